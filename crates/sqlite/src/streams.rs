//! The backlog of a stream, and (part of the writer) dropping waiting events when the stream is full.
//!
//! A reader counts the backlog in short snapshots, so that neither the writer nor the write-ahead log is
//! affected. An event that is dropped before its group has reached it gets its row in `skips` at once. A skip
//! beyond the cursor means that the group will skip the event.

use std::collections::{BTreeSet, HashSet};

use everbus_core::{DROPPED, GroupName, Pattern, Result};
use rusqlite::params;

use crate::broker::SqliteEngine;
use crate::deliveries::claims::stored_claims;
use crate::deliveries::leases::Leases;
use crate::deliveries::suspects::write_inherited;
use crate::errors::from_sqlite;
use crate::groups::patterns_of;
use crate::log::head;
use crate::outcomes::keep_outcome;
use crate::readers::Reader;
use crate::rows::{ADDRESS, LEASED, seq_from, to_sql};
use crate::settle::{remove_row, row, write_skip};
use crate::sql::Sql as _;
use crate::tx::Tx;

/// Rows of the log examined in one snapshot.
const LOOK: u64 = 20_000;
/// Events dropped in one transaction: few enough that a publish hardly waits.
const STEP: usize = 200;
/// How often the backlog is counted again.
const ROUNDS: usize = 8;
/// Events that a group is moved past in the same transaction.
const PASSED: i64 = 500;

/// The backlog of one group.
struct Tally {
    group: i64,
    name: GroupName,
    cursor: u64,
    /// The types of the stream that the group wants.
    wanted: HashSet<i64>,
    /// Whether an event beyond the cursor was dropped.
    has_drops: bool,
    owed: u64,
    /// The waiting events, if they are asked for.
    waiting: Vec<u64>,
}

/// A count under way.
struct Count {
    tallies: Vec<Tally>,
    /// How far the log was searched, and where the search ends.
    searched: u64,
    upto: u64,
    limit: u64,
    list_waiting: bool,
}

impl SqliteEngine {
    /// The backlog of the group that is furthest behind in a stream, counted up to a limit.
    pub(crate) async fn depth_of(&self, stream: Pattern, limit: u64) -> Result<u64> {
        let count = self.count_owed(stream, limit, false).await?;
        let most = count.tallies.iter().map(|tally| tally.owed).max();
        Ok(most.unwrap_or(0).min(limit))
    }

    /// Skips the oldest waiting events in every group until its backlog is at most `keep`.
    pub(crate) async fn drop_from(&self, stream: Pattern, keep: u64) -> Result<u64> {
        let mut dropped = BTreeSet::new();
        for _ in 0..ROUNDS {
            let count = self.count_owed(stream.clone(), u64::MAX, true).await?;
            let mut escaped = false;
            for mut tally in count.tallies {
                let too_many = tally.owed.saturating_sub(keep);
                tally.waiting.sort_unstable();
                tally
                    .waiting
                    .truncate(usize::try_from(too_many).unwrap_or(usize::MAX));
                for step in tally.waiting.chunks(STEP) {
                    let (group, step) = (tally.group, step.to_vec());
                    let wanted = step.len();
                    let done = self
                        .handle
                        .job(move |writer| {
                            drop_waiting(
                                &mut writer.tx,
                                &mut writer.deliveries.leases,
                                group,
                                &step,
                            )
                        })
                        .await?;
                    escaped |= done.len() < wanted;
                    dropped.extend(done);
                }
            }
            // Events handed out since the count are in flight now, so other events must be dropped.
            if !escaped {
                break;
            }
        }
        Ok(dropped.len() as u64)
    }

    async fn count_owed(&self, stream: Pattern, limit: u64, list_waiting: bool) -> Result<Count> {
        let mut count = self
            .handle
            .query(move |reader| Count::begin(reader, &stream, limit, list_waiting))
            .await?;
        while !count.is_done() {
            count = self
                .handle
                .query(move |reader| {
                    count.go_on(reader)?;
                    Ok(count)
                })
                .await?;
        }
        Ok(count)
    }
}

impl Count {
    /// Counts events in rows and claims. Events beyond the cursors are counted later.
    fn begin(reader: &Reader, stream: &Pattern, limit: u64, list_waiting: bool) -> Result<Self> {
        let types = matching_types(reader, stream)?;
        let doing = "reading the groups";
        let sql = "SELECT id, cursor, (SELECT max(seq) FROM skips WHERE group_id = groups.id), name
                   FROM groups WHERE owner IS NULL";
        let groups: Vec<(i64, i64, Option<i64>, String)> = reader.conn.all(doing, sql, [])?;
        let all: HashSet<i64> = types.iter().map(|(id, _)| *id).collect();
        let mut tallies = Vec::with_capacity(groups.len());
        for (group, cursor, last_skip, name) in groups {
            let patterns = patterns_of(&reader.conn, group)?;
            let wanted = types
                .iter()
                .filter(|(_, name)| patterns.iter().any(|p| p.matches(name)));
            let mut tally = Tally {
                group,
                name: name.parse()?,
                cursor: seq_from(cursor),
                wanted: wanted.map(|(id, _)| *id).collect(),
                has_drops: last_skip.is_some_and(|seq| seq > cursor),
                owed: 0,
                waiting: Vec::new(),
            };
            if !all.is_empty() {
                tally.count_rows(reader, &all, list_waiting)?;
                tally.count_claims(reader, &all, list_waiting)?;
            }
            tallies.push(tally);
        }
        let wanting = tallies.iter().filter(|tally| !tally.wanted.is_empty());
        let upto = head(reader)?;
        Ok(Self {
            searched: wanting.map(|tally| tally.cursor).min().unwrap_or(upto),
            upto,
            tallies,
            limit,
            list_waiting,
        })
    }

