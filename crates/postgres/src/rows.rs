//! Reading and writing rows of the log, and the names of event types.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use everbus_core::{
    Attributes, Error, Event, EventId, Failure, Position, Recorded, Result, Timestamp,
};
use parking_lot::RwLock;
use tokio_postgres::Row;
use tokio_postgres::types::FromSql;

use crate::checksum::Columns;
use crate::errors::{damaged, from_pg};
use crate::pool::Sql;

/// States of a row in `deliveries`.
pub(crate) const WAITING: i16 = 0;
pub(crate) const LEASED: i16 = 1;
pub(crate) const UNHANDLED: i16 = 3;

/// The columns that [`Types::read`] expects, in its order. The table is called `log` in the statement.
pub(crate) const RECORD: &str = "log.seq, log.id, log.type, log.version, log.occurred_at, log.received_at, log.attrs, log.payload, log.checksum";

/// The first column after those of [`RECORD`].
pub(crate) const AFTER_RECORD: usize = 9;

/// The type of an event whose type cannot be read.
pub(crate) const UNREADABLE: &str = "unreadable";
/// At most this many characters of damaged attributes are kept in a failure.
const SHOWN_ATTRIBUTES: usize = 1000;

/// Reads a column.
pub(crate) fn get<'a, T: FromSql<'a>>(row: &'a Row, index: usize) -> Result<T> {
    row.try_get(index).map_err(|e| from_pg("reading a row", e))
}

/// Reads the column of a position or a counter, which is never negative.
pub(crate) fn get_seq(row: &Row, index: usize) -> Result<u64> {
    Ok(seq_from(get(row, index)?))
}

