//! This process as a member of a consumer group: one client for all consumers of the group here.
//!
//! Two threads: one polls, always, so that the server never takes the process for dead; the other commits. A
//! commit has the progress of every partition that changed since the last one, so settlements that wait at the
//! same time share one.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use everbus_core::{Clock, Code, Error, Result, no_group};
use parking_lot::{Condvar, Mutex, RwLock};
use rdkafka::client::ClientContext;
use rdkafka::config::{FromClientConfigAndContext as _, RDKafkaLogLevel};
use rdkafka::consumer::{
    BaseConsumer, CommitMode, Consumer as _, ConsumerContext, RebalanceProtocol,
};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Kind};
use rdkafka::message::Message as _;
use rdkafka::types::RDKafkaRespErr;
use rdkafka::{Offset, TopicPartitionList};
use tokio::sync::Notify;

use crate::board::{Arrived, Board, Snapshot};
use crate::client::{Link, Trouble};
use crate::errors::{kind, refused};
use crate::groups::{Record, Registry};
use crate::progress::Saved;
use crate::topics::Topic;
use crate::wire;

/// How long a poll waits: as long the thread does not see that its subscription changed.
const POLL: Duration = Duration::from_millis(50);
/// The most records that are sorted in one turn.
const TURN: usize = 500;
/// Fresh events beyond this are not fetched.
const FULL: usize = 2_000;
/// A full board is looked at again after this long; then partitions are paused.
const PATIENCE: Duration = Duration::from_millis(20);
/// How long progress over events that nobody wants may be uncommitted.
const LAZY: Duration = Duration::from_millis(500);
/// How long a member without consumers stays in its group.
const LINGER: Duration = Duration::from_secs(2);

const RUNNING: u8 = 0;
/// Commit what is settled, and leave the group.
const LEAVING: u8 = 1;
/// Leave without a word, as a process that died.
const DROPPED: u8 = 2;

/// A member of a group.
pub(crate) struct Member {
    pub(crate) number: u64,
    /// The group as it was when the member began.
    pub(crate) group: Arc<Record>,
    pub(crate) board: Mutex<Board>,
    /// Something changed that consumers and settlements may wait for.
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
    /// An error that consumers are told.
    error: Mutex<Option<Error>>,
    idle_since: Mutex<Option<Instant>>,
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
            idle_since: Mutex::default(),
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

    /// The commit thread has something to do.
    pub(crate) fn kick(&self) {
        *self.wake.0.lock() = true;
        self.wake.1.notify_one();
    }

    /// How long a commit takes.
    pub(crate) fn step(&self) -> Duration {
        Duration::from_micros(self.step.load(Ordering::Relaxed))
    }

