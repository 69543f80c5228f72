//! The index: tasks by state and by job, in an SQLite file or in memory.
//!
//! It is built from the events alone, so it can be deleted at any time. A reader first updates it up to the end of the
//! log. Several processes may share a file: each applies the events after the cursor of the file in one transaction,
//! and drops its batch if another process has moved the cursor.

mod apply;
mod page;
mod query;

use std::path::{Path, PathBuf};
use std::str::FromStr as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use everbus::{Bus, Code, Cursor, Error, Pattern, Position, Result, TypedEvent as _};
use parking_lot::Mutex;
use rusqlite::{Connection, OptionalExtension as _};

use crate::events::{
    JobCreated, JobTasksAdded, TaskCompleted, TaskFailed, TaskHeartbeat, TaskPending,
    TaskProcessingFailed, TaskStarted, TaskTimeout,
};

use crate::handle::readable;

pub use page::Page;
pub use query::{JobRow, JobState, TaskFilter};

/// The version of the tables and of the rules for states. An index with another version is rebuilt from the events.
const LAYOUT: i64 = 3;
/// The SQLite application id in the header of the file: `Task` in ASCII.
const APPLICATION: u32 = 0x5461_736b;
/// Events per transaction.
const BATCH: usize = 2_000;

const SCHEMA: &str = "
CREATE TABLE IF NOT EXISTS meta (
  only INTEGER PRIMARY KEY CHECK (only = 0), cursor TEXT NOT NULL, last_id BLOB, last_place INTEGER
);
INSERT OR IGNORE INTO meta (only, cursor) VALUES (0, '0');
CREATE TABLE IF NOT EXISTS jobs (
  tenant TEXT NOT NULL, id TEXT NOT NULL, app TEXT, request_id TEXT NOT NULL, created_at INTEGER NOT NULL,
  place INTEGER NOT NULL, total INTEGER NOT NULL, refused TEXT,
  pending INTEGER NOT NULL DEFAULT 0, processing INTEGER NOT NULL DEFAULT 0,
  completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (tenant, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS jobs_by_place ON jobs (tenant, place);
CREATE INDEX IF NOT EXISTS jobs_unfinished ON jobs (created_at) WHERE completed < total AND refused IS NULL;
CREATE TABLE IF NOT EXISTS tasks (
  tenant TEXT NOT NULL, id TEXT NOT NULL, job TEXT, number INTEGER, name TEXT NOT NULL,
  state INTEGER, run INTEGER NOT NULL DEFAULT 0, attempt INTEGER NOT NULL DEFAULT 0,
  cancelled INTEGER NOT NULL DEFAULT 0, since INTEGER, started_at INTEGER, last_type TEXT, last_at INTEGER,
  effective_until INTEGER, worker_id TEXT, error TEXT, place INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (tenant, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS tasks_by_state ON tasks (tenant, state, since, id) WHERE state IS NOT NULL;
CREATE INDEX IF NOT EXISTS tasks_by_job ON tasks (tenant, job, number) WHERE job IS NOT NULL;
";

/// The index of tasks and jobs.
pub struct Index {
    conn: Mutex<Connection>,
    /// One reader of this process at a time updates the index; the others wait for it.
    catching_up: tokio::sync::Mutex<()>,
    /// Whether this process has checked that the index belongs to the log.
    checked: AtomicBool,
    path: Option<PathBuf>,
}

impl std::fmt::Debug for Index {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Index")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

impl Index {
    /// An index in memory. It reads all task events of the log when it is first used.
    pub fn in_memory() -> Result<Self> {
        let conn = Connection::open_in_memory().map_err(|e| failed("opening the index", e))?;
        Self::prepare(conn, None)
    }

    /// An index in a file of its own. A missing file is created, and a damaged index is replaced. Any other file is
    /// refused: with `InvalidSetting` if it is another database, with `Corrupt` if it is not a database.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let opened = Self::open_file(path).or_else(|error| {
            if error.code() != Code::Corrupt || !is_index(path) {
                return Err(error);
            }
            remove_files(path);
            Self::open_file(path)
        });
        opened.map_err(|error| {
            let what = format!("the index of tasks {} cannot be opened", path.display());
            Error::new(error.code(), what)
                .hint("an index has a file of its own, which is built from the events: choose another place for it, or delete it if it is an index")
                .caused_by(error)
        })
    }

    fn open_file(path: &Path) -> Result<Self> {
        let opening = |e| failed("opening the index", e);
        let conn = Connection::open(path).map_err(opening)?;
        conn.busy_timeout(Duration::from_secs(10))
            .map_err(opening)?;
        // This comes before any change of the file.
        check_own(&conn)?;
        conn.pragma_update(None, "journal_mode", "WAL")
            .map_err(opening)?;
        conn.pragma_update(None, "synchronous", "NORMAL")
            .map_err(opening)?;
        Self::prepare(conn, Some(path.to_owned()))
    }

    fn prepare(conn: Connection, path: Option<PathBuf>) -> Result<Self> {
        let opening = |e| failed("opening the index", e);
        let layout: i64 = conn
            .pragma_query_value(None, "user_version", |row| row.get(0))
            .map_err(opening)?;
        let made = format!(
            "{SCHEMA}PRAGMA application_id = {APPLICATION};PRAGMA user_version = {LAYOUT};COMMIT;"
        );
        let sql = match layout {
            LAYOUT => String::new(),
            0 => format!("BEGIN IMMEDIATE;{made}"),
            _ => format!(
                "BEGIN IMMEDIATE;DROP TABLE IF EXISTS meta;DROP TABLE IF EXISTS jobs;DROP TABLE IF EXISTS tasks;{made}"
            ),
        };
        conn.execute_batch(&sql).map_err(opening)?;
        conn.set_prepared_statement_cache_capacity(64);
        Ok(Self {
            conn: Mutex::new(conn),
            catching_up: tokio::sync::Mutex::default(),
            checked: AtomicBool::new(false),
            path,
        })
    }

    /// The file, if there is one.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Deletes the content. The next use rebuilds it from the events.
    pub fn clear(&self) -> Result<()> {
        let sql = "BEGIN IMMEDIATE; DELETE FROM tasks; DELETE FROM jobs;
                   UPDATE meta SET cursor = '0', last_id = NULL, last_place = NULL; COMMIT;";
        let conn = self.conn.lock();
        conn.execute_batch(sql)
            .map_err(|e| failed("clearing the index", e))
    }

    /// Applies all events up to the end of the log, and at least up to `upto`. Returns the cursor that was reached.
    pub async fn catch_up(&self, bus: &Bus, upto: Option<Position>) -> Result<Cursor> {
        let log = bus.log()?;
        let mut goal = log.head().await?;
        if let Some(position) = upto {
            goal.advance(position);
        }
        if self.checked.load(Ordering::Acquire) && self.cursor()?.reaches(&goal) {
            return self.cursor();
        }
        let _one = self.catching_up.lock().await;
        if !self.checked.load(Ordering::Acquire) {
            self.check_log(bus, &goal).await?;
            self.checked.store(true, Ordering::Release);
        }
        let patterns = patterns()?;
        loop {
            let from = self.cursor()?;
            if from.reaches(&goal) {
                return Ok(from);
            }
            let (records, next) = log.read(from.clone(), patterns.clone(), BATCH).await?;
            if next == from && records.is_empty() {
                // The next events are not visible yet: another process has an open transaction.
                tokio::time::sleep(Duration::from_millis(2)).await;
                continue;
            }
            let mut whole = Vec::with_capacity(records.len());
            for record in &records {
                whole.push(readable(bus, record).await?);
            }
            self.apply(&from, &next, &whole)?;
        }
    }

    /// Clears the index if it was built from another log, for example after the file of the events was replaced. Also
    /// clears it if retention has removed the last event that was applied.
    async fn check_log(&self, bus: &Bus, head: &Cursor) -> Result<()> {
        let last: Option<(Vec<u8>, i64)> = {
            let conn = self.conn.lock();
            let sql = "SELECT last_id, last_place FROM meta WHERE last_id IS NOT NULL";
            let row = conn.query_row(sql, [], |row| Ok((row.get(0)?, row.get(1)?)));
            row.optional().map_err(|e| failed("reading the index", e))?
        };
        let Some((id, place)) = last else {
            return Ok(());
        };
        if head.reaches(&self.cursor()?)
            && let Ok(id) = <[u8; 16]>::try_from(id)
        {
            let found = bus.lookup()?.find(everbus::EventId::from_bytes(id)).await?;
            if found.iter().any(|r| to_sql(r.position.place()) == place) {
                return Ok(());
            }
        }
        tracing::warn!(target: "everbus::jobs", "the index of tasks is built again: it does not belong to this log, or its last event was removed");
        self.clear()
    }

    /// The cursor up to which events were applied.
    pub fn cursor(&self) -> Result<Cursor> {
        let conn = self.conn.lock();
        read_cursor(&conn)
    }
}

fn read_cursor(conn: &Connection) -> Result<Cursor> {
    let reading = |e| failed("reading the index", e);
    let mut statement = conn
        .prepare_cached("SELECT cursor FROM meta")
        .map_err(reading)?;
    let text: String = statement.query_row([], |row| row.get(0)).map_err(reading)?;
    Cursor::from_str(&text)
}

/// The event types that the index needs.
pub(crate) fn patterns() -> Result<Vec<Pattern>> {
    let types = [
        TaskPending::TYPE,
        TaskStarted::TYPE,
        TaskProcessingFailed::TYPE,
        TaskCompleted::TYPE,
        TaskFailed::TYPE,
        TaskTimeout::TYPE,
        TaskHeartbeat::TYPE,
        JobCreated::TYPE,
        JobTasksAdded::TYPE,
    ];
    types.into_iter().map(Pattern::new).collect()
}

/// Refuses a database of another program: it may have tables with the same names.
fn check_own(conn: &Connection) -> Result<()> {
    let opening = |e| failed("opening the index", e);
    let application: u32 = conn
        .pragma_query_value(None, "application_id", |row| row.get(0))
        .map_err(opening)?;
    if application == APPLICATION {
        return Ok(());
    }
    let sql = "SELECT count(*) FROM sqlite_schema";
    let tables: i64 = conn.query_row(sql, [], |row| row.get(0)).map_err(opening)?;
    if application == 0 && tables == 0 {
        return Ok(());
    }
    Err(Error::new(
        Code::InvalidSetting,
        "the file is the database of another program, not an index of tasks",
    ))
}

/// Whether the header of a file says that it is an index of tasks.
fn is_index(path: &Path) -> bool {
    use std::io::Read as _;
    let mut header = [0; 72];
    let read = std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut header));
    read.is_ok()
        && header.starts_with(b"SQLite format 3")
        && header[68..] == APPLICATION.to_be_bytes()
}

fn remove_files(path: &Path) {
    for end in ["", "-wal", "-shm"] {
        let mut file = path.as_os_str().to_owned();
        file.push(end);
        // If the file cannot be removed, opening it gives the error.
        let _ = std::fs::remove_file(file);
    }
}

fn failed(doing: &str, error: rusqlite::Error) -> Error {
    let code = match error.sqlite_error_code() {
        Some(rusqlite::ErrorCode::DatabaseBusy | rusqlite::ErrorCode::DatabaseLocked) => Code::Busy,
        Some(rusqlite::ErrorCode::DiskFull) => Code::DiskFull,
        Some(rusqlite::ErrorCode::ReadOnly) => Code::ReadOnly,
        Some(rusqlite::ErrorCode::DatabaseCorrupt | rusqlite::ErrorCode::NotADatabase) => {
            Code::Corrupt
        }
        _ => Code::Internal,
    };
    Error::new(code, format!("{doing} of tasks failed"))
        .hint("the index is built from the events and can be deleted")
        .caused_by(error)
}

fn to_sql(place: u64) -> i64 {
    i64::try_from(place).unwrap_or(i64::MAX)
}
