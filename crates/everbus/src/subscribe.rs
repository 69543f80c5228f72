//! The subscription builder.

use std::fmt;
use std::future::Future;
use std::str::FromStr;
use std::time::Duration;

use everbus_core::{Code, Error, EventId, GroupName, Pattern, Result, RetryPolicy, StartFrom};
use serde::Serialize;

use crate::bus::Bus;
use crate::handler::{Handler, HandlerResult};
use crate::message::Message;
use crate::options::{check_concurrency, check_duration};

/// Names a subscription: what `subscribe` returns and `unsubscribe` takes. The same across restarts
/// for the same name in the same group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct SubscriptionId(EventId);

impl From<EventId> for SubscriptionId {
    fn from(id: EventId) -> Self {
        Self(id)
    }
}

impl From<SubscriptionId> for EventId {
    fn from(id: SubscriptionId) -> Self {
        id.0
    }
}

impl fmt::Display for SubscriptionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for SubscriptionId {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        s.parse().map(Self)
    }
}

/// A subscription in the making. Mistakes are reported by [`handler`](Self::handler), which makes it
/// take effect.
///
/// ```
/// use std::time::Duration;
/// use everbus::{Bus, Message, StartFrom};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> everbus::Result<()> {
/// # let bus = Bus::open("memory:").await?;
/// let id = bus
///     .subscribe("order.*")
///     .group("billing")
///     .start_from(StartFrom::First)
///     .retry_with(|defaults| defaults.max_retries(10))
///     .timeout(Duration::from_secs(5))
///     .concurrency(8)
///     .name("charge")
///     .handler(|m: Message| async move {
///         let order: serde_json::Value = m.json()?;
///         println!("{order}");
///         Ok(())
///     })
///     .await?;
/// bus.unsubscribe(id).await?;
/// # Ok(())
/// # }
/// ```
#[must_use = "a subscription takes effect when it is given a handler"]
pub struct Subscribe<'a> {
    bus: &'a Bus,
    pattern: String,
    group: Option<String>,
    start_from: Option<StartFrom>,
    retry: RetryPolicy,
    timeout: Duration,
    concurrency: Option<usize>,
    ordered: bool,
    name: Option<String>,
}

/// A subscription whose settings make sense by themselves.
pub(crate) struct Request {
    pub(crate) group: GroupName,
    pub(crate) pattern: Pattern,
    pub(crate) name: Option<String>,
    pub(crate) start_from: Option<StartFrom>,
    pub(crate) ordered: bool,
    pub(crate) concurrency: Option<usize>,
    pub(crate) retry: RetryPolicy,
    pub(crate) timeout: Duration,
}

impl<'a> Subscribe<'a> {
    pub(crate) fn new(bus: &'a Bus, pattern: &str) -> Self {
        let options = &bus.shared().options;
        Self {
            bus,
            pattern: pattern.to_owned(),
            group: None,
            start_from: None,
            retry: options.retry,
            timeout: options.timeout,
            concurrency: None,
            ordered: false,
            name: None,
        }
    }

    /// The group the handler works for. Each group has its own position, attempts and dead letters;
    /// handlers that share a group and match the same event run one after another and fail together.
    /// Without this it is the unnamed group, which begins at the first event of the log.
    pub fn group(mut self, name: impl Into<String>) -> Self {
        self.group = Some(name.into());
        self
    }

    /// Where the group begins if it does not exist yet; after what is in the log now unless said
    /// otherwise. The unnamed group always begins at the first event.
    pub fn start_from(mut self, start_from: StartFrom) -> Self {
        self.start_from = Some(start_from);
        self
    }

    /// The retry policy of this handler, in place of that of the bus.
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.retry = policy;
        self
    }

    /// Changes parts of the retry policy and keeps the rest of what the bus says.
    pub fn retry_with(mut self, change: impl FnOnce(RetryPolicy) -> RetryPolicy) -> Self {
        self.retry = change(self.retry);
        self
    }

    /// How long one attempt of this handler may take. A handler that takes longer is dropped where
    /// it waits, and the attempt has failed.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How many events of the group are handled at once in this process (16). Subscriptions of one
    /// group must not ask for different numbers.
    pub fn concurrency(mut self, handlers: usize) -> Self {
        self.concurrency = Some(handlers);
        self
    }

    /// The group handles events with the same key strictly one after another, also while one of them
    /// waits for a retry.
    pub fn ordered(mut self) -> Self {
        self.ordered = true;
        self
    }

    /// The name of the subscription in its group: what makes it the same one after a restart, and
    /// what logs and dead letters call the handler. Unless set it is the pattern, with `#2`, `#3`
    /// added where the group has the pattern already.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Makes the subscription durable and registers its handler. The handler runs once the bus is
    /// [started](Bus::start); what is published after this returns reaches it.
    ///
    /// Handlers are plain async functions or closures of a [`Message`]. They may be called more than
    /// once for the same event: after a failure, and after a crash that came before the outcome was
    /// durable. They must not block the thread; use `tokio::task::spawn_blocking` for that.
    pub async fn handler<F, Fut>(self, handler: F) -> Result<SubscriptionId>
    where
        F: Fn(Message) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = HandlerResult> + Send + 'static,
    {
        let bus = self.bus;
        bus.accepts()?;
        let request = self.validate()?;
        let mut registry = bus.registry().lock().await;
        // Checked again under the lock: a shutdown may have come first.
        bus.accepts()?;
        let shared = bus.shared();
        shared
            .unless_ending(registry.subscribe(shared, request, Handler::erase(handler)))
            .await
    }

    fn validate(self) -> Result<Request> {
        let pattern = Pattern::new(&self.pattern)?;
        let group = match &self.group {
            Some(name) => GroupName::new(name)?,
            None => GroupName::unnamed(),
        };
        let not_first = |from: &StartFrom| *from != StartFrom::First;
        if group.is_unnamed() && self.start_from.as_ref().is_some_and(not_first) {
            return Err(Error::new(
                Code::InvalidSetting,
                "the unnamed group always begins at the first event",
            )
            .hint("give the subscription a group to start it elsewhere"));
        }
        self.retry.validate()?;
        check_duration("the timeout", self.timeout)?;
        if let Some(concurrency) = self.concurrency {
            check_concurrency(concurrency)?;
        }
        if let Some(name) = &self.name
            && (name.is_empty() || name.chars().count() > 255 || name.chars().any(char::is_control))
        {
            return Err(Error::new(
                Code::InvalidSetting,
                format!("{name:?} is not a name for a subscription"),
            )
            .hint("a name is 1 to 255 printable characters"));
        }
        Ok(Request {
            group,
            pattern,
            name: self.name,
            start_from: self.start_from,
            ordered: self.ordered,
            concurrency: self.concurrency,
            retry: self.retry,
            timeout: self.timeout,
        })
    }
}
