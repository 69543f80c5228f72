//! The subscription builder.

use everbus_core::{Code, Error, Result};

use crate::handler::{Handler, SubscriptionId};
use crate::runtime::bus::Bus;
use crate::runtime::router::{Route, Router};
use crate::runtime::subscription::settings::{Settings, setters};

/// Builds a subscription. [`handler`](Self::handler) makes it take effect, and reports mistakes.
///
/// ```
/// use std::time::Duration;
/// use everbus::{Bus, Json, StartFrom};
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
///     .handler(|Json(order): Json<u64>| async move { println!("{order}") })
///     .await?;
/// bus.unsubscribe(id).await?;
/// # Ok(())
/// # }
/// ```
#[must_use = "a subscription takes effect when it is given a handler"]
pub struct Subscribe<'a> {
    bus: &'a Bus,
    pattern: String,
    settings: Settings,
}

impl<'a> Subscribe<'a> {
    pub(crate) fn new(bus: &'a Bus, pattern: &str) -> Self {
        Self {
            bus,
            pattern: pattern.to_owned(),
            settings: Settings::default(),
        }
    }

    setters!();

    /// The name of the subscription in its group. It identifies the subscription after a restart, and logs
    /// and dead letters use it for the handler. The default is the pattern, with `#2`, `#3` added where the
    /// group has the pattern already.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.settings.name = Some(name.into());
        self
    }

    /// Makes the subscription durable and registers its handler. The handler runs once the bus is
    /// [started](Bus::start). It gets every matching event that is published after this call returns.
    ///
    /// It takes every [`Handler`]: async functions and closures of extractors. Handlers may be called more
    /// than once for the same event: after a failure, and after a crash that came before the outcome was
    /// durable. They must not block the thread; use `tokio::task::spawn_blocking` for that.
    ///
    /// ```
    /// use everbus::{Bus, Context, HandlerResult, Json, Message, handled};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> everbus::Result<()> {
    /// # let bus = Bus::open("memory:").await?;
    /// async fn greet(Json(name): Json<String>, context: Context) -> HandlerResult {
    ///     println!("{name}, attempt {}", context.attempt());
    ///     Ok(())
    /// }
    /// bus.subscribe("user.created").handler(greet).await?;
    ///
    /// // A closure cannot name its error type. One that uses `?` ends in `handled()`, which names it.
    /// bus.subscribe("user.renamed")
    ///     .handler(|m: Message| async move {
    ///         println!("now {}", m.json::<String>()?);
    ///         handled()
    ///     })
    ///     .await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn handler<Args, H: Handler<Args>>(self, handler: H) -> Result<SubscriptionId> {
        let mut route = Route::new(handler);
        route.settings = self.settings;
        let router = Router::new().on(self.pattern, route);
        let mut ids = self.bus.mount_resolved(router.resolve()?).await?;
        ids.pop()
            .ok_or_else(|| Error::new(Code::Internal, "a subscription without an id"))
    }
}
