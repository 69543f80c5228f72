//! Settling deliveries (ack, skip, retry, release, dead-letter) and extending leases.

use std::sync::Arc;

use everbus_core::{
    Code, Death, Error, GroupName, Lease, Recorded, Result, Settlement, Timestamp, Verdict,
    dead_letter_notice,
};

use crate::groups::{Group, Row};
use crate::records::{LeaseParts as _, Seq as _};
use crate::state::State;

impl State {
    /// The group of a lease. Fails with `LeaseLost` if the lease is no longer held.
    pub(crate) fn holder(&mut self, lease: &Lease, now: Timestamp) -> Result<&mut Group> {
        let lost = || {
            let what = format!("the lease on event {} had ended", lease.seq());
            Error::new(Code::LeaseLost, what)
                .hint("the event was or will be delivered again; extend leases of long work")
        };
        let group = self.groups.get_mut(&lease.slot()).ok_or_else(lost)?;
        group.end_leases(now);
        if group.held(lease).is_none() {
            return Err(lost());
        }
        Ok(group)
    }

    pub(crate) fn extend(&mut self, lease: &Lease, until: Timestamp, now: Timestamp) -> Result<()> {
        self.holder(lease, now)?.extend(lease.seq(), until);
        Ok(())
    }

    /// Applies one settlement: all of it, or nothing.
    pub(crate) fn settle(&mut self, settlement: Settlement, now: Timestamp) -> Result<()> {
        let Settlement {
            lease,
            verdict,
            follow_ups,
            inbox,
            effect,
            ran,
            ..
        } = settlement;
        let held = self.holder(&lease, now)?.held(&lease);
        let record = held.map(|row| row.record.clone());
        let retried = held.is_some_and(|row| row.retried);
        let acked = verdict == Verdict::Ack;
        if acked && effect.is_some() {
            return Err(no_transaction());
        }
        let record = record.filter(|_| acked && inbox);
        let handled = |record: &Arc<Recorded>| self.inbox.contains(lease.slot(), &record.event);
        // If the inbox knows the event already, it is acked, but its follow-ups are not appended again.
        let again = record.as_ref().is_some_and(handled);
        if !follow_ups.is_empty() && !again {
            self.append(follow_ups, now)?;
        }
        if let Some(record) = record.filter(|_| !again) {
            self.inbox.insert(lease.slot(), &record.event, now);
        }
        let position = lease.seq();
        let group = self.groups.get(&lease.slot()).filter(|_| retried);
        let was_dead = group.is_some_and(|g| self.dead.get(position, &g.name).is_some());
        let group = self.holder(&lease, now)?;
        group.active_at = now;
        match verdict {
            Verdict::Ack => {
                group.end(position, was_dead, ran, now);
            }
            Verdict::Skip { reason } => {
                group.end(position, was_dead, ran, now);
                group.skip(position, &reason);
            }
            Verdict::Retry { after, failure } => {
                if let Some(row) = group.rows.get_mut(&position) {
                    row.failures.push(failure);
                }
                group.put_back(position, now.plus(after), false);
            }
            Verdict::Release { after } => group.put_back(position, now.plus(after), true),
            Verdict::Dead { failure } => {
                let name = group.name.clone();
                if let Some(row) = group.finish(position) {
                    let death = Death::new(row.attempts, row.failures, failure, now);
                    self.bury(name, row.record, death, now);
                }
            }
        }
        self.wake_waiters(position);
        Ok(())
    }

    /// Makes an event a dead letter and appends the notice about it. In an ephemeral group, skips the event instead.
    pub(crate) fn bury(
        &mut self,
        group: GroupName,
        record: Arc<Recorded>,
        death: Death,
        now: Timestamp,
    ) {
        let number = self.names.get(&group);
        let ephemeral = number.and_then(|number| self.groups.get_mut(number));
        if let Some(ephemeral) = ephemeral.filter(|group| group.ephemeral) {
            ephemeral.give_up(record.seq(), death, now);
            return;
        }
        let died_at = death.died_at;
        let letter = self.dead.bury(group, record, death);
        let (last, attempts) = (letter.failures.last(), letter.attempts);
        let notice = dead_letter_notice(&letter.record, &letter.group, attempts, last, died_at);
        if let Some(notice) = notice {
            // An error means that a notice with this id exists with another text. One notice is enough.
            let _ = self.append(vec![notice], now);
        }
    }

    /// Moves rows that had no handler for too long to the dead letters.
    pub(crate) fn bury_orphans(&mut self, group: &GroupName, orphans: Vec<Row>, now: Timestamp) {
        for mut row in orphans {
            let (position, last) = (row.record.seq(), row.failures.pop());
            let death = Death::new(row.attempts, row.failures, last, now);
            self.bury(group.clone(), row.record, death, now);
            self.wake_waiters(position);
        }
    }
}

fn no_transaction() -> Error {
    let what = "the memory engine has no transactions in which an effect could run";
    Error::new(Code::Unsupported, what)
        .hint("open the bus on a file (sqlite:events.db), or make the handler idempotent")
}