    /// An error that its consumers have not been told.
    pub(crate) fn take_error(&self) -> Option<Error> {
        let mut error = self.error.lock();
        // A group that was removed stays removed.
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

    /// Waits until a version of a partition is durable. False if the partition went to another process.
    pub(crate) async fn durable(&self, slot: u32, version: u64, within: Duration) -> Result<bool> {
        let durable = async {
            loop {
                let mut changed = std::pin::pin!(self.changed.notified());
                changed.as_mut().enable();
                match self.board.lock().is_committed(slot, version) {
                    Some(false) => {}
                    Some(true) => return true,
                    None => return false,
                }
                changed.await;
            }
        };
        self.kick();
        tokio::time::timeout(within, durable).await.map_err(|_| {
            let what = format!(
                "{}: the server did not store the progress of the group in time",
                self.link.servers
            );
            Error::new(Code::Unavailable, what).with_unknown_outcome()
        })
    }

    // The thread that polls.

    fn run(self: Arc<Self>) {
        let committer = {
            let own = self.clone();
            let thread = std::thread::Builder::new().name("everbus-kafka-commit".to_owned());
            thread.spawn(move || own.commit_loop())
        };
        if let Some(consumer) = self.consumer() {
            self.poll_loop(&consumer);
            self.state
                .compare_exchange(RUNNING, LEAVING, Ordering::SeqCst, Ordering::SeqCst)
                .ok();
            self.kick();
            if let Ok(committer) = committer {
                let _ = committer.join();
            }
            if self.state.load(Ordering::SeqCst) == LEAVING {
                let mine = consumer.assignment();
                if let Ok(mine) = mine {
                    self.revoked(&consumer, &mine);
                }
            }
        }
        // The last reference to it: dropping it leaves the group.
        let consumer = self.consumer.write().take();
        drop(consumer);
        self.ended.store(true, Ordering::SeqCst);
        self.changed.notify_waiters();
    }

    fn poll_loop(&self, consumer: &BaseConsumer<Context>) {
        let mut version = self.registry.version.subscribe();
        version.mark_changed();
        let mut subscribed = BTreeSet::new();
        let mut patterns = None;
        let mut paused = false;
        while self.is_running() {
            if version.has_changed().unwrap_or(false) {
                version.mark_unchanged();
                if !self.follow(consumer, &mut subscribed, &mut patterns) {
                    return;
                }
            }
            self.pass_time(consumer);
            if self.is_idle() {
                return;
            }
            if self.board.lock().is_full(FULL) {
                if !paused {
                    std::thread::sleep(PATIENCE);
                    if self.board.lock().is_full(FULL) {
                        paused = set_paused(consumer, true);
                    } else {
                        continue;
                    }
                }
                // Rebalances are served, and partitions that are gained meanwhile are paused too.
                self.take(consumer, POLL);
                set_paused(consumer, true);
                continue;
            }
            if paused {
                if self.board.lock().is_full(FULL / 2) {
                    self.take(consumer, PATIENCE);
                    continue;
                }
                paused = !set_paused(consumer, false);
            }
            self.take(consumer, POLL);
        }
    }

    /// Ends leases, and finds events without a handler.
    fn pass_time(&self, _: &BaseConsumer<Context>) {
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

    /// Whether no consumer has been here for a while, and no lease is held. Then it leaves: a consumer that comes
    /// from now on starts another member.
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
            // Under the lock of the board, where consumers sit down.
            self.leave();
        }
        over
    }

    /// Subscribes to the topics that the group reads now. False if the group is gone.
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

    /// Takes what has come.
    fn take(&self, consumer: &BaseConsumer<Context>, wait: Duration) {
        let mut reads = Vec::new();
        let mut wait = wait;
        while reads.len() < TURN {
            let Some(polled) = consumer.poll(wait) else {
                break;
            };
            wait = Duration::ZERO;
            match polled {
                Ok(message) => {
                    let topic = self.topics.read().get(message.topic()).cloned();
                    let Some(topic) = topic else {
                        continue;
                    };
                    let slot = self.board.lock().slot(topic.shard(message.partition()));
                    let mut read = wire::read(&topic, &message);
                    if self.raw_foreign {
                        read.foreign = None;
                    }
                    if let Some(slot) = slot {
                        reads.push((slot, topic, read));
                    }
                }
                Err(error) => self.trouble(&error),
            }
        }
        if !reads.is_empty() {
            self.sort(consumer, reads);
        }
    }

    fn trouble(&self, error: &KafkaError) {
        match kind(error) {
            // It was created a moment ago, or removed.
            Some(Kind::UnknownTopicOrPartition | Kind::UnknownTopic | Kind::PartitionEOF) => {}
            Some(
                Kind::TopicAuthorizationFailed
                | Kind::GroupAuthorizationFailed
                | Kind::SaslAuthenticationFailed,
            ) => {
                let what = format!("the group {} cannot be read", self.group.name);
                self.report(refused(&what, error));
            }
            _ => {
                tracing::debug!(target: "everbus::kafka", group = %self.group.name, %error, "reading");
            }
        }
    }

