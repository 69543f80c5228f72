//! Finds the events that are over the limits, in short snapshots on a reader.
//!
//! Times never fall as positions rise, so an age limit is a position: events of a type at or below its limit
//! are too old. A run passes over the log once and reads only its first columns. Events that have expired may be
//! anywhere; they come first.

use std::collections::HashMap;

use everbus_core::{Result, Retention, Timestamp};

use super::needed::Owed;
use crate::append::position_before;
use crate::readers::Reader;
use crate::rows::{micros, seq_from, to_sql};
use crate::sql::Sql as _;

/// Rows looked at in one snapshot.
const LOOK: u64 = 10_000;
/// A piece ends at this many events or bytes, so that the time can be checked after it.
const EVENTS: u64 = 64;
pub(crate) const BYTES: u64 = 128 * 1024;
/// A piece spans fewer positions than this: all of them are looked at when it is removed.
const SPAN: u64 = 2048;

/// Events that are removed together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Ranges in which every event may be removed, in order; never empty.
    pub(crate) ranges: Vec<(u64, u64)>,
    pub(crate) events: u64,
    /// With the payload stages.
    pub(crate) bytes: u64,
    /// Whether some events have part of their payload in an object.
    pub(crate) overflow: bool,
}

impl Piece {
    pub(crate) fn span(&self) -> (u64, u64) {
        let (first, last) = (self.ranges.first(), self.ranges.last());
        (
            first.map_or(0, |range| range.0),
            last.map_or(0, |range| range.1),
        )
    }
}

/// The result of one look at the log.
#[derive(Default)]
pub(crate) struct Found {
    pub(crate) pieces: Vec<Piece>,
    /// Events that are over the limits and must stay.
    pub(crate) kept: u64,
}

/// An event of the log.
struct Row {
    seq: u64,
    type_id: i64,
    bytes: u64,
    overflow: bool,
}

/// Which events a run removes, and how far it has looked.
pub(crate) struct Plan {
    /// By type: events up to this position are too old.
    limits: HashMap<i64, u64>,
    /// Events up to this position are over the length limit.
    beyond: u64,
    /// No event after this position is over a limit of age or length.
    upto: u64,
    searched: u64,
    /// Events that have expired, in order, and how many of them were looked at.
    expired: Vec<u64>,
    taken: usize,
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
            dead_before,
        })
    }

    pub(crate) fn is_done(&self) -> bool {
        self.taken >= self.expired.len() && self.searched >= self.upto
    }

    /// Looks a bounded distance further: first at expired events, then along the log.
    pub(crate) fn look(&mut self, reader: &Reader, owed: &Owed) -> Result<Found> {
        let expired = self.expired.get(self.taken).copied();
        let (lo, hi) = match expired {
            Some(first) => {
                let near = self.expired.partition_point(|seq| *seq < first + LOOK);
                self.taken = near;
                (first, self.expired[near - 1])
            }
            None => (self.searched + 1, self.upto),
        };
        let rows = rows(reader, (lo, hi))?;
        if expired.is_none() {
            let full = rows.last().filter(|_| rows.len() as u64 >= LOOK);
            self.searched = full.map_or(self.upto, |last| last.seq);
        }
        // Expired events were looked at first.
        let is_over = |row: &Row| match self.expired.binary_search(&row.seq) {
            Ok(_) => expired.is_some(),
            Err(_) => {
                let limit = self.limits.get(&row.type_id).copied().unwrap_or(0);
                expired.is_none() && row.seq <= limit.max(self.beyond)
            }
        };
        let mut found = Found::default();
        let (Some(first), Some(last)) = (
            rows.iter().find(|row| is_over(row)),
            rows.iter().rfind(|row| is_over(row)),
        ) else {
            return Ok(found);
        };
        let range = (first.seq, last.seq);
        let needed = owed.needed(&reader.conn, range, self.dead_before)?;
        let stages = stage_bytes(reader, range)?;
        let mut joins = false;
        for row in &rows {
            let over = is_over(row);
            if over && !needed.contains(&row.seq) {
                let bytes = row.bytes + stages.get(&row.seq).unwrap_or(&0);
                found.add(row, bytes, joins);
                joins = true;
            } else {
                found.kept += u64::from(over);
                joins = false;
            }
        }
        Ok(found)
    }
}

impl Found {
    /// Adds an event to the last piece if it fits: to its last range, if no event that stays is between them.
    fn add(&mut self, row: &Row, bytes: u64, joins: bool) {
        let fits = |piece: &&mut Piece| {
            let (near, light) = (
                row.seq - piece.span().0 < SPAN,
                piece.bytes.saturating_add(bytes) <= BYTES,
            );
            near && light && piece.events < EVENTS
        };
        let Some(piece) = self.pieces.last_mut().filter(fits) else {
            self.pieces.push(Piece {
                ranges: vec![(row.seq, row.seq)],
                events: 1,
                bytes,
                overflow: row.overflow,
            });
            return;
        };
        match piece.ranges.last_mut().filter(|_| joins) {
            Some((_, hi)) => *hi = row.seq,
            None => piece.ranges.push((row.seq, row.seq)),
        }
        piece.events += 1;
        piece.bytes += bytes;
        piece.overflow |= row.overflow;
    }
}

fn rows(reader: &Reader, (lo, hi): (u64, u64)) -> Result<Vec<Row>> {
    let sql = "SELECT seq, CAST(type AS INTEGER),
                 coalesce(length(payload), 0) + coalesce(length(attrs), 0),
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
            })
        })
}

/// The bytes of the payload stages in a range.
fn stage_bytes(reader: &Reader, (lo, hi): (u64, u64)) -> Result<HashMap<u64, u64>> {
    let sql = "SELECT seq, sum(payload_size_compressed) FROM event_payloads
               WHERE seq BETWEEN ?1 AND ?2 GROUP BY seq";
    let range = (to_sql(lo), to_sql(hi));
    let doing = "looking at payload stages";
    reader.conn.read_all(doing, sql, range, |r| {
        Ok((seq_from(r.get(0)?), seq_from(r.get(1)?)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_has_few_events_that_are_near_each_other() {
        let mut found = Found::default();
        for seq in [1, 2, 2000, 9000, 1_000_000] {
            let (type_id, bytes, overflow) = (1, 10, false);
            let row = Row {
                seq,
                type_id,
                bytes,
                overflow,
            };
            found.add(&row, bytes, seq == 2);
        }
        let ranges: Vec<_> = found.pieces.into_iter().map(|piece| piece.ranges).collect();
        let apart = |seq| vec![(seq, seq)];
        let near = vec![(1, 2), (2000, 2000)];
        assert_eq!(ranges, [near, apart(9000), apart(1_000_000)]);
    }
}
