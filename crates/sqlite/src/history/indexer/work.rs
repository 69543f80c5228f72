//! The loop of the indexer thread: new events first, then merges, reviews and sweeping.
//!
//! It reads on its own connection and gives its results to the writer in small jobs. Several processes may
//! have the file open: one of them writes runs, and every step is checked against the state of the file.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak, mpsc};
use std::time::Duration;

use everbus_core::{Code, Error, Result};

use super::jobs::wait_for;
use super::{Shared, Wake, warn};
use crate::history::HistoryTuning;
use crate::history::merge::Merge;
use crate::history::runs::{self, Run};
use crate::queue::Queue;
use crate::readers::Reader;
use crate::rows::ends;

/// Pause after a failure.
const PAUSE: Duration = Duration::from_secs(5);

/// What there is to do next.
pub(super) enum Next {
    /// Nothing until the log has grown.
    Rest,
    /// Nothing for this long: another process is working, or a step failed.
    Wait(Duration),
}

pub(super) struct Work {
    pub(super) reader: Reader,
    pub(super) queue: Weak<Queue>,
    pub(super) shared: Arc<Shared>,
    pub(super) tuning: HistoryTuning,
    pub(super) holder: i64,
    pub(super) merges: Vec<Merge>,
    pub(super) review: bool,
}

/// The state of the log and the index.
pub(super) struct Standing {
    pub(super) runs: Vec<Run>,
    /// Where the last run ends.
    pub(super) covered: Option<u64>,
    /// Everything up to here is in runs, or never existed.
    pub(super) after: u64,
    pub(super) newest: u64,
}

impl Work {
    pub(super) fn new(
        reader: Reader,
        queue: Weak<Queue>,
        shared: Arc<Shared>,
        tuning: HistoryTuning,
    ) -> Self {
        let id = uuid::Uuid::new_v4().as_u64_pair().0;
        Self {
            reader,
            queue,
            shared,
            tuning,
            holder: i64::from_ne_bytes(id.to_ne_bytes()),
            merges: Vec::new(),
            review: true,
        }
    }

    pub(super) fn run(mut self, wakes: &mpsc::Receiver<Wake>) {
        loop {
            self.shared.woken.store(false, Ordering::Relaxed);
            let next = match self.work() {
                Ok(next) => next,
                Err(error) if error.code() == Code::EventBusShutdownError => return,
                Err(error) => {
                    warn(&error);
                    Next::Wait(PAUSE)
                }
            };
            let woken = match next {
                Next::Rest => wakes
                    .recv()
                    .map_err(|_| mpsc::RecvTimeoutError::Disconnected),
                Next::Wait(time) => {
                    // Another process may have continued: unfinished merges are dropped.
                    self.merges.clear();
                    self.shared.wake_at.store(u64::MAX, Ordering::SeqCst);
                    wakes.recv_timeout(time)
                }
            };
            match woken {
                Ok(Wake::Review) => self.review = true,
                Ok(Wake::Appended) | Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Works until there is nothing to do. New events come first; merging keeps pace with them.
    fn work(&mut self) -> Result<Next> {
        loop {
            self.check_open()?;
            let head = self.shared.head.load(Ordering::SeqCst);
            let standing = self.look()?;
            let waiting = standing.newest.saturating_sub(standing.after);
            if let Some(left) = runs::held(&self.reader.conn, self.holder)?
                && (waiting >= self.tuning.run || self.review)
            {
                // Another process holds the lease and does the work; if it dies, the lease ends.
                return Ok(Next::Wait(wait_for(left)));
            }
            if waiting >= self.tuning.run {
                let written = match self.cut(&standing)? {
                    Ok(blocks) => blocks,
                    Err(next) => return Ok(next),
                };
                // Each posting is rewritten once per level, so this keeps up for six levels: with the default
                // sizes, five hundred million events.
                let mut left = written * 6 + 1;
                while left > 0 {
                    let standing = self.look()?;
                    match self.merge_some(&standing)? {
                        Ok(0) => break,
                        Ok(blocks) => left = left.saturating_sub(blocks),
                        Err(next) => return Ok(next),
                    }
                }
                continue;
            }
            match self.merge_some(&standing)? {
                Ok(0) => {}
                Ok(_) => continue,
                Err(next) => return Ok(next),
            }
            if self.review {
                self.review(&standing)?;
                continue;
            }
            if runs::to_sweep(&self.reader.conn, &self.begun())? {
                if let Err(next) = self.sweep()? {
                    return Ok(next);
                }
                continue;
            }
            // Wake up after as many events as are missing. Positions of removed events still count.
            let missing = self.tuning.run - waiting;
            let wake_at = standing.newest.max(head).saturating_add(missing);
            self.shared.wake_at.store(wake_at, Ordering::SeqCst);
            // The writer may have announced a head before it could see `wake_at`; so check it now.
            if self.shared.head.load(Ordering::SeqCst) < wake_at {
                return Ok(Next::Rest);
            }
        }
    }

    pub(super) fn check_open(&self) -> Result<()> {
        if self.shared.closing.load(Ordering::Relaxed) {
            return Err(Error::shutdown());
        }
        Ok(())
    }

    pub(super) fn look(&mut self) -> Result<Standing> {
        self.reader.snapshot(|reader| {
            let runs = runs::in_use(&reader.conn)?;
            let ends = ends(&reader.conn)?;
            let covered = runs.last().map(|run| run.hi);
            let before_oldest = ends.map_or(0, |(oldest, _)| oldest.saturating_sub(1));
            Ok(Standing {
                covered,
                after: covered.unwrap_or(before_oldest),
                newest: ends.map_or(0, |(_, newest)| newest),
                runs,
            })
        })
    }
}
