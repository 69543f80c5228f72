//! Values by key, in the table `everbus_kv`.
//!
//! Revisions come from a counter of the file that every change moves, deletions too. A watcher reads the counter after
//! each change of this process, when the next value expires, and otherwise every [`POLL`], because other processes
//! change the same file.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use everbus_core::{
    ABSENT, BoxFuture, Error, KeyValue, KvChange, KvEntry, KvPut, KvSeen, KvWatch, Result,
    Timestamp, check_kv_names, revision_conflict,
};
use rusqlite::{Connection, params};

use crate::broker::SqliteEngine;
use crate::handle::Handle;
use crate::rows::{seq_from, to_sql};
use crate::sql::Sql as _;

/// How soon a watcher sees a change of another process.
const POLL: Duration = Duration::from_millis(50);

const COUNTER: &str = "kv_revision";

impl KeyValue for SqliteEngine {
    fn get(&self, bucket: String, key: String) -> BoxFuture<'_, Result<Option<KvEntry>>> {
        let now = self.handle.clock.now().as_micros();
        self.checked(&bucket, Some(&key)).unwrap_or_else(|| {
            self.handle.query(move |reader| {
                let sql = "SELECT value, revision FROM everbus_kv
                           WHERE bucket = ?1 AND key = ?2 AND (expires_at IS NULL OR expires_at > ?3)";
                let doing = "reading a value";
                let row: Option<(Vec<u8>, i64)> =
                    reader.conn.first(doing, sql, params![bucket, key, now])?;
                Ok(row.map(|(value, revision)| KvEntry::new(key, value, seq_from(revision))))
            })
        })
    }

    fn put(
        &self,
        bucket: String,
        key: String,
        value: Bytes,
        put: KvPut,
    ) -> BoxFuture<'_, Result<u64>> {
        self.checked(&bucket, Some(&key)).unwrap_or_else(|| {
            self.changed(move |conn, now| {
                if let Err(conflict) = expect(conn, &bucket, &key, put.expected)? {
                    return Ok(Err(conflict));
                }
                let revision = next_revision(conn)?;
                let until = put.ttl.map(|ttl| now.plus(ttl).as_micros());
                let sql = "INSERT INTO everbus_kv (bucket, key, value, revision, expires_at)
                           VALUES (?1, ?2, ?3, ?4, ?5)
                           ON CONFLICT (bucket, key) DO UPDATE SET value = excluded.value,
                             revision = excluded.revision, expires_at = excluded.expires_at";
                let values = params![bucket, key, value.as_ref(), revision, until];
                conn.run("putting a value", sql, values)?;
                Ok(Ok(seq_from(revision)))
            })
        })
    }

    fn delete(
        &self,
        bucket: String,
        key: String,
        expected: Option<u64>,
    ) -> BoxFuture<'_, Result<bool>> {
        self.checked(&bucket, Some(&key)).unwrap_or_else(|| {
            self.changed(move |conn, _| {
                if let Err(conflict) = expect(conn, &bucket, &key, expected)? {
                    return Ok(Err(conflict));
                }
                // Watchers read the bucket again when the counter has changed.
                next_revision(conn)?;
                let sql = "DELETE FROM everbus_kv WHERE bucket = ?1 AND key = ?2";
                let removed = conn.change("deleting a value", sql, params![bucket, key])?;
                Ok(Ok(removed > 0))
            })
        })
    }

    fn watch(&self, bucket: String) -> BoxFuture<'_, Result<Box<dyn KvWatch>>> {
        let refused = check_kv_names(&bucket, None).err();
        let watcher = Watcher {
            handle: self.handle.clone(),
            bucket: bucket.into(),
            seen: KvSeen::default(),
            counter: None,
            expires: None,
        };
        Box::pin(std::future::ready(match refused {
            Some(error) => Err(error),
            None => Ok(Box::new(watcher) as Box<dyn KvWatch>),
        }))
    }
}

