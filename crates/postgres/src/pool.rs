//! Connections: a small pool, statements with typed values, and transactions that are tried again.
//!
//! The pool is our own because it is short, and because a pool must know two things about this engine:
//! which connections may keep prepared statements (not those through a pooler), and that a connection whose
//! answer did not come in time is never used again.
//!
//! ```text
//! let rows = shared.pool.get().await?.query("reading", SQL, &[&seq]).await?;
//! let value = transaction!(shared.pool, "moving", |tx| {
//!     tx.execute("moving", SQL, &[&seq]).await?;
//!     Ok(42)
//! })?;
//! ```

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use everbus_core::{Class, Code, Error, Result};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_postgres::types::Type;
use tokio_postgres::{Client, IsolationLevel, Row, Statement};

use crate::config::{Target, Tls};
use crate::errors::{from_pg, is_conflict, is_outdated, too_slow};
pub(crate) use crate::params::{Param, Params};
use crate::tls::Connector;

/// The first pause between two tries to connect.
const FIRST_PAUSE: Duration = Duration::from_millis(25);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// Prepared statements that a connection keeps.
const MOST_STATEMENTS: usize = 300;
/// How often a transaction is tried at most.
const MOST_TRIES: u32 = 12;

/// Statements on a connection, inside a transaction or outside of one. Statements whose futures are polled
/// concurrently are pipelined.
pub(crate) trait Sql: Sync {
    fn client(&self) -> &Client;
    fn kept(&self) -> &Kept;

    /// Reads all rows.
    fn query(
        &self,
        doing: &str,
        sql: &str,
        params: Params<'_>,
    ) -> impl Future<Output = Result<Vec<Row>>> + Send {
        query_with(
            self.client(),
            self.kept(),
            Plans::Custom,
            (doing, sql, params),
        )
    }

    /// Changes rows, and returns how many.
    fn execute(
        &self,
        doing: &str,
        sql: &str,
        params: Params<'_>,
    ) -> impl Future<Output = Result<u64>> + Send {
        async move {
            let run = async {
                self.kept().plan(self.client(), Plans::Custom).await?;
                let sql = self.kept().named(sql);
                let types = || params.iter().map(|p| p.sql_type());
                match self.kept().statement(self.client(), &sql, types).await? {
                    Some(statement) => {
                        let values: Vec<_> = params.iter().map(|p| p.sql()).collect();
                        self.client().execute(&statement, &values).await
                    }
                    None => {
                        let values: Vec<_> =
                            params.iter().map(|p| (p.sql(), p.sql_type())).collect();
                        self.client().execute_typed(&sql, &values).await
                    }
                }
            };
            self.kept().answer(doing, run).await
        }
    }

    /// Reads the first row, if there is one.
    fn first(
        &self,
        doing: &str,
        sql: &str,
        params: Params<'_>,
    ) -> impl Future<Output = Result<Option<Row>>> + Send {
        async move { Ok(self.query(doing, sql, params).await?.into_iter().next()) }
    }

    /// Reads the only row.
    fn one(
        &self,
        doing: &str,
        sql: &str,
        params: Params<'_>,
    ) -> impl Future<Output = Result<Row>> + Send {
        async move {
            let row = self.first(doing, sql, params).await?;
            row.ok_or_else(|| Error::new(Code::Internal, format!("{doing}: no row came")))
        }
    }

    /// Runs several statements without values.
    fn batch(&self, doing: &str, sql: &str) -> impl Future<Output = Result<()>> + Send {
        async move {
            let run = async {
                let sql = self.kept().named(sql);
                self.client().batch_execute(&sql).await
            };
            self.kept().answer(doing, run).await
        }
    }
}

