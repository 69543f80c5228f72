//! The topics of the cluster: created and compared as declared.
//!
//! A declared stream is a topic of its name. Without declared streams a topic has the types of a domain, or
//! what [`Topics`] says. Each topic with events is noted in the topic of the groups, where consumers find it.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::stream::dotted;
use everbus_core::{Code, Durability, Error, Pattern, Result, Shard, Stream, Streams, Weakness};
use everbus_dialects::Dialect;
use parking_lot::RwLock;
use rdkafka::admin::{AdminOptions, ConfigResource, NewTopic, ResourceSpecifier, TopicReplication};
use rdkafka::error::RDKafkaErrorCode as Kind;
use rdkafka::producer::Producer as _;

use crate::broker::Shared;
use crate::client::{Link, blocking, patiently};
use crate::config::{Options, Topics};
use crate::errors::of_kind;
use crate::groups::{Key, Note};
use crate::names;

/// What the server takes unless its topic says otherwise.
const DEFAULT_MAX_BYTES: usize = 1_048_588;

/// How much larger than an event its dead letter may be.
pub(crate) const DEAD_ROOM: usize = 256 * 1024;

/// A topic with events.
pub(crate) struct Topic {
    /// Its name on the server.
    pub(crate) name: String,
    /// Without the prefix of the space.
    pub(crate) short: String,
    pub(crate) dialect: Dialect,
    pub(crate) partitions: i32,
    shards: RwLock<Vec<Shard>>,
    /// The largest record.
    pub(crate) max_bytes: usize,
    pub(crate) durability: Durability,
    pub(crate) weaknesses: Vec<Weakness>,
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
        }
    }

    /// A topic that was noted by this or another process, for reading.
    pub(crate) fn of_note(name: &str, note: &Note) -> Self {
        let dialect = note.dialect.parse().unwrap_or(Dialect::Native);
        Self::new(
            name.to_owned(),
            note.short.clone(),
            dialect,
            note.partitions,
        )
    }

    #[cfg(test)]
    pub(crate) fn for_tests(name: &str, dialect: Dialect) -> Self {
        Self::new(name.to_owned(), name.to_owned(), dialect, 1)
    }

    /// The log of a partition.
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
        let naming = match self.naming.as_deref() {
            Some("domain") => Some(Topics::Domain),
            Some("type") => Some(Topics::Type),
            Some(_) => Some(Topics::Single),
            None => None,
        };
        patterns.iter().any(|pattern| match naming {
            Some(naming) => names::reaches(naming, &self.short, pattern),
            None => self.patterns.iter().any(|types| overlap(types, pattern)),
        })
    }
}

