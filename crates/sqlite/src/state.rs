//! The writer's copy of the state in the file, so that the common case needs no query.
//!
//! The file is the truth. After a failed transaction, and when another process has committed, the state is
//! loaded again.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;

use everbus_core::{Code, Error, GroupName, Lease, Pattern, Progress, Recorded, Result, Timestamp};
use rusqlite::{Connection, OptionalExtension};

use crate::errors::from_sqlite;
use crate::ids::IdMap;
use crate::rows::{LeaseParts as _, MAX_CACHED_TYPES, Seq as _, TypeNames, seq_from, to_sql};

/// States of a row in `deliveries`.
pub(crate) const WAITING: i64 = 0;
pub(crate) const LEASED: i64 = 1;
pub(crate) const BEHIND_KEY: i64 = 2;
pub(crate) const UNHANDLED: i64 = 3;

/// After this many crashes an event is handed out only while nothing else is in flight, so that the next
/// crash proves that this event caused it.
pub(crate) const CRASHES_BEFORE_ISOLATION: i64 = 3;

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

/// A range of the log that this engine handed out.
pub(crate) struct Claim {
    pub(crate) group: i64,
    pub(crate) session: u64,
    pub(crate) lo: u64,
    pub(crate) hi: u64,
    pub(crate) token: i64,
    /// When the lease ends of events that were never extended.
    pub(crate) until: i64,
    /// Events whose lease was extended, each with its end. The file has the latest of all.
    pub(crate) extended: HashMap<u64, i64>,
    /// Events up to here may have begun; the others are reserved.
    pub(crate) started: u64,
    pub(crate) progress: Progress,
    /// Average payload bytes of its events.
    pub(crate) bytes_each: u64,
    /// The ids of its events, by position: an ack may record them in the inbox.
    pub(crate) keys: Vec<(u64, EventKey)>,
}

/// An event by its id and the number of its tenant.
pub(crate) type EventKey = ([u8; 16], i64);

impl Claim {
    /// When the lease of one event ends.
    pub(crate) fn until_of(&self, seq: u64) -> i64 {
        self.extended.get(&seq).copied().unwrap_or(self.until)
    }

    /// The id of an event, if it is known.
    pub(crate) fn key_of(&self, seq: u64) -> Option<EventKey> {
        let found = self.keys.binary_search_by_key(&seq, |(seq, _)| *seq);
        found.ok().map(|index| self.keys[index].1)
    }

    /// Unfinished events whose lease has ended.
    pub(crate) fn ended(&self, now: i64) -> Vec<u64> {
        let open = self
            .progress
            .unfinished(self.hi)
            .flat_map(|(first, last)| first..=last);
        open.filter(|seq| self.until_of(*seq) <= now).collect()
    }

    /// Whether some lease may have ended. Cheap; it may be wrong only by answering yes.
    pub(crate) fn may_have_ended(&self, now: i64) -> bool {
        self.until <= now && !self.ended(now).is_empty()
            || self
                .extended
                .iter()
                .any(|(seq, until)| *until <= now && !self.progress.is_done(*seq))
    }
}

/// A single delivery that this engine handed out.
#[derive(Clone, Copy)]
pub(crate) struct Held {
    pub(crate) session: u64,
    pub(crate) token: i64,
    pub(crate) until: i64,
    pub(crate) suspect: bool,
    pub(crate) bytes: u64,
    /// It failed before, in this run or as a dead letter, so its outcome is kept.
    pub(crate) failed: bool,
}

/// The writer's state in memory.
pub(crate) struct State {
    pub(crate) head: u64,
    pub(crate) last_received: i64,
    /// Whether a warning was logged that this time is far in the future.
    pub(crate) told_ahead: Cell<bool>,
    pub(crate) groups: IdMap<i64, Group>,
    pub(crate) claims: IdMap<i64, Claim>,
    pub(crate) held: HashMap<(i64, u64), Held>,
    pub(crate) owner: i64,
    /// Other owners in the file: their ids and lock names.
    pub(crate) other_owners: Vec<(i64, String)>,
    /// The earliest end of a lease of another owner.
    pub(crate) foreign_until: Option<i64>,
    pub(crate) types: HashMap<Arc<str>, i64>,
    /// The last type that was looked up: events of one type often follow each other.
    last_type: Option<(Arc<str>, i64)>,
    pub(crate) tenants: HashMap<String, i64>,
    pub(crate) type_names: TypeNames,
    /// Events appended in the running transaction.
    pub(crate) appended: Vec<(i64, Arc<Recorded>)>,
}

impl State {
    pub(crate) fn load(conn: &Connection, owner: i64) -> Result<Self> {
        let mut state = Self {
            head: 0,
            last_received: i64::MIN,
            told_ahead: Cell::new(false),
            groups: IdMap::default(),
            claims: IdMap::default(),
            held: HashMap::new(),
            owner,
            other_owners: Vec::new(),
            foreign_until: None,
            types: HashMap::new(),
            last_type: None,
            tenants: HashMap::new(),
            type_names: TypeNames::default(),
            appended: Vec::new(),
        };
        state.refresh(conn)?;
        Ok(state)
    }

