//! The PostgreSQL engine: broker and store in one database, for a team that has outgrown one machine.
//!
//! | here | there |
//! |---|---|
//! | the log | table `log`, numbered by a sequence; readers go no further than the *horizon* (`horizon.rs`), because transactions do not commit in the order of their numbers |
//! | a group | a row of `groups` with its cursor; a transaction that hands out events locks this row (`FOR UPDATE`) |
//! | a claim | a row of `claims`: a range of the log, and a multirange of the positions in it that are done. Its commit does not wait for the disk: after a crash that undoes a claim, the events are claimed again |
//! | new events, and acks of first attempts | one function call each (`sql/claim.sql`); rarer cases take a longer transaction |
//! | a retry, a released or redelivered event | a row of `deliveries` |
//! | a lease | the number of the group and a random token, compared in the transaction that settles |
//! | an owner (an engine that consumes) | an advisory lock on a session of its own; when the process dies, the server frees the lock |
//! | a wake-up | `NOTIFY`, as a hint, if another engine listens; the log is also polled |
//! | a batch | one transaction with arrays (`unnest`); calls that wait at the same time share it |
//!
//! Times come from the clock of the engine and are stored as microseconds. Through a pooler in transaction
//! mode (`pooler=transaction`), everything works that needs no session. Notifications, ephemeral groups, and
//! noticing a dead engine before its leases end need one: give the URL of the server behind the pooler as `direct_url`.
//!
//! After a crash of the server or the promotion of a standby, the server may give out numbers again that were never
//! committed there. `horizon.rs` notices the new run of the server and forgets what it knew, the names of types
//! included. A limit: through a pooler without `direct_url`, an engine that only publishes does not ask the horizon.
//! If an asynchronous standby is promoted that had not received the names of this engine's types, the events of the
//! engine are taken for damaged and dead-lettered until the engine is opened again.
//!
//! Limits: the attempt of a first delivery becomes durable with its claim, whose commit does not wait for the disk. If
//! a handler takes down the machine of the database within that time (about 0.6 s by default), its event is handed out
//! as attempt 1 again. Leases are compared by the clocks of the engines: the clocks of workers must not differ by more
//! than a part of a lease, or events are handed out twice.
//!
//! An ordered group sets up to 200,000 events aside behind retries of their keys; with more, the
//! events of other keys wait too. An effect may take as long as [`Options::patience`]. Through a pooler in
//! transaction mode, session settings and locks that an effect leaves behind stay on the pooler's connection.

mod append;
mod audit;
mod broker;
mod bury;
mod checkpoints;
mod checksum;
mod claim;
mod condition;
mod config;
mod consumer;
mod dead_letters;
mod declare;
mod durability;
mod effect;
mod errors;
mod groups;
mod history;
mod horizon;
mod inbox;
mod insert;
mod inspect;
mod kv;
mod leases;
mod log;
mod maintenance;
mod orphans;
pub mod outbox;
mod outcomes;
mod params;
mod payloads;
mod pool;
mod ranges;
mod redeliver;
mod retention;
mod rows;
mod schema;
mod seats;
mod session;
mod settle;
mod store;
mod streams;
mod tls;
mod watch;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use everbus_core::{Clock, Code, Engine, Error, Result, Timestamp};
use tokio::sync::{Semaphore, mpsc};

pub use config::Options;
pub use effect::{ENGINE, Slot, Work};
#[cfg(feature = "sqlx")]
pub use sqlx;
pub use tokio_postgres;

use crate::broker::PgBroker;
use crate::config::Target;
use crate::durability::Grade;
use crate::groups::{GroupCache, Natures};
use crate::horizon::Horizon;
use crate::pool::{Pool, Pooled, Sql as _};
use crate::rows::Types;
use crate::seats::{Returning, Seats};
use crate::session::{Bell, Session};

/// The engine. This type implements most of the traits that the engine offers, each in the file of its role.
pub(crate) struct Postgres {
    pub(crate) pool: Pool,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) options: Options,
    pub(crate) types: Arc<Types>,
    pub(crate) groups: GroupCache,
    pub(crate) natures: Natures,
    pub(crate) horizon: Horizon,
    pub(crate) seats: Seats,
    pub(crate) returning: Returning,
    pub(crate) bell: Arc<Bell>,
    pub(crate) durability: Grade,
    pub(crate) closed: AtomicBool,
    appends: append::Queue,
    repeats: append::Repeats,
    settlements: settle::Queue,
    /// Effects that may run at the same time.
    effects: Semaphore,
    /// Set once, right after the engine is made.
    session: OnceLock<Session>,
}

impl Postgres {
    pub(crate) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// The current time as it is stored.
    pub(crate) fn micros(&self) -> i64 {
        self.clock.now().as_micros()
    }

    /// Refuses every call after the engine was closed.
    pub(crate) fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::shutdown());
        }
        Ok(())
    }

    /// A connection, unless the engine is closed.
    pub(crate) async fn conn(&self) -> Result<Pooled> {
        self.check_open()?;
        self.pool.get().await
    }

    #[expect(clippy::expect_used, reason = "it is set before anyone can call")]
    pub(crate) fn session(&self) -> &Session {
        self.session.get().expect("a session")
    }
}

