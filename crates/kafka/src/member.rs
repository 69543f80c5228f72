//! This process as a member of a consumer group: one client for all consumers of the group here.
//!
//! There are two threads. One polls without a break, so that the server never takes the process for dead (this file
//! and `partitions`). The other commits (`commit`).

mod commit;
mod partitions;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use everbus_core::{Clock, Code, Error, Result, no_group};
use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};
use rdkafka::TopicPartitionList;
use rdkafka::client::ClientContext;
use rdkafka::config::{FromClientConfigAndContext as _, RDKafkaLogLevel};
use rdkafka::consumer::{BaseConsumer, Consumer as _, ConsumerContext, RebalanceProtocol};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Kind};
use rdkafka::message::Message as _;
use rdkafka::types::RDKafkaRespErr;
use tokio::sync::Notify;

use crate::board::{Arrived, Board, Partition};
use crate::client::{Link, Trouble};
use crate::errors::{is_damage, is_passing, kind, refused};
use crate::groups::{Record, Registry};
use crate::topics::Topic;
use crate::wire;

/// How long a poll waits. The thread notices a changed subscription after this long at the latest.
const POLL: Duration = Duration::from_millis(50);
/// How long a poll waits while a partition is paused: the partition may have room again at any time.
const POLL_PAUSED: Duration = Duration::from_millis(5);
/// The most records that are sorted in one turn.
const TURN: usize = 500;
/// After this many records, the board is free for others for a moment.
const LOCKED: usize = 50;
/// The same error is reported again after this long.
const REMINDED: Duration = Duration::from_secs(30);
/// How long progress over records that the group does not want may stay uncommitted.
const LAZY: Duration = Duration::from_millis(500);
/// How long a member without consumers stays in its group.
const LINGER: Duration = Duration::from_secs(2);

const RUNNING: u8 = 0;
/// Commit what is settled, and leave the group.
const LEAVING: u8 = 1;
/// Leave without a commit, like a process that died.
const DROPPED: u8 = 2;

/// A member of a group.
pub(crate) struct Member {
    pub(crate) number: u64,
    /// The group as it was when the member began.
    pub(crate) group: Arc<Record>,
    pub(crate) board: Mutex<Board>,
    /// Notified after a change that consumers and settlements may wait for.
    pub(crate) changed: Notify,
    registry: Arc<Registry>,
    clock: Arc<dyn Clock>,
    link: Arc<Link>,
    raw_foreign: bool,
    consumer: RwLock<Option<Arc<BaseConsumer<Context>>>>,
    topics: RwLock<HashMap<String, Arc<Topic>>>,
    /// Held while progress is committed: commits arrive in the order of the snapshots.
    committing: Mutex<()>,
    /// Whether there is something to commit; the committer waits for it.
    wake: (Mutex<bool>, Condvar),
    /// How long the last commit took, in microseconds.
    step: AtomicU64,
    state: AtomicU8,
    /// Its consumer has left the group.
    pub(crate) ended: AtomicBool,
    /// An error that is returned to the consumers.
    error: Mutex<Option<Error>>,
    /// Errors that were reported, and when.
    reported: Mutex<HashMap<String, Instant>>,
    /// Partitions that are paused, because they are full.
    paused: Mutex<BTreeSet<Partition>>,
    idle_since: Mutex<Option<Instant>>,
    /// How often partitions were assigned or revoked. Only the thread that polls changes it.
    rebalances: AtomicU64,
}

/// The callbacks of the client.
pub(crate) struct Context {
    member: Weak<Member>,
    trouble: Trouble,
}

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, text: &str) {
        self.trouble.note(level, facility, text);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(target: "everbus::kafka", %error, reason, "member");
        if let Some(member) = self.member.upgrade() {
            member.trouble(&error);
        }
    }
}

