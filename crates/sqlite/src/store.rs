//! The file as a store beside a broker: it records what the runtime reports about events that another engine
//! delivers.
//!
//! A group that is known only from such reports has no subscriptions, so it keeps no event from being
//! removed. Its cursor moves with the end of the log: a row in `skips` beyond a cursor would mean that the
//! group has yet to skip the event.

use std::sync::Arc;

use everbus_core::{
    BoxFuture, Burial, EARLY_STAGES, EarlierDeath, EventId, EventKey, Failure, GroupName,
    KeptFailures, Position, Recorded, Result, SentBack, Store, StoredStage, Timestamp,
};
use rusqlite::{Connection, params};

use crate::append::Appender;
use crate::broker::SqliteEngine;
use crate::dead_letters::bury::put_dead_letter;
use crate::errors::from_sqlite;
use crate::groups::reread_groups;
use crate::inbox::note_handled;
use crate::payloads::{seq_of, store_stage};
use crate::readers::Reader;
use crate::rows::{micros, read_failures, seq_from, to_sql, write_failures};
use crate::settle::type_of;
use crate::sql::Sql as _;
use crate::streams::skip_ahead;
use crate::tx::Tx;

/// Events stored in one transaction: few enough that publishers hardly wait.
const STEP: usize = 500;

impl Store for SqliteEngine {
    fn ingest(&self, records: Vec<Arc<Recorded>>) -> BoxFuture<'_, Result<Vec<Position>>> {
        Box::pin(async move {
            let mut places = Vec::with_capacity(records.len());
            for step in records.chunks(STEP) {
                let step = step.to_vec();
                let some = self.handle.job(move |writer| {
                    // The inner error refuses only this command.
                    match writer.space.check() {
                        Ok(()) => ingest(&mut writer.tx, &step).map(Ok),
                        Err(full) => Ok(Err(full)),
                    }
                });
                places.extend(some.await??.into_iter().map(Position::seq));
            }
            Ok(places)
        })
    }

    fn store_stage(&self, event: EventKey, stage: StoredStage) -> BoxFuture<'_, Result<()>> {
        self.handle
            .job(move |writer| store_stage_early(&mut writer.tx, &event, &stage))
    }

    fn record_failure(
        &self,
        group: GroupName,
        record: Arc<Recorded>,
        failure: Failure,
    ) -> BoxFuture<'_, Result<()>> {
        self.handle.job(move |writer| {
            let (group, seq) = told_of(&mut writer.tx, &group, &record)?;
            let mut kept = kept_failures(&writer.tx.conn, group, seq)?;
            kept.record(failure);
            keep_failures(&writer.tx, group, seq, &kept)
        })
    }

    fn failures(
        &self,
        group: GroupName,
        events: Vec<EventKey>,
    ) -> BoxFuture<'_, Result<Vec<Vec<Failure>>>> {
        self.handle
            .query_inbox(move |reader| failures(reader, &group, &events))
    }

    fn record_handled(
        &self,
        group: GroupName,
        records: Vec<Arc<Recorded>>,
    ) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            for step in records.chunks(STEP) {
                let (group, step) = (group.clone(), step.to_vec());
                let told = self.handle.job(move |writer| {
                    let seqs = ingest(&mut writer.tx, &step)?;
                    let group = store_group(&mut writer.tx, &group)?;
                    for seq in seqs {
                        note_handled(&mut writer.tx, group, seq)?;
                        end_failures(&writer.tx, group, seq)?;
                    }
                    Ok(())
                });
                told.await?;
            }
            Ok(())
        })
    }

    fn record_skip(
        &self,
        group: GroupName,
        record: Arc<Recorded>,
        reason: String,
    ) -> BoxFuture<'_, Result<()>> {
        self.handle.job(move |writer| {
            let (group, seq) = told_of(&mut writer.tx, &group, &record)?;
            skip_ahead(&mut writer.tx, group, seq, &reason)?;
            end_failures(&writer.tx, group, seq)
        })
    }

    fn bury(&self, letter: Burial) -> BoxFuture<'_, Result<()>> {
        self.handle.job(move |writer| {
            let (group, seq) = told_of(&mut writer.tx, &letter.group, &letter.record)?;
            let earlier = earlier_death(&writer.tx, group, seq)?;
            let death = letter.with_earlier(earlier);
            let type_id = type_of(&mut writer.tx, seq)?;
            put_dead_letter(&mut writer.tx, group, seq, type_id, &death)?;
            let mut kept = kept_failures(&writer.tx.conn, group, seq)?;
            kept.forget_current();
            keep_failures(&writer.tx, group, seq, &kept)?;
            // The dead letter records how the event ended.
            forget_skip(&writer.tx, group, seq)
        })
    }

    fn mark_retried(&self, letters: Vec<SentBack>, at: Timestamp) -> BoxFuture<'_, Result<()>> {
        self.handle
            .job(move |writer| mark_retried(&mut writer.tx, &letters, None, at))
    }

    fn mark_replaced(
        &self,
        letter: SentBack,
        by: EventId,
        at: Timestamp,
    ) -> BoxFuture<'_, Result<()>> {
        self.handle
            .job(move |writer| mark_retried(&mut writer.tx, &[letter], Some(by), at))
    }
}

