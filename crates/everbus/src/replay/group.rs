//! Replay into a group that is there.

use std::sync::Arc;

use everbus_core::{Code, Error, GroupInfo, GroupName, Pattern, Recorded, Redelivery, Result};

use super::preview::PreviewedGroup;
use super::report::ReplayReport;
use super::saved::Saved;
use super::target::{Context, Target, positions, wanted};

/// Hands the events to a group once more.
#[derive(Debug)]
pub struct LiveGroup {
    group: GroupName,
    patterns: Vec<Pattern>,
    /// Whether the inbox may absorb something.
    absorbs: bool,
}

impl LiveGroup {
    pub(super) fn new(group: GroupName) -> Self {
        Self {
            group,
            patterns: Vec::new(),
            absorbs: true,
        }
    }

    async fn find(&self, context: &Context) -> Result<GroupInfo> {
        let found = context.group(&self.group).await?;
        found.ok_or_else(|| {
            Error::new(
                Code::GroupNotFound,
                format!("there is no group {}", self.group),
            )
            .hint("a group exists from its first subscription; bus.groups() lists them")
        })
    }
}

impl Target for LiveGroup {
    const PORTION: usize = 1000;

    fn describe(&self) -> String {
        format!("the group {}", self.group)
    }

    async fn prepare(&mut self, context: &Context, _: &Saved, _: bool) -> Result<()> {
        let info = self.find(context).await?;
        let patterns = info.patterns.iter().map(|text| Pattern::new(text));
        self.patterns = patterns.collect::<Result<_>>()?;
        self.absorbs = context.bus.may_absorb(&self.group).await;
        Ok(())
    }

    async fn take(
        &mut self,
        context: &Context,
        events: &[Arc<Recorded>],
        report: &mut ReplayReport,
    ) -> Result<()> {
        let engine = &context.bus.shared().engine;
        let wanted = wanted(events, &self.patterns, report);
        let positions = positions(&wanted);
        // Asked before: afterwards the group may have handled them again.
        let absorbed = match &engine.inbox {
            Some(inbox) if self.absorbs => inbox.handled(self.group.clone(), wanted).await?,
            _ => vec![false; wanted.len()],
        };
        let redelivered = engine.broker.redeliver(self.group.clone(), positions);
        for (answer, absorbed) in redelivered.await?.into_iter().zip(absorbed) {
            match answer {
                Redelivery::Queued if absorbed => report.skips.absorbed += 1,
                Redelivery::Queued => report.processed += 1,
                Redelivery::Owed => report.skips.owed += 1,
                Redelivery::Gone => report.skips.gone += 1,
            }
        }
        Ok(())
    }

    async fn groups(&mut self, context: &Context) -> Result<Vec<PreviewedGroup>> {
        let info = self.find(context).await?;
        Ok(vec![PreviewedGroup::live(context, &info, true).await?])
    }
}
