//! Checkpoints: the saved state of a long operation, so that it can continue after a restart.

use serde::Serialize;
use serde_json::Value;

use crate::broker::BoxFuture;
use crate::error::{Code, Error, Result};
use crate::time::Timestamp;

/// Refuses names that are hard to type: a name is 1 to 255 printable characters.
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

/// The saved state of an operation, under a name.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Checkpoint {
    /// The name: `replay/…`.
    pub name: String,
    /// The state that its owner needs to continue.
    pub state: Value,
    /// When it was saved.
    pub saved_at: Timestamp,
}

/// A store that keeps checkpoints.
pub trait Checkpoints: Send + Sync + 'static {
    /// Saves a checkpoint, replacing an earlier one of the same name; durable on return.
    fn save(&self, name: String, state: Value) -> BoxFuture<'_, Result<()>>;

    /// The checkpoints with this prefix, by name.
    fn load(&self, prefix: String) -> BoxFuture<'_, Result<Vec<Checkpoint>>>;

    /// Removes a checkpoint. Returns whether it existed.
    fn remove(&self, name: String) -> BoxFuture<'_, Result<bool>>;
}
