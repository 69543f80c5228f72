//! Keeps retention from removing the events of jobs that are unfinished or failed: such a job can go on or be resumed.
//!
//! The events of all jobs since the oldest one that is not completed stay. The time is a hold in the store, which every
//! run of retention respects. Producers make it before their first job, and move it back when an older job goes on;
//! dispatchers move it forward.

use std::time::Duration;

use everbus::holds::{self, Hold};
use everbus::{Code, Result, Timestamp};

use crate::events::TYPES;
use crate::handle::Jobs;

/// The name of the hold.
const NAME: &str = "tasks";
/// Clocks of producers and the time of receipt may differ by this much.
const MARGIN: Duration = Duration::from_secs(3600);

impl Jobs {
    /// Makes the hold, if it is not there. Needed before a job is published.
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

    /// Moves the hold back to this time, if it is later. Needed before the job of that time goes on: if it has
    /// completed, the hold may have passed it.
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
                // Another process moved it at the same time.
                Err(error) if error.code() == Code::RevisionConflict => {}
                put => return put,
            }
        }
    }

    /// Moves the hold to the oldest job that is not completed: forward, or back if a completed job goes on. Returns the
    /// time since which events are kept.
    pub async fn release_completed(&self) -> Result<Option<Timestamp>> {
        let engine = self.bus().engine();
        if engine.kv().is_err() {
            return Ok(None);
        }
        // Before the look: a job that comes later is newer than this.
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
            // Another process moved it at the same time.
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
