//! Low-priority ("patient") work such as retention. It runs after all other commands,
//! rests after each piece for as long as the piece took, and does the checkpoints of the write-ahead log, so
//! that publishers rarely wait for one.
//!
//! Work that is also *lazy* is not synced to the disk by itself. The write-ahead log keeps the order of
//! commits, so a lazy commit becomes durable with the next synced one. If the power fails before that, the
//! work is lost as a whole and is done again.

use std::time::{Duration, Instant};

use everbus_core::Result;
use rusqlite::Connection;

use crate::Durable;
use crate::errors::from_sqlite;
use crate::queue::Command;

/// Patient work is postponed at most this many times in a row while other commands wait.
const PUT_OFF: u32 = 4;
/// The file is in use if other commands ran within this time.
const ACTIVE: Duration = Duration::from_secs(1);
/// The longest rest.
const LONGEST_REST: Duration = Duration::from_millis(2);
/// Pages in the write-ahead log that start a checkpoint: normally; by patient work (small, so that the wait
/// for one is short); and while the disk is nearly full.
const CHECKPOINT: u32 = 1000;
const SMALL_CHECKPOINT: u32 = 128;
const SAVING_CHECKPOINT: u32 = 50;

/// Durability and checkpoint size of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mode {
    synced: bool,
    checkpoint: u32,
}

impl Mode {
    const USUAL: Self = Self {
        synced: true,
        checkpoint: CHECKPOINT,
    };
}

/// State of the scheduling of patient work.
pub(crate) struct Patience {
    /// How often patient work was put off in a row.
    times_put_off: u32,
    /// When other commands ran last.
    others_at: Option<Instant>,
    /// When the rest of patient work ends.
    rest_until: Option<Instant>,
    durability: Durable,
    mode: Mode,
    saving_room: bool,
}

impl Patience {
    pub(super) fn new(durability: Durable) -> Self {
        Self {
            times_put_off: 0,
            others_at: None,
            rest_until: None,
            durability,
            mode: Mode::USUAL,
            saving_room: false,
        }
    }

    /// Sets the pragmas for the next transaction. If this fails, no command may be acknowledged.
    fn switch(&mut self, conn: &Connection, mode: Mode) -> Result<()> {
        let doing = |e| from_sqlite("preparing a transaction", e);
        if mode.synced != self.mode.synced && self.durability == Durable::Full {
            let level = if mode.synced { "FULL" } else { "NORMAL" };
            conn.pragma_update(None, "synchronous", level)
                .map_err(doing)?;
        }
        self.mode.synced = mode.synced;
        if mode.checkpoint != self.mode.checkpoint {
            conn.pragma_update(None, "wal_autocheckpoint", mode.checkpoint)
                .map_err(doing)?;
        }
        self.mode.checkpoint = mode.checkpoint;
        Ok(())
    }

    /// Whether the running transaction is not synced. Nothing may be handed out in such a transaction.
    pub(super) fn is_lazy(&self) -> bool {
        !self.mode.synced
    }

    /// Sets the pragmas of a round from its commands.
    pub(super) fn begin(&mut self, conn: &Connection, patient: bool, lazy: bool) -> Result<()> {
        let checkpoint = match patient {
            _ if self.saving_room => SAVING_CHECKPOINT,
            true => SMALL_CHECKPOINT,
            false => CHECKPOINT,
        };
        let synced = !lazy;
        self.switch(conn, Mode { synced, checkpoint })
    }

    /// A round has ended. After a round of patient work alone comes a rest, in which other processes find the
    /// file unlocked.
    pub(super) fn end(&mut self, patient: bool, took: Duration) {
        if patient {
            self.rest_until = Some(Instant::now() + took.min(LONGEST_REST));
        }
    }

    /// How long the queued patient work still rests.
    pub(super) fn rest(&self, backlog: &[Command]) -> Duration {
        match self.rest_until {
            Some(until) if backlog.iter().all(Command::is_patient) => {
                until.saturating_duration_since(Instant::now())
            }
            _ => Duration::ZERO,
        }
    }

    /// Postpones patient work, a few times, when other commands wait in the same batch.
    pub(super) fn put_off(
        &mut self,
        mut batch: Vec<Command>,
        backlog: &mut Vec<Command>,
    ) -> Vec<Command> {
        let patient = batch.iter().filter(|c| c.is_patient()).count();
        if patient < batch.len() {
            self.others_at = Some(Instant::now());
        }
        if patient == 0 {
            return batch;
        }
        if patient == batch.len() || self.times_put_off >= PUT_OFF {
            self.times_put_off = 0;
            return batch;
        }
        self.times_put_off += 1;
        let later: Vec<Command> = batch.extract_if(.., |c| c.is_patient()).collect();
        backlog.splice(0..0, later);
        batch
    }

