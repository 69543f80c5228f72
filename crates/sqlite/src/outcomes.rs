//! The attempts of an event that failed before its group handled or skipped it. An event that
//! succeeds at its first attempt has no row here.

use everbus_core::{Ended, Failure, GroupState, Ran, Result, Timestamp, all_failures};
use rusqlite::{Connection, params};

use crate::rows::{read_failures, to_sql, write_failures};
use crate::settle::row;
use crate::sql::Sql as _;
use crate::tx::Tx;

/// attempts, failures
type Kept = (u32, Option<String>);

/// Keeps the attempts of a row in `deliveries` that is about to be removed as handled or skipped. For a
/// replayed event, the attempts of all runs are kept.
pub(crate) fn keep_outcome(tx: &mut Tx, group: i64, seq: u64, ran: Option<&Ran>) -> Result<()> {
    let (attempts, failures) = row(tx, group, seq)?;
    write_outcome(tx, group, seq, attempts, failures, ran)
}

/// Writes the attempts of an event that has ended, with those of earlier runs.
pub(crate) fn write_outcome(
    tx: &mut Tx,
    group: i64,
    seq: u64,
    mut attempts: u32,
    mut failures: Vec<Failure>,
    ran: Option<&Ran>,
) -> Result<()> {
    let doing = "keeping the attempts of an event";
    let sql = "SELECT attempts, failures FROM outcomes WHERE seq = ?1 AND group_id = ?2";
    let before: Option<Kept> = tx.conn.first(doing, sql, (to_sql(seq), group))?;
    if let Some((earlier, texts)) = before {
        attempts = attempts.saturating_add(earlier);
        // Damaged old failures must not keep new ones from being written.
        let texts = read_failures(texts.as_deref()).unwrap_or_default();
        failures = all_failures(texts, failures);
    }
    let took = ran.and_then(|ran| ran.took);
    tx.conn.run(
        doing,
        "INSERT OR REPLACE INTO outcomes
           (seq, group_id, attempts, failures, ended_at, took, worker)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
        params![
            to_sql(seq),
            group,
            attempts,
            write_failures(&failures),
            tx.now(),
            took.map(|took| i64::try_from(took.as_micros()).unwrap_or(i64::MAX)),
            ran.and_then(|ran| ran.worker.as_deref()),
        ],
    )
}

/// Adds the attempts of an event that a group is done with: those of a retried dead letter, and those kept
/// when it ended.
pub(crate) fn read_into(
    conn: &Connection,
    seq: i64,
    group: i64,
    state: &mut GroupState,
) -> Result<()> {
    let doing = "reading the attempts of an event";
    let sql = "SELECT attempts, failures FROM dead_letters WHERE seq = ?1 AND group_id = ?2";
    let letter: Option<(u32, String)> = conn.first(doing, sql, (seq, group))?;
    let sql = "SELECT attempts, failures, ended_at, took, worker FROM outcomes
               WHERE seq = ?1 AND group_id = ?2";
    let kept: Option<(Kept, Ended)> = conn.read_first(doing, sql, (seq, group), |r| {
        let took: Option<i64> = r.get(3)?;
        let took = took.and_then(|took| u64::try_from(took).ok());
        let ran = Ran {
            took: took.map(std::time::Duration::from_micros),
            worker: r.get(4)?,
        };
        let at = Timestamp::from_micros(r.get(2)?);
        Ok(((r.get(0)?, r.get(1)?), Ended { at, ran }))
    })?;
    let (mut attempts, mut failures): (u32, Vec<Failure>) = match letter {
        Some((attempts, texts)) => (attempts, read_failures(Some(&texts))?),
        None => (0, Vec::new()),
    };
    if let Some(((more, texts), ended)) = kept {
        attempts = attempts.saturating_add(more);
        failures = all_failures(failures, read_failures(texts.as_deref())?);
        failures.sort_by_key(|failure| failure.at);
        state.ended = Some(ended);
    }
    (state.attempts, state.failures) = (attempts, failures);
    Ok(())
}
