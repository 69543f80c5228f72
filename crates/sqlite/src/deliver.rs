//! Handing out what waits in rows of its own: retries, released events, suspects.

use everbus_core::{Code, Delivery, Error, Failure, FailureKind, Lease, Progress, Result};
use rusqlite::{OptionalExtension, params};

use crate::claims::{delivery_slot, new_token, size};
use crate::errors::from_sqlite;
use crate::rows::{read_failures, record_at, seq_from, to_sql, write_failures};
use crate::session::Session;
use crate::state::{CRASHES_BEFORE_ISOLATION, Held, UNHANDLED, micros, next_due, next_suspect};
use crate::writer::Writer;

/// What a crash leaves in the record of failures.
pub(crate) const CRASHED: &str = "the process died while the event was in flight";
/// What the end of a lease leaves there.
pub(crate) const EXPIRED: &str = "the lease ended before the event was settled";

/// At most this many rows are taken in one transaction.
const BATCH: usize = 1024;

/// A row that may be handed out.
struct Ready {
    seq: u64,
    type_id: i64,
    attempt: u32,
    failures: Option<String>,
}

impl Writer {
    /// Whether some session could take a row now.
    pub(crate) fn deliveries_to_take(&self, now: i64) -> bool {
        if let Some(key) = self.isolating {
            return !self.state.held.contains_key(&key) && self.state.in_flight() == 0;
        }
        self.sessions.values().any(|session| {
            let Some(group) = self.state.groups.get(&session.group) else {
                return false;
            };
            session.room() > 0
                && (group.next_due.is_some_and(|due| due <= now)
                    || session.look_for_unhandled
                    || (group.next_suspect.is_some_and(|due| due <= now)
                        && self.may_take_suspect(session.group)))
        })
    }

    /// Hands out rows that are due, to every session that has room.
    pub(crate) fn take_deliveries(&mut self, now: i64) -> Result<()> {
        if self.sessions.is_empty() {
            return Ok(());
        }
        self.drop_stale_isolation()?;
        let ids: Vec<u64> = self.sessions.keys().copied().collect();
        for id in ids {
            let Some(session) = self.sessions.get(&id) else {
                continue;
            };
            let (group, room) = (session.group, session.room());
            if room == 0 {
                continue;
            }
            let Some(known) = self.state.groups.get(&group) else {
                continue;
            };
            let is_due = |at: Option<i64>| at.is_some_and(|at| at <= now);
            let (suspect, due) = (is_due(known.next_suspect), is_due(known.next_due));
            if suspect {
                self.take_suspect(id, group, now)?;
            }
            if self.isolating.is_some() {
                continue;
            }
            if due {
                self.give_up_unhandled(group, now)?;
                self.take_due(id, group, now)?;
            }
            if self.sessions.get(&id).is_some_and(|s| s.look_for_unhandled) {
                self.take_unhandled(id, group, now)?;
            }
            if due {
                let next = next_due(&self.conn, group)?;
                self.state.group_mut(group)?.next_due = next;
            }
        }
        Ok(())
    }

    /// Ends an isolation whose event is no longer there to be isolated: another process took it, or
    /// nobody here consumes its group.
    pub(crate) fn drop_stale_isolation(&mut self) -> Result<()> {
        let Some((group, seq)) = self.isolating else {
            return Ok(());
        };
        if self.state.held.contains_key(&(group, seq)) {
            return Ok(());
        }
        let attended = self.sessions.values().any(|session| session.group == group);
        if !attended || self.suspect("AND seq = ?2", group, to_sql(seq))?.is_none() {
            self.isolating = None;
        }
        Ok(())
    }

    fn take_due(&mut self, session: u64, group: i64, now: i64) -> Result<()> {
        let room = self
            .sessions
            .get(&session)
            .map_or(0, Session::room)
            .min(BATCH);
        let ready = self.ready(
            "SELECT seq, type, attempt, failures FROM deliveries
             WHERE group_id = ?1 AND state = 0 AND suspect = 0 AND due <= ?2
             ORDER BY due, seq LIMIT ?3",
            group,
            now,
            room,
        )?;
        let mut deliveries = Vec::with_capacity(ready.len());
        for row in ready {
            if self
                .sessions
                .get(&session)
                .is_none_or(|s| s.room_in_bytes() == 0)
            {
                break;
            }
            if self.stands_behind(group, row.seq)? {
                continue;
            }
            if self.session_handles(session, row.type_id)? {
                deliveries.push(self.lease_row(session, group, &row, now, false, false)?);
            } else {
                self.set_unhandled(session, group, row.seq, now)?;
            }
        }
        self.post(session, deliveries);
        Ok(())
    }

