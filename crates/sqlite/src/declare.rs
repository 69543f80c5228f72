//! Creating, changing and removing groups and subscriptions.

use everbus_core::{
    Code, Cursor, Error, EventId, GroupName, GroupSpec, Pattern, Result, StartFrom,
    SubscriptionInfo, SubscriptionSpec, Timestamp, UNSUBSCRIBED, no_group,
};
use rusqlite::{Connection, params};

use crate::append::position_before;
use crate::broker::SqliteEngine;
use crate::deliveries::leases::Leases;
use crate::errors::from_sqlite;
use crate::groups::reread_groups;
use crate::inspect::subscriptions;
use crate::outcomes::keep_outcome;
use crate::owner::is_dead;
use crate::rows::{UNHANDLED, seq_from, to_sql};
use crate::settle::{remove_row, row, write_skip};
use crate::sql::Sql as _;
use crate::tx::Tx;

/// Skips deleted in one transaction: few enough that a publish hardly waits.
const STEP: i64 = 500;

impl SqliteEngine {
    /// Deletes, in small steps, the skips of a group that is to be removed. Skips beyond its cursor stay
    /// until the group is gone.
    pub(crate) async fn forget_skips(&self, group: &GroupName) -> Result<()> {
        loop {
            let name = group.clone();
            let more = self
                .handle
                .job(move |writer| forget_some_skips(&mut writer.tx, &name));
            if !more.await? {
                return Ok(());
            }
        }
    }
}

fn forget_some_skips(tx: &mut Tx, name: &GroupName) -> Result<bool> {
    let doing = "removing a group";
    let Some(id) = tx.groups.id_of(name) else {
        return Ok(false);
    };
    let cursor = tx.groups.known(id)?.cursor;
    let sql = "SELECT seq FROM skips WHERE group_id = ?1 AND seq <= ?2 ORDER BY seq
               LIMIT 1 OFFSET ?3";
    let last: Option<i64> = tx.conn.first(doing, sql, (id, to_sql(cursor), STEP - 1))?;
    let Some(last) = last else {
        // A small rest is removed with the group.
        return Ok(false);
    };
    let sql = "DELETE FROM skips WHERE group_id = ?1 AND seq <= ?2";
    tx.conn.run(doing, sql, (id, last))?;
    Ok(true)
}

/// Creates a group if it is new, and adds subscriptions.
pub(crate) fn declare(
    tx: &mut Tx,
    leases: &mut Leases,
    spec: &GroupSpec,
) -> Result<Vec<SubscriptionInfo>> {
    if spec.ephemeral {
        // The group ends with this owner. A dead process may have left a group with this name.
        leases.become_owner(tx)?;
        sweep_ephemeral(tx, leases)?;
    }
    let owner = spec.ephemeral.then_some(leases.owner);
    let known = tx.groups.id_of(&spec.name);
    let group = match known {
        Some(id) => {
            let group = tx.groups.known(id)?;
            spec.check_known(group.ordered, group.owner == owner)?;
            id
        }
        None => create_group(tx, spec, owner)?,
    };
    let declared = spec.subscriptions.iter();
    let declared = declared.map(|s| subscribe(tx, group, &spec.name, s));
    let mut all: Vec<SubscriptionInfo> = declared.collect::<Result<_>>()?;
    let others = subscriptions(&tx.conn, group, &spec.name)?.into_iter();
    let others = others.filter(|other| spec.subscriptions.iter().all(|s| s.name != other.name));
    all.extend(others);
    reread_groups(tx)?;
    // A subscription may have become narrower.
    skip_unwanted(tx, group)?;
    Ok(all)
}

fn create_group(tx: &mut Tx, spec: &GroupSpec, owner: Option<i64>) -> Result<i64> {
    spec.check_new()?;
    let patterns: Vec<Pattern> = spec
        .subscriptions
        .iter()
        .map(|s| s.pattern.clone())
        .collect();
    let cursor = resolve(&tx.conn, tx.log.head, spec.start_from, &patterns)?;
    let now = tx.now();
    tx.conn.add(
        "declaring a group",
        "INSERT INTO groups (name, ordered, cursor, declared_at, created_at, active_at, owner)
         VALUES (?1, ?2, ?3, ?4, ?5, ?5, ?6)",
        params![
            spec.name.as_str(),
            spec.ordered,
            to_sql(cursor),
            to_sql(tx.log.head),
            now,
            owner
        ],
    )
}

