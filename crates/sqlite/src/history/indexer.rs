//! The thread that keeps the index some way behind the log.
//!
//! When enough events were appended it sorts their postings into a run; when there are many runs of a
//! size it merges them. It reads on a connection of its own and hands what it made to the writer in small
//! jobs. Nothing depends on it: what has no index yet is found by reading the log. So it never makes the
//! engine fail; it logs a warning and tries again later. Several processes may have the file open: one of
//! them writes runs, and every step is checked against what is in the file.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use everbus_core::{Code, Error, Result};

use super::HistoryTuning;
use super::block::{Encoder, Posting};
use super::merge::{Alive, Merge};
use super::runs::{self, Applied, BATCH, Change, End, Run, Target};
use super::scope::{self, Hashes, Named};
use crate::errors::from_sqlite;
use crate::queue::{Answer, Command, Haste, Queue};
use crate::readers::Reader;
use crate::rows::{seq_from, to_sql};
use crate::writer::Writer;

/// Rows read between two looks whether the engine closes.
const ROWS: u64 = 2048;
/// How long to leave it after something failed.
const PAUSE: Duration = Duration::from_secs(5);
/// Positions of a run that are looked at to see how much of it is left.
const PROBES: u64 = 256;
/// A run is not written again if so few of those were there at first: it is small by then.
const PROBES_WITH_EVENTS: u64 = 32;

/// What the writer has of the thread.
pub(crate) struct Indexer {
    sender: Option<mpsc::Sender<Wake>>,
    handle: Option<JoinHandle<()>>,
    shared: Arc<Shared>,
}

enum Wake {
    Appended,
    Review,
}

/// What both threads look at.
struct Shared {
    /// The newest position that the writer knows of.
    head: AtomicU64,
    /// The head at which there will be enough for a run.
    wake_at: AtomicU64,
    woken: AtomicBool,
    closing: AtomicBool,
}

impl Indexer {
    /// Starts the thread.
    pub(crate) fn start(path: &Path, queue: &Arc<Queue>, tuning: HistoryTuning) -> Result<Self> {
        let shared = Arc::new(Shared {
            head: AtomicU64::new(0),
            wake_at: AtomicU64::new(u64::MAX),
            woken: AtomicBool::new(false),
            closing: AtomicBool::new(false),
        });
        let (sender, wakes) = mpsc::channel();
        let (path, queue, of_thread) = (path.to_owned(), Arc::downgrade(queue), shared.clone());
        let handle = std::thread::Builder::new()
            .name("everbus-index".into())
            .spawn(move || match Reader::open(&path) {
                Ok(reader) => Work::new(reader, queue, of_thread, tuning).run(&wakes),
                Err(error) => warn(&error),
            })
            .map_err(|e| Error::new(Code::Internal, format!("no thread for indexing: {e}")))?;
        Ok(Self {
            sender: Some(sender),
            handle: Some(handle),
            shared,
        })
    }

    /// Tells it how far the log reaches.
    pub(crate) fn saw(&self, head: u64) {
        self.shared.head.store(head, Ordering::SeqCst);
        if head >= self.shared.wake_at.load(Ordering::SeqCst)
            && !self.shared.woken.swap(true, Ordering::Relaxed)
        {
            self.send(Wake::Appended);
        }
    }

    /// Lets it look for runs of which little is left.
    pub(crate) fn review(&self) {
        self.send(Wake::Review);
    }

    fn send(&self, wake: Wake) {
        if let Some(sender) = &self.sender {
            let _ = sender.send(wake);
        }
    }

    /// Ends the thread and closes its connection. What it was at is left for the next process.
    pub(crate) fn close(&mut self) {
        self.shared.closing.store(true, Ordering::Relaxed);
        self.sender = None;
        if let Some(handle) = self.handle.take() {
            let _ = handle.join();
        }
    }
}

fn warn(error: &Error) {
    tracing::warn!(target: "everbus::sqlite", %error, "the indexes of the history are not kept up; queries read the log instead");
}

/// Until the lease of another process ends.
fn wait_for(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0).max(1000))
}

/// What there is to do next.
enum Next {
    /// Nothing until there is more in the log.
    Rest,
    /// Nothing for this long: another process is at it, or something failed.
    Wait(Duration),
}

