//! Deletes objects without an event, and counts the objects of a place by the log that put them.
//!
//! The collector deletes an object only if this log has a note of it, no event of the log refers to it,
//! **and** only this log can have put it. The note of a publish that did not finish must be a day old as well:
//! the event may be about to be appended. An object of this log with neither a reference nor a note proves
//! that the log is an older copy of itself, for example copied back by hand. Then the log gets a new id, and
//! deletes only objects that it puts from then on.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use everbus_core::{
    Clock as _, Engine, Event, EventId, Orphan, Orphans, Result, SystemClock, Timestamp,
};
use futures_util::TryStreamExt as _;
use serde::Serialize;

use super::owner::Owners;
use super::{Objects, foreign, key};

/// What to delete.
#[derive(Clone, Debug)]
#[non_exhaustive]
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

impl Collect {
    /// Only report what would be deleted.
    pub fn dry_run() -> Self {
        Self {
            dry_run: true,
            ..Self::default()
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
    /// Objects of this log without a reference or a note: the file is an older copy. Nothing was deleted.
    pub unknown: u64,
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
    /// The log that owns the place.
    pub owner: Option<String>,
    /// Objects that events of this log refer to, whichever log put them.
    pub in_use: Tally,
    /// Objects that this log has a note of: deleted later, unless another log put them.
    pub noted: Tally,
    /// The rest, by the log that put them: another log, or this log before it was replaced by an older
    /// copy. The empty name stands for an unknown log.
    pub others: BTreeMap<String, Tally>,
}

/// One object of a place.
struct Found {
    id: EventId,
    key: String,
    bytes: u64,
    age: Duration,
}

/// Notes examined before objects are deleted.
const AT_A_TIME: usize = 256;

/// What is to be done about the object of a note.
enum Fate {
    /// An event may refer to it soon.
    Keep,
    /// The object is gone or in use: only the note goes.
    Forget,
    /// No event refers to it.
    Delete { bytes: u64, age: Duration },
}

/// What is different when a note was made again.
fn identity(note: &Orphan) -> (String, Timestamp, bool) {
    (note.key.clone(), note.since, note.unborn)
}

/// What an object is to this log.
enum Kind {
    Used,
    Noted,
    /// Another log put it, or this one before it was replaced by an older copy. Empty: not known.
    Of(String),
}

impl Objects {
    /// Deletes the objects of this log that no event refers to. Safe at any time, also during publishes.
    pub async fn collect(&self, engine: &Engine, options: &Collect) -> Result<Collected> {
        let mut done = Collected::default();
        let (Some(orphans), Some(owners)) = (&self.orphans, self.owners().await?) else {
            return Ok(done);
        };
        done.unknown = self.unknown(engine, &**orphans, owners).await?;
        if done.unknown > 0 {
            if !options.dry_run {
                orphans.renew().await?;
                tracing::warn!(
                    target: "everbus::overflow",
                    objects = done.unknown,
                    "the log is an older copy of itself: objects that were put after the copy was made are left alone"
                );
            }
            return Ok(done);
        }
        let mut gone = Vec::new();
        for notes in orphans.list().await?.chunks(AT_A_TIME) {
            let mut unused = Vec::new();
            for note in notes {
                let fate = match owners.is_ours(&note.key) {
                    true => self.examine(engine, note, options).await?,
                    false => Fate::Keep,
                };
                match fate {
                    Fate::Keep => done.kept += 1,
                    Fate::Forget => gone.push(note.clone()),
                    Fate::Delete { bytes, age } => unused.push((note, bytes, age)),
                }
            }
            if unused.is_empty() {
                continue;
            }
            // A publish makes a note before it puts an object. So a note that is still the same belongs to the
            // object that was examined, and not to one that was put under the same key since.
            let current = orphans.list().await?;
            let current: HashSet<_> = current.iter().map(identity).collect();
            for (note, bytes, age) in unused {
                let unchanged = current.contains(&identity(note));
                let now = self.place.look(&note.key).await?;
                if !unchanged || now.is_none_or(|(_, now)| now < age) {
                    done.kept += 1;
                    continue;
                }
                if !options.dry_run {
                    self.place.delete(&note.key).await?;
                }
                match note.unborn {
                    true => done.strays += 1,
                    false => done.orphans += 1,
                }
                done.bytes += bytes;
                gone.push(note.clone());
            }
        }
        if !options.dry_run {
            orphans.forget(gone).await?;
            self.place.sweep(options.strays_after).await?;
        }
        Ok(done)
    }

    /// What is to be done about the object of a note.
    async fn examine(&self, engine: &Engine, note: &Orphan, options: &Collect) -> Result<Fate> {
        // In a store beside a broker the event may be still to come, however late: the archive copies it.
        let archived = engine.background.is_some();
        let waits = |age| note.unborn && (archived || age < options.strays_after);
        if waits(SystemClock.now().since(note.since)) {
            return Ok(Fate::Keep);
        }
        let Some((bytes, age)) = self.place.look(&note.key).await? else {
            // Never put or already deleted, unless it is in another place.
            return Ok(match note.bucket == self.place.name() {
                true => Fate::Forget,
                false => Fate::Keep,
            });
        };
        if is_in_use(engine, note.id, &note.key).await? {
            return Ok(Fate::Forget);
        }
        Ok(match waits(age) {
            true => Fate::Keep,
            false => Fate::Delete { bytes, age },
        })
    }

    /// Deletes the object that an append did not need: it stored nothing, or had stored the event before. The
    /// collector strikes off the note. Two objects stay: one whose key another publish may use again, since a
    /// late deletion would hit the object of that publish, and one in a store beside a broker, which sees events
    /// late.
    pub(crate) async fn discard(&self, engine: &Engine, event: &Event) -> Result<()> {
        let seen = self.orphans.is_some() && engine.background.is_none();
        let unneeded = event.overflow().filter(|o| seen && key::is_unique(&o.key));
        match unneeded {
            Some(reference) if !is_in_use(engine, event.id(), &reference.key).await? => {
                self.place.delete(&reference.key).await
            }
            _ => Ok(()),
        }
    }

    /// How many objects of this log have neither a reference nor a note.
    async fn unknown(&self, engine: &Engine, orphans: &dyn Orphans, owners: Owners) -> Result<u64> {
        let mut found = self.walk(engine, Some(owners), true).await?;
        found.retain(|(_, used)| matches!(used, Kind::Of(_)));
        if found.is_empty() {
            return Ok(0);
        }
        // An event may have been removed meanwhile, which made a note, and the object after it.
        let noted = keys(orphans).await?;
        let mut count = 0;
        for (object, _) in found.iter().filter(|(o, _)| !noted.contains(&o.key)) {
            count += u64::from(self.place.look(&object.key).await?.is_some());
        }
        Ok(count)
    }

    /// Lists the configured place. Every object is checked.
    pub async fn survey(&self, engine: &Engine) -> Result<Survey> {
        let owners = self.owners().await?;
        let mut survey = Survey {
            place: self.place.name().to_owned(),
            log: owners.map(|owners| owners.log.short()),
            owner: owners.and_then(|owners| Some(owners.place?.short())),
            ..Survey::default()
        };
        for (object, used) in self.walk(engine, owners, false).await? {
            let tally = match used {
                Kind::Used => &mut survey.in_use,
                Kind::Noted => &mut survey.noted,
                Kind::Of(log) => survey.others.entry(log).or_default(),
            };
            tally.add(object.bytes);
        }
        Ok(survey)
    }

    /// Deletes the objects of a log, as named by [`survey`](Self::survey), unless an event of this log
    /// refers to them or they are younger than `older`. The caller must know that no other file needs them.
    /// With `dry_run` nothing is deleted, only counted.
    pub async fn remove_others(
        &self,
        engine: &Engine,
        owner: &str,
        older: Duration,
        dry_run: bool,
    ) -> Result<Tally> {
        let owners = self.owners().await?;
        let mut removed = Tally::default();
        for (object, used) in self.walk(engine, owners, false).await? {
            if matches!(used, Kind::Of(log) if log == owner) && object.age >= older {
                if !dry_run {
                    self.place.delete(&object.key).await?;
                }
                removed.add(object.bytes);
            }
        }
        Ok(removed)
    }

    /// The objects of events in the configured place, with what they are to this log; `only_ours`: those that
    /// only this log can have put.
    async fn walk(
        &self,
        engine: &Engine,
        owners: Option<Owners>,
        only_ours: bool,
    ) -> Result<Vec<(Found, Kind)>> {
        let mut listed = Vec::new();
        let mut list = self.place.list().await?;
        while let Some((key, bytes, age)) = list.try_next().await? {
            let ours = owners.is_some_and(|owners| owners.is_ours(&key));
            let id = key::event_of(&key).filter(|_| ours || !only_ours);
            listed.extend(id.map(|id| {
                (
                    ours,
                    Found {
                        id,
                        key,
                        bytes,
                        age,
                    },
                )
            }));
        }
        // After the listing: an object is noted before it is put.
        let noted = match &self.orphans {
            Some(orphans) => keys(&**orphans).await?,
            None => HashSet::new(),
        };
        let mut objects = Vec::with_capacity(listed.len());
        for (ours, object) in listed {
            let key = &object.key;
            let used = if ours && noted.contains(key) {
                Kind::Noted
            } else if is_in_use(engine, object.id, key).await? {
                Kind::Used
            } else {
                Kind::Of(owners.and_then(|owners| owners.of(key)).unwrap_or_default())
            };
            objects.push((object, used));
        }
        Ok(objects)
    }

    /// This log and the owner of the place. `None` if the engine keeps no notes of objects.
    async fn owners(&self) -> Result<Option<Owners>> {
        let Some(orphans) = &self.orphans else {
            return Ok(None);
        };
        let (log, place) = (orphans.log_id().await?, self.place.owner().await?);
        Ok(Some(Owners { log, place }))
    }
}

impl Survey {
    /// All objects of other logs together.
    pub fn of_others(&self) -> Tally {
        Tally {
            objects: self.others.values().map(|tally| tally.objects).sum(),
            bytes: self.others.values().map(|tally| tally.bytes).sum(),
        }
    }
}

/// The keys of all notes.
async fn keys(orphans: &dyn Orphans) -> Result<HashSet<String>> {
    let notes = orphans.list().await?;
    Ok(notes.into_iter().map(|note| note.key).collect())
}

/// Whether an event of the log with this id refers to the object, whatever its tenant.
pub async fn is_in_use(engine: &Engine, id: EventId, key: &str) -> Result<bool> {
    let events = engine.lookup()?.find(id).await?;
    Ok(events.iter().any(|record| match record.event.overflow() {
        Some(reference) => reference.key == key,
        None => foreign::refers_to(&record.event, key),
    }))
}
