//! Retention: removes events that are old and that no group needs, in steps so small that publishers hardly
//! notice.
//!
//! A reader finds the events, in short snapshots and in one pass over the log. The writer then removes
//! ranges, after it has checked again that no group needs an event in them (rule 7).

pub(crate) mod clock;
mod holdings;
pub(crate) mod needed;
pub(crate) mod others;
pub(crate) mod pace;
mod plan;
pub(crate) mod remove;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Audit as _, Code, DutyRecord, Error, Pruned, Result, Retention, Timestamp, letter_kept_for,
};
use rusqlite::Connection;

use self::others::{free_pages, shrink};
use crate::audit::forget_audit_some;
use crate::broker::SqliteEngine;
use crate::declare::sweep_ephemeral;
use crate::history::forget_history;
use crate::outbox::DeadGone;
use crate::retention::needed::owed;
use crate::retention::others::{
    forget_dead, forget_outbox_dead, forget_sent, forget_stages, note_pruned,
};
use crate::retention::remove::remove_pieces;
use crate::rows::{micros, seq_from};
use crate::sql::Sql as _;
use crate::writer::Writer;
use needed::Stretches;
use others::cutoff;
use pace::{STEP, Slice};
use plan::{Length, Plan};

/// The pause between two steps of giving space back while other commands write to the file. At this rate the
/// steps do not show in the slowest hundredth of the commits.
const SPACE_PAUSE: Duration = Duration::from_millis(200);

/// Called with the progress of a run.
type Watch = Box<dyn FnMut(Pruned) + Send>;

/// One run: what was done so far, or what would be done.
struct Run<'e> {
    engine: &'e SqliteEngine,
    retention: Retention,
    now: Timestamp,
    done: Pruned,
    preview: bool,
    /// In a preview: all events that would be removed.
    gone: Vec<(u64, u64)>,
    watch: Watch,
    /// How long a step works.
    slice: Duration,
}

impl SqliteEngine {
    pub(crate) async fn prune_all(&self, retention: Retention, watch: Watch) -> Result<Pruned> {
        self.prune_timed(retention, watch, pace::SLICE).await
    }

    /// A run with steps of this length.
    async fn prune_timed(
        &self,
        retention: Retention,
        watch: Watch,
        slice: Duration,
    ) -> Result<Pruned> {
        let mut run = Run::new(self, retention, false, watch);
        run.slice = slice;
        self.handle
            .job(|writer| sweep_ephemeral(&mut writer.tx, &mut writer.deliveries.leases))
            .await?;
        run.dead_letters().await?;
        run.events().await?;
        run.stages().await?;
        run.outbox().await?;
        run.audit().await?;
        run.history().await?;
        run.space().await?;
        run.make_durable().await?;
        Ok(run.done)
    }

