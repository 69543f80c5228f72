//! Short forms for statements. Parameters carry their types, so that a statement is one message to the server
//! and needs no name: named statements do not survive a pooler in transaction mode.

use everbus_core::{EventId, Result};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{GenericClient, Row};
use uuid::Uuid;

use crate::errors::from_pg;

/// A parameter with its type.
pub(crate) type Arg<'a> = (&'a (dyn ToSql + Sync), Type);

/// A Rust type that is always sent as the same type of the server.
pub(crate) trait Typed: ToSql + Sync + Sized {
    const TYPE: Type;

    fn arg(&self) -> Arg<'_> {
        (self, Self::TYPE)
    }
}

macro_rules! typed {
    ($($rust:ty => $sql:ident,)*) => {
        $(impl Typed for $rust { const TYPE: Type = Type::$sql; })*
        $(impl Typed for Option<$rust> { const TYPE: Type = Type::$sql; })*
    };
}

typed! {
    bool => BOOL,
    i32 => INT4,
    i64 => INT8,
    &str => TEXT,
    String => TEXT,
    std::borrow::Cow<'_, str> => TEXT,
    &[u8] => BYTEA,
    Vec<u8> => BYTEA,
    Uuid => UUID,
    Vec<bool> => BOOL_ARRAY,
    Vec<i32> => INT4_ARRAY,
    Vec<i64> => INT8_ARRAY,
    Vec<String> => TEXT_ARRAY,
    Vec<&str> => TEXT_ARRAY,
    Vec<std::borrow::Cow<'_, str>> => TEXT_ARRAY,
    Vec<Option<&str>> => TEXT_ARRAY,
    Vec<Option<String>> => TEXT_ARRAY,
    Vec<Uuid> => UUID_ARRAY,
}

/// The parameters of a statement, each with the type of its Rust value.
macro_rules! args {
    ($($value:expr),* $(,)?) => { &[$($crate::statements::Typed::arg(&$value)),*] };
}
pub(crate) use args;

/// A connection or a transaction.
pub(crate) trait Db: GenericClient + Sync {}
impl<C: GenericClient + Sync> Db for C {}

/// All rows.
pub(crate) async fn rows(
    db: &impl Db,
    doing: &str,
    sql: &str,
    args: &[Arg<'_>],
) -> Result<Vec<Row>> {
    let found = db.query_typed(sql, args).await;
    found.map_err(|e| from_pg(doing, e))
}

/// The first row, if there is one.
pub(crate) async fn first(
    db: &impl Db,
    doing: &str,
    sql: &str,
    args: &[Arg<'_>],
) -> Result<Option<Row>> {
    Ok(rows(db, doing, sql, args).await?.into_iter().next())
}

/// The only row of a statement that always has one.
pub(crate) async fn one(db: &impl Db, doing: &str, sql: &str, args: &[Arg<'_>]) -> Result<Row> {
    let row = first(db, doing, sql, args).await?;
    row.ok_or_else(|| crate::errors::missing(doing))
}

/// Runs a statement. Returns how many rows it changed.
pub(crate) async fn run(db: &impl Db, doing: &str, sql: &str, args: &[Arg<'_>]) -> Result<u64> {
    let changed = db.execute_typed(sql, args).await;
    changed.map_err(|e| from_pg(doing, e))
}

/// The id of an event as the server stores it.
pub(crate) fn uuid(id: EventId) -> Uuid {
    Uuid::from_bytes(*id.as_bytes())
}

/// A text without the one character that the server cannot store. Only for texts that people read, and for
/// columns beside the attributes, which have the text as it was.
pub(crate) fn clean(text: &str) -> std::borrow::Cow<'_, str> {
    if text.contains('\0') {
        text.replace('\0', "\u{fffd}").into()
    } else {
        text.into()
    }
}
