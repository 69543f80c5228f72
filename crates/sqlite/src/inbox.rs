//! The inbox, which records the events that a group has handled.
//!
//! A record is a row of about thirty bytes, written in the transaction of the ack. Ids of version 7 increase with time,
//! so new records are added at the end of their group's part of the B-tree.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use everbus_core::{BoxFuture, GroupName, Inbox, Recorded, Result, Timestamp};
use rusqlite::params;

use crate::broker::SqliteEngine;
use crate::deliveries::leases::EventKey;
use crate::errors::from_sqlite;
use crate::readers::Reader;
use crate::rows::{micros, to_sql};
use crate::sql::Sql as _;
use crate::tx::Tx;

/// Records read in one query, and removed in one transaction: few enough that a publish hardly waits.
const LOOK: usize = 10_000;
const STEP: usize = 200;

/// A record by its key: group, id, tenant.
type Key = (i64, [u8; 16], i64);

/// Records that a group has handled an event. Returns whether the record is new.
pub(crate) fn note_handled(tx: &mut Tx, group: i64, seq: u64) -> Result<bool> {
    let doing = "writing to the inbox";
    let sql = "INSERT INTO inbox (group_id, id, tenant, at)
               SELECT ?1, id, tenant, ?3 FROM log WHERE seq = ?2 ON CONFLICT DO NOTHING";
    tx.conn
        .change(doing, sql, params![group, to_sql(seq), tx.now()])
        .map(|noted| noted > 0)
}

/// Writes the records of plain acks. An existing record is not changed.
pub(crate) fn write_noted(tx: &mut Tx) -> Result<()> {
    if tx.noted.is_empty() {
        return Ok(());
    }
    let doing = |e| from_sqlite("writing to the inbox", e);
    let at = tx.now();
    let mut insert = tx
        .conn
        .prepare_cached(
            "INSERT INTO inbox (group_id, id, tenant, at) VALUES (?1, ?2, ?3, ?4)
             ON CONFLICT DO NOTHING",
        )
        .map_err(doing)?;
    // In the order of the B-tree.
    tx.noted.sort_unstable();
    for (group, (id, tenant)) in tx.noted.drain(..) {
        insert
            .execute(params![group, id, tenant, at])
            .map_err(doing)?;
    }
    Ok(())
}

/// Deletes the record.
pub(crate) fn unnote_handled(tx: &mut Tx, group: i64, seq: u64) -> Result<()> {
    let sql = "DELETE FROM inbox WHERE group_id = ?1
               AND (id, tenant) = (SELECT id, tenant FROM log WHERE seq = ?2)";
    tx.conn
        .run("writing to the inbox", sql, params![group, to_sql(seq)])
}

/// Removes records, unless they were written again since they were read.
fn forget_handled(tx: &mut Tx, keys: &[(Key, i64)]) -> Result<u64> {
    let doing = |e| from_sqlite("forgetting what was handled", e);
    let mut delete = tx
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
                        .job(move |writer| forget_handled(&mut writer.tx, &step))
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
    let sql = "SELECT id FROM groups WHERE name = ?1";
    let group: Option<i64> = reader
        .conn
        .first("looking into the inbox", sql, [group.as_str()])?;
    let Some(group) = group else {
        // An unknown group has handled nothing.
        return Ok(vec![false; events.len()]);
    };
    let mut keys = Vec::with_capacity(events.len());
    let mut tenants: HashMap<&str, Option<i64>> = HashMap::new();
    for record in events {
        let tenant = match record.event.tenant() {
            None => Some(0),
            Some(name) => match tenants.get(name) {
                Some(known) => *known,
                None => {
                    let number = tenant_number(reader, name)?;
                    tenants.insert(name, number);
                    number
                }
            },
        };
        // A tenant that has no number has no record.
        keys.push(tenant.map(|tenant| (*record.event.id().as_bytes(), tenant)));
    }
    let found = match neighbours(reader, group, &keys)? {
        Some(found) => found,
        None => one_by_one(reader, group, &keys)?,
    };
    Ok(keys
        .iter()
        .map(|key| key.is_some_and(|key| found.contains(&key)))
        .collect())
}

fn tenant_number(reader: &Reader, name: &str) -> Result<Option<i64>> {
    let sql = "SELECT id FROM tenants WHERE name = ?1";
    reader.conn.first("looking into the inbox", sql, [name])
}

/// All records between the first and the last of these. Ids that increase with time are close together, so one search
/// is enough. `None` if there are many more than asked for.
fn neighbours(
    reader: &Reader,
    group: i64,
    keys: &[Option<EventKey>],
) -> Result<Option<HashSet<EventKey>>> {
    let ids = || keys.iter().flatten().map(|(id, _)| id);
    let (Some(first), Some(last)) = (ids().min(), ids().max()) else {
        return Ok(Some(HashSet::new()));
    };
    let most = 2 * keys.len() + 16;
    let found: HashSet<EventKey> = reader.conn.all(
        "looking into the inbox",
        "SELECT id, tenant FROM inbox WHERE group_id = ?1 AND id BETWEEN ?2 AND ?3 LIMIT ?4",
        params![group, first, last, to_sql(most as u64)],
    )?;
    Ok((found.len() < most).then_some(found))
}

fn one_by_one(reader: &Reader, group: i64, keys: &[Option<EventKey>]) -> Result<HashSet<EventKey>> {
    let doing = |e| from_sqlite("looking into the inbox", e);
    let mut find = reader
        .conn
        .prepare_cached("SELECT 1 FROM inbox WHERE group_id = ?1 AND id = ?2 AND tenant = ?3")
        .map_err(doing)?;
    let mut found = HashSet::new();
    for (id, tenant) in keys.iter().flatten() {
        if find.exists(params![group, id, tenant]).map_err(doing)? {
            found.insert((*id, *tenant));
        }
    }
    Ok(found)
}

/// The result of reading a part of the inbox.
struct Look {
    /// Records to be removed, with their times.
    old: Vec<(Key, i64)>,
    /// Where to continue. `None` if there is no more.
    last: Option<Key>,
}

/// Reads a part of the inbox for records that are old or belong to no group any more.
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
