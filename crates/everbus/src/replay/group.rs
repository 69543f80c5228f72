//! Replay into an existing group.

use std::sync::Arc;

use everbus_core::{
    Code, Error, EventId, GroupInfo, GroupName, Pattern, Recorded, Redelivery, Result,
};

use super::copies::copy_of;
use super::corrections::{Corrections, is_copy};
use super::preview::PreviewedGroup;
use super::report::ReplayReport;
use super::saved::Saved;
use super::target::{Context, Target, positions, wanted};
use super::whole::whole;

/// Redelivers the events to a group.
#[derive(Debug)]
pub struct LiveGroup {
    group: GroupName,
    patterns: Vec<Pattern>,
    /// Whether the inbox may skip events.
    absorbs: bool,
    corrections: Corrections,
    /// The ids of addressed copies are made from this.
    run: Option<EventId>,
}

impl LiveGroup {
    pub(super) fn new(group: GroupName) -> Self {
        Self {
            group,
            patterns: Vec::new(),
            absorbs: true,
            corrections: Corrections::default(),
            run: None,
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

    async fn get_ready(&mut self, context: &Context) -> Result<GroupInfo> {
        let info = self.find(context).await?;
        let patterns = info.patterns.iter().map(|text| Pattern::new(text));
        self.patterns = patterns.collect::<Result<_>>()?;
        self.absorbs = context.bus.may_absorb(&self.group).await;
        self.corrections = Corrections::load(context).await?;
        Ok(info)
    }

    /// Publishes copies addressed to the group, for engines that cannot redeliver an event. A resumed run
    /// makes the same ids again.
    async fn address(
        &self,
        context: &Context,
        events: &[Arc<Recorded>],
    ) -> Result<Vec<Redelivery>> {
        let run = self.run.unwrap_or_default().to_string();
        let mut copies = Vec::with_capacity(events.len());
        for record in events {
            let (original, group) = (&record.event, self.group.as_str());
            let id = EventId::derived(original.id(), record.received_at, group, &run, 0);
            let whole = whole(context.bus.shared(), record).await??;
            copies.push(copy_of(&whole.event, id)?.addressed_to(&self.group));
        }
        let answers = context.bus.append_as_is(copies).await?;
        let queued = answers
            .into_iter()
            .map(|answer| answer.map(|_| Redelivery::Queued));
        queued.collect()
    }

    /// Offers events to the group and counts the results; if not `really`, counts what the results would
    /// be. Returns the events that the group takes, including those that its inbox will skip.
    async fn offer(
        &self,
        context: &Context,
        events: &[Arc<Recorded>],
        report: &mut ReplayReport,
        really: bool,
    ) -> Result<Vec<Arc<Recorded>>> {
        let engine = &context.bus.shared().engine;
        let offered = wanted(events, &self.patterns, report);
        let group = Some(&self.group);
        let mut offered = self.corrections.sort(group, offered, &mut report.skips);
        if engine.redeliver.is_none() && !context.single {
            // Copies of earlier replays and retries are in the log as well; only their originals are
            // offered.
            let all = offered.len();
            offered.retain(|record| !is_copy(record));
            report.skips.copies += (all - offered.len()) as u64;
        }
        // The inbox is read before the delivery, because afterwards the group may have handled the events again. No
        // inbox knows a copy.
        let absorbed = match &engine.inbox {
            Some(inbox) if self.absorbs && engine.redeliver.is_some() => {
                inbox.handled(self.group.clone(), offered.clone()).await?
            }
            _ => vec![false; offered.len()],
        };
        let (group, positions) = (self.group.clone(), positions(&offered));
        let answers = match &engine.redeliver {
            Some(engine) if really => engine.redeliver(group, positions).await?,
            Some(engine) => engine.redeliverable(group, positions).await?,
            None if really => self.address(context, &offered).await?,
            None => vec![Redelivery::Queued; offered.len()],
        };
        let mut taken = Vec::new();
        for ((record, answer), absorbed) in offered.into_iter().zip(answers).zip(absorbed) {
            match answer {
                Redelivery::Owed => report.skips.owed += 1,
                Redelivery::Gone => report.skips.gone += 1,
                Redelivery::Queued => {
                    *(if absorbed {
                        &mut report.skips.absorbed
                    } else {
                        &mut report.processed
                    }) += 1;
                    taken.push(record);
                }
            }
        }
        Ok(taken)
    }
}

impl Target for LiveGroup {
    const PORTION: usize = 1000;

    fn describe(&self) -> String {
        format!("the group {}", self.group)
    }

    async fn prepare(&mut self, context: &Context, saved: &Saved, _: bool) -> Result<()> {
        self.run = Some(saved.run);
        self.get_ready(context).await.map(drop)
    }

    async fn take(
        &mut self,
        context: &Context,
        events: &[Arc<Recorded>],
        report: &mut ReplayReport,
    ) -> Result<()> {
        self.offer(context, events, report, true).await.map(drop)
    }

    async fn look(
        &mut self,
        context: &Context,
        events: &[Arc<Recorded>],
        report: &mut ReplayReport,
    ) -> Result<Vec<Arc<Recorded>>> {
        self.offer(context, events, report, false).await
    }

    async fn groups(&mut self, context: &Context) -> Result<Vec<PreviewedGroup>> {
        let info = self.get_ready(context).await?;
        Ok(vec![PreviewedGroup::live(&info, true)?])
    }
}
