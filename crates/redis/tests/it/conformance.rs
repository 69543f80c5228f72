//! The suite every engine passes.

use std::sync::Arc;

use everbus_core::{Clock, Engine, SystemClock};
use everbus_redis::Options;
use everbus_testkit::conformance::Harness;
use everbus_testkit::servers::Flavour;

use crate::server;

#[derive(Debug)]
pub(crate) struct OnServer {
    url: Option<String>,
    column: Option<&'static str>,
}

impl OnServer {
    pub(crate) fn new(flavour: Flavour) -> Self {
        Self {
            url: server::database(flavour),
            column: (flavour == Flavour::Valkey).then_some("valkey"),
        }
    }
}

/// Opens the engine of a database.
pub(crate) async fn open(url: &str) -> Engine {
    let mut options = Options::default();
    options.clock = Arc::new(SystemClock);
    everbus_redis::open(url, options).await.unwrap()
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

    fn column(&self) -> Option<&'static str> {
        self.column
    }
}

// conformance: contract/engine-redis: the Redis engine passes the suite every engine passes, against a real server
// conformance: framework/broker-redis: a group is a consumer group of its name on every stream that it wants
everbus_testkit::conformance_tests!(OnServer::new(Flavour::Redis));
