//! Part of the writer: creating, changing and removing groups and subscriptions.

use everbus_core::{
    Code, Cursor, Error, EventId, GroupName, GroupSpec, Pattern, Result, StartFrom,
    SubscriptionInfo, SubscriptionSpec, Timestamp, UNSUBSCRIBED, other_lifetime,
};
use rusqlite::{Connection, OptionalExtension, params};

use crate::append::position_before;
use crate::engine::SqliteEngine;
use crate::errors::from_sqlite;
use crate::inspect::subscriptions;
use crate::rows::{seq_from, to_sql};
use crate::state::{UNHANDLED, micros};
use crate::writer::Writer;

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
                .job(move |writer| writer.forget_some_skips(&name));
            if !more.await? {
                return Ok(());
            }
        }
    }
}

impl Writer {
    fn forget_some_skips(&mut self, name: &GroupName) -> Result<bool> {
        let doing = |e| from_sqlite("removing a group", e);
        let Some(id) = self.state.group_id(name) else {
            return Ok(false);
        };
        let cursor = self.state.group_mut(id)?.cursor;
        let last: Option<i64> = self
            .conn
            .prepare_cached(
                "SELECT seq FROM skips WHERE group_id = ?1 AND seq <= ?2 ORDER BY seq
                 LIMIT 1 OFFSET ?3",
            )
            .and_then(|mut s| {
                s.query_row((id, to_sql(cursor), STEP - 1), |r| r.get(0))
                    .optional()
            })
            .map_err(doing)?;
        let Some(last) = last else {
            // A small rest is removed with the group.
            return Ok(false);
        };
        self.conn
            .prepare_cached("DELETE FROM skips WHERE group_id = ?1 AND seq <= ?2")
            .and_then(|mut s| s.execute((id, last)))
            .map_err(doing)?;
        Ok(true)
    }

    /// Creates a group if it is new, and adds subscriptions.
    pub(crate) fn declare(&mut self, spec: &GroupSpec) -> Result<Vec<SubscriptionInfo>> {
        if spec.ephemeral {
            // The group ends with this owner. A dead process may have left a group with this name.
            self.become_owner()?;
            self.sweep_ephemeral()?;
        }
        let owner = spec.ephemeral.then_some(self.state.owner);
        let known = self.state.group_id(&spec.name);
        let group = match known {
            Some(id) => {
                let group = self.state.group_mut(id)?;
                if group.ordered != spec.ordered {
                    return Err(Error::new(
                        Code::GroupConflict,
                        format!(
                            "group {} is {}ordered and cannot be changed",
                            spec.name,
                            if group.ordered { "" } else { "not " }
                        ),
                    )
                    .hint("use another group name, or remove the group first"));
                }
                if group.owner != owner {
                    return Err(other_lifetime(spec));
                }
                id
            }
            None => self.create_group(spec, owner)?,
        };
        let declared = spec.subscriptions.iter();
        let declared = declared.map(|s| self.subscribe(group, &spec.name, s));
        let mut all: Vec<SubscriptionInfo> = declared.collect::<Result<_>>()?;
        let others = subscriptions(&self.conn, group, &spec.name)?.into_iter();
        let others = others.filter(|other| spec.subscriptions.iter().all(|s| s.name != other.name));
        all.extend(others);
        self.reread_groups()?;
        // A subscription may have become narrower.
        self.skip_unwanted(group)?;
        Ok(all)
    }

    fn create_group(&mut self, spec: &GroupSpec, owner: Option<i64>) -> Result<i64> {
        if spec.name.is_unnamed() && spec.ephemeral {
            return Err(other_lifetime(spec));
        }
        if spec.name.is_unnamed() && spec.start_from != StartFrom::First {
            return Err(Error::new(
                Code::InvalidSetting,
                "the unnamed group begins at the start of the log",
            )
            .hint("name the group to start it anywhere else"));
        }
        let patterns: Vec<Pattern> = spec
            .subscriptions
            .iter()
            .map(|s| s.pattern.clone())
            .collect();
        let cursor = resolve(&self.conn, self.state.head, spec.start_from, &patterns)?;
        let now = micros(self.clock.now());
        self.conn
            .prepare_cached(
                "INSERT INTO groups (name, ordered, cursor, declared_at, created_at, active_at, owner)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?5, ?6)",
            )
            .and_then(|mut s| {
                s.insert(params![
                    spec.name.as_str(),
                    spec.ordered,
                    to_sql(cursor),
                    to_sql(self.state.head),
                    now,
                    owner
                ])
            })
            .map_err(|e| from_sqlite("declaring a group", e))
    }

