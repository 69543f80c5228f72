//! Part of the writer: the attempts of an event that failed before its group handled or skipped it. An event
//! that succeeds at its first attempt has no row here.

use everbus_core::{Ended, Failure, GroupState, Ran, Result, Timestamp, all_failures};
use rusqlite::{Connection, OptionalExtension, params};

use crate::errors::from_sqlite;
use crate::rows::{read_failures, to_sql, write_failures};
use crate::state::micros;
use crate::writer::Writer;

/// attempts, failures
type Kept = (u32, Option<String>);

impl Writer {
    /// Keeps the attempts of a row in `deliveries` that is about to be removed as handled or skipped. For a
    /// replayed event, the attempts of all runs are kept.
    pub(crate) fn keep_outcome(&mut self, group: i64, seq: u64, ran: Option<&Ran>) -> Result<()> {
        let (attempts, failures) = self.row(group, seq)?;
        self.write_outcome(group, seq, attempts, failures, ran)
    }

    /// Writes the attempts of an event that has ended, with those of earlier runs.
    pub(crate) fn write_outcome(
        &mut self,
        group: i64,
        seq: u64,
        mut attempts: u32,
        mut failures: Vec<Failure>,
        ran: Option<&Ran>,
    ) -> Result<()> {
        let doing = |e| from_sqlite("keeping the attempts of an event", e);
        let before: Option<Kept> = self
            .conn
            .prepare_cached(
                "SELECT attempts, failures FROM outcomes WHERE seq = ?1 AND group_id = ?2",
            )
            .and_then(|mut s| {
                s.query_row((to_sql(seq), group), |r| Ok((r.get(0)?, r.get(1)?)))
                    .optional()
            })
            .map_err(doing)?;
        if let Some((earlier, texts)) = before {
            attempts = attempts.saturating_add(earlier);
            // Damaged old failures must not keep new ones from being written.
            let texts = read_failures(texts.as_deref()).unwrap_or_default();
            failures = all_failures(texts, failures);
        }
        let took = ran.and_then(|ran| ran.took);
        self.conn
            .prepare_cached(
                "INSERT OR REPLACE INTO outcomes
                   (seq, group_id, attempts, failures, ended_at, took, worker)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
            )
            .and_then(|mut s| {
                s.execute(params![
                    to_sql(seq),
                    group,
                    attempts,
                    write_failures(&failures),
                    micros(self.clock.now()),
                    took.map(|took| i64::try_from(took.as_micros()).unwrap_or(i64::MAX)),
                    ran.and_then(|ran| ran.worker.as_deref()),
                ])
            })
            .map(drop)
            .map_err(doing)
    }
}

/// Adds the attempts of an event that a group is done with: those of a retried dead letter, and those kept
/// when it ended.
pub(crate) fn read_into(
    conn: &Connection,
    seq: i64,
    group: i64,
    state: &mut GroupState,
) -> Result<()> {
    let doing = |e| from_sqlite("reading the attempts of an event", e);
    let letter: Option<(u32, String)> = conn
        .prepare_cached(
            "SELECT attempts, failures FROM dead_letters WHERE seq = ?1 AND group_id = ?2",
        )
        .and_then(|mut s| {
            s.query_row((seq, group), |r| Ok((r.get(0)?, r.get(1)?)))
                .optional()
        })
        .map_err(doing)?;
    let kept: Option<(Kept, Ended)> = conn
        .prepare_cached(
            "SELECT attempts, failures, ended_at, took, worker FROM outcomes
             WHERE seq = ?1 AND group_id = ?2",
        )
        .and_then(|mut s| {
            s.query_row((seq, group), |r| {
                let took: Option<i64> = r.get(3)?;
                let took = took.and_then(|took| u64::try_from(took).ok());
                let ran = Ran {
                    took: took.map(std::time::Duration::from_micros),
                    worker: r.get(4)?,
                };
                let at = Timestamp::from_micros(r.get(2)?);
                Ok(((r.get(0)?, r.get(1)?), Ended { at, ran }))
            })
            .optional()
        })
        .map_err(doing)?;
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
