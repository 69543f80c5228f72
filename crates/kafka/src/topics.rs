//! The topics of the cluster: created and compared as declared.
//!
//! A declared stream is a topic of its name. Without declared streams a topic has the types of a domain, or
//! what [`Topics`] says. Each topic with events is noted in the topic of the groups, where consumers find it.
//! `settings` knows which settings of a topic are refused; `own` has the topics without events.

mod own;
mod settings;

use std::sync::Arc;
use std::time::Duration;

use everbus_core::stream::dotted;
use everbus_core::{Code, Durability, Error, Pattern, Result, Shard, Stream, Streams, Weakness};
use everbus_dialects::Dialect;
use parking_lot::RwLock;
use rdkafka::admin::{AdminOptions, NewTopic, TopicReplication};
use rdkafka::error::RDKafkaErrorCode as Kind;
use rdkafka::producer::Producer as _;

use crate::broker::Shared;
use crate::client::{Link, blocking, patiently_while};
use crate::config::Topics;
use crate::errors::{is_passing_for_new, of_kind};
use crate::groups::{Key, Note, Types};
use crate::names;

pub(crate) use own::{check_dead, declare_dead, declare_registry};
pub(crate) use settings::{Defaults, defaults, weaknesses};
use settings::{check, configuration, grade};

/// The largest record that the server takes by default.
const DEFAULT_MAX_BYTES: usize = 1_048_588;

/// How much larger than an event its dead letter may be.
pub(crate) const DEAD_ROOM: usize = 256 * 1024;

/// A topic with events.
pub(crate) struct Topic {
    /// Its name on the server.
    pub(crate) name: String,
    /// The name without the prefix of the space.
    pub(crate) short: String,
    pub(crate) dialect: Dialect,
    pub(crate) partitions: i32,
    shards: RwLock<Vec<Shard>>,
    /// The largest record.
    pub(crate) max_bytes: usize,
    pub(crate) durability: Durability,
    pub(crate) weaknesses: Vec<Weakness>,
    /// The age at which the server removes events, also those that a group has not received.
    pub(crate) max_age: Option<Duration>,
}

impl Topic {
    fn new(name: String, short: String, dialect: Dialect, partitions: i32) -> Self {
        Self {
            name,
            short,
            dialect,
            partitions,
            shards: RwLock::default(),
            max_bytes: DEFAULT_MAX_BYTES,
            durability: Durability::Process,
            weaknesses: Vec::new(),
            max_age: None,
        }
    }

    /// A topic that was noted by this or another process, for reading.
    pub(crate) fn of_note(name: &str, note: &Note) -> Self {
        let dialect = note.dialect.parse().unwrap_or(Dialect::Native);
        let topic = Self::new(
            name.to_owned(),
            note.short.clone(),
            dialect,
            note.partitions,
        );
        Self {
            max_age: note.max_age.map(Duration::from_millis),
            ..topic
        }
    }

    #[cfg(test)]
    pub(crate) fn for_tests(name: &str, dialect: Dialect) -> Self {
        Self::new(name.to_owned(), name.to_owned(), dialect, 1)
    }

    /// The shard of a partition.
    pub(crate) fn shard(&self, partition: i32) -> Shard {
        let index = usize::try_from(partition).unwrap_or(0);
        if let Some(shard) = self.shards.read().get(index) {
            return *shard;
        }
        let mut shards = self.shards.write();
        for number in shards.len()..=index {
            let name = format!("{}/{number}", self.short);
            // The name is made of letters that are allowed; only too many shards are refused.
            shards.push(Shard::named(&name).unwrap_or(Shard::ONLY));
        }
        shards[index]
    }
}

impl Note {
    /// Whether the topic may have events that one of the patterns matches.
    pub(crate) fn is_reached(&self, patterns: &[Pattern]) -> bool {
        let reached = |types: &Types, pattern: &Pattern| match types {
            Types::Named(naming) => names::reaches(*naming, &self.short, pattern),
            Types::Pattern(types) => overlap(types, pattern),
        };
        let mut types = self.types.iter();
        types.any(|types| patterns.iter().any(|pattern| reached(types, pattern)))
    }
}

/// Whether a pattern of a stream and one of a subscription share a type. If in doubt, returns true.
fn overlap(types: &str, pattern: &Pattern) -> bool {
    let (Ok(types), text) = (Pattern::new(types), dotted(pattern.as_str())) else {
        return true;
    };
    if pattern.overlap(&types).is_some() {
        return true;
    }
    text != pattern.as_str() && Pattern::new(&text).is_ok_and(|p| p.overlap(&types).is_some())
}

/// What a topic is to look like.
struct Wanted {
    short: String,
    dialect: Dialect,
    types: Vec<Types>,
    shards: Option<u32>,
    copies: Option<u32>,
    max_age: Option<Duration>,
}

