//! The objects of large events in `everbus check`: whether each exists and is intact.

use std::fmt::Display;

use everbus::overflow::{Objects, is_in_use};
use everbus_core::{CheckReport, Cursor, Engine, EventId, Log, Overflow, Pattern, Result};
use indicatif::ProgressBar;
use serde::Serialize;

use super::carry::References;
use crate::open::Target;
use crate::output::{Output, counted, escaped, grouped};
use crate::progress;
use crate::stop::Outcome;

/// How many problems are listed; the others are counted.
const LISTED: usize = 1000;
/// Objects checked at a time. The check stops if all of them failed: the place cannot be reached.
const CHUNK: usize = 64;
/// Events read at once where there is no file to query. They come with their payloads.
const EVENTS: usize = 64;

#[derive(Debug, Default, Serialize)]
pub(super) struct Checked {
    /// Whether every object was read, not only looked for.
    deep: bool,
    /// Objects that events refer to, as far as they were checked.
    checked: u64,
    /// The bytes that they should have.
    bytes: u64,
    /// How many are missing, damaged, or could not be checked.
    bad: u64,
    /// The first of those.
    pub(super) problems: Vec<Problem>,
    /// Why not all were checked.
    #[serde(skip_serializing_if = "Option::is_none")]
    gave_up: Option<String>,
}

/// One object that is not as it should be.
#[derive(Debug, Serialize)]
pub(super) struct Problem {
    event: EventId,
    bucket: String,
    key: String,
    problem: String,
}

impl Checked {
    /// Checks the object of every event that has one.
    pub(super) async fn run(target: &Target, engine: &Engine, deep: bool) -> Outcome<Self> {
        let objects = target.objects(engine)?;
        let mut checked = Self {
            deep,
            ..Self::default()
        };
        let bar = progress::bar("checking objects", None);
        let walked = checked.walk(target, engine, objects.as_deref(), &bar).await;
        bar.finish_and_clear();
        // An object that cannot be checked is a finding too.
        if let Err(error) = walked {
            checked.gave_up = Some(error.message().to_owned());
        }
        Ok(checked)
    }

    async fn walk(
        &mut self,
        target: &Target,
        engine: &Engine,
        objects: Option<&Objects>,
        bar: &ProgressBar,
    ) -> Result<()> {
        let mut pages = match target.path() {
            Ok(file) => Pages::File(References::of(file)),
            Err(_) => Pages::Log(engine.log()?, Some(Cursor::START)),
        };
        while let Some(page) = pages.next().await? {
            for part in page.chunks(CHUNK) {
                self.look(engine, objects, part).await?;
                bar.inc(part.len() as u64);
            }
        }
        Ok(())
    }

    async fn look(
        &mut self,
        engine: &Engine,
        objects: Option<&Objects>,
        part: &[(EventId, Overflow)],
    ) -> Result<()> {
        let references: Vec<Overflow> = part.iter().map(|(_, r)| r.clone()).collect();
        let answers = match objects {
            Some(objects) => objects.inspect(&references, self.deep).await,
            None => {
                let none = "there is no place for objects; set EVERBUS_CONFIG to the configuration";
                part.iter().map(|_| Ok(Some(none.to_owned()))).collect()
            }
        };
        let (mut failed, mut failures) = (None, 0);
        for ((id, reference), answer) in part.iter().zip(answers) {
            self.checked += 1;
            self.bytes += reference.size;
            let problem = match answer {
                Ok(None) => continue,
                Ok(Some(problem)) => problem,
                Err(error) => {
                    failures += 1;
                    let what = format!("it cannot be read: {}", error.message());
                    failed = Some(error);
                    what
                }
            };
            // If the event was removed meanwhile, its object may be gone too.
            if is_in_use(engine, *id, &reference.key).await? {
                self.add(*id, reference, problem);
            }
        }
        match failed {
            // The place cannot be reached: stop instead of waiting for every object.
            Some(error) if failures == part.len() => Err(error),
            _ => Ok(()),
        }
    }

    fn add(&mut self, event: EventId, reference: &Overflow, problem: String) {
        self.bad += 1;
        if self.problems.len() < LISTED {
            self.problems.push(Problem {
                event,
                bucket: reference.bucket.clone(),
                key: reference.key.clone(),
                problem,
            });
        }
    }

    /// Whether every object is as it should be.
    pub(super) fn is_ok(&self) -> bool {
        self.bad == 0 && self.gave_up.is_none()
    }

    /// Adds the result to the report.
    pub(super) fn report(&self, report: &mut CheckReport) {
        let objects = counted(self.checked, "object");
        let how = match self.deep {
            true => "by length and SHA-256",
            false => "by length",
        };
        let mut detail = format!("{objects} ({} bytes) checked {how}", grouped(self.bytes));
        let mut more = |what: &dyn Display| detail.push_str(&format!(", {what}"));
        if self.bad > 0 {
            more(&format!("{} missing or damaged", grouped(self.bad)));
        }
        if let Some(why) = &self.gave_up {
            more(&format!("then given up: {why}"));
        }
        report.add("objects", self.is_ok(), detail);
    }

    /// Lists the problems.
    pub(super) fn print(&self, output: &mut Output) -> Outcome {
        for problem in &self.problems {
            output.line(format!(
                "    event {}, object {}: {}",
                problem.event,
                escaped(&problem.key),
                escaped(&problem.problem)
            ))?;
        }
        match self.bad - self.problems.len() as u64 {
            0 => Ok(()),
            more => output.line(format!("    and {} more", grouped(more))),
        }
    }
}

/// Where the references come from: a file, or the log of an engine that has none.
enum Pages<'a> {
    File(References),
    Log(&'a dyn Log, Option<Cursor>),
}

impl Pages<'_> {
    async fn next(&mut self) -> Result<Option<Vec<(EventId, Overflow)>>> {
        let (log, after) = match self {
            Self::File(references) => return references.page().await,
            Self::Log(log, after) => (log, after),
        };
        let Some(from) = after.take() else {
            return Ok(None);
        };
        let head = log.head().await?;
        let all = vec![Pattern::new("*")?, Pattern::new("system.>")?];
        let (events, reached) = log.read(from, all, EVENTS).await?;
        *after = (!reached.reaches(&head)).then_some(reached);
        let references = events.iter().filter_map(|record| {
            let reference = record.event.overflow()?;
            Some((record.event.id(), reference.clone()))
        });
        Ok(Some(references.collect()))
    }
}