    /// Whether other work ran within the last second.
    pub(crate) fn is_in_use(&self) -> bool {
        let others = self.others_at;
        others.is_some_and(|at| at.elapsed() < ACTIVE)
    }

    /// From here on every commit is synced.
    pub(super) fn sync_all(&mut self, conn: &Connection) -> Result<()> {
        self.switch(conn, Mode::USUAL)
    }

    /// While the disk is nearly full, checkpoints run often. The write-ahead log is then reused from its
    /// beginning, and the acks and dead letters that follow need little more room.
    pub(super) fn save_room(&mut self, conn: &Connection, save: bool) {
        if save != self.saving_room {
            self.saving_room = save;
            let mode = Mode {
                checkpoint: if save { SAVING_CHECKPOINT } else { CHECKPOINT },
                ..self.mode
            };
            // An error is ignored: the next transaction sets the pragmas again.
            let _ = self.switch(conn, mode);
        }
        if save {
            // An error is ignored: if the disk is full, the next ack reports it.
            let _ = conn.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Options;
    use crate::writer::Writer;

    fn setting(writer: &mut Writer, name: &str) -> Result<i64> {
        writer
            .tx
            .conn
            .query_row(&format!("PRAGMA {name}"), [], |r| r.get(0))
            .map_err(|e| from_sqlite("reading a setting", e))
    }

    fn settings(writer: &mut Writer) -> Result<(i64, i64)> {
        Ok((
            setting(writer, "synchronous")?,
            setting(writer, "wal_autocheckpoint")?,
        ))
    }

    const FULL: i64 = 2;
    const NORMAL: i64 = 1;

    // conformance: memory/retention-lazy: only lazy work is not synced; whatever comes after it is
    #[tokio::test]
    async fn only_what_is_lazy_is_not_synced() {
        let dir = tempfile::tempdir().unwrap();
        let handle = crate::handle::start(&dir.path().join("a.db"), Options::default()).unwrap();
        let (usual, small) = (i64::from(CHECKPOINT), i64::from(SMALL_CHECKPOINT));
        for _ in 0..3 {
            assert_eq!(handle.job(settings).await.unwrap(), (FULL, usual));
            // Other threads of the engine may be in the same transaction; the test tries again.
            while handle.lazy_job(settings).await.unwrap() != (NORMAL, small) {}
            while handle.patient_job(settings).await.unwrap() != (FULL, small) {}
            while handle.lazy_job(settings).await.unwrap() != (NORMAL, small) {}
        }
        // A job that shares its transaction is not lazy. The writer is held until both jobs are queued.
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let held = handle.job(move |_| Ok(wait.recv().is_ok()));
        let (mut lazy, mut other) = (Vec::new(), Vec::new());
        for _ in 0..20 {
            lazy.push(handle.lazy_job(settings));
            other.push(handle.job(settings));
        }
        drop(go);
        held.await.unwrap();
        for job in other {
            assert_eq!(job.await.unwrap(), (FULL, usual), "never without a sync");
        }
        for job in lazy {
            job.await.unwrap();
        }
        assert_eq!(handle.job(settings).await.unwrap().0, FULL);
        handle.queue.close(true);
    }

    // conformance: memory/retention-lazy: a bus that does without syncs by its setting stays as it is
    #[tokio::test]
    async fn the_durability_that_was_asked_for_stays() {
        let dir = tempfile::tempdir().unwrap();
        let options = Options {
            durability: Durable::Normal,
            ..Options::default()
        };
        let handle = crate::handle::start(&dir.path().join("a.db"), options).unwrap();
        for _ in 0..2 {
            assert_eq!(handle.job(settings).await.unwrap().0, NORMAL);
            assert_eq!(handle.lazy_job(settings).await.unwrap().0, NORMAL);
        }
        handle.queue.close(true);
    }

    // conformance: memory/retention-rests: patient work leaves the writer alone for as long as it held it
    #[tokio::test]
    async fn patient_work_rests() {
        let dir = tempfile::tempdir().unwrap();
        let handle = crate::handle::start(&dir.path().join("a.db"), Options::default()).unwrap();
        let rest = |writer: &mut Writer| Ok(writer.patience.rest_until);
        // A job that shares its transaction with other work causes no rest; the test tries again.
        let until = loop {
            let work = handle.lazy_job(|_| {
                std::thread::sleep(LONGEST_REST);
                Ok(())
            });
            work.await.unwrap();
            if let Some(until) = handle.job(rest).await.unwrap() {
                break until;
            }
        };
        // The rest ends before the next job runs.
        let next = handle.lazy_job(|_| Ok(Instant::now())).await.unwrap();
        assert!(next >= until);
        handle.queue.close(true);
    }
}
