//! The end of the log, and the numbers of names: what an append needs to know without a query.
//!
//! The file is the truth. After a failed transaction, and when another process has committed, it is loaded
//! again.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use everbus_core::Result;
use rusqlite::Connection;

use crate::deliveries::claims::{Typed, size};
use crate::rows::{MAX_CACHED_TYPES, Seq as _, TypeNames, seq_from};
use crate::sql::Sql as _;

/// At most this many of the newest events, and this many bytes of their payloads, stay in memory.
const RECENT: usize = 16_384;
const RECENT_BYTES: u64 = 4 << 20;

/// The end of the log, the numbers of types and tenants, and what the running transaction appended.
#[derive(Default)]
pub(crate) struct LogEnd {
    pub(crate) head: u64,
    pub(crate) last_received: i64,
    /// Whether the warning about a time far in the future was logged.
    pub(crate) told_ahead: Cell<bool>,
    types: HashMap<Arc<str>, i64>,
    /// The last type that was looked up: events of one type often follow each other.
    last_type: Option<(Arc<str>, i64)>,
    tenants: HashMap<String, i64>,
    pub(crate) type_names: TypeNames,
    /// Events appended in the running transaction.
    pub(crate) appended: Vec<Typed>,
    /// The newest events before those, without a gap up to them, that some consumer of this process has not passed. A
    /// consumer that is a little behind gets its events from here, and nothing is read from the file.
    recent: VecDeque<Typed>,
    recent_bytes: u64,
}

impl LogEnd {
    pub(crate) fn load(conn: &Connection) -> Result<Self> {
        let mut end = Self::default();
        end.refresh(conn)?;
        Ok(end)
    }

    /// Loads what another process may have changed.
    pub(crate) fn refresh(&mut self, conn: &Connection) -> Result<()> {
        let doing = "reading the state of the file";
        let sql = "SELECT seq, CAST(received_at AS INTEGER) FROM log ORDER BY seq DESC LIMIT 1";
        let newest: Option<(i64, i64)> = conn.first(doing, sql, [])?;
        let sql = "SELECT value FROM meta WHERE key = 'head'";
        let pruned: Option<i64> = conn.first(doing, sql, [])?;
        let (seq, received) = newest.unwrap_or((0, i64::MIN));
        self.head = seq_from(seq.max(pruned.unwrap_or(0)));
        self.last_received = received;
        self.types.clear();
        self.last_type = None;
        self.tenants.clear();
        self.appended.clear();
        self.forget_recent();
        Ok(())
    }

    /// The transaction is durable. Events after `position` stay in memory, as far as there is room; `None`
    /// keeps none.
    pub(crate) fn committed(&mut self, position: Option<u64>) {
        let Some(position) = position else {
            self.appended.clear();
            self.forget_recent();
            return;
        };
        for event in self.appended.drain(..) {
            self.recent_bytes += size(&event.1);
            self.recent.push_back(event);
        }
        while let Some((_, oldest)) = self.recent.front()
            && (oldest.seq() <= position
                || self.recent.len() > RECENT
                || self.recent_bytes > RECENT_BYTES)
        {
            self.recent_bytes -= size(oldest);
            self.recent.pop_front();
        }
    }

    /// Events up to this position may have been removed: none of them may be handed out from memory.
    pub(crate) fn removed_up_to(&mut self, position: u64) {
        let oldest = self.recent.front();
        if oldest.is_some_and(|(_, oldest)| oldest.seq() <= position) {
            self.forget_recent();
        }
    }

    fn forget_recent(&mut self) {
        self.recent.clear();
        self.recent_bytes = 0;
    }

    /// Whether every event after this position is in memory, and there is one.
    pub(crate) fn holds_after(&self, position: u64) -> bool {
        let first = self.recent.front().or(self.appended.first());
        first.is_some_and(|(_, first)| first.seq() <= position + 1) && position < self.head
    }

    /// The events in memory after this position, oldest first.
    pub(crate) fn after(&self, position: u64) -> impl Iterator<Item = &Typed> {
        let before = |(_, record): &Typed| record.seq() <= position;
        let recent = self.recent.partition_point(before);
        let appended = self.appended.partition_point(before);
        let recent = self.recent.range(recent..);
        recent.chain(&self.appended[appended..])
    }

    /// The time of receipt of the newest event.
    pub(crate) fn newest_received(conn: &Connection) -> Result<Option<i64>> {
        let sql = "SELECT CAST(received_at AS INTEGER) FROM log ORDER BY seq DESC LIMIT 1";
        conn.first("reading the state of the file", sql, [])
    }