/// Whether a pattern of a stream and one of a subscription share a type. In doubt they do.
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
    naming: Option<Topics>,
    patterns: Vec<String>,
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
            naming: None,
            patterns: patterns
                .map(|pattern| pattern.as_str().to_owned())
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
            naming: Some(topics),
            patterns: Vec::new(),
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
        if let Some(known) = self.known(&name).filter(|_| wanted.naming.is_some()) {
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
        if let Some(config) = configuration(link, &name).await {
            check(&name, &config, &wanted, self.options.allow_shorter_age)?;
            grade(&mut topic, &config, described.copies);
        }
        let mut note = Note {
            short: wanted.short,
            dialect: wanted.dialect.to_string(),
            naming: wanted.naming.map(|naming| match naming {
                Topics::Domain => "domain".to_owned(),
                Topics::Single => "single".to_owned(),
                Topics::Type => "type".to_owned(),
            }),
            patterns: wanted.patterns,
            partitions: described.partitions,
        };
        if let Some(known) = &noted {
            for pattern in &known.patterns {
                if !note.patterns.contains(pattern) {
                    note.patterns.push(pattern.clone());
                }
            }
        }
        if noted.as_deref() != Some(&note) {
            let text = serde_json::to_string(&note)
                .map_err(|e| Error::new(Code::Internal, format!("a topic cannot be noted: {e}")))?;
            let fact = (Key::Topic(name.clone()), Some(text));
            self.registry.write(link, vec![fact]).await?;
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
    /// Waits until the leader of each partition answers. The cluster names leaders before they know it, and a
    /// producer whose first records are refused loses count of them.
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
                patiently(link.timeout, ask).map(drop)
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

/// `None` if there is no such topic, or if it has no leader yet.
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
    // -1: the default of the server.
    let copies = copies.map_or(-1, |copies| i32::try_from(copies).unwrap_or(i32::MAX));
    let mut topic = NewTopic::new(name, partitions, TopicReplication::Fixed(copies));
    for (key, value) in config {
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

/// The settings of a topic; `None` if the user may not see them.
async fn configuration(link: &Link, name: &str) -> Option<ConfigResource> {
    let options = AdminOptions::new().request_timeout(Some(link.timeout));
    let topic = ResourceSpecifier::Topic(name);
    let answers = link
        .admin()
        .describe_configs([&topic], &options)
        .await
        .ok()?;
    answers.into_iter().next()?.ok()
}

fn value<'a>(config: &'a ConfigResource, name: &str) -> Option<&'a str> {
    config.get(name).and_then(|entry| entry.value.as_deref())
}

/// Refuses settings under which the server drops an event before every group has it.
fn check(name: &str, config: &ConfigResource, wanted: &Wanted, allow_shorter: bool) -> Result<()> {
    let refused = |what: String, hint: &str| {
        let what = format!("the topic {name} cannot be used: {what}");
        Err(Error::new(Code::InvalidSetting, what).hint(hint))
    };
    if value(config, "cleanup.policy").is_some_and(|policy| policy.contains("compact")) {
        return refused(
            "it is compacted, so a later event of a key removes an earlier one".to_owned(),
            "set cleanup.policy=delete, or give the stream another name",
        );
    }
    let bytes = value(config, "retention.bytes").and_then(|bytes| bytes.parse::<i64>().ok());
    if bytes.is_some_and(|bytes| bytes > 0) {
        return refused(
            "beyond retention.bytes it drops its oldest events, also those that no group has"
                .to_owned(),
            "set retention.bytes=-1",
        );
    }
    let age = value(config, "retention.ms").and_then(|age| age.parse::<i64>().ok());
    let Some(age) = age.filter(|age| *age >= 0) else {
        return Ok(());
    };
    let wanted_age = wanted
        .max_age
        .map(|age| i64::try_from(age.as_millis()).unwrap_or(i64::MAX));
    if wanted_age.is_none_or(|wanted| age < wanted) && !allow_shorter {
        return refused(
            format!(
                "it deletes events after {:?}, sooner than declared",
                Duration::from_millis(age.unsigned_abs())
            ),
            "set retention.ms=-1 on the topic, declare the max_age that it has, or allow it with \
             broker.allow_shorter_age: true",
        );
    }
    Ok(())
}

/// The durability of a topic, from its copies and settings.
fn grade(topic: &mut Topic, config: &ConfigResource, copies: usize) {
    let number = |name: &str| value(config, name).and_then(|text| text.parse::<i64>().ok());
    if let Some(bytes) = number("max.message.bytes") {
        topic.max_bytes = usize::try_from(bytes).unwrap_or(DEFAULT_MAX_BYTES);
    }
    let in_sync = number("min.insync.replicas").unwrap_or(1);
    let unclean = value(config, "unclean.leader.election.enable") == Some("true");
    let flushes = number("flush.messages") == Some(1);
    let mut weak = |setting: &str, value: String, advice: &str| {
        topic.weaknesses.push(Weakness::new(
            format!("{setting} of {}", topic.name),
            value,
            advice,
        ));
    };
    if copies < 2 {
        weak(
            "replication.factor",
            copies.to_string(),
            "for copies on several machines declare copies: 3 before the topic is created (a cluster of three brokers)",
        );
    } else if in_sync < 2 {
        weak(
            "min.insync.replicas",
            in_sync.to_string(),
            "a broker alone acknowledges events that are lost with it; set it to 2",
        );
    }
    if copies > 1 && unclean {
        weak(
            "unclean.leader.election.enable",
            "true".to_owned(),
            "a copy that lacks acknowledged events may become the leader; set it to false",
        );
    }
    if copies < 2 && !flushes {
        weak(
            "flush.messages",
            number("flush.messages").map_or_else(String::new, |n| n.to_string()),
            "a power loss may lose the last moments; set it to 1, or keep several copies",
        );
    }
    if let Some(age) = number("retention.ms").filter(|age| *age >= 0) {
        weak(
            "retention.ms",
            age.to_string(),
            "the server deletes events of this age, also those that a group has not handled; set it to -1",
        );
    }
    topic.durability = match (copies, in_sync, unclean) {
        (2.., 2.., false) => Durability::Replicated,
        _ if flushes => Durability::PowerLoss,
        _ => Durability::Process,
    };
}

/// The settings of a topic that keep it from being more durable.
pub(crate) async fn weaknesses(link: &Arc<Link>, name: &str) -> Vec<Weakness> {
    let Ok(Some(described)) = partitions_of(link, name).await else {
        return Vec::new();
    };
    let Some(config) = configuration(link, name).await else {
        return Vec::new();
    };
    let mut topic = Topic::new(
        name.to_owned(),
        name.to_owned(),
        Dialect::Native,
        described.partitions,
    );
    grade(&mut topic, &config, described.copies);
    topic.weaknesses
}

/// The topic of groups, subscriptions and topics: one partition, compacted.
pub(crate) async fn declare_registry(
    link: &Arc<Link>,
    name: &str,
    options: &Options,
) -> Result<()> {
    if partitions_of(link, name).await?.is_some() {
        return Ok(());
    }
    let config = [("cleanup.policy", "compact"), ("retention.ms", "-1")];
    create(link, name, 1, options.copies, &config).await?;
    let begin = std::time::Instant::now();
    while partitions_of(link, name).await?.is_none() {
        if begin.elapsed() > link.timeout {
            let what = format!("the topic {name} was created and has no leader");
            return Err(Error::new(Code::Unavailable, what));
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

/// The topic of dead letters.
pub(crate) async fn declare_dead(shared: &Shared, name: &str, max_bytes: usize) -> Result<()> {
    let link = &shared.link;
    if shared.dead_topics.lock().contains(name) {
        return Ok(());
    }
    if partitions_of(link, name).await?.is_none() {
        // A dead letter is larger than its event.
        let bytes = (max_bytes + DEAD_ROOM).to_string();
        let config = [
            ("cleanup.policy", "delete"),
            ("retention.ms", "-1"),
            ("retention.bytes", "-1"),
            ("max.message.bytes", &bytes),
        ];
        create(link, name, 1, shared.options.copies, &config).await?;
        shared.appeared(name).await?;
    }
    shared.dead_topics.lock().insert(name.to_owned());
    Ok(())
}
