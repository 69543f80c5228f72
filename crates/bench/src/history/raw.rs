//! The same pages from plain SQLite: names as text, and for each pattern the index that it needs.
//!
//! The table is filled and indexed as fast as possible, since only its queries are measured.

use std::hint::black_box;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use everbus_core::{Order, Result};
use rusqlite::{Connection, ToSql, params};
use uuid::Uuid;

use super::data::{Data, Names};
use super::{Case, PAGE, PATTERNS};
use crate::raw::run;
use crate::sample;

const TABLE: &str = "CREATE TABLE raw(seq INTEGER PRIMARY KEY, id BLOB, type TEXT, tenant TEXT, \
                     app TEXT, entity TEXT, created_at INTEGER, payload BLOB)";
const INSERT: &str = "INSERT INTO raw(id, type, tenant, app, entity, created_at, payload) \
                      VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)";

/// A table with eight indexes.
pub(crate) struct Raw {
    conn: Connection,
    data: Data,
}

/// A row in memory, with the columns that a caller would want.
type Row = (i64, [u8; 16], String, String, String, String, i64, Vec<u8>);

impl Raw {
    pub(crate) async fn make(path: PathBuf, data: Data) -> Result<Self> {
        run(move || {
            let conn = Connection::open(&path)?;
            conn.pragma_update(None, "journal_mode", "OFF")?;
            conn.pragma_update(None, "synchronous", "OFF")?;
            conn.execute_batch(TABLE)?;
            let payload = sample::payload();
            conn.execute_batch("BEGIN")?;
            let mut insert = conn.prepare(INSERT)?;
            for n in 0..data.events {
                let Names {
                    event_type,
                    tenant,
                    app,
                    entity,
                } = data.names(n);
                let id = Uuid::now_v7();
                let at = i64::try_from(n).unwrap_or(i64::MAX);
                insert.execute(params![
                    id.as_bytes(),
                    event_type,
                    tenant,
                    app,
                    entity,
                    at,
                    &payload[..]
                ])?;
            }
            drop(insert);
            conn.execute_batch("COMMIT")?;
            for (index, (_, columns)) in PATTERNS.iter().enumerate() {
                let columns = columns.join(", ");
                conn.execute_batch(&format!(
                    "CREATE INDEX raw_{index} ON raw ({columns}, created_at)"
                ))?;
            }
            drop(conn);
            // Read with a plain connection, as any program would.
            let conn = Connection::open(&path)?;
            conn.pragma_update(None, "journal_mode", "WAL")?;
            Ok(Self { conn, data })
        })
        .await
    }

    /// How long the pages of these queries take. Gives the table back.
    pub(crate) async fn pages(
        self,
        case: Case,
        queries: std::ops::Range<u64>,
    ) -> Result<(Self, Vec<Duration>)> {
        run(move || {
            let took: rusqlite::Result<_> = queries.map(|n| self.page(case, n)).collect();
            Ok((self, took?))
        })
        .await
    }

    fn page(&self, case: Case, n: u64) -> rusqlite::Result<Duration> {
        let names = self.data.asked(case.kind, n);
        let (mut conditions, mut given) = (Vec::new(), Vec::<(&str, &dyn ToSql)>::new());
        for column in PATTERNS[case.pattern].1 {
            conditions.push(format!("{column} = :{column}"));
            given.push(match *column {
                "type" => (":type", &names.event_type),
                "tenant" => (":tenant", &names.tenant),
                "app" => (":app", &names.app),
                _ => (":entity", &names.entity),
            });
        }
        let upto = case.share(n).map(|share| {
            let at = i64::try_from(self.data.events).unwrap_or(i64::MAX) / 1000 * share;
            at.max(1)
        });
        let until = match &upto {
            Some(upto) => {
                given.push((":upto", upto));
                " AND created_at <= :upto"
            }
            None => "",
        };
        let direction = match case.order(n) {
            Order::Newest => "DESC",
            Order::Oldest => "ASC",
        };
        let sql = format!(
            "SELECT seq, id, type, tenant, app, entity, created_at, payload FROM raw
             INDEXED BY raw_{} WHERE {}{until} ORDER BY created_at {direction} LIMIT {PAGE}",
            case.pattern,
            conditions.join(" AND "),
        );
        let began = Instant::now();
        let mut statement = self.conn.prepare_cached(&sql)?;
        let rows = statement.query_map(&given[..], |r| Row::try_from(r))?;
        let rows: Vec<Row> = rows.collect::<rusqlite::Result<_>>()?;
        let took = began.elapsed();
        black_box(rows);
        Ok(took)
    }
}
