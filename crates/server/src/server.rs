//! The server: from binding the address to the last request.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use everbus::{Bus, Code, Config, Error, Result, Shutdown};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use crate::options::ServerOptions;
use crate::routes::{Route, router};
use crate::state::AppState;
use crate::{api, consumers, dashboard, demo, listen, metrics, openapi, sse, tasks, ws};

/// How long the server waits for WebSockets when it stops: they tell their clients, and give back their leases.
const LEAVE: Duration = Duration::from_secs(5);

/// A server that is bound to its address, and does not serve yet.
pub struct Server {
    state: AppState,
    listener: TcpListener,
    address: SocketAddr,
    tls: Option<TlsAcceptor>,
    router: Router,
}

/// Every route of the server.
fn routes() -> Vec<Route> {
    let mut routes = Vec::new();
    routes.extend(api::routes());
    routes.extend(dashboard::routes());
    routes.extend(metrics::routes());
    routes.extend(sse::routes());
    routes.extend(ws::routes());
    routes
}

impl Server {
    /// Binds the address.
    ///
    /// An address that is not loopback is refused while no token exists: anyone who can reach it could read and publish
    /// everything.
    pub async fn bind(bus: Bus, config: Option<Config>, options: ServerOptions) -> Result<Self> {
        let listen = options.listen;
        let tls = options.tls.as_ref().map(listen::acceptor).transpose()?;
        let state = AppState::new(bus, config, options);
        if !listen.ip().is_loopback() && !state.tokens().exist().await? {
            let what =
                format!("{listen} can be reached from other machines, and there is no token");
            return Err(Error::new(Code::InvalidSetting, what)
                .hint("make one first: everbus token create NAME --scope admin"));
        }
        let listener = TcpListener::bind(listen).await.map_err(|e| {
            Error::new(Code::Unavailable, format!("cannot listen on {listen}: {e}"))
                .hint("another program may use the port; choose one with --listen 127.0.0.1:0")
        })?;
        let address = listener
            .local_addr()
            .map_err(|e| Error::new(Code::Unavailable, format!("no address: {e}")))?;
        let router = app(&state);
        Ok(Self {
            state,
            listener,
            address,
            tls,
            router,
        })
    }

    /// The address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its URL.
    pub fn url(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.address)
    }

    /// The state that request handlers share.
    pub fn state(&self) -> &AppState {
        &self.state
    }

    /// Serves until `stop` resolves. Then it accepts no more connections, ends long polls and streams, lets running
    /// requests finish, and shuts the bus down.
    pub async fn run(self, stop: impl Future<Output = ()> + Send + 'static) -> Result<Shutdown> {
        let Self {
            state,
            listener,
            tls,
            router,
            ..
        } = self;
        consumers::mount_configured(&state).await?;
        if state.options().demo {
            demo::open(&state).await?;
        }
        tasks::mount_alerts(&state).await?;
        if let Some(cron) = &state.options().health_check {
            // A wrong cron expression is reported here, not in the log when the schedules start.
            everbus_jobs::schedule::CronTimes::new(cron, "UTC")?;
        }
        state.bus().start().await?;
        let mut background = JoinSet::new();
        start_background(&state, &mut background);
        let stopping = state.clone();
        let waiting = tokio::spawn(async move {
            stop.await;
            stopping.stop();
        });
        listen::serve(listener, router, tls, &state).await;
        // WebSockets give back the leases of their clients, which needs the bus.
        state.live().until_left(LEAVE).await;
        waiting.abort();
        background.shutdown().await;
        state.live().figures().processes().leave().await;
        state.bus().shutdown().await
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

/// Starts the background tasks. They end with the server.
fn start_background(state: &AppState, background: &mut JoinSet<()>) {
    let tokens = state.clone();
    background.spawn(async move { tokens.tokens().follow().await });
    background.spawn(consumers::follow(state.clone()));
    background.spawn(tasks::run(state.clone()));
    if state.options().demo {
        background.spawn(demo::customers(state.clone()));
        background.spawn(demo::catalogue(state.clone()));
    }
    let figures = state.clone();
    background.spawn(async move { figures.live().figures().run().await });
}

/// Makes the router. [`around`](crate::guard::around) adds the code around each request.
pub(crate) fn app(state: &AppState) -> Router {
    let mut all = routes();
    let document = openapi::document(&all);
    all.extend(openapi::routes(&document));
    state.set_routes(all.iter().map(|route| route.listed.clone()).collect());
    let router = router(state, all);
    router.with_state(state.clone())
}
