//! The streams of the server: created and changed as declared.
//!
//! A declared stream is a JetStream stream of its name, with its patterns as subjects. Without declared streams
//! one stream, `EVERBUS`, has everything. Two more streams always exist: `EVERBUS_GROUPS` has the groups and
//! `DLQ` the dead letters.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Code, Durability, Error, Pattern, Result, Shard, Stream, Streams};
use everbus_dialects::Dialect;
use serde_json::{Value, json};

use crate::api::StreamInfo;
use crate::client::Link;
use crate::config::Options;
use crate::names::{self, Naming};

/// The stream of everything, where none are declared.
pub(crate) const SINGLE: &str = "EVERBUS";
const GROUPS: &str = "EVERBUS_GROUPS";
const DEAD: &str = "DLQ";
/// The mark of streams that Everbus made, and the key of their dialect.
const MADE: &str = "everbus";
const DIALECT: &str = "everbus.dialect";
const NAMING: &str = "everbus.naming";
const SPACE: &str = "everbus.space";
const DAY: Duration = Duration::from_secs(24 * 3600);

/// The names of a bus on its server: with a path in the URL, several buses share one.
#[derive(Clone, Debug)]
pub(crate) struct Space {
    stream_prefix: String,
    subject_prefix: String,
    own: String,
}

impl Space {
    pub(crate) fn new(space: &str) -> Self {
        let (stream_prefix, subject_prefix, own) = match space {
            "" => (String::new(), String::new(), "$EVERBUS".to_owned()),
            space => (
                format!("{space}-"),
                format!("{space}."),
                format!("$EVERBUS.{space}"),
            ),
        };
        Self {
            stream_prefix,
            subject_prefix,
            own,
        }
    }

    fn stream(&self, name: &str) -> String {
        format!("{}{}", self.stream_prefix, names::encoded(name))
    }

    /// The name of a bucket of values.
    pub(crate) fn bucket(&self, name: &str) -> String {
        format!("{}{name}", self.stream_prefix)
    }

    pub(crate) fn single_stream(&self) -> String {
        self.stream(SINGLE)
    }

    pub(crate) fn groups_stream(&self) -> String {
        self.stream(GROUPS)
    }

    pub(crate) fn dead_stream(&self) -> String {
        self.stream(DEAD)
    }

    /// The subject of a group's record; `*` for all.
    pub(crate) fn group_subject(&self, encoded: &str) -> String {
        format!("{}.groups.{encoded}", self.own)
    }

    /// Where a living engine answers.
    pub(crate) fn owner_subject(&self, owner: &str) -> String {
        format!("{}.owner.{owner}", self.own)
    }

    /// The subject of a dead letter.
    pub(crate) fn dead_subject(&self, stream: &str, group: &str, seq: &str) -> String {
        format!("{}dlq.{stream}.{group}.{seq}", self.subject_prefix)
    }
}

/// A stream of the server that has events.
#[derive(Debug)]
pub(crate) struct StreamHandle {
    /// Its name on the server.
    pub(crate) name: String,
    /// Its name as declared, encoded.
    pub(crate) short: String,
    pub(crate) shard: Shard,
    pub(crate) naming: Naming,
    pub(crate) dialect: Dialect,
    /// The prefix of all its subjects.
    prefix: String,
    /// Its subjects, with the prefix.
    pub(crate) subjects: Vec<String>,
    /// The types that belong to it; `None` for one that is not declared any more, and for the single one.
    pub(crate) types: Option<Pattern>,
    /// Whether the server stores a batch as a whole.
    pub(crate) atomic: bool,
    pub(crate) durability: Durability,
    pub(crate) window: Duration,
    /// The age at which the server removes events.
    pub(crate) max_age: Option<Duration>,
}

impl StreamHandle {
    pub(crate) fn subject(&self, plain: &str) -> String {
        format!("{}{plain}", self.prefix)
    }