    pub(crate) async fn preview_all(&self, retention: Retention) -> Result<Pruned> {
        let mut run = Run::new(self, retention, true, Box::new(|_| {}));
        run.dead_letters().await?;
        run.events().await?;
        run.stages().await?;
        run.outbox().await?;
        run.audit().await?;
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
            gone: Vec::new(),
            watch,
            slice: pace::SLICE,
        }
    }

    fn tell(&mut self) {
        (self.watch)(self.done);
    }

    /// Runs one step on the writer. Steps that need not be durable at once are lazy.
    async fn step<T: Send + 'static>(
        &mut self,
        durable: bool,
        work: impl FnOnce(&mut Writer, &Slice) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let length = self.slice;
        let job = move |writer: &mut Writer| {
            let slice = Slice::begin(length);
            let done = work(writer, &slice)?;
            Ok((done, slice, slice.took()))
        };
        // Runs on the writer's thread, after the commit.
        let then = |(done, slice, took): (T, Slice, Duration)| (done, took, slice.took());
        let handle = &self.engine.handle;
        let (done, took, held) = handle.patient_job_then(durable, job, then).await?;
        self.done.longest_step = self.done.longest_step.max(took);
        self.done.longest_hold = self.done.longest_hold.max(held);
        Ok(done)
    }

    /// Removes dead letters by age. Their events stay; a group counts an event that it never handled as
    /// skipped.
    async fn dead_letters(&mut self) -> Result<()> {
        let Some(age) = self.retention.dead_letters else {
            return Ok(());
        };
        let before = micros(self.now.minus(age));
        let reason: Arc<str> = letter_kept_for(age).into();
        let handle = &self.engine.handle;
        let mut after = (i64::MIN, 0, i64::MIN);
        loop {
            let old = handle
                .query(move |reader| others::old_dead(reader, before, after))
                .await?;
            let Some(last) = old.last() else {
                return self.outbox_dead_letters().await;
            };
            after = last.key();
            if self.preview {
                self.done.dead_letters += old.len() as u64;
                continue;
            }
            let mut old = old.as_slice();
            while !old.is_empty() {
                let count = pace::take(old.iter().map(|dead| dead.weight));
                let (step, reason) = (old[..count].to_vec(), reason.clone());
                let done = self
                    .step(false, move |writer, slice| {
                        forget_dead(&mut writer.tx, &step, &reason, slice)
                    })
                    .await?;
                self.done.dead_letters += done.removed;
                self.tell();
                old = &old[done.seen..];
            }
        }
    }

    /// Removes dead letters of the outbox, with their rows.
    async fn outbox_dead_letters(&mut self) -> Result<()> {
        let Some(age) = self.retention.dead_letters else {
            return Ok(());
        };
        let before = self.now.minus(age);
        let handle = &self.engine.handle;
        if self.preview {
            let gone = handle
                .query(move |reader| crate::outbox::count_dead(&reader.conn, before))
                .await?;
            self.done.dead_letters += gone.letters;
            self.done.outbox += gone.rows;
            return Ok(());
        }
        self.outbox_rows(true, move |writer, slice| {
            forget_outbox_dead(&mut writer.tx, before, slice)
        })
        .await
    }

    /// Repeats a step on the outbox until none is left.
    async fn outbox_rows(
        &mut self,
        durable: bool,
        work: impl Fn(&mut Writer, &Slice) -> Result<(DeadGone, bool)> + Copy + Send + 'static,
    ) -> Result<()> {
        loop {
            let step = self.step(durable, work);
            let (gone, all) = step.await?;
            self.done.dead_letters += gone.letters;
            self.done.outbox += gone.rows;
            self.tell();
            if all {
                return Ok(());
            }
        }
    }

    /// Removes events that have expired, are too old or too many.
    async fn events(&mut self) -> Result<()> {
        let mut plan = self.plan().await?;
        let handle = &self.engine.handle;
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
                for piece in &found.pieces {
                    self.done.removed += piece.events;
                    self.gone.push((piece.lo, piece.hi));
                }
                continue;
            }
            let mut pieces = found.pieces.as_slice();
            while !pieces.is_empty() {
                let near = remove::near(pieces).iter();
                let count = pace::take(near.map(|piece| piece.weight));
                let step = pieces[..count].to_vec();
                // An object may be deleted only after the removal of its event is durable.
                let durable = step.iter().any(|piece| piece.overflow);
                let removed = self
                    .step(durable, move |writer, slice| {
                        remove_pieces(&mut writer.tx, &mut writer.deliveries.leases, &step, slice)
                    })
                    .await?;
                self.done.removed += removed.events;
                self.done.kept += removed.kept;
                self.tell();
                pieces = &pieces[removed.pieces..];
            }
        }
        Ok(())
    }

    /// Turns the limits of age and length into positions, and finds expired events.
    async fn plan(&mut self) -> Result<Plan> {
        let handle = &self.engine.handle;
        let (retention, now) = (self.retention.clone(), self.now);
        let mut plan = handle
            .query(move |reader| Plan::begin(reader, &retention, now))
            .await?;
        if let Some(keep) = self.retention.max_len {
            let mut length = Length::new(keep);
            let beyond = loop {
                if let Some(beyond) = length.beyond {
                    break beyond;
                }
                length = handle
                    .query(move |reader| {
                        length.go_on(reader)?;
                        Ok(length)
                    })
                    .await?;
            };
            plan.limit_length(beyond);
        }
        let mut after = (i64::MIN, i64::MIN);
        loop {
            let some = handle
                .query(move |reader| plan::expired(reader, now, after))
                .await?;
            let Some(last) = some.last() else {
                break;
            };
            after = *last;
            plan.expired
                .extend(some.iter().map(|(_, seq)| seq_from(*seq)));
        }
        plan.expired.sort_unstable();
        if self.preview {
            plan.without_dead(cutoff(now, self.retention.dead_letters));
        }
        Ok(plan)
    }

    /// Removes payload stages by age. Stages of open dead letters stay as long as the dead letter.
    async fn stages(&mut self) -> Result<()> {
        let Some(before) = cutoff(self.now, self.retention.payloads) else {
            return Ok(());
        };
        let dead = cutoff(self.now, self.retention.dead_letters).filter(|_| self.preview);
        let dead_since = dead.unwrap_or(i64::MIN);
        let handle = &self.engine.handle;
        // Stages that are removed with their event are not counted.
        let gone = Stretches::new(std::mem::take(&mut self.gone));
        let mut after = (i64::MIN, i64::MIN);
        loop {
            let old = handle
                .query(move |reader| others::old_stages(reader, before, dead_since, after))
                .await?;
            let Some(last) = old.last() else {
                return Ok(());
            };
            after = last.key();
            let old: Vec<_> = old.into_iter().filter(|stage| !stage.spared).collect();
            if self.preview {
                let alone = old.iter().filter(|stage| !gone.contains(stage.seq));
                self.done.payloads += alone.count() as u64;
                continue;
            }
            let mut old = old.as_slice();
            while !old.is_empty() {
                let count = pace::take(old.iter().map(|stage| stage.weight));
                let step = old[..count].to_vec();
                let done = self
                    .step(false, move |writer, slice| {
                        forget_stages(&mut writer.tx, &step, slice)
                    })
                    .await?;
                self.done.payloads += done.removed;
                self.tell();
                old = &old[done.seen..];
            }
        }
    }

    /// Removes rows of the outbox that were sent long ago.
    async fn outbox(&mut self) -> Result<()> {
        let Some(age) = self.retention.outbox else {
            return Ok(());
        };
        let before = self.now.minus(age);
        let handle = &self.engine.handle;
        if self.preview {
            let dead = cutoff(self.now, self.retention.dead_letters);
            self.done.outbox += handle
                .query(move |reader| others::count_sent(reader, before, dead))
                .await?;
            return Ok(());
        }
        self.outbox_rows(false, move |writer, slice| {
            forget_sent(&mut writer.tx, before, slice)
        })
        .await
    }

    /// Removes audit records by age; the trail keeps an anchor.
    async fn audit(&mut self) -> Result<()> {
        let Some(age) = self.retention.audit else {
            return Ok(());
        };
        let before = self.now.minus(age);
        if self.preview {
            self.done.audit = self.engine.forgettable(before).await?;
            return Ok(());
        }
        let Some(last) = self.engine.allow_forgetting(before).await? else {
            return Ok(());
        };
        loop {
            let (gone, all) = self
                .step(true, move |writer, _| {
                    forget_audit_some(&mut writer.tx, last)
                })
                .await?;
            self.done.audit += gone;
            self.tell();
            if all {
                return Ok(());
            }
        }
    }

    /// Removes index runs whose events are all gone. The indexer cleans up the others later.
    async fn history(&mut self) -> Result<()> {
        if self.done.removed == 0 {
            return Ok(());
        }
        let handle = &self.engine.handle;
        handle.patient_job(forget_history).await
    }

    /// Makes the lazy steps durable.
    async fn make_durable(&mut self) -> Result<()> {
        let handle = &self.engine.handle;
        let now = self.now;
        handle
            .patient_job(move |writer| note_pruned(&mut writer.tx, now))
            .await
    }

    /// Gives the pages that are free now back to the file system.
    ///
    /// A page must be moved before it can be given back, so this costs publishers more than removing an
    /// event. New events fill the free pages anyway, so there is no hurry while other commands write.
    async fn space(&mut self) -> Result<()> {
        let handle = &self.engine.handle;
        let (size, free) = handle.lazy_job(|writer| free_pages(&mut writer.tx)).await?;
        let mut left = free;
        while left > 0 {
            let pages = STEP.min(left);
            let step = self
                .step(false, move |writer, slice| {
                    shrink(&writer.tx, writer.patience.is_in_use(), pages, slice)
                })
                .await?;
            self.done.freed_bytes += step.given * size;
            self.tell();
            if step.given == 0 || step.left == 0 {
                break;
            }
            left = left.saturating_sub(step.given);
            if step.in_use {
                tokio::time::sleep(SPACE_PAUSE).await;
            }
        }
        Ok(())
    }
}

