//! Objects whose events are gone. Noted in the transaction that removes the event
//! ([`Writer::note_orphans`]), forgotten when the object has been deleted.

use std::path::{Path, PathBuf};

use everbus_core::{BoxFuture, EventId, Orphan, Orphans, Result, Timestamp};
use rusqlite::params;

use crate::engine::SqliteEngine;
use crate::errors::from_sqlite;
use crate::readers::Reader;
use crate::rows::to_sql;
use crate::state::micros;
use crate::writer::Writer;

/// The directory beside a file in which its objects go.
pub(crate) fn beside(database: &Path) -> PathBuf {
    let mut name = database.as_os_str().to_owned();
    name.push(".objects");
    PathBuf::from(name)
}

impl Writer {
    /// Notes the objects of all events in a range of the log, both ends included. To be called in the
    /// transaction that removes the events, before they are removed.
    pub(crate) fn note_orphans(&self, lo: u64, hi: u64) -> Result<()> {
        // Few events have attributes that say "overflow" at all: only those are read as JSON.
        self.conn
            .prepare_cached(
                "INSERT OR REPLACE INTO orphaned_objects (bucket, key, id, since)
                 SELECT attrs ->> '$.overflow.bucket', attrs ->> '$.overflow.key', id, ?3 FROM log
                 WHERE seq BETWEEN ?1 AND ?2 AND attrs IS NOT NULL
                   AND iif(instr(attrs, '\"overflow\"') > 0,
                           typeof(attrs ->> '$.overflow.bucket') = 'text'
                             AND typeof(attrs ->> '$.overflow.key') = 'text',
                           0)",
            )
            .and_then(|mut s| s.execute(params![to_sql(lo), to_sql(hi), micros(self.clock.now())]))
            .map(drop)
            .map_err(|e| from_sqlite("noting objects without their events", e))
    }

    fn forget_orphans(&mut self, orphans: &[Orphan]) -> Result<()> {
        let doing = |e| from_sqlite("forgetting objects without their events", e);
        let mut delete = self
            .conn
            .prepare_cached("DELETE FROM orphaned_objects WHERE bucket = ?1 AND key = ?2")
            .map_err(doing)?;
        for orphan in orphans {
            delete
                .execute([&orphan.bucket, &orphan.key])
                .map_err(doing)?;
        }
        Ok(())
    }
}

impl Orphans for SqliteEngine {
    fn list(&self, after: Option<Orphan>, limit: usize) -> BoxFuture<'_, Result<Vec<Orphan>>> {
        self.handle
            .query(move |reader| list(reader, after.as_ref(), limit))
    }

    fn forget(&self, orphans: Vec<Orphan>) -> BoxFuture<'_, Result<()>> {
        self.handle
            .job(move |writer| writer.forget_orphans(&orphans))
    }
}

fn list(reader: &Reader, after: Option<&Orphan>, limit: usize) -> Result<Vec<Orphan>> {
    let doing = |e| from_sqlite("reading objects without their events", e);
    let mut statement = reader
        .conn
        .prepare_cached(
            "SELECT bucket, key, id, since FROM orphaned_objects
             WHERE ?1 IS NULL OR (bucket, key) > (?1, ?2) ORDER BY bucket, key LIMIT ?3",
        )
        .map_err(doing)?;
    let after = after.map(|orphan| (orphan.bucket.as_str(), orphan.key.as_str()));
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let orphans = statement
        .query_map(
            params![after.map(|a| a.0), after.map(|a| a.1), limit],
            |row| {
                Ok(Orphan {
                    bucket: row.get(0)?,
                    key: row.get(1)?,
                    id: EventId::from_bytes(row.get(2)?),
                    since: Timestamp::from_micros(row.get(3)?),
                })
            },
        )
        .and_then(Iterator::collect);
    orphans.map_err(doing)
}