    /// The subject without the prefix of the space.
    pub(crate) fn plain<'a>(&self, subject: &'a str) -> &'a str {
        subject.strip_prefix(&self.prefix).unwrap_or(subject)
    }

    /// The filters for these patterns, with the prefix. `None` is everything, and an empty list nothing.
    pub(crate) fn filters(&self, patterns: &[Pattern]) -> Option<Vec<String>> {
        let wanted = |pattern: &&Pattern| {
            let types = self.types.as_ref();
            types.is_none_or(|types| reaches(pattern, types))
        };
        let wanted: Vec<&Pattern> = patterns.iter().filter(wanted).collect();
        let filters = names::filters(self.naming, wanted)?;
        let filters = filters.iter().map(|filter| self.subject(filter));
        // Without a declaration its subjects say what belongs to it.
        let reached = |filter: &String| {
            let subjects = &mut self.subjects.iter();
            self.types.is_some() || subjects.any(|subject| names::overlap(subject, filter))
        };
        Some(filters.filter(reached).collect())
    }

    /// One filter that covers all of these patterns.
    pub(crate) fn one_filter(&self, patterns: &[Pattern]) -> String {
        match self.filters(patterns).as_deref() {
            Some([one]) => one.clone(),
            _ => self.subject(">"),
        }
    }
}

/// Whether a subscription's pattern shares a type with those of a stream.
fn reaches(pattern: &Pattern, types: &Pattern) -> bool {
    let text = everbus_core::stream::dotted(pattern.as_str());
    match text == pattern.as_str() {
        true => pattern.overlap(types).is_some(),
        false => Pattern::new(&text).is_ok_and(|dotted| dotted.overlap(types).is_some()),
    }
}

/// The streams of a bus, and which type is in which.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) routes: Streams,
    pub(crate) streams: Vec<Arc<StreamHandle>>,
    /// The copies of the streams for groups, dead letters and values: as many as that of any event.
    pub(crate) copies: u32,
    /// The weaker durability of groups and dead letters.
    own: Durability,
}

impl Table {
    /// The stream of an event type.
    pub(crate) fn route(&self, event_type: &str) -> Result<&Arc<StreamHandle>> {
        let name = &self.routes.route(event_type)?.name;
        let short = match self.routes.is_declared() {
            true => names::encoded(name),
            false => SINGLE.to_owned(),
        };
        self.streams
            .iter()
            .find(|stream| stream.short == short)
            .ok_or_else(|| Error::new(Code::Internal, format!("the stream {name} has no handle")))
    }

    /// The weakest durability of its streams, with those of groups and dead letters.
    pub(crate) fn durability(&self) -> Durability {
        let all = self.streams.iter().map(|stream| stream.durability);
        all.fold(self.own, Ord::min)
    }

    /// The shortest time for which a repeated id is recognised.
    pub(crate) fn window(&self) -> Duration {
        let all = self.streams.iter().map(|stream| stream.window);
        all.min().unwrap_or_default()
    }

    /// Whether the server removes events of any of its streams by their age.
    pub(crate) fn drops_by_age(&self) -> bool {
        self.streams.iter().any(|stream| stream.max_age.is_some())
    }

    /// Whether a batch is stored as a whole, whatever types it has.
    pub(crate) fn atomic(&self) -> bool {
        matches!(&self.streams[..], [only] if only.atomic)
    }
}

/// Creates or changes the streams.
pub(crate) async fn declare(
    link: &Link,
    space: &Space,
    options: &Options,
    routes: Streams,
) -> Result<Table> {
    let mut streams = Vec::new();
    let mut copies = options.replicas;
    if routes.is_declared() {
        for stream in &routes {
            let others = routes.iter().filter(|other| other.name != stream.name);
            let others: Vec<&Pattern> = others.flat_map(Stream::patterns).collect();
            let stream_ = declare_one(link, space, options, stream, others).await?;
            streams.push(Arc::new(stream_));
            copies = copies.max(stream.copies.unwrap_or(0));
        }
    } else {
        let subjects = names::single_subjects();
        let wanted = Wanted {
            name: SINGLE,
            subjects,
            dialect: Dialect::Native,
            naming: Naming::Single,
            max_age: None,
            copies: options.replicas,
            of_others: Vec::new(),
        };
        streams.push(Arc::new(ensure(link, space, options, wanted, None).await?));
    }
    let groups = declare_groups(link, space, options, copies).await?;
    let dead = declare_dead(link, space, options, &routes, copies).await?;
    Ok(Table {
        routes,
        streams,
        copies,
        own: groups.min(dead),
    })
}

