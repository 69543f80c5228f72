//! The runs of the index in the file: which there are, and how they come and go.
//!
//! A run is written block by block and invisible until one change puts it in use; in the same change the
//! runs it replaces go out of use. What a crash leaves half-written is swept away.

use std::time::{SystemTime, UNIX_EPOCH};

use everbus_core::{Error, Result};
use rusqlite::{Connection, OptionalExtension};

use super::block::Block;
use crate::errors::{from_sqlite, is_fatal};
use crate::rows::{seq_from, to_sql};
use crate::writer::Writer;

/// Blocks written or swept in one transaction: little enough that a publish hardly waits.
pub(crate) const BATCH: usize = 96;

/// For how long a process is the one that writes runs, from its last change on.
pub(crate) const LEASE_MICROS: i64 = 2_000_000;

const WRITING: i64 = 0;
const IN_USE: i64 = 1;
const GONE: i64 = 2;

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

/// The runs in use, in the order of the log. Their ranges do not overlap; between them is nothing.
pub(crate) fn in_use(conn: &Connection) -> Result<Vec<Run>> {
    conn.prepare_cached(
        "SELECT id, level, lo, hi, events FROM history_runs WHERE state = 1 ORDER BY lo",
    )
    .and_then(|mut s| {
        s.query_map([], |r| {
            Ok(Run {
                id: r.get(0)?,
                level: r.get(1)?,
                lo: seq_from(r.get(2)?),
                hi: seq_from(r.get(3)?),
                events: seq_from(r.get(4)?),
            })
        })?
        .collect()
    })
    .map_err(|e| from_sqlite("reading the history's index", e))
}

/// Whether there are runs to sweep away, those apart that are being written.
pub(crate) fn to_sweep(conn: &Connection, writing: &[i64]) -> Result<bool> {
    let doing = |e| from_sqlite("reading the history's index", e);
    let mut statement = conn
        .prepare_cached("SELECT id FROM history_runs WHERE state <> 1")
        .map_err(doing)?;
    let mut rows = statement.query([]).map_err(doing)?;
    while let Some(row) = rows.next().map_err(doing)? {
        if !writing.contains(&row.get(0).map_err(doing)?) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// For how many more microseconds another process is the one that writes runs, if one is.
pub(crate) fn held(conn: &Connection, holder: i64) -> Result<Option<i64>> {
    let found: Option<(i64, i64)> = conn
        .prepare_cached("SELECT holder, until FROM history_indexer")
        .and_then(|mut s| s.query_row([], |r| Ok((r.get(0)?, r.get(1)?))).optional())
        .map_err(|e| from_sqlite("reading the lease of the history's index", e))?;
    Ok(found
        .filter(|(other, _)| *other != holder)
        .map(|(_, until)| until.saturating_sub(system_micros()))
        .filter(|left| (1..=LEASE_MICROS).contains(left)))
}

/// The run that a change is about.
pub(crate) enum Target {
    /// One that begins with this change. Its id is not looked at.
    New(Run),
    /// One that was begun before.
    Begun(i64),
}

/// How a change ends.
pub(crate) enum End {
    /// More blocks will follow.
    Open,
    /// The run is in use, if what is covered still ends here.
    Appended { after: Option<u64> },
    /// The run is in use in place of these, if they all are in use.
    Replaced(Vec<i64>),
}

/// A step on the way to a new run, done in one transaction.
pub(crate) struct Change {
    /// Who is at work.
    pub(crate) holder: i64,
    pub(crate) target: Target,
    pub(crate) blocks: Vec<Block>,
    pub(crate) end: End,
}

/// What came of a change.
#[derive(Debug)]
pub(crate) enum Applied {
    /// It is done; the run, or how many blocks are gone.
    Done(i64),
    /// Another process is at work, for up to so many microseconds.
    Held(i64),
    /// The file is not what the change was made for: look again.
    Stale,
    /// It failed, and nothing else did.
    Failed(Error),
}

impl Writer {
    /// Does one step.
    pub(crate) fn change_history(&mut self, change: &Change) -> Result<Applied> {
        self.within(change.holder, |conn| apply(conn, change))
    }

    /// Sweeps away some blocks of runs that are out of use or were never finished; says how much there
    /// was to do.
    pub(crate) fn sweep_history(&mut self, holder: i64, writing: &[i64]) -> Result<Applied> {
        self.within(holder, |conn| sweep(conn, writing))
    }

    /// Puts runs out of use whose events are all gone, and lets the indexer look for those of which
    /// little is left. For whoever removes events in large numbers.
    pub(crate) fn forget_history(&mut self) -> Result<()> {
        forget_gone(&self.conn)?;
        self.review_history();
        Ok(())
    }

    /// Runs a change under a savepoint: if it fails, nobody else who is in the transaction does.
    fn within(
        &mut self,
        holder: i64,
        change: impl FnOnce(&Connection) -> Result<Applied>,
    ) -> Result<Applied> {
        if let Err(error) = self.check_room() {
            return Ok(Applied::Failed(error));
        }
        let doing = |e| from_sqlite("writing the history's index", e);
        self.conn
            .execute_batch("SAVEPOINT history")
            .map_err(doing)?;
        let applied = match take(&self.conn, holder) {
            Ok(None) => change(&self.conn),
            Ok(Some(left)) => Ok(Applied::Held(left)),
            Err(error) => Err(error),
        };
        let undo = !matches!(applied, Ok(Applied::Done(_)));
        if undo {
            // Without a transaction there is no savepoint to go back to: a full disk may end it for all.
            if let Err(error) = &applied
                && (is_fatal(error) || self.conn.is_autocommit())
            {
                return applied;
            }
            self.conn
                .execute_batch("ROLLBACK TO history")
                .map_err(doing)?;
        }
        self.conn.execute_batch("RELEASE history").map_err(doing)?;
        Ok(applied.unwrap_or_else(Applied::Failed))
    }
}

/// The time by the clock of the system: the lease is between processes, and has nothing to do with the
/// time of events.
fn system_micros() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |time| i64::try_from(time.as_micros()).unwrap_or(0))
}

