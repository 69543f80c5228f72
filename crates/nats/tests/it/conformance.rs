//! The suite every engine passes.

use std::sync::Arc;

use everbus_core::{Clock, Engine, SystemClock};
use everbus_nats::Options;
use everbus_testkit::conformance::Harness;

use crate::server;

#[derive(Debug)]
struct OnServer {
    url: Option<String>,
}

impl OnServer {
    fn new() -> Self {
        Self {
            url: server::account(),
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
        open(self.url.as_ref().unwrap()).await
    }

    fn available(&self) -> Result<(), String> {
        self.url.as_ref().map(drop).ok_or_else(server::missing)
    }

    fn survives_restart(&self) -> bool {
        true
    }

    fn virtual_time(&self) -> bool {
        false
    }
}

// conformance: contract/engine-nats: the NATS engine passes the suite every engine passes, against a real server
// conformance: omni/nats-persistent: events, groups and values survive a restart of their clients
// conformance: omni/nats-kv: values by key are kept in buckets of NATS, with revisions, expiry and watchers
// conformance: omni/subscribe-nats: a group is a durable pull consumer with filters, start positions, explicit acks and a lease
everbus_testkit::conformance_tests!(OnServer::new());
