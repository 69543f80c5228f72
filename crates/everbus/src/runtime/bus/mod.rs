//! The bus: the type that users work with.
//!
//! This file opens the bus and reports its state. The rest is one file per topic: `publish`, `handlers`,
//! `memory` (reading what was published) and `life` (from start to shutdown); `shared` is the state that
//! its background tasks hold.

mod handlers;
mod life;
mod memory;
mod publish;
mod shared;

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use everbus_core::{Capabilities, Code, Engine, Error, GroupName, Result, Streams};
use tokio::runtime::Handle;
use tokio::sync::watch;

use self::life::Ending;
pub(crate) use self::publish::only_answer;
pub(crate) use self::shared::Shared;
use crate::breaker::BreakerInfo;
use crate::environment::watch::RunningActivity;
use crate::runtime::options::BusOptions;
use crate::runtime::subscription::registry::Registry;
use crate::stats::BusStats;

/// How long [`Bus::health`] waits for the answer of the engine.
const PING: Duration = Duration::from_secs(3);

/// A bus on an open engine. Clones are the same bus.
///
/// Needs a tokio runtime with its timer enabled, as `#[tokio::main]` gives. Dropping the last clone
/// without [`shutdown`](Self::shutdown) blocks nothing and loses nothing: running handlers get the
/// shutdown timeout in the background as long as the runtime lives, and what they did not finish is
/// delivered again. A handler that holds a clone of the bus keeps it alive until it is shut down.
#[derive(Clone)]
pub struct Bus {
    inner: Arc<Inner>,
}

/// What the clones of a bus share.
struct Inner {
    shared: Arc<Shared>,
    registry: tokio::sync::Mutex<Registry>,
    runtime: OnceLock<Handle>,
    ending: parking_lot::Mutex<Option<watch::Receiver<Ending>>>,
}

impl Bus {
    /// Makes a bus on an engine that is already open.
    pub fn with_engine(engine: Engine, options: BusOptions) -> Result<Bus> {
        if let Some(required) = options.require_durability {
            engine.require_durability(required)?;
        }
        Ok(Bus {
            inner: Arc::new(Inner {
                shared: Arc::new(Shared::new(engine, options)?),
                registry: tokio::sync::Mutex::default(),
                runtime: OnceLock::new(),
                ending: parking_lot::Mutex::default(),
            }),
        })
    }

    /// Counts and latencies since this bus was opened: per event type, per group, and its breakers.
    pub fn stats(&self) -> BusStats {
        let shared = &self.inner.shared;
        shared.stats.snapshot(shared.circuits.infos())
    }

    /// The state of the circuit breakers of this bus.
    pub fn breakers(&self) -> Vec<BreakerInfo> {
        self.inner.shared.circuits.infos()
    }

    /// The circuit breakers that publish an event when they open or close.
    pub(crate) fn alerting_breakers(&self) -> Vec<BreakerInfo> {
        self.inner.shared.circuits.alerting()
    }

    /// The capabilities of the engine.
    pub fn capabilities(&self) -> Capabilities {
        self.inner.shared.engine.broker.capabilities()
    }

    /// Which event types are in which stream, with the limits in force.
    pub fn streams(&self) -> &Streams {
        &self.inner.shared.options.streams
    }

    /// The engine.
    pub fn engine(&self) -> &Engine {
        &self.inner.shared.engine
    }

    /// The failure after which this bus stopped working, if there was one: a disk that failed, a file that
    /// is damaged or was upgraded by a newer version. Publishes return it too. Open the bus again to
    /// continue. A single group may also stop: see [`stopped_groups`](Self::stopped_groups).
    pub fn failure(&self) -> Option<Error> {
        self.inner.shared.failure.get().cloned()
    }

    /// Whether this bus works: [`failure`](Self::failure), the first of
    /// [`stopped_groups`](Self::stopped_groups), or [`Unavailable`](everbus_core::Code::Unavailable) if the
    /// engine's server does not answer within three seconds. While the server is not available, publishers get
    /// that error; consumers continue by themselves when it is available again.
    pub async fn health(&self) -> Result<()> {
        let shared = &self.inner.shared;
        shared.accepts()?;
        if let Some((_, error)) = self.stopped_groups().into_iter().next() {
            return Err(error);
        }
        let answer = tokio::time::timeout(PING, shared.engine.broker.ping()).await;
        answer.unwrap_or_else(|_| {
            let engine = shared.engine.broker.capabilities().engine;
            let what = format!("the server of the {engine} engine does not answer");
            Err(Error::new(Code::Unavailable, what)
                .hint("the bus goes on by itself once the server is there again"))
        })
    }

    /// The groups with handlers in this bus that have stopped, and why: another process removed the group, or the
    /// engine failed. After a removal the other groups and publishes continue. To use a removed group
    /// again, unsubscribe its handlers and subscribe them again.
    pub fn stopped_groups(&self) -> Vec<(GroupName, Error)> {
        let stopped = self.inner.shared.stopped_groups();
        let pairs = stopped.iter();
        pairs.map(|(g, e)| (g.clone(), e.clone())).collect()
    }

    /// How many outcomes came too late: the lease had ended and the event had gone to another consumer.
    /// More than a few mean that this process is stopped or starved for longer than its leases last.
    pub fn lost_leases(&self) -> u64 {
        self.inner.shared.lost_leases.load(Ordering::Relaxed)
    }

    /// What running handlers of this process last reported with
    /// [`Context::progress`](crate::Context::progress).
    pub fn activities(&self) -> Vec<RunningActivity> {
        self.inner.shared.environment.watches.activities()
    }

    pub(crate) fn accepts(&self) -> Result<()> {
        self.inner.shared.accepts()
    }

    #[cfg(feature = "sqlite")]
    pub(crate) fn clock(&self) -> &Arc<dyn everbus_core::Clock> {
        &self.inner.shared.options.clock
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.inner.shared
    }
}

impl std::fmt::Debug for Bus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bus")
            .field("engine", &self.inner.shared.engine)
            .finish_non_exhaustive()
    }
}
