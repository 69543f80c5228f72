//! The statements of the outbox. Each function is one short transaction, or part of one.

use std::collections::HashMap;

use everbus_core::{
    Claimed, FailedRow, LONGEST_RELAY_LEASE, OUTBOX_ATTEMPTS, OutboxRow, OutboxStatus, RelayLease,
    Result, RowOutcome, Timestamp, outbox_delay,
};
use rusqlite::{Connection, OptionalExtension, params};

use super::dead::{self, CLOSE, identity};
use super::read::{self, COLUMNS};
use super::times;
use crate::errors::from_sqlite;
use crate::rows::{micros, seq_from, to_sql};
use crate::sql::Sql as _;

/// At most this many bytes of payload are in memory at a time.
const MAX_BYTES: usize = 8 << 20;

/// The longest that a row may wait. A longer wait was written before the clock was set back, and counts as ended.
fn horizon(now: i64) -> i64 {
    let longest = (1..OUTBOX_ATTEMPTS).filter_map(outbox_delay).max();
    let longest = longest.map_or(0, |d| i64::try_from(d.as_micros()).unwrap_or(i64::MAX));
    now.saturating_add(longest)
}

/// Whether a lease that ends at `until` is held now.
fn is_held(until: i64, now: i64) -> bool {
    let longest = i64::try_from(LONGEST_RELAY_LEASE.as_micros()).unwrap_or(i64::MAX);
    until > now && until <= now.saturating_add(longest)
}

/// The holder of the lease and its token, if the lease is held.
pub(super) fn holder(conn: &Connection, now: Timestamp) -> Result<Option<(String, i64)>> {
    let sql = "SELECT holder, token, until FROM outbox_relay WHERE only = 1";
    let found: Option<(String, i64, i64)> = conn.first("looking for the relay", sql, [])?;
    let held = found.filter(|(_, _, until)| is_held(*until, micros(now)));
    Ok(held.map(|(holder, token, _)| (holder, token)))
}

/// Splits a stored holder, `everbus (process 7, 1f) [0198…]`, into its name and its lock. The lock shows other
/// processes that the holder's process is alive.
pub(super) fn parts(holder: &str) -> (&str, Option<&str>) {
    let parts = holder.strip_suffix(']').and_then(|it| it.rsplit_once(" ["));
    parts.map_or((holder, None), |(who, lock)| (who, Some(lock)))
}

/// Takes or keeps the lease; also takes the lease of a holder whose process is gone.
pub(super) fn acquire(
    conn: &Connection,
    me: &str,
    gone: Option<&str>,
    now: Timestamp,
    until: Timestamp,
) -> Result<Option<RelayLease>> {
    if let Some((other, _)) = holder(conn, now)?
        && other != me
        && Some(other.as_str()) != gone
    {
        return Ok(None);
    }
    // A new holder gets a new fencing token, also if it held the lease before.
    let doing = "taking the lease of the outbox";
    let sql = "INSERT INTO outbox_relay (only, holder, token, until, since)
               VALUES (1, ?1, 1, ?2, (SELECT coalesce(max(row), 0) FROM event_outbox))
               ON CONFLICT DO UPDATE SET token = token + (holder <> ?1), holder = ?1, until = ?2,
                 since = iif(holder <> ?1, excluded.since, since)
               RETURNING token, since";
    let (token, since): (i64, i64) = conn.one(doing, sql, params![me, micros(until)])?;
    Ok(Some(RelayLease {
        holder: me.to_owned(),
        token: seq_from(token),
        since,
    }))
}

/// Whether the lease is still this one. It may have expired, as long as no other relay has it.
pub(super) fn is_ours(conn: &Connection, lease: &RelayLease) -> Result<bool> {
    conn.prepare_cached("SELECT 1 FROM outbox_relay WHERE only = 1 AND holder = ?1 AND token = ?2")
        .and_then(|mut s| s.exists(params![lease.holder, to_sql(lease.token)]))
        .map_err(|e| from_sqlite("looking for the relay", e))
}

