//! Several engines on one file: what processes see of each other. (Real processes are killed in the
//! test kit's campaigns; locks and changes work the same between two engines of one process.)

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Code, Consumer, DeadLetterFilter, Delivery, Engine, Settlement, Verdict};
use everbus_sqlite::Options;

use crate::{PATIENCE, clock, consume, declare, eventually, failure, fetch, open, publish, settle};

// conformance: bus/cross-process-wake: events of another process are noticed without a hint
#[tokio::test]
async fn what_another_process_publishes_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let (service, tool) = (open(&path), open(&path));
    declare(&service, "", "*").await;
    let mut consumer = consume(&service, "").await;
    for _ in 0..5 {
        let published = publish(&tool, "a.b").await;
        let delivery = fetch(&mut consumer, 1).await.remove(0);
        assert_eq!(delivery.record.position, published.position);
        let settled = tool
            .settled()
            .unwrap()
            .settled(published.position, PATIENCE);
        settle(&service, &delivery, Verdict::Ack).await;
        settled
            .await
            .expect("the tool sees that the service settled it");
    }
}

// conformance: bus/several-processes: several engines publish and consume one file; each event is handled once per group
// conformance: framework/framework-groups: several engines publish and consume one file; each event is handled once per group
// conformance: framework/backpressure-scaling: several engines publish and consume one file; each event is handled once per group
// conformance: omni/subscribe-queue: several engines publish and consume one file; each event is handled once per group
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn competing_processes_share_a_group_without_overlap() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let first = open(&path);
    declare(&first, "workers", "*").await;
    let engines = [first, open(&path), open(&path)];
    let handled = Arc::new(std::sync::Mutex::new(Vec::new()));
    let total = 600;
    let mut tasks = Vec::new();
    for engine in &engines {
        let (broker, handled) = (engine.broker.clone(), handled.clone());
        let mut consumer = consume(engine, "workers").await;
        tasks.push(tokio::spawn(async move {
            while let Ok(batch) = consumer.fetch(16).await {
                let settlements: Vec<Settlement> = batch
                    .iter()
                    .map(|d| Settlement::new(d.lease.clone(), Verdict::Ack))
                    .collect();
                for result in broker.settle(settlements).await.unwrap() {
                    result.unwrap();
                }
                handled
                    .lock()
                    .unwrap()
                    .extend(batch.iter().map(|d| d.record.position));
            }
        }));
    }
    let publishers = engines.iter().map(|engine| async move {
        for _ in 0..total / 3 {
            publish(engine, "a.b").await;
        }
    });
    let publishers: Vec<_> = publishers.collect();
    let [a, b, c]: [_; 3] = publishers.try_into().ok().unwrap();
    tokio::join!(a, b, c);
    eventually("everything is handled", async || {
        handled.lock().unwrap().len() >= total
    })
    .await;
    for engine in &engines {
        engine.broker.close().await.unwrap();
    }
    for task in tasks {
        task.await.unwrap();
    }
    let handled = handled.lock().unwrap();
    assert_eq!(handled.len(), total, "none twice");
    assert_eq!(
        handled.iter().collect::<HashSet<_>>().len(),
        total,
        "none lost"
    );
}

// conformance: bus/recovery-spares-the-living: work of a process that lives is not taken
// conformance: rule-3/living: only what a dead owner had is inherited
#[tokio::test]
async fn recovery_takes_from_the_dead_and_never_from_the_living() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let alive = open(&path);
    declare(&alive, "", "*").await;
    let mut worker = consume(&alive, "").await;
    let held = publish(&alive, "a.b").await;
    let delivery = fetch(&mut worker, 1).await.remove(0);
    let other = open(&path);
    let mut rival = consume(&other, "").await;
    // Several rounds of the rival's search for dead owners.
    let nothing = tokio::time::timeout(Duration::from_millis(700), rival.fetch(1)).await;
    assert!(nothing.is_err(), "the owner lives: {nothing:?}");
    settle(&alive, &delivery, Verdict::Ack).await;

    let abandoned = publish(&other, "a.b").await;
    let (taken_by_rival, taken) = tokio::select! {
        taken = worker.fetch(1) => (false, taken.unwrap().remove(0)),
        taken = rival.fetch(1) => (true, taken.unwrap().remove(0)),
    };
    assert_eq!(taken.record.position, abandoned.position);
    // The one that has it goes away without a word.
    let mut survivor = if taken_by_rival {
        drop(rival);
        drop(other);
        worker
    } else {
        drop(worker);
        drop(alive);
        rival
    };
    let again = fetch(&mut survivor, 1).await.remove(0);
    assert_eq!(
        (again.record.position, again.attempt),
        (abandoned.position, 2)
    );
    assert_ne!(again.record.position, held.position);
}

