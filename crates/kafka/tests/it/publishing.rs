//! What is acknowledged is there, from the first event of a topic on.

use std::collections::HashSet;

use everbus_core::{Cursor, Event, Pattern, Position};

use crate::server;

/// Publishes to new topics, and returns how many events are missing.
async fn missing(url: String) -> usize {
    let engine = server::open(&url).await;
    let mut acknowledged = HashSet::new();
    for domain in ["a", "b", "c"] {
        let event = |_| Event::builder(format!("{domain}.x")).build().unwrap();
        let answers = engine
            .broker
            .append((0..50).map(event).collect())
            .await
            .unwrap();
        acknowledged.extend(answers.into_iter().map(|answer| answer.unwrap().position));
    }
    assert_eq!(
        acknowledged.len(),
        150,
        "each event has a position of its own"
    );
    let (mut found, mut after) = (HashSet::new(), Cursor::START);
    loop {
        let all = vec![Pattern::new("*").unwrap()];
        let (records, reached) = engine
            .log()
            .unwrap()
            .read(after.clone(), all, 100)
            .await
            .unwrap();
        found.extend(records.iter().map(|record| record.position));
        if reached == after {
            break;
        }
        after = reached;
    }
    engine.broker.close().await.unwrap();
    acknowledged
        .difference(&found)
        .collect::<Vec<&Position>>()
        .len()
}

// conformance: contract/kafka-first-events: the first events of new topics are stored if they are acknowledged, also while their partitions have no leader yet
// needs: Kafka
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_events_of_new_topics_are_there() {
    let mut tasks = Vec::new();
    for _ in 0..8 {
        let Some(url) = server::space() else {
            return;
        };
        tasks.push(tokio::spawn(missing(url)));
    }
    for task in tasks {
        assert_eq!(task.await.unwrap(), 0);
    }
}
