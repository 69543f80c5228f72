//! Which file or engine a command works on, and how it is opened.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use everbus::audit::Operator;
use everbus::config::{Broker, BrokerKind, config_used, redacted};
use everbus::overflow::{Objects, Overflow};
use everbus::{Bus, Config};
use everbus_core::{Code, Engine, Error, Streams};

use crate::args::{Args, OutputFormat};
use crate::output::escaped;
use crate::stop::{Outcome, Stop};
use crate::when;

const DEFAULT_FILE: &str = "everbus.db";

/// After this time the command prints what it waits for.
const PATIENCE: Duration = Duration::from_secs(1);

/// A command that reads from the store waits this long until the store has what the broker has.
const CATCHING_UP: Duration = Duration::from_secs(2);

/// What `--db`, `--broker`, `--store`, `--config` and the environment chose, and how it is opened.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    place: Place,
    /// The URL of the store beside it.
    store: Option<String>,
    /// The configuration file that applies.
    config: Option<PathBuf>,
    /// Only if the option was given.
    max_payload: Option<usize>,
    busy_timeout: Duration,
    /// Whether wildcards also find streams of other programs.
    adopts_streams: bool,
    /// Whether the message "still waiting" was printed, or must not be printed.
    told: Arc<AtomicBool>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    /// A file of the embedded engine.
    File(PathBuf),
    /// Another engine.
    Url(String),
}

impl Target {
    /// Chooses the target. A flag overrides the environment. Of two flags, or of two variables, the one that names
    /// the engine itself overrides the one that names a configuration file. The other settings of the configuration
    /// file always apply.
    pub(crate) fn choose(args: &Args) -> Outcome<Self> {
        let named = args.config.clone();
        let config = match named.or_else(|| variable("EVERBUS_CONFIG").map(PathBuf::from)) {
            // A configuration file that was named must be valid, even if an option overrides it.
            Some(path) => Some((path.clone(), Config::load(&path)?)),
            None => None,
        };
        let (place, from_config) = Place::choose(args, config.as_ref())?;
        // The store of a configuration belongs to its broker: beside another broker it would mix two logs.
        let configured = config.as_ref().filter(|_| from_config);
        let configured = configured.and_then(|(_, config)| config.store_url());
        let store = args.store.clone().or(configured);
        let store = store.or_else(|| {
            let store = variable("EVERBUS_STORE").filter(|_| !from_config);
            store.map(|url| url.to_string_lossy().into_owned())
        });
        let config = config.map(|(path, _)| path);
        if let Place::File(path) = &place {
            refuse_directory_name(path, "--db")?;
        }
        Ok(Self {
            place,
            store,
            config,
            max_payload: args.max_payload,
            busy_timeout: args.busy_timeout,
            adopts_streams: false,
            // With JSON output the command prints no message about waiting.
            told: Arc::new(AtomicBool::new(args.output == OutputFormat::Json)),
        })
    }

    /// One end of a bridge: a path, a URL, or a configuration file with the broker that it names.
    pub(crate) fn end(value: &str, store: Option<String>, args: &Args) -> Outcome<Self> {
        let is_config = [".yaml", ".yml"].iter().any(|end| value.ends_with(end));
        let (place, configured, config) = if is_config {
            let path = PathBuf::from(value);
            let config = Config::load(&path)?;
            let place = Place::from_config(&path, &config)?;
            let place = place.ok_or_else(|| {
                let hint = Some("add broker: {url: …} to it, or name the URL itself");
                Stop::usage(format!("{value} names no broker"), hint)
            })?;
            (place, config.store_url(), Some(path))
        } else if value.contains("://") || value.starts_with("sqlite:") || value == "memory:" {
            (Place::from_url(value)?, None, None)
        } else {
            (Place::File(value.into()), None, None)
        };
        if let Place::File(path) = &place {
            refuse_directory_name(path, "FILE")?;
        }
        Ok(Self {
            place,
            store: store.or(configured),
            config,
            max_payload: args.max_payload,
            busy_timeout: args.busy_timeout,
            adopts_streams: false,
            told: Arc::new(AtomicBool::new(args.output == OutputFormat::Json)),
        })
    }

    /// The same target, with the streams of other programs where the engine has them.
    pub(crate) fn with_all_streams(mut self) -> Self {
        self.adopts_streams = true;
        self
    }

    /// Its name without credentials. Two names are equal only if they name the same log.
    pub(crate) fn label(&self) -> String {
        match &self.place {
            Place::File(path) => {
                let whole = std::path::absolute(path).unwrap_or_else(|_| path.clone());
                format!("sqlite:{}", whole.display())
            }
            Place::Url(url) => without_access(url),
        }
    }

