//! The outbox: events written into a table in the user's own transaction, for a relay to publish.
//!
//! ```text
//!  your transaction ── enqueue ──▶ event_outbox ──▶ relay (crate everbus) ──▶ any broker
//!        └─ your tables                  └─ sent | failed, with a dead letter
//! ```
//!
//! The tables are in every file of Everbus, and in any other database after [`Outbox::create_tables`]. [`Outbox::open`]
//! returns the source from which a relay takes the rows.

mod dead;
mod enqueue;
mod file;
mod forget;
mod init;
mod own;
mod read;
mod rows;
mod source;
mod times;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Clock, EventId, IntoEvent, OutboxSource, Result, SystemClock};
use rusqlite::Connection;

use crate::errors::from_sqlite;

pub use forget::forget_sent;
pub(crate) use forget::{count_dead, forget_dead};
pub use init::OutboxInit;
pub(crate) use own::own_outbox;

const TABLES: &str = include_str!("../outbox.sql");
const VIEW: &str = include_str!("../outbox_view.sql");

/// Writes events into the outbox of a database.
///
/// ```
/// use everbus_core::Event;
/// use everbus_sqlite::outbox::Outbox;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut db = rusqlite::Connection::open_in_memory()?;
/// db.execute_batch("CREATE TABLE orders (id INTEGER PRIMARY KEY, total INTEGER)")?;
/// Outbox::create_tables(&db)?;
///
/// let tx = db.transaction()?;
/// tx.execute("INSERT INTO orders VALUES (123, 1999)", [])?;
/// Outbox::new().enqueue(&tx, ("order.confirmed", serde_json::json!({ "order_id": 123 })))?;
/// tx.commit()?; // both, or neither
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Outbox;

/// Options for opening an outbox for a relay.
#[derive(Clone, Debug)]
pub struct OutboxOptions {
    /// The source of the time.
    pub clock: Arc<dyn Clock>,
    /// How long to wait for another program that holds the file.
    pub busy_timeout: Duration,
}

impl Default for OutboxOptions {
    fn default() -> Self {
        Self {
            clock: Arc::new(SystemClock),
            busy_timeout: Duration::from_secs(5),
        }
    }
}

impl Outbox {
    /// Makes a handle for enqueuing. It holds nothing: the transaction names the database.
    pub fn new() -> Self {
        Self
    }

    /// Creates the tables of an outbox in a user's database, if they do not exist. Every Everbus file has
    /// them already. Inside a transaction they are created as part of it.
    pub fn create_tables(conn: &Connection) -> Result<()> {
        let doing = |e| from_sqlite("making the tables of the outbox", e);
        let is_everbus = conn
            .query_row("PRAGMA application_id", [], |r| r.get::<_, i32>(0))
            .map_err(doing)?
            == crate::schema::APPLICATION_ID;
        if is_everbus {
            return Ok(());
        }
        conn.execute_batch(TABLES).map_err(doing)?;
        conn.execute_batch(VIEW).map_err(doing)
    }

    /// The SQL behind [`create_tables`](Self::create_tables), for programs in other languages and their
    /// migration tools. Running it again does nothing.
    pub fn tables_sql() -> String {
        format!("{TABLES}\n{VIEW}")
    }

    /// Creates the tables of an outbox in a database given by its path, all of them or none, and the file if
    /// there is none. Returns what it found. This blocks for as long as the file system does.
    pub fn init(path: impl AsRef<Path>, options: &OutboxOptions) -> Result<OutboxInit> {
        init::init(path.as_ref(), options)
    }

    /// Writes an event into the outbox, in the transaction that is open on the connection. The event is
    /// relayed after that transaction has committed, and never if it does not commit.
    ///
    /// Takes what [`Bus::publish`](https://docs.rs/everbus) takes. Enqueuing the same event again while it
    /// waits changes nothing; the same id with another body is [`Code::IdReused`]. Returns the event's id.
    pub fn enqueue(&self, tx: &Connection, event: impl IntoEvent) -> Result<EventId> {
        let event = event.into_event()?;
        enqueue::insert(tx, &event)?;
        source::enqueued();
        Ok(event.id())
    }

    /// As [`enqueue`](Self::enqueue), for several events. If one is refused, those before it are in the
    /// transaction; roll it back.
    pub fn enqueue_batch<I>(&self, tx: &Connection, events: I) -> Result<Vec<EventId>>
    where
        I: IntoIterator,
        I::Item: IntoEvent,
    {
        let mut ids = Vec::new();
        for event in events {
            let event = event.into_event()?;
            enqueue::insert(tx, &event)?;
            ids.push(event.id());
        }
        if !ids.is_empty() {
            source::enqueued();
        }
        Ok(ids)
    }

    /// Opens the outbox in a user's database for a relay. The tables must exist; every journal mode works.
    /// This blocks for as long as the file system does.
    pub fn open(path: impl AsRef<Path>) -> Result<Arc<dyn OutboxSource>> {
        Self::open_with(path.as_ref(), OutboxOptions::default())
    }

    /// As [`open`](Self::open), with options.
    pub fn open_with(path: &Path, options: OutboxOptions) -> Result<Arc<dyn OutboxSource>> {
        Ok(Arc::new(file::open(path, options)?))
    }
}
