//! The source of a relay's rows, for the engine's file and for users' databases.
//!
//! Reads and writes use different connections. To wait for rows, it polls `PRAGMA data_version`, which
//! changes with every commit of another connection: every 100 ms at rest, and soon after an enqueue in this
//! process, which happens a little before its commit.

use std::path::Path;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::Duration;

use everbus_core::{
    BoxFuture, Claimed, Clock, Code, Error, EventId, FailedRow, Forgotten, LONGEST_RELAY_LEASE,
    OutboxKeep, OutboxRow, OutboxSource, OutboxStatus, RelayLease, Result, RowOutcome, Timestamp,
};
use rusqlite::Connection;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::{dead, forget, rows};
use crate::failpoint;
use crate::owner::{OwnerLock, is_dead};
use crate::sql::Sql as _;

/// Rows settled in one transaction: few enough that other writers of the database hardly wait.
const STEP: usize = 256;
/// How often an idle outbox is polled.
const REST: Duration = Duration::from_millis(100);
const FIRST_LOOK: Duration = Duration::from_millis(1);
/// Time for one round of removing old rows.
const FORGETTING: Duration = Duration::from_millis(50);
/// Rows that one transaction of such a round removes, and the pause after it, in which other programs can write.
const FORGET_ROWS: usize = 32;
const FORGET_PAUSE: Duration = Duration::from_millis(1);

/// Enqueues in this process, whatever database they go to.
static ENQUEUED: AtomicU64 = AtomicU64::new(0);
static WAKE: LazyLock<Notify> = LazyLock::new(Notify::new);

/// Tells every outbox in this process that there may soon be a row.
pub(super) fn enqueued() {
    ENQUEUED.fetch_add(1, Ordering::Release);
    WAKE.notify_waiters();
}

/// Access to the outbox of a database.
pub(super) trait Access: Send + Sync + 'static {
    fn name(&self) -> String;

    /// The file of the database.
    fn file(&self) -> &Path;

    fn clock(&self) -> &Arc<dyn Clock>;

    /// Whether the dead letters of an engine are in the same database.
    fn is_own(&self) -> bool;

    /// Whether an engine's retention removes old rows from this database.
    fn has_retention(&self) -> bool;

    /// Runs a query in one read transaction.
    fn read<T: Send + 'static>(
        &self,
        query: impl FnOnce(&Connection) -> Result<T> + Send + 'static,
    ) -> BoxFuture<'static, Result<T>>;

    /// Runs a change in one write transaction.
    fn write<T: Send + 'static>(
        &self,
        change: impl FnOnce(&Connection) -> Result<T> + Send + 'static,
    ) -> BoxFuture<'static, Result<T>>;
}

/// The outbox of a database.
pub(super) struct Source<A> {
    access: A,
    /// `data_version` when rows were last searched.
    seen: Arc<AtomicI64>,
    /// The number of enqueues at that time.
    known: AtomicU64,
    jumped: Arc<Notify>,
    /// A lock that is held from the first lease on. It shows other processes that this process is alive. `None` if no
    /// lock can be created; other processes then wait until the lease ends.
    alive: OnceLock<Option<OwnerLock>>,
}

/// Whether a holder names a lock that its process no longer holds.
fn is_gone(database: &Path, holder: &str) -> bool {
    let (_, lock) = rows::parts(holder);
    lock.is_some_and(|lock| is_dead(database, lock))
}

impl<A: Access> Source<A> {
    /// The holder with the lock of this process.
    fn alive(&self, holder: String) -> String {
        let lock = self
            .alive
            .get_or_init(|| OwnerLock::take(self.access.file()).ok());
        match lock {
            Some(lock) => format!("{holder} [{}]", lock.name()),
            None => holder,
        }
    }

    pub(super) fn new(access: A) -> Self {
        let jumped = Arc::new(Notify::new());
        let wake = Arc::downgrade(&jumped);
        access.clock().on_jump(Box::new(move || {
            if let Some(jumped) = wake.upgrade() {
                jumped.notify_one();
            }
        }));
        Self {
            access,
            seen: Arc::new(AtomicI64::new(i64::MIN)),
            known: AtomicU64::new(ENQUEUED.load(Ordering::Acquire)),
            jumped,
            alive: OnceLock::new(),
        }
    }

