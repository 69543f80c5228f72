//! Finds the events that are over the limits, in short snapshots on a reader.
//!
//! Times never decrease along the log, so an age limit corresponds to a position: events of a type at or below its
//! limit are too old. A run passes over the log once and reads only its first columns. Events that have expired may be
//! anywhere; they come first.

use std::collections::HashMap;

use everbus_core::{Result, Retention, Timestamp};

use super::needed::Owed;
use crate::append::position_before;
use crate::readers::Reader;
use crate::rows::{micros, seq_from, to_sql};
use crate::sql::Sql as _;

/// Rows examined in one snapshot.
const LOOK: u64 = 10_000;

/// An event that was examined.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub(crate) seq: u64,
    type_id: i64,
    /// With its payload stages.
    pub(crate) bytes: u64,
    /// Whether part of its payload may be in an object.
    pub(crate) overflow: bool,
    /// Whether it is over the limits, and no group needs it.
    pub(crate) goes: bool,
}

/// Which events a run removes, and how far it has searched.
pub(crate) struct Plan {
    /// By type: events up to this position are too old.
    limits: HashMap<i64, u64>,
    /// Events up to this position are over the length limit.
    beyond: u64,
    /// No event after this position is over a limit of age or length.
    upto: u64,
    searched: u64,
    /// Events that have expired, in order, and how many of them were examined.
    expired: Vec<u64>,
    taken: usize,
    /// Events of the last search that are over the limits and must stay.
    pub(crate) kept: u64,
    dead_before: Option<i64>,
}

impl Plan {
    /// Turns the limits of age and length into positions, and finds expired events. Dead letters from before
    /// `dead_before` do not keep their events.
    pub(crate) fn begin(
        reader: &Reader,
        retention: &Retention,
        now: Timestamp,
        dead_before: Option<i64>,
    ) -> Result<Self> {
        let (conn, doing) = (&reader.conn, "looking what may go");
        let types: Vec<(i64, String)> = conn.all(doing, "SELECT id, name FROM types", [])?;
        let (mut positions, mut limits) = (HashMap::new(), HashMap::new());
        for (id, name) in types {
            let Some(age) = retention.age_of(&name) else {
                continue;
            };
            let limit = match positions.get(&age) {
                Some(known) => *known,
                None => position_before(conn, now.minus(age))?,
            };
            positions.insert(age, limit);
            limits.insert(id, limit);
        }
        let mut beyond = 0;
        if let Some(keep) = retention.max_len {
            let sql = "SELECT seq FROM log ORDER BY seq DESC LIMIT 1 OFFSET ?1";
            let last: Option<i64> = conn.first(doing, sql, [to_sql(keep)])?;
            beyond = last.map_or(0, seq_from);
        }
        let sql = "SELECT seq FROM expirations WHERE at < ?1 ORDER BY seq";
        let expired = conn.read_all(doing, sql, [micros(now)], |r| Ok(seq_from(r.get(0)?)))?;
        Ok(Self {
            upto: limits.values().copied().fold(beyond, u64::max),
            limits,
            beyond,
            searched: 0,
            expired,
            taken: 0,
            kept: 0,
            dead_before,
        })
    }

    pub(crate) fn is_done(&self) -> bool {
        self.taken >= self.expired.len() && self.searched >= self.upto
    }

    /// Searches the next part, of bounded size: first the expired events, then the log. Returns the events found.
    pub(crate) fn look(mut self, reader: &Reader, owed: &Owed) -> Result<(Self, Vec<Row>)> {
        let expired = self.expired.get(self.taken).copied();
        let (lo, hi) = match expired {
            Some(first) => {
                let near = self.expired.partition_point(|seq| *seq < first + LOOK);
                self.taken = near;
                (first, self.expired[near - 1])
            }
            None => (self.searched + 1, self.upto),
        };
        let mut rows = rows(reader, (lo, hi))?;
        if expired.is_none() {
            let full = rows.last().filter(|_| rows.len() as u64 >= LOOK);
            self.searched = full.map_or(self.upto, |last| last.seq);
        }
        for row in &mut rows {
            // Expired events were examined before.
            row.goes = match self.expired.binary_search(&row.seq) {
                Ok(_) => expired.is_some(),
                Err(_) => {
                    let limit = self.limits.get(&row.type_id).copied().unwrap_or(0);
                    expired.is_none() && row.seq <= limit.max(self.beyond)
                }
            };
        }
        self.kept = 0;
        let Some(last) = rows.iter().rfind(|row| row.goes) else {
            return Ok((self, Vec::new()));
        };
        let needed = owed.needed(&reader.conn, (lo, last.seq), self.dead_before)?;
        for row in rows.iter_mut().filter(|row| needed.contains(&row.seq)) {
            self.kept += u64::from(row.goes);
            row.goes = false;
        }
        Ok((self, rows))
    }
}

fn rows(reader: &Reader, (lo, hi): (u64, u64)) -> Result<Vec<Row>> {
    let sql = "SELECT seq, CAST(type AS INTEGER),
                 coalesce(length(payload), 0) + coalesce(length(attrs), 0) + coalesce((SELECT
                   sum(p.payload_size_compressed) FROM event_payloads p WHERE p.seq = log.seq), 0),
                 attrs IS NOT NULL AND instr(attrs, '\"overflow\"')
               FROM log WHERE seq BETWEEN ?1 AND ?2 ORDER BY seq LIMIT ?3";
    let range = (to_sql(lo), to_sql(hi), to_sql(LOOK));
    reader
        .conn
        .read_all("looking what may go", sql, range, |r| {
            Ok(Row {
                seq: seq_from(r.get(0)?),
                type_id: r.get(1)?,
                bytes: seq_from(r.get(2)?),
                overflow: r.get::<_, i64>(3)? != 0,
                goes: false,
            })
        })
}
