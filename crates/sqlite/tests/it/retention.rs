//! Retention on a file: what goes with an event, small steps, several processes, and a run that is cut
//! short.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use everbus_core::{
    Clock as _, Engine, Event, Failure, FailureKind, GroupSpec, Pruned, Retention, Settlement,
    Shard, StartFrom, SubscriptionSpec, Verdict,
};
use everbus_sqlite::Options;
use rusqlite::Connection;

use crate::{
    PATIENCE, clock, consume, consume_some, declare, eventually, failure, fetch, open, publish,
    settle,
};

const DAY: Duration = Duration::from_secs(24 * 3600);

fn everything() -> Retention {
    Retention {
        max_len: Some(0),
        ..Retention::default()
    }
}

fn count(conn: &Connection, table: &str) -> i64 {
    conn.query_row(&format!("SELECT count(*) FROM {table}"), [], |r| r.get(0))
        .unwrap()
}

async fn publish_many(engine: &Engine, event_type: &str, n: usize) {
    let events = (0..n).map(|_| Event::builder(event_type).build().unwrap());
    for answer in engine.broker.append(events.collect()).await.unwrap() {
        answer.unwrap();
    }
}

async fn assert_sound(engine: &Engine) {
    let report = engine.maintenance().unwrap().check().await.unwrap();
    assert!(report.is_ok(), "{report:?}");
}

fn add_stage(conn: &Connection, seq: u64, at: i64) {
    conn.execute(
        "INSERT INTO event_payloads (event_id, stage, payload_compressed, payload_size_original,
           payload_size_compressed, timestamp, seq) VALUES ('x', 'webhook_raw', x'00', 1, 1, ?1, ?2)",
        (at, seq as i64),
    )
    .unwrap();
}

// conformance: memory/retention-whole: payload stages, expiry, skips and retried dead letters go with the event
// conformance: memory/retention-orphans: the transaction that removes an event marks its object as an orphan, and never before
#[tokio::test]
async fn whatever_is_about_an_event_goes_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "g", "*").await;
    let mut seqs = Vec::new();
    for n in 0..4 {
        let event = Event::builder("a").ttl(DAY).meta("overflow", "no").build();
        let appended = engine.broker.append(vec![event.unwrap()]).await.unwrap();
        seqs.push(
            appended
                .into_iter()
                .next()
                .unwrap()
                .unwrap()
                .position
                .place(),
        );
        assert_eq!(seqs.len(), n + 1);
    }
    let mut consumer = consume(&engine, "g").await;
    let got = fetch(&mut consumer, 4).await;
    settle(&engine, &got[0], Verdict::Ack).await;
    let reason = "no".to_owned();
    settle(&engine, &got[1], Verdict::Skip { reason }).await;
    let dead = Verdict::Dead {
        failure: Some(failure("x")),
    };
    settle(&engine, &got[2], dead).await;
    let dead_letters = engine.dead_letters().unwrap();
    assert_eq!(dead_letters.retry(Default::default()).await.unwrap(), 1);
    let again = fetch(&mut consumer, 1).await.remove(0);
    settle(&engine, &again, Verdict::Ack).await;
    let conn = Connection::open(&path).unwrap();
    assert_eq!(count(&conn, "outcomes"), 1, "of the retried dead letter");
    for seq in &seqs {
        add_stage(&conn, *seq, 1);
    }
    // Two of them have their payload elsewhere; the last one is still in flight.
    for seq in [seqs[0], seqs[3]] {
        conn.execute(
            "UPDATE log SET attrs = json_set(attrs, '$.overflow',
               json('{\"bucket\":\"b\",\"key\":\"events/k' || seq || '\",\"size\":1,\"sha256\":\"\"}'))
             WHERE seq = ?1",
            [seq as i64],
        )
        .unwrap();
    }
    let maintenance = engine.maintenance().unwrap();
    let pruned = maintenance.prune(everything()).await.unwrap();
    // The event that tells of the dead letter goes as well.
    assert_eq!((pruned.removed, pruned.kept), (4, 1));
    for table in ["log", "event_payloads", "expirations"] {
        assert_eq!(count(&conn, table), 1, "{table}");
    }
    for table in ["skips", "dead_letters", "outcomes"] {
        assert_eq!(count(&conn, table), 0, "{table}");
    }
    let orphans: Vec<(String, String)> = conn
        .prepare("SELECT bucket, key FROM orphaned_objects")
        .unwrap()
        .query_map([], |r| Ok((r.get(0)?, r.get(1)?)))
        .unwrap()
        .map(Result::unwrap)
        .collect();
    let key = format!("events/k{}", seqs[0]);
    assert_eq!(orphans, [("b".to_owned(), key)], "not that of the one kept");
    settle(&engine, &got[3], Verdict::Ack).await;
    maintenance.prune(everything()).await.unwrap();
    assert_eq!(count(&conn, "orphaned_objects"), 2);
    for table in ["log", "event_payloads", "expirations"] {
        assert_eq!(count(&conn, table), 0, "{table}");
    }
    assert_sound(&engine).await;
}

