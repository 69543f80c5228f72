//! Retention runs by itself, once a day: of the buses that share a store, one does it for all that say
//! the same.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Code, Maintenance, Pruned, Result, Retention};

use crate::runtime::bus::Shared;

/// How often it is done.
const EVERY: Duration = Duration::from_secs(24 * 3600);
/// How often a bus looks whether it is time.
const LOOK: Duration = Duration::from_secs(3600);

/// Looks shortly after the start, and then every hour, whether retention is due, and sees to it.
pub(crate) async fn prune_daily(shared: Arc<Shared>, retention: Retention) {
    let first = shared.options.retention_delay.unwrap_or_else(some_minutes);
    // At once: what is published from now on has the time of this clock, right or wrong.
    if let Ok(maintenance) = shared.engine.maintenance() {
        // If that fails, so will the look below, and say so.
        let _ = maintenance.look_at_clock().await;
    }
    tokio::time::sleep(first).await;
    let owner = owner(&shared);
    loop {
        match once(&shared, &retention, &owner).await {
            Ok(None) => {}
            Ok(Some(pruned)) => tracing::info!(
                target: "everbus::retention",
                removed = pruned.removed,
                kept = pruned.kept,
                payloads = pruned.payloads,
                dead_letters = pruned.dead_letters,
                audit = pruned.audit,
                outbox = pruned.outbox,
                freed_bytes = pruned.freed_bytes,
                "retention ran"
            ),
            Err(error) if error.code() == Code::EventBusShutdownError => return,
            Err(error) if error.code() == Code::Unsupported => {
                tracing::debug!(target: "everbus::retention", %error, "this engine keeps everything");
                return;
            }
            Err(error) => {
                shared.fail_if_fatal(&error);
                tracing::warn!(target: "everbus::retention", %error, "retention failed");
            }
        }
        tokio::time::sleep(LOOK + some_minutes()).await;
    }
}

/// Runs it, if nobody has within a day and the clock is to be believed.
async fn once(shared: &Shared, retention: &Retention, owner: &str) -> Result<Option<Pruned>> {
    let maintenance = shared.engine.maintenance()?;
    if let Some(doubt) = maintenance.look_at_clock().await? {
        tracing::warn!(
            target: "everbus::retention",
            owner,
            before = %doubt.before,
            found = %doubt.found,
            "retention waits: {doubt} (everbus retention run --trust-clock)"
        );
        return Ok(None);
    }
    // A little less than a day, so that it does not come later every day.
    let duty = retention.duty();
    if !maintenance
        .take_duty(duty.clone(), owner.to_owned(), EVERY - LOOK)
        .await?
    {
        return Ok(None);
    }
    let done = carry_out(shared, maintenance, retention).await;
    if done.is_err() {
        // Somebody else may have better luck; if the store is gone, that fails too.
        let _ = maintenance.return_duty(duty, owner.to_owned()).await;
    }
    done.map(Some)
}

async fn carry_out(
    shared: &Shared,
    maintenance: &dyn Maintenance,
    retention: &Retention,
) -> Result<Pruned> {
    if let Some(age) = shared.options.inbox_retention {
        let before = shared.options.clock.now().minus(age);
        let records = shared.engine.inbox()?.forget(before).await?;
        tracing::info!(target: "everbus::retention", records, "pruned the inbox");
    }
    maintenance.prune(retention.clone()).await
}

/// Who we are, for the record.
fn owner(shared: &Shared) -> String {
    let source = shared.options.source.as_deref().unwrap_or("a bus");
    format!("{source}, process {}", std::process::id())
}

/// Between one and five minutes, so that processes that start together do not all come at once.
fn some_minutes() -> Duration {
    Duration::from_secs(fastrand::u64(60..300))
}
