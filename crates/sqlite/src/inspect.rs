//! The state and backlog of every group.
//!
//! Events after the groups' cursors are counted in one pass over the log, by type number, from the cursor
//! that is furthest behind. The cost grows with that backlog, not with the number of groups.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use everbus_core::{
    Cursor, GroupInfo, GroupName, Lag, Pattern, Result, SubscriptionInfo, Timestamp,
};
use rusqlite::{Connection, OptionalExtension};

use crate::deliveries::claims::stored_claims;
use crate::errors::from_sqlite;
use crate::groups::patterns_of;
use crate::owner::is_dead;
use crate::readers::Reader;
use crate::rows::{LEASED, UNHANDLED, seq_from, to_sql};
use crate::sql::Sql as _;

struct Stored {
    id: i64,
    name: String,
    ordered: bool,
    /// Of an ephemeral group: the lock of its owner.
    lock: Option<String>,
    cursor: u64,
    active_at: i64,
    patterns: Vec<Pattern>,
}

/// The backlog of a group by type number.
type Types = HashMap<i64, Lag>;

pub(crate) fn groups(reader: &Reader, file: &Path, now: Timestamp) -> Result<Vec<GroupInfo>> {
    let conn = &reader.conn;
    // An ephemeral group ends with its owner, even before it is removed.
    let gone = |group: &Stored| group.lock.as_ref().is_some_and(|lock| is_dead(file, lock));
    let mut stored = stored(conn)?;
    stored.retain(|group| !gone(group));
    if stored.is_empty() {
        return Ok(Vec::new());
    }
    let names = type_names(conn)?;
    let beyond = beyond(conn, &stored, &names)?;
    let groups = stored.iter().zip(beyond);
    groups
        .map(|(group, types)| info(conn, group, types, &names, now))
        .collect()
}

fn stored(conn: &Connection) -> Result<Vec<Stored>> {
    let sql = "SELECT id, name, ordered, cursor, active_at, iif(owner IS NULL, NULL,
                 coalesce((SELECT lock FROM owners WHERE owners.id = groups.owner), ''))
               FROM groups ORDER BY name";
    let mut stored: Vec<Stored> = conn.read_all("reading the groups", sql, [], |r| {
        Ok(Stored {
            id: r.get(0)?,
            name: r.get(1)?,
            ordered: r.get(2)?,
            cursor: seq_from(r.get(3)?),
            active_at: r.get(4)?,
            lock: r.get(5)?,
            patterns: Vec::new(),
        })
    })?;
    for group in &mut stored {
        group.patterns = patterns_of(conn, group.id)?;
    }
    Ok(stored)
}

fn type_names(conn: &Connection) -> Result<HashMap<i64, Arc<str>>> {
    conn.prepare_cached("SELECT id, name FROM types")
        .and_then(|mut s| {
            let names = s.query_map([], |r| Ok((r.get(0)?, r.get::<_, String>(1)?.into())))?;
            names.collect()
        })
        .map_err(|e| from_sqlite("reading the types", e))
}

/// Matching events after the cursor of each group.
///
/// The cursors divide the log into ranges, and a group is behind by all ranges after its cursor. So each row is counted
/// once, in its range, for any number of groups.
fn beyond(
    conn: &Connection,
    groups: &[Stored],
    names: &HashMap<i64, Arc<str>>,
) -> Result<Vec<Types>> {
    let mut cuts: Vec<u64> = groups.iter().map(|group| group.cursor).collect();
    cuts.sort_unstable();
    cuts.dedup();
    let stretches = stretches(conn, &cuts)?;
    let mut all = Vec::with_capacity(groups.len());
    for group in groups {
        let first = cuts.partition_point(|cut| *cut < group.cursor);
        let mut types = Types::new();
        for (type_id, lag) in stretches[first..].iter().flatten() {
            types.entry(*type_id).or_default().add(lag);
        }
        types.retain(|type_id, _| {
            let name = names.get(type_id);
            name.is_some_and(|name| group.patterns.iter().any(|p| p.matches(name)))
        });
        leave_out_dropped(conn, group, &mut types)?;
        all.push(types);
    }
    Ok(all)
}

