//! The clock record of the file. Every process that checks the clock updates it.

use everbus_core::{ClockDoubt, ClockRecord, Code, Error, Result, Timestamp};
use rusqlite::Connection;

use crate::sql::Sql as _;
use crate::tx::Tx;

const KEY: &str = "clock";

/// Records the clock's time and returns whether the clock is in doubt.
pub(crate) fn look_at_clock(tx: &mut Tx) -> Result<Option<ClockDoubt>> {
    let record = look(&tx.conn, tx.clock.now())?;
    note_clock(tx, &record)?;
    Ok(record.doubt)
}

/// Records that the clock is right.
pub(crate) fn trust_clock(tx: &mut Tx) -> Result<()> {
    note_clock(tx, &ClockRecord::certain(tx.clock.now()))
}

fn note_clock(tx: &Tx, record: &ClockRecord) -> Result<()> {
    let text = serde_json::to_string(record)
        .map_err(|e| Error::new(Code::Internal, format!("noting the time: {e}")))?;
    let sql = "INSERT OR REPLACE INTO meta (key, value) VALUES (?1, ?2)";
    tx.conn.run("noting the time", sql, (KEY, text))
}

/// The result of a check at this moment, without writing it.
pub(crate) fn look(conn: &Connection, now: Timestamp) -> Result<ClockRecord> {
    let sql = "SELECT CAST(received_at AS INTEGER) FROM log ORDER BY seq DESC LIMIT 1";
    let newest: Option<i64> = conn.first("reading the newest event", sql, [])?;
    let newest = newest.map(Timestamp::from_micros);
    Ok(ClockRecord::look(recorded(conn)?, newest, now))
}

/// The result of the last check.
pub(crate) fn recorded(conn: &Connection) -> Result<Option<ClockRecord>> {
    let sql = "SELECT value FROM meta WHERE key = ?1";
    let text: Option<String> = conn.first("looking what is known of the clock", sql, [KEY])?;
    let record = text.map(|text| serde_json::from_str(&text)).transpose();
    record.map_err(|e| {
        let what = format!("the record of the clock is damaged: {e}");
        Error::of_file(Code::Corrupt, what)
    })
}
