//! The router: which handler takes which events, with what settings and what shared state.

mod document;
mod resolve;
mod route;

use everbus_core::{Result, TypedEvent};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::handler::extract::States;
use crate::handler::upcast::Upcasts;
use crate::runtime::subscription::settings::{Settings, setters};

pub(crate) use resolve::{Resolved, Subscription};
pub use route::{IntoRoute, Route, to};

/// Handlers by pattern. A setting of the router applies to all its routes that do not set it themselves,
/// whether it is given before or after them. A nested router inherits the settings that it does not set.
///
/// Nothing takes effect before [`Bus::mount`](crate::Bus::mount), which first checks the whole router.
///
/// ```
/// use std::time::Duration;
/// use everbus::{Bus, Context, Event, Payload, RetryPolicy, Router, State, to};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize, Event)]
/// #[event(type = "orders.order.placed")]
/// struct OrderPlaced { order: u64 }
///
/// #[derive(Clone)]
/// struct Mailer;
///
/// async fn confirm(Payload(order): Payload<OrderPlaced>, State(_mailer): State<Mailer>) {
///     println!("order {} confirmed", order.order);
/// }
///
/// async fn count(context: Context) {
///     println!("{} for {}", context.correlation_id(), context.group());
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> everbus::Result<()> {
/// let orders = Router::new()
///     .on("order.placed", to(confirm).timeout(Duration::from_secs(5)))
///     .on("order.*", to(count).group("statistics"));
/// let router = Router::new()
///     .nest("orders", orders) // orders.order.placed, orders.order.*
///     .group("notifications")
///     .retry(RetryPolicy::default().max_retries(5))
///     .with_state(Mailer);
/// let bus = Bus::open("memory:").await?;
/// bus.mount(router).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Default)]
#[must_use = "a router takes effect when it is mounted"]
pub struct Router {
    entries: Vec<Entry>,
    pub(crate) settings: Settings,
    states: States,
    upcasts: Upcasts,
    schemas: Vec<Declared>,
    exact: bool,
}

#[derive(Clone)]
enum Entry {
    Route(String, Route),
    Nested(String, Router),
}

/// An event type that was declared without a handler.
#[derive(Clone)]
pub(crate) struct Declared {
    pub(crate) event_type: String,
    pub(crate) version: u32,
    pub(crate) schema: Option<Value>,
    pub(crate) rust_type: Option<&'static str>,
}

impl Router {
    /// A router without routes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sends events that match a pattern (`user.created`, `user.*`, `order.*.shipped`, `*`) to a handler:
    /// an async function or closure, or [`to`]`(function)` with additional settings.
    pub fn on<Args>(mut self, pattern: impl Into<String>, handler: impl IntoRoute<Args>) -> Self {
        let route = handler.into_route();
        self.entries.push(Entry::Route(pattern.into(), route));
        self
    }

    /// Adds the routes of another router with this prefix before their patterns: `nest("orders", r)` makes
    /// its `order.placed` into `orders.order.placed`.
    pub fn nest(mut self, prefix: impl Into<String>, router: Router) -> Self {
        self.entries.push(Entry::Nested(prefix.into(), router));
        self
    }

    /// Adds the routes of another router unchanged.
    pub fn merge(self, router: Router) -> Self {
        self.nest("", router)
    }

    /// Declares that this router has all subscriptions of its groups. Older subscriptions of these groups
    /// that this bus does not mount are removed when the router is mounted. Subscriptions outlive the
    /// program: without this, after a handler was removed or its pattern narrowed, its group would still
    /// get the old events, and they would wait for a handler.
    ///
    /// This affects all programs that share the groups: a program that still has the handler gets no new
    /// events for it. Events that wait for a handler are skipped, with the reason `unsubscribed`.
    ///
    /// ```
    /// use everbus::{Bus, Router};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> everbus::Result<()> {
    /// let bus = Bus::open("memory:").await?;
    /// let billing = Router::new().on("order.placed", || async {}).group("billing");
    /// bus.mount(billing.exactly()).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn exactly(mut self) -> Self {
        self.exact = true;
        self
    }

    /// Sets a value that handlers take as [`State<S>`](crate::State): one value for each type. The value of a
    /// nested router replaces that of the router around it.
    pub fn with_state<S: Clone + Send + Sync + 'static>(mut self, state: S) -> Self {
        self.states.insert(state);
        self
    }

    /// Converts an older version of an event to a newer one, so that handlers of the newer version take
    /// both. Conversions can be chained: 1 → 2 → 3.
    pub fn upcast<Old, New, F>(mut self, upcast: F) -> Self
    where
        Old: TypedEvent + DeserializeOwned + 'static,
        New: TypedEvent + DeserializeOwned + 'static,
        F: Fn(Old) -> New + Send + Sync + 'static,
    {
        self.upcasts.add(upcast);
        self
    }

    /// Converts an older version of an event to a newer one, as JSON.
    pub fn upcast_json<F>(mut self, event_type: &str, from: u32, to: u32, upcast: F) -> Self
    where
        F: Fn(Value) -> Result<Value> + Send + Sync + 'static,
    {
        self.upcasts.add_json(event_type, from, to, upcast);
        self
    }

    /// Declares an event type: for the warning about patterns that match nothing, for the AsyncAPI
    /// document, and, if it has a schema, for validation. Types that handlers take or return are declared
    /// already.
    pub fn event<T: TypedEvent>(mut self) -> Self {
        self.schemas.push(Declared {
            event_type: T::TYPE.to_owned(),
            version: T::VERSION,
            schema: T::schema(),
            rust_type: Some(std::any::type_name::<T>()),
        });
        self
    }

    /// Registers a JSON Schema for a type and version: payloads are checked when they are published and
    /// before they are handled.
    pub fn schema(mut self, event_type: impl Into<String>, version: u32, schema: Value) -> Self {
        self.schemas.push(Declared {
            event_type: event_type.into(),
            version,
            schema: Some(schema),
            rust_type: None,
        });
        self
    }

    setters!();

    /// Resolves the whole router: returns its subscriptions and declared types, or the first mistake.
    pub(crate) fn resolve(self) -> Result<Resolved> {
        Resolved::of(self)
    }
}

impl std::fmt::Debug for Router {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names = self.entries.iter().map(|entry| match entry {
            Entry::Route(pattern, _) => pattern.clone(),
            Entry::Nested(prefix, router) => format!("{prefix}: {router:?}"),
        });
        f.debug_list().entries(names).finish()
    }
}
