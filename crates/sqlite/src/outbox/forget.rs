//! Removes old rows: rows that were sent long ago, and dead letters of the outbox with their rows.
//!
//! In the engine's file, retention calls this; in other databases, the relay. Each function is one step.

use everbus_core::{Result, Timestamp};
use rusqlite::{Connection, params};

use crate::errors::from_sqlite;
use crate::rows::seq_from;
use crate::sql::Sql as _;

/// The result of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeadGone {
    pub(crate) letters: u64,
    /// Their rows, if they are still as the relay left them.
    pub(crate) rows: u64,
}

/// Deletes at most `limit` rows that were sent before a time, oldest first, and returns how many. Rows that
/// wait or failed are never deleted.
pub fn forget_sent(conn: &Connection, before: Timestamp, limit: usize) -> Result<usize> {
    let sql = "DELETE FROM event_outbox WHERE row IN (
               SELECT row FROM event_outbox WHERE status = 'sent' AND sent_at < ?1
               ORDER BY sent_at LIMIT ?2)";
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    conn.change(
        "forgetting sent rows",
        sql,
        params![before.to_string(), limit],
    )
}

/// Dead letters that died before a time, retried or not, unless their event waits in the outbox.
const OLD: &str = "FROM outbox_dead_letters d INDEXED BY outbox_dead_letters_died
     WHERE last_seen_at < ?1 AND NOT EXISTS (SELECT 1 FROM event_outbox o
       WHERE +o.status = 'pending' AND (o.row = d.row OR o.event_id = d.event_id))";

/// Deletes at most `limit` dead letters that died before a time, oldest first, and their rows.
pub(crate) fn forget_dead(conn: &Connection, before: Timestamp, limit: usize) -> Result<DeadGone> {
    let doing = |e| from_sqlite("forgetting dead letters of the outbox", e);
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let old: Vec<(String, String, i64)> = conn.all(
        "forgetting dead letters of the outbox",
        &format!("SELECT event, event_id, row {OLD} ORDER BY last_seen_at LIMIT ?2"),
        params![before.to_string(), limit],
    )?;
    let mut letter = conn
        .prepare_cached("DELETE FROM outbox_dead_letters WHERE event = ?1")
        .map_err(doing)?;
    // Also rows of earlier attempts under the same id; the rows of another dead letter stay with it.
    let mut rows = conn
        .prepare_cached(
            "DELETE FROM event_outbox
             WHERE +status = 'failed' AND sent_at IS NULL AND (row = ?1 OR event_id = ?2)
               AND NOT EXISTS (SELECT 1 FROM outbox_dead_letters d WHERE d.row = event_outbox.row)",
        )
        .map_err(doing)?;
    let mut gone = DeadGone::default();
    for (event, event_id, row) in old {
        gone.letters += letter.execute([event]).map_err(doing)? as u64;
        gone.rows += rows.execute(params![row, event_id]).map_err(doing)? as u64;
    }
    Ok(gone)
}

/// What [`forget_dead`] would delete.
pub(crate) fn count_dead(conn: &Connection, before: Timestamp) -> Result<DeadGone> {
    let count = |sql: String| -> Result<u64> {
        conn.one(
            "counting dead letters of the outbox",
            &sql,
            [before.to_string()],
        )
        .map(seq_from)
    };
    Ok(DeadGone {
        letters: count(format!("SELECT count(*) {OLD}"))?,
        rows: count(format!(
            "WITH old (event, event_id, row) AS MATERIALIZED (SELECT event, event_id, row {OLD})
             SELECT count(*) FROM event_outbox f WHERE row IN (
               SELECT f.row FROM old CROSS JOIN event_outbox f ON f.row = old.row
               UNION SELECT f.row FROM old CROSS JOIN event_outbox f ON f.event_id = old.event_id)
             AND +status = 'failed' AND sent_at IS NULL
             AND NOT EXISTS (SELECT 1 FROM outbox_dead_letters d
               WHERE d.row = f.row AND d.event NOT IN (SELECT event FROM old))"
        ))?,
    })
}

/// Whether there is something to delete. This needs no lock.
pub(super) fn is_any(
    conn: &Connection,
    sent_before: Option<Timestamp>,
    dead_before: Option<Timestamp>,
) -> Result<bool> {
    let found = |sql: &str, before: Option<Timestamp>| -> Result<bool> {
        let Some(before) = before else {
            return Ok(false);
        };
        conn.prepare_cached(sql)
            .and_then(|mut s| s.exists([before.to_string()]))
            .map_err(|e| from_sqlite("looking for old rows", e))
    };
    let sent = "SELECT 1 FROM event_outbox WHERE status = 'sent' AND sent_at < ?1 LIMIT 1";
    Ok(found(sent, sent_before)? || found(&format!("SELECT 1 {OLD} LIMIT 1"), dead_before)?)
}
