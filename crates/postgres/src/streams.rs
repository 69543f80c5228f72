//! The backlog of a stream, and dropping waiting events when the stream is full.
//!
//! An event that is dropped before its group has reached it gets its row in `skips` at once. A skip beyond
//! the cursor means that the group will skip the event.

use std::collections::BTreeSet;

use everbus_core::{BoxFuture, DROPPED, Depth, Pattern, Result};

use crate::Postgres;
use crate::bury::write_skips;
use crate::groups::{self, Group, caught_up};
use crate::outcomes;
use crate::pool::{Conn, Params, Sql as _, Tx, transaction};
use crate::rows::{LEASED, get, get_seq, read_failures, seq_from, to_sql};

/// Events dropped in one transaction, which holds the lock of the group.
const STEP: usize = 500;
/// How often the backlog is counted again at most.
const ROUNDS: usize = 8;

/// The unfinished events `l` of a group and a stream: in rows, in claims, and beyond the cursor. `$1` is the
/// group, `$2` the types of the stream, `$3` those that the group wants, `$4` its cursor, `$5` its name, `$6`
/// whether it gets every address.
const OWED: &str = "
    SELECT d.seq, d.state <> 1 AS waits FROM everbus.deliveries d
      WHERE d.group_id = $1 AND d.type = ANY ($2)
    UNION ALL
    SELECT l.seq, false FROM everbus.claims c
      CROSS JOIN LATERAL (SELECT l.seq FROM everbus.log l
        WHERE l.seq BETWEEN c.lo AND c.hi AND NOT c.done @> l.seq AND l.type = ANY ($2) ORDER BY l.seq) l
      WHERE c.group_id = $1
    UNION ALL
    SELECT l.seq, true FROM everbus.log l
      WHERE l.seq > $4 AND l.type = ANY ($3) AND CASE WHEN l.address IS NULL THEN true ELSE l.address = $5 OR $6 END
        AND NOT EXISTS (SELECT 1 FROM everbus.skips s WHERE s.group_id = $1 AND s.seq = l.seq)
        AND NOT EXISTS (SELECT 1 FROM everbus.deliveries d WHERE d.group_id = $1 AND d.seq = l.seq)";

impl Postgres {
    /// The types of a stream, and those of them that a group wants.
    fn types_of(&self, stream: &Pattern, group: &Group) -> (Vec<i32>, Vec<i32>) {
        let all = self.types.all().into_iter();
        let all: Vec<_> = all.filter(|(_, name)| stream.matches(name)).collect();
        let wanted = all
            .iter()
            .filter(|(_, name)| group.wants(name))
            .map(|(id, _)| *id);
        let wanted = wanted.collect();
        (all.into_iter().map(|(id, _)| id).collect(), wanted)
    }

    async fn owed(&self, conn: &Conn, stream: &Pattern, group: &Group, limit: u64) -> Result<u64> {
        let (types, wanted) = self.types_of(stream, group);
        let sql = format!("SELECT count(*) FROM ({OWED} LIMIT $7) owed");
        let (cursor, limit) = (to_sql(group.cursor), to_sql(limit));
        let name = group.name.as_str();
        let values: Params<'_> = &[
            &group.id,
            &types,
            &wanted,
            &cursor,
            &name,
            &group.is_archive(),
            &limit,
        ];
        let row = conn.one("counting what waits", &sql, values).await?;
        Ok(seq_from(get(&row, 0)?))
    }

    /// The backlog of the group that is furthest behind in a stream, counted up to a limit. Ephemeral groups do not
    /// count.
    async fn depth_of(&self, stream: &Pattern, limit: u64) -> Result<u64> {
        self.end_leases().await?;
        let conn = self.conn().await?;
        self.types.learn_all(&*conn).await?;
        let mut most = 0;
        for group in groups::all(&*conn).await? {
            if group.owner.is_none() && most < limit {
                most = most.max(self.owed(&conn, stream, &group, limit).await?);
            }
        }
        Ok(most.min(limit))
    }

    /// Skips the oldest waiting events in every group until its backlog is at most `keep`.
    async fn drop_from(&self, stream: &Pattern, keep: u64) -> Result<u64> {
        self.end_leases().await?;
        let groups = {
            let conn = self.conn().await?;
            self.types.learn_all(&*conn).await?;
            groups::all(&*conn).await?
        };
        let mut dropped = BTreeSet::new();
        for group in groups {
            for _ in 0..ROUNDS {
                let waiting = self.too_many(stream, group.id, keep).await?;
                let (mut escaped, wanted) = (false, waiting.len());
                let mut done = 0;
                for step in waiting.chunks(STEP) {
                    let some = transaction!(self.pool, "dropping from a stream", |tx| {
                        drop_waiting(self, tx, group.id, step).await
                    })?;
                    done += some.len();
                    dropped.extend(some);
                }
                escaped |= done < wanted;
                // Events handed out since the count are in flight now, so other events must be dropped.
                if !escaped {
                    break;
                }
            }
        }
        self.bell.ring();
        Ok(dropped.len() as u64)
    }

    /// The oldest waiting events of a group that are more than it may keep.
    async fn too_many(&self, stream: &Pattern, group: i64, keep: u64) -> Result<Vec<u64>> {
        let conn = self.conn().await?;
        self.groups.forget(group);
        let Ok(group) = self.groups.get(&*conn, group).await else {
            return Ok(Vec::new());
        };
        let owed = self.owed(&conn, stream, &group, u64::MAX >> 1).await?;
        if owed <= keep {
            return Ok(Vec::new());
        }
        let (types, wanted) = self.types_of(stream, &group);
        let sql = format!("SELECT seq FROM ({OWED}) owed WHERE waits ORDER BY seq LIMIT $7");
        let (cursor, limit) = (to_sql(group.cursor), to_sql(owed - keep));
        let name = group.name.as_str();
        let values: Params<'_> = &[
            &group.id,
            &types,
            &wanted,
            &cursor,
            &name,
            &group.is_archive(),
            &limit,
        ];
        let rows = conn.query("counting what waits", &sql, values).await?;
        rows.iter().map(|row| get_seq(row, 0)).collect()
    }
}