/// Reads all rows. The tuple has what is being done (for errors), the statement and its values.
async fn query_with(
    client: &Client,
    kept: &Kept,
    plans: Plans,
    (doing, sql, params): (&str, &str, Params<'_>),
) -> Result<Vec<Row>> {
    let run = async {
        kept.plan(client, plans).await?;
        let sql = kept.named(sql);
        let types = || params.iter().map(|p| p.sql_type());
        match kept.statement(client, &sql, types).await? {
            Some(statement) => {
                let values: Vec<_> = params.iter().map(|p| p.sql()).collect();
                client.query(&statement, &values).await
            }
            None => {
                let values: Vec<_> = params.iter().map(|p| (p.sql(), p.sql_type())).collect();
                client.query_typed(&sql, &values).await
            }
        }
    };
    kept.answer(doing, run).await
}

/// What a connection keeps beside the client.
pub(crate) struct Kept {
    schema: Arc<str>,
    patience: Duration,
    /// `None`: through a pooler each transaction has another connection, which knows no statements.
    statements: Option<Mutex<HashMap<Box<str>, Statement>>>,
    /// The connection must not be used again: an answer did not come in time, or the server takes no writes any more.
    broken: AtomicBool,
    /// The session is set to [`Plans::Kept`].
    keeps_plans: AtomicBool,
    /// Statements of an effect ran on the connection. They may have left settings, roles or locks.
    lent_out: AtomicBool,
}

/// Undoes what statements of an effect may have left on a connection, except prepared statements.
const CLEAN: &str = "CLOSE ALL; SET SESSION AUTHORIZATION DEFAULT; RESET ALL; UNLISTEN *;
    SELECT pg_catalog.pg_advisory_unlock_all(); DISCARD TEMP; DISCARD SEQUENCES;";

/// Settings of every connection that does not go through a pooler. Custom plans: a generic plan that was made for a
/// small table would still be used when the table is large. No JIT: compiling takes longer than running any of our
/// statements. Read committed: a statement outside of transactions must see what was committed before it, whatever the
/// default of the database is.
const SETTINGS: &str = "SET plan_cache_mode = force_custom_plan; SET jit = off;
    SET default_transaction_isolation = 'read committed'";

/// How the server plans the statements of a session.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plans {
    /// Each execution is planned, with its values and the current sizes of the tables.
    Custom,
    /// A statement is planned once. For the frequent statements, which find every row through an index, however small
    /// the tables are when the plan is made.
    Kept,
}

const MAKE_PLANS: &str = "SET plan_cache_mode = force_custom_plan; RESET enable_seqscan";
const KEEP_PLANS: &str = "SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off";

impl Kept {
    /// Sets how the session plans statements. Call it outside of transactions: a rollback would undo the setting.
    async fn plan(&self, client: &Client, plans: Plans) -> Result<(), tokio_postgres::Error> {
        let keep = plans == Plans::Kept;
        if self.statements.is_none() || self.keeps_plans.swap(keep, Ordering::Relaxed) == keep {
            return Ok(());
        }
        client
            .batch_execute(if keep { KEEP_PLANS } else { MAKE_PLANS })
            .await
    }

    /// The statement with the name of the schema. Statements are written for the schema `everbus`.
    fn named<'a>(&self, sql: &'a str) -> std::borrow::Cow<'a, str> {
        if &*self.schema == "everbus" {
            sql.into()
        } else {
            in_schema(sql, &self.schema).into()
        }
    }

    async fn statement<I: Iterator<Item = Type>>(
        &self,
        client: &Client,
        sql: &str,
        types: impl Fn() -> I,
    ) -> Result<Option<Statement>, tokio_postgres::Error> {
        let Some(statements) = &self.statements else {
            return Ok(None);
        };
        if let Some(known) = statements.lock().get(sql) {
            return Ok(Some(known.clone()));
        }
        let types: Vec<Type> = types().collect();
        let statement = client.prepare_typed(sql, &types).await?;
        let mut statements = statements.lock();
        if statements.len() >= MOST_STATEMENTS {
            statements.clear();
        }
        statements.insert(sql.into(), statement.clone());
        Ok(Some(statement))
    }

    /// Waits for an answer as long as the options say.
    async fn answer<T>(
        &self,
        doing: &str,
        run: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T> {
        match tokio::time::timeout(self.patience, run).await {
            Ok(answer) => answer.map_err(|e| {
                if is_outdated(&e) {
                    self.broken.store(true, Ordering::Relaxed);
                }
                from_pg(doing, e)
            }),
            Err(_) => {
                self.broken.store(true, Ordering::Relaxed);
                Err(too_slow(doing, self.patience))
            }
        }
    }
}

/// Writes the name of a schema into a statement for the schema `everbus`.
pub(crate) fn in_schema(sql: &str, schema: &str) -> String {
    sql.replace("everbus.", &format!("{schema}."))
}

