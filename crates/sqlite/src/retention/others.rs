//! Removing rows with their own age limit: dead letters, payload stages, sent rows of the outbox. Also the
//! records of duties.
//!
//! A reader selects rows in short snapshots. The writer removes those that have not changed since.

use std::time::Duration;

use everbus_core::{Result, Timestamp};
use rusqlite::params;

use super::pace::Slice;
use crate::errors::from_sqlite;
use crate::outbox::DeadGone;
use crate::readers::Reader;
use crate::rows::{micros, seq_from, to_sql};
use crate::sql::Sql as _;
use crate::streams::skip_ahead;
use crate::tx::Tx;

/// Rows selected in one snapshot.
pub(crate) const CHOOSE: usize = 2000;
const PAGE: u64 = 4096;
/// Rows of the outbox removed between two checks of the time.
pub(crate) const FEW_ROWS: usize = 16;

/// An old dead letter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OldDead {
    pub(crate) seq: u64,
    group: i64,
    pub(crate) died_at: i64,
    /// It was never retried: its event was never handled.
    pub(crate) open: bool,
    pub(crate) weight: u64,
}

/// Dead letters from before a time that are not being retried, ordered by the time of death.
pub(crate) fn old_dead(
    reader: &Reader,
    before: i64,
    after: (i64, u64, i64),
) -> Result<Vec<OldDead>> {
    let sql = "SELECT d.seq, d.group_id, d.died_at, d.retried_at IS NULL, length(d.failures)
               FROM dead_letters d INDEXED BY dead_died
               WHERE d.died_at < ?1 AND (d.died_at, d.seq, d.group_id) > (?2, ?3, ?4)
                 AND NOT EXISTS (SELECT 1 FROM deliveries w
                   WHERE w.group_id = d.group_id AND w.seq = d.seq)
               ORDER BY d.died_at, d.seq, d.group_id LIMIT ?5";
    let (died_at, seq, group) = after;
    let values = params![before, died_at, to_sql(seq), group, CHOOSE as i64];
    let doing = "looking for old dead letters";
    reader.conn.read_all(doing, sql, values, |r| {
        Ok(OldDead {
            seq: seq_from(r.get(0)?),
            group: r.get(1)?,
            died_at: r.get(2)?,
            open: r.get(3)?,
            weight: 4 + seq_from(r.get(4)?) / PAGE,
        })
    })
}

impl OldDead {
    pub(crate) fn key(&self) -> (i64, u64, i64) {
        (self.died_at, self.seq, self.group)
    }
}

/// An old payload stage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OldStage {
    id: i64,
    timestamp: i64,
    pub(crate) seq: u64,
    pub(crate) weight: u64,
    /// The event is an open dead letter, so the stage stays as long as the dead letter.
    pub(crate) spared: bool,
}

impl OldStage {
    pub(crate) fn key(&self) -> (i64, i64) {
        (self.timestamp, self.id)
    }
}

/// Payload stages from before a time. Stages of open dead letters that died at or after `dead_since` are
/// marked as spared.
pub(crate) fn old_stages(
    reader: &Reader,
    before: i64,
    dead_since: i64,
    after: (i64, i64),
) -> Result<Vec<OldStage>> {
    let sql = "SELECT p.id, p.timestamp, p.payload_size_compressed,
                 EXISTS (SELECT 1 FROM dead_letters d
                   WHERE d.seq = p.seq AND d.retried_at IS NULL AND d.died_at >= ?2), p.seq
               FROM event_payloads p INDEXED BY event_payloads_timestamp
               WHERE p.timestamp < ?1 AND (p.timestamp, p.id) > (?3, ?4)
               ORDER BY p.timestamp, p.id LIMIT ?5";
    let (timestamp, id) = after;
    let values = params![before, dead_since, timestamp, id, CHOOSE as i64];
    let doing = "looking for old payload stages";
    reader.conn.read_all(doing, sql, values, |r| {
        Ok(OldStage {
            id: r.get(0)?,
            timestamp: r.get(1)?,
            weight: 4 + seq_from(r.get(2)?) / PAGE,
            spared: r.get(3)?,
            seq: seq_from(r.get(4)?),
        })
    })
}

