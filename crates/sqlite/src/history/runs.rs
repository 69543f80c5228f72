//! The runs of the history index in the file, and how they are added and removed.
//!
//! A run is written block by block and is invisible until one change puts it in use. The same change takes
//! the runs that it replaces out of use. Runs that a crash left half-written are swept.

use std::time::{SystemTime, UNIX_EPOCH};

use everbus_core::{Error, Result};
use rusqlite::Connection;

use super::block::Block;
use crate::disk_space::Space;
use crate::errors::{from_sqlite, is_fatal};
use crate::rows::{seq_from, to_sql};
use crate::sql::Sql as _;
use crate::writer::Writer;

/// Blocks written or swept in one transaction: few enough that a publish hardly waits.
pub(crate) const BATCH: usize = 96;

/// How long the lease of the process that writes runs lasts after its last change.
pub(crate) const LEASE_MICROS: i64 = 2_000_000;

const WRITING: i64 = 0;
const IN_USE: i64 = 1;
const GONE: i64 = 2;
const RETIRE: &str = "UPDATE history_runs SET state = ?2 WHERE id = ?1 AND state = ?3";

/// The postings of a range of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) id: i64,
    pub(crate) level: u32,
    pub(crate) lo: u64,
    pub(crate) hi: u64,
    /// How many events of the range there were when it was written.
    pub(crate) events: u64,
}

/// The runs in use, in the order of the log, without overlaps and gaps.
pub(crate) fn in_use(conn: &Connection) -> Result<Vec<Run>> {
    let sql = "SELECT id, level, lo, hi, events FROM history_runs WHERE state = 1 ORDER BY lo";
    conn.read_all("reading the history's index", sql, [], |r| {
        Ok(Run {
            id: r.get(0)?,
            level: r.get(1)?,
            lo: seq_from(r.get(2)?),
            hi: seq_from(r.get(3)?),
            events: seq_from(r.get(4)?),
        })
    })
}

/// Whether there are runs to sweep, other than those being written.
pub(crate) fn to_sweep(conn: &Connection, writing: &[i64]) -> Result<bool> {
    let sql = "SELECT id FROM history_runs WHERE state <> 1";
    let runs: Vec<i64> = conn.all("reading the history's index", sql, [])?;
    Ok(runs.iter().any(|run| !writing.contains(run)))
}

/// How many more microseconds another process holds the lease. `None` if no other process holds it.
pub(crate) fn held(conn: &Connection, holder: i64) -> Result<Option<i64>> {
    let doing = "reading the lease of the history's index";
    let sql = "SELECT holder, until FROM history_indexer";
    let found: Option<(i64, i64)> = conn.first(doing, sql, [])?;
    Ok(found
        .filter(|(other, _)| *other != holder)
        .map(|(_, until)| until.saturating_sub(system_micros()))
        .filter(|left| (1..=LEASE_MICROS).contains(left)))
}

/// The run that a change belongs to.
pub(crate) enum Target {
    /// A run that begins with this change. Its id is ignored.
    New(Run),
    /// One that was begun before.
    Begun(i64),
}

/// How a change ends.
pub(crate) enum End {
    /// More blocks will follow.
    Open,
    /// The run is in use, if the covered range still ends here.
    Appended { after: Option<u64> },
    /// The run is in use and replaces these, if all of them are in use.
    Replaced(Vec<i64>),
}

/// A step on the way to a new run, done in one transaction.
pub(crate) struct Change {
    /// The process that makes the change.
    pub(crate) holder: i64,
    pub(crate) target: Target,
    pub(crate) blocks: Vec<Block>,
    pub(crate) end: End,
}

/// The result of a change.
#[derive(Debug)]
pub(crate) enum Applied {
    /// Done: the id of the run, or the number of blocks removed.
    Done(i64),
    /// Another process holds the lease, for up to this many microseconds.
    Held(i64),
    /// The file has changed since the change was planned: plan it again.
    Stale,
    /// The change failed, and the rest of the transaction did not.
    Failed(Error),
}