    /// The time of receipt of the newest event.
    pub(crate) fn newest_received(&self, conn: &Connection) -> Result<Option<i64>> {
        conn.prepare_cached(
            "SELECT CAST(received_at AS INTEGER) FROM log ORDER BY seq DESC LIMIT 1",
        )
        .and_then(|mut s| s.query_row([], |r| r.get(0)).optional())
        .map_err(|e| from_sqlite("reading the state of the file", e))
    }

    /// Loads what another process may have changed. Leases that this process has lost are removed and
    /// returned.
    pub(crate) fn refresh(&mut self, conn: &Connection) -> Result<Lost> {
        let doing = |e| from_sqlite("reading the state of the file", e);
        let version: i32 = conn
            .query_row("PRAGMA user_version", [], |r| r.get(0))
            .map_err(doing)?;
        if version > crate::schema::VERSION {
            return Err(crate::schema::newer(version));
        }
        let newest: Option<(i64, i64)> = conn
            .prepare_cached(
                "SELECT seq, CAST(received_at AS INTEGER) FROM log ORDER BY seq DESC LIMIT 1",
            )
            .and_then(|mut s| s.query_row([], |r| Ok((r.get(0)?, r.get(1)?))).optional())
            .map_err(doing)?;
        let pruned: Option<i64> = conn
            .prepare_cached("SELECT value FROM meta WHERE key = 'head'")
            .and_then(|mut s| s.query_row([], |r| r.get(0)).optional())
            .map_err(doing)?;
        let (seq, received) = newest.unwrap_or((0, i64::MIN));
        self.head = seq_from(seq.max(pruned.unwrap_or(0)));
        self.last_received = received;
        self.types.clear();
        self.last_type = None;
        self.tenants.clear();
        self.appended.clear();
        self.refresh_groups(conn)?;
        self.other_owners = conn
            .prepare_cached("SELECT id, lock FROM owners WHERE id <> ?1")
            .and_then(|mut s| {
                s.query_map([self.owner], |r| Ok((r.get(0)?, r.get(1)?)))?
                    .collect()
            })
            .map_err(doing)?;
        self.find_foreign_leases(conn)?;
        self.drop_lost(conn)
    }

