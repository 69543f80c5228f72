//! The broker, and what its parts share.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use everbus_core::{
    Appended, BoxFuture, Broker, Capabilities, Code, ConsumeOptions, Consumer, Durability, Error,
    Event, EventId, GroupInfo, GroupName, GroupSpec, Lease, Result, Settlement, Streams,
    SubscriptionInfo, Timestamp, Weakness, no_group,
};
use parking_lot::{Mutex, RwLock};
use rdkafka::consumer::BaseConsumer;

use crate::client::{Link, Plain};
use crate::config::Options;
use crate::consumer::KafkaConsumer;
use crate::groups::Registry;
use crate::member::{Member, Parts};
use crate::names::Space;
use crate::topics::{self, Topic};

/// How long a member may take to leave its group.
const LEAVES_WITHIN: Duration = Duration::from_secs(10);

/// What the broker, its consumers and its log share.
pub(crate) struct Shared {
    pub(crate) link: Arc<Link>,
    pub(crate) space: Space,
    pub(crate) options: Options,
    pub(crate) registry: Arc<Registry>,
    /// The name of this engine as the owner of ephemeral groups.
    pub(crate) owner: String,
    pub(crate) routes: RwLock<Arc<Streams>>,
    /// Topics that are known to exist, by name.
    pub(crate) topics: Mutex<HashMap<String, Arc<Topic>>>,
    /// Topics of dead letters that are known to exist, and the largest letter that each takes.
    pub(crate) dead_topics: Mutex<HashMap<String, usize>>,
    /// One topic is created at a time.
    pub(crate) declaring: tokio::sync::Mutex<()>,
    /// The members of groups in this process.
    pub(crate) members: Mutex<HashMap<GroupName, Arc<Member>>>,
    /// One member is started at a time.
    joining: tokio::sync::Mutex<()>,
    /// Readers of the log that are not in use.
    pub(crate) readers: Mutex<Vec<BaseConsumer<Plain>>>,
    numbers: AtomicU64,
    stamp: Mutex<Timestamp>,
}

impl Shared {
    pub(crate) fn new(
        link: Arc<Link>,
        space: Space,
        options: Options,
        registry: Arc<Registry>,
    ) -> Self {
        Self {
            link,
            space,
            options,
            registry,
            owner: format!("{:016x}", fastrand::u64(..)),
            routes: RwLock::new(Arc::new(Streams::single())),
            topics: Mutex::default(),
            dead_topics: Mutex::default(),
            declaring: tokio::sync::Mutex::default(),
            members: Mutex::default(),
            joining: tokio::sync::Mutex::default(),
            readers: Mutex::default(),
            numbers: AtomicU64::new(1),
            stamp: Mutex::new(Timestamp::EPOCH),
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

    /// The member of a group in this process, if there is one.
    pub(crate) fn member(&self, name: &GroupName) -> Option<Arc<Member>> {
        self.members.lock().get(name).cloned()
    }

    /// The member that gave out a lease.
    pub(crate) fn member_numbered(&self, number: u64) -> Option<Arc<Member>> {
        let members = self.members.lock();
        members
            .values()
            .find(|member| member.number == number)
            .cloned()
    }

    /// The member of a group, which joins the group if there is none yet. `joined` is called before the member can
    /// leave again.
    pub(crate) async fn join(
        &self,
        name: &GroupName,
        joined: impl Fn(&Arc<Member>),
    ) -> Result<Arc<Member>> {
        let _one = self.joining.lock().await;
        self.registry.sync(&self.link).await?;
        let Some(record) = self.registry.group(name) else {
            return Err(no_group(name));
        };
        if let Some(member) = self.member(name) {
            if member.is_running() && member.group.born == record.born {
                joined(&member);
                // The member may have begun to leave just now, because it had no consumer.
                if member.is_running() {
                    return Ok(member);
                }
            }
            member.leave();
            member.left(LEAVES_WITHIN).await;
            self.members.lock().remove(name);
        }
        let member = Member::start(Parts {
            number: self.number(),
            group: record,
            group_id: self.space.group(name),
            registry: self.registry.clone(),
            link: self.link.clone(),
            clock: self.options.clock.clone(),
            session: self.options.session,
            raw_foreign: self.options.raw_foreign,
        })?;
        joined(&member);
        self.members.lock().insert(name.clone(), member.clone());
        Ok(member)
    }

    /// Ends the member of a group here.
    pub(crate) async fn part(&self, name: &GroupName) {
        let member = self.members.lock().remove(name);
        if let Some(member) = member {
            member.abandon();
            member.left(LEAVES_WITHIN).await;
        }
    }

    /// The weakest durability of the known topics.
    fn durability(&self) -> Durability {
        let topics = self.topics.lock();
        let all = topics.values().map(|topic| topic.durability);
        all.min().unwrap_or(match self.options.copies {
            Some(2..) => Durability::Replicated,
            _ => Durability::Process,
        })
    }

    /// The settings of known topics that keep them from being more durable, and of the topic of the groups.
    pub(crate) async fn weaknesses(&self) -> Vec<Weakness> {
        let mut all = topics::weaknesses(&self.link, &self.space.registry()).await;
        for (name, _) in self.registry.topics() {
            all.extend(topics::weaknesses(&self.link, &name).await);
        }
        all
    }
}

/// The broker. When it is dropped without a close, its members leave without a commit, like those of a process that
/// died.
pub(crate) struct Kafka {
    pub(crate) shared: Arc<Shared>,
}

impl Drop for Kafka {
    fn drop(&mut self) {
        self.shared.link.begin_close();
        self.shared.registry.stop();
        for member in self.shared.members.lock().values() {
            member.abandon();
        }
    }
}

impl Broker for Kafka {
    fn capabilities(&self) -> Capabilities {
        let topics = self.shared.registry.topics();
        Capabilities::new("kafka", self.shared.durability())
            .drops_by_age(topics.iter().any(|(_, note)| note.max_age.is_some()))
            .native_delay(true)
            .fencing(true)
            .exact_attempts(true)
    }

    fn declare_streams(&self, streams: Streams) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            // Without declared streams topics are created when they are needed.
            if !streams.is_declared() {
                return Ok(());
            }
            self.shared.declare_streams(streams).await
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
            let _running = self.shared.link.enter()?;
            let seat = self.shared.number();
            let sit = |member: &Arc<Member>| member.board.lock().sit(seat, options.clone());
            let member = self.shared.join(&group, sit).await?;
            let consumer = KafkaConsumer::new(self.shared.clone(), member, seat, options);
            Ok(Box::new(consumer) as Box<dyn Consumer>)
        })
    }

    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            Ok(self.shared.settle_all(settlements).await)
        })
    }

    fn extend(&self, leases: Vec<Lease>, by: Duration) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            let extended = leases.iter().map(|lease| self.shared.extend_one(lease, by));
            Ok(extended.collect())
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
            let shared = &self.shared;
            if !shared.link.begin_close() {
                return Ok(());
            }
            shared.link.quiet().await;
            let members: Vec<Arc<Member>> = shared.members.lock().drain().map(|(_, m)| m).collect();
            for member in &members {
                member.leave();
            }
            for member in &members {
                member.left(LEAVES_WITHIN).await;
            }
            shared.remove_own_groups().await;
            shared.registry.stop();
            shared.readers.lock().clear();
            Ok(())
        })
    }
}

/// The error of a lease that is over.
pub(crate) fn lost() -> Error {
    let what = "the lease has ended, or the delivery was settled";
    Error::new(Code::LeaseLost, what)
}
