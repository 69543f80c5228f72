//! The statements of the outbox. Each function is one short transaction, or part of one.

use everbus_core::{
    Claimed, FailedRow, LONGEST_RELAY_LEASE, OUTBOX_ATTEMPTS, OutboxRow, OutboxStatus, RelayLease,
    Result, RowOutcome, Timestamp, outbox_delay,
};

use super::dead::{self, identity};
use super::read::{self, COLUMNS};
use crate::pool::{Params, Sql};

/// At most about this many bytes of payload are in memory at a time.
const MAX_BYTES: i64 = 8 << 20;

/// The parameter with this number, in microseconds, as a time.
pub(super) fn time(parameter: usize) -> String {
    format!("(timestamptz 'epoch' + ${parameter} * interval '1 microsecond')")
}

/// The latest due time that a row can have. A later one was written before the clock was set back, and counts as
/// over.
fn horizon(now: i64) -> i64 {
    let longest = (1..OUTBOX_ATTEMPTS).filter_map(outbox_delay).max();
    let longest = longest.map_or(0, |d| i64::try_from(d.as_micros()).unwrap_or(i64::MAX));
    now.saturating_add(longest)
}

/// The latest end that a lease can have. A later one was written before the clock was set back.
fn latest_end(now: i64) -> i64 {
    let longest = i64::try_from(LONGEST_RELAY_LEASE.as_micros()).unwrap_or(i64::MAX);
    now.saturating_add(longest)
}

/// Takes or keeps the lease, unless another holder has it. Each change of the holder gives a new fencing token.
pub(super) async fn acquire(
    db: &impl Sql,
    me: &str,
    now: Timestamp,
    until: Timestamp,
) -> Result<Option<RelayLease>> {
    let doing = "taking the lease of the outbox";
    let sql = "INSERT INTO everbus.outbox_relay AS held (holder, token, until, since)
         VALUES ($1, 1, $2, (SELECT coalesce(max(number), 0) FROM everbus.event_outbox))
         ON CONFLICT (only_one) DO UPDATE SET
           token = held.token + (held.holder <> $1)::int, holder = $1, until = $2,
           since = CASE WHEN held.holder <> $1 THEN excluded.since ELSE held.since END
         WHERE held.holder = $1 OR held.until <= $3 OR held.until > $4
         RETURNING token, since";
    let now = now.as_micros();
    let args: Params<'_> = &[&me, &until.as_micros(), &now, &latest_end(now)];
    let row = db.first(doing, sql, args).await?;
    Ok(row.map(|row| RelayLease {
        holder: me.to_owned(),
        token: u64::try_from(row.get::<_, i64>(0)).unwrap_or(0),
        since: row.get(1),
    }))
}

/// Whether the lease is still this one. It may have expired, as long as no other relay has taken it. No other relay can
/// take it before the transaction ends.
pub(super) async fn is_ours(db: &impl Sql, lease: &RelayLease) -> Result<bool> {
    let sql = "SELECT 1 FROM everbus.outbox_relay WHERE holder = $1 AND token = $2 FOR SHARE";
    let args: Params<'_> = &[&lease.holder, &token(lease)];
    Ok(db
        .first("looking for the relay", sql, args)
        .await?
        .is_some())
}

fn token(lease: &RelayLease) -> i64 {
    i64::try_from(lease.token).unwrap_or(i64::MAX)
}

pub(super) async fn release(db: &impl Sql, lease: &RelayLease) -> Result<()> {
    let sql = "UPDATE everbus.outbox_relay SET until = 0 WHERE holder = $1 AND token = $2";
    let args: Params<'_> = &[&lease.holder, &token(lease)];
    db.execute("giving the lease of the outbox back", sql, args)
        .await?;
    Ok(())
}

