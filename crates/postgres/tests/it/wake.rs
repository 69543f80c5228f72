//! Engines that wake each other.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    ConsumeOptions, Delivery, Event, GroupName, Pattern, Settlement, SystemClock, Verdict,
};
use everbus_postgres::Options;
use everbus_testkit::servers::Postgres;

use crate::support::{event, fresh_schema, group, open, options};

// conformance: engines/postgres-wake: an engine that was alone, and so notified none, wakes the consumers of an engine that came later
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_was_alone_wakes_one_that_came_later() {
    // The first engine counts the listeners again before each publish, or never.
    for poll in [Duration::from_millis(20), Duration::from_secs(3600)] {
        let Some(url) = fresh_schema() else { return };
        wake_one_that_came_later(&url, poll).await;
    }
}

async fn wake_one_that_came_later(url: &str, poll: Duration) {
    let polling = |poll| Options {
        poll,
        ..options(Arc::new(SystemClock))
    };
    let first = everbus_postgres::open(url, polling(poll)).await.unwrap();
    first.broker.declare(group("g")).await.unwrap();
    // Its session has begun then, and sees that no other engine listens.
    let lease = Duration::from_secs(3600);
    let wanted = || ConsumeOptions::new(vec![Pattern::new("*").unwrap()]).lease(lease);
    let name = || GroupName::new("g").unwrap();
    drop(first.broker.consume(name(), wanted()).await.unwrap());
    first.broker.append(vec![event(0)]).await.unwrap();
    // Polling would find the events too.
    let never = polling(Duration::from_secs(3600));
    let second = everbus_postgres::open(url, never).await.unwrap();
    let mut consumer = second.broker.consume(name(), wanted()).await.unwrap();
    assert_eq!(consumer.fetch(10).await.unwrap().len(), 1);
    // It waits before anything is published. Again and again: the news of the second engine needs a moment.
    let fetch = consumer.fetch(10);
    let mut publishing = tokio::time::interval(Duration::from_millis(200));
    publishing.tick().await;
    let woken = async {
        let mut fetch = std::pin::pin!(fetch);
        loop {
            tokio::select! {
                batch = &mut fetch => return batch.unwrap(),
                _ = publishing.tick() => drop(first.broker.append(vec![event(1)]).await.unwrap()),
            }
        }
    };
    let woken = tokio::time::timeout(Duration::from_secs(60), woken).await;
    assert!(woken.is_ok(), "the consumer was not woken");
    second.broker.close().await.unwrap();
    first.broker.close().await.unwrap();
}

/// How the slow consumer of a test leaves claimed events behind.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Left {
    /// It claimed as many again after a large fetch.
    InAdvance,
    /// It claimed in advance, and the next fetch took only some of these events.
    ByASmallFetch,
    /// Its fetch was dropped.
    ByADroppedFetch,
}

// conformance: engines/postgres-in-advance: events that are claimed and that no fetch takes are given back before their leases end, and do not count as crashed
// needs: PostgreSQL
#[tokio::test]
async fn claims_that_no_fetch_takes_are_given_back_before_their_leases_end() {
    let cases = [Left::InAdvance, Left::ByASmallFetch, Left::ByADroppedFetch];
    let mut running = tokio::task::JoinSet::new();
    for left in cases {
        let Some(url) = fresh_schema() else { return };
        running.spawn(given_back_before_their_leases_end(left, url));
    }
    while let Some(ended) = running.join_next().await {
        ended.unwrap();
    }
}