    /// Whether both name the same log, as far as their names say.
    pub(crate) fn is_same_as(&self, other: &Self) -> bool {
        match (&self.place, &other.place) {
            (Place::File(one), Place::File(two)) => {
                crate::files::are_same(one, two) || self.label() == other.label()
            }
            _ => self.label() == other.label(),
        }
    }

    /// Whether neither an option, nor the environment, nor a configuration named it.
    pub(crate) fn is_default(&self, args: &Args) -> bool {
        let named = args.db.is_some() || args.broker.is_some() || self.config.is_some();
        !named && self.place == Place::File(DEFAULT_FILE.into()) && variable("EVERBUS_DB").is_none()
    }

    /// An Everbus file, opened with the default settings.
    pub(crate) fn file(path: &Path) -> Self {
        Self {
            place: Place::File(path.to_path_buf()),
            store: None,
            config: None,
            max_payload: None,
            busy_timeout: everbus_sqlite::Options::default().busy_timeout,
            adopts_streams: false,
            told: Arc::new(AtomicBool::new(true)),
        }
    }
}

impl Place {
    /// The place, from the setting with the highest precedence, and whether that setting is the configuration file.
    fn choose(args: &Args, config: Option<&(PathBuf, Config)>) -> Outcome<(Self, bool)> {
        let given = |place| Ok((place, false));
        if let Some(path) = &args.db {
            return given(Self::File(path.clone()));
        }
        if let Some(url) = &args.broker {
            return given(Self::from_url(url)?);
        }
        let configured = || match config {
            Some((path, config)) => Self::from_config(path, config),
            None => Ok(None),
        };
        if args.config.is_some()
            && let Some(place) = configured()?
        {
            return Ok((place, true));
        }
        match (variable("EVERBUS_DB"), variable("EVERBUS_BROKER")) {
            (Some(_), Some(_)) => Err(Stop::usage(
                "EVERBUS_DB and EVERBUS_BROKER are both set",
                Some("unset one, or name the file with --db"),
            )),
            (Some(path), None) => given(Self::File(path.into())),
            (None, Some(url)) => given(Self::from_url(&url.to_string_lossy())?),
            (None, None) => match configured()? {
                Some(place) => Ok((place, true)),
                None => given(Self::File(DEFAULT_FILE.into())),
            },
        }
    }

    /// The broker of a configuration file, if it names one.
    fn from_config(path: &Path, config: &Config) -> Outcome<Option<Self>> {
        let Some(broker) = &config.broker else {
            return Ok(None);
        };
        if broker.kind.is_available() {
            return Self::from_url(broker.url.reveal()).map(Some);
        }
        let what = format!(
            "{} names a {} broker, and this build has no engine for it",
            path.display(),
            broker.kind
        );
        let hint = match broker.kind {
            BrokerKind::Nats => "build with `--features nats`, or name a file with --db",
            BrokerKind::Redis => "build with `--features redis`, or name a file with --db",
            _ => "use type sqlite there, or name a file with --db",
        };
        Err(Error::new(Code::InvalidUrl, what).hint(hint).into())
    }

    /// Whether it is this broker of a configuration file.
    fn is(&self, broker: &Broker) -> bool {
        Self::from_url(broker.url.reveal()).is_ok_and(|place| place == *self)
    }

    fn from_url(url: &str) -> Outcome<Self> {
        if url.starts_with("memory:") {
            return Err(Stop::Failed(
                Error::new(
                    Code::InvalidUrl,
                    "events in memory live and die with the program that holds them",
                )
                .hint("name a file: --db everbus.db"),
            ));
        }
        // A file may also be given as a URL; the library checks its form.
        let path = url.strip_prefix("sqlite:").filter(|p| !p.contains('?'));
        match path.map(|p| p.strip_prefix("//").unwrap_or(p)) {
            Some(path) if !path.is_empty() && path != ":memory:" => Ok(Self::File(path.into())),
            _ => Ok(Self::Url(url.to_owned())),
        }
    }
}

impl Target {
    /// The file, for commands that work on files.
    pub(crate) fn path(&self) -> Outcome<&Path> {
        if self.store.is_some() {
            return Err(Stop::usage(
                "this works on one file, and a store beside the broker is named",
                Some("name the file with --db and leave the store out"),
            ));
        }
        match &self.place {
            Place::File(path) => Ok(path),
            Place::Url(url) => Err(Stop::Failed(
                Error::new(
                    Code::Unsupported,
                    format!("{} is not a file", redacted(url)),
                )
                .hint("name the file with --db"),
            )),
        }
    }

    /// The URL, unless it is a file.
    pub(crate) fn url(&self) -> Option<&str> {
        match &self.place {
            Place::File(_) => None,
            Place::Url(url) => Some(url),
        }
    }

