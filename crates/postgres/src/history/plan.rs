//! The condition of a history query, and a description of the index that it uses.

use everbus_core::{HistoryQuery, Timestamp};

use crate::condition::Condition;
use crate::rows::storable;

/// Times of receipt grow with the numbers, except between concurrent writers. So a time corresponds to a number of the
/// log, plus or minus this much.
const SLACK: i64 = 10_000;

/// The filters of a query over `everbus.log log`, without its cursor. `types` are the numbers of the types
/// that match.
pub(super) fn condition(query: &HistoryQuery, types: Option<Vec<i32>>) -> Condition {
    let mut condition = Condition::default();
    // An index has the hash of a name; the name itself is compared as well.
    let named = |column: &str| {
        format!("hashtextextended(log.{column}, 0) = hashtextextended(?, 0) AND log.{column} = ?")
    };
    if let Some(tenant) = &query.tenant {
        condition.term("log.tenant <> ''");
        condition.and(&named("tenant"), storable(tenant));
    }
    if let Some(app) = &query.app {
        condition.and(&named("app"), storable(app));
    }
    if let Some(entity) = &query.entity {
        condition.and(&named("entity_id"), storable(&entity.id));
        condition.and("log.entity_type = ?", storable(&entity.kind));
    }
    if let Some(id) = &query.correlation_id {
        condition.and(
            "everbus.everbus_json(log.attrs) ->> 'correlation_id' = ?",
            storable(id),
        );
    }
    if let Some(types) = types {
        match types.as_slice() {
            [one] => condition.and("log.type = ?", *one),
            _ => condition.and("log.type = ANY (?)", types),
        }
    }
    if let Some(since) = query.since.map(Timestamp::as_micros) {
        condition.and("log.received_at >= ?", since);
        condition.and(
            "log.seq >= coalesce((SELECT everbus.seq_at(?)), 9223372036854775807)",
            since,
        );
    }
    if let Some(until) = query.until.map(Timestamp::as_micros) {
        condition.and("log.received_at <= ?", until);
        let last = format!(
            "log.seq <= coalesce((SELECT everbus.seq_at(?)) + {SLACK}, 9223372036854775807)"
        );
        condition.and(&last, until.saturating_add(1));
    }
    condition
}

/// Describes for people how a query is answered: the narrowest index, and the conditions that filter.
pub(super) fn text(query: &HistoryQuery) -> String {
    let exact = query
        .types
        .as_ref()
        .is_some_and(|types| types.exact().is_some());
    let names = [
        ("entity", query.entity.is_some()),
        ("tenant", query.tenant.is_some()),
        ("app", query.app.is_some()),
    ];
    let mut given = names
        .iter()
        .filter(|(_, given)| *given)
        .map(|(name, _)| *name);
    let first = given.next();
    let mut filters: Vec<&str> = given.collect();
    let index = match first {
        None => "scan".to_owned(),
        Some("tenant") if exact => "index type+tenant".to_owned(),
        Some(name) => format!("index {name}"),
    };
    if query.types.is_some() && !index.contains("type") {
        filters.push("type");
    }
    if query.correlation_id.is_some() {
        filters.push("correlation");
    }
    if filters.is_empty() {
        index
    } else {
        format!("{index}, filter {}", filters.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: engines/postgres-history-plan: each of the eight patterns has an index to begin with
    #[test]
    fn every_pattern_of_the_specification_begins_with_an_index() {
        let query = |words: &str| {
            let query = HistoryQuery::default();
            words.split_whitespace().fold(query, |q, word| match word {
                "tenant" => q.tenant("t"),
                "app" => q.app("a"),
                "entity" => q.entity("E", "1"),
                _ => q.types(word.parse().unwrap()),
            })
        };
        for (given, plan) in [
            ("tenant", "index tenant"),
            ("entity", "index entity"),
            ("app", "index app"),
            ("app entity", "index entity, filter app"),
            ("a.b tenant", "index type+tenant"),
            ("a.b tenant entity", "index entity, filter tenant, type"),
            ("a.b tenant app", "index type+tenant, filter app"),
            (
                "a.b tenant app entity",
                "index entity, filter tenant, app, type",
            ),
            ("a.* tenant", "index tenant, filter type"),
            ("a.b", "scan, filter type"),
            ("", "scan"),
        ] {
            assert_eq!(text(&query(given)), plan, "{given}");
        }
    }
}