struct Work {
    reader: Reader,
    queue: Weak<Queue>,
    shared: Arc<Shared>,
    tuning: HistoryTuning,
    holder: i64,
    merges: Vec<Merge>,
    review: bool,
}

/// How the log and the index stand.
struct Standing {
    runs: Vec<Run>,
    /// Where the last run ends.
    covered: Option<u64>,
    /// Everything up to here is in runs, or was never there.
    after: u64,
    newest: u64,
}

impl Work {
    fn new(reader: Reader, queue: Weak<Queue>, shared: Arc<Shared>, tuning: HistoryTuning) -> Self {
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

    fn run(mut self, wakes: &mpsc::Receiver<Wake>) {
        loop {
            self.shared.woken.store(false, Ordering::Relaxed);
            let next = match self.work() {
                Ok(next) => next,
                Err(error) if error.code() == Code::Shutdown => return,
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
                    // What is half done may not be ours to finish.
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
                // It does what there is to do; if it dies, somebody else will.
                return Ok(Next::Wait(wait_for(left)));
            }
            if waiting >= self.tuning.run {
                let written = match self.cut(&standing)? {
                    Ok(blocks) => blocks,
                    Err(next) => return Ok(next),
                };
                // Each posting is written again once per level, so this keeps up for four of them.
                let mut left = written * 4 + 1;
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
            // As much more as is missing. The newest events may be gone: their positions still count.
            let missing = self.tuning.run - waiting;
            let wake_at = standing.newest.max(head).saturating_add(missing);
            self.shared.wake_at.store(wake_at, Ordering::SeqCst);
            // What the writer announced before it could see this is looked at now.
            if self.shared.head.load(Ordering::SeqCst) < wake_at {
                return Ok(Next::Rest);
            }
        }
    }

    fn check_open(&self) -> Result<()> {
        if self.shared.closing.load(Ordering::Relaxed) {
            return Err(Error::shutdown());
        }
        Ok(())
    }

    fn look(&mut self) -> Result<Standing> {
        self.reader.snapshot(|reader| {
            let runs = runs::in_use(&reader.conn)?;
            let (oldest, newest): (Option<i64>, Option<i64>) = reader
                .conn
                .prepare_cached("SELECT (SELECT min(seq) FROM log), (SELECT max(seq) FROM log)")
                .and_then(|mut s| s.query_row([], |r| Ok((r.get(0)?, r.get(1)?))))
                .map_err(|e| from_sqlite("reading the log", e))?;
            let covered = runs.last().map(|run| run.hi);
            let before_oldest = oldest.map_or(0, seq_from).saturating_sub(1);
            Ok(Standing {
                covered,
                after: covered.unwrap_or(before_oldest),
                newest: newest.map_or(0, seq_from),
                runs,
            })
        })
    }

    /// Makes a run of the events after the last one. Far behind, it makes a larger one at once.
    fn cut(&mut self, standing: &Standing) -> Result<Result<usize, Next>> {
        let waiting = standing.newest - standing.after;
        let large = self.tuning.run.saturating_mul(self.tuning.fan as u64);
        let (level, size) = if waiting >= large {
            (1, large)
        } else {
            (0, self.tuning.run)
        };
        let mut postings: Vec<Posting> = Vec::new();
        let (mut hi, mut events) = (standing.after, 0);
        while events < size && hi < standing.newest {
            self.check_open()?;
            let rows = ROWS.min(size - events);
            let read = self.read((hi, standing.newest), rows, &mut postings)?;
            events += read.0;
            hi = if read.0 < rows {
                standing.newest
            } else {
                read.1
            };
        }
        postings.sort_unstable();
        // Two combinations of one event may have the same hash.
        postings.dedup();
        let run = Run {
            id: 0,
            level,
            lo: standing.after + 1,
            hi,
            events,
        };
        let mut encoder = Encoder::new(run.lo, self.tuning.block);
        for posting in postings {
            encoder.push(posting)?;
        }
        encoder.finish();
        let mut blocks = encoder.done;
        let written = blocks.len();
        let mut target = Target::New(run);
        while blocks.len() > BATCH {
            let rest = blocks.split_off(BATCH);
            let some = std::mem::replace(&mut blocks, rest);
            target = match self.change(target, some, End::Open)? {
                Ok(id) => Target::Begun(id),
                Err(None) => return Ok(Ok(0)),
                Err(Some(next)) => return Ok(Err(next)),
            };
        }
        let after = standing.covered;
        Ok(
            match self.change(target, blocks, End::Appended { after })? {
                Ok(_) => Ok(written),
                Err(None) => Ok(0),
                Err(Some(next)) => Err(next),
            },
        )
    }

    /// Adds the postings of some events; how many events there were, and the last position.
    fn read(
        &mut self,
        (after, upto): (u64, u64),
        limit: u64,
        postings: &mut Vec<Posting>,
    ) -> Result<(u64, u64)> {
        let doing = |e| from_sqlite("reading the log", e);
        let Reader { conn, types } = &mut self.reader;
        let mut statement = conn
            .prepare_cached(
                "SELECT seq, type, attrs FROM log WHERE seq > ?1 AND seq <= ?2
                 ORDER BY seq LIMIT ?3",
            )
            .map_err(doing)?;
        let mut rows = statement
            .query((to_sql(after), to_sql(upto), to_sql(limit)))
            .map_err(doing)?;
        // The names of neighbours are often the same.
        let mut known: Option<(i64, u64)> = None;
        let (mut events, mut last) = (0, after);
        let mut found = Vec::new();
        while let Some(row) = rows.next().map_err(doing)? {
            events += 1;
            last = seq_from(row.get(0).map_err(doing)?);
            let Ok(attrs) = row.get_ref(2).map_err(doing)?.as_str() else {
                continue;
            };
            // What cannot be read is damaged, and cannot be found by its names in any way.
            let Ok(named) = serde_json::from_str::<Named<'_>>(attrs) else {
                continue;
            };
            let type_id: i64 = row.get(1).map_err(doing)?;
            let event_type = match known {
                Some((id, hash)) if id == type_id => hash,
                _ => scope::name(&types.get(conn, type_id)?),
            };
            known = Some((type_id, event_type));
            let hashes = Hashes {
                tenant: named.tenant.map(|t| scope::name(&t.0)),
                app: named.app.map(|a| scope::name(&a.0)),
                entity: named.entity.map(|e| scope::entity(&e.kind, &e.id)),
                event_type: Some(event_type),
            };
            found.extend(hashes.scopes().map(|scope| (scope, last)));
        }
        postings.append(&mut found);
        Ok((events, last))
    }

    /// Does a part of a merge, beginning one if there are enough runs of a size. How many blocks were
    /// written, and one if none were needed.
    fn merge_some(&mut self, standing: &Standing) -> Result<Result<usize, Next>> {
        self.plan(&standing.runs);
        // The smallest first: it is done soonest, and queries have fewer runs to look at.
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
            // It was dropped: somebody else has changed its runs.
            Err(None) => {}
            Err(Some(next)) => return Ok(Err(next)),
        }
        Ok(Ok(written.max(1)))
    }

