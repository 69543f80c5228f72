//! Part of the writer: which events of a claim may have begun, and which are only reserved.
//!
//! A claim covers more events than its consumer can run at once. Events beyond the consumer's window stay
//! reserved in its mailbox. The file records how far the claim was opened (`started`), and that is durable
//! before the consumer gets the event. The mark moves in the transactions that claim and settle, never in a
//! separate one. After a crash, reserved events go back without an attempt.

use std::time::Instant;

use everbus_core::{Delivery, Lease, Progress, Result};

use crate::errors::from_sqlite;
use crate::rows::{LeaseParts as _, Seq as _, seq_from, to_sql};
use crate::session::Session;
use crate::state::micros;
use crate::writer::Writer;

/// Deliveries for a consumer, to be handed over once the transaction is durable.
pub(crate) struct Outgoing {
    pub(crate) session: u64,
    /// When their leases end.
    pub(crate) until: i64,
    pub(crate) deliveries: Vec<Delivery>,
    /// The first `open` of them may begin; the others are reserved.
    pub(crate) open: usize,
}

impl Outgoing {
    /// Takes out matching deliveries.
    pub(crate) fn recall(&mut self, mut which: impl FnMut(&Delivery) -> bool) -> Vec<Delivery> {
        let (mut place, mut were_open) = (0, 0);
        let open = self.open;
        let back = self.deliveries.extract_if(.., |delivery| {
            let recalled = which(delivery);
            were_open += usize::from(recalled && place < open);
            place += 1;
            recalled
        });
        let back = back.collect();
        self.open -= were_open;
        back
    }
}

impl Writer {
    /// How many deliveries of a consumer are reserved.
    pub(crate) fn reserved(&self, id: u64) -> usize {
        let mailbox = self.sessions.get(&id).map_or(0, |s| s.mailbox.reserved());
        let outgoing = self.outgoing.iter().filter(|o| o.session == id);
        let to_come: usize = outgoing.map(|o| o.deliveries.len() - o.open).sum();
        mailbox + to_come
    }

    /// How many more deliveries of a consumer may begin.
    pub(crate) fn places(&self, id: u64) -> usize {
        let Some(session) = self.sessions.get(&id) else {
            return 0;
        };
        match session.window.size() {
            usize::MAX => usize::MAX,
            size => size.saturating_sub(session.in_flight.saturating_sub(self.reserved(id))),
        }
    }

    /// How many rows a consumer may take: a row that is leased may begin.
    pub(crate) fn room_for_rows(&self, id: u64) -> usize {
        let room = self.sessions.get(&id).map_or(0, Session::room);
        if room == 0 {
            0
        } else {
            room.min(self.places(id))
        }
    }

    /// Reports settled events to the windows, and divides the places of consumers that have rows due. Half of
    /// the places are for reserved events, so that neither kind waits for ever.
    pub(crate) fn share_places(&mut self, now: i64) {
        let (at, step) = (Instant::now(), self.step);
        let mut shared = Vec::new();
        for (id, session) in &mut self.sessions {
            session.tell_window(at, step);
            let group = self.state.groups.get(&session.group);
            let due = group.and_then(|group| match (group.next_due, group.next_suspect) {
                (Some(one), Some(other)) => Some(one.min(other)),
                (one, other) => one.or(other),
            });
            if due.is_some_and(|due| due <= now) {
                shared.push(*id);
            }
        }
        for id in shared {
            let places = self.places(id).min(self.reserved(id).saturating_mul(2));
            let Some(session) = self.sessions.get_mut(&id) else {
                continue;
            };
            if places > 0 {
                let odd = session.reserved_next;
                session.reserved_next = !odd;
                self.open_some(id, (places + usize::from(odd)) / 2);
            }
        }
    }

    /// Whether a reserved event may begin. This is rare outside a transaction that opens it: a claim that
    /// another process took frees its places.
    pub(crate) fn reserved_may_begin(&self) -> bool {
        let mut sessions = self.sessions.keys();
        self.isolating.is_none()
            && sessions.any(|id| self.reserved(*id) > 0 && self.places(*id) > 0)
    }

    /// Opens as many reserved events as there are places.
    pub(crate) fn open_reserved(&mut self) {
        let ids: Vec<u64> = self.sessions.keys().copied().collect();
        for id in ids {
            let reserved = self.reserved(id);
            if reserved > 0 {
                self.open_some(id, self.places(id).min(reserved));
            }
        }
    }

    /// Opens up to `count` reserved events of a consumer, the oldest first.
    fn open_some(&mut self, id: u64, count: usize) {
        // While a suspect runs alone, nothing else may begin.
        let Some(session) = self.sessions.get(&id).filter(|_| self.isolating.is_none()) else {
            return;
        };
        let (claims, touched) = (&mut self.state.claims, &mut self.touched);
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
        for outgoing in self.outgoing.iter_mut().filter(|o| o.session == id) {
            let more = left.min(outgoing.deliveries.len() - outgoing.open);
            let opened = outgoing.deliveries.iter().skip(outgoing.open).take(more);
            opened.for_each(|delivery| may_begin(&delivery.lease));
            outgoing.open += more;
            left -= more;
        }
    }

    /// Puts the reserved events of matching claims back to waiting, without an attempt. The claims keep the
    /// events that may have begun.
    pub(crate) fn give_back_reserved(&mut self, which: &str, values: (i64, i64)) -> Result<()> {
        let doing = |e| from_sqlite("recovering", e);
        type Reserving = (i64, i64, (u64, u64), u64, Option<Vec<u8>>);
        let claims: Vec<Reserving> = self
            .conn
            .prepare_cached(&format!(
                "SELECT id, group_id, lo, hi, started, done FROM claims
                 WHERE started < hi AND {which}"
            ))
            .and_then(|mut s| {
                s.query_map(values, |r| {
                    let range = (seq_from(r.get(2)?), seq_from(r.get(3)?));
                    Ok((r.get(0)?, r.get(1)?, range, seq_from(r.get(4)?), r.get(5)?))
                })?
                .collect()
            })
            .map_err(doing)?;
        let now = micros(self.clock.now());
        for (id, group, (lo, hi), started, done) in claims {
            let progress = Progress::from_bitmap(lo, hi, done.as_deref().unwrap_or_default());
            for (first, last) in progress.unfinished(hi).filter(|(_, last)| *last > started) {
                let first = first.max(started + 1);
                self.conn
                    .prepare_cached(
                        "INSERT OR IGNORE INTO deliveries
                           (group_id, seq, state, due, attempt, type, updated_at)
                         SELECT ?1, seq, 0, ?2, 0, CAST(type AS INTEGER), ?2 FROM log
                         WHERE seq BETWEEN ?3 AND ?4",
                    )
                    .and_then(|mut s| s.execute((group, now, to_sql(first), to_sql(last))))
                    .map_err(doing)?;
            }
            let kept = if progress.is_complete(started) {
                self.conn
                    .prepare_cached("DELETE FROM claims WHERE id = ?1")
                    .and_then(|mut s| s.execute([id]))
            } else {
                self.conn
                    .prepare_cached("UPDATE claims SET hi = started WHERE id = ?1")
                    .and_then(|mut s| s.execute([id]))
            };
            kept.map_err(doing)?;
        }
        Ok(())
    }
}
