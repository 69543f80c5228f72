//! The suite every engine passes.

use std::sync::Arc;

use everbus_core::{Clock, Engine};
use everbus_testkit::conformance::Harness;

#[derive(Debug)]
pub(crate) struct InMemory;

impl Harness for InMemory {
    async fn open(&self, clock: Arc<dyn Clock>) -> Engine {
        everbus_memory::open(everbus_memory::Options { clock })
    }

    fn survives_restart(&self) -> bool {
        false
    }

    fn claims_ahead(&self) -> bool {
        false
    }
}

// conformance: bus/memory-engine: the memory engine passes the suite every engine passes
everbus_testkit::conformance_tests!(InMemory);
