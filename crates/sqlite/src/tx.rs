//! The running transaction: the writing connection, and what the writer knows of the file without a query.
//!
//! Work on one table is a function that takes the transaction. Work that also hands out events is in
//! [`Deliveries`](crate::deliveries::Deliveries).

use std::path::PathBuf;
use std::sync::Arc;

use everbus_core::{Clock, Result};
use rusqlite::Connection;

use crate::deliveries::leases::EventKey;
use crate::errors::from_sqlite;
use crate::groups::Groups;
use crate::log_end::LogEnd;
use crate::rows::micros;
use crate::watch::Watches;

/// The writing connection, with the end of the log and the groups in memory.
pub(crate) struct Tx {
    pub(crate) conn: Connection,
    pub(crate) path: PathBuf,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) log: LogEnd,
    pub(crate) groups: Groups,
    pub(crate) watches: Watches,
    /// Events to record in the inbox, from plain acks in this transaction.
    pub(crate) noted: Vec<(i64, EventKey)>,
}

impl Tx {
    pub(crate) fn new(conn: Connection, path: PathBuf, clock: Arc<dyn Clock>) -> Result<Self> {
        check_version(&conn)?;
        Ok(Self {
            log: LogEnd::load(&conn)?,
            groups: Groups::load(&conn)?,
            conn,
            path,
            clock,
            watches: Watches::default(),
            noted: Vec::new(),
        })
    }

    /// The time of the clock, as stored.
    pub(crate) fn now(&self) -> i64 {
        micros(self.clock.now())
    }

    /// Loads what another process may have changed.
    pub(crate) fn refresh(&mut self) -> Result<()> {
        check_version(&self.conn)?;
        self.log.refresh(&self.conn)?;
        self.groups.refresh(&self.conn)
    }
}

/// Refuses a file that a newer version of Everbus has migrated while it was open.
fn check_version(conn: &Connection) -> Result<()> {
    let version: i32 = conn
        .query_row("PRAGMA user_version", [], |r| r.get(0))
        .map_err(|e| from_sqlite("reading the state of the file", e))?;
    if version > crate::schema::VERSION {
        return Err(crate::schema::newer(version));
    }
    Ok(())
}
