//! Finds the events that are over the limits of age and length, in bounded steps.

use everbus_core::{Result, Retention, Timestamp};

use crate::Postgres;
use crate::pool::{Params, Sql};
use crate::rows::get;

/// Numbers of the log that one statement looks at, and events that it returns.
const LOOK: i64 = 100_000;
const MOST: i64 = 1000;
/// Times of receipt grow with the numbers, except between concurrent writers. So a time corresponds to a number of the
/// log, plus or minus this much.
const SLACK: i64 = 10_000;

/// Which events a run removes, and how far it has looked.
pub(super) struct Plan {
    now: i64,
    /// Types with an age, and the time before which their events are too old.
    types: Vec<i32>,
    cutoffs: Vec<i64>,
    /// Events up to this position are over the length limit.
    beyond: i64,
    /// No event after this position is over a limit of age or length.
    upto: i64,
    searched: i64,
    /// How far expired events were looked at: expiry and position.
    expired: Option<(i64, i64)>,
}

impl Plan {
    pub(super) async fn begin(
        engine: &Postgres,
        db: &impl Sql,
        retention: &Retention,
        now: Timestamp,
    ) -> Result<Self> {
        let doing = "looking what may go";
        engine.types.learn_all(db).await?;
        let (mut types, mut cutoffs) = (Vec::new(), Vec::new());
        for (id, name) in engine.types.all() {
            if let Some(age) = retention.age_of(&name) {
                types.push(id);
                cutoffs.push(now.minus(age).as_micros());
            }
        }
        let beyond: Option<i64> = match retention.max_len {
            None => None,
            Some(keep) => {
                let sql = "SELECT seq FROM everbus.log ORDER BY seq DESC OFFSET $1 LIMIT 1";
                let row = db.first(doing, sql, &[&crate::rows::to_sql(keep)]).await?;
                row.map(|row| get(&row, 0)).transpose()?
            }
        };
        let beyond = beyond.unwrap_or(0);
        let aged: i64 = match cutoffs.iter().max() {
            None => 0,
            Some(latest) => {
                let sql = "SELECT coalesce(everbus.seq_at($1) + $2, (SELECT max(seq) FROM everbus.log), 0)";
                let row = db.one(doing, sql, &[latest, &SLACK]).await?;
                get(&row, 0)?
            }
        };
        Ok(Self {
            now: now.as_micros(),
            types,
            cutoffs,
            beyond,
            upto: beyond.max(aged),
            searched: 0,
            expired: Some((i64::MIN, i64::MIN)),
        })
    }

    /// The next events over a limit: first those that have expired, then the others in the order of the log. `None` at
    /// the end.
    pub(super) async fn next(&mut self, db: &impl Sql) -> Result<Option<Vec<i64>>> {
        let doing = "looking what may go";
        if let Some((at, seq)) = self.expired {
            let sql = "SELECT expires_at, seq FROM everbus.log
                       WHERE expires_at < $1 AND (expires_at, seq) > ($2, $3)
                       ORDER BY expires_at, seq LIMIT $4";
            let values: Params<'_> = &[&self.now, &at, &seq, &MOST];
            let rows = db.query(doing, sql, values).await?;
            if let Some(last) = rows.last() {
                self.expired = Some((get(last, 0)?, get(last, 1)?));
                return rows
                    .iter()
                    .map(|row| get(row, 1))
                    .collect::<Result<_>>()
                    .map(Some);
            }
            self.expired = None;
        }
        if self.searched >= self.upto {
            return Ok(None);
        }
        // Expired events were returned before, so they are left out here.
        let sql = "WITH first AS (SELECT min(seq) AS seq FROM everbus.log WHERE seq > $1)
                   SELECT l.seq, first.seq FROM first LEFT JOIN LATERAL (
                     SELECT l.seq FROM everbus.log l
                     LEFT JOIN unnest($4, $5) AS t (type, cutoff) ON t.type = l.type
                     WHERE l.seq >= first.seq AND l.seq <= least($2, first.seq + $7)
                       AND (l.seq <= $3 OR l.received_at < t.cutoff)
                       AND (l.expires_at IS NULL OR l.expires_at >= $6)
                     ORDER BY l.seq LIMIT $8) AS l ON true
                   ORDER BY l.seq";
        let values: Params<'_> = &[
            &self.searched,
            &self.upto,
            &self.beyond,
            &self.types,
            &self.cutoffs,
            &self.now,
            &LOOK,
            &MOST,
        ];
        let rows = db.query(doing, sql, values).await?;
        let mut found: Vec<i64> = Vec::new();
        let mut first: Option<i64> = None;
        for row in &rows {
            found.extend(get::<Option<i64>>(row, 0)?);
            first = get(row, 1)?;
        }
        self.searched = match (first, found.last()) {
            (None, _) => self.upto,
            (Some(_), Some(last)) if found.len() as i64 == MOST => *last,
            (Some(first), _) => self.upto.min(first.saturating_add(LOOK)),
        };
        Ok(Some(found))
    }
}
