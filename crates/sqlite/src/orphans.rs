//! Notes about objects without an event, and the identity of the log.
//!
//! An object is noted before it is stored, and again in the transaction that removes its event
//! ([`note_orphans`]). The note is removed by the append of the event ([`born`]), and when the object
//! has been deleted.

use std::path::{Path, PathBuf};

use everbus_core::{
    BoxFuture, Code, Error, EventId, LogId, Orphan, Orphans, Overflow, Result, Timestamp,
};
use rusqlite::{Connection, params};

use crate::broker::SqliteEngine;
use crate::file::open_reader;
use crate::readers::Reader;
use crate::rows::{micros, seq_from, to_sql};
use crate::sql::Sql as _;
use crate::tx::Tx;

/// The directory beside a file that holds its objects.
pub(crate) fn beside(database: &Path) -> PathBuf {
    let mut name = database.as_os_str().to_owned();
    name.push(".objects");
    PathBuf::from(name)
}

/// Notes the objects of all events in a range of the log, both ends included. Call it in the transaction
/// that removes the events, before they are removed.
pub(crate) fn note_orphans(tx: &Tx, lo: u64, hi: u64) -> Result<()> {
    // Few events have attributes that contain "overflow": only those are read as JSON.
    tx.conn.run(
        "noting objects without their events",
        "INSERT OR REPLACE INTO orphaned_objects (bucket, key, id, since, unborn)
         SELECT attrs ->> '$.overflow.bucket', attrs ->> '$.overflow.key', id, ?3, 0 FROM log
         WHERE seq BETWEEN ?1 AND ?2 AND attrs IS NOT NULL
           AND iif(instr(attrs, '\"overflow\"') > 0,
                   typeof(attrs ->> '$.overflow.bucket') = 'text'
                     AND typeof(attrs ->> '$.overflow.key') = 'text',
                   0)",
        params![to_sql(lo), to_sql(hi), tx.now()],
    )
}

fn note_unborn(tx: &Tx, orphans: &[Orphan]) -> Result<()> {
    let sql = "INSERT OR REPLACE INTO orphaned_objects (bucket, key, id, since, unborn)
               VALUES (?1, ?2, ?3, ?4, ?5)";
    orphans.iter().try_for_each(|o| {
        let note = params![o.bucket, o.key, o.id.as_bytes(), micros(o.since), o.unborn];
        tx.conn.run("noting objects before they are put", sql, note)
    })
}

fn forget_orphans(tx: &Tx, orphans: &[Orphan]) -> Result<()> {
    // Only the note that was read: there may be a newer note of the same object.
    let sql = "DELETE FROM orphaned_objects
               WHERE bucket = ?1 AND key = ?2 AND since = ?3 AND unborn = ?4";
    orphans.iter().try_for_each(|o| {
        let note = params![o.bucket, o.key, micros(o.since), o.unborn];
        tx.conn
            .run("forgetting objects without their events", sql, note)
    })
}

impl Orphans for SqliteEngine {
    fn list(&self) -> BoxFuture<'_, Result<Vec<Orphan>>> {
        self.handle.query(|reader| list(reader))
    }

    fn note(&self, orphans: Vec<Orphan>) -> BoxFuture<'_, Result<()>> {
        self.handle
            .job(move |writer| note_unborn(&writer.tx, &orphans))
    }

    fn forget(&self, orphans: Vec<Orphan>) -> BoxFuture<'_, Result<()>> {
        self.handle
            .job(move |writer| forget_orphans(&writer.tx, &orphans))
    }

    fn log_id(&self) -> BoxFuture<'_, Result<LogId>> {
        self.handle.query(|reader| log_id(&reader.conn))
    }
}

/// Removes the note of an event's object, in the transaction of the append.
pub(crate) fn born(conn: &Connection, overflow: &Overflow) -> Result<()> {
    let doing = "forgetting that an object has no event";
    let sql = "DELETE FROM orphaned_objects WHERE bucket = ?1 AND key = ?2";
    conn.run(doing, sql, [&overflow.bucket, &overflow.key])
}

/// The identity of the log in a file.
pub(crate) fn log_id(conn: &Connection) -> Result<LogId> {
    let id: Option<[u8; 16]> = conn.first(
        "reading the id of the log",
        "SELECT value FROM meta WHERE key = 'log_id'",
        [],
    )?;
    let missing = || Error::of_file(Code::Corrupt, "the file does not say which log it is");
    id.map(LogId::from_bytes).ok_or_else(missing)
}

/// Gives a file a new log identity and removes its notes, because the noted objects may belong to the log that this
/// file is a copy of. Call it in a transaction, or on a file that is not in place yet.
pub(crate) fn renew(conn: &Connection) -> Result<LogId> {
    let doing = "giving the log a new id";
    let id = LogId::new();
    let sql = "INSERT OR REPLACE INTO meta (key, value) VALUES ('log_id', ?1)";
    conn.run(doing, sql, [id.as_bytes()])?;
    conn.run(doing, "DELETE FROM orphaned_objects", [])?;
    Ok(id)
}

/// A page of references, and the position to continue from.
pub type References = (Vec<(EventId, Overflow)>, Option<u64>);

/// Returns the objects that the events of a file refer to, each with the id of its event, one page at a time
/// in the order of the log. A page holds the references after a position, and the position to continue from;
/// `None` at the end. The file is only read, in short transactions; it may be in use.
pub fn references(file: &Path, after: u64) -> Result<References> {
    /// Events read in one transaction.
    const PAGE: u64 = 20_000;
    let doing = "reading which objects are in use";
    let conn = open_reader(file)?;
    let sql = "SELECT min(seq) FROM log WHERE seq > ?1";
    let from: Option<i64> = conn.one(doing, sql, [to_sql(after)])?;
    let Some(from) = from.map(seq_from) else {
        return Ok((Vec::new(), None));
    };
    let to = from.saturating_add(PAGE - 1);
    let sql = "SELECT id, attrs -> '$.overflow' FROM log
               WHERE seq BETWEEN ?1 AND ?2 AND attrs IS NOT NULL
                 AND iif(instr(attrs, '\"overflow\"') > 0,
                         json_type(attrs, '$.overflow') = 'object', 0)";
    let found: Vec<([u8; 16], String)> = conn.all(doing, sql, [to_sql(from), to_sql(to)])?;
    let read = |(id, text): ([u8; 16], String)| {
        let id = EventId::from_bytes(id);
        let reference = serde_json::from_str(&text).map_err(|e| {
            let what = format!("the reference of {id} to its object cannot be read: {e}");
            Error::of_file(Code::Corrupt, what)
        });
        Ok((id, reference?))
    };
    let found: Result<Vec<_>> = found.into_iter().map(read).collect();
    Ok((found?, Some(to)))
}

fn list(reader: &Reader) -> Result<Vec<Orphan>> {
    let sql = "SELECT bucket, key, id, since, unborn FROM orphaned_objects ORDER BY bucket, key";
    let doing = "reading objects without their events";
    reader.conn.read_all(doing, sql, [], |row| {
        Ok(Orphan {
            bucket: row.get(0)?,
            key: row.get(1)?,
            id: EventId::from_bytes(row.get(2)?),
            since: Timestamp::from_micros(row.get(3)?),
            unborn: row.get(4)?,
        })
    })
}
