//! Reserved events: the events of a claim that may not begin yet.
//!
//! A claim covers more events than its consumer can run at once. Events beyond the consumer's window stay
//! reserved in its mailbox. The file records up to which event the claim may have begun (`started`), and this is
//! durable before the consumer gets the event. The mark moves in the transactions that claim and settle, so it needs
//! no transaction of its own. After a crash, reserved events go back to waiting without an attempt.

use std::time::Instant;

use everbus_core::{Lease, Result};

use crate::deliveries::Deliveries;
use crate::deliveries::claims::stored_claims;
use crate::rows::{LeaseParts as _, Seq as _, to_sql};
use crate::sql::Sql as _;
use crate::tx::Tx;

impl Deliveries {
    /// Reports settled events to the windows. For consumers whose group has due rows, opens reserved events in half
    /// of the free places and leaves the other half to the rows, so that neither kind waits for ever.
    pub(crate) fn share_places(&mut self, tx: &mut Tx, now: i64) {
        let (at, step) = (Instant::now(), self.consumers.step);
        let mut shared = Vec::new();
        for (id, session) in &mut self.consumers.sessions {
            session.tell_window(at, step);
            let group = tx.groups.get(&session.group);
            let due = group.and_then(|group| match (group.next_due, group.next_suspect) {
                (Some(one), Some(other)) => Some(one.min(other)),
                (one, other) => one.or(other),
            });
            if due.is_some_and(|due| due <= now) {
                shared.push(*id);
            }
        }
        for id in shared {
            let places = self
                .consumers
                .places(id)
                .min(self.consumers.reserved(id).saturating_mul(2));
            let Some(session) = self.consumers.sessions.get_mut(&id) else {
                continue;
            };
            if places > 0 {
                let odd = session.reserved_next;
                session.reserved_next = !odd;
                self.open_some(id, (places + usize::from(odd)) / 2);
            }
        }
    }

    /// Whether a reserved event may begin. Usually the transaction that frees a place also opens a reserved event.
    /// This finds the rest: another process took a claim, which freed its places.
    pub(crate) fn reserved_may_begin(&self) -> bool {
        let mut sessions = self.consumers.sessions.keys();
        self.leases.isolating.is_none()
            && sessions.any(|id| self.consumers.reserved(*id) > 0 && self.consumers.places(*id) > 0)
    }

    /// Opens as many reserved events as there are free places.
    pub(crate) fn open_reserved(&mut self) {
        let ids: Vec<u64> = self.consumers.sessions.keys().copied().collect();
        for id in ids {
            let reserved = self.consumers.reserved(id);
            if reserved > 0 {
                self.open_some(id, self.consumers.places(id).min(reserved));
            }
        }
    }

    /// Opens up to `count` reserved events of a consumer, the oldest first.
    fn open_some(&mut self, id: u64, count: usize) {
        // While a suspect runs alone, nothing else may begin.
        let Some(session) = self
            .consumers
            .sessions
            .get(&id)
            .filter(|_| self.leases.isolating.is_none())
        else {
            return;
        };
        let (claims, touched) = (&mut self.leases.claims, &mut self.leases.touched);
        let mut may_begin = |lease: &Lease| {
            let id = (lease.slot() >> 1) as i64;
            if let Some(claim) = claims.get_mut(&id)
                && lease.seq() > claim.started
            {
                claim.started = lease.seq();
                if touched.last() != Some(&id) {
                    touched.push(id);
                }
            }
        };
        let mut left = count - session.mailbox.begin_opening(count, &mut may_begin);
        for outgoing in self
            .consumers
            .outgoing
            .iter_mut()
            .filter(|o| o.session == id)
        {
            let more = left.min(outgoing.deliveries.len() - outgoing.open);
            let opened = outgoing.deliveries.iter().skip(outgoing.open).take(more);
            opened.for_each(|delivery| may_begin(&delivery.lease));
            outgoing.open += more;
            left -= more;
        }
    }
}

/// Puts the reserved events of matching claims back to waiting, without an attempt. The claims keep the
/// events that may have begun.
pub(crate) fn give_back_reserved(tx: &Tx, which: &str, values: (i64, i64)) -> Result<()> {
    let (doing, now) = ("recovering", tx.now());
    let which = format!("started < hi AND {which}");
    for claim in stored_claims(&tx.conn, doing, &which, values)? {
        let (started, id) = (claim.started, claim.id);
        let open = claim.progress.unfinished(claim.hi);
        for (first, last) in open.filter(|(_, last)| *last > started) {
            let first = first.max(started + 1);
            let sql = "INSERT OR IGNORE INTO deliveries
                         (group_id, seq, state, due, attempt, type, updated_at)
                       SELECT ?1, seq, 0, ?2, 0, CAST(type AS INTEGER), ?2 FROM log
                       WHERE seq BETWEEN ?3 AND ?4";
            tx.conn
                .run(doing, sql, (claim.group, now, to_sql(first), to_sql(last)))?;
        }
        let kept = match claim.progress.is_complete(started) {
            true => "DELETE FROM claims WHERE id = ?1",
            false => "UPDATE claims SET hi = started WHERE id = ?1",
        };
        tx.conn.run(doing, kept, [id])?;
    }
    Ok(())
}
