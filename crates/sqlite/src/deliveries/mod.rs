//! Deliveries: the consumers of this process and their leases.
//!
//! | file | part of the work |
//! |---|---|
//! | `consumers.rs` | the consumers, and the deliveries that they get after the commit |
//! | `leases.rs` | claims, leased rows, the owner lock |
//! | `cursor.rs` | how a group's cursor moves over the log |
//! | `claims.rs` | handing out ranges of the log as claims |
//! | `deliver.rs` | handing out single rows: retries, released events, events without a handler |
//! | `suspects.rs` | events that were in flight at a crash, one at a time |
//! | `reserve.rs` | how much of a claim a consumer may begin |
//! | `expire.rs` | leases that expire, leases of deliveries that were not fetched |
//! | `recover.rs` | consumers that attach and leave, owners that died |
//! | `restore.rs` | leases after a rollback |
//!
//! Acks, retries, releases and dead-lettering are in `settle.rs` beside this folder, the role of that name in
//! every engine.

pub(crate) mod claims;
pub(crate) mod consumers;
pub(crate) mod cursor;
pub(crate) mod deliver;
pub(crate) mod expire;
pub(crate) mod leases;
pub(crate) mod recover;
pub(crate) mod reserve;
pub(crate) mod restore;
pub(crate) mod suspects;

use std::time::{Duration, Instant};

use everbus_core::Result;

use crate::deliveries::consumers::Consumers;
use crate::deliveries::cursor::has_unwritten_cursors;
use crate::deliveries::leases::{Leases, Lost};
use crate::rows::{LeaseParts as _, Seq as _};
use crate::tx::Tx;

/// How often the writer checks whether an owner has died.
const OWNER_CHECK: Duration = Duration::from_millis(200);
/// A moved cursor is stored after at most this time.
const CURSOR_DELAY: Duration = Duration::from_millis(500);

/// The consumers of this process and their leases.
pub(crate) struct Deliveries {
    pub(crate) consumers: Consumers,
    pub(crate) leases: Leases,
}

impl Deliveries {
    /// Whether the writer must run a transaction although no command waits.
    pub(crate) fn has_work(&mut self, tx: &mut Tx) -> bool {
        if self.consumers.sessions.is_empty() {
            return false;
        }
        let now = tx.now();
        if self.leases.owners_checked.elapsed() >= OWNER_CHECK {
            self.leases.owners_checked = Instant::now();
            self.leases.owner_died = self.leases.some_owner_died(tx);
        }
        self.leases_ended(now)
            || self.leases.owner_died
            || self.leases_to_extend(now)
            || self.deliveries_to_take(tx, now)
            || self.reserved_may_begin()
            || self.recent_to_claim(tx)
            || (tx.groups.stored_at.elapsed() >= CURSOR_DELAY && has_unwritten_cursors(tx))
    }

    /// Hands out every event that can be handed out now. First ends expired leases, takes over the deliveries of
    /// dead owners, and extends the leases of deliveries that wait in mailboxes.
    pub(crate) fn pump(&mut self, tx: &mut Tx) -> Result<()> {
        let now = tx.now();
        if self.leases_ended(now) {
            self.end_leases(tx, now)?;
        }
        if self.leases.owner_died {
            self.leases.owner_died = false;
            self.leases.inherit_from_dead(tx)?;
        }
        self.extend_waiting(tx, now)?;
        self.share_places(tx, now);
        self.take_deliveries(tx, now)?;
        self.claim_recent(tx)?;
        // In ordered groups, `claim_recent` has put new events into rows.
        if self.deliveries_to_take(tx, now) {
            self.take_deliveries(tx, now)?;
        }
        self.open_reserved();
        Ok(())
    }

    pub(crate) fn forget(&mut self, lost: Lost) {
        for (id, claim) in lost.claims {
            self.consumers.forget_claim(id, &claim);
        }
        for ((group, seq), held) in lost.held {
            if let Some(session) = self.consumers.sessions.get_mut(&held.session) {
                session.gave(1, held.bytes);
                session
                    .mailbox
                    .recall(|d| d.lease.seq() == seq && d.lease.token() == held.token as u64);
            }
            self.leases.end_isolation((group, seq));
        }
    }
}
