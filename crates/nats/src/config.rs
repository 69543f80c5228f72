//! The URL and the options of the engine.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Clock, Code, Error, Result, SystemClock};

/// How long the server recognises a repeated id, unless the options say otherwise.
pub const DEFAULT_WINDOW: Duration = Duration::from_secs(120);

/// How to connect, and what the streams that Everbus creates look like.
#[derive(Clone)]
#[non_exhaustive]
pub struct Options {
    /// The clock of time stamps. Leases and delays follow the clock of the server.
    pub clock: Arc<dyn Clock>,
    /// The user, if the URL names none.
    pub user: Option<String>,
    /// The password of the user.
    pub password: Option<String>,
    /// The token, instead of user and password.
    pub token: Option<String>,
    /// A credentials file (`.creds`), or the seed of an nkey (`SU…`).
    pub creds: Option<String>,
    /// TLS is required, also with `nats://`.
    pub tls: bool,
    /// A file with root certificates, beside those of the system.
    pub ca_file: Option<PathBuf>,
    /// How long an answer of the server may take.
    pub timeout: Duration,
    /// For how long the server recognises a repeated id, in streams that Everbus creates.
    pub window: Duration,
    /// The number of replicas of streams that declare no number of copies.
    pub replicas: u32,
    /// Allows a shorter `max_age` for an existing stream. The server then deletes the older events.
    pub allow_shorter_age: bool,
    /// Messages that are not of the stream's dialect are handed to handlers as they are. Otherwise they are
    /// dead-lettered with the reason.
    pub raw_foreign: bool,
    /// The operator vouches that the server runs with `sync_interval: always`, which it does not tell its
    /// clients: then an acknowledged event survives power loss.
    pub synced: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            clock: Arc::new(SystemClock),
            user: None,
            password: None,
            token: None,
            creds: None,
            tls: false,
            ca_file: None,
            timeout: Duration::from_secs(5),
            window: DEFAULT_WINDOW,
            replicas: 1,
            allow_shorter_age: false,
            raw_foreign: false,
            synced: false,
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
            .field("replicas", &self.replicas)
            .finish_non_exhaustive()
    }
}

/// A URL, taken apart.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Address {
    /// `scheme://host:port`, one for each server, without secrets.
    pub(crate) servers: Vec<String>,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) token: Option<String>,
    /// The path: it separates several buses on one server.
    pub(crate) space: String,
    pub(crate) tls: bool,
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.servers.join(","), self.space)
    }
}

const HINT: &str = "write it as nats://host:4222, nats://user:password@host:4222/space or \
                    tls://host:4222; several servers are separated by commas";

