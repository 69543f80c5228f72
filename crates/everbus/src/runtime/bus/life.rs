//! The life of a bus: start, shutdown, and what happens when it is dropped without a shutdown.

use std::time::Duration;

use everbus_core::{Code, Error, Result};
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::{Bus, Inner};
#[cfg(feature = "overflow")]
use crate::overflow;
use crate::runtime::lag;
use crate::runtime::pauses;
use crate::runtime::retention;
use crate::runtime::shutdown::{self, Shutdown};

/// The report of the shutdown; `None` until the shutdown has finished.
pub(super) type Ending = Option<Result<Shutdown>>;

impl Bus {
    /// Starts dispatching: handlers run from now on, including those that are subscribed later. Events that
    /// were in flight in a process that died are delivered again. Starting twice is harmless.
    pub async fn start(&self) -> Result<()> {
        let mut registry = self.inner.registry.lock().await;
        self.accepts()?;
        let _ = self.inner.runtime.set(Handle::current());
        let shared = &self.inner.shared;
        shared.declare_streams().await?;
        // Loaded before the first handler runs: a paused group stays paused across restarts.
        pauses::load(shared).await;
        if !registry.start(shared) {
            return Ok(());
        }
        #[cfg(feature = "overflow")]
        if let Some(objects) = shared.objects.clone() {
            let collecting = overflow::collect_daily(shared.engine.clone(), objects);
            registry.keep(tokio::spawn(collecting));
        }
        if let Some(background) = &shared.engine.background {
            registry.keep(tokio::spawn(background.run()));
        }
        if let Some(retention) = shared.options.retention_in_force() {
            let pruning = retention::prune_daily(shared.clone(), retention);
            registry.keep(tokio::spawn(pruning));
        }
        registry.keep(tokio::spawn(lag::show(shared.clone())));
        registry.keep(tokio::spawn(pauses::follow(shared.clone())));
        Ok(())
    }

    /// Shuts down like [`shutdown_within`](Self::shutdown_within), with the configured time for handlers
    /// (30 s unless set).
    pub async fn shutdown(&self) -> Result<Shutdown> {
        self.shutdown_within(self.inner.shared.options.shutdown_timeout)
            .await
    }

    /// Shuts down: refuses new publishes and subscriptions (`EventBusShutdownError`), releases events that
    /// no handler has begun, lets running handlers finish within `timeout`, makes their outcomes
    /// durable and closes the engine. It returns at the latest 5 seconds after `timeout`: this extra time
    /// is for outcomes and the engine, when the handlers have used all of `timeout` or another program
    /// holds the file.
    ///
    /// Handlers that are still running after `timeout` are abandoned; their events are delivered again,
    /// with the attempt counted. [`Shutdown`] says how many handlers were abandoned, how many outcomes
    /// could not be made durable in time, and whether the engine is closed.
    ///
    /// Shutting down twice, also at the same time, is harmless: both calls return the report of the first.
    /// Dropping the future does not stop the shutdown. A handler that awaits the shutdown of the bus it
    /// runs on would wait for itself; it is abandoned.
    pub async fn shutdown_within(&self, timeout: Duration) -> Result<Shutdown> {
        let mut ending = self.begin_shutdown(timeout);
        let report = ending.wait_for(Option::is_some).await;
        match report.as_deref() {
            Ok(Some(report)) => report.clone(),
            _ => Err(Error::new(
                Code::Internal,
                "the shutdown ended without a report",
            )),
        }
    }

    fn begin_shutdown(&self, timeout: Duration) -> watch::Receiver<Ending> {
        let mut ending = self.inner.ending.lock();
        if let Some(running) = &*ending {
            return running.clone();
        }
        self.inner.shared.refuse_new_work();
        let deadline = shutdown::deadline(timeout);
        let (report, receiver) = watch::channel(None);
        let inner = self.inner.clone();
        // A separate task, so that the shutdown continues when the caller stops waiting.
        tokio::spawn(async move {
            let registry = std::mem::take(&mut *inner.registry.lock().await);
            let outcome = shutdown::drain(&inner.shared, registry, deadline).await;
            report.send_replace(Some(outcome));
        });
        *ending = Some(receiver.clone());
        receiver
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let registry = std::mem::take(self.registry.get_mut());
        // Without a start there is nothing in the background, and after a shutdown nothing is left.
        let Some(runtime) = self.runtime.get().filter(|_| registry.is_started()) else {
            return;
        };
        self.shared.refuse_new_work();
        let shared = self.shared.clone();
        runtime.spawn(async move {
            let deadline = shutdown::deadline(shared.options.shutdown_timeout);
            if let Err(error) = shutdown::drain(&shared, registry, deadline).await {
                tracing::warn!(target: "everbus::shutdown", %error, "a dropped bus did not close cleanly");
            }
        });
    }
}
