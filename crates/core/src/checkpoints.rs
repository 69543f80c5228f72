//! Checkpoints: how far something long has come, so that it can go on after a restart.

use serde::Serialize;
use serde_json::Value;

use crate::broker::BoxFuture;
use crate::error::{Code, Error, Result};
use crate::time::Timestamp;

/// Refuses names that nobody could type again: a name is 1 to 255 printable characters.
pub fn check_checkpoint_name(name: &str) -> Result<()> {
    if name.is_empty() || name.chars().count() > 255 || name.chars().any(char::is_control) {
        return Err(Error::new(
            Code::InvalidSetting,
            format!("{name:?} is not a name for a checkpoint"),
        )
        .hint("a name is 1 to 255 printable characters"));
    }
    Ok(())
}

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
