//! Exactly-once effects in the database of the PostgreSQL engine, and the outbox in any PostgreSQL database.
//!
//! The engine awaits the effect in the transaction that also contains the inbox record, the follow-up events
//! and the ack: they commit together or not at all. The connection and the rows that the effect locks are
//! held meanwhile, so keep slow work, such as calls of other services, out of it.

mod outbox;

use std::sync::Arc;

use everbus_core::{BoxFuture, Code, Effect, Error};
use everbus_postgres::tokio_postgres::Transaction;
use everbus_postgres::{ENGINE, Slot};

use crate::handler::HandlerOutcome;
use crate::handler::outcome::{self, IntoOutcome, Outcome, Returns};

pub use outbox::Outbox;

/// The return value of [`in_transaction`], which a handler returns.
#[derive(Clone, Debug)]
#[must_use = "the handler returns it; nothing is done before that"]
pub struct InTransaction(Effect);

/// Work for the transaction of the ack: the handler returns it.
///
/// The closure is called with the transaction, may be called again if the commit failed or another
/// transaction was in the way, and must have no other effects. It returns the same as a handler: nothing,
/// events to publish in the same transaction, or an error; after an error the transaction is rolled back and
/// the event is retried. An event that the group's inbox has as handled is acked without a call.
///
/// It may take as long as the engine waits for an answer of the server (30 seconds); then it is rolled back
/// and has failed. Settings, roles, locks and temporary tables of the session are reset after it; through a
/// pooler they are not, so use `SET LOCAL` and `pg_advisory_xact_lock` there.
///
/// Leave out `COMMIT` and `ROLLBACK`: the engine ends the transaction. Through a pooler in transaction mode use
/// the methods of the transaction that name the types of their values (`query_typed`, `execute_typed`).
///
/// ```no_run
/// use everbus::{Bus, Event, HandlerError, Payload, Router, postgres};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize, Event)]
/// #[event(type = "bank.deposit.made")]
/// struct Deposit { account: i64, amount: i64 }
///
/// async fn book(Payload(deposit): Payload<Deposit>) -> postgres::InTransaction {
///     // Slow work goes here, before the transaction.
///     let (account, amount) = (deposit.account, deposit.amount);
///     postgres::in_transaction(move |tx| Box::pin(async move {
///         let sql = "INSERT INTO balance VALUES ($1, $2)
///                    ON CONFLICT (account) DO UPDATE SET amount = balance.amount + $2";
///         tx.execute(sql, &[&account, &amount]).await?;
///         Ok::<_, HandlerError>(())
///     }))
/// }
///
/// # async fn run() -> everbus::Result<()> {
/// let bus = Bus::open("postgres://shop:secret@localhost/shop").await?;
/// bus.mount(Router::new().group("ledger").on("bank.deposit.made", book)).await?;
/// bus.start().await?;
/// # Ok(())
/// # }
/// ```
pub fn in_transaction<F, R>(effect: F) -> InTransaction
where
    F: for<'a> Fn(&'a Transaction<'a>) -> BoxFuture<'a, R> + Send + Sync + 'static,
    R: IntoOutcome + 'static,
{
    let effect = Arc::new(effect);
    InTransaction(Effect::new(ENGINE, move |slot| {
        let Some(slot) = slot.downcast_ref::<Slot>() else {
            return Err(foreign().into());
        };
        let effect = effect.clone();
        slot.set(Box::new(move |tx| {
            Box::pin(async move { outcome::events_only(effect(tx).await) })
        }));
        Ok(Vec::new())
    }))
}

fn foreign() -> Error {
    let what = "the transaction is not one of the PostgreSQL engine";
    Error::new(Code::Unsupported, what)
}

impl IntoOutcome for InTransaction {
    fn into_outcome(self) -> HandlerOutcome {
        Ok(Outcome::of_effect(self.0))
    }

    fn returns(returns: &mut Returns) {
        returns.transaction = Some(ENGINE);
    }
}