impl Wanted {
    fn of_stream(stream: &Stream) -> Result<Self> {
        let dialect = match &stream.dialect {
            Some(name) => name.parse()?,
            None => Dialect::Native,
        };
        let patterns = stream.patterns().iter();
        Ok(Self {
            short: stream_topic(&stream.name),
            dialect,
            types: patterns
                .map(|pattern| Types::Pattern(pattern.as_str().to_owned()))
                .collect(),
            shards: stream.shards,
            copies: stream.copies,
            max_age: stream.max_age,
        })
    }

    fn of_type(topics: Topics, event_type: &str) -> Self {
        Self {
            short: names::of_type(topics, event_type),
            dialect: Dialect::Native,
            types: vec![Types::Named(topics)],
            shards: None,
            copies: None,
            max_age: None,
        }
    }
}

fn stream_topic(name: &str) -> String {
    names::encoded(&dotted(name))
}

impl Shared {
    /// Creates or compares the topics of declared streams.
    pub(crate) async fn declare_streams(&self, streams: Streams) -> Result<()> {
        for stream in &streams {
            self.ensure(Wanted::of_stream(stream)?).await?;
        }
        *self.routes.write() = Arc::new(streams);
        Ok(())
    }

    /// The topic of an event type. It is created with the first event.
    pub(crate) async fn topic_of(&self, event_type: &str) -> Result<Arc<Topic>> {
        let routes = self.routes.read().clone();
        let wanted = match routes.is_declared() {
            true => {
                let stream = routes.route(event_type)?;
                let short = stream_topic(&stream.name);
                if let Some(topic) = self.known(&self.space.topic(&short)) {
                    return Ok(topic);
                }
                Wanted::of_stream(stream)?
            }
            false => {
                let short = names::of_type(self.options.topics, event_type);
                if let Some(topic) = self.known(&self.space.topic(&short)) {
                    return Ok(topic);
                }
                Wanted::of_type(self.options.topics, event_type)
            }
        };
        self.ensure(wanted).await
    }

    fn known(&self, name: &str) -> Option<Arc<Topic>> {
        self.topics.lock().get(name).cloned()
    }

