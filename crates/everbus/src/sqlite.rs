//! Exactly-once effects in the file of the SQLite engine.
//!
//! The engine runs the effect on its writer, in the transaction that also contains the inbox record, the
//! follow-up events and the ack: they commit together or not at all. Nothing else is written meanwhile, so
//! keep an effect to a few statements without waiting.

use std::ops::Deref;

use everbus_core::{Code, Effect, Error};
use rusqlite::Connection;

use crate::handler::HandlerOutcome;
use crate::handler::outcome::{self, IntoOutcome, Outcome, Returns};

/// The name of the engine.
pub(crate) const ENGINE: &str = "sqlite";

/// The transaction that acks the event. It derefs to the [`Connection`]. Your own tables can be created,
/// changed and read; those of Everbus only read, except that events can be written to its
/// [outbox](crate::outbox::Outbox::enqueue). The engine ends the transaction: `COMMIT`, `ROLLBACK`,
/// `ATTACH` and `PRAGMA` are refused.
pub struct Transaction<'a>(&'a Connection);

impl Deref for Transaction<'_> {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        self.0
    }
}

impl std::fmt::Debug for Transaction<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Transaction")
    }
}

/// The return value of [`in_transaction`], which a handler returns.
#[derive(Clone, Debug)]
#[must_use = "the handler returns it; nothing is done before that"]
pub struct InTransaction(Effect);

/// Work for the transaction of the ack: the handler returns it.
///
/// The closure is called with the transaction, may be called again if the commit failed, and must have no
/// other effects. It returns the same as a handler: nothing, events to publish in the same transaction, or
/// an error; after an error the transaction is rolled back and the event is retried. An event that the
/// group's inbox has as handled is acked without a call.
///
/// ```
/// use everbus::{Bus, Event, HandlerError, Payload, Router, sqlite};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize, Event)]
/// #[event(type = "bank.deposit.made")]
/// struct Deposit { account: i64, amount: i64 }
///
/// async fn book(Payload(deposit): Payload<Deposit>) -> sqlite::InTransaction {
///     // Slow work goes here, before the transaction.
///     sqlite::in_transaction(move |tx| {
///         tx.execute("CREATE TABLE IF NOT EXISTS balance (account INTEGER PRIMARY KEY, amount INTEGER)", ())?;
///         tx.execute(
///             "INSERT INTO balance VALUES (?1, ?2) ON CONFLICT DO UPDATE SET amount = amount + ?2",
///             (deposit.account, deposit.amount),
///         )?;
///         Ok::<_, HandlerError>(())
///     })
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> everbus::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let url = dir.path().join("bank.db").display().to_string();
/// let bus = Bus::open(url).await?;
/// bus.mount(Router::new().group("ledger").on("bank.deposit.made", book)).await?;
/// bus.start().await?;
/// let receipt = bus.publish(Deposit { account: 7, amount: 100 }).await?;
/// assert!(receipt.settled().await?.dead_lettered.is_empty());
/// # bus.shutdown().await?;
/// # Ok(())
/// # }
/// ```
pub fn in_transaction<F, R>(effect: F) -> InTransaction
where
    F: Fn(&Transaction<'_>) -> R + Send + Sync + 'static,
    R: IntoOutcome,
{
    InTransaction(Effect::new(ENGINE, move |transaction| {
        let Some(connection) = transaction.downcast_ref::<Connection>() else {
            return Err(foreign().into());
        };
        outcome::events_only(effect(&Transaction(connection)))
    }))
}

fn foreign() -> Error {
    Error::new(
        Code::Unsupported,
        "the transaction is not one of the SQLite engine",
    )
}

impl IntoOutcome for InTransaction {
    fn into_outcome(self) -> HandlerOutcome {
        Ok(Outcome::of_effect(self.0))
    }

    fn returns(returns: &mut Returns) {
        returns.transaction = Some(ENGINE);
    }
}
