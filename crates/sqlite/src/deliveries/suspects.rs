//! Suspects: the events that were in flight at a crash.
//!
//! A poison event, whose handler kills the process, must be distinguished from events that were only in flight at the
//! same time. So the events of a dead process are handed out one at a time. An event that was in flight at several
//! crashes is handed out only while nothing else is in flight: if the process dies once more, that event caused it.

use everbus_core::{Failure, FailureKind, Result};
use rusqlite::params;

use crate::consumer::Session;
use crate::deliveries::Deliveries;
use crate::deliveries::claims::{StoredClaim, stored_claims};
use crate::deliveries::deliver::{CRASHED, Ready, stands_behind};
use crate::groups::next_suspect;
use crate::rows::{seq_from, stored_at, to_sql, write_failures};
use crate::settle::free_keys;
use crate::sql::Sql as _;
use crate::tx::Tx;

/// After this many crashes an event is handed out only while nothing else is in flight, so that the next
/// crash proves that this event caused it.
const CRASHES_BEFORE_ISOLATION: i64 = 3;

impl Deliveries {
    /// Ends an isolation whose event this process cannot hand out: another process took the event, or this process
    /// has no consumer of its group that takes events.
    pub(crate) fn drop_stale_isolation(&mut self, tx: &mut Tx) -> Result<()> {
        let Some((group, seq)) = self.leases.isolating else {
            return Ok(());
        };
        if self.leases.held.contains_key(&(group, seq)) {
            return Ok(());
        }
        // A paused consumer takes nothing, and the isolation would block every other group until it resumes.
        let takes = |session: &Session| session.group == group && session.prefetch > 0;
        let attended = self.consumers.sessions.values().any(takes);
        if !attended || suspect(tx, "AND seq = ?2", group, to_sql(seq))?.is_none() {
            self.leases.isolating = None;
        }
        Ok(())
    }

    /// Hands out the next suspect of a group, if no other suspect of it is in flight. After several crashes, the
    /// suspect is isolated: it is handed out only while nothing else is in flight.
    pub(crate) fn take_suspect(
        &mut self,
        tx: &mut Tx,
        session: u64,
        group: i64,
        now: i64,
    ) -> Result<()> {
        if !self.leases.may_take_suspect(group) {
            return Ok(());
        }
        let next = match self.leases.isolating {
            Some((chosen, _)) if chosen != group => return Ok(()),
            Some((_, seq)) => {
                let row = suspect(tx, "AND seq = ?2", group, to_sql(seq))?;
                if row.is_none() {
                    // The row no longer exists, so nothing needs to be isolated.
                    self.leases.isolating = None;
                }
                row
            }
            None => {
                separate_inherited(tx, group, now)?;
                suspect(tx, "AND due <= ?2 ORDER BY due, seq LIMIT 1", group, now)?
            }
        };
        let Some((row, crashes)) = next else {
            return look_for_suspects(tx, group);
        };
        let key = (group, row.seq);
        let alone = crashes >= CRASHES_BEFORE_ISOLATION;
        if alone {
            self.leases.isolating = Some(key);
            self.recall_unfetched(tx)?;
            if self.leases.in_flight() > 0 {
                return Ok(());
            }
        }
        if stands_behind(tx, group, row.seq)? {
            self.leases.isolating = None;
            free_keys(tx, group)?;
            return look_for_suspects(tx, group);
        }
        if !self.consumers.session_handles(tx, session, row.type_id)? {
            self.leases.isolating = None;
            self.consumers
                .set_unhandled(tx, session, group, row.seq, now)?;
            return look_for_suspects(tx, group);
        }
        let delivery = self.lease_row(tx, session, group, &row, true, alone)?;
        self.consumers
            .post(tx, session, delivery.into_iter().collect());
        look_for_suspects(tx, group)
    }
}

pub(crate) fn look_for_suspects(tx: &mut Tx, group: i64) -> Result<()> {
    let next = next_suspect(&tx.conn, group)?;
    tx.groups.known(group)?.next_suspect = next;
    Ok(())
}

