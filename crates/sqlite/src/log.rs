//! Reading the log without a group.

use std::sync::{Arc, PoisonError};

use everbus_core::{
    ADDRESSED, BoxFuture, Code, Cursor, Error, EventId, EventState, Failure, FailureKind,
    GroupName, GroupState, Log, Lookup, Pattern, Position, Recorded, Result, Shard, StartFrom,
    Timestamp, UNMATCHED,
};
use rusqlite::{Connection, params};

use crate::broker::SqliteEngine;
use crate::declare::resolve;
use crate::deliveries::claims::stored_claims;
use crate::deliveries::deliver::CRASHED;
use crate::errors::from_sqlite;
use crate::feeder::{Damaged, read_matching};
use crate::groups::patterns_of;
use crate::outcomes;
use crate::readers::Reader;
use crate::rows::{
    LEASED, LEFT_OUT, RECORD, Seq as _, WAITING, read_failures, read_record, record_at, seq_from,
    to_sql,
};
use crate::sql::Sql as _;
use crate::store::kept_failures;

impl Log for SqliteEngine {
    fn head(&self) -> BoxFuture<'_, Result<Cursor>> {
        self.handle.query(|reader| head(reader).map(Cursor::seq))
    }

    fn read(
        &self,
        after: Cursor,
        patterns: Vec<Pattern>,
        limit: usize,
    ) -> BoxFuture<'_, Result<(Vec<Arc<Recorded>>, Cursor)>> {
        let after = after.place(Shard::ONLY);
        self.handle.query(move |reader| {
            let head = head(reader)?;
            let read = read_matching(
                reader,
                (after, head),
                &patterns,
                None,
                None,
                (limit.max(1), 16 << 20),
            )?;
            for Damaged { seq, damage, .. } in &read.damaged {
                tracing::error!(target: "everbus::sqlite", position = seq, %damage, "{LEFT_OUT}");
            }
            Ok((
                read.found.into_iter().map(|(_, record)| record).collect(),
                Cursor::seq(read.searched.max(after)),
            ))
        })
    }

    fn resolve(&self, from: StartFrom, patterns: Vec<Pattern>) -> BoxFuture<'_, Result<Cursor>> {
        self.handle.query(move |reader| {
            let head = head(reader)?;
            resolve(&reader.conn, head, from, &patterns).map(Cursor::seq)
        })
    }

    fn wait_beyond(&self, cursor: Cursor) -> BoxFuture<'_, Result<()>> {
        let seq = cursor.place(Shard::ONLY);
        let mut head = self.handle.head.clone();
        Box::pin(async move {
            // Wakes the writer, so that it begins to look for commits of other processes.
            self.handle.queue.nudge();
            loop {
                if let Some(error) = self.handle.failed.get() {
                    return Err(error.clone());
                }
                if *head.borrow_and_update() > seq {
                    return Ok(());
                }
                let stalled = self.handle.stalled.lock();
                if let Some(error) = &*stalled.unwrap_or_else(PoisonError::into_inner) {
                    return Err(error.clone());
                }
                if head.changed().await.is_err() {
                    return Err(Error::shutdown());
                }
            }
        })
    }
}

impl Lookup for SqliteEngine {
    fn find(&self, id: EventId) -> BoxFuture<'_, Result<Vec<Arc<Recorded>>>> {
        self.handle.query(move |reader| {
            let doing = |e| from_sqlite("looking for an event", e);
            let Reader { conn, types } = reader;
            let mut statement = conn
                .prepare_cached(&format!(
                    "SELECT {RECORD} FROM log WHERE id = ?1 ORDER BY seq"
                ))
                .map_err(doing)?;
            let mut rows = statement.query(params![id.as_bytes()]).map_err(doing)?;
            let mut found = Vec::new();
            while let Some(row) = rows.next().map_err(doing)? {
                found.push(read_record(conn, row, types)?);
            }
            Ok(found)
        })
    }

    fn states(&self, position: Position) -> BoxFuture<'_, Result<Vec<GroupState>>> {
        self.handle.query(move |reader| {
            let Some(record) = record_at(&reader.conn, position.place(), &mut reader.types)? else {
                return Err(Error::new(
                    Code::NotFound,
                    format!("there is no event at {position}"),
                ));
            };
            let sql = "SELECT id, name, cursor FROM groups ORDER BY name";
            let groups: Vec<(i64, String, i64)> = reader.conn.all("reading the groups", sql, [])?;
            groups
                .into_iter()
                .map(|(id, name, cursor)| {
                    let group: GroupName = name.parse()?;
                    state_in(reader, id, group, seq_from(cursor), &record)
                })
                .collect()
        })
    }
}