fn subscribe(
    tx: &mut Tx,
    group: i64,
    name: &GroupName,
    spec: &SubscriptionSpec,
) -> Result<SubscriptionInfo> {
    let doing = "declaring a subscription";
    let position: i64 = tx
        .conn
        .one(doing, "SELECT cursor FROM groups WHERE id = ?1", [group])?;
    // Events skipped in memory count as passed, even before the cursor is stored.
    let passed = tx.groups.get(&group).map_or(0, |g| g.cursor);
    let position = position.max(to_sql(passed));
    let sql = "UPDATE groups SET cursor = ?2 WHERE id = ?1 AND cursor < ?2";
    tx.conn.run(doing, sql, (group, position))?;
    let known: Option<(String, String, i64, String)> = tx.conn.first(
        doing,
        "SELECT id, event_type, after_seq, created_at FROM subscriptions
         WHERE group_id = ?1 AND name = ?2",
        params![group, spec.name],
    )?;
    let info = |id: EventId, after: i64, created_at: Timestamp| SubscriptionInfo {
        id,
        group: name.clone(),
        name: spec.name.clone(),
        pattern: spec.pattern.clone(),
        after: Cursor::seq(seq_from(after)),
        created_at,
    };
    if let Some((id, pattern, after, created_at)) = known {
        let mut after = after;
        if pattern != spec.pattern.as_str() {
            after = position;
            let sql = "UPDATE subscriptions SET event_type = ?2, after_seq = ?3 WHERE id = ?1";
            tx.conn
                .run(doing, sql, params![id, spec.pattern.as_str(), after])?;
        }
        return Ok(info(id.parse()?, after, created_at.parse()?));
    }
    let (id, now) = (EventId::new(), tx.clock.now());
    tx.conn.run(
        doing,
        "INSERT INTO subscriptions (id, event_type, created_at, group_id, name, after_seq)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
        params![
            id.to_string(),
            spec.pattern.as_str(),
            now.to_string(),
            group,
            spec.name,
            position
        ],
    )?;
    Ok(info(id, position, now))
}

/// Removes a subscription. Events that the group already has stay, unless they wait for a handler.
pub(crate) fn retract(tx: &mut Tx, subscription: &str) -> Result<()> {
    let sql = "DELETE FROM subscriptions WHERE id = ?1 RETURNING group_id";
    let group: Option<i64> = tx.conn.first("unsubscribing", sql, [subscription])?;
    tx.watches.recheck_all();
    let Some(group) = group else {
        return Err(Error::new(
            Code::SubscriptionNotFound,
            format!("there is no subscription {subscription}"),
        )
        .hint("subscriptions are named by the id that subscribe returned"));
    };
    reread_groups(tx)?;
    skip_unwanted(tx, group)
}

/// Skips events that wait for a handler and match no subscription of the group any more. In an ordered group they would
/// block every later event of their key.
fn skip_unwanted(tx: &mut Tx, group: i64) -> Result<()> {
    let doing = "reading what has no handler";
    let sql = "SELECT seq, type FROM deliveries WHERE group_id = ?1 AND state = ?2";
    let waiting: Vec<(i64, i64)> = tx.conn.all(doing, sql, (group, UNHANDLED))?;
    for (seq, type_id) in waiting {
        let name = tx.log.type_names.get(&tx.conn, type_id)?;
        if tx.groups.known(group)?.wants(type_id, &name) {
            continue;
        }
        let seq = seq_from(seq);
        write_skip(tx, group, seq, UNSUBSCRIBED)?;
        if !row(tx, group, seq)?.1.is_empty() {
            keep_outcome(tx, group, seq, None)?;
        }
        remove_row(tx, group, seq)?;
        tx.watches.touch(seq);
    }
    Ok(())
}

/// Deletes a group and all its rows.
pub(crate) fn remove_group(tx: &mut Tx, leases: &mut Leases, name: &GroupName) -> Result<()> {
    let id = tx.groups.id_of(name).ok_or_else(|| no_group(name))?;
    remove_group_numbered(tx, leases, id)
}

