//! The settings of a subscription. They can be given at the handler, at its router, or in the configuration
//! file.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{RetryPolicy, StartFrom};
use serde_json::Value;

use crate::breaker::{BreakerPolicy, Criticality};
use crate::handler::Decode;
use crate::handler::layers::AnyLayer;

type RetryChange = Arc<dyn Fn(RetryPolicy) -> RetryPolicy + Send + Sync>;

/// Settings given at this level. `None` means: inherit from the next level.
#[derive(Clone, Default)]
pub(crate) struct Settings {
    pub(crate) group: Option<String>,
    pub(crate) ephemeral: Option<bool>,
    pub(crate) name: Option<String>,
    pub(crate) start_from: Option<StartFrom>,
    pub(crate) ordered: Option<bool>,
    pub(crate) concurrency: Option<usize>,
    pub(crate) prefetch: Option<usize>,
    pub(crate) lease: Option<Duration>,
    /// Changes to the retry policy of the bus, the outermost first.
    pub(crate) retry: Vec<RetryChange>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) idempotent: Option<bool>,
    /// Zero means: never skip.
    pub(crate) max_staleness: Option<Duration>,
    pub(crate) breaker: Option<Option<BreakerPolicy>>,
    pub(crate) dependency: Option<String>,
    pub(crate) criticality: Option<Criticality>,
    pub(crate) decode: Option<Decode>,
    pub(crate) drop_failed: Option<bool>,
    pub(crate) schema: Option<Value>,
    /// The outermost first.
    pub(crate) layers: Vec<AnyLayer>,
}

impl Settings {
    /// These settings, with missing ones taken from `outer`.
    #[must_use]
    pub(crate) fn over(self, outer: &Settings) -> Settings {
        Settings {
            group: self.group.or_else(|| outer.group.clone()),
            ephemeral: self.ephemeral.or(outer.ephemeral),
            name: self.name.or_else(|| outer.name.clone()),
            start_from: self.start_from.or(outer.start_from),
            ordered: self.ordered.or(outer.ordered),
            concurrency: self.concurrency.or(outer.concurrency),
            prefetch: self.prefetch.or(outer.prefetch),
            lease: self.lease.or(outer.lease),
            retry: outer.retry.iter().cloned().chain(self.retry).collect(),
            timeout: self.timeout.or(outer.timeout),
            idempotent: self.idempotent.or(outer.idempotent),
            max_staleness: self.max_staleness.or(outer.max_staleness),
            breaker: self.breaker.or(outer.breaker),
            dependency: self.dependency.or_else(|| outer.dependency.clone()),
            criticality: self.criticality.or(outer.criticality),
            decode: self.decode.or(outer.decode),
            drop_failed: self.drop_failed.or(outer.drop_failed),
            schema: self.schema.or_else(|| outer.schema.clone()),
            layers: outer.layers.iter().cloned().chain(self.layers).collect(),
        }
    }

    /// The breaker policy, if a breaker was asked for. Naming a dependency or a criticality asks for the
    /// default policy.
    pub(crate) fn breaker_policy(&self) -> Option<BreakerPolicy> {
        let implied = self.dependency.is_some() || self.criticality.is_some();
        match &self.breaker {
            Some(said) => *said,
            None => implied.then(BreakerPolicy::default),
        }
    }

    pub(crate) fn retry_policy(&self, defaults: RetryPolicy) -> RetryPolicy {
        self.retry
            .iter()
            .fold(defaults, |policy, change| change(policy))
    }
}

