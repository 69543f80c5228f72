//! The statements of the outbox. Each function is one short transaction, or part of one.

use std::collections::HashMap;

use everbus_core::{
    Claimed, FailedRow, LONGEST_RELAY_LEASE, OUTBOX_ATTEMPTS, OutboxRow, OutboxStatus, RelayLease,
    Result, RowOutcome, Timestamp, outbox_delay,
};
use rusqlite::{Connection, OptionalExtension, params};

use super::read::{self, COLUMNS};
use super::{from_outbox, times};
use crate::rows::{seq_from, to_sql};
use crate::state::micros;

/// At most so many bytes of payload are in memory at a time.
const MAX_BYTES: usize = 8 << 20;

/// The longest that a row is made to wait. A longer wait was written before a clock went back, and
/// counts as over.
fn horizon(now: i64) -> i64 {
    let longest = (1..OUTBOX_ATTEMPTS).filter_map(outbox_delay).max();
    let longest = longest.map_or(0, |d| i64::try_from(d.as_micros()).unwrap_or(i64::MAX));
    now.saturating_add(longest)
}

/// Whether a lease that ends then is held now.
fn is_held(until: i64, now: i64) -> bool {
    let longest = i64::try_from(LONGEST_RELAY_LEASE.as_micros()).unwrap_or(i64::MAX);
    until > now && until <= now.saturating_add(longest)
}

/// Who holds the lease, with its token, if somebody does.
pub(super) fn holder(conn: &Connection, now: Timestamp) -> Result<Option<(String, i64)>> {
    let found: Option<(String, i64, i64)> = conn
        .prepare_cached("SELECT holder, token, until FROM outbox_relay WHERE only = 1")
        .and_then(|mut s| {
            s.query_row([], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?)))
                .optional()
        })
        .map_err(|e| from_outbox("looking for the relay", e))?;
    let held = found.filter(|(_, _, until)| is_held(*until, micros(now)));
    Ok(held.map(|(holder, token, _)| (holder, token)))
}

/// Takes or keeps the lease.
pub(super) fn acquire(
    conn: &Connection,
    me: &str,
    now: Timestamp,
    until: Timestamp,
) -> Result<Option<RelayLease>> {
    let doing = |e| from_outbox("taking the lease of the outbox", e);
    if let Some((other, _)) = holder(conn, now)?
        && other != me
    {
        return Ok(None);
    }
    // Another holder, another token; also for one who comes back.
    let (token, since): (i64, i64) = conn
        .prepare_cached(
            "INSERT INTO outbox_relay (only, holder, token, until, since)
             VALUES (1, ?1, 1, ?2, (SELECT coalesce(max(row), 0) FROM event_outbox))
             ON CONFLICT DO UPDATE SET token = token + (holder <> ?1), holder = ?1, until = ?2,
               since = iif(holder <> ?1, excluded.since, since)
             RETURNING token, since",
        )
        .and_then(|mut s| s.query_row(params![me, micros(until)], |r| Ok((r.get(0)?, r.get(1)?))))
        .map_err(doing)?;
    Ok(Some(RelayLease {
        holder: me.to_owned(),
        token: seq_from(token),
        since,
    }))
}

/// Whether the lease is still this one. It may have ended, as long as nobody else has it.
fn is_ours(conn: &Connection, lease: &RelayLease) -> Result<bool> {
    conn.prepare_cached("SELECT 1 FROM outbox_relay WHERE only = 1 AND holder = ?1 AND token = ?2")
        .and_then(|mut s| s.exists(params![lease.holder, to_sql(lease.token)]))
        .map_err(|e| from_outbox("looking for the relay", e))
}

pub(super) fn release(conn: &Connection, lease: &RelayLease) -> Result<()> {
    conn.prepare_cached(
        "UPDATE outbox_relay SET until = 0 WHERE only = 1 AND holder = ?1 AND token = ?2",
    )
    .and_then(|mut s| s.execute(params![lease.holder, to_sql(lease.token)]))
    .map(drop)
    .map_err(|e| from_outbox("giving the lease of the outbox back", e))
}

