//! The checkpoint of a named run.

use std::time::Duration;

use everbus_core::{Code, Cursor, Engine, Error, EventId, Result, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::time::Instant;

use super::report::{ReplayReport, ReplaySkips};
use super::source::Bounds;

/// How often a running replay saves its checkpoint.
const EVERY: Duration = Duration::from_secs(1);

/// The prefix of checkpoint names.
pub(super) const PREFIX: &str = "replay/";

/// The state of a run, saved under `replay/<name>`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Saved {
    /// The ids of copies are made from this.
    pub(super) run: EventId,
    pub(super) selection: Value,
    pub(super) target: String,
    pub(super) started_at: Timestamp,
    pub(super) from: Cursor,
    pub(super) upto: Cursor,
    /// Everything up to here is processed.
    pub(super) done: Cursor,
    pub(super) processed: u64,
    pub(super) errors: u64,
    pub(super) skips: ReplaySkips,
}

impl Saved {
    pub(super) fn begin(selection: Value, target: String, at: Timestamp, bounds: Bounds) -> Self {
        Self {
            run: EventId::new(),
            selection,
            target,
            started_at: at,
            from: bounds.from.clone(),
            upto: bounds.upto,
            done: bounds.from,
            processed: 0,
            errors: 0,
            skips: ReplaySkips::default(),
        }
    }
}

/// Keeps the checkpoint of one run, if it has a name.
pub(super) struct Keeper {
    engine: Engine,
    /// The name of the checkpoint.
    key: Option<String>,
    saved_at: Instant,
}

impl Keeper {
    pub(super) fn new(engine: &Engine, name: Option<&str>) -> Result<Self> {
        if name.is_some() {
            engine.checkpoints()?;
        }
        Ok(Self {
            engine: engine.clone(),
            key: name.map(|name| format!("{PREFIX}{name}")),
            saved_at: Instant::now(),
        })
    }

    /// The checkpoint of an earlier part of the run. A checkpoint with another selection or target is an
    /// error: resuming it would be wrong, and deleting it too.
    pub(super) async fn load(&self, selection: &Value, target: &str) -> Result<Option<Saved>> {
        let Some(key) = &self.key else {
            return Ok(None);
        };
        let found = self.engine.checkpoints()?.load(key.clone()).await?;
        let Some(found) = found.into_iter().find(|c| c.name == *key) else {
            return Ok(None);
        };
        let saved: Saved = serde_json::from_value(found.state).map_err(|e| {
            Error::new(
                Code::Corrupt,
                format!("the checkpoint {key:?} is not that of a replay: {e}"),
            )
        })?;
        if saved.selection != *selection || saved.target != target {
            let name = key.strip_prefix(PREFIX).unwrap_or(key);
            return Err(Error::new(
                Code::InvalidSetting,
                format!(
                    "the run {name:?} is under way with another selection or target: {} into {}",
                    saved.selection, saved.target
                ),
            )
            .hint(
                "use the same selection and target to continue it, forget it, or use another name",
            ));
        }
        Ok(Some(saved))
    }

    /// Saves if the last save is old enough, or if `now` is required.
    pub(super) async fn save(
        &mut self,
        saved: &mut Saved,
        report: &ReplayReport,
        now: bool,
    ) -> Result<()> {
        let Some(key) = &self.key else {
            return Ok(());
        };
        if !now && self.saved_at.elapsed() < EVERY {
            return Ok(());
        }
        saved.processed = report.processed;
        saved.errors = report.errors;
        saved.skips = report.skips;
        let state = serde_json::to_value(&*saved)
            .map_err(|e| Error::new(Code::Internal, format!("a checkpoint is no JSON: {e}")))?;
        self.engine.checkpoints()?.save(key.clone(), state).await?;
        self.saved_at = Instant::now();
        Ok(())
    }

    /// Removes the checkpoint: the run is complete.
    pub(super) async fn remove(&self) -> Result<()> {
        if let Some(key) = &self.key {
            self.engine.checkpoints()?.remove(key.clone()).await?;
        }
        Ok(())
    }
}
