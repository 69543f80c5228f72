//! Appending events to the log.

use std::sync::{Arc, LazyLock};

use everbus_core::{Appended, Code, Error, Event, EventKey, Position, Recorded, Result, Timestamp};
use rusqlite::{CachedStatement, Connection, OptionalExtension, Statement, params};

use crate::checksum::Columns;
use crate::errors::from_sqlite;
use crate::log_end::LogEnd;
use crate::rows::{ends, micros, read_stored, seq_from, to_sql};
use crate::sql::Sql as _;
use crate::tx::Tx;

/// Rows written by one statement when there are that many events. Starting and ending a statement and finding
/// the end of the log costs a third of a single insert.
pub(crate) const ROWS: usize = 16;
const COLUMNS: usize = 10;

static INSERT: LazyLock<String> = LazyLock::new(|| insert(1));
static INSERT_ROWS: LazyLock<String> = LazyLock::new(|| insert(ROWS));

fn insert(rows: usize) -> String {
    let values = vec!["(?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"; rows].join(", ");
    format!(
        "INSERT INTO log
           (seq, id, tenant, type, version, occurred_at, received_at, attrs, payload, checksum)
         VALUES {values} ON CONFLICT DO NOTHING"
    )
}

/// Appends events inside one transaction.
pub(crate) struct Appender<'c> {
    conn: &'c Connection,
    insert: CachedStatement<'c>,
    insert_rows: Option<CachedStatement<'c>>,
    received_at: i64,
}

impl<'c> Appender<'c> {
    pub(crate) fn new(conn: &'c Connection, state: &LogEnd, now: Timestamp) -> Result<Self> {
        let insert = conn
            .prepare_cached(&INSERT)
            .map_err(|e| from_sqlite("publishing", e))?;
        crate::ahead::warn_once(state, micros(now));
        Ok(Self {
            conn,
            insert,
            insert_rows: None,
            received_at: micros(now).max(state.last_received),
        })
    }

    /// Appends a batch as a whole or not at all.
    pub(crate) fn batch(
        &mut self,
        state: &mut LogEnd,
        events: Vec<Event>,
    ) -> Result<Vec<Appended>> {
        self.all(state, events, |answer| answer)
    }

    /// Appends one event.
    pub(crate) fn single(&mut self, state: &mut LogEnd, event: Arc<Recorded>) -> Result<Appended> {
        let appended = self.one(state, event)?;
        let record = state.appended.last().filter(|_| !appended.duplicate);
        if let Some(overflow) = record.and_then(|(_, record)| record.event.overflow()) {
            crate::orphans::born(self.conn, overflow)?;
        }
        Ok(appended)
    }

    /// As [`batch`](Self::batch), with the answers in the form that a publisher gets.
    pub(crate) fn answered(
        &mut self,
        state: &mut LogEnd,
        events: Vec<Event>,
    ) -> Result<Vec<Result<Appended>>> {
        self.all(state, events, Ok)
    }

    fn all<T>(
        &mut self,
        state: &mut LogEnd,
        events: Vec<Event>,
        answer: impl Fn(Appended) -> T,
    ) -> Result<Vec<T>> {
        let mark = (state.head, state.appended.len());
        let mut answers = Vec::with_capacity(events.len());
        let each = self.each(state, events, |appended| answers.push(answer(appended)));
        if let Err(e) = each {
            self.undo(state, mark)?;
            return Err(e);
        }
        for (_, record) in &state.appended[mark.1..] {
            if let Some(overflow) = record.event.overflow() {
                crate::orphans::born(self.conn, overflow)?;
            }
        }
        Ok(answers)
    }

