//! Groups, subscriptions and topics as the cluster keeps them: records in a compacted topic of one partition.
//!
//! Kafka has no compare-and-set. So nothing is changed in place: every fact has a key of its own, and facts that two
//! processes write at the same time add up. A group is the sum of its *creations*; the earliest start counts. A topic
//! has all types that were noted for it. A thread reads the topic of the groups as it grows. [`Registry::sync`] waits
//! until the thread has read everything that was written before.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use everbus_core::{
    Code, Cursor, Error, EventId, GroupName, Pattern, Result, SubscriptionInfo, Timestamp,
};
use parking_lot::RwLock;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::KafkaError;
use rdkafka::message::Message as _;
use rdkafka::producer::FutureRecord;
use rdkafka::{Offset, TopicPartitionList};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::client::{Link, Plain, blocking, patiently};
use crate::config::Topics;
use crate::errors::{is_passing, refused};

/// The most attempts to write a fact while the server answers without an offset.
const RESENDS: usize = 5;
/// How long the reader waits after an error that does not pass by itself.
const AFTER_ERROR: Duration = Duration::from_secs(1);

/// A group as one process created it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Creation {
    pub(crate) ordered: bool,
    /// The engine that an ephemeral group belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) owner: Option<String>,
    pub(crate) created_at: Timestamp,
    /// Events that were received earlier are not for the group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) since: Option<Timestamp>,
}

/// A subscription of a group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Subscription {
    pub(crate) pattern: String,
    pub(crate) after: String,
    pub(crate) created_at: Timestamp,
}

/// A topic with events.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Note {
    pub(crate) short: String,
    pub(crate) dialect: String,
    pub(crate) partitions: i32,
    /// The age in milliseconds at which the server removes events, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) max_age: Option<u64>,
    /// The types of events that the topic may have. They are separate facts, and are never removed, because the topic
    /// may still have such events.
    #[serde(skip)]
    pub(crate) types: Vec<Types>,
}

/// Types of events that a topic may have.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Types {
    /// Those that this naming puts there, where no streams are declared.
    Named(Topics),
    /// Those that a pattern of a declared stream matches.
    Pattern(String),
}

/// The key of a fact.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Key {
    /// A creation: group, and the number of the creation.
    Group(String, String),
    /// A subscription: group and name.
    Subscription(String, String),
    /// Where a group begins in a topic: group, topic, the number of the creation, and the number of the declaration.
    Start(String, String, String, String),
    Topic(String),
    /// Types that a topic may have.
    Types(String, Types),
}

/// A group: all that is known of it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Record {
    pub(crate) name: GroupName,
    pub(crate) ordered: bool,
    pub(crate) owner: Option<String>,
    pub(crate) created_at: Timestamp,
    pub(crate) since: Option<Timestamp>,
    pub(crate) subscriptions: BTreeMap<String, Subscription>,
    /// The first offset of each partition of a topic. A topic that is not here begins with its first event.
    pub(crate) starts: BTreeMap<String, Vec<i64>>,
    pub(crate) patterns: Arc<[Pattern]>,
    /// The offset of its first creation. A group with another offset is another group.
    pub(crate) born: i64,
    /// The numbers of its creations.
    pub(crate) creations: Vec<String>,
}

impl Record {
    pub(crate) fn wants(&self, event_type: &str) -> bool {
        self.patterns
            .iter()
            .any(|pattern| pattern.matches(event_type))
    }

    pub(crate) fn start(&self, topic: &str, partition: i32) -> u64 {
        let starts = self.starts.get(topic);
        let start = starts.and_then(|all| all.get(usize::try_from(partition).ok()?));
        start
            .and_then(|start| u64::try_from(*start).ok())
            .unwrap_or(0)
    }

