//! Retention: removes events that are old and that no group needs, in small steps, so that publishers hardly wait.
//!
//! A reader finds the events, in short snapshots and in one pass over the log. The writer then removes
//! ranges, after it has checked again that no group needs an event in them (rule 7). Rows with an age of their own
//! are found and removed on the writer, a few at a time.

pub(crate) mod clock;
mod holdings;
pub(crate) mod needed;
mod others;
mod plan;
mod preview;
pub(crate) mod remove;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{Duration, Instant};

use everbus_core::{Audit as _, Pruned, Result, Retention, Timestamp, letter_kept_for};

use crate::audit::forget_audit_some;
use crate::broker::SqliteEngine;
use crate::declare::sweep_ephemeral;
use crate::history::forget_history;
use crate::readers::Reader;
use crate::rows::micros;
use crate::writer::Writer;
use needed::owed;
use plan::Plan;
use remove::remove_rows;

/// How long one transaction of retention works: about as long as a commit takes, so that a waiting publish hardly
/// notices. The piece of work that is running when the time ends is finished.
const SLICE: Duration = Duration::from_micros(300);
/// The most events that one transaction examines.
const EVENTS: usize = 1024;
/// The most free pages that one step returns to the file system.
const PAGES: u64 = 1024;
/// The pause between two steps that return space, while other commands write to the file. At this rate the steps do not
/// show in the slowest hundredth of the commits.
const SPACE_PAUSE: Duration = Duration::from_millis(200);

/// Called with the progress of a run.
type Watch = Box<dyn FnMut(Pruned) + Send>;

/// The time until which one transaction works. It is checked between two pieces of work, never before the
/// first, so every transaction makes progress. After each step the writer rests
/// ([`Patience`](crate::writer::Patience)), so that other commands and other processes can write.
#[derive(Clone, Copy)]
pub(crate) struct Slice(Instant);

impl Slice {
    fn of(length: Duration) -> Self {
        Self(Instant::now() + length)
    }

    pub(crate) fn is_over(&self) -> bool {
        Instant::now() >= self.0
    }
}

/// One run: what was done so far, or what would be done.
struct Run<'e> {
    engine: &'e SqliteEngine,
    retention: Retention,
    now: Timestamp,
    done: Pruned,
    preview: bool,
    watch: Watch,
}

impl SqliteEngine {
    pub(crate) async fn prune_all(&self, retention: Retention, watch: Watch) -> Result<Pruned> {
        let mut run = Run::new(self, retention, watch);
        self.handle
            .job(|writer| sweep_ephemeral(&mut writer.tx, &mut writer.deliveries.leases))
            .await?;
        run.dead_letters().await?;
        // Before the events, so that a stage that is too old is counted even if its event is removed in the same run.
        run.stages().await?;
        run.events().await?;
        run.outbox().await?;
        run.audit().await?;
        if run.done.removed > 0 {
            // Index runs whose events are all gone. The indexer cleans up the others later.
            self.handle.patient_job(forget_history).await?;
        }
        run.space().await?;
        // The lazy steps become durable with this one.
        let now = run.now;
        self.handle
            .patient_job(move |writer| others::note_pruned(&writer.tx, now))
            .await?;
        Ok(run.done)
    }

    pub(crate) async fn preview_all(&self, retention: Retention) -> Result<Pruned> {
        let mut run = Run::new(self, retention.clone(), Box::new(|_| {}));
        run.preview = true;
        let (now, audit) = (run.now, run.before(retention.audit));
        let count = move |reader: &mut Reader| preview::count(reader, &retention, now);
        run.done = self.handle.query(count).await?;
        run.events().await?;
        if let Some(before) = audit {
            run.done.audit = self.forgettable(before).await?;
        }
        Ok(run.done)
    }
}

impl<'e> Run<'e> {
    fn new(engine: &'e SqliteEngine, retention: Retention, watch: Watch) -> Self {
        Self {
            engine,
            now: engine.handle.clock.now(),
            retention,
            done: Pruned::default(),
            preview: false,
            watch,
        }
    }

    /// Adds what a step removed.
    fn add(&mut self, gone: Pruned) {
        self.done += gone;
        (self.watch)(self.done);
    }

    /// The time before which things of this age are too old.
    fn before(&self, age: Option<Duration>) -> Option<Timestamp> {
        age.map(|age| self.now.minus(age))
    }

