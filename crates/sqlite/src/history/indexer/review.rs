//! Finds runs with no or few events left, because retention removed them.

use everbus_core::Result;

use super::work::{Standing, Work};
use crate::history::merge::{Alive, Merge};
use crate::history::runs::forget_history;
use crate::history::runs::{self, Applied, Run};
use crate::rows::{seq_from, to_sql};
use crate::sql::Sql as _;

/// Rows read between two checks whether the engine closes.
const ROWS: u64 = 2048;
/// Positions of a run that are sampled to estimate how much of it is left.
const PROBES: u64 = 256;
/// A run is not rewritten if fewer samples than this had events at first: it is small.
const PROBES_WITH_EVENTS: u64 = 32;

impl Work {
    /// Looks for runs with no or few events left.
    pub(super) fn review(&mut self, standing: &Standing) -> Result<()> {
        self.review = false;
        let merging: Vec<i64> = self.merges.iter().flat_map(Merge::replaced).collect();
        let free = |run: &&Run| !merging.contains(&run.id);
        let mut gone = false;
        for run in standing.runs.iter().filter(free) {
            self.check_open()?;
            if runs::is_gone(&self.reader.conn, run)? {
                gone |= Some(run.hi) != standing.covered;
            } else if self.seems_sparse(run)?
                && let Some(merge) = self.without_gone(run)?
            {
                self.merges.push(merge);
            }
        }
        if gone {
            self.job(|writer| forget_history(writer).map(|()| Applied::Done(0)))?;
            self.review = false;
        }
        Ok(())
    }

    /// Whether less than half of the events seem to be left, by a sample of positions.
    fn seems_sparse(&mut self, run: &Run) -> Result<bool> {
        let width = run.hi - run.lo + 1;
        let probes = width.min(PROBES);
        // Neither product can overflow.
        let expected = probes.saturating_mul(run.events) / width;
        if expected < PROBES_WITH_EVENTS.min(probes / 8) || expected == 0 {
            return Ok(false);
        }
        let conn = &self.reader.conn;
        let sql = "SELECT EXISTS (SELECT 1 FROM log WHERE seq = ?1)";
        let mut found = 0;
        for probe in 0..probes {
            let seq = run.lo + probe * width / probes;
            let there: bool = conn.one("reading the log", sql, [to_sql(seq)])?;
            found += u64::from(there);
        }
        Ok(found * 2 < expected)
    }

    /// A merge that leaves out removed events, if they are more than half.
    fn without_gone(&mut self, run: &Run) -> Result<Option<Merge>> {
        let mut alive = Alive::new(run);
        let (mut left, mut after) = (0, run.lo.saturating_sub(1));
        loop {
            self.check_open()?;
            let sql = "SELECT seq FROM log WHERE seq > ?1 AND seq <= ?2 ORDER BY seq LIMIT ?3";
            let values = (to_sql(after), to_sql(run.hi), to_sql(ROWS));
            let seqs: Vec<i64> = self.reader.conn.all("reading the log", sql, values)?;
            for seq in &seqs {
                after = seq_from(*seq);
                alive.set(after);
            }
            let read = seqs.len() as u64;
            left += read;
            if read < ROWS {
                break;
            }
        }
        let sparse = left * 2 < run.events;
        Ok(sparse.then(|| Merge::again(run, left, alive, self.tuning.block)))
    }
}
