//! The shutdown of a bus: outcomes of finished handlers are made durable, and no unfinished event is acked.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::Result;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::environment::LONGEST;
use crate::guard;
use crate::runtime::bus::Shared;
use crate::runtime::dispatch::GRACE;
use crate::runtime::subscription::registry::Registry;

/// The result of a shutdown.
///
/// In every case no published event is lost: an event whose outcome is not durable is delivered again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shutdown {
    /// Handlers that were still running when the time was over. Their events are delivered again.
    pub abandoned: usize,
    /// Handlers that had finished, but whose outcome could not be made durable in time, for example because
    /// another program holds the file. Their events may be delivered again although they were handled.
    pub unsettled: usize,
    /// Whether the engine was closed in time. If not, it closes in the background as soon as it can;
    /// until then its file is still open.
    pub closed: bool,
}

/// The deadline for running handlers.
pub(crate) fn deadline(timeout: Duration) -> Instant {
    // At most a year, so that the sum cannot overflow.
    Instant::now() + timeout.min(LONGEST)
}

/// Stops every group, then closes the engine. New work is refused before this is called.
pub(crate) async fn drain(
    shared: &Arc<Shared>,
    mut registry: Registry,
    deadline: Instant,
) -> Result<Shutdown> {
    registry.stop_housekeeping();
    let mut groups = JoinSet::new();
    for runner in registry.take_runners() {
        groups.spawn(runner.stop(deadline));
    }
    // Drops the handlers and everything they hold, clones of the bus included.
    drop(registry);
    let mut report = Shutdown::default();
    while let Some(leftovers) = groups.join_next().await {
        let leftovers = leftovers.unwrap_or_default();
        report.abandoned += leftovers.abandoned;
        report.unsettled += leftovers.unsettled;
    }
    // Ends the calls that still wait for an event to settle.
    shared.closed.send_replace(true);
    let closing = shared.engine.broker.close();
    if let Ok(closed) = tokio::time::timeout_at(deadline + GRACE, closing).await {
        report.closed = true;
        closed?;
    }
    let Shutdown {
        abandoned,
        unsettled,
        closed,
    } = report;
    if abandoned > 0 || unsettled > 0 || !closed {
        guard::log(|| {
            tracing::warn!(
                target: "everbus::shutdown",
                abandoned,
                unsettled,
                closed,
                "the time for the shutdown was over; what has no durable outcome is delivered again"
            );
        });
    }
    Ok(report)
}
