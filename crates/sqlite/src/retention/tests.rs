//! A step of retention ends when its time is over, also if its rows are large.

use std::time::Duration;

use everbus_core::{Broker as _, Event, Retention};
use rusqlite::Connection;

use super::needed::owed;
use super::plan::Plan;
use super::remove::remove_rows;
use super::{Slice, others};
use crate::Options;
use crate::broker::SqliteEngine;
use crate::handle::start;

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

    /// Repeats a step on payload stages, each with a time that is over at once. Returns what each removed.
    async fn steps(&self) -> Vec<u64> {
        let (mut removed, mut from) = (Vec::new(), (i64::MIN, i64::MIN));
        loop {
            let job = move |writer: &mut crate::writer::Writer| {
                others::forget_stages(&writer.tx, i64::MAX, from, &Slice::of(Duration::ZERO))
            };
            let (gone, next) = self.engine.handle.job(job).await.unwrap();
            removed.push(gone.payloads);
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
    let stages = lab.steps().await;
    assert!(stages.iter().all(|removed| *removed <= 1), "{stages:?}");
    assert_eq!(stages.iter().sum::<u64>(), 60, "all of it went");
    lab.engine.handle.queue.close(true);
}

// conformance: memory/retention-slice: events that would go together are cut as well, between two pieces
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
    let rows = handle.query(move |reader| {
        Ok(Plan::begin(reader, &everything, now, None)?
            .look(reader, &owed)?
            .1)
    });
    let mut rows = rows.await.unwrap();
    // Each step has no time left: it removes one piece, and the next one goes on.
    let mut steps = Vec::new();
    while !rows.is_empty() {
        let left = rows.clone();
        let job = handle.job(move |writer| {
            let over = Slice::of(Duration::ZERO);
            remove_rows(&mut writer.tx, &writer.deliveries.leases, &left, &over)
        });
        let (gone, seen) = job.await.unwrap();
        assert_eq!((gone.removed, gone.kept), (seen as u64, 0));
        steps.push(seen);
        rows.drain(..seen);
    }
    // 1, 5, 11, 21 and 31 are heavy.
    assert_eq!(steps, [1, 3, 1, 5, 1, 9, 1, 9, 1, 9]);
    lab.engine.handle.queue.close(true);
}
