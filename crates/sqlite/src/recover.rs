//! Part of the writer: consumers that attach and leave, owners (processes) that died, and what happens to
//! their deliveries.

use std::collections::HashMap;

use everbus_core::{Code, Delivery, Error, Failure, FailureKind, Progress, Result, Timestamp};
use rusqlite::params;

use crate::claims::{delivery_slot, new_token};
use crate::deliver::CRASHED;
use crate::errors::from_sqlite;
use crate::owner::{OwnerLock, bury, is_dead};
use crate::rows::{LeaseParts as _, Seq as _, seq_from};
use crate::session::{NewSession, Session};
use crate::state::{Claim, WAITING, micros};
use crate::writer::Writer;

impl Writer {
    /// Starts serving a consumer.
    pub(crate) fn attach(&mut self, new: &NewSession) -> Result<()> {
        let group = self.state.group_id(&new.group).ok_or_else(|| {
            Error::new(
                Code::GroupNotFound,
                format!("there is no group {}", new.group),
            )
            .hint("declare it by subscribing, or list the groups with `everbus groups`")
        })?;
        self.become_owner()?;
        self.add_session(new.id, Session::new(new, group));
        self.inherit_from_dead()?;
        // The previous consumer may have left while an event with some key was in flight.
        self.free_keys(group)
    }

    /// Takes the owner lock and an owner number, once.
    pub(crate) fn become_owner(&mut self) -> Result<()> {
        if self.owner_lock.is_some() {
            return Ok(());
        }
        let lock = OwnerLock::take(&self.path)?;
        self.state.owner = self
            .conn
            .prepare_cached("INSERT INTO owners (lock, pid, started_at) VALUES (?1, ?2, ?3)")
            .and_then(|mut s| {
                s.insert(params![
                    lock.name(),
                    std::process::id(),
                    micros(self.clock.now())
                ])
            })
            .map_err(|e| from_sqlite("registering as a consumer", e))?;
        self.owner_lock = Some(lock);
        Ok(())
    }

    /// Stops serving a consumer. Deliveries that it has not fetched go back without an attempt.
    pub(crate) fn detach(&mut self, id: u64) -> Result<()> {
        let Some(group) = self.sessions.get(&id).map(|session| session.group) else {
            return Ok(());
        };
        let unfetched = self.recall(id, |_| true);
        self.drop_session(id);
        self.give_back(group, &unfetched)
    }

    /// Takes back every delivery that was not fetched yet, so that less is in flight.
    pub(crate) fn recall_unfetched(&mut self) -> Result<()> {
        let ids: Vec<u64> = self.sessions.keys().copied().collect();
        ids.into_iter()
            .try_for_each(|id| self.take_back_unfetched(id))
    }

