//! Retention: removes events that are old and that no group needs, in steps so small that publishers hardly
//! notice.
//!
//! A reader finds the events, in short snapshots and in one pass over the log. The writer then removes
//! ranges, after it has checked again that no group needs an event in them (rule 7). Rows with an age of their own
//! are found and removed on the writer, a few at a time.

pub(crate) mod clock;
mod holdings;
pub(crate) mod needed;
mod others;
mod plan;
pub(crate) mod remove;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use everbus_core::{Audit as _, Pruned, Result, Retention, Timestamp, letter_kept_for};

use crate::audit::forget_audit_some;
use crate::broker::SqliteEngine;
use crate::declare::sweep_ephemeral;
use crate::history::forget_history;
use crate::rows::micros;
use crate::writer::Writer;
use needed::owed;
use plan::Plan;
use remove::remove_pieces;

/// How long one transaction of retention works: about as long as a commit takes, so that a waiting publish
/// hardly notices. The piece of work that is under way when the time is over is finished.
const SLICE: Duration = Duration::from_micros(300);
/// Pieces that one transaction removes at most, if they are light.
const PIECES: usize = 16;
/// Free pages given back in one step at most.
const PAGES: u64 = 1024;
/// The pause between two steps of giving space back while other commands write to the file. At this rate the
/// steps do not show in the slowest hundredth of the commits.
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
    /// In a preview: the ranges of events that would be removed, by their begin.
    gone: BTreeMap<u64, u64>,
    watch: Watch,
}

impl SqliteEngine {
    pub(crate) async fn prune_all(&self, retention: Retention, watch: Watch) -> Result<Pruned> {
        let mut run = Run::new(self, retention, false, watch);
        self.handle
            .job(|writer| sweep_ephemeral(&mut writer.tx, &mut writer.deliveries.leases))
            .await?;
        run.all().await?;
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
        let mut run = Run::new(self, retention, true, Box::new(|_| {}));
        run.all().await?;
        Ok(run.done)
    }
}

impl<'e> Run<'e> {
    fn new(engine: &'e SqliteEngine, retention: Retention, preview: bool, watch: Watch) -> Self {
        Self {
            engine,
            now: engine.handle.clock.now(),
            retention,
            done: Pruned::default(),
            preview,
            gone: BTreeMap::new(),
            watch,
        }
    }

    async fn all(&mut self) -> Result<()> {
        self.dead_letters().await?;
        self.events().await?;
        self.stages().await?;
        self.outbox().await?;
        self.audit().await
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

    /// Repeats a step until nothing is left. It returns what it removed, and where the next one goes on.
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
        if self.preview {
            let count = self.engine.handle.query(move |reader| {
                let gone = crate::outbox::count_dead(&reader.conn, before)?;
                let dead_letters = gone.letters + others::count_dead(reader, micros(before))?;
                Ok((dead_letters, gone.rows))
            });
            (self.done.dead_letters, self.done.outbox) = count.await?;
            return Ok(());
        }
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

    /// Removes events that have expired, are too old or too many.
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
            let found;
            (plan, found) = handle
                .query(move |reader| {
                    let found = plan.look(reader, &owed)?;
                    Ok((plan, found))
                })
                .await?;
            self.done.kept += found.kept;
            if self.preview {
                self.done.removed += found.pieces.iter().map(|piece| piece.events).sum::<u64>();
                let ranges = found.pieces.into_iter().flat_map(|piece| piece.ranges);
                self.gone.extend(ranges);
                continue;
            }
            let mut pieces = found.pieces.as_slice();
            while !pieces.is_empty() {
                let step = pieces[..pieces.len().min(PIECES)].to_vec();
                // An object may be deleted only after the removal of its event is durable.
                let durable = step.iter().any(|piece| piece.overflow);
                let step = move |writer: &mut Writer, slice: &Slice| {
                    remove_pieces(&mut writer.tx, &writer.deliveries.leases, &step, slice)
                };
                let (gone, seen) = self.step(durable, step).await?;
                self.add(gone);
                pieces = &pieces[seen..];
            }
        }
        Ok(())
    }

    /// Removes payload stages by age. Stages of open dead letters stay as long as the dead letter.
    async fn stages(&mut self) -> Result<()> {
        let Some(before) = self.before(self.retention.payloads).map(micros) else {
            return Ok(());
        };
        if self.preview {
            let dead = self.before(self.retention.dead_letters).map(micros);
            let old = self
                .engine
                .handle
                .query(move |reader| others::old_stages(reader, before, dead.unwrap_or(i64::MIN)));
            let old = old.await?;
            // Stages that are removed with their event are not counted.
            let goes = |seq: u64| {
                let last = self.gone.range(..=seq).next_back();
                last.is_some_and(|(_, hi)| *hi >= seq)
            };
            self.done.payloads = old.iter().filter(|seq| !goes(**seq)).count() as u64;
            return Ok(());
        }
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
        if self.preview {
            let dead = self.before(self.retention.dead_letters).map(micros);
            let handle = &self.engine.handle;
            let sent = handle.query(move |reader| others::count_sent(reader, before, dead));
            self.done.outbox += sent.await?;
            return Ok(());
        }
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
        if self.preview {
            self.done.audit = self.engine.forgettable(before).await?;
            return Ok(());
        }
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

    /// Gives the pages that are free now back to the file system.
    ///
    /// A page must be moved before it can be given back, so this costs publishers more than removing an
    /// event. New events fill the free pages anyway, so there is no hurry while other commands write.
    async fn space(&mut self) -> Result<()> {
        let free = self
            .engine
            .handle
            .lazy_job(|writer| others::free(&writer.tx));
        let (page, mut left) = free.await?;
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
            left = left.saturating_sub(given);
            if given == 0 || left == 0 {
                break;
            }
            if in_use {
                tokio::time::sleep(SPACE_PAUSE).await;
            }
        }
        Ok(())
    }
}
