//! Keeps retention from removing the events of unfinished and failed jobs: these jobs can continue or be resumed.
//!
//! All job events since the oldest unfinished job are kept. That time is stored as a hold, which every run of retention
//! respects. Producers create the hold before their first job, and move it back when an older job continues.
//! Dispatchers move it forward.

use std::time::Duration;

use everbus::holds::{self, Hold};
use everbus::{Code, Result, Timestamp};

use crate::events::TYPES;
use crate::handle::Jobs;

/// The name of the hold.
const NAME: &str = "tasks";
/// The clock of a producer and the time at which an event is received may differ by this much.
const MARGIN: Duration = Duration::from_secs(3600);

impl Jobs {
    /// Creates the hold if it does not exist. Must be called before a job is published.
    pub(crate) async fn keep_jobs(&self) -> Result<()> {
        let engine = self.bus().engine();
        if engine.kv().is_err() || self.is_kept() {
            return Ok(());
        }
        if holds::get(engine, NAME).await?.is_none() {
            match holds::put(engine, NAME, &hold(self.now()), 0).await {
                Err(error) if error.code() != Code::RevisionConflict => return Err(error),
                _ => {}
            }
        }
        self.set_kept();
        Ok(())
    }

    /// Moves the hold back to this time, if it is later. Must be called before a job of that time continues: if the job
    /// had completed, the hold may be past it.
    pub(crate) async fn keep_since(&self, created_at: Timestamp) -> Result<()> {
        let engine = self.bus().engine();
        if engine.kv().is_err() {
            return Ok(());
        }
        let wanted = hold(created_at);
        loop {
            let known = holds::get(engine, NAME).await?;
            let revision = match known {
                Some((known, _)) if known.since <= wanted.since => return Ok(()),
                Some((_, revision)) => revision,
                None => 0,
            };
            match holds::put(engine, NAME, &wanted, revision).await {
                // Another process moved the hold at the same time.
                Err(error) if error.code() == Code::RevisionConflict => {}
                put => return put,
            }
        }
    }

    /// Moves the hold to the oldest unfinished job: forward, or back if a completed job continues. Returns the time
    /// since which events are kept.
    pub async fn release_completed(&self) -> Result<Option<Timestamp>> {
        let engine = self.bus().engine();
        if engine.kv().is_err() {
            return Ok(None);
        }
        // The time is taken before the index is read: a job that the index does not have yet is newer.
        let now = self.now();
        let Some((known, revision)) = holds::get(engine, NAME).await? else {
            return Ok(None);
        };
        self.index().catch_up(self.bus(), None).await?;
        let oldest = self.index().oldest_unfinished()?;
        let next = hold(oldest.map_or(now, |oldest| oldest.min(now)));
        if next == known {
            return Ok(Some(known.since));
        }
        match holds::put(engine, NAME, &next, revision).await {
            // Another process moved the hold at the same time.
            Err(error) if error.code() == Code::RevisionConflict => Ok(Some(known.since)),
            Err(error) => Err(error),
            Ok(()) => Ok(Some(next.since)),
        }
    }
}

fn hold(since: Timestamp) -> Hold {
    Hold {
        types: TYPES.iter().map(ToString::to_string).collect(),
        since: since.minus(MARGIN),
    }
}
