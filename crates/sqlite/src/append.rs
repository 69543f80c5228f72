//! Putting events into the log.

use std::sync::Arc;

use everbus_core::{Appended, Code, Error, Event, EventKey, Position, Recorded, Result, Timestamp};
use rusqlite::{CachedStatement, Connection, OptionalExtension, params};

use crate::checksum::Columns;
use crate::errors::from_sqlite;
use crate::rows::{ends, read_stored, seq_from, to_sql};
use crate::state::{State, micros};

const INSERT: &str =
    "INSERT INTO log (seq, id, tenant, type, version, occurred_at, received_at, attrs, payload, checksum)
     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10) ON CONFLICT DO NOTHING";

/// Appends events inside one transaction.
pub(crate) struct Appender<'c> {
    conn: &'c Connection,
    insert: CachedStatement<'c>,
    received_at: i64,
}

impl<'c> Appender<'c> {
    pub(crate) fn new(conn: &'c Connection, state: &State, now: Timestamp) -> Result<Self> {
        let insert = conn
            .prepare_cached(INSERT)
            .map_err(|e| from_sqlite("publishing", e))?;
        crate::ahead::warn_once(state, micros(now));
        Ok(Self {
            conn,
            insert,
            received_at: micros(now).max(state.last_received),
        })
    }

    /// Appends a batch as a whole or not at all.
    pub(crate) fn batch(&mut self, state: &mut State, events: Vec<Event>) -> Result<Vec<Appended>> {
        self.all(state, events, |answer| answer)
    }

    /// As [`batch`](Self::batch), with the answers as a publisher gets them.
    pub(crate) fn answered(
        &mut self,
        state: &mut State,
        events: Vec<Event>,
    ) -> Result<Vec<Result<Appended>>> {
        self.all(state, events, Ok)
    }

    fn all<T>(
        &mut self,
        state: &mut State,
        events: Vec<Event>,
        answer: impl Fn(Appended) -> T,
    ) -> Result<Vec<T>> {
        let mark = (state.head, state.appended.len());
        let mut answers = Vec::with_capacity(events.len());
        for event in events {
            match self.one(state, event) {
                Ok(appended) => answers.push(answer(appended)),
                Err(e) => {
                    self.undo(state, mark)?;
                    return Err(e);
                }
            }
        }
        for (_, record) in &state.appended[mark.1..] {
            if let Some(overflow) = record.event.overflow() {
                crate::orphans::born(self.conn, overflow)?;
            }
        }
        Ok(answers)
    }

    /// Appends an event that another engine received; one whose id is taken stays as it is. Returns where
    /// it is.
    pub(crate) fn ingest(
        &mut self,
        state: &mut State,
        record: &Recorded,
        now: Timestamp,
    ) -> Result<u64> {
        self.received_at = micros(record.received_at.min(now)).max(state.last_received);
        match self.one(state, record.event.clone()) {
            Ok(answer) => {
                if let Some(overflow) = record.event.overflow().filter(|_| !answer.duplicate) {
                    crate::orphans::born(self.conn, overflow)?;
                }
                Ok(answer.position.place())
            }
            Err(e) if e.code() == Code::IdReused => {
                let event = crate::payloads::seq_of(self.conn, &EventKey::of(&record.event))?;
                tracing::warn!(
                    target: "everbus::sqlite",
                    event_id = %record.event.id(),
                    "an event with this id and another body is kept already"
                );
                event.ok_or(e)
            }
            Err(e) => Err(e),
        }
    }

