//! Part of the writer: memory after a rollback.
//!
//! SQLite rolls the file back; memory must follow. The state that is in the file is loaded again. This module
//! keeps the rest until the commit: the consumers, the deliveries in their mailboxes, and the consumer of
//! each lease.

use std::sync::Arc;

use everbus_core::{Delivery, Result};
use rusqlite::{OptionalExtension, params};

use super::Writer;
use crate::errors::from_sqlite;
use crate::mailbox::{Mailbox, Recalled};
use crate::session::Session;
use crate::state::{Claim, Held, State};

/// What the running transaction removed from memory.
#[derive(Default)]
pub(crate) struct Undo {
    claims: Vec<(i64, Claim)>,
    held: Vec<((i64, u64), Held)>,
    sessions: Vec<(u64, Session)>,
    attached: Vec<u64>,
    recalled: Vec<(Arc<Mailbox>, Recalled)>,
}

impl Writer {
    /// Forgets a claim that is finished or given up.
    pub(crate) fn drop_claim(&mut self, id: i64) {
        if let Some(claim) = self.state.claims.remove(&id) {
            self.undo.claims.push((id, claim));
        }
    }

    /// Forgets a single delivery that is finished or given up.
    pub(crate) fn drop_held(&mut self, key: (i64, u64)) -> Option<Held> {
        let held = self.state.held.remove(&key)?;
        self.undo.held.push((key, held));
        Some(held)
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

    /// Takes back deliveries that a consumer has not fetched, also those that this transaction handed out and
    /// that are not in the mailbox yet.
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

    /// The transaction is durable: nothing needs to be restored.
    pub(super) fn keep_changes(&mut self) {
        self.undo = Undo::default();
    }

    /// The transaction was rolled back: loads the state from the file.
    pub(super) fn undo_changes(&mut self) -> Result<()> {
        self.outgoing.clear();
        self.touched.clear();
        self.noted.clear();
        self.must_reload = true;
        let owner = self.owner_in_file()?;
        // Everything that can fail comes first, so that a second try is possible.
        let (state, leases) = (State::load(&self.conn, owner)?, self.leases_in_file(owner)?);
        let mut old = std::mem::replace(&mut self.state, state);
        let undo = std::mem::take(&mut self.undo);
        for id in undo.attached {
            self.sessions.remove(&id);
        }
        self.sessions.extend(undo.sessions);
        self.sessions
            .values()
            .for_each(|session| session.mailbox.cancel_opening());
        for (mailbox, deliveries) in undo.recalled.into_iter().rev() {
            mailbox.put_back(deliveries);
        }
        // Backwards: what was there first is what the file has.
        old.claims.extend(undo.claims.into_iter().rev());
        old.held.extend(undo.held.into_iter().rev());
        // A reading that was under way may have been lost; asking twice is harmless.
        self.sessions
            .values_mut()
            .for_each(|session| session.feeding = false);
        self.restore_leases(old, &leases);
        self.isolating = None;
        self.must_reload = false;
        Ok(())
    }

    /// Our number, if the file knows it: the transaction that registered us may be the one that was
    /// rolled back.
    fn owner_in_file(&mut self) -> Result<i64> {
        let Some(lock) = &self.owner_lock else {
            return Ok(0);
        };
        let known: Option<i64> = self
            .conn
            .prepare_cached("SELECT id FROM owners WHERE id = ?1 AND lock = ?2")
            .and_then(|mut s| {
                s.query_row(params![self.state.owner, lock.name()], |r| r.get(0))
                    .optional()
            })
            .map_err(|e| from_sqlite("looking for our own entry", e))?;
        if known.is_none() {
            self.owner_lock = None;
        }
        Ok(known.unwrap_or(0))
    }
}
