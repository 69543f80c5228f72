//! The URL and the options of the engine.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Clock, Code, Error, Result, SystemClock};
use tokio_postgres::config::{SslMode, TargetSessionAttrs};

/// The options of the engine, beside those in its URL:
/// `postgres://user:password@host:port/database?setting=value&…`.
///
/// | setting | default | |
/// |---|---|---|
/// | `sslmode` | `prefer` | `disable`; `prefer`: TLS if the server offers it, **else plain text**; `require`: TLS, without a check of the certificate; `verify-full`: TLS, and the certificate and the name of the host are checked |
/// | `sslrootcert` | those of the system | a PEM file with root certificates; needs `verify-full` |
/// | `schema` | `everbus` | where the tables are |
/// | `pool_size` | 10 | connections, besides one for notifications; effects use at most half of them |
/// | `pooler` | | `transaction` if the URL leads to a pooler in transaction mode |
/// | `direct_url` | | the URL of the server behind the pooler, with its special characters encoded |
///
/// Several hosts are separated by commas (`postgres://me@a:5432,b:5432/shop`): the one that takes writes is used, and
/// after a failover the new one. Other settings are those of `tokio_postgres`, such as `connect_timeout` and
/// `target_session_attrs` (`read-write` unless the URL says otherwise). Over a network that others share, use
/// `verify-full`: with the other modes, traffic can be read or changed on the way.
#[derive(Clone, Debug)]
pub struct Options {
    /// The clock for due times, leases and ages.
    pub clock: Arc<dyn Clock>,
    /// Whether the tables are made if they are not there.
    pub create: bool,
    /// How long a call waits for a connection and for an answer of the server, and how long an effect may take.
    pub patience: Duration,
    /// How long an engine must be gone before others take its work over. A shorter break of its connection
    /// changes nothing.
    pub owner_grace: Duration,
    /// How often the log is read if no notification comes.
    pub poll: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            clock: Arc::new(SystemClock),
            create: true,
            patience: Duration::from_secs(30),
            owner_grace: Duration::from_secs(3),
            poll: Duration::from_secs(1),
        }
    }
}

/// How the certificate of the server is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tls {
    /// No TLS.
    Off,
    /// Encrypted, without a check of the certificate.
    Unchecked,
    /// The certificate is checked, with the name of the host.
    Verified,
}

/// A parsed URL: `postgres://user:password@host:port/database?setting=value&…`.
///
/// Besides the settings of the client library: `sslmode` (`disable`, `prefer`, `require`, `verify-full`),
/// `sslrootcert` (a PEM file), `schema` (`everbus`), `pool_size` (10), `pooler=transaction` for a pooler in
/// transaction mode, and `direct_url` with the URL of the server behind it.
#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) config: tokio_postgres::Config,
    pub(crate) tls: Tls,
    pub(crate) root_certificate: Option<String>,
    pub(crate) schema: String,
    pub(crate) pool_size: usize,
    /// Connections go through a pooler that may give each transaction another server connection.
    pub(crate) pooled: bool,
    /// The server for the session (notifications and the lock of the owner), if it is not this one.
    pub(crate) direct: Option<Box<Target>>,
    /// The URL without its password, for messages.
    pub(crate) shown: String,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

const HINT: &str = "write postgres://user:password@host:5432/database?sslmode=verify-full";
const DEFAULT_POOL: usize = 10;

fn bad(what: impl Into<String>) -> Error {
    Error::new(Code::InvalidUrl, what).hint(HINT)
}

impl Target {
    pub(crate) fn parse(url: &str, options: &Options) -> Result<Self> {
        if !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
            return Err(bad("the URL begins with postgres:// or postgresql://"));
        }
        let (base, query) = url.split_once('?').unwrap_or((url, ""));
        let mut kept = Vec::new();
        let mut target = Self {
            config: tokio_postgres::Config::new(),
            tls: Tls::Unchecked,
            root_certificate: None,
            schema: "everbus".into(),
            pool_size: DEFAULT_POOL,
            pooled: false,
            direct: None,
            shown: without_password(base),
        };
        let mut ssl = SslMode::Prefer;
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            // Errors never show values: `direct_url` has a password, and an unescaped & or = in it would move a part
            // of the password into another setting.
            let (name, value) = pair
                .split_once('=')
                .ok_or_else(|| bad("a setting after the ? of the URL has no ="))?;
            let value = decoded(value).ok_or_else(|| {
                bad("a setting after the ? of the URL has a % that is not followed by two digits")
                    .hint("write % as %25, & as %26 and # as %23 in values")
            })?;
            match name {
                "sslmode" => {
                    (ssl, target.tls) = match &*value {
                        "disable" => (SslMode::Disable, Tls::Off),
                        "prefer" => (SslMode::Prefer, Tls::Unchecked),
                        "require" => (SslMode::Require, Tls::Unchecked),
                        "verify-full" => (SslMode::Require, Tls::Verified),
                        _ => {
                            return Err(bad("this sslmode does not exist")
                                .hint("sslmode is disable, prefer, require or verify-full"));
                        }
                    }
                }
                "sslrootcert" => target.root_certificate = Some(value),
                "schema" => target.schema = checked_schema(value)?,
                "pool_size" => {
                    let size = value.parse().ok().filter(|size| (2..=1000).contains(size));
                    target.pool_size =
                        size.ok_or_else(|| bad("pool_size is between 2 and 1000"))?;
                }
                "pooler" if value == "transaction" => target.pooled = true,
                "pooler" => return Err(bad("pooler can only be transaction")),
                "direct_url" => {
                    target.direct = Some(Box::new(Self::parse(&value, options)?));
                }
                _ => kept.push(pair),
            }
        }
        if target.root_certificate.is_some() && target.tls != Tls::Verified {
            return Err(
                bad("sslrootcert without sslmode=verify-full checks nothing")
                    .hint("add sslmode=verify-full, or leave sslrootcert out"),
            );
        }
        let url = if kept.is_empty() {
            base.to_owned()
        } else {
            format!("{base}?{}", kept.join("&"))
        };
        // The error of the library does not repeat the URL, so no password is shown.
        target.config = url.parse().map_err(|e: tokio_postgres::Error| {
            let cause = std::error::Error::source(&e).map(ToString::to_string);
            bad(format!(
                "the URL cannot be read: {}",
                cause.unwrap_or_default()
            ))
        })?;
        if target.config.get_hosts().is_empty() {
            return Err(bad("the URL names no host"));
        }
        if target.config.get_user().is_none() {
            return Err(bad("the URL names no user"));
        }
        target.config.ssl_mode(ssl);
        // Of several hosts only the primary is used, and after a failover the new one.
        if !kept
            .iter()
            .any(|pair| pair.starts_with("target_session_attrs="))
        {
            target
                .config
                .target_session_attrs(TargetSessionAttrs::ReadWrite);
        }
        if target.config.get_connect_timeout().is_none() {
            target
                .config
                .connect_timeout(options.patience.min(Duration::from_secs(10)));
        }
        target.config.keepalives_idle(Duration::from_secs(10));
        target.config.keepalives_interval(Duration::from_secs(5));
        target.config.keepalives_retries(3);
        target.config.tcp_user_timeout(Duration::from_secs(25));
        if target.config.get_application_name().is_none() {
            target.config.application_name("everbus");
        }
        Ok(target)
    }

    /// The server that a session can be kept with: the direct one, or this one unless it is a pooler.
    pub(crate) fn session(&self) -> Option<&Target> {
        match &self.direct {
            Some(direct) => Some(direct),
            None => (!self.pooled).then_some(self),
        }
    }
}