/// Appends events with the time at which their broker received them. Existing events are not changed. Returns the
/// position of each.
fn ingest(tx: &mut Tx, records: &[Arc<Recorded>]) -> Result<Vec<u64>> {
    let now = tx.clock.now();
    let before = tx.log.appended.len();
    let mut appender = Appender::new(&tx.conn, &tx.log, now)?;
    let mut seqs = Vec::with_capacity(records.len());
    for record in records {
        seqs.push(appender.ingest(&mut tx.log, record, now)?);
    }
    drop(appender);
    move_early_stages(tx, before)?;
    Ok(seqs)
}

/// The number of a group and the position of an event. A new event is ingested first.
fn told_of(tx: &mut Tx, group: &GroupName, record: &Arc<Recorded>) -> Result<(i64, u64)> {
    let seqs = ingest(tx, std::slice::from_ref(record))?;
    let group = store_group(tx, group)?;
    Ok((group, seqs.first().copied().unwrap_or(0)))
}

/// The number of a group. A group without subscriptions is moved to the end of the log.
fn store_group(tx: &mut Tx, name: &GroupName) -> Result<i64> {
    if let Some(id) = tx.groups.id_of(name) {
        let head = tx.log.head;
        let group = tx.groups.known(id)?;
        if group.patterns.is_empty() {
            group.cursor = group.cursor.max(head);
        }
        return Ok(id);
    }
    let sql = "INSERT INTO groups (name, ordered, cursor, declared_at, created_at, active_at)
               VALUES (?1, 0, ?2, ?2, ?3, ?3)";
    let values = params![name.as_str(), to_sql(tx.log.head), tx.now()];
    let id = tx.conn.add("adding a group", sql, values)?;
    reread_groups(tx)?;
    Ok(id)
}

fn keep_failures(tx: &Tx, group: i64, seq: u64, kept: &KeptFailures) -> Result<()> {
    let doing = "keeping a failed attempt";
    if kept.all.is_empty() {
        let sql = "DELETE FROM everbus_failures WHERE seq = ?1 AND group_id = ?2";
        return tx.conn.run(doing, sql, (to_sql(seq), group));
    }
    let sql = "INSERT OR REPLACE INTO everbus_failures (seq, group_id, failures, past)
               VALUES (?1, ?2, ?3, ?4)";
    let past = to_sql(kept.past as u64);
    let values = params![to_sql(seq), group, write_failures(&kept.all), past];
    tx.conn.run(doing, sql, values)
}

/// The group is done with an event: its failures no longer count for a next attempt.
fn end_failures(tx: &Tx, group: i64, seq: u64) -> Result<()> {
    let sql = "UPDATE everbus_failures SET past = json_array_length(failures)
               WHERE seq = ?1 AND group_id = ?2";
    tx.conn
        .run("keeping a failed attempt", sql, (to_sql(seq), group))
}

fn earlier_death(tx: &Tx, group: i64, seq: u64) -> Result<Option<EarlierDeath>> {
    tx.conn.read_first(
        "reading a dead letter",
        "SELECT attempts, failures, died_at, retried_at IS NULL FROM dead_letters
         WHERE seq = ?1 AND group_id = ?2",
        (to_sql(seq), group),
        |r| {
            let failures: String = r.get(1)?;
            Ok(EarlierDeath {
                attempts: r.get(0)?,
                // Damaged old failures must not keep new ones from being written.
                failures: read_failures(Some(&failures)).unwrap_or_default(),
                died_at: Timestamp::from_micros(r.get(2)?),
                open: r.get(3)?,
            })
        },
    )
}

fn forget_skip(tx: &Tx, group: i64, seq: u64) -> Result<()> {
    let sql = "DELETE FROM skips WHERE group_id = ?1 AND seq = ?2";
    tx.conn
        .run("writing a dead letter", sql, (group, to_sql(seq)))
}