/// Rows that are ready to publish.
pub(super) async fn claim(
    db: &impl Sql,
    now: Timestamp,
    after: i64,
    limit: usize,
) -> Result<Claimed> {
    let doing = "reading the outbox";
    let now = now.as_micros();
    // One row more than asked for, to know whether more follow. The sizes are known without the payloads.
    let sql = format!(
        "WITH held AS MATERIALIZED (
           SELECT ordering_key, min(number) AS number FROM everbus.event_outbox
           WHERE status = 'pending' AND attempts > 0 AND due > $1 AND due <= $2
             AND ordering_key IS NOT NULL
           GROUP BY ordering_key),
         ready AS (
           SELECT o.* FROM everbus.event_outbox o
           WHERE status = 'pending' AND number > $3 AND (due <= $1 OR due > $2)
             AND NOT EXISTS (SELECT 1 FROM held
               WHERE held.ordering_key = o.ordering_key AND held.number < o.number)
           ORDER BY number LIMIT $4)
         SELECT {COLUMNS}, found FROM (
           SELECT ready.*, count(*) OVER () AS found,
             sum(octet_length(payload)) OVER (ORDER BY number) - octet_length(payload) AS before
           FROM ready) AS sized
         WHERE before < $5 ORDER BY number LIMIT $4 - 1"
    );
    let many = i64::try_from(limit)
        .unwrap_or(i64::MAX - 1)
        .saturating_add(1);
    let args: Params<'_> = &[&now, &horizon(now), &after, &many, &MAX_BYTES];
    let found = db.query(doing, &sql, args).await?;
    let sql = "SELECT min(due) FROM everbus.event_outbox
         WHERE status = 'pending' AND attempts > 0 AND due > $1 AND due <= $2";
    let due = db.one(doing, sql, &[&now, &horizon(now)]).await?;
    let all = found.first().map_or(0, |row| row.get::<_, i64>("found"));
    Ok(Claimed {
        more: usize::try_from(all).unwrap_or(0) > found.len(),
        rows: found.iter().map(read::row).collect(),
        next_due: due.get::<_, Option<i64>>(0).map(Timestamp::from_micros),
    })
}

/// Records the results of rows, in a transaction. Without the lease it writes nothing and returns false.
/// With `own` the dead letters of an engine are in the same schema.
pub(super) async fn settle(
    db: &impl Sql,
    lease: &RelayLease,
    outcomes: &[(OutboxRow, RowOutcome)],
    now: Timestamp,
    own: bool,
) -> Result<bool> {
    if !is_ours(db, lease).await? {
        return Ok(false);
    }
    let sent = outcomes.iter().filter_map(|(row, outcome)| match outcome {
        RowOutcome::Sent => Some(row),
        _ => None,
    });
    let sent: Vec<&OutboxRow> = sent.collect();
    if !sent.is_empty() {
        mark_sent(db, &sent, now).await?;
        // Only the schema of an engine has the second table.
        let dead_lettered = match own {
            true => "EXISTS (SELECT 1 FROM everbus.dead_letters WHERE retried_at IS NULL)",
            false => "false",
        };
        let sql = format!(
            "SELECT EXISTS (SELECT 1 FROM everbus.outbox_dead_letters WHERE retried_at IS NULL),
               {dead_lettered}"
        );
        let row = db.one("looking for dead letters", &sql, &[]).await?;
        let (given_up, dead_lettered): (bool, bool) = (row.get(0), row.get(1));
        if given_up {
            let names: Vec<_> = sent.iter().map(|row| (row.row, identity(row))).collect();
            dead::close(db, &names, now).await?;
        }
        if dead_lettered {
            dead::show(db, &sent).await?;
        }
    }
    for (row, outcome) in outcomes {
        match outcome {
            RowOutcome::Sent => {}
            RowOutcome::Rejected { error, after } => {
                let due = now.plus(*after).as_micros();
                dead::reject(db, row, error, now, due).await?;
            }
            RowOutcome::Failed { error } => dead::fail(db, row, error, now).await?,
        }
    }
    Ok(true)
}

async fn mark_sent(db: &impl Sql, sent: &[&OutboxRow], now: Timestamp) -> Result<()> {
    let numbers: Vec<i64> = sent.iter().map(|row| row.row).collect();
    let revisions: Vec<i64> = sent.iter().map(|row| row.revision).collect();
    let sql = format!(
        "UPDATE everbus.event_outbox o SET status = 'sent', sent_at = {at}
         FROM unnest($1, $2) AS t (number, revision)
         WHERE o.number = t.number AND o.status = 'pending' AND o.revision = t.revision",
        at = time(3)
    );
    let args: Params<'_> = &[&numbers, &revisions, &now.as_micros()];
    db.execute("marking rows as sent", &sql, args).await?;
    Ok(())
}

