//! The session of an engine: a connection of its own, for everything that is tied to one connection.
//!
//! It listens for notifications, sends those of this engine if another engine listens, and holds the advisory lock that
//! makes the engine an owner: the server frees the lock when the process dies, however it dies. If the connection is
//! lost, it is opened again and the lock is taken again; other engines wait for `owner_grace` before they take the
//! owner for dead. Through a pooler in transaction mode there is no session unless a direct URL is given. Without a
//! session, everything is found by polling, and a dead engine is noticed only when its leases end.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use everbus_core::{Code, Error, Result};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, oneshot};

use crate::Postgres;
use crate::pool::{Conn, Sql as _, connect};
use crate::rows::get;

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Wakes consumers and readers that wait for events, here and in other engines.
#[derive(Default)]
pub(crate) struct Bell {
    /// Tasks of this engine that wait for events or for the log to grow.
    pub(crate) here: Notify,
    /// Tasks of this engine that wait for settlements.
    pub(crate) settled: Notify,
    /// How often tasks of this engine were woken.
    rings: AtomicU64,
    /// No other engine listens. A notification costs the server a transaction, and it is only a hint, so none is sent.
    alone: AtomicBool,
    /// Other engines have not been notified yet.
    pending: AtomicBool,
    /// Wakes the session.
    session: Notify,
}

impl Bell {
    /// Wakes the tasks of this engine, and lets the session notify the other engines.
    pub(crate) fn ring(&self) {
        self.ring_here();
        if !self.alone.load(Ordering::Acquire) && !self.pending.swap(true, Ordering::AcqRel) {
            self.session.notify_one();
        }
    }

    /// Wakes only the tasks of this engine.
    pub(crate) fn ring_here(&self) {
        self.rings.fetch_add(1, Ordering::SeqCst);
        self.here.notify_waiters();
    }

    /// How often tasks of this engine were woken. A task that waits for `here` and then finds the same number as before
    /// has missed no ring.
    pub(crate) fn rings(&self) -> u64 {
        self.rings.load(Ordering::SeqCst)
    }

    /// Wakes the tasks of this engine that wait for settlements.
    pub(crate) fn ring_settled(&self) {
        self.settled.notify_waiters();
    }
}

/// A request to the session.
pub(crate) enum Request {
    /// Become an owner; the answer is its number.
    Own(oneshot::Sender<Result<i64>>),
}

/// The engine's side of its session.
pub(crate) struct Session {
    requests: mpsc::UnboundedSender<Request>,
    task: tokio::task::AbortHandle,
    /// The number of this engine as an owner; 0: it is no owner yet.
    owner: Arc<AtomicI64>,
    unlocked: Mutex<HashMap<i64, Instant>>,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Session {
    pub(crate) fn start(engine: Weak<Postgres>) -> Self {
        let (requests, inbox) = mpsc::unbounded_channel();
        let owner: Arc<AtomicI64> = Arc::default();
        let task = tokio::spawn(run(engine, inbox, owner.clone()));
        Self {
            requests,
            task: task.abort_handle(),
            owner,
            unlocked: Mutex::default(),
        }
    }

    /// The number of this engine as an owner; 0 if it is no owner.
    pub(crate) fn owner(&self) -> i64 {
        self.owner.load(Ordering::Acquire)
    }

    /// Ends the session without telling the server, as a crash would.
    pub(crate) fn stop(&self) {
        self.task.abort();
    }

    /// The number of an engine without a session: it has no lock, and no row in `owners`.
    async fn number(&self, conn: &Conn) -> Result<i64> {
        if self.owner() == 0 {
            let number = next_number(conn).await?;
            let _ = self
                .owner
                .compare_exchange(0, number, Ordering::AcqRel, Ordering::Acquire);
        }
        Ok(self.owner())
    }

    async fn own(&self) -> Result<i64> {
        let known = self.owner();
        if known != 0 {
            return Ok(known);
        }
        let (reply, answer) = oneshot::channel();
        let sent = self.requests.send(Request::Own(reply));
        sent.map_err(|_| Error::shutdown())?;
        answer.await.map_err(|_| Error::shutdown())?
    }

    /// The owners that have been without a lock for at least `grace`, and so count as dead.
    pub(crate) fn dead(&self, unlocked: Vec<i64>, grace: Duration) -> Vec<i64> {
        let own = self.owner();
        let mut seen = self.unlocked.lock();
        seen.retain(|owner, _| unlocked.contains(owner));
        let now = Instant::now();
        let others = unlocked.into_iter().filter(|owner| *owner != own);
        let dead = others.filter(|owner| {
            let since = *seen.entry(*owner).or_insert(now);
            now.duration_since(since) >= grace
        });
        dead.collect()
    }
}

impl Postgres {
    /// The number of this engine as an owner. Without a session it holds no lock, and others notice its death only
    /// when its leases end.
    pub(crate) async fn become_owner(&self) -> Result<i64> {
        if !self.has_session() {
            return self.session().number(&*self.conn().await?).await;
        }
        let asked = self.session().own();
        let answer = tokio::time::timeout(self.options.patience, asked).await;
        answer.map_err(|_| {
            crate::errors::too_slow("registering as a consumer", self.options.patience)
        })?
    }

