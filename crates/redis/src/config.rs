//! The URL and the options of the engine.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Clock, Code, Error, Result, SystemClock};

/// How long a repeated id is recognised, unless the options say otherwise.
pub const DEFAULT_WINDOW: Duration = Duration::from_secs(600);
/// How long a message that another program read may stay unfinished before it is taken over: five minutes, as in
/// the specification.
pub const DEFAULT_STALE: Duration = Duration::from_secs(300);

/// How many finished events a stream keeps: the cap of a usual stream in the specification.
pub const DEFAULT_KEPT: u64 = 100_000;

/// How to connect, and how the engine uses the server.
#[derive(Clone)]
#[non_exhaustive]
pub struct Options {
    /// The clock for failures and statistics. Leases, delays and times of receipt follow the clock of the server.
    pub clock: Arc<dyn Clock>,
    /// The user, if the URL names none.
    pub user: Option<String>,
    /// The password, if the URL has none.
    pub password: Option<String>,
    /// Whether TLS is required, also with `redis://`.
    pub tls: bool,
    /// A file with the root certificates to trust instead of those of the system.
    pub ca_file: Option<PathBuf>,
    /// How long the engine waits for an answer of the server.
    pub timeout: Duration,
    /// For how long a repeated id is recognised. Each id takes about 200 bytes of the server's memory meanwhile.
    pub window: Duration,
    /// Messages that another program read for one of our groups and did not finish are taken over after this
    /// long.
    pub stale_after: Duration,
    /// How many such messages are examined in one step.
    pub stale_count: usize,
    /// How many finished events a stream without a declared limit keeps, once a group consumes it. This number and the
    /// unfinished events bound the memory. `None`: all finished events are kept.
    pub keep_finished: Option<u64>,
    /// Whether messages that are not in the dialect of their stream go to handlers unchanged. Otherwise they are
    /// dead-lettered with the reason.
    pub raw_foreign: bool,
    /// Whether a server is used although its eviction policy may delete streams.
    pub allow_eviction: bool,
    /// A new group with a wildcard also gets streams that only other programs have written: all keys of the database
    /// are scanned once when the group is declared. Otherwise a wildcard finds streams that Everbus has seen.
    pub adopt_streams: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            clock: Arc::new(SystemClock),
            user: None,
            password: None,
            tls: false,
            ca_file: None,
            timeout: Duration::from_secs(5),
            window: DEFAULT_WINDOW,
            stale_after: DEFAULT_STALE,
            stale_count: 100,
            keep_finished: Some(DEFAULT_KEPT),
            raw_foreign: false,
            allow_eviction: false,
            adopt_streams: false,
        }
    }
}

impl std::fmt::Debug for Options {
    /// Without secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options")
            .field("user", &self.user)
            .field("tls", &self.tls)
            .field("timeout", &self.timeout)
            .field("window", &self.window)
            .field("stale_after", &self.stale_after)
            .finish_non_exhaustive()
    }
}

/// A URL, taken apart.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) database: i64,
    /// A name that separates several buses in one database.
    pub(crate) space: String,
    pub(crate) tls: bool,
}

impl Address {
    /// The server, without secrets.
    pub(crate) fn server(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }
}

/// Names that a space must not have: keys of the engine begin with them, and would collide with keys of the space.
const OWN_NAMES: &[&str] = &[
    "st",
    "lease",
    "due",
    "fail",
    "inbox",
    "dead",
    "old",
    "again",
    "key",
    "kv",
    "id",
    "owner",
    "orphans",
    "handlers",
    "addressed",
    "notalone",
    "read",
];
const HINT: &str =
    "write it as redis://host:6379, redis://user:password@host:6379/0/space or rediss://host:6379";

