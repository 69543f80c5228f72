//! The settings of a bus, their defaults and what is refused.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Clock, Code, Engine, Error, GroupName, Pattern, Result, Retention, RetryPolicy, StreamLimit,
    Streams, SystemClock,
};

use crate::admission::{Limits, PublishRate};
use crate::audit::note_config;
use crate::bus::Bus;
use crate::config::Config;
use crate::engines::{self, Durable, EngineOptions};
use crate::overflow::Overflow;
use crate::settings::Settings;
use crate::streams;

/// Longer durations are a mistake of units.
pub(crate) const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);
/// SQLite cannot store more in one row.
const LARGEST_PAYLOAD: usize = 512 * 1024 * 1024;
/// The largest payload that travels with its event, unless said otherwise.
pub(crate) const TRAVELS: usize = 1024 * 1024;
/// More handlers at once than this are a mistake.
const MOST_AT_ONCE: usize = 65_536;
/// Handlers of a group at once, unless a subscription says otherwise.
pub(crate) const DEFAULT_CONCURRENCY: usize = 16;

/// How a bus behaves, whatever its engine.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BusOptions {
    /// Where the time comes from; must be the clock the engine uses.
    pub clock: Arc<dyn Clock>,
    /// The retry policy of subscriptions that do not bring their own.
    pub retry: RetryPolicy,
    /// How long one attempt of a handler may take (30 s), unless its subscription says otherwise.
    pub timeout: Duration,
    /// How long [`Bus::shutdown`] waits for running handlers (30 s).
    pub shutdown_timeout: Duration,
    /// The largest payload that is taken, in bytes, whether it travels with its event or is moved to an
    /// object store. Unless set, it is what [`overflow`](Self::overflow) takes (64 MiB), or 1 MiB where
    /// nothing is moved.
    pub max_payload: Option<usize>,
    /// When the large parts of events go to an object store, and where.
    pub overflow: Overflow,
    /// How many deliveries of a group this bus holds at most, queued and running together. Unless
    /// set, eight for each handler that may run at once, and at least 4096.
    pub prefetch: Option<usize>,
    /// What is removed once nobody needs it any more, by itself and once a day
    /// ([`Retention::standard`]); `None` removes nothing.
    pub retention: Option<Retention>,
    /// How long after its start a bus first looks whether retention is due; one to five minutes, at
    /// random, unless set.
    pub retention_delay: Option<Duration>,
    /// How long the inbox remembers what was handled; for ever unless set. At least as long as the log
    /// keeps events, or one that comes again would be handled again.
    pub inbox_retention: Option<Duration>,
    /// An event that no process has had a handler for is dead-lettered after this long (24 h).
    pub no_handler_after: Duration,
    /// The source of events that name none: the service this bus belongs to.
    pub source: Option<Arc<str>>,
    /// Which event types are in which stream; one stream has everything unless declared otherwise.
    pub streams: Streams,
    /// The name of this worker in the record of failed attempts: `host/pid` unless set.
    pub worker_name: Arc<str>,
    /// How full streams may get, and what happens then; over what the declared streams say themselves.
    pub limits: Limits,
    /// How many events may be published in a second.
    pub publish_rate: Option<PublishRate>,
    /// Events of these types are skipped when they happened longer ago than this; zero is never.
    pub max_staleness: BTreeMap<String, Duration>,
    /// What the configuration file says of single consumers.
    pub(crate) consumers: Vec<ConsumerOverride>,
}

/// What the configuration file says of one consumer.
#[derive(Clone)]
pub(crate) struct ConsumerOverride {
    pub(crate) name: String,
    pub(crate) group: GroupName,
    pub(crate) pattern: Pattern,
    /// The file names a declared stream: every subscription that reads something of it is meant.
    pub(crate) whole_stream: bool,
    pub(crate) settings: Settings,
}

impl std::fmt::Debug for ConsumerOverride {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({} of {})", self.name, self.group, self.pattern)
    }
}

impl Default for BusOptions {
    fn default() -> Self {
        Self {
            clock: Arc::new(SystemClock),
            retry: RetryPolicy::default(),
            timeout: Duration::from_secs(30),
            shutdown_timeout: Duration::from_secs(30),
            max_payload: None,
            overflow: Overflow::default(),
            prefetch: None,
            retention: Some(Retention::standard()),
            retention_delay: None,
            inbox_retention: None,
            no_handler_after: Duration::from_secs(24 * 3600),
            source: None,
            streams: Streams::default(),
            worker_name: worker_name(),
            limits: Limits::default(),
            publish_rate: None,
            max_staleness: BTreeMap::new(),
            consumers: Vec::new(),
        }
    }
}

