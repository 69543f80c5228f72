//! What the engine and its consumers share: the queue to the writer, the threads that answer queries.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock};

use everbus_core::{BoxFuture, Clock, Code, Error, Result};
use tokio::sync::{Notify, oneshot, watch};

use crate::answers::Answers;
use crate::audit::Keeper;
use crate::feeder;
use crate::file::{locate, open_writer};
use crate::guard::Guard;
use crate::history::Indexer;
use crate::queue::{Answer, Command, Priority, Queue, Reply};
use crate::readers::{Reader, Readers};
use crate::writer::{Start, Writer};
use crate::{Durable, Options};

/// Shared by the engine and its consumers. When the last one is dropped, the writer finishes the queued
/// commands and ends.
pub(crate) struct Handle {
    pub(crate) queue: Arc<Queue>,
    readers: Arc<Readers>,
    /// Separate, because a handler waits for these queries.
    inbox_readers: Arc<Readers>,
    /// Separate, because a relay reads many rows at a time.
    outbox_readers: Arc<Readers>,
    pub(crate) audit: Arc<Keeper>,
    pub(crate) head: watch::Receiver<u64>,
    pub(crate) failed: Arc<OnceLock<Error>>,
    /// The error that currently keeps the writer from finding new events.
    pub(crate) stalled: Arc<Mutex<Option<Error>>>,
    pub(crate) answers: Arc<Answers>,
    pub(crate) path: PathBuf,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) durability: Durable,
    pub(crate) sessions: AtomicU64,
    /// Wakes tasks that watch values.
    pub(crate) values: Notify,
    pub(crate) ended: watch::Receiver<bool>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.queue.close(false);
    }
}

impl Handle {
    /// Runs a query on the reader thread while the engine runs.
    pub(crate) fn query<T: Send + 'static>(
        &self,
        query: impl FnOnce(&mut Reader) -> Result<T> + Send + 'static,
    ) -> BoxFuture<'static, Result<T>> {
        self.query_on(&self.readers, query)
    }

    /// Runs a query about the inbox. It does not wait for longer queries.
    pub(crate) fn query_inbox<T: Send + 'static>(
        &self,
        query: impl FnOnce(&mut Reader) -> Result<T> + Send + 'static,
    ) -> BoxFuture<'static, Result<T>> {
        self.query_on(&self.inbox_readers, query)
    }

    /// Runs a query about the outbox. No other query waits for it.
    pub(crate) fn query_outbox<T: Send + 'static>(
        &self,
        query: impl FnOnce(&mut Reader) -> Result<T> + Send + 'static,
    ) -> BoxFuture<'static, Result<T>> {
        self.query_on(&self.outbox_readers, query)
    }

    fn query_on<T: Send + 'static>(
        &self,
        readers: &Readers,
        query: impl FnOnce(&mut Reader) -> Result<T> + Send + 'static,
    ) -> BoxFuture<'static, Result<T>> {
        match self.failed.get() {
            Some(error) => Box::pin(std::future::ready(Err(error.clone()))),
            None => readers.query(query),
        }
    }

    /// Runs a job inside the writer's transaction and returns its result once it is durable.
    pub(crate) fn job<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Writer) -> Result<T> + Send + 'static,
    ) -> BoxFuture<'static, Result<T>> {
        self.job_then(job, |value| value)
    }

    /// As [`job`](Self::job), for work that may wait while other commands are queued.
    pub(crate) fn patient_job<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Writer) -> Result<T> + Send + 'static,
    ) -> BoxFuture<'static, Result<T>> {
        self.push_job(Priority::Patient, job, |value| value)
    }

    /// As [`patient_job`](Self::patient_job), for work that need not be durable when it is answered. It
    /// becomes durable with the next synced commit; after a power failure before that, it has not happened.
    pub(crate) fn lazy_job<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Writer) -> Result<T> + Send + 'static,
    ) -> BoxFuture<'static, Result<T>> {
        self.push_job(Priority::Lazy, job, |value| value)
    }

    /// As [`job`](Self::job), with a step that runs on the writer's thread once the change is durable, even
    /// if the caller no longer waits.
    pub(crate) fn job_then<T: Send + 'static, U: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Writer) -> Result<T> + Send + 'static,
        then: impl FnOnce(T) -> U + Send + 'static,
    ) -> BoxFuture<'static, Result<U>> {
        self.push_job(Priority::Now, job, then)
    }

    fn push_job<T: Send + 'static, U: Send + 'static>(
        &self,
        priority: Priority,
        job: impl FnOnce(&mut Writer) -> Result<T> + Send + 'static,
        then: impl FnOnce(T) -> U + Send + 'static,
    ) -> BoxFuture<'static, Result<U>> {
        let (reply, answer) = oneshot::channel();
        let reply = Arc::new(std::sync::Mutex::new(Some(reply)));
        let take = |slot: &std::sync::Mutex<Option<Reply<U>>>| {
            slot.lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner)
                .take()
        };
        let failed = reply.clone();
        self.queue.push(Command::Job {
            job: Some(Box::new(move |writer| {
                let value = job(writer)?;
                let answer: Answer = Box::new(move || {
                    let value = then(value);
                    if let Some(reply) = take(&reply) {
                        let _ = reply.send(Ok(value));
                    }
                });
                Ok(answer)
            })),
            failed: Box::new(move |error| {
                if let Some(reply) = take(&failed) {
                    let _ = reply.send(Err(error));
                }
            }),
            priority,
        });
        Box::pin(receive(answer))
    }
}

