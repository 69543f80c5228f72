//! The history: what happened to a tenant, an app or an entity, by plain indexes of the log.
//!
//! An event without tenant, app and entity is in none of these indexes. The narrowest index is walked in the order of
//! the log, and the other conditions filter what it finds. A committed event is found at once, even if a writer with an
//! earlier number has not ended. When that writer commits, its event appears in the middle of a page.

mod plan;

use everbus_core::history::MAX_HISTORY_BYTES;
use everbus_core::{BoxFuture, History, HistoryPage, HistoryQuery, Order, Result, check_range};

use crate::Postgres;
use crate::pool::Sql as _;
use crate::rows::{RECORD, Stored, get_seq, to_sql};

impl Postgres {
    /// The numbers of the types that match, or `None` if the query has no types.
    async fn numbers_of(
        &self,
        db: &crate::pool::Conn,
        query: &HistoryQuery,
    ) -> Result<Option<Vec<i32>>> {
        let Some(pattern) = &query.types else {
            return Ok(None);
        };
        if let Some(exact) = pattern.exact() {
            // A single type is looked up by its name, without reading all types.
            let sql = "SELECT id FROM everbus.types WHERE name = $1";
            let row = db.first("reading the types", sql, &[&exact]).await?;
            return row
                .iter()
                .map(|row| crate::rows::get(row, 0))
                .collect::<Result<_>>()
                .map(Some);
        }
        self.types.learn_all(db).await?;
        let all = self.types.all().into_iter();
        Ok(Some(
            all.filter(|(_, name)| pattern.matches(name))
                .map(|(id, _)| id)
                .collect(),
        ))
    }
}

impl History for Postgres {
    fn query(&self, query: HistoryQuery) -> BoxFuture<'_, Result<HistoryPage>> {
        Box::pin(async move {
            query.validate()?;
            let resume = query.resume_after()?;
            let db = self.conn().await?;
            let types = self.numbers_of(&db, &query).await?;
            let mut condition = plan::condition(&query, types);
            let direction = match query.order {
                Order::Newest => "DESC",
                Order::Oldest => "ASC",
            };
            if let Some(after) = resume {
                let beyond = match query.order {
                    Order::Newest => "log.seq < ?",
                    Order::Oldest => "log.seq > ?",
                };
                condition.and(beyond, to_sql(after.place()));
            }
            // One more than the page, to know whether another follows. The sizes are known without reading
            // the payloads.
            let limit = condition.value(to_sql(query.limit as u64));
            let bytes = condition.value(to_sql(MAX_HISTORY_BYTES as u64));
            let sql = format!(
                "SELECT {RECORD}, log.found FROM (
                   SELECT page.*, count(*) OVER () AS found,
                     sum(octet_length(payload)) OVER (ORDER BY seq {direction}) - octet_length(payload) AS before
                   FROM (SELECT log.* FROM everbus.log log WHERE {condition}
                         ORDER BY log.seq {direction} LIMIT {limit} + 1) AS page) AS log
                 WHERE log.before <= {bytes} ORDER BY log.seq {direction} LIMIT {limit}",
                condition = condition.sql()
            );
            let rows = db
                .query("reading the history", &sql, &condition.params())
                .await?;
            let found = rows
                .first()
                .map_or(Ok(0), |row| get_seq(row, crate::rows::AFTER_RECORD))?;
            let more = found > rows.len() as u64;
            let last = rows
                .last()
                .map(|row| get_seq(row, 0))
                .transpose()?
                .filter(|_| more);
            let stored = self.types.read(&*db, &rows).await?;
            Ok(HistoryPage {
                items: stored.into_iter().filter_map(Stored::or_left_out).collect(),
                next: last.map(|seq| query.cursor_after(everbus_core::Position::seq(seq))),
                plan: plan::text(&query),
            })
        })
    }

    fn count(&self, query: HistoryQuery, limit: u64) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            check_range(query.since, query.until)?;
            let db = self.conn().await?;
            let types = self.numbers_of(&db, &query).await?;
            let mut condition = plan::condition(&query, types);
            let limit = condition.value(to_sql(limit));
            let sql = format!(
                "SELECT count(*) FROM (SELECT 1 FROM everbus.log log WHERE {} LIMIT {limit}) AS found",
                condition.sql()
            );
            let row = db
                .one("counting the history", &sql, &condition.params())
                .await?;
            get_seq(&row, 0)
        })
    }
}
