//! Rejected rows of the outbox: each failure is stored with the row, and the last one moves them to a dead
//! letter.
//!
//! A row that was given up has no time of sending. A row that was sent, and whose event a group dead-lettered
//! later, has one.

use everbus_core::dead_letters::all_failures;
use everbus_core::{Code, Error, EventId, Failure, FailureKind, OutboxRow, Result, Timestamp};
use uuid::Uuid;

use super::rows::time;
use crate::pool::{Params, Sql};
use crate::rows::storable;

/// Marks the dead letters of rows that were sent, or that wait again, as retried. A dead letter is found by the event
/// or by the row: an unreadable row may have become another event when it was corrected.
pub(super) async fn close(db: &impl Sql, rows: &[(i64, String)], now: Timestamp) -> Result<()> {
    let numbers: Vec<i64> = rows.iter().map(|(number, _)| *number).collect();
    let events: Vec<&str> = rows.iter().map(|(_, event)| event.as_str()).collect();
    let sql = format!(
        "UPDATE everbus.outbox_dead_letters SET retried_at = {at}
         WHERE retried_at IS NULL
           AND (md5(event) IN (SELECT md5(e) FROM unnest($3) e) OR number = ANY($2))",
        at = time(1)
    );
    let doing = "closing dead letters of the outbox";
    db.execute(doing, &sql, &[&now.as_micros(), &numbers, &events])
        .await?;
    Ok(())
}

/// The name of a row's event among the dead letters of the outbox.
pub(super) fn identity(row: &OutboxRow) -> String {
    match &row.tenant {
        Some(tenant) => format!("{}@{}", row.uuid(), storable(tenant)),
        None => row.uuid().to_string(),
    }
}

/// Marks rows as failed whose events became dead letters before the rows were marked as sent.
pub(super) async fn show(db: &impl Sql, rows: &[&OutboxRow]) -> Result<()> {
    let readable = rows.iter().filter_map(|row| {
        let event = row.event.as_ref().ok()?;
        let tenant = row.tenant.as_deref().map(storable).unwrap_or_default();
        Some((row.row, event.id().as_uuid(), tenant))
    });
    let (numbers, (ids, tenants)): (Vec<i64>, (Vec<Uuid>, Vec<String>)) = readable
        .map(|(number, id, tenant)| (number, (id, tenant)))
        .unzip();
    let sql = "UPDATE everbus.event_outbox o SET status = 'failed', last_error = found.error
         FROM (SELECT DISTINCT ON (t.number) t.number, d.failures::json -> -1 ->> 'error' AS error
               FROM unnest($1, $2, $3) AS t (number, id, tenant)
               JOIN everbus.log l ON l.id = t.id AND l.tenant = t.tenant
               JOIN everbus.dead_letters d ON d.seq = l.seq AND d.retried_at IS NULL
               JOIN everbus.event_outbox_origins origin ON origin.seq = l.seq AND origin.number = t.number
               ORDER BY t.number) AS found
         WHERE o.number = found.number AND o.status = 'sent'";
    db.execute("looking for dead letters", sql, &[&numbers, &ids, &tenants])
        .await?;
    Ok(())
}

/// Reads the failures in a column. Failures that were damaged by hand must not keep new ones from being
/// written.
pub(super) fn read_list(text: Option<&str>) -> Vec<Failure> {
    text.and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or_default()
}

fn write_list(failures: &[Failure]) -> Result<String> {
    serde_json::to_string(failures)
        .map_err(|e| Error::new(Code::Internal, format!("failures cannot be stored: {e}")))
}

/// Every rejection of a row, this one included.
async fn rejections(
    db: &impl Sql,
    row: &OutboxRow,
    error: &str,
    now: Timestamp,
) -> Result<Vec<Failure>> {
    let sql = "SELECT failures FROM everbus.event_outbox WHERE number = $1";
    let before = db.first("reading rejections", sql, &[&row.row]).await?;
    let before = before.and_then(|row| row.get::<_, Option<String>>(0));
    let kind = match row.event {
        Ok(_) => FailureKind::Error,
        Err(_) => FailureKind::Decode,
    };
    let attempt = row.attempts.saturating_add(1);
    let new = Failure::new(attempt, now, kind, error);
    Ok(all_failures(read_list(before.as_deref()), [new]))
}

