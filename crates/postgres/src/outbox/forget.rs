//! Removes old rows: rows that were sent long ago, and dead letters of the outbox with their rows.
//!
//! In the schema of an engine, retention calls this; in others, the relay. Each function is one step.

use everbus_core::{Result, Timestamp};

use super::rows::time;
use crate::pool::{Params, Sql};

/// The result of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeadGone {
    pub(crate) letters: u64,
    /// Their rows, if they are still as the relay left them.
    pub(crate) rows: u64,
}

/// Deletes at most `limit` rows that were sent before a time, oldest first, and returns how many. Rows that
/// wait or failed are never deleted.
pub(crate) async fn forget_sent(db: &impl Sql, before: Timestamp, limit: i64) -> Result<u64> {
    let sql = format!(
        "DELETE FROM everbus.event_outbox WHERE status = 'sent' AND number IN (
           SELECT number FROM everbus.event_outbox WHERE status = 'sent' AND sent_at < {at}
           ORDER BY sent_at LIMIT $2)",
        at = time(1)
    );
    db.execute("forgetting sent rows", &sql, &[&before.as_micros(), &limit])
        .await
}

/// How many rows [`forget_sent`] would delete in all. Rows that failed because of a dead letter from before `dead` are
/// included: retention removes that dead letter first, and then the rows count as sent.
pub(crate) async fn count_sent(
    db: &impl Sql,
    before: Timestamp,
    dead: Option<Timestamp>,
) -> Result<u64> {
    let sql = format!(
        "SELECT count(*) FROM everbus.event_outbox o
         WHERE sent_at < {at} AND (status = 'sent' OR status = 'failed' AND $2
           AND EXISTS (SELECT 1 FROM everbus.event_outbox_origins origin WHERE origin.number = o.number)
           AND NOT EXISTS (SELECT 1 FROM everbus.event_outbox_origins origin
             JOIN everbus.dead_letters d ON d.seq = origin.seq
             WHERE origin.number = o.number AND d.retried_at IS NULL AND d.died_at >= $3))",
        at = time(1)
    );
    let since = dead.map_or(i64::MIN, Timestamp::as_micros);
    let args: Params<'_> = &[&before.as_micros(), &dead.is_some(), &since];
    let row = db.one("counting sent rows", &sql, args).await?;
    Ok(u64::try_from(row.get::<_, i64>(0)).unwrap_or(0))
}

/// Dead letters that died before a time, retried or not, unless their event waits in the outbox.
fn old() -> String {
    format!(
        "FROM everbus.outbox_dead_letters d
         WHERE last_seen_at < {at} AND NOT EXISTS (SELECT 1 FROM everbus.event_outbox o
           WHERE o.status = 'pending' AND (o.number = d.number OR o.event_id = d.event_id))",
        at = time(1)
    )
}

/// Deletes at most `limit` dead letters that died before a time, oldest first, and their rows.
pub(crate) async fn forget_dead(db: &impl Sql, before: Timestamp, limit: i64) -> Result<DeadGone> {
    let doing = "forgetting dead letters of the outbox";
    let sql = format!(
        "DELETE FROM everbus.outbox_dead_letters WHERE ctid IN (
           SELECT d.ctid {} ORDER BY last_seen_at LIMIT $2)
         RETURNING number, event_id",
        old()
    );
    let gone = db
        .query(doing, &sql, &[&before.as_micros(), &limit])
        .await?;
    let numbers: Vec<i64> = gone.iter().map(|row| row.get(0)).collect();
    let events: Vec<String> = gone.iter().map(|row| row.get(1)).collect();
    // Also rows of earlier attempts under the same id; the rows of another dead letter stay with it.
    let sql = "DELETE FROM everbus.event_outbox o
         WHERE status = 'failed' AND sent_at IS NULL AND (number = ANY($1) OR event_id = ANY($2))
           AND NOT EXISTS (SELECT 1 FROM everbus.outbox_dead_letters d WHERE d.number = o.number)";
    let rows = db.execute(doing, sql, &[&numbers, &events]).await?;
    Ok(DeadGone {
        letters: gone.len() as u64,
        rows,
    })
}

/// What [`forget_dead`] would delete in all.
pub(crate) async fn count_dead(db: &impl Sql, before: Timestamp) -> Result<DeadGone> {
    let sql = format!(
        "WITH old AS MATERIALIZED (SELECT event, event_id, number {old})
         SELECT (SELECT count(*) FROM old),
           (SELECT count(*) FROM everbus.event_outbox o
            WHERE status = 'failed' AND sent_at IS NULL
              AND (number IN (SELECT number FROM old) OR event_id IN (SELECT event_id FROM old))
              AND NOT EXISTS (SELECT 1 FROM everbus.outbox_dead_letters d
                WHERE d.number = o.number AND d.event NOT IN (SELECT event FROM old)))",
        old = old()
    );
    let doing = "counting dead letters of the outbox";
    let row = db.one(doing, &sql, &[&before.as_micros()]).await?;
    let count = |column: usize| u64::try_from(row.get::<_, i64>(column)).unwrap_or(0);
    Ok(DeadGone {
        letters: count(0),
        rows: count(1),
    })
}
