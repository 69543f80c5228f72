//! Removing ranges of events, with all rows that belong to them.

use everbus_core::{Pruned, Result};

use super::Slice;
use super::needed::{Owed, owed};
use super::plan::Piece;
use crate::declare::pass_removed;
use crate::deliveries::leases::Leases;
use crate::orphans::note_orphans;
use crate::rows::to_sql;
use crate::sql::Sql as _;
use crate::tx::Tx;

/// The largest range that one transaction looks at, from the first event that it removes on. Scattered events
/// take several transactions.
const SPAN: u64 = 2048;
/// A transaction removes about this many events before the time counts: what it looks up first costs the same for
/// one event as for all of its range.
const LEAST: u64 = 64;

/// As many of these pieces as one transaction may take, by their positions: at least one.
pub(crate) fn near(pieces: &[Piece]) -> &[Piece] {
    let Some(first) = pieces.first() else {
        return pieces;
    };
    let end = first.lo.saturating_add(SPAN);
    let count = pieces.partition_point(|piece| piece.hi < end);
    &pieces[..count.max(1)]
}

/// Rows about the events of a range in other tables.
struct Beside {
    /// Statements that remove them, for tables that have some.
    tables: Vec<String>,
    /// Groups that skipped some of them.
    skipped: Vec<i64>,
}

/// Removes the planned pieces, except events that a group has come to need since, until the time is over. Returns
/// what was done, and how many pieces were handled.
pub(crate) fn remove_pieces(
    tx: &mut Tx,
    leases: &Leases,
    pieces: &[Piece],
    slice: &Slice,
) -> Result<(Pruned, usize)> {
    let (mut done, mut seen) = (Pruned::default(), 0);
    let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else {
        return Ok((done, seen));
    };
    let whole = (first.lo, last.hi);
    let needed = owed(tx, leases)?.needed(&tx.conn, whole, None)?;
    let beside = beside(tx, whole)?;
    for piece in pieces {
        if done.removed + done.kept >= LEAST && slice.is_over() {
            break;
        }
        let mut gone = 0;
        for (lo, hi) in needed.outside(piece.lo, piece.hi) {
            gone += remove_stretch(tx, lo, hi, &beside, piece.overflow)?;
        }
        done.removed += gone;
        if !needed.is_empty() {
            done.kept += piece.events.saturating_sub(gone);
        }
        seen += 1;
    }
    Ok((done, seen))
}

/// Removes one event unless a group needs it.
pub(crate) fn remove_unowed(tx: &mut Tx, owed: &Owed, seq: u64) -> Result<bool> {
    let needed = owed.needed(&tx.conn, (seq, seq), None)?;
    if !needed.is_empty() {
        return Ok(false);
    }
    let beside = beside(tx, (seq, seq))?;
    Ok(remove_stretch(tx, seq, seq, &beside, true)? > 0)
}

fn beside(tx: &Tx, (lo, hi): (u64, u64)) -> Result<Beside> {
    let doing = "looking what belongs to events";
    let range = (to_sql(lo), to_sql(hi));
    let mut tables = Vec::new();
    for table in BESIDE {
        let exists = format!("SELECT EXISTS (SELECT 1 FROM {table} WHERE seq BETWEEN ?1 AND ?2)");
        if tx.conn.one(doing, &exists, range)? {
            tables.push(format!("DELETE FROM {table} WHERE seq BETWEEN ?1 AND ?2"));
        }
    }
    let sql = "SELECT EXISTS (SELECT 1 FROM skips WHERE group_id = ?1 AND seq BETWEEN ?2 AND ?3)";
    let mut skipped = Vec::new();
    for group in tx.groups.keys() {
        if tx.conn.one(doing, sql, (group, range.0, range.1))? {
            skipped.push(*group);
        }
    }
    Ok(Beside { tables, skipped })
}

/// Removes all events of a range, and all rows about them.
fn remove_stretch(tx: &mut Tx, lo: u64, hi: u64, beside: &Beside, overflow: bool) -> Result<u64> {
    let doing = "removing events";
    let range = (to_sql(lo), to_sql(hi));
    if (lo..=hi).contains(&tx.log.head) {
        // The newest position must never be used again.
        tx.conn.run(
            doing,
            "INSERT OR REPLACE INTO meta (key, value) VALUES ('head', ?1)",
            [to_sql(tx.log.head)],
        )?;
    }
    if overflow {
        // The objects are deleted after this removal is durable, never before.
        note_orphans(tx, lo, hi)?;
    }
    for delete in &beside.tables {
        tx.conn.run(doing, delete, range)?;
    }
    for group in &beside.skipped {
        let sql = "DELETE FROM skips WHERE group_id = ?1 AND seq BETWEEN ?2 AND ?3";
        tx.conn.run(doing, sql, (group, range.0, range.1))?;
    }
    pass_removed(tx, hi)?;
    tx.log.removed_up_to(hi);
    tx.conn
        .change(doing, "DELETE FROM log WHERE seq BETWEEN ?1 AND ?2", range)
        .map(|removed| removed as u64)
}

/// Tables with rows about an event.
const BESIDE: [&str; 5] = [
    "dead_letters",
    "event_payloads",
    "expirations",
    "outcomes",
    "everbus_failures",
];
