//! Rejected rows of the outbox: each failure is stored with its row, and the last failure makes the row a dead letter.
//!
//! A row that was given up has no time of sending. A row that was sent, and whose event a group dead-lettered
//! later, has one.

use everbus_core::dead_letters::all_failures;
use everbus_core::{Code, Error, EventId, Failure, FailureKind, OutboxRow, Result, Timestamp};
use rusqlite::{Connection, params};

use crate::errors::from_sqlite;
use crate::rows::seq_from;
use crate::sql::Sql as _;

/// Marks earlier dead letters of rows that are sent now as retried.
pub(super) fn close(conn: &Connection, rows: &[&OutboxRow], now: Timestamp) -> Result<()> {
    let doing = "closing dead letters of the outbox";
    let sql = "SELECT EXISTS (SELECT 1 FROM outbox_dead_letters WHERE retried_at IS NULL)";
    if !conn.one::<bool>(doing, sql, [])? {
        return Ok(());
    }
    for row in rows {
        let values = params![identity(row), row.row, now.to_string()];
        conn.run(doing, CLOSE, values)?;
    }
    Ok(())
}

/// Selects by the event or by the row, because an unreadable row may have become another event when it was corrected.
pub(super) const CLOSE: &str = "UPDATE outbox_dead_letters SET retried_at = ?3
                                WHERE (event = ?1 OR row = ?2) AND retried_at IS NULL";

/// The name of a row's event among the dead letters of the outbox.
pub(super) fn identity(row: &OutboxRow) -> String {
    match &row.tenant {
        Some(tenant) => format!("{}@{tenant}", row.uuid()),
        None => row.uuid().to_string(),
    }
}

/// An event may have become a dead letter before its row was marked. Then the row shows it too, if the
/// triggers would find it again when the dead letter is gone.
pub(super) fn show(conn: &Connection, rows: &[&OutboxRow]) -> Result<()> {
    let doing = |e| from_sqlite("looking for dead letters", e);
    let any = conn
        .prepare_cached("SELECT 1 FROM dead_letters WHERE retried_at IS NULL LIMIT 1")
        .and_then(|mut s| s.exists([]))
        .map_err(doing)?;
    if !any {
        return Ok(());
    }
    let mut statement = conn
        .prepare_cached(
            "UPDATE event_outbox SET status = 'failed', last_error = found.error
             FROM (SELECT d.seq, json_extract(d.failures, '$[#-1].error') AS error
                   FROM log JOIN dead_letters d ON d.seq = log.seq
                   WHERE log.id = ?2 AND d.retried_at IS NULL
                     AND log.tenant = iif(?3 IS NULL, 0, (SELECT id FROM tenants WHERE name = ?3))
                   LIMIT 1) AS found
             WHERE event_outbox.row = ?1 AND +event_outbox.status = 'sent'
               AND ?1 IN (SELECT o.row FROM event_outbox_origins o WHERE o.seq = found.seq)",
        )
        .map_err(doing)?;
    for row in rows {
        if let Ok(event) = &row.event {
            statement
                .execute(params![row.row, event.id().as_bytes(), row.tenant])
                .map_err(doing)?;
        }
    }
    Ok(())
}

/// Reads the failures in a column. Failures that were damaged by hand must not keep new ones from being
/// written.
pub(super) fn read_list(text: Option<String>) -> Vec<Failure> {
    text.and_then(|text| serde_json::from_str(&text).ok())
        .unwrap_or_default()
}

fn write_list(failures: &[Failure]) -> Result<String> {
    serde_json::to_string(failures)
        .map_err(|e| Error::new(Code::Internal, format!("failures cannot be stored: {e}")))
}

/// Every rejection of a row, this one included.
fn rejections(
    conn: &Connection,
    row: &OutboxRow,
    error: &str,
    now: Timestamp,
) -> Result<Vec<Failure>> {
    let sql = "SELECT failures FROM event_outbox WHERE row = ?1";
    let before: Option<String> = conn
        .first("reading rejections", sql, [row.row])
        .map(Option::flatten)?;
    let kind = match row.event {
        Ok(_) => FailureKind::Error,
        Err(_) => FailureKind::Decode,
    };
    let attempt = row.attempts.saturating_add(1);
    let new = Failure::new(attempt, now, kind, error);
    Ok(all_failures(read_list(before), [new]))
}

/// Records a rejection; the row is tried again when it is due.
pub(super) fn reject(
    conn: &Connection,
    row: &OutboxRow,
    error: &str,
    now: Timestamp,
    due: i64,
) -> Result<()> {
    let failures = write_list(&rejections(conn, row, error, now)?)?;
    let sql = "UPDATE event_outbox SET attempts = ?2, last_error = ?3, due = ?4, failures = ?6
               WHERE row = ?1 AND +status = 'pending' AND revision = ?5";
    let attempts = row.attempts.saturating_add(1);
    let values = params![row.row, attempts, error, due, row.revision, failures];
    conn.run("writing down a rejection", sql, values)
}

/// Gives up a row and writes a dead letter.
pub(super) fn fail(conn: &Connection, row: &OutboxRow, error: &str, now: Timestamp) -> Result<()> {
    let doing = "giving a row up";
    let attempts = row.attempts.saturating_add(1);
    let new = rejections(conn, row, error, now)?;
    let sql = "UPDATE event_outbox SET status = 'failed', attempts = ?2, last_error = ?3, due = 0,
                 sent_at = NULL, failures = NULL
               WHERE row = ?1 AND +status = 'pending' AND revision = ?4";
    let failed = conn.change(doing, sql, params![row.row, attempts, error, row.revision])?;
    if failed == 0 {
        return Ok(());
    }
    let event = identity(row);
    let sql = "SELECT failures FROM outbox_dead_letters WHERE event = ?1";
    let before: Option<String> = conn.first(doing, sql, [&event])?;
    let failures = write_list(&all_failures(read_list(before), new))?;
    let sql = "INSERT INTO outbox_dead_letters
                 (event, event_id, event_type, payload, error, attempts, first_seen_at, last_seen_at, row, failures)
               SELECT ?5, event_id, event_type, payload, ?2, ?3, ?4, ?4, ?1, ?6 FROM event_outbox WHERE row = ?1
               ON CONFLICT (event) DO UPDATE SET
                 event_id = excluded.event_id, row = excluded.row, event_type = excluded.event_type,
                 payload = excluded.payload, error = excluded.error,
                 attempts = attempts + excluded.attempts, last_seen_at = excluded.last_seen_at,
                 retried_at = NULL, failures = excluded.failures";
    let now = now.to_string();
    let values = params![row.row, error, attempts, now, event, failures];
    conn.run(doing, sql, values)
}

/// How many events were given up and not retried since.
pub(super) fn count(conn: &Connection) -> Result<u64> {
    let sql = "SELECT count(*) FROM outbox_dead_letters WHERE retried_at IS NULL";
    conn.one("counting dead letters of the outbox", sql, [])
        .map(seq_from)
}

/// The text in `event_id` of an event that was given up, by that text or by its id, whatever its tenant.
pub(super) fn find(conn: &Connection, text: &str, id: EventId) -> Result<Option<String>> {
    conn.first("looking for a dead letter of the outbox", "SELECT event_id FROM outbox_dead_letters WHERE event_id = ?1 AND retried_at IS NULL
         UNION ALL
         SELECT event_id FROM outbox_dead_letters
         WHERE event >= ?2 AND event < ?2 || 'A' AND retried_at IS NULL -- with @ and a tenant, or without
         LIMIT 1", params![text, id.to_string()])
}
