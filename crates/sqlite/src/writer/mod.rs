//! The thread that owns the writing connection.
//!
//! It takes the queued commands, runs them in one transaction, and answers once that transaction is durable.
//! Without commands it wakes up for work that is due: retries, leases that expire, owners that died, commits
//! of other processes.
//!
//! The writer consists of these parts:
//!
//! | part | what it is |
//! |---|---|
//! | [`Tx`] | the connection, the end of the log, the groups, the tasks that wait for an event |
//! | [`Deliveries`] | what is handed out: consumers and leases. Its table lists the files |
//! | [`Effects`] | handlers' own statements in the transaction of their ack |
//! | `Patience` | low-priority work: when it runs, and the checkpoints of the write-ahead log |
//! | [`Space`], [`Presence`], [`LogHead`] | is there room on the disk; is the file still in its place; the newest position, kept outside the file |
//! | [`Feeder`], [`Indexer`] | threads that read for groups that are behind, and for the history |
//!
//! | file | the writer's own work |
//! |---|---|
//! | `mod.rs` | the loop: take commands, run a round, sleep until something is due |
//! | `transaction.rs` | one transaction: begin, run commands, commit, answer |
//! | `ending.rs` | the end of the writer, orderly or after a fatal error |
//!
//! A job of another module (retention, the audit trail, dead letters, …) gets the writer and passes the parts
//! on that it needs, usually only the transaction.

mod ending;
mod low_space;
mod patience;
mod transaction;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use everbus_core::{Code, Error, Result};
use rusqlite::Connection;
use tokio::sync::watch;

use crate::answers::{Answers, Published};
use crate::deliveries::Deliveries;
use crate::deliveries::consumers::Consumers;
use crate::deliveries::cursor::flush_cursors;
use crate::deliveries::leases::Leases;
use crate::disk_space::Space;
use crate::effect::Effects;
use crate::errors::is_fatal;
use crate::feeder::Feeder;
use crate::guard::Guard;
use crate::history::Indexer;
use crate::log_head::LogHead;
use crate::presence::Presence;
use crate::queue::{Command, Queue, Taken};
use crate::readers::Readers;
use crate::sql::Sql as _;
use crate::tx::Tx;
pub(crate) use patience::Patience;

/// How often the writer looks for commits of other processes while a consumer or a watcher waits.
const POLL: Duration = Duration::from_millis(20);
/// A transaction takes at most about this many events and this many bytes of payload: less than the disk
/// headroom.
const MAX_EVENTS: usize = 8192;
const MAX_BYTES: usize = 4 << 20;
/// An effect counts as this many events: its real cost is not known.
const EFFECT: usize = 64;

pub(crate) struct Writer {
    pub(crate) tx: Tx,
    pub(crate) deliveries: Deliveries,
    pub(crate) effects: Effects,
    pub(crate) patience: Patience,
    pub(crate) space: Space,
    pub(crate) indexer: Indexer,
    feeder: Feeder,
    presence: Presence,
    log_head: LogHead,
    readers: Vec<Arc<Readers>>,
    /// Memory may be ahead of the file. The state is loaded again before any other work.
    must_reload: bool,
    busy_timeout: Duration,
    data_version: i64,
    /// The newest position, for tasks that wait for new events.
    head: watch::Sender<u64>,
    failed: Arc<OnceLock<Error>>,
    /// When looking for new events began to fail; `stalled` is the error that waiting readers get.
    failing_since: Option<Instant>,
    stalled: Arc<Mutex<Option<Error>>>,
    queue: Arc<Queue>,
    backlog: Vec<Command>,
    /// Empty buffers for commands and answers, kept for reuse.
    spare: Vec<Command>,
    published: Vec<Published>,
    answers: Arc<Answers>,
}

/// Arguments of [`Writer::new`].
pub(crate) struct Start {
    pub(crate) conn: Connection,
    pub(crate) guard: Guard,
    pub(crate) path: PathBuf,
    pub(crate) options: crate::Options,
    pub(crate) queue: Arc<Queue>,
    pub(crate) feeder: Feeder,
    pub(crate) indexer: Indexer,
    pub(crate) readers: Vec<Arc<Readers>>,
    pub(crate) head: watch::Sender<u64>,
    pub(crate) failed: Arc<OnceLock<Error>>,
    pub(crate) stalled: Arc<Mutex<Option<Error>>>,
    pub(crate) answers: Arc<Answers>,
}

