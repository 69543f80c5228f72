//! The audit trail of a file.
//!
//! Records are chained by their hashes. The head of the chain is kept in a file beside the database, so that
//! verification notices records cut off at the end.

mod head;
mod keeper;
mod read;
mod verify;

use std::path::Path;

use everbus_core::{
    Audit, AuditEntry, AuditHash, AuditHead, AuditPage, AuditQuery, AuditVerdict, BoxFuture,
    CheckReport, Code, Error, Result, Timestamp,
};
use rusqlite::types::Value;
use rusqlite::{Connection, params};

use crate::broker::SqliteEngine;
use crate::errors::from_sqlite;
use crate::maintenance::apart;
use crate::rows::{seq_from, to_sql};
use crate::sql::Sql as _;
use crate::tx::Tx;

pub(crate) use head::adopt;
pub use head::kept_head;
pub(crate) use keeper::Keeper;

/// Records removed in one transaction: few enough that a publish hardly waits.
const STEP: usize = 100;

impl Audit for SqliteEngine {
    fn record(&self, entry: AuditEntry) -> BoxFuture<'_, Result<u64>> {
        if let Err(error) = entry.validate() {
            return Box::pin(std::future::ready(Err(error)));
        }
        let keeper = self.handle.audit.clone();
        let recorded = self.handle.job_then(
            move |writer| record_audit(&mut writer.tx, &entry),
            // Runs on the writer once the record is durable, even if the caller no longer waits.
            move |link| (link.head.seq, keeper.advance(link)),
        );
        Box::pin(async move {
            let (seq, kept) = recorded.await?;
            match kept.await {
                Ok(()) => {}
                Err(error) if error.code() == Code::EventBusShutdownError => {}
                Err(error) => {
                    tracing::warn!(target: "everbus::audit", %error, "the head of the audit trail could not be kept outside the file");
                }
            }
            Ok(seq)
        })
    }

    fn query(&self, query: AuditQuery) -> BoxFuture<'_, Result<AuditPage>> {
        if let Err(error) = query.validate() {
            return Box::pin(std::future::ready(Err(error)));
        }
        self.handle
            .query(move |reader| read::page(&reader.conn, &query))
    }

    fn head(&self) -> BoxFuture<'_, Result<Option<AuditHead>>> {
        self.handle.query(|reader| {
            let (head, _) = last(&reader.conn)?;
            Ok((head.seq > 0).then_some(head))
        })
    }

    fn verify(&self, known: Option<AuditHead>) -> BoxFuture<'_, Result<AuditVerdict>> {
        let path = self.handle.path.clone();
        apart("everbus-audit-verify", move || verify::run(&path, known))
    }

    fn forget(&self, before: Timestamp) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            let Some(last) = self.allow_forgetting(before).await? else {
                return Ok(0);
            };
            let mut total = 0;
            loop {
                let (removed, all) = self
                    .handle
                    .job(move |writer| forget_audit_some(&mut writer.tx, last))
                    .await?;
                total += removed;
                if all {
                    return Ok(total);
                }
            }
        })
    }

    fn forgettable(&self, before: Timestamp) -> BoxFuture<'_, Result<u64>> {
        self.handle.query(move |reader| {
            let Some(target) = read::last_before(&reader.conn, before)? else {
                return Ok(0);
            };
            Ok(target.seq.saturating_sub(anchor(&reader.conn)?.0.seq))
        })
    }
}

impl SqliteEngine {
    /// The last record before a time, if there is one. The head file first records that everything up to it
    /// may be removed: verification reports an anchor that moves further.
    pub(crate) async fn allow_forgetting(&self, before: Timestamp) -> Result<Option<u64>> {
        let target = self
            .handle
            .query(move |reader| read::last_before(&reader.conn, before))
            .await?;
        if let Some(target) = target {
            self.handle.audit.allow(target).await?;
        }
        Ok(target.map(|target| target.seq))
    }
}

/// A record that was written: the chain before it and after it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Link {
    pub(crate) before: AuditHead,
    pub(crate) head: AuditHead,
}

fn record_audit(tx: &mut Tx, entry: &AuditEntry) -> Result<Link> {
    let (before, last_at) = last(&tx.conn)?;
    let seq = before.seq + 1;
    if before == AuditHead::ORIGIN {
        // Within the transaction, so that no record can exist before the head file.
        head::begin(&tx.path);
    }
    // Times never decrease along the trail, so a time corresponds to a place in it.
    let at = Timestamp::from_micros(tx.now().max(last_at));
    let details = entry.details_text();
    let content = entry.content(seq, at, details.as_deref());
    let hash = content.hash(&before.hash);
    tx.conn
        .prepare_cached(
            "INSERT INTO audit_log (seq, at, actor, action, entity_type, entity_id, tenant,
               correlation_id, trace_id, details, hash)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
        )
        .and_then(|mut s| {
            s.execute(params![
                to_sql(seq),
                at.as_micros(),
                content.actor,
                content.action,
                content.entity_type,
                content.entity_id,
                content.tenant,
                content.correlation_id,
                content.trace_id,
                content.details,
                hash.as_bytes()
            ])
        })
        .map_err(|e| refused("writing to the audit trail", e))?;
    let head = AuditHead { seq, hash };
    Ok(Link { before, head })
}

