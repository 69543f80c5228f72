//! The thread that owns the writing connection.
//!
//! It takes everything that is queued, does it in one transaction, and answers once that transaction
//! is durable. Between commands it wakes for what is due: retries, leases that end, owners that died,
//! commits of other processes.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use everbus_core::{Appended, Clock, Code, Delivery, Error, Event, Result, SubscriptionInfo};
use rusqlite::{Connection, ErrorCode};
use tokio::sync::watch;

use crate::append::Appender;
use crate::errors::{from_sqlite, is_fatal};
use crate::failpoint;
use crate::feeder::{Fed, Feed, Feeder};
use crate::owner::OwnerLock;
use crate::queue::{Answer, Command, Queue, Reply, Taken};
use crate::readers::Readers;
use crate::session::Session;
use crate::space::{Space, full};
use crate::state::{Claim, Lost, State, micros};
use crate::watch::Watches;

/// How often the writer looks for commits of other processes while somebody would care.
const POLL: Duration = Duration::from_millis(20);
/// How often it looks for owners that died.
const OWNER_CHECK: Duration = Duration::from_millis(200);
/// Skipped positions are written down at the latest after this long.
const CURSOR_DELAY: Duration = Duration::from_millis(500);
/// One transaction takes at most about this many events.
const MAX_EVENTS: usize = 8192;

pub(crate) struct Writer {
    pub(crate) conn: Connection,
    pub(crate) path: PathBuf,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) state: State,
    pub(crate) sessions: HashMap<u64, Session>,
    pub(crate) watches: Watches,
    /// Claims whose bitmap changed in this transaction.
    pub(crate) touched: Vec<i64>,
    /// Deliveries to hand over once the transaction is durable.
    pub(crate) outgoing: Vec<(u64, Vec<Delivery>)>,
    /// While this is set, only the named suspect may be handed out.
    pub(crate) isolating: Option<(i64, u64)>,
    pub(crate) owner_lock: Option<OwnerLock>,
    feeder: Feeder,
    readers: Arc<Readers>,
    queue: Arc<Queue>,
    space: Space,
    busy_timeout: Duration,
    head: watch::Sender<u64>,
    data_version: i64,
    owners_checked: Instant,
    owner_died: bool,
    cursors_stored: Instant,
    failed: Arc<OnceLock<Error>>,
    backlog: Vec<Command>,
}

/// What the writer needs to begin.
pub(crate) struct Start {
    pub(crate) conn: Connection,
    pub(crate) path: PathBuf,
    pub(crate) options: crate::Options,
    pub(crate) queue: Arc<Queue>,
    pub(crate) feeder: Feeder,
    pub(crate) readers: Arc<Readers>,
    pub(crate) head: watch::Sender<u64>,
    pub(crate) failed: Arc<OnceLock<Error>>,
}

/// What came of a command, told to its sender after the commit.
enum Outcome {
    Nothing,
    Each(Vec<Result<()>>),
    Unit(Result<()>),
    Declared(Result<Vec<SubscriptionInfo>>),
    Job(Result<Answer>),
}

impl Outcome {
    fn answer(self, command: Command) {
        match (command, self) {
            (
                Command::Settle { reply, .. } | Command::Extend { reply, .. },
                Outcome::Each(results),
            ) => drop(reply.send(Ok(results))),
            (Command::Declare { reply, .. }, Outcome::Declared(result)) => {
                drop(reply.send(result));
            }
            (
                Command::Retract { reply, .. }
                | Command::RemoveGroup { reply, .. }
                | Command::Attach { reply, .. }
                | Command::Detach { reply: Some(reply), .. },
                Outcome::Unit(result),
            ) => drop(reply.send(result)),
            (Command::Job { failed, .. }, Outcome::Job(result)) => match result {
                Ok(answer) => answer(),
                Err(error) => failed(error),
            },
            _ => {}
        }
    }
}

