//! Steps of retention are cut when their time is over, whatever their weight.

use std::time::Duration;

use everbus_core::{Broker as _, Event, Result, Retention};
use rusqlite::Connection;

use super::needed::owed;
use super::plan::{BYTES, Piece, Plan};
use super::remove::{near, remove_pieces};
use super::{Slice, others};
use crate::Options;
use crate::broker::SqliteEngine;
use crate::handle::start;
use crate::tx::Tx;

/// A slice that is over at the first check.
const NONE: Duration = Duration::ZERO;
/// A slice that is never over.
const ENDLESS: Duration = Duration::from_secs(3600);

/// What a step removed, and where the next one begins.
type Stepped<C> = Result<(everbus_core::Pruned, Option<C>)>;
type Step<C> = fn(&Tx, C, &Slice) -> Stepped<C>;

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

    /// Events, every tenth of them large.
    async fn fill(&self, count: usize) {
        for n in 0..count {
            let size = if n % 10 == 0 { 300_000 } else { 200 };
            let event = Event::builder("order.placed").payload(format!("\"{}\"", "x".repeat(size)));
            let event = event.build().unwrap();
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

    /// Repeats a step on the outbox or on payload stages, each with a time that is over at once. Returns what each
    /// removed.
    async fn steps<C: Copy + Send + 'static>(&self, mut from: C, step: Step<C>) -> Vec<u64> {
        let mut removed = Vec::new();
        loop {
            let job =
                move |writer: &mut crate::writer::Writer| step(&writer.tx, from, &Slice::of(NONE));
            let (gone, next) = self.engine.handle.job(job).await.unwrap();
            removed.push(gone.payloads + gone.outbox);
            match next {
                Some(next) => from = next,
                None => return removed,
            }
        }
    }
}

// conformance: memory/retention-slice: a step ends with what it is at when its time is over, and the next one goes on; nothing is left out
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_ends_when_its_time_is_over() {
    let lab = Lab::new();
    lab.fill(20).await;
    for seq in [3, 4, 11] {
        lab.add_stages(seq, 20);
    }
    lab.add_sent(100);
    let stages = lab.steps((i64::MIN, i64::MIN), |tx, from, slice| {
        others::forget_stages(tx, i64::MAX, from, slice)
    });
    let stages = stages.await;
    assert!(stages.iter().all(|removed| *removed <= 1), "{stages:?}");
    assert_eq!(stages.iter().sum::<u64>(), 60, "all of it went");
    let now = lab.engine.handle.clock.now();
    let sent = lab.steps(now, |tx, now, slice| {
        let (gone, next) = others::forget_sent(tx, now, slice)?;
        Ok((gone, next.map(|()| now)))
    });
    let sent = sent.await;
    let few = others::FEW_ROWS as u64;
    assert!(sent.iter().all(|removed| *removed <= few), "{sent:?}");
    assert_eq!(sent.iter().sum::<u64>(), 100, "all of it went");
    lab.engine.handle.queue.close(true);
}

// conformance: memory/retention-slice: events that would go together are cut as well, between two stretches
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stretches_of_events_are_cut() {
    let lab = Lab::new();
    let events = (0..1024).map(|_| Event::builder("a").build().unwrap());
    let answers = lab.engine.append(events.collect()).await.unwrap();
    assert!(answers.into_iter().all(|answer| answer.is_ok()));
    let pieces: Vec<Piece> = (0..32).map(|n| piece(n * 32 + 1, n * 32 + 32)).collect();
    let remove = |pieces: Vec<Piece>, slice: Duration| {
        let handle = lab.engine.handle.clone();
        async move {
            let job = handle.patient_job(move |writer| {
                let slice = Slice::of(slice);
                remove_pieces(&mut writer.tx, &writer.deliveries.leases, &pieces, &slice)
            });
            job.await.unwrap()
        }
    };
    let (cut, seen) = remove(pieces.clone(), NONE).await;
    assert_eq!((seen, cut.removed, cut.kept), (2, 64, 0));
    let (rest, seen) = remove(pieces[seen..].to_vec(), ENDLESS).await;
    assert_eq!((seen, rest.removed, rest.kept), (30, 960, 0));
    lab.engine.handle.queue.close(true);
}

fn piece(lo: u64, hi: u64) -> Piece {
    Piece {
        lo,
        hi,
        events: hi - lo + 1,
        bytes: 0,
        overflow: false,
    }
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
    let handle = &lab.engine.handle;
    let owed = handle.job(|writer| owed(&writer.tx, &writer.deliveries.leases));
    let (owed, now) = (owed.await.unwrap(), handle.clock.now());
    let pieces = handle.query(move |reader| {
        let mut plan = Plan::begin(reader, &everything, now, None)?;
        Ok(plan.look(reader, &owed)?.pieces)
    });
    let pieces = pieces.await.unwrap();
    assert_eq!(pieces.iter().map(|piece| piece.events).sum::<u64>(), 40);
    let heavy: Vec<(u64, u64)> = pieces
        .iter()
        .filter(|piece| piece.bytes > BYTES)
        .map(|piece| (piece.lo, piece.hi))
        .collect();
    let alone = [(1, 1), (5, 5), (11, 11), (21, 21), (31, 31)];
    assert_eq!(heavy, alone, "{pieces:?}");
    // Scattered pieces do not make a step look at the whole log.
    let scattered = [1, 2000, 9000, 1_000_000].map(|seq| piece(seq, seq));
    assert_eq!(near(&scattered), &scattered[..2]);
    assert_eq!(near(&scattered[2..]), &scattered[2..3]);
    lab.engine.handle.queue.close(true);
}