/// What a connection is used for. Each use keeps to the same few connections, so that few of them make its plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Any,
    Append,
    Claim,
    Ack,
}

/// A connection.
pub(crate) struct Conn {
    client: Client,
    kept: Kept,
    role: Role,
}

impl Conn {
    pub(crate) fn new(client: Client, target: &Target, patience: Duration) -> Self {
        let statements = (!target.pooled).then(Mutex::default);
        Self {
            client,
            role: Role::Any,
            kept: Kept {
                schema: target.schema.as_str().into(),
                patience,
                statements,
                broken: AtomicBool::new(false),
                keeps_plans: AtomicBool::new(false),
                lent_out: AtomicBool::new(false),
            },
        }
    }

    /// Begins a transaction. Each statement sees what was committed before it, whatever the default of the database is:
    /// after a wait for a lock, or after the horizon was read, the next statement must see all events up to then.
    pub(crate) async fn begin(&mut self, doing: &str) -> Result<Tx<'_>> {
        let planned = self.kept.plan(&self.client, Plans::Custom);
        self.kept.answer(doing, planned).await?;
        let begun = self.client.build_transaction();
        let begun = begun.isolation_level(IsolationLevel::ReadCommitted).start();
        let inner = self.kept.answer(doing, begun).await?;
        Ok(Tx {
            inner,
            kept: &self.kept,
        })
    }

    /// As [`query`](Sql::query), with a plan that the session keeps: see [`Plans::Kept`].
    pub(crate) async fn query_planned(
        &self,
        doing: &str,
        sql: &str,
        params: Params<'_>,
    ) -> Result<Vec<Row>> {
        let asked = (doing, sql, params);
        query_with(&self.client, &self.kept, Plans::Kept, asked).await
    }

    /// Undoes what statements of an effect may have left.
    async fn clean(&self) -> Result<()> {
        let doing = "cleaning a connection";
        self.batch(doing, CLEAN).await?;
        self.kept.keeps_plans.store(false, Ordering::Relaxed);
        self.batch(doing, SETTINGS).await
    }

    fn is_usable(&self) -> bool {
        !self.client.is_closed() && !self.kept.broken.load(Ordering::Relaxed)
    }
}

impl Sql for Conn {
    fn client(&self) -> &Client {
        &self.client
    }

    fn kept(&self) -> &Kept {
        &self.kept
    }
}

/// A transaction. Dropped without a commit it is rolled back.
pub(crate) struct Tx<'a> {
    inner: tokio_postgres::Transaction<'a>,
    kept: &'a Kept,
}

impl<'a> Tx<'a> {
    /// Commits. If the connection is lost meanwhile, the outcome is unknown.
    pub(crate) async fn commit(self, doing: &str) -> Result<()> {
        let done = self.kept.answer(doing, self.inner.commit()).await;
        done.map_err(|e| match e.class() {
            // A refused commit is an answer; only a missing answer leaves the outcome open.
            Class::Passing if !is_conflict(&e) && e.code() == Code::Unavailable => {
                e.with_unknown_outcome()
            }
            _ => e,
        })
    }

    /// Notes that statements of an effect will run in this transaction. Returns how long they may take.
    pub(crate) fn lend_out(&self) -> Duration {
        self.kept.lent_out.store(true, Ordering::Relaxed);
        self.kept.patience
    }

    /// Closes the connection after this transaction: the server rolls back.
    pub(crate) fn give_up(&self) {
        self.kept.broken.store(true, Ordering::Relaxed);
    }

    /// Runs statements without values, with the error of the client library if the server refuses them.
    pub(crate) async fn batch_raw(
        &self,
        sql: &str,
    ) -> Result<std::result::Result<(), tokio_postgres::Error>> {
        let run = async { Ok(self.inner.batch_execute(sql).await) };
        self.kept.answer("running an effect", run).await
    }

    /// The transaction of the client library, for effects.
    pub(crate) fn inner(&self) -> &tokio_postgres::Transaction<'a> {
        &self.inner
    }
}

impl Sql for Tx<'_> {
    fn client(&self) -> &Client {
        self.inner.client()
    }

    fn kept(&self) -> &Kept {
        self.kept
    }
}

