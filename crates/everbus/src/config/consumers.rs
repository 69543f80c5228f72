//! The section `consumers`: their streams, groups, retries and breakers.

use std::collections::BTreeMap;
use std::time::Duration;

use everbus_core::{Code, GroupName, Pattern, RetryPolicy, StartFrom, Streams};

use super::delivery::{self, Delivery};
use super::problems::quoted;
use super::section::{Field, Reader, Section};
use crate::breaker::{BreakerPolicy, Criticality};
use crate::handler::Decode;
use crate::streams::canonical;

pub(super) const KEYS: &[&str] = &[
    "stream",
    "group",
    "criticality",
    "circuit_breaker",
    "retry",
    "processing_timeout",
    "concurrency",
    "ordered",
    "idempotent",
    "decode",
    "start_from",
    "tenant",
    "webhook",
    "exec",
    "pull",
];
pub(super) const BREAKER_KEYS: &[&str] = &[
    "fail_max",
    "timeout_duration",
    "window",
    "failure_rate",
    "dependency",
];
pub(super) const RETRY_KEYS: &[&str] = &["max_attempts", "backoff_multiplier", "backoff_max"];

/// With more attempts an event would never reach the dead letters.
const MOST_ATTEMPTS: u64 = 1_000_001;
/// A higher concurrency is refused as a mistake.
const MOST_AT_ONCE: u64 = 65_536;
/// A breaker that waits for more failures than this would never open.
const MOST_FAILURES: u64 = 1_000_000;

/// One consumer: a stream, a group that reads it, and how the group handles failures.
///
/// A setting that is not in the file is `None`, so that the program may set it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Consumer {
    /// Its name in the file.
    pub name: String,
    /// The stream as it is written in the file.
    pub stream: String,
    /// The event types: those of the declared stream of this name, or else the canonical name, which may
    /// have wildcards.
    pub pattern: Pattern,
    /// The group that reads; by default it has the name of the consumer.
    pub group: GroupName,
    /// What happens to events while the circuit breaker is open.
    pub criticality: Option<Criticality>,
    /// The circuit breaker.
    pub circuit_breaker: Breaker,
    /// The dependency that the breaker protects; consumers with the same dependency share one breaker.
    /// Without a name the breaker belongs to the group.
    pub dependency: Option<String>,
    /// When and how often a failed event is tried again.
    pub retry: Option<Retry>,
    /// How long one attempt may take.
    pub processing_timeout: Option<Duration>,
    /// How many handlers of the group run at once.
    pub concurrency: Option<usize>,
    /// Whether events with the same key are handled one after another.
    pub ordered: Option<bool>,
    /// Whether events that were handled before are recognised and skipped.
    pub idempotent: Option<bool>,
    /// What happens to an event that cannot be decoded.
    pub decode: Option<Decode>,
    /// Where a new group begins.
    pub start_from: Option<StartFrom>,
    /// Only events of this tenant, for a consumer with a [`Delivery`].
    pub tenant: Option<String>,
    /// Where `everbus serve` delivers the events. `None`: a program has a handler for them.
    pub delivery: Option<Delivery>,
}

const CRITICALITIES: &[(&str, Criticality)] = &[
    ("critical", Criticality::Critical),
    ("standard", Criticality::Standard),
    ("best_effort", Criticality::BestEffort),
    ("best-effort", Criticality::BestEffort),
];

const DECODES: &[(&str, Decode)] = &[
    ("dead_letter", Decode::DeadLetter),
    ("dead-letter", Decode::DeadLetter),
    ("retry", Decode::Retry),
];

/// The circuit breaker of a consumer in the file.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Breaker {
    /// Not in the file. The consumer still has a breaker, with the defaults.
    #[default]
    Unsaid,
    /// It has none.
    Off,
    /// It has one like this.
    On(BreakerPolicy),
}

impl Breaker {
    /// The breaker of the consumer, if it has one.
    pub fn policy(self) -> Option<BreakerPolicy> {
        match self {
            Self::Unsaid => Some(BreakerPolicy::default()),
            Self::Off => None,
            Self::On(policy) => Some(policy),
        }
    }
}

