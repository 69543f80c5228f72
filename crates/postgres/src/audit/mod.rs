//! The audit trail of a schema.
//!
//! Records are chained by their hashes. The head of the chain is kept in a table of its own, so that
//! verification notices records cut off at the end; triggers refuse everything but appends.

mod chain;
mod read;
mod verify;

use everbus_core::{
    Audit, AuditEntry, AuditHead, AuditPage, AuditQuery, AuditVerdict, BoxFuture, CheckReport,
    Code, Error, Result, Timestamp,
};

use crate::Postgres;
use crate::pool::{Sql as _, transaction};

impl Audit for Postgres {
    fn record(&self, entry: AuditEntry) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            entry.validate()?;
            refuse_zero(&entry)?;
            self.check_open()?;
            transaction!(self.pool, "writing to the audit trail", |tx| {
                chain::record(tx, &entry, self.now()).await
            })
        })
    }

    fn query(&self, query: AuditQuery) -> BoxFuture<'_, Result<AuditPage>> {
        Box::pin(async move {
            query.validate()?;
            read::page(&*self.conn().await?, &query).await
        })
    }

    fn head(&self) -> BoxFuture<'_, Result<Option<AuditHead>>> {
        Box::pin(async move {
            let head = chain::kept_head(&*self.conn().await?).await?;
            Ok(head.filter(|head| head.seq > 0))
        })
    }

    fn verify(&self, known: Option<AuditHead>) -> BoxFuture<'_, Result<AuditVerdict>> {
        Box::pin(async move {
            self.check_open()?;
            let doing = "reading the audit trail";
            transaction!(self.pool, doing, |tx| {
                // One snapshot for the whole walk.
                tx.batch(
                    doing,
                    "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY",
                )
                .await?;
                verify::run(tx, known).await
            })
        })
    }

    fn forget(&self, before: Timestamp) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            let Some(last) = read::last_before(&*self.conn().await?, before).await? else {
                return Ok(0);
            };
            let mut total = 0;
            loop {
                let doing = "shortening the audit trail";
                let removed: u64 = transaction!(self.pool, doing, |tx| {
                    chain::forget_some(tx, last.seq).await
                })?;
                total += removed;
                if removed < chain::STEP.unsigned_abs() {
                    return Ok(total);
                }
            }
        })
    }

    fn forgettable(&self, before: Timestamp) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            let db = self.conn().await?;
            let Some(target) = read::last_before(&*db, before).await? else {
                return Ok(0);
            };
            Ok(target.seq.saturating_sub(chain::anchor(&*db).await?.seq))
        })
    }
}

/// Refuses the zero character, which the server cannot store. Replacing it would change the hash of the entry.
fn refuse_zero(entry: &AuditEntry) -> Result<()> {
    let entity = entry.entity.as_ref();
    let texts = [
        Some(&entry.actor),
        Some(&entry.action),
        entity.map(|e| &e.kind),
        entity.map(|e| &e.id),
        entry.tenant.as_ref(),
        entry.correlation_id.as_ref(),
        entry.trace_id.as_ref(),
    ];
    if texts.into_iter().flatten().any(|text| text.contains('\0')) {
        let what = "a text of the audit entry has a zero character, which PostgreSQL cannot store";
        return Err(Error::new(Code::InvalidAttribute, what).hint("leave the character out"));
    }
    Ok(())
}

/// Adds the state of the trail to a check.
pub(crate) async fn check(engine: &Postgres, report: &mut CheckReport) -> Result<()> {
    let verdict = engine.verify(None).await?;
    let detail = match &verdict.broken {
        Some(broken) => broken.problem.clone(),
        None => format!("{} records, an unbroken chain", verdict.verified),
    };
    report.add("audit trail", verdict.is_ok(), detail);
    Ok(())
}