/// Applies one change.
pub(crate) fn change_history(conn: &Connection, space: &Space, change: &Change) -> Result<Applied> {
    within(conn, space, change.holder, |conn| apply(conn, change))
}

/// Sweeps some blocks of runs that are out of use or were never finished. Returns how many.
pub(crate) fn sweep_history(
    conn: &Connection,
    space: &Space,
    holder: i64,
    writing: &[i64],
) -> Result<Applied> {
    within(conn, space, holder, |conn| sweep(conn, writing))
}

/// Takes runs out of use whose events are all gone, and asks the indexer to look for runs with few events
/// left. Called after events were removed in large numbers.
pub(crate) fn forget_history(writer: &mut Writer) -> Result<()> {
    forget_gone(&writer.tx.conn)?;
    writer.indexer.review();
    Ok(())
}

/// Runs a change under a savepoint: if it fails, the other commands of the transaction do not.
fn within(
    conn: &Connection,
    space: &Space,
    holder: i64,
    change: impl FnOnce(&Connection) -> Result<Applied>,
) -> Result<Applied> {
    if let Err(error) = space.check() {
        return Ok(Applied::Failed(error));
    }
    let doing = |e| from_sqlite("writing the history's index", e);
    conn.execute_batch("SAVEPOINT history").map_err(doing)?;
    let applied = match take(conn, holder) {
        Ok(None) => change(conn),
        Ok(Some(left)) => Ok(Applied::Held(left)),
        Err(error) => Err(error),
    };
    let undo = !matches!(applied, Ok(Applied::Done(_)));
    if undo {
        // A full disk may end the whole transaction. In that case the savepoint no longer exists.
        if let Err(error) = &applied
            && (is_fatal(error) || conn.is_autocommit())
        {
            return applied;
        }
        conn.execute_batch("ROLLBACK TO history").map_err(doing)?;
    }
    conn.execute_batch("RELEASE history").map_err(doing)?;
    Ok(applied.unwrap_or_else(Applied::Failed))
}

/// The system's time. The lease is between processes and has nothing to do with the time of events.
fn system_micros() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |time| i64::try_from(time.as_micros()).unwrap_or(0))
}

/// Takes or renews the lease; otherwise returns how long another process holds it. A lease that ends later
/// than any lease can was taken before the clock was set back. The caller holds the lock of the file, so no
/// process can see an earlier time than the previous holder.
fn take(conn: &Connection, holder: i64) -> Result<Option<i64>> {
    let now = system_micros();
    let until = now.saturating_add(LEASE_MICROS);
    let doing = "taking the lease of the history's index";
    let sql = "INSERT INTO history_indexer (only, holder, until) VALUES (1, ?1, ?2)
               ON CONFLICT (only) DO UPDATE SET holder = ?1, until = ?2
               WHERE holder = ?1 OR until <= ?3 OR until > ?2";
    let taken = conn.change(doing, sql, (holder, until, now))?;
    if taken > 0 {
        return Ok(None);
    }
    held(conn, holder)
}

fn apply(conn: &Connection, change: &Change) -> Result<Applied> {
    let doing = "writing the history's index";
    let sql = "SELECT max(hi) FROM history_runs WHERE state = 1";
    let covered: Option<i64> = conn.one(doing, sql, [])?;
    let covered = covered.map(seq_from);
    let id = match &change.target {
        Target::New(run) => {
            let sql = "INSERT INTO history_runs (level, lo, hi, events, state)
                       VALUES (?1, ?2, ?3, ?4, ?5)";
            let (lo, hi, events) = (to_sql(run.lo), to_sql(run.hi), to_sql(run.events));
            conn.add(doing, sql, (run.level, lo, hi, events, WRITING))?
        }
        Target::Begun(id) => {
            let sql = "SELECT EXISTS (SELECT 1 FROM history_runs WHERE id = ?1 AND state = ?2)";
            if !conn.one::<bool>(doing, sql, (id, WRITING))? {
                return Ok(Applied::Stale);
            }
            *id
        }
    };
    let sql = "INSERT INTO history_blocks (run, scope, seq, block) VALUES (?1, ?2, ?3, ?4)";
    for block in &change.blocks {
        let (scope, seq) = block.first;
        conn.run(doing, sql, (id, scope, to_sql(seq), &block.bytes[..]))?;
    }
    match &change.end {
        End::Open => return Ok(Applied::Done(id)),
        End::Appended { after } if *after != covered => return Ok(Applied::Stale),
        End::Appended { .. } => {}
        End::Replaced(old) => {
            for run in old {
                if conn.change(doing, RETIRE, (run, GONE, IN_USE))? == 0 {
                    return Ok(Applied::Stale);
                }
            }
        }
    }
    let sql = "UPDATE history_runs SET state = ?2 WHERE id = ?1";
    conn.run(doing, sql, (id, IN_USE))?;
    Ok(Applied::Done(id))
}

