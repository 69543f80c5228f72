//! Removing rows with their own age limit: dead letters, payload stages, sent rows of the outbox. And returning free
//! space.
//!
//! Each step removes a few rows on the writer. Rows that may be large are removed one by one until the time of the step
//! ends.

use everbus_core::{Pruned, Result, Timestamp};
use rusqlite::params;

use super::Slice;
use crate::errors::from_sqlite;
use crate::rows::seq_from;
use crate::sql::Sql as _;
use crate::streams::skip_ahead;
use crate::tx::Tx;

/// Rows that one step reads.
const STEP: usize = 64;
/// Rows of the outbox that one step removes.
const OUTBOX_ROWS: usize = 16;

/// Where the next step continues: the time of death, position and group of a dead letter.
pub(crate) type DeadKey = (i64, i64, i64);

/// Dead letters that are not being retried.
pub(super) const AT_REST: &str = "NOT EXISTS (SELECT 1 FROM deliveries w
                         WHERE w.group_id = d.group_id AND w.seq = d.seq)";

/// Removes some dead letters from before a time that are not being retried. For an open one, the group's skip
/// is recorded with this reason.
pub(crate) fn forget_dead(
    tx: &mut Tx,
    before: i64,
    from: DeadKey,
    reason: &str,
    slice: &Slice,
) -> Result<(Pruned, Option<DeadKey>)> {
    let doing = "removing old dead letters";
    let sql = format!(
        "SELECT d.died_at, d.seq, d.group_id, d.retried_at IS NULL, {AT_REST}
         FROM dead_letters d INDEXED BY dead_died
         WHERE d.died_at < ?1 AND (d.died_at, d.seq, d.group_id) > (?2, ?3, ?4)
         ORDER BY d.died_at, d.seq, d.group_id LIMIT {STEP}"
    );
    let values = params![before, from.0, from.1, from.2];
    let old: Vec<(i64, i64, i64, bool, bool)> = tx.conn.all(doing, &sql, values)?;
    let (mut gone, mut next) = (Pruned::default(), None);
    for (died_at, seq, group, open, at_rest) in old {
        next = Some((died_at, seq, group));
        if at_rest {
            let sql = "DELETE FROM dead_letters WHERE seq = ?1 AND group_id = ?2";
            tx.conn.run(doing, sql, (seq, group))?;
            gone.dead_letters += 1;
        }
        if at_rest && open {
            // The rows of a removed group are removed with the group.
            if tx.groups.contains_key(&group) {
                skip_ahead(tx, group, seq_from(seq), reason)?;
            }
            tx.watches.touch(seq_from(seq));
        }
        if slice.is_over() {
            break;
        }
    }
    Ok((gone, next))
}

/// Removes some payload stages from before a time. Those of open dead letters stay.
pub(crate) fn forget_stages(
    tx: &Tx,
    before: i64,
    from: (i64, i64),
    slice: &Slice,
) -> Result<(Pruned, Option<(i64, i64)>)> {
    let doing = "removing old payload stages";
    let sql = format!(
        "SELECT p.timestamp, p.id, EXISTS (SELECT 1 FROM dead_letters d
           WHERE d.seq = p.seq AND d.retried_at IS NULL)
         FROM event_payloads p INDEXED BY event_payloads_timestamp
         WHERE p.timestamp < ?1 AND (p.timestamp, p.id) > (?2, ?3)
         ORDER BY p.timestamp, p.id LIMIT {STEP}"
    );
    let old: Vec<(i64, i64, bool)> = tx.conn.all(doing, &sql, (before, from.0, from.1))?;
    let (mut gone, mut next) = (Pruned::default(), None);
    for (timestamp, id, spared) in old {
        next = Some((timestamp, id));
        if !spared {
            let sql = "DELETE FROM event_payloads WHERE id = ?1";
            tx.conn.run(doing, sql, [id])?;
            gone.payloads += 1;
        }
        if slice.is_over() {
            break;
        }
    }
    Ok((gone, next))
}

/// Removes some rows of the outbox that were sent before a time.
pub(crate) fn forget_sent(tx: &Tx, before: Timestamp) -> Result<(Pruned, Option<()>)> {
    let removed = crate::outbox::forget_sent(&tx.conn, before, OUTBOX_ROWS)?;
    let gone = Pruned {
        outbox: removed as u64,
        ..Pruned::default()
    };
    Ok((gone, (removed == OUTBOX_ROWS).then_some(())))
}

/// Removes some dead letters of the outbox that died before a time, with their rows.
pub(crate) fn forget_outbox_dead(tx: &Tx, before: Timestamp) -> Result<(Pruned, Option<()>)> {
    let removed = crate::outbox::forget_dead(&tx.conn, before, OUTBOX_ROWS)?;
    let gone = Pruned {
        dead_letters: removed.letters,
        outbox: removed.rows,
        ..Pruned::default()
    };
    Ok((gone, (removed.letters == OUTBOX_ROWS as u64).then_some(())))
}

/// Records the time of this removal. The write is synced, and all lazy commits before it become durable
/// with it.
pub(crate) fn note_pruned(tx: &Tx, now: Timestamp) -> Result<()> {
    let sql = "INSERT OR REPLACE INTO meta (key, value) VALUES ('pruned', ?1)";
    tx.conn
        .run("noting that things were removed", sql, [now.to_string()])
}

/// The size of a page, and how many are free.
pub(crate) fn free(tx: &Tx) -> Result<(u64, u64)> {
    Ok((pragma(tx, "page_size")?, pragma(tx, "freelist_count")?))
}

/// Returns some free pages to the file system, and their number.
pub(crate) fn shrink(tx: &Tx, pages: u64, slice: &Slice) -> Result<u64> {
    let doing = |e| from_sqlite("giving space back", e);
    let before = pragma(tx, "page_count")?;
    // The inserted value is the engine's number; a pragma takes no parameters.
    let vacuum = format!("PRAGMA incremental_vacuum({pages})");
    let mut statement = tx.conn.prepare(&vacuum).map_err(doing)?;
    // Each step of the statement frees one page.
    let mut rows = statement.query([]).map_err(doing)?;
    while rows.next().map_err(doing)?.is_some() && !slice.is_over() {}
    drop(rows);
    Ok(before.saturating_sub(pragma(tx, "page_count")?))
}

fn pragma(tx: &Tx, name: &str) -> Result<u64> {
    tx.conn
        .one("measuring the file", &format!("PRAGMA {name}"), [])
        .map(seq_from)
}
