//! The run of a replay: reads ahead while the target works, and keeps the checkpoint.

use std::sync::Arc;

use everbus_core::{Recorded, Result};
use serde_json::Value;
use tokio::time::Instant;

use super::pace::Pace;
use super::report::{ReplayProgress, ReplayReport};
use super::saved::{Keeper, Saved};
use super::selection::Selection;
use super::source::{self, Batch, Bounds, Source};
use super::target::{Context, Target};
use super::{Filter, Progress, Replay};
use crate::audit::{Action, audited};
use crate::guard;

pub(super) async fn run<T: Target>(replay: Replay, target: T) -> Result<ReplayReport> {
    let shared = replay.bus.shared().clone();
    shared.accepts()?;
    let keeper = Keeper::new(&shared.engine, replay.name.as_deref())?;
    let (described, into) = (replay.selection.description(), target.describe());
    let found = keeper.load(&described, &into).await?;
    let is_resumed = found.is_some();
    let saved = match found {
        Some(saved) => saved,
        None => {
            let bounds = source::bounds(&shared.engine, &replay.selection).await?;
            Saved::begin(described, into, shared.options.clock.now(), bounds)
        }
    };
    if !T::AUDITED {
        return go(replay, target, keeper, saved, is_resumed).await;
    }
    let action = action(&replay.selection, &saved.target, replay.name.as_deref());
    let operator = shared.audit().operator();
    let work = go(replay, target, keeper, saved, is_resumed);
    audited(&shared.engine, &operator, action, work).await
}

async fn go<T: Target>(
    mut replay: Replay,
    mut target: T,
    mut keeper: Keeper,
    mut saved: Saved,
    is_resumed: bool,
) -> Result<ReplayReport> {
    let began = Instant::now();
    let context = replay.context();
    let Replay {
        selection,
        filter,
        progress,
        rate,
        ..
    } = replay;
    let mut report = ReplayReport {
        processed: saved.processed,
        errors: saved.errors,
        skips: saved.skips,
        ..ReplayReport::default()
    };
    target.prepare(&context, &saved, is_resumed).await?;
    keeper.save(&mut saved, &report, true).await?;
    let mut steps = Steps {
        context: &context,
        pace: Pace::new(rate, T::PORTION),
        filter,
        progress,
    };
    let engine = &context.bus.shared().engine;
    let left = Bounds {
        from: saved.done.clone(),
        upto: saved.upto.clone(),
    };
    let mut source = Source::open(engine, &selection, left)?;
    let mut ready = source.next().await?;
    while let Some(batch) = ready {
        // Polled in this order: the next batch is read while this one is processed.
        let (ahead, worked) = tokio::join!(
            biased;
            source.next(),
            steps.work(batch, &mut target, &mut keeper, &mut saved, &mut report)
        );
        worked?;
        if context.stop.is_set() && !saved.done.reaches(&saved.upto) {
            report.next = Some(saved.done.clone());
            break;
        }
        ready = ahead?;
    }
    report.skipped = report.skips.total();
    if report.next.is_none() {
        saved.done = saved.upto.clone();
    }
    keeper.save(&mut saved, &report, true).await?;
    target.finish(&context, &mut report).await?;
    // The target may have stopped with work left.
    if report.next.is_none() {
        keeper.remove().await?;
    }
    report.elapsed = began.elapsed();
    Ok(report)
}

/// Gives batches to the target in smaller portions.
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
            if rest.is_empty() {
                saved.done = batch.reached.clone();
            } else {
                portion
                    .iter()
                    .for_each(|record| saved.done.advance(record.position));
            }
            keeper.save(saved, report, T::SAVED_EACH_TIME).await?;
            self.tell(saved, report);
        }
        if !saved.done.reaches(&batch.reached) {
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
            from: saved.from.progress(),
            position: saved.done.progress(),
            upto: saved.upto.progress(),
        };
        // A panic in the progress function must not end the run.
        let _ = guard::contain(|| told(&progress));
    }
}

/// The audit record of a run.
pub(super) fn action(selection: &Selection, target: &str, name: Option<&str>) -> Action {
    let mut action = Action::new("replay")
        .detail("target", target.into())
        .detail("name", name.map_or(Value::Null, Value::from));
    if let Some(id) = selection.event {
        action = action.on("EVENT", &id);
    }
    if let Value::Object(selection) = selection.description() {
        for (word, value) in selection {
            action = action.detail(&word, value);
        }
    }
    action
}
