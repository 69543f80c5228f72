//! Merges: selects runs and merges them, one part at a time.

use everbus_core::Result;

use super::work::{Next, Standing, Work};
use crate::history::merge::Merge;
use crate::history::runs::{BATCH, End, Run, Target};

impl Work {
    /// Does a part of a merge; begins one if there are enough runs of a level. Returns the number of blocks
    /// written, and 1 if none were needed.
    pub(super) fn merge_some(&mut self, standing: &Standing) -> Result<Result<usize, Next>> {
        self.plan(&standing.runs);
        // The smallest merge first: it ends soonest, and queries then have fewer runs to read.
        let smallest = (0..self.merges.len()).min_by_key(|m| self.merges[*m].output.level);
        let Some(index) = smallest else {
            return Ok(Ok(0));
        };
        self.check_open()?;
        let mut merge = self.merges.swap_remove(index);
        let (blocks, last) = merge.step(&self.reader.conn, BATCH)?;
        let written = blocks.len();
        let target = match merge.output.id {
            0 => Target::New(merge.output.clone()),
            id => Target::Begun(id),
        };
        let end = if last {
            End::Replaced(merge.replaced())
        } else {
            End::Open
        };
        match self.change(target, blocks, end)? {
            Ok(id) if !last => {
                merge.output.id = id;
                self.merges.push(merge);
            }
            Ok(_) => self.review |= merge.output.level > 1,
            // The merge was dropped: another process has changed its runs.
            Err(None) => {}
            Err(Some(next)) => return Ok(Err(next)),
        }
        Ok(Ok(written.max(1)))
    }

    /// Begins a merge if one is due among the runs that are newer than those of running merges.
    fn plan(&mut self, runs: &[Run]) {
        let merging: Vec<i64> = self.merges.iter().flat_map(Merge::replaced).collect();
        let free = runs
            .iter()
            .rposition(|run| merging.contains(&run.id))
            .map_or(runs, |last| &runs[last + 1..]);
        if let Some((due, level)) = due(free, self.tuning.fan) {
            self.merges.extend(Merge::of(due, level, self.tuning.block));
        }
    }
}

/// The runs to merge, and the level of the result: the lowest level with enough runs, with smaller runs that
/// lie before or between. Only runs of the level itself are counted. If smaller ones were counted, a large
/// run would be rewritten for every few small ones.
fn due(runs: &[Run], fan: usize) -> Option<(&[Run], u32)> {
    let highest = runs.iter().map(|run| run.level).max()?;
    for level in 0..=highest {
        let larger = runs.iter().rposition(|run| run.level > level);
        let newest = larger.map_or(runs, |last| &runs[last + 1..]);
        let count = newest.iter().filter(|run| run.level == level).count();
        if count >= fan {
            let last = newest.iter().rposition(|run| run.level == level)?;
            return Some((&newest[..=last], level + 1));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(level: u32, after: u64, events: u64) -> Run {
        Run {
            id: 0,
            level,
            lo: after + 1,
            hi: after + events,
            events,
        }
    }

    // conformance: memory/history-merge-cost: an entry is written once for each level, and there are few runs, however long the log
    #[test]
    fn neither_the_writing_nor_the_runs_grow_with_the_log() {
        for (fan, cuts, levels) in [(3, 729, 6), (8, 4096, 4), (8, 30_000, 5), (16, 4096, 3)] {
            let mut runs: Vec<Run> = Vec::new();
            let mut written = 0;
            for n in 0..cuts {
                runs.push(run(0, n, 1));
                written += 1;
                while let Some((found, level)) = due(&runs, fan) {
                    let (many, first) = (found.len(), found[0].clone());
                    assert!(many > 1, "one run alone is no merge");
                    let at = runs.iter().position(|r| *r == first).unwrap();
                    let events = runs[at..at + many].iter().map(|r| r.events).sum();
                    written += events;
                    let most = cuts * (1 + levels as u64);
                    assert!(written <= most, "{written} written of {cuts} by {fan}");
                    let merged = run(level, first.lo - 1, events);
                    runs.splice(at..at + many, [merged]);
                }
                assert!(runs.len() <= (levels + 1) * (fan - 1), "{runs:?}");
            }
            assert_eq!(runs.iter().map(|r| r.events).sum::<u64>(), cuts);
        }
    }

    #[test]
    fn smaller_runs_in_between_are_merged_with_the_larger_ones() {
        let levels = [3, 0, 2, 1, 2, 0];
        let runs: Vec<Run> = (0..).zip(levels).map(|(n, l)| run(l, n, 1)).collect();
        assert_eq!(due(&runs, 2), Some((&runs[1..5], 3)));
        assert_eq!(due(&runs, 3), None);
        assert_eq!(due(&[], 2), None);
    }
}