    /// Runs one step on the writer. Steps that need not be durable at once are lazy.
    async fn step<T: Send + 'static>(
        &mut self,
        durable: bool,
        work: impl FnOnce(&mut Writer, &Slice) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let job = |writer: &mut Writer| work(writer, &Slice::of(SLICE));
        let handle = &self.engine.handle;
        match durable {
            true => handle.patient_job(job).await,
            false => handle.lazy_job(job).await,
        }
    }

    /// Repeats a step until nothing is left. Each step returns what it removed, and where the next step continues.
    async fn repeat<C: Send + 'static>(
        &mut self,
        durable: bool,
        mut from: C,
        work: impl Fn(&mut Writer, C, &Slice) -> Result<(Pruned, Option<C>)> + Clone + Send + 'static,
    ) -> Result<()> {
        loop {
            let work = work.clone();
            let step = move |writer: &mut Writer, slice: &Slice| work(writer, from, slice);
            let (gone, next) = self.step(durable, step).await?;
            self.add(gone);
            match next {
                Some(next) => from = next,
                None => return Ok(()),
            }
        }
    }

    /// Removes dead letters by age, those of the outbox with their rows. The events of the others stay; a group
    /// counts an event that it never handled as skipped.
    async fn dead_letters(&mut self) -> Result<()> {
        let Some(age) = self.retention.dead_letters else {
            return Ok(());
        };
        let before = self.now.minus(age);
        let reason: Arc<str> = letter_kept_for(age).into();
        let first = (i64::MIN, 0, i64::MIN);
        self.repeat(false, first, move |writer, from, slice| {
            others::forget_dead(&mut writer.tx, micros(before), from, &reason, slice)
        })
        .await?;
        self.repeat(true, (), move |writer, (), _| {
            others::forget_outbox_dead(&writer.tx, before)
        })
        .await
    }

    /// Removes events that have expired, are too old, or exceed the maximum number.
    async fn events(&mut self) -> Result<()> {
        let handle = &self.engine.handle;
        let (retention, now) = (self.retention.clone(), self.now);
        // In a preview the old dead letters are still there.
        let dead_before = self.before(retention.dead_letters);
        let dead_before = dead_before.filter(|_| self.preview).map(micros);
        let mut plan = handle
            .query(move |reader| Plan::begin(reader, &retention, now, dead_before))
            .await?;
        while !plan.is_done() {
            let owed = handle
                .lazy_job(|writer| owed(&writer.tx, &writer.deliveries.leases))
                .await?;
            let rows;
            (plan, rows) = handle.query(move |reader| plan.look(reader, &owed)).await?;
            self.done.kept += plan.kept;
            if self.preview {
                self.done.removed += rows.iter().filter(|row| row.goes).count() as u64;
                continue;
            }
            let mut left = rows.as_slice();
            while let Some(first) = left.iter().position(|row| row.goes) {
                left = &left[first..];
                let step = left[..left.len().min(EVENTS)].to_vec();
                // An object may be deleted only after the removal of its event is durable.
                let durable = step.iter().any(|row| row.goes && row.overflow);
                let step = move |writer: &mut Writer, slice: &Slice| {
                    remove_rows(&mut writer.tx, &writer.deliveries.leases, &step, slice)
                };
                let (gone, seen) = self.step(durable, step).await?;
                self.add(gone);
                left = &left[seen..];
            }
        }
        Ok(())
    }

    /// Removes payload stages by age. Stages of open dead letters stay as long as the dead letter.
    async fn stages(&mut self) -> Result<()> {
        let Some(before) = self.before(self.retention.payloads).map(micros) else {
            return Ok(());
        };
        self.repeat(false, (i64::MIN, i64::MIN), move |writer, from, slice| {
            others::forget_stages(&writer.tx, before, from, slice)
        })
        .await
    }

    /// Removes rows of the outbox that were sent long ago.
    async fn outbox(&mut self) -> Result<()> {
        let Some(before) = self.before(self.retention.outbox) else {
            return Ok(());
        };
        self.repeat(false, (), move |writer, (), _| {
            others::forget_sent(&writer.tx, before)
        })
        .await
    }

    /// Removes audit records by age; the trail keeps an anchor.
    async fn audit(&mut self) -> Result<()> {
        let Some(before) = self.before(self.retention.audit) else {
            return Ok(());
        };
        let Some(last) = self.engine.allow_forgetting(before).await? else {
            return Ok(());
        };
        self.repeat(true, (), move |writer, (), _| {
            let (audit, all) = forget_audit_some(&mut writer.tx, last)?;
            let gone = Pruned {
                audit,
                ..Pruned::default()
            };
            Ok((gone, (!all).then_some(())))
        })
        .await
    }

    /// Returns the pages that are free now to the file system.
    ///
    /// A page must be moved before it can be returned, so this costs publishers more than removing an event. New events
    /// fill the free pages anyway, so there is no hurry while other commands write.
    async fn space(&mut self) -> Result<()> {
        let handle = &self.engine.handle;
        let (page, mut left) = handle.lazy_job(|writer| others::free(&writer.tx)).await?;
        while left > 0 {
            let pages = PAGES.min(left);
            let step = move |writer: &mut Writer, slice: &Slice| {
                let given = others::shrink(&writer.tx, pages, slice)?;
                Ok((given, writer.patience.is_in_use()))
            };
            let (given, in_use) = self.step(false, step).await?;
            self.add(Pruned {
                freed_bytes: given * page,
                ..Pruned::default()
            });
            left = if given == 0 {
                0
            } else {
                left.saturating_sub(given)
            };
            if left > 0 && in_use {
                tokio::time::sleep(SPACE_PAUSE).await;
            }
        }
        Ok(())
    }
}