    fn one(&mut self, state: &mut State, event: Event) -> Result<Appended> {
        let doing = |e| from_sqlite("publishing", e);
        let type_id = state.intern_type(self.conn, event.type_arc())?;
        let tenant = state.intern_tenant(self.conn, event.tenant())?;
        let attrs = match event.attributes() {
            None => None,
            Some(attributes) => Some(serde_json::to_string(attributes).map_err(|e| {
                Error::new(
                    Code::InvalidAttribute,
                    format!("the attributes cannot be stored: {e}"),
                )
            })?),
        };
        let position = state.head + 1;
        let id = event.id();
        let columns = Columns {
            seq: to_sql(position),
            id: id.as_bytes(),
            tenant,
            event_type: event.event_type(),
            version: event.version(),
            occurred_at: micros(event.occurred_at()),
            received_at: self.received_at,
            attrs: attrs.as_deref().map(str::as_bytes),
            payload: event.payload(),
        };
        let inserted = self
            .insert
            .execute(params![
                to_sql(position),
                id.as_bytes(),
                tenant,
                type_id,
                event.version(),
                micros(event.occurred_at()),
                self.received_at,
                attrs,
                &event.payload()[..],
                columns.checksum(),
            ])
            .map_err(doing)?;
        if inserted == 0 {
            return self.repeated(state, &event, tenant);
        }
        if let Some(at) = event.attributes().and_then(|a| a.expires_at) {
            self.conn
                .prepare_cached("INSERT INTO expirations (seq, at) VALUES (?1, ?2)")
                .and_then(|mut s| s.execute((to_sql(position), micros(at))))
                .map_err(doing)?;
        }
        state.head = position;
        state.last_received = self.received_at;
        let received_at = Timestamp::from_micros(self.received_at);
        let position = Position::seq(position);
        let answer = Appended::new(event.id(), position, received_at);
        let record = Recorded::new(event, position, received_at);
        state.appended.push((type_id, Arc::new(record)));
        Ok(answer)
    }

    /// The id is taken: by the same event, or by another one.
    fn repeated(&mut self, state: &mut State, event: &Event, tenant: i64) -> Result<Appended> {
        let doing = |e| from_sqlite("looking for an earlier publish", e);
        let sql = format!(
            "SELECT {} FROM log WHERE id = ?1 AND tenant = ?2",
            crate::rows::RECORD
        );
        let mut statement = self.conn.prepare_cached(&sql).map_err(doing)?;
        let mut rows = statement
            .query(params![event.id().as_bytes(), tenant])
            .map_err(doing)?;
        let row = rows.next().map_err(doing)?.ok_or_else(|| {
            Error::new(
                Code::Internal,
                "an event could not be stored, yet its id is free",
            )
        })?;
        let stored = read_stored(self.conn, row, &mut state.type_names)?;
        let first = stored.record;
        // What is damaged cannot be told from another event, and is no reason to stop publishing.
        if stored.damage.is_some() || !first.event.same_body(event) {
            return Err(Error::new(
                Code::IdReused,
                format!(
                    "event {} was published before with another body",
                    event.display_id()
                ),
            )
            .hint("use a new id for a new event; repeat a publish with the same content"));
        }
        let first = Appended::new(first.event.id(), first.position, first.received_at);
        Ok(first.as_duplicate())
    }

    fn undo(&mut self, state: &mut State, (head, appended): (u64, usize)) -> Result<()> {
        for sql in [
            "DELETE FROM log WHERE seq > ?1",
            "DELETE FROM expirations WHERE seq > ?1",
        ] {
            self.conn
                .prepare_cached(sql)
                .and_then(|mut s| s.execute([to_sql(head)]))
                .map_err(|e| from_sqlite("taking back a refused batch", e))?;
        }
        state.head = head;
        state.appended.truncate(appended);
        Ok(())
    }
}

/// The place of the first event received at or after a time, less one: what a reader that begins
/// there has behind it.
pub(crate) fn position_before(conn: &Connection, at: Timestamp) -> Result<u64> {
    let doing = |e| from_sqlite("searching the log by time", e);
    let Some((oldest, newest)) = ends(conn)? else {
        return Ok(0);
    };
    let (mut low, mut high) = (to_sql(oldest), to_sql(newest));
    // Times never fall as positions rise, so halving the range finds the place.
    let mut statement = conn
        .prepare_cached("SELECT seq, CAST(received_at AS INTEGER) FROM log WHERE seq >= ?1 ORDER BY seq LIMIT 1")
        .map_err(doing)?;
    high += 1;
    while low < high {
        let middle = low + (high - low) / 2;
        let found: Option<(i64, i64)> = statement
            .query_row([middle], |r| Ok((r.get(0)?, r.get(1)?)))
            .optional()
            .map_err(doing)?;
        match found {
            Some((seq, received)) if received < micros(at) => low = seq + 1,
            _ => high = middle,
        }
    }
    Ok(seq_from(low - 1))
}
