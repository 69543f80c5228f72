//! The thread that owns the writing connection.
//!
//! It takes the queued commands, runs them in one transaction, and answers once that transaction is durable.
//! Without commands it wakes up for work that is due: retries, leases that expire, owners that died, commits
//! of other processes.
//!
//! The writer is one type, [`Writer`], with an `impl` block in each of these files:
//!
//! | file | part of the writer's work |
//! |---|---|
//! | `writer/mod.rs` | the loop: take commands, run a round, sleep until something is due |
//! | `writer/transaction.rs` | one transaction: begin, run commands, commit, answer |
//! | `writer/patience.rs` | low-priority work: when it runs, and the checkpoints of the write-ahead log |
//! | `writer/feeding.rs` | groups that are behind: requests to the feeder, and what it read |
//! | `writer/undo.rs` | memory after a rollback |
//! | `writer/ending.rs` | the end of the writer, orderly or after a fatal error |
//! | `claims.rs` | handing out ranges of the log as claims |
//! | `deliver.rs` | handing out single rows: retries, released events, events without a handler |
//! | `suspects.rs` | events that were in flight at a crash, one at a time |
//! | `reserve.rs` | how much of a claim a consumer may begin |
//! | `settle.rs` | acks, retries, releases, dead-lettering; extending a lease |
//! | `leases.rs` | leases that expire, leases of deliveries that were not fetched |
//! | `recover.rs` | consumers that come and go, owners that died |
//! | `bury.rs` | writing a dead letter, and the event that reports it |
//! | `dead_letters.rs`, `replace.rs` | operators: retry, purge, replace a dead letter |
//! | `redeliver.rs` | delivering events to a group again |
//! | `effect.rs` | a handler's own statements in the transaction of its ack |
//! | `inbox.rs` | which events a group has handled |
//! | `outcomes.rs` | how an event ended that failed before |
//! | `watch.rs` | tasks that wait until an event is settled |
//! | `declare.rs`, `ephemeral.rs` | groups and subscriptions: create, change, remove |
//! | `streams.rs` | dropping waiting events when a stream is full |
//! | `store.rs` | the file as the store beside another engine's broker |
//! | `payloads.rs`, `orphans.rs` | payload stages; objects without an event |
//! | `audit/mod.rs` | records of the audit trail |
//! | `history/runs.rs` | runs of the history index |
//! | `retention/needed.rs`, `remove.rs`, `others.rs` | retention: what must stay; removing the rest |
//! | `retention/clock.rs`, `ahead.rs` | doubts about the clock; times in the future |

mod ending;
mod feeding;
mod patience;
mod transaction;
mod undo;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use everbus_core::{Clock, Code, Error, Lease, Result};
use rusqlite::Connection;
use tokio::sync::watch;

use crate::answers::{Answers, Published};
use crate::errors::{from_sqlite, is_fatal};
use crate::failpoint;
use crate::feeder::Feeder;
use crate::guard::Guard;
use crate::history::Indexer;
use crate::ids::IdMap;
use crate::log_head::LogHead;
use crate::owner::OwnerLock;
use crate::presence::Presence;
use crate::queue::{Command, Queue, Taken};
use crate::readers::Readers;
use crate::reserve::Outgoing;
use crate::rows::{LeaseParts as _, Seq as _};
use crate::session::Session;
use crate::space::Space;
use crate::state::{Claim, EventKey, Lost, State, micros};
use crate::watch::Watches;
pub(crate) use patience::Hold;
use patience::Patience;

/// How often the writer looks for commits of other processes while a consumer or a watcher waits.
const POLL: Duration = Duration::from_millis(20);
/// How often the writer looks for owners that died.
const OWNER_CHECK: Duration = Duration::from_millis(200);
/// A moved cursor is stored after at most this time.
const CURSOR_DELAY: Duration = Duration::from_millis(500);
/// A transaction takes at most about this many events and this many bytes of payload: less than the disk
/// headroom.
const MAX_EVENTS: usize = 8192;
const MAX_BYTES: usize = 4 << 20;
/// An effect counts as this many events: its real cost is not known.
const EFFECT: usize = 64;