/// The retry settings of the file, with the names of the specification.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Retry {
    /// All attempts, the first included.
    pub max_attempts: Option<u32>,
    /// The first wait; each further one is twice as long.
    pub backoff_multiplier: Option<Duration>,
    /// The longest wait.
    pub backoff_max: Option<Duration>,
}

impl Retry {
    /// This applied to another policy: waits double, and missing settings are kept.
    pub fn over(&self, policy: RetryPolicy) -> RetryPolicy {
        let mut policy = policy.multiplier(2.0);
        if let Some(attempts) = self.max_attempts {
            policy = policy.max_retries(attempts.saturating_sub(1));
        }
        if let Some(first) = self.backoff_multiplier {
            policy = policy.base_delay(first);
        }
        if let Some(longest) = self.backoff_max {
            policy = policy.max_delay(longest);
        }
        policy
    }

    /// This applied to the default policy.
    pub fn policy(&self) -> RetryPolicy {
        self.over(RetryPolicy::default())
    }
}

pub(super) fn read(
    reader: &mut Reader<'_>,
    field: Option<Field<'_>>,
    streams: &Streams,
) -> Vec<Consumer> {
    let mut consumers = Vec::new();
    let mut shared = Shared::default();
    for field in reader.names(field, "names of consumers to their settings") {
        let name = field.key;
        let Some(section) = reader.section(Some(field), KEYS) else {
            continue;
        };
        if let Some(consumer) = consumer(reader, name, &section, streams) {
            shared.check(reader, &section, &consumer);
            consumers.push(consumer);
        }
    }
    shared.share_breakers(&mut consumers);
    consumers
}

/// Reads the whole consumer, so that every problem is found, then checks that it is complete.
fn consumer(
    reader: &mut Reader<'_>,
    name: &str,
    section: &Section<'_>,
    streams: &Streams,
) -> Option<Consumer> {
    let stream = stream(reader, section, streams);
    let group = group(reader, name, section);
    let criticality = reader.choice(section.get("criticality"), CRITICALITIES);
    let (circuit_breaker, dependency) = breaker(reader, section.get("circuit_breaker"));
    let retry = retry(reader, section.get("retry"));
    let processing_timeout = reader.duration(section.get("processing_timeout"));
    let concurrency = section.get("concurrency");
    let concurrency = reader.whole(concurrency, 1..=MOST_AT_ONCE, "handlers");
    let ordered = reader.boolean(section.get("ordered"));
    let idempotent = reader.boolean(section.get("idempotent"));
    let decode = reader.choice(section.get("decode"), DECODES);
    let start_from = start_from(reader, section);
    let tenant = reader.text(section.get("tenant"), "the name of a tenant");
    let delivery = delivery::read(reader, section);
    let (stream, pattern) = stream?;
    Some(Consumer {
        name: name.to_owned(),
        stream,
        pattern,
        group: group?,
        criticality,
        circuit_breaker,
        dependency,
        retry,
        processing_timeout,
        concurrency: concurrency.and_then(|n| usize::try_from(n).ok()),
        ordered,
        idempotent,
        decode,
        start_from,
        tenant: tenant.map(|text| text.value),
        delivery,
    })
}

/// The stream of a consumer: a declared stream, or types that a declared stream covers.
fn stream(
    reader: &mut Reader<'_>,
    section: &Section<'_>,
    streams: &Streams,
) -> Option<(String, Pattern)> {
    let Some(field) = section.get("stream") else {
        let what = format!("{} is missing", section.path_of("stream"));
        let hint = "a consumer needs the stream that it reads: stream: orders:order-placed";
        reader.problems.add(section.place, what, hint);
        return None;
    };
    let text = reader.text(Some(field), "the name of a stream")?;
    if let Some(stream) = streams.named(&text.value).filter(|_| streams.is_declared()) {
        return Some((text.value, stream.types().clone()));
    }
    let pattern = Pattern::new(&canonical(&text.value));
    match pattern.and_then(|pattern| streams.reaches(&pattern).map(|()| pattern)) {
        Ok(pattern) => Some((text.value, pattern)),
        Err(error) if error.code() == Code::NoStream => {
            let hint = error.hint_text().unwrap_or_default().to_owned();
            reader.refuse(&text, "which no declared stream covers", hint);
            None
        }
        Err(error) => {
            let hint = error.hint_text().unwrap_or("name a stream").to_owned();
            reader.refuse(&text, "which is not the name of a stream", hint);
            None
        }
    }
}

