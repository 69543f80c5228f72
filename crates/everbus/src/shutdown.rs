//! The end of a bus: nothing acked is forgotten, nothing half done is acked.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::Result;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::bus::Shared;
use crate::options::LONGEST;
use crate::registry::Registry;

/// How a shutdown went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shutdown {
    /// Handlers that were still running when the time was over. Their events will be delivered again.
    pub abandoned: usize,
}

/// Stops every group, then closes the engine. New work is refused before this is called.
pub(crate) async fn drain(
    shared: &Arc<Shared>,
    mut registry: Registry,
    timeout: Duration,
) -> Result<Shutdown> {
    // Cut to a year, so that adding it cannot overflow.
    let deadline = Instant::now() + timeout.min(LONGEST);
    registry.stop_housekeeping();
    let mut groups = JoinSet::new();
    for runner in registry.take_runners() {
        groups.spawn(async move { runner.stop(deadline).await });
    }
    // The handlers go here, and with them whatever they hold, clones of the bus included.
    drop(registry);
    let mut report = Shutdown::default();
    while let Some(abandoned) = groups.join_next().await {
        report.abandoned += abandoned.unwrap_or_default();
    }
    // Whoever still waits for an event to settle will not see it now.
    shared.closed.send_replace(true);
    shared.engine.broker.close().await?;
    if report.abandoned > 0 {
        tracing::warn!(
            target: "everbus::shutdown",
            abandoned = report.abandoned,
            "handlers did not finish in time; their events will be delivered again"
        );
    }
    Ok(report)
}
