//! The state that all request handlers share.

use std::sync::Arc;
use std::time::Instant;

use everbus::{Bus, Config, Result};
use everbus_jobs::Jobs;
use tokio::sync::watch;

use crate::api::replays::RunningReplays;
use crate::auth::Tokens;
use crate::consumers::Webhooks;
use crate::guard::rate::RateLimits;
use crate::live::LiveState;
use crate::options::ServerOptions;
use crate::routes::Listed;
use crate::tasks::Tasks;

/// The state that all request handlers share. Clones refer to the same state.
#[derive(Clone)]
pub struct AppState(Arc<Inner>);

struct Inner {
    bus: Bus,
    config: Option<Config>,
    options: ServerOptions,
    tokens: Tokens,
    rates: RateLimits,
    replays: RunningReplays,
    webhooks: Webhooks,
    tasks: Tasks,
    live: LiveState,
    stopping: watch::Sender<bool>,
    started: Instant,
    routes: std::sync::OnceLock<Vec<Listed>>,
}

impl AppState {
    pub(crate) fn new(bus: Bus, config: Option<Config>, options: ServerOptions) -> Self {
        Self(Arc::new(Inner {
            tokens: Tokens::new(&bus),
            live: LiveState::new(&bus),
            rates: RateLimits::new(options.limits.requests_per_second),
            bus,
            config,
            options,
            replays: RunningReplays::default(),
            webhooks: Webhooks::default(),
            tasks: Tasks::default(),
            stopping: watch::Sender::new(false),
            started: Instant::now(),
            routes: std::sync::OnceLock::new(),
        }))
    }

    /// The bus.
    pub fn bus(&self) -> &Bus {
        &self.0.bus
    }

    /// The configuration file, if there is one.
    pub fn config(&self) -> Option<&Config> {
        self.0.config.as_ref()
    }

    /// The settings of the server.
    pub fn options(&self) -> &ServerOptions {
        &self.0.options
    }

    /// The tokens.
    pub fn tokens(&self) -> &Tokens {
        &self.0.tokens
    }

    /// The live state: the end of the log, the figures, and the number of listeners.
    pub(crate) fn live(&self) -> &LiveState {
        &self.0.live
    }

    /// The replays that this server has started.
    pub(crate) fn replays(&self) -> &RunningReplays {
        &self.0.replays
    }

    /// The webhooks that were declared over HTTP and run in this server.
    pub(crate) fn webhooks(&self) -> &Webhooks {
        &self.0.webhooks
    }

    /// The handle for tasks and jobs, and the start of their background work.
    pub(crate) fn tasks(&self) -> &Tasks {
        &self.0.tasks
    }

    /// The tasks and jobs of the default tenant. Fails with `Unsupported` if the engine has no history.
    pub(crate) fn jobs(&self) -> Result<Jobs> {
        self.0.tasks.open(&self.0.bus, &self.0.options)
    }

    pub(crate) fn rates(&self) -> &RateLimits {
        &self.0.rates
    }

    /// Whether requests need no token: the server listens on loopback, and no token was ever created. Revoking the last
    /// token does not open the server again.
    pub(crate) async fn is_open(&self) -> everbus::Result<bool> {
        Ok(self.0.options.listen.ip().is_loopback() && !self.0.tokens.are_used().await?)
    }

    /// When the server started.
    pub fn started(&self) -> Instant {
        self.0.started
    }

    /// Begins the shutdown: long polls, streams and WebSockets end.
    pub fn stop(&self) {
        self.0.stopping.send_replace(true);
    }

    /// Whether the shutdown has begun.
    pub fn is_stopping(&self) -> bool {
        *self.0.stopping.borrow()
    }

    /// Resolves once the shutdown has begun. Long requests select on it.
    pub async fn stopping(&self) {
        let mut stopping = self.0.stopping.subscribe();
        if stopping.wait_for(|stopping| *stopping).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Every route of the server.
    pub fn routes(&self) -> &[Listed] {
        self.0.routes.get().map_or(&[], Vec::as_slice)
    }

    pub(crate) fn set_routes(&self, routes: Vec<Listed>) {
        let _ = self.0.routes.set(routes);
    }
}

impl std::fmt::Debug for AppState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AppState").finish_non_exhaustive()
    }
}