    /// Whether the engine can keep a session: not through a pooler without a direct URL.
    pub(crate) fn has_session(&self) -> bool {
        self.pool.target().session().is_some()
    }

    /// The channel of notifications: one per schema of a database.
    fn channel(&self) -> String {
        format!("{}_wake", self.pool.target().schema)
    }
}

/// Keeps the session until the engine is gone.
async fn run(
    engine: Weak<Postgres>,
    mut requests: mpsc::UnboundedReceiver<Request>,
    owner: Arc<AtomicI64>,
) {
    let mut pause = FIRST_PAUSE;
    loop {
        let Some(strong) = engine.upgrade() else {
            return;
        };
        let (poll, has_session) = (
            strong.options.poll,
            strong.pool.target().session().is_some(),
        );
        if !has_session {
            serve_pooled(&strong).await;
            drop(strong);
            // Without a session only polling finds changes, so poll often.
            tokio::time::sleep(poll.min(Duration::from_millis(100))).await;
            continue;
        }
        // Until this session has counted the listeners.
        strong.bell.alone.store(false, Ordering::Release);
        let began = Instant::now();
        let ended = match begin(&strong, &owner).await {
            Ok((conn, notifications, registered)) => {
                drop(strong);
                let listening = (notifications, registered);
                serve(&engine, &conn, listening, &mut requests, &owner).await
            }
            Err(error) => {
                drop(strong);
                Err(error)
            }
        };
        let Err(error) = ended else { return };
        tracing::warn!(target: "everbus::postgres", %error, "the session was lost; connecting again");
        if began.elapsed() > LONGEST_PAUSE * 5 {
            pause = FIRST_PAUSE;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
        // Notifications may have been missed, so consumers and relays look now.
        if let Some(engine) = engine.upgrade() {
            engine.bell.ring_here();
        }
    }
}

/// Wakes the tasks of this engine. Notifies other engines on a pooled connection if something changed.
async fn serve_pooled(engine: &Postgres) {
    engine.bell.ring_here();
    if engine.bell.pending.swap(false, Ordering::AcqRel)
        && let Ok(conn) = engine.pool.get().await
    {
        let _ = conn.batch("waking others", &wake(&engine.channel())).await;
    }
}

/// The statements that notify all sessions. A lost notification loses no event, so its commit does not wait for the
/// disk, and does not delay the commits of events there. Two statements in one message are one transaction.
fn wake(channel: &str) -> String {
    format!("SET LOCAL synchronous_commit = off; NOTIFY {channel}")
}

/// Takes the lock that every listening session holds in shared mode.
const LISTENING: &str = "SELECT pg_advisory_lock_shared(everbus.owner_key(0))";

/// Whether other sessions listen: whether more than one session holds the lock.
const OTHERS: &str = "SELECT count(*) > 1 FROM pg_catalog.pg_locks l
  WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted AND l.objid::bigint = 0
    AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = current_database())
    AND l.classid = (SELECT c.relnamespace FROM pg_catalog.pg_class c WHERE c.oid = 'everbus.log'::regclass)";

/// Connects, listens, and takes the lock of the owner again. `false`: the previous session still holds the lock, so
/// [`serve`] tries again.
async fn begin(
    engine: &Postgres,
    owner: &AtomicI64,
) -> Result<(Conn, mpsc::UnboundedReceiver<i32>, bool)> {
    let Some(target) = engine.pool.target().session() else {
        return Err(Error::new(Code::Internal, "there is no session"));
    };
    let mut target = target.clone();
    target.schema.clone_from(&engine.pool.target().schema);
    let (conn, notifications) = connect(&target, engine.options.patience).await?;
    conn.batch("listening", &format!("LISTEN {}", engine.channel()))
        .await?;
    conn.query("listening", LISTENING, &[]).await?;
    // Tells the other sessions that this one listens. From now on they notify it.
    conn.batch("listening", &wake(&engine.channel())).await?;
    // This may be another server. Then the horizon forgets what was known of the previous one, the types of publishers
    // included.
    engine.horizon.ask(&conn).await?;
    let known = owner.load(Ordering::Acquire);
    let registered = known == 0 || register(engine, &conn, known).await?;
    Ok((conn, notifications, registered))
}

/// Takes the lock of an owner, then writes its row: an owner with a row and without a lock would be taken for dead.
/// `false`: the lock is held, because the server has not noticed yet that the previous connection is gone.
async fn register(engine: &Postgres, conn: &Conn, owner: i64) -> Result<bool> {
    let doing = "registering as a consumer";
    let sql = "SELECT pg_try_advisory_lock(everbus.owner_key($1))";
    let row = conn.one(doing, sql, &[&owner]).await?;
    if !get::<bool>(&row, 0)? {
        return Ok(false);
    }
    let name = format!("process {}", std::process::id());
    let sql = "INSERT INTO everbus.owners (id, name, started_at) VALUES ($1, $2, $3)
               ON CONFLICT (id) DO NOTHING";
    let at = engine.clock.now().as_micros();
    conn.execute(doing, sql, &[&owner, &name, &at]).await?;
    Ok(true)
}

/// Serves until the connection is lost (an error) or the engine is gone.
async fn serve(
    engine: &Weak<Postgres>,
    conn: &Conn,
    (mut notifications, mut registered): (mpsc::UnboundedReceiver<i32>, bool),
    requests: &mut mpsc::UnboundedReceiver<Request>,
    owner: &AtomicI64,
) -> Result<()> {
    let Some(strong) = engine.upgrade() else {
        return Ok(());
    };
    let (poll, channel) = (strong.options.poll, strong.channel());
    let bell = strong.bell.clone();
    drop(strong);
    let own = conn
        .one("listening", "SELECT pg_backend_pid()", &[])
        .await?;
    let own: i32 = get(&own, 0)?;
    let wake = wake(&channel);
    let mut poll = tokio::time::interval(poll.max(Duration::from_millis(1)));
    poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut again = tokio::time::interval(LONGEST_PAUSE);
    loop {
        tokio::select! {
            _ = again.tick(), if !registered => {
                let Some(strong) = engine.upgrade() else { return Ok(()) };
                let known = owner.load(Ordering::Acquire);
                registered = register(&strong, conn, known).await?;
            }
            () = bell.session.notified() => {
                if bell.pending.swap(false, Ordering::AcqRel) {
                    conn.batch("waking others", &wake).await?;
                }
            }
            notified = notifications.recv() => {
                if notified.is_none() {
                    return Err(Error::new(Code::Unavailable, "the connection was closed"));
                }
                // Own notifications are ignored: the tasks here were woken before the notification was sent.
                let mut others = notified != Some(own);
                while let Ok(from) = notifications.try_recv() {
                    others |= from != own;
                }
                if others {
                    // The other engine may have begun to listen just before a publish here, which sent no notification because this
                    // engine counted as alone. So one is sent now.
                    match bell.alone.swap(false, Ordering::AcqRel) {
                        true => bell.ring(),
                        false => bell.ring_here(),
                    }
                }
            }
            request = requests.recv() => {
                let Some(strong) = engine.upgrade() else { return Ok(()) };
                let Some(Request::Own(reply)) = request else { return Ok(()) };
                let known = owner.load(Ordering::Acquire);
                if known != 0 {
                    let _ = reply.send(Ok(known));
                    continue;
                }
                match become_one(&strong, conn).await {
                    Ok(number) => {
                        owner.store(number, Ordering::Release);
                        let _ = reply.send(Ok(number));
                    }
                    Err(error) => {
                        let lost = error.class().may_repeat();
                        let _ = reply.send(Err(error.clone()));
                        if lost { return Err(error) }
                    }
                }
            }
            _ = poll.tick() => {
                if engine.strong_count() == 0 {
                    return Ok(());
                }
                // A dead connection is noticed, and waiting consumers look again.
                let row = conn.one("keeping the session", OTHERS, &[]).await?;
                bell.alone.store(!get::<bool>(&row, 0)?, Ordering::Release);
                bell.ring_here();
            }
        }
    }
}

async fn next_number(conn: &Conn) -> Result<i64> {
    let sql = "SELECT nextval('everbus.owner_seq')";
    get(&conn.one("registering as a consumer", sql, &[]).await?, 0)
}

async fn become_one(engine: &Postgres, conn: &Conn) -> Result<i64> {
    let number = next_number(conn).await?;
    if !register(engine, conn, number).await? {
        let what = "the lock of this engine is still held";
        return Err(Error::new(Code::Unavailable, what));
    }
    Ok(number)
}
