//! One statement, from the cache of prepared statements, in one call. `doing` names the step in the error.

use everbus_core::Result;
use rusqlite::types::FromSql;
use rusqlite::{CachedStatement, Connection, OptionalExtension as _, Params, Row};

use crate::errors::from_sqlite;

/// What a row is read as: a tuple of its columns, or the only column.
pub(crate) trait FromRow: Sized {
    fn from_row(row: &Row<'_>) -> rusqlite::Result<Self>;
}

macro_rules! from_row {
    ($(($($column:ident),+))+) => {$(
        impl<$($column: FromSql),+> FromRow for ($($column,)+) {
            fn from_row(row: &Row<'_>) -> rusqlite::Result<Self> {
                row.try_into()
            }
        }
    )+};
    ($($only:ty),+) => {$(
        impl FromRow for $only {
            fn from_row(row: &Row<'_>) -> rusqlite::Result<Self> {
                row.get(0)
            }
        }
    )+};
}

from_row! { (A, B) (A, B, C) (A, B, C, D) (A, B, C, D, E) (A, B, C, D, E, F) }
from_row! { bool, i64, u32, String, [u8; 16], Vec<u8>, Option<i64>, Option<String> }

/// Statements on a connection.
pub(crate) trait Sql {
    /// Runs `work` on a statement from the cache.
    fn with<T>(
        &self,
        doing: &str,
        sql: &str,
        work: impl FnOnce(CachedStatement<'_>) -> rusqlite::Result<T>,
    ) -> Result<T>;

    /// Changes rows, and returns how many.
    fn change(&self, doing: &str, sql: &str, values: impl Params) -> Result<usize> {
        self.with(doing, sql, |mut s| s.execute(values))
    }

    /// Changes rows.
    fn run(&self, doing: &str, sql: &str, values: impl Params) -> Result<()> {
        self.change(doing, sql, values).map(drop)
    }

    /// Inserts one row, and returns its number.
    fn add(&self, doing: &str, sql: &str, values: impl Params) -> Result<i64> {
        self.with(doing, sql, |mut s| s.insert(values))
    }

    /// Reads the only row.
    fn one<T: FromRow>(&self, doing: &str, sql: &str, values: impl Params) -> Result<T> {
        self.with(doing, sql, |mut s| s.query_row(values, T::from_row))
    }

    /// Reads the first row, if there is one.
    fn first<T: FromRow>(&self, doing: &str, sql: &str, values: impl Params) -> Result<Option<T>> {
        self.read_first(doing, sql, values, T::from_row)
    }

    /// Reads all rows.
    fn all<T: FromRow, C: FromIterator<T>>(
        &self,
        doing: &str,
        sql: &str,
        values: impl Params,
    ) -> Result<C> {
        self.read_all(doing, sql, values, T::from_row)
    }

    /// As [`first`](Self::first), with a function that reads the row.
    fn read_first<T>(
        &self,
        doing: &str,
        sql: &str,
        values: impl Params,
        read: impl FnOnce(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Option<T>> {
        self.with(doing, sql, |mut s| s.query_row(values, read).optional())
    }

    /// As [`all`](Self::all), with a function that reads a row.
    fn read_all<T, C: FromIterator<T>>(
        &self,
        doing: &str,
        sql: &str,
        values: impl Params,
        read: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<C> {
        self.with(doing, sql, |mut s| s.query_map(values, read)?.collect())
    }
}

impl Sql for Connection {
    fn with<T>(
        &self,
        doing: &str,
        sql: &str,
        work: impl FnOnce(CachedStatement<'_>) -> rusqlite::Result<T>,
    ) -> Result<T> {
        let done = self.prepare_cached(sql).and_then(work);
        done.map_err(|e| from_sqlite(doing, e))
    }
}