async fn declare_one(
    link: &Link,
    space: &Space,
    options: &Options,
    stream: &Stream,
    others: Vec<&Pattern>,
) -> Result<StreamHandle> {
    let dialect = match &stream.dialect {
        Some(name) => name.parse()?,
        None => Dialect::Native,
    };
    let Some(subjects) = names::filters(Naming::Declared, stream.patterns()) else {
        let what = format!(
            "the stream {} covers everything: a NATS server has subjects of its own",
            stream.name
        );
        return Err(Error::new(Code::InvalidSetting, what)
            .hint("name domains, such as order.>, or declare no streams at all"));
    };
    let wanted = Wanted {
        name: &stream.name,
        subjects,
        dialect,
        naming: Naming::Declared,
        max_age: stream.max_age,
        copies: stream.copies.unwrap_or(options.replicas),
        of_others: names::filters(Naming::Declared, others).unwrap_or_default(),
    };
    let types = Some(stream.types().clone());
    ensure(link, space, options, wanted, types).await
}

/// The stream of the groups.
pub(crate) async fn declare_groups(
    link: &Link,
    space: &Space,
    options: &Options,
    copies: u32,
) -> Result<Durability> {
    let own = Own {
        name: space.groups_stream(),
        subject: space.group_subject("*"),
        age: None,
        least_age: None,
        copies,
    };
    own_stream(link, options, own).await
}

/// The stream of the dead letters.
async fn declare_dead(
    link: &Link,
    space: &Space,
    options: &Options,
    routes: &Streams,
    copies: u32,
) -> Result<Durability> {
    let omni = Streams::omni();
    let is_omni = routes.is_declared() && omni.iter().all(|s| routes.named(&s.name).is_some());
    let own = Own {
        name: space.dead_stream(),
        subject: format!("{}dlq.>", space.subject_prefix),
        age: is_omni.then_some(DEAD_AGE),
        least_age: Some(DEAD_AGE),
        copies,
    };
    own_stream(link, options, own).await
}

/// A stream for what Everbus keeps beside events.
struct Own {
    name: String,
    subject: String,
    /// The age that it is made with.
    age: Option<Duration>,
    /// The shortest age of one that is there; `None`: it must have no age.
    least_age: Option<Duration>,
    copies: u32,
}

/// Creates the stream, or compares it with what is there. Returns how durable it is.
async fn own_stream(link: &Link, options: &Options, own: Own) -> Result<Durability> {
    let found = match link.stream(&own.name).await? {
        Some(info) => info,
        None => {
            let config = json!({
                "name": own.name,
                "subjects": [own.subject],
                "storage": "file",
                "retention": "limits",
                "discard": "old",
                "max_msgs_per_subject": 1,
                "max_age": own.age.map_or(0, nanos),
                "num_replicas": own.copies,
                "allow_direct": true,
                "metadata": made(),
            });
            match link.create_stream(&config).await? {
                Some(info) => info,
                // Another process was faster.
                None => match link.stream(&own.name).await? {
                    Some(info) => info,
                    None => return Err(removed_meanwhile(&own.name)),
                },
            }
        }
    };
    check_own(&found.config, &own)?;
    match raise_copies(link, &found.config, own.copies).await? {
        Some(raised) => Ok(durability_of(&raised.config, options)),
        None => Ok(durability_of(&found.config, options)),
    }
}

/// The mark of a stream that Everbus makes.
pub(crate) fn made() -> Value {
    json!({ MADE: "1" })
}

/// Gives a stream that Everbus made more copies, if it has fewer. `None`: it was left as it is.
pub(crate) async fn raise_copies(
    link: &Link,
    config: &Value,
    copies: u32,
) -> Result<Option<StreamInfo>> {
    let enough = config["num_replicas"].as_u64().unwrap_or(1) >= u64::from(copies);
    if enough || !config["metadata"][MADE].is_string() {
        return Ok(None);
    }
    let mut raised = config.clone();
    raised["num_replicas"] = json!(copies);
    link.update_stream(&raised).await.map(Some)
}

