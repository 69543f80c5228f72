//! Adding to the end of the chain, and removing from its beginning.

use everbus_core::{AuditEntry, AuditHash, AuditHead, Code, Error, Result, Timestamp};

use super::read::{self, number};
use crate::pool::{Params, Sql};

/// Records removed in one transaction.
pub(super) const STEP: i64 = 1000;

/// Adds a record, in a transaction. The row of the head is the lock: records are added one after another.
pub(super) async fn record(db: &impl Sql, entry: &AuditEntry, now: Timestamp) -> Result<u64> {
    let doing = "writing to the audit trail";
    let sql = "SELECT seq, hash, at FROM everbus.audit_head FOR UPDATE";
    let row = db.first(doing, sql, &[]).await?;
    let (before, last_at) = row.map(|row| read::head(&row)).ok_or_else(no_head)?;
    let seq = before.seq + 1;
    // Times never decrease, so a time corresponds to one place in the trail.
    let at = Timestamp::from_micros(now.as_micros().max(last_at));
    let details = entry.details_text();
    let content = entry.content(seq, at, details.as_deref());
    let hash: AuditHash = content.hash(&before.hash);
    let bytes = &hash.as_bytes()[..];
    let sql = format!(
        "INSERT INTO everbus.audit_log ({})
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
        read::COLUMNS
    );
    let args: Params<'_> = &[
        &number(seq),
        &at.as_micros(),
        &content.actor,
        &content.action,
        &content.entity_type,
        &content.entity_id,
        &content.tenant,
        &content.correlation_id,
        &content.trace_id,
        &content.details,
        &bytes,
    ];
    db.execute(doing, &sql, args).await.map_err(refused)?;
    // A separate statement, so that its trigger sees the new record.
    let sql = "UPDATE everbus.audit_head SET seq = $1, hash = $2, at = $3";
    let moved = db
        .execute(doing, sql, &[&number(seq), &bytes, &at.as_micros()])
        .await;
    moved.map_err(refused)?;
    Ok(seq)
}

fn no_head() -> Error {
    Error::new(Code::Corrupt, "the head of the audit trail is missing")
        .hint("the tables of the trail were changed; `everbus audit verify` says how")
}

/// Maps an internal error: the tables were changed by hand, which is no bug of Everbus.
fn refused(error: Error) -> Error {
    if error.code() != Code::Internal {
        return error;
    }
    let what = error.message().to_owned();
    Error::new(Code::InvalidSetting, what)
        .hint("the tables of the trail were changed; `everbus audit verify` says how")
        .caused_by(error)
}

/// Removes some records from the beginning, up to `last`, and moves the anchor, in a transaction. Returns
/// how many.
pub(super) async fn forget_some(db: &impl Sql, last: u64) -> Result<u64> {
    let doing = "shortening the audit trail";
    let sql = "INSERT INTO everbus.audit_anchor AS anchor (seq, hash, at)
         SELECT seq, hash, at FROM (
           SELECT seq, hash, at FROM everbus.audit_log WHERE seq <= $1 ORDER BY seq LIMIT $2) AS page
         ORDER BY seq DESC LIMIT 1
         ON CONFLICT (only_one) DO UPDATE SET seq = excluded.seq, hash = excluded.hash, at = excluded.at
         RETURNING seq";
    let anchor = db.first(doing, sql, &[&number(last), &STEP]).await;
    let Some(anchor) = anchor.map_err(refused)? else {
        return Ok(0);
    };
    let anchor: i64 = anchor.get(0);
    let sql = "DELETE FROM everbus.audit_log WHERE seq <= $1";
    db.execute(doing, sql, &[&anchor]).await.map_err(refused)
}

/// The anchor that retention left, or the origin of the chain.
pub(super) async fn anchor(db: &impl Sql) -> Result<AuditHead> {
    let sql = "SELECT seq, hash, at FROM everbus.audit_anchor";
    let row = db.first("reading the audit trail", sql, &[]).await?;
    Ok(row.map_or(AuditHead::ORIGIN, |row| read::head(&row).0))
}

/// The head that the schema keeps beside the records.
pub(super) async fn kept_head(db: &impl Sql) -> Result<Option<AuditHead>> {
    let sql = "SELECT seq, hash, at FROM everbus.audit_head";
    let row = db.first("reading the audit trail", sql, &[]).await?;
    Ok(row.map(|row| read::head(&row).0))
}
