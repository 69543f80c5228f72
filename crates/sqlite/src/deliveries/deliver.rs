//! Handing out single rows: retries, released events, events of ordered groups, events that had no handler.

use everbus_core::{Code, Delivery, Error, Lease, Result};
use rusqlite::params;

use crate::dead_letters::bury::bury_damaged;
use crate::deliveries::Deliveries;
use crate::deliveries::claims::{delivery_slot, new_token, size};
use crate::deliveries::leases::Held;
use crate::feeder::Damaged;
use crate::groups::next_due;
use crate::rows::{micros, read_failures, seq_from, stored_at, to_sql};
use crate::settle::remove_row;
use crate::sql::Sql as _;
use crate::tx::Tx;

/// Failure text of an event whose process died.
pub(crate) const CRASHED: &str = "the process died while the event was in flight";
/// Failure text of an event whose lease expired.
pub(crate) const EXPIRED: &str = "the lease ended before the event was settled";

/// At most this many rows are taken in one transaction.
pub(crate) const BATCH: usize = 1024;

/// A row that may be handed out.
pub(crate) struct Ready {
    pub(crate) seq: u64,
    pub(crate) type_id: i64,
    pub(crate) attempt: u32,
    pub(crate) failures: Option<String>,
}

impl Deliveries {
    /// Whether a row can be handed out now.
    pub(crate) fn deliveries_to_take(&self, tx: &Tx, now: i64) -> bool {
        if let Some(key) = self.leases.isolating {
            return !self.leases.held.contains_key(&key) && self.leases.in_flight() == 0;
        }
        self.consumers.sessions.iter().any(|(id, session)| {
            let Some(group) = tx.groups.get(&session.group) else {
                return false;
            };
            session.room() > 0
                && (group.next_due.is_some_and(|due| due <= now)
                    || session.look_for_unhandled
                    || (group.next_suspect.is_some_and(|due| due <= now)
                        && self.leases.may_take_suspect(session.group)))
                && self.consumers.places(*id) > 0
        })
    }

    /// Hands out rows that are due, to every session that has room.
    pub(crate) fn take_deliveries(&mut self, tx: &mut Tx, now: i64) -> Result<()> {
        if self.consumers.sessions.is_empty() {
            return Ok(());
        }
        self.drop_stale_isolation(tx)?;
        let ids: Vec<u64> = self.consumers.sessions.keys().copied().collect();
        for id in ids {
            let Some(session) = self.consumers.sessions.get(&id) else {
                continue;
            };
            let group = session.group;
            if self.consumers.room_for_rows(id) == 0 {
                continue;
            }
            let Some(known) = tx.groups.get(&group) else {
                continue;
            };
            let is_due = |at: Option<i64>| at.is_some_and(|at| at <= now);
            let (suspect, due) = (is_due(known.next_suspect), is_due(known.next_due));
            if suspect {
                self.take_suspect(tx, id, group, now)?;
            }
            if self.leases.isolating.is_some() {
                continue;
            }
            if due {
                self.consumers.give_up_unhandled(tx, group, now)?;
                self.take_due(tx, id, group, now)?;
            }
            if self
                .consumers
                .sessions
                .get(&id)
                .is_some_and(|s| s.look_for_unhandled)
            {
                self.take_unhandled(tx, id, group, now)?;
            }
            if due {
                let next = next_due(&tx.conn, group)?;
                tx.groups.known(group)?.next_due = next;
            }
        }
        Ok(())
    }

    fn take_due(&mut self, tx: &mut Tx, session: u64, group: i64, now: i64) -> Result<()> {
        let room = self.consumers.room_for_rows(session).min(BATCH);
        let ready = ready(
            tx,
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
                .consumers
                .sessions
                .get(&session)
                .is_none_or(|s| s.room_in_bytes() == 0)
            {
                break;
            }
            if stands_behind(tx, group, row.seq)? {
                continue;
            }
            if self.consumers.session_handles(tx, session, row.type_id)? {
                deliveries.extend(self.lease_row(tx, session, group, &row, false, false)?);
            } else {
                self.consumers
                    .set_unhandled(tx, session, group, row.seq, now)?;
            }
        }
        self.consumers.post(tx, session, deliveries);
        Ok(())
    }

