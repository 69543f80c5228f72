//! Batches of events, with and without repeated ids.

use everbus_core::{ConsumeOptions, Engine, Event, GroupName, Pattern, Settlement, Verdict};

use crate::support::{event, fresh_schema, group, open};

/// Fetches and acks events, until there are this many.
async fn handled(engine: &Engine, count: usize) -> Vec<Event> {
    let options = ConsumeOptions::new(vec![Pattern::new("*").unwrap()]);
    let name = GroupName::new("g").unwrap();
    let mut consumer = engine.broker.consume(name, options).await.unwrap();
    let mut events = Vec::new();
    while events.len() < count {
        let batch = consumer.fetch(100).await.unwrap();
        let acks = batch
            .iter()
            .map(|d| Settlement::new(d.lease.clone(), Verdict::Ack));
        let answers = engine.broker.settle(acks.collect()).await.unwrap();
        assert!(answers.iter().all(Result::is_ok), "{answers:?}");
        events.extend(batch.iter().map(|d| d.record.event.clone()));
    }
    consumer.close().await.unwrap();
    events
}

// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_id_is_found_with_and_without_a_look() {
    let Some(url) = fresh_schema() else { return };
    let engine = open(&url).await;
    engine.broker.declare(group("g")).await.unwrap();
    let first = event(0);
    let stored = engine.broker.append(vec![first.clone()]).await.unwrap();
    let stored = stored[0].as_ref().unwrap();
    let mut expected = vec![first.clone()];
    // The unique index finds the first repeat. After it, ids are looked up.
    for number in 1..4 {
        let new = event(number);
        let batch = vec![new.clone(), first.clone(), new.clone()];
        let answers = engine.broker.append(batch).await.unwrap();
        let answers: Vec<_> = answers.into_iter().map(Result::unwrap).collect();
        let repeated: Vec<bool> = answers.iter().map(|a| a.duplicate).collect();
        assert_eq!(repeated, [false, true, true]);
        assert_eq!(answers[1].position, stored.position);
        assert_eq!(answers[2].position, answers[0].position);
        let other = event(100 + number);
        let answers = engine.broker.append(vec![other.clone()]).await.unwrap();
        assert!(!answers[0].as_ref().unwrap().duplicate);
        expected.extend([new, other]);
    }
    assert_eq!(handled(&engine, expected.len()).await, expected);
    engine.broker.close().await.unwrap();
}

// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_comes_back_whatever_its_events_have_in_common() {
    let Some(url) = fresh_schema() else { return };
    let engine = open(&url).await;
    engine.broker.declare(group("g")).await.unwrap();
    let rich = |number: u32| {
        let event = Event::builder("a.c").json(&number).version(number + 2);
        let event = event.tenant(format!("t{number}")).app("shop");
        event.entity("order", number.to_string()).build().unwrap()
    };
    let batches = [
        vec![event(1), event(2)],
        vec![rich(1), rich(2)],
        vec![event(3), rich(3), event(4)],
        vec![rich(4)],
    ];
    let mut expected = Vec::new();
    for batch in batches {
        let answers = engine.broker.append(batch.clone()).await.unwrap();
        let positions: Vec<_> = answers.into_iter().map(|a| a.unwrap().position).collect();
        assert!(positions.is_sorted());
        expected.extend(batch);
    }
    assert_eq!(handled(&engine, expected.len()).await, expected);
    engine.broker.close().await.unwrap();
}