/// Takes or renews the lease. One that ends later than any lease is from before the clock was set back.
/// This runs under the lock of the file, so nobody's moment is earlier than the last one's.
/// Otherwise it says how long another process has it.
fn take(conn: &Connection, holder: i64) -> Result<Option<i64>> {
    let doing = |e| from_sqlite("taking the lease of the history's index", e);
    let now = system_micros();
    let until = now.saturating_add(LEASE_MICROS);
    let taken = conn
        .prepare_cached(
            "INSERT INTO history_indexer (only, holder, until) VALUES (1, ?1, ?2)
             ON CONFLICT (only) DO UPDATE SET holder = ?1, until = ?2
             WHERE holder = ?1 OR until <= ?3 OR until > ?2",
        )
        .and_then(|mut s| s.execute((holder, until, now)))
        .map_err(doing)?;
    if taken > 0 {
        return Ok(None);
    }
    held(conn, holder)
}

fn apply(conn: &Connection, change: &Change) -> Result<Applied> {
    let doing = |e| from_sqlite("writing the history's index", e);
    let covered: Option<u64> = conn
        .prepare_cached("SELECT max(hi) FROM history_runs WHERE state = 1")
        .and_then(|mut s| s.query_row([], |r| r.get::<_, Option<i64>>(0)))
        .map_err(doing)?
        .map(seq_from);
    let id = match &change.target {
        Target::New(run) => conn
            .prepare_cached(
                "INSERT INTO history_runs (level, lo, hi, events, state)
                 VALUES (?1, ?2, ?3, ?4, ?5)",
            )
            .and_then(|mut s| {
                let (lo, hi, events) = (to_sql(run.lo), to_sql(run.hi), to_sql(run.events));
                s.insert((run.level, lo, hi, events, WRITING))
            })
            .map_err(doing)?,
        Target::Begun(id) => {
            let there = conn
                .prepare_cached("SELECT 1 FROM history_runs WHERE id = ?1 AND state = ?2")
                .and_then(|mut s| s.exists((id, WRITING)))
                .map_err(doing)?;
            if !there {
                return Ok(Applied::Stale);
            }
            *id
        }
    };
    let mut insert = conn
        .prepare_cached(
            "INSERT INTO history_blocks (run, scope, seq, block) VALUES (?1, ?2, ?3, ?4)",
        )
        .map_err(doing)?;
    for block in &change.blocks {
        let (scope, seq) = block.first;
        insert
            .execute((id, scope, to_sql(seq), &block.bytes[..]))
            .map_err(doing)?;
    }
    match &change.end {
        End::Open => return Ok(Applied::Done(id)),
        End::Appended { after } if *after != covered => return Ok(Applied::Stale),
        End::Appended { .. } => {}
        End::Replaced(old) => {
            let mut retire = conn
                .prepare_cached("UPDATE history_runs SET state = ?2 WHERE id = ?1 AND state = ?3")
                .map_err(doing)?;
            for run in old {
                if retire.execute((run, GONE, IN_USE)).map_err(doing)? == 0 {
                    return Ok(Applied::Stale);
                }
            }
        }
    }
    conn.prepare_cached("UPDATE history_runs SET state = ?2 WHERE id = ?1")
        .and_then(|mut s| s.execute((id, IN_USE)))
        .map_err(doing)?;
    Ok(Applied::Done(id))
}

