//! The named replays that are not complete: running, stopped or killed.

use std::time::Duration;

use everbus_core::{Checkpoint, Cursor, Result, Timestamp};
use serde::Serialize;
use serde_json::Value;

use super::saved::{PREFIX, Saved};
use crate::audit::{Action, audited};
use crate::runtime::bus::Bus;

/// Even the slowest run saves its checkpoint more often than this.
const IDLE: Duration = Duration::from_secs(3600);

/// A named replay that is not complete. A run with the same name, selection and target resumes it.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ReplayRun {
    /// Its name.
    pub name: String,
    /// Where the events go: `copies`, `the group billing`, `a fresh group`, `a function`.
    pub target: String,
    /// The selection; settings that were not given are left out.
    pub selection: Value,
    /// When it began.
    pub started_at: Timestamp,
    /// When its checkpoint was saved last.
    pub saved_at: Timestamp,
    /// Nothing was saved for so long that no process can be running it.
    pub idle: bool,
    /// The selection begins after this.
    pub from: Cursor,
    /// Everything up to here is processed.
    pub position: Cursor,
    /// The selection ends here.
    pub upto: Cursor,
    /// Events that reached the target.
    pub processed: u64,
    /// Events that were left out.
    pub skipped: u64,
    /// Events that failed.
    pub errors: u64,
}

impl ReplayRun {
    /// `None` if the checkpoint does not belong to a replay.
    fn new(checkpoint: Checkpoint, now: Timestamp) -> Option<Self> {
        let name = checkpoint.name.strip_prefix(PREFIX)?.to_owned();
        let saved: Saved = match serde_json::from_value(checkpoint.state) {
            Ok(saved) => saved,
            Err(error) => {
                tracing::warn!(target: "everbus::replay", name, %error, "a checkpoint cannot be read");
                return None;
            }
        };
        let mut selection = saved.selection;
        if let Value::Object(words) = &mut selection {
            words.retain(|_, value| !value.is_null());
        }
        Some(Self {
            name,
            target: saved.target,
            selection,
            started_at: saved.started_at,
            saved_at: checkpoint.saved_at,
            idle: now.since(checkpoint.saved_at) > IDLE,
            from: saved.from,
            position: saved.done,
            upto: saved.upto,
            processed: saved.processed,
            skipped: saved.skips.total(),
            errors: saved.errors,
        })
    }
}

/// All named replays that are not complete, by name.
pub(crate) async fn runs(bus: &Bus) -> Result<Vec<ReplayRun>> {
    let shared = bus.shared();
    let now = shared.options.clock.now();
    let found = shared.engine.checkpoints()?.load(PREFIX.to_owned()).await?;
    let runs = found.into_iter().filter_map(|it| ReplayRun::new(it, now));
    Ok(runs.collect())
}

/// Removes the checkpoint of a run. Returns whether there was one.
pub(crate) async fn forget(bus: &Bus, name: &str) -> Result<bool> {
    bus.accepts()?;
    let shared = bus.shared();
    let (checkpoints, key) = (shared.engine.checkpoints()?, format!("{PREFIX}{name}"));
    // If there is no such run, nothing is recorded in the audit trail.
    if !checkpoints
        .load(key.clone())
        .await?
        .iter()
        .any(|it| it.name == key)
    {
        return Ok(false);
    }
    let removed = checkpoints.remove(key);
    let action = Action::new("replay.forget").detail("name", name.into());
    let operator = shared.audit().operator();
    audited(&shared.engine, &operator, action, removed).await
}