fn attempts(row: &OutboxRow) -> i32 {
    i32::try_from(row.attempts.saturating_add(1)).unwrap_or(i32::MAX)
}

/// Records a rejection; the row is tried again when it is due.
pub(super) async fn reject(
    db: &impl Sql,
    row: &OutboxRow,
    error: &str,
    now: Timestamp,
    due: i64,
) -> Result<()> {
    let failures = write_list(&rejections(db, row, error, now).await?)?;
    let sql =
        "UPDATE everbus.event_outbox SET attempts = $2, last_error = $3, due = $4, failures = $6
         WHERE number = $1 AND status = 'pending' AND revision = $5";
    let args: Params<'_> = &[
        &row.row,
        &attempts(row),
        &storable(error),
        &due,
        &row.revision,
        &failures,
    ];
    db.execute("writing down a rejection", sql, args).await?;
    Ok(())
}

/// Gives up a row and writes a dead letter.
pub(super) async fn fail(
    db: &impl Sql,
    row: &OutboxRow,
    error: &str,
    now: Timestamp,
) -> Result<()> {
    let doing = "giving a row up";
    let new = rejections(db, row, error, now).await?;
    let (attempts, error) = (attempts(row), storable(error));
    let sql = "UPDATE everbus.event_outbox SET status = 'failed', attempts = $2, last_error = $3, due = 0,
           sent_at = NULL, failures = NULL
         WHERE number = $1 AND status = 'pending' AND revision = $4";
    let failed = db
        .execute(doing, sql, &[&row.row, &attempts, &error, &row.revision])
        .await?;
    if failed == 0 {
        return Ok(());
    }
    let event = identity(row);
    let sql =
        "SELECT failures FROM everbus.outbox_dead_letters WHERE md5(event) = md5($1) FOR UPDATE";
    let before = db.first(doing, sql, &[&event]).await?;
    let before = before.map(|row| row.get::<_, String>(0));
    let failures = write_list(&all_failures(read_list(before.as_deref()), new))?;
    let sql = format!(
        "INSERT INTO everbus.outbox_dead_letters AS there
           (event, event_id, event_type, payload, error, attempts, first_seen_at, last_seen_at, number, failures)
         SELECT $5, event_id, event_type, payload, $2, $3, {at}, {at}, $1, $6
         FROM everbus.event_outbox WHERE number = $1
         ON CONFLICT (md5(event)) DO UPDATE SET
           event_id = excluded.event_id, number = excluded.number, event_type = excluded.event_type,
           payload = excluded.payload, error = excluded.error,
           attempts = there.attempts + excluded.attempts, last_seen_at = excluded.last_seen_at,
           retried_at = NULL, failures = excluded.failures",
        at = time(4)
    );
    let args: Params<'_> = &[
        &row.row,
        &error,
        &attempts,
        &now.as_micros(),
        &event,
        &failures,
    ];
    db.execute(doing, &sql, args).await?;
    Ok(())
}

/// How many events were given up and not retried since.
pub(super) async fn count(db: &impl Sql) -> Result<u64> {
    let sql = "SELECT count(*) FROM everbus.outbox_dead_letters WHERE retried_at IS NULL";
    let row = db
        .one("counting dead letters of the outbox", sql, &[])
        .await?;
    Ok(u64::try_from(row.get::<_, i64>(0)).unwrap_or(0))
}

/// Finds an event that was given up, by the text in `event_id` or by its id, in any tenant. Returns the text in
/// `event_id`.
pub(super) async fn find(db: &impl Sql, text: &str, id: EventId) -> Result<Option<String>> {
    let sql = "SELECT event_id FROM everbus.outbox_dead_letters
         WHERE retried_at IS NULL AND (event_id = $1 OR left(event, 36) = $2)
         ORDER BY event_id <> $1 LIMIT 1";
    let args: Params<'_> = &[&storable(text), &id.to_string()];
    let found = db
        .first("looking for a dead letter of the outbox", sql, args)
        .await?;
    Ok(found.map(|row| row.get(0)))
}
