//! The broker, and what its parts share.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use everbus_core::{
    Appended, BoxFuture, Broker, Capabilities, ConsumeOptions, Consumer, Deduplication, Event,
    EventId, GroupInfo, GroupName, GroupSpec, Lease, OrderScope, Result, Settlement, Streams,
    SubscriptionInfo, TypeLimits, no_group,
};
use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;

use crate::client::Link;
use crate::config::Options;
use crate::consumer::RedisConsumer;
use crate::durability::Grade;
use crate::groups::Group;
use crate::held::Held;
use crate::keys::Space;
use crate::registry::Registry;

/// What the broker, its consumers and its log share.
pub(crate) struct Shared {
    pub(crate) link: Link,
    pub(crate) space: Space,
    pub(crate) options: Options,
    pub(crate) grade: Grade,
    /// The largest value that the server accepts, in bytes.
    pub(crate) max_bulk: u64,
    /// The name of this engine in leases and as the owner of ephemeral groups.
    pub(crate) owner: String,
    pub(crate) table: RwLock<Option<Arc<Streams>>>,
    /// The limits by type, if no streams are declared.
    pub(crate) type_limits: RwLock<Option<Arc<TypeLimits>>>,
    pub(crate) registry: RwLock<Arc<Registry>>,
    pub(crate) groups: Mutex<HashMap<GroupName, Arc<Group>>>,
    pub(crate) held: Held,
    numbers: AtomicU64,
    /// Grows when there may be something to claim.
    pub(crate) wakes: watch::Sender<u64>,
    /// How many events were claimed.
    pub(crate) claimed: AtomicU64,
    /// How many consumers wait for events.
    pub(crate) waiting: watch::Sender<usize>,
    /// Whether the background tasks run.
    pub(crate) tasks: Mutex<bool>,
}

/// A consumer that waits for events.
pub(crate) struct Idle<'a>(&'a Shared);

impl Drop for Idle<'_> {
    fn drop(&mut self) {
        self.0.waiting.send_modify(|waiting| *waiting -= 1);
    }
}

impl Shared {
    pub(crate) fn new(
        link: Link,
        space: Space,
        options: Options,
        grade: Grade,
        max_bulk: u64,
    ) -> Self {
        Self {
            link,
            space,
            options,
            grade,
            max_bulk,
            owner: format!("{:016x}", fastrand::u64(..)),
            table: RwLock::default(),
            type_limits: RwLock::default(),
            registry: RwLock::default(),
            groups: Mutex::default(),
            held: Held::default(),
            numbers: AtomicU64::new(1),
            wakes: watch::Sender::new(0),
            claimed: AtomicU64::new(0),
            waiting: watch::Sender::new(0),
            tasks: Mutex::new(false),
        }
    }

    pub(crate) fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn idle(&self) -> Idle<'_> {
        self.waiting.send_modify(|waiting| *waiting += 1);
        Idle(self)
    }
}

/// The broker.
pub(crate) struct Redis {
    pub(crate) shared: Arc<Shared>,
}

impl Broker for Redis {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new("redis", self.shared.grade.durability)
            .atomic_batch(true)
            .atomic_follow_ups(true)
            .atomic_dead_letter(true)
            .native_delay(true)
            .fencing(true)
            .exact_attempts(true)
            .deduplication(Deduplication::Window(self.shared.options.window))
            .order(OrderScope::Key)
    }

    fn declare_streams(&self, streams: Streams) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            self.shared.declare_table(streams).await?;
            self.shared.start_tasks();
            Ok(())
        })
    }

    fn declare(&self, group: GroupSpec) -> BoxFuture<'_, Result<Vec<SubscriptionInfo>>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            self.shared.start_tasks();
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
            let known = shared.load_group(group.as_str()).await?;
            let Some((record, revision)) = known else {
                return Err(no_group(&group));
            };
            let registry = shared.load_registry().await?;
            if record.owner.is_none() {
                let patterns = record.patterns()?;
                for key in registry.streams.keys() {
                    // Counted before the first claim moves the position of the group.
                    if shared.space.wanted(key, &patterns) {
                        shared.count_missed(key, &[group.as_str()]).await;
                    }
                }
            }
            let known = shared.remember(record, revision)?;
            shared.be_alive().await?;
            shared.start_tasks();
            let consumer = RedisConsumer::start(shared.clone(), known, options);
            // An error is ignored, because a full memory must not keep a consumer from starting. Other engines learn
            // the handlers with the next heartbeat.
            let _ = shared.tell_handlers().await;
            Ok(Box::new(consumer) as Box<dyn Consumer>)
        })
    }

    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            self.shared.settle(settlements).await
        })
    }

    fn extend(&self, leases: Vec<Lease>, by: Duration) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            self.shared.extend(leases, by).await
        })
    }

    fn inspect(&self) -> BoxFuture<'_, Result<Vec<GroupInfo>>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            self.shared.inspect().await
        })
    }

    fn close(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            if self.shared.link.begin_close() {
                // If the server cannot be reached, the key of this engine expires by itself.
                let patience = self.shared.options.timeout;
                let _ = tokio::time::timeout(patience, self.shared.leave()).await;
                self.shared.link.close().await;
            }
            Ok(())
        })
    }
}
