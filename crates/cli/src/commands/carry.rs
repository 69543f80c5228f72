//! Copies objects with a file: into a backup and back.

use std::collections::HashSet;
use std::path::Path;

use everbus::overflow::{Place, Transferred};
use everbus_core::Overflow;
use indicatif::ProgressBar;
use serde_json::{Value, json};

use crate::open::blocking;
use crate::output::{Output, counted, escaped, grouped};
use crate::progress;
use crate::stop::Outcome;

/// At most this many missing objects are named.
const NAMED: usize = 5;

/// Copies the objects that a file refers to from one place to another.
pub(super) struct Carrier<'a> {
    /// Sources; each is tried in turn.
    from: Vec<&'a Place>,
    to: &'a Place,
    bar: ProgressBar,
    /// Objects that are at the destination.
    seen: HashSet<String>,
    copied: u64,
    present: u64,
    bytes: u64,
    /// Objects that could not be copied in the last round, with the reasons.
    pub(super) lost: Vec<(Overflow, String)>,
}

impl<'a> Carrier<'a> {
    pub(super) fn new(from: Vec<&'a Place>, to: &'a Place) -> Self {
        Self {
            from,
            to,
            bar: progress::bar("copying objects", None),
            seen: HashSet::new(),
            copied: 0,
            present: 0,
            bytes: 0,
            lost: Vec::new(),
        }
    }

    /// Copies all objects that a file refers to and that are not copied yet.
    pub(super) async fn round(&mut self, file: &Path) -> Outcome {
        self.lost.clear();
        let mut after = 0;
        loop {
            let (path, from) = (file.to_path_buf(), after);
            let (page, next) = blocking(move || everbus_sqlite::references(&path, from)).await?;
            for (_, reference) in page {
                if !self.seen.contains(&reference.key) {
                    self.bring(reference).await?;
                }
            }
            match next {
                Some(next) => after = next,
                None => return Ok(()),
            }
        }
    }

    async fn bring(&mut self, reference: Overflow) -> Outcome {
        let mut why = "it is missing".to_owned();
        let named = |from: &&&Place| from.name() == reference.bucket;
        let (first, then) = (self.from.iter().filter(named), self.from.iter());
        for from in first.chain(then.filter(|from| !named(from))) {
            match self.to.bring(from, &reference).await? {
                Transferred::Copied => {
                    self.copied += 1;
                    self.bytes += reference.size;
                }
                Transferred::Present => self.present += 1,
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
        self.lost.push((reference, why));
        Ok(())
    }

    /// Makes everything durable, and returns the result.
    pub(super) async fn finish(self) -> Outcome<Carried> {
        self.to.finish().await?;
        self.bar.finish_and_clear();
        Ok(Carried {
            place: self.to.name().to_owned(),
            copied: self.copied,
            present: self.present,
            bytes: self.bytes,
            lost: self.lost,
        })
    }
}

/// The result of copying the objects.
pub(super) struct Carried {
    pub(super) place: String,
    copied: u64,
    present: u64,
    bytes: u64,
    pub(super) lost: Vec<(Overflow, String)>,
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

    /// Prints how many objects were copied, and which could not be.
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
        for (reference, why) in self.lost.iter().take(NAMED) {
            tracing::warn!("the object {}: {}", escaped(&reference.key), escaped(why));
        }
        if self.lost.len() > NAMED {
            tracing::warn!("and {} more", self.lost.len() - NAMED);
        }
    }
}