/// Reads a URL: `nats://[user:password@|token@]host[:port][,host…][/space]`.
pub(crate) fn parse(url: &str) -> Result<Address> {
    let bad = |what: &str| Err(Error::new(Code::InvalidUrl, what.to_owned()).hint(HINT));
    let Some((scheme, rest)) = url.split_once("://") else {
        return bad("the URL of a NATS server has no scheme");
    };
    let tls = match scheme {
        "nats" => false,
        "tls" => true,
        _ => return bad("the URL does not begin with nats:// or tls://"),
    };
    if rest.contains(['?', '#']) {
        return bad("settings after a question mark are not read");
    }
    // Each server of a list may have the scheme.
    let rest = rest.replace("nats://", "").replace("tls://", "");
    let (hosts, space) = match rest.split_once('/') {
        Some((hosts, space)) => (hosts, space.trim_end_matches('/')),
        None => (&rest[..], ""),
    };
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    if space.len() > 32 || !space.chars().all(fits) {
        return bad("the part after the slash is not up to 32 letters, digits, - and _");
    }
    let (mut user, mut password, mut token) = (None, None, None);
    let (mut servers, mut no_secrets) = (Vec::new(), true);
    for host in hosts.split(',') {
        let (secrets, host) = match host.rsplit_once('@') {
            Some((secrets, host)) => (Some(secrets), host.trim()),
            None => (None, host.trim()),
        };
        match secrets.map(|secrets| (secrets, secrets.split_once(':'))) {
            Some((_, Some((name, secret)))) => {
                (user, password) = (Some(unescape(name)?), Some(unescape(secret)?));
            }
            Some((secret, None)) => token = Some(unescape(secret)?),
            None => {}
        }
        if host.is_empty() || host.contains(char::is_whitespace) {
            return bad("the URL names no host");
        }
        // The error does not quote the part: if the password contains a comma, the part may be the password.
        let port = match host.rsplit_once(':') {
            Some((name, port)) if !name.contains(':') || name.ends_with(']') => Some(port),
            _ => None,
        };
        let is_bad = port.is_some_and(|port| port.parse::<u16>().is_err());
        let is_late = secrets.is_some() && !servers.is_empty() && no_secrets;
        if is_bad || is_late {
            let what = "a part of the URL between commas is no host and port";
            return Err(Error::new(Code::InvalidUrl, what)
                .hint("write a comma in a user or password as %2C; user and password stand before the first host"));
        }
        no_secrets &= secrets.is_none();
        servers.push(format!("{scheme}://{host}"));
    }
    Ok(Address {
        servers,
        user,
        password,
        token,
        space: space.to_owned(),
        tls,
    })
}

/// Decodes percent escapes (`%40` is `@`), so that passwords may contain any character.
fn unescape(text: &str) -> Result<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digits = [rest.next(), rest.next()];
        let value = match digits {
            [Some(high), Some(low)] => std::str::from_utf8(&[high, low])
                .ok()
                .and_then(|hex| u8::from_str_radix(hex, 16).ok()),
            _ => None,
        };
        match value {
            Some(value) => bytes.push(value),
            None => return Err(bad_escape()),
        }
    }
    String::from_utf8(bytes).map_err(|_| bad_escape())
}

fn bad_escape() -> Error {
    Error::new(
        Code::InvalidUrl,
        "user or password in the URL have an invalid %",
    )
    .hint("write a % as %25")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_taken_apart() {
        let plain = parse("nats://localhost:4222").unwrap();
        assert_eq!(plain.servers, ["nats://localhost:4222"]);
        assert_eq!((plain.user, plain.token, plain.tls), (None, None, false));
        let full = parse("tls://me:a%40b@one:1,two:2/shop").unwrap();
        assert_eq!(full.servers, ["tls://one:1", "tls://two:2"]);
        assert_eq!(full.user.as_deref(), Some("me"));
        assert_eq!(full.password.as_deref(), Some("a@b"));
        assert_eq!(format!("{full:?}"), "tls://one:1,tls://two:2/shop");
        assert_eq!((full.space.as_str(), full.tls), ("shop", true));
        let two = parse("nats://me:x@a:4222,nats://me:x@b:4222").unwrap();
        assert_eq!(two.servers, ["nats://a:4222", "nats://b:4222"]);
        assert_eq!(two.password.as_deref(), Some("x"));
        let token = parse("nats://secret@host").unwrap();
        assert_eq!(token.token.as_deref(), Some("secret"));
    }

    #[test]
    fn what_is_no_url_is_refused_with_a_hint_and_without_secrets() {
        for url in [
            "localhost:4222",
            "http://x",
            "nats://",
            "nats://me:secret@",
            "nats://h/a.b",
            "nats://h?x=1",
            "nats://me:%zz@h",
            "nats://me:secret,more@h",
            "nats://me:1234,secret@h",
            "nats://h:secret",
        ] {
            let error = parse(url).unwrap_err();
            assert_eq!(error.code(), Code::InvalidUrl, "{url}");
            assert!(error.hint_text().is_some());
            assert!(!format!("{error:?}").contains("secret"), "{error:?}");
        }
    }
}
