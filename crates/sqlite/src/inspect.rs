//! How every group stands.

use std::path::Path;

use everbus_core::{GroupInfo, Pattern, Progress, Result, SubscriptionSpec, Timestamp};
use rusqlite::{Connection, OptionalExtension};

use crate::errors::from_sqlite;
use crate::log::head;
use crate::owner::is_dead;
use crate::readers::Reader;
use crate::rows::{seq_from, to_sql};
use crate::state::patterns_of;

struct Stored {
    id: i64,
    name: String,
    ordered: bool,
    /// Of an ephemeral group: the lock of its owner.
    lock: Option<String>,
    cursor: u64,
    active_at: i64,
}

pub(crate) fn groups(reader: &Reader, file: &Path, now: Timestamp) -> Result<Vec<GroupInfo>> {
    let doing = |e| from_sqlite("reading the groups", e);
    let stored: Vec<Stored> = reader
        .conn
        .prepare_cached(
            "SELECT id, name, ordered, cursor, active_at, iif(owner IS NULL, NULL,
               coalesce((SELECT lock FROM owners WHERE owners.id = groups.owner), ''))
             FROM groups ORDER BY name",
        )
        .and_then(|mut s| {
            s.query_map([], |r| {
                Ok(Stored {
                    id: r.get(0)?,
                    name: r.get(1)?,
                    ordered: r.get(2)?,
                    cursor: seq_from(r.get(3)?),
                    active_at: r.get(4)?,
                    lock: r.get(5)?,
                })
            })?
            .collect()
        })
        .map_err(doing)?;
    let head = head(reader)?;
    // An ephemeral group is gone with its owner, also before it is swept up.
    let gone = |group: &Stored| group.lock.as_ref().is_some_and(|lock| is_dead(file, lock));
    stored
        .into_iter()
        .filter(|group| !gone(group))
        .map(|group| info(&reader.conn, head, &group, now))
        .collect()
}

fn info(conn: &Connection, head: u64, group: &Stored, now: Timestamp) -> Result<GroupInfo> {
    let doing = |e| from_sqlite("reading a group", e);
    let count = |sql: &str| -> Result<u64> {
        conn.prepare_cached(sql)
            .and_then(|mut s| s.query_row([group.id], |r| r.get(0)))
            .map(seq_from)
            .map_err(doing)
    };
    let claims: Vec<(i64, i64, i64, Option<Vec<u8>>)> = conn
        .prepare_cached("SELECT lo, hi, owner, done FROM claims WHERE group_id = ?1 ORDER BY lo")
        .and_then(|mut s| {
            s.query_map([group.id], |r| {
                Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?))
            })?
            .collect()
        })
        .map_err(doing)?;
    let (mut in_flight, mut waiting) = (0, 0);
    let mut oldest = first_after(conn, group)?;
    for (lo, hi, owner, done) in claims {
        let (lo, hi) = (seq_from(lo), seq_from(hi));
        let progress = Progress::from_bitmap(lo, hi, done.as_deref().unwrap_or_default());
        let open = progress.unfinished_count(hi);
        *(if owner == 0 {
            &mut waiting
        } else {
            &mut in_flight
        }) += open;
        if let Some((first, _)) = progress.unfinished(hi).next() {
            oldest = Some(oldest.map_or(first, |known| known.min(first)));
        }
    }
    in_flight += count("SELECT count(*) FROM deliveries WHERE group_id = ?1 AND state = 1")?;
    waiting += count("SELECT count(*) FROM deliveries WHERE group_id = ?1 AND state <> 1")?;
    let row: Option<i64> = conn
        .prepare_cached("SELECT min(seq) FROM deliveries WHERE group_id = ?1")
        .and_then(|mut s| s.query_row([group.id], |r| r.get(0)))
        .map_err(doing)?;
    if let Some(row) = row.map(seq_from) {
        oldest = Some(oldest.map_or(row, |known| known.min(row)));
    }
    let oldest: Option<Timestamp> = match oldest {
        None => None,
        Some(seq) => conn
            .prepare_cached("SELECT received_at FROM log WHERE seq = ?1")
            .and_then(|mut s| s.query_row([to_sql(seq)], |r| r.get(0)).optional())
            .map_err(doing)?
            .map(Timestamp::from_micros),
    };
    let dropped: i64 = conn
        .prepare_cached("SELECT count(*) FROM skips WHERE group_id = ?1 AND seq > ?2")
        .and_then(|mut s| s.query_row((group.id, to_sql(group.cursor)), |r| r.get(0)))
        .map_err(doing)?;
    let dropped = seq_from(dropped);
    Ok(GroupInfo {
        name: group.name.parse()?,
        ordered: group.ordered,
        ephemeral: group.lock.is_some(),
        patterns: patterns_of(conn, group.id)?
            .iter()
            .map(|p| p.as_str().to_owned())
            .collect(),
        subscriptions: subscriptions(conn, group.id)?,
        position: group.cursor,
        behind: head.saturating_sub(group.cursor).saturating_sub(dropped),
        in_flight,
        waiting,
        dead_letters: count(
            "SELECT count(*) FROM dead_letters WHERE group_id = ?1 AND retried_at IS NULL",
        )?,
        oldest,
        behind_for: oldest.map(|at| now.since(at)).unwrap_or_default(),
        active_at: Timestamp::from_micros(group.active_at),
    })
}

/// The subscriptions of a group, by name.
fn subscriptions(conn: &Connection, group: i64) -> Result<Vec<SubscriptionSpec>> {
    let stored: Vec<(String, String)> = conn
        .prepare_cached(
            "SELECT name, event_type FROM subscriptions WHERE group_id = ?1 ORDER BY name",
        )
        .and_then(|mut s| {
            s.query_map([group], |r| Ok((r.get(0)?, r.get(1)?)))?
                .collect()
        })
        .map_err(|e| from_sqlite("reading the subscriptions", e))?;
    let specs = stored.into_iter().map(|(name, pattern)| {
        let pattern = Pattern::new(&pattern)?;
        Ok(SubscriptionSpec { name, pattern })
    });
    specs.collect()
}

/// The first event that a group has yet to reach and that was not dropped.
fn first_after(conn: &Connection, group: &Stored) -> Result<Option<u64>> {
    conn.prepare_cached(
        "SELECT seq FROM log WHERE seq > ?2
           AND NOT EXISTS (SELECT 1 FROM skips WHERE group_id = ?1 AND skips.seq = log.seq)
         ORDER BY seq LIMIT 1",
    )
    .and_then(|mut s| {
        s.query_row((group.id, to_sql(group.cursor)), |r| r.get::<_, i64>(0))
            .optional()
    })
    .map(|seq| seq.map(seq_from))
    .map_err(|e| from_sqlite("reading the log", e))
}
