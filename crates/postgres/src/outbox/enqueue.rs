//! Writing to the outbox: one row per event.

use std::borrow::Cow;

use everbus_core::{Code, Error, Event, Result, TraceContext};
use everbus_dialects::envelope;
use tokio_postgres::GenericClient;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};

use crate::errors::{Refused, from_pg};
use crate::rows::storable;

/// The values of a row, in the order of [`insert_sql`]. Any client of PostgreSQL can send them.
#[derive(Clone, Debug)]
pub(crate) struct NewRow {
    pub(crate) id: String,
    pub(crate) event_id: String,
    pub(crate) event_type: String,
    pub(crate) payload: String,
    pub(crate) correlation_id: Option<String>,
    pub(crate) trace_id: Option<String>,
    pub(crate) attributes: Cow<'static, str>,
    pub(crate) ordering_key: Option<String>,
}

pub(crate) fn insert_sql(table: &str) -> String {
    format!(
        "INSERT INTO {table} (id, event_id, event_type, payload, created_at,
           correlation_id, trace_id, attributes, ordering_key)
         VALUES ($1, $2, $3, $4, clock_timestamp(), $5, $6, $7, $8)"
    )
}

impl NewRow {
    pub(crate) fn of(event: &Event) -> Result<Self> {
        let written = envelope::write(event)?;
        let attributes = event.attributes();
        let trace = attributes.and_then(|a| a.trace.as_ref());
        let id = event.id().to_string();
        let foreign = attributes.and_then(|a| a.foreign_id.as_deref());
        Ok(Self {
            event_id: foreign.map_or_else(|| id.clone(), storable),
            // Ids are unique per tenant.
            id: match event.tenant() {
                Some(tenant) => format!("{id}@{}", storable(tenant)),
                None => id,
            },
            event_type: event.event_type().to_owned(),
            payload: written.payload,
            correlation_id: attributes
                .and_then(|a| a.correlation_id.as_deref())
                .map(storable),
            trace_id: trace.and_then(TraceContext::trace_id).map(str::to_owned),
            attributes: written.attributes,
            ordering_key: event.ordering_key().map(|key| storable(&key)),
        })
    }
}

pub(super) async fn insert<C: GenericClient + Sync>(
    db: &C,
    table: &str,
    event: &Event,
) -> Result<()> {
    let row = NewRow::of(event)?;
    let attributes = &*row.attributes;
    let values: [&(dyn ToSql + Sync); 8] = [
        &row.id,
        &row.event_id,
        &row.event_type,
        &row.payload,
        &row.correlation_id,
        &row.trace_id,
        &attributes,
        &row.ordering_key,
    ];
    let values = values.map(|value| (value, Type::TEXT));
    let inserted = db.execute_typed(&insert_sql(table), &values).await;
    inserted.map(drop).map_err(|e| refused(event, e))
}

/// Maps the error of an insert.
fn refused(event: &Event, error: tokio_postgres::Error) -> Error {
    match error.code() {
        Some(&SqlState::UNIQUE_VIOLATION) => taken(event).caused_by(Refused(error)),
        Some(&SqlState::UNDEFINED_TABLE) => no_table().caused_by(Refused(error)),
        _ => from_pg("writing to the outbox", error),
    }
}

/// The error of an id that waits with another body.
pub(crate) fn taken(event: &Event) -> Error {
    let what = format!(
        "event {} waits in the outbox with another body",
        event.display_id()
    );
    Error::new(Code::IdReused, what).hint("use a new id for a new event")
}

/// The error of a transaction that finds no outbox.
pub(crate) fn no_table() -> Error {
    Error::new(
        Code::NotFound,
        "there is no table event_outbox in this database",
    )
    .hint("make it with `Outbox::create_tables`, or name its schema with `Outbox::in_schema`")
}
