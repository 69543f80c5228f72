//! Rows of the log, in and out.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use everbus_core::{
    Appended, Attributes, Code, Error, Event, EventId, Failure, Lease, Position, Recorded, Result,
    Timestamp,
};
use rusqlite::types::ValueRef;
use rusqlite::{Connection, OptionalExtension, Row};

use crate::errors::from_sqlite;

/// The columns that [`read_record`] expects, in its order.
pub(crate) const RECORD: &str = "log.seq, log.id, log.type, log.version, log.occurred_at, log.received_at, log.attrs, log.payload";

/// The group that an event is addressed to, NULL for none. Most events have no attributes, and of the others
/// hardly any needs to be parsed.
pub(crate) const ADDRESS: &str =
    "iif(instr(log.attrs, '\"address\":') > 0, log.attrs ->> '$.address', NULL)";

/// The oldest and the newest position. Two searches: asked for as one, SQLite reads all of the log.
pub(crate) const ENDS: &str = "SELECT (SELECT min(seq) FROM log), (SELECT max(seq) FROM log)";

/// The oldest and the newest position, if there is any event.
pub(crate) fn ends(conn: &Connection) -> Result<Option<(u64, u64)>> {
    let (oldest, newest): (Option<i64>, Option<i64>) = conn
        .prepare_cached(ENDS)
        .and_then(|mut s| s.query_row([], |r| Ok((r.get(0)?, r.get(1)?))))
        .map_err(|e| from_sqlite("reading the log", e))?;
    Ok(oldest.map(seq_from).zip(newest.map(seq_from)))
}

/// The names of interned types, read when needed and kept up to a limit.
#[derive(Default)]
pub(crate) struct TypeNames(HashMap<i64, Arc<str>>);

/// More types than this are not kept in memory at once.
pub(crate) const MAX_CACHED_TYPES: usize = 10_000;

impl TypeNames {
    pub(crate) fn get(&mut self, conn: &Connection, id: i64) -> Result<Arc<str>> {
        if let Some(name) = self.0.get(&id) {
            return Ok(name.clone());
        }
        let name: Option<String> = conn
            .prepare_cached("SELECT name FROM types WHERE id = ?1")
            .and_then(|mut s| s.query_row([id], |row| row.get(0)).optional())
            .map_err(|e| from_sqlite("reading a type", e))?;
        let name: Arc<str> = name
            .ok_or_else(|| {
                Error::of_file(
                    Code::Corrupt,
                    format!("the log names type {id}, which is missing"),
                )
            })?
            .into();
        if self.0.len() >= MAX_CACHED_TYPES {
            self.0.clear();
        }
        self.0.insert(id, name.clone());
        Ok(name)
    }
}

/// Reads an event from a row of [`RECORD`].
pub(crate) fn read_record(
    conn: &Connection,
    row: &Row<'_>,
    types: &mut TypeNames,
) -> Result<Arc<Recorded>> {
    let get = |e| from_sqlite("reading the log", e);
    let position = seq_from(row.get(0).map_err(get)?);
    let id: [u8; 16] = row.get(1).map_err(get)?;
    let name = types.get(conn, row.get(2).map_err(get)?)?;
    let attrs = match row.get_ref(6).map_err(get)? {
        ValueRef::Null => None,
        value => {
            let text = value.as_str().unwrap_or_default();
            Some(Box::new(read_attributes(position, text)?))
        }
    };
    let payload = row.get_ref(7).map_err(get)?.as_bytes().map_err(|e| {
        Error::of_file(
            Code::Corrupt,
            format!("the payload of event {position} is damaged: {e}"),
        )
    })?;
    let event = Event::from_stored(
        EventId::from_bytes(id),
        name,
        row.get(3).map_err(get)?,
        Timestamp::from_micros(row.get(4).map_err(get)?),
        Bytes::copy_from_slice(payload),
        attrs,
    );
    let received_at = Timestamp::from_micros(row.get(5).map_err(get)?);
    Ok(Arc::new(Recorded::new(
        event,
        Position::seq(position),
        received_at,
    )))
}

/// The number of an event in the file: it has a single log.
pub(crate) trait Seq {
    fn seq(&self) -> u64;
}

impl Seq for Recorded {
    fn seq(&self) -> u64 {
        self.position.place()
    }
}

impl Seq for Appended {
    fn seq(&self) -> u64 {
        self.position.place()
    }
}

impl Seq for Lease {
    fn seq(&self) -> u64 {
        self.position().place()
    }
}

/// What this engine puts into a lease.
pub(crate) trait LeaseParts {
    /// The claim or the row that holds the event.
    fn slot(&self) -> u64;
    /// Changes each time the event is handed out.
    fn token(&self) -> u64;
}

impl LeaseParts for Lease {
    fn slot(&self) -> u64 {
        self.words()[0]
    }

    fn token(&self) -> u64 {
        self.words()[1]
    }
}

fn read_attributes(position: u64, text: &str) -> Result<Attributes> {
    serde_json::from_str(text).map_err(|e| {
        Error::of_file(
            Code::Corrupt,
            format!("the attributes of event {position} are damaged: {e}"),
        )
    })
}

/// Reads one event by its place in the log.
pub(crate) fn record_at(
    conn: &Connection,
    seq: u64,
    types: &mut TypeNames,
) -> Result<Option<Arc<Recorded>>> {
    let doing = |e| from_sqlite("reading the log", e);
    let mut statement = conn
        .prepare_cached(&format!("SELECT {RECORD} FROM log WHERE seq = ?1"))
        .map_err(doing)?;
    let mut rows = statement.query([to_sql(seq)]).map_err(doing)?;
    match rows.next().map_err(doing)? {
        Some(row) => read_record(conn, row, types).map(Some),
        None => Ok(None),
    }
}

/// Positions and counters are unsigned outside and signed in SQLite; they never get near the limit.
pub(crate) fn to_sql(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// The other way round; a negative number in the file counts as zero.
pub(crate) fn seq_from(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

/// Reads the failures of a delivery or dead letter.
pub(crate) fn read_failures(text: Option<&str>) -> Result<Vec<Failure>> {
    match text {
        None => Ok(Vec::new()),
        Some(text) => serde_json::from_str(text).map_err(|e| {
            Error::of_file(
                Code::Corrupt,
                format!("a record of failures is damaged: {e}"),
            )
        }),
    }
}

/// Writes them; none at all is NULL.
pub(crate) fn write_failures(failures: &[Failure]) -> Option<String> {
    if failures.is_empty() {
        None
    } else {
        serde_json::to_string(failures).ok()
    }
}
