//! The conformance suite: scenarios at the level of [`Broker`](everbus_core::Broker),
//! [`Log`](everbus_core::Log) and [`DeadLetters`](everbus_core::DeadLetters) that every engine passes.
//!
//! An engine implements [`Harness`] and expands [`conformance_tests!`](crate::conformance_tests).
//! Where engines may differ, a scenario asks their [`Capabilities`](everbus_core::Capabilities).

pub mod addressed;
pub mod appending;
pub mod audit;
pub mod clock;
pub mod consuming;
pub mod dead_letters;
pub mod effects;
pub mod ephemeral;
pub mod groups;
pub mod history;
pub mod inbox;
pub mod lapsing;
pub mod notices;
pub mod ordered;
pub mod outcomes;
pub mod payloads;
pub mod replay;
pub mod restart;
pub mod retention;
pub mod reviving;
pub mod settled;
pub mod settling;
pub(crate) mod stage;
pub mod store;
pub mod streams;
mod suite;
pub mod upkeep;

use std::future::Future;
use std::sync::Arc;

use everbus_core::{Clock, Engine};

pub use stage::Stage;

/// How the suite gets at an engine. One value is one storage, empty at first.
pub trait Harness: Send + Sync {
    /// Opens the engine; opening again on the same value is a restart.
    fn open(&self, clock: Arc<dyn Clock>) -> impl Future<Output = Engine> + Send;

    /// Whether what was acknowledged is there after a restart.
    fn survives_restart(&self) -> bool;

    /// Ends an engine as a crash would: no close. The default drops it.
    fn crash(&self, engine: Engine) -> impl Future<Output = ()> + Send {
        async move { drop(engine) }
    }

    /// Whether a consumer may claim events before they are fetched. What it claimed and lost unfetched,
    /// by a crash or the end of a lease, may count as an attempt.
    fn claims_ahead(&self) -> bool {
        true
    }

    /// Whether leases and delays follow the clock given to `open`. Otherwise the suite really waits.
    fn virtual_time(&self) -> bool {
        true
    }
}