/// The group name; by default the name of the consumer.
fn group(reader: &mut Reader<'_>, name: &str, section: &Section<'_>) -> Option<GroupName> {
    let hint = "a group is named with 1 to 128 printable characters";
    let Some(field) = section.get("group") else {
        let group = GroupName::new(name);
        if group.is_err() {
            let what = format!(
                "the consumer {} cannot be the name of a group",
                quoted(name)
            );
            reader.problems.add(section.place, what, hint);
        }
        return group.ok();
    };
    let text = reader.text(Some(field), "the name of a group")?;
    let group = GroupName::new(&text.value);
    if group.is_err() {
        reader.refuse(&text, "which cannot be the name of a group", hint);
    }
    group.ok()
}

/// The breaker and its dependency.
fn breaker(reader: &mut Reader<'_>, field: Option<Field<'_>>) -> (Breaker, Option<String>) {
    if field
        .as_ref()
        .is_some_and(|field| field.node.is_word(&["off", "false"]))
    {
        return (Breaker::Off, None);
    }
    let Some(section) = reader.section(field, BREAKER_KEYS) else {
        return (Breaker::Unsaid, None);
    };
    let mut policy = BreakerPolicy::new();
    let fail_max = reader.whole(section.get("fail_max"), 1..=MOST_FAILURES, "failures");
    if let Some(failures) = fail_max.and_then(|n| u32::try_from(n).ok()) {
        policy = policy.fail_max(failures);
    }
    if let Some(open_for) = reader.duration(section.get("timeout_duration")) {
        policy = policy.open_for(open_for);
    }
    if let Some(window) = reader.duration(section.get("window")) {
        policy = policy.window(window);
    }
    let rate = section.get("failure_rate");
    if let Some(rate) = reader.number(rate, 0.001..=1.0, "a share of the attempts") {
        policy = policy.failure_rate(rate);
    }
    let dependency = reader.text(section.get("dependency"), "the name of a dependency");
    let dependency = dependency.and_then(|text| {
        let bad = text.value.trim().is_empty() || text.value.chars().any(char::is_control);
        if bad {
            let hint = "name what the handler depends on";
            reader.refuse(&text, "which is not a name", hint);
        }
        (!bad).then_some(text.value)
    });
    let mut keys = BREAKER_KEYS.iter().filter(|key| **key != "dependency");
    let breaker = if keys.any(|key| section.get(key).is_some()) {
        Breaker::On(policy)
    } else {
        Breaker::Unsaid
    };
    (breaker, dependency)
}

fn retry(reader: &mut Reader<'_>, field: Option<Field<'_>>) -> Option<Retry> {
    let section = reader.section(field, RETRY_KEYS)?;
    let before = reader.problems.total;
    let attempts = section.get("max_attempts");
    let attempts = reader.whole(attempts, 1..=MOST_ATTEMPTS, "attempts, the first included");
    let retry = Retry {
        max_attempts: attempts.and_then(|n| u32::try_from(n).ok()),
        backoff_multiplier: reader.duration(section.get("backoff_multiplier")),
        backoff_max: reader.duration(section.get("backoff_max")),
    };
    if reader.problems.total == before
        && let Err(error) = retry.policy().validate()
    {
        let what = format!("{}: {}", section.path(), error.message());
        let hint = "backoff_multiplier is the first wait, backoff_max the longest (30 s if it is \
                    not given)";
        reader.problems.add(section.place, what, hint);
    }
    Some(retry)
}

fn start_from(reader: &mut Reader<'_>, section: &Section<'_>) -> Option<StartFrom> {
    let wanted = "new, first, last, or a time such as 2026-01-31T12:00:00Z";
    let text = reader.text(section.get("start_from"), wanted)?;
    match text.value.as_str() {
        "new" => Some(StartFrom::New),
        "first" => Some(StartFrom::First),
        "last" => Some(StartFrom::Last),
        time => {
            let time = time.parse().ok().map(StartFrom::Time);
            if time.is_none() {
                reader.refuse(
                    &text,
                    "which is no place to start",
                    format!("write {wanted}"),
                );
            }
            time
        }
    }
}

