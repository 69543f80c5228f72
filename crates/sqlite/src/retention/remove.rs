//! Removing events on the writer, by stretches of the log, with everything that belongs to them.

use std::time::{Duration, Instant};

use everbus_core::Result;

use super::needed::Owed;
use super::plan::Piece;
use crate::errors::from_sqlite;
use crate::rows::to_sql;
use crate::writer::Writer;

/// What one transaction did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Removed {
    pub(crate) events: u64,
    /// Events that somebody needs by now.
    pub(crate) kept: u64,
    /// How long it held the writer, the commit apart.
    pub(crate) took: Duration,
}

/// Which tables have something about the events of a stretch.
struct Beside {
    tables: Vec<&'static str>,
    /// Groups that skipped some of them.
    skipped: Vec<i64>,
}

impl Writer {
    /// Removes what is planned, except what somebody has come to need since.
    pub(crate) fn remove_pieces(&mut self, pieces: &[Piece]) -> Result<Removed> {
        let began = Instant::now();
        let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else {
            return Ok(Removed::default());
        };
        let whole = (first.lo, last.hi);
        let needed = self.owed()?.needed(&self.conn, whole, None)?;
        let beside = self.beside(whole)?;
        let mut removed = Removed::default();
        for (lo, hi, planned, overflow) in joined(pieces) {
            let mut gone = 0;
            for (lo, hi) in needed.outside(lo, hi) {
                gone += self.remove_stretch(lo, hi, &beside, overflow)?;
            }
            removed.events += gone;
            if !needed.is_empty() {
                removed.kept += planned.saturating_sub(gone);
            }
        }
        removed.took = began.elapsed();
        Ok(removed)
    }

    /// Removes one event unless somebody needs it.
    pub(crate) fn remove_unowed(&mut self, owed: &Owed, seq: u64) -> Result<bool> {
        let needed = owed.needed(&self.conn, (seq, seq), None)?;
        if !needed.is_empty() {
            return Ok(false);
        }
        let beside = self.beside((seq, seq))?;
        Ok(self.remove_stretch(seq, seq, &beside, true)? > 0)
    }

    fn beside(&self, (lo, hi): (u64, u64)) -> Result<Beside> {
        let doing = |e| from_sqlite("looking what belongs to events", e);
        let range = (to_sql(lo), to_sql(hi));
        let mut tables = Vec::new();
        for (exists, delete) in BESIDE {
            let there: bool = self
                .conn
                .prepare_cached(exists)
                .and_then(|mut s| s.query_row(range, |r| r.get(0)))
                .map_err(doing)?;
            if there {
                tables.push(*delete);
            }
        }
        let mut skips = self
            .conn
            .prepare_cached(
                "SELECT EXISTS (SELECT 1 FROM skips WHERE group_id = ?1 AND seq BETWEEN ?2 AND ?3)",
            )
            .map_err(doing)?;
        let mut skipped = Vec::new();
        for group in self.state.groups.keys() {
            let some = skips.query_row((group, range.0, range.1), |r| r.get(0));
            if some.map_err(doing)? {
                skipped.push(*group);
            }
        }
        Ok(Beside { tables, skipped })
    }

    /// Removes all events of a stretch, and whatever there is about them.
    fn remove_stretch(&self, lo: u64, hi: u64, beside: &Beside, overflow: bool) -> Result<u64> {
        let doing = |e| from_sqlite("removing events", e);
        let range = (to_sql(lo), to_sql(hi));
        if (lo..=hi).contains(&self.state.head) {
            // The newest position must never be given again.
            self.conn
                .prepare_cached("INSERT OR REPLACE INTO meta (key, value) VALUES ('head', ?1)")
                .and_then(|mut s| s.execute([to_sql(self.state.head)]))
                .map_err(doing)?;
        }
        if overflow {
            // Their objects are collected once this is durable, never before.
            self.note_orphans(lo, hi)?;
        }
        for delete in &beside.tables {
            self.conn
                .prepare_cached(delete)
                .and_then(|mut s| s.execute(range))
                .map_err(doing)?;
        }
        for group in &beside.skipped {
            self.conn
                .prepare_cached("DELETE FROM skips WHERE group_id = ?1 AND seq BETWEEN ?2 AND ?3")
                .and_then(|mut s| s.execute((group, range.0, range.1)))
                .map_err(doing)?;
        }
        self.conn
            .prepare_cached("DELETE FROM log WHERE seq BETWEEN ?1 AND ?2")
            .and_then(|mut s| s.execute(range))
            .map(|removed| removed as u64)
            .map_err(doing)
    }
}

/// What may be about an event beside its row in the log: whether there is some, and how it goes.
const BESIDE: &[(&str, &str)] = &[
    (
        "SELECT EXISTS (SELECT 1 FROM dead_letters WHERE seq BETWEEN ?1 AND ?2)",
        "DELETE FROM dead_letters WHERE seq BETWEEN ?1 AND ?2",
    ),
    (
        "SELECT EXISTS (SELECT 1 FROM event_payloads WHERE seq BETWEEN ?1 AND ?2)",
        "DELETE FROM event_payloads WHERE seq BETWEEN ?1 AND ?2",
    ),
    (
        "SELECT EXISTS (SELECT 1 FROM expirations WHERE seq BETWEEN ?1 AND ?2)",
        "DELETE FROM expirations WHERE seq BETWEEN ?1 AND ?2",
    ),
];

/// Pieces that follow each other without anything that stays between them become one.
fn joined(pieces: &[Piece]) -> Vec<(u64, u64, u64, bool)> {
    let mut all: Vec<(u64, u64, u64, bool)> = Vec::new();
    for piece in pieces {
        match all.last_mut().filter(|_| piece.joins) {
            Some(last) => {
                last.1 = piece.hi;
                last.2 += piece.events;
                last.3 |= piece.overflow;
            }
            None => all.push((piece.lo, piece.hi, piece.events, piece.overflow)),
        }
    }
    all
}
