//! The thread that keeps the index some way behind the log.
//!
//! When enough events were appended it sorts their postings into a run; when there are many runs of a
//! size it merges them. Nothing depends on it: what has no index yet is found by reading the log. So it
//! never makes the engine fail; it logs a warning and tries again later. This is the handle that the
//! writer has of it; what it does is in `work`.

mod compact;
mod cut;
mod jobs;
mod review;
mod work;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use everbus_core::{Code, Error, Result};

use super::HistoryTuning;
use crate::queue::Queue;
use crate::readers::Reader;
use work::Work;

/// What the writer has of the thread.
pub(crate) struct Indexer {
    sender: Option<mpsc::Sender<Wake>>,
    handle: Option<JoinHandle<()>>,
    shared: Arc<Shared>,
}

enum Wake {
    Appended,
    Review,
}

/// What both threads look at.
struct Shared {
    /// The newest position that the writer knows of.
    head: AtomicU64,
    /// The head at which there will be enough for a run.
    wake_at: AtomicU64,
    woken: AtomicBool,
    closing: AtomicBool,
}

impl Indexer {
    /// Starts the thread.
    pub(crate) fn start(path: &Path, queue: &Arc<Queue>, tuning: HistoryTuning) -> Result<Self> {
        let shared = Arc::new(Shared {
            head: AtomicU64::new(0),
            wake_at: AtomicU64::new(u64::MAX),
            woken: AtomicBool::new(false),
            closing: AtomicBool::new(false),
        });
        let (sender, wakes) = mpsc::channel();
        let (path, queue, of_thread) = (path.to_owned(), Arc::downgrade(queue), shared.clone());
        let handle = std::thread::Builder::new()
            .name("everbus-index".into())
            .spawn(move || match Reader::open(&path) {
                Ok(reader) => Work::new(reader, queue, of_thread, tuning).run(&wakes),
                Err(error) => warn(&error),
            })
            .map_err(|e| Error::new(Code::Internal, format!("no thread for indexing: {e}")))?;
        Ok(Self {
            sender: Some(sender),
            handle: Some(handle),
            shared,
        })
    }

    /// Tells it how far the log reaches.
    pub(crate) fn saw(&self, head: u64) {
        self.shared.head.store(head, Ordering::SeqCst);
        if head >= self.shared.wake_at.load(Ordering::SeqCst)
            && !self.shared.woken.swap(true, Ordering::Relaxed)
        {
            self.send(Wake::Appended);
        }
    }

    /// Lets it look for runs of which little is left.
    pub(crate) fn review(&self) {
        self.send(Wake::Review);
    }

    fn send(&self, wake: Wake) {
        if let Some(sender) = &self.sender {
            let _ = sender.send(wake);
        }
    }

    /// Ends the thread and closes its connection. What it was at is left for the next process.
    pub(crate) fn close(&mut self) {
        self.shared.closing.store(true, Ordering::Relaxed);
        self.sender = None;
        if let Some(handle) = self.handle.take() {
            let _ = handle.join();
        }
    }
}

fn warn(error: &Error) {
    tracing::warn!(target: "everbus::sqlite", %error, "the indexes of the history are not kept up; queries read the log instead");
}
