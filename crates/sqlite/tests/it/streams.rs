//! Full streams on the file: what is recorded, what other processes see, and what happens to drops in
//! the middle of everything else.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use everbus_core::{
    ConsumeOptions, DROPPED, Engine, Event, Pattern, Retention, Settlement, Verdict,
};
use everbus_testkit::chaos::observe::{Place, observe};
use rusqlite::Connection;

use crate::{consume, declare, eventually, fetch, open, publish, settle};

fn pattern(text: &str) -> Pattern {
    text.parse().unwrap()
}

async fn publish_many(engine: &Engine, event_type: &str, count: usize) {
    let events = (0..count).map(|_| Event::builder(event_type).payload("{}").build().unwrap());
    engine.broker.append(events.collect()).await.unwrap();
}

async fn depth(engine: &Engine, stream: &str) -> u64 {
    engine
        .depth()
        .unwrap()
        .depth(pattern(stream), 1_000_000)
        .await
        .unwrap()
}

async fn drop_oldest(engine: &Engine, stream: &str, keep: u64) -> u64 {
    engine
        .depth()
        .unwrap()
        .drop_oldest(pattern(stream), keep)
        .await
        .unwrap()
}

fn skipped(path: &Path) -> BTreeSet<u64> {
    let conn = Connection::open(path).unwrap();
    let mut statement = conn
        .prepare("SELECT seq FROM skips WHERE reason = ?1")
        .unwrap();
    let rows = statement
        .query_map([DROPPED], |r| r.get::<_, i64>(0))
        .unwrap();
    rows.map(|seq| seq.unwrap().unsigned_abs()).collect()
}

async fn assert_sound(engine: &Engine) {
    let report = engine.maintenance().unwrap().check().await.unwrap();
    assert!(report.is_ok(), "{report:?}");
}

// conformance: handlers/drop-oldest-recorded: every event that was dropped is on record with the reason, and done in the view
#[tokio::test]
async fn every_drop_is_on_record_and_shown_as_done() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "", "*").await;
    publish(&engine, "b.first").await;
    for _ in 0..3 {
        publish_many(&engine, "a.b", 2).await;
        publish_many(&engine, "b.c", 1).await;
    }
    assert_eq!(drop_oldest(&engine, "a.b", 2).await, 4);
    assert_eq!(skipped(&path), BTreeSet::from([2, 3, 5, 6]));
    let conn = Connection::open(&path).unwrap();
    let counts = |status: &str| -> (i64, i64) {
        conn.query_row(
            "SELECT count(*), count(DISTINCT id) FROM events WHERE status = ?1",
            [status],
            |r| Ok((r.get(0)?, r.get(1)?)),
        )
        .unwrap()
    };
    assert_eq!(counts("done"), (4, 4));
    assert_eq!(counts("pending"), (6, 6));
    let all: i64 = conn
        .query_row("SELECT count(*) FROM events", [], |r| r.get(0))
        .unwrap();
    assert_eq!(all, 10, "each event once");
    let mut consumer = consume(&engine, "").await;
    let got = fetch(&mut consumer, 6).await;
    assert_eq!(counts("done"), (4, 4));
    assert_eq!(counts("processing"), (6, 6));
    for delivery in &got {
        settle(&engine, delivery, Verdict::Ack).await;
    }
    assert_eq!(counts("done"), (10, 10));
    assert_sound(&engine).await;
}

// conformance: handlers/depth-processes: depth and drops are right between processes that share a file
#[tokio::test]
async fn what_one_process_drops_another_does_not_hand_out() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let (service, tool) = (open(&path), open(&path));
    declare(&service, "", "*").await;
    let options = ConsumeOptions::new(vec![pattern("*")]).prefetch(2);
    let group = "".parse().unwrap();
    let mut consumer = service.broker.consume(group, options).await.unwrap();
    publish_many(&tool, "a.b", 10).await;
    let got = fetch(&mut consumer, 2).await;
    assert_eq!(
        (depth(&service, "a.b").await, depth(&tool, "a.b").await),
        (10, 10)
    );
    assert_eq!(drop_oldest(&tool, "a.b", 5).await, 5);
    assert_eq!(
        (depth(&service, "a.b").await, depth(&tool, "a.b").await),
        (5, 5)
    );
    for delivery in &got {
        settle(&service, delivery, Verdict::Ack).await;
    }
    assert_eq!(depth(&tool, "a.b").await, 3);
    for expected in 8..=10 {
        let next = fetch(&mut consumer, 1).await.remove(0);
        assert_eq!(next.record.position.place(), expected);
        settle(&service, &next, Verdict::Ack).await;
    }
    assert_eq!(depth(&tool, "a.b").await, 0);
    assert_eq!(skipped(&path), (3..=7).collect());
}

