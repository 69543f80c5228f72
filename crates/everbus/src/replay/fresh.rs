//! Replay into a fresh group: a group without subscriptions in the engine, so that it gets only the events
//! that the replay gives it.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Code, Cursor, DeadLetterFilter, Error, GroupInfo, GroupName, PageRequest, Pattern, Recorded,
    Redelivery, Result,
};

use super::preview::PreviewedGroup;
use super::report::{ReplayFailure, ReplayReport};
use super::saved::Saved;
use super::target::{Context, Target, positions, wanted};
use crate::runtime::bus::Bus;
use crate::runtime::router::{Resolved, Router};

/// At most this many events wait for the handlers; then reading pauses.
const ROOM: u64 = 5_000;
/// At most this many dead letters are listed for the report.
const MAX_LISTED: usize = 10_000;
/// How often the group is polled while events wait: at first, and at most.
const LOOK: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(100));

/// Runs the given handlers in a group of the replay.
pub struct FreshGroup {
    router: Option<Router>,
    guest: Option<Guest>,
    patterns: Vec<Pattern>,
    /// The number of events that wait for the handlers, as far as known.
    given: u64,
    /// Where the run ends.
    upto: Cursor,
}

/// The group while it exists. Dropping it stops its handlers.
struct Guest {
    bus: Bus,
    group: GroupName,
    /// Whether the group must still exist when the run is resumed.
    resumable: bool,
    dismissed: bool,
}

impl FreshGroup {
    pub(super) fn new(router: Router) -> Self {
        Self {
            router: Some(router),
            guest: None,
            patterns: Vec::new(),
            given: 0,
            upto: Cursor::START,
        }
    }

    fn resolve(&mut self) -> Result<Resolved> {
        let router = self.router.take().unwrap_or_default();
        let resolved = router.resolve()?;
        if resolved.subscriptions.is_empty() {
            return Err(
                Error::new(Code::InvalidSetting, "the router has no handlers")
                    .hint("add one with Router::on"),
            );
        }
        let all = resolved.subscriptions.iter();
        self.patterns = all
            .map(|subscription| subscription.pattern.clone())
            .collect();
        Ok(resolved)
    }

    fn guest(&self) -> Result<&Guest> {
        let absent = || Error::new(Code::Internal, "a replay without its group");
        self.guest.as_ref().ok_or_else(absent)
    }

    /// Waits until at most this many events wait for the handlers, or the run is stopped.
    async fn wait(&mut self, context: &Context, most: u64) -> Result<GroupInfo> {
        let group = self.guest()?.group.clone();
        let (mut pause, longest) = LOOK;
        loop {
            context.bus.accepts()?;
            let stopped = context.bus.stopped_groups();
            if let Some((_, error)) = stopped.into_iter().find(|(name, _)| *name == group) {
                return Err(error);
            }
            let info = context.group(&group).await?.ok_or_else(|| {
                Error::new(
                    Code::GroupNotFound,
                    format!("the group {group} of the replay was removed"),
                )
            })?;
            self.given = info.waiting + info.in_flight;
            if self.given <= most || context.stop.is_set() {
                return Ok(info);
            }
            context.stop.or(tokio::time::sleep(pause)).await;
            pause = (pause * 2).min(longest);
        }
    }
}

/// The group of a run.
fn group_name(context: &Context, run: &str) -> Result<GroupName> {
    GroupName::new(&match &context.name {
        Some(name) => format!("replay-{name}"),
        None => format!("replay-{run}"),
    })
}

impl Target for FreshGroup {
    const PORTION: usize = 1000;

    fn describe(&self) -> String {
        "a fresh group".into()
    }

    async fn prepare(&mut self, context: &Context, saved: &Saved, resumed: bool) -> Result<()> {
        let resolved = self.resolve()?;
        self.upto = saved.upto.clone();
        let group = group_name(context, &saved.run.to_string())?;
        if !resumed && context.group(&group).await?.is_some() {
            return Err(Error::new(
                Code::GroupConflict,
                format!("the group {group} of an earlier run is still there"),
            )
            .hint("look at its dead letters, then remove the group, or use another name"));
        }
        // Set before the handlers are mounted: whatever happens then, they are removed.
        self.guest = Some(Guest {
            bus: context.bus.clone(),
            group: group.clone(),
            resumable: context.name.is_some(),
            dismissed: false,
        });
        context.bus.mount_apart(resolved, &group).await
    }

