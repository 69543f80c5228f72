//! Writing to the outbox: one row per event.

use std::borrow::Cow;

use everbus_core::{Clock as _, Code, Error, Event, Result, SystemClock, TraceContext};
use everbus_dialects::envelope;
use rusqlite::{Connection, ErrorCode, params};

use super::init::missing;

const INSERT: &str = "INSERT INTO event_outbox (id, event_id, event_type, payload, created_at,
                      correlation_id, trace_id, attributes, ordering_key)
                      VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)";

pub(super) fn insert(conn: &Connection, event: &Event) -> Result<()> {
    let doing = |e: rusqlite::Error| {
        if e.sqlite_error_code() == Some(ErrorCode::ConstraintViolation) {
            return taken(event, e);
        }
        missing(conn, "writing to the outbox", e)
    };
    let written = envelope::write(event)?;
    let attributes = event.attributes();
    let trace = attributes.and_then(|a| a.trace.as_ref());
    let mut buffer = uuid::Uuid::encode_buffer();
    let id: &str = event.id().as_uuid().hyphenated().encode_lower(&mut buffer);
    // Ids are unique per tenant.
    let row = event.tenant().map_or(Cow::Borrowed(id), |tenant| {
        Cow::Owned(format!("{id}@{tenant}"))
    });
    let foreign = attributes.and_then(|a| a.foreign_id.as_deref());
    let mut statement = conn.prepare_cached(INSERT).map_err(doing)?;
    statement
        .execute(params![
            row,
            foreign.unwrap_or(id),
            event.event_type(),
            written.payload,
            SystemClock.now().to_string(),
            attributes.and_then(|a| a.correlation_id.as_deref()),
            trace.and_then(TraceContext::trace_id),
            written.attributes,
            event.ordering_key(),
        ])
        .map_err(doing)?;
    Ok(())
}

fn taken(event: &Event, cause: rusqlite::Error) -> Error {
    Error::new(
        Code::IdReused,
        format!(
            "the event {} waits in the outbox with another body",
            event.display_id()
        ),
    )
    .hint("use a new id for a new event")
    .caused_by(cause)
}
