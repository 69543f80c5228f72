//! Part of the writer: the clock record of the file. Every process that checks the clock updates it.

use everbus_core::{ClockDoubt, ClockRecord, Code, Error, Result, Timestamp};
use rusqlite::{Connection, OptionalExtension};

use crate::errors::from_sqlite;
use crate::writer::Writer;

const KEY: &str = "clock";

impl Writer {
    /// Records the clock's time and returns whether the clock is in doubt.
    pub(crate) fn look_at_clock(&mut self) -> Result<Option<ClockDoubt>> {
        let record = look(&self.conn, self.clock.now())?;
        self.note_clock(&record)?;
        Ok(record.doubt)
    }

    /// Records that the clock is right.
    pub(crate) fn trust_clock(&mut self) -> Result<()> {
        self.note_clock(&ClockRecord::certain(self.clock.now()))
    }

    fn note_clock(&self, record: &ClockRecord) -> Result<()> {
        let text = serde_json::to_string(record)
            .map_err(|e| Error::new(Code::Internal, format!("noting the time: {e}")))?;
        self.conn
            .prepare_cached("INSERT OR REPLACE INTO meta (key, value) VALUES (?1, ?2)")
            .and_then(|mut s| s.execute((KEY, text)))
            .map(drop)
            .map_err(|e| from_sqlite("noting the time", e))
    }
}

/// The result of a check at this moment, without writing it.
pub(crate) fn look(conn: &Connection, now: Timestamp) -> Result<ClockRecord> {
    let newest: Option<i64> = conn
        .prepare_cached("SELECT CAST(received_at AS INTEGER) FROM log ORDER BY seq DESC LIMIT 1")
        .and_then(|mut s| s.query_row([], |r| r.get(0)).optional())
        .map_err(|e| from_sqlite("reading the newest event", e))?;
    let newest = newest.map(Timestamp::from_micros);
    Ok(ClockRecord::look(recorded(conn)?, newest, now))
}

/// The result of the last check.
pub(crate) fn recorded(conn: &Connection) -> Result<Option<ClockRecord>> {
    let text: Option<String> = conn
        .prepare_cached("SELECT value FROM meta WHERE key = ?1")
        .and_then(|mut s| s.query_row([KEY], |r| r.get(0)).optional())
        .map_err(|e| from_sqlite("looking what is known of the clock", e))?;
    let record = text.map(|text| serde_json::from_str(&text)).transpose();
    record.map_err(|e| {
        let what = format!("the record of the clock is damaged: {e}");
        Error::of_file(Code::Corrupt, what)
    })
}