    async fn take(
        &mut self,
        context: &Context,
        events: &[Arc<Recorded>],
        report: &mut ReplayReport,
    ) -> Result<()> {
        let positions = positions(&wanted(events, &self.patterns, report));
        let group = self.guest()?.group.clone();
        let engine = &context.bus.shared().engine;
        for answer in engine.redeliver()?.redeliver(group, positions).await? {
            match answer {
                Redelivery::Gone => report.skips.gone += 1,
                // An earlier part of the run gave these to the group and stopped before it counted them.
                Redelivery::Queued | Redelivery::Owed => {
                    report.processed += 1;
                    self.given += 1;
                }
            }
        }
        if self.given > ROOM {
            self.wait(context, ROOM / 2).await?;
        }
        Ok(())
    }

    async fn look(
        &mut self,
        _: &Context,
        events: &[Arc<Recorded>],
        report: &mut ReplayReport,
    ) -> Result<Vec<Arc<Recorded>>> {
        let wanted = wanted(events, &self.patterns, report);
        report.processed += wanted.len() as u64;
        Ok(wanted)
    }

    async fn finish(&mut self, context: &Context, report: &mut ReplayReport) -> Result<()> {
        let info = self.wait(context, 0).await?;
        let Some(mut guest) = self.guest.take() else {
            return Ok(());
        };
        guest.dismiss().await;
        let (left, dead) = (info.waiting + info.in_flight, info.dead_letters);
        if left > 0 {
            // The run was stopped after everything was read. A resumed run continues with the waiting events.
            report.next.get_or_insert_with(|| self.upto.clone());
        }
        report.processed = report.processed.saturating_sub(dead + left);
        report.errors += dead;
        if dead > 0 {
            self.collect_failures(context, &info.name, report).await?;
        }
        if dead > 0 || (report.next.is_some() && guest.resumable) {
            report.kept_group = Some(info.name);
            return Ok(());
        }
        context.bus.remove_group(info.name).await
    }

    async fn groups(&mut self, context: &Context) -> Result<Vec<PreviewedGroup>> {
        let resolved = self.resolve()?;
        let name = group_name(context, "…")?;
        let subscriptions = resolved.subscriptions.iter();
        let handlers = subscriptions.map(|subscription| {
            let name = subscription.settings.name.clone();
            name.unwrap_or_else(|| subscription.pattern.to_string())
        });
        Ok(vec![PreviewedGroup::fresh(
            name,
            self.patterns.clone(),
            handlers.collect(),
        )])
    }
}

impl FreshGroup {
    async fn collect_failures(
        &self,
        context: &Context,
        group: &GroupName,
        report: &mut ReplayReport,
    ) -> Result<()> {
        let Ok(letters) = context.bus.shared().engine.dead_letters() else {
            return Ok(());
        };
        let most = context.kept_failures.min(MAX_LISTED);
        if most == 0 {
            return Ok(());
        }
        let filter = DeadLetterFilter {
            group: Some(group.clone()),
            ..DeadLetterFilter::default()
        };
        let page = PageRequest {
            limit: most,
            ..PageRequest::default()
        };
        let letters = letters.list(filter, page).await?.items;
        report.failures = letters
            .iter()
            .rev()
            .map(|letter| ReplayFailure::new(&letter.record, letter.last_error()))
            .collect();
        Ok(())
    }
}

impl Guest {
    /// Stops the handlers; running ones may finish.
    async fn dismiss(&mut self) {
        self.dismissed = true;
        self.bus.dismount(&self.group).await;
    }
}

impl Drop for Guest {
    /// The run was dropped or failed: its handlers must stop, and a group that cannot be resumed must not
    /// stay.
    fn drop(&mut self) {
        if self.dismissed {
            return;
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        let (bus, group, resumable) = (self.bus.clone(), self.group.clone(), self.resumable);
        runtime.spawn(async move {
            bus.dismount(&group).await;
            if !resumable
                && let Err(error) = bus.remove_group(group).await
                && error.code() != Code::GroupNotFound
            {
                tracing::warn!(target: "everbus::replay", %error, "the group of a replay could not be removed");
            }
        });
    }
}
