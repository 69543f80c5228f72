//! The attempts of an event that failed before its group handled or skipped it. An event that succeeds at
//! its first attempt has no row here.

use everbus_core::{Failure, Ran, Result, Timestamp, all_failures};

use crate::pool::Sql;
use crate::rows::{get, read_failures, to_sql, write_failures};

/// Writes the attempts of an event that has ended, with those of earlier runs.
pub(crate) async fn keep(
    db: &impl Sql,
    (group, seq): (i64, u64),
    (mut attempts, mut failures): (u32, Vec<Failure>),
    ran: Option<&Ran>,
    now: Timestamp,
) -> Result<()> {
    let doing = "keeping the attempts of an event";
    let sql = "SELECT attempts, failures FROM everbus.outcomes WHERE seq = $1 AND group_id = $2";
    let place = to_sql(seq);
    if let Some(row) = db.first(doing, sql, &[&place, &group]).await? {
        attempts = attempts.saturating_add(u32::try_from(get::<i32>(&row, 0)?).unwrap_or(0));
        // Damaged old failures must not keep new ones from being written.
        let before = read_failures(get(&row, 1)?).unwrap_or_default();
        failures = all_failures(before, failures);
    }
    let took = ran.and_then(|ran| ran.took);
    let took = took.map(|took| i64::try_from(took.as_micros()).unwrap_or(i64::MAX));
    let worker = ran
        .and_then(|ran| ran.worker.as_deref())
        .map(crate::rows::storable);
    let sql =
        "INSERT INTO everbus.outcomes (seq, group_id, attempts, failures, ended_at, took, worker)
               VALUES ($1, $2, $3, $4, $5, $6, $7)
               ON CONFLICT (seq, group_id) DO UPDATE SET attempts = excluded.attempts,
                 failures = excluded.failures, ended_at = excluded.ended_at, took = excluded.took,
                 worker = excluded.worker";
    let attempts = i32::try_from(attempts).unwrap_or(i32::MAX);
    let texts = write_failures(&failures);
    let at = now.as_micros();
    db.execute(
        doing,
        sql,
        &[&place, &group, &attempts, &texts, &at, &took, &worker],
    )
    .await
    .map(drop)
}
