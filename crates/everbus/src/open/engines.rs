//! Opens the engine of a URL: the only place that knows which engines exist.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Clock, Code, Engine, Error, Result};
#[cfg(feature = "sqlite")]
pub use everbus_sqlite::Durable;

use crate::access::Access;
use crate::url::split_scheme;

/// The settings that only some engines have.
#[derive(Clone, Debug)]
pub(crate) struct EngineOptions {
    #[cfg(feature = "sqlite")]
    pub(crate) durability: Durable,
    pub(crate) create: bool,
    /// `None`: the default of the engine.
    pub(crate) busy_timeout: Option<Duration>,
    /// How to get access to a server.
    pub(crate) access: Access,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            #[cfg(feature = "sqlite")]
            durability: Durable::default(),
            create: true,
            busy_timeout: None,
            access: Access::default(),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Target {
    Memory,
    Sqlite(PathBuf),
    /// The whole URL.
    Kafka(String),
    /// The whole URL.
    Nats(String),
    /// The whole URL.
    Postgres(String),
    /// The whole URL.
    Redis(String),
}

pub(crate) async fn open(
    url: &str,
    options: EngineOptions,
    clock: Arc<dyn Clock>,
) -> Result<Engine> {
    match parse(url)? {
        Target::Memory => Ok(everbus_memory::open(everbus_memory::Options { clock })),
        #[cfg(feature = "sqlite")]
        Target::Sqlite(path) => open_sqlite(path, options, clock).await,
        #[cfg(not(feature = "sqlite"))]
        Target::Sqlite(_) => {
            let _ = options;
            Err(not_built("sqlite"))
        }
        #[cfg(feature = "kafka")]
        Target::Kafka(url) => {
            let options = kafka_options(options.access, clock);
            Box::pin(everbus_kafka::open(&url, options)).await
        }
        #[cfg(not(feature = "kafka"))]
        Target::Kafka(_) => Err(not_built("kafka")),
        #[cfg(feature = "nats")]
        Target::Nats(url) => {
            let options = nats_options(options.access, clock);
            Box::pin(everbus_nats::open(&url, options)).await
        }
        #[cfg(not(feature = "nats"))]
        Target::Nats(_) => Err(not_built("nats")),
        #[cfg(feature = "postgres")]
        Target::Postgres(url) => {
            let options = everbus_postgres::Options {
                clock,
                create: options.create,
                ..everbus_postgres::Options::default()
            };
            Box::pin(everbus_postgres::open(&url, options)).await
        }
        #[cfg(not(feature = "postgres"))]
        Target::Postgres(_) => Err(not_built("postgres")),
        #[cfg(feature = "redis")]
        Target::Redis(url) => {
            let options = redis_options(options.access, clock);
            Box::pin(everbus_redis::open(&url, options)).await
        }
        #[cfg(not(feature = "redis"))]
        Target::Redis(_) => Err(not_built("redis")),
    }
}

#[cfg(feature = "sqlite")]
async fn open_sqlite(
    path: PathBuf,
    options: EngineOptions,
    clock: Arc<dyn Clock>,
) -> Result<Engine> {
    let defaults = everbus_sqlite::Options::default();
    let options = everbus_sqlite::Options {
        clock,
        durability: options.durability,
        create: options.create,
        busy_timeout: options.busy_timeout.unwrap_or(defaults.busy_timeout),
        ..defaults
    };
    tokio::task::spawn_blocking(move || everbus_sqlite::open(&path, options))
        .await
        .map_err(|e| Error::new(Code::Internal, "opening the file failed").caused_by(e))?
}

#[cfg(feature = "nats")]
fn nats_options(access: Access, clock: Arc<dyn Clock>) -> everbus_nats::Options {
    let mut options = everbus_nats::Options::default();
    options.clock = clock;
    options.user = access.user;
    options.password = access.password;
    options.token = access.token;
    options.creds = access.creds;
    options.tls = access.tls;
    options.ca_file = access.ca_file;
    options.raw_foreign = access.raw_foreign;
    options.synced = access.synced;
    options.allow_shorter_age = access.allow_shorter_age;
    if let Some(copies) = access.copies {
        options.replicas = copies;
    }
    options
}

#[cfg(feature = "redis")]
fn redis_options(access: Access, clock: Arc<dyn Clock>) -> everbus_redis::Options {
    let mut options = everbus_redis::Options::default();
    options.clock = clock;
    options.user = access.user;
    options.password = access.password;
    options.tls = access.tls;
    options.ca_file = access.ca_file;
    options.raw_foreign = access.raw_foreign;
    let own = access.redis;
    options.window = own.window.unwrap_or(options.window);
    options.stale_after = own.stale_after.unwrap_or(options.stale_after);
    options.stale_count = own.stale_count.unwrap_or(options.stale_count);
    options.keep_finished = own.keep_finished.or(options.keep_finished);
    options.timeout = own.timeout.unwrap_or(options.timeout);
    options.allow_eviction = own.allow_eviction;
    options.adopt_streams = own.adopt_streams;
    options
}

#[cfg(feature = "kafka")]
fn kafka_options(access: Access, clock: Arc<dyn Clock>) -> everbus_kafka::Options {
    let mut options = everbus_kafka::Options::default();
    options.clock = clock;
    options.user = access.user;
    options.password = access.password;
    options.mechanism = access.sasl;
    options.tls = access.tls;
    options.ca_file = access.ca_file;
    options.raw_foreign = access.raw_foreign;
    options.allow_shorter_age = access.allow_shorter_age;
    options.copies = access.copies;
    options
}

/// The error for a URL whose engine is not part of this build.
#[cfg(not(all(
    feature = "sqlite",
    feature = "kafka",
    feature = "nats",
    feature = "postgres",
    feature = "redis"
)))]
fn not_built(feature: &str) -> Error {
    let what = format!("this build has no {feature} engine");
    let hint =
        format!("build with `--features {feature}`, or `--features engines` for all of them");
    Error::new(Code::Unsupported, what).hint(hint)
}

