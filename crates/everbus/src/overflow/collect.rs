//! Deletes objects without an event, and counts the objects of a place by the log that put them.
//!
//! The collector deletes an object only if this log has a note of it, no event of the log refers to it, **and** the
//! object belongs to this log: it is beside the file, or its key names the log. The note of a publish that did not
//! finish must be a day old as well: the event may be about to be appended. No key is used twice, so collectors may run
//! at the same time, and a late deletion cannot delete a newer object.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use everbus_core::{Clock as _, Engine, Event, EventId, LogId, Orphan, Result, SystemClock};
use serde::Serialize;

use super::{Objects, foreign, key};

/// What to delete.
#[derive(Clone, Debug)]
pub struct Collect {
    /// Only report what would be deleted.
    pub dry_run: bool,
    /// Objects whose publish was never finished are deleted when they are at least this old (24 h).
    pub strays_after: Duration,
}

impl Default for Collect {
    fn default() -> Self {
        Self {
            dry_run: false,
            strays_after: super::DAY,
        }
    }
}

/// What was deleted, or would be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Collected {
    /// Objects whose events were removed.
    pub orphans: u64,
    /// Objects whose publish did not finish.
    pub strays: u64,
    /// The bytes of both together.
    pub bytes: u64,
    /// Objects without an event that are kept for now: they are too young, another log put them, or they
    /// are in another place than the configured one.
    pub kept: u64,
}

/// A number of objects and their total size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tally {
    /// How many.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Tally {
    fn add(&mut self, bytes: u64) {
        self.objects += 1;
        self.bytes += bytes;
    }
}

/// The content of a place.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Survey {
    /// The place, as references name it.
    pub place: String,
    /// This log, by the first digits of its id.
    pub log: Option<String>,
    /// Objects that events of this log refer to, whichever log put them.
    pub in_use: Tally,
    /// Objects of this log without an event: deleted later.
    pub noted: Tally,
    /// The rest, by the log that put them: another log, or a newer state of this log that an older copy has
    /// replaced. The empty name stands for an unknown log.
    pub others: BTreeMap<String, Tally>,
    /// The objects of the others: log, key, size and age.
    #[serde(skip)]
    objects: Vec<(String, String, u64, Duration)>,
}

impl Objects {
    /// Deletes the objects of this log that no event refers to. Safe at any time, also during publishes.
    pub async fn collect(&self, engine: &Engine, options: &Collect) -> Result<Collected> {
        let mut done = Collected::default();
        let Some(orphans) = &self.orphans else {
            return Ok(done);
        };
        let log = orphans.log_id().await?;
        let mut gone = Vec::new();
        for note in orphans.list().await? {
            let mut stays = !self.is_ours(&note.key, log) || is_expected(engine, &note, options);
            let mut found = None;
            if !stays {
                found = self.place.get(&note.key, true).await?;
                // A missing object was never put or is deleted already, unless it is in another place.
                stays = found.is_none() && note.bucket != self.place.name();
            }
            if stays {
                done.kept += 1;
                continue;
            }
            if !is_in_use(engine, note.id, &note.key).await? {
                if !options.dry_run {
                    self.place.delete(&note.key).await?;
                }
                if let Some(found) = found {
                    done.bytes += found.meta.size;
                    match note.unborn {
                        true => done.strays += 1,
                        false => done.orphans += 1,
                    }
                }
            }
            gone.push(note);
        }
        if !options.dry_run {
            orphans.forget(gone).await?;
        }
        Ok(done)
    }

    /// Whether the object belongs to this log. The directory beside a file has the objects of that file, also
    /// those that a restore copied there; any other place may be shared.
    fn is_ours(&self, key: &str, log: LogId) -> bool {
        let named = key::made_by(key).is_some_and(|(_, by)| by == log.short());
        named || self.options.url.is_none()
    }

    /// Deletes the object that an append did not need: it stored nothing, or had stored the event before. The collector
    /// removes the note. A store beside a broker gets events late, so there the object stays.
    pub(crate) async fn discard(&self, engine: &Engine, event: &Event) -> Result<()> {
        let seen = self.orphans.is_some() && engine.background.is_none();
        if let Some(reference) = event.overflow().filter(|_| seen)
            && !is_in_use(engine, event.id(), &reference.key).await?
        {
            self.place.delete(&reference.key).await?;
        }
        Ok(())
    }

    /// Lists the configured place. Every object is checked.
    pub async fn survey(&self, engine: &Engine) -> Result<Survey> {
        let mut survey = Survey {
            place: self.place.name().to_owned(),
            ..Survey::default()
        };
        let listed = self.place.list().await?;
        // After the listing: an object is noted before it is put.
        let mut noted = HashSet::new();
        if let Some(orphans) = &self.orphans {
            let log = orphans.log_id().await?;
            survey.log = Some(log.short());
            let notes = orphans.list().await?.into_iter().map(|note| note.key);
            noted.extend(notes.filter(|key| self.is_ours(key, log)));
        }
        for (key, bytes, age) in listed {
            let Some((id, log)) = key::made_by(&key) else {
                continue;
            };
            if is_in_use(engine, id, &key).await? {
                survey.in_use.add(bytes);
            } else if noted.contains(&key) {
                survey.noted.add(bytes);
            } else {
                let log = log.to_owned();
                survey.others.entry(log.clone()).or_default().add(bytes);
                survey.objects.push((log, key, bytes, age));
            }
        }
        Ok(survey)
    }

    /// Deletes the objects of a log, as named by the survey, unless they are younger than `older` or an event of this
    /// log has begun to refer to them since. The caller must know that no other file needs them. With `dry_run` nothing
    /// is deleted, only counted.
    pub async fn remove_others(
        &self,
        engine: &Engine,
        survey: &Survey,
        owner: &str,
        older: Duration,
        dry_run: bool,
    ) -> Result<Tally> {
        let mut removed = Tally::default();
        for (log, key, bytes, age) in &survey.objects {
            let Some((id, _)) = key::made_by(key) else {
                continue;
            };
            if log == owner && *age >= older && !is_in_use(engine, id, key).await? {
                if !dry_run {
                    self.place.delete(key).await?;
                }
                removed.add(*bytes);
            }
        }
        Ok(removed)
    }
}

/// Whether the event of an unfinished publish may still arrive: within a day, or at any time in a store beside a
/// broker, because the archive copies events late.
fn is_expected(engine: &Engine, note: &Orphan, options: &Collect) -> bool {
    let young = SystemClock.now().since(note.since) < options.strays_after;
    note.unborn && (young || engine.background.is_some())
}

/// Whether an event of the log with this id refers to the object, whatever its tenant.
pub async fn is_in_use(engine: &Engine, id: EventId, key: &str) -> Result<bool> {
    let events = engine.lookup()?.find(id).await?;
    Ok(events.iter().any(|record| match record.event.overflow() {
        Some(reference) => reference.key == key,
        None => foreign::refers_to(&record.event, key),
    }))
}