impl ConsumerContext for Context {
    fn rebalance(
        &self,
        consumer: &BaseConsumer<Self>,
        what: RDKafkaRespErr,
        partitions: &mut TopicPartitionList,
    ) {
        let member = self.member.upgrade();
        if let Some(member) = &member {
            member.rebalances.fetch_add(1, Ordering::Relaxed);
        }
        let cooperative = matches!(
            consumer.rebalance_protocol(),
            RebalanceProtocol::Cooperative
        );
        let done = match what {
            RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS => {
                let with_offsets = member.map(|member| member.assigned(consumer, partitions));
                let assigned = with_offsets.as_ref().unwrap_or(partitions);
                match cooperative {
                    true => consumer.incremental_assign(assigned),
                    false => consumer.assign(assigned),
                }
            }
            _ => {
                if let Some(member) = member {
                    member.revoked(consumer, partitions);
                }
                match cooperative {
                    true => consumer.incremental_unassign(partitions),
                    false => consumer.unassign(),
                }
            }
        };
        if let Err(error) = done {
            tracing::warn!(target: "everbus::kafka", %error, "partitions could not be taken over or given up");
        }
    }
}

/// What a member is made of.
pub(crate) struct Parts {
    pub(crate) number: u64,
    pub(crate) group: Arc<Record>,
    pub(crate) group_id: String,
    pub(crate) registry: Arc<Registry>,
    pub(crate) link: Arc<Link>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) session: Duration,
    pub(crate) raw_foreign: bool,
}

impl Member {
    /// Joins the group. The threads run until [`leave`](Self::leave).
    pub(crate) fn start(parts: Parts) -> Result<Arc<Self>> {
        let config = parts.link.member_config(&parts.group_id, parts.session);
        let trouble = parts.link.trouble.clone();
        let member = Arc::new(Self {
            number: parts.number,
            board: Mutex::new(Board::new(parts.group.ordered, parts.group.born)),
            group: parts.group,
            changed: Notify::new(),
            registry: parts.registry,
            clock: parts.clock,
            link: parts.link,
            raw_foreign: parts.raw_foreign,
            consumer: RwLock::default(),
            topics: RwLock::default(),
            committing: Mutex::default(),
            wake: (Mutex::new(false), Condvar::new()),
            step: AtomicU64::new(1000),
            state: AtomicU8::new(RUNNING),
            ended: AtomicBool::new(false),
            error: Mutex::default(),
            reported: Mutex::default(),
            paused: Mutex::default(),
            idle_since: Mutex::default(),
            rebalances: AtomicU64::new(0),
        });
        let context = Context {
            member: Arc::downgrade(&member),
            trouble,
        };
        let consumer = BaseConsumer::from_config_and_context(&config, context)
            .map_err(|error| refused("a member cannot be made", &error))?;
        *member.consumer.write() = Some(Arc::new(consumer));
        let own = member.clone();
        std::thread::Builder::new()
            .name("everbus-kafka-poll".to_owned())
            .spawn(move || own.run())
            .map_err(|error| Error::new(Code::OutOfResources, "no thread").caused_by(error))?;
        Ok(member)
    }

    fn consumer(&self) -> Option<Arc<BaseConsumer<Context>>> {
        self.consumer.read().clone()
    }

    /// Leaves the group, after a last commit. [`ended`](Self::ended) is set when that is done.
    pub(crate) fn leave(&self) {
        let _ = self
            .state
            .compare_exchange(RUNNING, LEAVING, Ordering::SeqCst, Ordering::SeqCst);
        self.kick();
    }

    /// Leaves the group without a commit.
    pub(crate) fn abandon(&self) {
        self.state.store(DROPPED, Ordering::SeqCst);
        self.kick();
    }

    pub(crate) fn is_running(&self) -> bool {
        self.state.load(Ordering::SeqCst) == RUNNING
    }

    /// Waits until the member has left.
    pub(crate) async fn left(&self, within: Duration) {
        let left = async {
            loop {
                let changed = self.changed.notified();
                if self.ended.load(Ordering::SeqCst) {
                    return;
                }
                changed.await;
            }
        };
        let _ = tokio::time::timeout(within, left).await;
    }

    /// Wakes the commit thread.
    pub(crate) fn kick(&self) {
        *self.wake.0.lock() = true;
        self.wake.1.notify_one();
    }

    /// How long it takes until a change is durable: it waits for the commit that is under way, and then for its own.
    pub(crate) fn step(&self) -> Duration {
        2 * Duration::from_micros(self.step.load(Ordering::Relaxed))
    }

