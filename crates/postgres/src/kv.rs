//! Values by key, in the table `kv`.
//!
//! Revisions are counted for each bucket, in a row that every change locks. So revisions commit in order, and a
//! watcher that has seen one has seen all before it. A watcher looks after each wake-up of the engine, and otherwise
//! every [`POLL`] while a value will expire, or at the pace of the poll of the options.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use everbus_core::{
    ABSENT, BoxFuture, KeyValue, KvChange, KvEntry, KvPut, KvSeen, KvWatch, Result, Timestamp,
    check_kv_names, revision_conflict,
};

use crate::Postgres;
use crate::pool::{Params, Sql, transaction};
use crate::rows::{get, get_seq, to_sql};

/// How soon a watcher sees that a value has expired.
const POLL: Duration = Duration::from_millis(100);

/// The values of an engine.
pub(crate) struct Values(pub(crate) Arc<Postgres>);

impl KeyValue for Values {
    fn get(&self, bucket: String, key: String) -> BoxFuture<'_, Result<Option<KvEntry>>> {
        Box::pin(async move {
            check_kv_names(&bucket, Some(&key))?;
            let db = self.0.conn().await?;
            let sql = "SELECT value, revision FROM everbus.kv
                       WHERE bucket = $1 AND key = $2 AND (expires_at IS NULL OR expires_at > $3)";
            let row = db
                .first("reading a value", sql, &[&bucket, &key, &self.0.micros()])
                .await?;
            let Some(row) = row else {
                return Ok(None);
            };
            let value = Bytes::copy_from_slice(get(&row, 0)?);
            Ok(Some(KvEntry::new(key, value, get_seq(&row, 1)?)))
        })
    }

    fn put(
        &self,
        bucket: String,
        key: String,
        value: Bytes,
        put: KvPut,
    ) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            check_kv_names(&bucket, Some(&key))?;
            self.0.check_open()?;
            let doing = "putting a value";
            let now = self.0.now();
            let until = put.ttl.map(|ttl| now.plus(ttl).as_micros());
            let revision: u64 = transaction!(self.0.pool, doing, |tx| {
                let revision = next_revision(tx, &bucket, now).await?;
                expect(tx, &bucket, &key, put.expected).await?;
                let sql = "INSERT INTO everbus.kv (bucket, key, value, revision, expires_at)
                           VALUES ($1, $2, $3, $4, $5)
                           ON CONFLICT (bucket, key) DO UPDATE SET value = excluded.value,
                             revision = excluded.revision, expires_at = excluded.expires_at";
                let values: Params<'_> = &[&bucket, &key, &&value[..], &to_sql(revision), &until];
                tx.execute(doing, sql, values).await?;
                Ok(revision)
            })?;
            self.0.bell.ring();
            Ok(revision)
        })
    }

    fn delete(
        &self,
        bucket: String,
        key: String,
        expected: Option<u64>,
    ) -> BoxFuture<'_, Result<bool>> {
        Box::pin(async move {
            check_kv_names(&bucket, Some(&key))?;
            self.0.check_open()?;
            let (doing, now) = ("deleting a value", self.0.now());
            let removed: u64 = transaction!(self.0.pool, doing, |tx| {
                // Watchers look again when the revision has moved.
                next_revision(tx, &bucket, now).await?;
                expect(tx, &bucket, &key, expected).await?;
                let sql = "DELETE FROM everbus.kv WHERE bucket = $1 AND key = $2";
                tx.execute(doing, sql, &[&bucket, &key]).await
            })?;
            self.0.bell.ring();
            Ok(removed > 0)
        })
    }

    fn watch(&self, bucket: String) -> BoxFuture<'_, Result<Box<dyn KvWatch>>> {
        Box::pin(async move {
            check_kv_names(&bucket, None)?;
            self.0.check_open()?;
            let watcher = Watcher {
                engine: self.0.clone(),
                bucket,
                seen: KvSeen::default(),
                revision: None,
                expires: None,
            };
            Ok(Box::new(watcher) as Box<dyn KvWatch>)
        })
    }
}

