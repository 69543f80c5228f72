//! Attributes at their bounds, and bad items beside good ones.

use std::time::Duration;

use everbus_core::{
    Attributes, Clock as _, Code, ConsumeOptions, Consumer, DeadLetterFilter, Delivery, Engine,
    Event, EventId, Failure, FailureKind, GroupName, Pattern, Settlement, SystemClock, Timestamp,
    Verdict,
};

use everbus_testkit::servers::Postgres;

use crate::support::{event, fresh_schema, group, open};

/// About 9,000 bytes that cannot be made much shorter.
fn long() -> String {
    (0..250).map(|_| EventId::new().to_string()).collect()
}

async fn consume(engine: &Engine) -> Box<dyn Consumer> {
    let wanted = ConsumeOptions::new(vec![Pattern::new("*").unwrap()]);
    let group = GroupName::new("g").unwrap();
    engine.broker.consume(group, wanted).await.unwrap()
}

async fn fetch(consumer: &mut Box<dyn Consumer>) -> Delivery {
    let fetched = tokio::time::timeout(Duration::from_secs(60), consumer.fetch(1)).await;
    let mut fetched = fetched.expect("an event comes").unwrap();
    assert_eq!(fetched.len(), 1);
    fetched.remove(0)
}

fn failure(attempt: u32) -> Failure {
    Failure::new(
        attempt,
        SystemClock.now(),
        FailureKind::Error,
        "out of luck",
    )
}

// conformance: engines/postgres-long-attributes: long keys, foreign ids and tenants go through publish, ordered retry, inbox and dead letter
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_attributes_go_everywhere() {
    let Some(url) = fresh_schema() else {
        return;
    };
    let engine = open(&url).await;
    let mut ordered = group("g");
    ordered.ordered = true;
    engine.broker.declare(ordered).await.unwrap();
    let (key, other) = (long(), long());
    let with = |builder: everbus_core::EventBuilder| builder.json(&1).build().unwrap();
    let events: Vec<Event> = vec![
        with(Event::builder("a.b").key(&*key).tenant(long())),
        with(Event::builder("a.b").key(&*key).foreign_id(long())),
        with(Event::builder("a.b").key(&*other)),
    ];
    for event in &events {
        for again in [false, true] {
            let appended = engine.broker.append(vec![event.clone()]).await.unwrap();
            assert_eq!(appended[0].as_ref().unwrap().duplicate, again);
        }
    }
    let mut consumer = consume(&engine).await;
    let settle = async |settlement: Settlement| {
        let mut answers = engine.broker.settle(vec![settlement]).await.unwrap();
        answers.remove(0).unwrap();
    };
    let first = fetch(&mut consumer).await;
    assert_eq!(first.record.event.id(), events[0].id());
    // The second of the key waits behind the first; another key does not.
    let third = fetch(&mut consumer).await;
    assert_eq!(third.record.event.id(), events[2].id());
    let after = Duration::ZERO;
    let retry = Verdict::Retry {
        after,
        failure: failure(1),
    };
    settle(Settlement::new(first.lease, retry)).await;
    let first = fetch(&mut consumer).await;
    assert_eq!(
        (first.record.event.id(), first.attempt),
        (events[0].id(), 2)
    );
    let mut ack = Settlement::new(first.lease, Verdict::Ack);
    ack.inbox = true;
    settle(ack).await;
    let inbox = engine.inbox().unwrap();
    let handled = inbox.handled(GroupName::new("g").unwrap(), vec![first.record]);
    assert_eq!(handled.await.unwrap(), [true]);
    let second = fetch(&mut consumer).await;
    assert_eq!(second.record.event.id(), events[1].id());
    let failure = Some(failure(1));
    settle(Settlement::new(second.lease, Verdict::Dead { failure })).await;
    let letters = engine.dead_letters().unwrap();
    let count = letters.count(DeadLetterFilter::default()).await.unwrap();
    assert_eq!(count, 1);
    assert_eq!(
        inbox
            .forget(Timestamp::EPOCH.plus(Duration::MAX))
            .await
            .unwrap(),
        1
    );
    engine.broker.close().await.unwrap();
}

/// An event that only PostgreSQL refuses, if the core does not.
fn with_zero() -> Event {
    let attributes = Attributes {
        address: Some("g\0".into()),
        ..Attributes::default()
    };
    let builder = Event::builder("a.b").json(&0).attributes(attributes);
    builder.build().unwrap()
}

// conformance: engines/postgres-bad-neighbour: an event or follow-up that cannot be stored fails its own call only
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_event_fails_nobody_else() {
    let Some(url) = fresh_schema() else {
        return;
    };
    let engine = open(&url).await;
    engine.broker.declare(group("g")).await.unwrap();
    let (good, bad) = (0..200, 0..50);
    let mut calls = tokio::task::JoinSet::new();
    let mut call = |event: Event, fine: bool| {
        let broker = engine.broker.clone();
        calls.spawn(async move { (broker.append(vec![event]).await, fine) });
    };
    for number in good {
        call(event(number), true);
        if bad.contains(&number) {
            call(with_zero(), false);
        }
    }
    for (answer, fine) in calls.join_all().await {
        match answer {
            Ok(_) => assert!(fine),
            Err(error) => {
                assert_eq!((error.code(), fine), (Code::InvalidAttribute, false));
            }
        }
    }
    // One call with a bad follow-up in the middle.
    let mut consumer = consume(&engine).await;
    let mut leases = Vec::new();
    while leases.len() < 5 {
        let fetched = consumer.fetch(5 - leases.len()).await.unwrap();
        leases.extend(fetched.into_iter().map(|delivery| delivery.lease));
    }
    let settlements = leases.into_iter().enumerate().map(|(at, lease)| {
        let mut ack = Settlement::new(lease, Verdict::Ack);
        ack.follow_ups = vec![if at == 2 { with_zero() } else { event(1000) }];
        ack
    });
    let answers = engine.broker.settle(settlements.collect()).await.unwrap();
    for (at, answer) in answers.into_iter().enumerate() {
        let code = answer.err().map(|error| error.code());
        assert_eq!(code, (at == 2).then_some(Code::InvalidAttribute));
    }
    engine.broker.close().await.unwrap();
}

// conformance: engines/postgres-other-keys: many events behind a retry of their key do not hold up other keys
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_in_retry_does_not_starve_the_others() {
    let Some(server) = Postgres::shared() else {
        return;
    };
    let url = server.fresh_database();
    let engine = open(&url).await;
    let mut ordered = group("g");
    ordered.ordered = true;
    engine.broker.declare(ordered).await.unwrap();
    server.sql_at(
        &url,
        "INSERT INTO everbus.deliveries (group_id, seq, state, due, attempt, type, key, updated_at)
         SELECT g.id, -n, 0, 9000000000000000000, 1, 1, 'busy', 0
         FROM everbus.groups g, generate_series(1, 30000) n",
    );
    let mut consumer = consume(&engine).await;
    let free = Event::builder("a.b").key("free").json(&1).build().unwrap();
    engine.broker.append(vec![free.clone()]).await.unwrap();
    assert_eq!(fetch(&mut consumer).await.record.event.id(), free.id());
    engine.broker.close().await.unwrap();
}
