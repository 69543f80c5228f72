//! Retention: removes events that are old and that no group needs, and everything else with an age of its own.
//!
//! Each step that removes events is a short transaction that locks the groups, and checks again that no group needs the
//! events (`docs/adr/0021-retention-looks-twice.md`).

mod holdings;
pub(crate) mod needed;
mod plan;
pub(crate) mod remove;

use std::collections::BTreeSet;

use everbus_core::{Audit as _, Pruned, Result, Retention, Timestamp, letter_kept_for};

use self::needed::Owed;
use self::plan::Plan;
use crate::Postgres;
use crate::outbox::forget;
use crate::payloads::forget_early;
use crate::pool::{Params, Sql as _, transaction};
use crate::rows::{get, get_seq};

/// Rows removed in one transaction.
const STEP: i64 = 500;

/// Called with the progress of a run.
type Watch = Box<dyn FnMut(Pruned) + Send>;

/// One run: what was done so far, or what would be done.
struct Run<'e> {
    engine: &'e Postgres,
    retention: Retention,
    now: Timestamp,
    done: Pruned,
    preview: bool,
    /// In a preview: all events that would be removed.
    gone: BTreeSet<i64>,
    watch: Watch,
}

impl Postgres {
    pub(crate) async fn prune_all(&self, retention: Retention, watch: Watch) -> Result<Pruned> {
        self.check_open()?;
        // Dead engines leave their ephemeral groups.
        self.recover().await?;
        let mut run = Run::new(self, retention, false, watch);
        run.all().await?;
        forget_early(&*self.conn().await?, run.now).await?;
        self.bell.ring();
        Ok(run.done)
    }

    pub(crate) async fn preview_all(&self, retention: Retention) -> Result<Pruned> {
        let mut run = Run::new(self, retention, true, Box::new(|_| {}));
        run.all().await?;
        Ok(run.done)
    }
}

impl<'e> Run<'e> {
    fn new(engine: &'e Postgres, retention: Retention, preview: bool, watch: Watch) -> Self {
        Self {
            engine,
            now: engine.now(),
            retention,
            done: Pruned::default(),
            preview,
            gone: BTreeSet::new(),
            watch,
        }
    }

    async fn all(&mut self) -> Result<()> {
        self.dead_letters().await?;
        self.outbox_dead_letters().await?;
        self.events().await?;
        self.stages().await?;
        self.outbox().await?;
        self.audit().await
    }

    fn tell(&mut self) {
        (self.watch)(self.done);
    }

    fn cutoff(&self, age: Option<std::time::Duration>) -> Option<Timestamp> {
        age.map(|age| self.now.minus(age))
    }

    /// Removes dead letters by age. Their events stay; a group counts an event that it never handled as
    /// skipped.
    async fn dead_letters(&mut self) -> Result<()> {
        let doing = "forgetting dead letters";
        let Some(age) = self.retention.dead_letters else {
            return Ok(());
        };
        let before = self.now.minus(age).as_micros();
        // A dead letter whose event waits or runs again stays.
        const OLD: &str = "FROM everbus.dead_letters d WHERE d.died_at < $1
            AND NOT EXISTS (SELECT 1 FROM everbus.deliveries w
              WHERE w.group_id = d.group_id AND w.seq = d.seq)";
        let engine = self.engine;
        if self.preview {
            let db = engine.conn().await?;
            let sql = format!("SELECT count(*) {OLD}");
            self.done.dead_letters += get_seq(&db.one(doing, &sql, &[&before]).await?, 0)?;
            return Ok(());
        }
        let reason = letter_kept_for(age);
        let choose = format!(
            "SELECT d.seq, d.group_id, d.retried_at IS NULL {OLD}
             ORDER BY d.died_at, d.seq, d.group_id LIMIT {STEP} FOR UPDATE OF d"
        );
        loop {
            let removed: usize = transaction!(engine.pool, doing, |tx| {
                remove::lock(tx).await?;
                let rows = tx.query(doing, &choose, &[&before]).await?;
                let (mut seqs, mut groups, mut open) = (Vec::new(), Vec::new(), Vec::new());
                for row in &rows {
                    let (seq, group): (i64, i64) = (get(row, 0)?, get(row, 1)?);
                    seqs.push(seq);
                    groups.push(group);
                    if get(row, 2)? {
                        open.push((seq, group));
                    }
                }
                let sql = "DELETE FROM everbus.dead_letters d
                           USING unnest($1, $2) AS t (seq, group_id)
                           WHERE d.seq = t.seq AND d.group_id = t.group_id";
                tx.execute(doing, sql, &[&seqs, &groups]).await?;
                remove::skip(engine, tx, &open, &reason).await?;
                Ok(rows.len())
            })?;
            self.done.dead_letters += removed as u64;
            self.tell();
            if (removed as i64) < STEP {
                return Ok(());
            }
        }
    }

    /// Removes dead letters of the outbox, with their rows.
    async fn outbox_dead_letters(&mut self) -> Result<()> {
        let Some(before) = self.cutoff(self.retention.dead_letters) else {
            return Ok(());
        };
        let engine = self.engine;
        if self.preview {
            let gone = forget::count_dead(&*engine.conn().await?, before).await?;
            self.done.dead_letters += gone.letters;
            self.done.outbox += gone.rows;
            return Ok(());
        }
        loop {
            let doing = "forgetting dead letters of the outbox";
            let gone: forget::DeadGone = transaction!(engine.pool, doing, |tx| {
                forget::forget_dead(tx, before, STEP).await
            })?;
            self.done.dead_letters += gone.letters;
            self.done.outbox += gone.rows;
            self.tell();
            if gone.letters < STEP.unsigned_abs() {
                return Ok(());
            }
        }
    }