    /// Begins merges: the newest runs up to a level, once there are many of them.
    fn plan(&mut self, runs: &[Run]) {
        let merging: Vec<i64> = self.merges.iter().flat_map(Merge::replaced).collect();
        let free = runs
            .iter()
            .rposition(|run| merging.contains(&run.id))
            .map_or(runs, |last| &runs[last + 1..]);
        let highest = free.iter().map(|run| run.level).max().unwrap_or(0);
        for level in 0..=highest {
            let larger = free.iter().rposition(|run| run.level > level);
            let newest = larger.map_or(free, |last| &free[last + 1..]);
            if newest.len() >= self.tuning.fan {
                self.merges
                    .extend(Merge::of(newest, level + 1, self.tuning.block));
                return;
            }
        }
    }

    /// Looks for runs of which nothing or little is left.
    fn review(&mut self, standing: &Standing) -> Result<()> {
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
            self.job(|writer| writer.forget_history().map(|()| Applied::Done(0)))?;
            self.review = false;
        }
        Ok(())
    }

    /// Whether less than half of the events seem to be left, by looking at some positions.
    fn seems_sparse(&mut self, run: &Run) -> Result<bool> {
        let width = run.hi - run.lo + 1;
        let probes = width.min(PROBES);
        // Neither product comes near the limit of what fits.
        let expected = probes.saturating_mul(run.events) / width;
        if expected < PROBES_WITH_EVENTS.min(probes / 8) || expected == 0 {
            return Ok(false);
        }
        let conn = &self.reader.conn;
        let mut statement = conn
            .prepare_cached("SELECT 1 FROM log WHERE seq = ?1")
            .map_err(|e| from_sqlite("reading the log", e))?;
        let mut found = 0;
        for probe in 0..probes {
            let seq = run.lo + probe * width / probes;
            let there = statement.exists([to_sql(seq)]);
            found += u64::from(there.map_err(|e| from_sqlite("reading the log", e))?);
        }
        Ok(found * 2 < expected)
    }

    /// A merge that leaves out what is gone, if that is more than half.
    fn without_gone(&mut self, run: &Run) -> Result<Option<Merge>> {
        let doing = |e| from_sqlite("reading the log", e);
        let mut alive = Alive::new(run);
        let (mut left, mut after) = (0, run.lo.saturating_sub(1));
        loop {
            self.check_open()?;
            let mut statement = self
                .reader
                .conn
                .prepare_cached(
                    "SELECT seq FROM log WHERE seq > ?1 AND seq <= ?2 ORDER BY seq LIMIT ?3",
                )
                .map_err(doing)?;
            let mut rows = statement
                .query((to_sql(after), to_sql(run.hi), to_sql(ROWS)))
                .map_err(doing)?;
            let mut read = 0;
            while let Some(row) = rows.next().map_err(doing)? {
                after = seq_from(row.get(0).map_err(doing)?);
                alive.set(after);
                read += 1;
            }
            left += read;
            if read < ROWS {
                break;
            }
        }
        let sparse = left * 2 < run.events;
        Ok(sparse.then(|| Merge::again(run, left, alive, self.tuning.block)))
    }

    /// The runs that are being written.
    fn begun(&self) -> Vec<i64> {
        let ids = self.merges.iter().map(|merge| merge.output.id);
        ids.filter(|id| *id != 0).collect()
    }

    fn sweep(&mut self) -> Result<Result<(), Next>> {
        let (holder, writing) = (self.holder, self.begun());
        let applied = self.job(move |writer| writer.sweep_history(holder, &writing))?;
        Ok(match self.outcome(applied)? {
            Ok(_) | Err(None) => Ok(()),
            Err(Some(next)) => Err(next),
        })
    }

    /// Does a step in the file. `Err(None)`: it was not to be, look again.
    fn change(
        &mut self,
        target: Target,
        blocks: Vec<super::block::Block>,
        end: End,
    ) -> Result<Result<i64, Option<Next>>> {
        let change = Change {
            holder: self.holder,
            target,
            blocks,
            end,
        };
        let applied = self.job(move |writer| writer.change_history(&change))?;
        self.outcome(applied)
    }

    fn outcome(&mut self, applied: Applied) -> Result<Result<i64, Option<Next>>> {
        match applied {
            Applied::Done(id) => Ok(Ok(id)),
            Applied::Held(left) => Ok(Err(Some(Next::Wait(wait_for(left))))),
            Applied::Stale => Ok(Err(None)),
            Applied::Failed(error) => Err(error),
        }
    }

    /// Runs a job on the writer and waits for it, unless the engine closes.
    fn job(
        &self,
        job: impl FnOnce(&mut Writer) -> Result<Applied> + Send + 'static,
    ) -> Result<Applied> {
        let queue = self.queue.upgrade().ok_or_else(Error::shutdown)?;
        let (reply, answer) = mpsc::channel();
        let failed = reply.clone();
        queue.push(Command::Job {
            job: Some(Box::new(move |writer| {
                let applied = job(writer)?;
                let answer: Answer = Box::new(move || drop(reply.send(Ok(applied))));
                Ok(answer)
            })),
            failed: Box::new(move |error| drop(failed.send(Err(error)))),
            haste: Haste::Now,
        });
        drop(queue);
        loop {
            match answer.recv_timeout(Duration::from_millis(20)) {
                Ok(applied) => return applied,
                Err(mpsc::RecvTimeoutError::Timeout) => self.check_open()?,
                Err(mpsc::RecvTimeoutError::Disconnected) => return Err(Error::shutdown()),
            }
        }
    }
}