/// Positions are unsigned in Rust and signed on the server; they never get near the limit.
pub(crate) fn to_sql(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// The opposite of [`to_sql`].
pub(crate) fn seq_from(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

/// Reads failures of a delivery or a dead letter.
pub(crate) fn read_failures(text: Option<&str>) -> Result<Vec<Failure>> {
    match text {
        None => Ok(Vec::new()),
        Some(text) => serde_json::from_str(text)
            .map_err(|e| damaged(format!("a record of failures is damaged: {e}"))),
    }
}

/// Writes failures; an empty list is NULL.
pub(crate) fn write_failures(failures: &[Failure]) -> Option<String> {
    if failures.is_empty() {
        return None;
    }
    // The JSON functions of the server refuse the zero character.
    let has_zero = |text: &Option<String>| text.as_ref().is_some_and(|text| text.contains('\0'));
    let mut cleaned = std::borrow::Cow::Borrowed(failures);
    for (index, failure) in failures.iter().enumerate() {
        let optional = [&failure.handler, &failure.backtrace, &failure.worker];
        if failure.error.contains('\0') || optional.into_iter().any(has_zero) {
            let failure = &mut cleaned.to_mut()[index];
            failure.error = storable(&failure.error);
            for text in [
                &mut failure.handler,
                &mut failure.backtrace,
                &mut failure.worker,
            ] {
                *text = text.as_deref().map(storable);
            }
        }
    }
    serde_json::to_string(&cleaned).ok()
}

/// A text that the server can store: it has no zero characters.
pub(crate) fn storable(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

/// An event as read from a row of the log.
pub(crate) struct Stored {
    pub(crate) type_id: i32,
    /// The event. If the row is damaged: what could be read of it, above all the bytes of the payload.
    pub(crate) record: Arc<Recorded>,
    /// What is wrong with the row. A damaged event is not given to a handler.
    pub(crate) damage: Option<String>,
}

impl Stored {
    pub(crate) fn seq(&self) -> u64 {
        self.record.position.place()
    }

    /// The event, if its row is intact.
    pub(crate) fn intact(self) -> Result<Arc<Recorded>> {
        match self.damage {
            None => Ok(self.record),
            Some(damage) => {
                let position = self.record.position;
                Err(damaged(format!("event {position} is damaged: {damage}")))
            }
        }
    }

    /// The event, for a reader that continues after damage. A skipped event is logged.
    pub(crate) fn or_left_out(self) -> Option<Arc<Recorded>> {
        if let Some(damage) = &self.damage {
            tracing::error!(
                target: "everbus::postgres",
                position = %self.record.position,
                %damage,
                "a damaged event is left out; see `everbus check`"
            );
            return None;
        }
        Some(self.record)
    }
}

/// The columns of a new row of the log.
pub(crate) struct NewRow {
    pub(crate) attrs: Option<String>,
    pub(crate) checksum: i32,
}

impl NewRow {
    pub(crate) fn of(event: &Event) -> Result<Self> {
        let attrs = match event.attributes() {
            None => None,
            Some(attributes) => Some(serde_json::to_string(attributes).map_err(|e| {
                Error::new(everbus_core::Code::Internal, "attributes cannot be written")
                    .caused_by(e)
            })?),
        };
        let id = event.id();
        let columns = Columns {
            id: id.as_bytes(),
            event_type: event.event_type(),
            version: event.version(),
            occurred_at: event.occurred_at().as_micros(),
            attrs: attrs.as_deref().map(str::as_bytes),
            payload: event.payload(),
        };
        let checksum = columns.checksum();
        Ok(Self { attrs, checksum })
    }
}

/// The names of event types by number. Numbers and names never change in one run of the server. There are few,
/// so none is evicted.
#[derive(Default)]
pub(crate) struct Types {
    known: RwLock<Known>,
}

#[derive(Default)]
struct Known {
    by_id: HashMap<i32, Arc<str>>,
    by_name: HashMap<Arc<str>, i32>,
}

impl Types {
    /// The numbers of these types, by name. New types are added.
    ///
    /// Outside of a transaction (`durable`) new types are remembered; inside of one they may be rolled back.
    pub(crate) async fn intern<'a>(
        &self,
        db: &impl Sql,
        names: impl IntoIterator<Item = &'a Arc<str>>,
        durable: bool,
    ) -> Result<HashMap<Arc<str>, i32>> {
        let mut found = HashMap::new();
        let mut missing: Vec<&str> = Vec::new();
        {
            let known = self.known.read();
            let mut last = None;
            for name in names {
                // The events of a batch often have the same type.
                if last.replace(name) == Some(name) {
                    continue;
                }
                match known.by_name.get(name) {
                    Some(id) => _ = found.insert(name.clone(), *id),
                    None if !missing.contains(&&**name) => missing.push(name),
                    None => {}
                }
            }
        }
        if missing.is_empty() {
            return Ok(found);
        }
        missing.sort_unstable();
        let doing = "naming event types";
        let sql =
            "INSERT INTO everbus.types (name) SELECT unnest($1::text[]) ON CONFLICT DO NOTHING";
        db.execute(doing, sql, &[&missing]).await?;
        let sql = "SELECT id, name FROM everbus.types WHERE name = ANY ($1)";
        for row in db.query(doing, sql, &[&missing]).await? {
            let (id, name): (i32, &str) = (get(&row, 0)?, get(&row, 1)?);
            let name: Arc<str> = name.into();
            if durable {
                self.remember(id, name.clone());
            }
            found.insert(name, id);
        }
        Ok(found)
    }

    fn remember(&self, id: i32, name: Arc<str>) {
        let mut known = self.known.write();
        known.by_id.insert(id, name.clone());
        known.by_name.insert(name, id);
    }

    /// Forgets all names: another server may have given the numbers to other names.
    pub(crate) fn forget(&self) {
        *self.known.write() = Known::default();
    }

    /// The name of a type, if it is known here.
    pub(crate) fn name(&self, id: i32) -> Option<Arc<str>> {
        self.known.read().by_id.get(&id).cloned()
    }

    /// All known types.
    pub(crate) fn all(&self) -> Vec<(i32, Arc<str>)> {
        let known = self.known.read();
        known
            .by_id
            .iter()
            .map(|(id, name)| (*id, name.clone()))
            .collect()
    }

    /// Learns all names there are.
    pub(crate) async fn learn_all(&self, db: &impl Sql) -> Result<HashMap<i32, Arc<str>>> {
        let rows = db
            .query(
                "reading the types",
                "SELECT id, name FROM everbus.types",
                &[],
            )
            .await?;
        self.learned(&rows)
    }

    /// Learns the names of these types, and returns them, because [`forget`](Self::forget) may be called at any time.
    pub(crate) async fn learn(
        &self,
        db: &impl Sql,
        ids: impl Iterator<Item = i32>,
    ) -> Result<HashMap<i32, Arc<str>>> {
        let (mut names, mut missing) = (HashMap::new(), Vec::new());
        {
            let known = self.known.read();
            let mut last = None;
            for id in ids {
                // The events of a batch often have the same type.
                if last.replace(id) == Some(id) {
                    continue;
                }
                match known.by_id.get(&id) {
                    Some(name) => _ = names.entry(id).or_insert_with(|| name.clone()),
                    None => missing.push(id),
                }
            }
        }
        if missing.is_empty() {
            return Ok(names);
        }
        missing.sort_unstable();
        missing.dedup();
        let sql = "SELECT id, name FROM everbus.types WHERE id = ANY ($1)";
        let rows = db.query("reading the types", sql, &[&missing]).await?;
        names.extend(self.learned(&rows)?);
        Ok(names)
    }

    fn learned(&self, rows: &[Row]) -> Result<HashMap<i32, Arc<str>>> {
        let mut names = HashMap::with_capacity(rows.len());
        for row in rows {
            let (id, name): (i32, &str) = (get(row, 0)?, get(row, 1)?);
            let name: Arc<str> = name.into();
            self.remember(id, name.clone());
            names.insert(id, name);
        }
        Ok(names)
    }

    /// Reads events from rows that begin with the columns of [`RECORD`], damaged ones too.
    pub(crate) async fn read(&self, db: &impl Sql, rows: &[Row]) -> Result<Vec<Stored>> {
        let ids = rows.iter().filter_map(|row| get(row, 2).ok());
        let names = self.learn(db, ids).await?;
        rows.iter().map(|row| Self::read_row(row, &names)).collect()
    }

    /// Reads intact events.
    pub(crate) async fn read_intact(
        &self,
        db: &impl Sql,
        rows: &[Row],
    ) -> Result<Vec<Arc<Recorded>>> {
        let stored = self.read(db, rows).await?;
        stored.into_iter().map(Stored::intact).collect()
    }

    fn read_row(row: &Row, names: &HashMap<i32, Arc<str>>) -> Result<Stored> {
        let mut damage = None;
        let position = Position::seq(get_seq(row, 0)?);
        let id: uuid::Uuid = get(row, 1)?;
        let type_id: i32 = get(row, 2)?;
        let event_type = names.get(&type_id).cloned().unwrap_or_else(|| {
            damage = Some(format!("it names type {type_id}, which is missing"));
            UNREADABLE.into()
        });
        let version = u32::try_from(get::<i64>(row, 3)?).unwrap_or(0);
        let occurred_at: i64 = get(row, 4)?;
        let received_at: i64 = get(row, 5)?;
        let attrs: Option<&str> = get(row, 6)?;
        let payload: &[u8] = get(row, 7)?;
        let checksum: Option<i32> = get(row, 8)?;
        let attributes = match attrs.map(serde_json::from_str::<Attributes>).transpose() {
            Ok(attributes) => attributes.map(Box::new),
            Err(e) => {
                let shown: String = attrs
                    .unwrap_or_default()
                    .chars()
                    .take(SHOWN_ATTRIBUTES)
                    .collect();
                damage.get_or_insert_with(|| {
                    format!("its attributes cannot be read: {e}; they are: {shown}")
                });
                None
            }
        };
        if let (Some(expected), None) = (checksum, &damage) {
            let columns = Columns {
                id: id.as_bytes(),
                event_type: &event_type,
                version,
                occurred_at,
                attrs: attrs.map(str::as_bytes),
                payload,
            };
            if columns.checksum() != expected {
                damage = Some("its checksum does not match what is stored".into());
            }
        }
        let event = Event::from_stored(
            EventId::from(id),
            event_type,
            version,
            Timestamp::from_micros(occurred_at),
            Bytes::copy_from_slice(payload),
            attributes,
        );
        let record = Recorded::new(event, position, Timestamp::from_micros(received_at));
        Ok(Stored {
            type_id,
            record: Arc::new(record),
            damage,
        })
    }
}

/// Reads the event at a position, damaged or not.
pub(crate) async fn stored_at(db: &impl Sql, types: &Types, seq: u64) -> Result<Option<Stored>> {
    let sql = format!("SELECT {RECORD} FROM everbus.log WHERE seq = $1");
    let rows = db.query("reading the log", &sql, &[&to_sql(seq)]).await?;
    Ok(types.read(db, &rows).await?.pop())
}
