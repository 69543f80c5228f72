//! The narrow engine with a SQLite file beside it, put together by the runtime.

use std::sync::Arc;

use everbus_core::{Clock, Engine};
use everbus_testkit::conformance::Harness;
use everbus_testkit::narrow::{self, Faults};

#[derive(Debug)]
struct Beside(tempfile::TempDir);

impl Beside {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }
}

impl Harness for Beside {
    async fn open(&self, clock: Arc<dyn Clock>) -> Engine {
        let broker = narrow::open(&clock, 3, Faults::none()).unwrap();
        let options = everbus_sqlite::Options {
            clock: clock.clone(),
            ..everbus_sqlite::Options::default()
        };
        let store = everbus_sqlite::open(&self.0.path().join("store.db"), options).unwrap();
        let engine = everbus::compose(broker, store, clock).await.unwrap();
        // A bus would run it as long as it is started.
        if let Some(background) = &engine.background {
            tokio::spawn(background.run());
        }
        engine
    }

    fn survives_restart(&self) -> bool {
        false
    }

    fn claims_ahead(&self) -> bool {
        false
    }

    fn column(&self) -> Option<&'static str> {
        Some("narrow+sqlite")
    }
}

// conformance: contract/suite-beside: a broker without abilities and a store beside it pass the suite together, except for what their capabilities deny
everbus_testkit::conformance_tests!(Beside::new());