    /// Takes the error that was not returned to a consumer yet.
    pub(crate) fn take_error(&self) -> Option<Error> {
        let mut error = self.error.lock();
        // The error of a removed group stays.
        match error.as_ref().map(Error::code) {
            Some(Code::GroupNotFound) => error.clone(),
            _ => error.take(),
        }
    }

    fn report(&self, error: Error) {
        tracing::debug!(target: "everbus::kafka", group = %self.group.name, %error, "member");
        *self.error.lock() = Some(error);
        self.changed.notify_waiters();
    }

    /// Reports an error that does not pass by itself: to the log and to a consumer. The client repeats an error many
    /// times a second, and consumers have other partitions to work on. So the same error is reported again only after
    /// a while.
    fn complain(&self, error: Error) {
        let text = error.to_string();
        let mut reported = self.reported.lock();
        reported.retain(|_, at| at.elapsed() < REMINDED);
        if reported.contains_key(&text) {
            return;
        }
        reported.insert(text, Instant::now());
        drop(reported);
        tracing::error!(target: "everbus::kafka", group = %self.group.name, %error, "the group does not go on");
        self.report(error);
    }

    /// Waits until a version of a partition is durable. Returns false if the partition went to another process.
    pub(crate) async fn durable(&self, slot: u32, version: u64, within: Duration) -> Result<bool> {
        let durable = async {
            let mut kicked = false;
            loop {
                let mut changed = std::pin::pin!(self.changed.notified());
                changed.as_mut().enable();
                match self.board.lock().is_committed(slot, version) {
                    Some(false) => {}
                    Some(true) => return true,
                    None => return false,
                }
                if !std::mem::replace(&mut kicked, true) {
                    self.kick();
                }
                changed.await;
            }
        };
        let in_time = tokio::time::timeout(within, durable).await;
        in_time.map_err(|_| self.not_durable())
    }

    /// The error of progress that was not committed in time.
    pub(crate) fn not_durable(&self) -> Error {
        let what = format!(
            "{}: the server did not store the progress of the group in time",
            self.link.servers
        );
        Error::new(Code::Unavailable, what).with_unknown_outcome()
    }

    // From here on: the thread that polls.

    fn run(self: Arc<Self>) {
        let committer = {
            let own = self.clone();
            let thread = std::thread::Builder::new().name("everbus-kafka-commit".to_owned());
            thread.spawn(move || own.or_give_up(|| own.commit_loop()))
        };
        if let Some(consumer) = self.consumer() {
            match committer {
                Ok(committer) => {
                    self.or_give_up(|| self.poll_loop(&consumer));
                    self.leave();
                    let _ = committer.join();
                }
                Err(error) => {
                    self.report(Error::new(Code::OutOfResources, "no thread").caused_by(error));
                    self.abandon();
                }
            }
            if self.state.load(Ordering::SeqCst) == LEAVING {
                let mine = consumer.assignment();
                if let Ok(mine) = mine {
                    self.revoked(&consumer, &mine);
                }
            }
        }
        // The last reference to the client: dropping it leaves the group.
        let consumer = self.consumer.write().take();
        drop(consumer);
        self.ended.store(true, Ordering::SeqCst);
        self.changed.notify_waiters();
    }

    /// Ends the member if one of its threads panics, so that consumers start another one.
    fn or_give_up(&self, work: impl FnOnce()) {
        if catch_unwind(AssertUnwindSafe(work)).is_err() {
            tracing::error!(target: "everbus::kafka", group = %self.group.name, "a thread of the member has panicked; another member takes its place");
            self.abandon();
            self.changed.notify_waiters();
        }
    }

    fn poll_loop(&self, consumer: &BaseConsumer<Context>) {
        let mut version = self.registry.version.subscribe();
        version.mark_changed();
        let mut subscribed = BTreeSet::new();
        let mut patterns = None;
        while self.is_running() {
            if version.has_changed().unwrap_or(false) {
                version.mark_unchanged();
                if !self.follow(consumer, &mut subscribed, &mut patterns) {
                    return;
                }
            }
            self.pass_time();
            if self.is_idle() {
                return;
            }
            self.hold_back(consumer);
            let wait = match self.paused.lock().is_empty() {
                true => POLL,
                false => POLL_PAUSED,
            };
            self.take(consumer, wait);
        }
    }

