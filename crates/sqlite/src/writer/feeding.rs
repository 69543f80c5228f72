//! Part of the writer: catching up. Asks the feeder thread to read events for groups that are behind, and
//! hands out the events that it read.

use std::time::{Duration, Instant};

use everbus_core::Result;

use super::Writer;
use crate::errors::is_fatal;
use crate::feeder::{Fed, Feed};
use crate::rows::Seq as _;

/// After a failed read the next request to the feeder waits this long.
const FEED_PAUSE: Duration = Duration::from_secs(1);

impl Writer {
    /// Asks the feeder to read for sessions that have room and are behind.
    pub(super) fn feed(&mut self) {
        if self.isolating.is_some() {
            return;
        }
        let head = self.state.head;
        for (id, session) in &mut self.sessions {
            let Some(group) = self.state.groups.get(&session.group) else {
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
            session.feeding = self.feeder.ask(feed);
        }
    }

    pub(super) fn take_feed(&mut self, fed: &Fed) -> Result<()> {
        let Some(session) = self.sessions.get_mut(&fed.session) else {
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
        let Some(group) = self.state.groups.get(&group_id) else {
            return Ok(());
        };
        // If the group has moved or its patterns have changed since the request, the events are read again.
        if group.cursor != fed.after || group.patterns != fed.patterns || self.isolating.is_some() {
            return Ok(());
        }
        let (mut records, mut searched) = (records, fed.searched);
        if group.dropped_to > fed.after {
            // Leaves out events that were dropped since the read.
            let mut kept = Vec::with_capacity(records.len());
            for (type_id, record) in records {
                if !self.was_dropped(group_id, record.seq())? {
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
        self.hand_out(fed.session, searched, records)?;
        for damaged in fed.damaged.iter().filter(|d| d.seq <= searched) {
            if !self.was_dropped(group_id, damaged.seq)? {
                self.bury_damaged(group_id, damaged, 0, Vec::new())?;
            }
        }
        Ok(())
    }
}
