//! The outbox: events committed with the data they are about, and the relay that publishes them.
//!
//! A service that changes its database and then publishes can die between the two. With an outbox it writes
//! both in one transaction; a [`Relay`] publishes the events to any broker, in order for each key, and
//! repeats until the broker has acknowledged them. A row that was published and not marked is published
//! again, and the broker recognises the event id.
//!
//! ```
//! use everbus::outbox::{Outbox, Relay};
//! use everbus::{Bus, rusqlite::Connection};
//! use serde_json::json;
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let shop = dir.path().join("shop.db");
//! let mut db = Connection::open(&shop)?; // your own database
//! db.execute_batch("CREATE TABLE orders (id INTEGER PRIMARY KEY, total INTEGER)")?;
//! Outbox::create_tables(&db)?;
//!
//! let tx = db.transaction()?;
//! tx.execute("INSERT INTO orders VALUES (123, 1999)", [])?;
//! Outbox::new().enqueue(&tx, ("order.confirmed", json!({ "order_id": 123 })))?;
//! tx.commit()?; // both, or neither
//!
//! let bus = Bus::open("memory:").await?; // any engine
//! let relay = Relay::new(&bus, Outbox::open(&shop)?).spawn();
//! # let log = bus.log()?;
//! # log.wait_beyond(everbus::Cursor::START).await?;
//! // … later
//! let stats = relay.stop().await?;
//! assert_eq!(stats.sent, 1);
//! # Ok(())
//! # }
//! ```

mod blame;
mod pass;
mod publish;
mod relay;
mod retry_requests;
mod stats;
mod sweep;

use std::path::Path;
use std::sync::Arc;

use everbus_core::{EventId, IntoEvent, Result};
pub use everbus_core::{FailedRow, Forgotten, OutboxKeep, OutboxSource, OutboxStatus};
pub use everbus_sqlite::outbox::{OutboxInit, OutboxOptions};
use rusqlite::Connection;

use crate::ambient;

pub use relay::{Relay, RelayHandle};
pub use stats::RelayStats;

/// Writes events into the outbox of a database. Adds the ambient values of the current task: the
/// correlation id, the trace, the event being handled.
#[derive(Clone, Debug, Default)]
pub struct Outbox {
    inner: everbus_sqlite::outbox::Outbox,
    source: Option<Arc<str>>,
}

impl Outbox {
    /// An `Outbox` to enqueue with. It holds no connection: the transaction names the database.
    pub fn new() -> Self {
        Self::default()
    }

    /// The source of events that name none.
    #[must_use]
    pub fn source(mut self, source: impl Into<Arc<str>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Creates the outbox tables in the service's own database, if they are missing. Every Everbus file has
    /// them already.
    pub fn create_tables(conn: &Connection) -> Result<()> {
        everbus_sqlite::outbox::Outbox::create_tables(conn)
    }

    /// The SQL behind [`create_tables`](Self::create_tables), for programs in other languages and their
    /// migration tools. Running it again does nothing.
    pub fn tables_sql() -> String {
        everbus_sqlite::outbox::Outbox::tables_sql()
    }

    /// Creates the outbox tables in the database at this path, all of them or none, and the file too if it
    /// is missing. Returns what it found. This call blocks on the file system.
    pub fn init(path: impl AsRef<Path>, options: &OutboxOptions) -> Result<OutboxInit> {
        everbus_sqlite::outbox::Outbox::init(path, options)
    }

    /// Writes an event into the outbox, as part of the open transaction of the connection: your own
    /// `rusqlite::Transaction`, or that of [`sqlite::in_transaction`](crate::sqlite::in_transaction). It is
    /// relayed after the commit, and never without one. Returns the event's id.
    ///
    /// Takes what [`Bus::publish`](crate::Bus::publish) takes. Enqueuing the same event again while it
    /// waits changes nothing; the same id with another body is `IdReused`.
    pub fn enqueue(&self, tx: &Connection, event: impl IntoEvent) -> Result<EventId> {
        let event = ambient::inherit(event.into_event()?, self.source.as_ref())?;
        self.inner.enqueue(tx, event)
    }

    /// As [`enqueue`](Self::enqueue), for several events. If one is refused, those before it are in the
    /// transaction already; roll it back.
    pub fn enqueue_batch<I>(&self, tx: &Connection, events: I) -> Result<Vec<EventId>>
    where
        I: IntoIterator,
        I::Item: IntoEvent,
    {
        let source = self.source.as_ref();
        let events = events.into_iter();
        let events: Result<Vec<_>> = events
            .map(|event| ambient::inherit(event.into_event()?, source))
            .collect();
        self.inner.enqueue_batch(tx, events?)
    }

    /// Opens the outbox in the service's own database, for a [`Relay`]. This call blocks on the file
    /// system.
    pub fn open(path: impl AsRef<Path>) -> Result<Arc<dyn OutboxSource>> {
        everbus_sqlite::outbox::Outbox::open(path)
    }

    /// As [`open`](Self::open), with options.
    pub fn open_with(
        path: impl AsRef<Path>,
        options: OutboxOptions,
    ) -> Result<Arc<dyn OutboxSource>> {
        everbus_sqlite::outbox::Outbox::open_with(path.as_ref(), options)
    }
}

/// Opens the outbox of the database that a URL names, `postgres://…`, for a [`Relay`].
pub async fn open_url(url: &str) -> Result<Arc<dyn OutboxSource>> {
    #[cfg(feature = "postgres")]
    return crate::postgres::Outbox::open(url).await;
    #[cfg(not(feature = "postgres"))]
    Err(not_built(url))
}

/// Creates the outbox tables in the database that a URL names, `postgres://…`, all of them or none. Returns
/// whether they were missing.
pub async fn init_url(url: &str) -> Result<bool> {
    #[cfg(feature = "postgres")]
    return crate::postgres::Outbox::init(url).await;
    #[cfg(not(feature = "postgres"))]
    Err(not_built(url))
}

/// The SQL that creates the outbox tables in the kind of database that a URL names, `postgres://…`. Nothing is
/// connected to.
pub fn tables_sql_of(url: &str) -> Result<String> {
    #[cfg(feature = "postgres")]
    {
        let _ = url;
        Ok(crate::postgres::Outbox::tables_sql())
    }
    #[cfg(not(feature = "postgres"))]
    Err(not_built(url))
}

#[cfg(not(feature = "postgres"))]
fn not_built(_: &str) -> everbus_core::Error {
    let what = "this build has no postgres engine";
    everbus_core::Error::new(everbus_core::Code::Unsupported, what)
        .hint("build with the feature `postgres` of the crate everbus")
}