// conformance: memory/retention-payloads: payload stages go after 14 days, by their own time
// conformance: omni/payload-retention: the daily job removes payloads older than 14 days
// conformance: omni/dead-letter-age: the payloads of a dead letter stay as long as it does
#[tokio::test]
async fn payload_stages_go_by_their_age_and_those_of_dead_letters_with_these() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let (clock, shared) = clock();
    let options = Options {
        clock: shared.clone(),
        ..Options::default()
    };
    let engine = everbus_sqlite::open(&path, options).unwrap();
    declare(&engine, "g", "dead").await;
    let plain = publish(&engine, "plain").await.position.place();
    let dead = publish(&engine, "dead").await.position.place();
    let mut consumer = consume(&engine, "g").await;
    let delivery = fetch(&mut consumer, 1).await.remove(0);
    let failure = Failure::new(1, shared.now(), FailureKind::Error, "x");
    let verdict = Verdict::Dead {
        failure: Some(failure),
    };
    settle(&engine, &delivery, verdict).await;
    let conn = Connection::open(&path).unwrap();
    let start = shared.now().as_micros();
    for seq in [plain, dead] {
        add_stage(&conn, seq, start);
    }
    add_stage(&conn, plain, shared.now().plus(DAY).as_micros());
    let maintenance = engine.maintenance().unwrap();
    let run = async || {
        let standard = Retention::standard();
        let foretold = maintenance.preview(standard.clone()).await.unwrap();
        let done = maintenance.prune(standard).await.unwrap();
        assert_eq!(foretold.payloads, done.payloads);
        assert_eq!(foretold.dead_letters, done.dead_letters);
        (done.payloads, done.dead_letters, done.removed)
    };
    clock.advance(14 * DAY);
    assert_eq!(run().await, (0, 0, 0));
    clock.advance(Duration::from_secs(1));
    assert_eq!(run().await, (1, 0, 0), "not the one of the dead letter");
    clock.advance(DAY);
    assert_eq!(run().await, (1, 0, 0));
    clock.advance(16 * DAY);
    let done = run().await;
    assert_eq!(done, (1, 1, 0), "the dead letter with its stage");
    assert_eq!(count(&conn, "event_payloads"), 0);
    // The events stay: the plain one, the dead one, and the one that told of it.
    assert_eq!(count(&conn, "log"), 3);
    assert_eq!(count(&conn, "skips"), 1);
    assert_sound(&engine).await;
}

// conformance: memory/retention-outbox: rows of the outbox go once they were sent long ago, pending and failed ones stay
#[tokio::test]
async fn sent_rows_of_the_outbox_go() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    let conn = Connection::open(&path).unwrap();
    for n in 0..300 {
        let (status, sent) = match n % 4 {
            0 => ("sent", Some("-8 days")),
            1 => ("sent", Some("-6 days")),
            2 => ("failed", Some("-8 days")),
            _ => ("pending", None),
        };
        conn.execute(
            "INSERT INTO event_outbox (event_type, payload, status, sent_at)
             VALUES ('a', '{}', ?1, strftime('%Y-%m-%dT%H:%M:%fZ', 'now', ?2))",
            (status, sent),
        )
        .unwrap();
    }
    let maintenance = engine.maintenance().unwrap();
    let standard = Retention::standard();
    let foretold = maintenance.preview(standard.clone()).await.unwrap();
    let done = maintenance.prune(standard).await.unwrap();
    assert_eq!((foretold.outbox, done.outbox), (75, 75));
    let held = maintenance.holdings().await.unwrap();
    assert_eq!(held.outbox.count, 75);
    assert!(held.outbox.oldest.is_some());
    assert_eq!(count(&conn, "event_outbox"), 225);
}

