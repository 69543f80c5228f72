//! Effects: what a handler wants done inside the transaction that acks its event.
//!
//! The engine runs an effect while it settles, in the same commit as the inbox record, the follow-up
//! events and the ack: all of them happen or none. What the effect is given is the engine's business
//! (the SQLite engine passes its connection), so it travels through here without a type.

use std::any::Any;
use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use crate::event::Event;

/// What an effect comes to: further events for the same commit, or why nothing of it may happen.
pub type EffectResult = Result<Vec<Event>, Box<dyn StdError + Send + Sync>>;

type Run = dyn Fn(&dyn Any) -> EffectResult + Send + Sync;

/// Work for the engine's own transaction.
///
/// It may run more than once: a transaction that was rolled back runs it again. Only the run that is
/// committed counts, so it must have no other effects than those on the transaction.
#[derive(Clone)]
pub struct Effect {
    engine: &'static str,
    run: Arc<Run>,
}

impl Effect {
    /// An effect for the engine of this name, which passes what that engine documents.
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
    /// Whether both are the same effect, not whether they do the same.
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