    /// Sorts records: those that no subscription matches are passed over.
    fn sort(&self, consumer: &BaseConsumer<Context>, reads: Vec<(u32, Arc<Topic>, wire::Read)>) {
        let group = &self.group.name;
        let record = || {
            self.registry
                .group(group)
                .unwrap_or_else(|| self.group.clone())
        };
        let early = |record: &Record, read: &wire::Read| {
            record
                .since
                .is_some_and(|since| read.record.received_at < since)
        };
        let mut known = record();
        let wanted = |record: &Record, read: &wire::Read| {
            let event = &read.record.event;
            event.is_for(group) && record.wants(event.event_type())
        };
        let unmatched = reads
            .iter()
            .any(|(_, _, read)| read.record.event.is_for(group) && !wanted(&known, read));
        if unmatched {
            // Another process may have added a subscription before the event was published. Without an answer
            // nothing is passed over: the events are kept, and sorted out later.
            let timeout = self.link.timeout;
            while !self.registry.sync_blocking(consumer, timeout) {
                if !self.is_running() {
                    return;
                }
            }
            known = record();
        }
        let now = (Instant::now(), self.clock.now());
        let mut board = self.board.lock();
        for (slot, topic, read) in reads {
            let position = read.record.position;
            let wanted = wanted(&known, &read) && !early(&known, &read);
            match board.arrive(slot, read, wanted, now) {
                Arrived::Expected => {}
                Arrived::Gap(gap) => {
                    tracing::error!(target: "everbus::kafka", %group, topic = topic.name, %position, gap, "the server removed records before the group had them: events may be lost");
                }
                Arrived::Anew => {
                    tracing::warn!(target: "everbus::kafka", %group, topic = topic.name, %position, "the topic was removed and created again: it is read from its beginning");
                }
            }
        }
        drop(board);
        self.changed.notify_waiters();
    }

    // Rebalances, on the thread that polls.

    /// Partitions come to this process: their progress is read before the first record. Returns them with the
    /// offsets at which they begin.
    fn assigned(
        &self,
        consumer: &BaseConsumer<Context>,
        partitions: &TopicPartitionList,
    ) -> TopicPartitionList {
        let mut with_offsets = TopicPartitionList::new();
        if partitions.count() == 0 {
            return with_offsets;
        }
        let committed = self.committed(consumer, partitions);
        let record = self.registry.group(&self.group.name);
        let record = record.unwrap_or_else(|| self.group.clone());
        let mut board = self.board.lock();
        for element in partitions.elements() {
            let (name, partition) = (element.topic(), element.partition());
            let Some(topic) = self.topics.read().get(name).cloned() else {
                continue;
            };
            let start = record.start(name, partition);
            let known = committed.as_ref().map(|all| {
                let found = all.find_partition(name, partition)?;
                match found.offset() {
                    Offset::Offset(floor) => {
                        let floor = u64::try_from(floor).ok()?;
                        Saved::of_group(floor, found.metadata(), record.born)
                    }
                    _ => None,
                }
            });
            let offset = match &known {
                Some(Some(saved)) => offset(saved.progress.floor()),
                Some(None) => offset(start),
                // The client asks again.
                None => Offset::Stored,
            };
            tracing::debug!(target: "everbus::kafka", group = %self.group.name, topic = name, partition, ?offset, "a partition was assigned");
            let anchored = known.is_some();
            board.open_part(topic, partition, start, known.flatten(), anchored);
            let _ = with_offsets.add_partition_offset(name, partition, offset);
        }
        with_offsets
    }

