//! Named checkpoints: how far a long-running task has come, kept in the file.

use everbus_core::{BoxFuture, Checkpoint, Checkpoints, Code, Error, Result, Timestamp};
use rusqlite::params;
use serde_json::Value;

use crate::broker::SqliteEngine;
use crate::sql::Sql as _;

impl Checkpoints for SqliteEngine {
    fn save(&self, name: String, state: Value) -> BoxFuture<'_, Result<()>> {
        if let Err(error) = everbus_core::check_checkpoint_name(&name) {
            return Box::pin(std::future::ready(Err(error)));
        }
        self.handle.job(move |writer| {
            let now = writer.tx.now();
            let doing = "saving a checkpoint";
            let sql = "INSERT INTO checkpoints (name, state, saved_at) VALUES (?1, ?2, ?3)
                       ON CONFLICT (name) DO UPDATE SET
                         state = excluded.state, saved_at = excluded.saved_at";
            writer
                .tx
                .conn
                .run(doing, sql, params![name, state.to_string(), now])
        })
    }

    fn load(&self, prefix: String) -> BoxFuture<'_, Result<Vec<Checkpoint>>> {
        self.handle.query(move |reader| {
            let doing = "reading the checkpoints";
            let sql = "SELECT name, state, saved_at FROM checkpoints
                       WHERE name >= ?1 AND substr(name, 1, length(?1)) = ?1 ORDER BY name";
            let rows: Vec<(String, String, i64)> = reader.conn.all(doing, sql, [prefix])?;
            rows.into_iter()
                .map(|(name, state, saved_at)| {
                    let state = serde_json::from_str(&state).map_err(|e| {
                        Error::of_file(
                            Code::Corrupt,
                            format!("the checkpoint {name:?} is damaged: {e}"),
                        )
                    })?;
                    Ok(Checkpoint {
                        name,
                        state,
                        saved_at: Timestamp::from_micros(saved_at),
                    })
                })
                .collect()
        })
    }

    fn remove(&self, name: String) -> BoxFuture<'_, Result<bool>> {
        self.handle.job(move |writer| {
            let sql = "DELETE FROM checkpoints WHERE name = ?1";
            writer
                .tx
                .conn
                .change("removing a checkpoint", sql, [name])
                .map(|removed| removed > 0)
        })
    }
}
