//! Queries over the audit trail. Records that were changed by hand are shown as they are; verification
//! reports them.

use everbus_core::{
    AuditEntry, AuditHash, AuditHead, AuditPage, AuditQuery, AuditRecord, Entity, Order, Result,
    Timestamp,
};
use tokio_postgres::Row;

use crate::pool::{Param, Sql};
use crate::rows::storable;

pub(super) const COLUMNS: &str = "seq, at, actor, action, entity_type, entity_id, tenant, correlation_id, \
                                  trace_id, details, hash";
const DOING: &str = "reading the audit trail";

/// The texts and the numbers of a query, kept for as long as its statement runs.
#[derive(Default)]
struct Condition {
    sql: String,
    texts: Vec<String>,
    numbers: Vec<i64>,
}

impl Condition {
    /// Adds a term; `?` stands for the text. Texts are the parameters after the three numbers.
    fn and(&mut self, term: &str, text: &str) {
        let place = format!("${}", 4 + self.texts.len());
        self.sql.push_str(" AND ");
        self.sql.push_str(&term.replace('?', &place));
        self.texts.push(storable(text));
    }

    fn params(&self) -> Vec<&dyn Param> {
        let numbers = self.numbers.iter().map(|number| number as &dyn Param);
        let texts = self.texts.iter().map(|text| text as &dyn Param);
        numbers.chain(texts).collect()
    }
}

pub(super) async fn page(db: &impl Sql, query: &AuditQuery) -> Result<AuditPage> {
    let (mut low, mut high) = (i64::MIN, i64::MAX);
    // Times never decrease with growing numbers, so a time corresponds to a number.
    if let Some(since) = query.since {
        low = at_or_after(db, since).await?.unwrap_or(i64::MAX);
    }
    if let Some(until) = query.until {
        high = at_or_before(db, until).await?.unwrap_or(i64::MIN);
    }
    match (query.after.map(number), query.order) {
        (Some(after), Order::Newest) => high = high.min(after.saturating_sub(1)),
        (Some(after), Order::Oldest) => low = low.max(after.saturating_add(1)),
        (None, _) => {}
    }
    // One more than the page size, to know whether another page follows.
    let limit = i64::try_from(query.page() + 1).unwrap_or(i64::MAX);
    let mut condition = Condition {
        numbers: vec![low, high, limit],
        ..Condition::default()
    };
    if let Some(entity) = &query.entity {
        condition.and(
            "hashtextextended(entity_id, 0) = hashtextextended(?, 0) AND entity_id = ?",
            &entity.id,
        );
        condition.and("entity_type = ?", &entity.kind);
    }
    if let Some(actor) = &query.actor {
        condition.and(
            "hashtextextended(actor, 0) = hashtextextended(?, 0) AND actor = ?",
            actor,
        );
    }
    match query.action.as_deref().map(|a| (a, a.strip_suffix('*'))) {
        Some((_, Some(start))) => condition.and("starts_with(action, ?)", start),
        Some((action, None)) => {
            condition.and(
                "left(action, 64) COLLATE \"C\" = left(?, 64) AND action = ?",
                action,
            );
        }
        None => {}
    }
    let order = match query.order {
        Order::Newest => "DESC",
        Order::Oldest => "ASC",
    };
    let sql = format!(
        "SELECT {COLUMNS} FROM everbus.audit_log WHERE seq >= $1 AND seq <= $2{} ORDER BY seq {order} LIMIT $3",
        condition.sql
    );
    let found = db.query(DOING, &sql, &condition.params()).await?;
    let mut items: Vec<AuditRecord> = found.iter().map(record).collect();
    let more = items.len() > query.page();
    items.truncate(query.page());
    let next = items.last().filter(|_| more).map(|record| record.seq);
    Ok(AuditPage { items, next })
}

pub(super) fn number(seq: u64) -> i64 {
    i64::try_from(seq).unwrap_or(i64::MAX)
}

async fn at_or_after(db: &impl Sql, at: Timestamp) -> Result<Option<i64>> {
    let sql = "SELECT seq FROM everbus.audit_log WHERE at >= $1 ORDER BY at, seq LIMIT 1";
    let found = db.first(DOING, sql, &[&at.as_micros()]).await?;
    Ok(found.map(|row| row.get(0)))
}

async fn at_or_before(db: &impl Sql, at: Timestamp) -> Result<Option<i64>> {
    let sql = "SELECT seq FROM everbus.audit_log WHERE at <= $1 ORDER BY at DESC, seq DESC LIMIT 1";
    let found = db.first(DOING, sql, &[&at.as_micros()]).await?;
    Ok(found.map(|row| row.get(0)))
}

/// The newest record in the part of the trail that is older than a time.
pub(super) async fn last_before(db: &impl Sql, before: Timestamp) -> Result<Option<AuditHead>> {
    let beyond = at_or_after(db, before).await?.unwrap_or(i64::MAX);
    let sql =
        "SELECT seq, hash, at FROM everbus.audit_log WHERE seq < $1 ORDER BY seq DESC LIMIT 1";
    let found = db.first(DOING, sql, &[&beyond]).await?;
    Ok(found.map(|row| head(&row).0))
}

/// Reads seq, hash and time. A hash of another length, put there by hand, counts as the origin; verification
/// reports it.
pub(super) fn head(row: &Row) -> (AuditHead, i64) {
    let seq = u64::try_from(row.get::<_, i64>(0)).unwrap_or(0);
    let hash = AuditHash::from_bytes(row.get(1)).unwrap_or(AuditHash::ORIGIN);
    (AuditHead { seq, hash }, row.get(2))
}

fn record(row: &Row) -> AuditRecord {
    let entity = match (
        row.get::<_, Option<String>>(4),
        row.get::<_, Option<String>>(5),
    ) {
        (None, None) => None,
        (kind, id) => Some(Entity {
            kind: kind.unwrap_or_default(),
            id: id.unwrap_or_default(),
        }),
    };
    let details: Option<String> = row.get(9);
    let details = details.map(|text| serde_json::from_str(&text).unwrap_or_else(|_| text.into()));
    AuditRecord {
        seq: u64::try_from(row.get::<_, i64>(0)).unwrap_or(0),
        at: Timestamp::from_micros(row.get(1)),
        hash: AuditHash::from_bytes(row.get(10)).unwrap_or(AuditHash::ORIGIN),
        entry: AuditEntry {
            actor: row.get(2),
            action: row.get(3),
            entity,
            tenant: row.get(6),
            correlation_id: row.get(7),
            trace_id: row.get(8),
            details: details.unwrap_or_default(),
        },
    }
}