/// Skips waiting events of a group and returns them. Events that no longer wait are left alone.
async fn drop_waiting(
    engine: &Postgres,
    tx: &Tx<'_>,
    group: i64,
    seqs: &[u64],
) -> Result<Vec<u64>> {
    let doing = "dropping from a stream";
    let Some(locked) = groups::lock(tx, group).await? else {
        return Ok(Vec::new());
    };
    let mut group = locked.group;
    let now = engine.now();
    let asked: Vec<i64> = seqs.iter().map(|seq| to_sql(*seq)).collect();
    let sql = "SELECT seq, state, attempt, failures FROM everbus.deliveries
               WHERE group_id = $1 AND seq = ANY ($2) FOR UPDATE";
    let mut dropped = Vec::with_capacity(seqs.len());
    let (mut rows, mut leased) = (Vec::new(), BTreeSet::new());
    for row in tx.query(doing, sql, &[&group.id, &asked]).await? {
        let seq = get_seq(&row, 0)?;
        if get::<i16>(&row, 1)? == LEASED {
            leased.insert(seq);
            continue;
        }
        let failures = read_failures(get(&row, 3)?).unwrap_or_default();
        if !failures.is_empty() {
            let attempts = u32::try_from(get::<i32>(&row, 2)?).unwrap_or(0);
            outcomes::keep(tx, (group.id, seq), (attempts, failures), None, now).await?;
        }
        rows.push(to_sql(seq));
        dropped.push(seq);
    }
    let sql = "DELETE FROM everbus.deliveries WHERE group_id = $1 AND seq = ANY ($2)";
    tx.execute(doing, sql, &[&group.id, &rows]).await?;
    let beyond = seqs
        .iter()
        .copied()
        .filter(|seq| *seq > group.cursor && !leased.contains(seq) && !dropped.contains(seq));
    let beyond: Vec<u64> = beyond.collect();
    dropped.extend(beyond);
    let skips: Vec<(i64, u64, String)> = dropped
        .iter()
        .map(|seq| (group.id, *seq, DROPPED.to_owned()))
        .collect();
    write_skips(tx, &skips, now.as_micros()).await?;
    for seq in &dropped {
        if engine.seats.isolating() == Some((group.id, *seq)) {
            engine.seats.isolate(None);
        }
    }
    // In a group without a consumer nothing else moves the cursor.
    let last = dropped.iter().copied().max().unwrap_or(0);
    group.dropped_to = group.dropped_to.max(last);
    let decided = engine.horizon.ask(tx).await?.decided;
    let cursor = caught_up(tx, &engine.types, &group, decided).await?;
    let sql =
        "UPDATE everbus.groups SET dropped_to = $2, cursor = greatest(cursor, $3) WHERE id = $1";
    tx.execute(
        doing,
        sql,
        &[&group.id, &to_sql(group.dropped_to), &to_sql(cursor)],
    )
    .await?;
    Ok(dropped)
}

impl Depth for Postgres {
    fn depth(&self, stream: Pattern, limit: u64) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move { self.depth_of(&stream, limit).await })
    }

    fn drop_oldest(&self, stream: Pattern, keep: u64) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move { self.drop_from(&stream, keep).await })
    }
}