/// Refuses access settings that the engine of a URL would ignore: a user who asks for TLS must not get a connection without it.
pub(crate) fn check_access(url: &str, access: &Access) -> Result<()> {
    if !matches!(parse(url)?, Target::Postgres(_)) {
        return Ok(());
    }
    let texts = [&access.user, &access.password, &access.token, &access.creds];
    let given = texts.iter().any(|text| text.is_some());
    if !access.tls && access.ca_file.is_none() && !given {
        return Ok(());
    }
    Err(Error::new(
        Code::InvalidSetting,
        "the access to PostgreSQL stands in its URL, not beside it",
    )
    .hint("write postgres://user:password@host/database?sslmode=verify-full&sslrootcert=ca.pem"))
}

/// Refuses a store that is the file of the broker: that file has a history already.
pub(crate) fn check_apart(broker: &str, store: &str) -> Result<()> {
    let (Target::Sqlite(broker), Target::Sqlite(store)) = (parse(broker)?, parse(store)?) else {
        return Ok(());
    };
    let whole = |path: &PathBuf| path.canonicalize().or_else(|_| std::path::absolute(path));
    match (whole(&broker), whole(&store)) {
        (Ok(broker), Ok(store)) if broker == store => Err(Error::new(
            Code::InvalidSetting,
            format!("{} is the broker and the store beside it", broker.display()),
        )
        .hint("a file remembers its own events: leave the store out, or name another file")),
        _ => Ok(()),
    }
}

const HINT: &str = "use sqlite:FILE or a path for a file, memory: for none, nats://HOST, redis://HOST, kafka://HOST or postgres://HOST/DATABASE for a server";

fn parse(url: &str) -> Result<Target> {
    let bad = |what: String| Err(Error::new(Code::InvalidUrl, what).hint(HINT));
    if url.is_empty() {
        return bad("the URL is empty".into());
    }
    let Some((scheme, rest)) = split_scheme(url) else {
        return Ok(Target::Sqlite(url.into()));
    };
    match scheme {
        "memory" if matches!(rest, "" | "//") => Ok(Target::Memory),
        "memory" => bad(format!(
            "memory: takes nothing after the colon, got {rest:?}"
        )),
        "sqlite" => {
            let path = rest.strip_prefix("//").unwrap_or(rest);
            if path.is_empty() {
                return bad("sqlite: needs the name of a file".into());
            }
            if path == ":memory:" {
                return bad("an SQLite database in memory survives nothing".into());
            }
            if path.contains('?') {
                return bad(format!("settings after ? are not read: {url:?}"));
            }
            Ok(Target::Sqlite(path.into()))
        }
        "kafka" => Ok(Target::Kafka(url.to_owned())),
        "nats" | "tls" => Ok(Target::Nats(url.to_owned())),
        "postgres" | "postgresql" => Ok(Target::Postgres(url.to_owned())),
        "redis" | "rediss" => Ok(Target::Redis(url.to_owned())),
        _ => bad(format!("this build has no engine for {scheme:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_and_paths_are_understood() {
        for (url, path) in [
            ("sqlite:shop.db", "shop.db"),
            ("sqlite://shop.db", "shop.db"),
            ("sqlite:///var/lib/shop.db", "/var/lib/shop.db"),
            ("sqlite:/var/lib/shop.db", "/var/lib/shop.db"),
            ("shop.db", "shop.db"),
            ("./a:b.db", "./a:b.db"),
            ("C:\\shop.db", "C:\\shop.db"),
        ] {
            assert_eq!(parse(url).unwrap(), Target::Sqlite(path.into()), "{url}");
        }
        assert_eq!(parse("memory:").unwrap(), Target::Memory);
    }

    // conformance: engines/postgres-access: TLS and credentials beside the URL of PostgreSQL are refused, not ignored
    #[test]
    fn access_that_would_be_ignored_is_refused() {
        let (mut tls, mut user) = (Access::default(), Access::default());
        tls.tls = true;
        user.user = Some("me".into());
        for access in [&tls, &user] {
            let e = check_access("postgres://me@db/shop", access).unwrap_err();
            assert_eq!(e.code(), Code::InvalidSetting);
            assert!(e.hint_text().unwrap().contains("sslmode"));
            check_access("nats://db", access).unwrap();
        }
        check_access("postgres://me@db/shop", &Access::default()).unwrap();
    }

    #[test]
    fn what_names_no_engine_is_refused_with_a_hint() {
        for url in [
            "",
            "sqlite:",
            "sqlite::memory:",
            ":memory:",
            "memory:x",
            "amqp://host:5672",
            "sqlite:a.db?mode=ro",
        ] {
            let e = parse(url).unwrap_err();
            assert_eq!(e.code(), Code::InvalidUrl, "{url}");
            assert!(e.hint_text().is_some());
        }
    }
}
