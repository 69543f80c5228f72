//! The broker, and what its parts share.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use everbus_core::{
    Appended, BoxFuture, Broker, Capabilities, Code, ConsumeOptions, Consumer, Deduplication,
    Delivery, Durability, Error, Event, EventId, Failure, FailureKind, GroupInfo, GroupName,
    GroupSpec, Lease, OrderScope, Result, Settlement, Streams, SubscriptionInfo, Timestamp,
    Verdict, no_group,
};
use futures_util::StreamExt as _;
use futures_util::future::join_all;
use parking_lot::{Mutex, RwLock};
use tokio::task::AbortHandle;

use crate::client::Link;
use crate::config::Options;
use crate::consumer::NatsConsumer;
use crate::groups::{self, Group, Record};
use crate::held::{Held, Hold, Key};
use crate::names;
use crate::reader::{Item, nak};
use crate::streams::{self, Space, StreamHandle, Table};

/// What the broker, its consumers and its log share.
pub(crate) struct Shared {
    pub(crate) link: Link,
    pub(crate) space: Space,
    pub(crate) options: Options,
    /// The name of this engine as the owner of ephemeral groups.
    pub(crate) owner: String,
    table: RwLock<Option<Arc<Table>>>,
    /// One declaration of streams at a time.
    declaring: tokio::sync::Mutex<()>,
    /// Streams that groups consume and that are not declared here.
    others: Mutex<HashMap<String, Arc<StreamHandle>>>,
    /// Streams that were removed from the server, to warn once for each.
    missing: Mutex<HashSet<String>>,
    pub(crate) groups: Mutex<HashMap<GroupName, Arc<Group>>>,
    pub(crate) held: Held,
    numbers: AtomicU64,
    stamp: Mutex<Timestamp>,
    /// Buckets that are known to exist.
    pub(crate) buckets: Mutex<HashSet<String>>,
    alive: Mutex<Option<AbortHandle>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(alive) = self.alive.lock().take() {
            alive.abort();
        }
    }
}

impl Shared {
    pub(crate) fn new(link: Link, space: Space, options: Options) -> Self {
        Self {
            link,
            space,
            options,
            owner: format!("{:016x}", fastrand::u64(..)),
            table: RwLock::default(),
            declaring: tokio::sync::Mutex::default(),
            others: Mutex::default(),
            missing: Mutex::default(),
            groups: Mutex::default(),
            held: Held::default(),
            numbers: AtomicU64::new(1),
            stamp: Mutex::new(Timestamp::EPOCH),
            buckets: Mutex::default(),
            alive: Mutex::default(),
        }
    }

    pub(crate) fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// The time of receipt of an event. It never decreases within this process.
    pub(crate) fn stamp(&self) -> Timestamp {
        let mut last = self.stamp.lock();
        *last = (*last).max(self.options.clock.now());
        *last
    }

    /// The table of streams. If no streams are declared, creates the single stream.
    pub(crate) async fn table(&self) -> Result<Arc<Table>> {
        if let Some(table) = self.known_table() {
            return Ok(table);
        }
        self.declare_table(Streams::single(), true).await
    }

    /// The number of replicas for groups, dead letters and values.
    pub(crate) fn copies_of_own(&self) -> u32 {
        let table = self.known_table();
        table.map_or(self.options.replicas, |table| table.copies)
    }

    pub(crate) fn known_table(&self) -> Option<Arc<Table>> {
        self.table.read().clone()
    }

    /// The table of streams, if streams are declared or the single stream exists.
    pub(crate) async fn table_if_any(&self) -> Result<Option<Arc<Table>>> {
        if let Some(table) = self.known_table() {
            return Ok(Some(table));
        }
        match self.link.stream(&self.space.single_stream()).await? {
            Some(_) => self.table().await.map(Some),
            None => Ok(None),
        }
    }