    /// Looks through what no process had a handler for: this one may have one now.
    fn take_unhandled(&mut self, session: u64, group: i64, now: i64) -> Result<()> {
        let room = self.sessions.get(&session).map_or(0, Session::room);
        let ready = self.ready(
            "SELECT seq, type, attempt, failures FROM deliveries
             WHERE group_id = ?1 AND state = 3 AND due > ?2 ORDER BY due, seq LIMIT ?3",
            group,
            now,
            10 * BATCH,
        )?;
        let mut complete = ready.len() < 10 * BATCH;
        let mut deliveries = Vec::new();
        for row in ready {
            if !self.session_handles(session, row.type_id)? || self.stands_behind(group, row.seq)? {
                continue;
            }
            let full = self
                .sessions
                .get(&session)
                .is_none_or(|s| s.room_in_bytes() == 0);
            if deliveries.len() >= room || full {
                complete = false;
                break;
            }
            deliveries.push(self.lease_row(session, group, &row, now, false, false)?);
        }
        if let Some(session) = self.sessions.get_mut(&session) {
            session.look_for_unhandled = !complete;
        }
        self.post(session, deliveries);
        Ok(())
    }

    /// Dead-letters what nobody had a handler for in the time allowed.
    fn give_up_unhandled(&mut self, group: i64, now: i64) -> Result<()> {
        let ready = self.ready(
            "SELECT seq, type, attempt, failures FROM deliveries
             WHERE group_id = ?1 AND state = 3 AND due <= ?2 ORDER BY due, seq LIMIT ?3",
            group,
            now,
            BATCH,
        )?;
        for row in ready {
            let mut failures = read_failures(row.failures.as_deref())?;
            let error = "no process has a handler for this event";
            failures.push(Failure::new(
                row.attempt,
                self.clock.now(),
                FailureKind::NoHandler,
                error,
            ));
            if let Some(record) = record_at(&self.conn, row.seq, &mut self.state.type_names)? {
                tracing::error!(
                    target: "everbus::dispatch",
                    event_id = %record.event.id(),
                    event_type = record.event.event_type(),
                    group = %self.state.group_mut(group)?.name,
                    attempt = row.attempt,
                    dead_lettered = true,
                    error,
                    "an event is dead-lettered"
                );
            }
            let died_at = self.clock.now();
            self.write_dead_letter(group, row.seq, row.type_id, row.attempt, &failures, died_at)?;
            self.remove_row(group, row.seq)?;
        }
        Ok(())
    }

    fn ready(&self, sql: &str, group: i64, now: i64, limit: usize) -> Result<Vec<Ready>> {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        self.conn
            .prepare_cached(sql)
            .and_then(|mut s| {
                s.query_map((group, now, limit), |row| {
                    Ok(Ready {
                        seq: seq_from(row.get(0)?),
                        type_id: row.get(1)?,
                        attempt: row.get(2)?,
                        failures: row.get(3)?,
                    })
                })?
                .collect()
            })
            .map_err(|e| from_sqlite("reading the waiting deliveries", e))
    }

    fn session_handles(&mut self, session: u64, type_id: i64) -> Result<bool> {
        let name = self.state.type_names.get(&self.conn, type_id)?;
        Ok(self
            .sessions
            .get_mut(&session)
            .is_some_and(|s| s.handles(type_id, &name)))
    }

    /// In an ordered group, an event waits while an earlier one of its key is there or any of its key
    /// is in flight. Retrying a dead letter can put one before others that were free to go.
    fn stands_behind(&mut self, group: i64, seq: u64) -> Result<bool> {
        if !self.state.group_mut(group)?.ordered {
            return Ok(false);
        }
        self.conn
            .prepare_cached(
                "UPDATE deliveries SET state = 2, suspect = 0 WHERE group_id = ?1 AND seq = ?2
                   AND EXISTS (SELECT 1 FROM deliveries other WHERE other.group_id = ?1
                     AND other.key = deliveries.key AND other.seq <> ?2
                     AND (other.seq < ?2 OR other.state = 1))",
            )
            .and_then(|mut s| s.execute((group, to_sql(seq))))
            .map(|moved| moved > 0)
            .map_err(|e| from_sqlite("ordering by key", e))
    }

    /// Another consumer of the group in this process may have a handler for what one has not.
    pub(crate) fn offer_unhandled(&mut self, group: i64, not_to: u64) {
        for (id, session) in &mut self.sessions {
            session.look_for_unhandled |= session.group == group && *id != not_to;
        }
    }

    fn set_unhandled(&mut self, session: u64, group: i64, seq: u64, now: i64) -> Result<()> {
        let patience = self
            .sessions
            .get(&session)
            .map(|s| s.no_handler_after)
            .unwrap_or_default();
        let due = micros(self.clock.now().plus(patience));
        self.offer_unhandled(group, session);
        self.conn
            .prepare_cached(
                "UPDATE deliveries SET state = ?3, due = ?4, suspect = 0, updated_at = ?5
                 WHERE group_id = ?1 AND seq = ?2",
            )
            .and_then(|mut s| s.execute(params![group, to_sql(seq), UNHANDLED, due, now]))
            .map(drop)
            .map_err(|e| from_sqlite("setting an event aside", e))
    }

