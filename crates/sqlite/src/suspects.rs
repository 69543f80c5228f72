//! Part of the writer: suspects, the events that were in flight at a crash.
//!
//! A handler that kills its process (a poison event) must be distinguished from those that only ran beside it. So
//! the events of a dead process are handed out one at a time. An event that was in flight at several crashes
//! is handed out only while nothing else is in flight: if the process dies once more, that event caused it.

use everbus_core::{Failure, FailureKind, Progress, Result};
use rusqlite::{OptionalExtension, params};

use crate::deliver::{CRASHED, Ready};
use crate::errors::from_sqlite;
use crate::rows::{Stored, seq_from, stored_at, to_sql, write_failures};
use crate::session::Session;
use crate::state::{CRASHES_BEFORE_ISOLATION, next_suspect};
use crate::writer::Writer;

impl Writer {
    /// Ends an isolation whose event is no longer here: another process took it, or this process has no
    /// consumer of its group.
    pub(crate) fn drop_stale_isolation(&mut self) -> Result<()> {
        let Some((group, seq)) = self.isolating else {
            return Ok(());
        };
        if self.state.held.contains_key(&(group, seq)) {
            return Ok(());
        }
        // A paused consumer takes nothing: the isolation would hold up every other group until it goes on.
        let takes = |session: &Session| session.group == group && session.prefetch > 0;
        let attended = self.sessions.values().any(takes);
        if !attended || self.suspect("AND seq = ?2", group, to_sql(seq))?.is_none() {
            self.isolating = None;
        }
        Ok(())
    }

    pub(crate) fn may_take_suspect(&self, group: i64) -> bool {
        let running = self
            .state
            .held
            .iter()
            .any(|((g, _), held)| *g == group && held.suspect);
        !running && (self.isolating.is_none() || self.state.in_flight() == 0)
    }

    /// Hands out one event that was in flight at a crash: one at a time, to find the event that causes
    /// crashes; after several crashes only while nothing else is in flight.
    pub(crate) fn take_suspect(&mut self, session: u64, group: i64, now: i64) -> Result<()> {
        if !self.may_take_suspect(group) {
            return Ok(());
        }
        let next = match self.isolating {
            Some((chosen, _)) if chosen != group => return Ok(()),
            Some((_, seq)) => {
                let row = self.suspect("AND seq = ?2", group, to_sql(seq))?;
                if row.is_none() {
                    // The event is gone, so nothing needs to be isolated.
                    self.isolating = None;
                }
                row
            }
            None => {
                self.separate_inherited(group, now)?;
                self.suspect("AND due <= ?2 ORDER BY due, seq LIMIT 1", group, now)?
            }
        };
        let Some((row, crashes)) = next else {
            return self.look_for_suspects(group);
        };
        let key = (group, row.seq);
        let alone = crashes >= CRASHES_BEFORE_ISOLATION;
        if alone {
            self.isolating = Some(key);
            self.recall_unfetched()?;
            if self.state.in_flight() > 0 {
                return Ok(());
            }
        }
        if self.stands_behind(group, row.seq)? {
            self.isolating = None;
            self.free_keys(group)?;
            return self.look_for_suspects(group);
        }
        if !self.session_handles(session, row.type_id)? {
            self.isolating = None;
            self.set_unhandled(session, group, row.seq, now)?;
            return self.look_for_suspects(group);
        }
        let delivery = self.lease_row(session, group, &row, now, true, alone)?;
        self.post(session, delivery.into_iter().collect());
        self.look_for_suspects(group)
    }

    pub(crate) fn look_for_suspects(&mut self, group: i64) -> Result<()> {
        let next = next_suspect(&self.conn, group)?;
        self.state.group_mut(group)?.next_suspect = next;
        Ok(())
    }

    /// Notes that a suspect of a group is due at this time.
    pub(crate) fn note_suspect(&mut self, group: i64, due: i64) {
        if let Some(group) = self.state.groups.get_mut(&group) {
            group.next_suspect = Some(group.next_suspect.map_or(due, |known| known.min(due)));
        }
    }

    pub(crate) fn suspect(
        &self,
        which: &str,
        group: i64,
        value: i64,
    ) -> Result<Option<(Ready, i64)>> {
        self.conn
            .prepare_cached(&format!(
                "SELECT seq, type, attempt, failures, crashes FROM deliveries
                 WHERE group_id = ?1 AND suspect = 1 {which}"
            ))
            .and_then(|mut s| {
                s.query_row((group, value), |row| {
                    let ready = Ready {
                        seq: seq_from(row.get(0)?),
                        type_id: row.get(1)?,
                        attempt: row.get(2)?,
                        failures: row.get(3)?,
                    };
                    Ok((ready, row.get(4)?))
                })
                .optional()
            })
            .map_err(|e| from_sqlite("reading the suspects", e))
    }