    async fn declare_table(&self, routes: Streams, only_first: bool) -> Result<Arc<Table>> {
        let _one = self.declaring.lock().await;
        if let Some(table) = self.known_table().filter(|_| only_first) {
            return Ok(table);
        }
        let table = streams::declare(&self.link, &self.space, &self.options, routes).await?;
        let table = Arc::new(table);
        // Existing groups consume new streams from their beginning.
        for record in groups::list(&self.link, &self.space).await? {
            self.adopt(&table.streams, &record.name).await?;
        }
        *self.table.write() = Some(table.clone());
        for group in self.groups.lock().values() {
            group.version.send_modify(|version| *version += 1);
        }
        Ok(table)
    }

    /// A stream by its name on the server; `None` if it is gone.
    pub(crate) async fn stream_named(&self, name: &str) -> Result<Option<Arc<StreamHandle>>> {
        let of_table = |table: &Table| table.streams.iter().find(|s| s.name == name).cloned();
        if let Some(stream) = self.known_table().as_deref().and_then(of_table) {
            return Ok(Some(stream));
        }
        if let Some(stream) = self.others.lock().get(name) {
            return Ok(Some(stream.clone()));
        }
        let stream = streams::undeclared(&self.link, &self.space, &self.options, name).await?;
        let stream = stream.map(Arc::new);
        if let Some(stream) = &stream {
            let mut others = self.others.lock();
            others.insert(name.to_owned(), stream.clone());
        }
        Ok(stream)
    }

    /// Notes that a stream was removed from the server. If it is created again, the next look at the groups finds it.
    pub(crate) fn forget_stream(&self, stream: &StreamHandle) {
        let known = self.others.lock().remove(&stream.name);
        if self.missing.lock().insert(stream.name.clone()) {
            tracing::warn!(target: "everbus::nats", stream = stream.name, declared = known.is_none(), "a stream that groups consume was removed from the server; they go on with their other streams");
        }
    }

    /// Notes that a stream exists, perhaps again.
    pub(crate) fn found_stream(&self, stream: &StreamHandle) {
        self.missing.lock().remove(&stream.name);
    }

    /// Whether a stream that groups consume was removed from the server.
    pub(crate) fn misses_streams(&self) -> bool {
        !self.missing.lock().is_empty()
    }

    /// A group as the server has it now; `None` if it was removed.
    pub(crate) async fn reload(&self, group: &Arc<Group>) -> Result<Option<Arc<Record>>> {
        let known = groups::load(&self.link, &self.space, &group.encoded).await?;
        let Some((record, revision)) = known else {
            return Ok(None);
        };
        group.update(record, revision)?;
        Ok(Some(group.record()))
    }

    /// As [`Self::reload`]; streams that appeared meanwhile are added to the group, and consumers that lost
    /// filters are repaired.
    pub(crate) async fn look_again(&self, group: &Arc<Group>) -> Result<Option<Arc<Record>>> {
        let Some(record) = self.reload(group).await? else {
            return Ok(None);
        };
        let mut streams = self.all_streams().await?;
        streams.retain(|stream| !record.starts.contains_key(&stream.name));
        if !streams.is_empty() {
            self.adopt(&streams, &record.name).await?;
        }
        self.repair(group).await?;
        Ok(Some(group.record()))
    }

    /// Creates or updates the group of this process from a record that was just read or written.
    pub(crate) fn remember(
        &self,
        name: &GroupName,
        record: Record,
        revision: u64,
    ) -> Result<Arc<Group>> {
        let mut groups = self.groups.lock();
        if let Some(group) = groups.get(name) {
            // A group that was removed and created again is another group.
            if group.record().created_at == record.created_at {
                group.update(record, revision)?;
                return Ok(group.clone());
            }
        }
        let group = Arc::new(Group::new(name.clone(), self.number(), record, revision)?);
        groups.insert(name.clone(), group.clone());
        Ok(group)
    }

    pub(crate) fn key(&self, group: &Group, item: &Item) -> Key {
        (item.stream.shard, group.number, item.seq())
    }

    /// Sends a verdict without waiting for an answer. If it is lost, the server delivers the message again when the
    /// lease ends.
    pub(crate) async fn tell(&self, reply: &str, verdict: &str) {
        let body = Bytes::copy_from_slice(verdict.as_bytes());
        let _ = self.link.client.publish(reply.to_owned(), body).await;
    }