impl SqliteEngine {
    /// Checks the names, and answers with an error if they are invalid.
    fn checked<T: Send + 'static>(
        &self,
        bucket: &str,
        key: Option<&str>,
    ) -> Option<BoxFuture<'static, Result<T>>> {
        let error = check_kv_names(bucket, key).err()?;
        Some(Box::pin(std::future::ready(Err(error))))
    }

    /// Changes values in the writer's transaction. A conflict is an answer and undoes nothing else.
    fn changed<T: Send + 'static>(
        &self,
        change: impl FnOnce(&Connection, Timestamp) -> Result<Result<T>> + Send + 'static,
    ) -> BoxFuture<'static, Result<T>> {
        let handle = self.handle.clone();
        let changed = self.handle.job_then(
            move |writer| {
                let now = writer.tx.clock.now();
                let sql = "DELETE FROM everbus_kv WHERE expires_at <= ?1";
                let conn = &writer.tx.conn;
                conn.run("removing expired values", sql, [now.as_micros()])?;
                change(conn, now)
            },
            move |answer| {
                handle.values.notify_waiters();
                answer
            },
        );
        Box::pin(async move { changed.await? })
    }
}

/// Compares the revision of a key. Expired values were removed before.
fn expect(
    conn: &Connection,
    bucket: &str,
    key: &str,
    expected: Option<u64>,
) -> Result<Result<(), Error>> {
    let Some(expected) = expected else {
        return Ok(Ok(()));
    };
    let sql = "SELECT revision FROM everbus_kv WHERE bucket = ?1 AND key = ?2";
    let found: Option<i64> = conn.first("reading a revision", sql, params![bucket, key])?;
    let found = found.map(seq_from);
    Ok(match found.unwrap_or(ABSENT) == expected {
        true => Ok(()),
        false => Err(revision_conflict(key, expected, found)),
    })
}

fn next_revision(conn: &Connection) -> Result<i64> {
    let sql = "INSERT INTO meta (key, value) VALUES (?1, 1)
               ON CONFLICT (key) DO UPDATE SET value = value + 1 RETURNING value";
    conn.one("counting revisions", sql, [COUNTER])
}

struct Watcher {
    handle: Arc<Handle>,
    bucket: Arc<str>,
    seen: KvSeen,
    /// The counter at the last read.
    counter: Option<i64>,
    /// When the next value expires.
    expires: Option<Timestamp>,
}

/// The result of a read: the counter, and the values of the bucket if they may have changed.
type Found = (i64, Option<Vec<Row>>);
type Row = (String, Option<Vec<u8>>, i64, Option<i64>);

impl Watcher {
    async fn look(&mut self) -> Result<()> {
        let now = self.handle.clock.now();
        let expired = self.expires.is_some_and(|at| at <= now);
        let (bucket, last) = (self.bucket.clone(), self.seen.last());
        let before = self.counter.filter(|_| !expired);
        let found = self.handle.query(move |reader| -> Result<Found> {
            let doing = "watching values";
            let sql = "SELECT coalesce((SELECT value FROM meta WHERE key = ?1), 0)";
            let counter: i64 = reader.conn.one(doing, sql, [COUNTER])?;
            if before == Some(counter) {
                return Ok((counter, None));
            }
            let sql = "SELECT key, CASE WHEN revision > ?2 THEN value END, revision, expires_at
                       FROM everbus_kv WHERE bucket = ?1 AND (expires_at IS NULL OR expires_at > ?3)";
            let values = params![&*bucket, to_sql(last), now.as_micros()];
            let rows = reader.conn.all(doing, sql, values)?;
            Ok((counter, Some(rows)))
        });
        let (counter, rows) = found.await?;
        self.counter = Some(counter);
        let Some(rows) = rows else {
            return Ok(());
        };
        let times = rows.iter().filter_map(|(_, _, _, at)| *at);
        self.expires = times.min().map(Timestamp::from_micros);
        self.seen.compare(rows.into_iter().map(|row| {
            let (key, value, revision, _) = row;
            (key, value.map(Bytes::from), seq_from(revision))
        }));
        Ok(())
    }
}

impl KvWatch for Watcher {
    fn next(&mut self) -> BoxFuture<'_, Result<KvChange>> {
        Box::pin(async move {
            let handle = self.handle.clone();
            loop {
                if let Some(change) = self.seen.take() {
                    return Ok(change);
                }
                // Registered before the read, so that no notification between the two is lost.
                let mut changed = std::pin::pin!(handle.values.notified());
                changed.as_mut().enable();
                self.look().await?;
                if let Some(change) = self.seen.take() {
                    return Ok(change);
                }
                // Check again in both cases.
                let _ = tokio::time::timeout(POLL, changed).await;
            }
        })
    }
}
