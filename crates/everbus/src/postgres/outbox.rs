//! The outbox in a PostgreSQL database.

use std::sync::Arc;

use everbus_core::{Event, EventId, IntoEvent, OutboxSource, Result};
use everbus_postgres::tokio_postgres::GenericClient;

use crate::ambient;

/// Writes events into the outbox of a PostgreSQL database, in the service's own transaction. Adds the ambient
/// values of the current task: the correlation id, the trace, the event being handled.
///
/// A relay ([`outbox::Relay`](crate::outbox::Relay), or `everbus outbox relay`) publishes them to any broker
/// after the commit; a trigger of the table wakes it. Several relays may run: one works, the others stand by.
///
/// ```no_run
/// use everbus::outbox::Relay;
/// use everbus::{Bus, postgres::Outbox};
/// use serde_json::json;
///
/// # async fn run(db: &mut everbus::tokio_postgres::Client) -> Result<(), Box<dyn std::error::Error>> {
/// Outbox::create_tables(db).await?; // once
///
/// let tx = db.transaction().await?;
/// tx.execute("INSERT INTO orders VALUES (123, 1999)", &[]).await?;
/// Outbox::new().enqueue(&tx, ("order.confirmed", json!({ "order_id": 123 }))).await?;
/// tx.commit().await?; // both, or neither
///
/// let bus = Bus::open("nats://localhost").await?; // any engine
/// let relay = Relay::new(&bus, Outbox::open("postgres://shop:secret@localhost/shop").await?).spawn();
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct Outbox {
    inner: everbus_postgres::outbox::Outbox,
    source: Option<Arc<str>>,
}

impl Outbox {
    /// An `Outbox` that writes to the table `event_outbox` which the transaction sees: usually that of the
    /// schema `public`. It holds no connection: the transaction names the database.
    pub fn new() -> Self {
        Self::default()
    }

    /// An `Outbox` that writes to the table in this schema: `everbus` is that of an engine in the same
    /// database.
    pub fn in_schema(schema: impl Into<String>) -> Self {
        Self {
            inner: everbus_postgres::outbox::Outbox::in_schema(schema),
            source: None,
        }
    }

    /// The source of events that name none.
    #[must_use]
    pub fn source(mut self, source: impl Into<Arc<str>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Creates the outbox tables in the schema `public`, if they are missing. The schema of an engine has
    /// them already.
    pub async fn create_tables(client: &(impl GenericClient + Sync)) -> Result<()> {
        everbus_postgres::outbox::Outbox::create_tables(client).await
    }

    /// The SQL behind [`create_tables`](Self::create_tables), for programs in other languages and their
    /// migration tools. Running it again does nothing.
    pub fn tables_sql() -> String {
        everbus_postgres::outbox::Outbox::tables_sql()
    }

    /// Writes an event into the outbox, as part of this transaction: your own, or that of
    /// [`postgres::in_transaction`](crate::postgres::in_transaction). It is relayed after the commit, and
    /// never without one. Returns the event's id.
    ///
    /// Takes what [`Bus::publish`](crate::Bus::publish) takes. Enqueuing the same event again while it
    /// waits changes nothing; the same id with another body is `IdReused`, and the server refuses the rest
    /// of the transaction.
    pub async fn enqueue(
        &self,
        tx: &(impl GenericClient + Sync),
        event: impl IntoEvent,
    ) -> Result<EventId> {
        self.inner.enqueue(tx, self.inherit(event)?).await
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
        let events = events.into_iter().map(|event| self.inherit(event));
        let events: Vec<Event> = events.collect::<Result<_>>()?;
        self.inner.enqueue_batch(tx, events).await
    }

    /// As [`enqueue`](Self::enqueue), in a transaction of sqlx: pass `&mut *tx`.
    #[cfg(feature = "sqlx")]
    pub async fn enqueue_sqlx(
        &self,
        tx: &mut everbus_postgres::sqlx::PgConnection,
        event: impl IntoEvent,
    ) -> Result<EventId> {
        self.inner.enqueue_sqlx(tx, self.inherit(event)?).await
    }

    fn inherit(&self, event: impl IntoEvent) -> Result<Event> {
        ambient::inherit(event.into_event()?, self.source.as_ref())
    }

    /// Creates the outbox tables in the database that a URL names, all of them or none: in the schema of the
    /// URL (`?schema=…`), or in `public`. Returns whether they were missing.
    pub async fn init(url: &str) -> Result<bool> {
        let options = everbus_postgres::Options::default();
        everbus_postgres::outbox::Outbox::init(url, options).await
    }

    /// Opens the outbox of a database for a relay: that of the schema in the URL (`?schema=…`), or of
    /// `public`.
    pub async fn open(url: &str) -> Result<Arc<dyn OutboxSource>> {
        let options = everbus_postgres::Options::default();
        everbus_postgres::outbox::Outbox::open(url, options).await
    }
}