/// Rows that are ready.
pub(super) fn claim(
    conn: &Connection,
    now: Timestamp,
    after: i64,
    limit: usize,
) -> Result<Claimed> {
    let doing = |e| from_outbox("reading the outbox", e);
    let (now, horizon) = (micros(now), horizon(micros(now)));
    let held: HashMap<String, i64> = conn
        .prepare_cached(
            "SELECT ordering_key, min(row) FROM event_outbox
             WHERE status = 'pending' AND attempts > 0 AND due > ?1 AND due <= ?2
               AND ordering_key IS NOT NULL
             GROUP BY ordering_key",
        )
        .and_then(|mut s| {
            s.query_map([now, horizon], |r| Ok((r.get(0)?, r.get(1)?)))?
                .collect()
        })
        .map_err(doing)?;
    let next_due: Option<i64> = conn
        .prepare_cached(
            "SELECT min(due) FROM event_outbox
             WHERE status = 'pending' AND attempts > 0 AND due > ?1 AND due <= ?2",
        )
        .and_then(|mut s| s.query_row([now, horizon], |r| r.get(0)))
        .map_err(doing)?;
    let mut claimed = Claimed {
        next_due: next_due.map(Timestamp::from_micros),
        ..Claimed::default()
    };
    let sql = format!(
        "SELECT {COLUMNS} FROM event_outbox INDEXED BY event_outbox_pending
         WHERE status = 'pending' AND row > ?1 AND (due <= ?2 OR due > ?3) ORDER BY row"
    );
    let mut statement = conn.prepare_cached(&sql).map_err(doing)?;
    let mut rows = statement.query([after, now, horizon]).map_err(doing)?;
    let mut bytes = 0;
    while let Some(row) = rows.next().map_err(doing)? {
        if claimed.rows.len() >= limit || bytes >= MAX_BYTES {
            claimed.more = true;
            break;
        }
        if !held.is_empty() {
            let key: Option<String> = row.get(10).map_err(doing)?;
            let first = key.and_then(|key| held.get(&key).copied());
            let number: i64 = row.get(0).map_err(doing)?;
            if first.is_some_and(|first| first < number) {
                continue;
            }
        }
        let row = read::row(conn, row).map_err(doing)?;
        bytes += row.event.as_ref().map_or(0, |event| event.payload().len());
        claimed.rows.push(row);
    }
    Ok(claimed)
}

/// Writes down what became of rows; false, and nothing is written, without the lease. With `own` the
/// dead letters are in the same file.
pub(super) fn settle(
    conn: &Connection,
    lease: &RelayLease,
    outcomes: &[(OutboxRow, RowOutcome)],
    now: Timestamp,
    own: bool,
) -> Result<bool> {
    if !is_ours(conn, lease)? {
        return Ok(false);
    }
    let sent: Vec<&OutboxRow> = outcomes
        .iter()
        .filter(|(_, outcome)| matches!(outcome, RowOutcome::Sent))
        .map(|(row, _)| row)
        .collect();
    mark_sent(conn, &sent, now)?;
    close_dead_letters(conn, &sent, now)?;
    if own {
        show_dead_letters(conn, &sent)?;
    }
    for (row, outcome) in outcomes {
        match outcome {
            RowOutcome::Sent => {}
            RowOutcome::Rejected { error, after } => {
                let due = micros(now.plus(*after));
                reject(conn, row, error, due)?;
            }
            RowOutcome::Failed { error } => fail(conn, row, error, now)?,
        }
    }
    Ok(true)
}

/// Rows that lie side by side are marked in one statement.
fn mark_sent(conn: &Connection, rows: &[&OutboxRow], now: Timestamp) -> Result<()> {
    let doing = |e| from_outbox("marking rows as sent", e);
    let mut statement = conn
        .prepare_cached(
            "UPDATE event_outbox SET status = 'sent', sent_at = ?3
             WHERE row BETWEEN ?1 AND ?2 AND +status = 'pending' AND revision = ?4",
        )
        .map_err(doing)?;
    let now = now.to_string();
    for run in rows.chunk_by(|a, b| a.row + 1 == b.row && a.revision == b.revision) {
        if let [first, .., last] | [first @ last] = run {
            statement
                .execute(params![first.row, last.row, now, first.revision])
                .map_err(doing)?;
        }
    }
    Ok(())
}

/// What was given up before and is sent now has been retried.
fn close_dead_letters(conn: &Connection, rows: &[&OutboxRow], now: Timestamp) -> Result<()> {
    let doing = |e| from_outbox("closing dead letters of the outbox", e);
    let any = conn
        .prepare_cached("SELECT 1 FROM outbox_dead_letters WHERE retried_at IS NULL LIMIT 1")
        .and_then(|mut s| s.exists([]))
        .map_err(doing)?;
    if !any {
        return Ok(());
    }
    let mut statement = conn.prepare_cached(CLOSE).map_err(doing)?;
    for row in rows {
        statement
            .execute(params![identity(row), row.row, now.to_string()])
            .map_err(doing)?;
    }
    Ok(())
}