/// Prefix of the keys of duties.
const DUTY: &str = "duty/";

fn duty_key(duty: &str) -> String {
    format!("{DUTY}{duty}")
}

/// The latest record among the duties whose names have this prefix.
fn last_duty(conn: &Connection, prefix: &str) -> Result<Option<DutyRecord>> {
    let first = duty_key(prefix);
    let sql = "SELECT key FROM meta WHERE key >= ?1 ORDER BY key";
    let keys: Vec<String> = conn.all("looking who has a duty", sql, [&first])?;
    let mut last: Option<DutyRecord> = None;
    for key in keys.iter().take_while(|key| key.starts_with(&first)) {
        let duty = key.strip_prefix(DUTY).unwrap_or(key);
        let record = duty_record(conn, duty)?;
        last = last
            .into_iter()
            .chain(record)
            .max_by_key(|record| record.at);
    }
    Ok(last)
}

/// The last owner of a duty.
fn duty_record(conn: &Connection, duty: &str) -> Result<Option<DutyRecord>> {
    let sql = "SELECT value FROM meta WHERE key = ?1";
    let text: Option<String> = conn.first("looking who has a duty", sql, [duty_key(duty)])?;
    let Some(text) = text else {
        return Ok(None);
    };
    let record = serde_json::from_str(&text).map_err(|e| {
        Error::of_file(
            Code::Corrupt,
            format!("the record of the duty {duty} is damaged: {e}"),
        )
    })?;
    Ok(Some(record))
}
