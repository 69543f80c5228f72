//! The suite with a SQLite file beside the server.

use std::sync::{Arc, Mutex};

use everbus_core::{Clock, Engine, SystemClock};
use everbus_testkit::conformance::Harness;
use everbus_testkit::servers::Kafka;
use tokio::task::JoinHandle;

use crate::server;

#[derive(Debug)]
struct Beside {
    url: Option<String>,
    directory: tempfile::TempDir,
    /// What a bus would run: it ends with its process.
    background: Mutex<Option<JoinHandle<()>>>,
}

impl Beside {
    fn new() -> Self {
        Self {
            url: server::space(),
            directory: tempfile::tempdir().unwrap(),
            background: Mutex::default(),
        }
    }
}

impl Harness for Beside {
    async fn open(&self, _: Arc<dyn Clock>) -> Engine {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let broker = server::open(self.url.as_ref().unwrap()).await;
        let options = everbus_sqlite::Options {
            clock: clock.clone(),
            ..everbus_sqlite::Options::default()
        };
        let file = self.directory.path().join("store.db");
        let store = everbus_sqlite::open(&file, options).unwrap();
        let engine = everbus::compose(broker, store, clock).await.unwrap();
        // A bus would run it as long as it is started.
        if let Some(background) = &engine.background {
            let running = tokio::spawn(background.run());
            *self.background.lock().unwrap() = Some(running);
        }
        engine
    }

    async fn crash(&self, engine: Engine) {
        let running = self.background.lock().unwrap().take();
        if let Some(running) = running {
            running.abort();
            let _ = running.await;
        }
        drop(engine);
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

    fn column(&self) -> Option<&'static str> {
        Some("kafka+sqlite")
    }
}

// conformance: contract/kafka-beside: the Kafka engine with a SQLite file beside it passes the suite, against a real server
// conformance: framework/brokers-kafka: the same contract holds on Kafka with a SQLite file beside it
// needs: Kafka, by hand
everbus_testkit::conformance_tests!(Beside::new());
