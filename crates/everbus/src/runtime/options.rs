//! The settings of a bus, their defaults and what is refused.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Clock, Code, Error, GroupName, Pattern, Result, Retention, RetryPolicy, Streams, SystemClock,
};

use crate::admission::{Limits, PublishRate};
use crate::environment::LONGEST;
use crate::overflow::Overflow;
use crate::runtime::subscription::settings::Settings;

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

impl BusOptions {
    /// The consumers of the file that none of these subscriptions is.
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

pub(crate) fn too_long(what: &str, duration: Duration) -> Error {
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
