//! The schema as a store beside a broker: it records what the runtime reports about events that another
//! engine delivers.
//!
//! A group that is known only from such reports has no subscriptions, so it keeps no event from being
//! removed. Its cursor moves with the end of the log: a row in `skips` beyond a cursor would mean that the
//! group has yet to skip the event.

use std::collections::HashMap;
use std::sync::Arc;

use everbus_core::{
    BoxFuture, Burial, EarlierDeath, Event, EventId, EventKey, Failure, GroupName, KeptFailures,
    Position, Recorded, Result, SentBack, Store, StoredStage, Timestamp,
};
use tokio_postgres::Row;

use crate::Postgres;
use crate::insert::insert;
use crate::payloads::{store_stage, tenant_of};
use crate::pool::{Params, Sql, transaction};
use crate::rows::{get, read_failures, seq_from, to_sql, write_failures};

/// Events taken in one transaction.
const STEP: usize = 500;

impl Store for Postgres {
    fn ingest(&self, records: Vec<Arc<Recorded>>) -> BoxFuture<'_, Result<Vec<Position>>> {
        Box::pin(async move {
            self.check_open()?;
            let mut places = Vec::with_capacity(records.len());
            for step in records.chunks(STEP) {
                let seqs: Vec<i64> = transaction!(self.pool, "copying events", |tx| {
                    self.ingest_in(tx, step).await
                })?;
                places.extend(seqs.into_iter().map(|seq| Position::seq(seq_from(seq))));
            }
            self.bell.ring();
            Ok(places)
        })
    }

    fn store_stage(&self, event: EventKey, stage: StoredStage) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let db = self.conn().await?;
            store_stage(&*db, &event, &stage, false).await.map(drop)
        })
    }

    fn record_failure(
        &self,
        group: GroupName,
        record: Arc<Recorded>,
        failure: Failure,
    ) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            self.check_open()?;
            transaction!(self.pool, "keeping a failed attempt", |tx| {
                let (group, seq) = self.told_of(tx, &group, &record).await?;
                let mut kept = kept_failures(tx, group, seq).await?;
                kept.record(failure.clone());
                keep_failures(tx, group, seq, &kept).await
            })
        })
    }

    fn failures(
        &self,
        group: GroupName,
        events: Vec<EventKey>,
    ) -> BoxFuture<'_, Result<Vec<Vec<Failure>>>> {
        Box::pin(async move {
            let db = self.conn().await?;
            let ids: Vec<uuid::Uuid> = events.iter().map(|event| event.id.as_uuid()).collect();
            let sql = "SELECT k.failures, k.past, l.id, l.tenant FROM everbus.log l
                       JOIN everbus.failures k ON k.seq = l.seq
                       JOIN everbus.groups g ON g.id = k.group_id
                       WHERE l.id = ANY ($1) AND g.name = $2";
            let values: Params<'_> = &[&ids, &group.as_str()];
            let rows = db.query("reading failed attempts", sql, values).await?;
            let mut known: HashMap<(uuid::Uuid, String), Vec<Failure>> = HashMap::new();
            for row in &rows {
                let kept = KeptRow::read(row, 0)?;
                known.insert((get(row, 2)?, get(row, 3)?), kept.current().to_vec());
            }
            let of = |event: &EventKey| {
                let key = (event.id.as_uuid(), tenant_of(event));
                known.get(&key).cloned().unwrap_or_default()
            };
            Ok(events.iter().map(of).collect())
        })
    }

    fn record_handled(
        &self,
        group: GroupName,
        records: Vec<Arc<Recorded>>,
    ) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            self.check_open()?;
            for step in records.chunks(STEP) {
                transaction!(self.pool, "writing to the inbox", |tx| {
                    let mut seqs = self.ingest_in(tx, step).await?;
                    seqs.sort_unstable();
                    let group = self.store_group(tx, &group).await?;
                    let sql = "INSERT INTO everbus.inbox (group_id, id, tenant, at)
                               SELECT $1, l.id, l.tenant, $3 FROM everbus.log l WHERE l.seq = ANY ($2)
                               ORDER BY l.id, l.tenant ON CONFLICT DO NOTHING";
                    tx.execute(
                        "writing to the inbox",
                        sql,
                        &[&group, &seqs, &self.micros()],
                    )
                    .await?;
                    end_failures(tx, group, &seqs).await
                })?;
            }
            self.bell.ring();
            Ok(())
        })
    }

    fn record_skip(
        &self,
        group: GroupName,
        record: Arc<Recorded>,
        reason: String,
    ) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            self.check_open()?;
            transaction!(self.pool, "recording a skip", |tx| {
                let (group, seq) = self.told_of(tx, &group, &record).await?;
                crate::retention::remove::skip(self, tx, &[(seq, group)], &reason).await?;
                end_failures(tx, group, &[seq]).await
            })
        })
    }

    fn bury(&self, letter: Burial) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            self.check_open()?;
            transaction!(self.pool, "writing a dead letter", |tx| {
                let (group, seq) = self.told_of(tx, &letter.group, &letter.record).await?;
                let death = letter.with_earlier(earlier_death(tx, group, seq).await?);
                crate::bury::put(self, tx, group, seq_from(seq), &death).await?;
                let mut kept = kept_failures(tx, group, seq).await?;
                kept.forget_current();
                keep_failures(tx, group, seq, &kept).await?;
                // The dead letter replaces an earlier skip as the outcome.
                let sql = "DELETE FROM everbus.skips WHERE group_id = $1 AND seq = $2";
                tx.execute("writing a dead letter", sql, &[&group, &seq])
                    .await?;
                Ok(())
            })
        })
    }

    fn mark_retried(&self, letters: Vec<SentBack>, at: Timestamp) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.mark_sent_back(letters, None, at))
    }

    fn mark_replaced(
        &self,
        letter: SentBack,
        by: EventId,
        at: Timestamp,
    ) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.mark_sent_back(vec![letter], Some(by), at))
    }
}