    /// Ends leases and waits that are over, and wakes those who wait for a change.
    fn pass_time(&self) {
        let (now, wall) = (Instant::now(), self.clock.now());
        let mut board = self.board.lock();
        let due = board.next_tick().is_some_and(|at| at <= now);
        board.tick(now, wall);
        let dirty = board.is_dirty();
        drop(board);
        if due {
            self.changed.notify_waiters();
        }
        if dirty {
            self.kick();
        }
    }

    /// Whether the member has had no consumer and no lease for a while. Then it leaves the group, and the next
    /// consumer starts another member. The member of an ephemeral group stays.
    fn is_idle(&self) -> bool {
        let board = self.board.lock();
        let idle = !board.has_seats() && board.held() == 0 && self.group.owner.is_none();
        let mut since = self.idle_since.lock();
        if !idle {
            *since = None;
            return false;
        }
        let over = since.get_or_insert_with(Instant::now).elapsed() > LINGER;
        if over {
            // The board is locked here, and also when a consumer sits down: no consumer is missed.
            self.leave();
        }
        over
    }

    /// Subscribes to the topics that the group reads now. Returns false if the group is gone.
    fn follow(
        &self,
        consumer: &BaseConsumer<Context>,
        subscribed: &mut BTreeSet<String>,
        patterns: &mut Option<Arc<[everbus_core::Pattern]>>,
    ) -> bool {
        let record = self.registry.group(&self.group.name);
        let Some(record) = record.filter(|record| record.born == self.group.born) else {
            self.report(no_group(&self.group.name));
            self.state.store(DROPPED, Ordering::SeqCst);
            return false;
        };
        if patterns.as_ref() != Some(&record.patterns) {
            let mut board = self.board.lock();
            board.refilter(|event| event.is_for(&record.name) && record.wants(event.event_type()));
            drop(board);
            *patterns = Some(record.patterns.clone());
            self.changed.notify_waiters();
            self.kick();
        }
        let mut wanted = subscribed.clone();
        for (name, note) in self.registry.topics() {
            // A topic that was read is read to its end, also if no subscription reaches it any more.
            if wanted.contains(&name) || !note.is_reached(&record.patterns) {
                continue;
            }
            let topic = Arc::new(Topic::of_note(&name, &note));
            self.topics.write().insert(name.clone(), topic);
            wanted.insert(name);
        }
        if wanted != *subscribed {
            let names: Vec<&str> = wanted.iter().map(String::as_str).collect();
            tracing::debug!(target: "everbus::kafka", group = %self.group.name, ?names, "subscribing");
            if let Err(error) = consumer.subscribe(&names) {
                self.report(refused("the topics cannot be subscribed to", &error));
            }
            *subscribed = wanted;
        }
        true
    }

    /// Takes the records that have arrived.
    fn take(&self, consumer: &BaseConsumer<Context>, wait: Duration) {
        let mut reads: Vec<Fetched> = Vec::new();
        let mut wait = wait;
        // Most records come from the same partition as the one before.
        let mut last: Option<Origin> = None;
        while reads.len() < TURN && self.is_running() {
            let Some(polled) = consumer.poll(wait) else {
                break;
            };
            wait = Duration::ZERO;
            match polled {
                Ok(message) => {
                    let (name, partition) = (message.topic(), message.partition());
                    let is_same = |last: &Origin| {
                        let same = last.topic.name == name && last.partition == partition;
                        same && last.rebalances == self.rebalances.load(Ordering::Relaxed)
                    };
                    if !last.as_ref().is_some_and(is_same) {
                        last = self.origin(name, partition);
                    }
                    let Some(origin) = &last else {
                        continue;
                    };
                    let before = reads.last();
                    let before = before.map(|last| last.read.record.event.type_arc());
                    let read = wire::read(&origin.topic, &message, before);
                    reads.push(Fetched {
                        slot: origin.slot,
                        topic: origin.topic.clone(),
                        partition,
                        read,
                    });
                }
                Err(error) => self.trouble(&error),
            }
        }
        if !reads.is_empty() {
            self.sort(consumer, reads);
        }
    }

