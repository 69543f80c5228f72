//! The file as a store beside a broker: it records what the runtime reports about events that another engine
//! delivers. Part of the writer: storing these reports.
//!
//! A group that is known only from such reports has no subscriptions, so it keeps no event from being
//! removed. Its cursor moves with the end of the log: a row in `skips` beyond a cursor would mean that the
//! group has yet to skip the event.

use std::sync::Arc;

use everbus_core::{
    BoxFuture, Burial, EARLY_STAGES, EarlierDeath, EventId, EventKey, Failure, GroupName,
    KeptFailures, Position, Recorded, Result, SentBack, Store, StoredStage, Timestamp,
};
use rusqlite::{Connection, OptionalExtension, params};

use crate::append::Appender;
use crate::engine::SqliteEngine;
use crate::errors::from_sqlite;
use crate::readers::Reader;
use crate::rows::{read_failures, seq_from, to_sql, write_failures};
use crate::state::micros;
use crate::writer::Writer;

/// Events taken in one transaction, so that publishers get their turn.
const STEP: usize = 500;

impl Store for SqliteEngine {
    fn ingest(&self, records: Vec<Arc<Recorded>>) -> BoxFuture<'_, Result<Vec<Position>>> {
        Box::pin(async move {
            let mut places = Vec::with_capacity(records.len());
            for step in records.chunks(STEP) {
                let step = step.to_vec();
                let some = self.handle.job(move |writer| {
                    // The inner error refuses only this command.
                    match writer.check_room() {
                        Ok(()) => writer.ingest(&step).map(Ok),
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
            .job(move |writer| writer.store_stage_early(&event, &stage))
    }

    fn record_failure(
        &self,
        group: GroupName,
        record: Arc<Recorded>,
        failure: Failure,
    ) -> BoxFuture<'_, Result<()>> {
        self.handle.job(move |writer| {
            let (group, seq) = writer.told_of(&group, &record)?;
            let mut kept = kept_failures(&writer.conn, group, seq)?;
            kept.record(failure);
            writer.keep_failures(group, seq, &kept)
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
                    let seqs = writer.ingest(&step)?;
                    let group = writer.store_group(&group)?;
                    for seq in seqs {
                        writer.note_handled(group, seq)?;
                        writer.end_failures(group, seq)?;
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
            let (group, seq) = writer.told_of(&group, &record)?;
            writer.skip_ahead(group, seq, &reason)?;
            writer.end_failures(group, seq)
        })
    }

    fn bury(&self, letter: Burial) -> BoxFuture<'_, Result<()>> {
        self.handle.job(move |writer| {
            let (group, seq) = writer.told_of(&letter.group, &letter.record)?;
            let earlier = writer.earlier_death(group, seq)?;
            let (attempts, failures) = letter.with_earlier(earlier);
            let (type_id, died_at) = (writer.type_of(seq)?, letter.died_at);
            writer.put_dead_letter(group, seq, type_id, attempts, &failures, died_at)?;
            let mut kept = kept_failures(&writer.conn, group, seq)?;
            kept.forget_current();
            writer.keep_failures(group, seq, &kept)?;
            // The dead letter says how it ended.
            writer.forget_skip(group, seq)
        })
    }

    fn mark_retried(&self, letters: Vec<SentBack>, at: Timestamp) -> BoxFuture<'_, Result<()>> {
        self.handle
            .job(move |writer| writer.mark_retried(&letters, None, at))
    }

    fn mark_replaced(
        &self,
        letter: SentBack,
        by: EventId,
        at: Timestamp,
    ) -> BoxFuture<'_, Result<()>> {
        self.handle
            .job(move |writer| writer.mark_retried(&[letter], Some(by), at))
    }
}

impl Writer {
    /// Appends events with the time at which their broker received them. Existing events stay as they are.
    /// Returns the position of each.
    fn ingest(&mut self, records: &[Arc<Recorded>]) -> Result<Vec<u64>> {
        let now = self.clock.now();
        let before = self.state.appended.len();
        let mut appender = Appender::new(&self.conn, &self.state, now)?;
        let mut seqs = Vec::with_capacity(records.len());
        for record in records {
            seqs.push(appender.ingest(&mut self.state, record, now)?);
        }
        drop(appender);
        self.move_early_stages(before)?;
        Ok(seqs)
    }

    /// The number of a group and the position of an event. A new event is ingested first.
    fn told_of(&mut self, group: &GroupName, record: &Arc<Recorded>) -> Result<(i64, u64)> {
        let seqs = self.ingest(std::slice::from_ref(record))?;
        let group = self.store_group(group)?;
        Ok((group, seqs.first().copied().unwrap_or(0)))
    }

    /// The number of a group. A group without subscriptions is moved to the end of the log.
    fn store_group(&mut self, name: &GroupName) -> Result<i64> {
        if let Some(id) = self.state.group_id(name) {
            let head = self.state.head;
            let group = self.state.group_mut(id)?;
            if group.patterns.is_empty() {
                group.cursor = group.cursor.max(head);
            }
            return Ok(id);
        }
        let id = self
            .conn
            .prepare_cached(
                "INSERT INTO groups (name, ordered, cursor, declared_at, created_at, active_at)
                 VALUES (?1, 0, ?2, ?2, ?3, ?3)",
            )
            .and_then(|mut s| {
                let now = micros(self.clock.now());
                s.insert(params![name.as_str(), to_sql(self.state.head), now])
            })
            .map_err(|e| from_sqlite("adding a group", e))?;
        self.reread_groups()?;
        Ok(id)
    }

    fn keep_failures(&self, group: i64, seq: u64, kept: &KeptFailures) -> Result<()> {
        let doing = |e| from_sqlite("keeping a failed attempt", e);
        if kept.all.is_empty() {
            return self
                .conn
                .prepare_cached("DELETE FROM everbus_failures WHERE seq = ?1 AND group_id = ?2")
                .and_then(|mut s| s.execute((to_sql(seq), group)))
                .map(drop)
                .map_err(doing);
        }
        self.conn
            .prepare_cached(
                "INSERT OR REPLACE INTO everbus_failures (seq, group_id, failures, past)
                 VALUES (?1, ?2, ?3, ?4)",
            )
            .and_then(|mut s| {
                let past = to_sql(kept.past as u64);
                s.execute(params![to_sql(seq), group, write_failures(&kept.all), past])
            })
            .map(drop)
            .map_err(doing)
    }

    /// The group is done with an event: its failures no longer count for a next attempt.
    fn end_failures(&self, group: i64, seq: u64) -> Result<()> {
        self.conn
            .prepare_cached(
                "UPDATE everbus_failures SET past = json_array_length(failures)
                 WHERE seq = ?1 AND group_id = ?2",
            )
            .and_then(|mut s| s.execute((to_sql(seq), group)))
            .map(drop)
            .map_err(|e| from_sqlite("keeping a failed attempt", e))
    }

    fn earlier_death(&self, group: i64, seq: u64) -> Result<Option<EarlierDeath>> {
        self.conn
            .prepare_cached(
                "SELECT attempts, failures, died_at, retried_at IS NULL FROM dead_letters
                 WHERE seq = ?1 AND group_id = ?2",
            )
            .and_then(|mut s| {
                s.query_row((to_sql(seq), group), |r| {
                    let failures: String = r.get(1)?;
                    Ok(EarlierDeath {
                        attempts: r.get(0)?,
                        // Damaged old failures must not keep new ones from being written.
                        failures: read_failures(Some(&failures)).unwrap_or_default(),
                        died_at: Timestamp::from_micros(r.get(2)?),
                        open: r.get(3)?,
                    })
                })
                .optional()
            })
            .map_err(|e| from_sqlite("reading a dead letter", e))
    }

    fn forget_skip(&self, group: i64, seq: u64) -> Result<()> {
        self.conn
            .prepare_cached("DELETE FROM skips WHERE group_id = ?1 AND seq = ?2")
            .and_then(|mut s| s.execute((group, to_sql(seq))))
            .map(drop)
            .map_err(|e| from_sqlite("writing a dead letter", e))
    }

    fn mark_retried(
        &mut self,
        letters: &[SentBack],
        by: Option<EventId>,
        at: Timestamp,
    ) -> Result<()> {
        let doing = |e| from_sqlite("noting a retry", e);
        for SentBack { letter, died_at } in letters {
            let seq = letter.position.place();
            let Some(group) = self.state.group_id(&letter.group) else {
                continue;
            };
            self.conn
                .prepare_cached(
                    "UPDATE dead_letters SET retried_at = ?3, replaced_by = coalesce(?4, replaced_by)
                     WHERE seq = ?1 AND group_id = ?2 AND retried_at IS NULL AND died_at = ?5",
                )
                .and_then(|mut s| {
                    let by = by.as_ref().map(EventId::as_bytes);
                    s.execute((to_sql(seq), group, micros(at), by, micros(*died_at)))
                })
                .map_err(doing)?;
            self.watches.touch(seq);
        }
        Ok(())
    }

    fn store_stage_early(&mut self, event: &EventKey, stage: &StoredStage) -> Result<()> {
        let doing = |e| from_sqlite("storing a payload stage", e);
        if self.seq_of(event)?.is_some() {
            return self.store_stage(event, stage);
        }
        let old = micros(self.clock.now().minus(EARLY_STAGES));
        self.conn
            .prepare_cached("DELETE FROM everbus_early_payloads WHERE timestamp < ?1")
            .and_then(|mut s| s.execute([old]))
            .map_err(doing)?;
        let info = &stage.info;
        self.conn
            .prepare_cached(
                "INSERT INTO everbus_early_payloads
                   (event, tenant, event_id, stage, payload_compressed, payload_size_original,
                    payload_size_compressed, timestamp, status_code, error_details,
                    contains_media, contains_base64)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
            )
            .and_then(|mut s| {
                s.execute(params![
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
                ])
            })
            .map(drop)
            .map_err(doing)
    }

    /// Moves stages that arrived early to the events that this transaction appended, from this one on.
    fn move_early_stages(&self, from: usize) -> Result<()> {
        let doing = |e| from_sqlite("storing a payload stage", e);
        let waiting: bool = self
            .conn
            .prepare_cached("SELECT EXISTS (SELECT 1 FROM everbus_early_payloads)")
            .and_then(|mut s| s.query_row([], |r| r.get(0)))
            .map_err(doing)?;
        if !waiting {
            return Ok(());
        }
        for (_, record) in &self.state.appended[from..] {
            let id = record.event.id();
            let tenant = record.event.tenant().unwrap_or_default();
            self.conn
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
            self.conn
                .prepare_cached(
                    "DELETE FROM everbus_early_payloads WHERE event = ?1 AND tenant = ?2",
                )
                .and_then(|mut s| s.execute(params![id.as_bytes(), tenant]))
                .map_err(doing)?;
        }
        Ok(())
    }
}

/// The failed attempts of an event in a group.
pub(crate) fn kept_failures(conn: &Connection, group: i64, seq: u64) -> Result<KeptFailures> {
    let found: Option<(Option<String>, i64)> = conn
        .prepare_cached(
            "SELECT failures, past FROM everbus_failures WHERE seq = ?1 AND group_id = ?2",
        )
        .and_then(|mut s| {
            s.query_row((to_sql(seq), group), |r| Ok((r.get(0)?, r.get(1)?)))
                .optional()
        })
        .map_err(|e| from_sqlite("reading failed attempts", e))?;
    let Some((texts, past)) = found else {
        return Ok(KeptFailures::default());
    };
    let all = read_failures(texts.as_deref())?;
    let past = usize::try_from(seq_from(past)).unwrap_or(0).min(all.len());
    Ok(KeptFailures { all, past })
}

fn failures(reader: &Reader, group: &GroupName, events: &[EventKey]) -> Result<Vec<Vec<Failure>>> {
    let doing = |e| from_sqlite("reading failed attempts", e);
    let group: Option<i64> = reader
        .conn
        .prepare_cached("SELECT id FROM groups WHERE name = ?1")
        .and_then(|mut s| s.query_row([group.as_str()], |r| r.get(0)).optional())
        .map_err(doing)?;
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