impl Writer {
    pub(crate) fn new(start: Start) -> Result<Self> {
        let state = State::load(&start.conn, 0)?;
        let data_version = data_version(&start.conn)?;
        let _ = start.head.send_replace(state.head);
        Ok(Self {
            space: Space::new(&start.path, start.options.disk_headroom),
            conn: start.conn,
            path: start.path,
            clock: start.options.clock,
            busy_timeout: start.options.busy_timeout,
            state,
            sessions: HashMap::new(),
            watches: Watches::default(),
            touched: Vec::new(),
            outgoing: Vec::new(),
            isolating: None,
            owner_lock: None,
            feeder: start.feeder,
            readers: start.readers,
            queue: start.queue,
            head: start.head,
            data_version,
            owners_checked: Instant::now(),
            owner_died: false,
            cursors_stored: Instant::now(),
            failed: start.failed,
            backlog: Vec::new(),
        })
    }

    /// Serves until the queue is closed and empty.
    pub(crate) fn run(mut self) {
        let mut spare = Vec::new();
        loop {
            let timeout = if self.backlog.is_empty() { self.sleep() } else { Some(Duration::ZERO) };
            let Taken { commands, closed, orderly } =
                self.queue.take(std::mem::take(&mut spare), timeout);
            let mut commands = commands;
            if let Some(error) = self.failed.get() {
                let error = error.clone();
                self.backlog.drain(..).chain(commands.drain(..)).for_each(|c| c.fail(error.clone()));
                if closed {
                    return;
                }
                spare = commands;
                continue;
            }
            let idle = commands.is_empty() && self.backlog.is_empty();
            if closed && idle {
                self.finish(orderly);
                return;
            }
            self.backlog.append(&mut commands);
            spare = commands;
            let batch = self.next_batch();
            if let Err(error) = self.turn(batch) {
                self.stop(error);
            }
        }
    }

