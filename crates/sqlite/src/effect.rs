//! Effects. An effect is a handler's own work in the transaction that acks its event.
//!
//! An effect runs on the writer, under a savepoint. If the effect fails or panics, or if the guard refuses one of its
//! statements, the savepoint is rolled back, and with it the whole settlement, in the file and in memory. The other
//! settlements of the transaction are not affected. If an effect makes SQLite roll back the whole transaction
//! (`INSERT OR ROLLBACK`), the transaction runs again without that effect.

use std::any::Any;
use std::error::Error as StdError;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use everbus_core::{Code, Effect, Error, Event, Lease, Result};

use crate::failpoint;
use crate::guard::{Guard, SAVEPOINT};
use crate::rows::Seq as _;
use crate::sql::Sql as _;
use crate::tx::Tx;

/// The engine of effects that this crate runs: they get a `rusqlite::Connection`.
pub(crate) const ENGINE: &str = "sqlite";

/// An effect that holds the writer for longer than this is logged.
const LONG: Duration = Duration::from_millis(50);

/// Wraps the error that an effect returned, as the cause of the engine's error. Its source is the effect's error, of
/// any type.
#[derive(Debug)]
struct Cause(Box<dyn StdError + Send + Sync>);

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl StdError for Cause {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&*self.0)
    }
}

/// How effects run.
pub(crate) struct Effects {
    pub(crate) guard: Guard,
    /// Effects that rolled the transaction back, each with the error its settlement gets.
    pub(crate) offenders: Vec<(Lease, Error)>,
    /// Whether each settlement has a transaction of its own.
    pub(crate) apart: bool,
}

/// What to remove from memory if the savepoint is rolled back.
struct Mark {
    head: u64,
    appended: usize,
}

/// Does the work that belongs to an ack under a savepoint: all of it or nothing.
pub(crate) fn under_savepoint<T>(
    tx: &mut Tx,
    work: impl FnOnce(&mut Tx) -> Result<T>,
) -> Result<T> {
    let mark = Mark {
        head: tx.log.head,
        appended: tx.log.appended.len(),
    };
    savepoint(tx, "SAVEPOINT")?;
    let result = work(tx);
    if tx.conn.is_autocommit() {
        // The transaction is gone. The other settlements run again in a new one, without this settlement.
        return result;
    }
    if result.is_err() {
        savepoint(tx, "ROLLBACK TO")?;
        take_back(tx, &mark);
    }
    savepoint(tx, "RELEASE")?;
    result
}

fn savepoint(tx: &Tx, what: &str) -> Result<()> {
    tx.conn.run(
        "keeping an effect apart",
        &format!("{what} {SAVEPOINT}"),
        [],
    )
}

fn take_back(tx: &mut Tx, mark: &Mark) {
    tx.log.head = mark.head;
    tx.log.appended.truncate(mark.appended);
    // New types and tenants were rolled back, and their numbers may be assigned to other names.
    tx.log.forget_names();
}

/// Runs an effect. The events that it returns are to be appended.
pub(crate) fn run_effect(
    tx: &mut Tx,
    effects: &mut Effects,
    lease: &Lease,
    effect: &Effect,
) -> Result<Vec<Event>> {
    let schema = schema_cookie(tx)?;
    let began = Instant::now();
    let conn: &dyn Any = &tx.conn;
    let result = effects
        .guard
        .during(|| catch_unwind(AssertUnwindSafe(|| effect.run(conn))));
    let took = began.elapsed();
    if took > LONG {
        tracing::warn!(
            target: "everbus::sqlite",
            position = lease.seq(),
            took_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
            "an effect held the writer for a long time; every publish waited meanwhile"
        );
    }
    failpoint::hit("after-effect");
    let result = match result {
        Ok(Ok(events)) => Ok(events),
        Ok(Err(cause)) => Err(failed(cause)),
        Err(panic) => Err(panicked(&*panic)),
    };
    if tx.conn.is_autocommit() {
        let error = result.err().unwrap_or_else(broke_out);
        effects.offenders.push((lease.clone(), error.clone()));
        return Err(error);
    }
    let events = result?;
    if !effects.apart && schema_cookie(tx)? != schema && defers_constraints(tx)? {
        return Err(Error::new(
            Code::EffectFailed,
            "an effect made a table with a deferred constraint",
        )
        .hint("make the tables before the first event is handled"));
    }
    Ok(events)
}

/// Refuses an effect that belongs to another engine.
pub(crate) fn check_effect(effect: &Effect) -> Result<()> {
    if effect.engine() == ENGINE {
        return Ok(());
    }
    Err(Error::new(
        Code::Unsupported,
        format!(
            "an effect for the {} engine cannot run in a transaction of the {ENGINE} engine",
            effect.engine()
        ),
    )
    .hint("write the effect for the engine that carries the events"))
}

/// Whether some table has deferred constraints, which are checked at the commit. If so, each settlement needs a commit
/// of its own.
pub(crate) fn defers_constraints(tx: &Tx) -> Result<bool> {
    let sql = "SELECT EXISTS (SELECT 1 FROM sqlite_schema
               WHERE type = 'table' AND sql LIKE '%INITIALLY%DEFERRED%')";
    tx.conn.one("reading the schema", sql, [])
}

fn schema_cookie(tx: &Tx) -> Result<i64> {
    tx.conn
        .one("reading the schema", "PRAGMA schema_version", [])
}

/// The error of an effect that failed at the commit.
pub(crate) fn failed_at_commit(error: Error) -> Error {
    failed(Box::new(error))
}

fn failed(cause: Box<dyn StdError + Send + Sync>) -> Error {
    let error = Error::new(
        Code::EffectFailed,
        format!("nothing of the settlement was done: {cause}"),
    );
    let refused = cause
        .downcast_ref::<rusqlite::Error>()
        .and_then(rusqlite::Error::sqlite_error_code)
        == Some(rusqlite::ErrorCode::AuthorizationForStatementDenied);
    let error = error.caused_by(Cause(cause));
    if refused {
        error.hint(
            "an effect may read everything and change your own tables; it may not end the \
             transaction, set pragmas, use temporary tables or change tables of Everbus",
        )
    } else {
        error
    }
}

fn panicked(panic: &(dyn Any + Send)) -> Error {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("(no text)");
    Error::new(
        Code::EffectFailed,
        format!("nothing of the settlement was done: the effect panicked: {text}"),
    )
}

fn broke_out() -> Error {
    Error::new(
        Code::EffectFailed,
        "nothing of the settlement was done: a statement of the effect rolled the transaction back",
    )
    .hint("do not use OR ROLLBACK or RAISE(ROLLBACK) in an effect; return an error instead")
}