// conformance: fault-7/zombie: a late ack of a process whose lease is over does not complete another's delivery
#[tokio::test]
async fn a_zombies_late_ack_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let (clock, shared) = clock();
    let options = || Options {
        clock: shared.clone(),
        ..Options::default()
    };
    let zombie = everbus_sqlite::open(&path, options()).unwrap();
    declare(&zombie, "", "*").await;
    let mut worker = consume(&zombie, "").await;
    publish(&zombie, "a.b").await;
    let old = fetch(&mut worker, 1).await.remove(0);
    worker.close().await.unwrap();
    let other = everbus_sqlite::open(&path, options()).unwrap();
    let mut rival = consume(&other, "").await;
    clock.advance(Duration::from_secs(3600));
    let new = fetch(&mut rival, 1).await.remove(0);
    assert_eq!(new.attempt, 2);
    let late = vec![Settlement::new(old.lease.clone(), Verdict::Ack)];
    let refused = zombie
        .broker
        .settle(late)
        .await
        .unwrap()
        .remove(0)
        .unwrap_err();
    assert_eq!(refused.code(), Code::LeaseLost);
    let extended = zombie
        .broker
        .extend(vec![old.lease], Duration::from_secs(60))
        .await
        .unwrap();
    assert_eq!(extended[0].as_ref().unwrap_err().code(), Code::LeaseLost);
    settle(
        &other,
        &new,
        Verdict::Retry {
            after: Duration::ZERO,
            failure: failure("x"),
        },
    )
    .await;
    let third = fetch(&mut rival, 1).await.remove(0);
    assert_eq!(third.attempt, 3, "the zombie did not complete it");
}

#[tokio::test]
async fn a_tool_retries_dead_letters_while_the_service_runs() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let (service, tool) = (open(&path), open(&path));
    declare(&service, "", "*").await;
    let mut consumer = consume(&service, "").await;
    let published = publish(&service, "a.b").await;
    let delivery = fetch(&mut consumer, 1).await.remove(0);
    settle(
        &service,
        &delivery,
        Verdict::Dead {
            failure: Some(failure("x")),
        },
    )
    .await;
    let retried = tool
        .dead_letters()
        .unwrap()
        .retry(DeadLetterFilter::default())
        .await
        .unwrap();
    assert_eq!(retried, 1);
    let delivery = fetch(&mut consumer, 1).await.remove(0);
    assert_eq!(
        (delivery.record.position, delivery.attempt),
        (published.position, 1)
    );
}

/// The delivery of the first event, with as much as comes with it. Whatever comes before is acked.
async fn with_the_first(engine: &Engine, consumer: &mut Box<dyn Consumer>) -> Vec<Delivery> {
    loop {
        let got = tokio::time::timeout(PATIENCE, consumer.fetch(64)).await;
        let got = got.expect("the first event is delivered").unwrap();
        if got.iter().any(|d| d.record.position.place() == 1) {
            return got;
        }
        for delivery in &got {
            settle(engine, delivery, Verdict::Ack).await;
        }
    }
}

// conformance: rule-3/crash-loop: an event that kills its process again and again is found out alone and marked so
#[tokio::test]
async fn an_event_that_crashes_again_and_again_is_handed_out_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "", "*").await;
    drop(engine);
    for crash in 1..=4u32 {
        let engine = open(&path);
        // There is always something else to do.
        for _ in 0..20 {
            publish(&engine, "a.b").await;
        }
        let mut consumer = consume(&engine, "").await;
        let got = with_the_first(&engine, &mut consumer).await;
        let guilty = got.iter().find(|d| d.record.position.place() == 1).unwrap();
        assert_eq!(guilty.attempt, crash);
        assert_eq!(
            guilty.failures.len() as u32,
            crash - 1,
            "every crash is on record"
        );
        if crash == 4 {
            assert_eq!(got.len(), 1, "after three crashes it is alone in flight");
            let more = tokio::time::timeout(Duration::from_millis(300), consumer.fetch(64)).await;
            assert!(more.is_err(), "and stays so: {more:?}");
        }
        for delivery in got.iter().filter(|d| d.record.position.place() != 1) {
            settle(&engine, delivery, Verdict::Ack).await;
        }
        drop(consumer);
        drop(engine);
    }
    let engine = open(&path);
    let mut consumer = consume(&engine, "").await;
    let got = with_the_first(&engine, &mut consumer).await;
    let delivery = got.iter().find(|d| d.record.position.place() == 1).unwrap();
    assert_eq!(delivery.attempt, 5);
    assert!(
        delivery.failures.last().is_some_and(|f| f.alone),
        "{:?}",
        delivery.failures
    );
}
