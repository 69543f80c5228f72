//! Part of the writer: handing out single rows: retries, released events, events that had no handler.

use everbus_core::{Code, Delivery, Error, Failure, FailureKind, Lease, Result};
use rusqlite::params;

use crate::claims::{delivery_slot, new_token, size};
use crate::errors::from_sqlite;
use crate::feeder::Damaged;
use crate::reserve::Outgoing;
use crate::rows::{read_failures, seq_from, stored_at, to_sql};
use crate::state::{Held, UNHANDLED, micros, next_due};
use crate::writer::Writer;

/// Failure text of an event whose process died.
pub(crate) const CRASHED: &str = "the process died while the event was in flight";
/// Failure text of an event whose lease expired.
pub(crate) const EXPIRED: &str = "the lease ended before the event was settled";

/// At most this many rows are taken in one transaction.
const BATCH: usize = 1024;

/// A row that may be handed out.
pub(crate) struct Ready {
    pub(crate) seq: u64,
    pub(crate) type_id: i64,
    pub(crate) attempt: u32,
    pub(crate) failures: Option<String>,
}

impl Writer {
    /// Whether some session could take a row now.
    pub(crate) fn deliveries_to_take(&self, now: i64) -> bool {
        if let Some(key) = self.isolating {
            return !self.state.held.contains_key(&key) && self.state.in_flight() == 0;
        }
        self.sessions.iter().any(|(id, session)| {
            let Some(group) = self.state.groups.get(&session.group) else {
                return false;
            };
            session.room() > 0
                && (group.next_due.is_some_and(|due| due <= now)
                    || session.look_for_unhandled
                    || (group.next_suspect.is_some_and(|due| due <= now)
                        && self.may_take_suspect(session.group)))
                && self.places(*id) > 0
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
            let group = session.group;
            if self.room_for_rows(id) == 0 {
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

    fn take_due(&mut self, session: u64, group: i64, now: i64) -> Result<()> {
        let room = self.room_for_rows(session).min(BATCH);
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
                deliveries.extend(self.lease_row(session, group, &row, now, false, false)?);
            } else {
                self.set_unhandled(session, group, row.seq, now)?;
            }
        }
        self.post(session, deliveries);
        Ok(())
    }

    /// Offers this session the events for which no process had a handler: this session may have one now.
    fn take_unhandled(&mut self, session: u64, group: i64, now: i64) -> Result<()> {
        let room = self.room_for_rows(session);
        let types: Vec<i64> = self
            .conn
            .prepare_cached(
                "SELECT DISTINCT type FROM deliveries WHERE group_id = ?1 AND state = 3",
            )
            .and_then(|mut s| s.query_map([group], |r| r.get(0))?.collect())
            .map_err(|e| from_sqlite("reading what has no handler", e))?;
        let mut handled = Vec::new();
        for type_id in types {
            if self.session_handles(session, type_id)? {
                handled.push(type_id.to_string());
            }
        }
        // The inserted values are the engine's numbers, never text from a user.
        let sql = format!(
            "SELECT seq, type, attempt, failures FROM deliveries
             WHERE group_id = ?1 AND state = 3 AND due > ?2 AND type IN ({})
             ORDER BY due, seq LIMIT ?3",
            handled.join(",")
        );
        let ready = self.ready(&sql, group, now, BATCH)?;
        let mut complete = ready.len() < BATCH;
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
            deliveries.extend(self.lease_row(session, group, &row, now, false, false)?);
        }
        if let Some(session) = self.sessions.get_mut(&session) {
            session.look_for_unhandled = !complete;
        }
        self.post(session, deliveries);
        Ok(())
    }

    /// Dead-letters events for which no consumer had a handler within the allowed time.
    fn give_up_unhandled(&mut self, group: i64, now: i64) -> Result<()> {
        let ready = self.ready(
            "SELECT seq, type, attempt, failures FROM deliveries
             WHERE group_id = ?1 AND state = 3 AND due <= ?2 ORDER BY due, seq LIMIT ?3",
            group,
            now,
            BATCH,
        )?;
        for row in ready {
            if let Some(session) = self.handler_of(group, row.type_id)? {
                // A consumer with a handler exists, but is paused or has no room. The event keeps waiting.
                self.set_unhandled(session, group, row.seq, now)?;
                continue;
            }
            let mut failures = read_failures(row.failures.as_deref())?;
            let error = "no process has a handler for this event";
            failures.push(Failure::new(
                row.attempt,
                self.clock.now(),
                FailureKind::NoHandler,
                error,
            ));
            if let Some(stored) = stored_at(&self.conn, row.seq, &mut self.state.type_names)? {
                let record = stored.record;
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

    /// A consumer of the group in this process that has a handler for a type.
    fn handler_of(&mut self, group: i64, type_id: i64) -> Result<Option<u64>> {
        let name = self.state.type_names.get(&self.conn, type_id)?;
        let mut sessions = self.sessions.iter_mut();
        Ok(sessions.find_map(|(id, session)| {
            let handles = session.group == group && session.handles(type_id, &name);
            handles.then_some(*id)
        }))
    }

    pub(crate) fn session_handles(&mut self, session: u64, type_id: i64) -> Result<bool> {
        let name = self.state.type_names.get(&self.conn, type_id)?;
        Ok(self
            .sessions
            .get_mut(&session)
            .is_some_and(|s| s.handles(type_id, &name)))
    }

    /// In an ordered group, an event waits while an earlier event with its key waits, or any event with its
    /// key is in flight. The retry of a dead letter can put an event before others that were free to go.
    pub(crate) fn stands_behind(&mut self, group: i64, seq: u64) -> Result<bool> {
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

    /// Another consumer of the group in this process may have a handler that this consumer lacks.
    pub(crate) fn offer_unhandled(&mut self, group: i64, not_to: u64) {
        for (id, session) in &mut self.sessions {
            session.look_for_unhandled |= session.group == group && *id != not_to;
        }
    }

    pub(crate) fn set_unhandled(
        &mut self,
        session: u64,
        group: i64,
        seq: u64,
        now: i64,
    ) -> Result<()> {
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

    /// Leases a row. The attempt is counted here, before the handler runs. A damaged event is dead-lettered
    /// instead.
    pub(crate) fn lease_row(
        &mut self,
        session: u64,
        group: i64,
        row: &Ready,
        now: i64,
        suspect: bool,
        alone: bool,
    ) -> Result<Option<Delivery>> {
        let stored =
            stored_at(&self.conn, row.seq, &mut self.state.type_names)?.ok_or_else(|| {
                Error::of_file(
                    Code::Corrupt,
                    format!("event {} is owed but not in the log", row.seq),
                )
            })?;
        let record = stored.record;
        if let Some(damage) = stored.damage {
            let damaged = Damaged {
                seq: row.seq,
                type_id: stored.type_id,
                damage,
            };
            let failures = read_failures(row.failures.as_deref())?;
            self.bury_damaged(group, &damaged, row.attempt, failures)?;
            self.remove_row(group, row.seq)?;
            if self.isolating == Some((group, row.seq)) {
                self.isolating = None;
            }
            return Ok(None);
        }
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
        let bytes = size(&record);
        let (was_dead, replayed) = self.earlier_runs(group, row.seq)?;
        let held = Held {
            session,
            token,
            until,
            suspect,
            bytes,
            failed: row.failures.is_some() || was_dead,
        };
        self.state.held.insert((group, row.seq), held);
        if let Some(session) = self.sessions.get_mut(&session) {
            session.took(1, bytes);
        }
        let lease = Lease::new(record.position, [delivery_slot(group), token as u64]);
        let failures = read_failures(row.failures.as_deref())?;
        let delivery = Delivery::new(record, lease).after(attempt, failures);
        Ok(Some(delivery.retried(was_dead || replayed)))
    }

    /// Whether the event was retried from the dead letters, and whether it is replayed.
    fn earlier_runs(&self, group: i64, seq: u64) -> Result<(bool, bool)> {
        let sql = "SELECT EXISTS (SELECT 1 FROM dead_letters
                     WHERE seq = ?1 AND group_id = ?2 AND retried_at IS NOT NULL),
                   EXISTS (SELECT 1 FROM deliveries
                     WHERE group_id = ?2 AND seq = ?1 AND replayed = 1)";
        self.conn
            .prepare_cached(sql)
            .and_then(|mut s| s.query_row((to_sql(seq), group), |r| Ok((r.get(0)?, r.get(1)?))))
            .map_err(|e| from_sqlite("looking for a dead letter", e))
    }

    pub(crate) fn post(&mut self, session: u64, deliveries: Vec<Delivery>) {
        if !deliveries.is_empty() {
            let lease = self
                .sessions
                .get(&session)
                .map(|s| s.lease)
                .unwrap_or_default();
            let until = micros(self.clock.now().plus(lease));
            let open = deliveries.len();
            self.outgoing.push(Outgoing {
                session,
                until,
                deliveries,
                open,
            });
        }
    }
}