    fn each(
        &mut self,
        state: &mut LogEnd,
        events: Vec<Event>,
        mut answer: impl FnMut(Appended),
    ) -> Result<()> {
        let mut events = events.into_iter();
        while events.len() > 0 {
            let types = match events.as_slice().first_chunk::<ROWS>() {
                Some(rows) => self.write_rows(state, rows.iter())?,
                None => None,
            };
            let next = events.by_ref().take(ROWS);
            match types {
                Some(types) => next.zip(types).for_each(|(event, type_id)| {
                    answer(self.written(state, unplaced(event), type_id));
                }),
                None => {
                    for event in next {
                        answer(self.one(state, unplaced(event))?);
                    }
                }
            }
        }
        Ok(())
    }

    /// Appends an event that another engine received, and returns its position. An event whose id exists is not
    /// changed.
    pub(crate) fn ingest(
        &mut self,
        state: &mut LogEnd,
        record: &Recorded,
        now: Timestamp,
    ) -> Result<u64> {
        self.received_at = micros(record.received_at.min(now)).max(state.last_received);
        match self.one(state, unplaced(record.event.clone())) {
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
                    "an event with this id and another body is stored already"
                );
                event.ok_or(e)
            }
            Err(e) => Err(e),
        }
    }

    /// Writes the rows of [`ROWS`] events, all or none, and returns the numbers of their types. `None`: an id
    /// exists, or an event needs more than its row, so each event must be appended alone. The rows count as
    /// appended after [`written`](Self::written).
    pub(crate) fn write_rows<'e>(
        &mut self,
        state: &mut LogEnd,
        events: impl Iterator<Item = &'e Event>,
    ) -> Result<Option<[i64; ROWS]>> {
        let doing = |e| from_sqlite("publishing", e);
        let mut insert = match self.insert_rows.take() {
            Some(insert) => insert,
            None => self.conn.prepare_cached(&INSERT_ROWS).map_err(doing)?,
        };
        let mut types = [0; ROWS];
        for ((row, type_id), event) in types.iter_mut().enumerate().zip(events) {
            let expires = event.attributes().is_some_and(|a| a.expires_at.is_some());
            if expires || event.overflow().is_some() {
                return Ok(None);
            }
            let seq = state.head + 1 + row as u64;
            *type_id = state.intern_type(self.conn, event.type_arc())?;
            let tenant = state.intern_tenant(self.conn, event.tenant())?;
            let Ok(attrs) = attrs_of(event) else {
                return Ok(None);
            };
            let names = (tenant, *type_id);
            bind(&mut insert, row, seq, event, names, self.received_at, attrs).map_err(doing)?;
        }
        let inserted = insert.raw_execute().map_err(doing)?;
        self.insert_rows = Some(insert);
        if inserted == ROWS {
            return Ok(Some(types));
        }
        self.undo(state, (state.head, state.appended.len()))?;
        Ok(None)
    }

    /// Adds an event whose row was written to the log's state in memory, and sets its position.
    pub(crate) fn written(
        &self,
        state: &mut LogEnd,
        mut record: Arc<Recorded>,
        type_id: i64,
    ) -> Appended {
        state.head += 1;
        state.last_received = self.received_at;
        let placed = Arc::make_mut(&mut record);
        placed.received_at = Timestamp::from_micros(self.received_at);
        placed.position = Position::seq(state.head);
        let answer = Appended::new(placed.event.id(), placed.position, placed.received_at);
        state.appended.push((type_id, record));
        answer
    }

    fn one(&mut self, state: &mut LogEnd, record: Arc<Recorded>) -> Result<Appended> {
        let event = &record.event;
        let doing = |e| from_sqlite("publishing", e);
        let type_id = state.intern_type(self.conn, event.type_arc())?;
        let tenant = state.intern_tenant(self.conn, event.tenant())?;
        let attrs = attrs_of(event)?;
        let (seq, names) = (state.head + 1, (tenant, type_id));
        let insert = &mut self.insert;
        bind(insert, 0, seq, event, names, self.received_at, attrs).map_err(doing)?;
        if insert.raw_execute().map_err(doing)? == 0 {
            return self.repeated(state, event, tenant);
        }
        if let Some(at) = event.attributes().and_then(|a| a.expires_at) {
            let sql = "INSERT INTO expirations (seq, at) VALUES (?1, ?2)";
            self.conn
                .run("publishing", sql, (to_sql(seq), micros(at)))?;
        }
        Ok(self.written(state, record, type_id))
    }

    /// Answers for an event whose id exists: a repetition of the same event, or another event.
    fn repeated(&mut self, state: &mut LogEnd, event: &Event, tenant: i64) -> Result<Appended> {
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
        // A damaged event cannot be compared. It counts as another event, and publishing continues.
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

    fn undo(&mut self, state: &mut LogEnd, (head, appended): (u64, usize)) -> Result<()> {
        for sql in [
            "DELETE FROM log WHERE seq > ?1",
            "DELETE FROM expirations WHERE seq > ?1",
        ] {
            self.conn
                .run("removing a refused batch", sql, [to_sql(head)])?;
        }
        state.head = head;
        state.appended.truncate(appended);
        Ok(())
    }
}

