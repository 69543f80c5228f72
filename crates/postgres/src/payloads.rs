//! Payload stages: a row beside the log for each stored stage of an event.
//!
//! The columns are those of the specification. A stage belongs to its event by id and tenant.

use bytes::Bytes;
use everbus_core::{
    BoxFuture, Code, EARLY_STAGES, Error, EventId, EventKey, Payloads, Result, Stage, StageInfo,
    StoredStage, Timestamp,
};
use tokio_postgres::Row;

use crate::Postgres;
use crate::errors::damaged;
use crate::pool::{Params, Sql};
use crate::rows::{get, get_seq, storable, to_sql};

/// The columns that [`read_info`] expects, in its order.
const INFO: &str = "p.stage, p.timestamp, p.payload_size_original, p.payload_size_compressed,
    p.status_code, p.error_details, p.contains_media, p.contains_base64";

/// The tenant as it is stored.
pub(crate) fn tenant_of(event: &EventKey) -> String {
    storable(event.tenant.as_deref().unwrap_or_default())
}

/// Stores a stage, with `known` only if its event is in the log. Returns whether it was stored.
pub(crate) async fn store_stage(
    db: &impl Sql,
    event: &EventKey,
    stage: &StoredStage,
    known: bool,
) -> Result<bool> {
    let info = &stage.info;
    let sql = "INSERT INTO everbus.event_payloads
                 (event_id, tenant, stage, payload_compressed, payload_size_original,
                  payload_size_compressed, timestamp, status_code, error_details,
                  contains_media, contains_base64)
               SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11
               WHERE NOT $12 OR EXISTS (SELECT 1 FROM everbus.log WHERE id = $1 AND tenant = $2)";
    let values: Params<'_> = &[
        &event.id.as_uuid(),
        &tenant_of(event),
        &info.stage.as_str(),
        &&stage.compressed[..],
        &to_sql(info.payload_size_original),
        &to_sql(info.payload_size_compressed),
        &info.timestamp.as_micros(),
        &info.status_code.map(i32::from),
        &info.error_details.as_deref().map(storable),
        &info.contains_media,
        &info.contains_base64,
        &known,
    ];
    let stored = db.execute("storing a payload stage", sql, values).await?;
    Ok(stored > 0)
}

/// Removes stages whose event never came.
pub(crate) async fn forget_early(db: &impl Sql, now: Timestamp) -> Result<()> {
    let sql = "DELETE FROM everbus.event_payloads p WHERE p.timestamp < $1
               AND NOT EXISTS (SELECT 1 FROM everbus.log l
                 WHERE l.id = p.event_id AND l.tenant = p.tenant)";
    let old = now.minus(EARLY_STAGES).as_micros();
    db.execute("forgetting payload stages without an event", sql, &[&old])
        .await?;
    Ok(())
}

impl Payloads for Postgres {
    fn store(&self, event: EventKey, stage: StoredStage) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let db = self.conn().await?;
            match store_stage(&*db, &event, &stage, true).await? {
                true => Ok(()),
                false => Err(no_event(&event)),
            }
        })
    }

    fn stages(
        &self,
        event: EventKey,
        stage: Option<Stage>,
    ) -> BoxFuture<'_, Result<Vec<StoredStage>>> {
        Box::pin(async move {
            let sql = format!(
                "SELECT {INFO}, p.payload_compressed FROM everbus.event_payloads p
                 WHERE p.event_id = $1 AND p.tenant = $2 AND ($3 IS NULL OR p.stage = $3)
                 ORDER BY p.timestamp, p.id"
            );
            let db = self.conn().await?;
            let stage = stage.as_ref().map(Stage::as_str);
            let values: Params<'_> = &[&event.id.as_uuid(), &tenant_of(&event), &stage];
            let rows = db.query("reading payload stages", &sql, values).await?;
            let read = |row: &Row| {
                Ok(StoredStage {
                    info: read_info(row, 0)?,
                    compressed: Bytes::copy_from_slice(get(row, 8)?),
                })
            };
            rows.iter().map(read).collect()
        })
    }

    fn largest(
        &self,
        over: u64,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<(EventKey, StageInfo)>>> {
        Box::pin(async move {
            let sql = format!(
                "SELECT p.event_id, p.tenant, {INFO} FROM everbus.event_payloads p
                 WHERE p.payload_size_original > $1
                   AND EXISTS (SELECT 1 FROM everbus.log l
                     WHERE l.id = p.event_id AND l.tenant = p.tenant)
                 ORDER BY p.payload_size_original DESC, p.id LIMIT $2"
            );
            let db = self.conn().await?;
            let limit = to_sql(limit as u64);
            let rows = db
                .query("reading payload stages", &sql, &[&to_sql(over), &limit])
                .await?;
            let read = |row: &Row| {
                let tenant: String = get(row, 1)?;
                let key = EventKey {
                    id: EventId::from(get::<uuid::Uuid>(row, 0)?),
                    tenant: Some(tenant).filter(|tenant| !tenant.is_empty()),
                };
                Ok((key, read_info(row, 2)?))
            };
            rows.iter().map(read).collect()
        })
    }
}

fn read_info(row: &Row, first: usize) -> Result<StageInfo> {
    let stage = Stage::new(get(row, first)?)
        .map_err(|e| damaged("the name of a payload stage is damaged").caused_by(e))?;
    let status: Option<i32> = get(row, first + 4)?;
    Ok(StageInfo {
        stage,
        timestamp: Timestamp::from_micros(get(row, first + 1)?),
        payload_size_original: get_seq(row, first + 2)?,
        payload_size_compressed: get_seq(row, first + 3)?,
        status_code: status.and_then(|code| u16::try_from(code).ok()),
        error_details: get(row, first + 5)?,
        contains_media: get(row, first + 6)?,
        contains_base64: get(row, first + 7)?,
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