/// By the event or by the row: one that could not be read may be another event since it was corrected.
const CLOSE: &str = "UPDATE outbox_dead_letters SET retried_at = ?3
     WHERE (event = ?1 OR row = ?2) AND retried_at IS NULL";

/// What names the event of a row among the dead letters of the outbox.
fn identity(row: &OutboxRow) -> String {
    match &row.tenant {
        Some(tenant) => format!("{}@{tenant}", row.uuid()),
        None => row.uuid().to_string(),
    }
}

/// An event may have died before its row was marked; then the row shows it all the same.
fn show_dead_letters(conn: &Connection, rows: &[&OutboxRow]) -> Result<()> {
    let doing = |e| from_outbox("looking for dead letters", e);
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
             FROM (SELECT json_extract(d.failures, '$[#-1].error') AS error
                   FROM log JOIN dead_letters d ON d.seq = log.seq
                   WHERE log.id = ?2 AND d.retried_at IS NULL
                     AND log.tenant = iif(?3 IS NULL, 0, (SELECT id FROM tenants WHERE name = ?3))
                   LIMIT 1) AS found
             WHERE event_outbox.row = ?1 AND +event_outbox.status = 'sent'",
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

fn reject(conn: &Connection, row: &OutboxRow, error: &str, due: i64) -> Result<()> {
    conn.prepare_cached(
        "UPDATE event_outbox SET attempts = ?2, last_error = ?3, due = ?4
         WHERE row = ?1 AND +status = 'pending' AND revision = ?5",
    )
    .and_then(|mut s| {
        let attempts = row.attempts.saturating_add(1);
        s.execute(params![row.row, attempts, error, due, row.revision])
    })
    .map(drop)
    .map_err(|e| from_outbox("writing down a rejection", e))
}

fn fail(conn: &Connection, row: &OutboxRow, error: &str, now: Timestamp) -> Result<()> {
    let doing = |e| from_outbox("giving a row up", e);
    let attempts = row.attempts.saturating_add(1);
    let failed = conn
        .prepare_cached(
            "UPDATE event_outbox SET status = 'failed', attempts = ?2, last_error = ?3, due = 0
             WHERE row = ?1 AND +status = 'pending' AND revision = ?4",
        )
        .and_then(|mut s| s.execute(params![row.row, attempts, error, row.revision]))
        .map_err(doing)?;
    if failed == 0 {
        return Ok(());
    }
    conn.prepare_cached(
        "INSERT INTO outbox_dead_letters
           (event, event_id, event_type, payload, error, attempts, first_seen_at, last_seen_at, row)
         SELECT ?5, event_id, event_type, payload, ?2, ?3, ?4, ?4, ?1 FROM event_outbox WHERE row = ?1
         ON CONFLICT (event) DO UPDATE SET
           event_id = excluded.event_id, row = excluded.row, event_type = excluded.event_type, payload = excluded.payload, error = excluded.error,
           attempts = attempts + excluded.attempts, last_seen_at = excluded.last_seen_at,
           retried_at = NULL",
    )
    .and_then(|mut s| {
        let now = now.to_string();
        s.execute(params![row.row, error, attempts, now, identity(row)])
    })
    .map(drop)
    .map_err(doing)
}

pub(super) fn status(conn: &Connection, now: Timestamp) -> Result<OutboxStatus> {
    let doing = |e| from_outbox("counting the outbox", e);
    let count = |condition: &str| -> Result<u64> {
        let sql = format!("SELECT count(*) FROM event_outbox WHERE {condition}");
        conn.query_row(&sql, [], |r| r.get(0))
            .map(seq_from)
            .map_err(doing)
    };
    let text = |sql: &str| -> Result<Option<String>> {
        conn.query_row(sql, [], |r| r.get(0))
            .optional()
            .map(Option::flatten)
            .map_err(doing)
    };
    let oldest = text(
        "SELECT CAST(created_at AS TEXT) FROM event_outbox WHERE status = 'pending' ORDER BY row LIMIT 1",
    )?;
    let waiting_error = text(
        "SELECT last_error FROM event_outbox WHERE status = 'pending' AND attempts > 0
         ORDER BY due DESC LIMIT 1",
    )?;
    let last_error = match waiting_error {
        Some(error) => Some(error),
        None => text(
            "SELECT last_error FROM event_outbox WHERE status = 'failed' ORDER BY row DESC LIMIT 1",
        )?,
    };
    Ok(OutboxStatus {
        pending: count("status = 'pending'")?,
        retrying: count("status = 'pending' AND attempts > 0")?,
        failed: count("status = 'failed'")?,
        sent: count("status = 'sent'")?,
        oldest_pending_at: oldest.and_then(|text| times::read(conn, &text).ok()),
        last_error,
        relay: holder(conn, now)?.map(|(holder, _)| holder),
    })
}

pub(super) fn failed(conn: &Connection, limit: usize) -> Result<Vec<FailedRow>> {
    conn.prepare_cached(
        "SELECT id, event_id, event_type, attempts, CAST(created_at AS TEXT), last_error
         FROM event_outbox WHERE status = 'failed' ORDER BY row DESC LIMIT ?1",
    )
    .and_then(|mut s| {
        s.query_map([i64::try_from(limit).unwrap_or(i64::MAX)], |r| {
            Ok(FailedRow {
                id: r.get(0)?,
                event_id: r.get(1)?,
                event_type: r.get(2)?,
                attempts: u32::try_from(r.get::<_, i64>(3)?).unwrap_or(0),
                created_at: r.get(4)?,
                last_error: r.get(5)?,
            })
        })?
        .collect()
    })
    .map_err(|e| from_outbox("listing failed rows", e))
}

/// The failed rows that one of these texts names, or all of them, from `after` on and at most so many:
/// their numbers, and what names their events. Reads payloads, so it is no work for a writer.
pub(super) fn failed_rows(
    conn: &Connection,
    ids: Option<&[String]>,
    after: i64,
    limit: usize,
) -> Result<Vec<(i64, String)>> {
    let doing = |e| from_outbox("looking for failed rows", e);
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let sql = match ids {
        None => format!(
            "SELECT {COLUMNS} FROM event_outbox WHERE status = 'failed' AND row > ?1
             ORDER BY row LIMIT ?2"
        ),
        Some(_) => format!(
            "SELECT {COLUMNS} FROM event_outbox WHERE +status = 'failed' AND row > ?1 AND row IN (
               SELECT row FROM event_outbox WHERE id = ?3
               UNION SELECT row FROM event_outbox WHERE event_id = ?3)
             ORDER BY row LIMIT ?2"
        ),
    };
    let mut statement = conn.prepare_cached(&sql).map_err(doing)?;
    let mut found = Vec::new();
    let mut add = |id: Option<&String>| -> rusqlite::Result<()> {
        let mut rows = match id {
            Some(id) => statement.query(params![after, limit, id])?,
            None => statement.query(params![after, limit])?,
        };
        while let Some(row) = rows.next()? {
            let row = read::row(conn, row)?;
            found.push((row.row, identity(&row)));
        }
        Ok(())
    };
    match ids {
        Some(ids) => ids.iter().try_for_each(|id| add(Some(id))),
        None => add(None),
    }
    .map_err(doing)?;
    found.sort_unstable();
    found.dedup();
    found.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
    Ok(found)
}