impl BusOptions {
    pub(crate) fn validate(&self) -> Result<()> {
        self.retry.validate()?;
        check_duration("the timeout", self.timeout)?;
        check_duration("no_handler_after", self.no_handler_after)?;
        self.limits.validate()?;
        self.limits.over(&self.streams)?;
        if let Some(rate) = &self.publish_rate {
            rate.validate()?;
        }
        if let Some(retention) = &self.retention_in_force() {
            retention.validate()?;
        }
        self.check_inbox_retention()?;
        for age in self.max_staleness.values() {
            check_staleness(*age)?;
        }
        if let Some(source) = &self.source
            && (source.is_empty() || source.len() > 255)
        {
            return Err(Error::new(
                Code::InvalidSetting,
                "the source has no or more than 255 bytes",
            ));
        }
        if self.worker_name.is_empty() || self.worker_name.len() > 255 {
            return Err(Error::new(
                Code::InvalidSetting,
                "the worker name has no or more than 255 bytes",
            )
            .hint("leave it out for host/pid"));
        }
        if self.shutdown_timeout > LONGEST {
            return Err(too_long("the shutdown timeout", self.shutdown_timeout));
        }
        self.overflow.validate()?;
        if let Some(limit) = self.max_payload
            && (limit == 0 || limit > LARGEST_PAYLOAD)
        {
            let what = format!("a payload limit of {limit} bytes");
            return Err(Error::new(Code::InvalidSetting, what).hint(format!(
                "the limit is between 1 and {LARGEST_PAYLOAD} bytes"
            )));
        }
        if self.prefetch.is_some_and(|n| n == 0 || n > 1_000_000) {
            return Err(Error::new(
                Code::InvalidSetting,
                format!("a prefetch of {}", self.prefetch.unwrap_or_default()),
            )
            .hint("it is between 1 and 1000000; 1 takes one event at a time"));
        }
        Ok(())
    }

    fn check_inbox_retention(&self) -> Result<()> {
        let Some(kept) = self.inbox_retention else {
            return Ok(());
        };
        let events = self.retention_in_force().and_then(|kept| kept.longest());
        if events.is_none_or(|events| events > kept) || kept > LONGEST {
            return Err(Error::new(
                Code::InvalidSetting,
                format!("the inbox would forget after {kept:?} what the log keeps longer"),
            )
            .hint(
                "give the bus a retention whose ages, of every stream, are no longer than this",
            ));
        }
        Ok(())
    }

    /// What is kept for how long: what was said of it, and the ages of the declared streams.
    pub(crate) fn retention_in_force(&self) -> Option<Retention> {
        let retention = self.retention.clone()?;
        Some(retention.with_streams(&self.streams))
    }

    pub(crate) fn prefetch_for(&self, concurrency: usize) -> usize {
        self.prefetch
            .unwrap_or_else(|| concurrency.saturating_mul(8).max(4096))
    }
}

/// The name of a worker that was given none: the host and the number of the process.
fn worker_name() -> Arc<str> {
    let host = rustix::system::uname();
    let host = host.nodename().to_string_lossy();
    let host: String = host.chars().take(200).collect();
    format!("{host}/{}", std::process::id()).into()
}

/// Refuses durations of zero and of more than a year.
pub(crate) fn check_duration(what: &str, duration: Duration) -> Result<()> {
    if duration.is_zero() {
        return Err(
            Error::new(Code::InvalidSetting, format!("{what} is zero")).hint("30 s is the default")
        );
    }
    if duration > LONGEST {
        return Err(too_long(what, duration));
    }
    Ok(())
}

fn too_long(what: &str, duration: Duration) -> Error {
    Error::new(
        Code::InvalidSetting,
        format!("{what} is longer than a year: {duration:?}"),
    )
    .hint("check the unit")
}

/// Zero is "never skip".
pub(crate) fn check_staleness(age: Duration) -> Result<()> {
    if age > LONGEST {
        return Err(too_long("max_staleness", age));
    }
    Ok(())
}

