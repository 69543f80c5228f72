//! The narrow engine alone: what the verbs give without any help.

use std::sync::Arc;

use everbus_core::{Clock, Engine};
use everbus_testkit::conformance::Harness;
use everbus_testkit::narrow::{self, Faults};

#[derive(Debug)]
struct Narrow;

impl Harness for Narrow {
    async fn open(&self, clock: Arc<dyn Clock>) -> Engine {
        narrow::open(&clock, 3, Faults::none()).unwrap()
    }

    fn survives_restart(&self) -> bool {
        false
    }

    fn claims_ahead(&self) -> bool {
        false
    }
}

// conformance: contract/suite-narrow: the narrow engine passes the suite, except for what its capabilities deny
everbus_testkit::conformance_tests!(Narrow);