    /// When the first lease of another owner ends.
    pub(crate) fn find_foreign_leases(&mut self, conn: &Connection) -> Result<()> {
        let doing = |e| from_sqlite("reading the leases of others", e);
        self.foreign_until = conn
            .prepare_cached(
                "SELECT min(until) FROM (
                   SELECT until FROM claims WHERE owner NOT IN (0, ?1)
                   UNION ALL SELECT until FROM deliveries WHERE state = 1 AND owner <> ?1)",
            )
            .and_then(|mut s| s.query_row([self.owner], |r| r.get(0)))
            .map_err(doing)?;
        Ok(())
    }

    /// Loads groups and their patterns again.
    pub(crate) fn refresh_groups(&mut self, conn: &Connection) -> Result<()> {
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
        let mut old = std::mem::replace(&mut self.groups, groups);
        for (id, group) in &mut self.groups {
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

    fn drop_lost(&mut self, conn: &Connection) -> Result<Lost> {
        let doing = |e| from_sqlite("checking the leases", e);
        let mut lost = Lost::default();
        if !self.claims.is_empty() {
            let ours: HashMap<i64, i64> = conn
                .prepare_cached("SELECT id, token FROM claims WHERE owner = ?1")
                .and_then(|mut s| {
                    s.query_map([self.owner], |r| Ok((r.get(0)?, r.get(1)?)))?
                        .collect()
                })
                .map_err(doing)?;
            for (id, claim) in self
                .claims
                .extract_if(|id, claim| ours.get(id) != Some(&claim.token))
            {
                lost.claims.push((id, claim));
            }
        }
        if !self.held.is_empty() {
            let mut check = conn
                .prepare_cached(
                    "SELECT token FROM deliveries WHERE group_id = ?1 AND seq = ?2 AND state = 1",
                )
                .map_err(doing)?;
            let mut gone = Vec::new();
            for (key, held) in &self.held {
                let token: Option<i64> = check
                    .query_row((key.0, to_sql(key.1)), |r| r.get(0))
                    .optional()
                    .map_err(doing)?;
                if token != Some(held.token) {
                    gone.push(*key);
                }
            }
            for key in gone {
                if let Some(held) = self.held.remove(&key) {
                    lost.held.push((key, held));
                }
            }
        }
        Ok(lost)
    }

    /// The number of a type. A new type gets one.
    pub(crate) fn intern_type(&mut self, conn: &Connection, name: &Arc<str>) -> Result<i64> {
        if let Some((last, id)) = &self.last_type
            && (Arc::ptr_eq(last, name) || last == name)
        {
            return Ok(*id);
        }
        let id = match self.types.get(name) {
            Some(id) => *id,
            None => {
                let id = intern(conn, "types", name)?;
                if self.types.len() >= MAX_CACHED_TYPES {
                    self.types.clear();
                }
                self.types.insert(name.clone(), id);
                id
            }
        };
        self.last_type = Some((name.clone(), id));
        Ok(id)
    }

    /// The number of a tenant. A new tenant gets one; 0 for none.
    pub(crate) fn intern_tenant(&mut self, conn: &Connection, name: Option<&str>) -> Result<i64> {
        let Some(name) = name else { return Ok(0) };
        if let Some(id) = self.tenants.get(name) {
            return Ok(*id);
        }
        let id = intern(conn, "tenants", name)?;
        if self.tenants.len() >= MAX_CACHED_TYPES {
            self.tenants.clear();
        }
        self.tenants.insert(name.to_owned(), id);
        Ok(id)
    }

    /// Forgets cached names whose numbers were rolled back.
    pub(crate) fn forget_names(&mut self) {
        self.types.clear();
        self.last_type = None;
        self.tenants.clear();
        self.type_names = TypeNames::default();
    }

    pub(crate) fn group_id(&self, name: &GroupName) -> Option<i64> {
        self.groups
            .iter()
            .find(|(_, group)| group.name == *name)
            .map(|(id, _)| *id)
    }

    pub(crate) fn group_mut(&mut self, id: i64) -> Result<&mut Group> {
        self.groups
            .get_mut(&id)
            .ok_or_else(|| Error::new(Code::GroupNotFound, "the group was removed"))
    }

    /// Bytes that a delivery counts for in its consumer's memory limit.
    pub(crate) fn bytes_of(&self, lease: &Lease) -> u64 {
        let id = (lease.slot() >> 1) as i64;
        if lease.slot() & 1 == 0 {
            self.claims.get(&id).map_or(0, |claim| claim.bytes_each)
        } else {
            self.held
                .get(&(id, lease.seq()))
                .map_or(0, |held| held.bytes)
        }
    }

    /// How many events this engine has in flight.
    pub(crate) fn in_flight(&self) -> u64 {
        let claimed: u64 = self
            .claims
            .values()
            .map(|c| c.progress.unfinished_count(c.hi))
            .sum();
        claimed + self.held.len() as u64
    }
}

/// Leases that this process has lost.
#[derive(Default)]
pub(crate) struct Lost {
    pub(crate) claims: Vec<(i64, Claim)>,
    pub(crate) held: Vec<((i64, u64), Held)>,
}

fn intern(conn: &Connection, table: &str, name: &str) -> Result<i64> {
    let doing = |e| from_sqlite("interning a name", e);
    let found: Option<i64> = conn
        .prepare_cached(&format!("SELECT id FROM {table} WHERE name = ?1"))
        .and_then(|mut s| s.query_row([name], |r| r.get(0)).optional())
        .map_err(doing)?;
    match found {
        Some(id) => Ok(id),
        None => conn
            .prepare_cached(&format!("INSERT INTO {table} (name) VALUES (?1)"))
            .and_then(|mut s| s.insert([name]))
            .map_err(doing),
    }
}

/// The patterns of a group, in the order they were declared.
pub(crate) fn patterns_of(conn: &Connection, group: i64) -> Result<Vec<Pattern>> {
    let doing = |e| from_sqlite("reading the subscriptions", e);
    let texts: Vec<String> = conn
        .prepare_cached(
            "SELECT DISTINCT event_type FROM subscriptions WHERE group_id = ?1 ORDER BY event_type",
        )
        .and_then(|mut s| s.query_map([group], |r| r.get(0))?.collect())
        .map_err(doing)?;
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
    conn.prepare_cached(
        "SELECT min(due) FROM (
           SELECT * FROM (SELECT due FROM deliveries
             WHERE group_id = ?1 AND state = 0 AND suspect = 0 ORDER BY due LIMIT 1)
           UNION ALL
           SELECT min(due) FROM deliveries WHERE group_id = ?1 AND state = 3)",
    )
    .and_then(|mut s| s.query_row([group], |r| r.get(0)))
    .map_err(|e| from_sqlite("reading the waiting deliveries", e))
}

/// When the earliest suspect is due. Events in inherited claims are due at once.
pub(crate) fn next_suspect(conn: &Connection, group: i64) -> Result<Option<i64>> {
    conn.prepare_cached(
        "SELECT iif(EXISTS (SELECT 1 FROM claims WHERE group_id = ?1 AND owner = 0), 0,
           (SELECT min(due) FROM deliveries WHERE group_id = ?1 AND suspect = 1))",
    )
    .and_then(|mut s| s.query_row([group], |r| r.get(0)))
    .map_err(|e| from_sqlite("reading the suspects", e))
}

/// Microseconds as stored.
pub(crate) fn micros(at: Timestamp) -> i64 {
    at.as_micros()
}
