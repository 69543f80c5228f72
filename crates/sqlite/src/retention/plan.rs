//! Finds the events that are over the limits, in short snapshots on a reader.
//!
//! Times never fall as positions rise, so an age limit is a position: events of a type at or below its limit
//! are too old. A run passes over the log once and reads only its first columns.

use std::collections::HashMap;
use std::time::Duration;

use everbus_core::{Result, Retention, Timestamp};
use rusqlite::{CachedStatement, Row};

use super::needed::Owed;
use crate::append::position_before;
use crate::errors::from_sqlite;
use crate::readers::Reader;
use crate::rows::{micros, seq_from, to_sql};
use crate::sql::Sql as _;

/// Rows looked at in one snapshot.
const LOOK: usize = 10_000;
/// A piece ends at about this weight, so that steps can be sized.
pub(crate) const QUANTUM: u64 = 32;
/// Weights: a page of payload, and a row of another table, compared with a bare event.
const PAGE: u64 = 4096;
const STAGE: u64 = 3;

const COLUMNS: &str =
    "seq, CAST(type AS INTEGER), coalesce(length(payload), 0) + coalesce(length(attrs), 0),
   attrs IS NOT NULL AND instr(attrs, '\"overflow\"')";

/// A range of the log in which every event may be removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) lo: u64,
    pub(crate) hi: u64,
    pub(crate) events: u64,
    /// Cost of removing it, in bare events.
    pub(crate) weight: u64,
    /// Whether some events have part of their payload in an object.
    pub(crate) overflow: bool,
    /// Whether no event that stays lies between the previous piece and this one.
    pub(crate) joins: bool,
}

/// The result of one look at the log.
#[derive(Default)]
pub(crate) struct Found {
    pub(crate) pieces: Vec<Piece>,
    /// Events that are over the limits and must stay.
    pub(crate) kept: u64,
    /// An event that stays came after the last piece.
    apart: bool,
}

impl Found {
    fn add(&mut self, candidate: Candidate, joins: bool) {
        let Candidate {
            seq,
            weight,
            overflow,
        } = candidate;
        let joins = joins && !std::mem::take(&mut self.apart) && !self.pieces.is_empty();
        if let Some(last) = self
            .pieces
            .last_mut()
            .filter(|p| joins && p.weight.saturating_add(weight) <= QUANTUM)
        {
            last.hi = seq;
            last.events += 1;
            last.weight += weight;
            last.overflow |= overflow;
            return;
        }
        self.pieces.push(Piece {
            lo: seq,
            hi: seq,
            events: 1,
            weight,
            overflow,
            joins,
        });
    }
}

#[derive(Clone, Copy)]
struct Candidate {
    seq: u64,
    weight: u64,
    overflow: bool,
}

impl Candidate {
    fn read(row: &Row<'_>) -> Result<(Self, i64)> {
        let doing = |e| from_sqlite("looking what may go", e);
        let bytes = seq_from(row.get(2).map_err(doing)?);
        let candidate = Self {
            seq: seq_from(row.get(0).map_err(doing)?),
            weight: 1 + bytes / PAGE,
            overflow: row.get::<_, i64>(3).map_err(doing)? != 0,
        };
        Ok((candidate, row.get(1).map_err(doing)?))
    }
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
    /// Events that have expired, in order.
    pub(crate) expired: Vec<u64>,
    taken: usize,
    dead_before: Option<i64>,
}

impl Plan {
    /// Reads the types and turns ages into positions.
    pub(crate) fn begin(reader: &Reader, retention: &Retention, now: Timestamp) -> Result<Self> {
        let types: Vec<(i64, String)> =
            reader
                .conn
                .read_all("reading the types", "SELECT id, name FROM types", [], |r| {
                    r.try_into()
                })?;
        let mut positions: HashMap<Duration, u64> = HashMap::new();
        let mut limits = HashMap::new();
        for (id, name) in types {
            let Some(age) = retention.age_of(&name) else {
                continue;
            };
            let limit = match positions.get(&age) {
                Some(known) => *known,
                None => {
                    let limit = position_before(&reader.conn, now.minus(age))?;
                    positions.insert(age, limit);
                    limit
                }
            };
            limits.insert(id, limit);
        }
        let upto = limits.values().copied().max().unwrap_or(0);
        Ok(Self {
            limits,
            beyond: 0,
            upto,
            searched: 0,
            expired: Vec::new(),
            taken: 0,
            dead_before: None,
        })
    }

    /// For a preview: dead letters from before this time do not keep their events.
    pub(crate) fn without_dead(&mut self, before: Option<i64>) {
        self.dead_before = before;
    }

    /// Events at or before this position are over the length limit.
    pub(crate) fn limit_length(&mut self, beyond: u64) {
        self.beyond = beyond;
        self.upto = self.upto.max(beyond);
    }

    pub(crate) fn is_done(&self) -> bool {
        self.taken >= self.expired.len() && self.searched >= self.upto
    }

    /// Looks a bounded distance further: first at expired events, then along the log.
    pub(crate) fn look(&mut self, reader: &Reader, owed: &Owed) -> Result<Found> {
        if self.taken < self.expired.len() {
            self.look_at_expired(reader, owed)
        } else {
            self.look_along(reader, owed)
        }
    }

