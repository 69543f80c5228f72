//! Reading and writing rows of the log.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use everbus_core::{
    Appended, Attributes, Code, Error, Event, EventId, Failure, Lease, Position, Recorded, Result,
    Timestamp,
};
use rusqlite::types::{FromSql, ValueRef};
use rusqlite::{Connection, Row};

use crate::checksum::Columns;
use crate::errors::from_sqlite;
use crate::sql::Sql as _;

/// States of a row in `deliveries`.
pub(crate) const WAITING: i64 = 0;
pub(crate) const LEASED: i64 = 1;
pub(crate) const BEHIND_KEY: i64 = 2;
pub(crate) const UNHANDLED: i64 = 3;

/// The columns that [`read_record`] expects, in its order.
pub(crate) const RECORD: &str = "log.seq, log.id, log.type, log.version, log.occurred_at, log.received_at, log.attrs, log.payload, log.tenant, log.checksum";

/// The first column after those of [`RECORD`].
pub(crate) const AFTER_RECORD: usize = 10;

/// The group that an event is addressed to, NULL for none. Most events have no attributes, and few of the
/// others need to be parsed.
pub(crate) const ADDRESS: &str =
    "iif(instr(log.attrs, '\"address\":') > 0, log.attrs ->> '$.address', NULL)";

/// The oldest and the newest position. As two searches, because for a single query SQLite would read the whole log.
pub(crate) const ENDS: &str = "SELECT (SELECT min(seq) FROM log), (SELECT max(seq) FROM log)";

/// The oldest and the newest position, if there is any event.
pub(crate) fn ends(conn: &Connection) -> Result<Option<(u64, u64)>> {
    let (oldest, newest): (Option<i64>, Option<i64>) = conn.one("reading the log", ENDS, [])?;
    Ok(oldest.map(seq_from).zip(newest.map(seq_from)))
}

/// The names of interned types, read when needed and kept up to a limit.
#[derive(Default)]
pub(crate) struct TypeNames(HashMap<i64, Arc<str>>);

/// More types than this are not cached at once.
pub(crate) const MAX_CACHED_TYPES: usize = 10_000;

impl TypeNames {
    pub(crate) fn get(&mut self, conn: &Connection, id: i64) -> Result<Arc<str>> {
        self.find(conn, id)?.ok_or_else(|| {
            Error::of_file(
                Code::Corrupt,
                format!("the log names type {id}, which is missing"),
            )
        })
    }

    /// The name of a type, if there is one with this number.
    pub(crate) fn find(&mut self, conn: &Connection, id: i64) -> Result<Option<Arc<str>>> {
        if let Some(name) = self.0.get(&id) {
            return Ok(Some(name.clone()));
        }
        let sql = "SELECT name FROM types WHERE id = ?1";
        let name: Option<String> = conn.first("reading a type", sql, [id])?;
        let Some(name) = name else { return Ok(None) };
        let name: Arc<str> = name.into();
        if self.0.len() >= MAX_CACHED_TYPES {
            self.0.clear();
        }
        self.0.insert(id, name.clone());
        Ok(Some(name))
    }
}

/// The type of a dead letter whose event type cannot be read.
pub(crate) const UNREADABLE: &str = "unreadable";
/// At most this many characters of damaged attributes are kept in a failure.
const SHOWN_ATTRIBUTES: usize = 1000;

/// Logged when a reader skips a damaged event.
pub(crate) const LEFT_OUT: &str = "a damaged event is left out; see `everbus check`";

/// An event as read from a row of the log.
pub(crate) struct Stored {
    pub(crate) type_id: i64,
    /// The event. If the row is damaged: the parts that could be read, the bytes of the payload among them.
    pub(crate) record: Arc<Recorded>,
    /// What is wrong with the row. A damaged event is not given to a handler.
    pub(crate) damage: Option<String>,
}

impl Stored {
    /// The event, if its row is intact.
    pub(crate) fn intact(self) -> Result<Arc<Recorded>> {
        let Some(damage) = self.damage else {
            return Ok(self.record);
        };
        let position = self.record.position;
        Err(Error::of_file(
            Code::Corrupt,
            format!("event {position} is damaged: {damage}"),
        )
        .hint("`everbus check` lists all damaged events; restore a backup to have them back"))
    }

    /// The event, for a reader that continues after damage. A skipped event is logged.
    pub(crate) fn or_left_out(self) -> Option<Arc<Recorded>> {
        if let Some(damage) = &self.damage {
            tracing::error!(
                target: "everbus::sqlite",
                position = %self.record.position,
                %damage,
                "{LEFT_OUT}"
            );
            return None;
        }
        Some(self.record)
    }
}

/// Reads an event from a row of [`RECORD`]. The row must be intact.
pub(crate) fn read_record(
    conn: &Connection,
    row: &Row<'_>,
    types: &mut TypeNames,
) -> Result<Arc<Recorded>> {
    read_stored(conn, row, types)?.intact()
}