    /// Gives back a message that no handler saw.
    pub(crate) async fn give_back(&self, group: &Group, item: &Item) {
        let key = self.key(group, item);
        self.held.with_note(key, |note| note.uncounted += 1);
        if let Some(key) = item.key() {
            let mut keys = group.keys.lock();
            keys.give_back(&key, item.seq(), Duration::ZERO);
        }
        self.tell(&item.reply, &nak(Duration::ZERO)).await;
    }

    /// Turns messages into deliveries. Messages that waited here for more than half of their lease are given back.
    pub(crate) fn hand_out(
        self: &Arc<Self>,
        group: &Arc<Group>,
        items: Vec<Item>,
        consumer: u64,
    ) -> Vec<Delivery> {
        let mut deliveries = Vec::with_capacity(items.len());
        for item in items {
            let waited = item.came.elapsed();
            if waited > item.lease / 2 {
                let (shared, group) = (self.clone(), group.clone());
                tokio::spawn(async move { shared.give_back(&group, &item).await });
                continue;
            }
            if waited > item.lease / 8 {
                let (shared, reply) = (self.clone(), item.reply.clone());
                tokio::spawn(async move { shared.tell(&reply, "+WPI").await });
            }
            deliveries.push(self.deliver(group, item, consumer));
        }
        deliveries
    }

    fn deliver(&self, group: &Arc<Group>, item: Item, consumer: u64) -> Delivery {
        let key = self.key(group, &item);
        let note = self.held.note(&key).unwrap_or_default();
        let counted = item.delivered.saturating_sub(u64::from(note.uncounted));
        let attempt = u32::try_from(counted).unwrap_or(u32::MAX).max(1);
        let mut failures = note.failures;
        if let Some(why) = item.foreign.filter(|_| !self.options.raw_foreign) {
            let now = self.options.clock.now();
            failures.push(Failure::new(attempt, now, FailureKind::Corrupt, why));
        }
        if item.unhandled {
            failures.push(self.unhandled_failure(attempt, item.record.event.event_type()));
        }
        let token = self.number();
        let hold = Hold {
            token,
            consumer,
            until: Instant::now() + item.lease,
            lease: item.lease,
            record: item.record.clone(),
            attempt,
            failures: failures.clone(),
            group: group.clone(),
            stream: item.stream,
            reply: item.reply.clone(),
        };
        self.held.hold(key, hold);
        let position = item.record.position;
        let lease = Lease::new(position, [group.number, token]).with_text(item.reply);
        Delivery::new(item.record, lease).after(attempt, failures)
    }

    fn unhandled_failure(&self, attempt: u32, event_type: &str) -> Failure {
        let text = format!("no process has a handler for {event_type}");
        let now = self.options.clock.now();
        Failure::new(attempt, now, FailureKind::NoHandler, text)
    }

    /// Dead-letters an event that no process has a handler for.
    pub(crate) async fn no_handler(&self, group: &Arc<Group>, item: Item, consumer: u64) {
        let reply = item.reply.clone();
        let delivery = self.deliver(group, item, consumer);
        let event_type = delivery.record.event.event_type();
        let verdict = Verdict::Dead {
            failure: Some(self.unhandled_failure(delivery.attempt, event_type)),
        };
        if let Err(error) = self
            .settle_one(Settlement::new(delivery.lease, verdict))
            .await
        {
            tracing::warn!(target: "everbus::nats", %error, "an event without a handler could not be dead-lettered");
            self.tell(&reply, &nak(Duration::from_secs(60))).await;
        }
    }

    /// Begins to answer other engines that ask whether this engine is alive.
    pub(crate) async fn be_alive(&self) -> Result<()> {
        if self.alive.lock().is_some() {
            return Ok(());
        }
        let client = self.link.client.clone();
        let subject = self.space.owner_subject(&self.owner);
        let mut questions = client
            .subscribe(subject)
            .await
            .map_err(|e| Error::new(Code::Unavailable, e.to_string()))?;
        let answers = tokio::spawn(async move {
            while let Some(question) = questions.next().await {
                if let Some(reply) = question.reply {
                    let _ = client.publish(reply, Bytes::new()).await;
                }
            }
        });
        if let Some(other) = self.alive.lock().replace(answers.abort_handle()) {
            other.abort();
        }
        Ok(())
    }

