//! The lag of groups: read on request, and reported at intervals as gauges and alerts.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Code, GroupInfo, Result};
use tokio::time::Instant;

use crate::guard;
use crate::runtime::bus::Shared;
use crate::runtime::drops;

/// How often the gauges are updated, at most.
const EVERY: Duration = Duration::from_secs(15);
/// Counting a long backlog is slow. The pause is at least this many times the duration of the count, so
/// counting takes at most one percent of the time.
const PAUSE_PER_COST: u32 = 100;

/// The state of every group, with its lag in each stream; updates the gauges.
pub(crate) async fn look(shared: &Arc<Shared>) -> Result<Vec<GroupInfo>> {
    let groups = shared.engine.broker.inspect().await?;
    let (streams, now) = (&shared.options.streams, shared.options.clock.now());
    let groups = groups.into_iter();
    let groups: Vec<GroupInfo> = groups.map(|info| info.with_streams(streams, now)).collect();
    guard::log(|| shared.stats.lag(&groups, streams, now));
    drops::report(shared, &groups);
    Ok(groups)
}

/// Updates the gauges until the bus ends.
pub(crate) async fn show(shared: Arc<Shared>) {
    let mut pause = EVERY;
    loop {
        tokio::time::sleep(pause).await;
        let start = Instant::now();
        match look(&shared).await {
            Ok(_) => {}
            Err(error) if error.code() == Code::EventBusShutdownError => return,
            // The next try may succeed; other calls to the engine report the error as well.
            Err(error) => {
                tracing::debug!(target: "everbus::bus", %error, "the lag of the groups is not known");
            }
        }
        pause = EVERY.max(start.elapsed() * PAUSE_PER_COST);
    }
}
