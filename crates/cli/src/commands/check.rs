//! `everbus check`: checks what is stored, and prints how durable the engine is and why.

use std::path::Path;

use everbus_core::{Capabilities, CheckReport, Code, Engine, Error, OrderScope, Weakness};
use indicatif::ProgressBar;
use rusqlite::{Connection, OpenFlags};
use serde_json::json;

use super::check_objects::Checked;
use crate::open::{Target, blocking, close};
use crate::output::{Output, escaped};
use crate::progress;
use crate::stop::{Outcome, Stop};

#[derive(Debug, clap::Args)]
pub(crate) struct CheckArgs {
    /// Read every object of a large event and compare its SHA-256; without this, only its presence and length
    /// are checked
    #[arg(long)]
    pub(crate) deep: bool,
}

/// The result of a check.
struct Verdict {
    report: CheckReport,
    capabilities: Option<Capabilities>,
    weaknesses: Vec<Weakness>,
    /// Whether the file itself is sound.
    sound: bool,
    objects: Option<Checked>,
}

pub(crate) async fn run(args: &CheckArgs, target: &Target, output: &mut Output) -> Outcome {
    let bar = progress::spinner("checking");
    let checked = check(args, target, &bar).await;
    bar.finish_and_clear();
    let verdict = match checked {
        // A check looks for damage, so damage is a finding, not an error.
        Err(Stop::Failed(error)) if error.code() == Code::Corrupt => Verdict {
            report: damage(target.path()?, &error).await?,
            capabilities: None,
            weaknesses: Vec::new(),
            sound: false,
            objects: None,
        },
        other => other?,
    };
    print(&verdict, output)?;
    if verdict.report.is_ok() {
        Ok(())
    } else {
        Err(Stop::Unsatisfied)
    }
}

async fn check(args: &CheckArgs, target: &Target, bar: &ProgressBar) -> Outcome<Verdict> {
    let engine = target.open_existing().await?;
    let verdict = look(args, target, &engine, bar).await;
    close(&engine).await;
    verdict
}

async fn look(
    args: &CheckArgs,
    target: &Target,
    engine: &Engine,
    bar: &ProgressBar,
) -> Outcome<Verdict> {
    let mut report = match &engine.maintenance {
        Some(maintenance) => maintenance.check().await?,
        // A server that cannot be checked from outside; its durability is still printed.
        None => CheckReport::default(),
    };
    bar.finish_and_clear();
    let sound = report.is_ok();
    let objects = Checked::run(target, engine, args.deep).await?;
    objects.report(&mut report);
    Ok(Verdict {
        report,
        capabilities: Some(engine.broker.capabilities()),
        weaknesses: engine.weaknesses.clone(),
        sound,
        objects: Some(objects),
    })
}

/// The report about a file that is too damaged for the engine.
async fn damage(path: &Path, error: &Error) -> Outcome<CheckReport> {
    let mut report = CheckReport::default();
    report.add("readable", false, error.message());
    let path = path.to_path_buf();
    let problems = blocking(move || Ok(integrity(&path))).await?;
    let sound = matches!(&problems, Ok(problems) if problems == "ok");
    let detail = problems.unwrap_or_else(|e| e.to_string());
    report.add("integrity", sound, detail);
    Ok(report)
}

/// SQLite's own integrity check, without changing anything.
fn integrity(path: &Path) -> rusqlite::Result<String> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)?;
    let mut statement = connection.prepare("PRAGMA integrity_check(20)")?;
    let problems: Vec<String> = statement
        .query_map([], |row| row.get(0))?
        .collect::<Result<_, _>>()?;
    Ok(problems.join("; "))
}

/// What an engine does less well than the file, and what that means for handlers.
fn limits(offers: &Capabilities) -> Vec<&'static str> {
    let all = [
        (
            offers.order == OrderScope::Log,
            "order: events of one key come in order, others may not",
        ),
        (
            offers.atomic_follow_ups,
            "follow-up events are stored before the ack: after a crash a handler may publish them again, under the same ids",
        ),
        (
            offers.atomic_dead_letter,
            "a dead letter is stored before its event is acked: after a crash the event may be handled once more",
        ),
        (
            !offers.drops_by_age,
            "the server removes events by the age of their stream, also those that a group has not got: watch the lag",
        ),
    ];
    let missing = all.into_iter().filter(|(offered, _)| !offered);
    missing.map(|(_, text)| text).collect()
}

fn print(verdict: &Verdict, output: &mut Output) -> Outcome {
    let report = &verdict.report;
    let capabilities = verdict.capabilities.as_ref();
    if output.is_json() {
        return output.json(&json!({
            "ok": report.is_ok(),
            "findings": report.findings,
            "capabilities": capabilities,
            "weaknesses": verdict.weaknesses,
            "objects": verdict.objects,
        }));
    }
    if let Some(capabilities) = capabilities {
        output.line(format!(
            "engine {}, durability {}: an acknowledged event {}",
            capabilities.engine,
            capabilities.durability,
            capabilities.durability.meaning()
        ))?;
        for weakness in &verdict.weaknesses {
            output.line(format!("    {}", escaped(&weakness.to_string())))?;
        }
        for limit in limits(capabilities) {
            output.line(format!("    {limit}"))?;
        }
    }
    for finding in &report.findings {
        let mark = if finding.ok { "ok " } else { "BAD" };
        output.line(format!(
            "{mark} {}: {}",
            escaped(&finding.check),
            escaped(&finding.detail)
        ))?;
    }
    if let Some(objects) = &verdict.objects {
        objects.print(output)?;
    }
    output.line(match (report.is_ok(), verdict.sound) {
        (true, _) => "everything is as it should be",
        (false, true) => {
            "the file is sound, but not all objects of large events: bring them back from a backup"
        }
        (false, false) => {
            "something is wrong: keep a copy of the file and its -wal, then restore a backup"
        }
    })
}
