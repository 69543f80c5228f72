//! Checkpoints: how far something long has come, so that it can go on after a restart.

use serde::Serialize;
use serde_json::Value;

use crate::broker::BoxFuture;
use crate::error::Result;
use crate::time::Timestamp;

/// How far something has come, under a name.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Checkpoint {
    /// What it belongs to: `replay/…`.
    pub name: String,
    /// Whatever its owner needs to go on.
    pub state: Value,
    /// When it was saved.
    pub saved_at: Timestamp,
}

/// A store that keeps checkpoints.
pub trait Checkpoints: Send + Sync + 'static {
    /// Saves one, in place of an earlier one of its name; durable on return.
    fn save(&self, name: String, state: Value) -> BoxFuture<'_, Result<()>>;

    /// Those whose names begin so, by name.
    fn load(&self, prefix: String) -> BoxFuture<'_, Result<Vec<Checkpoint>>>;

    /// Removes one; whether it was there.
    fn remove(&self, name: String) -> BoxFuture<'_, Result<bool>>;
}