impl Postgres {
    /// Appends events with the time at which their broker received them. Existing events stay as they are.
    /// Returns the position of each.
    async fn ingest_in(&self, db: &impl Sql, records: &[Arc<Recorded>]) -> Result<Vec<i64>> {
        let doing = "copying events";
        let mut known = places_of(db, records).await?;
        let mut new: Vec<&Event> = Vec::new();
        let mut times: Vec<i64> = Vec::new();
        let mut seen = std::collections::HashSet::new();
        let now = self.micros();
        for record in records {
            let key = key_of(&record.event);
            if !known.contains_key(&key) && seen.insert(key) {
                new.push(&record.event);
                times.push(record.received_at.as_micros().min(now));
            }
        }
        if !new.is_empty() {
            // Times never decrease: neither after the newest event, nor inside of the batch.
            let sql = "SELECT received_at FROM everbus.log ORDER BY seq DESC LIMIT 1";
            let newest = db.first(doing, sql, &[]).await?;
            let mut last = newest.map_or(Ok(i64::MIN), |row| get(&row, 0))?;
            for time in &mut times {
                last = last.max(*time);
                *time = last;
            }
            let names = new.iter().map(|event| event.type_arc());
            let types = self.types.intern(db, names, false).await?;
            let inserted = insert(db, &new, &types, &times).await?;
            let born: Vec<(u64, &Event)> = inserted
                .iter()
                .map(|(event, a)| (a.position.place(), *event))
                .collect();
            crate::orphans::born(db, &born).await?;
            if inserted.len() < new.len() {
                // Another copy of the same event was committed meanwhile.
                known = places_of(db, records).await?;
            }
            for (event, appended) in inserted {
                known.insert(key_of(event), to_sql(appended.position.place()));
            }
        }
        let missing = || crate::errors::damaged("an event that was copied is not in the log");
        let place = |record: &Arc<Recorded>| known.get(&key_of(&record.event)).copied();
        records
            .iter()
            .map(|record| place(record).ok_or_else(missing))
            .collect()
    }

    /// The number of a group and the position of an event. A new event is ingested first.
    async fn told_of(
        &self,
        db: &impl Sql,
        group: &GroupName,
        record: &Arc<Recorded>,
    ) -> Result<(i64, i64)> {
        let seqs = self.ingest_in(db, std::slice::from_ref(record)).await?;
        let group = self.store_group(db, group).await?;
        Ok((group, seqs.first().copied().unwrap_or(0)))
    }

    /// The number of a group, whose row is locked. A missing group is made. The cursor of a group without subscriptions
    /// is moved to the end of the log.
    async fn store_group(&self, db: &impl Sql, name: &GroupName) -> Result<i64> {
        let doing = "adding a group";
        let sql = "INSERT INTO everbus.groups AS g (name, ordered, cursor, declared_at, created_at, active_at)
                   SELECT $1, false, coalesce(max(l.seq), 0), coalesce(max(l.seq), 0), $2, $2
                   FROM everbus.log l
                   ON CONFLICT (name) DO UPDATE SET cursor = CASE
                     WHEN EXISTS (SELECT 1 FROM everbus.subscriptions s WHERE s.group_id = g.id) THEN g.cursor
                     ELSE greatest(g.cursor, excluded.cursor) END
                   RETURNING id";
        let row = db
            .one(doing, sql, &[&name.as_str(), &self.micros()])
            .await?;
        get(&row, 0)
    }

