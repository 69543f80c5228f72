//! The outbox: events written into a table in the user's own transaction, for a relay to publish.
//!
//! ```text
//!  your transaction ── enqueue ──▶ event_outbox ──▶ relay (crate everbus) ──▶ any broker
//!        └─ your tables                  └─ sent | failed, with a dead letter
//! ```
//!
//! The tables are in the schema of every engine, and in any other schema after [`Outbox::create_tables`].
//! [`Outbox::open`] returns the source from which a relay reads the rows. A trigger wakes the relay when a transaction
//! with new rows commits.

mod dead;
mod enqueue;
pub(crate) mod forget;
mod read;
mod rows;
mod source;
#[cfg(feature = "sqlx")]
mod with_sqlx;

use std::sync::Arc;

use everbus_core::{EventId, IntoEvent, OutboxSource, Result};
use tokio_postgres::GenericClient;

use crate::config::Options;
use crate::errors::from_pg;
use crate::pool::in_schema;

pub(crate) use source::own_outbox;

const TABLES: &str = include_str!("../sql/outbox.sql");
const VIEW: &str = include_str!("../sql/outbox_view.sql");

/// The schema of an outbox if none is given.
const PUBLIC: &str = "public";

/// Writes events into the outbox of a database.
///
/// ```no_run
/// use everbus_postgres::outbox::Outbox;
///
/// # async fn order(client: &mut tokio_postgres::Client) -> Result<(), Box<dyn std::error::Error>> {
/// Outbox::create_tables(client).await?;
///
/// let tx = client.transaction().await?;
/// tx.execute("INSERT INTO orders (id, total) VALUES (123, 1999)", &[]).await?;
/// Outbox::new().enqueue(&tx, ("order.confirmed", serde_json::json!({ "order_id": 123 }))).await?;
/// tx.commit().await?; // both, or neither
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Outbox {
    /// The schema of the table. `None`: the `search_path` of the transaction finds the table.
    schema: Option<String>,
}

impl Outbox {
    /// Writes to the table `event_outbox` that the `search_path` finds: usually that of the schema `public`.
    pub fn new() -> Self {
        Self::default()
    }

    /// Writes to the table in this schema: `everbus` is that of an engine in the same database.
    pub fn in_schema(schema: impl Into<String>) -> Self {
        Self {
            schema: Some(schema.into()),
        }
    }

    fn table(&self) -> String {
        match &self.schema {
            None => "event_outbox".to_owned(),
            Some(schema) => format!("\"{}\".event_outbox", schema.replace('"', "\"\"")),
        }
    }

    /// Creates the tables of an outbox in the schema `public`, if they do not exist. The schema of an engine
    /// has them already. Inside a transaction they are created as part of it.
    pub async fn create_tables(client: &(impl GenericClient + Sync)) -> Result<()> {
        let made = client.batch_execute(&Self::tables_sql()).await;
        made.map_err(|e| from_pg("making the tables of the outbox", e))
    }

    /// The SQL behind [`create_tables`](Self::create_tables), for programs in other languages and their
    /// migration tools. Running it again does nothing.
    pub fn tables_sql() -> String {
        in_schema(&format!("{TABLES}\n{VIEW}"), PUBLIC)
    }

    /// Writes an event into the outbox, in this transaction. The event is relayed after the transaction has
    /// committed, and never if it does not commit.
    ///
    /// Takes what [`Bus::publish`](https://docs.rs/everbus) takes. Enqueuing the same event again while it
    /// waits changes nothing; the same id with another body is [`Code::IdReused`](everbus_core::Code::IdReused),
    /// and the server refuses the rest of the transaction. Returns the event's id.
    pub async fn enqueue(
        &self,
        tx: &(impl GenericClient + Sync),
        event: impl IntoEvent,
    ) -> Result<EventId> {
        let event = event.into_event()?;
        enqueue::insert(tx, &self.table(), &event).await?;
        Ok(event.id())
    }

    /// As [`enqueue`](Self::enqueue), for several events.
    pub async fn enqueue_batch<I>(
        &self,
        tx: &(impl GenericClient + Sync),
        events: I,
    ) -> Result<Vec<EventId>>
    where
        I: IntoIterator,
        I::Item: IntoEvent,
    {
        let events: Result<Vec<_>> = events.into_iter().map(IntoEvent::into_event).collect();
        let events = events?;
        for event in &events {
            enqueue::insert(tx, &self.table(), event).await?;
        }
        Ok(events.iter().map(everbus_core::Event::id).collect())
    }

    /// Creates the tables of an outbox in a database given by its URL, all of them or none: in the schema that
    /// the URL names, or in `public`. Returns whether they were missing. The schema of an engine has them
    /// already.
    pub async fn init(url: &str, options: Options) -> Result<bool> {
        source::init(url, options).await
    }

    /// Opens the outbox of a database for a relay: that of the schema in the URL, or of `public`. The tables
    /// must exist.
    pub async fn open(url: &str, options: Options) -> Result<Arc<dyn OutboxSource>> {
        source::open(url, options).await
    }
}