/// How many events of each type are in each range.
fn stretches(conn: &Connection, cuts: &[u64]) -> Result<Vec<Types>> {
    let doing = |e| from_sqlite("counting what waits", e);
    let mut stretches = vec![Types::new(); cuts.len()];
    let Some(first) = cuts.first() else {
        return Ok(stretches);
    };
    let mut statement = conn
        .prepare_cached(
            "SELECT seq, CAST(type AS INTEGER), CAST(received_at AS INTEGER) FROM log
             WHERE seq > ?1 ORDER BY seq",
        )
        .map_err(doing)?;
    let mut rows = statement.query([to_sql(*first)]).map_err(doing)?;
    let mut stretch = 0;
    while let Some(row) = rows.next().map_err(doing)? {
        let seq = seq_from(row.get(0).map_err(doing)?);
        while cuts.get(stretch + 1).is_some_and(|next| seq > *next) {
            stretch += 1;
        }
        let lag = stretches[stretch]
            .entry(row.get(1).map_err(doing)?)
            .or_default();
        if lag.behind == 0 {
            let received_at = row.get(2).map_err(doing)?;
            lag.note_oldest(Timestamp::from_micros(received_at));
        }
        lag.behind += 1;
    }
    Ok(stretches)
}

/// Subtracts events that were dropped before the group reached them. If the oldest event of a type was dropped, finds
/// the first one that was not.
fn leave_out_dropped(conn: &Connection, group: &Stored, types: &mut Types) -> Result<()> {
    let doing = |e| from_sqlite("reading the skips", e);
    let dropped: HashMap<i64, u64> = conn
        .prepare_cached(
            "SELECT CAST(log.type AS INTEGER), count(*) FROM skips JOIN log ON log.seq = skips.seq
             WHERE skips.group_id = ?1 AND skips.seq > ?2 GROUP BY log.type",
        )
        .and_then(|mut s| {
            let counts = s.query_map((group.id, to_sql(group.cursor)), |r| {
                Ok((r.get(0)?, seq_from(r.get(1)?)))
            })?;
            counts.collect()
        })
        .map_err(doing)?;
    for (type_id, count) in dropped {
        let Some(lag) = types.get_mut(&type_id) else {
            continue;
        };
        lag.behind = lag.behind.saturating_sub(count);
        lag.oldest = None;
        if lag.behind == 0 {
            types.remove(&type_id);
            continue;
        }
        let first: Option<i64> = conn.first(
            "reading the skips",
            "SELECT CAST(received_at AS INTEGER) FROM log WHERE seq > ?2 AND type = ?3
               AND NOT EXISTS (SELECT 1 FROM skips WHERE group_id = ?1 AND skips.seq = log.seq)
             ORDER BY seq LIMIT 1",
            (group.id, to_sql(group.cursor), type_id),
        )?;
        lag.oldest = first.map(Timestamp::from_micros);
    }
    Ok(())
}

fn info(
    conn: &Connection,
    group: &Stored,
    mut types: Types,
    names: &HashMap<i64, Arc<str>>,
    now: Timestamp,
) -> Result<GroupInfo> {
    let mut oldest: HashMap<i64, u64> = HashMap::new();
    count_rows(conn, group.id, &mut types, &mut oldest)?;
    count_claims(conn, group.id, &mut types, &mut oldest)?;
    note_oldest(conn, &mut types, &oldest)?;
    let sql = "SELECT type, count(*) FROM dead_letters
               WHERE group_id = ?1 AND retried_at IS NULL GROUP BY type";
    let dead: Vec<(i64, i64)> = conn.all("counting the dead letters", sql, [group.id])?;
    for (type_id, count) in dead {
        types.entry(type_id).or_default().dead_letters = seq_from(count);
    }
    let unknown: Arc<str> = "".into();
    let mut by_name: BTreeMap<Arc<str>, Lag> = BTreeMap::new();
    for (type_id, lag) in types {
        let name = names.get(&type_id).unwrap_or(&unknown).clone();
        by_name.entry(name).or_default().add(&lag);
    }
    let mut info = GroupInfo::new(group.name.parse()?, Timestamp::from_micros(group.active_at));
    info.ordered = group.ordered;
    info.ephemeral = group.lock.is_some();
    let patterns = group.patterns.iter().map(|p| p.as_str().to_owned());
    info.patterns = patterns.collect();
    info.subscriptions = subscriptions(conn, group.id, &info.name)?;
    info.position = Cursor::seq(group.cursor);
    Ok(info.with_types(by_name, now))
}