fn removed_meanwhile(name: &str) -> Error {
    let what = format!("the stream {name} is removed and created at the same time");
    Error::new(Code::Unavailable, what)
}

/// The shortest age of dead letters: the omni specification keeps them this long.
const DEAD_AGE: Duration = DAY.saturating_mul(30);

/// A stream for groups or dead letters that exists must keep what is stored in it.
fn check_own(config: &Value, own: &Own) -> Result<()> {
    check_keeps(config)?;
    if config["storage"].as_str() == Some("memory") {
        return Err(other_settings(
            config,
            "it is kept in memory",
            "recreate it with file storage",
        ));
    }
    let subject = &own.subject;
    let there = texts(&config["subjects"]);
    if !there.iter().any(|known| names::covers(known, subject)) {
        return Err(other_settings(
            config,
            &format!("it has the subjects {there:?} and not {subject}"),
            "rename that stream, or separate buses by a path in the URL (nats://host/space)",
        ));
    }
    let age = config["max_age"].as_u64().unwrap_or(0);
    if age != 0 && own.least_age.is_none_or(|least| age < nanos(least)) {
        let hint = match own.least_age {
            None => "give it no max_age",
            Some(_) => "give it no max_age, or thirty days at least",
        };
        let what = format!("it deletes messages after {:?}", Duration::from_nanos(age));
        return Err(other_settings(config, &what, hint));
    }
    Ok(())
}

/// Refuses settings under which the server acks an event and drops it before every group has it.
fn check_keeps(config: &Value) -> Result<()> {
    let retention = config["retention"].as_str().unwrap_or("limits");
    if retention != "limits" {
        return Err(other_settings(
            config,
            &format!("its retention is {retention}, so events vanish once one consumer acked them"),
            "give the stream another name, or recreate it with the retention limits",
        ));
    }
    if config["sealed"].as_bool() == Some(true) || config["mirror"].is_object() {
        return Err(other_settings(
            config,
            "it is sealed or a mirror and takes no events",
            "give the stream another name",
        ));
    }
    if config["no_ack"].as_bool() == Some(true) {
        return Err(other_settings(
            config,
            "it acks no publish (no_ack)",
            "set no_ack to false",
        ));
    }
    let drops_old = config["discard"].as_str().unwrap_or("old") == "old";
    for limit in ["max_msgs", "max_bytes"] {
        if drops_old && config[limit].as_i64().is_some_and(|most| most > 0) {
            return Err(other_settings(
                config,
                &format!("beyond {limit} it drops its oldest events, also those that no group has"),
                "remove the limit, or let the stream refuse new events instead (discard: new)",
            ));
        }
    }
    Ok(())
}

fn other_settings(config: &Value, what: &str, hint: &str) -> Error {
    let name = config["name"].as_str().unwrap_or_default();
    let what = format!("the stream {name} exists with other settings: {what}");
    Error::new(Code::InvalidSetting, what).hint(hint)
}

struct Wanted<'a> {
    name: &'a str,
    subjects: Vec<String>,
    dialect: Dialect,
    naming: Naming,
    max_age: Option<Duration>,
    copies: u32,
    /// The subjects of the other streams of the table.
    of_others: Vec<String>,
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Creates the stream, or compares it with what is there.
async fn ensure(
    link: &Link,
    space: &Space,
    options: &Options,
    wanted: Wanted<'_>,
    types: Option<Pattern>,
) -> Result<StreamHandle> {
    let name = space.stream(wanted.name);
    let subjects: Vec<String> = wanted
        .subjects
        .iter()
        .map(|subject| format!("{}{subject}", space.subject_prefix))
        .collect();
    let info = match link.stream(&name).await? {
        Some(info) => Some(info),
        None => {
            let mut config = json!({
                "name": name,
                "subjects": subjects,
                "storage": "file",
                "retention": "limits",
                "discard": "old",
                "max_age": wanted.max_age.map_or(0, nanos),
                "num_replicas": wanted.copies,
                "duplicate_window": nanos(window(options, wanted.max_age)),
                "allow_direct": true,
                "allow_atomic": true,
                "metadata": metadata(space, &wanted),
            });
            if !link.client.is_server_compatible(2, 12, 0)
                && let Some(config) = config.as_object_mut()
            {
                config.remove("allow_atomic");
            }
            match link.create_stream(&config).await? {
                Some(info) => Some(info),
                None => link.stream(&name).await?,
            }
        }
    };
    let Some(mut info) = info else {
        return Err(removed_meanwhile(&name));
    };
    if let Some(changed) = changes(space, &info, &subjects, &wanted, options)? {
        info = link.update_stream(&changed).await?;
    }
    let short = names::encoded(wanted.name);
    handle(space, name, short, &info, types, Some(&wanted), options)
}

