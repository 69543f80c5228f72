//! Prunes the log by itself where the bus was given a retention.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Code, Retention};

use crate::bus::Shared;

const EVERY: Duration = Duration::from_secs(3600);

pub(crate) async fn prune_hourly(shared: Arc<Shared>, retention: Retention) {
    let mut hour = tokio::time::interval(EVERY);
    hour.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        hour.tick().await;
        let pruned = match shared.engine.maintenance() {
            Ok(maintenance) => maintenance.prune(retention).await,
            Err(error) => Err(error),
        };
        match pruned {
            Ok(pruned) => tracing::info!(
                target: "everbus::retention",
                removed = pruned.removed,
                kept = pruned.kept,
                "pruned the log"
            ),
            Err(error) if error.code() == Code::Shutdown => return,
            Err(error) => {
                shared.fail_if_fatal(&error);
                tracing::warn!(target: "everbus::retention", %error, "could not prune the log");
                if error.code() == Code::Unsupported {
                    return;
                }
            }
        }
    }
}