// conformance: handlers/drop-oldest-once: while several processes publish, handle and drop, each event is handled or dropped, never both and never neither
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn under_load_each_event_is_handled_or_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engines = [open(&path), open(&path)];
    declare(&engines[0], "", "*").await;
    let handled = Arc::new(Mutex::new(Vec::new()));
    let mut workers = Vec::new();
    for engine in &engines {
        let (broker, handled) = (engine.broker.clone(), handled.clone());
        let options = ConsumeOptions::new(vec![pattern("*")]).prefetch(8);
        let group = "".parse().unwrap();
        let mut consumer = broker.consume(group, options).await.unwrap();
        workers.push(tokio::spawn(async move {
            while let Ok(batch) = consumer.fetch(4).await {
                tokio::time::sleep(Duration::from_millis(2)).await;
                for delivery in batch {
                    let settlement = Settlement::new(delivery.lease, Verdict::Ack);
                    broker
                        .settle(vec![settlement])
                        .await
                        .unwrap()
                        .remove(0)
                        .unwrap();
                    handled
                        .lock()
                        .unwrap()
                        .push(delivery.record.position.place());
                }
            }
        }));
    }
    let (mut total, mut dropped) = (0, 0);
    // Longer, if the workers were so quick that nothing had to be dropped.
    for round in 0..400 {
        if round >= 40 && dropped > 0 {
            break;
        }
        total += 60;
        publish_many(&engines[round % 2], "a.b", 50).await;
        publish_many(&engines[round % 2], "b.c", 10).await;
        dropped += drop_oldest(&engines[(round + 1) % 2], "a.b", 20).await;
        assert!(depth(&engines[0], "b.c").await <= total);
    }
    eventually("everything is settled", async || {
        depth(&engines[1], "*").await == 0
    })
    .await;
    for engine in &engines {
        engine.broker.close().await.unwrap();
    }
    for worker in workers {
        worker.await.unwrap();
    }
    let mut handled = Arc::into_inner(handled).unwrap().into_inner().unwrap();
    handled.sort_unstable();
    let skipped = skipped(&path);
    assert_eq!(skipped.len() as u64, dropped);
    let unique: BTreeSet<u64> = handled.iter().copied().collect();
    assert_eq!(unique.len(), handled.len(), "none was handled twice");
    assert!(unique.is_disjoint(&skipped), "none was handled and dropped");
    assert_eq!(
        unique.len() + skipped.len(),
        usize::try_from(total).unwrap()
    );
    assert!(dropped > 0 && !unique.is_empty());
    let engine = open(&path);
    assert_sound(&engine).await;
}

// conformance: handlers/drop-oldest-idle: a group that nobody consumes is moved past what was dropped, and retention takes it
#[tokio::test]
async fn an_idle_group_does_not_pin_what_was_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "idle", "a.*").await;
    for _ in 0..6 {
        publish_many(&engine, "a.b", 300).await;
        publish_many(&engine, "b.c", 10).await;
        drop_oldest(&engine, "a.b", 100).await;
    }
    assert_eq!(depth(&engine, "a.b").await, 100);
    let groups = engine.broker.inspect().await.unwrap();
    assert_eq!(groups[0].behind, 100, "the last hundred");
    let everything = Retention {
        max_len: Some(0),
        ..Retention::default()
    };
    let maintenance = engine.maintenance().unwrap();
    let pruned = maintenance.prune(everything).await.unwrap();
    assert_eq!(pruned.removed, 1760, "also what it does not want");
    assert!(
        skipped(&path).is_empty(),
        "the records go with their events"
    );
    let mut consumer = consume(&engine, "idle").await;
    let got = fetch(&mut consumer, 100).await;
    assert_eq!(got[0].record.position.place(), 1751);
    assert_sound(&engine).await;
}

// conformance: handlers/drop-oldest-rollback: a drop that was rolled back leaves everything owed
#[tokio::test]
async fn a_drop_that_was_rolled_back_never_happened() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "", "*").await;
    publish_many(&engine, "a.b", 6).await;
    let saboteur = Connection::open(&path).unwrap();
    saboteur
        .execute_batch(
            "CREATE TRIGGER sabotage BEFORE UPDATE ON groups
             BEGIN SELECT RAISE(ABORT, 'sabotaged'); END",
        )
        .unwrap();
    let refused = engine.depth().unwrap().drop_oldest(pattern("a.b"), 2).await;
    refused.expect_err("the transaction failed");
    saboteur.execute_batch("DROP TRIGGER sabotage").unwrap();
    assert_eq!(depth(&engine, "a.b").await, 6);
    assert!(skipped(&path).is_empty());
    let mut consumer = consume(&engine, "").await;
    let got = fetch(&mut consumer, 6).await;
    assert_eq!(got[0].record.position.place(), 1);
}

// conformance: bus/checker-dropped: the checker finds a dropped event skipped with its reason, in that one place
#[tokio::test]
async fn the_checker_finds_a_dropped_event_in_one_place() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "", "*").await;
    publish_many(&engine, "b.c", 1).await;
    publish_many(&engine, "a.b", 3).await;
    assert_eq!(drop_oldest(&engine, "a.b", 1).await, 2);
    engine.broker.close().await.unwrap();
    let file = path.clone();
    let observed = tokio::task::spawn_blocking(move || observe(&file).unwrap());
    let observed = observed.await.unwrap();
    assert!(observed.damage.is_empty(), "{:?}", observed.damage);
    let mut places: Vec<(u64, Vec<Place>)> = observed
        .events
        .into_values()
        .map(|event| (event.position, event.places[0].clone()))
        .collect();
    places.sort_by_key(|(position, _)| *position);
    let dropped = || vec![Place::Skipped(DROPPED.into())];
    let waiting = || vec![Place::Waiting];
    assert_eq!(
        places,
        [
            (1, waiting()),
            (2, dropped()),
            (3, dropped()),
            (4, waiting())
        ]
    );
}
