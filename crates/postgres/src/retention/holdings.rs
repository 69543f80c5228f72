//! Counts what retention may remove later, by type and kind.

use std::collections::HashMap;

use everbus_core::{Held, Holdings, Result, Timestamp, TypeHoldings};

use crate::Postgres;
use crate::maintenance::clock_now;
use crate::pool::Sql;
use crate::rows::{UNREADABLE, get, get_seq};

/// Numbers of the log counted in one statement.
const LOOK: i64 = 1_000_000;

impl Postgres {
    pub(crate) async fn count_holdings(&self) -> Result<Holdings> {
        let doing = "counting the log";
        let db = self.conn().await?;
        let mut types: HashMap<i32, (u64, i64)> = HashMap::new();
        let sql = "SELECT coalesce(min(seq), 1), coalesce(max(seq), 0) FROM everbus.log";
        let ends = db.one(doing, sql, &[]).await?;
        let (mut from, last): (i64, i64) = (get(&ends, 0)?, get(&ends, 1)?);
        while from <= last {
            let sql = "SELECT type, count(*), min(received_at) FROM everbus.log
                       WHERE seq >= $1 AND seq < $1 + $2 GROUP BY type";
            for row in &db.query(doing, sql, &[&from, &LOOK]).await? {
                let oldest: i64 = get(row, 2)?;
                let known = types.entry(get(row, 0)?).or_insert((0, oldest));
                known.0 += get_seq(row, 1)?;
                known.1 = known.1.min(oldest);
            }
            from = from.saturating_add(LOOK);
        }
        self.types.learn(&*db, types.keys().copied()).await?;
        let mut named: Vec<TypeHoldings> = types
            .into_iter()
            .map(|(id, (events, oldest))| TypeHoldings {
                event_type: self
                    .types
                    .name(id)
                    .as_deref()
                    .unwrap_or(UNREADABLE)
                    .to_owned(),
                events,
                oldest: Timestamp::from_micros(oldest),
            })
            .collect();
        named.sort_unstable_by(|a, b| a.event_type.cmp(&b.event_type));
        Ok(Holdings {
            types: named,
            payloads: held(
                &*db,
                "SELECT count(*), min(timestamp) FROM everbus.event_payloads",
            )
            .await?,
            dead_letters: held(
                &*db,
                "SELECT count(*), min(at) FROM (
                   SELECT died_at AS at FROM everbus.dead_letters
                   UNION ALL
                   SELECT (extract(epoch FROM last_seen_at) * 1000000)::bigint
                   FROM everbus.outbox_dead_letters) AS dead",
            )
            .await?,
            audit: held(&*db, "SELECT count(*), min(at) FROM everbus.audit_log").await?,
            outbox: held(
                &*db,
                "SELECT count(*), (extract(epoch FROM min(sent_at)) * 1000000)::bigint
                 FROM everbus.event_outbox WHERE status = 'sent'",
            )
            .await?,
            expiring: held(
                &*db,
                "SELECT count(*), min(expires_at) FROM everbus.log WHERE expires_at IS NOT NULL",
            )
            .await?,
            clock: clock_now(&*db, self.now()).await?.doubt,
        })
    }
}

async fn held(db: &impl Sql, sql: &str) -> Result<Held> {
    let row = db.one("counting", sql, &[]).await?;
    let oldest: Option<i64> = get(&row, 1)?;
    Ok(Held {
        count: get_seq(&row, 0)?,
        oldest: oldest.map(Timestamp::from_micros),
    })
}
