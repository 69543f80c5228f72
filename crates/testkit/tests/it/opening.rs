//! A file is opened while another process writes to it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use everbus_core::{Engine, Event};

const OPENS: usize = 1000;

fn open(file: &std::path::Path) -> Engine {
    everbus_sqlite::open(file, everbus_sqlite::Options::default()).unwrap()
}

fn event() -> Event {
    Event::builder("opening.made").build().unwrap()
}

// conformance: bus/several-processes: a process that opens a busy file may publish at once
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_is_being_written_is_opened_as_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("busy.db");
    let (busy, done) = (open(&file), Arc::new(AtomicBool::new(false)));
    let stop = done.clone();
    let writing = tokio::spawn(async move {
        while !stop.load(Ordering::Relaxed) {
            busy.broker.append(vec![event()]).await.unwrap();
            // Room for the other to get between two commits.
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
    });
    let mut refused = Vec::new();
    for _ in 0..OPENS {
        let path = file.clone();
        let engine = tokio::task::spawn_blocking(move || open(&path))
            .await
            .unwrap();
        if let Err(error) = engine.broker.append(vec![event()]).await {
            refused.push(error);
        }
        engine.broker.close().await.unwrap();
    }
    done.store(true, Ordering::Relaxed);
    writing.await.unwrap();
    assert!(
        refused.is_empty(),
        "{} of {OPENS}: {refused:?}",
        refused.len()
    );
}