async fn given_back_before_their_leases_end(left: Left, url: String) {
    const EVENTS: usize = 600;
    let engine = open(&url).await;
    engine.broker.declare(group("g")).await.unwrap();
    let events: Vec<Event> = (0..EVENTS as u32).map(event).collect();
    engine.broker.append(events).await.unwrap();
    let wanted = || {
        ConsumeOptions::new(vec![Pattern::new("*").unwrap()])
            .concurrency(1000)
            .prefetch(1000)
            .lease(Duration::from_secs(8))
    };
    let consume = || {
        engine
            .broker
            .consume(GroupName::new("g").unwrap(), wanted())
    };
    let mut slow = consume().await.unwrap();
    let mut first = Vec::new();
    if left == Left::ByADroppedFetch {
        tokio::select! {
            biased;
            _ = slow.fetch(200) => panic!("the server cannot answer at once"),
            () = std::future::ready(()) => {}
        }
        let is_claimed = async || {
            let groups = engine.broker.inspect().await.unwrap();
            groups.iter().any(|group| group.in_flight > 0)
        };
        while !is_claimed().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    } else {
        first.extend(slow.fetch(200).await.unwrap());
        assert_eq!(first.len(), 200);
    }
    if left == Left::ByASmallFetch {
        first.extend(slow.fetch(10).await.unwrap());
        assert_eq!(first.len(), 210);
    }
    // The slow consumer fetches no more. Another one gets everything that it has not returned.
    let mut other = consume().await.unwrap();
    let mut rest = Vec::new();
    while rest.len() < EVENTS - first.len() {
        for delivery in other.fetch(200).await.unwrap() {
            let seen = (delivery.attempt, delivery.failures.len());
            assert_eq!(seen, (1, 0), "{left:?}");
            rest.push(delivery);
        }
    }
    let places = |deliveries: &[Delivery]| -> BTreeSet<u64> {
        let places = deliveries.iter().map(|d| d.record.position.place());
        places.collect()
    };
    assert!(places(&first).is_disjoint(&places(&rest)), "{left:?}");
}

// conformance: engines/postgres-quiet: a consumer that has taken the last event does not ask the server again before something happens, and misses nothing meanwhile
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_the_last_event_the_server_is_not_asked_again() {
    const EVENTS: u32 = 100;
    let Some(server) = Postgres::shared() else {
        return;
    };
    let url = server.fresh_database();
    let database = url.rsplit('/').next().unwrap();
    server.sql(&format!(
        "ALTER DATABASE {database} SET track_functions = 'pl'"
    ));
    let never = Options {
        poll: Duration::from_secs(3600),
        ..options(Arc::new(SystemClock))
    };
    let engine = everbus_postgres::open(&url, never).await.unwrap();
    engine.broker.declare(group("g")).await.unwrap();
    let wanted = ConsumeOptions::new(vec![Pattern::new("*").unwrap()]);
    let name = GroupName::new("g").unwrap();
    let mut consumer = engine.broker.consume(name, wanted).await.unwrap();
    for number in 0..EVENTS {
        // The consumer waits already, or it comes later.
        let append = engine.broker.append(vec![event(number)]);
        let fetched = async {
            if number % 2 == 0 {
                let mut fetch = std::pin::pin!(consumer.fetch(10));
                tokio::select! {
                    biased;
                    _ = &mut fetch => panic!("event {number} is not published yet"),
                    // A look of the fetch would be over by now.
                    groups = engine.broker.inspect() => drop(groups?),
                }
                let (fetched, appended) = tokio::join!(fetch, append);
                appended.map(|_| fetched)
            } else {
                append.await.map(|_| ())?;
                Ok(consumer.fetch(10).await)
            }
        };
        let fetched = tokio::time::timeout(Duration::from_secs(60), fetched).await;
        let fetched = fetched.expect("no event is missed").unwrap().unwrap();
        assert_eq!(fetched.len(), 1, "event {number}");
        let acks = fetched.into_iter();
        let acks = acks.map(|d| Settlement::new(d.lease, Verdict::Ack));
        let settled = engine.broker.settle(acks.collect()).await.unwrap();
        assert!(settled.iter().all(Result::is_ok));
    }
    drop(consumer);
    engine.broker.close().await.unwrap();
    // Sessions report what they counted when they end, a moment after the engine has closed them.
    let others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
    while server.sql_at(&url, others) != "0" {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let calls = "SELECT calls FROM pg_stat_user_functions WHERE funcname = 'claim_new'";
    let calls: u32 = server.sql_at(&url, calls).parse().unwrap();
    // One look for each event, and a few when the consumer begins. With a look after each event there are half as many
    // again.
    assert!(calls < EVENTS + EVENTS / 4, "{calls} looks");
    // Each ack was all that was left of its claim. For these a plain statement is enough.
    let calls = "SELECT coalesce(sum(calls), 0) FROM pg_stat_user_functions WHERE funcname = 'ack'";
    assert_eq!(
        server.sql_at(&url, calls),
        "0",
        "calls of the function for acks of parts"
    );
}
