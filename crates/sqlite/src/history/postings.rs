//! The positions of one scope in one run, read block by block in either direction.

use everbus_core::{Order, Result};
use rusqlite::Connection;

use super::block::decode;
use super::runs::Run;
use crate::errors::from_sqlite;
use crate::rows::{seq_from, to_sql};

/// The block that may contain a posting: the last one that begins at or before it.
pub(crate) const AT_OR_BEFORE: &str = "SELECT scope, seq, block FROM history_blocks
     WHERE run = ?1 AND (scope, seq) <= (?2, ?3) ORDER BY scope DESC, seq DESC LIMIT 1";
/// The first block that begins after a posting.
pub(crate) const AFTER: &str = "SELECT scope, seq, block FROM history_blocks
                                WHERE run = ?1 AND (scope, seq) > (?2, ?3) ORDER BY scope, seq LIMIT 1";

/// A list that is searched in the order of a query, never backwards.
pub(crate) struct Postings<'c> {
    conn: &'c Connection,
    run: i64,
    lo: u64,
    scope: i64,
    order: Order,
    /// Positions of the scope in the current block, ascending.
    seqs: Vec<u64>,
}

impl<'c> Postings<'c> {
    pub(crate) fn new(conn: &'c Connection, run: &Run, scope: i64, order: Order) -> Self {
        Self {
            conn,
            run: run.id,
            lo: run.lo,
            scope,
            order,
            seqs: Vec::new(),
        }
    }

    /// The next position in the order of the query, at or beyond the one given.
    pub(crate) fn seek(&mut self, at: u64) -> Result<Option<u64>> {
        if let Some(found) = self.known(at) {
            return Ok(Some(found));
        }
        self.load(AT_OR_BEFORE, at)?;
        if let Some(found) = self.known(at) {
            return Ok(Some(found));
        }
        match self.order {
            // Earlier blocks have no nearer position.
            Order::Newest => Ok(None),
            Order::Oldest => {
                self.load(AFTER, at)?;
                Ok(self.known(at))
            }
        }
    }

    /// The answer, if the current block has it.
    fn known(&self, at: u64) -> Option<u64> {
        let (first, last) = (*self.seqs.first()?, *self.seqs.last()?);
        match self.order {
            Order::Newest if first <= at => {
                // An earlier call already showed that later blocks are beyond it.
                let beyond = self.seqs.partition_point(|seq| *seq <= at);
                (beyond > 0).then(|| self.seqs[beyond - 1])
            }
            Order::Oldest if last >= at => {
                let before = self.seqs.partition_point(|seq| *seq < at);
                self.seqs.get(before).copied()
            }
            _ => None,
        }
    }

    fn load(&mut self, sql: &str, at: u64) -> Result<()> {
        let doing = |e| from_sqlite("reading the history's index", e);
        self.seqs.clear();
        let mut statement = self.conn.prepare_cached(sql).map_err(doing)?;
        let mut rows = statement
            .query((self.run, self.scope, to_sql(at)))
            .map_err(doing)?;
        let Some(row) = rows.next().map_err(doing)? else {
            return Ok(());
        };
        let first = (
            row.get(0).map_err(doing)?,
            seq_from(row.get(1).map_err(doing)?),
        );
        let block = row.get_ref(2).map_err(doing)?;
        let bytes = block.as_blob().map_err(|_| super::block::damaged())?;
        let (scope, seqs) = (self.scope, &mut self.seqs);
        decode(self.lo, first, bytes, |(found, seq)| {
            if found == scope {
                seqs.push(seq);
            }
            found <= scope
        })
    }
}

/// The next position that is in all lists.
pub(crate) fn seek_all(lists: &mut [Postings<'_>], mut at: u64) -> Result<Option<u64>> {
    loop {
        let asked = at;
        for list in lists.iter_mut() {
            match list.seek(at)? {
                None => return Ok(None),
                Some(found) => at = found,
            }
        }
        if at == asked {
            return Ok(Some(at));
        }
    }
}
