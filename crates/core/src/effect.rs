//! Effects: work of a handler inside the transaction that acks its event.
//!
//! The engine runs an effect while it settles, in the same commit as the inbox record, the follow-up events
//! and the ack: all of them happen or none. The argument of the effect depends on the engine (the SQLite
//! engine passes its connection), so here it has no type.

use std::any::Any;
use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use crate::event::Event;

/// The result of an effect: further events for the same commit, or the error that rolls it back.
pub type EffectResult = Result<Vec<Event>, Box<dyn StdError + Send + Sync>>;

type Run = dyn Fn(&dyn Any) -> EffectResult + Send + Sync;

/// Work for the engine's own transaction.
///
/// An effect may run more than once: after a rollback it runs again. Only the committed run counts, so an effect must
/// change nothing outside the transaction.
#[derive(Clone)]
pub struct Effect {
    engine: &'static str,
    run: Arc<Run>,
}

impl Effect {
    /// An effect for the engine of this name, which documents the argument it passes.
    pub fn new(
        engine: &'static str,
        run: impl Fn(&dyn Any) -> EffectResult + Send + Sync + 'static,
    ) -> Self {
        Self {
            engine,
            run: Arc::new(run),
        }
    }

    /// The engine whose transaction it needs.
    pub fn engine(&self) -> &'static str {
        self.engine
    }

    /// Runs it on the engine's transaction.
    pub fn run(&self, transaction: &dyn Any) -> EffectResult {
        (self.run)(transaction)
    }
}

impl PartialEq for Effect {
    /// Whether both are the same effect object.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.run, &other.run)
    }
}

impl fmt::Debug for Effect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Effect")
            .field("engine", &self.engine)
            .finish_non_exhaustive()
    }
}
