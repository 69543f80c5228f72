//! The narrow engine: a broker with several shards that offers only the required verbs, and fails on
//! demand.
//!
//! It consists of several memory engines, one for each shard, without the features that a server may lack:
//! delays, fencing, exact attempts, deduplication, failure texts, dead letters that can be queried, and
//! atomic steps. A runtime that keeps its guarantees here, with a store beside it, does not depend on any
//! particular engine.
//!
//! [`Faults`] makes calls fail before or after they took effect, stores events twice, hands them out twice,
//! and takes shards away from a consumer. [`with_faulty_store`] does the same to the store beside it.

mod broker;
mod consumer;
mod faults;
mod store;
mod wire;

use std::sync::Arc;

use everbus_core::{Clock, Engine};

use broker::Narrow;
pub use faults::{Faults, Tally};
pub use store::with_faulty_store;

/// Opens a narrow engine with this many shards.
pub fn open(clock: &Arc<dyn Clock>, shards: usize, faults: Faults) -> everbus_core::Result<Engine> {
    let narrow = Narrow::new(clock, shards, faults)?;
    Ok(Engine::new(Arc::new(narrow)))
}
