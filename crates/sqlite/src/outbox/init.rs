//! Creates the tables of an outbox in a database given by its path, for programs that cannot call
//! [`Outbox::create_tables`].

use std::path::Path;

use everbus_core::{Code, Error, Result};
use rusqlite::{Connection, OpenFlags};

use super::{Outbox, OutboxOptions};
use crate::errors::from_sqlite;
use crate::file::locate;
use crate::schema::APPLICATION_ID;

/// What [`Outbox::init`] found and did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OutboxInit {
    /// There was no file: it was created, with the tables.
    NewFile,
    /// The tables were created in an existing database.
    NewTables,
    /// The tables existed already.
    There,
    /// It is an Everbus file, which always has them.
    Everbus,
}

/// The columns without which a relay cannot work.
pub(super) const NEEDED: &str =
    "SELECT attributes, due, revision, wanted_at, failures FROM event_outbox LIMIT 0";

/// The error of a statement on the outbox. A database without an outbox is asked for by name: a table of the
/// user with a similar name may be missing too.
pub(super) fn missing(conn: &Connection, doing: &str, error: rusqlite::Error) -> Error {
    let sql = "SELECT EXISTS (SELECT 1 FROM pragma_table_list WHERE lower(name) = 'event_outbox')";
    match conn.query_row(sql, [], |row| row.get(0)) {
        Ok(false) => {
            let what = format!("{doing}: there is no outbox in this database");
            Error::new(Code::NotFound, what)
                .hint("make its tables once, with Outbox::create_tables or `everbus outbox init`")
                .caused_by(error)
        }
        _ => from_sqlite(doing, error),
    }
}

pub(super) fn init(path: &Path, options: &OutboxOptions) -> Result<OutboxInit> {
    let is_new = !path.exists();
    let path = locate(path, true)?;
    let doing = |e| from_sqlite(&format!("making an outbox in {}", path.display()), e);
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
        | OpenFlags::SQLITE_OPEN_CREATE
        | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let mut conn = Connection::open_with_flags(&path, flags).map_err(doing)?;
    conn.busy_timeout(options.busy_timeout).map_err(doing)?;
    let application: i32 = conn
        .query_row("PRAGMA application_id", [], |r| r.get(0))
        .map_err(doing)?;
    if application == APPLICATION_ID {
        return Ok(OutboxInit::Everbus);
    }
    let tx = conn
        .transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)
        .map_err(doing)?;
    let is_there: bool = tx
        .query_row(
            "SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE lower(name) = 'event_outbox')",
            [],
            |r| r.get(0),
        )
        .map_err(doing)?;
    if is_there {
        tx.prepare(NEEDED).map(drop).map_err(|e| {
            Error::new(
                Code::Unsupported,
                format!("{} has an event_outbox of another kind", path.display()),
            )
            .hint("rename yours first: ALTER TABLE event_outbox RENAME TO …; nothing was changed")
            .caused_by(e)
        })?;
    }
    // Also if the table exists: an index or a view of it may be missing.
    Outbox::create_tables(&tx)?;
    tx.commit().map_err(doing)?;
    Ok(match (is_new, is_there) {
        (true, _) => OutboxInit::NewFile,
        (false, true) => OutboxInit::There,
        (false, false) => OutboxInit::NewTables,
    })
}