    fn subscribe(
        &mut self,
        group: i64,
        name: &GroupName,
        spec: &SubscriptionSpec,
    ) -> Result<SubscriptionInfo> {
        let doing = |e| from_sqlite("declaring a subscription", e);
        let position: i64 = self
            .conn
            .prepare_cached("SELECT cursor FROM groups WHERE id = ?1")
            .and_then(|mut s| s.query_row([group], |r| r.get(0)))
            .map_err(doing)?;
        // Events skipped in memory count as passed, even before the cursor is stored.
        let passed = self.state.groups.get(&group).map_or(0, |g| g.cursor);
        let position = position.max(to_sql(passed));
        self.conn
            .prepare_cached("UPDATE groups SET cursor = ?2 WHERE id = ?1 AND cursor < ?2")
            .and_then(|mut s| s.execute((group, position)))
            .map_err(doing)?;
        let known: Option<(String, String, i64, String)> = self
            .conn
            .prepare_cached(
                "SELECT id, event_type, after_seq, created_at FROM subscriptions
                 WHERE group_id = ?1 AND name = ?2",
            )
            .and_then(|mut s| {
                s.query_row(params![group, spec.name], |r| {
                    Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?))
                })
                .optional()
            })
            .map_err(doing)?;
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
                self.conn
                    .prepare_cached(
                        "UPDATE subscriptions SET event_type = ?2, after_seq = ?3 WHERE id = ?1",
                    )
                    .and_then(|mut s| s.execute(params![id, spec.pattern.as_str(), after]))
                    .map_err(doing)?;
            }
            return Ok(info(id.parse()?, after, created_at.parse()?));
        }
        let (id, now) = (EventId::new(), self.clock.now());
        self.conn
            .prepare_cached(
                "INSERT INTO subscriptions (id, event_type, created_at, group_id, name, after_seq)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
            )
            .and_then(|mut s| {
                s.execute(params![
                    id.to_string(),
                    spec.pattern.as_str(),
                    now.to_string(),
                    group,
                    spec.name,
                    position
                ])
            })
            .map_err(doing)?;
        Ok(info(id, position, now))
    }

    /// Removes a subscription. Events that the group already has stay, unless they wait for a handler.
    pub(crate) fn retract(&mut self, subscription: &str) -> Result<()> {
        let group: Option<i64> = self
            .conn
            .prepare_cached("DELETE FROM subscriptions WHERE id = ?1 RETURNING group_id")
            .and_then(|mut s| s.query_row([subscription], |r| r.get(0)).optional())
            .map_err(|e| from_sqlite("unsubscribing", e))?;
        self.watches.recheck_all();
        let Some(group) = group else {
            return Err(Error::new(
                Code::SubscriptionNotFound,
                format!("there is no subscription {subscription}"),
            )
            .hint("subscriptions are named by the id that subscribe returned"));
        };
        self.reread_groups()?;
        self.skip_unwanted(group)
    }

    /// Skips events that wait for a handler and match no subscription of the group any more. In an ordered
    /// group they would hold up every later event with their key.
    fn skip_unwanted(&mut self, group: i64) -> Result<()> {
        let waiting: Vec<(i64, i64)> = self
            .conn
            .prepare_cached("SELECT seq, type FROM deliveries WHERE group_id = ?1 AND state = ?2")
            .and_then(|mut s| {
                s.query_map((group, UNHANDLED), |r| Ok((r.get(0)?, r.get(1)?)))?
                    .collect()
            })
            .map_err(|e| from_sqlite("reading what has no handler", e))?;
        for (seq, type_id) in waiting {
            let name = self.state.type_names.get(&self.conn, type_id)?;
            if self.state.group_mut(group)?.wants(type_id, &name) {
                continue;
            }
            let seq = seq_from(seq);
            self.write_skip(group, seq, UNSUBSCRIBED)?;
            if !self.row(group, seq)?.1.is_empty() {
                self.keep_outcome(group, seq, None)?;
            }
            self.remove_row(group, seq)?;
            self.watches.touch(seq);
        }
        Ok(())
    }

    /// Deletes a group and all its rows.
    pub(crate) fn remove_group(&mut self, name: &GroupName) -> Result<()> {
        let id = self.state.group_id(name).ok_or_else(|| {
            Error::new(Code::GroupNotFound, format!("there is no group {name}"))
                .hint("list the groups with `everbus groups`")
        })?;
        self.remove_group_numbered(id)
    }

    /// As [`remove_group`](Self::remove_group), by number.
    pub(crate) fn remove_group_numbered(&mut self, id: i64) -> Result<()> {
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
            self.conn
                .execute(&format!("DELETE FROM {table} WHERE group_id = ?1"), [id])
                .map_err(doing)?;
        }
        self.conn
            .execute("DELETE FROM groups WHERE id = ?1", [id])
            .map_err(doing)?;
        let claims = self
            .state
            .claims
            .iter()
            .filter(|(_, claim)| claim.group == id);
        let claims: Vec<i64> = claims.map(|(id, _)| *id).collect();
        claims.into_iter().for_each(|id| self.drop_claim(id));
        let held = self.state.held.keys().filter(|(group, _)| *group == id);
        let held: Vec<(i64, u64)> = held.copied().collect();
        for key in held {
            self.drop_held(key);
        }
        self.isolating = self.isolating.filter(|(group, _)| *group != id);
        self.watches.recheck_all();
        // The consumers are told once this is durable.
        self.reread_groups()
    }
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