    /// Whether the configuration file names this place.
    fn is_configured(&self) -> bool {
        let config = self.load_config().ok().flatten();
        let broker = config.and_then(|config| config.broker);
        broker.is_some_and(|broker| self.place.is(&broker))
    }

    /// The options that name this target again, for suggested commands.
    pub(crate) fn as_option(&self) -> String {
        use crate::output::shell_word;
        let config = self
            .config
            .as_ref()
            .map(|path| format!("--config {}", shell_word(&path.to_string_lossy())));
        let configured = self.is_configured();
        let place = match &self.place {
            Place::File(path) => Some(format!("--db {}", shell_word(&path.to_string_lossy()))),
            // A URL may hold a password, so the configuration file that names it is shown instead.
            Place::Url(_) if configured => None,
            Place::Url(url) => Some(format!("--broker {}", shell_word(&redacted(url)))),
        };
        // So is the store.
        let store = self.store.as_ref().filter(|_| !configured);
        let store = store.map(|url| format!("--store {}", shell_word(&redacted(url))));
        let all: Vec<String> = config.into_iter().chain(place).chain(store).collect();
        all.join(" ")
    }

    /// Opens an existing file. A command that reads must not leave an empty file behind.
    pub(crate) async fn open_existing(&self) -> Outcome<Engine> {
        self.open(false).await
    }

    /// Opens a bus that publishes; a file is created if it is not there.
    pub(crate) async fn open_bus(&self) -> Outcome<Bus> {
        self.bus_on(self.open(true).await?).await
    }

    /// Opens a bus for a server; a file is created if it is not there. Unlike a command, a server applies the
    /// retention of its configuration, or the default.
    pub(crate) async fn open_serving_bus(&self) -> Outcome<Bus> {
        let engine = self.open(true).await?;
        let mut builder = Bus::builder();
        if let Some(bytes) = self.max_payload {
            builder = builder.max_payload(bytes);
        }
        if let Some(config) = self.load_config()? {
            builder = builder.config(&config);
            config_used(&engine, &Operator::current(), &config).await?;
        }
        Ok(builder.with_engine(engine)?)
    }

    /// Opens a bus on what exists.
    pub(crate) async fn open_existing_bus(&self) -> Outcome<Bus> {
        self.bus_on(self.open(false).await?).await
    }

    /// A bus on an open engine, with the limits of the configuration.
    pub(crate) async fn bus_on(&self, engine: Engine) -> Outcome<Bus> {
        // A command has no retention of its own: the programs that use the file set it, or the configuration.
        let mut builder = Bus::builder().keep_everything();
        if let Some(bytes) = self.max_payload {
            builder = builder.max_payload(bytes);
        }
        // The stream limits and the rate of the configuration apply to every publisher.
        let config = self.load_config()?;
        if let Some(config) = &config {
            builder = builder.config(config);
        }
        if let Some(config) = &config {
            config_used(&engine, &Operator::current(), config).await?;
        }
        Ok(builder.with_engine(engine)?)
    }

    /// The largest payload that may be published, if it was given.
    pub(crate) fn max_payload(&self) -> Option<usize> {
        self.max_payload
    }

    /// Where the objects of the engine's large events are.
    pub(crate) fn objects(&self, engine: &Engine) -> Outcome<Option<Arc<Objects>>> {
        Ok(Objects::open(engine, &self.overflow()?)?)
    }

    /// Where large payloads go, from the configuration.
    pub(crate) fn overflow(&self) -> Outcome<Overflow> {
        let configured = self.load_config()?.and_then(|config| config.overflow);
        Ok(configured.unwrap_or_default())
    }

    /// Which event types are in which stream, from the configuration.
    pub(crate) fn streams(&self) -> Outcome<Streams> {
        match self.load_config()? {
            Some(config) => Ok(config.limits.over(&config.streams)?),
            None => Ok(Streams::default()),
        }
    }

    /// Whether a configuration file applies.
    pub(crate) fn has_config(&self) -> bool {
        self.config.is_some()
    }

    pub(crate) fn load_config(&self) -> Outcome<Option<Config>> {
        Ok(self.config.as_ref().map(Config::load).transpose()?)
    }

    /// How long to wait for another program that holds the file.
    pub(crate) fn busy_timeout(&self) -> Duration {
        self.busy_timeout
    }

