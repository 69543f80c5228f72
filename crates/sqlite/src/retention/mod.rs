//! Retention: what is old and needed by nobody goes, in steps so small that publishers hardly notice.
//!
//! A reader looks for it, in short snapshots and once along the log; the writer removes stretches, after
//! it has made sure that nobody has come to need something of them meanwhile (rule 7).

pub(crate) mod clock;
mod holdings;
mod needed;
mod others;
pub(crate) mod pace;
mod plan;
mod remove;

use everbus_core::{Audit as _, Code, DutyRecord, Error, Pruned, Result, Retention, Timestamp};
use rusqlite::{Connection, OptionalExtension};

use crate::engine::SqliteEngine;
use crate::errors::from_sqlite;
use crate::rows::seq_from;
use crate::writer::Writer;
use needed::Stretches;
use others::{CHOOSE, cutoff};
use pace::Pace;
use plan::{Length, Plan};

/// Whoever watches a run.
type Watch = Box<dyn FnMut(Pruned) + Send>;

/// One run: what was done so far, or what would be done.
struct Run<'e> {
    engine: &'e SqliteEngine,
    retention: Retention,
    now: Timestamp,
    done: Pruned,
    preview: bool,
    /// In a preview, the events of dead letters that would go.
    counted: Vec<u64>,
    /// In a preview, all events that would go.
    gone: Vec<(u64, u64)>,
    watch: Watch,
}