/// A schema is written into statements, so it has only characters that need no quotes.
fn checked_schema(name: String) -> Result<String> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let first = name.chars().next();
    let fine = first.is_some_and(|c| c.is_ascii_lowercase() || c == '_')
        && name.chars().all(plain)
        && name.len() <= 48
        && !name.starts_with("pg_")
        && name != "public";
    if fine {
        return Ok(name);
    }
    Err(bad("this schema cannot be used")
        .hint("a schema is 1 to 48 lower-case letters, digits and _, and not public"))
}

fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let pair = [rest.next()?, rest.next()?];
            let hex = std::str::from_utf8(&pair).ok()?;
            bytes.push(u8::from_str_radix(hex, 16).ok()?);
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok()
}

fn without_password(base: &str) -> String {
    let Some((scheme, rest)) = base.split_once("://") else {
        return base.to_owned();
    };
    match rest.rsplit_once('@') {
        Some((credentials, host)) => {
            let user = credentials.split(':').next().unwrap_or_default();
            format!("{scheme}://{user}@{host}")
        }
        None => base.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<Target> {
        Target::parse(url, &Options::default())
    }

    #[test]
    fn settings_are_read_and_the_password_is_never_shown() {
        let url = "postgres://me:s%40crét@db:5433/shop?sslmode=verify-full&schema=bus&pool_size=3\
                   &application_name=x";
        let target = parse(url).unwrap();
        assert_eq!(
            (target.tls, &*target.schema, target.pool_size),
            (Tls::Verified, "bus", 3)
        );
        assert_eq!(format!("{target:?}"), "postgres://me@db:5433/shop");
        assert_eq!(target.config.get_application_name(), Some("x"));
        let direct =
            "postgres://me@pool/d?pooler=transaction&direct_url=postgres%3A%2F%2Fme@db%2Fd";
        let target = parse(direct).unwrap();
        assert_eq!(target.session().unwrap().shown, "postgres://me@db/d");
        assert!(
            parse("postgres://me@pool/d?pooler=transaction")
                .unwrap()
                .session()
                .is_none()
        );
    }

    // conformance: engines/postgres-bad-url: a URL that cannot be used is refused with a hint and without its password
    #[test]
    fn what_is_wrong_is_said_without_the_password() {
        for url in [
            "postgres:db",
            "postgres://",
            "postgres://db/shop",
            "postgres://me:secret@db/shop?sslmode=maybe",
            "postgres://me:secret@db/shop?schema=a-b",
            "postgres://me:secret@db/shop?schema=public",
            "postgres://me:secret@db/shop?pool_size=0",
            "postgres://me:secret@db/shop?pooler=session",
            "postgres://me:secret@db:port/shop",
            "postgres://me:secret@db/shop?unknown=1",
            "postgres://me:secret@db/shop?sslrootcert=ca.pem",
            "postgres://me:secret@db/shop?sslmode=require&sslrootcert=ca.pem",
            "postgres://me@db/shop?direct_url=postgres://me:100%secret@db/shop",
            "postgres://me@db/shop?direct_url=postgres://me:a&secret@db/shop",
            "postgres://me@db/shop?sslmode=secret",
            "postgres://me@db/shop?schema=secret-1",
            "postgres://me@db/shop?connect_timeout=secret",
        ] {
            let error = parse(url).unwrap_err();
            assert_eq!(error.code(), Code::InvalidUrl, "{url}");
            assert!(error.hint_text().is_some());
            assert!(!format!("{error:?}").contains("secret"), "{error:?}");
        }
    }
}