/// Counts rows of the outbox that were sent before a time. It also counts rows with a dead letter from before
/// `dead`: that dead letter would be removed first.
pub(crate) fn count_sent(reader: &Reader, before: Timestamp, dead: Option<i64>) -> Result<u64> {
    let doing = "counting the outbox";
    let sql = "SELECT count(*) FROM event_outbox WHERE status = 'sent' AND sent_at < ?1";
    let sent: i64 = reader.conn.one(doing, sql, [before.to_string()])?;
    let Some(dead) = dead else {
        return Ok(seq_from(sent));
    };
    let freed: i64 = reader
        .conn.one(doing, "SELECT count(DISTINCT o.row) FROM dead_letters d INDEXED BY dead_open_died
                          CROSS JOIN event_outbox_origins v ON v.seq = d.seq
                          CROSS JOIN event_outbox o ON o.row = v.row
                          WHERE d.retried_at IS NULL AND d.died_at < ?2 AND +o.status = 'failed' AND o.sent_at < ?1
                            AND NOT EXISTS (SELECT 1 FROM dead_letters e
                              WHERE e.seq = d.seq AND e.retried_at IS NULL AND (e.died_at >= ?2 OR EXISTS (
                                SELECT 1 FROM deliveries w WHERE w.group_id = e.group_id AND w.seq = e.seq)))", params![before.to_string(), dead])?;
    Ok(seq_from(sent + freed))
}

/// The result of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Done {
    /// Number of rows handled, from the first on: all, unless the time ran out.
    pub(crate) seen: usize,
    pub(crate) removed: u64,
}

/// The result of one step of giving space back.
pub(crate) struct Shrunk {
    /// Pages given back to the file system.
    pub(crate) given: u64,
    /// Pages that are still free.
    pub(crate) left: u64,
    /// Whether other commands write to the file.
    pub(crate) in_use: bool,
}

/// Gives some free pages back to the file system.
pub(crate) fn shrink(tx: &Tx, in_use: bool, pages: u64, slice: &Slice) -> Result<Shrunk> {
    let doing = |e| from_sqlite("giving space back", e);
    let before = pragma(tx, "page_count")?;
    // The inserted value is the engine's number; a pragma takes no parameters.
    let mut statement = tx
        .conn
        .prepare(&format!("PRAGMA incremental_vacuum({pages})"))
        .map_err(doing)?;
    // Each step of the statement frees one page.
    let mut rows = statement.query([]).map_err(doing)?;
    while rows.next().map_err(doing)?.is_some() && !slice.is_over() {}
    drop(rows);
    drop(statement);
    Ok(Shrunk {
        given: before.saturating_sub(pragma(tx, "page_count")?),
        left: pragma(tx, "freelist_count")?,
        in_use,
    })
}

/// Removes dead letters that have not changed since they were selected. For an open one, the group's skip
/// is recorded with this reason.
pub(crate) fn forget_dead(
    tx: &mut Tx,
    old: &[OldDead],
    reason: &str,
    slice: &Slice,
) -> Result<Done> {
    let mut done = Done::default();
    for dead in old {
        if done.seen > 0 && slice.is_over() {
            break;
        }
        done.seen += 1;
        let removed = tx.conn.change(
            "removing old dead letters",
            "DELETE FROM dead_letters WHERE seq = ?1 AND group_id = ?2 AND died_at = ?3
             AND (retried_at IS NULL) = ?4
             AND NOT EXISTS (SELECT 1 FROM deliveries WHERE group_id = ?2 AND seq = ?1)",
            (to_sql(dead.seq), dead.group, dead.died_at, dead.open),
        )?;
        done.removed += removed as u64;
        if removed > 0 && dead.open {
            // The rows of a removed group are removed with the group.
            if tx.groups.contains_key(&dead.group) {
                skip_ahead(tx, dead.group, dead.seq, reason)?;
            }
            tx.watches.touch(dead.seq);
        }
    }
    Ok(done)
}