    pub(crate) fn infos(&self) -> Result<Vec<SubscriptionInfo>> {
        let info = |(name, s): (&String, &Subscription)| {
            Ok(SubscriptionInfo {
                id: subscription_id(&self.name, name),
                group: self.name.clone(),
                name: name.clone(),
                pattern: Pattern::new(&s.pattern)?,
                after: s.after.parse::<Cursor>()?,
                created_at: s.created_at,
            })
        };
        self.subscriptions.iter().map(info).collect()
    }
}

/// The id of a subscription. Processes that declare the same subscription at the same time get the same id.
pub(crate) fn subscription_id(group: &GroupName, name: &str) -> EventId {
    EventId::from_foreign(&format!("everbus subscription of {group}"), name)
}

#[derive(Default)]
struct Facts {
    /// Each with the offset of its record.
    all: BTreeMap<Key, (i64, String)>,
    groups: HashMap<String, Arc<Record>>,
    topics: BTreeMap<String, Arc<Note>>,
}

/// What is known of groups and topics.
pub(crate) struct Registry {
    topic: String,
    facts: RwLock<Facts>,
    /// The offset up to which the topic was read.
    reached: watch::Sender<i64>,
    /// Grows with every change.
    pub(crate) version: watch::Sender<u64>,
    stop: AtomicBool,
}