    /// Leases a row: the attempt is counted here, before anything runs.
    fn lease_row(
        &mut self,
        session: u64,
        group: i64,
        row: &Ready,
        now: i64,
        suspect: bool,
        alone: bool,
    ) -> Result<Delivery> {
        let lease = self
            .sessions
            .get(&session)
            .map(|s| s.lease)
            .unwrap_or_default();
        let (token, attempt) = (new_token(), row.attempt + 1);
        let until = micros(self.clock.now().plus(lease));
        self.conn
            .prepare_cached(
                "UPDATE deliveries SET state = 1, attempt = ?3, owner = ?4, token = ?5, until = ?6,
                   alone = ?7, suspect = 0, updated_at = ?8
                 WHERE group_id = ?1 AND seq = ?2",
            )
            .and_then(|mut s| {
                s.execute(params![
                    group,
                    to_sql(row.seq),
                    attempt,
                    self.state.owner,
                    token,
                    until,
                    alone,
                    now
                ])
            })
            .map_err(|e| from_sqlite("claiming", e))?;
        let record =
            record_at(&self.conn, row.seq, &mut self.state.type_names)?.ok_or_else(|| {
                Error::new(
                    Code::Corrupt,
                    format!("event {} is owed but not in the log", row.seq),
                )
            })?;
        let bytes = size(&record);
        let held = Held {
            session,
            token,
            until,
            suspect,
            bytes,
        };
        self.state.held.insert((group, row.seq), held);
        if let Some(session) = self.sessions.get_mut(&session) {
            session.took(1, bytes);
        }
        Ok(Delivery {
            record,
            attempt,
            failures: read_failures(row.failures.as_deref())?,
            lease: Lease {
                position: row.seq,
                slot: delivery_slot(group),
                token: token as u64,
                handle: None,
            },
        })
    }

    fn post(&mut self, session: u64, deliveries: Vec<Delivery>) {
        if !deliveries.is_empty() {
            let lease = self
                .sessions
                .get(&session)
                .map(|s| s.lease)
                .unwrap_or_default();
            let until = micros(self.clock.now().plus(lease));
            self.outgoing.push((session, until, deliveries));
        }
    }

    fn may_take_suspect(&self, group: i64) -> bool {
        let running = self
            .state
            .held
            .iter()
            .any(|((g, _), held)| *g == group && held.suspect);
        !running && (self.isolating.is_none() || self.state.in_flight() == 0)
    }

    /// Hands out one event that was in flight at a crash. One at a time, so that the guilty one can
    /// be told from the innocent; after several crashes only while nothing else is in flight.
    fn take_suspect(&mut self, session: u64, group: i64, now: i64) -> Result<()> {
        if !self.may_take_suspect(group) {
            return Ok(());
        }
        let next = match self.isolating {
            Some((chosen, _)) if chosen != group => return Ok(()),
            Some((_, seq)) => {
                let row = self.suspect("AND seq = ?2", group, to_sql(seq))?;
                if row.is_none() {
                    // It went another way; nothing needs to be kept apart any more.
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
            return self.look_for_suspects(group);
        }
        if !self.session_handles(session, row.type_id)? {
            self.isolating = None;
            self.set_unhandled(session, group, row.seq, now)?;
            return self.look_for_suspects(group);
        }
        let delivery = self.lease_row(session, group, &row, now, true, alone)?;
        self.post(session, vec![delivery]);
        self.look_for_suspects(group)
    }

    fn look_for_suspects(&mut self, group: i64) -> Result<()> {
        let next = next_suspect(&self.conn, group)?;
        self.state.group_mut(group)?.next_suspect = next;
        Ok(())
    }

    /// Remembers that a suspect of a group is due at a time.
    pub(crate) fn note_suspect(&mut self, group: i64, due: i64) {
        if let Some(group) = self.state.groups.get_mut(&group) {
            group.next_suspect = Some(group.next_suspect.map_or(due, |known| known.min(due)));
        }
    }

    fn suspect(&self, which: &str, group: i64, value: i64) -> Result<Option<(Ready, i64)>> {
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

    /// Moves the next unfinished event of an inherited claim into a row of its own.
    fn separate_inherited(&mut self, group: i64, now: i64) -> Result<()> {
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
        if progress.is_complete(hi) {
            self.conn
                .prepare_cached("DELETE FROM claims WHERE id = ?1")
                .and_then(|mut s| s.execute([id]))
                .map_err(doing)?;
        } else {
            let done = progress.bitmap(lo, hi);
            self.conn
                .prepare_cached("UPDATE claims SET done = ?2 WHERE id = ?1")
                .and_then(|mut s| s.execute(params![id, done]))
                .map_err(doing)?;
        }
        Ok(())
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
        let Some(record) = record_at(&self.conn, seq, &mut self.state.type_names)? else {
            return Ok(());
        };
        let type_id = self
            .state
            .intern_type(&self.conn, record.event.type_arc())?;
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
