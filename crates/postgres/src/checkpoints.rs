//! Named checkpoints: how far a long-running task has come.

use everbus_core::{BoxFuture, Checkpoint, Checkpoints, Result, Timestamp};
use serde_json::Value;

use crate::Postgres;
use crate::errors::damaged;
use crate::pool::Sql as _;
use crate::rows::get;

impl Checkpoints for Postgres {
    fn save(&self, name: String, state: Value) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            everbus_core::check_checkpoint_name(&name)?;
            let sql = "INSERT INTO everbus.checkpoints (name, state, saved_at) VALUES ($1, $2, $3)
                       ON CONFLICT (name) DO UPDATE SET
                         state = excluded.state, saved_at = excluded.saved_at";
            let (db, state) = (self.conn().await?, state.to_string());
            let values: crate::pool::Params<'_> = &[&name, &state, &self.micros()];
            db.execute("saving a checkpoint", sql, values).await?;
            Ok(())
        })
    }

    fn load(&self, prefix: String) -> BoxFuture<'_, Result<Vec<Checkpoint>>> {
        Box::pin(async move {
            let sql = "SELECT name, state, saved_at FROM everbus.checkpoints
                       WHERE name >= $1 AND starts_with(name, $1) ORDER BY name";
            let db = self.conn().await?;
            let rows = db.query("reading the checkpoints", sql, &[&prefix]).await?;
            let read = |row: &tokio_postgres::Row| {
                let (name, state): (String, &str) = (get(row, 0)?, get(row, 1)?);
                let state = serde_json::from_str(state)
                    .map_err(|e| damaged(format!("the checkpoint {name:?} is damaged: {e}")))?;
                Ok(Checkpoint {
                    name,
                    state,
                    saved_at: Timestamp::from_micros(get(row, 2)?),
                })
            };
            rows.iter().map(read).collect()
        })
    }

    fn remove(&self, name: String) -> BoxFuture<'_, Result<bool>> {
        Box::pin(async move {
            let sql = "DELETE FROM everbus.checkpoints WHERE name = $1";
            let db = self.conn().await?;
            let removed = db.execute("removing a checkpoint", sql, &[&name]).await?;
            Ok(removed > 0)
        })
    }
}
