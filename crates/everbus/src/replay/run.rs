//! The run itself: reads ahead while the target works, in portions, and keeps the checkpoint.

use std::sync::Arc;

use everbus_core::{AuditEntry, Recorded, Result};
use serde_json::json;
use tokio::time::Instant;

use super::pace::{Pace, Stop};
use super::report::{ReplayProgress, ReplayReport};
use super::saved::{Keeper, Saved};
use super::selection::Selection;
use super::source::{self, Batch, Source};
use super::target::{Context, Target};
use super::{Filter, Progress, Replay};
use crate::bus::Bus;
use crate::guard;

/// Read at once.
const BATCH: usize = 4096;

pub(super) async fn run<T: Target>(replay: Replay, mut target: T) -> Result<ReplayReport> {
    let began = Instant::now();
    let Replay {
        bus,
        selection,
        filter,
        progress,
        stop,
        name,
        rate,
        kept_failures,
        ..
    } = replay;
    bus.accepts()?;
    let shared = bus.shared().clone();
    let engine = &shared.engine;
    let mut keeper = Keeper::new(engine, name.as_deref())?;
    let (described, into) = (selection.description(), target.describe());
    let resumed = keeper.load(&described, &into).await?;
    let is_resumed = resumed.is_some();
    let mut saved = match resumed {
        Some(saved) => saved,
        None => {
            let bounds = source::bounds(engine, &selection).await?;
            Saved::begin(described, into, shared.options.clock.now(), bounds)
        }
    };
    let mut report = ReplayReport {
        processed: saved.processed,
        errors: saved.errors,
        skips: saved.skips,
        ..ReplayReport::default()
    };
    let context = Context {
        bus: bus.clone(),
        stop: Stop::on(stop),
        name: name.clone(),
        kept_failures,
        single: selection.event.is_some(),
    };
    target.prepare(&context, &saved, is_resumed).await?;
    audit(&bus, &selection, &saved.target, name.as_deref()).await?;
    keeper.save(&mut saved, &report, true).await?;

    let mut steps = Steps {
        context: &context,
        pace: Pace::new(rate, T::PORTION),
        filter,
        progress,
    };
    let mut source = Source::open(engine, &selection, saved.done, saved.upto, BATCH)?;
    let mut ready = source.next().await?;
    while let Some(batch) = ready {
        // Polled in this order: the next batch is being read while this one is worked on.
        let (ahead, worked) = tokio::join!(
            biased;
            source.next(),
            steps.work(batch, &mut target, &mut keeper, &mut saved, &mut report)
        );
        worked?;
        if context.stop.is_set() && saved.done < saved.upto {
            report.next = Some(saved.done);
            break;
        }
        ready = ahead?;
    }
    report.skipped = report.skips.total();
    if report.next.is_none() {
        saved.done = saved.upto;
    }
    keeper.save(&mut saved, &report, true).await?;
    target.finish(&context, &mut report).await?;
    // The target may have found that it was stopped with work left.
    if report.next.is_none() {
        keeper.remove().await?;
    }
    report.elapsed = began.elapsed();
    Ok(report)
}

/// Takes batches to the target in portions.
struct Steps<'a> {
    context: &'a Context,
    pace: Pace,
    filter: Option<Filter>,
    progress: Option<Progress>,
}

impl Steps<'_> {
    async fn work<T: Target>(
        &mut self,
        batch: Batch,
        target: &mut T,
        keeper: &mut Keeper,
        saved: &mut Saved,
        report: &mut ReplayReport,
    ) -> Result<()> {
        let mut rest = batch.events.as_slice();
        while !rest.is_empty() {
            let (portion, others) = rest.split_at(self.pace.size().min(rest.len()));
            self.pace.begin(portion.len(), &self.context.stop).await;
            if self.context.stop.is_set() {
                return Ok(());
            }
            match &self.filter {
                None => target.take(self.context, portion, report).await?,
                Some(filter) => {
                    let passes = |record: &&Arc<Recorded>| filter(record);
                    let passed: Vec<_> = portion.iter().filter(passes).cloned().collect();
                    report.skips.filtered += (portion.len() - passed.len()) as u64;
                    target.take(self.context, &passed, report).await?;
                }
            }
            self.pace.end();
            rest = others;
            let last = portion.last().map(|record| record.position);
            saved.done = match last {
                Some(position) if !rest.is_empty() => position,
                _ => batch.reached,
            };
            keeper.save(saved, report, T::SAVED_EACH_TIME).await?;
            self.tell(saved, report);
        }
        if saved.done < batch.reached {
            saved.done = batch.reached;
            self.tell(saved, report);
        }
        Ok(())
    }

    fn tell(&mut self, saved: &Saved, report: &ReplayReport) {
        let Some(told) = &mut self.progress else {
            return;
        };
        let progress = ReplayProgress {
            processed: report.processed,
            skipped: report.skips.total(),
            errors: report.errors,
            from: saved.from,
            position: saved.done,
            upto: saved.upto,
        };
        // Whoever watches must not end what is watched.
        let _ = guard::contain(|| told(&progress));
    }
}

/// Puts on record that somebody replays something, where there is an audit trail.
pub(super) async fn audit(
    bus: &Bus,
    selection: &Selection,
    target: &str,
    name: Option<&str>,
) -> Result<()> {
    let shared = bus.shared();
    let Some(audit) = &shared.engine.audit else {
        return Ok(());
    };
    let actor = shared.options.source.as_deref().unwrap_or("everbus");
    let entry = AuditEntry::new(actor, "replay").details(json!({
        "selection": selection.description(),
        "target": target,
        "name": name,
    }));
    audit.record(entry).await.map(drop)
}