    /// Moves the next unfinished event of an inherited claim into its own row.
    pub(crate) fn separate_inherited(&mut self, group: i64, now: i64) -> Result<()> {
        let doing = |e| from_sqlite("recovering", e);
        type Inherited = (i64, i64, i64, i64, i64, u32, Option<Vec<u8>>);
        let waiting: bool = self
            .conn
            .prepare_cached(
                "SELECT EXISTS (SELECT 1 FROM deliveries
                   WHERE group_id = ?1 AND suspect = 1 AND due <= ?2)",
            )
            .and_then(|mut s| s.query_row((group, now), |row| row.get(0)))
            .map_err(doing)?;
        if waiting {
            return Ok(());
        }
        let claim: Option<Inherited> = self
            .conn
            .prepare_cached(
                "SELECT id, lo, hi, token, coalesce(crashed_at, 0), attempt, done FROM claims
                 WHERE group_id = ?1 AND owner = 0 ORDER BY lo LIMIT 1",
            )
            .and_then(|mut s| {
                s.query_row([group], |r| {
                    Ok((
                        r.get(0)?,
                        r.get(1)?,
                        r.get(2)?,
                        r.get(3)?,
                        r.get(4)?,
                        r.get(5)?,
                        r.get(6)?,
                    ))
                })
                .optional()
            })
            .map_err(doing)?;
        let Some((id, lo, hi, _token, crashed_at, attempt, done)) = claim else {
            return Ok(());
        };
        let (lo, hi) = (seq_from(lo), seq_from(hi));
        let mut progress = Progress::from_bitmap(lo, hi, done.as_deref().unwrap_or_default());
        let next = progress.unfinished(hi).next().map(|(first, _)| first);
        if let Some(seq) = next {
            progress.complete(seq);
            let at = everbus_core::Timestamp::from_micros(crashed_at);
            let crash = Failure::new(attempt, at, FailureKind::Crash, CRASHED);
            self.insert_suspect(group, seq, attempt, &[crash], now)?;
        }
        self.write_inherited(id, (lo, hi), &progress)
    }

    /// Stores the bitmap of an inherited claim; removes it if it is finished.
    pub(crate) fn write_inherited(
        &self,
        id: i64,
        (lo, hi): (u64, u64),
        progress: &Progress,
    ) -> Result<()> {
        let written = if progress.is_complete(hi) {
            self.conn
                .prepare_cached("DELETE FROM claims WHERE id = ?1")
                .and_then(|mut s| s.execute([id]))
        } else {
            self.conn
                .prepare_cached("UPDATE claims SET done = ?2 WHERE id = ?1")
                .and_then(|mut s| s.execute(params![id, progress.bitmap(lo, hi)]))
        };
        written.map(drop).map_err(|e| from_sqlite("recovering", e))
    }

    /// A row for an event whose last attempt ended with a crash.
    pub(crate) fn insert_suspect(
        &mut self,
        group: i64,
        seq: u64,
        attempt: u32,
        failures: &[Failure],
        now: i64,
    ) -> Result<()> {
        let ordered = self.state.group_mut(group)?.ordered;
        let Some(Stored {
            type_id, record, ..
        }) = stored_at(&self.conn, seq, &mut self.state.type_names)?
        else {
            return Ok(());
        };
        let key = if ordered {
            record.event.ordering_key()
        } else {
            None
        };
        let crashes = failures
            .iter()
            .filter(|f| f.kind == FailureKind::Crash)
            .count();
        self.conn
            .prepare_cached(
                "INSERT OR REPLACE INTO deliveries
                   (group_id, seq, state, due, attempt, type, key, suspect, crashes, failures, updated_at)
                 VALUES (?1, ?2, 0, ?3, ?4, ?5, ?6, 1, ?7, ?8, ?3)",
            )
            .and_then(|mut s| {
                s.execute(params![
                    group,
                    to_sql(seq),
                    now,
                    attempt,
                    type_id,
                    key,
                    to_sql(crashes as u64),
                    write_failures(failures)
                ])
            })
            .map_err(|e| from_sqlite("recovering", e))?;
        self.note_suspect(group, now);
        Ok(())
    }
}
