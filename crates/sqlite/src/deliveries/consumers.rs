//! The consumers of this process, and the deliveries that they get when the transaction is durable.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Code, Death, Delivery, Error, Failure, FailureKind, Result};
use rusqlite::params;

use crate::consumer::Session;
use crate::dead_letters::bury::write_dead_letter;
use crate::deliveries::claims::claim_slot;
use crate::deliveries::deliver::{BATCH, ready};
use crate::deliveries::leases::Claim;
use crate::failpoint;
use crate::ids::IdMap;
use crate::mailbox::{Mailbox, Recalled};
use crate::rows::{LeaseParts as _, Seq as _, UNHANDLED, micros, read_failures, stored_at, to_sql};
use crate::settle::remove_row;
use crate::sql::Sql as _;
use crate::tx::Tx;

/// The consumers by number.
#[derive(Default)]
pub(crate) struct Consumers {
    pub(crate) sessions: IdMap<u64, Session>,
    /// Deliveries to hand over once the transaction is durable.
    pub(crate) outgoing: Vec<Outgoing>,
    /// New lease ends of deliveries that wait in mailboxes. The mailboxes get them once the transaction is
    /// durable: a mailbox must not believe that a lease lasts longer than it does in the file.
    pub(crate) renewals: Vec<Renewal>,
    /// The average duration of a transaction.
    pub(crate) step: Duration,
    undo: Undo,
}

/// The new end of the leases of some deliveries in a mailbox.
pub(crate) struct Renewal {
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) slot: u64,
    /// The event, if only one delivery is meant; `None` means all deliveries of the slot.
    pub(crate) seq: Option<u64>,
    pub(crate) until: i64,
}

/// What the running transaction changed, for a rollback.
#[derive(Default)]
struct Undo {
    sessions: Vec<(u64, Session)>,
    attached: Vec<u64>,
    recalled: Vec<(Arc<Mailbox>, Recalled)>,
}

/// Deliveries for a consumer, to be handed over once the transaction is durable.
pub(crate) struct Outgoing {
    pub(crate) session: u64,
    /// When the leases of these deliveries end.
    pub(crate) until: i64,
    pub(crate) deliveries: Vec<Delivery>,
    /// The first `open` deliveries may begin; the others are reserved.
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

impl Consumers {
    /// The group of a consumer.
    pub(crate) fn group_of(&self, id: u64) -> Option<i64> {
        self.sessions.get(&id).map(|session| session.group)
    }

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

    /// How many rows a consumer may take. A leased row may begin at once, so there must be a place for it.
    pub(crate) fn room_for_rows(&self, id: u64) -> usize {
        let room = self.sessions.get(&id).map_or(0, Session::room);
        if room == 0 {
            0
        } else {
            room.min(self.places(id))
        }
    }

    /// Dead-letters events for which no consumer had a handler within the allowed time.
    pub(crate) fn give_up_unhandled(&mut self, tx: &mut Tx, group: i64, now: i64) -> Result<()> {
        let ready = ready(
            tx,
            "SELECT seq, type, attempt, failures FROM deliveries
             WHERE group_id = ?1 AND state = 3 AND due <= ?2 ORDER BY due, seq LIMIT ?3",
            group,
            now,
            BATCH,
        )?;
        for row in ready {
            if let Some(session) = self.handler_of(tx, group, row.type_id)? {
                // A consumer with a handler exists, but it is paused or has no room. The event waits longer.
                self.set_unhandled(tx, session, group, row.seq, now)?;
                continue;
            }
            let failures = read_failures(row.failures.as_deref())?;
            let error = "no process has a handler for this event";
            if let Some(stored) = stored_at(&tx.conn, row.seq, &mut tx.log.type_names)? {
                let record = stored.record;
                tracing::error!(
                    target: "everbus::dispatch",
                    event_id = %record.event.id(),
                    event_type = record.event.event_type(),
                    group = %tx.groups.known(group)?.name,
                    attempt = row.attempt,
                    dead_lettered = true,
                    error,
                    "an event is dead-lettered"
                );
            }
            let now = tx.clock.now();
            let last = Failure::new(row.attempt, now, FailureKind::NoHandler, error);
            let death = Death::new(row.attempt, failures, Some(last), now);
            write_dead_letter(tx, group, row.seq, row.type_id, death)?;
            remove_row(tx, group, row.seq)?;
        }
        Ok(())
    }

    /// A consumer of the group in this process that has a handler for this type, if there is one.
    fn handler_of(&mut self, tx: &mut Tx, group: i64, type_id: i64) -> Result<Option<u64>> {
        let name = tx.log.type_names.get(&tx.conn, type_id)?;
        let mut sessions = self.sessions.iter_mut();
        Ok(sessions.find_map(|(id, session)| {
            let handles = session.group == group && session.handles(type_id, &name);
            handles.then_some(*id)
        }))
    }

    pub(crate) fn session_handles(
        &mut self,
        tx: &mut Tx,
        session: u64,
        type_id: i64,
    ) -> Result<bool> {
        let name = tx.log.type_names.get(&tx.conn, type_id)?;
        Ok(self
            .sessions
            .get_mut(&session)
            .is_some_and(|s| s.handles(type_id, &name)))
    }

    /// Lets the other consumers of the group in this process look for events without a handler: one of them may
    /// have the handler that the consumer `not_to` lacks.
    pub(crate) fn offer_unhandled(&mut self, group: i64, not_to: u64) {
        for (id, session) in &mut self.sessions {
            session.look_for_unhandled |= session.group == group && *id != not_to;
        }
    }