/// Makes failed rows wait again.
pub(super) fn retry(conn: &Connection, rows: &[(i64, String)], now: Timestamp) -> Result<u64> {
    let doing = |e| from_outbox("retrying failed rows", e);
    let mut again = conn
        .prepare_cached(
            "UPDATE event_outbox
             SET status = 'pending', attempts = 0, due = 0, sent_at = NULL, wanted_at = ?2
             WHERE row = ?1 AND +status = 'failed'",
        )
        .map_err(doing)?;
    let mut close = conn.prepare_cached(CLOSE).map_err(doing)?;
    let now = now.to_string();
    let mut retried = 0;
    for (row, event) in rows {
        let changed = again.execute(params![row, now]).map_err(doing)?;
        if changed > 0 {
            close.execute(params![event, row, now]).map_err(doing)?;
        }
        retried += changed as u64;
    }
    Ok(retried)
}

/// Deletes at most `limit` rows that were sent before a time, oldest first, and returns how many. What
/// waits or failed is never deleted.
pub fn forget_sent(conn: &Connection, before: Timestamp, limit: usize) -> Result<usize> {
    conn.prepare_cached(
        "DELETE FROM event_outbox WHERE row IN (
           SELECT row FROM event_outbox WHERE status = 'sent' AND sent_at < ?1
           ORDER BY sent_at LIMIT ?2)",
    )
    .and_then(|mut s| {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        s.execute(params![before.to_string(), limit])
    })
    .map_err(|e| from_outbox("forgetting sent rows", e))
}