    /// Where records of a partition belong. `None` if the partition is not assigned.
    fn origin(&self, name: &str, partition: i32) -> Option<Origin> {
        let topic = self.topics.read().get(name).cloned()?;
        let slot = self.board.lock().slot(topic.shard(partition))?;
        let rebalances = self.rebalances.load(Ordering::Relaxed);
        Some(Origin {
            topic,
            partition,
            slot,
            rebalances,
        })
    }

    fn trouble(&self, error: &KafkaError) {
        match kind(error) {
            // The topic was created a moment ago, or removed.
            Some(Kind::UnknownTopicOrPartition | Kind::UnknownTopic | Kind::PartitionEOF) => {}
            _ if is_passing(error) => {
                tracing::debug!(target: "everbus::kafka", group = %self.group.name, %error, "reading");
            }
            _ => {
                let what = format!("the group {} cannot be read", self.group.name);
                self.complain(refused(&what, error));
            }
        }
        if is_damage(error) {
            // The client continues after records that it cannot read. These records would look as if the server had
            // removed them, and would be skipped. So this member gives up: the next one begins before these records.
            self.abandon();
        }
    }

    /// Puts records on the board. Records that no subscription matches are skipped.
    fn sort(&self, consumer: &BaseConsumer<Context>, reads: Vec<Fetched>) {
        let group = &self.group.name;
        let record = || {
            self.registry
                .group(group)
                .unwrap_or_else(|| self.group.clone())
        };
        let mut known = record();
        let matches = |record: &Record, read: &wire::Read| {
            let event = &read.record.event;
            !event.is_for(group) || record.wants(event.event_type())
        };
        if !reads.iter().all(|fetched| matches(&known, &fetched.read)) {
            // Another process may have added a subscription before the event was published. So the registry is read
            // to its end first, and no record is skipped before that succeeds.
            let timeout = self.link.timeout;
            while !self.registry.sync_blocking(consumer, timeout) {
                if !self.is_running() {
                    return;
                }
            }
            known = record();
        }
        let now = (Instant::now(), self.clock.now());
        let mut gaps = BTreeMap::new();
        let mut board = self.board.lock();
        for (n, fetched) in reads.into_iter().enumerate() {
            if n % LOCKED == LOCKED - 1 {
                MutexGuard::bump(&mut board);
            }
            let Fetched {
                slot,
                topic,
                partition,
                mut read,
            } = fetched;
            let position = read.record.position;
            let early = known
                .since
                .is_some_and(|since| read.record.received_at < since);
            let event = &read.record.event;
            let wanted = event.is_for(group)
                && match known.wants(event.event_type()) {
                    true => {
                        read.foreign = read.foreign.filter(|_| !self.raw_foreign);
                        true
                    }
                    false => read.is_for_all(&topic),
                };
            match board.arrive(slot, read, wanted && !early, now) {
                Arrived::Expected => {}
                Arrived::Gap(gap) => {
                    let partition = (topic.name.clone(), partition);
                    gaps.entry(partition).or_insert((slot, position, gap));
                }
                Arrived::Anew => {
                    tracing::warn!(target: "everbus::kafka", %group, topic = topic.name, %position, "the topic was removed and created again: it is read from its beginning");
                }
            }
        }
        drop(board);
        self.changed.notify_waiters();
        for ((topic, partition), (slot, position, gap)) in gaps {
            // Transaction markers have offsets, too. Records that the server removed are before its first offset.
            let missing = position.place().saturating_sub(gap + 1);
            let ends = consumer.fetch_watermarks(&topic, partition, self.link.timeout);
            let first = ends.map_or(u64::MAX, |(first, _)| u64::try_from(first).unwrap_or(0));
            if first > missing {
                let dropped = first.min(position.place().saturating_sub(1)) - missing;
                self.board.lock().note_dropped(slot, dropped);
                tracing::error!(target: "everbus::kafka", %group, topic, %position, dropped, "the server removed records before the group had them: events may be lost");
            }
        }
    }
}

/// A partition that is assigned.
struct Origin {
    topic: Arc<Topic>,
    partition: i32,
    slot: u32,
    /// The number of rebalances before.
    rebalances: u64,
}

/// A record that was fetched, and where it belongs.
struct Fetched {
    slot: u32,
    topic: Arc<Topic>,
    partition: i32,
    read: wire::Read,
}