    async fn mark_sent_back(
        &self,
        letters: Vec<SentBack>,
        by: Option<EventId>,
        at: Timestamp,
    ) -> Result<()> {
        let seqs: Vec<i64> = letters
            .iter()
            .map(|l| to_sql(l.letter.position.place()))
            .collect();
        let groups: Vec<String> = letters
            .iter()
            .map(|l| l.letter.group.as_str().to_owned())
            .collect();
        let died: Vec<i64> = letters.iter().map(|l| l.died_at.as_micros()).collect();
        let sql = "UPDATE everbus.dead_letters d
                   SET retried_at = $4, replaced_by = coalesce($5, d.replaced_by)
                   FROM unnest($1, $2, $3) AS t (seq, name, died_at)
                   JOIN everbus.groups g ON g.name = t.name
                   WHERE d.seq = t.seq AND d.group_id = g.id AND d.retried_at IS NULL
                     AND d.died_at = t.died_at";
        let by = by.map(|by| by.as_uuid());
        let values: Params<'_> = &[&seqs, &groups, &died, &at.as_micros(), &by];
        self.conn()
            .await?
            .execute("noting a retry", sql, values)
            .await?;
        self.bell.ring();
        Ok(())
    }
}

/// The identity of an event.
type Key = (uuid::Uuid, String);

fn key_of(event: &Event) -> Key {
    (
        event.id().as_uuid(),
        crate::rows::storable(event.tenant().unwrap_or_default()),
    )
}

/// The positions of those of these events that are in the log.
async fn places_of(db: &impl Sql, records: &[Arc<Recorded>]) -> Result<HashMap<Key, i64>> {
    let ids: Vec<uuid::Uuid> = records.iter().map(|r| r.event.id().as_uuid()).collect();
    let sql = "SELECT id, tenant, seq FROM everbus.log WHERE id = ANY ($1)";
    let rows = db.query("copying events", sql, &[&ids]).await?;
    let mut places = HashMap::with_capacity(rows.len());
    for row in &rows {
        places.insert((get(row, 0)?, get(row, 1)?), get(row, 2)?);
    }
    Ok(places)
}

/// A row of `failures`.
pub(crate) struct KeptRow;

impl KeptRow {
    /// Reads `failures` and `past`, from this column on; none if they are NULL.
    pub(crate) fn read(row: &Row, first: usize) -> Result<KeptFailures> {
        let texts: Option<&str> = get(row, first)?;
        let Some(texts) = texts else {
            return Ok(KeptFailures::default());
        };
        let all = read_failures(Some(texts)).unwrap_or_default();
        let past = usize::try_from(get::<i32>(row, first + 1)?)
            .unwrap_or(0)
            .min(all.len());
        Ok(KeptFailures { all, past })
    }
}

/// The failed attempts of an event in a group, locked until the end of the transaction.
async fn kept_failures(db: &impl Sql, group: i64, seq: i64) -> Result<KeptFailures> {
    let sql =
        "SELECT failures, past FROM everbus.failures WHERE seq = $1 AND group_id = $2 FOR UPDATE";
    let row = db
        .first("reading failed attempts", sql, &[&seq, &group])
        .await?;
    row.map_or_else(|| Ok(KeptFailures::default()), |row| KeptRow::read(&row, 0))
}

async fn keep_failures(db: &impl Sql, group: i64, seq: i64, kept: &KeptFailures) -> Result<()> {
    let doing = "keeping a failed attempt";
    let Some(texts) = write_failures(&kept.all) else {
        let sql = "DELETE FROM everbus.failures WHERE seq = $1 AND group_id = $2";
        return db.execute(doing, sql, &[&seq, &group]).await.map(drop);
    };
    let sql = "INSERT INTO everbus.failures (seq, group_id, failures, past) VALUES ($1, $2, $3, $4)
               ON CONFLICT (seq, group_id) DO UPDATE SET failures = excluded.failures, past = excluded.past";
    let past = i32::try_from(kept.past).unwrap_or(i32::MAX);
    db.execute(doing, sql, &[&seq, &group, &texts, &past])
        .await
        .map(drop)
}

/// Marks the failures of events that the group is done with: they no longer count for a next attempt.
async fn end_failures(db: &impl Sql, group: i64, seqs: &[i64]) -> Result<()> {
    let sql = "UPDATE everbus.failures SET past = json_array_length(failures::json)
               WHERE group_id = $1 AND seq = ANY ($2)";
    db.execute("keeping a failed attempt", sql, &[&group, &seqs])
        .await?;
    Ok(())
}

/// The earlier record of the same dead letter, locked until the end of the transaction.
async fn earlier_death(db: &impl Sql, group: i64, seq: i64) -> Result<Option<EarlierDeath>> {
    let sql = "SELECT attempts, failures, died_at, retried_at IS NULL FROM everbus.dead_letters
               WHERE seq = $1 AND group_id = $2 FOR UPDATE";
    let Some(row) = db
        .first("reading a dead letter", sql, &[&seq, &group])
        .await?
    else {
        return Ok(None);
    };
    Ok(Some(EarlierDeath {
        attempts: u32::try_from(get::<i32>(&row, 0)?).unwrap_or(0),
        // Damaged old failures must not keep new ones from being written.
        failures: read_failures(get(&row, 1)?).unwrap_or_default(),
        died_at: Timestamp::from_micros(get(&row, 2)?),
        open: get(&row, 3)?,
    }))
}
