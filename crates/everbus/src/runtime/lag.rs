//! How far groups are behind: asked by people, and shown to the recorder of metrics now and then.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Code, GroupInfo, Result};
use tokio::time::Instant;

use crate::guard;
use crate::runtime::bus::Shared;

/// How often the gauges are set.
const EVERY: Duration = Duration::from_secs(15);
/// Counting a long backlog takes its time: it is done so seldom that it takes a hundredth of it.
const PAUSE_PER_COST: u32 = 100;

/// How every group stands, with its lag in each stream; the gauges are set by it.
pub(crate) async fn look(shared: &Shared) -> Result<Vec<GroupInfo>> {
    let groups = shared.engine.broker.inspect().await?;
    let (streams, now) = (&shared.options.streams, shared.options.clock.now());
    let groups = groups.into_iter();
    let groups: Vec<GroupInfo> = groups.map(|info| info.with_streams(streams, now)).collect();
    guard::log(|| shared.stats.lag(&groups, streams, now));
    Ok(groups)
}

/// Sets the gauges until the bus ends.
pub(crate) async fn show(shared: Arc<Shared>) {
    let mut pause = EVERY;
    loop {
        tokio::time::sleep(pause).await;
        let start = Instant::now();
        match look(&shared).await {
            Ok(_) => {}
            Err(error) if error.code() == Code::EventBusShutdownError => return,
            // The next look may succeed; whoever works with the engine meets the error as well.
            Err(error) => {
                tracing::debug!(target: "everbus::bus", %error, "the lag of the groups is not known");
            }
        }
        pause = EVERY.max(start.elapsed() * PAUSE_PER_COST);
    }
}
