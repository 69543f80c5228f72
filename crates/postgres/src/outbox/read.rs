//! Reading rows of the outbox, whichever program wrote them.

use everbus_core::{Code, Error, OutboxRow, Timestamp};
use everbus_dialects::columns::{Columns, tenant};
use tokio_postgres::Row;

/// The columns that [`row`] expects, in its order. Times are microseconds, NULL for infinity.
pub(super) const COLUMNS: &str = "number, id, event_id, event_type, payload, attempts,
  CASE WHEN isfinite(created_at) THEN (extract(epoch FROM created_at) * 1000000)::bigint END,
  correlation_id, trace_id, attributes, ordering_key, revision,
  CASE WHEN isfinite(coalesce(wanted_at, created_at))
    THEN (extract(epoch FROM coalesce(wanted_at, created_at)) * 1000000)::bigint END";

/// Reads a row. An unreadable event is an error of that row alone.
pub(super) fn row(row: &Row) -> OutboxRow {
    let filled = |column: usize| {
        row.get::<_, Option<String>>(column)
            .filter(|t| !t.is_empty())
    };
    let columns = Columns {
        event_id: row.get(2),
        event_type: row.get(3),
        correlation_id: filled(7),
        trace_id: filled(8),
        ordering_key: filled(10),
        attributes: row.get(9),
    };
    let created_at: Option<i64> = row.get(6);
    let event = columns.event(row.get(4), || {
        created_at.map(Timestamp::from_micros).ok_or_else(|| {
            Error::new(Code::InvalidAttribute, "created_at is infinite")
                .hint("leave the column to its default, or write now()")
        })
    });
    let id: String = row.get(1);
    let tenant = tenant(&event, &id, columns.attributes.is_some());
    let attempts: i32 = row.get(5);
    OutboxRow {
        row: row.get(0),
        id,
        event,
        attempts: u32::try_from(attempts).unwrap_or(0),
        key: columns.ordering_key,
        tenant,
        revision: row.get(11),
        wanted_at: row.get::<_, Option<i64>>(12).map(Timestamp::from_micros),
        event_id: columns.event_id,
        event_type: columns.event_type,
    }
}