    fn committed(
        &self,
        consumer: &BaseConsumer<Context>,
        partitions: &TopicPartitionList,
    ) -> Option<TopicPartitionList> {
        for _ in 0..20 {
            match consumer.committed_offsets(partitions.clone(), self.link.timeout) {
                Ok(committed) => return Some(committed),
                Err(error) => {
                    tracing::debug!(target: "everbus::kafka", %error, "committed offsets");
                }
            }
            if !self.is_running() {
                break;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        None
    }

    /// Partitions go to another process: what is settled is committed, and their leases are over.
    fn revoked(&self, consumer: &BaseConsumer<Context>, partitions: &TopicPartitionList) {
        let _one = self.committing.lock();
        let mut last = Vec::new();
        {
            let mut board = self.board.lock();
            for element in partitions.elements() {
                let topic = self.topics.read().get(element.topic()).cloned();
                let Some(topic) = topic else { continue };
                last.extend(board.close_shard(topic.shard(element.partition())));
            }
        }
        let lost = consumer.assignment_lost();
        tracing::debug!(target: "everbus::kafka", group = %self.group.name, count = partitions.count(), lost, "partitions were revoked");
        let silent = self.state.load(Ordering::SeqCst) == DROPPED;
        if !last.is_empty() && !lost && !silent {
            for _ in 0..5 {
                match consumer.commit(&list(&last), CommitMode::Sync) {
                    Ok(()) => {
                        let mut board = self.board.lock();
                        for snapshot in &last {
                            board.set_closed(snapshot.slot, snapshot.version);
                        }
                        break;
                    }
                    Err(error) => {
                        tracing::debug!(target: "everbus::kafka", %error, "the last commit");
                        let again = [
                            Kind::RebalanceInProgress,
                            Kind::NotCoordinator,
                            Kind::CoordinatorNotAvailable,
                        ];
                        if !kind(&error).is_some_and(|kind| again.contains(&kind)) {
                            break;
                        }
                        std::thread::sleep(Duration::from_millis(50));
                    }
                }
            }
        }
        self.changed.notify_waiters();
    }

    // The thread that commits.

    fn commit_loop(&self) {
        let mut lazily = Instant::now();
        while self.is_running() {
            {
                let mut woken = self.wake.0.lock();
                if !*woken {
                    self.wake.1.wait_for(&mut woken, LAZY);
                }
                *woken = false;
            }
            let lazy = lazily.elapsed() >= LAZY;
            if !self.commit(lazy) {
                std::thread::sleep(Duration::from_millis(30));
                self.kick();
            }
            if lazy {
                lazily = Instant::now();
            }
        }
    }

    /// Commits what changed. False if that failed and is to be tried again.
    fn commit(&self, lazy: bool) -> bool {
        let Some(consumer) = self.consumer() else {
            return true;
        };
        let _one = self.committing.lock();
        let snapshots = self.board.lock().snapshots(lazy);
        if snapshots.is_empty() || !self.is_running() {
            return true;
        }
        let begin = Instant::now();
        match consumer.commit(&list(&snapshots), CommitMode::Sync) {
            Ok(()) => {
                let took = u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX);
                self.step.store(took, Ordering::Relaxed);
                let mut board = self.board.lock();
                for snapshot in &snapshots {
                    board.committed(snapshot.slot, snapshot.version);
                }
                drop(board);
                self.changed.notify_waiters();
                true
            }
            Err(error) => {
                tracing::debug!(target: "everbus::kafka", group = %self.group.name, %error, "a commit failed");
                let mut board = self.board.lock();
                for snapshot in &snapshots {
                    board.not_committed(snapshot.slot);
                }
                false
            }
        }
    }
}

fn offset(place: u64) -> Offset {
    match place {
        0 => Offset::Beginning,
        place => Offset::Offset(i64::try_from(place).unwrap_or(i64::MAX)),
    }
}

fn list(snapshots: &[Snapshot]) -> TopicPartitionList {
    let mut all = TopicPartitionList::new();
    for snapshot in snapshots {
        let name = &snapshot.topic.name;
        let mut element = all.add_partition(name, snapshot.partition);
        let _ = element.set_offset(Offset::Offset(snapshot.offset));
        element.set_metadata(&snapshot.metadata);
    }
    all
}

/// Pauses or resumes all partitions. Returns whether they are paused or resumed now.
fn set_paused(consumer: &BaseConsumer<Context>, pause: bool) -> bool {
    let Ok(all) = consumer.assignment() else {
        return false;
    };
    let done = match pause {
        true => consumer.pause(&all),
        false => consumer.resume(&all),
    };
    done.is_ok()
}
