//! The engine's public side: every verb becomes a command for the writer or a query.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use everbus_core::{
    Appended, BoxFuture, Broker, Capabilities, Clock, Code, ConsumeOptions, Consumer, Depth,
    Durability, Engine, Error, Event, EventId, GroupInfo, GroupName, GroupSpec, Lease, Pattern,
    Position, Redeliver, Redelivery, Result, Settled, SettledOutcome, Settlement, SubscriptionInfo,
};
use tokio::sync::{oneshot, watch};

use crate::answers::Answers;
use crate::audit::Keeper;
use crate::effect::ENGINE;
use crate::feeder;
use crate::file::{locate, open_writer};
use crate::guard::Guard;
use crate::history::Indexer;
use crate::mailbox::Mailbox;
use crate::queue::{Answer, Command, Priority, Queue, Reply};
use crate::readers::{Reader, Readers};
use crate::session::{NewSession, SqliteConsumer};
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
    /// The error that keeps the writer from looking for new events, while it lasts.
    pub(crate) stalled: Arc<Mutex<Option<Error>>>,
    answers: Arc<Answers>,
    pub(crate) path: PathBuf,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) durability: Durable,
    sessions: AtomicU64,
    ended: watch::Receiver<bool>,
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
async fn receive<T>(answer: oneshot::Receiver<Result<T>>) -> Result<T> {
    answer.await.unwrap_or_else(|_| {
        Err(
            Error::new(Code::StorageFailed, "the writer of the file has ended")
                .hint("open the file again")
                .with_unknown_outcome(),
        )
    })
}

/// The embedded engine.
pub(crate) struct SqliteEngine {
    pub(crate) handle: Arc<Handle>,
}

/// Opens a file and starts its threads.
pub(crate) fn start(path: &Path, options: Options) -> Result<Arc<Handle>> {
    crate::schema::check_library()?;
    let path = locate(path, options.create)?;
    let mut conn = match open_writer(&path, &options) {
        // A temporary read error of the disk looks like damage: only an error that stays is damage.
        Err(e) if e.code() == Code::Corrupt => {
            tracing::info!(target: "everbus::sqlite", error = %e, "opening the file once more");
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
        ended,
    }))
}

pub(crate) fn open(path: &Path, options: Options) -> Result<Engine> {
    let handle = start(path, options)?;
    let objects = crate::orphans::beside(&handle.path);
    let outbox = crate::outbox::own_outbox(handle.clone());
    let engine = Arc::new(SqliteEngine { handle });
    Ok(Engine {
        log: Some(engine.clone()),
        lookup: Some(engine.clone()),
        settled: Some(engine.clone()),
        redeliver: Some(engine.clone()),
        depth: Some(engine.clone()),
        dead_letters: Some(engine.clone()),
        store: Some(engine.clone()),
        maintenance: Some(engine.clone()),
        inbox: Some(engine.clone()),
        payloads: Some(engine.clone()),
        orphans: Some(engine.clone()),
        objects: Some(objects),
        outbox: Some(outbox),
        checkpoints: Some(engine.clone()),
        audit: Some(engine.clone()),
        history: Some(engine.clone()),
        ..Engine::new(engine)
    })
}

struct EndSignal(watch::Sender<bool>);

impl Drop for EndSignal {
    fn drop(&mut self) {
        self.0.send_replace(true);
    }
}

impl SqliteEngine {
    fn ask<T: Send + 'static>(
        &self,
        command: impl FnOnce(Reply<T>) -> Command,
    ) -> BoxFuture<'static, Result<T>> {
        let (reply, answer) = oneshot::channel();
        self.handle.queue.push(command(reply));
        Box::pin(receive(answer))
    }
}

impl Broker for SqliteEngine {
    fn capabilities(&self) -> Capabilities {
        let durability = match self.handle.durability {
            Durable::Full => Durability::PowerLoss,
            Durable::Normal => Durability::Process,
        };
        Capabilities::full(ENGINE, durability).transaction(Some(ENGINE))
    }

