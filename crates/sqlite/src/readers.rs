//! Queries, on a separate thread with its own connection.

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

use everbus_core::{BoxFuture, Code, Error, Result};
use rusqlite::Connection;
use tokio::sync::oneshot;

use crate::errors::from_sqlite;
use crate::file::open_reader;
use crate::rows::TypeNames;

type Query = Box<dyn FnOnce(&mut Reader) + Send>;

/// A reading connection with its cache of names.
pub(crate) struct Reader {
    pub(crate) conn: Connection,
    pub(crate) types: TypeNames,
}

impl Reader {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        Ok(Self {
            conn: open_reader(path)?,
            types: TypeNames::default(),
        })
    }

    /// Runs a query in one read transaction, so that all its statements see the same snapshot.
    pub(crate) fn snapshot<T>(&mut self, query: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.conn
            .execute_batch("BEGIN")
            .map_err(|e| from_sqlite("beginning to read", e))?;
        let result = query(self);
        // Also after an error: an open read transaction would keep the write-ahead log growing.
        let _ = self.conn.execute_batch("ROLLBACK");
        result
    }
}

/// The thread that answers queries. The first query starts it.
pub(crate) struct Readers {
    path: PathBuf,
    thread: Mutex<Thread>,
}

#[derive(Default)]
struct Thread {
    sender: Option<mpsc::Sender<Query>>,
    handle: Option<JoinHandle<()>>,
    closed: bool,
}

impl Readers {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self {
            path,
            thread: Mutex::default(),
        }
    }

    /// Runs a query and waits for its answer without blocking the executor.
    pub(crate) fn query<T: Send + 'static>(
        &self,
        query: impl FnOnce(&mut Reader) -> Result<T> + Send + 'static,
    ) -> BoxFuture<'static, Result<T>> {
        let (reply, answer) = oneshot::channel();
        let task: Query = Box::new(move |reader| {
            let _ = reply.send(reader.snapshot(query));
        });
        if let Err(e) = self.send(task) {
            return Box::pin(std::future::ready(Err(e)));
        }
        Box::pin(async move {
            answer.await.unwrap_or_else(|_| {
                Err(Error::new(
                    Code::Internal,
                    "the reader of the file has ended",
                ))
            })
        })
    }

    fn send(&self, task: Query) -> Result<()> {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.closed {
            return Err(Error::shutdown());
        }
        let task = match &thread.sender {
            None => task,
            Some(sender) => match sender.send(task) {
                Ok(()) => return Ok(()),
                // The thread has ended, which only a panic in a query can cause; start another.
                Err(mpsc::SendError(task)) => task,
            },
        };
        let mut reader = Reader::open(&self.path)?;
        let (sender, tasks) = mpsc::channel::<Query>();
        let handle = std::thread::Builder::new()
            .name("everbus-read".into())
            .spawn(move || tasks.into_iter().for_each(|task| task(&mut reader)))
            .map_err(|e| Error::new(Code::Internal, format!("no thread for reading: {e}")))?;
        let _ = sender.send(task);
        thread.sender = Some(sender);
        thread.handle = Some(handle);
        Ok(())
    }

    /// Answers the pending queries, then closes the connection.
    pub(crate) fn close(&self) {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        thread.closed = true;
        thread.sender = None;
        let handle = thread.handle.take();
        drop(thread);
        if let Some(handle) = handle {
            let _ = handle.join();
        }
    }
}