/// Reads a row of [`RECORD`], also if some of it is unreadable.
pub(crate) fn read_stored(
    conn: &Connection,
    row: &Row<'_>,
    types: &mut TypeNames,
) -> Result<Stored> {
    let get = |e| from_sqlite("reading the log", e);
    let damage = &mut None;
    let position = seq_from(row.get(0).map_err(get)?);
    let id: [u8; 16] = column(row, 1, "id", damage);
    let type_id: i64 = column(row, 2, "type", damage);
    let name = types.find(conn, type_id)?.unwrap_or_else(|| {
        damage.get_or_insert_with(|| format!("it names type {type_id}, which is missing"));
        UNREADABLE.into()
    });
    let stored_attrs = row.get_ref(6).map_err(get)?;
    let raw_attrs = stored_attrs.as_bytes_or_null().unwrap_or_default();
    let attrs = match stored_attrs {
        ValueRef::Null => None,
        value => match read_attributes(value) {
            Ok(attributes) => Some(Arc::new(attributes)),
            Err(e) => {
                damage.get_or_insert(e);
                None
            }
        },
    };
    let payload = match row.get_ref(7).map_err(get)? {
        ValueRef::Blob(bytes) | ValueRef::Text(bytes) => Bytes::copy_from_slice(bytes),
        other => {
            damage.get_or_insert_with(|| format!("its payload is {}", other.data_type()));
            match other {
                ValueRef::Integer(number) => number.to_string().into(),
                ValueRef::Real(number) => number.to_string().into(),
                _ => Bytes::new(),
            }
        }
    };
    let version = column(row, 3, "version", damage);
    let occurred_at = column(row, 4, "occurred_at", damage);
    let received_at = column(row, 5, "received_at", damage);
    let tenant = column(row, 8, "tenant", damage);
    let checksum: Option<i32> = column(row, 9, "checksum", damage);
    // A row of an older version has no checksum.
    if let (Some(expected), None) = (checksum, &damage) {
        let columns = Columns {
            seq: to_sql(position),
            id: &id,
            tenant,
            event_type: &name,
            version,
            occurred_at,
            received_at,
            attrs: raw_attrs,
            payload: &payload,
        };
        if columns.checksum() != expected {
            *damage = Some("its checksum does not match what is stored".into());
        }
    }
    let event = Event::from_stored(
        EventId::from_bytes(id),
        name,
        version,
        Timestamp::from_micros(occurred_at),
        payload,
        attrs,
    );
    let received_at = Timestamp::from_micros(received_at);
    let record = Recorded::new(event, Position::seq(position), received_at);
    Ok(Stored {
        type_id,
        record: Arc::new(record),
        damage: damage.take(),
    })
}

/// The checksum of an intact row of [`RECORD`] with another time of receipt; `None` if the row has none.
pub(crate) fn restamp(
    row: &Row<'_>,
    event_type: &str,
    received_at: i64,
) -> rusqlite::Result<Option<i32>> {
    if row.get_ref(9)? == ValueRef::Null {
        return Ok(None);
    }
    let columns = Columns {
        seq: row.get(0)?,
        id: row.get_ref(1)?.as_bytes()?,
        tenant: row.get(8)?,
        event_type,
        version: row.get(3)?,
        occurred_at: row.get(4)?,
        received_at,
        attrs: row.get_ref(6)?.as_bytes_or_null()?,
        payload: row.get_ref(7)?.as_bytes()?,
    };
    Ok(Some(columns.checksum()))
}

/// Reads a column. If it has the wrong type, returns a default and adds a note.
fn column<T: FromSql + Default>(
    row: &Row<'_>,
    index: usize,
    name: &str,
    damage: &mut Option<String>,
) -> T {
    row.get(index).unwrap_or_else(|e| {
        damage.get_or_insert_with(|| format!("its {name} cannot be read: {e}"));
        T::default()
    })
}

/// The number of an event in the file, which has a single log.
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

/// The parts of a lease in this engine.
pub(crate) trait LeaseParts {
    /// The claim or the row that holds the event.
    fn slot(&self) -> u64;
    /// Fencing token: changes each time the event is handed out.
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

fn read_attributes(value: ValueRef<'_>) -> Result<Attributes, String> {
    let text = value.as_str().map_err(|e| e.to_string());
    let read = text.and_then(|text| serde_json::from_str(text).map_err(|e| e.to_string()));
    read.map_err(|e| {
        let shown = String::from_utf8_lossy(value.as_bytes().unwrap_or_default());
        let shown: String = shown.chars().take(SHOWN_ATTRIBUTES).collect();
        format!("its attributes cannot be read: {e}; they are: {shown}")
    })
}

/// Reads one event by its position. The row must be intact.
pub(crate) fn record_at(
    conn: &Connection,
    seq: u64,
    types: &mut TypeNames,
) -> Result<Option<Arc<Recorded>>> {
    let stored = stored_at(conn, seq, types)?;
    stored.map(Stored::intact).transpose()
}

/// Reads the row of an event, also if some of it is unreadable.
pub(crate) fn stored_at(
    conn: &Connection,
    seq: u64,
    types: &mut TypeNames,
) -> Result<Option<Stored>> {
    let doing = |e| from_sqlite("reading the log", e);
    let mut statement = conn
        .prepare_cached(&format!("SELECT {RECORD} FROM log WHERE seq = ?1"))
        .map_err(doing)?;
    let mut rows = statement.query([to_sql(seq)]).map_err(doing)?;
    match rows.next().map_err(doing)? {
        Some(row) => read_stored(conn, row, types).map(Some),
        None => Ok(None),
    }
}

/// Positions and counters are unsigned in Rust and signed in SQLite; they never come near the limit.
pub(crate) fn to_sql(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// The opposite of [`to_sql`]; a negative number in the file counts as zero.
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

/// Writes failures; an empty list is NULL.
pub(crate) fn write_failures(failures: &[Failure]) -> Option<String> {
    if failures.is_empty() {
        None
    } else {
        serde_json::to_string(failures).ok()
    }
}

/// Microseconds as stored.
pub(crate) fn micros(at: Timestamp) -> i64 {
    at.as_micros()
}