    async fn changed(&self) -> bool {
        let seen = self.seen.load(Ordering::Acquire);
        let version = self.access.read(data_version).await;
        // An error is reported by the next read.
        version.map_or(true, |version| version != seen)
    }

    /// Whether there were enqueues since this was last asked.
    fn was_enqueued(&self) -> bool {
        let now = ENQUEUED.load(Ordering::Acquire);
        self.known.swap(now, Ordering::AcqRel) != now
    }
}

/// What one step removes, and up to which time.
#[derive(Clone, Copy)]
enum Old {
    Sent(Timestamp),
    Dead(Timestamp),
}

/// Removes a few rows. Without the lease it does nothing.
fn forget_step(conn: &Connection, lease: &RelayLease, old: Old) -> Result<Forgotten> {
    let mut gone = Forgotten::default();
    if rows::is_ours(conn, lease)? {
        match old {
            Old::Sent(before) => {
                gone.rows = forget::forget_sent(conn, before, FORGET_ROWS)? as u64;
                gone.more = gone.rows >= FORGET_ROWS as u64;
            }
            Old::Dead(before) => {
                let dead = forget::forget_dead(conn, before, FORGET_ROWS)?;
                (gone.rows, gone.dead_letters) = (dead.rows, dead.letters);
                gone.more = dead.letters >= FORGET_ROWS as u64;
            }
        }
    }
    Ok(gone)
}

fn data_version(conn: &Connection) -> Result<i64> {
    conn.one("looking for changes", "PRAGMA data_version", [])
}

impl<A: Access> OutboxSource for Source<A> {
    fn name(&self) -> String {
        self.access.name()
    }

