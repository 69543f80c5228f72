//! Deleting objects that no event refers to: those that retention left behind, and those whose publish
//! was never finished.
//!
//! An object is deleted only if no event of the log refers to it **and** it is old enough that no
//! publish can be about to refer to it: a publish takes up an object only in its first hour.

use std::collections::HashSet;
use std::time::Duration;

use everbus_core::{Clock as _, Code, Engine, EventId, Orphan, Pattern, Result, SystemClock};
use serde::Serialize;

use super::{Objects, key};

/// How many notes are read at once.
const PAGE: usize = 500;

/// What to delete.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Collect {
    /// Only say what would be deleted.
    pub dry_run: bool,
    /// Objects whose events were removed are deleted when they are at least this old (2 h).
    pub orphans_after: Duration,
    /// Objects that no event ever referred to are deleted when they are at least this old (24 h), where
    /// the place belongs to the bus alone.
    pub strays_after: Duration,
    /// Also those that are older than the oldest event of the log. They may be all that is left of the
    /// payloads of another log that was in this place before: one that was moved away, say.
    pub before_log: bool,
}

impl Default for Collect {
    fn default() -> Self {
        Self {
            dry_run: false,
            orphans_after: Duration::from_secs(2 * 3600),
            strays_after: Duration::from_secs(24 * 3600),
            before_log: false,
        }
    }
}

impl Collect {
    /// Only say what would be deleted.
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
    /// Objects that no event ever referred to, and what interrupted puts left.
    pub strays: u64,
    /// The bytes of both.
    pub bytes: u64,
    /// Objects whose events were removed that are kept for now: they are too young, or in another
    /// place than the one that is configured.
    pub kept: u64,
}

impl Objects {
    /// Deletes the objects that no event refers to any more. Safe at any time, also while others
    /// publish.
    pub async fn collect(&self, engine: &Engine, options: &Collect) -> Result<Collected> {
        let mut run = Run {
            objects: self,
            engine,
            options,
            collected: Collected::default(),
            noted: HashSet::new(),
        };
        run.collect_orphans().await?;
        if self.options.exclusive {
            run.collect_strays().await?;
        }
        Ok(run.collected)
    }
}

/// One collection under way.
struct Run<'a> {
    objects: &'a Objects,
    engine: &'a Engine,
    options: &'a Collect,
    collected: Collected,
    /// What was decided by a note.
    noted: HashSet<String>,
}

impl Run<'_> {
    async fn collect_orphans(&mut self) -> Result<()> {
        let orphans = match self.engine.orphans() {
            Err(error) if error.code() == Code::Unsupported => return Ok(()),
            orphans => orphans?,
        };
        let mut after = None;
        loop {
            let page = orphans.list(after.take(), PAGE).await?;
            let mut gone = Vec::new();
            for orphan in &page {
                if self.collect_orphan(orphan).await? {
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

    /// Whether the note of it has served.
    async fn collect_orphan(&mut self, orphan: &Orphan) -> Result<bool> {
        if is_referred_to(self.engine, orphan.id, &orphan.key).await? {
            return Ok(true);
        }
        self.noted.insert(orphan.key.clone());
        let store = &self.objects.store;
        if orphan.bucket != store.bucket() && !self.objects.options.exclusive {
            // An object of that name here would be somebody else's.
            self.collected.kept += 1;
            return Ok(false);
        }
        match store.look(&orphan.key).await? {
            // Gone already, unless it is somewhere else.
            None if orphan.bucket == store.bucket() => Ok(true),
            None => {
                self.collected.kept += 1;
                Ok(false)
            }
            Some((_, age)) if age < self.options.orphans_after => {
                self.collected.kept += 1;
                Ok(false)
            }
            Some((size, _)) => {
                if !self.options.dry_run {
                    store.delete(&orphan.key).await?;
                }
                self.collected.orphans += 1;
                self.collected.bytes += size;
                Ok(true)
            }
        }
    }

    async fn collect_strays(&mut self) -> Result<()> {
        let (store, options) = (&self.objects.store, self.options);
        let oldest = if options.before_log {
            Duration::MAX
        } else {
            age_of_log(self.engine).await?
        };
        let mut old = Vec::new();
        let listed = store.list(|name, size, age| {
            if age >= options.strays_after
                && age <= oldest
                && let Some(id) = key::event_of(&name)
            {
                old.push((id, name, size));
            }
        });
        listed.await?;
        for (id, name, size) in old {
            if self.noted.contains(&name) || is_referred_to(self.engine, id, &name).await? {
                continue;
            }
            if !options.dry_run {
                store.delete(&name).await?;
            }
            self.collected.strays += 1;
            self.collected.bytes += size;
        }
        let swept = store.sweep_unfinished(options.strays_after, options.dry_run);
        let (files, bytes) = swept.await?;
        self.collected.strays += files;
        self.collected.bytes += bytes;
        Ok(())
    }
}

/// How long ago the oldest event that is left was received; zero without one.
async fn age_of_log(engine: &Engine) -> Result<Duration> {
    let log = engine.log()?;
    let all = vec![Pattern::new("*")?, Pattern::new("system.>")?];
    let (head, mut after) = (log.head().await?, 0);
    while after < head {
        let (found, searched) = log.read(after, all.clone(), 1).await?;
        if let Some(first) = found.first() {
            return Ok(SystemClock.now().since(first.received_at));
        }
        if searched <= after {
            break;
        }
        after = searched;
    }
    Ok(Duration::ZERO)
}

/// Whether an event of any tenant refers to the object.
async fn is_referred_to(engine: &Engine, id: EventId, key: &str) -> Result<bool> {
    let events = engine.log()?.find(id).await?;
    let mut references = events.iter().filter_map(|record| record.event.overflow());
    Ok(references.any(|reference| reference.key == key))
}