pub(super) async fn status(db: &impl Sql, now: Timestamp) -> Result<OutboxStatus> {
    let sql = "SELECT
           (SELECT count(*) FROM everbus.event_outbox WHERE status = 'pending'),
           (SELECT count(*) FROM everbus.event_outbox WHERE status = 'pending' AND attempts > 0),
           (SELECT count(*) FROM everbus.event_outbox WHERE status = 'failed'),
           (SELECT count(*) FROM everbus.event_outbox WHERE status = 'sent'),
           (SELECT CASE WHEN isfinite(created_at) THEN (extract(epoch FROM created_at) * 1000000)::bigint END
            FROM everbus.event_outbox WHERE status = 'pending' ORDER BY number LIMIT 1),
           coalesce(
             (SELECT last_error FROM everbus.event_outbox WHERE status = 'pending' AND attempts > 0
              ORDER BY due DESC LIMIT 1),
             (SELECT last_error FROM everbus.event_outbox WHERE status = 'failed'
              ORDER BY number DESC LIMIT 1)),
           (SELECT holder FROM everbus.outbox_relay WHERE until > $1 AND until <= $2)";
    let now = now.as_micros();
    let row = db
        .one("counting the outbox", sql, &[&now, &latest_end(now)])
        .await?;
    let count = |column: usize| u64::try_from(row.get::<_, i64>(column)).unwrap_or(0);
    Ok(OutboxStatus {
        pending: count(0),
        retrying: count(1),
        failed: count(2),
        sent: count(3),
        oldest_pending_at: row.get::<_, Option<i64>>(4).map(Timestamp::from_micros),
        last_error: row.get(5),
        relay: row.get(6),
    })
}

pub(super) async fn failed(db: &impl Sql, limit: usize) -> Result<Vec<FailedRow>> {
    let sql = "SELECT id, event_id, event_type, attempts,
           to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"'), last_error,
           CASE WHEN sent_at IS NULL THEN (SELECT failures FROM everbus.outbox_dead_letters d
             WHERE d.number = o.number ORDER BY last_seen_at DESC LIMIT 1) END
         FROM everbus.event_outbox o WHERE status = 'failed' ORDER BY number DESC LIMIT $1";
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let found = db.query("listing failed rows", sql, &[&limit]).await?;
    let read = |row: &tokio_postgres::Row| FailedRow {
        id: row.get(0),
        event_id: row.get(1),
        event_type: row.get(2),
        attempts: u32::try_from(row.get::<_, i32>(3)).unwrap_or(0),
        created_at: row.get(4),
        last_error: row.get(5),
        failures: dead::read_list(row.get(6)),
    };
    Ok(found.iter().map(read).collect())
}

/// The failed rows that one of these texts names, or all failed rows, from `after` on and up to a limit:
/// their numbers, and the names of their events.
pub(super) async fn failed_rows(
    db: &impl Sql,
    ids: Option<&Vec<String>>,
    after: i64,
    limit: i64,
) -> Result<Vec<(i64, String)>> {
    let sql = format!(
        "SELECT {COLUMNS} FROM everbus.event_outbox WHERE status = 'failed' AND number > $1
           AND ($4 OR id = ANY ($3) OR event_id = ANY ($3))
         ORDER BY number LIMIT $2"
    );
    let (all, ids) = (ids.is_none(), ids.cloned().unwrap_or_default());
    let values: Params<'_> = &[&after, &limit, &ids, &all];
    let found = db.query("looking for failed rows", &sql, values).await?;
    let name = |row: &tokio_postgres::Row| {
        let row = read::row(row);
        (row.row, identity(&row))
    };
    Ok(found.iter().map(name).collect())
}

/// Makes failed rows wait again, in a transaction.
pub(super) async fn retry(db: &impl Sql, chosen: &[(i64, String)], now: Timestamp) -> Result<u64> {
    let sql = format!(
        "UPDATE everbus.event_outbox
         SET status = 'pending', attempts = 0, due = 0, sent_at = NULL, wanted_at = {at}
         WHERE number = ANY($1) AND status = 'failed' RETURNING number",
        at = time(2)
    );
    let numbers: Vec<i64> = chosen.iter().map(|(number, _)| *number).collect();
    let args: Params<'_> = &[&numbers, &now.as_micros()];
    let changed = db.query("retrying failed rows", &sql, args).await?;
    let changed: Vec<i64> = changed.iter().map(|row| row.get(0)).collect();
    let waiting = chosen.iter().filter(|(number, _)| changed.contains(number));
    let waiting: Vec<(i64, String)> = waiting.cloned().collect();
    if !waiting.is_empty() {
        dead::close(db, &waiting, now).await?;
    }
    Ok(waiting.len() as u64)
}