pub(crate) fn check_concurrency(concurrency: usize) -> Result<()> {
    if concurrency == 0 || concurrency > MOST_AT_ONCE {
        return Err(Error::new(
            Code::InvalidSetting,
            format!("a concurrency of {concurrency}"),
        )
        .hint(format!(
            "between 1 and {MOST_AT_ONCE} handlers run at once; the default is {DEFAULT_CONCURRENCY}"
        )));
    }
    Ok(())
}

/// Opens a [`Bus`] with settings of one's own.
///
/// ```
/// use std::time::Duration;
/// use everbus::{Bus, RetryPolicy};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> everbus::Result<()> {
/// let bus = Bus::builder()
///     .retry(RetryPolicy::default().max_retries(5))
///     .timeout(Duration::from_secs(5))
///     .open("memory:")
///     .await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "a builder does nothing until it is opened"]
pub struct BusBuilder {
    pub(crate) options: BusOptions,
    engine: EngineOptions,
    /// The store beside the broker.
    pub(crate) store: Option<String>,
    /// Of the configuration file.
    pub(crate) url: Option<String>,
    /// The configuration file, to put on record that it changed.
    pub(crate) config: Option<Box<Config>>,
}

impl BusBuilder {
    /// Where the time comes from (the operating system).
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.options.clock = Arc::new(clock);
        self
    }

    /// The retry policy of subscriptions that do not bring their own.
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.options.retry = policy;
        self
    }

    /// How long one attempt of a handler may take (30 s).
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.options.timeout = timeout;
        self
    }

    /// How long [`Bus::shutdown`] waits for running handlers (30 s).
    pub fn shutdown_timeout(mut self, timeout: Duration) -> Self {
        self.options.shutdown_timeout = timeout;
        self
    }

    /// The largest payload that is taken, in bytes, moved to an object store or not (64 MiB, or 1 MiB
    /// where there is none).
    pub fn max_payload(mut self, bytes: usize) -> Self {
        self.options.max_payload = Some(bytes);
        self
    }

    /// When the large parts of events go to an object store, and where.
    pub fn overflow(mut self, overflow: Overflow) -> Self {
        self.options.overflow = overflow;
        self
    }

    /// How many deliveries of a group this bus holds at most, queued and running together.
    pub fn prefetch(mut self, deliveries: usize) -> Self {
        self.options.prefetch = Some(deliveries);
        self
    }

    /// What is removed once nobody needs it any more ([`Retention::standard`]). It runs by itself, once
    /// a day: of several buses that share a store and say the same, one does it for all.
    ///
    /// ```
    /// use std::time::Duration;
    /// use everbus::{Bus, Retention};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> everbus::Result<()> {
    /// let month = Duration::from_secs(30 * 24 * 3600);
    /// let retention = Retention { max_age: Some(month), ..Retention::standard() };
    /// let bus = Bus::builder().retention(retention).open("memory:").await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn retention(mut self, retention: Retention) -> Self {
        self.options.retention = Some(retention);
        self
    }

    /// Removes nothing by itself: neither old dead letters nor events that have expired.
    pub fn keep_everything(mut self) -> Self {
        self.options.retention = None;
        self
    }

    /// How long after its start the bus first looks whether retention is due (one to five minutes, at
    /// random).
    pub fn retention_delay(mut self, delay: Duration) -> Self {
        self.options.retention_delay = Some(delay);
        self
    }

    /// How long the inbox remembers what was handled (for ever), seen to together with the
    /// [retention](Self::retention). At least as long as that keeps the events of every stream.
    pub fn inbox_retention(mut self, age: Duration) -> Self {
        self.options.inbox_retention = Some(age);
        self
    }

    /// After how long an event that no process has a handler for is dead-lettered (24 h).
    pub fn no_handler_after(mut self, after: Duration) -> Self {
        self.options.no_handler_after = after;
        self
    }

    /// The source of events that name none: the service this bus belongs to.
    pub fn source(mut self, service: impl Into<Arc<str>>) -> Self {
        self.options.source = Some(service.into());
        self
    }

    /// Which event types are in which stream. A type that none covers is refused when it is published
    /// ([`Code::NoStream`]), and so is a subscription to types that none covers.
    ///
    /// ```
    /// use everbus::{Bus, Stream, StreamLimit, Streams};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> everbus::Result<()> {
    /// let orders = Stream::new("ORDERS", ["order.>", "cart.*"])?.limit(StreamLimit::new(10_000));
    /// let users = Stream::new("USERS", ["user.>"])?;
    /// let bus = Bus::builder().streams(Streams::new([orders, users])?).open("memory:").await?;
    /// assert_eq!(&*bus.streams().route("order.placed")?.name, "ORDERS");
    /// # Ok(())
    /// # }
    /// ```
    pub fn streams(mut self, streams: Streams) -> Self {
        self.options.streams = streams;
        self
    }

    /// The name of this worker in the record of failed attempts (`host/pid`).
    pub fn worker_name(mut self, name: impl Into<Arc<str>>) -> Self {
        self.options.worker_name = name.into();
        self
    }

    /// How full a stream may get: the name of a declared stream, or where none is declared an event type,
    /// `orders.order.placed` or in the form `orders:order-placed`.
    pub fn stream_limit(mut self, stream: &str, limit: StreamLimit) -> Self {
        let limits = &mut self.options.limits.by_stream;
        limits.insert(streams::canonical(stream), limit);
        self
    }

    /// How full every stream may get that has no limit of its own.
    pub fn default_stream_limit(mut self, limit: StreamLimit) -> Self {
        self.options.limits.default = Some(limit);
        self
    }

    /// How many events may be published in a second.
    pub fn publish_rate(mut self, rate: PublishRate) -> Self {
        self.options.publish_rate = Some(rate);
        self
    }

    /// Skips events of a stream that happened longer ago than this, in every group; zero is never.
    pub fn max_staleness(mut self, stream: &str, age: Duration) -> Self {
        let ages = &mut self.options.max_staleness;
        ages.insert(streams::canonical(stream), age);
        self
    }

    /// How durable an acknowledged publish is, where the engine has a choice (`Full`).
    pub fn durability(mut self, durability: Durable) -> Self {
        self.engine.durability = durability;
        self
    }

    /// Whether a file that does not exist is created (yes).
    pub fn create(mut self, create: bool) -> Self {
        self.engine.create = create;
        self
    }

    /// How long an operation waits for another program that holds the file before it gives up with
    /// `FileBusy` (10 s). What was handled is not given up: its outcome is tried again.
    pub fn busy_timeout(mut self, timeout: Duration) -> Self {
        self.engine.busy_timeout = Some(timeout);
        self
    }

    /// Puts a store beside the broker, for an engine that moves events and cannot remember them: dead letters,
    /// failure texts, inbox, history and payload stages are kept there, and every event is copied into it.
    ///
    /// ```
    /// use everbus::Bus;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> everbus::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let file = dir.path().join("events.db").display().to_string();
    /// // Moved in memory, remembered in a file.
    /// let bus = Bus::builder().store(file).open("memory:").await?;
    /// bus.start().await?;
    /// let receipt = bus.publish(("order.placed", 1)).await?;
    /// let archived = async || bus.lookup()?.find(receipt.id()).await;
    /// while archived().await?.is_empty() {
    ///     tokio::task::yield_now().await;
    /// }
    /// # bus.shutdown().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn store(mut self, url: impl Into<String>) -> Self {
        self.store = Some(url.into());
        self
    }

    /// Opens the bus: `sqlite:FILE` or a bare path for a file, `memory:` for none.
    pub async fn open(self, url: impl AsRef<str>) -> Result<Bus> {
        self.options.validate()?;
        if let Some(timeout) = self.engine.busy_timeout.filter(|t| *t > LONGEST) {
            return Err(too_long("the busy timeout", timeout));
        }
        let clock = self.options.clock.clone();
        let mut engine = engines::open(url.as_ref(), self.engine.clone(), clock.clone()).await?;
        if let Some(store) = &self.store {
            engines::check_apart(url.as_ref(), store)?;
            let store = engines::open(store, self.engine, clock.clone()).await?;
            engine = crate::beside::compose(engine, store, clock).await?;
        }
        let bus = Bus::with_engine(engine, self.options)?;
        if let Some(config) = &self.config {
            note_config(bus.engine(), &bus.audit().operator(), config).await;
        }
        Ok(bus)
    }

    /// Builds the bus on an engine that is open already. The settings that concern opening a file
    /// have no effect, and the clock must be the engine's.
    pub fn with_engine(self, engine: Engine) -> Result<Bus> {
        Bus::with_engine(engine, self.options)
    }
}
