//! What this process hands out: its consumers and their leases.
//!
//! | file | part of the work |
//! |---|---|
//! | `consumers.rs` | the consumers, and the deliveries on their way to them |
//! | `leases.rs` | claims, leased rows, the owner lock |
//! | `claims.rs` | handing out ranges of the log as claims |
//! | `deliver.rs` | handing out single rows: retries, released events, events without a handler |
//! | `suspects.rs` | events that were in flight at a crash, one at a time |
//! | `reserve.rs` | how much of a claim a consumer may begin |
//! | `settle.rs` | acks, retries, releases, dead-lettering |
//! | `expire.rs` | leases that expire, leases of deliveries that were not fetched |
//! | `recover.rs` | consumers that come and go, owners that died |
//! | `restore.rs` | leases after a rollback |

pub(crate) mod claims;
pub(crate) mod consumers;
pub(crate) mod deliver;
pub(crate) mod expire;
pub(crate) mod leases;
pub(crate) mod recover;
pub(crate) mod reserve;
pub(crate) mod restore;
pub(crate) mod suspects;

use std::time::{Duration, Instant};

use everbus_core::Result;

use crate::dead_letters::bury::bury_damaged;
use crate::deliveries::consumers::Consumers;
use crate::deliveries::leases::{Leases, Lost};
use crate::errors::is_fatal;
use crate::feeder::{Fed, Feed, Feeder};
use crate::groups::has_unwritten_cursors;
use crate::rows::{LeaseParts as _, Seq as _};
use crate::streams::was_dropped;
use crate::tx::Tx;

/// How often the writer looks for owners that died.
const OWNER_CHECK: Duration = Duration::from_millis(200);
/// A moved cursor is stored after at most this time.
const CURSOR_DELAY: Duration = Duration::from_millis(500);
/// After a failed read the next request to the feeder waits this long.
const FEED_PAUSE: Duration = Duration::from_secs(1);

/// The consumers of this process and their leases.
pub(crate) struct Deliveries {
    pub(crate) consumers: Consumers,
    pub(crate) leases: Leases,
}

impl Deliveries {
    /// Asks the feeder to read for sessions that have room and are behind.
    pub(crate) fn feed(&mut self, tx: &Tx, feeder: &Feeder) {
        if self.leases.isolating.is_some() {
            return;
        }
        let head = tx.log.head;
        for (id, session) in &mut self.consumers.sessions {
            let Some(group) = tx.groups.get(&session.group) else {
                continue;
            };
            let pausing = session.feed_after.is_some_and(|at| Instant::now() < at);
            if session.feeding || pausing || session.room() == 0 || group.cursor >= head {
                continue;
            }
            session.feed_after = None;
            let feed = Feed {
                session: *id,
                group: group.name.clone(),
                after: group.cursor,
                upto: head,
                patterns: group.patterns.clone(),
                without_drops_of: (group.dropped_to > group.cursor).then_some(session.group),
                limit: session.room().min(1024),
                bytes: session.room_in_bytes().min(4 << 20),
            };
            session.feeding = feeder.ask(feed);
        }
    }

    pub(crate) fn take_feed(&mut self, tx: &mut Tx, fed: &Fed) -> Result<()> {
        let Some(session) = self.consumers.sessions.get_mut(&fed.session) else {
            return Ok(());
        };
        session.feeding = false;
        let (group_id, room) = (session.group, session.room());
        let records = match &fed.records {
            Ok(records) => records.clone(),
            Err(error) if is_fatal(error) => return Err(error.clone()),
            Err(error) => {
                tracing::error!(target: "everbus::sqlite", %error, "reading ahead failed; trying again");
                session.feed_after = Some(Instant::now() + FEED_PAUSE);
                return Ok(());
            }
        };
        let Some(group) = tx.groups.get(&group_id) else {
            return Ok(());
        };
        // If the group has moved or its patterns have changed since the request, the events are read again.
        if group.cursor != fed.after
            || group.patterns != fed.patterns
            || self.leases.isolating.is_some()
        {
            return Ok(());
        }
        let (mut records, mut searched) = (records, fed.searched);
        if group.dropped_to > fed.after {
            // Leaves out events that were dropped since the read.
            let mut kept = Vec::with_capacity(records.len());
            for (type_id, record) in records {
                if !was_dropped(tx, group_id, record.seq())? {
                    kept.push((type_id, record));
                }
            }
            records = kept;
        }
        // Retries that became due since the request may have taken the room.
        if records.len() > room {
            records.truncate(room);
            let Some((_, last)) = records.last() else {
                return Ok(());
            };
            searched = last.seq();
        }
        self.hand_out(tx, fed.session, searched, records)?;
        for damaged in fed.damaged.iter().filter(|d| d.seq <= searched) {
            if !was_dropped(tx, group_id, damaged.seq)? {
                bury_damaged(tx, group_id, damaged, 0, Vec::new())?;
            }
        }
        Ok(())
    }

    /// Whether there is something to write without a command.
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
            || (tx.groups.stored_at.elapsed() >= CURSOR_DELAY && has_unwritten_cursors(tx))
    }

    /// Hands out every event that can be handed out.
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
        self.claim_appended(tx)?;
        // In ordered groups, events that were just appended wait in rows.
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
