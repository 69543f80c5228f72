//! Part of the writer: writing a dead letter, and the event that reports it, in one transaction.

use std::sync::Arc;

use everbus_core::{
    Code, Error, Failure, FailureKind, Recorded, Result, Timestamp, all_failures,
    dead_letter_notice, given_up,
};
use rusqlite::{OptionalExtension, params};

use crate::append::Appender;
use crate::errors::from_sqlite;
use crate::failpoint;
use crate::feeder::Damaged;
use crate::rows::{read_failures, stored_at, to_sql};
use crate::state::micros;
use crate::writer::Writer;

impl Writer {
    /// Opens a dead letter, or opens it again: attempts add up, and the time of the first failure stays. The
    /// event that reports it is appended in the same transaction.
    pub(crate) fn write_dead_letter(
        &mut self,
        group: i64,
        seq: u64,
        type_id: i64,
        attempts: u32,
        failures: &[Failure],
        died_at: Timestamp,
    ) -> Result<()> {
        // The claim counted an attempt; if no handler ran, it was none.
        let was_none = failures.last().is_some_and(|last| !last.kind.is_attempt());
        let attempts = attempts.saturating_sub(u32::from(was_none));
        if self.state.group_mut(group)?.owner.is_some() {
            // An ephemeral group has no dead letters: they could not be retried once the group is gone.
            self.write_skip(group, seq, &given_up(failures.last()))?;
            self.watches.touch(seq);
            return self.write_outcome(group, seq, attempts, failures.to_vec(), None);
        }
        let (before, earlier) = self.death_before(group, seq)?;
        let all = all_failures(earlier, failures.iter().cloned());
        let attempts = before.saturating_add(attempts);
        let record = self.put_dead_letter(group, seq, type_id, attempts, &all, died_at)?;
        self.tell(group, &record, attempts, all.last(), died_at)?;
        failpoint::hit("after-dead-letter");
        Ok(())
    }

    /// Dead-letters a damaged event for a group, with a text that says what is damaged. The row stays as it
    /// is, no handler sees it, and the group goes on.
    pub(crate) fn bury_damaged(
        &mut self,
        group: i64,
        damaged: &Damaged,
        attempt: u32,
        mut failures: Vec<Failure>,
    ) -> Result<()> {
        let Damaged {
            seq,
            type_id,
            damage,
        } = damaged;
        let now = self.clock.now();
        let error = format!("what is stored of this event is damaged: {damage}");
        tracing::error!(
            target: "everbus::dispatch",
            position = seq,
            group = %self.state.group_mut(group)?.name,
            dead_lettered = true,
            error,
            "an event is dead-lettered"
        );
        failures.push(Failure::new(attempt, now, FailureKind::Corrupt, error));
        // One more than the real count: a failure that was not an attempt is subtracted again.
        self.write_dead_letter(group, *seq, *type_id, attempt + 1, &failures, now)
    }

    /// Opens a dead letter, or opens it again, with all its attempts and failures. The first time stays.
    pub(crate) fn put_dead_letter(
        &mut self,
        group: i64,
        seq: u64,
        type_id: i64,
        attempts: u32,
        all: &[Failure],
        died_at: Timestamp,
    ) -> Result<Arc<Recorded>> {
        let handler = all.iter().rev().find_map(|f| f.handler.as_deref());
        let failures_json = serde_json::to_string(all)
            .map_err(|e| Error::new(Code::Internal, format!("failures cannot be stored: {e}")))?;
        let stored = stored_at(&self.conn, seq, &mut self.state.type_names)?.ok_or_else(|| {
            Error::of_file(
                Code::Corrupt,
                format!("event {seq} was delivered but is not in the log"),
            )
        })?;
        let record = stored.record;
        self.conn
            .prepare_cached(
                "INSERT INTO dead_letters
                   (seq, group_id, type, attempts, failures, handler, first_seen_at, died_at,
                    event_id, binary)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?7, ?8, ?9)
                 ON CONFLICT (seq, group_id) DO UPDATE SET
                   attempts = excluded.attempts, failures = excluded.failures,
                   handler = excluded.handler, died_at = excluded.died_at, retried_at = NULL",
            )
            .and_then(|mut s| {
                s.execute(params![
                    to_sql(seq),
                    group,
                    type_id,
                    attempts,
                    failures_json,
                    handler,
                    micros(died_at),
                    record.event.display_id(),
                    !is_text(record.event.payload()),
                ])
            })
            .map_err(|e| from_sqlite("writing a dead letter", e))?;
        self.watches.touch(seq);
        Ok(record)
    }

    /// The attempts and failures of an earlier death of the same event in the same group.
    fn death_before(&self, group: i64, seq: u64) -> Result<(u32, Vec<Failure>)> {
        let before: Option<(u32, String)> = self
            .conn
            .prepare_cached(
                "SELECT attempts, failures FROM dead_letters WHERE seq = ?1 AND group_id = ?2",
            )
            .and_then(|mut s| {
                s.query_row((to_sql(seq), group), |r| Ok((r.get(0)?, r.get(1)?)))
                    .optional()
            })
            .map_err(|e| from_sqlite("reading a dead letter", e))?;
        let (attempts, failures) = before.unwrap_or_default();
        // Damaged old failures must not keep new ones from being written.
        let failures = read_failures(Some(&failures)).unwrap_or_default();
        Ok((attempts, failures))
    }

    /// Appends the event that reports a dead letter. It is claimed and handed out like any other.
    fn tell(
        &mut self,
        group: i64,
        record: &Recorded,
        attempts: u32,
        failure: Option<&Failure>,
        died_at: Timestamp,
    ) -> Result<()> {
        let name = &self.state.group_mut(group)?.name;
        let Some(notice) = dead_letter_notice(record, name, attempts, failure, died_at) else {
            return Ok(());
        };
        let now = self.clock.now();
        let mut appender = Appender::new(&self.conn, &self.state, now)?;
        match appender.batch(&mut self.state, vec![notice]) {
            // Already reported at the same time with another text: once is enough.
            Err(e) if e.code() == Code::IdReused => Ok(()),
            told => told.map(drop),
        }
    }
}

/// Whether SQL can show a payload as text.
fn is_text(payload: &[u8]) -> bool {
    !payload.contains(&0) && std::str::from_utf8(payload).is_ok()
}
