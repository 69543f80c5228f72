//! Counts what retention may remove later, by type and kind.

use std::collections::HashMap;

use everbus_core::{Held, Holdings, RETENTION_DUTY, Result, Timestamp, TypeHoldings};

use super::{clock, last_duty};
use crate::broker::SqliteEngine;
use crate::errors::from_sqlite;
use crate::readers::Reader;
use crate::rows::{UNREADABLE, seq_from, to_sql};
use crate::sql::Sql as _;

/// Rows of the log counted in one snapshot.
const LOOK: u64 = 50_000;

/// By type: the number of events, and when the first was received.
#[derive(Default)]
struct Count {
    types: HashMap<i64, (u64, i64)>,
    searched: u64,
    done: bool,
}

impl SqliteEngine {
    pub(crate) async fn count_holdings(&self) -> Result<Holdings> {
        let mut count = Count::default();
        while !count.done {
            count = self
                .handle
                .query(move |reader| {
                    count.go_on(reader)?;
                    Ok(count)
                })
                .await?;
        }
        let now = self.handle.clock.now();
        self.handle
            .query(move |reader| {
                let mut types = Vec::with_capacity(count.types.len());
                for (id, (events, oldest)) in count.types {
                    let name = reader.types.find(&reader.conn, id)?;
                    types.push(TypeHoldings {
                        event_type: name.as_deref().unwrap_or(UNREADABLE).to_owned(),
                        events,
                        oldest: Timestamp::from_micros(oldest),
                    });
                }
                types.sort_unstable_by(|a, b| a.event_type.cmp(&b.event_type));
                Ok(Holdings {
                    types,
                    payloads: held(reader, "SELECT count(*), min(timestamp) FROM event_payloads")?,
                    dead_letters: held(
                        reader,
                        "SELECT count(*), min(at) FROM (SELECT died_at AS at FROM dead_letters
                         UNION ALL
                         SELECT CAST(unixepoch(last_seen_at, 'subsec') * 1000000 AS INTEGER)
                         FROM outbox_dead_letters)",
                    )?,
                    audit: held(reader, "SELECT count(*), min(at) FROM audit_log")?,
                    outbox: held(
                        reader,
                        "SELECT count(*), CAST(unixepoch(min(sent_at), 'subsec') * 1000000 AS INTEGER)
                         FROM event_outbox WHERE status = 'sent'",
                    )?,
                    expiring: held(reader, "SELECT count(*), min(at) FROM expirations")?,
                    last_run: last_duty(&reader.conn, RETENTION_DUTY)?,
                    clock: clock::look(&reader.conn, now)?.doubt,
                })
            })
            .await
    }
}

impl Count {
    fn go_on(&mut self, reader: &Reader) -> Result<()> {
        let doing = |e| from_sqlite("counting the log", e);
        let mut statement = reader
            .conn
            .prepare_cached(
                "SELECT type, count(*), min(received_at), max(seq), sum(count(*)) OVER () FROM
                   (SELECT seq, CAST(type AS INTEGER) AS type, CAST(received_at AS INTEGER) AS received_at FROM log WHERE seq > ?1 ORDER BY seq LIMIT ?2)
                 GROUP BY type",
            )
            .map_err(doing)?;
        let mut rows = statement
            .query((to_sql(self.searched), to_sql(LOOK)))
            .map_err(doing)?;
        let (mut last, mut seen) = (self.searched, 0);
        while let Some(row) = rows.next().map_err(doing)? {
            let oldest: i64 = row.get(2).map_err(doing)?;
            let known = self.types.entry(row.get(0).map_err(doing)?);
            let (events, _) = known.or_insert((0, oldest));
            *events += seq_from(row.get(1).map_err(doing)?);
            last = last.max(seq_from(row.get(3).map_err(doing)?));
            seen = seq_from(row.get(4).map_err(doing)?);
        }
        self.searched = last;
        self.done = seen < LOOK;
        Ok(())
    }
}

fn held(reader: &Reader, sql: &str) -> Result<Held> {
    let (count, oldest): (i64, Option<i64>) = reader.conn.one("counting", sql, [])?;
    Ok(Held {
        count: seq_from(count),
        oldest: oldest.map(Timestamp::from_micros),
    })
}
