//! Which events must stay: those that a group has not reached yet, has in flight, has waiting, or has in the
//! dead letters.

use std::collections::{HashMap, HashSet};

use everbus_core::{GroupName, Pattern, Result};
use rusqlite::Connection;

use crate::deliveries::claims::stored_claims;
use crate::deliveries::leases::Leases;
use crate::rows::{ADDRESS, TypeNames, seq_from, to_sql};
use crate::sql::Sql as _;
use crate::tx::Tx;

/// Ranges of the log with both ends included, sorted, without overlap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stretches(Vec<(u64, u64)>);

impl Stretches {
    pub(crate) fn new(mut all: Vec<(u64, u64)>) -> Self {
        all.sort_unstable();
        let mut merged: Vec<(u64, u64)> = Vec::with_capacity(all.len());
        for (lo, hi) in all {
            match merged.last_mut() {
                Some((_, last)) if lo <= last.saturating_add(1) => *last = hi.max(*last),
                _ => merged.push((lo, hi)),
            }
        }
        Self(merged)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn contains(&self, seq: u64) -> bool {
        let next = self.0.partition_point(|(lo, _)| *lo <= seq);
        next > 0 && self.0[next - 1].1 >= seq
    }

    /// The parts of a range that are in none of these.
    pub(crate) fn outside(&self, lo: u64, hi: u64) -> Vec<(u64, u64)> {
        let mut free = Vec::new();
        let mut from = lo;
        let first = self.0.partition_point(|(_, end)| *end < lo);
        for (start, end) in &self.0[first..] {
            if *start > hi {
                break;
            }
            if *start > from {
                free.push((from, start - 1));
            }
            from = end.saturating_add(1);
        }
        if from <= hi {
            free.push((from, hi));
        }
        free
    }
}

/// Events that groups need and that have no row: events beyond the cursors, and open events in claims.
#[derive(Clone, Debug)]
pub(crate) struct Owed {
    groups: Vec<Reader>,
    /// Unfinished events in claims.
    claimed: Stretches,
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
    ) -> Result<Stretches> {
        let doing = "looking what is still owed";
        let (first, last) = (to_sql(lo), to_sql(hi));
        let claimed = self.claimed.0.iter().filter(|(a, b)| *a <= hi && *b >= lo);
        let mut all: Vec<(u64, u64)> = claimed.copied().collect();
        let sql = "SELECT seq FROM deliveries WHERE group_id = ?1 AND seq BETWEEN ?2 AND ?3";
        let mut rows: Vec<i64> = Vec::new();
        for group in &self.groups {
            rows.extend(conn.all::<i64, Vec<i64>>(doing, sql, (group.id, first, last))?);
        }
        self.add_unread(conn, (lo, hi), &mut all)?;
        let sql = "SELECT seq FROM dead_letters
                   WHERE retried_at IS NULL AND seq BETWEEN ?1 AND ?2 AND died_at >= ?3";
        let since = dead_before.unwrap_or(i64::MIN);
        rows.extend(conn.all::<i64, Vec<i64>>(doing, sql, (first, last, since))?);
        all.extend(rows.into_iter().map(|seq| (seq_from(seq), seq_from(seq))));
        Ok(Stretches::new(all))
    }

    /// Adds events that groups want and have not reached, except those they were told to skip.
    fn add_unread(
        &self,
        conn: &Connection,
        (lo, hi): (u64, u64),
        all: &mut Vec<(u64, u64)>,
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
        let mut names = TypeNames::default();
        for group in behind {
            let from = to_sql(lo.max(group.cursor + 1));
            let sql = "SELECT seq FROM skips WHERE group_id = ?1 AND seq BETWEEN ?2 AND ?3";
            let dropped: HashSet<i64> = conn.all(doing, sql, (group.id, from, to_sql(hi)))?;
            let mut wanted: HashMap<i64, bool> = HashMap::new();
            for (seq, type_id, address) in events.iter().filter(|(seq, ..)| *seq >= from) {
                if !group.name.receives(address.as_deref()) {
                    continue;
                }
                let wants = match wanted.get(type_id) {
                    Some(known) => *known,
                    None => {
                        // Every group that reaches a damaged event dead-letters it, so the event must stay.
                        let name = names.find(conn, *type_id)?;
                        let wants =
                            name.is_none_or(|name| group.patterns.iter().any(|p| p.matches(&name)));
                        wanted.insert(*type_id, wants);
                        wants
                    }
                };
                if wants && !dropped.contains(seq) {
                    let seq = seq_from(*seq);
                    // Usually they follow each other.
                    match all.last_mut().filter(|last| last.1 + 1 == seq) {
                        Some(last) => last.1 = seq,
                        None => all.push((seq, seq)),
                    }
                }
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
        claimed: Stretches::new(open),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stretches_merge_and_leave_the_rest() {
        let some = Stretches::new(vec![(8, 9), (3, 4), (5, 5), (20, 30), (9, 10)]);
        assert_eq!(some.0, [(3, 5), (8, 10), (20, 30)]);
        assert_eq!(some.outside(1, 40), [(1, 2), (6, 7), (11, 19), (31, 40)]);
        assert_eq!(some.outside(4, 9), [(6, 7)]);
        assert_eq!(some.outside(21, 29), []);
        assert_eq!(some.outside(11, 19), [(11, 19)]);
        assert_eq!(Stretches::default().outside(1, 2), [(1, 2)]);
        for seq in 0..40 {
            let inside = [(3, 5), (8, 10), (20, 30)];
            let inside = inside.iter().any(|(lo, hi)| (*lo..=*hi).contains(&seq));
            assert_eq!(some.contains(seq), inside, "{seq}");
        }
    }
}
