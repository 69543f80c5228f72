//! The operations of a broker: each becomes a command for the writer or a query.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use everbus_core::{
    Appended, BoxFuture, Broker, Capabilities, Code, ConsumeOptions, Consumer, Depth, Durability,
    Engine, Error, Event, EventId, GroupInfo, GroupName, GroupSpec, Lease, Pattern, Position,
    Redeliver, Redelivery, Result, Settled, SettledOutcome, Settlement, SubscriptionInfo, Weakness,
};
use tokio::sync::oneshot;

use crate::append::unplaced;
use crate::consumer::{NewSession, SqliteConsumer};
use crate::effect::ENGINE;
use crate::handle::{Handle, receive, start};
use crate::mailbox::Mailbox;
use crate::queue::{Command, Reply};
use crate::{Durable, Options};

/// The embedded engine.
pub(crate) struct SqliteEngine {
    pub(crate) handle: Arc<Handle>,
}

pub(crate) fn open(path: &Path, options: Options) -> Result<Engine> {
    let handle = start(path, options)?;
    let objects = crate::orphans::beside(&handle.path);
    let file = handle.path.clone();
    let outbox = crate::outbox::own_outbox(handle.clone());
    let weaknesses = match handle.durability {
        Durable::Full => Vec::new(),
        Durable::Normal => vec![Weakness::new(
            "durability",
            "normal",
            "commits are not synced; open the file with Durable::Full",
        )],
    };
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
        file: Some(file),
        outbox: Some(outbox),
        checkpoints: Some(engine.clone()),
        kv: Some(engine.clone()),
        audit: Some(engine.clone()),
        history: Some(engine.clone()),
        weaknesses,
        ..Engine::new(engine)
    })
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
            let record = unplaced(event);
            self.handle.queue.push(Command::AppendOne { record, reply });
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
