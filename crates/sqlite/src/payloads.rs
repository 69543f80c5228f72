//! Payload stages: rows beside the log, one row for each stored stage of an event.
//!
//! The columns are those of the specification. `seq` ties a row to its event, so that removing a range of the
//! log can remove its stages with one statement.

use bytes::Bytes;
use everbus_core::{
    BoxFuture, Code, Error, EventId, EventKey, Payloads, Result, Stage, StageInfo, StoredStage,
    Timestamp,
};
use rusqlite::{Connection, Row, params};

use crate::broker::SqliteEngine;
use crate::errors::from_sqlite;
use crate::readers::Reader;
use crate::rows::{micros, seq_from, to_sql};
use crate::sql::Sql as _;
use crate::tx::Tx;

/// The position of an event by its id and the name of its tenant (NULL for none).
const SEQ_OF: &str = "SELECT seq FROM log WHERE id = ?1
                      AND tenant = iif(?2 IS NULL, 0, (SELECT id FROM tenants WHERE name = ?2))";

/// The columns that [`read_info`] expects, in its order.
const INFO: &str = "p.stage, p.timestamp, p.payload_size_original, p.payload_size_compressed,
    p.status_code, p.error_details, p.contains_media, p.contains_base64";

/// The position of an event, if it is in the log.
pub(crate) fn seq_of(conn: &Connection, event: &EventKey) -> Result<Option<u64>> {
    conn.first(
        "looking for an event",
        SEQ_OF,
        params![event.id.as_bytes(), event.tenant],
    )
    .map(|seq| seq.map(seq_from))
}

pub(crate) fn store_stage(tx: &mut Tx, event: &EventKey, stage: &StoredStage) -> Result<()> {
    let seq = seq_of(&tx.conn, event)?.ok_or_else(|| no_event(event))?;
    let info = &stage.info;
    tx.conn.run(
        "storing a payload stage",
        "INSERT INTO event_payloads
           (event_id, stage, payload_compressed, payload_size_original,
            payload_size_compressed, timestamp, status_code, error_details,
            contains_media, contains_base64, seq)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
        params![
            event.id.to_string(),
            info.stage.as_str(),
            &stage.compressed[..],
            to_sql(info.payload_size_original),
            to_sql(info.payload_size_compressed),
            micros(info.timestamp),
            info.status_code,
            info.error_details,
            info.contains_media,
            info.contains_base64,
            to_sql(seq),
        ],
    )
}

impl Payloads for SqliteEngine {
    fn store(&self, event: EventKey, stage: StoredStage) -> BoxFuture<'_, Result<()>> {
        self.handle
            .job(move |writer| store_stage(&mut writer.tx, &event, &stage))
    }

    fn stages(
        &self,
        event: EventKey,
        stage: Option<Stage>,
    ) -> BoxFuture<'_, Result<Vec<StoredStage>>> {
        self.handle
            .query(move |reader| stages(reader, &event, stage.as_ref()))
    }

    fn largest(
        &self,
        over: u64,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<(EventKey, StageInfo)>>> {
        self.handle
            .query(move |reader| largest(reader, over, limit))
    }
}

fn stages(reader: &Reader, event: &EventKey, stage: Option<&Stage>) -> Result<Vec<StoredStage>> {
    let doing = |e| from_sqlite("reading payload stages", e);
    let sql = format!(
        "SELECT {INFO}, p.payload_compressed, p.id FROM event_payloads p
         WHERE p.seq = ({SEQ_OF}) AND (?3 IS NULL OR p.stage = ?3)
         UNION ALL
         -- Those that wait for their event.
         SELECT {INFO}, p.payload_compressed, p.id FROM everbus_early_payloads p
         WHERE p.event = ?1 AND p.tenant = coalesce(?2, '') AND (?3 IS NULL OR p.stage = ?3)
         ORDER BY 2, 10"
    );
    let mut statement = reader.conn.prepare_cached(&sql).map_err(doing)?;
    let stage = stage.map(Stage::as_str);
    let mut rows = statement
        .query(params![event.id.as_bytes(), event.tenant, stage])
        .map_err(doing)?;
    let mut found = Vec::new();
    while let Some(row) = rows.next().map_err(doing)? {
        let info = read_info(row)?;
        // Text instead of bytes is reported when the stage is decompressed.
        let compressed = row.get_ref(8).map_err(doing)?.as_bytes_or_null();
        found.push(StoredStage {
            info,
            compressed: Bytes::copy_from_slice(compressed.ok().flatten().unwrap_or_default()),
        });
    }
    Ok(found)
}

fn largest(reader: &Reader, over: u64, limit: usize) -> Result<Vec<(EventKey, StageInfo)>> {
    let doing = |e| from_sqlite("looking for large payloads", e);
    // In the order of the index: largest first, and among equals the newest.
    let sql = format!(
        "SELECT {INFO}, l.id, t.name FROM event_payloads p
         JOIN log l ON l.seq = p.seq LEFT JOIN tenants t ON t.id = l.tenant
         WHERE p.payload_size_original > ?1
         ORDER BY p.payload_size_original DESC, p.id DESC LIMIT ?2"
    );
    let mut statement = reader.conn.prepare_cached(&sql).map_err(doing)?;
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let mut rows = statement
        .query(params![to_sql(over), limit])
        .map_err(doing)?;
    let mut found = Vec::new();
    while let Some(row) = rows.next().map_err(doing)? {
        let key = EventKey {
            id: EventId::from_bytes(row.get(8).map_err(doing)?),
            tenant: row.get(9).map_err(doing)?,
        };
        found.push((key, read_info(row)?));
    }
    Ok(found)
}

fn read_info(row: &Row<'_>) -> Result<StageInfo> {
    let doing = |e| from_sqlite("reading payload stages", e);
    let name: String = row.get(0).map_err(doing)?;
    let stage = Stage::new(&name).map_err(|e| {
        Error::of_file(Code::Corrupt, "the name of a payload stage is damaged").caused_by(e)
    })?;
    let status: Option<i64> = row.get(4).map_err(doing)?;
    Ok(StageInfo {
        stage,
        timestamp: Timestamp::from_micros(row.get(1).map_err(doing)?),
        payload_size_original: seq_from(row.get(2).map_err(doing)?),
        payload_size_compressed: seq_from(row.get(3).map_err(doing)?),
        status_code: status.and_then(|code| u16::try_from(code).ok()),
        error_details: row.get(5).map_err(doing)?,
        contains_media: row.get(6).map_err(doing)?,
        contains_base64: row.get(7).map_err(doing)?,
    })
}

fn no_event(event: &EventKey) -> Error {
    let tenant = match &event.tenant {
        Some(tenant) => format!(" of tenant {tenant:?}"),
        None => String::new(),
    };
    Error::new(
        Code::NotFound,
        format!("there is no event {}{tenant}", event.id),
    )
    .hint("a stage belongs to an event that was published; ids are unique per tenant")
}
