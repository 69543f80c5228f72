//! Deletes objects without an event: objects whose event retention removed, and objects whose publish did
//! not finish.
//!
//! An object is deleted only if this log has a note of it, no event of the log refers to it, only this log
//! can have put it, **and** it is old enough that no publish can be about to refer to it: a publish reuses
//! an object only in its first hour. An object of this log with neither a reference nor a note proves that
//! the log is an older copy of itself, for example restored from a backup. Then the log gets a new id, and
//! deletes only objects that it puts from then on.

use std::collections::HashSet;
use std::time::Duration;

use everbus_core::{Clock as _, Engine, EventId, Orphan, Orphans, Result, SystemClock};
use serde::Serialize;

use super::owner::Owners;
use super::{Objects, foreign, key};

/// How many notes are read at once.
const PAGE: usize = 500;

/// What to delete.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Collect {
    /// Only report what would be deleted.
    pub dry_run: bool,
    /// Objects whose events were removed are deleted when they are at least this old (2 h).
    pub orphans_after: Duration,
    /// Objects whose publish was never finished are deleted when they are at least this old (24 h).
    pub strays_after: Duration,
}

impl Default for Collect {
    fn default() -> Self {
        Self {
            dry_run: false,
            orphans_after: Duration::from_secs(2 * 3600),
            strays_after: Duration::from_secs(24 * 3600),
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

impl Objects {
    /// Deletes the objects of this log that no event refers to. Safe at any time, also during publishes.
    pub async fn collect(&self, engine: &Engine, options: &Collect) -> Result<Collected> {
        let mut run = Run {
            objects: self,
            engine,
            options,
            collected: Collected::default(),
        };
        let (Some(orphans), Some(owners)) = (&self.orphans, self.owners().await?) else {
            return Ok(run.collected);
        };
        run.collected.unknown = self.unknown(engine, &**orphans, owners).await?;
        if run.collected.unknown > 0 {
            if !options.dry_run {
                orphans.renew().await?;
                tracing::warn!(
                    target: "everbus::overflow",
                    objects = run.collected.unknown,
                    "the log is an older copy of itself: objects that were put after the copy was made are left alone"
                );
            }
            return Ok(run.collected);
        }
        run.collect_noted(&**orphans, owners).await?;
        let swept = self
            .store
            .sweep_unfinished(options.strays_after, options.dry_run);
        let (files, bytes) = swept.await?;
        run.collected.strays += files;
        run.collected.bytes += bytes;
        Ok(run.collected)
    }

    /// How many objects only this log can have put, but have neither a reference nor a note.
    async fn unknown(&self, engine: &Engine, orphans: &dyn Orphans, owners: Owners) -> Result<u64> {
        let mut ours = Vec::new();
        let listed = self.store.list(|name, _, _| {
            if let Some(id) = key::event_of(&name).filter(|_| owners.is_ours(&name)) {
                ours.push((id, name));
            }
        });
        listed.await?;
        if ours.is_empty() {
            return Ok(0);
        }
        let noted = noted(orphans).await?;
        let mut suspects = Vec::new();
        for (id, name) in ours {
            if !noted.contains(&name) && !is_referred_to(engine, id, &name).await? {
                suspects.push((id, name));
            }
        }
        if suspects.is_empty() {
            return Ok(0);
        }
        // Between the two listings an event may have been removed, or its object deleted: check again.
        let noted = self::noted(orphans).await?;
        let mut unknown = 0;
        for (id, name) in suspects {
            let known = noted.contains(&name)
                || is_referred_to(engine, id, &name).await?
                || self.store.look(&name).await?.is_none();
            unknown += u64::from(!known);
        }
        Ok(unknown)
    }
}

/// The keys of all notes.
pub(super) async fn noted(orphans: &dyn Orphans) -> Result<HashSet<String>> {
    let mut keys = HashSet::new();
    let mut after = None;
    loop {
        let page = orphans.list(after.take(), PAGE).await?;
        keys.extend(page.iter().map(|orphan| orphan.key.clone()));
        if page.len() < PAGE {
            return Ok(keys);
        }
        after = page.into_iter().next_back();
    }
}

/// One running collection.
struct Run<'a> {
    objects: &'a Objects,
    engine: &'a Engine,
    options: &'a Collect,
    collected: Collected,
}

impl Run<'_> {
    async fn collect_noted(&mut self, orphans: &dyn Orphans, owners: Owners) -> Result<()> {
        let mut after = None;
        loop {
            let page = orphans.list(after.take(), PAGE).await?;
            let mut gone = Vec::new();
            for orphan in &page {
                if self.collect_one(orphan, owners).await? {
                    gone.push(orphan.clone());
                }
            }
            if !gone.is_empty() && !self.options.dry_run {
                orphans.forget(gone).await?;
            }
            if page.len() < PAGE {
                return Ok(());
            }
            after = page.into_iter().next_back();
        }
    }

    /// Handles one note. Returns whether the note can be removed.
    async fn collect_one(&mut self, orphan: &Orphan, owners: Owners) -> Result<bool> {
        if is_referred_to(self.engine, orphan.id, &orphan.key).await? {
            return Ok(true);
        }
        let store = &self.objects.store;
        let old = match orphan.unborn {
            true => self.options.strays_after,
            false => self.options.orphans_after,
        };
        // The publish that made the note may be about to put the object.
        let waiting = orphan.unborn && SystemClock.now().since(orphan.since) < old;
        let found = match waiting || !owners.is_ours(&orphan.key) {
            true => None,
            false => store.look(&orphan.key).await?,
        };
        match found {
            Some((size, age)) if age >= old => {
                if !self.options.dry_run {
                    store.delete(&orphan.key).await?;
                }
                match orphan.unborn {
                    true => self.collected.strays += 1,
                    false => self.collected.orphans += 1,
                }
                self.collected.bytes += size;
                Ok(true)
            }
            // Never put or already deleted, unless it is in another place.
            None if !waiting && owners.is_ours(&orphan.key) && orphan.bucket == store.bucket() => {
                Ok(true)
            }
            _ => {
                self.collected.kept += 1;
                Ok(false)
            }
        }
    }
}

/// Whether an event of any tenant refers to the object.
pub(super) async fn is_referred_to(engine: &Engine, id: EventId, key: &str) -> Result<bool> {
    let events = engine.lookup()?.find(id).await?;
    Ok(events.iter().any(|record| match record.event.overflow() {
        Some(reference) => reference.key == key,
        None => foreign::refers_to(&record.event, key),
    }))
}

/// Whether an event of the log refers to an object.
pub async fn is_in_use(engine: &Engine, key: &str) -> Result<bool> {
    match key::event_of(key) {
        Some(id) => is_referred_to(engine, id, key).await,
        None => Ok(false),
    }
}
