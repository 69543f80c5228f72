//! Part of the writer: settling deliveries (ack, retry, release, dead-letter) and extending leases.

use std::collections::HashMap;
use std::time::Duration;

use everbus_core::{Code, Error, Failure, Lease, Result, Settlement, Timestamp, Verdict};
use rusqlite::params;

use crate::errors::from_sqlite;
use crate::failpoint;
use crate::rows::{LeaseParts as _, Seq as _, read_failures, stored_at, to_sql, write_failures};
use crate::state::{WAITING, micros};
use crate::writer::Writer;

/// What a lease refers to.
#[derive(Clone, Copy)]
enum Place {
    Claim(i64),
    Row(i64),
}

impl Writer {
    /// Applies settlements. Each one is refused separately if its lease is lost or its effect fails.
    pub(crate) fn settle(&mut self, settlements: &[Settlement]) -> Result<Vec<Result<()>>> {
        let mut results = Vec::with_capacity(settlements.len());
        for settlement in settlements {
            let result = self.settle_one(settlement);
            let refused = match &result {
                Ok(()) => true,
                // Without a transaction, the other settlements are rolled back too.
                Err(_) if self.conn.is_autocommit() => false,
                Err(e) => is_refusal(e.code()),
            };
            if !refused {
                return result.map(|()| results);
            }
            results.push(result);
        }
        self.write_noted()?;
        failpoint::hit("after-settle");
        Ok(results)
    }

    fn settle_one(&mut self, settlement: &Settlement) -> Result<()> {
        let lease = &settlement.lease;
        let place = self.find(lease)?;
        if settlement.verdict == Verdict::Ack && (settlement.inbox || settlement.effect.is_some()) {
            self.accompany_ack(place, settlement)?;
        } else if !settlement.follow_ups.is_empty() {
            self.append_follow_ups(settlement.follow_ups.clone())?;
        }
        match place {
            Place::Claim(id) => self.settle_claimed(id, lease.seq(), &settlement.verdict)?,
            Place::Row(group) => self.settle_row(group, settlement)?,
        }
        self.watches.touch(lease.seq());
        Ok(())
    }

    /// Does the work that belongs to an ack: the inbox record, the effect, the follow-up events. If the inbox
    /// record exists, all of it was done before.
    fn accompany_ack(&mut self, place: Place, settlement: &Settlement) -> Result<()> {
        let seq = settlement.lease.seq();
        let group = match place {
            Place::Row(group) => group,
            Place::Claim(id) => self.state.claims.get(&id).ok_or_else(|| lost(seq))?.group,
        };
        if let Some(effect) = &settlement.effect {
            Self::check_effect(effect)?;
            let offence = self.offenders.iter().find(|(l, _)| *l == settlement.lease);
            if let Some((_, error)) = offence {
                return Err(error.clone());
            }
            return self.under_savepoint(|writer| {
                if settlement.inbox && !writer.note_handled(group, seq)? {
                    return Ok(());
                }
                let more = writer.run_effect(&settlement.lease, effect)?;
                let mut follow_ups = settlement.follow_ups.clone();
                follow_ups.extend(more);
                writer.append_follow_ups(follow_ups)
            });
        }
        if settlement.follow_ups.is_empty() {
            return self.note_later(place, group, seq);
        }
        if !self.note_handled(group, seq)? {
            return Ok(());
        }
        let appended = self.append_follow_ups(settlement.follow_ups.clone());
        if appended.is_err() {
            self.unnote_handled(group, seq)?;
        }
        appended
    }

    /// A plain ack need not know whether the event was handled before, so these inbox records are written
    /// together.
    fn note_later(&mut self, place: Place, group: i64, seq: u64) -> Result<()> {
        let known = match place {
            Place::Claim(id) => self.state.claims.get(&id).and_then(|c| c.key_of(seq)),
            Place::Row(_) => None,
        };
        match known {
            Some(key) => self.noted.push((group, key)),
            None => {
                self.note_handled(group, seq)?;
            }
        }
        Ok(())
    }