/// Notes that a suspect of a group is due at this time.
pub(crate) fn note_suspect(tx: &mut Tx, group: i64, due: i64) {
    if let Some(group) = tx.groups.get_mut(&group) {
        group.next_suspect = Some(group.next_suspect.map_or(due, |known| known.min(due)));
    }
}

pub(crate) fn suspect(
    tx: &Tx,
    which: &str,
    group: i64,
    value: i64,
) -> Result<Option<(Ready, i64)>> {
    tx.conn.read_first(
        "reading the suspects",
        &format!(
            "SELECT seq, type, attempt, failures, crashes FROM deliveries
             WHERE group_id = ?1 AND suspect = 1 {which}"
        ),
        (group, value),
        |row| {
            let ready = Ready {
                seq: seq_from(row.get(0)?),
                type_id: row.get(1)?,
                attempt: row.get(2)?,
                failures: row.get(3)?,
            };
            Ok((ready, row.get(4)?))
        },
    )
}

/// Moves the next unfinished event of a claim without an owner into its own row, unless a suspect waits already.
pub(crate) fn separate_inherited(tx: &mut Tx, group: i64, now: i64) -> Result<()> {
    let doing = "recovering";
    let sql = "SELECT EXISTS (SELECT 1 FROM deliveries
               WHERE group_id = ?1 AND suspect = 1 AND due <= ?2)";
    let waiting: bool = tx.conn.one(doing, sql, (group, now))?;
    if waiting {
        return Ok(());
    }
    let which = "group_id = ?1 AND owner = 0 ORDER BY lo LIMIT 1";
    let Some(mut claim) = stored_claims(&tx.conn, doing, which, [group])?.pop() else {
        return Ok(());
    };
    if let Some(seq) = claim.first_open() {
        claim.progress.complete(seq);
        let (attempt, at) = (claim.attempt, claim.crashed_at);
        let crash = Failure::new(attempt, at, FailureKind::Crash, CRASHED);
        insert_suspect(tx, group, seq, attempt, &[crash], now)?;
    }
    write_inherited(tx, &claim)
}

/// Stores the bitmap of a claim without an owner; removes the claim if it is finished.
pub(crate) fn write_inherited(tx: &Tx, claim: &StoredClaim) -> Result<()> {
    let (doing, id, progress) = ("recovering", claim.id, &claim.progress);
    if progress.is_complete(claim.hi) {
        return tx.conn.run(doing, "DELETE FROM claims WHERE id = ?1", [id]);
    }
    let done = progress.bitmap(claim.lo, claim.hi);
    let sql = "UPDATE claims SET done = ?2 WHERE id = ?1";
    tx.conn.run(doing, sql, params![id, done])
}

/// Adds a row for an event whose last attempt ended with a crash.
pub(crate) fn insert_suspect(
    tx: &mut Tx,
    group: i64,
    seq: u64,
    attempt: u32,
    failures: &[Failure],
    now: i64,
) -> Result<()> {
    let Some(stored) = stored_at(&tx.conn, seq, &mut tx.log.type_names)? else {
        return Ok(());
    };
    let key = tx.groups.known(group)?.key_of(&stored.record.event);
    let crashed = |failure: &&Failure| failure.kind == FailureKind::Crash;
    let crashes = to_sql(failures.iter().filter(crashed).count() as u64);
    let sql = "INSERT OR REPLACE INTO deliveries (group_id, seq, state, due, attempt, type, key,
                 suspect, crashes, failures, updated_at)
               VALUES (?1, ?2, 0, ?3, ?4, ?5, ?6, 1, ?7, ?8, ?3)";
    let (seq, type_id, failures) = (to_sql(seq), stored.type_id, write_failures(failures));
    let values = params![group, seq, now, attempt, type_id, key, crashes, failures];
    tx.conn.run("recovering", sql, values)?;
    note_suspect(tx, group, now);
    Ok(())
}
