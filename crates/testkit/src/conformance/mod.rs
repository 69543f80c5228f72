//! The conformance suite: scenarios at the level of [`Broker`](everbus_core::Broker),
//! [`Log`](everbus_core::Log) and [`DeadLetters`](everbus_core::DeadLetters) that every engine passes.
//!
//! An engine implements [`Harness`] and expands [`conformance_tests!`](crate::conformance_tests).
//! A scenario says first how it uses [`Time`] and what it [needs]; its [`Outcome`] is compared with what
//! is checked in for the engine, and `COMPAT.md` shows it.

pub mod addressed;
pub mod appending;
pub mod audit;
pub mod claims;
pub mod clock;
#[cfg(test)]
mod compat;
pub mod consuming;
pub mod dead_letters;
pub mod effects;
pub mod ephemeral;
pub mod groups;
pub mod history;
pub mod inbox;
pub mod kv;
pub mod lapsing;
pub mod needs;
pub mod notices;
pub mod ordered;
mod outcome;
pub mod outcomes;
pub mod pausing;
pub mod payloads;
pub mod positions;
mod reading;
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

pub use outcome::{NotOffered, Outcome, Passed, run};
pub use stage::{Stage, Time};

/// The names of all scenarios, in the order of the suite.
pub fn names() -> Vec<&'static str> {
    let is_name = |text: &str| text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    // `module::name;` in a list, or the first argument of a `run` on a line of its own.
    let named = |line: &'static str| {
        let quoted = |line: &'static str| line.strip_prefix('"')?.strip_suffix("\",");
        let name = line.strip_suffix(';').or_else(|| quoted(line))?;
        let (module, scenario) = name.split_once("::")?;
        (is_name(module) && is_name(scenario)).then_some(name)
    };
    let lines = include_str!("suite.rs").lines().map(str::trim);
    let mut names: Vec<&str> = lines.filter_map(named).collect();
    let mut order: Vec<&str> = Vec::new();
    for name in &names {
        let module = name.split("::").next().unwrap_or(name);
        if !order.contains(&module) {
            order.push(module);
        }
    }
    names.sort_by_key(|name| {
        order
            .iter()
            .position(|m| name.starts_with(&format!("{m}::")))
    });
    names
}

/// Whether the engine of a harness can be opened; if not, says so (see
/// [`servers::require`](crate::servers::require)).
#[doc(hidden)]
pub fn is_available(harness: &impl Harness) -> bool {
    let found = harness.available();
    if harness.by_hand() && found.is_err() {
        return false;
    }
    crate::servers::require("the conformance suite", "cargo xtask test", found).is_some()
}

/// How the suite opens an engine. One value is one storage, empty at first.
pub trait Harness: Send + Sync {
    /// Opens the engine; opening again on the same value is a restart.
    fn open(&self, clock: Arc<dyn Clock>) -> impl Future<Output = Engine> + Send;

    /// Whether acknowledged events are there after a restart.
    fn survives_restart(&self) -> bool;

    /// Ends an engine as a crash would: no close. The default drops it.
    fn crash(&self, engine: Engine) -> impl Future<Output = ()> + Send {
        async move { drop(engine) }
    }

    /// Whether a consumer may claim events before they are fetched. A claim that is lost before the fetch, by
    /// a crash or the end of a lease, may count as an attempt.
    fn claims_ahead(&self) -> bool {
        true
    }

    /// Whether leases and delays follow the clock given to `open`. Otherwise the suite really waits, and
    /// leaves out scenarios that need a clock that can be moved.
    fn virtual_time(&self) -> bool {
        true
    }

    /// Whether its tests run only on request. Then a missing server is not a failure; the message about it was
    /// printed before.
    fn by_hand(&self) -> bool {
        false
    }

    /// Whether the engine can be opened here. An error says which server is missing and how to get it: the
    /// scenario is then skipped with that message, or fails with `EVERBUS_REQUIRE_SERVERS=1`.
    fn available(&self) -> Result<(), String> {
        Ok(())
    }

    /// The name of its column in `docs/compat`, if that is not the name of the engine.
    fn column(&self) -> Option<&'static str> {
        None
    }
}