fn mark_retried(
    tx: &mut Tx,
    letters: &[SentBack],
    by: Option<EventId>,
    at: Timestamp,
) -> Result<()> {
    let sql = "UPDATE dead_letters SET retried_at = ?3, replaced_by = coalesce(?4, replaced_by)
               WHERE seq = ?1 AND group_id = ?2 AND retried_at IS NULL AND died_at = ?5";
    let by = by.as_ref().map(EventId::as_bytes);
    for SentBack { letter, died_at } in letters {
        let seq = letter.position.place();
        let Some(group) = tx.groups.id_of(&letter.group) else {
            continue;
        };
        let values = (to_sql(seq), group, micros(at), by, micros(*died_at));
        tx.conn.run("noting a retry", sql, values)?;
        tx.watches.touch(seq);
    }
    Ok(())
}

fn store_stage_early(tx: &mut Tx, event: &EventKey, stage: &StoredStage) -> Result<()> {
    if seq_of(&tx.conn, event)?.is_some() {
        return store_stage(tx, event, stage);
    }
    let old = micros(tx.clock.now().minus(EARLY_STAGES));
    let sql = "DELETE FROM everbus_early_payloads WHERE timestamp < ?1";
    tx.conn.run("storing a payload stage", sql, [old])?;
    let info = &stage.info;
    tx.conn.run(
        "storing a payload stage",
        "INSERT INTO everbus_early_payloads
           (event, tenant, event_id, stage, payload_compressed, payload_size_original,
            payload_size_compressed, timestamp, status_code, error_details,
            contains_media, contains_base64)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
        params![
            event.id.as_bytes(),
            event.tenant.as_deref().unwrap_or_default(),
            event.id.to_string(),
            info.stage.as_str(),
            &stage.compressed[..],
            to_sql(info.payload_size_original),
            to_sql(info.payload_size_compressed),
            micros(info.timestamp),
            info.status_code,
            info.error_details,
            info.contains_media,
            info.contains_base64,
        ],
    )
}

/// Moves stages that arrived early to the events that this transaction appended, from this one on.
fn move_early_stages(tx: &Tx, from: usize) -> Result<()> {
    let doing = |e| from_sqlite("storing a payload stage", e);
    let sql = "SELECT EXISTS (SELECT 1 FROM everbus_early_payloads)";
    let waiting: bool = tx.conn.one("storing a payload stage", sql, [])?;
    if !waiting {
        return Ok(());
    }
    for (_, record) in &tx.log.appended[from..] {
        let id = record.event.id();
        let tenant = record.event.tenant().unwrap_or_default();
        tx.conn
            .prepare_cached(
                "INSERT INTO event_payloads
                   (event_id, stage, payload_compressed, payload_size_original,
                    payload_size_compressed, timestamp, status_code, error_details,
                    contains_media, contains_base64, seq)
                 SELECT event_id, stage, payload_compressed, payload_size_original,
                    payload_size_compressed, timestamp, status_code, error_details,
                    contains_media, contains_base64, ?3
                 FROM everbus_early_payloads WHERE event = ?1 AND tenant = ?2 ORDER BY id",
            )
            .and_then(|mut s| {
                let seq = to_sql(record.position.place());
                s.execute(params![id.as_bytes(), tenant, seq])
            })
            .map_err(doing)?;
        let doing = "storing a payload stage";
        let sql = "DELETE FROM everbus_early_payloads WHERE event = ?1 AND tenant = ?2";
        tx.conn.run(doing, sql, params![id.as_bytes(), tenant])?;
    }
    Ok(())
}

/// The failed attempts of an event in a group.
pub(crate) fn kept_failures(conn: &Connection, group: i64, seq: u64) -> Result<KeptFailures> {
    let doing = "reading failed attempts";
    let sql = "SELECT failures, past FROM everbus_failures WHERE seq = ?1 AND group_id = ?2";
    let found: Option<(Option<String>, i64)> = conn.first(doing, sql, (to_sql(seq), group))?;
    let Some((texts, past)) = found else {
        return Ok(KeptFailures::default());
    };
    let all = read_failures(texts.as_deref())?;
    let past = usize::try_from(seq_from(past)).unwrap_or(0).min(all.len());
    Ok(KeptFailures { all, past })
}

fn failures(reader: &Reader, group: &GroupName, events: &[EventKey]) -> Result<Vec<Vec<Failure>>> {
    let sql = "SELECT id FROM groups WHERE name = ?1";
    let group: Option<i64> = reader
        .conn
        .first("reading failed attempts", sql, [group.as_str()])?;
    let Some(group) = group else {
        return Ok(vec![Vec::new(); events.len()]);
    };
    let mut all = Vec::with_capacity(events.len());
    for event in events {
        all.push(match crate::payloads::seq_of(&reader.conn, event)? {
            Some(seq) => kept_failures(&reader.conn, group, seq)?.current().to_vec(),
            None => Vec::new(),
        });
    }
    Ok(all)
}
