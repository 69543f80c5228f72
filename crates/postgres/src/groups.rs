//! Groups as they are stored.

use std::collections::HashMap;
use std::sync::Arc;

use everbus_core::{
    ARCHIVE, Code, Cursor, Error, Event, GroupName, Pattern, Result, SubscriptionInfo, Timestamp,
    no_group,
};
use parking_lot::RwLock;
use tokio_postgres::Row;

use crate::pool::Sql;
use crate::rows::{Types, get, get_seq, to_sql};

/// A group with the patterns of its subscriptions.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub(crate) id: i64,
    pub(crate) name: GroupName,
    pub(crate) ordered: bool,
    pub(crate) cursor: u64,
    pub(crate) dropped_to: u64,
    /// The owner of an ephemeral group, which is removed with its owner.
    pub(crate) owner: Option<i64>,
    pub(crate) patterns: Vec<Pattern>,
}

impl Group {
    /// Whether a subscription matches this type.
    pub(crate) fn wants(&self, event_type: &str) -> bool {
        self.patterns.iter().any(|p| p.matches(event_type))
    }

    /// Whether a subscription matches the event, and it is not addressed to another group.
    pub(crate) fn is_due(&self, event: &Event) -> bool {
        event.is_for(&self.name) && self.wants(event.event_type())
    }

    /// The key of an event, if the group is ordered.
    pub(crate) fn key_of(&self, event: &Event) -> Option<String> {
        let key = event.ordering_key().filter(|_| self.ordered)?;
        Some(crate::rows::storable(&key))
    }

    /// The known types that the group does not want. A type that is not known here is never among them.
    pub(crate) fn unwanted(&self, types: &Types) -> Vec<i32> {
        let all = types.all().into_iter();
        all.filter(|(_, name)| !self.wants(name))
            .map(|(id, _)| id)
            .collect()
    }

    /// Whether the group gets events whatever their address.
    pub(crate) fn is_archive(&self) -> bool {
        self.name.as_str() == ARCHIVE
    }
}

const GROUP: &str = "g.id, g.name, g.ordered, g.cursor, g.dropped_to, g.owner,
  ARRAY (SELECT s.event_type FROM everbus.subscriptions s WHERE s.group_id = g.id ORDER BY s.name)";

fn read_group(row: &Row) -> Result<Group> {
    let patterns: Vec<String> = get(row, 6)?;
    Ok(Group {
        id: get(row, 0)?,
        name: get::<&str>(row, 1)?.parse()?,
        ordered: get(row, 2)?,
        cursor: get_seq(row, 3)?,
        dropped_to: get_seq(row, 4)?,
        owner: get(row, 5)?,
        patterns: parsed(&patterns)?,
    })
}

fn parsed(patterns: &[String]) -> Result<Vec<Pattern>> {
    patterns.iter().map(|text| Pattern::new(text)).collect()
}

/// Every group, by name.
pub(crate) async fn all(db: &impl Sql) -> Result<Vec<Group>> {
    let sql = format!("SELECT {GROUP} FROM everbus.groups g ORDER BY g.name");
    let rows = db.query("reading the groups", &sql, &[]).await?;
    rows.iter().map(read_group).collect()
}

/// A group by its name.
pub(crate) async fn find(db: &impl Sql, name: &GroupName) -> Result<Option<Group>> {
    let sql = format!("SELECT {GROUP} FROM everbus.groups g WHERE g.name = $1");
    let row = db.first("reading a group", &sql, &[&name.as_str()]).await?;
    row.as_ref().map(read_group).transpose()
}

/// A group by its name, which must exist.
pub(crate) async fn by_name(db: &impl Sql, name: &GroupName) -> Result<Group> {
    find(db, name).await?.ok_or_else(|| no_group(name))
}

/// A locked group, and what is due in it.
pub(crate) struct Locked {
    pub(crate) group: Group,
    /// When the first lease ends.
    pub(crate) lease_end: Option<i64>,
    /// When the first event without a handler is given up.
    pub(crate) unhandled: Option<i64>,
    /// There are skips or rows beyond the cursor.
    pub(crate) ahead: bool,
}

/// Locks a group until the end of the transaction. Everything that hands out events of the group, or changes
/// what it owes other than by settling, holds this lock. `None`: it was removed.
pub(crate) async fn lock(db: &impl Sql, id: i64) -> Result<Option<Locked>> {
    let sql = "SELECT o_name, o_ordered, o_cursor, o_dropped_to, o_owner, o_patterns,
               o_lease_end, o_unhandled, o_ahead FROM everbus.lock_group($1)";
    let Some(row) = db.first("locking a group", sql, &[&id]).await? else {
        return Ok(None);
    };
    let patterns: Vec<String> = get(&row, 5)?;
    Ok(Some(Locked {
        group: Group {
            id,
            name: get::<&str>(&row, 0)?.parse()?,
            ordered: get(&row, 1)?,
            cursor: get_seq(&row, 2)?,
            dropped_to: get_seq(&row, 3)?,
            owner: get(&row, 4)?,
            patterns: parsed(&patterns)?,
        },
        lease_end: get(&row, 6)?,
        unhandled: get(&row, 7)?,
        ahead: get(&row, 8)?,
    }))
}