    /// The claim or row of a lease, if this process still holds it.
    fn find(&self, lease: &Lease) -> Result<Place> {
        let seq = lease.seq();
        // An expired lease is lost, even before another consumer took the event.
        let now = micros(self.clock.now());
        if lease.slot() & 1 == 0 {
            let id = (lease.slot() >> 1) as i64;
            match self.state.claims.get(&id) {
                Some(claim)
                    if claim.token as u64 == lease.token()
                        && (claim.lo..=claim.hi).contains(&seq)
                        && !claim.progress.is_done(seq)
                        && claim.until_of(seq) > now =>
                {
                    Ok(Place::Claim(id))
                }
                _ => Err(lost(seq)),
            }
        } else {
            let group = (lease.slot() >> 1) as i64;
            match self.state.held.get(&(group, seq)) {
                Some(held) if held.token as u64 == lease.token() && held.until > now => {
                    Ok(Place::Row(group))
                }
                _ => Err(lost(seq)),
            }
        }
    }

    fn settle_claimed(&mut self, id: i64, seq: u64, verdict: &Verdict) -> Result<()> {
        let Some(claim) = self.state.claims.get_mut(&id) else {
            return Err(lost(seq));
        };
        let (group, session, bytes) = (claim.group, claim.session, claim.bytes_each);
        claim.progress.complete(seq);
        self.touched.push(id);
        self.settled_in(session, bytes);
        match verdict {
            Verdict::Ack => Ok(()),
            Verdict::Skip { reason } => self.write_skip(group, seq, reason),
            Verdict::Retry { after, failure } => {
                let due = self.clock.now().plus(*after);
                self.insert_waiting(group, seq, 1, due, std::slice::from_ref(failure))
            }
            Verdict::Release { after } => {
                let due = self.clock.now().plus(*after);
                self.insert_waiting(group, seq, 0, due, &[])
            }
            Verdict::Dead { failure } => {
                let died_at = failure.as_ref().map_or_else(|| self.clock.now(), |f| f.at);
                let failures: Vec<Failure> = failure.iter().cloned().collect();
                let type_id = self.type_of(seq)?;
                self.write_dead_letter(group, seq, type_id, 1, &failures, died_at)
            }
        }
    }

    fn settle_row(&mut self, group: i64, settlement: &Settlement) -> Result<()> {
        let seq = settlement.lease.seq();
        let Some(held) = self.drop_held((group, seq)) else {
            return Err(lost(seq));
        };
        self.settled_in(held.session, held.bytes);
        if self.isolating == Some((group, seq)) {
            self.isolating = None;
        }
        let doing = |e| from_sqlite("settling", e);
        let now = self.clock.now();
        match &settlement.verdict {
            verdict @ (Verdict::Ack | Verdict::Skip { .. }) => {
                if let Verdict::Skip { reason } = verdict {
                    self.write_skip(group, seq, reason)?;
                }
                if held.failed {
                    self.keep_outcome(group, seq, settlement.ran.as_deref())?;
                }
                self.remove_row(group, seq)
            }
            Verdict::Retry { after, failure } => {
                let (_, mut failures) = self.row(group, seq)?;
                failures.push(failure.clone());
                let due = micros(now.plus(*after));
                self.conn
                    .prepare_cached(
                        "UPDATE deliveries SET state = 0, due = ?3, owner = 0, suspect = 0, alone = 0,
                           failures = ?4, updated_at = ?5
                         WHERE group_id = ?1 AND seq = ?2",
                    )
                    .and_then(|mut s| {
                        s.execute(params![group, to_sql(seq), due, write_failures(&failures), micros(now)])
                    })
                    .map_err(doing)?;
                self.note_due(group, due);
                self.free_keys(group)
            }
            Verdict::Release { after } => {
                let due = micros(now.plus(*after));
                self.release_row(group, seq, held.suspect, due)
            }
            Verdict::Dead { failure } => {
                let died_at = failure.as_ref().map_or(now, |f| f.at);
                let (mut attempt, mut failures) = self.row(group, seq)?;
                if failure.is_none() && !failures.is_empty() {
                    // The event is given up because of earlier failures: this delivery was not an attempt.
                    attempt = attempt.saturating_sub(1);
                }
                failures.extend(failure.iter().cloned());
                let type_id = self.type_of(seq)?;
                self.write_dead_letter(group, seq, type_id, attempt, &failures, died_at)?;
                self.remove_row(group, seq)
            }
        }
    }

