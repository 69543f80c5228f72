//! Reading rows of the outbox, whichever program wrote them.
//!
//! SQLite stores any type in any column, so every column is read as text.

use everbus_core::OutboxRow;
use everbus_dialects::columns::{Columns, tenant, unreadable};
use rusqlite::types::ValueRef;
use rusqlite::{Connection, Row};

use super::times;

/// The columns that [`row`] expects, in its order.
pub(super) const COLUMNS: &str = "row, id, event_id, event_type, payload, attempts, created_at, correlation_id, trace_id, attributes, ordering_key, revision, wanted_at";

/// Reads a row. An unreadable event is an error of that row alone.
pub(super) fn row(conn: &Connection, row: &Row<'_>) -> rusqlite::Result<OutboxRow> {
    let created_at = text(row, 6)?.unwrap_or_default();
    let attributes = match row.get_ref(9)? {
        ValueRef::Text(attributes) => Some(String::from_utf8_lossy(attributes).into_owned()),
        _ => None,
    };
    let columns = Columns {
        event_id: text(row, 2)?.unwrap_or_default(),
        event_type: text(row, 3)?.unwrap_or_default(),
        correlation_id: text(row, 7)?.filter(|t| !t.is_empty()),
        trace_id: text(row, 8)?.filter(|t| !t.is_empty()),
        ordering_key: text(row, 10)?.filter(|t| !t.is_empty()),
        attributes,
    };
    let event = match row.get_ref(4)?.as_bytes_or_null() {
        Ok(Some(bytes)) => match std::str::from_utf8(bytes) {
            Ok(payload) => columns.event(payload, || times::read(conn, &created_at)),
            Err(e) => Err(unreadable(&e)),
        },
        _ => Err(unreadable(&"it is a number")),
    };
    let attempts: i64 = row.get(5)?;
    let id = text(row, 1)?.unwrap_or_default();
    let tenant = tenant(&event, &id, columns.attributes.is_some());
    let again = text(row, 12)?;
    let wanted_at = times::latest(conn, again.as_deref().unwrap_or(&created_at));
    Ok(OutboxRow {
        row: row.get(0)?,
        id,
        event,
        attempts: u32::try_from(attempts).unwrap_or(0),
        key: columns.ordering_key,
        tenant,
        revision: row.get(11)?,
        wanted_at,
        event_id: columns.event_id,
        event_type: columns.event_type,
    })
}

/// A column as text, whatever type SQLite stored.
fn text(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<String>> {
    Ok(match row.get_ref(column)? {
        ValueRef::Null => None,
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => {
            Some(String::from_utf8_lossy(bytes).into_owned())
        }
        ValueRef::Integer(number) => Some(number.to_string()),
        ValueRef::Real(number) => Some(number.to_string()),
    })
}
