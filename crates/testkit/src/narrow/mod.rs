//! The narrow engine: a broker with several shards that offers nothing beyond the verbs, and fails on
//! demand.
//!
//! It is several memory engines in a row, one for each shard, with everything taken away that a server may
//! lack: delays, fencing, exact attempts, deduplication, failure texts, dead letters that can be queried,
//! and any step that does two things at once. A runtime that keeps its promises here, with a store beside
//! it, does not depend on any engine in particular.
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
