//! The suite with a SQLite file beside the server.

use std::sync::{Arc, Mutex};

use everbus_core::{Clock, Engine, Event, Settlement, SystemClock, Verdict};
use everbus_testkit::conformance::Harness;
use everbus_testkit::servers::Flavour;
use tokio::task::JoinHandle;

use crate::plain::{Plain, group, options, publish};
use crate::{conformance, server};

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
            url: server::database(Flavour::Redis),
            directory: tempfile::tempdir().unwrap(),
            background: Mutex::default(),
        }
    }
}

impl Harness for Beside {
    async fn open(&self, _: Arc<dyn Clock>) -> Engine {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let broker = conformance::open(self.url.as_ref().unwrap()).await;
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

    fn survives_restart(&self) -> bool {
        true
    }

    fn virtual_time(&self) -> bool {
        false
    }

    fn column(&self) -> Option<&'static str> {
        Some("redis+sqlite")
    }
}

// conformance: framework/broker-redis: the same contract holds on Redis with a SQLite file beside it
// conformance: contract/redis-beside: the Redis engine with a SQLite file beside it passes the suite, against a real server
everbus_testkit::conformance_tests!(Beside::new());

// conformance: contract/redis-beside-repeated: a follow-up that an earlier run appended with another body does not turn a handled event into a failure, and the other follow-ups are stored
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_follow_up_with_another_body_is_there_already() {
    let beside = Beside::new();
    let Some(url) = beside.url.clone() else {
        return;
    };
    let engine = beside.open(Arc::new(SystemClock)).await;
    let spec = group("g", &["order.placed"]);
    engine.broker.declare(spec).await.unwrap();
    let one = Event::builder("mail.sent").json(&1).build().unwrap();
    engine.broker.append(vec![one.clone()]).await.unwrap();
    let changed = Event::builder("mail.sent").id(one.id()).json(&2);
    let changed = changed.build().unwrap();
    let new = |n: u64| Event::builder("mail.sent").json(&n).build().unwrap();
    let plain = Plain::connect(&url).await;
    for follow_ups in [vec![changed.clone()], vec![new(3), changed.clone(), new(4)]] {
        publish(&engine, "order.placed").await;
        let consumer = engine.broker.consume("g".parse().unwrap(), options());
        let mut consumer = consumer.await.unwrap();
        let delivery = consumer.fetch(1).await.unwrap().remove(0);
        let mut done = Settlement::new(delivery.lease, Verdict::Ack);
        done.follow_ups = follow_ups;
        let answers = engine.broker.settle(vec![done]).await.unwrap();
        answers.into_iter().next().unwrap().unwrap();
        consumer.close().await.unwrap();
    }
    assert_eq!(plain.number(&["XLEN", "mail:sent"]).await, 3);
}