    /// Removes events that have expired, are too old or too many.
    async fn events(&mut self) -> Result<()> {
        let engine = self.engine;
        let mut plan = {
            let db = engine.conn().await?;
            Plan::begin(engine, &*db, &self.retention, self.now).await?
        };
        let dead_since = self
            .cutoff(self.retention.dead_letters)
            .map(Timestamp::as_micros);
        loop {
            let db = engine.conn().await?;
            let Some(over) = plan.next(&*db).await? else {
                return Ok(());
            };
            if self.preview {
                let owed = Owed::read(&*db).await?;
                let needed = owed.needed_among(engine, &*db, &over, dead_since).await?;
                self.done.kept += needed.len() as u64;
                self.done.removed += (over.len() - needed.len()) as u64;
                self.gone
                    .extend(over.iter().filter(|seq| !needed.contains(seq)));
                continue;
            }
            drop(db);
            for step in over.chunks(usize::try_from(STEP).unwrap_or(1)) {
                let (removed, kept): (u64, u64) =
                    transaction!(engine.pool, "removing events", |tx| {
                        remove::lock(tx).await?;
                        let owed = Owed::read(tx).await?;
                        let needed = owed.needed_among(engine, tx, step, None).await?;
                        let free = step.iter().filter(|seq| !needed.contains(seq));
                        let free: Vec<i64> = free.copied().collect();
                        let removed = remove::remove_events(engine, tx, &free).await?;
                        Ok((removed, needed.len() as u64))
                    })?;
                self.done.removed += removed;
                self.done.kept += kept;
                self.tell();
            }
        }
    }

    /// Removes payload stages by age. Stages of open dead letters stay as long as the dead letter.
    async fn stages(&mut self) -> Result<()> {
        let doing = "forgetting payload stages";
        let Some(before) = self.cutoff(self.retention.payloads) else {
            return Ok(());
        };
        // Stages whose event has not come yet are kept as long as other stages.
        const OLD: &str = "FROM everbus.event_payloads p
            LEFT JOIN everbus.log l ON l.id = p.event_id AND l.tenant = p.tenant
            WHERE p.timestamp < $1 AND (p.timestamp, p.id) > ($2, $3)
              AND NOT EXISTS (SELECT 1 FROM everbus.dead_letters d
                WHERE d.seq = l.seq AND d.retried_at IS NULL AND d.died_at >= $4)
            ORDER BY p.timestamp, p.id LIMIT $5";
        // A preview ignores dead letters that a run would have removed by now.
        let dead = self
            .cutoff(self.retention.dead_letters)
            .filter(|_| self.preview);
        let dead_since = dead.map_or(i64::MIN, Timestamp::as_micros);
        let mut after = (i64::MIN, i64::MIN);
        loop {
            let db = self.engine.conn().await?;
            let sql = format!("SELECT p.timestamp, p.id, l.seq {OLD}");
            let values: Params<'_> = &[&before.as_micros(), &after.0, &after.1, &dead_since, &STEP];
            let rows = db.query(doing, &sql, values).await?;
            let Some(last) = rows.last() else {
                return Ok(());
            };
            after = (get(last, 0)?, get(last, 1)?);
            if self.preview {
                for row in &rows {
                    // Stages that are removed with their event are not counted.
                    let seq: Option<i64> = get(row, 2)?;
                    let alone = seq.is_none_or(|seq| !self.gone.contains(&seq));
                    self.done.payloads += u64::from(alone);
                }
                continue;
            }
            let mut ids: Vec<i64> = Vec::with_capacity(rows.len());
            for row in &rows {
                ids.push(get(row, 1)?);
            }
            let sql = "DELETE FROM everbus.event_payloads WHERE id = ANY ($1)";
            self.done.payloads += db.execute(doing, sql, &[&ids]).await?;
            self.tell();
        }
    }

    /// Removes rows of the outbox that were sent long ago.
    async fn outbox(&mut self) -> Result<()> {
        let Some(before) = self.cutoff(self.retention.outbox) else {
            return Ok(());
        };
        let engine = self.engine;
        if self.preview {
            let dead = self.cutoff(self.retention.dead_letters);
            self.done.outbox += forget::count_sent(&*engine.conn().await?, before, dead).await?;
            return Ok(());
        }
        loop {
            let removed = forget::forget_sent(&*engine.conn().await?, before, STEP).await?;
            self.done.outbox += removed;
            self.tell();
            if removed < STEP.unsigned_abs() {
                return Ok(());
            }
        }
    }

    /// Removes audit records by age; the trail keeps an anchor.
    async fn audit(&mut self) -> Result<()> {
        let Some(before) = self.cutoff(self.retention.audit) else {
            return Ok(());
        };
        self.done.audit = match self.preview {
            true => self.engine.forgettable(before).await?,
            false => everbus_core::Audit::forget(self.engine, before).await?,
        };
        Ok(())
    }
}
