//! The URL and the options of the engine.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Clock, Code, Error, Result, SystemClock};

/// Which events share a topic, where no streams are declared. A declared stream is a topic of its own.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    serde::Serialize,
    serde::Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Topics {
    /// A topic for each domain: `order.placed` and `order.paid` are in `order`. Order by key holds within the topic.
    #[default]
    Domain,
    /// One topic, `events`, for all events: order by key holds for all of them.
    Single,
    /// A topic for each type.
    Type,
}

/// How to connect, and what the topics that Everbus creates look like.
#[derive(Clone)]
#[non_exhaustive]
pub struct Options {
    /// The clock of time stamps. Leases and delays follow the clock of the process.
    pub clock: Arc<dyn Clock>,
    /// The user, if the URL names none.
    pub user: Option<String>,
    /// The password of the user.
    pub password: Option<String>,
    /// The SASL mechanism for user and password: `PLAIN` (the default), `SCRAM-SHA-256` or `SCRAM-SHA-512`.
    pub mechanism: Option<String>,
    /// Connections use TLS.
    pub tls: bool,
    /// A file with root certificates, in place of those of the system.
    pub ca_file: Option<PathBuf>,
    /// How long an answer of the server may take.
    pub timeout: Duration,
    /// Which events share a topic, where no streams are declared.
    pub topics: Topics,
    /// The partitions of topics that declare no number of shards.
    pub partitions: u32,
    /// The copies of topics that declare no number; `None`: the default of the server.
    pub copies: Option<u32>,
    /// Accepts an existing topic that deletes events sooner than declared.
    pub allow_shorter_age: bool,
    /// Records that are not of their topic's dialect are handed to handlers as they are. Otherwise they are
    /// dead-lettered with the reason.
    pub raw_foreign: bool,
    /// A process that is silent for this long loses its partitions to the other members of its groups.
    pub session: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            clock: Arc::new(SystemClock),
            user: None,
            password: None,
            mechanism: None,
            tls: false,
            ca_file: None,
            timeout: Duration::from_secs(10),
            topics: Topics::default(),
            partitions: 3,
            copies: None,
            allow_shorter_age: false,
            raw_foreign: false,
            session: Duration::from_secs(15),
        }
    }
}

impl std::fmt::Debug for Options {
    /// Without secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options")
            .field("user", &self.user)
            .field("mechanism", &self.mechanism)
            .field("tls", &self.tls)
            .field("timeout", &self.timeout)
            .field("topics", &self.topics)
            .field("partitions", &self.partitions)
            .field("copies", &self.copies)
            .field("session", &self.session)
            .finish_non_exhaustive()
    }
}

/// A URL, taken apart. Its `Debug` has no secrets.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Address {
    /// `host:port`, separated by commas.
    pub(crate) servers: String,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    /// The path: it separates several buses on one cluster.
    pub(crate) space: String,
}

impl std::fmt::Debug for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.servers)
    }
}

const HINT: &str =
    "write it as kafka://host:9092, or kafka://user:password@host:9092,other:9092/space";
const PORT: &str = "9092";

/// Reads a URL: `kafka://[user:password@]host[:port][,host…][/space]`.
pub(crate) fn parse(url: &str) -> Result<Address> {
    let bad = |what: &str| Err(Error::new(Code::InvalidUrl, what.to_owned()).hint(HINT));
    let Some(rest) = url.strip_prefix("kafka://") else {
        return bad("the URL does not begin with kafka://");
    };
    if rest.contains(['?', '#']) {
        return bad("settings after a question mark are not read");
    }
    // Each server of a list may have the scheme.
    let rest = rest.replace("kafka://", "");
    let (hosts, space) = match rest.split_once('/') {
        Some((hosts, space)) => (hosts, space.trim_end_matches('/')),
        None => (&rest[..], ""),
    };
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '-';
    if space.len() > 32 || !space.chars().all(fits) {
        return bad("the part after the slash is not up to 32 letters, digits and -");
    }
    let (secrets, hosts) = match hosts.rsplit_once('@') {
        Some((secrets, hosts)) => (Some(secrets), hosts),
        None => (None, hosts),
    };
    let (mut user, mut password) = (None, None);
    if let Some(secrets) = secrets {
        let Some((name, secret)) = secrets.split_once(':') else {
            return bad("the URL has a user without a password");
        };
        (user, password) = (Some(unescape(name)?), Some(unescape(secret)?));
    }
    let mut servers = Vec::new();
    for host in hosts.split(',') {
        let host = host.trim();
        let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
        if name.is_empty() || host.contains(char::is_whitespace) {
            return bad("the URL names no host");
        }
        let has_port = host
            .rsplit_once(':')
            .is_some_and(|(_, port)| !port.contains(']'));
        if !has_port {
            servers.push(format!("{host}:{PORT}"));
            continue;
        }
        let port = host
            .rsplit_once(':')
            .and_then(|(_, port)| port.parse::<u16>().ok());
        if port.is_none() {
            return bad("the URL has a port that is no number");
        }
        servers.push(host.to_owned());
    }
    Ok(Address {
        servers: servers.join(","),
        user,
        password,
        space: space.to_owned(),
    })
}

/// Decodes percent escapes (`%40` is `@`), so that passwords may contain any character.
fn unescape(text: &str) -> Result<String> {
    let bad = || {
        let what = "user or password in the URL have an invalid %";
        Error::new(Code::InvalidUrl, what).hint("write a % as %25")
    };
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digit = |byte: Option<u8>| byte.and_then(|byte| char::from(byte).to_digit(16));
        let (high, low) = (digit(rest.next()), digit(rest.next()));
        match (high, low) {
            (Some(high), Some(low)) => bytes.push((high * 16 + low) as u8),
            _ => return Err(bad()),
        }
    }
    String::from_utf8(bytes).map_err(|_| bad())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_taken_apart() {
        let plain = parse("kafka://localhost").unwrap();
        assert_eq!(
            (plain.servers.as_str(), plain.user),
            ("localhost:9092", None)
        );
        let full = parse("kafka://me:a%40b@one:1,two:2/shop").unwrap();
        assert_eq!(full.servers, "one:1,two:2");
        assert_eq!(full.user.as_deref(), Some("me"));
        assert_eq!(full.password.as_deref(), Some("a@b"));
        assert_eq!(full.space, "shop");
        assert_eq!(parse("kafka://[::1]:9").unwrap().servers, "[::1]:9");
        assert!(!format!("{:?}", parse("kafka://me:secret@h").unwrap()).contains("secret"));
    }

    #[test]
    fn what_is_no_url_is_refused_with_a_hint_and_without_secrets() {
        for url in [
            "localhost:9092",
            "http://x",
            "kafka://",
            "kafka://me:secret@",
            "kafka://me@h",
            "kafka://h/a.b",
            "kafka://h?x=1",
            "kafka://h:port",
            "kafka://me:%zz@h",
        ] {
            let error = parse(url).unwrap_err();
            assert_eq!(error.code(), Code::InvalidUrl, "{url}");
            assert!(error.hint_text().is_some());
            assert!(!error.to_string().contains("secret"));
        }
    }
}