    /// Takes what one transaction should hold from what was queued.
    fn next_batch(&mut self) -> Vec<Command> {
        let mut events = 0;
        let fits = self.backlog.iter().take_while(|command| {
            let fits = events < MAX_EVENTS;
            if let Command::Append { events: batch, .. } = command {
                events += batch.len();
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

    /// How long nothing will happen by itself; `None` if nobody waits for anything.
    fn sleep(&self) -> Option<Duration> {
        let watched = self.head.receiver_count() > 1 || !self.watches.is_empty();
        if self.sessions.is_empty() && !watched {
            return None;
        }
        let now = micros(self.clock.now());
        let due = self.sessions.values().filter_map(|session| {
            let group = self.state.groups.get(&session.group)?;
            group.next_due.filter(|_| session.room() > 0)
        });
        let next = due.min().map_or(POLL, |due| {
            Duration::from_micros(u64::try_from(due.saturating_sub(now)).unwrap_or(0))
        });
        Some(next.clamp(Duration::from_millis(1), POLL))
    }

    /// One round: the commands, and whatever is due by itself.
    fn turn(&mut self, commands: Vec<Command>) -> Result<()> {
        if commands.is_empty() {
            let version = data_version(&self.conn)?;
            if version != self.data_version {
                self.data_version = version;
                self.refresh()?;
                self.watches.recheck_all();
            }
            if !self.has_work() {
                self.answer_watches()?;
                self.feed();
                return Ok(());
            }
        }
        let (appends, others): (Vec<_>, Vec<_>) =
            commands.into_iter().partition(|c| matches!(c, Command::Append { .. }));
        let appends = self.refuse_if_full(appends);
        match self.transaction(appends, others) {
            Ok(()) => {
                self.hand_over();
                self.answer_watches()?;
                self.feed();
                Ok(())
            }
            Err(e) if is_fatal(e.code()) => Err(e),
            Err(_) => self.forget_transaction(),
        }
    }

    fn refuse_if_full(&self, appends: Vec<Command>) -> Vec<Command> {
        if appends.is_empty() {
            return appends;
        }
        match self.space.check() {
            Ok(()) => appends,
            Err(error) => {
                appends.into_iter().for_each(|c| c.fail(error.clone()));
                Vec::new()
            }
        }
    }

    /// Runs everything in one transaction; if the disk turns out to be full, once more without the
    /// publishes, so that acks and dead letters get what room there is.
    fn transaction(&mut self, appends: Vec<Command>, mut others: Vec<Command>) -> Result<()> {
        let publishing = !appends.is_empty();
        let Err(error) = self.attempt(appends, &mut others) else { return Ok(()) };
        if error.code() == Code::DiskFull && publishing && !others.is_empty() {
            self.forget_transaction()?;
            return match self.attempt(Vec::new(), &mut others) {
                Ok(()) => Ok(()),
                Err(error) => {
                    others.into_iter().for_each(|c| c.fail(error.clone()));
                    Err(error)
                }
            };
        }
        others.into_iter().for_each(|c| c.fail(error.clone()));
        Err(error)
    }

    /// One transaction. On success everybody is answered; on failure only the publishers are.
    fn attempt(&mut self, appends: Vec<Command>, others: &mut Vec<Command>) -> Result<()> {
        if let Err(error) = self.begin() {
            appends.into_iter().for_each(|c| c.fail(error.clone()));
            return Err(error);
        }
        let mut published = Vec::with_capacity(appends.len());
        let result = self
            .perform(others)
            .and_then(|outcomes| self.append(appends, &mut published).map(|()| outcomes))
            .and_then(|outcomes| self.pump().map(|()| outcomes))
            .and_then(|outcomes| self.flush().map(|()| outcomes))
            .and_then(|outcomes| self.commit().map(|()| outcomes));
        match result {
            Ok(outcomes) => {
                for (reply, result) in published {
                    let _ = reply.send(result.map(|all| all.into_iter().map(Ok).collect()));
                }
                for (command, outcome) in others.drain(..).zip(outcomes) {
                    outcome.answer(command);
                }
                failpoint::hit("after-answer");
                self.announce_head();
                Ok(())
            }
            Err(error) => {
                let _ = self.conn.execute_batch("ROLLBACK");
                let error = match error.code() {
                    Code::DiskFull => full(error.message().to_owned()),
                    code if is_fatal(code) => error.with_unknown_outcome(),
                    _ => error,
                };
                for (reply, _) in published {
                    let _ = reply.send(Err(error.clone()));
                }
                Err(error)
            }
        }
    }

    /// After a rollback, memory is ahead of the file: read it again.
    fn forget_transaction(&mut self) -> Result<()> {
        self.outgoing.clear();
        self.touched.clear();
        self.reload()
    }

    fn begin(&mut self) -> Result<()> {
        let give_up = Instant::now() + self.busy_timeout;
        loop {
            match self.conn.execute_batch("BEGIN IMMEDIATE") {
                Ok(()) => break,
                Err(e) if is_busy(&e) && Instant::now() < give_up => {}
                Err(e) => return Err(from_sqlite("waiting for the file", e)),
            }
        }
        let version = match data_version(&self.conn) {
            Ok(version) => version,
            Err(e) => {
                let _ = self.conn.execute_batch("ROLLBACK");
                return Err(e);
            }
        };
        if version != self.data_version {
            self.data_version = version;
            self.watches.recheck_all();
            if let Err(e) = self.refresh() {
                let _ = self.conn.execute_batch("ROLLBACK");
                return Err(e);
            }
        }
        Ok(())
    }

    fn append(
        &mut self,
        appends: Vec<Command>,
        published: &mut Vec<(Reply<Vec<Result<Appended>>>, Result<Vec<Appended>>)>,
    ) -> Result<()> {
        if appends.is_empty() {
            return Ok(());
        }
        let now = self.clock.now();
        let mut appender = Appender::new(&self.conn, &self.state, now);
        let mut failure = None;
        for command in appends {
            let Command::Append { events, reply } = command else { continue };
            let result = match (&failure, &mut appender) {
                (Some(error), _) => Err(Error::clone(error)),
                (None, Err(error)) => Err(error.clone()),
                (None, Ok(appender)) => appender.batch(&mut self.state, events),
            };
            if let Err(e) = &result
                && !matches!(e.code(), Code::IdReused | Code::InvalidAttribute)
            {
                failure.get_or_insert_with(|| e.clone());
            }
            published.push((reply, result));
        }
        failure.map_or(Ok(()), Err)
    }

    fn perform(&mut self, commands: &mut [Command]) -> Result<Vec<Outcome>> {
        commands.iter_mut().map(|command| self.perform_one(command)).collect()
    }

    fn perform_one(&mut self, command: &mut Command) -> Result<Outcome> {
        Ok(match command {
            Command::Append { .. } => Outcome::Nothing,
            Command::Settle { settlements, .. } => Outcome::Each(self.settle(settlements)?),
            Command::Extend { leases, by, .. } => Outcome::Each(self.extend(leases, *by)?),
            Command::Declare { group, .. } => Outcome::Declared(soft(self.declare(group))?),
            Command::Retract { subscription, .. } => {
                Outcome::Unit(soft(self.retract(subscription))?)
            }
            Command::RemoveGroup { group, .. } => Outcome::Unit(soft(self.remove_group(group))?),
            Command::Attach { session, .. } => Outcome::Unit(soft(self.attach(session))?),
            Command::SetHandled { session, handled } => {
                if let Some(session) = self.sessions.get_mut(session) {
                    session.set_handled(handled.clone());
                }
                Outcome::Nothing
            }
            Command::Detach { session, .. } => {
                self.detach(*session)?;
                Outcome::Unit(Ok(()))
            }
            Command::Fed(fed) => {
                self.take_feed(fed)?;
                Outcome::Nothing
            }
            Command::Watch { position, reply } => {
                if let Some(reply) = reply.take() {
                    self.watches.add(*position, reply);
                }
                Outcome::Nothing
            }
            Command::Job { job, .. } => match job.take() {
                Some(job) => Outcome::Job(soft(job(self))?),
                None => Outcome::Nothing,
            },
        })
    }

    /// Appends events that a settlement brings, in its own transaction.
    pub(crate) fn append_follow_ups(&mut self, events: Vec<Event>) -> Result<()> {
        let now = self.clock.now();
        let mut appender = Appender::new(&self.conn, &self.state, now)?;
        appender.batch(&mut self.state, events).map(drop)
    }

    fn commit(&mut self) -> Result<()> {
        failpoint::hit("before-commit");
        self.conn.execute_batch("COMMIT").map_err(|e| from_sqlite("committing", e))?;
        failpoint::hit("after-commit");
        self.state.appended.clear();
        Ok(())
    }

    fn announce_head(&mut self) {
        let head = self.state.head;
        self.head.send_if_modified(|known| {
            let newer = *known < head;
            *known = head.max(*known);
            newer
        });
    }

    fn hand_over(&mut self) {
        for (session, deliveries) in self.outgoing.drain(..) {
            if let Some(session) = self.sessions.get(&session) {
                session.mailbox.put(deliveries);
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

    /// Writes down what changed in memory: bitmaps of claims, cursors of groups.
    fn flush(&mut self) -> Result<()> {
        self.flush_claims()?;
        self.flush_cursors()
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

    /// Whether something must be written although nobody asked.
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
            || (self.cursors_stored.elapsed() >= CURSOR_DELAY
                && self.state.groups.values().any(|g| g.cursor != g.stored_cursor))
    }

    /// Hands out whatever can be handed out.
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
        self.take_deliveries(now)?;
        self.claim_appended()?;
        // In ordered groups what was just appended waits in rows.
        if self.deliveries_to_take(now) { self.take_deliveries(now) } else { Ok(()) }
    }

    /// Asks the feeder to read for sessions that have room and are behind.
    fn feed(&mut self) {
        if self.isolating.is_some() {
            return;
        }
        let head = self.state.head;
        for (id, session) in &mut self.sessions {
            let Some(group) = self.state.groups.get(&session.group) else { continue };
            if session.feeding || session.room() == 0 || group.cursor >= head {
                continue;
            }
            let feed = Feed {
                session: *id,
                after: group.cursor,
                upto: head,
                patterns: group.patterns.clone(),
                limit: session.room().min(1024),
                bytes: session.room_in_bytes().min(4 << 20),
            };
            session.feeding = self.feeder.ask(feed);
        }
    }

    fn take_feed(&mut self, fed: &mut Fed) -> Result<()> {
        let Some(session) = self.sessions.get_mut(&fed.session) else { return Ok(()) };
        session.feeding = false;
        let group_id = session.group;
        let records = std::mem::replace(&mut fed.records, Ok(Vec::new()))?;
        let Some(group) = self.state.groups.get(&group_id) else { return Ok(()) };
        // Somebody else may have moved the group meanwhile; then this is read again.
        if group.cursor != fed.after || self.isolating.is_some() {
            return Ok(());
        }
        self.hand_out(fed.session, fed.searched, records)
    }

    /// Takes in what other processes changed.
    fn refresh(&mut self) -> Result<()> {
        let lost = self.state.refresh(&self.conn)?;
        self.forget(lost);
        for session in self.sessions.values_mut() {
            session.look_for_unhandled = true;
        }
        self.announce_head();
        Ok(())
    }

    /// Reads everything again after a failed transaction: memory may be ahead of the file.
    fn reload(&mut self) -> Result<()> {
        let owner = self.state.owner;
        let old = std::mem::replace(&mut self.state, State::load(&self.conn, owner)?);
        self.reload_leases(old)?;
        self.isolating = None;
        Ok(())
    }

    fn forget(&mut self, lost: Lost) {
        for (id, claim) in lost.claims {
            self.forget_claim(id, &claim);
        }
        for ((group, seq), held) in lost.held {
            if let Some(session) = self.sessions.get_mut(&held.session) {
                session.gave(1, held.bytes);
                session.mailbox.recall(|d| {
                    d.lease.position == seq && d.lease.token == held.token as u64
                });
            }
            if self.isolating == Some((group, seq)) {
                self.isolating = None;
            }
        }
    }

    fn forget_claim(&mut self, id: i64, claim: &Claim) {
        if let Some(session) = self.sessions.get_mut(&claim.session) {
            let open = claim.progress.unfinished_count(claim.hi);
            session.gave(usize::try_from(open).unwrap_or(0), open * claim.bytes_each);
            let slot = crate::claims::claim_slot(id);
            session.mailbox.recall(|d| d.lease.slot == slot);
        }
    }

    /// The end: what was not fetched is given back, everything skipped is written down, the lock is
    /// freed. In an orderly end what was fetched and not settled is given back too.
    fn finish(&mut self, orderly: bool) {
        let ids: Vec<u64> = self.sessions.keys().copied().collect();
        let mailboxes: Vec<_> = self.sessions.values().map(|s| s.mailbox.clone()).collect();
        if self.begin().is_ok() {
            let done = ids
                .iter()
                .try_for_each(|id| self.detach(*id))
                .and_then(|()| self.flush())
                .and_then(|()| if orderly { self.leave() } else { Ok(()) })
                .and_then(|()| self.commit());
            if done.is_err() {
                // Nothing acknowledged depends on this: the next owner inherits what is left.
                let _ = self.conn.execute_batch("ROLLBACK");
            }
        }
        self.stop(Error::shutdown());
        mailboxes.iter().for_each(|mailbox| mailbox.end(Error::shutdown()));
    }

    /// Answers everybody who waits with an error and takes nothing more.
    fn stop(&mut self, error: Error) {
        let _ = self.failed.set(error.clone());
        for session in self.sessions.values() {
            session.mailbox.end(error.clone());
        }
        self.sessions.clear();
        self.watches.fail_all(&error);
        // Wakes everybody who waits for new events; they find the engine stopped.
        self.head.send_modify(|_| {});
        // The readers go first: the last connection to close must be one that can tidy up the
        // write-ahead log.
        self.readers.close();
        self.feeder.close();
        self.owner_lock = None;
    }
}

/// Keeps refusals (of this command alone) apart from failures (of the whole transaction).
fn soft<T>(result: Result<T>) -> Result<Result<T>> {
    match result {
        Err(e)
            if matches!(
                e.code(),
                Code::GroupConflict
                    | Code::GroupNotFound
                    | Code::SubscriptionNotFound
                    | Code::NotFound
                    | Code::InvalidSetting
                    | Code::ReadOnly
            ) =>
        {
            Ok(Err(e))
        }
        Err(e) => Err(e),
        Ok(value) => Ok(Ok(value)),
    }
}

fn is_busy(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked)
    )
}

/// Changes whenever another connection commits; our own commits do not change it.
fn data_version(conn: &Connection) -> Result<i64> {
    conn.prepare_cached("PRAGMA data_version")
        .and_then(|mut s| s.query_row([], |row| row.get(0)))
        .map_err(|e| from_sqlite("looking for changes", e))
}