    async fn ensure(&self, wanted: Wanted) -> Result<Arc<Topic>> {
        let _one = self.declaring.lock().await;
        let name = self.space.topic(&wanted.short);
        // Another task may have created the topic meanwhile. A declared stream is compared each time.
        let undeclared = matches!(wanted.types[..], [Types::Named(_)]);
        if let Some(known) = self.known(&name).filter(|_| undeclared) {
            return Ok(known);
        }
        let age = wanted
            .max_age
            .map_or(-1, |age| i64::try_from(age.as_millis()).unwrap_or(-1));
        let retention = age.to_string();
        let config = [
            ("cleanup.policy", "delete"),
            ("retention.ms", &retention),
            ("retention.bytes", "-1"),
        ];
        let partitions = wanted.shards.unwrap_or(self.options.partitions);
        let copies = wanted.copies.or(self.options.copies);
        let link = &self.link;
        let described = match partitions_of(link, &name).await? {
            Some(described) => described,
            None => {
                create(link, &name, partitions, copies, &config).await?;
                self.appeared(&name).await?
            }
        };
        let mut topic = Topic::new(
            name.clone(),
            wanted.short.clone(),
            wanted.dialect,
            described.partitions,
        );
        let noted = self.registry.topic(&name);
        let before = noted.as_ref().map_or(0, |note| note.partitions);
        if described.partitions < before {
            let what = format!(
                "the topic {name} has {} partitions and had {before}: it was created anew with fewer",
                described.partitions
            );
            return Err(Error::new(Code::InvalidSetting, what).hint(
                "keys are in other partitions now: let groups finish the old events, or give it as many as before",
            ));
        }
        if let Some(shards) = wanted
            .shards
            .filter(|shards| i64::from(*shards) > i64::from(described.partitions))
        {
            let what = format!(
                "the topic {name} has {} partitions, and {shards} shards are declared",
                described.partitions
            );
            return Err(Error::new(Code::InvalidSetting, what).hint(
                "declare the number that it has: partitions are never added, since keys would move between them",
            ));
        }
        topic.max_age = wanted.max_age;
        if let Some(config) = configuration(link, &name).await? {
            check(&name, &config, &wanted, self.options.allow_shorter_age)?;
            grade(&mut topic, &config, described.copies);
        }
        check_dead(link, &self.space.dead(&wanted.short)).await?;
        let note = Note {
            short: wanted.short,
            dialect: wanted.dialect.to_string(),
            partitions: described.partitions,
            max_age: topic
                .max_age
                .map(|age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX)),
            types: noted
                .as_ref()
                .map_or_else(Vec::new, |known| known.types.clone()),
        };
        // The types come first, so that the topic is never known without them.
        let mut facts = Vec::new();
        for types in wanted.types {
            if !note.types.contains(&types) {
                facts.push((Key::Types(name.clone(), types), Some(String::new())));
            }
        }
        if noted.as_deref() != Some(&note) {
            let text = serde_json::to_string(&note)
                .map_err(|e| Error::new(Code::Internal, format!("a topic cannot be noted: {e}")))?;
            facts.push((Key::Topic(name.clone()), Some(text)));
        }
        if !facts.is_empty() {
            self.registry.write(link, facts).await?;
        }
        let topic = Arc::new(topic);
        self.topics.lock().insert(name, topic.clone());
        Ok(topic)
    }

    /// Waits until a topic that was just created has leaders.
    async fn appeared(&self, name: &str) -> Result<Described> {
        let begin = std::time::Instant::now();
        loop {
            if let Some(described) = partitions_of(&self.link, name).await? {
                self.led(name, described.partitions).await?;
                return Ok(described);
            }
            if begin.elapsed() > self.link.timeout {
                let what = format!("the topic {name} was created and has no leader");
                return Err(Error::new(Code::Unavailable, what));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Shared {
    /// Waits until the leader of each partition answers. The cluster names leaders before they are ready. If the
    /// first records of a producer are refused, they may be taken for repetitions later (see `Shared::placed`).
    async fn led(&self, name: &str, partitions: i32) -> Result<()> {
        let (link, topic) = (self.link.clone(), name.to_owned());
        let asked = blocking(move || {
            let producer = link.producer();
            (0..partitions).try_for_each(|partition| {
                let ask = || {
                    producer
                        .client()
                        .fetch_watermarks(&topic, partition, link.timeout)
                };
                patiently_while(is_passing_for_new, link.timeout, ask).map(drop)
            })
        });
        let what = format!("the topic {name}");
        asked
            .await?
            .map_err(|error| self.link.unanswered(&what, &error))
    }
}

/// A topic as the cluster describes it.
pub(crate) struct Described {
    partitions: i32,
    copies: usize,
}

/// The partitions of a topic; `None` if the topic does not exist or has no leader yet.
pub(crate) async fn partitions_of(link: &Arc<Link>, name: &str) -> Result<Option<Described>> {
    let (own, topic) = (link.clone(), name.to_owned());
    let asked = blocking(move || {
        let metadata = own
            .producer()
            .client()
            .fetch_metadata(Some(&topic), own.timeout)?;
        let found = metadata.topics().iter().find(|found| found.name() == topic);
        let found = found.map(|found| {
            let error = found.error().map(Kind::from);
            let leads = |p: &rdkafka::metadata::MetadataPartition| p.leader() >= 0;
            let led = found.partitions().iter().all(leads) && !found.partitions().is_empty();
            let copies = found.partitions().iter().map(|p| p.replicas().len()).min();
            (error, led, found.partitions().len(), copies.unwrap_or(1))
        });
        Ok::<_, rdkafka::error::KafkaError>(found)
    });
    let what = format!("the topic {name}");
    let found = asked
        .await?
        .map_err(|error| link.unanswered(&what, &error))?;
    match found {
        None => Ok(None),
        Some((None, true, partitions, copies)) => Ok(Some(Described {
            partitions: i32::try_from(partitions).unwrap_or(i32::MAX),
            copies,
        })),
        Some((None, false, ..)) => Ok(None),
        Some((
            Some(Kind::UnknownTopicOrPartition | Kind::UnknownTopic | Kind::LeaderNotAvailable),
            ..,
        )) => Ok(None),
        Some((Some(kind), ..)) => Err(of_kind(&what, kind)),
    }
}

/// Creates a topic; one that exists is left as it is.
pub(crate) async fn create(
    link: &Link,
    name: &str,
    partitions: u32,
    copies: Option<u32>,
    config: &[(&str, &str)],
) -> Result<()> {
    let partitions = i32::try_from(partitions).unwrap_or(i32::MAX);
    let in_sync = settings::in_sync(copies, link.defaults().await?);
    // -1: the default of the server.
    let copies = copies.map_or(-1, |copies| i32::try_from(copies).unwrap_or(i32::MAX));
    let mut topic = NewTopic::new(name, partitions, TopicReplication::Fixed(copies));
    let in_sync = in_sync.map(|number| ("min.insync.replicas", number));
    for (key, value) in config.iter().copied().chain(in_sync) {
        topic = topic.set(key, value);
    }
    let options = AdminOptions::new()
        .request_timeout(Some(link.timeout))
        .operation_timeout(Some(link.timeout));
    let what = format!("the topic {name} cannot be created");
    let answers = link.admin().create_topics([&topic], &options).await;
    let answers = answers.map_err(|error| link.unanswered(&what, &error))?;
    match answers.into_iter().next() {
        Some(Ok(_)) | None => Ok(()),
        Some(Err((_, Kind::TopicAlreadyExists))) => Ok(()),
        Some(Err((_, kind))) => Err(of_kind(&what, kind)),
    }
}