/// Removes payload stages that have not changed since they were selected.
pub(crate) fn forget_stages(tx: &mut Tx, old: &[OldStage], slice: &Slice) -> Result<Done> {
    let doing = "removing old payload stages";
    let sql = "DELETE FROM event_payloads WHERE id = ?1 AND timestamp = ?2
                 AND NOT EXISTS (SELECT 1 FROM dead_letters d
                   WHERE d.seq = event_payloads.seq AND d.retried_at IS NULL)";
    let mut done = Done::default();
    for stage in old {
        if done.seen > 0 && slice.is_over() {
            break;
        }
        done.seen += 1;
        done.removed += tx.conn.change(doing, sql, (stage.id, stage.timestamp))? as u64;
    }
    Ok(done)
}

/// Removes some rows of the outbox that were sent before a time. Returns how many, and whether none is
/// left.
pub(crate) fn forget_sent(
    tx: &mut Tx,
    before: Timestamp,
    slice: &Slice,
) -> Result<(DeadGone, bool)> {
    let mut gone = DeadGone::default();
    let all = a_few(slice, |limit| {
        let removed = crate::outbox::forget_sent(&tx.conn, before, limit)? as u64;
        gone.rows += removed;
        Ok(removed)
    })?;
    Ok((gone, all))
}

/// Removes some dead letters of the outbox that died before a time, with their rows. Returns how many,
/// and whether none is left.
pub(crate) fn forget_outbox_dead(
    tx: &mut Tx,
    before: Timestamp,
    slice: &Slice,
) -> Result<(DeadGone, bool)> {
    let mut gone = DeadGone::default();
    let all = a_few(slice, |limit| {
        let removed = crate::outbox::forget_dead(&tx.conn, before, limit)?;
        gone.letters += removed.letters;
        gone.rows += removed.rows;
        Ok(removed.letters)
    })?;
    Ok((gone, all))
}

/// Records the time of this removal. The write is synced, and all lazy commits before it become durable
/// with it.
pub(crate) fn note_pruned(tx: &mut Tx, now: Timestamp) -> Result<()> {
    let sql = "INSERT OR REPLACE INTO meta (key, value) VALUES ('pruned', ?1)";
    tx.conn
        .run("noting that things were removed", sql, [now.to_string()])
}

/// The size of a page, and how many are free.
pub(crate) fn free_pages(tx: &mut Tx) -> Result<(u64, u64)> {
    Ok((pragma(tx, "page_size")?, pragma(tx, "freelist_count")?))
}

fn pragma(tx: &Tx, name: &str) -> Result<u64> {
    tx.conn
        .one("measuring the file", &format!("PRAGMA {name}"), [])
        .map(seq_from)
}

/// Takes on a duty unless another owner took it within this time.
pub(crate) fn take_duty(tx: &mut Tx, duty: &str, owner: &str, every: Duration) -> Result<bool> {
    let now = tx.clock.now();
    let last = super::duty_record(&tx.conn, duty)?;
    if last.is_some_and(|last| last.holds(now, every)) {
        return Ok(false);
    }
    let record = serde_json::json!({"owner": owner, "at": now});
    let sql = "INSERT OR REPLACE INTO meta (key, value) VALUES (?1, ?2)";
    let values = (super::duty_key(duty), record.to_string());
    tx.conn.run("taking on a duty", sql, values)?;
    Ok(true)
}

/// Deletes the record of a duty if this owner holds it.
pub(crate) fn return_duty(tx: &mut Tx, duty: &str, owner: &str) -> Result<()> {
    let last = super::duty_record(&tx.conn, duty)?;
    if last.is_some_and(|last| last.owner == owner) {
        let sql = "DELETE FROM meta WHERE key = ?1";
        tx.conn
            .run("giving a duty back", sql, [super::duty_key(duty)])?;
    }
    Ok(())
}

/// Removes a few rows at a time until the time is over. Returns whether none is left.
fn a_few(slice: &Slice, mut remove: impl FnMut(usize) -> Result<u64>) -> Result<bool> {
    loop {
        if remove(FEW_ROWS)? < FEW_ROWS as u64 {
            return Ok(true);
        }
        if slice.is_over() {
            return Ok(false);
        }
    }
}

/// The stored time before which a row is too old.
pub(crate) fn cutoff(now: Timestamp, age: Option<Duration>) -> Option<i64> {
    age.map(|age| micros(now.minus(age)))
}