/// Opens a connection. A task reads its messages until the connection ends; see [`drive`] for the receiver.
pub(crate) async fn connect(
    target: &Target,
    patience: Duration,
) -> Result<(Conn, tokio::sync::mpsc::UnboundedReceiver<i32>)> {
    let doing = "connecting";
    let (notified, notifications) = tokio::sync::mpsc::unbounded_channel();
    let connecting = async {
        if target.tls == Tls::Off {
            let (client, connection) = target
                .config
                .connect(tokio_postgres::NoTls)
                .await
                .map_err(|e| from_pg(doing, e))?;
            drive(connection, notified);
            return Ok(client);
        }
        let connector = Connector::new(target)?;
        let (client, connection) = target
            .config
            .connect(connector)
            .await
            .map_err(|e| from_pg(doing, e))?;
        drive(connection, notified);
        Ok(client)
    };
    let client = tokio::time::timeout(patience, connecting)
        .await
        .map_err(|_| too_slow(doing, patience))
        .flatten()
        .map_err(|e| {
            let message = format!("{} ({target:?})", e.message());
            e.with_message(message)
        })?;
    let conn = Conn::new(client, target, patience);
    if !target.pooled {
        conn.batch(doing, SETTINGS).await?;
    }
    Ok((conn, notifications))
}

/// Reads the messages of a connection until it ends. Passes on the process id of the sender of each notification.
fn drive<S, T>(
    mut connection: tokio_postgres::Connection<S, T>,
    notified: tokio::sync::mpsc::UnboundedSender<i32>,
) where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    tokio::spawn(async move {
        loop {
            let message = std::future::poll_fn(|cx| connection.poll_message(cx)).await;
            match message {
                Some(Ok(tokio_postgres::AsyncMessage::Notification(news))) => {
                    let _ = notified.send(news.process_id());
                }
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return,
            }
        }
    });
}

/// The connections of an engine.
pub(crate) struct Pool {
    target: Target,
    patience: Duration,
    idle: Arc<Mutex<Vec<Conn>>>,
    places: Arc<Semaphore>,
    closed: Arc<AtomicBool>,
    /// The pool was connected to a primary before.
    found_primary: AtomicBool,
}

impl Pool {
    pub(crate) fn new(target: Target, patience: Duration) -> Self {
        Self {
            places: Arc::new(Semaphore::new(target.pool_size)),
            target,
            patience,
            idle: Arc::default(),
            closed: Arc::default(),
            found_primary: AtomicBool::new(false),
        }
    }

    pub(crate) fn target(&self) -> &Target {
        &self.target
    }

    /// A connection. While the server cannot be reached, tries again until the patience is over.
    pub(crate) async fn get(&self) -> Result<Pooled> {
        self.get_for(Role::Any).await
    }

