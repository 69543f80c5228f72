//! The highest acknowledged position, kept beside a database while it is in use: `FILE.log-head`.
//!
//! The newest events are only in the write-ahead log. If that file is deleted, cut or changed after a crash,
//! SQLite opens the rest without an error, and the events after the damage are missing. So the highest
//! acknowledged position is kept outside both files, and a log that ends before it is reported.
//!
//! The note costs no sync and is renewed about once a second, so it lags behind: a loss of the last moments
//! before a crash is not noticed. After an orderly close everything is in the database, and the note is
//! removed.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use everbus_core::{CheckReport, LogId, Result};
use rusqlite::Connection;

use crate::orphans::log_id;
use crate::rows::seq_from;

/// The note is renewed at most this often.
const RENEW: Duration = Duration::from_secs(1);
/// First line of the note.
const TITLE: &str = "everbus log head 1";

/// The note beside one database.
pub(crate) struct LogHead {
    path: PathBuf,
    log: Option<LogId>,
    noted: Option<(u64, Instant)>,
}

impl LogHead {
    /// Reads the existing note. If the log is shorter than the note says, the note is renamed and kept for
    /// `check`.
    pub(crate) fn begin(database: &Path, conn: &Connection) -> Self {
        let path = beside(database, "");
        let log = log_id(conn).ok();
        if let Some((noted, head)) = log.and_then(|log| missing(&path, log, conn).ok().flatten()) {
            tracing::error!(
                target: "everbus::sqlite",
                noted,
                head,
                "acknowledged events are missing: the write-ahead log of the file was lost, cut or altered"
            );
            let _ = std::fs::rename(&path, beside(database, LOST));
        }
        Self {
            path,
            log,
            noted: None,
        }
    }

    /// Renews the note with this position if it is due.
    pub(crate) fn note(&mut self, head: u64) {
        if self
            .noted
            .is_some_and(|(noted, at)| noted == head || at.elapsed() < RENEW)
        {
            return;
        }
        self.noted = Some((head, Instant::now()));
        let Some(log) = self.log else { return };
        // One short write, so that every reader sees all of it or nothing. The note always has the same
        // length and is overwritten in place: truncating and rewriting a file makes some file systems flush
        // it at once, and the next commit would wait for that.
        let text = format!("{TITLE}\nlog {log}\nhead {head:020}\n");
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&self.path);
        if let Err(error) = file.and_then(|file| file.write_all_at(text.as_bytes(), 0)) {
            tracing::debug!(target: "everbus::sqlite", %error, "the head of the log could not be noted");
        }
    }
}

/// The position that the note names and the head of the log, if the log ends before that position.
///
/// The note is read before the log: another process commits first and notes afterwards, so a log that is read
/// later holds everything that the note names.
fn missing(path: &Path, log: LogId, conn: &Connection) -> Result<Option<(u64, u64)>> {
    let Some(noted) = read(path, log) else {
        return Ok(None);
    };
    let head = crate::log::head_of(conn)?;
    Ok((noted > head).then_some((noted, head)))
}

/// Removes the note of a database that no process has open: the file is complete without a write-ahead log.
pub(crate) fn retire(database: &Path) {
    let mut wal = database.as_os_str().to_owned();
    wal.push("-wal");
    if !Path::new(&wal).exists() {
        let _ = std::fs::remove_file(beside(database, ""));
    }
}

const LOST: &str = ".lost";

/// Compares the log with the note, and reports a loss that was found when the file was opened.
pub(crate) fn check(database: &Path, conn: &Connection, report: &mut CheckReport) -> Result<()> {
    let Ok(log) = log_id(conn) else { return Ok(()) };
    let short = missing(&beside(database, ""), log, conn)?;
    let lost = read(&beside(database, LOST), log);
    let detail = match (short, lost) {
        (None, None) => "ok".into(),
        (Some((noted, head)), _) => format!(
            "the log ends at {head}, and {noted} was acknowledged: its -wal was lost, cut or altered"
        ),
        (None, Some(lost)) => format!(
            "when the file was opened it had lost what was acknowledged up to {lost}: its -wal was lost, cut or \
             altered; delete {} once that is dealt with",
            beside(database, LOST).display()
        ),
    };
    report.add("what was acknowledged is there", detail == "ok", detail);
    Ok(())
}

/// The position that a note of this log names.
fn read(path: &Path, log: LogId) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    let mut lines = text.lines();
    let title = lines.next()? == TITLE;
    let same = lines.next()?.strip_prefix("log ")? == log.to_string();
    let head = lines.next()?.strip_prefix("head ")?.parse().ok()?;
    (title && same && text.ends_with('\n')).then_some(seq_from(head))
}

fn beside(database: &Path, suffix: &str) -> PathBuf {
    let mut path = database.as_os_str().to_owned();
    path.push(".log-head");
    path.push(suffix);
    path.into()
}