/// Reads a URL: `redis://[[user]:password@]host[:port][/database[/space]]`.
pub(crate) fn parse(url: &str) -> Result<Address> {
    let bad = |what: &str| Err(Error::new(Code::InvalidUrl, what.to_owned()).hint(HINT));
    let Some((scheme, rest)) = url.split_once("://") else {
        return bad("the URL of a Redis server has no scheme");
    };
    let tls = match scheme {
        "redis" => false,
        "rediss" => true,
        _ => return bad("the URL does not begin with redis:// or rediss://"),
    };
    if rest.contains(['?', '#']) {
        return bad("settings after a question mark are not supported");
    }
    let (place, path) = rest.split_once('/').unwrap_or((rest, ""));
    let (secrets, place) = match place.rsplit_once('@') {
        Some((secrets, place)) => (Some(secrets), place),
        None => (None, place),
    };
    if place.contains(',') {
        return bad("several servers are named: a cluster or sentinels are not supported");
    }
    let (user, password) = match secrets.map(|secrets| (secrets, secrets.split_once(':'))) {
        None => (None, None),
        Some((_, Some((user, password)))) => (Some(user), Some(password)),
        // A word without a colon is the user. Some clients take it for the password.
        Some((user, None)) => (Some(user), None),
    };
    let unescaped = |text: Option<&str>| -> Result<Option<String>> {
        let text = text.filter(|text| !text.is_empty());
        text.map(unescape).transpose()
    };
    let (host, port) = match place.strip_prefix('[').and_then(|p| p.split_once(']')) {
        Some((host, "")) => (host, None),
        Some((host, port)) => (host, port.strip_prefix(':')),
        None => match place.rsplit_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (place, None),
        },
    };
    if host.is_empty() || host.contains(char::is_whitespace) {
        return bad("the URL names no host");
    }
    let Ok(port) = port.map_or(Ok(6379), str::parse::<u16>) else {
        return bad("the port is not a number");
    };
    let path = path.trim_end_matches('/');
    let (database, space) = path.split_once('/').unwrap_or((path, ""));
    let database = match database {
        "" => 0,
        number => match number.parse::<u16>() {
            Ok(number) => i64::from(number),
            Err(_) => return bad("the part after the host is not the number of a database"),
        },
    };
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    if space.len() > 32 || !space.chars().all(fits) {
        return bad(
            "the space after the database may only have letters, digits, - and _, and at most 32 of them",
        );
    }
    if OWN_NAMES.contains(&space) {
        return bad("the engine uses this name for its own keys: choose another space");
    }
    Ok(Address {
        host: host.to_owned(),
        port,
        user: unescaped(user)?,
        password: unescaped(password)?,
        database,
        space: space.to_owned(),
        tls,
    })
}

/// Decodes percent escapes, such as `%40` for @, because passwords may have any character.
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
        let (Some(high), Some(low)) = (rest.next(), rest.next()) else {
            return Err(bad());
        };
        let pair = [high, low];
        let hex = std::str::from_utf8(&pair).map_err(|_| bad())?;
        bytes.push(u8::from_str_radix(hex, 16).map_err(|_| bad())?);
    }
    String::from_utf8(bytes).map_err(|_| bad())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_taken_apart() {
        let plain = parse("redis://localhost").unwrap();
        assert_eq!(
            (plain.host.as_str(), plain.port, plain.database),
            ("localhost", 6379, 0)
        );
        let full = parse("rediss://me:a%40b@one:1/3/shop").unwrap();
        assert_eq!(
            (full.host.as_str(), full.port, full.database),
            ("one", 1, 3)
        );
        assert_eq!(full.user.as_deref(), Some("me"));
        assert_eq!(full.password.as_deref(), Some("a@b"));
        assert_eq!((full.space.as_str(), full.tls), ("shop", true));
        let only = parse("redis://:x@h:1").unwrap();
        assert_eq!((only.user, only.password.as_deref()), (None, Some("x")));
        assert_eq!(parse("redis://[::1]:7").unwrap().server(), "::1:7");
    }

    #[test]
    fn what_is_no_url_is_refused_with_a_hint_and_without_secrets() {
        for url in [
            "localhost:6379",
            "http://x",
            "redis://",
            "redis://me:secret@",
            "redis://h/a.b",
            "redis://h/0/a.b",
            "redis://h?x=1",
            "redis://me:%zz@h",
            "redis://h:secret",
            "redis://me:secret@a,b",
        ] {
            let error = parse(url).map(drop).unwrap_err();
            assert_eq!(error.code(), Code::InvalidUrl, "{url}");
            assert!(error.hint_text().is_some());
            assert!(!error.to_string().contains("secret"));
        }
    }
}