/// The server refuses a window that is longer than the age.
fn window(options: &Options, max_age: Option<Duration>) -> Duration {
    max_age.map_or(options.window, |age| age.min(options.window))
}

fn metadata(space: &Space, wanted: &Wanted<'_>) -> Value {
    let naming = match wanted.naming {
        Naming::Single => "single",
        Naming::Declared => "declared",
    };
    json!({
        MADE: "1",
        DIALECT: wanted.dialect.as_str(),
        NAMING: naming,
        SPACE: space.own,
    })
}

/// The changed configuration of a stream that is there, or `None` if it is as wanted. A stream whose settings
/// would lose events is refused.
fn changes(
    space: &Space,
    info: &StreamInfo,
    subjects: &[String],
    wanted: &Wanted<'_>,
    options: &Options,
) -> Result<Option<Value>> {
    let config = &info.config;
    let refused = |what: String, hint: &str| Err(other_settings(config, &what, hint));
    check_keeps(config)?;
    let per_subject = config["max_msgs_per_subject"].as_i64().unwrap_or(-1);
    let refuses = config["discard"].as_str() == Some("new")
        && config["discard_new_per_subject"].as_bool() == Some(true);
    if per_subject > 0 && !refuses {
        return refused(
            format!("it keeps {per_subject} events of a type and drops older ones"),
            "remove max_msgs_per_subject from the stream",
        );
    }
    let ours = config["metadata"][MADE].is_string();
    let there: Vec<String> = texts(&config["subjects"]);
    let missing = |subject: &&String| !there.iter().any(|known| names::covers(known, subject));
    let missing: Vec<&String> = subjects.iter().filter(missing).collect();
    if !missing.is_empty() && !ours {
        return refused(
            format!("it has the subjects {there:?} and not {missing:?}"),
            "declare the patterns that the stream has, or give the stream another name",
        );
    }
    let mut new = config.clone();
    // Subjects that are not declared here stay: a newer version may have declared them. Only another stream of
    // this table takes them.
    let taken = |known: &String| {
        let mut others = wanted.of_others.iter();
        others.any(|other| names::overlap(&format!("{}{other}", space.subject_prefix), known))
    };
    // The server takes no subjects that overlap unless one covers the other, where the wider one is enough.
    let clashes = |known: &String| {
        let apart = |one: &str, other: &str| {
            !names::overlap(one, other) || names::covers(one, other) || names::covers(other, one)
        };
        !subjects.iter().all(|subject| apart(subject, known))
    };
    let kept = there
        .iter()
        .filter(|known| !taken(known) && !clashes(known));
    let kept: Vec<String> = kept.cloned().collect();
    let subjects = names::union(&kept, subjects);
    if ours && sorted(&there) != sorted(&subjects) {
        new["subjects"] = json!(subjects);
    }
    let age = config["max_age"].as_u64().unwrap_or(0);
    let wanted_age = wanted.max_age.map_or(0, nanos);
    let shorter = wanted_age != 0 && (age == 0 || wanted_age < age);
    if shorter && !options.allow_shorter_age {
        let shown = match age {
            0 => "without an age".to_owned(),
            age => format!("for {:?}", Duration::from_nanos(age)),
        };
        return refused(
            format!(
                "it keeps events {shown}, and the shorter {:?} would delete what is older",
                Duration::from_nanos(wanted_age)
            ),
            "declare the longer age, or allow it with broker.allow_shorter_age: true",
        );
    }
    if !ours && age != 0 && (wanted_age == 0 || age < wanted_age) {
        return refused(
            format!(
                "it deletes events after {:?}, sooner than declared",
                Duration::from_nanos(age)
            ),
            "declare the stream with the max_age that it has, or raise it on the server",
        );
    }
    if age != wanted_age && (ours || shorter) {
        new["max_age"] = json!(wanted_age);
        let known = config["duplicate_window"].as_u64().unwrap_or(0);
        if wanted_age != 0 && known > wanted_age {
            new["duplicate_window"] = json!(wanted_age);
        }
    }
    if ours {
        if u64::from(wanted.copies) > config["num_replicas"].as_u64().unwrap_or(1) {
            new["num_replicas"] = json!(wanted.copies);
        }
        if let (Some(known), Value::Object(more)) =
            (new["metadata"].as_object_mut(), metadata(space, wanted))
        {
            known.extend(more);
        }
        new["allow_direct"] = json!(true);
    }
    Ok((new != *config).then_some(new))
}