/// The newest position that was ever assigned.
pub(crate) fn head(reader: &Reader) -> Result<u64> {
    head_of(&reader.conn)
}

pub(crate) fn head_of(conn: &Connection) -> Result<u64> {
    let sql = "SELECT max(coalesce((SELECT max(seq) FROM log), 0),
               coalesce((SELECT value FROM meta WHERE key = 'head'), 0))";
    conn.one("reading the log", sql, []).map(seq_from)
}

/// state, due, attempt, failures
type Row = (i64, i64, u32, Option<String>);

fn state_in(
    reader: &Reader,
    id: i64,
    group: GroupName,
    cursor: u64,
    record: &Recorded,
) -> Result<GroupState> {
    let doing = "reading the state of an event";
    let seq = to_sql(record.seq());
    let mut state = GroupState {
        group,
        state: EventState::Done,
        attempts: 0,
        failures: vec![],
        due_at: None,
        skipped: None,
        ended: None,
    };
    let sql = "SELECT attempts, failures FROM dead_letters
               WHERE seq = ?1 AND group_id = ?2 AND retried_at IS NULL";
    let dead: Option<(u32, String)> = reader.conn.first(doing, sql, (seq, id))?;
    if let Some((attempts, failures)) = dead {
        state.state = EventState::Dlq;
        state.attempts = attempts;
        state.failures = read_failures(Some(&failures))?;
        return Ok(state);
    }
    let sql = "SELECT state, due, attempt, failures FROM deliveries
               WHERE group_id = ?1 AND seq = ?2";
    let row: Option<Row> = reader.conn.first(doing, sql, (id, seq))?;
    if let Some((kind, due, attempts, failures)) = row {
        state.attempts = attempts;
        state.failures = read_failures(failures.as_deref())?;
        state.state = EventState::of_waiting(kind == LEASED, &state.failures);
        state.due_at = (kind == WAITING).then(|| Timestamp::from_micros(due));
        return Ok(state);
    }
    let which = "group_id = ?1 AND lo <= ?2 AND hi >= ?2";
    let claims = stored_claims(&reader.conn, doing, which, (id, seq))?;
    if let Some(claim) = claims.iter().find(|claim| claim.is_open(record.seq())) {
        let begun = record.seq() <= claim.started;
        state.attempts = if begun { claim.attempt } else { 0 };
        state.state = EventState::Processing;
        if claim.owner == 0 {
            let (attempt, at) = (state.attempts, claim.crashed_at);
            state.state = EventState::Pending;
            state
                .failures
                .push(Failure::new(attempt, at, FailureKind::Crash, CRASHED));
        }
        return Ok(state);
    }
    let is_for = record.event.is_for(&state.group);
    let patterns = patterns_of(&reader.conn, id)?;
    let event_type = record.event.event_type();
    let is_matched = patterns.iter().any(|p| p.matches(event_type));
    let sql = "SELECT reason FROM skips WHERE group_id = ?1 AND seq = ?2";
    state.skipped = reader.conn.first(doing, sql, (id, seq))?;
    if record.seq() > cursor && state.skipped.is_none() && is_for && is_matched {
        state.state = EventState::Pending;
        return Ok(state);
    }
    outcomes::read_into(&reader.conn, seq, id, &mut state)?;
    if !is_for && state.skipped.is_none() {
        state.skipped = Some(ADDRESSED.to_owned());
    }
    // A group without subscriptions belongs to another broker, or only gets single events by redelivery.
    let untouched = state.failures.is_empty() && state.ended.is_none() && !patterns.is_empty();
    if !is_matched && untouched && state.skipped.is_none() {
        state.skipped = Some(UNMATCHED.to_owned());
    }
    // Failures that the runtime recorded for an event of another broker.
    let kept = kept_failures(&reader.conn, id, record.seq())?;
    if !kept.current().is_empty() {
        state.state = EventState::Processing;
    }
    if let Some(last) = kept.all.last() {
        // If the group has handled it, one more attempt came after the last failure.
        let done = state.state == EventState::Done && state.skipped.is_none();
        state.attempts = last.attempt.saturating_add(u32::from(done));
        state.failures = kept.all;
    }
    Ok(state)
}
