//! The suite with a SQLite file beside the server.

use std::sync::Arc;

use everbus_core::{Clock, Engine, SystemClock};
use everbus_testkit::conformance::Harness;

use crate::{conformance, server};

#[derive(Debug)]
struct Beside {
    url: String,
    directory: tempfile::TempDir,
}

impl Beside {
    fn new() -> Self {
        Self {
            url: server::space().unwrap(),
            directory: tempfile::tempdir().unwrap(),
        }
    }
}

impl Harness for Beside {
    async fn open(&self, _: Arc<dyn Clock>) -> Engine {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let broker = conformance::open(&self.url).await;
        let options = everbus_sqlite::Options {
            clock: clock.clone(),
            ..everbus_sqlite::Options::default()
        };
        let file = self.directory.path().join("store.db");
        let store = everbus_sqlite::open(&file, options).unwrap();
        let engine = everbus::compose(broker, store, clock).await.unwrap();
        // A bus would run it as long as it is started.
        if let Some(background) = &engine.background {
            tokio::spawn(background.run());
        }
        engine
    }

    fn survives_restart(&self) -> bool {
        true
    }

    fn virtual_time(&self) -> bool {
        false
    }

    fn column(&self) -> Option<&'static str> {
        Some("nats+sqlite")
    }
}

// conformance: bus/nats-beside: the NATS engine with a SQLite file beside it passes the suite, against a real server
everbus_testkit::conformance_tests!(Beside::new());