    fn declare(&self, group: GroupSpec) -> BoxFuture<'_, Result<Vec<SubscriptionInfo>>> {
        let group = Box::new(group);
        self.ask(|reply| Command::Declare { group, reply })
    }

    fn retract(&self, subscription: EventId) -> BoxFuture<'_, Result<()>> {
        let subscription = subscription.to_string();
        self.ask(|reply| Command::Retract {
            subscription,
            reply,
        })
    }

    fn remove_group(&self, group: GroupName) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            self.forget_skips(&group).await?;
            self.ask(|reply| Command::RemoveGroup { group, reply })
                .await
        })
    }

    fn append(&self, mut batch: Vec<Event>) -> BoxFuture<'_, Result<Vec<Result<Appended>>>> {
        if batch.len() <= 1 {
            let Some(event) = batch.pop() else {
                return Box::pin(std::future::ready(Ok(Vec::new())));
            };
            let (reply, answer) = oneshot::channel();
            self.handle.queue.push(Command::AppendOne { event, reply });
            return Box::pin(async {
                let answer = receive(answer).await;
                self.handle.answers.send();
                Ok(vec![Ok(answer?)])
            });
        }
        let answer = self.ask(|reply| Command::Append {
            events: batch,
            reply,
        });
        Box::pin(async {
            let answer = answer.await;
            self.handle.answers.send();
            answer
        })
    }

    fn consume(
        &self,
        group: GroupName,
        options: ConsumeOptions,
    ) -> BoxFuture<'_, Result<Box<dyn Consumer>>> {
        if options.lease.is_zero() {
            let error = Error::new(Code::InvalidSetting, "a lease of no time")
                .hint("a lease lasts as long as a handler may run, and some more");
            return Box::pin(std::future::ready(Err(error)));
        }
        let id = self.handle.sessions.fetch_add(1, Ordering::Relaxed);
        let mailbox = Arc::new(Mailbox::default());
        let session = Box::new(NewSession {
            id,
            group,
            options,
            mailbox: mailbox.clone(),
        });
        let attached = self.ask(|reply| Command::Attach { session, reply });
        // Made before the answer arrives: if the caller stops waiting, dropping it detaches the session.
        let consumer = SqliteConsumer {
            id,
            mailbox,
            handle: self.handle.clone(),
            closed: false,
        };
        Box::pin(async move {
            attached.await?;
            Ok(Box::new(consumer) as Box<dyn Consumer>)
        })
    }

    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        if settlements.is_empty() {
            return Box::pin(std::future::ready(Ok(Vec::new())));
        }
        self.ask(|reply| Command::Settle { settlements, reply })
    }

    fn extend(&self, leases: Vec<Lease>, by: Duration) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        if leases.is_empty() {
            return Box::pin(std::future::ready(Ok(Vec::new())));
        }
        self.ask(|reply| Command::Extend { leases, by, reply })
    }

    fn inspect(&self) -> BoxFuture<'_, Result<Vec<GroupInfo>>> {
        let (now, path) = (self.handle.clock.now(), self.handle.path.clone());
        self.handle
            .query(move |reader| crate::inspect::groups(reader, &path, now))
    }

    fn close(&self) -> BoxFuture<'_, Result<()>> {
        self.handle.queue.close(true);
        let mut ended = self.handle.ended.clone();
        Box::pin(async move {
            let _ = ended.wait_for(|ended| *ended).await;
            match self.handle.failed.get() {
                Some(error) if error.code() != Code::EventBusShutdownError => Err(error.clone()),
                _ => Ok(()),
            }
        })
    }
}

impl Settled for SqliteEngine {
    fn settled(
        &self,
        position: Position,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<SettledOutcome>> {
        let waiting = self.ask(|reply| Command::Watch {
            position: position.place(),
            reply: Some(reply),
        });
        Box::pin(async move {
            tokio::time::timeout(timeout, waiting)
                .await
                .unwrap_or_else(|_| {
                    Err(Error::new(
                        Code::Timeout,
                        format!("event {position} was not settled within {timeout:?}"),
                    )
                    .hint("a handler is slow, failing, or not running; see `everbus groups`"))
                })
        })
    }
}

impl Depth for SqliteEngine {
    fn depth(&self, stream: Pattern, limit: u64) -> BoxFuture<'_, Result<u64>> {
        Box::pin(self.depth_of(stream, limit))
    }

    fn drop_oldest(&self, stream: Pattern, keep: u64) -> BoxFuture<'_, Result<u64>> {
        Box::pin(self.drop_from(stream, keep))
    }
}

impl Redeliver for SqliteEngine {
    fn redeliver(
        &self,
        group: GroupName,
        positions: Vec<Position>,
    ) -> BoxFuture<'_, Result<Vec<Redelivery>>> {
        Box::pin(self.redeliver_all(group, positions, true))
    }

    fn redeliverable(
        &self,
        group: GroupName,
        positions: Vec<Position>,
    ) -> BoxFuture<'_, Result<Vec<Redelivery>>> {
        Box::pin(self.redeliver_all(group, positions, false))
    }
}
