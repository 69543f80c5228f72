//! Replay as copies: publishes the events again under new ids, for all groups.

use std::sync::Arc;

use everbus_core::{
    Appended, Event, EventId, IDEMPOTENCY_KEY, REPLAY_OF, Recorded, Result, Timestamp,
};

use super::corrections::{Corrections, is_copy};
use super::preview::PreviewedGroup;
use super::report::ReplayReport;
use super::saved::Saved;
use super::target::{Context, Target};
use super::whole::whole;

/// Copies of about this total size are appended in one step.
const STEP_BYTES: usize = 4 << 20;

/// Publishes copies.
#[derive(Debug, Default)]
pub struct Copies {
    /// The ids of the copies are made from this: the run, and when it began.
    run: Option<(String, Timestamp)>,
    corrections: Corrections,
}

/// The event under a new id, linked to the original; everything else is unchanged.
pub(super) fn copy_of(original: &Event, id: EventId) -> Result<Event> {
    let mut attributes = original.attributes().cloned().unwrap_or_default();
    attributes.foreign_id = None;
    // An addressed event that is selected by its id is copied for all groups.
    attributes.address = None;
    // The correlation id of an event without one is its own id; the copy keeps that id.
    let correlation = original.correlation_id();
    attributes.correlation_id = Some(correlation.into_owned());
    let link = original.display_id().into_owned();
    attributes.metadata.insert(REPLAY_OF.to_owned(), link);
    let key = original.idempotency_key().into_owned();
    attributes.metadata.insert(IDEMPOTENCY_KEY.to_owned(), key);
    Event::builder(original.type_arc().clone())
        .id(id)
        .version(original.version())
        .occurred_at(original.occurred_at())
        .payload(original.payload().clone())
        .attributes(attributes)
        .build()
}

impl Copies {
    /// The events to copy; the others are counted as skipped.
    fn sort(
        &self,
        context: &Context,
        events: &[Arc<Recorded>],
        report: &mut ReplayReport,
    ) -> Vec<Arc<Recorded>> {
        let all = events.iter();
        let originals = all.filter(|record| context.single || !is_copy(record));
        let originals: Vec<_> = originals.cloned().collect();
        report.skips.copies += (events.len() - originals.len()) as u64;
        self.corrections.sort(None, originals, &mut report.skips)
    }

    /// The same run and event always give the same id, so that a resumed run publishes nothing twice.
    fn id(&self, original: &Event) -> EventId {
        let (run, at) = match &self.run {
            Some((run, at)) => (run.as_str(), *at),
            None => ("", Timestamp::EPOCH),
        };
        EventId::derived(original.id(), at, run, REPLAY_OF, 0)
    }

    async fn publish(
        &self,
        context: &Context,
        originals: &[Arc<Recorded>],
        copies: Vec<Event>,
        report: &mut ReplayReport,
    ) -> Result<()> {
        if copies.is_empty() {
            return Ok(());
        }
        for copy in &copies {
            context.bus.shared().check_stream(copy)?;
        }
        let answers: Vec<Result<Appended>> = context.bus.append_as_is(copies).await?;
        for (original, answer) in originals.iter().zip(answers) {
            match answer {
                Ok(_) => report.processed += 1,
                Err(error) => report.failed(original, error.to_string(), context.kept_failures),
            }
        }
        Ok(())
    }
}

impl Target for Copies {
    const PORTION: usize = 256;

    fn describe(&self) -> String {
        "copies".into()
    }

    async fn prepare(&mut self, context: &Context, saved: &Saved, _: bool) -> Result<()> {
        self.corrections = Corrections::load(context).await?;
        self.run = Some((saved.run.to_string(), saved.started_at));
        Ok(())
    }

    async fn take(
        &mut self,
        context: &Context,
        events: &[Arc<Recorded>],
        report: &mut ReplayReport,
    ) -> Result<()> {
        let (mut originals, mut copies, mut bytes) = (Vec::new(), Vec::new(), 0);
        for record in &self.sort(context, events, report) {
            let original = whole(context.bus.shared(), record).await?;
            let copy = original.and_then(|it| copy_of(&it.event, self.id(&it.event)));
            match copy {
                Ok(copy) => {
                    bytes += copy.payload().len();
                    originals.push(record.clone());
                    copies.push(copy);
                }
                Err(error) => report.failed(record, error.to_string(), context.kept_failures),
            }
            if bytes > STEP_BYTES {
                let step = std::mem::take(&mut copies);
                self.publish(context, &originals, step, report).await?;
                originals.clear();
                bytes = 0;
            }
        }
        self.publish(context, &originals, copies, report).await
    }

    async fn look(
        &mut self,
        context: &Context,
        events: &[Arc<Recorded>],
        report: &mut ReplayReport,
    ) -> Result<Vec<Arc<Recorded>>> {
        let copied = self.sort(context, events, report);
        report.processed += copied.len() as u64;
        Ok(copied)
    }

    /// All groups with a matching subscription. No inbox knows the copies.
    async fn groups(&mut self, context: &Context) -> Result<Vec<PreviewedGroup>> {
        self.corrections = Corrections::load(context).await?;
        let groups = context.bus.groups().await?;
        let live = groups.iter().map(|info| PreviewedGroup::live(info, false));
        live.collect()
    }
}