/// As [`remove_group`](Self::remove_group), by number.
pub(crate) fn remove_group_numbered(tx: &mut Tx, leases: &mut Leases, id: i64) -> Result<()> {
    let doing = |e| from_sqlite("removing a group", e);
    for table in [
        "subscriptions",
        "claims",
        "deliveries",
        "dead_letters",
        "skips",
        "outcomes",
        "everbus_failures",
    ] {
        tx.conn
            .execute(&format!("DELETE FROM {table} WHERE group_id = ?1"), [id])
            .map_err(doing)?;
    }
    tx.conn
        .execute("DELETE FROM groups WHERE id = ?1", [id])
        .map_err(doing)?;
    let claims = leases.claims.iter().filter(|(_, claim)| claim.group == id);
    let claims: Vec<i64> = claims.map(|(id, _)| *id).collect();
    claims.into_iter().for_each(|id| leases.drop_claim(id));
    let held = leases.held.keys().filter(|(group, _)| *group == id);
    let held: Vec<(i64, u64)> = held.copied().collect();
    for key in held {
        leases.drop_held(key);
    }
    leases.isolating = leases.isolating.filter(|(group, _)| *group != id);
    tx.watches.recheck_all();
    // The consumers are told once this is durable.
    reread_groups(tx)
}

/// Returns the cursor for `from`: reading after it yields the first matching event.
pub(crate) fn resolve(
    conn: &Connection,
    head: u64,
    from: StartFrom,
    patterns: &[Pattern],
) -> Result<u64> {
    match from {
        StartFrom::New => Ok(head),
        StartFrom::First => Ok(0),
        StartFrom::Time(at) => Ok(position_before(conn, at)?.min(head)),
        StartFrom::Last => {
            let doing = |e| from_sqlite("looking for the newest event", e);
            let mut statement = conn
                .prepare_cached(
                    "SELECT log.seq, types.name FROM log JOIN types ON types.id = log.type
                     ORDER BY log.seq DESC",
                )
                .map_err(doing)?;
            let mut rows = statement.query([]).map_err(doing)?;
            while let Some(row) = rows.next().map_err(doing)? {
                let name: String = row.get(1).map_err(doing)?;
                if patterns.iter().any(|p| p.matches(&name)) {
                    return Ok(seq_from(row.get::<_, i64>(0).map_err(doing)?) - 1);
                }
            }
            Ok(head)
        }
    }
}

/// Removes the ephemeral groups of an owner.
pub(crate) fn remove_ephemeral(tx: &mut Tx, leases: &mut Leases, owner: i64) -> Result<()> {
    let groups = tx.groups.iter();
    let theirs = groups.filter(|(_, group)| group.owner == Some(owner));
    let ids: Vec<i64> = theirs.map(|(id, _)| *id).collect();
    ids.into_iter()
        .try_for_each(|id| remove_group_numbered(tx, leases, id))
}

/// Removes the ephemeral groups of owners that are dead.
pub(crate) fn sweep_ephemeral(tx: &mut Tx, leases: &mut Leases) -> Result<()> {
    let owners = tx.groups.values().filter_map(|group| group.owner);
    let mut dead: Vec<i64> = owners.filter(|owner| is_gone(tx, leases, *owner)).collect();
    dead.sort_unstable();
    dead.dedup();
    dead.into_iter()
        .try_for_each(|owner| remove_ephemeral(tx, leases, owner))
}

fn is_gone(tx: &Tx, leases: &Leases, owner: i64) -> bool {
    let mut others = leases.other_owners.iter();
    let known = others.find(|(id, _)| *id == owner);
    owner != leases.owner && known.is_none_or(|(_, lock)| is_dead(&tx.path, lock))
}

/// Moves ephemeral groups past events that were removed before the groups reached them.
pub(crate) fn pass_removed(tx: &mut Tx, hi: u64) -> Result<()> {
    let groups = tx.groups.iter_mut();
    let behind = groups.filter(|(_, group)| group.owner.is_some() && group.cursor < hi);
    for (id, group) in behind {
        let sql = "UPDATE groups SET cursor = ?2 WHERE id = ?1 AND cursor < ?2";
        tx.conn.run("removing events", sql, (id, to_sql(hi)))?;
        (group.cursor, group.stored_cursor) = (hi, hi);
    }
    Ok(())
}