/// The setters that subscriptions, handlers and routers share.
macro_rules! setters {
    () => {
        /// The group the handler works for. Each group has its own position, attempts and dead letters;
        /// handlers that share a group and match the same event run one after another and fail together.
        /// Without this it is the unnamed group, which begins at the first event of the log.
        pub fn group(mut self, name: impl Into<String>) -> Self {
            self.settings.group = Some(name.into());
            self
        }

        /// Makes the group ephemeral: it is removed when the bus is shut down or its process has ended. It begins
        /// with the next published event and never keeps the log from being pruned. It has no dead letters:
        /// an event that fails for good is skipped. Without a [`group`](Self::group) each handler gets a
        /// separate group named `ephemeral-…`; a group of that name must not exist already.
        pub fn ephemeral(mut self) -> Self {
            self.settings.ephemeral = Some(true);
            self
        }

        /// The group by the names of the *omni* specification: `durable` is the group name, or `queue` if
        /// there is no durable; with neither the group is [ephemeral](Self::ephemeral).
        pub fn durable_or_queue(mut self, durable: Option<&str>, queue: Option<&str>) -> Self {
            let group = durable.or(queue);
            self.settings.ephemeral = Some(group.is_none());
            self.settings.group = group.map(str::to_owned);
            self
        }

        /// Where the group begins if it does not exist yet. By default it begins after the newest event in
        /// the log. The unnamed group always begins at the first event.
        pub fn start_from(mut self, start_from: everbus_core::StartFrom) -> Self {
            self.settings.start_from = Some(start_from);
            self
        }

        /// The retry policy, instead of the policy of the bus.
        pub fn retry(mut self, policy: everbus_core::RetryPolicy) -> Self {
            self.settings.retry = vec![std::sync::Arc::new(move |_| policy)];
            self
        }

        /// Changes parts of the bus's retry policy and keeps the rest.
        pub fn retry_with(
            mut self,
            change: impl Fn(everbus_core::RetryPolicy) -> everbus_core::RetryPolicy
            + Send
            + Sync
            + 'static,
        ) -> Self {
            self.settings.retry.push(std::sync::Arc::new(change));
            self
        }

        /// How long one attempt may take. A handler that takes longer is cancelled at its current await
        /// point, and the attempt has failed.
        pub fn timeout(mut self, timeout: std::time::Duration) -> Self {
            self.settings.timeout = Some(timeout);
            self
        }

        /// How many events of the group are handled at once in this process (16). Subscriptions of one
        /// group must not ask for different numbers.
        pub fn concurrency(mut self, handlers: usize) -> Self {
            self.settings.concurrency = Some(handlers);
            self
        }

        /// How many events of the group this process holds at most, waiting and running together, instead of
        /// the number of the bus. For long work, set it to the concurrency: another process cannot take an
        /// event that waits in this one. Of several subscriptions of a group the smallest number counts.
        pub fn prefetch(mut self, events: usize) -> Self {
            self.settings.prefetch = Some(events);
            self
        }

        /// The lease duration: how long this process keeps a delivery without extending its lease. The default
        /// is the longest timeout of the group's handlers plus 10 s. The process extends the lease three times
        /// in this time. If the process dies or stands still for longer, another process gets the delivery. Of
        /// several subscriptions of a group the longest lease counts.
        pub fn lease(mut self, lease: std::time::Duration) -> Self {
            self.settings.lease = Some(lease);
            self
        }

        /// Makes the group ordered: it handles events with the same key strictly one after another, also while
        /// one of them waits for a retry. Events with different keys run at the same time.
        pub fn ordered(mut self) -> Self {
            self.settings.ordered = Some(true);
            self
        }

        /// Records in the inbox which events the group has handled, in the same step as the ack, and does
        /// not handle them again. This applies to all handlers of the group that take the same event.
        /// Handlers that return a transaction always do this.
        pub fn idempotent(mut self) -> Self {
            self.settings.idempotent = Some(true);
            self
        }

        /// Skips events that happened longer ago than this (recorded with the reason `stale`). Zero: never
        /// skip. Replayed events are not skipped.
        pub fn max_staleness(mut self, age: std::time::Duration) -> Self {
            self.settings.max_staleness = Some(age);
            self
        }

        /// Adds a circuit breaker: after repeated failures the group pauses instead of failing every event.
        /// Groups have no breaker by default. The breaker belongs to the group, or to the
        /// [dependency](Self::depends_on) if one is named.
        pub fn breaker(mut self, policy: $crate::BreakerPolicy) -> Self {
            self.settings.breaker = Some(Some(policy));
            self
        }

        /// Names a dependency of the handler: all handlers that name it, in all groups of the bus, share
        /// one circuit breaker.
        pub fn depends_on(mut self, dependency: impl Into<String>) -> Self {
            self.settings.dependency = Some(dependency.into());
            self
        }

        /// What happens to events while the breaker is open: critical ones wait (the default), standard
        /// ones go to the dead letters for a later retry, best-effort ones are skipped.
        pub fn criticality(mut self, criticality: $crate::Criticality) -> Self {
            self.settings.criticality = Some(criticality);
            self
        }

        /// What happens to an event that cannot be decoded: by default it goes to the dead letters at once;
        /// with [`Decode::Retry`](crate::Decode::Retry) it is retried by the retry policy.
        ///
        /// ```
        /// use everbus::{Decode, Json, Router, to};
        ///
        /// async fn ship(Json(order): Json<u64>) {
        ///     println!("{order}");
        /// }
        /// let router = Router::new().on("order.placed", to(ship).decode(Decode::Retry));
        /// ```
        pub fn decode(mut self, decode: $crate::Decode) -> Self {
            self.settings.decode = Some(decode);
            self
        }

        /// Skips an event that fails for good, with its last error as the recorded reason, instead of making it
        /// a dead letter: for work that is not worth doing later, such as a cache or a gauge. Only with
        /// [best-effort](crate::Criticality::BestEffort) criticality.
        pub fn drop_failed(mut self) -> Self {
            self.settings.drop_failed = Some(true);
            self
        }

        /// Checks every payload against this JSON Schema before the handler runs; one that does not match
        /// goes to the dead letters at once, unless [`decode`](Self::decode) says otherwise.
        pub fn validated(mut self, schema: serde_json::Value) -> Self {
            self.settings.schema = Some(schema);
            self
        }

        /// Wraps the handler in a tower layer, inside its timeout. Of several, the first is the outermost.
        pub fn layer<L>(mut self, layer: L) -> Self
        where
            L: tower_layer::Layer<$crate::HandlerService> + Send + Sync + 'static,
            L::Service: tower_service::Service<$crate::Message, Response = $crate::Outcome>
                + Clone
                + Send
                + Sync
                + 'static,
            <L::Service as tower_service::Service<$crate::Message>>::Error: Into<$crate::BoxError>,
            <L::Service as tower_service::Service<$crate::Message>>::Future: Send,
        {
            self.settings
                .layers
                .push($crate::handler::layers::AnyLayer::new(layer));
            self
        }
    };
}

pub(crate) use setters;
