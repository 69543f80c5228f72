//! Times of receipt that lie far in the future, because the clock of an earlier publisher was ahead.
//!
//! Times of receipt never decrease along the log, so every later event gets the same future time until the clocks have
//! caught up. Until then, everything that depends on times is wrong. The engine cannot know which clock is right, and a
//! file that was idle for long looks the same as a clock that jumped. So the engine only warns. It sets the times back
//! when an operator says that the clock is right.

use everbus_core::{CheckReport, Result, Timestamp};
use rusqlite::{Connection, OptionalExtension as _};

use crate::append::position_before;
use crate::errors::from_sqlite;
use crate::log_end::LogEnd;
use crate::rows::{RECORD, ends, micros, read_stored, restamp, to_sql};
use crate::tx::Tx;

/// Allowed difference between the clocks of machines, in microseconds: a day.
const TOLERATED: i64 = 24 * 3600 * 1_000_000;
/// Rows changed in one transaction.
const STEP: i64 = 500;

/// Warns once that new events get a time in the future.
pub(crate) fn warn_once(state: &LogEnd, now: i64) {
    if state.last_received.saturating_sub(TOLERATED) > now && !state.told_ahead.replace(true) {
        tracing::warn!(
            target: "everbus::sqlite",
            newest = %Timestamp::from_micros(state.last_received),
            now = %Timestamp::from_micros(now),
            "the newest event has a time of receipt in the future, and new events get the same time; see `everbus check`"
        );
    }
}

/// The last position whose time is not in the future.
fn believable(conn: &Connection, now: Timestamp) -> Result<u64> {
    position_before(
        conn,
        Timestamp::from_micros(micros(now).saturating_add(TOLERATED)),
    )
}

/// Reports events with a time in the future.
pub(crate) fn check(conn: &Connection, now: Timestamp, report: &mut CheckReport) -> Result<()> {
    let upto = believable(conn, now)?;
    let detail = match ends(conn)? {
        Some((_, newest)) if newest > upto => format!(
            "events {} to {newest} were received more than a day after now, {now}: a clock was ahead, or this one \
             is behind; if this one is right, `everbus retention run --trust-clock` brings their times back",
            upto + 1
        ),
        _ => "ok".into(),
    };
    report.add("no event is from the future", detail == "ok", detail);
    Ok(())
}

/// Sets events with a time in the future to now, oldest first, so that times never decrease along the log, even between
/// two steps. Returns whether there may be more.
pub(crate) fn bring_back_times(tx: &mut Tx) -> Result<bool> {
    let doing = |e| from_sqlite("bringing times back", e);
    let now = tx.clock.now();
    let upto = believable(&tx.conn, now)?;
    let before: Option<i64> = tx
        .conn
        .query_row(
            "SELECT CAST(received_at AS INTEGER) FROM log WHERE seq = ?1",
            [to_sql(upto)],
            |r| r.get(0),
        )
        .optional()
        .map_err(doing)?;
    let at = micros(now).max(before.unwrap_or(i64::MIN));
    let mut changes = Vec::new();
    {
        let sql = format!("SELECT {RECORD} FROM log WHERE log.seq > ?1 ORDER BY log.seq LIMIT ?2");
        let mut statement = tx.conn.prepare(&sql).map_err(doing)?;
        let mut rows = statement.query((to_sql(upto), STEP)).map_err(doing)?;
        while let Some(row) = rows.next().map_err(doing)? {
            let stored = read_stored(&tx.conn, row, &mut tx.log.type_names)?;
            let seq = row.get::<_, i64>(0).map_err(doing)?;
            // A damaged event stays damaged: it gets no new checksum.
            let checksum: Option<i32> = match &stored.damage {
                None => restamp(row, stored.record.event.event_type(), at).map_err(doing)?,
                Some(_) => row.get(9).unwrap_or_default(),
            };
            changes.push((seq, checksum));
        }
    }
    let mut update = tx
        .conn
        .prepare_cached("UPDATE log SET received_at = ?2, checksum = ?3 WHERE seq = ?1")
        .map_err(doing)?;
    for (seq, checksum) in &changes {
        update.execute((seq, at, checksum)).map_err(doing)?;
    }
    drop(update);
    if let Some(newest) = LogEnd::newest_received(&tx.conn)? {
        tx.log.last_received = newest;
    }
    tx.log.told_ahead.set(false);
    Ok(changes.len() as i64 == STEP)
}