impl Registry {
    /// Begins to read the topic, which must exist.
    pub(crate) fn start(link: &Link, topic: String) -> Result<Arc<Self>> {
        let reader = link.reader("everbus-registry")?;
        let mut all = TopicPartitionList::new();
        let added = all.add_partition_offset(&topic, 0, Offset::Beginning);
        added
            .and_then(|()| reader.assign(&all))
            .map_err(|error| refused("the topic of the groups cannot be read", &error))?;
        let registry = Arc::new(Self {
            topic,
            facts: RwLock::default(),
            reached: watch::Sender::new(-1),
            version: watch::Sender::new(0),
            stop: AtomicBool::new(false),
        });
        let own = registry.clone();
        let thread = std::thread::Builder::new().name("everbus-kafka-groups".to_owned());
        thread
            .spawn(move || own.read(&reader))
            .map_err(|error| Error::new(Code::OutOfResources, "no thread").caused_by(error))?;
        Ok(registry)
    }

    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
    }

    fn read(&self, reader: &BaseConsumer<Plain>) {
        while !self.stop.load(Ordering::SeqCst) {
            match reader.poll(Duration::from_millis(100)) {
                None => {}
                Some(Ok(record)) => {
                    self.apply(record.offset(), record.key(), record.payload());
                    self.reached.send_replace(record.offset() + 1);
                }
                // Compaction may have removed the last records: then the end of the topic is beyond the last record.
                Some(Err(KafkaError::PartitionEOF(_))) => {
                    let position = reader.position().ok();
                    let position = position.and_then(|all| {
                        let at = all.find_partition(&self.topic, 0)?.offset().to_raw()?;
                        (at >= 0).then_some(at)
                    });
                    let reached = position.unwrap_or(0);
                    self.reached.send_if_modified(|known| {
                        let further = reached > *known;
                        *known = reached.max(*known);
                        further
                    });
                }
                Some(Err(error)) if is_passing(&error) => {
                    tracing::debug!(target: "everbus::kafka", %error, "reading the groups");
                }
                Some(Err(error)) => {
                    tracing::error!(target: "everbus::kafka", %error, "the groups cannot be read");
                    std::thread::sleep(AFTER_ERROR);
                }
            }
        }
    }

    fn apply(&self, offset: i64, key: Option<&[u8]>, value: Option<&[u8]>) {
        // What cannot be read was written by a newer version, or by another program.
        let Some(key) = key.and_then(|key| serde_json::from_slice::<Key>(key).ok()) else {
            return;
        };
        let mut facts = self.facts.write();
        match value.and_then(|value| String::from_utf8(value.to_vec()).ok()) {
            Some(value) => _ = facts.all.insert(key.clone(), (offset, value)),
            None => _ = facts.all.remove(&key),
        }
        match key {
            Key::Topic(name) | Key::Types(name, _) => facts.update_topic(&name),
            Key::Group(name, _) | Key::Subscription(name, _) | Key::Start(name, ..) => {
                facts.update_group(&name);
            }
        }
        drop(facts);
        self.version.send_modify(|version| *version += 1);
    }

    /// Waits until everything that was written before this call is known here.
    pub(crate) async fn sync(&self, link: &Arc<Link>) -> Result<()> {
        let (own, topic, timeout) = (link.clone(), self.topic.clone(), link.timeout);
        let end = blocking(move || {
            use rdkafka::producer::Producer as _;
            let producer = own.producer();
            patiently(timeout, || {
                producer.client().fetch_watermarks(&topic, 0, timeout)
            })
        });
        let (_, end) = end
            .await?
            .map_err(|error| link.unanswered("the groups cannot be read", &error))?;
        self.wait(end, timeout).await
    }

    /// Like [`sync`](Self::sync), on a thread that may block. Returns false if that fails.
    pub(crate) fn sync_blocking(&self, reader: &impl Ends, timeout: Duration) -> bool {
        let Some(end) = reader.end(&self.topic, timeout) else {
            return false;
        };
        let begin = std::time::Instant::now();
        while *self.reached.borrow() < end {
            if begin.elapsed() > timeout || self.stop.load(Ordering::SeqCst) {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    async fn wait(&self, end: i64, timeout: Duration) -> Result<()> {
        let mut reached = self.reached.subscribe();
        let there = reached.wait_for(|reached| *reached >= end);
        match tokio::time::timeout(timeout, there).await {
            Ok(Ok(_)) => Ok(()),
            _ => Err(Error::new(
                Code::Unavailable,
                "the groups are not read in time",
            )),
        }
    }

    /// Writes facts, in order, and waits until they are known here. `None` removes one.
    pub(crate) async fn write(&self, link: &Link, facts: Vec<(Key, Option<String>)>) -> Result<()> {
        let unwritable = |error: serde_json::Error| {
            Error::new(
                Code::Internal,
                format!("a group cannot be written: {error}"),
            )
        };
        let producer = link.producer();
        let mut last = 0;
        // One after another: they are few, and each is needed before the next.
        for (key, value) in &facts {
            let key = serde_json::to_string(key).map_err(unwritable)?;
            let mut offset = -1;
            for _ in 0..RESENDS {
                let record = FutureRecord::<str, str> {
                    topic: &self.topic,
                    partition: Some(0),
                    payload: value.as_deref(),
                    key: Some(&key),
                    timestamp: None,
                    headers: None,
                };
                let answer = producer.send(record, link.timeout).await;
                let delivery = answer.map_err(|(error, _)| {
                    link.unanswered("a group cannot be stored", &error)
                        .with_unknown_outcome()
                })?;
                offset = delivery.offset;
                // Without an offset, the fact may not be stored. To write it again does no harm.
                if offset >= 0 {
                    break;
                }
            }
            last = last.max(offset + 1);
        }
        self.wait(last, link.timeout).await
    }

    pub(crate) fn group(&self, name: &GroupName) -> Option<Arc<Record>> {
        self.facts.read().groups.get(name.as_str()).cloned()
    }

    pub(crate) fn groups(&self) -> Vec<Arc<Record>> {
        let mut all: Vec<_> = self.facts.read().groups.values().cloned().collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    pub(crate) fn topics(&self) -> BTreeMap<String, Arc<Note>> {
        self.facts.read().topics.clone()
    }

    pub(crate) fn topic(&self, name: &str) -> Option<Arc<Note>> {
        self.facts.read().topics.get(name).cloned()
    }

    /// The facts that say where a group begins in a topic.
    pub(crate) fn starts_of(&self, group: &GroupName, topic: &str) -> Vec<Key> {
        let facts = self.facts.read();
        let own = |key: &&Key| matches!(key, Key::Start(of, at, ..) if of == group.as_str() && at == topic);
        facts.all.keys().filter(own).cloned().collect()
    }

    /// The keys of everything that is known of a group.
    pub(crate) fn keys_of(&self, group: &GroupName) -> Vec<Key> {
        let facts = self.facts.read();
        let own = |key: &&Key| match key {
            Key::Group(name, _) | Key::Subscription(name, _) | Key::Start(name, ..) => {
                name == group.as_str()
            }
            Key::Topic(_) | Key::Types(..) => false,
        };
        // Creations come last: the group exists until they are removed.
        let mut keys: Vec<Key> = facts.all.keys().filter(own).cloned().collect();
        keys.sort_by_key(|key| matches!(key, Key::Group(..)));
        keys
    }
}

/// Asks for the end of a partition.
pub(crate) trait Ends {
    fn end(&self, topic: &str, timeout: Duration) -> Option<i64>;
}

impl<C: rdkafka::consumer::ConsumerContext> Ends for BaseConsumer<C> {
    fn end(&self, topic: &str, timeout: Duration) -> Option<i64> {
        let ends = self.fetch_watermarks(topic, 0, timeout);
        ends.ok().map(|(_, end)| end)
    }
}

impl Facts {
    fn update_topic(&mut self, name: &str) {
        let fact = self.all.get(&Key::Topic(name.to_owned()));
        let note = fact.and_then(|(_, text)| serde_json::from_str::<Note>(text).ok());
        let Some(mut note) = note else {
            self.topics.remove(name);
            return;
        };
        let first = Key::Types(name.to_owned(), Types::Named(Topics::Domain));
        for key in self.all.range(first..).map(|(key, _)| key) {
            match key {
                Key::Types(of, types) if of == name => note.types.push(types.clone()),
                _ => break,
            }
        }
        self.topics.insert(name.to_owned(), Arc::new(note));
    }

    fn update_group(&mut self, name: &str) {
        match self.record(name) {
            Some(record) => _ = self.groups.insert(name.to_owned(), Arc::new(record)),
            None => _ = self.groups.remove(name),
        }
    }

    /// The sum of all facts about a group.
    fn record(&self, name: &str) -> Option<Record> {
        let mut record: Option<Record> = None;
        let first = Key::Group(name.to_owned(), String::new());
        for (key, (offset, text)) in self.all.range(first..) {
            let Key::Group(of, number) = key else { break };
            if of != name {
                break;
            }
            let Ok(creation) = serde_json::from_str::<Creation>(text) else {
                continue;
            };
            match &mut record {
                None => {
                    record = Some(Record {
                        name: name.parse().ok()?,
                        ordered: creation.ordered,
                        owner: creation.owner,
                        created_at: creation.created_at,
                        since: creation.since,
                        subscriptions: BTreeMap::new(),
                        starts: BTreeMap::new(),
                        patterns: Arc::new([]),
                        born: *offset,
                        creations: vec![number.clone()],
                    });
                }
                Some(record) => {
                    record.creations.push(number.clone());
                    record.created_at = record.created_at.min(creation.created_at);
                    // A creation without a time begins earlier than one with a time.
                    record.since = match (record.since, creation.since) {
                        (Some(one), Some(other)) => Some(one.min(other)),
                        _ => None,
                    };
                    if *offset < record.born {
                        record.born = *offset;
                        record.ordered = creation.ordered;
                        record.owner = creation.owner;
                    }
                }
            }
        }
        let mut record = record?;
        let first = Key::Subscription(name.to_owned(), String::new());
        for (key, (offset, text)) in self.all.range(first..) {
            let Key::Subscription(of, own) = key else {
                break;
            };
            if of != name {
                break;
            }
            // An older subscription was left behind by a removed group of the same name.
            if *offset > record.born
                && let Ok(subscription) = serde_json::from_str(text)
            {
                record.subscriptions.insert(own.clone(), subscription);
            }
        }
        let mut starts: BTreeMap<String, Vec<(&str, Vec<i64>)>> = BTreeMap::new();
        let none = String::new;
        let first = Key::Start(name.to_owned(), none(), none(), none());
        for (key, (_, text)) in self.all.range(first..) {
            let Key::Start(of, topic, creation, _) = key else {
                break;
            };
            if of != name {
                break;
            }
            if record.creations.contains(creation)
                && let Ok(offsets) = serde_json::from_str::<Vec<i64>>(text)
            {
                let known = starts.entry(topic.clone()).or_default();
                known.push((creation, offsets));
            }
        }
        // A topic without a start for one of the creations is newer than that creation, and is read from its first
        // event. If several declarations have a start for a topic, the earliest one counts: each declaration was
        // answered, and the group must get the events after that. A start may be written when a member has begun at a
        // later one already. Then no event is lost: the later start was the end of the topic before the earlier start
        // was written, so before that declaration was answered.
        for (topic, all) in starts {
            let knows = |creation: &String| all.iter().any(|(of, _)| of == creation);
            if !record.creations.iter().all(knows) {
                continue;
            }
            let shortest = all.iter().map(|(_, offsets)| offsets.len()).min();
            let least = |partition: usize| all.iter().map(|(_, offsets)| offsets[partition]).min();
            let offsets = (0..shortest.unwrap_or(0)).filter_map(least).collect();
            record.starts.insert(topic, offsets);
        }
        let patterns = record.subscriptions.values();
        let patterns = patterns.filter_map(|s| Pattern::new(&s.pattern).ok());
        record.patterns = patterns.collect();
        Some(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(all: &[(Key, &str)]) -> Facts {
        let mut facts = Facts::default();
        for (offset, (key, text)) in (0..).zip(all) {
            facts.all.insert(key.clone(), (offset, (*text).to_owned()));
        }
        facts
    }

    const CREATION: &str = r#"{"ordered":false,"created_at":"2026-01-01T00:00:00Z"}"#;

    fn start(creation: &str, declaration: &str) -> Key {
        let [group, topic] = ["g", "order"].map(str::to_owned);
        Key::Start(group, topic, creation.to_owned(), declaration.to_owned())
    }

    fn group(creation: &str) -> Key {
        Key::Group("g".to_owned(), creation.to_owned())
    }

    // conformance: contract/kafka-start-race: of two declarations at the same time that say where a group begins in a topic the earlier start counts
    #[test]
    fn the_earliest_start_counts_in_whatever_order_they_are_written() {
        for later_first in [false, true] {
            let mut all = vec![
                (group("a"), CREATION),
                (start("a", "one"), "[10,7]"),
                (start("a", "two"), "[12,5]"),
            ];
            if later_first {
                all.swap(1, 2);
            }
            let record = facts(&all).record("g").unwrap();
            assert_eq!(record.starts["order"], [10, 5]);
        }
    }

    #[test]
    fn a_topic_that_one_creation_did_not_know_begins_with_its_first_event() {
        let mut all = vec![
            (group("a"), CREATION),
            (group("b"), CREATION),
            (start("a", "one"), "[10]"),
            (start("a", "two"), "[11]"),
        ];
        assert!(facts(&all).record("g").unwrap().starts.is_empty());
        all.push((start("b", "three"), "[12]"));
        assert_eq!(facts(&all).record("g").unwrap().starts["order"], [10]);
    }

    // conformance: contract/kafka-types-add-up: the types that processes note of a topic add up
    #[test]
    fn types_of_a_topic_add_up() {
        let types = |types| Key::Types("order".to_owned(), types);
        let mut facts = facts(&[
            (types(Types::Pattern("order.paid".to_owned())), ""),
            (
                Key::Topic("order".to_owned()),
                r#"{"short":"order","dialect":"native","partitions":1}"#,
            ),
            (types(Types::Named(Topics::Domain)), ""),
        ]);
        facts.update_topic("order");
        let note = &facts.topics["order"];
        let reached = |text: &str| note.is_reached(&[Pattern::new(text).unwrap()]);
        assert!(reached("order.paid") && reached("order.placed"));
        assert!(!reached("mail.sent"));
    }
}