    async fn open(&self, create: bool) -> Outcome<Engine> {
        match (&self.place, &self.store) {
            (Place::File(path), None) => {
                let path = path.clone();
                let options = everbus_sqlite::Options {
                    create,
                    busy_timeout: self.busy_timeout,
                    ..everbus_sqlite::Options::default()
                };
                let opened = blocking(move || everbus_sqlite::open(&path, options));
                Ok(self.patiently(opened).await?)
            }
            (place, store) => {
                let mut builder = Bus::builder()
                    .create(create)
                    .busy_timeout(self.busy_timeout);
                if let Some(store) = store {
                    builder = builder.store(store);
                }
                // The credentials and settings of a configured broker belong to it: another server must not get them.
                let broker = self.load_config()?.and_then(|config| config.broker);
                let broker = broker.filter(|broker| place.is(broker));
                let mut access = broker.map(|broker| broker.access).unwrap_or_default();
                access.redis.adopt_streams |= self.adopts_streams;
                builder = builder.access(access);
                let url = match place {
                    Place::File(path) => format!("sqlite:{}", path.to_string_lossy()),
                    Place::Url(url) => url.clone(),
                };
                let bus = builder.open(url).await?;
                let engine = bus.engine().clone();
                if !create {
                    catch_up(&engine).await?;
                }
                Ok(engine)
            }
        }
    }

    /// Waits for work that writes to the file. If it takes long, prints a message once: most likely another program
    /// holds a lock on the file.
    pub(crate) async fn patiently<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        tokio::select! {
            biased;
            done = &mut work => return done,
            () = tokio::time::sleep(PATIENCE) => {}
        }
        if !self.told.swap(true, Ordering::Relaxed) {
            let what = match &self.place {
                Place::File(path) => path.to_string_lossy().into_owned(),
                Place::Url(url) => redacted(url),
            };
            let line = format!(
                "waiting for {}: another program may hold it (for up to {}, see --busy-timeout)\n",
                escaped(&what),
                when::lasting(self.busy_timeout)
            );
            // If standard error is closed, there is no reader.
            let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
        }
        work.await
    }
}

/// Copies events that only the broker has into the store, and continues while the command runs. Reports how many
/// are still missing after a while.
async fn catch_up(engine: &Engine) -> Outcome {
    let Some(archive) = &engine.background else {
        return Ok(());
    };
    tokio::spawn(archive.run());
    let give_up = tokio::time::Instant::now() + CATCHING_UP;
    while let Some(lag) = everbus::archive_lag(engine).await? {
        let behind = lag.unsettled();
        if behind == 0 {
            break;
        }
        if tokio::time::Instant::now() > give_up {
            let line = format!(
                "note: the store has not got the last {} yet\n",
                crate::output::counted(behind, "event")
            );
            let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

/// A URL without credentials and settings. The schema stays, because another schema is another log.
fn without_access(url: &str) -> String {
    let (base, query) = url.split_once('?').unwrap_or((url, ""));
    let (scheme, rest) = base.split_once("://").unwrap_or(("", base));
    let place = rest.rsplit_once('@').map_or(rest, |(_, place)| place);
    let schema = query.split('&').find(|pair| pair.starts_with("schema="));
    let schema = schema
        .map(|schema| format!("?{schema}"))
        .unwrap_or_default();
    format!("{scheme}://{place}{schema}")
}

/// A variable of the environment that is set and not empty.
fn variable(name: &str) -> Option<std::ffi::OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// Refuses a name that can only be that of a directory.
pub(crate) fn refuse_directory_name(path: &Path, example: &str) -> Outcome {
    let text = path.to_string_lossy();
    let is_directory = path.is_dir();
    if !is_directory && !text.ends_with(std::path::is_separator) {
        return Ok(());
    }
    let what = if is_directory { "is" } else { "names" };
    let file = path.join(DEFAULT_FILE);
    let file = crate::output::shell_word(&file.to_string_lossy());
    Err(
        Error::new(Code::NotAFile, format!("{text} {what} a directory"))
            .hint(format!("name a file in it: {example} {file}"))
            .into(),
    )
}

/// Runs blocking work off the executor.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> everbus_core::Result<T> + Send + 'static,
) -> everbus_core::Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(Error::new(Code::Internal, "a task ended early").caused_by(error)),
    }
}

/// Closes an engine after the command is done; what it printed stands either way.
pub(crate) async fn close(engine: &Engine) {
    let close = tokio::time::timeout(Duration::from_secs(10), engine.broker.close());
    if let Ok(Err(error)) = close.await {
        tracing::warn!(%error, "the file did not close cleanly");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sqlite_url_names_its_file() {
        let file = |path: &str| Place::File(path.into());
        assert_eq!(Place::from_url("sqlite:a/b.db").unwrap(), file("a/b.db"));
        assert_eq!(Place::from_url("sqlite://a/b.db").unwrap(), file("a/b.db"));
        assert_eq!(Place::from_url("sqlite:///a.db").unwrap(), file("/a.db"));
        assert!(Place::from_url("memory:").is_err());
        let named = without_access("postgres://me:se@cret@db:5432/shop?pool_size=2&schema=a");
        assert_eq!(named, "postgres://db:5432/shop?schema=a");
        assert!(matches!(
            Place::from_url("kafka://h").unwrap(),
            Place::Url(_)
        ));
    }
}
