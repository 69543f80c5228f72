//! The settings of a bus, their defaults and their limits.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Clock, Code, Durability, Error, GroupName, Pattern, Result, Retention, RetryPolicy, Streams,
    SystemClock,
};

use crate::admission::{Limits, PublishRate};
use crate::environment::LONGEST;
use crate::handler::DEFAULT_TIMEOUT;
use crate::overflow::Overflow;
use crate::runtime::subscription::settings::Settings;

/// The highest `max_payload` that is accepted: a row of SQLite cannot hold much more.
const LARGEST_PAYLOAD: usize = 512 * 1024 * 1024;
/// The largest accepted payload without an object store, by default.
pub(crate) const TRAVELS: usize = 1024 * 1024;
/// A higher concurrency than this is refused as a mistake.
const MOST_AT_ONCE: usize = 65_536;
/// How many handlers of a group run at once, by default.
pub(crate) const DEFAULT_CONCURRENCY: usize = 16;

/// The settings of a bus that do not depend on its engine.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BusOptions {
    /// The clock; must be the clock that the engine uses.
    pub clock: Arc<dyn Clock>,
    /// The retry policy of subscriptions that give none.
    pub retry: RetryPolicy,
    /// How long one attempt of a handler may take (30 s), unless its subscription sets a timeout.
    pub timeout: Duration,
    /// How long [`Bus::shutdown`](crate::Bus::shutdown) waits for running handlers (30 s).
    pub shutdown_timeout: Duration,
    /// The largest accepted payload in bytes, whether it is stored with its event or in an object store. By
    /// default it is the limit of [`overflow`](Self::overflow) (64 MiB), or 1 MiB without an object store.
    pub max_payload: Option<usize>,
    /// When and where the large parts of events are moved to an object store.
    pub overflow: Overflow,
    /// How many deliveries of a group this bus holds at most, queued and running together. By default eight
    /// for each handler that may run at once, and at least 4096.
    pub prefetch: Option<usize>,
    /// The retention policy, applied once a day by a started bus ([`Retention::standard`]). It removes only
    /// what no group needs any more; `None` removes nothing.
    pub retention: Option<Retention>,
    /// How long after its start a bus first checks whether retention is due; by default a random time of
    /// one to five minutes.
    pub retention_delay: Option<Duration>,
    /// How long the inbox remembers handled events; by default for ever. It must be at least as long as the
    /// log keeps events, or a repeated event would be handled again.
    pub inbox_retention: Option<Duration>,
    /// An event without a handler in any process is dead-lettered after this long (24 h).
    pub no_handler_after: Duration,
    /// The source of events that name none: the name of this service.
    pub source: Option<Arc<str>>,
    /// Which event types are in which stream; by default one stream has all types.
    pub streams: Streams,
    /// The name of this worker in the record of failed attempts; by default `host/pid`.
    pub worker_name: Arc<str>,
    /// The size limits of streams and what happens at the limit; they override the limits of the declared
    /// streams.
    pub limits: Limits,
    /// The rate limit for publishing, in events per second.
    pub publish_rate: Option<PublishRate>,
    /// Events of these types are skipped when they happened longer ago than this; zero: never skip.
    pub max_staleness: BTreeMap<String, Duration>,
    /// The least durability of the engine; a bus on a weaker engine is refused
    /// ([`Code::NotDurable`](crate::Code::NotDurable)).
    pub require_durability: Option<Durability>,
    /// The settings of single consumers in the configuration file.
    pub(crate) consumers: Vec<ConsumerOverride>,
}

/// The settings of one consumer in the configuration file.
#[derive(Clone)]
pub(crate) struct ConsumerOverride {
    pub(crate) name: String,
    pub(crate) group: GroupName,
    pub(crate) pattern: Pattern,
    /// Whether the file names a declared stream. If so, the settings apply to every subscription that reads
    /// from it.
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
            timeout: DEFAULT_TIMEOUT,
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
            require_durability: None,
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
                "the source is empty or has more than 255 bytes",
            ));
        }
        if self.worker_name.is_empty() || self.worker_name.len() > 255 {
            return Err(Error::new(
                Code::InvalidSetting,
                "the worker name is empty or has more than 255 bytes",
            )
            .hint("leave it out to use host/pid"));
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

    /// The retention policy in force: the policy of the bus with the ages of the declared streams.
    pub(crate) fn retention_in_force(&self) -> Option<Retention> {
        let retention = self.retention.clone()?;
        Some(retention.with_streams(&self.streams))
    }

    pub(crate) fn prefetch_for(&self, concurrency: usize) -> usize {
        self.prefetch
            .unwrap_or_else(|| concurrency.saturating_mul(8).max(4096))
    }
}

impl BusOptions {
    /// The consumers of the file that match none of these subscriptions.
    pub(crate) fn unused_consumers<'a>(
        &self,
        subscriptions: impl Iterator<Item = (&'a GroupName, &'a Pattern)>,
    ) -> Vec<&ConsumerOverride> {
        let mut unused: Vec<_> = self.consumers.iter().collect();
        for (group, pattern) in subscriptions {
            unused.retain(|consumer| !consumer.concerns(group, pattern));
        }
        unused
    }
}

/// The default name of a worker: the host and the process id.
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

pub(crate) fn too_long(what: &str, duration: Duration) -> Error {
    Error::new(
        Code::InvalidSetting,
        format!("{what} is longer than a year: {duration:?}"),
    )
    .hint("check the unit")
}

/// Checks an age limit. Zero means: never skip.
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