// conformance: memory/retention-small-steps: a run is many small transactions, and publishers get their turns between them
// conformance: memory/retention-space: what was freed is given back to the file system, and said
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_goes_in_small_steps_with_others_in_between() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    publish_many(&engine, "a", 20_000).await;
    let (stop, published) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU64::new(0)),
    );
    let publisher = {
        let (engine, stop, published) = (engine.clone(), stop.clone(), published.clone());
        tokio::spawn(async move {
            while !stop.load(Ordering::SeqCst) {
                publish(&engine, "b").await;
                published.fetch_add(1, Ordering::SeqCst);
            }
        })
    };
    eventually("the publisher works", async || {
        published.load(Ordering::SeqCst) > 0
    })
    .await;
    let steps: Arc<Mutex<Vec<Pruned>>> = Arc::default();
    let watch = {
        let (steps, published, path) = (steps.clone(), published.clone(), path.clone());
        move |done| {
            let first = steps.lock().unwrap().is_empty();
            steps.lock().unwrap().push(done);
            if first {
                // The run is in the middle of its work, and a publisher gets a turn.
                let before = published.load(Ordering::SeqCst);
                tokio::task::block_in_place(|| {
                    let next = eventually("somebody published between two steps", async || {
                        published.load(Ordering::SeqCst) > before + 1
                    });
                    tokio::runtime::Handle::current().block_on(next);
                });
                let left = count(&Connection::open(&path).unwrap(), "log");
                assert!(left > 10_000, "only the first step is done: {left}");
            }
        }
    };
    let retention = Retention {
        max_len: Some(1),
        ..Retention::default()
    };
    let maintenance = engine.maintenance().unwrap();
    let done = maintenance
        .prune_watched(retention, Box::new(watch))
        .await
        .unwrap();
    stop.store(true, Ordering::SeqCst);
    publisher.await.unwrap();
    assert!(done.removed >= 20_000 && done.freed_bytes > 0, "{done:?}");
    let steps = steps.lock().unwrap().clone();
    let mut before = Pruned::default();
    for step in &steps {
        assert!(step.removed - before.removed <= 5000, "{step:?}");
        assert!(step.freed_bytes >= before.freed_bytes);
        before = *step;
    }
    assert!(steps.len() > 5, "{}", steps.len());
    assert_sound(&engine).await;
}

