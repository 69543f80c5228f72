//! Which events must stay: those that a group has not reached yet, has in flight, has waiting, or has in the
//! dead letters.

use std::collections::{BTreeSet, HashSet};

use everbus_core::{GroupName, Pattern, Result};
use rusqlite::Connection;

use crate::deliveries::claims::stored_claims;
use crate::deliveries::leases::Leases;
use crate::rows::{ADDRESS, TypeNames, seq_from, to_sql};
use crate::sql::Sql as _;
use crate::tx::Tx;

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
        let slowest = self.groups.iter().map(|group| group.cursor).min();
        let Some(slowest) = slowest.filter(|cursor| *cursor < hi) else {
            return Ok(());
        };
        let range = (to_sql(lo.max(slowest + 1)), to_sql(hi));
        let sql = format!(
            "SELECT seq, CAST(type AS INTEGER), {ADDRESS} FROM log WHERE seq BETWEEN ?1 AND ?2"
        );
        let events: Vec<(i64, i64, Option<String>)> = conn.all(doing, &sql, range)?;
        let sql = "SELECT group_id, seq FROM skips
                   WHERE group_id IN (SELECT id FROM groups) AND seq BETWEEN ?1 AND ?2";
        let skipped: HashSet<(i64, i64)> = conn.all(doing, sql, range)?;
        let mut names = TypeNames::default();
        for (seq, type_id, address) in events {
            let name = names.find(conn, type_id)?;
            // Every group that reaches an event without a readable type dead-letters it, so the event must stay.
            let matches = |group: &Reader| match &name {
                Some(name) => group.patterns.iter().any(|pattern| pattern.matches(name)),
                None => true,
            };
            let wants = |group: &Reader| {
                to_sql(group.cursor) < seq
                    && matches(group)
                    && group.name.receives(address.as_deref())
                    && !skipped.contains(&(group.id, seq))
            };
            if self.groups.iter().any(wants) {
                all.insert(seq_from(seq));
            }
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