pub(crate) fn texts(value: &Value) -> Vec<String> {
    let all = value.as_array().map(Vec::as_slice).unwrap_or_default();
    let all = all.iter().filter_map(Value::as_str);
    all.map(str::to_owned).collect()
}

fn sorted(texts: &[String]) -> Vec<&String> {
    let mut all: Vec<&String> = texts.iter().collect();
    all.sort();
    all
}

fn durability_of(config: &Value, options: &Options) -> Durability {
    let replicas = config["num_replicas"].as_u64().unwrap_or(1);
    match config["storage"].as_str() {
        Some("memory") if replicas < 3 => Durability::Memory,
        _ if replicas >= 3 => Durability::Replicated,
        _ if options.synced => Durability::PowerLoss,
        _ => Durability::Process,
    }
}

fn handle(
    space: &Space,
    name: String,
    short: String,
    info: &StreamInfo,
    types: Option<Pattern>,
    wanted: Option<&Wanted<'_>>,
    options: &Options,
) -> Result<StreamHandle> {
    let config = &info.config;
    let metadata = &config["metadata"];
    let dialect = match wanted {
        Some(wanted) => wanted.dialect,
        None => match metadata[DIALECT].as_str() {
            Some(name) => name.parse()?,
            None => Dialect::Native,
        },
    };
    let naming = match (wanted, metadata[NAMING].as_str()) {
        (Some(wanted), _) => wanted.naming,
        (None, Some("single")) => Naming::Single,
        (None, _) => Naming::Declared,
    };
    Ok(StreamHandle {
        shard: Shard::named(&short)?,
        name,
        short,
        naming,
        dialect,
        prefix: space.subject_prefix.clone(),
        subjects: texts(&config["subjects"]),
        types,
        atomic: config["allow_atomic"].as_bool() == Some(true),
        durability: durability_of(config, options),
        window: Duration::from_nanos(config["duplicate_window"].as_u64().unwrap_or(0)),
        max_age: config["max_age"]
            .as_u64()
            .filter(|age| *age > 0)
            .map(Duration::from_nanos),
    })
}

/// A stream that a group consumes and that is not declared here any more. `None` if it is gone.
pub(crate) async fn undeclared(
    link: &Link,
    space: &Space,
    options: &Options,
    name: &str,
) -> Result<Option<StreamHandle>> {
    let Some(info) = link.stream(name).await? else {
        return Ok(None);
    };
    let short = name.strip_prefix(&space.stream_prefix).unwrap_or(name);
    let (name, short) = (name.to_owned(), short.to_owned());
    handle(space, name, short, &info, None, None, options).map(Some)
}

/// The streams that Everbus made for this space, for a reader that declares none.
pub(crate) async fn discover(
    link: &Link,
    space: &Space,
    options: &Options,
) -> Result<Vec<Arc<StreamHandle>>> {
    let mut streams = Vec::new();
    for info in link.streams().await? {
        let config = &info.config;
        if config["metadata"][SPACE].as_str() != Some(&space.own) {
            continue;
        }
        let name = config["name"].as_str().unwrap_or_default().to_owned();
        let short = name.strip_prefix(&space.stream_prefix).unwrap_or(&name);
        let short = short.to_owned();
        let stream = handle(space, name, short, &info, None, None, options)?;
        streams.push(Arc::new(stream));
    }
    Ok(streams)
}