impl SqliteEngine {
    pub(crate) async fn prune_all(&self, retention: Retention, watch: Watch) -> Result<Pruned> {
        let mut run = Run::new(self, retention, false, watch);
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
            counted: Vec::new(),
            gone: Vec::new(),
            watch,
        }
    }

    fn tell(&mut self) {
        (self.watch)(self.done);
    }

    /// Dead letters by their age, the open ones with their events.
    async fn dead_letters(&mut self) -> Result<()> {
        let Some(before) = cutoff(self.now, self.retention.dead_letters) else {
            return Ok(());
        };
        let handle = &self.engine.handle;
        let (mut pace, mut after) = (Pace::default(), (i64::MIN, 0, i64::MIN));
        loop {
            let old = handle
                .query(move |reader| others::old_dead(reader, before, after))
                .await?;
            let Some(last) = old.last() else {
                break;
            };
            after = last.key();
            let more = old.len() == CHOOSE;
            if self.preview {
                self.done.dead_letters += old.len() as u64;
                let open = old.iter().filter(|dead| dead.open).map(|dead| dead.seq);
                self.counted.extend(open);
            } else {
                let mut old = old.as_slice();
                while !old.is_empty() {
                    let (count, weight) = pace.take(old.iter().map(|dead| dead.weight));
                    let (step, rest) = old.split_at(count);
                    let step = step.to_vec();
                    let (letters, events, took) = handle
                        .patient_job(move |writer| writer.forget_dead(&step))
                        .await?;
                    self.done.dead_letters += letters;
                    self.done.removed += events;
                    self.tell();
                    pace.learn(weight, took);
                    pace.pause().await;
                    old = rest;
                }
            }
            if !more {
                break;
            }
        }
        if self.preview {
            self.count_dead_events(before).await?;
        }
        self.outbox_dead_letters().await
    }

    /// Dead letters of the outbox, with their rows.
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
        let mut pace = Pace::default();
        loop {
            let most = pace.budget();
            let (gone, took) = handle
                .patient_job(move |writer| writer.forget_outbox_dead(before, most))
                .await?;
            self.done.dead_letters += gone.letters;
            self.done.outbox += gone.rows;
            (self.watch)(self.done);
            if gone.letters < most {
                return Ok(());
            }
            pace.learn(most, took);
            pace.pause().await;
        }
    }

    /// How many events would go with their dead letters.
    async fn count_dead_events(&mut self, before: i64) -> Result<()> {
        let mut seqs = std::mem::take(&mut self.counted);
        seqs.sort_unstable();
        seqs.dedup();
        for chunk in seqs.chunks(CHOOSE) {
            let handle = &self.engine.handle;
            let owed = handle.lazy_job(|writer| writer.owed()).await?;
            let chunk = chunk.to_vec();
            let free = handle
                .query(move |reader| {
                    let mut free = Vec::with_capacity(chunk.len());
                    for seq in chunk {
                        let needed = owed.needed(&reader.conn, (seq, seq), Some(before))?;
                        if needed.is_empty() {
                            free.push(seq);
                        }
                    }
                    Ok(free)
                })
                .await?;
            self.done.removed += free.len() as u64;
            self.gone.extend(free.iter().map(|seq| (*seq, *seq)));
            self.counted.extend(free);
        }
        Ok(())
    }

    /// Events that have expired, are too old or too many.
    async fn events(&mut self) -> Result<()> {
        let mut plan = self.plan().await?;
        let handle = &self.engine.handle;
        let mut pace = Pace::default();
        while !plan.is_done() {
            let owed = handle.lazy_job(|writer| writer.owed()).await?;
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
                let (count, weight) = pace.take(pieces.iter().map(|piece| piece.weight));
                let (step, rest) = pieces.split_at(count);
                let step = step.to_vec();
                // An object may only be collected once the event is gone for good.
                let removed = if step.iter().any(|piece| piece.overflow) {
                    handle.patient_job(move |writer| writer.remove_pieces(&step))
                } else {
                    handle.lazy_job(move |writer| writer.remove_pieces(&step))
                };
                let removed = removed.await?;
                self.done.removed += removed.events;
                self.done.kept += removed.kept;
                (self.watch)(self.done);
                pace.learn(weight, removed.took);
                pace.pause().await;
                pieces = rest;
            }
        }
        Ok(())
    }

    /// Turns ages and length into positions, and finds what has expired.
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
            plan.counted = std::mem::take(&mut self.counted);
        }
        Ok(plan)
    }

    /// Payload stages by their age; those of open dead letters stay as long as these.
    async fn stages(&mut self) -> Result<()> {
        let Some(before) = cutoff(self.now, self.retention.payloads) else {
            return Ok(());
        };
        let dead = cutoff(self.now, self.retention.dead_letters).filter(|_| self.preview);
        let dead_since = dead.unwrap_or(i64::MIN);
        let handle = &self.engine.handle;
        // What goes with its event is not counted.
        let gone = Stretches::new(std::mem::take(&mut self.gone));
        let (mut pace, mut after) = (Pace::default(), (i64::MIN, i64::MIN));
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
                let (count, weight) = pace.take(old.iter().map(|stage| stage.weight));
                let (step, rest) = old.split_at(count);
                let step = step.to_vec();
                let (gone, took) = handle
                    .lazy_job(move |writer| writer.forget_stages(&step))
                    .await?;
                self.done.payloads += gone;
                (self.watch)(self.done);
                pace.learn(weight, took);
                pace.pause().await;
                old = rest;
            }
        }
    }

    /// Rows of the outbox that were sent long ago.
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
        let mut pace = Pace::default();
        loop {
            let most = pace.budget();
            let (gone, took) = handle
                .lazy_job(move |writer| writer.forget_sent(before, most))
                .await?;
            self.done.outbox += gone;
            self.tell();
            if gone < most {
                return Ok(());
            }
            pace.learn(most, took);
            pace.pause().await;
        }
    }

    /// Audit records by their age; the trail leaves an anchor.
    async fn audit(&mut self) -> Result<()> {
        let Some(age) = self.retention.audit else {
            return Ok(());
        };
        let before = self.now.minus(age);
        self.done.audit = if self.preview {
            self.engine.forgettable(before).await?
        } else {
            self.engine.forget(before).await?
        };
        self.tell();
        Ok(())
    }

    /// What the history's index knows of events that are gone goes as well, later and by itself.
    async fn history(&mut self) -> Result<()> {
        if self.done.removed == 0 {
            return Ok(());
        }
        let handle = &self.engine.handle;
        handle.patient_job(Writer::forget_history).await
    }

    /// What was done lazily is durable with this.
    async fn make_durable(&mut self) -> Result<()> {
        let handle = &self.engine.handle;
        let now = self.now;
        handle
            .patient_job(move |writer| writer.note_pruned(now))
            .await
    }

    /// Gives free pages back to the file system, as many as there are now.
    async fn space(&mut self) -> Result<()> {
        let handle = &self.engine.handle;
        let (size, free) = handle.lazy_job(Writer::free_pages).await?;
        let (mut pace, mut left) = (Pace::default(), free);
        while left > 0 {
            let pages = pace.budget().min(left);
            let (given, still, took) = handle.lazy_job(move |writer| writer.shrink(pages)).await?;
            self.done.freed_bytes += given * size;
            self.tell();
            if given == 0 || still == 0 {
                break;
            }
            left = left.saturating_sub(pages);
            pace.learn(pages, took);
            pace.pause().await;
        }
        Ok(())
    }
}

/// How the keys of duties begin.
const DUTY: &str = "duty/";

fn duty_key(duty: &str) -> String {
    format!("{DUTY}{duty}")
}

/// Who took on one of the duties last whose names begin so.
fn last_duty(conn: &Connection, prefix: &str) -> Result<Option<DutyRecord>> {
    let doing = |e| from_sqlite("looking who has a duty", e);
    let first = duty_key(prefix);
    let keys: Vec<String> = conn
        .prepare_cached("SELECT key FROM meta WHERE key >= ?1 ORDER BY key")
        .and_then(|mut s| s.query_map([&first], |r| r.get(0))?.collect())
        .map_err(doing)?;
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

/// Who took on a duty last.
fn duty_record(conn: &Connection, duty: &str) -> Result<Option<DutyRecord>> {
    let text: Option<String> = conn
        .prepare_cached("SELECT value FROM meta WHERE key = ?1")
        .and_then(|mut s| s.query_row([duty_key(duty)], |r| r.get(0)).optional())
        .map_err(|e| from_sqlite("looking who has a duty", e))?;
    let Some(text) = text else {
        return Ok(None);
    };
    let record = serde_json::from_str(&text).map_err(|e| {
        Error::new(
            Code::Corrupt,
            format!("the record of the duty {duty} is damaged: {e}"),
        )
    })?;
    Ok(Some(record))
}
