//! The raw loops: plain SQLite doing the same amount of durable work, and nothing else.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use everbus_core::{Code, Error, Result};
use rusqlite::{Connection, Statement, params};
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

use crate::blocking;
use crate::sample::{self, TYPE};

const TABLE: &str = "CREATE TABLE raw(seq INTEGER PRIMARY KEY AUTOINCREMENT, id BLOB UNIQUE, \
                     type TEXT, payload BLOB, created_at INTEGER)";
const INSERT: &str = "INSERT INTO raw(id, type, payload, created_at) VALUES (?1, ?2, ?3, ?4)";

pub(crate) fn failed(error: rusqlite::Error) -> Error {
    Error::new(Code::StorageFailed, format!("the raw loop failed: {error}")).caused_by(error)
}

/// One connection, WAL, `synchronous=FULL`, default cache and autocheckpoint.
fn open(path: &Path) -> rusqlite::Result<Connection> {
    let connection = Connection::open(path)?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.execute_batch(TABLE)?;
    Ok(connection)
}

/// Runs a loop of plain SQLite off the executor.
pub(crate) async fn run<T: Send + 'static>(
    work: impl FnOnce() -> rusqlite::Result<T> + Send + 'static,
) -> Result<T> {
    blocking(move || work().map_err(failed)).await
}

fn insert(statement: &mut Statement<'_>, payload: &[u8]) -> rusqlite::Result<()> {
    let id = Uuid::now_v7();
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |t| i64::try_from(t.as_micros()).unwrap_or(i64::MAX));
    statement.execute(params![id.as_bytes(), TYPE, payload, now])?;
    Ok(())
}

/// A prepared single-row insert, 1000 rows per transaction.
pub(crate) async fn batched(path: PathBuf, events: u64) -> Result<Duration> {
    run(move || {
        let connection = open(&path)?;
        let payload = sample::payload();
        let began = Instant::now();
        let mut statement = connection.prepare(INSERT)?;
        let mut left = events;
        while left > 0 {
            connection.execute_batch("BEGIN IMMEDIATE")?;
            for _ in 0..left.min(1000) {
                insert(&mut statement, &payload)?;
            }
            connection.execute_batch("COMMIT")?;
            left -= left.min(1000);
        }
        Ok(began.elapsed())
    })
    .await
}

/// Deletes by ranges of the key, 1000 rows per transaction, with no other work.
pub(crate) async fn range_deletes(path: PathBuf, events: u64) -> Result<Duration> {
    batched(path.clone(), events).await?;
    run(move || {
        let connection = Connection::open(&path)?;
        connection.pragma_update(None, "synchronous", "FULL")?;
        let events = i64::try_from(events).unwrap_or(i64::MAX);
        let began = Instant::now();
        let mut statement = connection.prepare("DELETE FROM raw WHERE seq BETWEEN ?1 AND ?2")?;
        let mut from = 1;
        while from <= events {
            statement.execute((from, from + 999))?;
            from += 1000;
        }
        Ok(began.elapsed())
    })
    .await
}

/// Bare group commit: the same table fed by a channel, each task awaiting its commit.
pub(crate) async fn group_commit(path: PathBuf, tasks: u64, events: u64) -> Result<Duration> {
    let (to, writer) = start_group_commit(path).await?;
    let each = events.div_ceil(tasks);
    let payload = sample::payload();
    let began = Instant::now();
    let publishing = sample::from_tasks(tasks, || {
        let (to, payload) = (to.clone(), payload.clone());
        async move {
            for _ in 0..each {
                let (done, committed) = oneshot::channel::<()>();
                if to.send((payload.clone(), done)).is_err() || committed.await.is_err() {
                    break;
                }
            }
            Ok(())
        }
    });
    publishing.await?;
    let took = began.elapsed();
    drop(to);
    join(writer)?;
    Ok(took)
}

/// A payload, and the channel that is told of its commit.
pub(crate) type Queued = (bytes::Bytes, oneshot::Sender<()>);

type Writer = std::thread::JoinHandle<rusqlite::Result<()>>;

/// The thread of a bare group commit, and its queue.
pub(crate) async fn start_group_commit(
    path: PathBuf,
) -> Result<(mpsc::UnboundedSender<Queued>, Writer)> {
    let (to, from) = mpsc::unbounded_channel();
    let (ready, opened) = oneshot::channel();
    let writer = std::thread::spawn(move || commit_what_is_queued(&path, from, ready));
    if opened.await.is_err() {
        return Err(join(writer).err().unwrap_or_else(ended));
    }
    Ok((to, writer))
}

/// How many rows the raw table has.
pub(crate) fn count(path: &Path) -> Result<u64> {
    let connection = Connection::open(path).map_err(failed)?;
    let count = connection.query_row("SELECT count(*) FROM raw", [], |row| row.get::<_, i64>(0));
    Ok(u64::try_from(count.map_err(failed)?).unwrap_or(0))
}

fn commit_what_is_queued(
    path: &Path,
    mut from: mpsc::UnboundedReceiver<Queued>,
    ready: oneshot::Sender<()>,
) -> rusqlite::Result<()> {
    let connection = open(path)?;
    let mut statement = connection.prepare(INSERT)?;
    let _ = ready.send(());
    let mut batch: Vec<Queued> = Vec::new();
    while from.blocking_recv_many(&mut batch, 4096) > 0 {
        connection.execute_batch("BEGIN IMMEDIATE")?;
        for (payload, _) in &batch {
            insert(&mut statement, payload)?;
        }
        connection.execute_batch("COMMIT")?;
        for (_, done) in batch.drain(..) {
            let _ = done.send(());
        }
    }
    Ok(())
}

pub(crate) fn join(writer: Writer) -> Result<()> {
    match writer.join() {
        Ok(outcome) => outcome.map_err(failed),
        Err(_) => Err(ended()),
    }
}

fn ended() -> Error {
    Error::new(Code::Internal, "the raw writer ended early")
}

/// How long single-row commits take at a steady rate.
pub(crate) async fn paced_commits(
    path: PathBuf,
    events: u64,
    period: Duration,
) -> Result<Vec<Duration>> {
    run(move || {
        let connection = open(&path)?;
        let payload = sample::payload();
        let mut statement = connection.prepare(INSERT)?;
        let mut took = Vec::new();
        let mut next = Instant::now();
        for _ in 0..events {
            next += period;
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
            let began = Instant::now();
            connection.execute_batch("BEGIN IMMEDIATE")?;
            insert(&mut statement, &payload)?;
            connection.execute_batch("COMMIT")?;
            took.push(began.elapsed());
        }
        Ok(took)
    })
    .await
}
