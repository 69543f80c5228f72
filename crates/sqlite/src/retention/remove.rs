//! Removing ranges of events, with all rows that belong to them.

use everbus_core::{Pruned, Result};

use super::Slice;
use super::needed::{Owed, owed};
use super::plan::Row;
use crate::declare::pass_removed;
use crate::deliveries::leases::Leases;
use crate::orphans::note_orphans;
use crate::rows::to_sql;
use crate::sql::Sql as _;
use crate::tx::Tx;

/// Events and bytes after which a piece of work ends, so that the time is checked.
const EVENTS: usize = 64;
const BYTES: u64 = 128 * 1024;

/// Removes these events until the time of the step ends, except events that a group needs now. Returns what was done,
/// and how many rows were handled.
pub(crate) fn remove_rows(
    tx: &mut Tx,
    leases: &Leases,
    rows: &[Row],
    slice: &Slice,
) -> Result<(Pruned, usize)> {
    let (mut done, mut seen) = (Pruned::default(), 0);
    let owed = owed(tx, leases)?;
    while let Some(piece) = piece(&rows[seen..]) {
        let span = (piece[0].seq, piece[piece.len() - 1].seq);
        let needed = owed.needed(&tx.conn, span, None)?;
        let goes = |row: &Row| row.goes && !needed.contains(&row.seq);
        for run in piece.chunk_by(|a, b| goes(a) == goes(b)) {
            let (first, last) = (run[0], run[run.len() - 1]);
            if goes(&first) {
                let overflow = run.iter().any(|row| row.overflow);
                done.removed += remove_range(tx, first.seq, last.seq, overflow)?;
            } else {
                done.kept += run.iter().filter(|row| row.goes).count() as u64;
            }
        }
        seen += piece.len();
        if slice.is_over() {
            break;
        }
    }
    Ok((done, seen))
}

/// The first events: at least one, and not more than the limits of one piece.
fn piece(rows: &[Row]) -> Option<&[Row]> {
    let mut bytes = rows.first()?.bytes;
    let fits = |row: &&Row| {
        bytes = bytes.saturating_add(row.bytes);
        bytes <= BYTES
    };
    let count = 1 + rows[1..].iter().take(EVENTS - 1).take_while(fits).count();
    Some(&rows[..count])
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
