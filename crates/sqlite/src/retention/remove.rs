//! Removing ranges of events, with all rows that belong to them.

use everbus_core::{Pruned, Result};

use super::Slice;
use super::needed::{Owed, between, owed};
use super::plan::Piece;
use crate::declare::pass_removed;
use crate::deliveries::leases::Leases;
use crate::orphans::note_orphans;
use crate::rows::to_sql;
use crate::sql::Sql as _;
use crate::tx::Tx;

/// Removes the events of these pieces, except those that a group has come to need since, until the time is over.
/// Returns what was done, and how many pieces were handled.
pub(crate) fn remove_pieces(
    tx: &mut Tx,
    leases: &Leases,
    pieces: &[Piece],
    slice: &Slice,
) -> Result<(Pruned, usize)> {
    let (mut done, mut seen) = (Pruned::default(), 0);
    let owed = owed(tx, leases)?;
    for piece in pieces {
        let needed = owed.needed(&tx.conn, piece.span(), None)?;
        let mut gone = 0;
        for (lo, hi) in &piece.ranges {
            for (lo, hi) in between(&needed, *lo, *hi) {
                gone += remove_range(tx, lo, hi, piece.overflow)?;
            }
        }
        done.removed += gone;
        if !needed.is_empty() {
            done.kept += piece.events.saturating_sub(gone);
        }
        seen += 1;
        if slice.is_over() {
            break;
        }
    }
    Ok((done, seen))
}

/// Removes one event unless a group needs it.
pub(crate) fn remove_unowed(tx: &mut Tx, owed: &Owed, seq: u64) -> Result<bool> {
    let needed = owed.needed(&tx.conn, (seq, seq), None)?;
    Ok(needed.is_empty() && remove_range(tx, seq, seq, true)? > 0)
}

/// Removes all events of a range, and all rows about them.
fn remove_range(tx: &mut Tx, lo: u64, hi: u64, overflow: bool) -> Result<u64> {
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
    for delete in BESIDE {
        tx.conn.run(doing, delete, range)?;
    }
    pass_removed(tx, hi)?;
    tx.log.removed_up_to(hi);
    tx.conn
        .change(doing, "DELETE FROM log WHERE seq BETWEEN ?1 AND ?2", range)
        .map(|removed| removed as u64)
}

/// Removes the rows about the events of a range in other tables.
const BESIDE: [&str; 6] = [
    "DELETE FROM dead_letters WHERE seq BETWEEN ?1 AND ?2",
    "DELETE FROM event_payloads WHERE seq BETWEEN ?1 AND ?2",
    "DELETE FROM expirations WHERE seq BETWEEN ?1 AND ?2",
    "DELETE FROM outcomes WHERE seq BETWEEN ?1 AND ?2",
    "DELETE FROM everbus_failures WHERE seq BETWEEN ?1 AND ?2",
    "DELETE FROM skips WHERE group_id IN (SELECT id FROM groups) AND seq BETWEEN ?1 AND ?2",
];
