//! Runs retention once a day. If several buses share a store and a policy, one of them runs it for all.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Code, Maintenance, Pruned, RETENTION_DUTY, Result, Retention};

use crate::duty::{Duty, DutyState, LastRun, Taken, Turn};
use crate::holds;
use crate::runtime::bus::Shared;

/// How often retention runs.
const EVERY: Duration = Duration::from_secs(24 * 3600);
/// How often a bus checks whether retention is due.
const LOOK: Duration = Duration::from_secs(3600);
/// How long a bus holds the duty of retention unless it extends it. It extends it three times in this time.
const HOLD: Duration = Duration::from_secs(600);

/// Checks shortly after the start, and then every hour, whether retention is due, and runs it.
pub(crate) async fn prune_daily(shared: Arc<Shared>, retention: Retention) {
    let first = shared.options.retention_delay.unwrap_or_else(some_minutes);
    // The clock is checked at once, because events that are published from now on carry its time.
    if let Ok(maintenance) = shared.engine.maintenance() {
        // If this fails, the check below fails too and reports the error.
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
                tracing::debug!(target: "everbus::retention", %error, "this engine has no retention: it keeps everything");
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

/// Runs retention if it is due. Returns `None` if it is not due, another bus runs it, the clock is in doubt, or
/// the engine has no maintenance and only its own records were pruned.
async fn once(shared: &Shared, retention: &Retention, owner: &str) -> Result<Option<Pruned>> {
    let maintenance = match shared.engine.maintenance() {
        Ok(maintenance) => maintenance,
        Err(_) if forget_own(shared, retention).await? => return Ok(None),
        Err(error) => return Err(error),
    };
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
    let Some(mut turn) = take_turn(shared, retention, owner).await? else {
        return Ok(None);
    };
    let clock = &*shared.options.clock;
    let done = {
        let mut work = std::pin::pin!(carry_out(shared, maintenance, retention));
        loop {
            tokio::select! {
                done = &mut work => break done,
                // Fails if another bus has taken the duty, because this process was suspended for too long.
                () = tokio::time::sleep(HOLD / 3) => turn.extend(HOLD, clock).await?,
            }
        }
    };
    let result = done.as_ref().map(drop).map_err(ToString::to_string);
    turn.finish(result, clock).await?;
    // Recorded after the turn has ended, so that a recorded run is always a finished one.
    if done.is_ok() {
        let (owner, at) = (owner.to_owned(), clock.now());
        let last = LastRun { owner, at };
        last.note(&shared.engine, RETENTION_DUTY).await?;
    }
    done.map(Some)
}

/// Takes the next turn of the duty. Returns `None` if the last successful run was less than a day ago, or if another
/// bus has the turn. After a failed run, any bus may take the turn at once.
async fn take_turn(shared: &Shared, retention: &Retention, owner: &str) -> Result<Option<Turn>> {
    let clock = &*shared.options.clock;
    let duty = Duty::of(&shared.engine, retention.duty(), owner)?;
    let now = clock.now();
    // A little less than a day, so that the run does not move later every day.
    let recent = now.minus(EVERY - LOOK);
    let is_due = |state: &DutyState| {
        let last = state.succeeded_at;
        last.is_none_or(|last| last <= recent || last > clock.now())
    };
    match duty.take_if(now, HOLD, clock, is_due).await? {
        Taken::Yes(turn) => Ok(Some(turn)),
        Taken::Done(_) | Taken::Busy(_) => Ok(None),
    }
}

async fn carry_out(
    shared: &Shared,
    maintenance: &dyn Maintenance,
    retention: &Retention,
) -> Result<Pruned> {
    forget_handled(shared).await?;
    let now = shared.options.clock.now();
    let kept = holds::applied(&shared.engine, retention.clone(), now).await?;
    maintenance.prune(kept).await
}

/// Prunes the inbox and the dead letters of an engine without maintenance, so that they do not grow for ever. Returns
/// `false` if neither is to be pruned: the engine does not have it, or the settings give no age.
async fn forget_own(shared: &Shared, retention: &Retention) -> Result<bool> {
    let engine = &shared.engine;
    let inbox = engine.inbox.is_some() && shared.options.inbox_retention.is_some();
    if inbox {
        forget_handled(shared).await?;
    }
    let (Some(letters), Some(age)) = (&engine.dead_letters, retention.dead_letters) else {
        return Ok(inbox);
    };
    let dead_letters = match letters.expire(shared.options.clock.now(), age).await {
        Err(error) if error.code() == Code::Unsupported => return Ok(inbox),
        expired => expired?,
    };
    if dead_letters > 0 {
        tracing::info!(target: "everbus::retention", dead_letters, "old dead letters were removed");
    }
    Ok(true)
}

async fn forget_handled(shared: &Shared) -> Result<()> {
    if let Some(age) = shared.options.inbox_retention {
        let before = shared.options.clock.now().minus(age);
        let records = shared.engine.inbox()?.forget(before).await?;
        tracing::info!(target: "everbus::retention", records, "pruned the inbox");
    }
    Ok(())
}

/// The name of this process in the record of duties.
fn owner(shared: &Shared) -> String {
    let source = shared.options.source.as_deref().unwrap_or("a bus");
    format!("{source}, process {}", std::process::id())
}

/// Between one and five minutes, so that processes that start together do not all run it at once.
fn some_minutes() -> Duration {
    Duration::from_secs(fastrand::u64(60..300))
}
