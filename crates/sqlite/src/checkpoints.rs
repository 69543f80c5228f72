//! Named checkpoints: how far a long-running task has come, kept in the file.

use everbus_core::{BoxFuture, Checkpoint, Checkpoints, Code, Error, Result, Timestamp};
use rusqlite::params;
use serde_json::Value;

use crate::engine::SqliteEngine;
use crate::errors::from_sqlite;
use crate::state::micros;

impl Checkpoints for SqliteEngine {
    fn save(&self, name: String, state: Value) -> BoxFuture<'_, Result<()>> {
        if let Err(error) = everbus_core::check_checkpoint_name(&name) {
            return Box::pin(std::future::ready(Err(error)));
        }
        self.handle.job(move |writer| {
            let now = micros(writer.clock.now());
            writer
                .conn
                .prepare_cached(
                    "INSERT INTO checkpoints (name, state, saved_at) VALUES (?1, ?2, ?3)
                     ON CONFLICT (name) DO UPDATE SET
                       state = excluded.state, saved_at = excluded.saved_at",
                )
                .and_then(|mut s| s.execute(params![name, state.to_string(), now]))
                .map(drop)
                .map_err(|e| from_sqlite("saving a checkpoint", e))
        })
    }

    fn load(&self, prefix: String) -> BoxFuture<'_, Result<Vec<Checkpoint>>> {
        self.handle.query(move |reader| {
            let doing = |e| from_sqlite("reading the checkpoints", e);
            let rows: Vec<(String, String, i64)> = reader
                .conn
                .prepare_cached(
                    "SELECT name, state, saved_at FROM checkpoints
                     WHERE name >= ?1 AND substr(name, 1, length(?1)) = ?1 ORDER BY name",
                )
                .and_then(|mut s| {
                    s.query_map([prefix], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?)))?
                        .collect()
                })
                .map_err(doing)?;
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
            writer
                .conn
                .prepare_cached("DELETE FROM checkpoints WHERE name = ?1")
                .and_then(|mut s| s.execute([name]))
                .map(|removed| removed > 0)
                .map_err(|e| from_sqlite("removing a checkpoint", e))
        })
    }
}