// conformance: rule-7/several-processes: what another process has in flight, waiting or unread is not removed
// conformance: fault-9/several-processes: nothing is lost while one process prunes all the time and others consume
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_while_another_process_prunes_all_the_time() {
    const EVENTS: usize = 1500;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let (pruner, worker) = (open(&path), open(&path));
    declare(&worker, "g", "*").await;
    let stop = Arc::new(AtomicBool::new(false));
    let pruning = {
        let (stop, pruner) = (stop.clone(), pruner.clone());
        tokio::spawn(async move {
            let mut removed = 0;
            while !stop.load(Ordering::SeqCst) {
                let maintenance = pruner.maintenance().unwrap();
                removed += maintenance.prune(everything()).await.unwrap().removed;
            }
            removed
        })
    };
    let publishing = {
        let pruner = pruner.clone();
        tokio::spawn(async move {
            for _ in 0..EVENTS / 10 {
                publish_many(&pruner, "a", 10).await;
            }
        })
    };
    let mut consumer = consume_some(&worker, "g", &["*"], 37).await.unwrap();
    let mut seen = BTreeSet::new();
    let mut late: Option<(u64, Box<dyn everbus_core::Consumer>)> = None;
    while seen.len() < EVENTS {
        let got = tokio::time::timeout(PATIENCE, consumer.fetch(20));
        let got = got.await.expect("an event was lost").unwrap();
        for delivery in got {
            let position = delivery.record.position.place();
            // Some wait for a second attempt.
            let verdict = if position % 7 == 0 && delivery.attempt == 1 {
                Verdict::Retry {
                    after: Duration::from_millis(position % 20),
                    failure: failure("once"),
                }
            } else {
                assert!(seen.insert(position), "handled twice");
                Verdict::Ack
            };
            settle(&worker, &delivery, verdict).await;
        }
        if late.is_none() && seen.len() > EVENTS / 2 {
            // A group that begins at the head: whatever comes after is owed to it as well.
            let head = worker.log().unwrap().head().await.unwrap();
            let spec = GroupSpec {
                name: "late".parse().unwrap(),
                start_from: StartFrom::New,
                ordered: false,
                ephemeral: false,
                subscriptions: vec![SubscriptionSpec {
                    name: "all".into(),
                    pattern: "*".parse().unwrap(),
                }],
            };
            worker.broker.declare(spec).await.unwrap();
            let from = worker.broker.inspect().await.unwrap();
            let from = from.iter().find(|g| g.name.as_str() == "late").unwrap();
            assert!(from.position.reaches(&head));
            late = Some((
                from.position.place(Shard::ONLY),
                consume(&worker, "late").await,
            ));
        }
    }
    publishing.await.unwrap();
    let (from, mut consumer) = late.unwrap();
    let rest = usize::try_from(EVENTS as u64 - from).unwrap();
    let mut expected = from + 1;
    while expected <= EVENTS as u64 {
        let delivery = fetch(&mut consumer, 1).await.remove(0);
        assert_eq!(delivery.record.position.place(), expected, "of {rest}");
        settle(&worker, &delivery, Verdict::Ack).await;
        expected += 1;
    }
    stop.store(true, Ordering::SeqCst);
    let mut removed = pruning.await.unwrap();
    let last = pruner.maintenance().unwrap().prune(everything()).await;
    removed += last.unwrap().removed;
    assert_eq!(removed, EVENTS as u64, "in the end everything went");
    assert_sound(&worker).await;
}

// conformance: rule-7/meanwhile: what somebody comes to need in the middle of a run is not removed
// conformance: fault-9/meanwhile: the writer looks again before it removes what was found
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_that_is_declared_in_the_middle_of_a_run_gets_what_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    publish_many(&engine, "a", 3000).await;
    let left = Arc::new(AtomicU64::new(u64::MAX));
    let watch = {
        let (engine, left, path) = (engine.clone(), left.clone(), path.clone());
        move |_| {
            if left.load(Ordering::SeqCst) < u64::MAX {
                return;
            }
            // Between the first step and the second, which was found together with it.
            tokio::task::block_in_place(|| {
                tokio::runtime::Handle::current().block_on(declare(&engine, "g", "*"));
            });
            let conn = Connection::open(&path).unwrap();
            left.store(count(&conn, "log").unsigned_abs(), Ordering::SeqCst);
        }
    };
    let maintenance = engine.maintenance().unwrap();
    let run = maintenance.prune_watched(everything(), Box::new(watch));
    let done = run.await.unwrap();
    let left = left.load(Ordering::SeqCst);
    assert!(left > 0 && left < 3000, "{left}");
    assert_eq!((done.removed, done.kept), (3000 - left, left));
    let mut consumer = consume(&engine, "g").await;
    let first = fetch(&mut consumer, 1).await.remove(0);
    assert_eq!(first.record.position.place(), 3000 - left + 1);
}

