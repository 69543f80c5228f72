//! The outbox in a user's database: one connection that reads and one that writes, each on its own thread.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, mpsc};

use everbus_core::{BoxFuture, Clock, Code, Error, Result};
use rusqlite::{Connection, OpenFlags};
use tokio::sync::oneshot;

use super::init::{NEEDED, missing};
use super::source::{Access, Source};
use super::{OutboxOptions, rows};
use crate::errors::from_sqlite;
use crate::file::locate;
use crate::readers::Readers;
use crate::schema::APPLICATION_ID;

pub(super) struct File {
    path: PathBuf,
    options: OutboxOptions,
    readers: Readers,
    writer: Mutex<Option<mpsc::Sender<Change>>>,
    /// The database is an Everbus file, opened like any other database.
    is_everbus: bool,
}

type Change = Box<dyn FnOnce(&Connection) + Send>;

pub(super) fn open(path: &Path, options: OutboxOptions) -> Result<Source<File>> {
    let path = locate(path, false)?;
    let mut file = File {
        is_everbus: false,
        readers: Readers::new(path.clone()),
        writer: Mutex::default(),
        path,
        options,
    };
    // Connects now, so that opening reports a mistake.
    let conn = file.connect()?;
    conn.prepare(NEEDED)
        .map_err(|e| missing(&conn, "opening the outbox", e))?;
    rows::holder(&conn, file.options.clock.now())?;
    let application: i32 = conn
        .query_row("PRAGMA application_id", [], |r| r.get(0))
        .map_err(|e| from_sqlite("opening the outbox", e))?;
    file.is_everbus = application == APPLICATION_ID;
    file.start(conn)?;
    Ok(Source::new(file))
}

impl File {
    fn connect(&self) -> Result<Connection> {
        let doing = |e| from_sqlite(&format!("opening {}", self.path.display()), e);
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let conn = Connection::open_with_flags(&self.path, flags).map_err(doing)?;
        conn.busy_timeout(self.options.busy_timeout)
            .map_err(doing)?;
        let mode: String = conn
            .query_row("PRAGMA journal_mode", [], |r| r.get(0))
            .map_err(doing)?;
        if mode.eq_ignore_ascii_case("wal") {
            // If a power loss undoes a mark, the row is published again, and the duplicate id is absorbed.
            conn.pragma_update(None, "synchronous", "NORMAL")
                .map_err(doing)?;
        }
        conn.pragma_update(None, "cache_size", "-2048")
            .map_err(doing)?;
        Ok(conn)
    }

    fn start(&self, conn: Connection) -> Result<mpsc::Sender<Change>> {
        let (sender, changes) = mpsc::channel::<Change>();
        std::thread::Builder::new()
            .name("everbus-outbox".into())
            .spawn(move || changes.into_iter().for_each(|change| change(&conn)))
            .map_err(|e| Error::new(Code::Internal, format!("no thread for the outbox: {e}")))?;
        *self.writer.lock().unwrap_or_else(PoisonError::into_inner) = Some(sender.clone());
        Ok(sender)
    }

    fn send(&self, change: Change) -> Result<()> {
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let change = match writer.as_ref().map(|writer| writer.send(change)) {
            Some(Ok(())) => return Ok(()),
            // The thread has ended, which only a panic can cause; start another.
            Some(Err(mpsc::SendError(change))) => change,
            None => return Err(Error::shutdown()),
        };
        drop(writer);
        let ended = |_| Error::new(Code::Internal, "the writer of the outbox has ended");
        self.start(self.connect()?)?.send(change).map_err(ended)
    }
}

impl Access for File {
    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn file(&self) -> &Path {
        &self.path
    }

    fn clock(&self) -> &Arc<dyn Clock> {
        &self.options.clock
    }

    fn is_own(&self) -> bool {
        false
    }

    fn has_retention(&self) -> bool {
        self.is_everbus
    }

    fn read<T: Send + 'static>(
        &self,
        query: impl FnOnce(&Connection) -> Result<T> + Send + 'static,
    ) -> BoxFuture<'static, Result<T>> {
        self.readers.query(|reader| query(&reader.conn))
    }

    fn write<T: Send + 'static>(
        &self,
        change: impl FnOnce(&Connection) -> Result<T> + Send + 'static,
    ) -> BoxFuture<'static, Result<T>> {
        let (reply, answer) = oneshot::channel();
        let sent = self.send(Box::new(move |conn| {
            let _ = reply.send(in_transaction(conn, change));
        }));
        Box::pin(async move {
            sent?;
            answer.await.unwrap_or_else(|_| {
                Err(Error::new(
                    Code::Internal,
                    "the writer of the outbox has ended",
                ))
            })
        })
    }
}

fn in_transaction<T>(
    conn: &Connection,
    change: impl FnOnce(&Connection) -> Result<T>,
) -> Result<T> {
    let doing = |e| from_sqlite("writing to the outbox", e);
    conn.execute_batch("BEGIN IMMEDIATE").map_err(doing)?;
    let changed = change(conn).and_then(|value| {
        conn.execute_batch("COMMIT").map_err(doing)?;
        Ok(value)
    });
    if changed.is_err() && !conn.is_autocommit() {
        let _ = conn.execute_batch("ROLLBACK");
    }
    changed
}
