//! Writing a dead letter, and the event that reports it, in one transaction.

use std::sync::Arc;

use everbus_core::dead_letters::last_handler;
use everbus_core::{
    Code, Death, Error, Failure, FailureKind, Recorded, Result, dead_letter_notice, given_up,
};
use rusqlite::params;

use crate::append::Appender;
use crate::failpoint;
use crate::feeder::Damaged;
use crate::outcomes::write_outcome;
use crate::rows::{micros, read_failures, stored_at, to_sql};
use crate::settle::write_skip;
use crate::sql::Sql as _;
use crate::tx::Tx;

/// Opens a dead letter, or opens it again: attempts add up, and the time of the first failure stays. The
/// event that reports it is appended in the same transaction.
pub(crate) fn write_dead_letter(
    tx: &mut Tx,
    group: i64,
    seq: u64,
    type_id: i64,
    death: Death,
) -> Result<()> {
    if tx.groups.known(group)?.owner.is_some() {
        // An ephemeral group has no dead letters: they could not be retried once the group is gone.
        write_skip(tx, group, seq, &given_up(death.failures.last()))?;
        tx.watches.touch(seq);
        return write_outcome(tx, group, seq, death.attempts, death.failures, None);
    }
    let (attempts, failures) = death_before(tx, group, seq)?;
    let death = death.after(attempts, failures);
    let record = put_dead_letter(tx, group, seq, type_id, &death)?;
    tell(tx, group, &record, &death)?;
    failpoint::hit("after-dead-letter");
    Ok(())
}

/// Dead-letters a damaged event for a group, with a text that says what is damaged. The row stays as it is, no handler
/// sees it, and the group continues.
pub(crate) fn bury_damaged(
    tx: &mut Tx,
    group: i64,
    damaged: &Damaged,
    attempt: u32,
    failures: Vec<Failure>,
) -> Result<()> {
    let Damaged {
        seq,
        type_id,
        damage,
    } = damaged;
    let now = tx.clock.now();
    let error = format!("what is stored of this event is damaged: {damage}");
    tracing::error!(
        target: "everbus::dispatch",
        position = seq,
        group = %tx.groups.known(group)?.name,
        dead_lettered = true,
        error,
        "an event is dead-lettered"
    );
    let damage = Failure::new(attempt, now, FailureKind::Corrupt, error);
    // One more than the real count: a failure that was not an attempt is subtracted again.
    let death = Death::new(attempt + 1, failures, Some(damage), now);
    write_dead_letter(tx, group, *seq, *type_id, death)
}

/// Opens a dead letter, or opens it again, with all its attempts and failures. The first time stays.
pub(crate) fn put_dead_letter(
    tx: &mut Tx,
    group: i64,
    seq: u64,
    type_id: i64,
    death: &Death,
) -> Result<Arc<Recorded>> {
    let failures_json = serde_json::to_string(&death.failures)
        .map_err(|e| Error::new(Code::Internal, format!("failures cannot be stored: {e}")))?;
    let stored = stored_at(&tx.conn, seq, &mut tx.log.type_names)?.ok_or_else(|| {
        Error::of_file(
            Code::Corrupt,
            format!("event {seq} was delivered but is not in the log"),
        )
    })?;
    let record = stored.record;
    tx.conn.run(
        "writing a dead letter",
        "INSERT INTO dead_letters
           (seq, group_id, type, attempts, failures, handler, first_seen_at, died_at,
            event_id, binary)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?7, ?8, ?9)
         ON CONFLICT (seq, group_id) DO UPDATE SET
           attempts = excluded.attempts, failures = excluded.failures,
           handler = excluded.handler, died_at = excluded.died_at, retried_at = NULL",
        params![
            to_sql(seq),
            group,
            type_id,
            death.attempts,
            failures_json,
            last_handler(&death.failures),
            micros(death.died_at),
            record.event.display_id(),
            !is_text(record.event.payload()),
        ],
    )?;
    tx.watches.touch(seq);
    Ok(record)
}

/// The attempts and failures of an earlier death of the same event in the same group.
fn death_before(tx: &Tx, group: i64, seq: u64) -> Result<(u32, Vec<Failure>)> {
    let doing = "reading a dead letter";
    let sql = "SELECT attempts, failures FROM dead_letters WHERE seq = ?1 AND group_id = ?2";
    let before: Option<(u32, String)> = tx.conn.first(doing, sql, (to_sql(seq), group))?;
    let (attempts, failures) = before.unwrap_or_default();
    // Damaged old failures must not keep new ones from being written.
    let failures = read_failures(Some(&failures)).unwrap_or_default();
    Ok((attempts, failures))
}

/// Appends the event that reports a dead letter. It is claimed and handed out like any other.
fn tell(tx: &mut Tx, group: i64, record: &Recorded, death: &Death) -> Result<()> {
    let (name, last) = (&tx.groups.known(group)?.name, death.failures.last());
    let notice = dead_letter_notice(record, name, death.attempts, last, death.died_at);
    let Some(notice) = notice else {
        return Ok(());
    };
    let now = tx.clock.now();
    let mut appender = Appender::new(&tx.conn, &tx.log, now)?;
    match appender.batch(&mut tx.log, vec![notice]) {
        // A report with another text exists for the same time. One report is enough.
        Err(e) if e.code() == Code::IdReused => Ok(()),
        told => told.map(drop),
    }
}

/// Whether SQL can show a payload as text.
fn is_text(payload: &[u8]) -> bool {
    !payload.contains(&0) && std::str::from_utf8(payload).is_ok()
}
