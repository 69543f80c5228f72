//! Effects: work of a handler in the transaction that acks its event.

use std::any::Any;
use std::error::Error as StdError;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::Poll;

use everbus_core::{BoxFuture, Code, Effect, EffectResult, Error, Event, Result};
use parking_lot::Mutex;

use crate::errors::Refused;
use crate::pool::{Sql as _, Tx};
use crate::rows::get;

/// The name of the engine, in [`Effect::engine`] and in its capabilities.
pub const ENGINE: &str = "postgres";

/// Work on the transaction of the ack.
pub type Work = Box<
    dyn for<'a> FnOnce(&'a tokio_postgres::Transaction<'a>) -> BoxFuture<'a, EffectResult> + Send,
>;

/// What an effect for this engine gets. The effect sets its work here. The engine runs the work in the transaction of
/// the ack, after the effect has returned.
#[derive(Default)]
pub struct Slot(Mutex<Option<Work>>);

impl Slot {
    /// Sets the work. Its statements belong to the transaction of the ack, which the engine commits.
    pub fn set(&self, work: Work) {
        *self.0.lock() = Some(work);
    }
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Slot")
    }
}

/// Refuses an effect that belongs to another engine.
pub(crate) fn check(effect: &Effect) -> Result<()> {
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

/// Runs an effect on a transaction.
pub(crate) async fn run(tx: &Tx<'_>, effect: &Effect) -> Result<Vec<Event>> {
    let slot = Slot::default();
    let any: &dyn Any = &slot;
    let mut events = ended(catch_unwind(AssertUnwindSafe(|| effect.run(any))))?;
    let Some(work) = slot.0.into_inner() else {
        return Ok(events);
    };
    let before = transaction_id(tx).await?;
    let patience = tx.lend_out();
    // This also ends a statement that waits for a lock.
    let limit = "SELECT set_config('statement_timeout', $1, true) WHERE current_setting('statement_timeout') = '0'";
    let millis = patience.as_millis().clamp(1, 2_000_000_000).to_string();
    tx.query("running an effect", limit, &[&millis]).await?;
    let mut running = work(tx.inner());
    let caught = std::future::poll_fn(|cx| {
        let polled = catch_unwind(AssertUnwindSafe(|| Pin::new(&mut running).poll(cx)));
        match polled {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(result)) => Poll::Ready(Ok(result)),
            Err(panic) => Poll::Ready(Err(panic)),
        }
    });
    let Ok(caught) = tokio::time::timeout(patience, caught).await else {
        tx.give_up();
        return Err(Error::new(
            Code::EffectFailed,
            format!("an effect took longer than {patience:?}; it was rolled back"),
        )
        .hint("do slow work before the transaction, or raise the patience of the options"));
    };
    events.extend(ended(caught)?);
    // Checks deferred constraints now, so that a violation is a failure of the effect and not of the commit.
    let checked = tx.batch_raw("SET CONSTRAINTS ALL IMMEDIATE").await?;
    checked.map_err(|e| failed(Box::new(e)))?;
    // If a statement of the effect ended the transaction, the ack would no longer belong to it.
    if transaction_id(tx).await.map_err(|e| failed(Box::new(e)))? != before {
        return Err(Error::new(
            Code::EffectFailed,
            "an effect ended the transaction of its ack",
        )
        .hint("leave out COMMIT and ROLLBACK: the engine ends the transaction"));
    }
    Ok(events)
}

async fn transaction_id(tx: &Tx<'_>) -> Result<String> {
    let row = tx
        .one(
            "running an effect",
            "SELECT pg_current_xact_id()::text",
            &[],
        )
        .await?;
    get(&row, 0)
}

fn ended(result: std::thread::Result<EffectResult>) -> Result<Vec<Event>> {
    match result {
        Ok(Ok(events)) => Ok(events),
        Ok(Err(cause)) => Err(failed(cause)),
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
            let text = text.unwrap_or_else(|| "no message".to_owned());
            Err(Error::new(
                Code::EffectFailed,
                format!("an effect panicked: {text}"),
            ))
        }
    }
}

/// An error of the handler as the cause of ours.
#[derive(Debug)]
struct Cause(Box<dyn StdError + Send + Sync>);

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl StdError for Cause {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&*self.0)
    }
}

fn failed(cause: Box<dyn StdError + Send + Sync>) -> Error {
    if let Some(passing) = passing(&*cause) {
        return passing;
    }
    let what = format!("nothing of the settlement was done: {cause}");
    Error::new(Code::EffectFailed, what).caused_by(Cause(cause))
}

/// A conflict with another transaction or a lost connection is not a failure of the effect: the effect runs again.
fn passing(cause: &(dyn StdError + 'static)) -> Option<Error> {
    let mut next = Some(cause);
    while let Some(error) = next {
        let refused = error.downcast_ref::<Refused>().map(|refused| &refused.0);
        if let Some(found) = refused.or_else(|| error.downcast_ref::<tokio_postgres::Error>()) {
            let closed = found.is_closed();
            let state = found.code().map_or("", |state| state.code());
            let conflict = matches!(state, "40001" | "40P01");
            let lost = closed || state.starts_with("57P") || state.starts_with("08");
            let code = match (conflict, lost) {
                (true, _) => Code::Busy,
                (_, true) => Code::Unavailable,
                _ => return None,
            };
            return Some(Error::new(code, format!("running an effect: {found}")));
        }
        next = error.source();
    }
    None
}