/// The record of an event that is not in the log yet: the append sets position and time.
pub(crate) fn unplaced(event: Event) -> Arc<Recorded> {
    Arc::new(Recorded::new(
        event,
        Position::seq(0),
        Timestamp::from_micros(0),
    ))
}

fn attrs_of(event: &Event) -> Result<Option<String>> {
    let attributes = event.attributes().map(serde_json::to_string).transpose();
    attributes.map_err(|e| {
        let what = format!("the attributes cannot be stored: {e}");
        Error::new(Code::InvalidAttribute, what)
    })
}

/// Binds the values of a row; the statement may hold several rows.
fn bind(
    insert: &mut Statement<'_>,
    row: usize,
    seq: u64,
    event: &Event,
    (tenant, type_id): (i64, i64),
    received_at: i64,
    attrs: Option<String>,
) -> rusqlite::Result<()> {
    let id = event.id();
    let columns = Columns {
        seq: to_sql(seq),
        id: id.as_bytes(),
        tenant,
        event_type: event.event_type(),
        version: event.version(),
        occurred_at: micros(event.occurred_at()),
        received_at,
        attrs: attrs.as_deref().map(str::as_bytes),
        payload: event.payload(),
    };
    let checksum = columns.checksum();
    let first = row * COLUMNS + 1;
    insert.raw_bind_parameter(first, to_sql(seq))?;
    insert.raw_bind_parameter(first + 1, id.as_bytes())?;
    insert.raw_bind_parameter(first + 2, tenant)?;
    insert.raw_bind_parameter(first + 3, type_id)?;
    insert.raw_bind_parameter(first + 4, event.version())?;
    insert.raw_bind_parameter(first + 5, micros(event.occurred_at()))?;
    insert.raw_bind_parameter(first + 6, received_at)?;
    insert.raw_bind_parameter(first + 7, attrs)?;
    insert.raw_bind_parameter(first + 8, &event.payload()[..])?;
    insert.raw_bind_parameter(first + 9, checksum)
}

/// The position before the first event received at or after a time: the cursor of a reader that begins at
/// that time.
pub(crate) fn position_before(conn: &Connection, at: Timestamp) -> Result<u64> {
    let doing = |e| from_sqlite("searching the log by time", e);
    let Some((oldest, newest)) = ends(conn)? else {
        return Ok(0);
    };
    let (mut low, mut high) = (to_sql(oldest), to_sql(newest));
    // Times never decrease along the log, so a binary search finds the position.
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

/// Appends the follow-up events of a settlement, in the same transaction.
pub(crate) fn append_follow_ups(tx: &mut Tx, events: Vec<Event>) -> Result<()> {
    let now = tx.clock.now();
    let mut appender = Appender::new(&tx.conn, &tx.log, now)?;
    appender.batch(&mut tx.log, events).map(drop)
}
