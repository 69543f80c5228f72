//! Copies objects with a file: into a backup and back.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use everbus::overflow::{Place, Transferred};
use everbus_core::{EventId, Overflow, Result};
use indicatif::ProgressBar;
use serde_json::{Value, json};

use crate::open::blocking;
use crate::output::{Output, counted, escaped, grouped};
use crate::progress;
use crate::stop::Outcome;

/// At most this many missing objects are listed.
const NAMED: usize = 5;

/// The references to objects in a file, page by page.
pub(super) struct References {
    file: PathBuf,
    after: Option<u64>,
}

impl References {
    pub(super) fn of(file: &Path) -> Self {
        let (file, after) = (file.to_path_buf(), Some(0));
        Self { file, after }
    }

    pub(super) async fn page(&mut self) -> Result<Option<Vec<(EventId, Overflow)>>> {
        let Some(after) = self.after else {
            return Ok(None);
        };
        let file = self.file.clone();
        let (page, next) = blocking(move || everbus_sqlite::references(&file, after)).await?;
        self.after = next;
        Ok(Some(page))
    }
}

/// Copies the objects that a file refers to from one place to another.
pub(super) struct Carrier<'a> {
    /// Sources; each is tried in turn.
    from: Vec<&'a Place>,
    to: &'a Place,
    bar: ProgressBar,
    /// Objects that are at the destination.
    seen: HashSet<String>,
    carried: Carried,
}

impl<'a> Carrier<'a> {
    pub(super) fn new(from: Vec<&'a Place>, to: &'a Place) -> Self {
        Self {
            from,
            to,
            bar: progress::bar("copying objects", None),
            seen: HashSet::new(),
            carried: Carried {
                place: to.name().to_owned(),
                ..Carried::default()
            },
        }
    }

    /// Copies all objects that a file refers to and that are not copied yet.
    pub(super) async fn round(&mut self, file: &Path) -> Outcome {
        self.carried.lost.clear();
        let mut references = References::of(file);
        while let Some(page) = references.page().await? {
            for (id, reference) in page {
                if !self.seen.contains(&reference.key) {
                    self.bring(id, reference).await?;
                }
            }
        }
        Ok(())
    }

    async fn bring(&mut self, id: EventId, reference: Overflow) -> Outcome {
        let mut why = "it is missing".to_owned();
        let mut from = self.from.clone();
        from.sort_by_key(|from| from.name() != reference.bucket);
        for from in from {
            match self.to.bring(from, &reference).await? {
                Transferred::Copied => {
                    self.carried.copied += 1;
                    self.carried.bytes += reference.size;
                }
                Transferred::Present => self.carried.present += 1,
                Transferred::Damaged(what) => {
                    why = what;
                    continue;
                }
                _ => continue,
            }
            self.bar.inc(1);
            self.seen.insert(reference.key);
            return Ok(());
        }
        self.carried.lost.push((id, reference.key, why));
        Ok(())
    }

    pub(super) fn finish(self) -> Carried {
        self.bar.finish_and_clear();
        self.carried
    }
}

/// The result of copying the objects.
#[derive(Default)]
pub(super) struct Carried {
    pub(super) place: String,
    copied: u64,
    present: u64,
    bytes: u64,
    /// Objects that could not be copied in the last round: their events, keys and the reasons.
    pub(super) lost: Vec<(EventId, String, String)>,
}

impl Carried {
    pub(super) fn json(&self) -> Value {
        json!({
            "place": self.place,
            "copied": self.copied,
            "present": self.present,
            "bytes": self.bytes,
            "missing": self.lost.len(),
        })
    }

    /// Prints how many objects were copied, and how many were there already.
    pub(super) fn print(&self, output: &mut Output) -> Outcome {
        if self.copied + self.present > 0 {
            let mut line = format!(
                "{} copied to {} ({} bytes)",
                counted(self.copied, "object"),
                escaped(&self.place),
                grouped(self.bytes)
            );
            if self.present > 0 {
                line.push_str(&format!(", {} there already", grouped(self.present)));
            }
            output.line(line)?;
        }
        Ok(())
    }

    /// Warns on standard error about missing objects.
    pub(super) fn warn(&self) {
        for (_, key, why) in self.lost.iter().take(NAMED) {
            tracing::warn!("the object {}: {}", escaped(key), escaped(why));
        }
        if self.lost.len() > NAMED {
            tracing::warn!("and {} more", self.lost.len() - NAMED);
        }
    }
}
