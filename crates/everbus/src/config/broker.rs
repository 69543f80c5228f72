//! The sections `broker` and `store`: the engine and its address.

use std::fmt;

use everbus_core::Durability;

use super::problems::listed;
use super::redact::redacted;
use super::section::{Reader, Section, Text};
use crate::access::{Access, RedisAccess};

pub(super) const KEYS: &[&str] = &[
    "type",
    "url",
    "require_durability",
    "user",
    "password",
    "token",
    "creds",
    "sasl",
    "tls",
    "foreign",
    "synced",
    "copies",
    "allow_shorter_age",
    "window",
    "stale_after",
    "stale_count",
    "keep_finished",
    "timeout",
    "allow_eviction",
    "adopt_streams",
];
/// The keys of other servers that a Redis server has as well.
const OF_REDIS: &[&str] = &["user", "password", "tls", "foreign"];
/// The keys that only a Redis server has.
const REDIS_ONLY: &[&str] = &[
    "window",
    "stale_after",
    "stale_count",
    "keep_finished",
    "timeout",
    "allow_eviction",
    "adopt_streams",
];
const FOREIGN: &[(&str, bool)] = &[("dead_letter", false), ("raw", true)];

/// The engine of the broker or of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Broker {
    /// The key `type`, or the scheme of the URL.
    pub kind: BrokerKind,
    /// The key `url` in the form that [`Bus::open`](crate::Bus::open) takes: with its scheme.
    pub url: BrokerUrl,
    /// The least durability that the engine must offer.
    pub require_durability: Option<Durability>,
    /// The other keys: how to get access to a server.
    pub access: Access,
}

/// The engines that a file may name. Not every build has all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BrokerKind {
    /// Redis Streams.
    Redis,
    /// NATS JetStream.
    Nats,
    /// Apache Kafka.
    Kafka,
    /// A file of the embedded engine.
    Sqlite,
    /// Memory only.
    Memory,
    /// PostgreSQL.
    Postgres,
}

const KINDS: &[(&str, BrokerKind)] = &[
    ("redis", BrokerKind::Redis),
    ("nats", BrokerKind::Nats),
    ("kafka", BrokerKind::Kafka),
    ("sqlite", BrokerKind::Sqlite),
    ("memory", BrokerKind::Memory),
    ("postgres", BrokerKind::Postgres),
];

impl BrokerKind {
    /// Its name in the file.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::Nats => "nats",
            Self::Kafka => "kafka",
            Self::Sqlite => "sqlite",
            Self::Memory => "memory",
            Self::Postgres => "postgres",
        }
    }

    /// Whether this build has the engine.
    pub fn is_available(self) -> bool {
        match self {
            Self::Memory => true,
            Self::Sqlite => cfg!(feature = "sqlite"),
            Self::Nats => cfg!(feature = "nats"),
            Self::Postgres => cfg!(feature = "postgres"),
            Self::Redis => cfg!(feature = "redis"),
            Self::Kafka => cfg!(feature = "kafka"),
        }
    }

    /// Whether the engine can be a store beside a broker.
    pub fn remembers(self) -> bool {
        matches!(self, Self::Sqlite | Self::Memory | Self::Postgres)
    }

    fn schemes(self) -> &'static [&'static str] {
        match self {
            Self::Redis => &["redis", "rediss"],
            Self::Nats => &["nats", "tls"],
            Self::Kafka => &["kafka"],
            Self::Sqlite => &["sqlite"],
            Self::Memory => &["memory"],
            Self::Postgres => &["postgres", "postgresql"],
        }
    }

    fn example(self) -> &'static str {
        match self {
            Self::Redis => "redis://localhost:6379",
            Self::Nats => "nats://localhost:4222",
            Self::Kafka => "localhost:9092 or kafka://localhost:9092",
            Self::Sqlite => "sqlite:everbus.db",
            Self::Memory => "memory:",
            Self::Postgres => "postgres://localhost/events",
        }
    }
}

impl fmt::Display for BrokerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The address of a broker. It is shown without user, password and parameters.
///
/// ```
/// use everbus::Config;
/// let config = Config::parse("broker: {url: 'redis://me:secret@host:6379'}", "everbus.yaml")?;
/// let url = config.broker.unwrap().url;
/// assert_eq!(url.to_string(), "redis://***@host:6379");
/// assert_eq!(url.reveal(), "redis://me:secret@host:6379");
/// # Ok::<(), everbus::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct BrokerUrl(String);

impl BrokerUrl {
    /// The whole address with its secrets, for connecting, not for display.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for BrokerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&redacted(&self.0))
    }
}

impl fmt::Debug for BrokerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&redacted(&self.0), f)
    }
}