    /// Whether the engine that owns an ephemeral group is alive. If the answer is late or the connection is lost, the
    /// engine counts as alive.
    pub(crate) async fn is_alive(&self, owner: &str) -> bool {
        if owner == self.owner {
            return true;
        }
        let subject = self.space.owner_subject(owner);
        match self.link.ask(&subject, None, Bytes::new()).await {
            Ok(_) => true,
            Err(error) => error.outcome_unknown() || !self.link.is_connected(),
        }
    }
}

/// The broker.
pub(crate) struct Nats {
    pub(crate) shared: Arc<Shared>,
}

impl Broker for Nats {
    fn capabilities(&self) -> Capabilities {
        let table = self.shared.known_table();
        let (durability, window, atomic, single) = match &table {
            Some(table) => (
                table.durability(),
                table.window(),
                table.atomic(),
                table.streams.len() == 1,
            ),
            None => (
                match (self.shared.options.replicas, self.shared.options.synced) {
                    (3.., _) => Durability::Replicated,
                    (_, true) => Durability::PowerLoss,
                    (_, false) => Durability::Process,
                },
                self.shared.options.window,
                self.shared.link.client.is_server_compatible(2, 12, 0),
                true,
            ),
        };
        let order = match single {
            true => OrderScope::Log,
            false => OrderScope::Key,
        };
        Capabilities::new("nats", durability)
            .native_delay(true)
            .atomic_batch(atomic)
            .deduplication(Deduplication::Window(window))
            .order(order)
            .drops_by_age(table.is_some_and(|table| table.drops_by_age()))
    }

    fn declare_streams(&self, streams: Streams) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            // Without declared streams the single one is created when it is needed.
            if !streams.is_declared() {
                return Ok(());
            }
            self.shared.declare_table(streams, false).await.map(drop)
        })
    }

    fn declare(&self, group: GroupSpec) -> BoxFuture<'_, Result<Vec<SubscriptionInfo>>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            self.shared.declare(group).await
        })
    }

    fn retract(&self, subscription: EventId) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            self.shared.retract(subscription).await
        })
    }

    fn remove_group(&self, group: GroupName) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            self.shared.remove_group(&group).await
        })
    }

    fn append(&self, batch: Vec<Event>) -> BoxFuture<'_, Result<Vec<Result<Appended>>>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            self.shared.append(batch).await
        })
    }

    fn consume(
        &self,
        group: GroupName,
        options: ConsumeOptions,
    ) -> BoxFuture<'_, Result<Box<dyn Consumer>>> {
        Box::pin(async move {
            let shared = &self.shared;
            let _running = shared.link.enter()?;
            let encoded = names::encoded(group.as_str());
            let known = groups::load(&shared.link, &shared.space, &encoded).await?;
            let Some((record, revision)) = known else {
                return Err(no_group(&group));
            };
            let known = shared.remember(&group, record, revision)?;
            // The lease is `ack_wait` of the consumer: the server counts it from when it sent the message.
            shared.consumed(&known, Some(options.lease)).await?;
            let consumer = NatsConsumer::start(shared.clone(), known, options);
            Ok(Box::new(consumer) as Box<dyn Consumer>)
        })
    }

    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            let settled = settlements.into_iter().map(|s| self.shared.settle_one(s));
            Ok(join_all(settled).await)
        })
    }

    fn extend(&self, leases: Vec<Lease>, by: Duration) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            let extended = leases.iter().map(|lease| self.shared.extend_one(lease, by));
            Ok(join_all(extended).await)
        })
    }

    fn inspect(&self) -> BoxFuture<'_, Result<Vec<GroupInfo>>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            self.shared.inspect().await
        })
    }

    fn ping(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            self.shared.link.answers().await
        })
    }

    fn close(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            if self.shared.link.begin_close() {
                self.shared.remove_own_groups().await;
                self.shared.link.close().await;
            }
            Ok(())
        })
    }
}