// conformance: memory/retention-cut-short: a run that is dropped anywhere leaves a sound file, and the next one ends the work
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_is_cut_short_is_ended_by_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "g", "owed").await;
    for _ in 0..40 {
        publish_many(&engine, "a", 200).await;
        publish_many(&engine, "owed", 3).await;
    }
    let maintenance = engine.maintenance().unwrap();
    for cut in [1, 3, 10] {
        let seen = AtomicU64::new(0);
        let (tell, told) = tokio::sync::oneshot::channel();
        let mut tell = Some(tell);
        let watch = move |_| {
            if seen.fetch_add(1, Ordering::SeqCst) + 1 == cut
                && let Some(tell) = tell.take()
            {
                let _ = tell.send(());
            }
        };
        let run = maintenance.prune_watched(everything(), Box::new(watch));
        tokio::select! {
            done = run => { done.unwrap(); }
            _ = told => {}
        }
        assert_sound(&engine).await;
    }
    let done = maintenance.prune(everything()).await.unwrap();
    assert_eq!(done.kept, 120);
    let conn = Connection::open(&path).unwrap();
    assert_eq!(count(&conn, "log"), 120, "what is owed, and no more");
    let mut consumer = consume(&engine, "g").await;
    assert_eq!(fetch(&mut consumer, 120).await.len(), 120);
}

// conformance: rule-7/expired: a follow-up that expires at once is kept until its groups are done
// conformance: memory/ttl: a batch that is refused leaves no expiry behind
#[tokio::test]
async fn a_refused_batch_leaves_no_expiry_behind() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "g", "*").await;
    let taken = publish(&engine, "a").await;
    let with_ttl = || {
        let event = Event::builder("b").ttl(Duration::from_nanos(1));
        event.build().unwrap()
    };
    let clash = Event::builder("other").id(taken.id).build().unwrap();
    let refused = engine.broker.append(vec![with_ttl(), clash.clone()]).await;
    refused.expect_err("the id is taken");
    let mut consumer = consume(&engine, "g").await;
    let delivery = fetch(&mut consumer, 1).await.remove(0);
    let mut settlement = Settlement::new(delivery.lease.clone(), Verdict::Ack);
    settlement.follow_ups = vec![with_ttl(), clash];
    let answers = engine.broker.settle(vec![settlement]).await.unwrap();
    assert!(answers[0].is_err());
    let conn = Connection::open(&path).unwrap();
    assert_eq!(count(&conn, "expirations"), 0);
    let mut settlement = Settlement::new(delivery.lease.clone(), Verdict::Ack);
    settlement.follow_ups = vec![with_ttl()];
    let answers = engine.broker.settle(vec![settlement]).await.unwrap();
    assert!(answers[0].is_ok());
    assert_eq!(count(&conn, "expirations"), 1);
    let maintenance = engine.maintenance().unwrap();
    let kept = maintenance.prune(Retention::default()).await.unwrap();
    assert_eq!((kept.removed, kept.kept), (0, 1), "it is owed");
    let delivery = fetch(&mut consumer, 1).await.remove(0);
    settle(&engine, &delivery, Verdict::Ack).await;
    let done = maintenance.prune(Retention::default()).await.unwrap();
    assert_eq!((done.removed, done.kept), (1, 0));
    assert_sound(&engine).await;
}

// conformance: memory/remove-group-skips: a group with many skips is removed in small steps
#[tokio::test]
async fn a_group_with_many_skips_is_removed_in_steps() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "g", "*").await;
    declare(&engine, "h", "*").await;
    publish_many(&engine, "a", 1700).await;
    let mut consumer = consume_some(&engine, "g", &["*"], 1700).await.unwrap();
    let got = fetch(&mut consumer, 1700).await;
    let skipped = got.iter().map(|delivery| {
        let reason = "no".to_owned();
        Settlement::new(delivery.lease.clone(), Verdict::Skip { reason })
    });
    let answers = engine.broker.settle(skipped.collect()).await.unwrap();
    assert!(answers.iter().all(Result::is_ok));
    let conn = Connection::open(&path).unwrap();
    conn.execute("INSERT INTO skips SELECT 2, 7, 'x', 1", [])
        .unwrap();
    assert_eq!(count(&conn, "skips"), 1701);
    engine
        .broker
        .remove_group("g".parse().unwrap())
        .await
        .unwrap();
    assert_eq!(count(&conn, "skips"), 1, "the other group's");
    let gone = engine.broker.remove_group("g".parse().unwrap()).await;
    assert_eq!(gone.unwrap_err().code(), everbus_core::Code::GroupNotFound);
}