/// Waits for an answer. A writer that ends without one has failed.
pub(crate) async fn receive<T>(answer: oneshot::Receiver<Result<T>>) -> Result<T> {
    answer.await.unwrap_or_else(|_| {
        Err(
            Error::new(Code::StorageFailed, "the writer of the file has ended")
                .hint("open the file again")
                .with_unknown_outcome(),
        )
    })
}

/// Opens a file and starts its threads.
pub(crate) fn start(path: &Path, options: Options) -> Result<Arc<Handle>> {
    crate::schema::check_library()?;
    let path = locate(path, options.create)?;
    let mut conn = match open_writer(&path, &options) {
        // A temporary read error of the disk looks like damage. Only an error that occurs again is damage.
        Err(e) if e.code() == Code::Corrupt => {
            tracing::info!(target: "everbus::sqlite", error = %e, "the file could not be read; opening it again");
            open_writer(&path, &options)?
        }
        opened => opened?,
    };
    let guard = Guard::install(&mut conn)?;
    let queue = Arc::new(Queue::default());
    let (head, watched) = watch::channel(0);
    let (end, ended) = watch::channel(false);
    let failed = Arc::new(OnceLock::new());
    let stalled = Arc::new(Mutex::default());
    let answers = Arc::new(Answers::default());
    let feeder = feeder::start(&path, &queue)?;
    let indexer = Indexer::start(&path, &queue, options.history)?;
    let readers = Arc::new(Readers::new(path.clone()));
    let inbox_readers = Arc::new(Readers::new(path.clone()));
    let outbox_readers = Arc::new(Readers::new(path.clone()));
    let audit = Arc::new(Keeper::new(path.clone()));
    let (clock, durability) = (options.clock.clone(), options.durability);
    let writer = Writer::new(Start {
        conn,
        guard,
        path: path.clone(),
        options,
        queue: queue.clone(),
        feeder,
        indexer,
        readers: vec![
            readers.clone(),
            inbox_readers.clone(),
            outbox_readers.clone(),
            audit.thread(),
        ],
        head,
        failed: failed.clone(),
        stalled: stalled.clone(),
        answers: answers.clone(),
    })?;
    let file = path.clone();
    std::thread::Builder::new()
        .name("everbus-write".into())
        .spawn(move || {
            // Dropped when the writer ends, also by a panic, so that no caller waits for ever.
            let _end = EndSignal(end);
            writer.run();
            crate::log_head::retire(&file);
        })
        .map_err(|e| Error::new(Code::Internal, format!("no thread for writing: {e}")))?;
    let wake = Arc::downgrade(&queue);
    clock.on_jump(Box::new(move || {
        if let Some(queue) = wake.upgrade() {
            queue.nudge();
        }
    }));
    Ok(Arc::new(Handle {
        queue,
        readers,
        inbox_readers,
        outbox_readers,
        audit,
        head: watched,
        failed,
        stalled,
        answers,
        path,
        clock,
        durability,
        sessions: AtomicU64::new(1),
        values: Notify::new(),
        ended,
    }))
}

struct EndSignal(watch::Sender<bool>);

impl Drop for EndSignal {
    fn drop(&mut self) {
        self.0.send_replace(true);
    }
}
