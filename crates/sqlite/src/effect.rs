//! Part of the writer: effects. An effect is a handler's own work in the transaction that acks its event.
//!
//! An effect runs on the writer, under a savepoint. If it fails, panics or is refused a statement, the
//! savepoint is rolled back, and its whole settlement with it, in the file and in memory. The other
//! settlements of the transaction are not affected. If an effect makes SQLite roll back the whole transaction
//! (`INSERT OR ROLLBACK`), the transaction runs again without that effect.

use std::any::Any;
use std::error::Error as StdError;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use everbus_core::{Code, Effect, Error, Event, Lease, Result};

use crate::errors::from_sqlite;
use crate::failpoint;
use crate::guard::SAVEPOINT;
use crate::rows::Seq as _;
use crate::writer::Writer;

/// The engine of effects that this crate runs: they get a `rusqlite::Connection`.
pub(crate) const ENGINE: &str = "sqlite";

/// An effect that holds the writer for longer than this is logged.
const LONG: Duration = Duration::from_millis(50);

/// Wraps the error that an effect returned, as the cause of the engine's error. Its source is the effect's
/// error, whatever its type.
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

/// What to remove from memory if the savepoint is rolled back.
struct Mark {
    head: u64,
    appended: usize,
}

impl Writer {
    /// Does the work that belongs to an ack under a savepoint: all of it or nothing.
    pub(crate) fn under_savepoint<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        let mark = Mark {
            head: self.state.head,
            appended: self.state.appended.len(),
        };
        self.savepoint("SAVEPOINT")?;
        let result = work(self);
        if self.conn.is_autocommit() {
            // The transaction is gone. The other settlements run again in a new one, without this settlement.
            return result;
        }
        if result.is_err() {
            self.savepoint("ROLLBACK TO")?;
            self.take_back(&mark);
        }
        self.savepoint("RELEASE")?;
        result
    }

    fn savepoint(&self, what: &str) -> Result<()> {
        self.conn
            .prepare_cached(&format!("{what} {SAVEPOINT}"))
            .and_then(|mut s| s.execute([]))
            .map(drop)
            .map_err(|e| from_sqlite("keeping an effect apart", e))
    }

    fn take_back(&mut self, mark: &Mark) {
        self.state.head = mark.head;
        self.state.appended.truncate(mark.appended);
        // New types and tenants were rolled back, and their numbers may be given to others.
        self.state.forget_names();
    }

    /// Runs an effect. The events that it returns are to be appended.
    pub(crate) fn run_effect(&mut self, lease: &Lease, effect: &Effect) -> Result<Vec<Event>> {
        let schema = self.schema_cookie()?;
        let began = Instant::now();
        let conn: &dyn Any = &self.conn;
        let result = self
            .guard
            .during(|| catch_unwind(AssertUnwindSafe(|| effect.run(conn))));
        let took = began.elapsed();
        if took > LONG {
            tracing::warn!(
                target: "everbus::sqlite",
                position = lease.seq(),
                took_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
                "an effect held the writer; every publish waits meanwhile"
            );
        }
        failpoint::hit("after-effect");
        let result = match result {
            Ok(Ok(events)) => Ok(events),
            Ok(Err(cause)) => Err(failed(cause)),
            Err(panic) => Err(panicked(&*panic)),
        };
        if self.conn.is_autocommit() {
            let error = result.err().unwrap_or_else(broke_out);
            self.offenders.push((lease.clone(), error.clone()));
            return Err(error);
        }
        let events = result?;
        if !self.settling_apart && self.schema_cookie()? != schema && self.defers_constraints()? {
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

    /// Whether some table has deferred constraints, which are checked at the commit. Then the commit of one
    /// effect must not decide about others.
    pub(crate) fn defers_constraints(&self) -> Result<bool> {
        self.conn
            .prepare_cached(
                "SELECT EXISTS (SELECT 1 FROM sqlite_schema
                   WHERE type = 'table' AND sql LIKE '%INITIALLY%DEFERRED%')",
            )
            .and_then(|mut s| s.query_row([], |r| r.get(0)))
            .map_err(|e| from_sqlite("reading the schema", e))
    }

    fn schema_cookie(&self) -> Result<i64> {
        self.conn
            .prepare_cached("PRAGMA schema_version")
            .and_then(|mut s| s.query_row([], |r| r.get(0)))
            .map_err(|e| from_sqlite("reading the schema", e))
    }
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
