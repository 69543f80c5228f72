//! Consumers that attach and leave, owners (processes) that died, and what happens to their deliveries.

use everbus_core::{Delivery, Failure, FailureKind, Result, Timestamp, no_group};
use rusqlite::params;

use crate::consumer::{NewSession, Session};
use crate::declare::remove_ephemeral;
use crate::deliveries::Deliveries;
use crate::deliveries::claims::{delivery_slot, new_token, park, stored_claims};
use crate::deliveries::deliver::CRASHED;
use crate::deliveries::leases::Leases;
use crate::deliveries::reserve::give_back_reserved;
use crate::deliveries::suspects::insert_suspect;
use crate::groups::reread_groups;
use crate::owner::{OwnerLock, bury, is_dead};
use crate::rows::{LeaseParts as _, Seq as _, WAITING, micros, seq_from};
use crate::settle::{free_keys, release_row};
use crate::sql::Sql as _;
use crate::tx::Tx;

impl Deliveries {
    /// Starts serving a consumer.
    pub(crate) fn attach(&mut self, tx: &mut Tx, new: &NewSession) -> Result<()> {
        let group = tx
            .groups
            .id_of(&new.group)
            .ok_or_else(|| no_group(&new.group))?;
        self.leases.become_owner(tx)?;
        self.consumers.add_session(new.id, Session::new(new, group));
        self.leases.inherit_from_dead(tx)?;
        // The previous consumer may have left while an event with some key was in flight.
        free_keys(tx, group)
    }

    /// Stops serving a consumer. Deliveries that it has not fetched go back to waiting, without an attempt.
    pub(crate) fn detach(&mut self, tx: &mut Tx, id: u64) -> Result<()> {
        let Some(group) = self.consumers.group_of(id) else {
            return Ok(());
        };
        let unfetched = self.consumers.recall(id, |_| true);
        self.consumers.drop_session(id);
        self.leases.give_back(tx, group, &unfetched)
    }

    /// Takes back every delivery that was not fetched yet, so that less is in flight.
    pub(crate) fn recall_unfetched(&mut self, tx: &mut Tx) -> Result<()> {
        let ids: Vec<u64> = self.consumers.sessions.keys().copied().collect();
        ids.into_iter()
            .try_for_each(|id| self.take_back_unfetched(tx, id))
    }

    /// Changes how many deliveries a consumer may hold. With zero it is paused, and deliveries that it has not
    /// fetched go back to waiting.
    pub(crate) fn set_prefetch(&mut self, tx: &mut Tx, id: u64, prefetch: usize) -> Result<()> {
        if let Some(session) = self.consumers.sessions.get_mut(&id) {
            session.prefetch = prefetch;
            session.look_for_unhandled = true;
        }
        if prefetch == 0 {
            self.take_back_unfetched(tx, id)?;
        }
        Ok(())
    }

    /// Takes back the deliveries that a consumer has not fetched yet.
    fn take_back_unfetched(&mut self, tx: &mut Tx, id: u64) -> Result<()> {
        let Some(group) = self.consumers.group_of(id) else {
            return Ok(());
        };
        let unfetched = self.consumers.recall(id, |_| true);
        let leases = unfetched.iter().map(|d| self.leases.bytes_of(&d.lease));
        let bytes = leases.sum();
        if let Some(session) = self.consumers.sessions.get_mut(&id) {
            session.gave(unfetched.len(), bytes);
        }
        self.leases.give_back(tx, group, &unfetched)
    }
}

impl Leases {
    /// Takes the owner lock and an owner number, unless this process has them already.
    pub(crate) fn become_owner(&mut self, tx: &mut Tx) -> Result<()> {
        if self.owner_lock.is_some() {
            return Ok(());
        }
        let lock = OwnerLock::take(&tx.path)?;
        self.owner = tx.conn.add(
            "registering as a consumer",
            "INSERT INTO owners (lock, pid, started_at) VALUES (?1, ?2, ?3)",
            params![lock.name(), std::process::id(), tx.now()],
        )?;
        self.owner_lock = Some(lock);
        Ok(())
    }

    /// Releases deliveries that no handler has seen, without counting an attempt.
    pub(crate) fn give_back(&mut self, tx: &mut Tx, group: i64, unseen: &[Delivery]) -> Result<()> {
        let now = tx.now();
        for delivery in unseen {
            let seq = delivery.record.seq();
            if delivery.lease.slot() == delivery_slot(group) {
                if let Some(held) = self.drop_held((group, seq)) {
                    release_row(tx, group, seq, held.suspect, now)?;
                }
                continue;
            }
            let id = (delivery.lease.slot() >> 1) as i64;
            let Some(claim) = self.claims.get_mut(&id) else {
                continue;
            };
            if claim.progress.complete(seq) {
                self.touched.push(id);
                let event = (
                    tx.log
                        .intern_type(&tx.conn, delivery.record.event.type_arc())?,
                    delivery.record.clone(),
                );
                park(tx, group, &event, WAITING, now)?;
            }
        }
        Ok(())
    }

    /// Whether another owner has died: its lock is free.
    pub(crate) fn some_owner_died(&self, tx: &Tx) -> bool {
        self.other_owners
            .iter()
            .any(|(_, lock)| is_dead(&tx.path, lock))
    }

    /// Takes over the deliveries that dead owners had in flight.
    pub(crate) fn inherit_from_dead(&mut self, tx: &mut Tx) -> Result<()> {
        let dead: Vec<(i64, String)> = self
            .other_owners
            .iter()
            .filter(|(_, lock)| is_dead(&tx.path, lock))
            .cloned()
            .collect();
        for (owner, lock) in &dead {
            tracing::info!(target: "everbus::recovery", owner, "taking over the deliveries of a process that died");
            self.inherit(tx, *owner)?;
            self.other_owners.retain(|(id, _)| id != owner);
            bury(&tx.path, lock);
        }
        if dead.is_empty() {
            Ok(())
        } else {
            after_crashes(tx)
        }
    }