    fn is_done(&self) -> bool {
        self.searched >= self.upto || self.tallies.iter().any(|tally| tally.owed >= self.limit)
    }

    /// Searches the next part of the log, of bounded size.
    fn go_on(&mut self, reader: &Reader) -> Result<()> {
        let doing = |e| from_sqlite("counting what waits", e);
        let upto = self.upto.min(self.searched.saturating_add(LOOK));
        let mut dropped = Vec::with_capacity(self.tallies.len());
        for tally in &self.tallies {
            dropped.push(if tally.has_drops {
                dropped_between(reader, tally.group, self.searched, upto)?
            } else {
                HashSet::new()
            });
        }
        let mut statement = reader
            .conn
            .prepare_cached(&format!(
                "SELECT seq, CAST(type AS INTEGER), {ADDRESS} FROM log WHERE seq > ?1 AND seq <= ?2 ORDER BY seq"
            ))
            .map_err(doing)?;
        let mut rows = statement
            .query((to_sql(self.searched), to_sql(upto)))
            .map_err(doing)?;
        self.searched = upto;
        while let Some(row) = rows.next().map_err(doing)? {
            let seq = seq_from(row.get(0).map_err(doing)?);
            let type_id: i64 = row.get(1).map_err(doing)?;
            let address: Option<String> = row.get(2).map_err(doing)?;
            for (tally, dropped) in self.tallies.iter_mut().zip(&dropped) {
                let is_for = tally.name.receives(address.as_deref());
                if is_for
                    && seq > tally.cursor
                    && tally.wanted.contains(&type_id)
                    && !dropped.contains(&seq)
                {
                    tally.add(seq, self.list_waiting);
                    if tally.owed >= self.limit {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }
}

impl Tally {
    fn add(&mut self, seq: u64, list: bool) {
        self.owed += 1;
        if list {
            self.waiting.push(seq);
        }
    }

    /// Events in their own rows: waiting, behind their key, without a handler, or leased.
    fn count_rows(&mut self, reader: &Reader, types: &HashSet<i64>, list: bool) -> Result<()> {
        let doing = |e| from_sqlite("counting the deliveries", e);
        let mut statement = reader
            .conn
            .prepare_cached("SELECT seq, type, state FROM deliveries WHERE group_id = ?1")
            .map_err(doing)?;
        let mut rows = statement.query([self.group]).map_err(doing)?;
        while let Some(row) = rows.next().map_err(doing)? {
            if types.contains(&row.get(1).map_err(doing)?) {
                let waits = row.get::<_, i64>(2).map_err(doing)? != LEASED;
                self.add(seq_from(row.get(0).map_err(doing)?), list && waits);
            }
        }
        Ok(())
    }

    /// Open events in claims. A claim of a dead owner has no owner, so its events count as waiting.
    fn count_claims(&mut self, reader: &Reader, types: &HashSet<i64>, list: bool) -> Result<()> {
        let doing = "counting the claims";
        for claim in stored_claims(&reader.conn, doing, "group_id = ?1", [self.group])? {
            let list = list && claim.owner == 0;
            for (first, last) in claim.progress.unfinished(claim.hi) {
                let sql = "SELECT seq, CAST(type AS INTEGER) FROM log WHERE seq BETWEEN ?1 AND ?2";
                let range = (to_sql(first), to_sql(last));
                let open: Vec<(i64, i64)> = reader.conn.all(doing, sql, range)?;
                for (seq, _) in open.iter().filter(|(_, type_id)| types.contains(type_id)) {
                    self.add(seq_from(*seq), list);
                }
            }
        }
        Ok(())
    }
}

/// The types that belong to a stream, with their numbers.
fn matching_types(reader: &Reader, stream: &Pattern) -> Result<Vec<(i64, String)>> {
    let doing = "reading the types";
    if let Some(text) = stream.exact() {
        return reader
            .conn
            .all(doing, "SELECT id, name FROM types WHERE name = ?1", [text]);
    }
    let mut types: Vec<(i64, String)> = reader.conn.all(doing, "SELECT id, name FROM types", [])?;
    types.retain(|(_, name)| stream.matches(name));
    Ok(types)
}

/// The events in a range that a group was told to skip.
fn dropped_between(reader: &Reader, group: i64, after: u64, upto: u64) -> Result<HashSet<u64>> {
    reader.conn.read_all(
        "reading the skips",
        "SELECT seq FROM skips WHERE group_id = ?1 AND seq > ?2 AND seq <= ?3",
        (group, to_sql(after), to_sql(upto)),
        |r| Ok(seq_from(r.get(0)?)),
    )
}

/// Skips waiting events of a group and returns them. Events that no longer wait are not changed.
fn drop_waiting(tx: &mut Tx, leases: &mut Leases, group: i64, seqs: &[u64]) -> Result<Vec<u64>> {
    let Some(cursor) = tx.groups.get(&group).map(|g| g.cursor) else {
        return Ok(Vec::new());
    };
    let mut dropped = Vec::with_capacity(seqs.len());
    let mut rest = Vec::new();
    for seq in seqs.iter().copied() {
        // An event sent to this group alone has a row before the cursor reaches it.
        match row_state(tx, group, seq)? {
            Some(LEASED) => rest.push(seq),
            Some(_) => {
                write_skip(tx, group, seq, DROPPED)?;
                if !row(tx, group, seq)?.1.is_empty() {
                    keep_outcome(tx, group, seq, None)?;
                }
                remove_row(tx, group, seq)?;
                dropped.push(seq);
            }
            None if seq > cursor => {
                write_skip(tx, group, seq, DROPPED)?;
                dropped.push(seq);
            }
            None => rest.push(seq),
        }
    }
    dropped.extend(drop_inherited(tx, group, &rest)?);
    for seq in &dropped {
        tx.watches.touch(*seq);
        leases.end_isolation((group, *seq));
    }
    if let (Some(last), Ok(group)) = (dropped.iter().max(), tx.groups.known(group)) {
        group.dropped_to = group.dropped_to.max(*last);
    }
    pass_dropped(tx, group)?;
    Ok(dropped)
}

fn row_state(tx: &Tx, group: i64, seq: u64) -> Result<Option<i64>> {
    let sql = "SELECT state FROM deliveries WHERE group_id = ?1 AND seq = ?2";
    tx.conn
        .first("dropping from a stream", sql, (group, to_sql(seq)))
}

/// Records why a group is done with an event without a row. The group will skip the event if it has not
/// reached it yet.
pub(crate) fn skip_ahead(tx: &mut Tx, group: i64, seq: u64, reason: &str) -> Result<()> {
    write_skip(tx, group, seq, reason)?;
    let group = tx.groups.known(group)?;
    group.dropped_to = group.dropped_to.max(seq);
    Ok(())
}

/// Skips open events in the claims of dead owners.
fn drop_inherited(tx: &mut Tx, group: i64, seqs: &[u64]) -> Result<Vec<u64>> {
    let mut dropped = Vec::new();
    if seqs.is_empty() {
        return Ok(dropped);
    }
    let (doing, which) = ("dropping from a stream", "group_id = ?1 AND owner = 0");
    for mut claim in stored_claims(&tx.conn, doing, which, [group])? {
        let before = dropped.len();
        for seq in seqs {
            if claim.is_open(*seq) && claim.progress.complete(*seq) {
                write_skip(tx, group, *seq, DROPPED)?;
                dropped.push(*seq);
            }
        }
        if dropped.len() > before {
            write_inherited(tx, &claim)?;
        }
    }
    Ok(dropped)
}

/// Moves a group past events that it need not read, for a bounded number of events. In a group without a consumer
/// nothing else moves the cursor.
fn pass_dropped(tx: &mut Tx, group_id: i64) -> Result<()> {
    let cursor = tx.groups.known(group_id)?.cursor;
    let next: Vec<(i64, i64, Option<String>)> = tx.conn.all("passing what was dropped", &format!(
            "SELECT seq, CAST(type AS INTEGER), {ADDRESS} FROM log WHERE seq > ?1 ORDER BY seq LIMIT ?2"
        ), (to_sql(cursor), PASSED))?;
    for (seq, type_id, address) in next {
        let Some(name) = tx.log.type_names.find(&tx.conn, type_id)? else {
            break;
        };
        let seq = seq_from(seq);
        let group = tx.groups.known(group_id)?;
        let is_for = group.name.receives(address.as_deref());
        if is_for && group.wants(type_id, &name) && !was_dropped(tx, group_id, seq)? {
            break;
        }
        tx.groups.known(group_id)?.cursor = seq;
    }
    Ok(())
}

/// Whether an event beyond the cursor of a group was dropped.
pub(crate) fn was_dropped(tx: &Tx, group: i64, seq: u64) -> Result<bool> {
    let known = tx.groups.get(&group);
    if known.is_none_or(|group| seq > group.dropped_to) {
        return Ok(false);
    }
    let doing = "reading the skips";
    let sql = "SELECT 1 FROM skips WHERE group_id = ?1 AND seq = ?2";
    tx.conn
        .read_first(doing, sql, params![group, to_sql(seq)], |_| Ok(()))
        .map(|found| found.is_some())
}