    /// The number of a type. A new type gets one.
    pub(crate) fn intern_type(&mut self, conn: &Connection, name: &Arc<str>) -> Result<i64> {
        if let Some((last, id)) = &self.last_type
            && (Arc::ptr_eq(last, name) || last == name)
        {
            return Ok(*id);
        }
        let id = match self.types.get(name) {
            Some(id) => *id,
            None => {
                let id = intern(conn, "types", name)?;
                if self.types.len() >= MAX_CACHED_TYPES {
                    self.types.clear();
                }
                self.types.insert(name.clone(), id);
                id
            }
        };
        self.last_type = Some((name.clone(), id));
        Ok(id)
    }

    /// The number of a tenant. A new tenant gets one; 0 for none.
    pub(crate) fn intern_tenant(&mut self, conn: &Connection, name: Option<&str>) -> Result<i64> {
        let Some(name) = name else { return Ok(0) };
        if let Some(id) = self.tenants.get(name) {
            return Ok(*id);
        }
        let id = intern(conn, "tenants", name)?;
        if self.tenants.len() >= MAX_CACHED_TYPES {
            self.tenants.clear();
        }
        self.tenants.insert(name.to_owned(), id);
        Ok(id)
    }

    /// Forgets cached names whose numbers were rolled back.
    pub(crate) fn forget_names(&mut self) {
        self.types.clear();
        self.last_type = None;
        self.tenants.clear();
        self.type_names = TypeNames::default();
    }
}

fn intern(conn: &Connection, table: &str, name: &str) -> Result<i64> {
    let doing = "interning a name";
    let found: Option<i64> = conn.first(
        doing,
        &format!("SELECT id FROM {table} WHERE name = ?1"),
        [name],
    )?;
    match found {
        Some(id) => Ok(id),
        None => conn.add(
            doing,
            &format!("INSERT INTO {table} (name) VALUES (?1)"),
            [name],
        ),
    }
}

#[cfg(test)]
mod tests {
    use everbus_core::{Event, Position, Recorded, Timestamp};

    use super::*;

    /// Appends `count` events with payloads of `bytes` bytes and commits; consumers have passed `passed`.
    fn commit(end: &mut LogEnd, count: u64, bytes: usize, passed: Option<u64>) {
        append(end, count, bytes);
        end.committed(passed);
    }

    fn append(end: &mut LogEnd, count: u64, bytes: usize) {
        for _ in 0..count {
            end.head += 1;
            let event = Event::builder("a.b").json(&"x".repeat(bytes)).build();
            let position = Position::seq(end.head);
            let record = Recorded::new(event.unwrap(), position, Timestamp::from_micros(0));
            end.appended.push((1, Arc::new(record)));
        }
    }

    fn after(end: &LogEnd, position: u64) -> Vec<u64> {
        end.after(position)
            .map(|(_, record)| record.seq())
            .collect()
    }

    #[test]
    fn a_reader_a_little_behind_finds_its_events_in_memory() {
        let mut end = LogEnd::default();
        commit(&mut end, 3, 1, Some(1));
        append(&mut end, 2, 1);
        assert!(
            !end.holds_after(0),
            "the first event was passed and is gone"
        );
        assert_eq!(after(&end, 1), [2, 3, 4, 5]);
        assert_eq!(after(&end, 3), [4, 5]);
        assert!(end.holds_after(1) && end.holds_after(4));
        assert!(
            !end.holds_after(5),
            "there is nothing after the newest event"
        );
    }

    #[test]
    fn memory_is_bounded_by_events_and_bytes() {
        let mut end = LogEnd::default();
        commit(&mut end, RECENT as u64 + 10, 1, Some(0));
        assert!(!end.holds_after(9) && end.holds_after(10));
        let large = usize::try_from(RECENT_BYTES).unwrap() / 2;
        commit(&mut end, 3, large, Some(0));
        let head = end.head;
        assert!(!end.holds_after(head - 2) && end.holds_after(head - 1));
        commit(&mut end, 1, 1, None);
        assert!(!end.holds_after(head), "without consumers nothing is kept");
    }

    #[test]
    fn removed_events_are_not_handed_out_from_memory() {
        let mut end = LogEnd::default();
        commit(&mut end, 5, 1, Some(0));
        end.removed_up_to(0);
        assert!(end.holds_after(0));
        end.removed_up_to(2);
        assert!((0..5).all(|position| !end.holds_after(position)));
    }
}