/// Reads the section `store`: an engine like that of `broker`, but one with a history.
pub(super) fn read_store(reader: &mut Reader<'_>, section: &Section<'_>) -> Option<Broker> {
    let store = read(reader, section, "store")?;
    if !store.kind.remembers() {
        let what = format!("a {} engine moves events and cannot keep them", store.kind);
        let hint = "name one that can: sqlite:history.db, postgres://localhost/events";
        reader.problems.add(section.place, what, hint);
        return None;
    }
    Some(store)
}

/// Reads the section of an engine; `role` is the purpose of the engine.
pub(super) fn read(reader: &mut Reader<'_>, section: &Section<'_>, role: &str) -> Option<Broker> {
    let kind_field = section.get("type");
    let wrong_kind = kind_field.is_some();
    let grades = Durability::ALL.map(|grade| (grade.as_str(), grade));
    let require_durability = reader.choice(section.get("require_durability"), &grades);
    let kind = reader.choice(kind_field, KINDS);
    let url = reader.text(section.get("url"), &format!("the address of the {role}"));
    let Some(url) = url else {
        // Memory has no address. For the others it is missing, unless an invalid one was reported.
        match kind {
            Some(BrokerKind::Memory) if section.get("url").is_none() => {
                return Some(Broker {
                    kind: BrokerKind::Memory,
                    url: BrokerUrl("memory:".to_owned()),
                    require_durability,
                    access: Access::default(),
                });
            }
            Some(kind) if section.get("url").is_none() => {
                let what = format!("{} is missing", section.path_of("url"));
                let hint = format!(
                    "a {kind} {role} needs its address, such as {}",
                    kind.example()
                );
                reader.problems.add(section.place, what, hint);
            }
            _ => {}
        }
        return None;
    };
    let scheme = scheme(&url.value);
    let by_scheme = scheme.and_then(|scheme| {
        let mut kinds = KINDS.iter().map(|(_, kind)| *kind);
        kinds.find(|kind| kind.schemes().contains(&scheme))
    });
    let kind = match kind {
        Some(kind) => kind,
        // An invalid type was reported: the meaning of the address is unknown.
        None if wrong_kind => return None,
        None if scheme.is_none() && !url.value.trim().is_empty() => BrokerKind::Sqlite,
        None => match by_scheme {
            Some(kind) => kind,
            None => {
                let words: Vec<&str> = KINDS.iter().map(|(word, _)| *word).collect();
                let hint = format!(
                    "the engines are {}; a URL begins with the name of one, such as {}",
                    listed(&words),
                    BrokerKind::Redis.example()
                );
                refuse(reader, &url, "names no engine that is known", hint);
                return None;
            }
        },
    };
    match check(kind, by_scheme, scheme, &url.value) {
        Ok(url) => Some(Broker {
            kind,
            url: BrokerUrl(url),
            require_durability,
            access: access(reader, section, kind),
        }),
        Err(what) => {
            let hint = match url.variables.as_slice() {
                [] => format!("write it as {}", kind.example()),
                names => format!(
                    "set {} so that it reads like {}",
                    names.join(" and "),
                    kind.example()
                ),
            };
            refuse(reader, &url, &what, hint);
            None
        }
    }
}

/// The keys for a server.
fn access(reader: &mut Reader<'_>, section: &Section<'_>, kind: BrokerKind) -> Access {
    // All but those that every engine has.
    let given = KEYS.iter().skip(3).filter(|key| match kind {
        BrokerKind::Nats => **key == "sasl" || REDIS_ONLY.contains(key),
        BrokerKind::Kafka => {
            matches!(**key, "token" | "creds" | "synced") || REDIS_ONLY.contains(key)
        }
        BrokerKind::Redis => !OF_REDIS.contains(key) && !REDIS_ONLY.contains(key),
        _ => true,
    });
    let mut given = given.filter_map(|key| Some((key, section.get(key)?)));
    if let Some((key, field)) = given.next() {
        let which = match kind {
            _ if REDIS_ONLY.contains(key) => "redis",
            BrokerKind::Nats => "kafka",
            BrokerKind::Kafka => "nats",
            _ => "nats or kafka",
        };
        let what = format!(
            "{} is for a {which} broker, and this one is {kind}",
            field.path
        );
        let hint = "remove the key, or put user and password into the URL";
        reader.problems.add(field.key_place, what, hint);
        return Access::default();
    }
    let mut text = |key: &str, wanted: &str| reader.text(section.get(key), wanted).map(|t| t.value);
    let mut access = Access {
        user: text("user", "the name of a user"),
        password: text("password", "a password, such as ${NATS_PASSWORD}"),
        token: text("token", "a token, such as ${NATS_TOKEN}"),
        creds: text("creds", "the path of a .creds file, or the seed of an nkey"),
        sasl: text("sasl", "PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512"),
        ..Access::default()
    };
    // A file with root certificates says that TLS is wanted.
    match text("tls", "true, false or a file with root certificates").as_deref() {
        None | Some("false") => {}
        Some("true") => access.tls = true,
        Some(file) => (access.tls, access.ca_file) = (true, Some(file.into())),
    }
    access.raw_foreign = reader
        .choice(section.get("foreign"), FOREIGN)
        .unwrap_or(false);
    access.synced = reader.boolean(section.get("synced")).unwrap_or(false);
    let copies = reader.whole(section.get("copies"), 1..=5, "copies");
    access.copies = copies.and_then(|copies| u32::try_from(copies).ok());
    access.allow_shorter_age = reader
        .boolean(section.get("allow_shorter_age"))
        .unwrap_or(false);
    access.redis = redis(reader, section);
    access
}

