//! Steps of retention are cut when their time is over, whatever their weight.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use everbus_core::{Broker as _, Event, Pruned, Retention};
use rusqlite::Connection;

use super::pace::Slice;
use super::plan::Piece;
use crate::Options;
use crate::broker::SqliteEngine;
use crate::handle::start;
use crate::retention::needed::owed;
use crate::retention::remove::remove_pieces;

/// A slice that is over at the first check.
const NONE: Duration = Duration::ZERO;
/// A slice that is never over.
const ENDLESS: Duration = Duration::MAX;

struct Lab {
    dir: tempfile::TempDir,
    engine: SqliteEngine,
}

impl Lab {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let handle = start(&dir.path().join("a.db"), Options::default()).unwrap();
        let engine = SqliteEngine { handle };
        Self { dir, engine }
    }

    fn conn(&self) -> Connection {
        Connection::open(self.dir.path().join("a.db")).unwrap()
    }

    /// Fully attributed events, every tenth of them large.
    async fn fill(&self, count: usize) {
        let events = (0..count).map(|n| {
            let size = if n % 10 == 0 { 300_000 } else { 200 };
            Event::builder("order.placed")
                .payload(format!("\"{}\"", "x".repeat(size)))
                .tenant(format!("tenant-{}", n % 20))
                .app("shop")
                .entity("order", format!("{}", n / 5))
                .source("test")
                .key(format!("{}", n / 5))
                .correlation_id(format!("request-{}", n / 3))
                .meta("region", "north")
                .ttl(Duration::from_secs(1_000_000))
                .build()
                .unwrap()
        });
        for event in events {
            let answers = self.engine.append(vec![event]).await.unwrap();
            assert!(answers.into_iter().all(|answer| answer.is_ok()));
        }
    }

    /// Payload stages of one event, some of them large.
    fn add_stages(&self, seq: u64, count: usize) {
        let conn = self.conn();
        for n in 0..count {
            let bytes = if n % 3 == 0 { 60_000 } else { 100 };
            conn.execute(
                "INSERT INTO event_payloads (event_id, stage, payload_compressed,
                   payload_size_original, payload_size_compressed, timestamp, seq)
                 VALUES ('x', 'webhook_raw', zeroblob(?1), ?1, ?1, 1, ?2)",
                (bytes, seq as i64),
            )
            .unwrap();
        }
    }

    fn add_sent(&self, count: usize) {
        let conn = self.conn();
        for _ in 0..count {
            conn.execute(
                "INSERT INTO event_outbox (event_type, payload, status, sent_at)
                 VALUES ('a', '{}', 'sent', '2020-01-01T00:00:00.000Z')",
                [],
            )
            .unwrap();
        }
    }

    /// A run with steps of this length, and what was done after each.
    async fn run(&self, retention: Retention, slice: Duration) -> (Pruned, Vec<Pruned>) {
        let steps: Arc<Mutex<Vec<Pruned>>> = Arc::default();
        let watch = {
            let steps = steps.clone();
            move |done| steps.lock().unwrap().push(done)
        };
        let run = self.engine.prune_timed(retention, Box::new(watch), slice);
        let done = run.await.unwrap();
        let steps = steps.lock().unwrap().clone();
        (done, steps)
    }
}

/// The most of something that one step did.
fn most(steps: &[Pruned], what: fn(&Pruned) -> u64) -> u64 {
    let mut before = 0;
    let each = steps.iter().map(|step| {
        let now = what(step);
        now - std::mem::replace(&mut before, now)
    });
    each.max().unwrap_or(0)
}