pub(crate) struct Writer {
    pub(crate) conn: Connection,
    pub(crate) guard: Guard,
    pub(crate) path: PathBuf,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) state: State,
    pub(crate) sessions: IdMap<u64, Session>,
    pub(crate) watches: Watches,
    /// Claims whose bitmap changed in this transaction.
    pub(crate) touched: Vec<i64>,
    /// Deliveries to hand over once the transaction is durable.
    pub(crate) outgoing: Vec<Outgoing>,
    /// Average duration of a transaction.
    pub(crate) step: Duration,
    /// While this is set, only the named suspect may be handed out.
    pub(crate) isolating: Option<(i64, u64)>,
    /// Events to record in the inbox, from plain acks in this transaction.
    pub(crate) noted: Vec<(i64, EventKey)>,
    /// Effects that rolled the transaction back, each with the error its settlement gets.
    pub(crate) offenders: Vec<(Lease, Error)>,
    /// Whether each settlement has a transaction of its own.
    pub(crate) settling_apart: bool,
    undo: undo::Undo,
    /// Memory may be ahead of the file. The state is loaded again before any other work.
    must_reload: bool,
    patience: Patience,
    pub(crate) owner_lock: Option<OwnerLock>,
    feeder: Feeder,
    indexer: Indexer,
    readers: Vec<Arc<Readers>>,
    queue: Arc<Queue>,
    space: Space,
    presence: Presence,
    log_head: LogHead,
    busy_timeout: Duration,
    head: watch::Sender<u64>,
    data_version: i64,
    owners_checked: Instant,
    owner_died: bool,
    cursors_stored: Instant,
    failed: Arc<OnceLock<Error>>,
    /// When looking for new events began to fail; `stalled` is the error that waiting readers get.
    failing_since: Option<Instant>,
    stalled: Arc<Mutex<Option<Error>>>,
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
        let state = State::load(&start.conn, 0)?;
        let _ = start.head.send_replace(state.head);
        Ok(Self {
            space: Space::new(&start.path, start.options.disk_headroom),
            presence: Presence::of(&start.path),
            log_head: LogHead::begin(&start.path, &start.conn),
            conn: start.conn,
            guard: start.guard,
            path: start.path,
            clock: start.options.clock,
            busy_timeout: start.options.busy_timeout,
            state,
            sessions: IdMap::default(),
            watches: Watches::default(),
            touched: Vec::new(),
            outgoing: Vec::new(),
            step: Duration::ZERO,
            isolating: None,
            noted: Vec::new(),
            offenders: Vec::new(),
            settling_apart: false,
            undo: undo::Undo::default(),
            must_reload: false,
            patience: Patience::new(start.options.durability),
            owner_lock: None,
            feeder: start.feeder,
            indexer: start.indexer,
            readers: start.readers,
            queue: start.queue,
            head: start.head,
            data_version,
            owners_checked: Instant::now(),
            owner_died: false,
            cursors_stored: Instant::now(),
            failed: start.failed,
            failing_since: None,
            stalled: start.stalled,
            backlog: Vec::new(),
            spare: Vec::new(),
            published: Vec::new(),
            answers: start.answers,
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
                Some(self.rest())
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
            if !closed && !self.backlog.is_empty() && !self.rest().is_zero() {
                continue;
            }
            let batch = self.next_batch();
            let batch = self.without_patient(batch);
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
                Command::AppendOne { event, .. } => {
                    events += 1;
                    bytes += event.payload().len();
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
        let watched = self.head.receiver_count() > 1 || !self.watches.is_empty();
        if self.sessions.is_empty() && !watched {
            return None;
        }
        if self.isolating.is_some() {
            return Some(POLL);
        }
        let now = micros(self.clock.now());
        let due = self.sessions.iter().filter_map(|(id, session)| {
            let group = self.state.groups.get(&session.group)?;
            group.next_due.filter(|_| self.room_for_rows(*id) > 0)
        });
        let next = due.min().map_or(POLL, |due| {
            Duration::from_micros(u64::try_from(due.saturating_sub(now)).unwrap_or(0))
        });
        Some(next.clamp(Duration::from_millis(1), POLL))
    }

    /// One round: the commands, and the work that is due.
    fn turn(&mut self, commands: Vec<Command>) -> Result<()> {
        let idle = commands.is_empty();
        if idle && self.must_reload {
            self.undo_changes()?;
        }
        if commands.is_empty() {
            let version = data_version(&self.conn)?;
            if version != self.data_version {
                self.refresh()?;
                self.data_version = version;
                self.watches.recheck_all();
            }
            if !self.has_work() {
                self.presence.check_idle()?;
                self.answer_watches()?;
                self.feed();
                return Ok(());
            }
        }
        let mut appends = commands;
        let mut others: Vec<Command> = appends.extract_if(.., |c| !c.is_append()).collect();
        let appends = self.refuse_if_full(appends);
        if let Err(error) = self.settle_apart(&mut others) {
            let refused = appends.into_iter().chain(others);
            refused.for_each(|command| command.fail(error.clone()));
            return Err(error);
        }
        let began = Instant::now();
        match self.transaction(appends, others) {
            Ok(()) => {
                self.hand_over();
                self.step = (self.step * 3 + began.elapsed()) / 4;
                self.dismiss_orphans();
                self.answer_watches()?;
                self.feed();
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

    fn refuse_if_full(&mut self, appends: Vec<Command>) -> Vec<Command> {
        if appends.is_empty() {
            return appends;
        }
        match self.space.check() {
            Ok(()) => {
                self.save_room(false);
                appends
            }
            Err(error) => {
                appends.into_iter().for_each(|c| c.fail(error.clone()));
                self.save_room(true);
                Vec::new()
            }
        }
    }

    fn announce_head(&mut self) {
        let head = self.state.head;
        self.head.send_if_modified(|known| {
            let newer = *known < head;
            *known = head.max(*known);
            newer
        });
        self.indexer.saw(head);
        self.log_head.note(head);
    }

    /// Whether the disk has room for writes that can wait.
    pub(crate) fn check_room(&self) -> Result<()> {
        self.space.check()
    }

    /// Asks the indexer to look for runs with few events left.
    pub(crate) fn review_history(&self) {
        self.indexer.review();
    }

    fn hand_over(&mut self) {
        for session in self.sessions.values() {
            session.mailbox.finish_opening();
        }
        for outgoing in self.outgoing.drain(..) {
            if let Some(session) = self.sessions.get(&outgoing.session) {
                let Outgoing { until, open, .. } = outgoing;
                session.mailbox.put(until, outgoing.deliveries, open);
            }
        }
        failpoint::hit("after-hand-over");
    }

    fn answer_watches(&mut self) -> Result<()> {
        let mut watches = std::mem::take(&mut self.watches);
        let result = watches.answer(self);
        self.watches = watches;
        result
    }

    /// Stores what changed in memory: bitmaps of claims, cursors of groups.
    fn flush(&mut self) -> Result<()> {
        self.flush_claims()?;
        self.flush_cursors()
    }

    /// Loads the groups again inside a transaction, after storing the cursors that it has moved.
    pub(crate) fn reread_groups(&mut self) -> Result<()> {
        self.flush_cursors()?;
        self.state.refresh_groups(&self.conn)
    }

    fn flush_cursors(&mut self) -> Result<()> {
        let doing = |e| from_sqlite("moving a group", e);
        let now = micros(self.clock.now());
        for (id, group) in &mut self.state.groups {
            if group.cursor != group.stored_cursor {
                self.conn
                    .prepare_cached("UPDATE groups SET cursor = ?2, active_at = ?3 WHERE id = ?1")
                    .and_then(|mut s| s.execute((id, crate::rows::to_sql(group.cursor), now)))
                    .map_err(doing)?;
                group.stored_cursor = group.cursor;
            }
        }
        self.cursors_stored = Instant::now();
        Ok(())
    }

    /// Whether there is something to write without a command.
    fn has_work(&mut self) -> bool {
        if self.sessions.is_empty() {
            return false;
        }
        let now = micros(self.clock.now());
        if self.owners_checked.elapsed() >= OWNER_CHECK {
            self.owners_checked = Instant::now();
            self.owner_died = self.some_owner_died();
        }
        self.leases_ended(now)
            || self.owner_died
            || self.leases_to_extend(now)
            || self.deliveries_to_take(now)
            || self.reserved_may_begin()
            || (self.cursors_stored.elapsed() >= CURSOR_DELAY && self.has_unwritten_cursors())
    }

    fn has_unwritten_cursors(&self) -> bool {
        let mut groups = self.state.groups.values();
        groups.any(|g| g.cursor != g.stored_cursor)
    }

    /// Hands out every event that can be handed out.
    fn pump(&mut self) -> Result<()> {
        let now = micros(self.clock.now());
        if self.leases_ended(now) {
            self.end_leases(now)?;
        }
        if self.owner_died {
            self.owner_died = false;
            self.inherit_from_dead()?;
        }
        self.extend_waiting(now)?;
        self.share_places(now);
        self.take_deliveries(now)?;
        self.claim_appended()?;
        // In ordered groups, events that were just appended wait in rows.
        if self.deliveries_to_take(now) {
            self.take_deliveries(now)?;
        }
        self.open_reserved();
        Ok(())
    }

    /// Loads changes of other processes.
    fn refresh(&mut self) -> Result<()> {
        let lost = self.state.refresh(&self.conn)?;
        self.forget(lost);
        self.dismiss_orphans();
        self.drop_stale_isolation()?;
        for session in self.sessions.values_mut() {
            session.look_for_unhandled = true;
        }
        self.announce_head();
        Ok(())
    }

    fn forget(&mut self, lost: Lost) {
        for (id, claim) in lost.claims {
            self.forget_claim(id, &claim);
        }
        for ((group, seq), held) in lost.held {
            if let Some(session) = self.sessions.get_mut(&held.session) {
                session.gave(1, held.bytes);
                session
                    .mailbox
                    .recall(|d| d.lease.seq() == seq && d.lease.token() == held.token as u64);
            }
            if self.isolating == Some((group, seq)) {
                self.isolating = None;
            }
        }
    }

    /// Ends the consumers of groups that were removed.
    fn dismiss_orphans(&mut self) {
        let groups = &self.state.groups;
        for (_, session) in self
            .sessions
            .extract_if(|_, s| !groups.contains_key(&s.group))
        {
            let gone = Error::new(Code::GroupNotFound, "the group was removed");
            session
                .mailbox
                .end(gone.hint("subscribe again to create it anew"));
        }
    }

    fn forget_claim(&mut self, id: i64, claim: &Claim) {
        if let Some(session) = self.sessions.get_mut(&claim.session) {
            let open = claim.progress.unfinished_count(claim.hi);
            session.gave(usize::try_from(open).unwrap_or(0), open * claim.bytes_each);
            let slot = crate::claims::claim_slot(id);
            session.mailbox.recall(|d| d.lease.slot() == slot);
        }
    }
}

/// Changes when another connection commits; commits of this connection do not change it.
fn data_version(conn: &Connection) -> Result<i64> {
    conn.prepare_cached("PRAGMA data_version")
        .and_then(|mut s| s.query_row([], |row| row.get(0)))
        .map_err(|e| from_sqlite("looking for changes", e))
}