/// Events in their own rows: leased or waiting.
fn count_rows(
    conn: &Connection,
    group: i64,
    types: &mut Types,
    oldest: &mut HashMap<i64, u64>,
) -> Result<()> {
    let sql = "SELECT type, state, count(*), min(seq) FROM deliveries
               WHERE group_id = ?1 GROUP BY 1, 2";
    let rows: Vec<(i64, i64, i64, i64)> = conn.all("counting the deliveries", sql, [group])?;
    for (type_id, state, count, first) in rows {
        let (lag, count) = (types.entry(type_id).or_default(), seq_from(count));
        match state {
            LEASED => lag.in_flight += count,
            UNHANDLED => {
                lag.waiting += count;
                lag.unhandled += count;
            }
            _ => lag.waiting += count,
        }
        earlier(oldest, type_id, seq_from(first));
    }
    Ok(())
}

fn count_claims(
    conn: &Connection,
    group: i64,
    types: &mut Types,
    oldest: &mut HashMap<i64, u64>,
) -> Result<()> {
    let doing = "counting the claims";
    for claim in stored_claims(conn, doing, "group_id = ?1 ORDER BY lo", [group])? {
        for (first, last) in claim.progress.unfinished(claim.hi) {
            let sql = "SELECT seq, CAST(type AS INTEGER) FROM log WHERE seq BETWEEN ?1 AND ?2 ORDER BY seq";
            let open: Vec<(i64, i64)> = conn.all(doing, sql, (to_sql(first), to_sql(last)))?;
            for (seq, type_id) in open {
                let lag = types.entry(type_id).or_default();
                match claim.owner {
                    0 => lag.waiting += 1,
                    _ => lag.in_flight += 1,
                }
                earlier(oldest, type_id, seq_from(seq));
            }
        }
    }
    Ok(())
}

fn earlier(oldest: &mut HashMap<i64, u64>, type_id: i64, seq: u64) {
    let known = oldest.entry(type_id).or_insert(seq);
    *known = seq.min(*known);
}

/// When the oldest events in rows and claims were received.
fn note_oldest(conn: &Connection, types: &mut Types, oldest: &HashMap<i64, u64>) -> Result<()> {
    let doing = |e| from_sqlite("reading a group", e);
    let mut statement = conn
        .prepare_cached("SELECT CAST(received_at AS INTEGER) FROM log WHERE seq = ?1")
        .map_err(doing)?;
    for (type_id, seq) in oldest {
        let found = statement.query_row([to_sql(*seq)], |r| r.get(0));
        if let Some(received_at) = found.optional().map_err(doing)? {
            let lag = types.entry(*type_id).or_default();
            lag.note_oldest(Timestamp::from_micros(received_at));
        }
    }
    Ok(())
}

/// The subscriptions of a group, by name.
pub(crate) fn subscriptions(
    conn: &Connection,
    group: i64,
    name: &GroupName,
) -> Result<Vec<SubscriptionInfo>> {
    let doing = "reading the subscriptions";
    let sql = "SELECT id, name, event_type, after_seq, created_at FROM subscriptions
               WHERE group_id = ?1 ORDER BY name";
    let stored: Vec<(String, String, String, i64, String)> = conn.all(doing, sql, [group])?;
    let infos = stored
        .into_iter()
        .map(|(id, own, pattern, after, created_at)| {
            Ok(SubscriptionInfo {
                id: id.parse()?,
                group: name.clone(),
                name: own,
                pattern: Pattern::new(&pattern)?,
                after: Cursor::seq(seq_from(after)),
                created_at: created_at.parse()?,
            })
        });
    infos.collect()
}
