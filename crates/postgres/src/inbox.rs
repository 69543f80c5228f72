//! The inbox, which records the events that a group has handled.

use std::collections::HashSet;
use std::sync::Arc;

use everbus_core::{BoxFuture, GroupName, Inbox, Recorded, Result, Timestamp};

use crate::Postgres;
use crate::pool::{Params, Sql as _};
use crate::rows::{get, storable};

/// Records looked at in one transaction.
const LOOK: i64 = 10_000;

impl Inbox for Postgres {
    fn handled(
        &self,
        group: GroupName,
        events: Vec<Arc<Recorded>>,
    ) -> BoxFuture<'_, Result<Vec<bool>>> {
        Box::pin(async move {
            if events.is_empty() {
                return Ok(Vec::new());
            }
            let ids: Vec<uuid::Uuid> = events.iter().map(|r| r.event.id().as_uuid()).collect();
            let sql = "SELECT i.id, i.tenant FROM everbus.inbox i
                       JOIN everbus.groups g ON g.id = i.group_id
                       WHERE g.name = $1 AND i.id = ANY ($2)";
            let db = self.conn().await?;
            let rows = db
                .query("looking into the inbox", sql, &[&group.as_str(), &ids])
                .await?;
            let mut found: HashSet<(uuid::Uuid, String)> = HashSet::with_capacity(rows.len());
            for row in &rows {
                found.insert((get(row, 0)?, get(row, 1)?));
            }
            let is_there = |record: &Arc<Recorded>| {
                let tenant = storable(record.event.tenant().unwrap_or_default());
                found.contains(&(record.event.id().as_uuid(), tenant))
            };
            Ok(events.iter().map(is_there).collect())
        })
    }

    fn forget(&self, before: Timestamp) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            // Pages along the unique index: an index by time would slow down every ack.
            let next = "SELECT group_id, id, tenant FROM (
                          SELECT group_id, id, tenant FROM everbus.inbox
                          WHERE (group_id, id, tenant) > ($1, $2, $3)
                          ORDER BY group_id, id, tenant LIMIT $4) AS page
                        ORDER BY group_id DESC, id DESC, tenant DESC LIMIT 1";
            let remove = "DELETE FROM everbus.inbox i
                          WHERE (group_id, id, tenant) > ($1, $2, $3)
                            AND (group_id, id, tenant) <= ($4, $5, $6)
                            AND (at < $7 OR NOT EXISTS (
                              SELECT 1 FROM everbus.groups g WHERE g.id = i.group_id))";
            let doing = "forgetting what was handled";
            let mut after = (i64::MIN, uuid::Uuid::nil(), String::new());
            let mut forgotten = 0;
            loop {
                let db = self.conn().await?;
                let found = db
                    .first(doing, next, &[&after.0, &after.1, &after.2, &LOOK])
                    .await?;
                let Some(row) = found else {
                    return Ok(forgotten);
                };
                let last: (i64, uuid::Uuid, String) = (get(&row, 0)?, get(&row, 1)?, get(&row, 2)?);
                let values: Params<'_> = &[
                    &after.0,
                    &after.1,
                    &after.2,
                    &last.0,
                    &last.1,
                    &last.2,
                    &before.as_micros(),
                ];
                forgotten += db.execute(doing, remove, values).await?;
                after = last;
            }
        })
    }
}
