//! The inbox: which events a group has handled.
//!
//! A record is a row of about thirty bytes, written in the transaction of the ack. Ids of version 7
//! rise with time, so that new records go to the end of their group's part of the tree.

use std::sync::Arc;

use everbus_core::{BoxFuture, GroupName, Inbox, Recorded, Result, Timestamp};
use rusqlite::{OptionalExtension, params};

use crate::engine::SqliteEngine;
use crate::errors::from_sqlite;
use crate::readers::Reader;
use crate::rows::to_sql;
use crate::state::micros;
use crate::writer::Writer;

/// Records looked at in one reading, and removed in one transaction: so few that a publish hardly
/// waits.
const LOOK: usize = 10_000;
const STEP: usize = 200;

/// A record by its key: group, id, tenant.
type Key = (i64, [u8; 16], i64);

impl Writer {
    /// Notes that a group has handled an event; says whether that is new.
    pub(crate) fn note_handled(&mut self, group: i64, seq: u64) -> Result<bool> {
        self.conn
            .prepare_cached(
                "INSERT INTO inbox (group_id, id, tenant, at)
                 SELECT ?1, id, tenant, ?3 FROM log WHERE seq = ?2 ON CONFLICT DO NOTHING",
            )
            .and_then(|mut s| s.execute(params![group, to_sql(seq), micros(self.clock.now())]))
            .map(|noted| noted > 0)
            .map_err(|e| from_sqlite("writing to the inbox", e))
    }

    /// Takes the note back.
    pub(crate) fn unnote_handled(&mut self, group: i64, seq: u64) -> Result<()> {
        self.conn
            .prepare_cached(
                "DELETE FROM inbox WHERE group_id = ?1
                   AND (id, tenant) = (SELECT id, tenant FROM log WHERE seq = ?2)",
            )
            .and_then(|mut s| s.execute(params![group, to_sql(seq)]))
            .map(drop)
            .map_err(|e| from_sqlite("writing to the inbox", e))
    }

    /// Removes records, unless they were written anew since they were looked at.
    fn forget_handled(&mut self, keys: &[(Key, i64)]) -> Result<u64> {
        let doing = |e| from_sqlite("forgetting what was handled", e);
        let mut delete = self
            .conn
            .prepare_cached(
                "DELETE FROM inbox WHERE group_id = ?1 AND id = ?2 AND tenant = ?3 AND at = ?4",
            )
            .map_err(doing)?;
        let mut forgotten = 0;
        for ((group, id, tenant), at) in keys {
            forgotten += delete
                .execute(params![group, id, tenant, at])
                .map_err(doing)? as u64;
        }
        Ok(forgotten)
    }
}

impl Inbox for SqliteEngine {
    fn handled(
        &self,
        group: GroupName,
        events: Vec<Arc<Recorded>>,
    ) -> BoxFuture<'_, Result<Vec<bool>>> {
        if events.is_empty() {
            return Box::pin(std::future::ready(Ok(Vec::new())));
        }
        self.handle
            .query_inbox(move |reader| handled(reader, &group, &events))
    }

    fn forget(&self, before: Timestamp) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            let (mut forgotten, mut after) = (0, None);
            loop {
                let look = self
                    .handle
                    .query(move |reader| look(reader, before, after))
                    .await?;
                for step in look.old.chunks(STEP) {
                    let step = step.to_vec();
                    forgotten += self
                        .handle
                        .job(move |writer| writer.forget_handled(&step))
                        .await?;
                }
                match look.last {
                    Some(last) => after = Some(last),
                    None => return Ok(forgotten),
                }
            }
        })
    }
}

fn handled(reader: &Reader, group: &GroupName, events: &[Arc<Recorded>]) -> Result<Vec<bool>> {
    let doing = |e| from_sqlite("looking into the inbox", e);
    let group: Option<i64> = reader
        .conn
        .prepare_cached("SELECT id FROM groups WHERE name = ?1")
        .and_then(|mut s| s.query_row([group.as_str()], |r| r.get(0)).optional())
        .map_err(doing)?;
    let Some(group) = group else {
        // Whoever is not there has handled nothing.
        return Ok(vec![false; events.len()]);
    };
    let mut find = reader
        .conn
        .prepare_cached(
            "SELECT EXISTS (SELECT 1 FROM inbox WHERE group_id = ?1 AND id = ?2
               AND tenant = iif(?3 IS NULL, 0, (SELECT id FROM tenants WHERE name = ?3)))",
        )
        .map_err(doing)?;
    events
        .iter()
        .map(|record| {
            let (id, tenant) = (record.event.id(), record.event.tenant());
            find.query_row(params![group, id.as_bytes(), tenant], |r| r.get(0))
                .map_err(doing)
        })
        .collect()
}

/// What one reading of the inbox found.
struct Look {
    /// Records to be removed, with their times.
    old: Vec<(Key, i64)>,
    /// Where to go on, if there is more.
    last: Option<Key>,
}

/// Looks through a stretch of the inbox for what is old or belongs to no group any more.
fn look(reader: &Reader, before: Timestamp, after: Option<Key>) -> Result<Look> {
    let doing = |e| from_sqlite("looking through the inbox", e);
    let mut statement = reader
        .conn
        .prepare_cached(
            "SELECT i.group_id, i.id, i.tenant, i.at, i.at < ?4 OR g.id IS NULL
             FROM inbox i LEFT JOIN groups g ON g.id = i.group_id
             WHERE (i.group_id, i.id, i.tenant) > (?1, ?2, ?3)
             ORDER BY i.group_id, i.id, i.tenant LIMIT ?5",
        )
        .map_err(doing)?;
    let (group, id, tenant) = after.unwrap_or((i64::MIN, [0; 16], i64::MIN));
    let mut rows = statement
        .query(params![
            group,
            id,
            tenant,
            micros(before),
            to_sql(LOOK as u64)
        ])
        .map_err(doing)?;
    let (mut old, mut last, mut seen) = (Vec::new(), None, 0);
    while let Some(row) = rows.next().map_err(doing)? {
        let key: Key = (
            row.get(0).map_err(doing)?,
            row.get(1).map_err(doing)?,
            row.get(2).map_err(doing)?,
        );
        seen += 1;
        if row.get(4).map_err(doing)? {
            old.push((key, row.get(3).map_err(doing)?));
        }
        last = Some(key);
    }
    Ok(Look {
        old,
        last: last.filter(|_| seen == LOOK),
    })
}