    fn acquire(
        &self,
        holder: String,
        lease: Duration,
    ) -> BoxFuture<'_, Result<Option<RelayLease>>> {
        Box::pin(async move {
            if lease.is_zero() || lease > LONGEST_RELAY_LEASE {
                let what = format!("a relay cannot hold a lease of {lease:?}");
                return Err(Error::new(Code::InvalidSetting, what)
                    .hint("a lease lasts up to a minute, and is renewed while the relay runs"));
            }
            let (now, holder) = (self.access.clock().now(), self.alive(holder));
            // Reading takes no lock of the database, so a relay in standby does not slow down other programs.
            let held = self
                .access
                .read(move |conn| rows::holder(conn, now))
                .await?;
            let other = held.map(|(other, _)| other).filter(|it| *it != holder);
            if let Some(other) = &other
                && !is_gone(self.access.file(), other)
            {
                return Ok(None);
            }
            let clock = self.access.clock().clone();
            self.access
                .write(move |conn| {
                    let now = clock.now();
                    rows::acquire(conn, &holder, other.as_deref(), now, now.plus(lease))
                })
                .await
        })
    }

    fn claim(&self, after: i64, limit: usize) -> BoxFuture<'_, Result<Claimed>> {
        let (seen, now) = (self.seen.clone(), self.access.clock().now());
        self.access.read(move |conn| {
            // Read before the rows: a commit in between is noticed as a change.
            let version = data_version(conn)?;
            let claimed = rows::claim(conn, now, after, limit)?;
            if after == 0 {
                seen.store(version, Ordering::Release);
            }
            Ok(claimed)
        })
    }

    fn settle(
        &self,
        lease: RelayLease,
        outcomes: Vec<(OutboxRow, RowOutcome)>,
    ) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let (own, mut outcomes) = (self.access.is_own(), outcomes);
            while !outcomes.is_empty() {
                let later = outcomes.split_off(outcomes.len().min(STEP));
                let step = std::mem::replace(&mut outcomes, later);
                let (lease, now) = (lease.clone(), self.access.clock().now());
                failpoint::hit("before-outbox-mark");
                let ours = self
                    .access
                    .write(move |conn| rows::settle(conn, &lease, &step, now, own))
                    .await?;
                failpoint::hit("after-outbox-mark");
                if !ours {
                    return Err(Error::new(
                        Code::LeaseLost,
                        "another relay has the lease of this outbox",
                    )
                    .hint("rows that were published and not marked are published again, and the broker recognises their ids"));
                }
            }
            Ok(())
        })
    }

    fn release(&self, lease: RelayLease) -> BoxFuture<'_, Result<()>> {
        self.access.write(move |conn| rows::release(conn, &lease))
    }

    fn wait(&self, at_most: Duration) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let end = Instant::now() + at_most;
            let mut pause = if self.was_enqueued() {
                FIRST_LOOK
            } else {
                REST
            };
            loop {
                let woken = WAKE.notified();
                let mut woken = std::pin::pin!(woken);
                woken.as_mut().enable();
                if pause == REST && self.was_enqueued() {
                    pause = FIRST_LOOK;
                }
                let left = end.saturating_duration_since(Instant::now());
                tokio::select! {
                    biased;
                    () = self.jumped.notified() => return,
                    // An enqueue changes nothing while the outbox is already polled often.
                    () = woken, if pause == REST => {
                        self.was_enqueued();
                        pause = FIRST_LOOK;
                        continue;
                    }
                    () = tokio::time::sleep(pause.min(left)) => {}
                }
                if Instant::now() >= end || self.changed().await {
                    return;
                }
                pause = (pause * 2).min(REST);
            }
        })
    }

    fn status(&self) -> BoxFuture<'_, Result<OutboxStatus>> {
        let now = self.access.clock().now();
        self.access.read(move |conn| rows::status(conn, now))
    }

    fn failed(&self, limit: usize) -> BoxFuture<'_, Result<Vec<FailedRow>>> {
        self.access.read(move |conn| rows::failed(conn, limit))
    }

    fn retry(&self, ids: Option<Vec<String>>) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            let ids = ids.map(Arc::new);
            let (mut total, mut after) = (0, 0);
            loop {
                let (ids, now) = (ids.clone(), self.access.clock().now());
                let found = self
                    .access
                    .read(move |conn| {
                        let ids = ids.as_ref().map(|ids| ids.as_slice());
                        rows::failed_rows(conn, ids, after, STEP)
                    })
                    .await?;
                // Goes forward only: a row that fails again during this retry is not retried again.
                let Some((last, _)) = found.last() else {
                    break;
                };
                after = *last;
                total += self
                    .access
                    .write(move |conn| rows::retry(conn, &found, now))
                    .await?;
            }
            enqueued();
            Ok(total)
        })
    }

    fn dead_letters(&self) -> BoxFuture<'_, Result<u64>> {
        self.access.read(dead::count)
    }

    fn find_dead_letter(&self, text: String, id: EventId) -> BoxFuture<'_, Result<Option<String>>> {
        self.access.read(move |conn| dead::find(conn, &text, id))
    }

    fn forget(&self, lease: RelayLease, keep: OutboxKeep) -> BoxFuture<'_, Result<Forgotten>> {
        Box::pin(async move {
            let mut done = Forgotten::default();
            if self.access.has_retention() {
                return Ok(done);
            }
            let now = self.access.clock().now();
            let sent = keep.sent.map(|age| now.minus(age));
            let dead = keep.dead_letters.map(|age| now.minus(age));
            // Reading needs no lock.
            let any = self
                .access
                .read(move |conn| forget::is_any(conn, sent, dead))
                .await?;
            if !any {
                return Ok(done);
            }
            let began = Instant::now();
            for old in sent.map(Old::Sent).into_iter().chain(dead.map(Old::Dead)) {
                loop {
                    let lease = lease.clone();
                    let step = move |conn: &Connection| forget_step(conn, &lease, old);
                    let gone = self.access.write(step).await?;
                    done.rows += gone.rows;
                    done.dead_letters += gone.dead_letters;
                    if !gone.more {
                        break;
                    }
                    if began.elapsed() >= FORGETTING {
                        done.more = true;
                        break;
                    }
                    tokio::time::sleep(FORGET_PAUSE).await;
                }
            }
            Ok(done)
        })
    }
}
