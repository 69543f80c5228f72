//! The end of the log, and the numbers of names: what an append needs to know without a query.
//!
//! The file is the truth. After a failed transaction, and when another process has committed, it is loaded
//! again.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;

use everbus_core::{Recorded, Result};
use rusqlite::Connection;

use crate::rows::{MAX_CACHED_TYPES, TypeNames, seq_from};
use crate::sql::Sql as _;

/// The end of the log, the numbers of types and tenants, and what the running transaction appended.
#[derive(Default)]
pub(crate) struct LogEnd {
    pub(crate) head: u64,
    pub(crate) last_received: i64,
    /// Whether a warning was logged that this time is far in the future.
    pub(crate) told_ahead: Cell<bool>,
    types: HashMap<Arc<str>, i64>,
    /// The last type that was looked up: events of one type often follow each other.
    last_type: Option<(Arc<str>, i64)>,
    tenants: HashMap<String, i64>,
    pub(crate) type_names: TypeNames,
    /// Events appended in the running transaction.
    pub(crate) appended: Vec<(i64, Arc<Recorded>)>,
}

impl LogEnd {
    pub(crate) fn load(conn: &Connection) -> Result<Self> {
        let mut end = Self::default();
        end.refresh(conn)?;
        Ok(end)
    }

    /// Loads what another process may have changed.
    pub(crate) fn refresh(&mut self, conn: &Connection) -> Result<()> {
        let doing = "reading the state of the file";
        let sql = "SELECT seq, CAST(received_at AS INTEGER) FROM log ORDER BY seq DESC LIMIT 1";
        let newest: Option<(i64, i64)> = conn.first(doing, sql, [])?;
        let sql = "SELECT value FROM meta WHERE key = 'head'";
        let pruned: Option<i64> = conn.first(doing, sql, [])?;
        let (seq, received) = newest.unwrap_or((0, i64::MIN));
        self.head = seq_from(seq.max(pruned.unwrap_or(0)));
        self.last_received = received;
        self.types.clear();
        self.last_type = None;
        self.tenants.clear();
        self.appended.clear();
        Ok(())
    }

    /// The time of receipt of the newest event.
    pub(crate) fn newest_received(conn: &Connection) -> Result<Option<i64>> {
        let sql = "SELECT CAST(received_at AS INTEGER) FROM log ORDER BY seq DESC LIMIT 1";
        conn.first("reading the state of the file", sql, [])
    }

    /// The number of a type. A new type gets one.
    pub(crate) fn intern_type(&mut self, conn: &Connection, name: &Arc<str>) -> Result<i64> {
        if let Some((last, id)) = &self.last_type
            && (Arc::ptr_eq(last, name) || last == name)
        {
            return Ok(*id);
        }
        let id = match self.types.get(name) {
            Some(id) => *id,
            None => {
                let id = intern(conn, "types", name)?;
                if self.types.len() >= MAX_CACHED_TYPES {
                    self.types.clear();
                }
                self.types.insert(name.clone(), id);
                id
            }
        };
        self.last_type = Some((name.clone(), id));
        Ok(id)
    }

    /// The number of a tenant. A new tenant gets one; 0 for none.
    pub(crate) fn intern_tenant(&mut self, conn: &Connection, name: Option<&str>) -> Result<i64> {
        let Some(name) = name else { return Ok(0) };
        if let Some(id) = self.tenants.get(name) {
            return Ok(*id);
        }
        let id = intern(conn, "tenants", name)?;
        if self.tenants.len() >= MAX_CACHED_TYPES {
            self.tenants.clear();
        }
        self.tenants.insert(name.to_owned(), id);
        Ok(id)
    }

    /// Forgets cached names whose numbers were rolled back.
    pub(crate) fn forget_names(&mut self) {
        self.types.clear();
        self.last_type = None;
        self.tenants.clear();
        self.type_names = TypeNames::default();
    }
}

fn intern(conn: &Connection, table: &str, name: &str) -> Result<i64> {
    let doing = "interning a name";
    let found: Option<i64> = conn.first(
        doing,
        &format!("SELECT id FROM {table} WHERE name = ?1"),
        [name],
    )?;
    match found {
        Some(id) => Ok(id),
        None => conn.add(
            doing,
            &format!("INSERT INTO {table} (name) VALUES (?1)"),
            [name],
        ),
    }
}
