//! Counts what retention may remove later, by type and kind.

use everbus_core::{Held, Holdings, Result, Timestamp, TypeHoldings};

use super::clock;
use crate::broker::SqliteEngine;
use crate::readers::Reader;
use crate::rows::{UNREADABLE, seq_from};
use crate::sql::Sql as _;

impl SqliteEngine {
    pub(crate) async fn count_holdings(&self) -> Result<Holdings> {
        let now = self.handle.clock.now();
        let count =
            move |reader: &mut Reader| {
                Ok(Holdings {
                types: types(reader)?,
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
                clock: clock::look(&reader.conn, now)?.doubt,
            })
            };
        self.handle.query(count).await
    }
}

/// The events by type, in the order of the names.
fn types(reader: &mut Reader) -> Result<Vec<TypeHoldings>> {
    let sql = "SELECT CAST(type AS INTEGER) AS type, count(*), min(CAST(received_at AS INTEGER))
               FROM log GROUP BY 1";
    let counts: Vec<(i64, i64, i64)> = reader.conn.all("counting the log", sql, [])?;
    let mut types = Vec::with_capacity(counts.len());
    for (id, events, oldest) in counts {
        let name = reader.types.find(&reader.conn, id)?;
        types.push(TypeHoldings {
            event_type: name.as_deref().unwrap_or(UNREADABLE).to_owned(),
            events: seq_from(events),
            oldest: Timestamp::from_micros(oldest),
        });
    }
    types.sort_unstable_by(|a, b| a.event_type.cmp(&b.event_type));
    Ok(types)
}

fn held(reader: &Reader, sql: &str) -> Result<Held> {
    let (count, oldest): (i64, Option<i64>) = reader.conn.one("counting", sql, [])?;
    Ok(Held {
        count: seq_from(count),
        oldest: oldest.map(Timestamp::from_micros),
    })
}