impl Writer {
    pub(crate) fn new(start: Start) -> Result<Self> {
        // In this order: a commit of another process between the two calls is seen as a change.
        let data_version = data_version(&start.conn)?;
        let tx = Tx::new(start.conn, start.path, start.options.clock)?;
        let _ = start.head.send_replace(tx.log.head);
        Ok(Self {
            deliveries: Deliveries {
                consumers: Consumers::default(),
                leases: Leases::load(&tx.conn)?,
            },
            effects: Effects {
                guard: start.guard,
                offenders: Vec::new(),
                apart: false,
            },
            patience: Patience::new(start.options.durability),
            space: Space::new(&tx.path, start.options.disk_headroom),
            indexer: start.indexer,
            feeder: start.feeder,
            presence: Presence::of(&tx.path),
            log_head: LogHead::begin(&tx.path, &tx.conn),
            readers: start.readers,
            must_reload: false,
            busy_timeout: start.options.busy_timeout,
            data_version,
            head: start.head,
            failed: start.failed,
            failing_since: None,
            stalled: start.stalled,
            queue: start.queue,
            backlog: Vec::new(),
            spare: Vec::new(),
            published: Vec::new(),
            answers: start.answers,
            tx,
        })
    }

    /// Runs until the queue is closed and empty. After a panic every waiting caller gets an error.
    pub(crate) fn run(mut self) {
        let served = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.serve()));
        self.answers.send();
        if served.is_err() {
            let error = Error::new(Code::StorageFailed, "the writer of the file panicked")
                .hint("this is a bug in Everbus; please report it, and open the file again")
                .with_unknown_outcome();
            self.stop(&error);
            self.queue.close(false);
            let Taken { commands, .. } = self.queue.take(Vec::new(), None);
            self.backlog
                .drain(..)
                .chain(commands)
                .for_each(|c| c.fail(error.clone()));
        }
    }

    fn serve(&mut self) {
        loop {
            if self.queue.is_empty() {
                self.answers.send();
            }
            let timeout = if self.backlog.is_empty() {
                self.sleep()
            } else {
                Some(self.patience.rest(&self.backlog))
            };
            let Taken {
                commands,
                closed,
                orderly,
            } = self.queue.take(std::mem::take(&mut self.spare), timeout);
            let mut commands = commands;
            if let Some(error) = self.failed.get() {
                let error = error.clone();
                self.backlog
                    .drain(..)
                    .chain(commands.drain(..))
                    .for_each(|c| c.fail(error.clone()));
                if closed {
                    return;
                }
                self.spare = commands;
                continue;
            }
            let idle = commands.is_empty() && self.backlog.is_empty();
            if closed && idle {
                self.finish(orderly);
                return;
            }
            if self.backlog.is_empty() {
                std::mem::swap(&mut self.backlog, &mut commands);
            }
            self.backlog.append(&mut commands);
            if !closed && !self.backlog.is_empty() && !self.patience.rest(&self.backlog).is_zero() {
                continue;
            }
            let batch = self.next_batch();
            let batch = self.patience.put_off(batch, &mut self.backlog);
            match self.turn_patiently(batch) {
                Err(error) if is_fatal(&error) => self.stop(&error),
                // A temporary error, such as a locked file: the next round tries again.
                Err(error) => {
                    tracing::warn!(target: "everbus::sqlite", %error, "trying again");
                    self.note_failure(error);
                }
                Ok(()) => self.note_success(),
            }
        }
    }

    /// Takes the commands for one transaction from the backlog.
    fn next_batch(&mut self) -> Vec<Command> {
        let (mut events, mut bytes) = (0, 0);
        let fits = self.backlog.iter().take_while(|command| {
            let fits = events < MAX_EVENTS && bytes < MAX_BYTES;
            match command {
                Command::Append { events: batch, .. } => {
                    events += batch.len();
                    bytes += batch
                        .iter()
                        .map(|event| event.payload().len())
                        .sum::<usize>();
                }
                Command::AppendOne { record, .. } => {
                    events += 1;
                    bytes += record.event.payload().len();
                }
                Command::Settle { settlements, .. } => {
                    let effects = settlements.iter().filter(|s| s.effect.is_some()).count();
                    events += effects * EFFECT;
                }
                _ => {}
            }
            fits
        });
        let count = fits.count();
        if count == self.backlog.len() {
            return std::mem::take(&mut self.backlog);
        }
        let rest = self.backlog.split_off(count);
        std::mem::replace(&mut self.backlog, rest)
    }

    /// How long the writer may sleep; `None` if no session and no watcher waits.
    fn sleep(&self) -> Option<Duration> {
        let watched = self.head.receiver_count() > 1 || !self.tx.watches.is_empty();
        if self.deliveries.consumers.sessions.is_empty() && !watched {
            return None;
        }
        if self.deliveries.leases.isolating.is_some() {
            return Some(POLL);
        }
        let now = self.tx.now();
        let due = self
            .deliveries
            .consumers
            .sessions
            .iter()
            .filter_map(|(id, session)| {
                let group = self.tx.groups.get(&session.group)?;
                group
                    .next_due
                    .filter(|_| self.deliveries.consumers.room_for_rows(*id) > 0)
            });
        let next = due.min().map_or(POLL, |due| {
            Duration::from_micros(u64::try_from(due.saturating_sub(now)).unwrap_or(0))
        });
        Some(next.clamp(Duration::from_millis(1), POLL))
    }

    /// One round. Its priority and durability follow from the commands in it.
    fn turn_patiently(&mut self, batch: Vec<Command>) -> Result<()> {
        let patient = !batch.is_empty() && batch.iter().all(Command::is_patient);
        // Work that is due must be durable, so it may not share a lazy transaction.
        let lazy = patient
            && batch.iter().all(Command::is_lazy)
            && !self.deliveries.has_work(&mut self.tx);
        if let Err(error) = self.patience.begin(&self.tx.conn, patient, lazy) {
            self.refuse(batch, &error);
            return Err(error);
        }
        let began = Instant::now();
        let done = self.turn(batch);
        self.patience.end(patient, began.elapsed());
        done
    }

    /// One round: the commands, and the work that is due.
    fn turn(&mut self, commands: Vec<Command>) -> Result<()> {
        let idle = commands.is_empty();
        if idle && self.must_reload {
            self.undo_changes()?;
        }
        if commands.is_empty() {
            let version = data_version(&self.tx.conn)?;
            if version != self.data_version {
                self.refresh()?;
                self.data_version = version;
                self.tx.watches.recheck_all();
            }
            if !self.deliveries.has_work(&mut self.tx) {
                self.presence.check_idle()?;
                crate::watch::answer(&mut self.tx, &self.deliveries.leases)?;
                self.deliveries.feed(&self.tx, &self.feeder);
                return Ok(());
            }
        }
        let mut appends = commands;
        let mut others: Vec<Command> = appends.extract_if(.., |c| !c.is_append()).collect();
        let appends = self.refuse_if_low_on_space(appends);
        if let Err(error) = self.settle_apart(&mut others) {
            let refused = appends.into_iter().chain(others);
            refused.for_each(|command| command.fail(error.clone()));
            return Err(error);
        }
        let began = Instant::now();
        match self.transaction(appends, others) {
            Ok(()) => {
                self.deliveries.consumers.hand_over();
                self.deliveries.consumers.step =
                    (self.deliveries.consumers.step * 3 + began.elapsed()) / 4;
                self.deliveries.consumers.dismiss_orphans(&mut self.tx);
                crate::watch::answer(&mut self.tx, &self.deliveries.leases)?;
                self.deliveries.feed(&self.tx, &self.feeder);
                Ok(())
            }
            Err(e) if is_fatal(&e) => Err(e),
            Err(error) => {
                tracing::warn!(target: "everbus::sqlite", %error, "a transaction was rolled back");
                if idle {
                    // No caller waits. The pause gives a temporary obstacle time to end.
                    std::thread::sleep(POLL);
                }
                self.undo_changes()
            }
        }
    }

    fn announce_head(&mut self) {
        let head = self.tx.log.head;
        self.head.send_if_modified(|known| {
            let newer = *known < head;
            *known = head.max(*known);
            newer
        });
        self.indexer.saw(head);
        self.log_head.note(head);
    }

    /// Stores what changed in memory: bitmaps of claims, cursors of groups.
    fn flush(&mut self) -> Result<()> {
        self.deliveries.leases.flush_claims(&mut self.tx)?;
        flush_cursors(&mut self.tx)
    }

    /// After a rollback: sets the state in memory back to that of the file.
    fn undo_changes(&mut self) -> Result<()> {
        self.must_reload = true;
        self.deliveries.undo_changes(&mut self.tx)?;
        self.must_reload = false;
        Ok(())
    }

    /// Loads changes of other processes.
    fn refresh(&mut self) -> Result<()> {
        self.tx.refresh()?;
        let lost = self.deliveries.leases.refresh(&self.tx.conn)?;
        self.deliveries.forget(lost);
        self.deliveries.consumers.dismiss_orphans(&mut self.tx);
        self.deliveries.drop_stale_isolation(&mut self.tx)?;
        for session in self.deliveries.consumers.sessions.values_mut() {
            session.look_for_unhandled = true;
        }
        self.announce_head();
        Ok(())
    }
}

/// Changes when another connection commits; commits of this connection do not change it.
fn data_version(conn: &Connection) -> Result<i64> {
    conn.one("looking for changes", "PRAGMA data_version", [])
}