// conformance: memory/retention-slice: a step ends with what it is at when its time is over, and the next one goes on; nothing is left out
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_ends_when_its_time_is_over() {
    let lab = Lab::new();
    lab.fill(300).await;
    for seq in [3, 4, 11] {
        lab.add_stages(seq, 20);
    }
    lab.add_sent(100);
    // Stages and rows of the outbox on their own, and then everything else.
    let by_age = Retention {
        payloads: Some(Duration::from_secs(60)),
        outbox: Some(Duration::from_secs(60)),
        ..Retention::default()
    };
    let everything = Retention {
        max_len: Some(0),
        ..Retention::default()
    };
    let (done, steps) = lab.run(by_age, NONE).await;
    assert_eq!((done.payloads, done.outbox), (60, 100), "all of it went");
    assert_eq!(most(&steps, |done| done.payloads), 1);
    assert_eq!(
        most(&steps, |done| done.outbox),
        super::others::FEW_ROWS as u64
    );
    assert!(done.longest_step > Duration::ZERO, "{done:?}");
    assert!(done.longest_hold >= done.longest_step);
    let (done, steps) = lab.run(everything, NONE).await;
    assert_eq!((done.removed, done.kept), (300, 0), "all of it went");
    // Neighbours are removed together, and a step goes on until it was worth its look-ups.
    assert!(most(&steps, |done| done.removed) <= 128, "not all at once");
    assert!(
        most(&steps, |done| done.freed_bytes) <= 2 * 4096,
        "page by page"
    );
    let left: i64 = lab
        .conn()
        .query_row(
            "SELECT (SELECT count(*) FROM log) + (SELECT count(*) FROM event_payloads)
             + (SELECT count(*) FROM expirations) + (SELECT count(*) FROM event_outbox)",
            [],
            |r| r.get(0),
        )
        .unwrap();
    assert_eq!(left, 0);
    // With time enough, a step is as large as planned.
    lab.fill(1).await;
    let seq = lab
        .engine
        .handle
        .query(|r| crate::log::head(r))
        .await
        .unwrap();
    lab.add_stages(seq, 60);
    let by_age = Retention {
        payloads: Some(Duration::from_secs(60)),
        ..Retention::default()
    };
    let (done, steps) = lab.run(by_age, ENDLESS).await;
    assert_eq!(done.payloads, 60);
    assert!(most(&steps, |done| done.payloads) > 1);
    lab.engine.handle.queue.close(true);
}

// conformance: memory/retention-slice: events that would go together are cut as well, between two stretches
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stretches_of_events_are_cut() {
    let lab = Lab::new();
    let events = (0..1024).map(|_| Event::builder("a").build().unwrap());
    let answers = lab.engine.append(events.collect()).await.unwrap();
    assert!(answers.into_iter().all(|answer| answer.is_ok()));
    let pieces: Vec<Piece> = (0..32)
        .map(|n| Piece {
            lo: n * 32 + 1,
            hi: n * 32 + 32,
            events: 32,
            weight: 32,
            overflow: false,
            joins: n > 0,
        })
        .collect();
    let remove = |pieces: Vec<Piece>, slice: Duration| {
        let handle = lab.engine.handle.clone();
        async move {
            let job = handle.patient_job(move |writer| {
                remove_pieces(
                    &mut writer.tx,
                    &mut writer.deliveries.leases,
                    &pieces,
                    &Slice::begin(slice),
                )
            });
            job.await.unwrap()
        }
    };
    let cut = remove(pieces.clone(), NONE).await;
    assert_eq!((cut.pieces, cut.events, cut.kept), (2, 64, 0));
    let rest = remove(pieces[cut.pieces..].to_vec(), ENDLESS).await;
    assert_eq!((rest.pieces, rest.events, rest.kept), (30, 960, 0));
    lab.engine.handle.queue.close(true);
}

// conformance: memory/retention-small-steps: whatever an event weighs, with its stages, it makes no piece larger than itself
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_heavy_is_planned_apart() {
    let lab = Lab::new();
    lab.fill(40).await;
    lab.add_stages(5, 30);
    let everything = Retention {
        max_len: Some(0),
        ..Retention::default()
    };
    let owed = lab
        .engine
        .handle
        .job(|writer| owed(&writer.tx, &writer.deliveries.leases))
        .await
        .unwrap();
    let now = lab.engine.handle.clock.now();
    let pieces = lab
        .engine
        .handle
        .query(move |reader| {
            let mut plan = super::plan::Plan::begin(reader, &everything, now)?;
            plan.limit_length(40);
            Ok(plan.look(reader, &owed)?.pieces)
        })
        .await
        .unwrap();
    assert_eq!(pieces.iter().map(|piece| piece.events).sum::<u64>(), 40);
    let heavy: Vec<(u64, u64)> = pieces
        .iter()
        .filter(|piece| piece.weight > super::plan::QUANTUM)
        .map(|piece| (piece.lo, piece.hi))
        .collect();
    assert_eq!(
        heavy,
        [(1, 1), (5, 5), (11, 11), (21, 21), (31, 31)],
        "{pieces:?}"
    );
    // Scattered pieces do not make a step look at the whole log.
    let far = |lo| Piece {
        lo,
        hi: lo,
        events: 1,
        weight: 1,
        overflow: false,
        joins: false,
    };
    let scattered = [far(1), far(2000), far(9000), far(1_000_000)];
    assert_eq!(super::remove::near(&scattered), &scattered[..2]);
    assert_eq!(super::remove::near(&scattered[2..]), &scattered[2..3]);
    lab.engine.handle.queue.close(true);
}