    /// Hands this session events that had no handler before and for which it has one.
    fn take_unhandled(&mut self, tx: &mut Tx, session: u64, group: i64, now: i64) -> Result<()> {
        let room = self.consumers.room_for_rows(session);
        let sql = "SELECT DISTINCT type FROM deliveries WHERE group_id = ?1 AND state = 3";
        let types: Vec<i64> = tx.conn.all("reading what has no handler", sql, [group])?;
        let mut handled = Vec::new();
        for type_id in types {
            if self.consumers.session_handles(tx, session, type_id)? {
                handled.push(type_id.to_string());
            }
        }
        // The values in the statement are numbers of the engine, never text of a user.
        let sql = format!(
            "SELECT seq, type, attempt, failures FROM deliveries
             WHERE group_id = ?1 AND state = 3 AND due > ?2 AND type IN ({})
             ORDER BY due, seq LIMIT ?3",
            handled.join(",")
        );
        let ready = ready(tx, &sql, group, now, BATCH)?;
        let mut complete = ready.len() < BATCH;
        let mut deliveries = Vec::new();
        for row in ready {
            if !self.consumers.session_handles(tx, session, row.type_id)?
                || stands_behind(tx, group, row.seq)?
            {
                continue;
            }
            let full = self
                .consumers
                .sessions
                .get(&session)
                .is_none_or(|s| s.room_in_bytes() == 0);
            if deliveries.len() >= room || full {
                complete = false;
                break;
            }
            deliveries.extend(self.lease_row(tx, session, group, &row, false, false)?);
        }
        if let Some(session) = self.consumers.sessions.get_mut(&session) {
            session.look_for_unhandled = !complete;
        }
        self.consumers.post(tx, session, deliveries);
        Ok(())
    }

    /// Leases a row and counts the attempt, before the handler runs. A damaged event becomes a dead letter instead,
    /// and the result is `None`.
    pub(crate) fn lease_row(
        &mut self,
        tx: &mut Tx,
        session: u64,
        group: i64,
        row: &Ready,
        suspect: bool,
        alone: bool,
    ) -> Result<Option<Delivery>> {
        let stored = stored_at(&tx.conn, row.seq, &mut tx.log.type_names)?.ok_or_else(|| {
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
            bury_damaged(tx, group, &damaged, row.attempt, failures)?;
            remove_row(tx, group, row.seq)?;
            self.leases.end_isolation((group, row.seq));
            return Ok(None);
        }
        let lease = self
            .consumers
            .sessions
            .get(&session)
            .map(|s| s.lease)
            .unwrap_or_default();
        let (token, attempt) = (new_token(), row.attempt + 1);
        let until = micros(tx.clock.now().plus(lease));
        let sql = "UPDATE deliveries SET state = 1, attempt = ?3, owner = ?4, token = ?5,
                     until = ?6, alone = ?7, suspect = 0, updated_at = ?8
                   WHERE group_id = ?1 AND seq = ?2";
        let (seq, owner) = (to_sql(row.seq), self.leases.owner);
        let values = params![group, seq, attempt, owner, token, until, alone, tx.now()];
        tx.conn.run("claiming", sql, values)?;
        let bytes = size(&record);
        let (was_dead, replayed) = earlier_runs(tx, group, row.seq)?;
        let held = Held {
            session,
            token,
            until,
            suspect,
            bytes,
            failed: row.failures.is_some() || was_dead,
        };
        self.leases.held.insert((group, row.seq), held);
        if let Some(session) = self.consumers.sessions.get_mut(&session) {
            session.took(1, bytes);
        }
        let lease = Lease::new(record.position, [delivery_slot(group), token as u64]);
        let failures = read_failures(row.failures.as_deref())?;
        let delivery = Delivery::new(record, lease).after(attempt, failures);
        Ok(Some(delivery.retried(was_dead || replayed)))
    }
}

pub(crate) fn ready(tx: &Tx, sql: &str, group: i64, now: i64, limit: usize) -> Result<Vec<Ready>> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    tx.conn.read_all(
        "reading the waiting deliveries",
        sql,
        (group, now, limit),
        |row| {
            Ok(Ready {
                seq: seq_from(row.get(0)?),
                type_id: row.get(1)?,
                attempt: row.get(2)?,
                failures: row.get(3)?,
            })
        },
    )
}

/// Whether an event of an ordered group must wait: an earlier event with its key is unsettled, or any event with its
/// key is in flight. If so, marks the row as waiting for its key. A row that was ready can come to wait, because the
/// retry of a dead letter adds an earlier event.
pub(crate) fn stands_behind(tx: &mut Tx, group: i64, seq: u64) -> Result<bool> {
    if !tx.groups.known(group)?.ordered {
        return Ok(false);
    }
    let sql = "UPDATE deliveries SET state = 2, suspect = 0 WHERE group_id = ?1 AND seq = ?2
               AND EXISTS (SELECT 1 FROM deliveries other WHERE other.group_id = ?1
                 AND other.key = deliveries.key AND other.seq <> ?2
                 AND (other.seq < ?2 OR other.state = 1))";
    tx.conn
        .change("ordering by key", sql, (group, to_sql(seq)))
        .map(|moved| moved > 0)
}

/// Returns whether the event was retried from the dead letters, and whether it is replayed.
fn earlier_runs(tx: &Tx, group: i64, seq: u64) -> Result<(bool, bool)> {
    let sql = "SELECT EXISTS (SELECT 1 FROM dead_letters
                 WHERE seq = ?1 AND group_id = ?2 AND retried_at IS NOT NULL),
               EXISTS (SELECT 1 FROM deliveries
                 WHERE group_id = ?2 AND seq = ?1 AND replayed = 1)";
    tx.conn
        .one("looking for a dead letter", sql, (to_sql(seq), group))
}
