//! The thread that builds the history index. The index lags behind the log.
//!
//! When enough events were appended it sorts their postings into a run; when there are many runs of a level
//! it merges them. Nothing depends on the thread: events without an index are found by reading the log. So a
//! failure never stops the engine; the thread logs a warning and tries again later. This file has the
//! writer's handle of the thread; `work` has what the thread does.

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

/// The writer's handle of the thread.
pub(crate) struct Indexer {
    sender: Option<mpsc::Sender<Wake>>,
    handle: Option<JoinHandle<()>>,
    shared: Arc<Shared>,
}

enum Wake {
    Appended,
    Review,
}

/// State shared by both threads.
struct Shared {
    /// The newest position that the writer knows of.
    head: AtomicU64,
    /// The head at which there are enough events for a run.
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

    /// Tells the thread the newest position of the log.
    pub(crate) fn saw(&self, head: u64) {
        self.shared.head.store(head, Ordering::SeqCst);
        if head >= self.shared.wake_at.load(Ordering::SeqCst)
            && !self.shared.woken.swap(true, Ordering::Relaxed)
        {
            self.send(Wake::Appended);
        }
    }

    /// Asks the thread to look for runs with few events left.
    pub(crate) fn review(&self) {
        self.send(Wake::Review);
    }

    fn send(&self, wake: Wake) {
        if let Some(sender) = &self.sender {
            let _ = sender.send(wake);
        }
    }

    /// Ends the thread and closes its connection. Unfinished work is left for the next process.
    pub(crate) fn close(&mut self) {
        self.shared.closing.store(true, Ordering::Relaxed);
        self.sender = None;
        if let Some(handle) = self.handle.take() {
            let _ = handle.join();
        }
    }
}

fn warn(error: &Error) {
    tracing::warn!(target: "everbus::sqlite", %error, "the indexes of the history could not be updated; queries read the log instead");
}
