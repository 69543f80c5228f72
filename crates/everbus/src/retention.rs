//! Prunes the log, and with it the inbox, by itself where the bus was given a retention.

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
        if let Some(age) = shared.options.inbox_retention {
            forget_handled(&shared, age).await;
        }
        let pruned = match shared.engine.maintenance() {
            Ok(maintenance) => maintenance.prune(retention.clone()).await,
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

async fn forget_handled(shared: &Shared, age: Duration) {
    let before = shared.options.clock.now().minus(age);
    let forgotten = match shared.engine.inbox() {
        Ok(inbox) => inbox.forget(before).await,
        Err(error) => Err(error),
    };
    match forgotten {
        Ok(records) => {
            tracing::info!(target: "everbus::retention", records, "pruned the inbox");
        }
        Err(error) => {
            shared.fail_if_fatal(&error);
            tracing::warn!(target: "everbus::retention", %error, "could not prune the inbox");
        }
    }
}