    /// Changes how many deliveries a consumer may hold. At zero it is paused, and deliveries that it has not
    /// fetched go back.
    pub(crate) fn set_prefetch(&mut self, id: u64, prefetch: usize) -> Result<()> {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.prefetch = prefetch;
            session.look_for_unhandled = true;
        }
        if prefetch == 0 {
            self.take_back_unfetched(id)?;
        }
        Ok(())
    }

    /// Takes back what a consumer has not fetched yet.
    fn take_back_unfetched(&mut self, id: u64) -> Result<()> {
        let Some(group) = self.sessions.get(&id).map(|session| session.group) else {
            return Ok(());
        };
        let unfetched = self.recall(id, |_| true);
        let leases = unfetched.iter().map(|d| self.state.bytes_of(&d.lease));
        let bytes = leases.sum();
        if let Some(session) = self.sessions.get_mut(&id) {
            session.gave(unfetched.len(), bytes);
        }
        self.give_back(group, &unfetched)
    }

    /// Puts back deliveries that no handler has seen, as if they had not been handed out.
    pub(crate) fn give_back(&mut self, group: i64, unseen: &[Delivery]) -> Result<()> {
        let now = micros(self.clock.now());
        for delivery in unseen {
            let seq = delivery.record.seq();
            if delivery.lease.slot() == delivery_slot(group) {
                if let Some(held) = self.drop_held((group, seq)) {
                    self.release_row(group, seq, held.suspect, now)?;
                }
                continue;
            }
            let id = (delivery.lease.slot() >> 1) as i64;
            let Some(claim) = self.state.claims.get_mut(&id) else {
                continue;
            };
            if claim.progress.complete(seq) {
                self.touched.push(id);
                let event = (
                    self.state
                        .intern_type(&self.conn, delivery.record.event.type_arc())?,
                    delivery.record.clone(),
                );
                self.park(group, &event, WAITING, now)?;
            }
        }
        Ok(())
    }

    /// Whether the lock of some other owner is free.
    pub(crate) fn some_owner_died(&self) -> bool {
        self.state
            .other_owners
            .iter()
            .any(|(_, lock)| is_dead(&self.path, lock))
    }

    /// Takes over what dead owners had in flight.
    pub(crate) fn inherit_from_dead(&mut self) -> Result<()> {
        let dead: Vec<(i64, String)> = self
            .state
            .other_owners
            .iter()
            .filter(|(_, lock)| is_dead(&self.path, lock))
            .cloned()
            .collect();
        for (owner, lock) in &dead {
            tracing::info!(target: "everbus::recovery", owner, "taking over from a process that died");
            self.inherit(*owner)?;
            self.state.other_owners.retain(|(id, _)| id != owner);
            bury(&self.path, lock);
        }
        if dead.is_empty() {
            Ok(())
        } else {
            self.after_crashes()
        }
    }

    /// Loads the groups again after this process inherited deliveries.
    pub(crate) fn after_crashes(&mut self) -> Result<()> {
        self.reread_groups()?;
        let ids: Vec<i64> = self.state.groups.keys().copied().collect();
        ids.into_iter().try_for_each(|id| self.free_keys(id))
    }

    /// Takes over the deliveries that one owner had in flight, and removes the owner. Its claims lose their
    /// owner and are drained one event at a time. An event that was alone in flight is marked as such.
    fn inherit(&mut self, owner: i64) -> Result<()> {
        let now = micros(self.clock.now());
        self.remove_ephemeral(owner)?;
        self.give_back_reserved("owner = ?1 AND ?2 = ?2", (owner, now))?;
        let claimed = self.claimed_by(owner)?;
        let leased: i64 = self
            .conn
            .prepare_cached("SELECT count(*) FROM deliveries WHERE state = 1 AND owner = ?1")
            .and_then(|mut s| s.query_row([owner], |r| r.get(0)))
            .map_err(|e| from_sqlite("recovering", e))?;
        let open: u64 = claimed
            .iter()
            .map(|(c, _)| c.progress.unfinished_count(c.hi))
            .sum();
        let alone = open + seq_from(leased) == 1;
        self.crash_rows("owner = ?5 AND ?6 = ?6", (owner, now), CRASHED, alone)?;
        if alone
            && let Some((claim, attempt)) = claimed.first()
            && let Some((seq, _)) = claim.progress.unfinished(claim.hi).next()
        {
            let at = Timestamp::from_micros(now);
            let mut failure = Failure::new(*attempt, at, FailureKind::Crash, CRASHED);
            failure.alone = true;
            self.insert_suspect(claim.group, seq, *attempt, &[failure], now)?;
            self.conn
                .prepare_cached("DELETE FROM claims WHERE owner = ?1")
                .and_then(|mut s| s.execute([owner]))
                .map_err(|e| from_sqlite("recovering", e))?;
        } else {
            self.crash_claims("owner = ?1 AND ?2 = ?2", (owner, now))?;
        }
        self.strike_owner(owner)
    }

    fn strike_owner(&mut self, owner: i64) -> Result<()> {
        self.conn
            .prepare_cached("DELETE FROM owners WHERE id = ?1")
            .and_then(|mut s| s.execute([owner]))
            .map(drop)
            .map_err(|e| from_sqlite("striking an owner", e))
    }

    fn claimed_by(&self, owner: i64) -> Result<Vec<(Claim, u32)>> {
        let mut claims = self
            .conn
            .prepare_cached(
                "SELECT group_id, lo, hi, token, until, attempt, done FROM claims WHERE owner = ?1",
            )
            .map_err(|e| from_sqlite("recovering", e))?;
        let rows = claims.query_map([owner], |r| {
            let (lo, hi) = (seq_from(r.get(1)?), seq_from(r.get(2)?));
            let done: Option<Vec<u8>> = r.get(6)?;
            let claim = Claim {
                group: r.get(0)?,
                session: 0,
                lo,
                hi,
                token: r.get(3)?,
                until: r.get(4)?,
                extended: HashMap::new(),
                started: hi,
                progress: Progress::from_bitmap(lo, hi, done.as_deref().unwrap_or_default()),
                bytes_each: 0,
                keys: Vec::new(),
            };
            Ok((claim, r.get(5)?))
        });
        rows.and_then(Iterator::collect)
            .map_err(|e| from_sqlite("recovering", e))
    }

    /// Puts matching leased rows back to waiting, and records the crash.
    pub(crate) fn crash_rows(
        &mut self,
        which: &str,
        values: (i64, i64),
        error: &str,
        alone: bool,
    ) -> Result<()> {
        let now = self.clock.now();
        self.conn
            .prepare_cached(&format!(
                "UPDATE deliveries SET state = 0, due = ?1, owner = 0, suspect = 1,
                   crashes = crashes + 1, updated_at = ?1,
                   failures = json_insert(coalesce(failures, '[]'), '$[#]', json_object(
                     'attempt', attempt, 'at', ?2, 'kind', 'crash', 'error', ?3,
                     'alone', json(iif((alone AND ?3 <> '{ABANDONED}') OR ?4, 'true', 'false'))))
                 WHERE state = 1 AND {which}"
            ))
            .and_then(|mut s| {
                s.execute(params![
                    micros(now),
                    now.to_string(),
                    error,
                    alone,
                    values.0,
                    values.1
                ])
            })
            .map(drop)
            .map_err(|e| from_sqlite("recovering", e))
    }

    /// Removes the owner of matching claims. Their old token is no longer valid. Events that were only
    /// reserved go back.
    pub(crate) fn crash_claims(&mut self, which: &str, values: (i64, i64)) -> Result<()> {
        self.give_back_reserved(which, values)?;
        let now = micros(self.clock.now());
        self.conn
            .prepare_cached(&format!(
                "UPDATE claims SET owner = 0, token = ?3, crashed_at = ?4 WHERE {which}"
            ))
            .and_then(|mut s| s.execute(params![values.0, values.1, new_token(), now]))
            .map(drop)
            .map_err(|e| from_sqlite("recovering", e))
    }

    /// Gives up all leases at an orderly end. An event that was fetched but not settled counts as an attempt.
    pub(crate) fn leave(&mut self) -> Result<()> {
        if self.owner_lock.is_none() {
            return Ok(());
        }
        let now = micros(self.clock.now());
        self.remove_ephemeral(self.state.owner)?;
        let ids: Vec<i64> = self.state.claims.keys().copied().collect();
        for id in ids {
            let Some(claim) = self.state.claims.get(&id) else {
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
                self.insert_suspect(group, seq, 1, &[failure], now)?;
            }
            self.conn
                .prepare_cached("DELETE FROM claims WHERE id = ?1 AND token = ?2")
                .and_then(|mut s| s.execute((id, token)))
                .map_err(|e| from_sqlite("leaving", e))?;
        }
        let owner = self.state.owner;
        let keys: Vec<(i64, u64)> = self.state.held.keys().copied().collect();
        for key in keys {
            self.drop_held(key);
        }
        self.crash_rows("owner = ?5 AND ?6 = ?6", (owner, now), ABANDONED, false)?;
        // A claim that memory does not know is inherited, not forgotten.
        self.crash_claims("owner = ?1 AND ?2 = ?2", (owner, now))?;
        self.after_crashes()?;
        self.strike_owner(owner)
    }
}

/// Failure text of an event whose handler did not finish before the shutdown.
const ABANDONED: &str = "the bus was shut down before the handler finished";
