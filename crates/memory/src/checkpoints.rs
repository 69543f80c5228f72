//! Checkpoints of long operations. They are lost with the process, like everything in this engine.

use std::collections::BTreeMap;

use everbus_core::{BoxFuture, Checkpoint, Checkpoints, Result, check_checkpoint_name};
use serde_json::Value;

use crate::broker::Memory;

/// The checkpoints by name.
pub(crate) type Saved = BTreeMap<String, Checkpoint>;

impl Checkpoints for Memory {
    fn save(&self, name: String, state: Value) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            check_checkpoint_name(&name)?;
            let saved_at = self.now();
            let checkpoint = Checkpoint {
                name: name.clone(),
                state,
                saved_at,
            };
            self.open_state()?.checkpoints.insert(name, checkpoint);
            Ok(())
        })
    }

    fn load(&self, prefix: String) -> BoxFuture<'_, Result<Vec<Checkpoint>>> {
        Box::pin(async move {
            let state = self.open_state()?;
            let from = state.checkpoints.range(prefix.clone()..);
            let begins_so = from.take_while(|(name, _)| name.starts_with(&prefix));
            Ok(begins_so.map(|(_, saved)| saved.clone()).collect())
        })
    }

    fn remove(&self, name: String) -> BoxFuture<'_, Result<bool>> {
        Box::pin(async move { Ok(self.open_state()?.checkpoints.remove(&name).is_some()) })
    }
}