    /// Takes over the deliveries that a dead owner had in flight, and removes the owner. Its claims have no owner
    /// then, and their events are handed out one at a time. An event that was alone in flight is marked as such.
    fn inherit(&mut self, tx: &mut Tx, owner: i64) -> Result<()> {
        let now = tx.now();
        remove_ephemeral(tx, self, owner)?;
        give_back_reserved(tx, "owner = ?1 AND ?2 = ?2", (owner, now))?;
        let claimed = stored_claims(&tx.conn, "recovering", "owner = ?1", [owner])?;
        let sql = "SELECT count(*) FROM deliveries WHERE state = 1 AND owner = ?1";
        let leased: i64 = tx.conn.one("recovering", sql, [owner])?;
        let open: u64 = claimed
            .iter()
            .map(|c| c.progress.unfinished_count(c.hi))
            .sum();
        let alone = open + seq_from(leased) == 1;
        crash_rows(tx, "owner = ?5 AND ?6 = ?6", (owner, now), CRASHED, alone)?;
        if alone
            && let Some(claim) = claimed.first()
            && let Some(seq) = claim.first_open()
        {
            let at = Timestamp::from_micros(now);
            let mut failure = Failure::new(claim.attempt, at, FailureKind::Crash, CRASHED);
            failure.alone = true;
            insert_suspect(tx, claim.group, seq, claim.attempt, &[failure], now)?;
            tx.conn
                .run("recovering", "DELETE FROM claims WHERE owner = ?1", [owner])?;
        } else {
            crash_claims(tx, "owner = ?1 AND ?2 = ?2", (owner, now))?;
        }
        strike_owner(tx, owner)
    }

    /// Gives up all leases at an orderly end. An event that was fetched but not settled counts as a failed attempt.
    pub(crate) fn leave(&mut self, tx: &mut Tx) -> Result<()> {
        if self.owner_lock.is_none() {
            return Ok(());
        }
        let now = tx.now();
        remove_ephemeral(tx, self, self.owner)?;
        let ids: Vec<i64> = self.claims.keys().copied().collect();
        for id in ids {
            let Some(claim) = self.claims.get(&id) else {
                continue;
            };
            let (group, token) = (claim.group, claim.token);
            let open: Vec<u64> = claim
                .progress
                .unfinished(claim.hi)
                .flat_map(|(a, b)| a..=b)
                .collect();
            self.drop_claim(id);
            for seq in open {
                let at = Timestamp::from_micros(now);
                let failure = Failure::new(1, at, FailureKind::Crash, ABANDONED);
                insert_suspect(tx, group, seq, 1, &[failure], now)?;
            }
            let sql = "DELETE FROM claims WHERE id = ?1 AND token = ?2";
            tx.conn.run("leaving", sql, (id, token))?;
        }
        let owner = self.owner;
        let keys: Vec<(i64, u64)> = self.held.keys().copied().collect();
        for key in keys {
            self.drop_held(key);
        }
        crash_rows(tx, "owner = ?5 AND ?6 = ?6", (owner, now), ABANDONED, false)?;
        // Claims in the file that memory does not know, if there are any, are treated like those of a dead owner.
        crash_claims(tx, "owner = ?1 AND ?2 = ?2", (owner, now))?;
        after_crashes(tx)?;
        strike_owner(tx, owner)
    }
}

/// Loads the groups again after this process took over deliveries, and releases the waiting events of keys that have
/// none in flight.
pub(crate) fn after_crashes(tx: &mut Tx) -> Result<()> {
    reread_groups(tx)?;
    let ids: Vec<i64> = tx.groups.keys().copied().collect();
    ids.into_iter().try_for_each(|id| free_keys(tx, id))
}

fn strike_owner(tx: &mut Tx, owner: i64) -> Result<()> {
    let sql = "DELETE FROM owners WHERE id = ?1";
    tx.conn.run("striking an owner", sql, [owner])
}

/// Puts matching leased rows back to waiting, as suspects, and records a failed attempt.
pub(crate) fn crash_rows(
    tx: &mut Tx,
    which: &str,
    values: (i64, i64),
    error: &str,
    alone: bool,
) -> Result<()> {
    let now = tx.clock.now();
    tx.conn.run(
        "recovering",
        &format!(
            "UPDATE deliveries SET state = 0, due = ?1, owner = 0, suspect = 1,
               crashes = crashes + 1, updated_at = ?1,
               failures = json_insert(coalesce(failures, '[]'), '$[#]', json_object(
                 'attempt', attempt, 'at', ?2, 'kind', 'crash', 'error', ?3,
                 'alone', json(iif((alone AND ?3 <> '{ABANDONED}') OR ?4, 'true', 'false'))))
             WHERE state = 1 AND {which}"
        ),
        params![
            micros(now),
            now.to_string(),
            error,
            alone,
            values.0,
            values.1
        ],
    )
}

/// Removes the owner of matching claims; their old token is no longer valid. Events that were only reserved go back
/// to waiting.
pub(crate) fn crash_claims(tx: &mut Tx, which: &str, values: (i64, i64)) -> Result<()> {
    give_back_reserved(tx, which, values)?;
    let now = tx.now();
    tx.conn.run(
        "recovering",
        &format!("UPDATE claims SET owner = 0, token = ?3, crashed_at = ?4 WHERE {which}"),
        params![values.0, values.1, new_token(), now],
    )
}

/// Failure text of an event whose handler did not finish before the shutdown.
const ABANDONED: &str = "the bus was shut down before the handler finished";