/// The next revision of a bucket, whose row is locked from here on. Removes values that have expired.
async fn next_revision(db: &impl Sql, bucket: &String, now: Timestamp) -> Result<u64> {
    let doing = "counting revisions";
    let sql = "INSERT INTO everbus.kv_buckets AS b (bucket, revision) VALUES ($1, 1)
               ON CONFLICT (bucket) DO UPDATE SET revision = b.revision + 1 RETURNING revision";
    let row = db.one(doing, sql, &[bucket]).await?;
    let sql = "DELETE FROM everbus.kv WHERE bucket = $1 AND expires_at <= $2";
    db.execute(doing, sql, &[bucket, &now.as_micros()]).await?;
    get_seq(&row, 0)
}

/// Compares the revision of a key. Expired values are gone by now.
async fn expect(db: &impl Sql, bucket: &String, key: &String, expected: Option<u64>) -> Result<()> {
    let Some(expected) = expected else {
        return Ok(());
    };
    let sql = "SELECT revision FROM everbus.kv WHERE bucket = $1 AND key = $2";
    let row = db.first("reading a revision", sql, &[bucket, key]).await?;
    let found = row.map(|row| get_seq(&row, 0)).transpose()?;
    match found.unwrap_or(ABSENT) == expected {
        true => Ok(()),
        false => Err(revision_conflict(key, expected, found)),
    }
}

struct Watcher {
    engine: Arc<Postgres>,
    bucket: String,
    seen: KvSeen,
    /// The revision of the bucket at the last look.
    revision: Option<i64>,
    /// When the next value expires.
    expires: Option<Timestamp>,
}

impl Watcher {
    async fn look(&mut self) -> Result<()> {
        let doing = "watching values";
        let now = self.engine.now();
        let expired = self.expires.is_some_and(|at| at <= now);
        let db = self.engine.conn().await?;
        let sql = "SELECT revision FROM everbus.kv_buckets WHERE bucket = $1";
        let row = db.first(doing, sql, &[&self.bucket]).await?;
        let revision = row.map_or(Ok(0), |row| get(&row, 0))?;
        if self.revision == Some(revision) && !expired {
            return Ok(());
        }
        let sql = "SELECT key, CASE WHEN revision > $2 THEN value END, revision, expires_at
                   FROM everbus.kv WHERE bucket = $1 AND (expires_at IS NULL OR expires_at > $3)";
        let values: Params<'_> = &[&self.bucket, &to_sql(self.seen.last()), &now.as_micros()];
        let rows = db.query(doing, sql, values).await?;
        let mut found = Vec::with_capacity(rows.len());
        let mut next: Option<i64> = None;
        for row in &rows {
            let value: Option<&[u8]> = get(row, 1)?;
            found.push((
                get(row, 0)?,
                value.map(Bytes::copy_from_slice),
                get_seq(row, 2)?,
            ));
            let until: Option<i64> = get(row, 3)?;
            next = next.into_iter().chain(until).min();
        }
        self.revision = Some(revision);
        self.expires = next.map(Timestamp::from_micros);
        self.seen.compare(found);
        Ok(())
    }
}

impl KvWatch for Watcher {
    fn next(&mut self) -> BoxFuture<'_, Result<KvChange>> {
        Box::pin(async move {
            loop {
                if let Some(change) = self.seen.take() {
                    return Ok(change);
                }
                // Registered before the look, so that no wake-up between the two is lost.
                let engine = self.engine.clone();
                let woken = engine.bell.here.notified();
                self.look().await?;
                if let Some(change) = self.seen.take() {
                    return Ok(change);
                }
                let pause = match self.expires {
                    Some(_) => POLL,
                    None => engine.options.poll,
                };
                let _ = tokio::time::timeout(pause, woken).await;
            }
        })
    }
}
