//! Beside a broker, call by call: the store knows first, and the broker sees one consumer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use everbus::Code;
use everbus_core::{
    BoxFuture, Broker, BrokerLayer, Clock, ConsumeOptions, Consumer, Delivery, Engine, Event,
    Failure, FailureKind, GroupName, GroupSpec, Pattern, Result, Settlement, SubscriptionSpec,
    SystemClock, Verdict,
};
use everbus_testkit::narrow::{self, Faults};

fn everything() -> Vec<Pattern> {
    vec![Pattern::new("*").unwrap()]
}

/// A narrow broker and a store whose faults are given, with a group that wants everything.
async fn composed(
    dir: &tempfile::TempDir,
    store_faults: &Faults,
    wrap: impl FnOnce(Arc<dyn Broker>) -> Arc<dyn Broker>,
) -> (Engine, GroupName) {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let mut broker = narrow::open(&clock, 3, Faults::none()).unwrap();
    broker.broker = wrap(broker.broker);
    let path = dir.path().join("store.db");
    let store = everbus_sqlite::open(&path, everbus_sqlite::Options::default()).unwrap();
    let store = narrow::with_faulty_store(store, store_faults.clone());
    let engine = everbus::compose(broker, store, clock).await.unwrap();
    let group: GroupName = "g".parse().unwrap();
    let mut spec = GroupSpec::new(group.clone());
    spec.subscriptions.push(SubscriptionSpec {
        name: "all".to_owned(),
        pattern: everything().remove(0),
    });
    engine.broker.declare(spec).await.unwrap();
    (engine, group)
}

async fn take(consumer: &mut Box<dyn Consumer>) -> Delivery {
    let fetched = tokio::time::timeout(Duration::from_secs(60), consumer.fetch(1)).await;
    fetched.expect("it is still owed").unwrap().remove(0)
}

// conformance: contract/beside-store-first: whatever the verdict, the broker does not learn of it before the store has it: if the store is away the event is still owed
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_store_knows_before_the_broker_does() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::none();
    let (engine, group) = composed(&dir, &faults, |broker| broker).await;
    let failure = Failure::new(1, SystemClock.now(), FailureKind::Error, "no");
    let after = Duration::ZERO;
    let verdicts = [
        Verdict::Ack,
        Verdict::Skip {
            reason: "stale".into(),
        },
        Verdict::Retry {
            after,
            failure: failure.clone(),
        },
        Verdict::Dead {
            failure: Some(failure),
        },
    ];
    let options = ConsumeOptions::new(everything()).lease(Duration::from_millis(200));
    let settle = async |delivery: &Delivery, verdict: &Verdict| {
        let mut settlement = Settlement::new(delivery.lease.clone(), verdict.clone());
        settlement.inbox = *verdict == Verdict::Ack;
        let mut answers = engine.broker.settle(vec![settlement]).await.unwrap();
        answers.remove(0)
    };
    for verdict in verdicts {
        let event = Event::builder("a.b").build().unwrap();
        engine.broker.append(vec![event]).await.unwrap();
        let consume = engine.broker.consume(group.clone(), options.clone());
        let mut consumer = consume.await.unwrap();
        let delivery = take(&mut consumer).await;
        faults.set(1);
        let refused = settle(&delivery, &verdict).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable, "{verdict:?}");
        faults.stop();
        // The process ends here; another one gets the event.
        drop(consumer);
        let consume = engine.broker.consume(group.clone(), options.clone());
        let mut consumer = consume.await.unwrap();
        let again = take(&mut consumer).await;
        assert_eq!(again.record.position, delivery.record.position);
        settle(&again, &Verdict::Ack).await.unwrap();
    }
}

/// Counts how often a group is consumed.
struct Counting {
    inner: Arc<dyn Broker>,
    consumed: Arc<AtomicUsize>,
}

impl BrokerLayer for Counting {
    fn inner(&self) -> &dyn Broker {
        &*self.inner
    }

    fn consume(
        &self,
        group: GroupName,
        options: ConsumeOptions,
    ) -> BoxFuture<'_, Result<Box<dyn Consumer>>> {
        self.consumed.fetch_add(1, Ordering::SeqCst);
        self.inner.consume(group, options)
    }
}

// conformance: contract/beside-pause: beside a broker, a consumer that pauses and resumes stays the same one in the broker
#[tokio::test]
async fn a_paused_consumer_stays_in_the_broker() {
    let dir = tempfile::tempdir().unwrap();
    let consumed = Arc::<AtomicUsize>::default();
    let count = consumed.clone();
    let wrap = |inner| Arc::new(Counting { inner, consumed }) as Arc<dyn Broker>;
    let (engine, group) = composed(&dir, &Faults::none(), wrap).await;
    let options = ConsumeOptions::new(everything());
    let mut consumer = engine.broker.consume(group, options).await.unwrap();
    for _ in 0..3 {
        consumer.pause().await.unwrap();
        consumer.resume(8).await.unwrap();
        let event = Event::builder("a.b").build().unwrap();
        engine.broker.append(vec![event]).await.unwrap();
        let delivery = take(&mut consumer).await;
        let ack = Settlement::new(delivery.lease, Verdict::Ack);
        engine.broker.settle(vec![ack]).await.unwrap();
    }
    assert_eq!(count.load(Ordering::SeqCst), 1);
}