/// Settings that consumers share and must agree on: those of a group and of a breaker. Names of groups and
/// streams may come from variables, so problems name lines instead of quoting them.
#[derive(Default)]
struct Shared {
    handlers: BTreeMap<(String, String), (String, usize)>,
    groups: BTreeMap<String, Vec<(&'static str, String, usize)>>,
    breakers: BTreeMap<Protected, (BreakerPolicy, usize)>,
}

/// The owner of a breaker.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Protected {
    Dependency(String),
    Group(String),
}

impl Protected {
    fn by(consumer: &Consumer) -> Self {
        match &consumer.dependency {
            Some(dependency) => Self::Dependency(dependency.clone()),
            None => Self::Group(consumer.group.as_str().to_owned()),
        }
    }
}

impl Shared {
    /// A consumer without breaker settings gets those of the consumers it shares the breaker with.
    fn share_breakers(&self, consumers: &mut [Consumer]) {
        for consumer in consumers {
            let shared = self.breakers.get(&Protected::by(consumer));
            if let (Breaker::Unsaid, Some((policy, _))) = (consumer.circuit_breaker, shared) {
                consumer.circuit_breaker = Breaker::On(*policy);
            }
        }
    }

    fn check(&mut self, reader: &mut Reader<'_>, section: &Section<'_>, consumer: &Consumer) {
        let group = consumer.group.as_str();
        let at = |key: &str| {
            section
                .get(key)
                .map_or(section.place, |field| field.key_place)
        };
        let line = section.place.line;

        let handler = (group.to_owned(), consumer.pattern.as_str().to_owned());
        match self.handlers.get(&handler) {
            Some((other, line)) => {
                let what = format!(
                    "{} reads the same stream as the same group as {} on line {line}",
                    section.path(),
                    quoted(other)
                );
                let hint = "one handler of a group is registered twice: remove one, or give it a \
                            group of its own";
                reader.problems.add(at("stream"), what, hint);
            }
            None => {
                self.handlers.insert(handler, (consumer.name.clone(), line));
            }
        }

        let said = [
            ("concurrency", consumer.concurrency.map(|n| n.to_string())),
            (
                "ordered",
                consumer.ordered.map(|ordered| ordered.to_string()),
            ),
            ("start_from", consumer.start_from.map(shown)),
        ];
        for (key, value) in said {
            let Some(value) = value else { continue };
            let place = at(key);
            let known = self.groups.entry(group.to_owned()).or_default();
            match known.iter().find(|(other, _, _)| *other == key) {
                Some((_, other, line)) if *other != value => {
                    let what = format!("{} contradicts line {line}", section.path_of(key));
                    let hint =
                        "consumers of one group share it: say it once, or the same each time";
                    reader.problems.add(place, what, hint);
                }
                Some(_) => {}
                None => known.push((key, value, place.line)),
            }
        }

        let Breaker::On(policy) = consumer.circuit_breaker else {
            return;
        };
        let protected = Protected::by(consumer);
        let place = at("circuit_breaker");
        match self.breakers.get(&protected) {
            Some((other, line)) if *other != policy => {
                let one = match protected {
                    Protected::Dependency(_) => "dependency",
                    Protected::Group(_) => "group",
                };
                let what = format!(
                    "{} differs from line {line}, but both are the breaker of one {one}",
                    section.path_of("circuit_breaker"),
                );
                let hint = "say it once, or the same each time, or name a dependency for each";
                reader.problems.add(place, what, hint);
            }
            Some(_) => {}
            None => {
                self.breakers.insert(protected, (policy, place.line));
            }
        }
    }
}

fn shown(start: StartFrom) -> String {
    match start {
        StartFrom::New => "new".to_owned(),
        StartFrom::First => "first".to_owned(),
        StartFrom::Last => "last".to_owned(),
        StartFrom::Time(time) => time.to_string(),
    }
}
