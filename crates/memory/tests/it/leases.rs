//! Leases that end.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    ConsumeOptions, Event, FailureKind, GroupName, GroupSpec, ManualClock, SubscriptionSpec,
};
use everbus_memory::Options;

// conformance: rule-3/expired-lease: an event whose lease ended was not alone at a crash, because no process died
#[tokio::test]
async fn a_lease_that_ended_proves_nothing_against_the_event() {
    let clock = ManualClock::default();
    let engine = everbus_memory::open(Options {
        clock: Arc::new(clock.clone()),
    });
    let name: GroupName = "g".parse().unwrap();
    let mut group = GroupSpec::new(name.clone());
    group.subscriptions = vec![SubscriptionSpec {
        name: "s".into(),
        pattern: "*".parse().unwrap(),
    }];
    engine.broker.declare(group).await.unwrap();
    let event = Event::builder("a.b").build().unwrap();
    engine.broker.append(vec![event]).await.unwrap();
    let options = ConsumeOptions::new(vec!["*".parse().unwrap()]);
    let lease = options.lease;
    let mut consumer = engine.broker.consume(name, options).await.unwrap();
    assert_eq!(consumer.fetch(1).await.unwrap().len(), 1);
    clock.advance(lease + Duration::from_secs(1));
    let again = consumer.fetch(1).await.unwrap().remove(0);
    let failure = again.failures.last().unwrap();
    assert_eq!((again.attempt, failure.kind), (2, FailureKind::Crash));
    assert!(!failure.alone);
}
