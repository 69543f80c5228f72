//! Walks over the objects of a place: deletes those without an event, and counts them by the log that put
//! them.
//!
//! The collector deletes an object only if this log has a note of it, no event of the log refers to it,
//! **and** only this log can have put it. The note of a publish that did not finish must be a day old as well:
//! the event may be about to be appended. An object of this log with neither a reference nor a note proves
//! that the log is an older copy of itself, for example copied back by hand. Then the log gets a new id, and
//! deletes only objects that it puts from then on.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use everbus_core::{Clock as _, Engine, EventId, Orphan, Result, SystemClock};
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
    /// Objects whose publish did not finish, and files that interrupted puts left.
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
    key: String,
    bytes: u64,
    age: Duration,
    state: State,
}

#[derive(PartialEq)]
enum State {
    InUse,
    /// This log has a note of it.
    Noted,
    /// This log should know it, and does not.
    Unknown,
    /// Another log put it.
    Other,
}

impl Objects {
    /// Every object of the configured place, and the notes of this log.
    async fn walk(
        &self,
        engine: &Engine,
        owners: Option<Owners>,
    ) -> Result<(Vec<Found>, Vec<Orphan>)> {
        let mut listed = self.place.list().await?;
        let mut found = Vec::new();
        while let Some((key, bytes, age)) = listed.try_next().await? {
            found.extend(key::event_of(&key).map(|id| (id, key, bytes, age)));
        }
        let notes = match &self.orphans {
            Some(orphans) => orphans.list().await?,
            None => Vec::new(),
        };
        let noted: HashMap<&str, &Orphan> = notes.iter().map(|n| (&*n.key, n)).collect();
        let mut objects = Vec::with_capacity(found.len());
        for (id, key, bytes, age) in found {
            let ours = owners.is_some_and(|owners| owners.is_ours(&key));
            let state = match is_in_use(engine, id, &key).await? {
                true => State::InUse,
                false if ours && noted.contains_key(&*key) => State::Noted,
                false if ours => State::Unknown,
                false => State::Other,
            };
            objects.push(Found {
                key,
                bytes,
                age,
                state,
            });
        }
        Ok((objects, notes))
    }

    /// This log and the owner of the place. `None` if the engine keeps no notes of objects.
    async fn owners(&self) -> Result<Option<Owners>> {
        let Some(orphans) = &self.orphans else {
            return Ok(None);
        };
        let (log, place) = (orphans.log_id().await?, self.place.owner().await?);
        Ok(Some(Owners { log, place }))
    }

    /// Deletes the objects of this log that no event refers to. Safe at any time, also during publishes.
    pub async fn collect(&self, engine: &Engine, options: &Collect) -> Result<Collected> {
        let mut done = Collected::default();
        let (Some(orphans), Some(owners)) = (&self.orphans, self.owners().await?) else {
            return Ok(done);
        };
        let (mut found, notes) = self.walk(engine, Some(owners)).await?;
        if found.iter().any(|object| object.state == State::Unknown) {
            // An event may have been removed during the walk, which makes a note: look again.
            let (again, _) = self.walk(engine, Some(owners)).await?;
            let is_unknown = |object: &&Found| object.state == State::Unknown;
            let before: Vec<&str> = found.iter().filter(is_unknown).map(|o| &*o.key).collect();
            let both = again.iter().filter(is_unknown);
            done.unknown = both.filter(|o| before.contains(&&*o.key)).count() as u64;
        }
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
        let found: HashMap<String, Found> = found.drain(..).map(|o| (o.key.clone(), o)).collect();
        let mut gone = Vec::new();
        for note in notes {
            let since = SystemClock.now().since(note.since);
            let object = found.get(&note.key);
            let waiting = |age| note.unborn && age < options.strays_after;
            let forget = match object.map(|object| (&object.state, object)) {
                Some((State::InUse, _)) => true,
                _ if waiting(since) || !owners.is_ours(&note.key) => false,
                Some((_, object)) if waiting(object.age) => false,
                Some((_, object)) => {
                    // Since the walk the event may have been appended, or another collector may have
                    // deleted the object and a publish put it again.
                    let used = is_in_use(engine, note.id, &note.key).await?;
                    let now = self.place.look(&note.key).await?;
                    if used || now.is_none_or(|(_, age)| age < object.age) {
                        continue;
                    }
                    if !options.dry_run {
                        self.place.delete(&note.key).await?;
                    }
                    match note.unborn {
                        true => done.strays += 1,
                        false => done.orphans += 1,
                    }
                    done.bytes += object.bytes;
                    true
                }
                // Never put or already deleted, unless it is in another place.
                None => {
                    note.bucket == self.place.name() && self.place.look(&note.key).await?.is_none()
                }
            };
            match forget {
                true => gone.push(note),
                false => done.kept += 1,
            }
        }
        if !gone.is_empty() && !options.dry_run {
            orphans.forget(gone).await?;
        }
        let swept = self.place.sweep(options.strays_after, options.dry_run);
        let (files, bytes) = swept.await?;
        done.strays += files;
        done.bytes += bytes;
        Ok(done)
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
        for object in self.walk(engine, owners).await?.0 {
            let tally = match object.state {
                State::InUse => &mut survey.in_use,
                State::Noted => &mut survey.noted,
                _ => survey.others.entry(owner_of(owners, &object)).or_default(),
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
        for object in self.walk(engine, owners).await?.0 {
            let stays = matches!(object.state, State::InUse | State::Noted);
            if stays || object.age < older || owner_of(owners, &object) != owner {
                continue;
            }
            if !dry_run {
                self.place.delete(&object.key).await?;
            }
            removed.add(object.bytes);
        }
        Ok(removed)
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

/// The log that put an object; empty if that is not known.
fn owner_of(owners: Option<Owners>, object: &Found) -> String {
    let owner = owners.and_then(|owners| owners.of(&object.key));
    owner.unwrap_or_default()
}

/// Whether an event of the log with this id refers to the object, whatever its tenant.
pub async fn is_in_use(engine: &Engine, id: EventId, key: &str) -> Result<bool> {
    let events = engine.lookup()?.find(id).await?;
    Ok(events.iter().any(|record| match record.event.overflow() {
        Some(reference) => reference.key == key,
        None => foreign::refers_to(&record.event, key),
    }))
}
