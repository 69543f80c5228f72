//! The builder of a bus.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Clock, Durability, Engine, Result, Retention, RetryPolicy, StreamLimit, Streams,
};

use crate::access::Access;
use crate::admission::PublishRate;
#[cfg(feature = "config")]
use crate::config::{Config, note_config};
use crate::environment::LONGEST;
#[cfg(feature = "sqlite")]
use crate::open::engines::Durable;
use crate::open::engines::{self, EngineOptions};
use crate::overflow::Overflow;
use crate::runtime::bus::Bus;
use crate::runtime::options::{BusOptions, too_long};
use crate::streams;

/// Opens a [`Bus`] with custom settings.
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
    /// The URL of the configuration file.
    #[cfg(feature = "config")]
    pub(crate) url: Option<String>,
    /// The configuration file, to record its changes.
    #[cfg(feature = "config")]
    pub(crate) config: Option<Box<Config>>,
}

impl BusBuilder {
    /// Sets the clock (the operating system's).
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.options.clock = Arc::new(clock);
        self
    }

    /// The retry policy of subscriptions that give none.
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

    /// The largest accepted payload in bytes, in an object store or not (64 MiB, or 1 MiB without an object
    /// store).
    pub fn max_payload(mut self, bytes: usize) -> Self {
        self.options.max_payload = Some(bytes);
        self
    }

    /// When and where the large parts of events go to an object store.
    pub fn overflow(mut self, overflow: Overflow) -> Self {
        self.options.overflow = overflow;
        self
    }

    /// How many deliveries of a group this bus holds at most, queued and running together.
    pub fn prefetch(mut self, deliveries: usize) -> Self {
        self.options.prefetch = Some(deliveries);
        self
    }

    /// The retention policy ([`Retention::standard`]); it removes only what no group needs any more. It
    /// runs by itself, once a day: of several buses that share a store and a policy, one runs it for all.
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

    /// Removes nothing automatically: neither old dead letters nor expired events.
    pub fn keep_everything(mut self) -> Self {
        self.options.retention = None;
        self
    }

    /// How long after its start the bus first checks whether retention is due (a random time of one to five
    /// minutes).
    pub fn retention_delay(mut self, delay: Duration) -> Self {
        self.options.retention_delay = Some(delay);
        self
    }

    /// How long the inbox remembers handled events (for ever); applied together with the
    /// [retention](Self::retention). It must be at least as long as the retention keeps the events of every
    /// stream.
    pub fn inbox_retention(mut self, age: Duration) -> Self {
        self.options.inbox_retention = Some(age);
        self
    }

    /// After how long an event without a handler in any process is dead-lettered (24 h).
    pub fn no_handler_after(mut self, after: Duration) -> Self {
        self.options.no_handler_after = after;
        self
    }

    /// The source of events that name none: the name of this service.
    pub fn source(mut self, service: impl Into<Arc<str>>) -> Self {
        self.options.source = Some(service.into());
        self
    }

    /// Which event types are in which stream. Publishing a type that no stream covers is refused
    /// ([`Code::NoStream`](crate::Code::NoStream)), and so is subscribing to one.
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

    /// The size limit of a stream: the name of a declared stream, or without declared streams an event
    /// type, `orders.order.placed` or in the form `orders:order-placed`.
    pub fn stream_limit(mut self, stream: &str, limit: StreamLimit) -> Self {
        let limits = &mut self.options.limits.by_stream;
        limits.insert(streams::canonical(stream), limit);
        self
    }

    /// The size limit of every stream without its own limit.
    pub fn default_stream_limit(mut self, limit: StreamLimit) -> Self {
        self.options.limits.default = Some(limit);
        self
    }

    /// The rate limit for publishing, in events per second.
    pub fn publish_rate(mut self, rate: PublishRate) -> Self {
        self.options.publish_rate = Some(rate);
        self
    }

    /// Skips events of a stream that happened longer ago than this, in every group; zero: never.
    pub fn max_staleness(mut self, stream: &str, age: Duration) -> Self {
        let ages = &mut self.options.max_staleness;
        ages.insert(streams::canonical(stream), age);
        self
    }

    /// How durable an acknowledged publish is, where the engine has a choice (`Full`).
    #[cfg(feature = "sqlite")]
    pub fn durability(mut self, durability: Durable) -> Self {
        self.engine.durability = durability;
        self
    }

    /// Refuses to open an engine that is less durable than this ([`Code::NotDurable`](crate::Code::NotDurable)).
    /// The error names the settings of the server that are to be changed.
    ///
    /// ```
    /// use everbus::{Bus, Code, Durability};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let opened = Bus::builder().require_durability(Durability::PowerLoss).open("memory:").await;
    /// assert_eq!(opened.unwrap_err().code(), Code::NotDurable);
    /// # }
    /// ```
    pub fn require_durability(mut self, durability: Durability) -> Self {
        self.options.require_durability = Some(durability);
        self
    }

    /// Whether a file that does not exist is created (yes).
    pub fn create(mut self, create: bool) -> Self {
        self.engine.create = create;
        self
    }

    /// How long an operation waits for another program that holds the file before it fails with `FileBusy`
    /// (10 s). Outcomes of handlers are not given up: they are tried again.
    pub fn busy_timeout(mut self, timeout: Duration) -> Self {
        self.engine.busy_timeout = Some(timeout);
        self
    }

    /// Sets how to get access to a server: credentials, TLS.
    pub fn access(mut self, access: Access) -> Self {
        self.engine.access = access;
        self
    }

    /// Puts a store beside the broker, for a broker without a history: dead letters, failure texts, inbox,
    /// history and payload stages are kept there, and every event is copied into it.
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
        engines::check_access(url.as_ref(), &self.engine.access)?;
        let mut engine = engines::open(url.as_ref(), self.engine.clone(), clock.clone()).await?;
        if let Some(store) = &self.store {
            engines::check_apart(url.as_ref(), store)?;
            let store = engines::open(store, self.engine, clock.clone()).await?;
            engine = crate::compose::compose(engine, store, clock).await?;
        }
        let bus = Bus::with_engine(engine, self.options)?;
        #[cfg(feature = "config")]
        if let Some(config) = &self.config {
            note_config(bus.engine(), &bus.audit().operator(), config).await;
        }
        Ok(bus)
    }

    /// Builds the bus on an open engine. The settings for opening a file have no effect, and the clock must
    /// be the engine's.
    pub fn with_engine(self, engine: Engine) -> Result<Bus> {
        Bus::with_engine(engine, self.options)
    }
}