/// The error of a consumer whose group was removed.
pub(crate) fn removed() -> Error {
    Error::new(Code::GroupNotFound, "the group was removed")
        .hint("subscribe again to create it anew")
}

/// The subscriptions of a group, by name.
pub(crate) async fn subscriptions(db: &impl Sql, group: &Group) -> Result<Vec<SubscriptionInfo>> {
    let sql = "SELECT id, name, event_type, after_seq, created_at FROM everbus.subscriptions
               WHERE group_id = $1 ORDER BY name";
    let rows = db
        .query("reading the subscriptions", sql, &[&group.id])
        .await?;
    let infos = rows.iter().map(|row| {
        Ok(SubscriptionInfo {
            id: get::<uuid::Uuid>(row, 0)?.into(),
            group: group.name.clone(),
            name: get(row, 1)?,
            pattern: Pattern::new(get(row, 2)?)?,
            after: Cursor::seq(get_seq(row, 3)?),
            created_at: Timestamp::from_micros(get(row, 4)?),
        })
    });
    infos.collect()
}

/// Where a group really is: right before the first event that it wants, or at the end of what is decided.
/// The stored cursor may trail behind events that the group does not want.
pub(crate) async fn caught_up(
    db: &impl Sql,
    types: &Types,
    group: &Group,
    decided: u64,
) -> Result<u64> {
    if decided <= group.cursor {
        return Ok(group.cursor);
    }
    types.learn_all(db).await?;
    let unwanted = group.unwanted(types);
    let sql = "SELECT l.seq FROM everbus.log l
               WHERE l.seq > $1 AND NOT (l.type = ANY ($2))
                 AND CASE WHEN l.address IS NULL THEN true ELSE l.address = $3 OR $4 END
                 AND NOT EXISTS (SELECT 1 FROM everbus.skips s WHERE s.group_id = $5 AND s.seq = l.seq)
               ORDER BY l.seq LIMIT 1";
    let cursor = to_sql(group.cursor);
    let values: crate::pool::Params<'_> = &[
        &cursor,
        &unwanted,
        &group.name.as_str(),
        &group.is_archive(),
        &group.id,
    ];
    let row = db.first("looking where a group is", sql, values).await?;
    let first = row.map(|row| get_seq(&row, 0)).transpose()?;
    let before = first.map_or(decided, |first| first - 1);
    Ok(before.min(decided))
}

/// Properties of a group that never change.
#[derive(Debug)]
pub(crate) struct Nature {
    pub(crate) name: GroupName,
    pub(crate) ephemeral: bool,
}

/// The natures of groups by number. Numbers are never used again.
#[derive(Default)]
pub(crate) struct Natures(RwLock<HashMap<i64, Arc<Nature>>>);

impl Natures {
    pub(crate) async fn get(&self, db: &impl Sql, id: i64) -> Result<Option<Arc<Nature>>> {
        if let Some(known) = self.0.read().get(&id) {
            return Ok(Some(known.clone()));
        }
        let sql = "SELECT name, owner IS NOT NULL FROM everbus.groups WHERE id = $1";
        let Some(row) = db.first("reading a group", sql, &[&id]).await? else {
            return Ok(None);
        };
        let nature = Arc::new(Nature {
            name: get::<&str>(&row, 0)?.parse()?,
            ephemeral: get(&row, 1)?,
        });
        self.0.write().insert(id, nature.clone());
        Ok(Some(nature))
    }
}

/// A cache of groups. The patterns of a group may have changed since it was read.
#[derive(Default)]
pub(crate) struct GroupCache(RwLock<HashMap<i64, Arc<Group>>>);

impl GroupCache {
    pub(crate) async fn get(&self, db: &impl Sql, id: i64) -> Result<Arc<Group>> {
        if let Some(known) = self.0.read().get(&id) {
            return Ok(known.clone());
        }
        let sql = format!("SELECT {GROUP} FROM everbus.groups g WHERE g.id = $1");
        let row = db.first("reading a group", &sql, &[&id]).await?;
        let group = Arc::new(read_group(&row.ok_or_else(removed)?)?);
        self.0.write().insert(id, group.clone());
        Ok(group)
    }

    pub(crate) fn put(&self, group: &Group) {
        let known = self
            .0
            .read()
            .get(&group.id)
            .map(|g| g.patterns == group.patterns);
        if known != Some(true) {
            self.0.write().insert(group.id, Arc::new(group.clone()));
        }
    }

    pub(crate) fn forget(&self, id: i64) {
        self.0.write().remove(&id);
    }
}