/// Removes some records from the beginning, up to `last`, and moves the anchor: both or neither. If the
/// tables were changed by hand and this fails, the other commands of the transaction do not. Returns how
/// many records were removed, and whether none of them is left.
pub(crate) fn forget_audit_some(tx: &mut Tx, last: u64) -> Result<(u64, bool)> {
    let doing = |e| from_sqlite("shortening the audit trail", e);
    let run = |sql| tx.conn.execute_batch(sql).map_err(doing);
    run("SAVEPOINT everbus_audit")?;
    let removed = shorten(&tx.conn, last);
    if removed.is_err() {
        run("ROLLBACK TO everbus_audit")?;
    }
    run("RELEASE everbus_audit")?;
    let removed = removed.map_err(|e| refused("shortening the audit trail", e))?;
    Ok((removed as u64, removed < STEP))
}

fn shorten(conn: &Connection, last: u64) -> rusqlite::Result<usize> {
    let rows: Vec<[Value; 3]> = conn
        .prepare_cached(
            "SELECT seq, hash, at FROM audit_log WHERE seq <= ?1 ORDER BY seq LIMIT ?2",
        )?
        .query_map((to_sql(last), STEP as i64), |r| {
            Ok([r.get(0)?, r.get(1)?, r.get(2)?])
        })?
        .collect::<rusqlite::Result<_>>()?;
    let Some([seq, hash, at]) = rows.last() else {
        return Ok(0);
    };
    let anchor = params![seq, hash, at];
    let moved = conn
        .prepare_cached("UPDATE audit_anchor SET seq = ?1, hash = ?2, at = ?3")?
        .execute(anchor)?;
    if moved == 0 {
        conn.prepare_cached(
            "INSERT INTO audit_anchor (only, seq, hash, at) VALUES (1, ?1, ?2, ?3)",
        )?
        .execute(anchor)?;
    }
    conn.prepare_cached("DELETE FROM audit_log WHERE seq <= ?1")?
        .execute([seq])
}

/// Maps an error of a statement on the trail. A constraint violation means that the tables were changed by
/// hand; only this command fails.
fn refused(doing: &str, error: rusqlite::Error) -> Error {
    if error.sqlite_error_code() == Some(rusqlite::ErrorCode::ConstraintViolation) {
        return Error::new(Code::InvalidSetting, format!("{doing}: {error}"))
            .hint("the tables of the trail were changed; `everbus audit verify` says how")
            .caused_by(error);
    }
    from_sqlite(doing, error)
}

/// The end of the chain and the time of its last record.
fn last(conn: &Connection) -> Result<(AuditHead, i64)> {
    let sql = "SELECT seq, hash, at FROM audit_log ORDER BY seq DESC LIMIT 1";
    let row = conn.read_first("reading the audit trail", sql, [], read_head)?;
    match row {
        Some(row) => Ok(row),
        None => anchor(conn),
    }
}

/// The anchor that retention left, or the origin of the chain, and its time.
fn anchor(conn: &Connection) -> Result<(AuditHead, i64)> {
    let sql = "SELECT seq, hash, at FROM audit_anchor";
    let row = conn.read_first("reading the audit trail", sql, [], read_head)?;
    Ok(row.unwrap_or((AuditHead::ORIGIN, i64::MIN)))
}

/// Reads a head. An invalid hash, put into the file by hand, counts as the origin; verification reports it.
fn read_head(row: &rusqlite::Row<'_>) -> rusqlite::Result<(AuditHead, i64)> {
    let seq = seq_from(row.get(0)?);
    let hash = row
        .get_ref(1)?
        .as_blob()
        .ok()
        .and_then(AuditHash::from_bytes);
    let hash = hash.unwrap_or(AuditHash::ORIGIN);
    let at = row.get_ref(2)?.as_i64().unwrap_or(i64::MIN);
    Ok((AuditHead { seq, hash }, at))
}

/// Adds the state of the trail to a check of the file.
pub(crate) fn check(path: &Path, report: &mut CheckReport) -> Result<()> {
    let verdict = verify::run(path, None)?;
    let detail = match &verdict.broken {
        Some(broken) => broken.problem.clone(),
        None => {
            let mut detail = format!("{} records, an unbroken chain", verdict.verified);
            for note in &verdict.notes {
                detail.push_str("; ");
                detail.push_str(note);
            }
            detail
        }
    };
    report.add("audit trail", verdict.is_ok(), detail);
    Ok(())
}
