//! The suite every engine passes.

use std::sync::Arc;

use everbus_core::{Clock, Engine};
use everbus_testkit::conformance::Harness;
use everbus_testkit::servers::Kafka;

use crate::server;

#[derive(Debug)]
struct OnServer {
    url: Option<String>,
}

impl OnServer {
    fn new() -> Self {
        Self {
            url: server::space(),
        }
    }
}

impl Harness for OnServer {
    async fn open(&self, _: Arc<dyn Clock>) -> Engine {
        server::open(self.url.as_ref().unwrap()).await
    }

    fn available(&self) -> Result<(), String> {
        self.url.as_ref().map(drop).ok_or_else(server::missing)
    }

    fn by_hand(&self) -> bool {
        !Kafka::is_asked_for()
    }

    fn survives_restart(&self) -> bool {
        true
    }

    fn virtual_time(&self) -> bool {
        false
    }
}

// conformance: contract/engine-kafka: the Kafka engine passes the suite every engine passes, against a real server
// needs: Kafka, by hand
everbus_testkit::conformance_tests!(OnServer::new());