    /// A connection, if possible one that had the same role before.
    pub(crate) async fn get_for(&self, role: Role) -> Result<Pooled> {
        let began = Instant::now();
        let waiting = self.places.clone().acquire_owned();
        let place = tokio::time::timeout(self.patience, waiting).await;
        let place = match place {
            Ok(Ok(place)) => place,
            Ok(Err(_)) => return Err(Error::shutdown()),
            Err(_) => return Err(too_slow("waiting for a free connection", self.patience)),
        };
        loop {
            match self.take_idle(role) {
                Some(conn) if conn.is_usable() => return Ok(self.lend(conn, place)),
                Some(_) => {}
                None => break,
            }
        }
        let mut pause = FIRST_PAUSE;
        loop {
            if self.closed.load(Ordering::Relaxed) {
                return Err(Error::shutdown());
            }
            match connect(&self.target, self.patience).await {
                Ok((mut conn, _)) => {
                    self.found_primary.store(true, Ordering::Relaxed);
                    conn.role = role;
                    return Ok(self.lend(conn, place));
                }
                Err(error) => {
                    let error = self.while_failing_over(error);
                    let over = began.elapsed() + pause >= self.patience;
                    if !error.class().may_repeat() || over {
                        return Err(error);
                    }
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// The idle connection that was used last in this role, else in [`Role::Any`], else the one that was idle longest.
    fn take_idle(&self, role: Role) -> Option<Conn> {
        let mut idle = self.idle.lock();
        let last = |wanted: Role| idle.iter().rposition(|conn| conn.role == wanted);
        let chosen = last(role).or_else(|| last(Role::Any));
        if idle.is_empty() {
            return None;
        }
        let mut conn = idle.remove(chosen.unwrap_or(0));
        if role != Role::Any {
            conn.role = role;
        }
        Some(conn)
    }

    /// Turns the error of a replica into one that may be repeated, if the pool had a primary: it waits for the next
    /// one.
    fn while_failing_over(&self, error: Error) -> Error {
        if error.code() != Code::ReadOnly || !self.found_primary.load(Ordering::Relaxed) {
            return error;
        }
        Error::new(Code::Unavailable, error.message())
            .hint("the bus goes on by itself once one of the hosts of its URL is a primary")
    }

    fn lend(&self, conn: Conn, place: OwnedSemaphorePermit) -> Pooled {
        Pooled {
            conn: Some(conn),
            idle: self.idle.clone(),
            closed: self.closed.clone(),
            place: Some(place),
        }
    }

    /// Closes the idle connections; those in use are closed when they come back.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        self.places.close();
        self.idle.lock().clear();
    }
}

/// A connection on loan.
pub(crate) struct Pooled {
    conn: Option<Conn>,
    idle: Arc<Mutex<Vec<Conn>>>,
    closed: Arc<AtomicBool>,
    place: Option<OwnedSemaphorePermit>,
}

impl std::ops::Deref for Pooled {
    type Target = Conn;

    #[expect(clippy::expect_used, reason = "it is taken out only by drop")]
    fn deref(&self) -> &Conn {
        self.conn.as_ref().expect("a connection on loan")
    }
}

impl std::ops::DerefMut for Pooled {
    #[expect(clippy::expect_used, reason = "it is taken out only by drop")]
    fn deref_mut(&mut self) -> &mut Conn {
        self.conn.as_mut().expect("a connection on loan")
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        if let Some(conn) = self.conn.take()
            && conn.is_usable()
            && !self.closed.load(Ordering::Relaxed)
        {
            if !conn.kept.lent_out.load(Ordering::Relaxed) {
                self.idle.lock().push(conn);
                return;
            }
            // Through a pooler the session belongs to the pooler, and is not cleaned. Without a runtime the connection
            // cannot be cleaned, so it is closed.
            let pooled = conn.kept.statements.is_none();
            let Ok(runtime) = tokio::runtime::Handle::try_current() else {
                return;
            };
            let (idle, closed, place) = (self.idle.clone(), self.closed.clone(), self.place.take());
            runtime.spawn(async move {
                let clean = pooled || conn.clean().await.is_ok();
                conn.kept.lent_out.store(false, Ordering::Relaxed);
                if clean && !closed.load(Ordering::Relaxed) {
                    idle.lock().push(conn);
                }
                drop(place);
            });
        }
    }
}

/// How often a transaction was tried.
pub(crate) struct Tries(u32);

impl Tries {
    pub(crate) fn new() -> Self {
        Self(0)
    }

    /// Waits before the next try. Returns the error if the transaction must not be tried again.
    pub(crate) async fn again(&mut self, error: Error) -> Result<()> {
        self.0 += 1;
        let lost = error.code() == Code::Unavailable && !error.outcome_unknown() && self.0 <= 3;
        if !(is_conflict(&error) && self.0 < MOST_TRIES || lost) {
            return Err(error);
        }
        let most = 2u64 << self.0.min(6);
        tokio::time::sleep(Duration::from_millis(fastrand::u64(1..=most))).await;
        Ok(())
    }
}

/// Runs the body in a transaction and commits it. The body runs again after a conflict with another transaction, or if
/// the connection was lost before the commit. The body may use `?`, and ends with a `Result`.
macro_rules! transaction {
    ($pool:expr, $doing:expr, |$tx:ident| $body:expr) => {{
        let mut tries = $crate::pool::Tries::new();
        loop {
            let done: everbus_core::Result<_> = async {
                let mut conn = $pool.get().await?;
                let transaction = conn.begin($doing).await?;
                let $tx = &transaction;
                let value: everbus_core::Result<_> = async { $body }.await;
                let value = value?;
                transaction.commit($doing).await?;
                Ok(value)
            }
            .await;
            match done {
                Ok(value) => break Ok(value),
                Err(error) => {
                    if let Err(error) = tries.again(error).await {
                        break Err(error);
                    }
                }
            }
        }
    }};
}
pub(crate) use transaction;
