//! Notes about objects without an event, and the identity of the log.
//!
//! An object is noted before it is stored, and again in the transaction that removes its event
//! ([`note_removed`]). The note is removed by the append of the event ([`born`]), and when the object has been
//! deleted.

use everbus_core::{
    BoxFuture, Event, EventId, LogId, Orphan, Orphans, Overflow, Result, Timestamp,
};

use crate::Postgres;
use crate::errors::damaged;
use crate::pool::Sql;
use crate::rows::get;

/// Removes the notes of the objects that these new events refer to, in the transaction of the append.
pub(crate) async fn born(db: &impl Sql, events: &[(u64, &Event)]) -> Result<()> {
    let objects: Vec<&Overflow> = events.iter().filter_map(|(_, e)| e.overflow()).collect();
    if objects.is_empty() {
        return Ok(());
    }
    let buckets: Vec<&str> = objects.iter().map(|o| o.bucket.as_str()).collect();
    let keys: Vec<&str> = objects.iter().map(|o| o.key.as_str()).collect();
    let sql = "DELETE FROM everbus.orphaned_objects
               WHERE (bucket, key) IN (SELECT * FROM unnest($1, $2))";
    let doing = "forgetting that an object has no event";
    db.execute(doing, sql, &[&buckets, &keys]).await?;
    Ok(())
}

/// Notes the objects of these events. Call it in the transaction that removes the events, before they are
/// removed.
pub(crate) async fn note_removed(db: &impl Sql, seqs: &[i64], now: i64) -> Result<()> {
    // Few events have attributes that contain "overflow": only those are read as JSON.
    let sql = "INSERT INTO everbus.orphaned_objects (bucket, key, id, since, unborn)
               SELECT DISTINCT ON (o.object ->> 'bucket', o.object ->> 'key')
                 o.object ->> 'bucket', o.object ->> 'key', l.id, $2, false
               FROM everbus.log l
               CROSS JOIN LATERAL (SELECT everbus.everbus_json(l.attrs) -> 'overflow') AS o (object)
               WHERE l.seq = ANY ($1) AND position('\"overflow\"' IN l.attrs) > 0
                 AND json_typeof(o.object -> 'bucket') = 'string'
                 AND json_typeof(o.object -> 'key') = 'string'
               ON CONFLICT (bucket, key) DO UPDATE SET
                 id = excluded.id, since = excluded.since, unborn = excluded.unborn";
    let doing = "noting objects without their events";
    db.execute(doing, sql, &[&seqs, &now]).await?;
    Ok(())
}

/// The notes as columns.
struct Notes<'a> {
    buckets: Vec<&'a str>,
    keys: Vec<&'a str>,
    ids: Vec<uuid::Uuid>,
    since: Vec<i64>,
    unborn: Vec<bool>,
}

impl<'a> Notes<'a> {
    /// Sorted by key, each key once: two transactions that write the same notes wait for each other without a deadlock.
    fn of(orphans: &'a [Orphan]) -> Self {
        let mut sorted: Vec<&Orphan> = orphans.iter().collect();
        sorted.sort_by(|a, b| (&a.bucket, &a.key).cmp(&(&b.bucket, &b.key)));
        sorted.dedup_by(|a, b| (&a.bucket, &a.key) == (&b.bucket, &b.key));
        let of = sorted.iter();
        Self {
            buckets: of.clone().map(|o| o.bucket.as_str()).collect(),
            keys: of.clone().map(|o| o.key.as_str()).collect(),
            ids: of.clone().map(|o| o.id.as_uuid()).collect(),
            since: of.clone().map(|o| o.since.as_micros()).collect(),
            unborn: of.map(|o| o.unborn).collect(),
        }
    }
}

impl Orphans for Postgres {
    fn list(&self) -> BoxFuture<'_, Result<Vec<Orphan>>> {
        Box::pin(async move {
            let sql = "SELECT bucket, key, id, since, unborn FROM everbus.orphaned_objects
                       ORDER BY bucket, key";
            let db = self.conn().await?;
            let rows = db
                .query("reading objects without their events", sql, &[])
                .await?;
            let read = |row: &tokio_postgres::Row| {
                Ok(Orphan {
                    bucket: get(row, 0)?,
                    key: get(row, 1)?,
                    id: EventId::from(get::<uuid::Uuid>(row, 2)?),
                    since: Timestamp::from_micros(get(row, 3)?),
                    unborn: get(row, 4)?,
                })
            };
            rows.iter().map(read).collect()
        })
    }

    fn note(&self, orphans: Vec<Orphan>) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let notes = Notes::of(&orphans);
            let sql = "INSERT INTO everbus.orphaned_objects (bucket, key, id, since, unborn)
                       SELECT * FROM unnest($1, $2, $3, $4, $5)
                       ON CONFLICT (bucket, key) DO UPDATE SET
                         id = excluded.id, since = excluded.since, unborn = excluded.unborn";
            let values: crate::pool::Params<'_> = &[
                &notes.buckets,
                &notes.keys,
                &notes.ids,
                &notes.since,
                &notes.unborn,
            ];
            let db = self.conn().await?;
            db.execute("noting objects before they are put", sql, values)
                .await?;
            Ok(())
        })
    }

    fn forget(&self, orphans: Vec<Orphan>) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let notes = Notes::of(&orphans);
            // Only the notes that were read: there may be newer notes of the same objects.
            let sql = "DELETE FROM everbus.orphaned_objects
                       WHERE (bucket, key, since, unborn) IN (SELECT * FROM unnest($1, $2, $3, $4))";
            let values: crate::pool::Params<'_> =
                &[&notes.buckets, &notes.keys, &notes.since, &notes.unborn];
            let db = self.conn().await?;
            db.execute("forgetting objects without their events", sql, values)
                .await?;
            Ok(())
        })
    }

    fn log_id(&self) -> BoxFuture<'_, Result<LogId>> {
        Box::pin(async move {
            let db = self.conn().await?;
            let sql = "SELECT value FROM everbus.meta WHERE key = 'log_id'";
            let row = db.first("reading the id of the log", sql, &[]).await?;
            let missing = || damaged("the schema does not say which log it is");
            let row = row.ok_or_else(missing)?;
            let id = uuid::Uuid::try_parse(get::<&str>(&row, 0)?).map_err(|_| missing())?;
            Ok(LogId::from_bytes(*id.as_bytes()))
        })
    }
}
