//! Short functions to declare, publish and handle.

use std::time::Duration;

use everbus_core::{
    Appended, ConsumeOptions, Consumer, Delivery, Engine, Event, GroupSpec, Pattern, Settlement,
    StartFrom, SubscriptionSpec, Verdict,
};

/// How long to wait for something that must happen, also on a slow machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(90);

/// A group that begins with the first event.
pub(crate) fn group(name: &str, patterns: &[&str]) -> GroupSpec {
    let mut spec = GroupSpec::new(name.parse().unwrap());
    spec.start_from = StartFrom::First;
    spec.subscriptions = patterns
        .iter()
        .map(|text| SubscriptionSpec {
            name: (*text).to_owned(),
            pattern: Pattern::new(text).unwrap(),
        })
        .collect();
    spec
}

/// Handlers for everything.
pub(crate) fn everything() -> ConsumeOptions {
    let patterns = ["*", "system.>"].map(|text| Pattern::new(text).unwrap());
    ConsumeOptions::new(patterns.to_vec()).lease(Duration::from_secs(30))
}

pub(crate) async fn consumer(engine: &Engine, group: &str) -> Box<dyn Consumer> {
    let consumer = engine.broker.consume(group.parse().unwrap(), everything());
    consumer.await.unwrap()
}

pub(crate) async fn publish(engine: &Engine, event_type: &str) -> Appended {
    let event = Event::builder(event_type).payload("{}").build().unwrap();
    append(engine, event).await
}

pub(crate) async fn append(engine: &Engine, event: Event) -> Appended {
    let answers = engine.broker.append(vec![event]).await.unwrap();
    answers.into_iter().next().unwrap().unwrap()
}

/// Takes exactly this many.
pub(crate) async fn take(consumer: &mut Box<dyn Consumer>, count: usize) -> Vec<Delivery> {
    let mut taken = Vec::new();
    while taken.len() < count {
        let fetched = tokio::time::timeout(DEADLINE, consumer.fetch(count - taken.len()));
        taken.extend(fetched.await.expect("something comes").unwrap());
    }
    taken
}

pub(crate) async fn settle(
    engine: &Engine,
    delivery: &Delivery,
    verdict: Verdict,
) -> everbus_core::Result<()> {
    let settlement = Settlement::new(delivery.lease.clone(), verdict);
    engine
        .broker
        .settle(vec![settlement])
        .await
        .unwrap()
        .remove(0)
}

pub(crate) async fn ack(engine: &Engine, delivery: &Delivery) {
    settle(engine, delivery, Verdict::Ack).await.unwrap();
}
