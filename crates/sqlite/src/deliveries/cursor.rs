//! How the cursor of a group moves over the log.
//!
//! [`hand_out`](Deliveries::hand_out) moves the cursor over a part of the log, and hands out the events in it in
//! the same transaction, as claims or as rows. That part is in memory if the group is at most a little behind the
//! newest event; for a group that is further behind, the feeder reads it. A cursor that moved only over events
//! that the group does not want is stored later.
//!
//! No other code moves a cursor over an event that the group gets. A cursor also moves past events that need no
//! delivery: dropped ones (`streams.rs`), events that were removed before an ephemeral group reached them
//! (`declare.rs`), and in a group without subscriptions all events (`store.rs`).

use std::time::{Duration, Instant};

use everbus_core::Result;

use crate::dead_letters::bury::bury_damaged;
use crate::deliveries::Deliveries;
use crate::deliveries::claims::{Typed, park, queue_by_key, size};
use crate::errors::is_fatal;
use crate::feeder::{Fed, Feed, Feeder};
use crate::rows::{Seq as _, UNHANDLED, micros, to_sql};
use crate::sql::Sql as _;
use crate::streams::was_dropped;
use crate::tx::Tx;

/// After a failed read, the next request to the feeder waits this long.
const FEED_PAUSE: Duration = Duration::from_secs(1);

impl Deliveries {
    /// Hands out new events that are in memory, to groups whose cursor has reached the part of the log in memory.
    pub(crate) fn claim_recent(&mut self, tx: &mut Tx) -> Result<()> {
        if self.leases.isolating.is_some() {
            return Ok(());
        }
        let groups = tx.groups.iter();
        let groups: Vec<(i64, u64)> = groups
            .filter(|(_, group)| tx.log.holds_after(group.cursor))
            .map(|(id, group)| (*id, group.cursor))
            .collect();
        for (group_id, cursor) in groups {
            // Of the consumers of a group, the one with the fewest deliveries in flight gets the events.
            let session = self
                .consumers
                .sessions
                .iter()
                .filter(|(_, s)| s.group == group_id && s.room() > 0)
                .min_by_key(|(_, s)| s.in_flight)
                .map(|(id, s)| (*id, s.room(), s.room_in_bytes()));
            let Some((session, room, room_in_bytes)) = session else {
                continue;
            };
            let dropped = dropped_after(tx, group_id, cursor)?;
            let Some(group) = tx.groups.get_mut(&group_id) else {
                continue;
            };
            let mut wanted = Vec::new();
            let (mut searched, mut bytes) = (cursor, 0);
            for (type_id, record) in tx.log.after(cursor) {
                let wants = record.event.is_for(&group.name)
                    && group.wants(*type_id, record.event.event_type());
                if wants && !dropped.contains(&record.seq()) {
                    if wanted.len() == room || bytes > room_in_bytes {
                        break;
                    }
                    bytes += size(record);
                    wanted.push((*type_id, record.clone()));
                }
                searched = record.seq();
            }
            self.hand_out(tx, session, searched, wanted)?;
        }
        Ok(())
    }

    /// Whether a consumer with room can get events that are in memory.
    pub(super) fn recent_to_claim(&self, tx: &Tx) -> bool {
        let mut sessions = self.consumers.sessions.values();
        self.leases.isolating.is_none()
            && sessions.any(|session| {
                let group = tx.groups.get(&session.group);
                group.is_some_and(|group| tx.log.holds_after(group.cursor)) && session.room() > 0
            })
    }

    /// The lowest cursor of the groups with a consumer in this process; `None` if there is no consumer.
    pub(crate) fn passed_by_all(&self, tx: &Tx) -> Option<u64> {
        let sessions = self.consumers.sessions.values();
        let groups = sessions.filter_map(|session| tx.groups.get(&session.group));
        groups.map(|group| group.cursor).min()
    }

    /// Moves the cursor of the session's group to `searched`, and hands out the `wanted` events up to there.
    /// Events that the session has no handler for wait in rows; so do all events of an ordered group.
    pub(crate) fn hand_out(
        &mut self,
        tx: &mut Tx,
        session_id: u64,
        searched: u64,
        mut wanted: Vec<Typed>,
    ) -> Result<()> {
        let Some(session) = self.consumers.sessions.get_mut(&session_id) else {
            return Ok(());
        };
        let group_id = session.group;
        let group = tx.groups.known(group_id)?;
        group.cursor = searched;
        if wanted.is_empty() {
            return Ok(());
        }
        let unhandled: Vec<Typed> = wanted
            .extract_if(.., |(type_id, record)| {
                !session.handles(*type_id, record.event.event_type())
            })
            .collect();
        let handled = wanted;
        let (lease, patience) = (session.lease, session.no_handler_after);
        if !unhandled.is_empty() {
            let due = micros(tx.clock.now().plus(patience));
            for event in &unhandled {
                park(tx, group_id, event, UNHANDLED, due)?;
            }
            self.consumers.offer_unhandled(group_id, session_id);
        }
        if tx.groups.known(group_id)?.ordered {
            return queue_by_key(tx, group_id, &handled);
        }
        let (Some(first), Some(last)) = (handled.first(), handled.last()) else {
            return Ok(());
        };
        let (lo, hi) = (first.1.seq(), last.1.seq());
        // For a few events that are far apart, the bitmap of a claim would be larger than a row for each event.
        let span = hi - lo + 1;
        if span > 64 + 16 * handled.len() as u64 {
            return self.lease_one_by_one(tx, session_id, group_id, handled, lease);
        }
        self.claim_range(tx, session_id, group_id, (lo, hi), handled, lease)
    }

    /// Asks the feeder to read the next events of sessions that have room and whose next event is not in memory.
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
            let in_memory = group.cursor >= head || tx.log.holds_after(group.cursor);
            if session.feeding || pausing || session.room() == 0 || in_memory {
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

    /// Hands out the events that the feeder read for a session, and moves the cursor of its group over them.
    /// Damaged events among them become dead letters.
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
        // If the cursor or the patterns of the group have changed since the request, or an event runs in isolation,
        // the events are read again later.
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
}

/// The events in memory after the cursor that were dropped for the group, so that it skips them. Usually there are
/// none.
fn dropped_after(tx: &Tx, group_id: i64, cursor: u64) -> Result<Vec<u64>> {
    let mut dropped = Vec::new();
    let group = tx.groups.get(&group_id);
    if group.is_some_and(|group| group.dropped_to > group.cursor) {
        for (_, record) in tx.log.after(cursor) {
            if was_dropped(tx, group_id, record.seq())? {
                dropped.push(record.seq());
            }
        }
    }
    Ok(dropped)
}

/// Stores the cursors that have moved.
pub(crate) fn flush_cursors(tx: &mut Tx) -> Result<()> {
    let now = tx.now();
    for (id, group) in tx.groups.iter_mut() {
        if group.cursor != group.stored_cursor {
            let sql = "UPDATE groups SET cursor = ?2, active_at = ?3 WHERE id = ?1";
            tx.conn
                .run("moving a group", sql, (id, to_sql(group.cursor), now))?;
            group.stored_cursor = group.cursor;
        }
    }
    tx.groups.stored_at = Instant::now();
    Ok(())
}

/// Whether a cursor has moved and is not stored yet.
pub(crate) fn has_unwritten_cursors(tx: &Tx) -> bool {
    let mut groups = tx.groups.values();
    groups.any(|g| g.cursor != g.stored_cursor)
}