    pub(crate) fn set_unhandled(
        &mut self,
        tx: &mut Tx,
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
        let due = micros(tx.clock.now().plus(patience));
        self.offer_unhandled(group, session);
        let doing = "setting an event aside";
        let sql = "UPDATE deliveries SET state = ?3, due = ?4, suspect = 0, updated_at = ?5
                   WHERE group_id = ?1 AND seq = ?2";
        tx.conn
            .run(doing, sql, params![group, to_sql(seq), UNHANDLED, due, now])
    }

    /// Hands deliveries to a consumer once the transaction is durable. The first `open` of them may begin.
    pub(crate) fn send(
        &mut self,
        session: u64,
        until: i64,
        deliveries: Vec<Delivery>,
        open: usize,
    ) {
        self.outgoing.push(Outgoing {
            session,
            until,
            deliveries,
            open,
        });
    }

    /// Hands single rows to a consumer once the transaction is durable. All of them may begin.
    pub(crate) fn post(&mut self, tx: &Tx, session: u64, deliveries: Vec<Delivery>) {
        if !deliveries.is_empty() {
            let lease = self.sessions.get(&session).map(|s| s.lease);
            let until = micros(tx.clock.now().plus(lease.unwrap_or_default()));
            let open = deliveries.len();
            self.send(session, until, deliveries, open);
        }
    }

    pub(crate) fn settled_in(&mut self, session: u64, bytes: u64) {
        if let Some(session) = self.sessions.get_mut(&session) {
            session.settled(bytes);
        }
    }

    pub(crate) fn discard(&self, session: u64, which: impl FnMut(&everbus_core::Delivery) -> bool) {
        if let Some(session) = self.sessions.get(&session) {
            session.mailbox.recall(which);
        }
    }

    /// Adds a consumer.
    pub(crate) fn add_session(&mut self, id: u64, session: Session) {
        self.sessions.insert(id, session);
        self.undo.attached.push(id);
    }

    /// Removes a consumer.
    pub(crate) fn drop_session(&mut self, id: u64) {
        if let Some(session) = self.sessions.remove(&id) {
            self.undo.sessions.push((id, session));
        }
    }

    /// Takes back matching deliveries that a consumer has not fetched, including those that this transaction
    /// handed out and that are not in the mailbox yet.
    pub(crate) fn recall(
        &mut self,
        session: u64,
        mut which: impl FnMut(&Delivery) -> bool,
    ) -> Vec<Delivery> {
        let Some(mailbox) = self.sessions.get(&session).map(|s| s.mailbox.clone()) else {
            return Vec::new();
        };
        let recalled = mailbox.recall(&mut which);
        let mut deliveries: Vec<Delivery> = recalled.deliveries().cloned().collect();
        if !recalled.is_empty() {
            self.undo.recalled.push((mailbox, recalled));
        }
        for outgoing in self.outgoing.iter_mut().filter(|o| o.session == session) {
            deliveries.extend(outgoing.recall(&mut which));
        }
        deliveries
    }

    pub(crate) fn hand_over(&mut self) {
        for session in self.sessions.values() {
            session.mailbox.finish_opening();
        }
        for outgoing in self.outgoing.drain(..) {
            if let Some(session) = self.sessions.get(&outgoing.session) {
                let Outgoing { until, open, .. } = outgoing;
                session.mailbox.put(until, outgoing.deliveries, open);
            }
        }
        failpoint::hit("after-hand-over");
    }

    /// Ends the consumers of groups that were removed.
    pub(crate) fn dismiss_orphans(&mut self, tx: &mut Tx) {
        let groups = &tx.groups;
        for (_, session) in self
            .sessions
            .extract_if(|_, s| !groups.contains_key(&s.group))
        {
            let gone = Error::new(Code::GroupNotFound, "the group was removed");
            session
                .mailbox
                .end(gone.hint("subscribe again to create it anew"));
        }
    }

    pub(crate) fn forget_claim(&mut self, id: i64, claim: &Claim) {
        if let Some(session) = self.sessions.get_mut(&claim.session) {
            let open = claim.progress.unfinished_count(claim.hi);
            session.gave(usize::try_from(open).unwrap_or(0), open * claim.bytes_each);
            let slot = claim_slot(id);
            session.mailbox.recall(|d| d.lease.slot() == slot);
        }
    }

    /// Keeps the changes of a durable transaction: forgets how to undo them, and tells the mailboxes the new lease
    /// ends.
    pub(super) fn keep_changes(&mut self) {
        self.undo = Undo::default();
        for Renewal {
            mailbox,
            slot,
            seq,
            until,
        } in self.renewals.drain(..)
        {
            mailbox.renew(until, |d| {
                d.lease.slot() == slot && seq.is_none_or(|seq| d.lease.seq() == seq)
            });
        }
    }

    /// Undoes the changes of a transaction that was rolled back: restores the consumers and their mailboxes.
    pub(super) fn undo_changes(&mut self) {
        let undo = std::mem::take(&mut self.undo);
        self.renewals.clear();
        for id in undo.attached {
            self.sessions.remove(&id);
        }
        self.sessions.extend(undo.sessions);
        for session in self.sessions.values_mut() {
            session.mailbox.cancel_opening();
            // A request to the feeder may have been lost; a second one is harmless.
            session.feeding = false;
        }
        for (mailbox, deliveries) in undo.recalled.into_iter().rev() {
            mailbox.put_back(deliveries);
        }
    }
}
