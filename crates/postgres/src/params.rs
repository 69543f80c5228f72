//! Values of statements. Each names its type on the server, so that no statement has to be prepared first.

use tokio_postgres::types::{ToSql, Type};

/// A value for a statement, with the type that it has on the server.
pub(crate) trait Param: Sync {
    fn sql(&self) -> &(dyn ToSql + Sync);
    fn sql_type(&self) -> Type;
}

macro_rules! params {
    ($($rust:ty => $sql:ident,)*) => {$(
        impl Param for $rust {
            fn sql(&self) -> &(dyn ToSql + Sync) {
                self
            }

            fn sql_type(&self) -> Type {
                Type::$sql
            }
        }
    )*};
}

params! {
    bool => BOOL,
    i16 => INT2,
    i32 => INT4,
    i64 => INT8,
    &str => TEXT,
    String => TEXT,
    uuid::Uuid => UUID,
    &[u8] => BYTEA,
    Vec<u8> => BYTEA,
    Option<bool> => BOOL,
    Option<i32> => INT4,
    Option<i64> => INT8,
    Option<&str> => TEXT,
    Option<String> => TEXT,
    Option<uuid::Uuid> => UUID,
    Vec<bool> => BOOL_ARRAY,
    Vec<i16> => INT2_ARRAY,
    Vec<i32> => INT4_ARRAY,
    Vec<i64> => INT8_ARRAY,
    Vec<&str> => TEXT_ARRAY,
    Vec<String> => TEXT_ARRAY,
    Vec<uuid::Uuid> => UUID_ARRAY,
    Vec<&[u8]> => BYTEA_ARRAY,
    Vec<Vec<u8>> => BYTEA_ARRAY,
    Vec<Option<i32>> => INT4_ARRAY,
    Vec<Option<i64>> => INT8_ARRAY,
    Vec<Option<&str>> => TEXT_ARRAY,
    Vec<Option<String>> => TEXT_ARRAY,
    Vec<Option<uuid::Uuid>> => UUID_ARRAY,
    &[i64] => INT8_ARRAY,
}

/// The values of a statement.
pub(crate) type Params<'a> = &'a [&'a dyn Param];
