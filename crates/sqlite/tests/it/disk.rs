//! A full disk: publishes are refused first, acks and dead letters still fit.

use std::path::{Path, PathBuf};
use std::process::Command;

use everbus_core::{Code, DeadLetterFilter, Event, PageRequest, Verdict};
use everbus_sqlite::Options;

use crate::{consume, declare, failure, fetch, settle};

/// A small file system in memory, unmounted in the end.
pub(crate) struct SmallDisk(pub(crate) PathBuf);

impl SmallDisk {
    /// `None`, loudly, where the machine does not allow it.
    pub(crate) fn mount(path: &Path, megabytes: u32) -> Option<Self> {
        let size = format!("size={megabytes}m");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "everbus-test"])
            .arg(path)
            .status();
        if mounted.is_ok_and(|status| status.success()) {
            return Some(Self(path.to_owned()));
        }
        eprintln!("SKIPPED: a small file system cannot be mounted here (needs root)");
        None
    }

    /// Takes all the room there is but for so many bytes.
    pub(crate) fn fill(&self, leave: u64) {
        let path = self.filler();
        // As much as there is, to the last byte.
        let _ = std::fs::write(&path, vec![0u8; 32 << 20]);
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        let size = file.metadata().unwrap().len();
        file.set_len(size - leave.min(size)).unwrap();
    }

    /// Gives the room back.
    pub(crate) fn free(&self) {
        std::fs::remove_file(self.filler()).unwrap();
    }

    fn filler(&self) -> PathBuf {
        self.0.join("filler")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

fn event(bytes: usize) -> Event {
    Event::builder("a.b")
        .json(&"x".repeat(bytes))
        .build()
        .unwrap()
}

// conformance: bus/full-disk: on a full disk publishes are refused while acks and dead letters succeed
// conformance: framework/backpressure-unbounded: on a full disk publishes are refused while acks and dead letters succeed
// needs: a file system that it may mount
#[tokio::test]
async fn on_a_full_disk_publishes_are_refused_first() {
    let dir = tempfile::tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(dir.path(), 24) else {
        return;
    };
    let path = disk.0.join("a.db");
    let engine = everbus_sqlite::open(&path, Options::default()).unwrap();
    declare(&engine, "", "*").await;
    let mut consumer = consume(&engine, "").await;
    let mut acknowledged = Vec::new();
    let refused = loop {
        match engine.broker.append(vec![event(50_000)]).await {
            Ok(answers) => acknowledged.push(answers[0].as_ref().unwrap().id),
            Err(error) => break error,
        }
    };
    assert_eq!(refused.code(), Code::DiskFull);
    assert!(refused.hint_text().is_some() && !refused.outcome_unknown());
    assert!(
        acknowledged.len() > 50,
        "it filled up: {}",
        acknowledged.len()
    );
    // Acks, retries and dead letters all fit into what was kept free.
    for n in 0..acknowledged.len() {
        let delivery = fetch(&mut consumer, 1).await.remove(0);
        let verdict = match n % 3 {
            0 => Verdict::Ack,
            1 => Verdict::Dead {
                failure: Some(failure(&"long ".repeat(100))),
            },
            _ => Verdict::Retry {
                after: std::time::Duration::from_secs(3600),
                failure: failure("x"),
            },
        };
        settle(&engine, &delivery, verdict).await;
    }
    let page = PageRequest {
        limit: 1000,
        ..PageRequest::default()
    };
    let dead = engine
        .dead_letters()
        .unwrap()
        .list(DeadLetterFilter::default(), page)
        .await
        .unwrap();
    assert_eq!(dead.items.len(), (acknowledged.len() + 1) / 3);
    for id in acknowledged {
        assert_eq!(
            engine.lookup().unwrap().find(id).await.unwrap().len(),
            1,
            "nothing is lost"
        );
    }
    let still = engine.broker.append(vec![event(50_000)]).await.unwrap_err();
    assert_eq!(still.code(), Code::DiskFull);
}

#[tokio::test]
async fn a_disk_filled_by_others_loses_nothing_and_recovers() {
    let dir = tempfile::tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(dir.path(), 16) else {
        return;
    };
    let path = disk.0.join("a.db");
    let engine = everbus_sqlite::open(&path, Options::default()).unwrap();
    declare(&engine, "", "*").await;
    let kept = engine
        .broker
        .append(vec![event(1000)])
        .await
        .unwrap()
        .remove(0)
        .unwrap();
    disk.fill(0);
    let refused = engine.broker.append(vec![event(1000)]).await.unwrap_err();
    assert_eq!(refused.code(), Code::DiskFull);
    disk.free();
    engine
        .broker
        .append(vec![event(1000)])
        .await
        .expect("it goes on by itself");
    assert_eq!(
        engine.lookup().unwrap().find(kept.id).await.unwrap().len(),
        1
    );
}

// conformance: bus/full-disk: on a disk that stays full, verdicts go on, since the write-ahead log is used again
// needs: a file system that it may mount
#[tokio::test]
async fn on_a_disk_that_stays_full_verdicts_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(dir.path(), 24) else {
        return;
    };
    let engine = everbus_sqlite::open(&disk.0.join("a.db"), Options::default()).unwrap();
    declare(&engine, "", "*").await;
    let mut consumer = consume(&engine, "").await;
    while engine.broker.append(vec![event(500_000)]).await.is_ok() {}
    let deliveries = fetch(&mut consumer, 20).await;
    for delivery in &deliveries[1..] {
        settle(&engine, delivery, Verdict::Ack).await;
    }
    // Together many times what is kept free.
    let mut delivery = deliveries[0].clone();
    for n in 0..400 {
        let verdict = crate::retry_at_once("x");
        let settled = crate::try_settle(&engine, &delivery, verdict).await;
        assert!(settled.is_ok(), "verdict {n}: {settled:?}");
        delivery = fetch(&mut consumer, 1).await.remove(0);
    }
    let refused = engine.broker.append(vec![event(500_000)]).await;
    assert_eq!(refused.unwrap_err().code(), Code::DiskFull);
}
