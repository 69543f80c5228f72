//! Which events must stay: those that a group has not reached yet, has in flight, has waiting, or has in the
//! dead letters.

use std::collections::{HashMap, HashSet};

use everbus_core::{GroupName, Result};

use crate::Postgres;
use crate::groups::{self, Group};
use crate::pool::{Params, Sql};
use crate::rows::{get, to_sql};

/// The groups, read before the events: a group that moves on meanwhile only makes more events stay.
pub(crate) struct Owed {
    groups: Vec<Group>,
}

impl Owed {
    pub(crate) async fn read(db: &impl Sql) -> Result<Self> {
        let groups = groups::all(db).await?;
        Ok(Self { groups })
    }

    /// The events among `seqs` that must stay. Dead letters from before `dead_since` do not count.
    pub(crate) async fn needed_among(
        &self,
        engine: &Postgres,
        db: &impl Sql,
        seqs: &[i64],
        dead_since: Option<i64>,
    ) -> Result<HashSet<i64>> {
        if seqs.is_empty() {
            return Ok(HashSet::new());
        }
        // One statement, so that an event that moves from a claim to a row is seen in one of them.
        let sql = "SELECT l.seq, l.type, l.address,
                     EXISTS (SELECT 1 FROM everbus.claims c
                       WHERE c.lo <= l.seq AND c.hi >= l.seq AND NOT c.done @> l.seq)
                     OR EXISTS (SELECT 1 FROM everbus.deliveries d
                       WHERE d.group_id = ANY ($2) AND d.seq = l.seq)
                     OR EXISTS (SELECT 1 FROM everbus.dead_letters d
                       WHERE d.seq = l.seq AND d.retried_at IS NULL AND d.died_at >= $3),
                     ARRAY (SELECT s.group_id FROM everbus.skips s WHERE s.seq = l.seq)
                   FROM everbus.log l WHERE l.seq = ANY ($1)";
        let ids: Vec<i64> = self.groups.iter().map(|group| group.id).collect();
        let since = dead_since.unwrap_or(i64::MIN);
        let values: Params<'_> = &[&seqs, &ids, &since];
        let rows = db.query("looking what is still owed", sql, values).await?;
        let types = rows.iter().filter_map(|row| get(row, 1).ok());
        engine.types.learn(db, types).await?;
        let mut wanted: HashMap<(i64, i32), bool> = HashMap::new();
        let mut needed = HashSet::new();
        for row in &rows {
            let (seq, type_id): (i64, i32) = (get(row, 0)?, get(row, 1)?);
            if get(row, 3)? {
                needed.insert(seq);
                continue;
            }
            let address: Option<&str> = get(row, 2)?;
            let skipped: Vec<i64> = get(row, 4)?;
            let unread = self.groups.iter().any(|group| {
                is_unread(group, seq)
                    && !skipped.contains(&group.id)
                    && receives(&group.name, address)
                    && *wanted.entry((group.id, type_id)).or_insert_with(|| {
                        // Every group that reaches a damaged event dead-letters it, so the event must stay.
                        let name = engine.types.name(type_id);
                        name.is_none_or(|name| group.wants(&name))
                    })
            });
            if unread {
                needed.insert(seq);
            }
        }
        Ok(needed)
    }
}

/// Whether a group has yet to read an event. Events that an ephemeral group has not reached are not kept for
/// it.
fn is_unread(group: &Group, seq: i64) -> bool {
    group.owner.is_none() && to_sql(group.cursor) < seq
}

fn receives(group: &GroupName, address: Option<&str>) -> bool {
    group.receives(address)
}