/// The keys of a Redis server.
fn redis(reader: &mut Reader<'_>, section: &Section<'_>) -> RedisAccess {
    let count = reader.whole(section.get("stale_count"), 1..=10_000, "messages");
    let kept = section.get("keep_finished");
    RedisAccess {
        window: reader.duration(section.get("window")),
        stale_after: reader.duration(section.get("stale_after")),
        stale_count: count.and_then(|count| usize::try_from(count).ok()),
        keep_finished: reader.whole(kept, 0..=1_000_000_000_000, "events"),
        timeout: reader.duration(section.get("timeout")),
        allow_eviction: reader
            .boolean(section.get("allow_eviction"))
            .unwrap_or(false),
        adopt_streams: reader
            .boolean(section.get("adopt_streams"))
            .unwrap_or(false),
    }
}

/// The address as `Bus::open` takes it, or what is wrong with it. The message never contains the address.
fn check(
    kind: BrokerKind,
    by_scheme: Option<BrokerKind>,
    scheme: Option<&str>,
    url: &str,
) -> Result<String, String> {
    if url.trim().is_empty() {
        return Err("is empty".to_owned());
    }
    let in_a_file_name = kind == BrokerKind::Sqlite;
    if url
        .chars()
        .any(|c| c.is_control() || c == ' ' && !in_a_file_name)
    {
        return Err("contains a blank or a control character".to_owned());
    }
    if let (Some(other), Some(scheme)) = (by_scheme.filter(|other| *other != kind), scheme) {
        return Err(format!(
            "begins with {scheme}:, which is {other}, but type is {kind}"
        ));
    }
    if by_scheme.is_none() {
        return match kind {
            // Kafka clients write it as host:port, several with commas.
            BrokerKind::Kafka if !url.contains(['/', '@']) => Ok(format!("kafka://{url}")),
            BrokerKind::Sqlite if scheme.is_none() => {
                check_file(url).map(|()| format!("sqlite:{url}"))
            }
            _ => {
                let schemes = kind.schemes().join(": or ");
                Err(format!(
                    "does not begin with {schemes}:, but type is {kind}"
                ))
            }
        };
    }
    let rest = url.split_once(':').map_or("", |(_, rest)| rest);
    match kind {
        BrokerKind::Memory if !matches!(rest, "" | "//") => {
            return Err("has something after memory:".to_owned());
        }
        BrokerKind::Memory => {}
        BrokerKind::Sqlite => check_file(rest.strip_prefix("//").unwrap_or(rest))?,
        _ => match rest.strip_prefix("//") {
            None => return Err("has no // after its scheme".to_owned()),
            Some(host) if host.is_empty() || host.starts_with(['/', '?']) => {
                return Err("names no host".to_owned());
            }
            Some(_) => {}
        },
    }
    Ok(url.to_owned())
}

fn check_file(path: &str) -> Result<(), String> {
    if path.is_empty() {
        return Err("names no file".to_owned());
    }
    if path == ":memory:" {
        return Err("names a database in memory, which survives nothing".to_owned());
    }
    if path.contains('?') {
        return Err("has settings after a question mark, which are not read".to_owned());
    }
    Ok(())
}

/// The scheme before the colon, if there is one: a single letter is a drive, and after a slash the colon is
/// part of a path.
fn scheme(url: &str) -> Option<&str> {
    let (scheme, _) = url.split_once(':')?;
    let is_scheme = scheme.len() > 1
        && scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-'));
    (is_scheme || scheme.is_empty()).then_some(scheme)
}

/// Reports a problem without the value: an address may contain a password.
fn refuse(reader: &mut Reader<'_>, url: &Text, what: &str, hint: String) {
    let what = format!("{} {what}", url.path);
    reader.problems.add(url.place, what, hint);
}
