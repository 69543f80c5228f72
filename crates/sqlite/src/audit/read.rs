//! Queries over the audit trail. Records that were changed by hand are shown as they are; verification
//! reports them.

use everbus_core::{
    AuditEntry, AuditHash, AuditHead, AuditPage, AuditQuery, AuditRecord, Entity, Order, Result,
    Timestamp,
};
use rusqlite::types::{Value, ValueRef};
use rusqlite::{Connection, Row, params_from_iter};

use crate::errors::from_sqlite;
use crate::rows::{seq_from, to_sql};
use crate::sql::Sql as _;

const COLUMNS: &str = "seq, at, actor, action, entity_type, entity_id, tenant, correlation_id, \
                       trace_id, details, hash";

pub(super) fn page(conn: &Connection, query: &AuditQuery) -> Result<AuditPage> {
    let doing = |e| from_sqlite("reading the audit trail", e);
    let Some((sql, values)) = statement(conn, query)? else {
        return Ok(AuditPage {
            items: Vec::new(),
            next: None,
        });
    };
    let mut statement = conn.prepare_cached(&sql).map_err(doing)?;
    let rows = statement.query_map(params_from_iter(values), record);
    let mut items: Vec<AuditRecord> = rows.and_then(std::iter::Iterator::collect).map_err(doing)?;
    // One more than the page size, to know whether another page follows.
    let more = items.len() > query.page();
    items.truncate(query.page());
    let next = items.last().filter(|_| more).map(|record| record.seq);
    Ok(AuditPage { items, next })
}

/// The statement of a query with its values, or nothing if no record can match.
fn statement(conn: &Connection, query: &AuditQuery) -> Result<Option<(String, Vec<Value>)>> {
    let (mut low, mut high) = (i64::MIN, i64::MAX);
    // Times never decrease along the trail, so a time corresponds to a number.
    if let Some(since) = query.since {
        match at_or_after(conn, since)? {
            Some(first) => low = first,
            None => return Ok(None),
        }
    }
    if let Some(until) = query.until {
        match at_or_before(conn, until)? {
            Some(last) => high = last,
            None => return Ok(None),
        }
    }
    match (query.after.map(to_sql), query.order) {
        (Some(after), Order::Newest) => high = high.min(after.saturating_sub(1)),
        (Some(after), Order::Oldest) => low = low.max(after.saturating_add(1)),
        (None, _) => {}
    }
    let mut sql = format!("SELECT {COLUMNS} FROM audit_log WHERE seq >= ? AND seq <= ?");
    let mut values = vec![Value::Integer(low), Value::Integer(high)];
    let mut and = |condition: &str, value: &str| {
        sql.push_str(" AND ");
        sql.push_str(condition);
        values.push(Value::Text(value.to_owned()));
    };
    if let Some(entity) = &query.entity {
        and("entity_id = ?", &entity.id);
        and("entity_type = ?", &entity.kind);
    }
    if let Some(actor) = &query.actor {
        and("actor = ?", actor);
    }
    match query.action.as_deref().map(|a| (a, a.strip_suffix('*'))) {
        Some((_, Some(start))) => {
            and("action >= ?", start);
            // No text with this prefix is larger.
            and("action < ? || char(1114111)", start);
        }
        Some((action, None)) => and("action = ?", action),
        None => {}
    }
    sql.push_str(match query.order {
        Order::Newest => " ORDER BY seq DESC",
        Order::Oldest => " ORDER BY seq",
    });
    sql.push_str(" LIMIT ?");
    let limit = i64::try_from(query.page() + 1).unwrap_or(i64::MAX);
    values.push(Value::Integer(limit));
    Ok(Some((sql, values)))
}

fn at_or_after(conn: &Connection, at: Timestamp) -> Result<Option<i64>> {
    let sql = "SELECT seq FROM audit_log WHERE at >= ?1 ORDER BY at, seq LIMIT 1";
    conn.first("reading the audit trail", sql, [at.as_micros()])
}

fn at_or_before(conn: &Connection, at: Timestamp) -> Result<Option<i64>> {
    let sql = "SELECT seq FROM audit_log WHERE at <= ?1 ORDER BY at DESC, seq DESC LIMIT 1";
    conn.first("reading the audit trail", sql, [at.as_micros()])
}

