//! The suite every engine passes.

use std::sync::Arc;

use everbus_core::{Clock, Engine, SystemClock};
use everbus_nats::Options;
use everbus_testkit::conformance::Harness;

use crate::server;

#[derive(Debug)]
struct OnServer {
    url: String,
}

impl OnServer {
    fn new() -> Self {
        Self {
            url: server::space().unwrap(),
        }
    }
}

/// Opens the engine of a space.
pub(crate) async fn open(url: &str) -> Engine {
    let mut options = Options::default();
    options.clock = Arc::new(SystemClock);
    everbus_nats::open(url, options).await.unwrap()
}

impl Harness for OnServer {
    async fn open(&self, _: Arc<dyn Clock>) -> Engine {
        open(&self.url).await
    }

    fn survives_restart(&self) -> bool {
        true
    }

    fn virtual_time(&self) -> bool {
        false
    }
}

// conformance: bus/nats-engine: the NATS engine passes the suite every engine passes, against a real server
everbus_testkit::conformance_tests!(OnServer::new());