/// Opens the database of a URL, `postgres://user:password@host/database`, and makes the tables if they are
/// not there.
pub async fn open(url: &str, options: Options) -> Result<Engine> {
    let target = Target::parse(url, &options)?;
    let pool = Pool::new(target.clone(), options.patience);
    let durability = {
        let mut conn = pool.get().await?;
        check_server(&conn).await?;
        schema::prepare(&mut conn, &target.schema, options.create).await?;
        durability::read(&*conn).await?
    };
    if durability.grade == everbus_core::Durability::Process {
        tracing::warn!(target: "everbus::postgres", durability = %durability, "the server is weaker than it could be");
    }
    let (appends, waiting_appends) = mpsc::unbounded_channel();
    let (settlements, waiting_settlements) = mpsc::unbounded_channel();
    let types = Arc::new(Types::default());
    let engine = Arc::new(Postgres {
        pool,
        clock: options.clock.clone(),
        types: types.clone(),
        groups: GroupCache::default(),
        natures: Natures::default(),
        horizon: Horizon::new(types),
        seats: Seats::default(),
        returning: Returning::default(),
        bell: Arc::default(),
        durability,
        closed: AtomicBool::new(false),
        appends,
        repeats: append::Repeats::default(),
        settlements,
        effects: Semaphore::new((target.pool_size / 2).max(1)),
        session: OnceLock::new(),
        options,
    });
    let _ = engine.session.set(Session::start(Arc::downgrade(&engine)));
    tokio::spawn(append::serve(Arc::downgrade(&engine), waiting_appends));
    tokio::spawn(settle::serve(Arc::downgrade(&engine), waiting_settlements));
    tokio::spawn(watch_owners(Arc::downgrade(&engine)));
    let bell = Arc::downgrade(&engine.bell);
    engine.clock.on_jump(Box::new(move || {
        if let Some(bell) = bell.upgrade() {
            bell.ring_here();
        }
    }));
    {
        // Dead letters are reported inside of transactions, where a new type could be rolled back. So it is added here.
        let conn = engine.pool.get().await?;
        let notice: Arc<str> = everbus_core::DEAD_LETTER_EVENT.into();
        engine.types.intern(&*conn, [&notice], true).await?;
        engine.types.learn_all(&*conn).await?;
    }
    Ok(wire(engine))
}

/// Lists the traits that the engine offers.
fn wire(engine: Arc<Postgres>) -> Engine {
    Engine {
        log: Some(engine.clone()),
        lookup: Some(engine.clone()),
        settled: Some(engine.clone()),
        redeliver: Some(engine.clone()),
        depth: Some(engine.clone()),
        dead_letters: Some(engine.clone()),
        store: Some(engine.clone()),
        maintenance: Some(engine.clone()),
        inbox: Some(engine.clone()),
        history: Some(engine.clone()),
        payloads: Some(engine.clone()),
        audit: Some(engine.clone()),
        checkpoints: Some(engine.clone()),
        orphans: Some(engine.clone()),
        outbox: Some(outbox::own_outbox(&engine)),
        kv: Some(Arc::new(kv::Values(engine.clone()))),
        weaknesses: engine.durability.weakness.iter().cloned().collect(),
        ..Engine::new(Arc::new(PgBroker(engine)))
    }
}

/// Refuses a read replica and a version of the server that is too old.
async fn check_server(conn: &Pooled) -> Result<()> {
    let sql = "SELECT pg_is_in_recovery(), current_setting('server_version_num')::integer,
               current_setting('server_version')";
    let row = conn.one("looking at the server", sql, &[]).await?;
    if rows::get::<bool>(&row, 0)? {
        return Err(Error::new(Code::ReadOnly, "the server is a read replica")
            .hint("name the primary in the URL, without target_session_attrs"));
    }
    if rows::get::<i32>(&row, 1)? < 140_000 {
        let version: &str = rows::get(&row, 2)?;
        return Err(Error::new(
            Code::Unsupported,
            format!("PostgreSQL {version} is too old"),
        )
        .hint("use PostgreSQL 14 or newer"));
    }
    Ok(())
}

/// Takes over the work of dead engines, as long as this engine has consumers.
async fn watch_owners(engine: Weak<Postgres>) {
    loop {
        let Some(strong) = engine.upgrade() else {
            return;
        };
        if strong.check_open().is_err() {
            return;
        }
        let pause = match strong.options.owner_grace {
            Duration::ZERO => Duration::from_millis(100),
            _ => Duration::from_secs(1),
        };
        if !strong.seats.is_empty()
            && let Err(error) = strong.recover().await
            && strong.check_open().is_ok()
        {
            tracing::debug!(target: "everbus::postgres", %error, "dead owners could not be looked for");
        }
        drop(strong);
        tokio::time::sleep(pause).await;
    }
}