    fn look_at_expired(&mut self, reader: &Reader, owed: &Owed) -> Result<Found> {
        let doing = |e| from_sqlite("looking what has expired", e);
        let seqs = self.expired.get(self.taken..).unwrap_or_default();
        let Some(first) = seqs.first() else {
            return Ok(Found::default());
        };
        // Few and close together: for a lagging group, all events between them must be checked.
        let near = seqs.partition_point(|seq| seq - first < LOOK as u64);
        let seqs = &seqs[..near.min(LOOK / 10)];
        self.taken += seqs.len();
        let last = seqs.last().unwrap_or(first);
        let needed = owed.needed(&reader.conn, (*first, *last), self.dead_before)?;
        let mut statement = reader
            .conn
            .prepare_cached(&format!("SELECT {COLUMNS} FROM log WHERE seq = ?1"))
            .map_err(doing)?;
        let stages = stage_weights(reader, (*first, *last))?;
        let (mut found, mut before) = (Found::default(), 0);
        for seq in seqs {
            let mut rows = statement.query([to_sql(*seq)]).map_err(doing)?;
            let Some(row) = rows.next().map_err(doing)? else {
                continue;
            };
            if needed.contains(*seq) {
                found.kept += 1;
                continue;
            }
            let (mut candidate, _) = Candidate::read(row)?;
            candidate.weight += stages.get(seq).unwrap_or(&0);
            found.add(candidate, before + 1 == *seq);
            before = *seq;
        }
        Ok(found)
    }

    fn look_along(&mut self, reader: &Reader, owed: &Owed) -> Result<Found> {
        let doing = |e| from_sqlite("looking what is too old", e);
        let mut statement: CachedStatement<'_> = reader
            .conn
            .prepare_cached(&format!(
                "SELECT {COLUMNS} FROM log WHERE seq > ?1 AND seq <= ?2 ORDER BY seq LIMIT ?3"
            ))
            .map_err(doing)?;
        let range = (to_sql(self.searched), to_sql(self.upto), LOOK as i64);
        let mut rows = statement.query(range).map_err(doing)?;
        let mut seen: Vec<(Candidate, bool)> = Vec::with_capacity(LOOK);
        while let Some(row) = rows.next().map_err(doing)? {
            let (candidate, type_id) = Candidate::read(row)?;
            let seq = candidate.seq;
            let limit = self.limits.get(&type_id).copied().unwrap_or(0);
            let expired = self.expired.binary_search(&seq).is_ok();
            // Expired events were handled first, or a group still needs them.
            let over = seq <= limit.max(self.beyond) && !expired;
            seen.push((candidate, over));
        }
        let (Some((first, _)), Some((last, _))) = (seen.first(), seen.last()) else {
            self.searched = self.upto;
            return Ok(Found::default());
        };
        let range = (first.seq, last.seq);
        self.searched = if seen.len() < LOOK {
            self.upto
        } else {
            last.seq
        };
        let mut found = Found::default();
        if !seen.iter().any(|(_, over)| *over) {
            return Ok(found);
        }
        let needed = owed.needed(&reader.conn, range, self.dead_before)?;
        let stages = stage_weights(reader, range)?;
        for (mut candidate, over) in seen {
            candidate.weight += stages.get(&candidate.seq).unwrap_or(&0);
            if over && !needed.contains(candidate.seq) {
                found.add(candidate, true);
            } else {
                found.kept += u64::from(over);
                found.apart = true;
            }
        }
        Ok(found)
    }
}

/// Weights of the payload stages in a range.
fn stage_weights(reader: &Reader, (lo, hi): (u64, u64)) -> Result<HashMap<u64, u64>> {
    let doing = "looking at payload stages";
    let sql = "SELECT seq, payload_size_compressed FROM event_payloads
               WHERE seq BETWEEN ?1 AND ?2";
    let stages: Vec<(i64, i64)> = reader.conn.all(doing, sql, (to_sql(lo), to_sql(hi)))?;
    let mut weights = HashMap::new();
    for (seq, bytes) in stages {
        *weights.entry(seq_from(seq)).or_default() += STAGE + seq_from(bytes) / PAGE;
    }
    Ok(weights)
}

/// Counts from the newest event backwards, a bounded way in each snapshot.
pub(crate) struct Length {
    left: u64,
    before: u64,
    /// The last position over the length limit, once it is known.
    pub(crate) beyond: Option<u64>,
}

impl Length {
    pub(crate) fn new(keep: u64) -> Self {
        Self {
            left: keep,
            before: u64::MAX,
            beyond: None,
        }
    }

    pub(crate) fn go_on(&mut self, reader: &Reader) -> Result<()> {
        let doing = "counting the log";
        let step = self.left.min(LOOK as u64);
        // The last event that stays, or else the first that does not.
        let found: Option<(i64, i64)> = reader.conn.read_first(
            doing,
            "SELECT count(*), min(seq) FROM
             (SELECT seq FROM log WHERE seq < ?1 ORDER BY seq DESC LIMIT ?2)",
            (to_sql(self.before), to_sql(step)),
            |r| Ok((r.get(0)?, r.get::<_, Option<i64>>(1)?.unwrap_or(0))),
        )?;
        let (count, first) = found.unwrap_or_default();
        self.left -= seq_from(count).min(self.left);
        if count > 0 {
            self.before = seq_from(first);
        }
        if self.left == 0 {
            let sql = "SELECT max(seq) FROM log WHERE seq < ?1";
            let first: Option<i64> = reader.conn.one(doing, sql, [to_sql(self.before)])?;
            self.beyond = Some(first.map_or(0, seq_from));
        } else if seq_from(count) < step {
            self.beyond = Some(0);
        }
        Ok(())
    }
}

/// Expired events in the order of the log, a bounded number at a time.
pub(crate) fn expired(
    reader: &Reader,
    now: Timestamp,
    after: (i64, i64),
) -> Result<Vec<(i64, i64)>> {
    let doing = "looking what has expired";
    let sql = "SELECT at, seq FROM expirations WHERE at < ?1 AND (at, seq) > (?2, ?3)
               ORDER BY at, seq LIMIT ?4";
    reader
        .conn
        .all(doing, sql, (micros(now), after.0, after.1, LOOK as i64))
}
