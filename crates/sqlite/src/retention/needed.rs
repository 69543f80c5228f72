//! Which events must stay: those that a group has not reached yet, has in flight, has waiting, or has in the
//! dead letters.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use everbus_core::{GroupName, Pattern, Result};
use rusqlite::Connection;

use crate::deliveries::claims::stored_claims;
use crate::deliveries::leases::Leases;
use crate::rows::{ADDRESS, TypeNames, seq_from, to_sql};
use crate::sql::Sql as _;
use crate::tx::Tx;

/// The parts of a range that have none of these events.
pub(super) fn between(needed: &BTreeSet<u64>, lo: u64, hi: u64) -> Vec<(u64, u64)> {
    let (mut free, mut from) = (Vec::new(), lo);
    for seq in needed.range(lo..=hi) {
        if *seq > from {
            free.push((from, seq - 1));
        }
        from = seq + 1;
    }
    if from <= hi {
        free.push((from, hi));
    }
    free
}

/// Events that groups need and that have no row: events beyond the cursors, and open events in claims.
#[derive(Clone, Debug)]
pub(crate) struct Owed {
    groups: Vec<Reader>,
    /// Ranges of unfinished events in claims.
    claimed: Vec<(u64, u64)>,
}

/// A group that reads the log.
#[derive(Clone, Debug)]
struct Reader {
    id: i64,
    name: GroupName,
    cursor: u64,
    patterns: Vec<Pattern>,
}

impl Owed {
    /// The events of a range that must stay. Dead letters from before `dead_before` do not count.
    pub(crate) fn needed(
        &self,
        conn: &Connection,
        (lo, hi): (u64, u64),
        dead_before: Option<i64>,
    ) -> Result<BTreeSet<u64>> {
        let doing = "looking what is still owed";
        let sql = "SELECT seq FROM deliveries
                   WHERE group_id IN (SELECT id FROM groups) AND seq BETWEEN ?1 AND ?2
                   UNION ALL
                   SELECT seq FROM dead_letters
                   WHERE retried_at IS NULL AND seq BETWEEN ?1 AND ?2 AND died_at >= ?3";
        let values = (to_sql(lo), to_sql(hi), dead_before.unwrap_or(i64::MIN));
        let mut all: BTreeSet<u64> =
            conn.read_all(doing, sql, values, |row| Ok(seq_from(row.get(0)?)))?;
        let claimed = self.claimed.iter().map(|(a, b)| *a.max(&lo)..=*b.min(&hi));
        all.extend(claimed.flatten());
        self.add_unread(conn, (lo, hi), &mut all)?;
        Ok(all)
    }

    /// Adds events that groups want and have not reached, except those they were told to skip.
    fn add_unread(
        &self,
        conn: &Connection,
        (lo, hi): (u64, u64),
        all: &mut BTreeSet<u64>,
    ) -> Result<()> {
        let doing = "looking what has yet to be read";
        let behind = self.groups.iter().filter(|group| group.cursor < hi);
        let behind: Vec<&Reader> = behind.collect();
        let Some(slowest) = behind.iter().map(|group| group.cursor).min() else {
            return Ok(());
        };
        let events: Vec<(i64, i64, Option<String>)> = conn.all(doing, &format!(
                "SELECT seq, CAST(type AS INTEGER), {ADDRESS} FROM log WHERE seq BETWEEN ?1 AND ?2 ORDER BY seq"
            ), (to_sql(lo.max(slowest + 1)), to_sql(hi)))?;
        let (mut names, mut types) = (TypeNames::default(), HashMap::new());
        for id in events.iter().map(|(_, id, _)| *id).collect::<HashSet<_>>() {
            types.insert(id, names.find(conn, id)?);
        }
        for group in behind {
            let from = to_sql(lo.max(group.cursor + 1));
            let sql = "SELECT seq FROM skips WHERE group_id = ?1 AND seq BETWEEN ?2 AND ?3";
            let dropped: HashSet<i64> = conn.all(doing, sql, (group.id, from, to_sql(hi)))?;
            // Every group that reaches a damaged event dead-letters it, so the event must stay.
            let wants = |name: &Option<Arc<str>>| match name {
                Some(name) => group.patterns.iter().any(|pattern| pattern.matches(name)),
                None => true,
            };
            let wanted = types.iter().filter(|(_, name)| wants(name));
            let wanted: HashSet<i64> = wanted.map(|(id, _)| *id).collect();
            let unread = events.iter().filter(|(seq, type_id, address)| {
                *seq >= from
                    && wanted.contains(type_id)
                    && group.name.receives(address.as_deref())
                    && !dropped.contains(seq)
            });
            all.extend(unread.map(|(seq, ..)| seq_from(*seq)));
        }
        Ok(())
    }
}

/// The events that groups need now. Memory knows more than the file about this process's groups and
/// claims.
pub(crate) fn owed(tx: &Tx, leases: &Leases) -> Result<Owed> {
    let mut open = Vec::new();
    for stored in stored_claims(&tx.conn, "looking what is still owed", "true", [])? {
        match leases.claims.get(&stored.id) {
            Some(claim) => open.extend(claim.progress.unfinished(claim.hi)),
            None => open.extend(stored.progress.unfinished(stored.hi)),
        }
    }
    let groups = tx.groups.iter().map(|(id, group)| Reader {
        id: *id,
        name: group.name.clone(),
        // Events that an ephemeral group has not reached are not kept for it.
        cursor: group.owner.map_or(group.cursor, |_| u64::MAX),
        patterns: group.patterns.clone(),
    });
    Ok(Owed {
        groups: groups.collect(),
        claimed: open,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_between_the_needed_ones_may_go() {
        let needed = BTreeSet::from([3, 4, 5, 8, 20]);
        let all = [(1, 2), (6, 7), (9, 19), (21, 40)];
        assert_eq!(between(&needed, 1, 40), all);
        assert_eq!(between(&needed, 4, 9), [(6, 7), (9, 9)]);
        assert_eq!(between(&needed, 4, 5), []);
        assert_eq!(between(&needed, 9, 19), [(9, 19)]);
        assert_eq!(between(&BTreeSet::new(), 1, 2), [(1, 2)]);
    }
}