pub(super) fn release(conn: &Connection, lease: &RelayLease) -> Result<()> {
    let doing = "giving the lease of the outbox back";
    let sql = "UPDATE outbox_relay SET until = 0 WHERE only = 1 AND holder = ?1 AND token = ?2";
    conn.run(doing, sql, params![lease.holder, to_sql(lease.token)])
}

/// Rows that are ready to publish.
pub(super) fn claim(
    conn: &Connection,
    now: Timestamp,
    after: i64,
    limit: usize,
) -> Result<Claimed> {
    let doing = |e| from_sqlite("reading the outbox", e);
    let (now, horizon) = (micros(now), horizon(micros(now)));
    let sql = "SELECT ordering_key, min(row) FROM event_outbox
               WHERE status = 'pending' AND attempts > 0 AND due > ?1 AND due <= ?2
                 AND ordering_key IS NOT NULL
               GROUP BY ordering_key";
    let held: HashMap<String, i64> = conn.all("reading the outbox", sql, [now, horizon])?;
    let sql = "SELECT min(due) FROM event_outbox
               WHERE status = 'pending' AND attempts > 0 AND due > ?1 AND due <= ?2";
    let next_due: Option<i64> = conn.one("reading the outbox", sql, [now, horizon])?;
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

/// Records the results of rows. Without the lease it writes nothing and returns false. With `own` the dead
/// letters are in the same file.
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
    dead::close(conn, &sent, now)?;
    if own {
        dead::show(conn, &sent)?;
    }
    for (row, outcome) in outcomes {
        match outcome {
            RowOutcome::Sent => {}
            RowOutcome::Rejected { error, after } => {
                let due = micros(now.plus(*after));
                dead::reject(conn, row, error, now, due)?;
            }
            RowOutcome::Failed { error } => dead::fail(conn, row, error, now)?,
        }
    }
    Ok(true)
}

/// Adjacent rows are marked in one statement.
fn mark_sent(conn: &Connection, rows: &[&OutboxRow], now: Timestamp) -> Result<()> {
    let doing = |e| from_sqlite("marking rows as sent", e);
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

pub(super) fn status(conn: &Connection, now: Timestamp) -> Result<OutboxStatus> {
    let doing = |e| from_sqlite("counting the outbox", e);
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
        relay: holder(conn, now)?.map(|(holder, _)| parts(&holder).0.to_owned()),
    })
}

pub(super) fn failed(conn: &Connection, limit: usize) -> Result<Vec<FailedRow>> {
    conn.read_all(
        "listing failed rows",
        "SELECT id, event_id, event_type, attempts, CAST(created_at AS TEXT), last_error,
           iif(sent_at IS NULL, (SELECT failures FROM outbox_dead_letters d
             WHERE d.row = event_outbox.row ORDER BY last_seen_at DESC LIMIT 1), NULL)
         FROM event_outbox WHERE status = 'failed' ORDER BY row DESC LIMIT ?1",
        [i64::try_from(limit).unwrap_or(i64::MAX)],
        |r| {
            Ok(FailedRow {
                id: r.get(0)?,
                event_id: r.get(1)?,
                event_type: r.get(2)?,
                attempts: u32::try_from(r.get::<_, i64>(3)?).unwrap_or(0),
                created_at: r.get(4)?,
                last_error: r.get(5)?,
                failures: dead::read_list(r.get(6)?),
            })
        },
    )
}

/// The failed rows that one of these texts names, or all failed rows, from `after` on and up to a limit:
/// their numbers, and the names of their events. It reads payloads, so it must not run on the writer.
pub(super) fn failed_rows(
    conn: &Connection,
    ids: Option<&[String]>,
    after: i64,
    limit: usize,
) -> Result<Vec<(i64, String)>> {
    let doing = |e| from_sqlite("looking for failed rows", e);
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
    let doing = |e| from_sqlite("retrying failed rows", e);
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