fn sweep(conn: &Connection, writing: &[i64]) -> Result<Applied> {
    let doing = |e| from_sqlite("sweeping the history's index", e);
    let runs: Vec<i64> = conn
        .prepare_cached("SELECT id FROM history_runs WHERE state <> 1 ORDER BY id")
        .and_then(|mut s| s.query_map([], |r| r.get(0))?.collect())
        .map_err(doing)?;
    // Whoever began one and was held up must not go on with what is left of it.
    let mut retire = conn
        .prepare_cached("UPDATE history_runs SET state = ?2 WHERE id = ?1 AND state = ?3")
        .map_err(doing)?;
    let mut swept = 0;
    for run in runs.into_iter().filter(|run| !writing.contains(run)) {
        retire.execute((run, GONE, WRITING)).map_err(doing)?;
        let left = BATCH - swept;
        let gone = conn
            .prepare_cached(
                "DELETE FROM history_blocks WHERE id IN
                   (SELECT id FROM history_blocks WHERE run = ?1 LIMIT ?2)",
            )
            .and_then(|mut s| s.execute((run, to_sql(left as u64))))
            .map_err(doing)?;
        swept += gone;
        if gone == left {
            break;
        }
        conn.prepare_cached("DELETE FROM history_runs WHERE id = ?1")
            .and_then(|mut s| s.execute([run]))
            .map_err(doing)?;
    }
    Ok(Applied::Done(to_sql(swept as u64)))
}

/// Whether all events of a run are gone.
pub(crate) fn is_gone(conn: &Connection, run: &Run) -> Result<bool> {
    conn.prepare_cached("SELECT 1 FROM log WHERE seq BETWEEN ?1 AND ?2 LIMIT 1")
        .and_then(|mut s| {
            s.query_row((to_sql(run.lo), to_sql(run.hi)), |_| Ok(()))
                .optional()
        })
        .map(|found| found.is_none())
        .map_err(|e| from_sqlite("reading the log", e))
}

/// Puts runs out of use whose events are all gone; the last one stays, since it says how far the log is
/// covered.
fn forget_gone(conn: &Connection) -> Result<()> {
    let doing = |e| from_sqlite("forgetting a part of the history's index", e);
    let mut runs = in_use(conn)?;
    runs.pop();
    for run in runs {
        if is_gone(conn, &run)? {
            conn.prepare_cached("UPDATE history_runs SET state = ?2 WHERE id = ?1")
                .and_then(|mut s| s.execute((run.id, GONE)))
                .map_err(doing)?;
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
            panic!("nobody is in the way");
        };
        // Its process stands still; another one sweeps, and dies in the middle of it.
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