    /// Puts a leased row back as if it had not been handed out.
    pub(crate) fn release_row(
        &mut self,
        group: i64,
        seq: u64,
        suspect: bool,
        due: i64,
    ) -> Result<()> {
        self.conn
            .prepare_cached(
                "UPDATE deliveries SET state = 0, due = ?3, attempt = attempt - 1, owner = 0,
                   suspect = ?4, alone = 0, updated_at = ?5
                 WHERE group_id = ?1 AND seq = ?2",
            )
            .and_then(|mut s| {
                s.execute(params![
                    group,
                    to_sql(seq),
                    due,
                    suspect,
                    micros(self.clock.now())
                ])
            })
            .map_err(|e| from_sqlite("giving an event back", e))?;
        if suspect {
            self.note_suspect(group, due);
        } else {
            self.note_due(group, due);
        }
        self.free_keys(group)
    }

    fn settled_in(&mut self, session: u64, bytes: u64) {
        if let Some(session) = self.sessions.get_mut(&session) {
            session.settled(bytes);
        }
    }

    pub(crate) fn row(&self, group: i64, seq: u64) -> Result<(u32, Vec<Failure>)> {
        let (attempt, failures): (u32, Option<String>) = self
            .conn
            .prepare_cached(
                "SELECT attempt, failures FROM deliveries WHERE group_id = ?1 AND seq = ?2",
            )
            .and_then(|mut s| s.query_row((group, to_sql(seq)), |r| Ok((r.get(0)?, r.get(1)?))))
            .map_err(|e| from_sqlite("reading a delivery", e))?;
        Ok((attempt, read_failures(failures.as_deref())?))
    }

    pub(crate) fn type_of(&mut self, seq: u64) -> Result<i64> {
        self.conn
            .prepare_cached("SELECT CAST(type AS INTEGER) FROM log WHERE seq = ?1")
            .and_then(|mut s| s.query_row([to_sql(seq)], |r| r.get(0)))
            .map_err(|e| from_sqlite("reading the log", e))
    }

    /// Removes a finished row. In an ordered group the next event with its key may go.
    pub(crate) fn remove_row(&mut self, group: i64, seq: u64) -> Result<()> {
        let doing = |e| from_sqlite("settling", e);
        let ordered = self.state.groups.get(&group).is_some_and(|g| g.ordered);
        let key: Option<String> = if ordered {
            self.conn
                .prepare_cached("SELECT key FROM deliveries WHERE group_id = ?1 AND seq = ?2")
                .and_then(|mut s| s.query_row((group, to_sql(seq)), |r| r.get(0)))
                .map_err(doing)?
        } else {
            None
        };
        self.conn
            .prepare_cached("DELETE FROM deliveries WHERE group_id = ?1 AND seq = ?2")
            .and_then(|mut s| s.execute((group, to_sql(seq))))
            .map_err(doing)?;
        if let Some(key) = key {
            let freed = self
                .conn
                .prepare_cached(
                    "UPDATE deliveries SET state = 0 WHERE group_id = ?1 AND state = 2 AND seq =
                       (SELECT min(seq) FROM deliveries WHERE group_id = ?1 AND key = ?2)",
                )
                .and_then(|mut s| s.execute(params![group, key]))
                .map_err(doing)?;
            if freed > 0 {
                self.note_due(group, micros(self.clock.now()));
            }
        }
        Ok(())
    }

    /// In an ordered group, releases the first event of every key that has none in flight. Needed when an
    /// event is no longer in flight but not finished.
    pub(crate) fn free_keys(&mut self, group: i64) -> Result<()> {
        if !self.state.groups.get(&group).is_some_and(|g| g.ordered) {
            return Ok(());
        }
        let freed = self
            .conn
            .prepare_cached(
                "UPDATE deliveries AS d SET state = 0 WHERE d.group_id = ?1 AND d.state = 2
                   AND NOT EXISTS (SELECT 1 FROM deliveries other WHERE other.group_id = ?1
                     AND other.key = d.key AND other.seq <> d.seq
                     AND (other.seq < d.seq OR other.state = 1))",
            )
            .and_then(|mut s| s.execute([group]))
            .map_err(|e| from_sqlite("ordering by key", e))?;
        if freed > 0 {
            self.note_due(group, micros(self.clock.now()));
        }
        Ok(())
    }

