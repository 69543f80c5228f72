//! Merges several adjacent runs into one, block by block; or rewrites one run without removed events.

use everbus_core::Result;
use rusqlite::Connection;

use super::block::{Block, Encoder, Posting, damaged, decode};
use super::runs::Run;
use crate::errors::from_sqlite;
use crate::rows::{seq_from, to_sql};

/// Some blocks of a run, from a posting on.
pub(crate) const FROM: &str = "SELECT scope, seq, block FROM history_blocks
                               WHERE run = ?1 AND (scope, seq) > (?2, ?3) ORDER BY scope, seq LIMIT 8";

/// A merge under way.
pub(crate) struct Merge {
    inputs: Vec<Input>,
    /// The new run; its id is 0 until it is begun.
    pub(crate) output: Run,
    encoder: Encoder,
    /// Which events of the range still exist, if removed ones are to be left out.
    alive: Option<Alive>,
}

struct Input {
    run: Run,
    /// Postings that were read and not used yet, from `next` on.
    read: Vec<Posting>,
    next: usize,
    /// The first posting of the last block that was read.
    reached: Option<Posting>,
    ended: bool,
}

/// One bit for each position of a range.
pub(crate) struct Alive {
    lo: u64,
    bits: Vec<u64>,
}

impl Alive {
    pub(crate) fn new(run: &Run) -> Self {
        let words = usize::try_from((run.hi - run.lo) / 64 + 1).unwrap_or(0);
        Self {
            lo: run.lo,
            bits: vec![0; words],
        }
    }

    pub(crate) fn set(&mut self, seq: u64) {
        let at = seq.wrapping_sub(self.lo);
        let word = usize::try_from(at / 64).ok();
        if let Some(word) = word.and_then(|word| self.bits.get_mut(word)) {
            *word |= 1 << (at % 64);
        }
    }

    fn has(&self, seq: u64) -> bool {
        let at = seq.wrapping_sub(self.lo);
        let word = usize::try_from(at / 64).ok();
        word.and_then(|word| self.bits.get(word))
            .is_some_and(|word| word >> (at % 64) & 1 == 1)
    }
}

impl Merge {
    /// Merges adjacent runs, the oldest first, into one of this level.
    pub(crate) fn of(runs: &[Run], level: u32, block: usize) -> Option<Self> {
        let (first, last) = (runs.first()?, runs.last()?);
        let output = Run {
            id: 0,
            level,
            lo: first.lo,
            hi: last.hi,
            events: runs.iter().map(|run| run.events).sum(),
        };
        Some(Self::into(runs, output, None, block))
    }

    /// Rewrites a run with the events that still exist.
    pub(crate) fn again(run: &Run, left: u64, alive: Alive, block: usize) -> Self {
        let output = Run {
            id: 0,
            events: left,
            ..run.clone()
        };
        Self::into(std::slice::from_ref(run), output, Some(alive), block)
    }

    fn into(runs: &[Run], output: Run, alive: Option<Alive>, block: usize) -> Self {
        let input = |run: &Run| Input {
            run: run.clone(),
            read: Vec::new(),
            next: 0,
            reached: None,
            ended: false,
        };
        Self {
            inputs: runs.iter().map(input).collect(),
            encoder: Encoder::new(output.lo, block),
            output,
            alive,
        }
    }

    /// The runs that are replaced.
    pub(crate) fn replaced(&self) -> Vec<i64> {
        self.inputs.iter().map(|input| input.run.id).collect()
    }

    /// The next blocks, at least this many unless they are the last, and whether they are.
    pub(crate) fn step(&mut self, conn: &Connection, blocks: usize) -> Result<(Vec<Block>, bool)> {
        while self.encoder.done.len() < blocks {
            let mut scope = None;
            for input in &mut self.inputs {
                let head = input.head(conn)?.map(|(scope, _)| scope);
                scope = scope.into_iter().chain(head).min();
            }
            let Some(scope) = scope else {
                self.encoder.finish();
                return Ok((std::mem::take(&mut self.encoder.done), true));
            };
            // The inputs are in the order of the log, so the postings of a scope follow each other.
            for input in &mut self.inputs {
                while let Some(posting) = input.head(conn)?.filter(|p| p.0 == scope) {
                    input.next += 1;
                    if self.alive.as_ref().is_none_or(|alive| alive.has(posting.1)) {
                        self.encoder.push(posting)?;
                    }
                }
            }
        }
        Ok((std::mem::take(&mut self.encoder.done), false))
    }
}

impl Input {
    fn head(&mut self, conn: &Connection) -> Result<Option<Posting>> {
        while self.next == self.read.len() && !self.ended {
            self.fill(conn)?;
        }
        Ok(self.read.get(self.next).copied())
    }

    fn fill(&mut self, conn: &Connection) -> Result<()> {
        let doing = |e| from_sqlite("reading the history's index", e);
        self.read.clear();
        self.next = 0;
        let (scope, seq) = self
            .reached
            .map_or((i64::MIN, 0), |(scope, seq)| (scope, to_sql(seq)));
        let mut statement = conn.prepare_cached(FROM).map_err(doing)?;
        let mut rows = statement.query((self.run.id, scope, seq)).map_err(doing)?;
        self.ended = true;
        while let Some(row) = rows.next().map_err(doing)? {
            let first = (
                row.get(0).map_err(doing)?,
                seq_from(row.get(1).map_err(doing)?),
            );
            let bytes = row.get_ref(2).map_err(doing)?;
            let bytes = bytes.as_blob().map_err(|_| damaged())?;
            decode(self.run.lo, first, bytes, |posting| {
                self.read.push(posting);
                true
            })?;
            self.reached = Some(first);
            self.ended = false;
        }
        Ok(())
    }
}