/// The last of the records at the beginning that were written before a time.
pub(super) fn last_before(conn: &Connection, before: Timestamp) -> Result<Option<AuditHead>> {
    let beyond = at_or_after(conn, before)?.unwrap_or(i64::MAX);
    let sql = "SELECT seq, hash, at FROM audit_log WHERE seq < ?1 ORDER BY seq DESC LIMIT 1";
    conn.read_first("reading the audit trail", sql, [beyond], super::read_head)
        .map(|found| found.map(|(head, _)| head))
}

fn record(row: &Row<'_>) -> rusqlite::Result<AuditRecord> {
    let text = |column: usize| -> rusqlite::Result<Option<String>> {
        Ok(match row.get_ref(column)? {
            ValueRef::Null => None,
            ValueRef::Integer(n) => Some(n.to_string()),
            ValueRef::Real(n) => Some(n.to_string()),
            ValueRef::Text(bytes) | ValueRef::Blob(bytes) => {
                Some(String::from_utf8_lossy(bytes).into_owned())
            }
        })
    };
    let entity = match (text(4)?, text(5)?) {
        (None, None) => None,
        (kind, id) => Some(Entity {
            kind: kind.unwrap_or_default(),
            id: id.unwrap_or_default(),
        }),
    };
    let details = text(9)?.map(|text| serde_json::from_str(&text).unwrap_or_else(|_| text.into()));
    let hash = row.get_ref(10)?.as_blob().ok();
    Ok(AuditRecord {
        seq: seq_from(row.get(0)?),
        at: Timestamp::from_micros(row.get_ref(1)?.as_i64().unwrap_or(0)),
        hash: hash
            .and_then(AuditHash::from_bytes)
            .unwrap_or(AuditHash::ORIGIN),
        entry: AuditEntry {
            actor: text(2)?.unwrap_or_default(),
            action: text(3)?.unwrap_or_default(),
            entity,
            tenant: text(6)?,
            correlation_id: text(7)?,
            trace_id: text(8)?,
            details: details.unwrap_or_default(),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What SQLite does for a query.
    fn plan(query: &AuditQuery) -> String {
        let conn = Connection::open_in_memory().unwrap();
        crate::schema::migrate(&conn).unwrap();
        conn.execute(
            "INSERT INTO audit_log (seq, at, actor, action, hash) VALUES (1, 5, 'a', 'b', x'00')",
            [],
        )
        .unwrap();
        let (sql, values) = statement(&conn, query).unwrap().unwrap();
        let mut explain = conn.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).unwrap();
        let steps = explain.query_map(params_from_iter(values), |r| r.get::<_, String>(3));
        steps
            .unwrap()
            .map(Result::unwrap)
            .collect::<Vec<_>>()
            .join("; ")
    }

    // conformance: framework/audit-indexed: the trail is indexed by entity, user and timestamp, and the indexes are used
    #[test]
    fn queries_by_entity_actor_action_and_time_use_their_index() {
        let entity = Entity {
            kind: "ORDER".into(),
            id: "1".into(),
        };
        for order in [Order::Newest, Order::Oldest] {
            let base = AuditQuery {
                order,
                ..AuditQuery::default()
            };
            let by_entity = AuditQuery {
                entity: Some(entity.clone()),
                ..base.clone()
            };
            let by_actor = AuditQuery {
                actor: Some("a".into()),
                ..base.clone()
            };
            let by_action = AuditQuery {
                action: Some("b".into()),
                ..base.clone()
            };
            for (query, index) in [
                (by_entity, "USING INDEX audit_log_entity"),
                (by_actor, "USING INDEX audit_log_actor"),
                (by_action, "USING INDEX audit_log_action"),
                (base, "USING INTEGER PRIMARY KEY"),
            ] {
                let plan = plan(&query);
                assert!(plan.contains(index), "{query:?}: {plan}");
                assert!(!plan.contains("TEMP B-TREE"), "{query:?}: {plan}");
                assert!(!plan.contains("SCAN"), "{query:?}: {plan}");
            }
        }
        let conn = Connection::open_in_memory().unwrap();
        crate::schema::migrate(&conn).unwrap();
        for sql in [
            "SELECT seq FROM audit_log WHERE at >= ?1 ORDER BY at, seq LIMIT 1",
            "SELECT seq FROM audit_log WHERE at <= ?1 ORDER BY at DESC, seq DESC LIMIT 1",
        ] {
            let mut explain = conn.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).unwrap();
            let plan: String = explain.query_row([1], |r| r.get(3)).unwrap();
            assert!(plan.contains("audit_log_at"), "{plan}");
        }
    }
}
