//! Values that a server refuses or that do not fit its types.

use std::time::Duration;

use everbus_core::{
    ConsumeOptions, Event, Failure, FailureKind, GroupName, Pattern, Retention, Settlement,
    StreamAge, Timestamp, Verdict,
};

use crate::support::{event, fresh_schema, group, open};

fn options() -> ConsumeOptions {
    ConsumeOptions::new(vec![Pattern::new("*").unwrap()])
}

// conformance: engines/postgres-odd-failures: the text of an error may hold a zero character, or its escape, and what cannot be read of earlier failures stops nobody
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_text_of_an_error_can_be_kept() {
    let Some(url) = fresh_schema() else { return };
    let engine = open(&url).await;
    engine.broker.declare(group("g")).await.unwrap();
    engine.broker.append(vec![event(1)]).await.unwrap();
    let mut consumer = engine
        .broker
        .consume(GroupName::new("g").unwrap(), options())
        .await
        .unwrap();
    let texts = ["\\u0000 cannot be converted to text", "\\\\u0000", "a\0b"];
    for (number, text) in (1..).zip(texts) {
        let delivery = consumer.fetch(1).await.unwrap().remove(0);
        let failure = Failure::new(number, Timestamp::from_micros(0), FailureKind::Error, text);
        let after = Duration::ZERO;
        let retry = Settlement::new(delivery.lease, Verdict::Retry { after, failure });
        engine
            .broker
            .settle(vec![retry])
            .await
            .unwrap()
            .remove(0)
            .unwrap();
    }
    let delivery = consumer.fetch(1).await.unwrap().remove(0);
    let kept: Vec<_> = delivery.failures.iter().map(|f| f.error.as_str()).collect();
    assert_eq!(kept, [texts[0], texts[1], "a\u{fffd}b"]);
    // A record that is damaged on the disk.
    let (base, query) = url.split_once('?').unwrap();
    let schema = query
        .split('&')
        .find_map(|q| q.strip_prefix("schema="))
        .unwrap();
    let damage = format!("UPDATE {schema}.deliveries SET failures = '[\\\u{fffd}'");
    let server = everbus_testkit::servers::Postgres::shared().unwrap();
    server.sql_at(base, &damage);
    let failure = Failure::new(4, Timestamp::from_micros(0), FailureKind::Error, "again");
    let after = Duration::ZERO;
    let retry = Settlement::new(delivery.lease, Verdict::Retry { after, failure });
    engine
        .broker
        .settle(vec![retry])
        .await
        .unwrap()
        .remove(0)
        .unwrap();
    server.sql_at(base, &damage);
    let delivery = consumer.fetch(1).await.unwrap().remove(0);
    assert!(delivery.failures.is_empty());
    let ack = Settlement::new(delivery.lease, Verdict::Ack);
    engine
        .broker
        .settle(vec![ack])
        .await
        .unwrap()
        .remove(0)
        .unwrap();
    engine.broker.close().await.unwrap();
}

// conformance: engines/postgres-version: the highest schema version is stored as it is
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_highest_version_comes_back() {
    let Some(url) = fresh_schema() else { return };
    let engine = open(&url).await;
    engine.broker.declare(group("g")).await.unwrap();
    let highest = Event::builder("a.b").version(u32::MAX).build().unwrap();
    engine
        .broker
        .append(vec![highest])
        .await
        .unwrap()
        .remove(0)
        .unwrap();
    let mut consumer = engine
        .broker
        .consume(GroupName::new("g").unwrap(), options())
        .await
        .unwrap();
    let fetched = tokio::time::timeout(Duration::from_secs(20), consumer.fetch(1)).await;
    let delivery = fetched.expect("the event comes").unwrap().remove(0);
    assert_eq!(delivery.record.event.version(), u32::MAX);
    engine.broker.close().await.unwrap();
}

// conformance: engines/postgres-removed-around: an event between removed ones reaches an ephemeral group that has not read it yet
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_kept_between_removed_events_comes() {
    let Some(url) = fresh_schema() else { return };
    let engine = open(&url).await;
    let mut brief = group("brief");
    brief.ephemeral = true;
    engine.broker.declare(brief).await.unwrap();
    let kept = Event::builder("kept.b").build().unwrap();
    let answers = engine.broker.append(vec![event(1), kept, event(3)]).await;
    assert!(answers.unwrap().iter().all(Result::is_ok));
    let retention = Retention {
        streams: vec![StreamAge {
            types: Pattern::new("a.*").unwrap(),
            max_age: Some(Duration::ZERO),
        }],
        ..Retention::default()
    };
    let maintenance = engine.maintenance().unwrap();
    while maintenance.prune(retention.clone()).await.unwrap().removed == 0 {}
    let mut consumer = engine
        .broker
        .consume(GroupName::new("brief").unwrap(), options())
        .await
        .unwrap();
    let fetched = tokio::time::timeout(Duration::from_secs(20), consumer.fetch(1)).await;
    let delivery = fetched.expect("the event comes").unwrap().remove(0);
    assert_eq!(delivery.record.event.event_type(), "kept.b");
    engine.broker.close().await.unwrap();
}