    /// Inserts a waiting row.
    pub(crate) fn insert_waiting(
        &mut self,
        group: i64,
        seq: u64,
        attempt: u32,
        due: Timestamp,
        failures: &[Failure],
    ) -> Result<()> {
        let type_id = self.type_of(seq)?;
        let key = if self.state.group_mut(group)?.ordered {
            stored_at(&self.conn, seq, &mut self.state.type_names)?.and_then(|s| {
                s.record
                    .event
                    .ordering_key()
                    .map(std::borrow::Cow::into_owned)
            })
        } else {
            None
        };
        self.conn
            .prepare_cached(
                "INSERT OR REPLACE INTO deliveries
                   (group_id, seq, state, due, attempt, type, key, failures, updated_at)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
            )
            .and_then(|mut s| {
                s.execute(params![
                    group,
                    to_sql(seq),
                    WAITING,
                    micros(due),
                    attempt,
                    type_id,
                    key,
                    write_failures(failures),
                    micros(self.clock.now())
                ])
            })
            .map_err(|e| from_sqlite("setting an event aside", e))?;
        self.note_due(group, micros(due));
        Ok(())
    }

    pub(crate) fn write_skip(&mut self, group: i64, seq: u64, reason: &str) -> Result<()> {
        self.conn
            .prepare_cached(
                "INSERT OR REPLACE INTO skips (group_id, seq, reason, at) VALUES (?1, ?2, ?3, ?4)",
            )
            .and_then(|mut s| {
                s.execute(params![
                    group,
                    to_sql(seq),
                    reason,
                    micros(self.clock.now())
                ])
            })
            .map(drop)
            .map_err(|e| from_sqlite("recording a skip", e))
    }

    /// Extends leases.
    pub(crate) fn extend(&mut self, leases: &[Lease], by: Duration) -> Result<Vec<Result<()>>> {
        let until = micros(self.clock.now().plus(by));
        let mut results = Vec::with_capacity(leases.len());
        let mut claims: HashMap<i64, Vec<u64>> = HashMap::new();
        for lease in leases {
            results.push(match self.find(lease) {
                Err(e) => Err(e),
                Ok(Place::Claim(id)) => {
                    claims.entry(id).or_default().push(lease.seq());
                    Ok(())
                }
                Ok(Place::Row(group)) => {
                    self.extend_row(group, lease.seq(), until)?;
                    Ok(())
                }
            });
        }
        for (id, seqs) in claims {
            self.extend_claimed(id, &seqs, until)?;
        }
        Ok(results)
    }

    /// Extends single events of a claim. In the file the claim lasts as long as its longest lease. Memory
    /// knows the lease of each event, and sees first when one expires.
    pub(crate) fn extend_claimed(&mut self, id: i64, seqs: &[u64], until: i64) -> Result<()> {
        let Some(claim) = self.state.claims.get_mut(&id) else {
            return Ok(());
        };
        claim.extended.extend(seqs.iter().map(|seq| (*seq, until)));
        self.conn
            .prepare_cached("UPDATE claims SET until = max(until, ?3) WHERE id = ?1 AND token = ?2")
            .and_then(|mut s| s.execute((id, claim.token, until)))
            .map(drop)
            .map_err(|e| from_sqlite("extending a lease", e))
    }

    pub(crate) fn extend_row(&mut self, group: i64, seq: u64, until: i64) -> Result<()> {
        if let Some(held) = self.state.held.get_mut(&(group, seq)) {
            held.until = until;
            self.conn
                .prepare_cached("UPDATE deliveries SET until = ?3 WHERE group_id = ?1 AND seq = ?2")
                .and_then(|mut s| s.execute((group, to_sql(seq), until)))
                .map_err(|e| from_sqlite("extending a lease", e))?;
        }
        Ok(())
    }
}

/// Whether an error refuses one settlement and leaves the others alone.
fn is_refusal(code: Code) -> bool {
    matches!(
        code,
        Code::LeaseLost
            | Code::IdReused
            | Code::InvalidAttribute
            | Code::EffectFailed
            | Code::Unsupported
    )
}

fn lost(seq: u64) -> Error {
    Error::new(
        Code::LeaseLost,
        format!("the lease on event {seq} has ended or another consumer has it"),
    )
    .hint("the event is delivered again; make handlers idempotent or raise the timeout")
}