fn sweep(conn: &Connection, writing: &[i64]) -> Result<Applied> {
    let doing = "sweeping the history's index";
    let sql = "SELECT id FROM history_runs WHERE state <> 1 ORDER BY id";
    let runs: Vec<i64> = conn.all(doing, sql, [])?;
    let mut swept = 0;
    for run in runs.into_iter().filter(|run| !writing.contains(run)) {
        // The process that began the run may have been suspended. It must not continue with the rest of the run.
        conn.run(doing, RETIRE, (run, GONE, WRITING))?;
        let left = BATCH - swept;
        let sql = "DELETE FROM history_blocks WHERE id IN
                   (SELECT id FROM history_blocks WHERE run = ?1 LIMIT ?2)";
        let gone = conn.change(doing, sql, (run, to_sql(left as u64)))?;
        swept += gone;
        if gone == left {
            break;
        }
        conn.run(doing, "DELETE FROM history_runs WHERE id = ?1", [run])?;
    }
    Ok(Applied::Done(to_sql(swept as u64)))
}

/// Whether all events of a run are gone.
pub(crate) fn is_gone(conn: &Connection, run: &Run) -> Result<bool> {
    let doing = "reading the log";
    let sql = "SELECT 1 FROM log WHERE seq BETWEEN ?1 AND ?2 LIMIT 1";
    conn.read_first(doing, sql, (to_sql(run.lo), to_sql(run.hi)), |_| Ok(()))
        .map(|found| found.is_none())
}

/// Takes runs out of use whose events are all gone. The last run stays, because it says how far the log is
/// covered.
fn forget_gone(conn: &Connection) -> Result<()> {
    let mut runs = in_use(conn)?;
    runs.pop();
    for run in runs {
        if is_gone(conn, &run)? {
            let doing = "forgetting a part of the history's index";
            let sql = "UPDATE history_runs SET state = ?2 WHERE id = ?1";
            conn.run(doing, sql, (run.id, GONE))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: memory/history-swept: a run that was partly swept away is never put in use
    #[test]
    fn a_run_that_another_process_began_to_sweep_is_not_finished() {
        let conn = Connection::open_in_memory().unwrap();
        crate::schema::migrate(&conn).unwrap();
        let change = |target, blocks: std::ops::Range<u64>, end| Change {
            holder: 1,
            target,
            blocks: blocks
                .map(|n| Block {
                    first: (to_sql(n), 1),
                    bytes: vec![0],
                })
                .collect(),
            end,
        };
        let run = Run {
            id: 0,
            level: 0,
            lo: 1,
            hi: 9,
            events: 9,
        };
        let more = BATCH as u64 + 10;
        let begun = change(Target::New(run), 0..more, End::Open);
        let Applied::Done(id) = apply(&conn, &begun).unwrap() else {
            panic!("no other process holds the lease");
        };
        // The process of the run stands still; another process sweeps, and dies halfway.
        assert!(matches!(sweep(&conn, &[]), Ok(Applied::Done(96))));
        let last = change(
            Target::Begun(id),
            more..more + 1,
            End::Appended { after: None },
        );
        assert!(matches!(apply(&conn, &last), Ok(Applied::Stale)));
        assert_eq!(in_use(&conn).unwrap(), []);
    }
}
