//! The groups of the file, as the writer knows them: cursors, patterns, and when each has work to do.

use std::borrow::Cow;
use std::ops::{Deref, DerefMut};
use std::time::Instant;

use everbus_core::{Code, Error, Event, GroupName, Pattern, Result};
use rusqlite::Connection;

use crate::deliveries::cursor::flush_cursors;
use crate::errors::from_sqlite;
use crate::ids::IdMap;
use crate::rows::{MAX_CACHED_TYPES, seq_from};
use crate::sql::Sql as _;
use crate::tx::Tx;

/// The groups by number.
pub(crate) struct Groups {
    all: IdMap<i64, Group>,
    /// When moved cursors were last stored.
    pub(crate) stored_at: Instant,
}

impl Deref for Groups {
    type Target = IdMap<i64, Group>;

    fn deref(&self) -> &Self::Target {
        &self.all
    }
}

impl DerefMut for Groups {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.all
    }
}

impl Groups {
    pub(crate) fn load(conn: &Connection) -> Result<Self> {
        let mut groups = Self {
            all: IdMap::default(),
            stored_at: Instant::now(),
        };
        groups.refresh(conn)?;
        Ok(groups)
    }

    pub(crate) fn id_of(&self, name: &GroupName) -> Option<i64> {
        self.all
            .iter()
            .find(|(_, group)| group.name == *name)
            .map(|(id, _)| *id)
    }

    pub(crate) fn known(&mut self, id: i64) -> Result<&mut Group> {
        self.all
            .get_mut(&id)
            .ok_or_else(|| Error::new(Code::GroupNotFound, "the group was removed"))
    }

    /// Loads groups and their patterns again.
    pub(crate) fn refresh(&mut self, conn: &Connection) -> Result<()> {
        let doing = |e| from_sqlite("reading the groups", e);
        let mut groups = IdMap::default();
        let mut statement = conn
            .prepare_cached("SELECT id, name, ordered, cursor, declared_at, owner FROM groups")
            .map_err(doing)?;
        let mut rows = statement.query([]).map_err(doing)?;
        while let Some(row) = rows.next().map_err(doing)? {
            let id: i64 = row.get(0).map_err(doing)?;
            let name: String = row.get(1).map_err(doing)?;
            let cursor = seq_from(row.get(3).map_err(doing)?);
            let group = Group {
                name: name.parse()?,
                ordered: row.get(2).map_err(doing)?,
                owner: row.get(5).map_err(doing)?,
                cursor,
                stored_cursor: cursor,
                dropped_to: last_skip(conn, id)?,
                declared_at: seq_from(row.get(4).map_err(doing)?),
                patterns: patterns_of(conn, id)?,
                matches: IdMap::default(),
                next_due: next_due(conn, id)?,
                next_suspect: next_suspect(conn, id)?,
            };
            groups.insert(id, group);
        }
        let mut old = std::mem::replace(&mut self.all, groups);
        for (id, group) in &mut self.all {
            // Events skipped in memory need not be read again, unless the group wants more than before.
            if let Some(old) = old.remove(id)
                && old.patterns == group.patterns
                && old.stored_cursor == group.stored_cursor
            {
                group.cursor = group.cursor.max(old.cursor);
                group.matches = old.matches;
            }
        }
        Ok(())
    }
}

/// A group as stored.
pub(crate) struct Group {
    pub(crate) name: GroupName,
    pub(crate) ordered: bool,
    /// The owner of an ephemeral group; the group ends with it.
    pub(crate) owner: Option<i64>,
    /// Everything up to here was handed out or skipped.
    pub(crate) cursor: u64,
    /// The cursor in the file: skipping is stored later.
    pub(crate) stored_cursor: u64,
    /// Dropped events beyond the cursor are at or before this position, and in `skips`.
    pub(crate) dropped_to: u64,
    pub(crate) declared_at: u64,
    pub(crate) patterns: Vec<Pattern>,
    matches: IdMap<i64, bool>,
    /// When the earliest waiting delivery is due, if there is one.
    pub(crate) next_due: Option<i64>,
    /// When the earliest suspect (an event in flight at a crash) is due; at once for inherited claims.
    pub(crate) next_suspect: Option<i64>,
}

impl Group {
    /// The key of an event, if the group is ordered by it.
    pub(crate) fn key_of<'e>(&self, event: &'e Event) -> Option<Cow<'e, str>> {
        event.ordering_key().filter(|_| self.ordered)
    }

    /// Whether some subscription of the group wants this type.
    pub(crate) fn wants(&mut self, type_id: i64, name: &str) -> bool {
        if let Some(known) = self.matches.get(&type_id) {
            return *known;
        }
        if self.matches.len() >= MAX_CACHED_TYPES {
            self.matches.clear();
        }
        let wanted = self.patterns.iter().any(|p| p.matches(name));
        self.matches.insert(type_id, wanted);
        wanted
    }
}

/// Loads the groups again inside a transaction, after storing the cursors that it has moved.
pub(crate) fn reread_groups(tx: &mut Tx) -> Result<()> {
    flush_cursors(tx)?;
    tx.groups.refresh(&tx.conn)
}

/// The patterns of a group, in the order they were declared.
pub(crate) fn patterns_of(conn: &Connection, group: i64) -> Result<Vec<Pattern>> {
    let sql =
        "SELECT DISTINCT event_type FROM subscriptions WHERE group_id = ?1 ORDER BY event_type";
    let texts: Vec<String> = conn.all("reading the subscriptions", sql, [group])?;
    texts.iter().map(|text| Pattern::new(text)).collect()
}

/// The last event that a group skipped.
fn last_skip(conn: &Connection, group: i64) -> Result<u64> {
    conn.prepare_cached("SELECT max(seq) FROM skips WHERE group_id = ?1")
        .and_then(|mut s| s.query_row([group], |r| r.get::<_, Option<i64>>(0)))
        .map(|seq| seq.map_or(0, seq_from))
        .map_err(|e| from_sqlite("reading the skips", e))
}

/// When the earliest ordinary delivery is due, also one that waits for a handler.
pub(crate) fn next_due(conn: &Connection, group: i64) -> Result<Option<i64>> {
    let sql = "SELECT min(due) FROM (
               SELECT * FROM (SELECT due FROM deliveries
                 WHERE group_id = ?1 AND state = 0 AND suspect = 0 ORDER BY due LIMIT 1)
               UNION ALL
               SELECT min(due) FROM deliveries WHERE group_id = ?1 AND state = 3)";
    conn.one("reading the waiting deliveries", sql, [group])
}

/// When the earliest suspect is due. Events in inherited claims are due at once.
pub(crate) fn next_suspect(conn: &Connection, group: i64) -> Result<Option<i64>> {
    let sql = "SELECT iif(EXISTS (SELECT 1 FROM claims WHERE group_id = ?1 AND owner = 0), 0,
               (SELECT min(due) FROM deliveries WHERE group_id = ?1 AND suspect = 1))";
    conn.one("reading the suspects", sql, [group])
}
