//! Which indexes answer a query.

use everbus_core::HistoryQuery;

use super::scope::{Hashes, Kind, entity, name};

/// Which scopes to look up, and a text that explains it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// An event must be in all of these scopes; the first is the narrowest. Empty: the log is read.
    pub(crate) scopes: Vec<i64>,
    /// Explanation for the user.
    pub(crate) text: String,
}

impl Plan {
    /// The narrowest index for the names in a query, and further ones for names it does not cover.
    pub(crate) fn of(query: &HistoryQuery) -> Self {
        let exact = query.types.as_ref().and_then(|pattern| pattern.exact());
        let hashes = Hashes {
            tenant: query.tenant.as_deref().map(name),
            app: query.app.as_deref().map(name),
            entity: query.entity.as_ref().map(|e| entity(&e.kind, &e.id)),
            event_type: exact.map(name),
            correlation: query.correlation_id.as_deref().map(name),
        };
        let has = (
            query.tenant.is_some(),
            query.app.is_some(),
            query.entity.is_some(),
        );
        let kinds: &[Kind] = match (exact.is_some(), has) {
            (true, (true, true, true)) => &[Kind::All],
            (true, (true, true, false)) => &[Kind::TypeTenantApp],
            (true, (true, false, true)) => &[Kind::TypeTenantEntity],
            (true, (true, false, false)) => &[Kind::TypeTenant],
            (_, (true, true, true)) => &[Kind::AppEntity, Kind::Tenant],
            (_, (true, true, false)) => &[Kind::Tenant, Kind::App],
            (_, (true, false, true)) => &[Kind::Entity, Kind::Tenant],
            (_, (true, false, false)) => &[Kind::Tenant],
            (_, (false, true, true)) => &[Kind::AppEntity],
            (_, (false, true, false)) => &[Kind::App],
            (_, (false, false, true)) => &[Kind::Entity],
            (_, (false, false, false)) => &[],
        };
        // Few events share a correlation id: they are compared with the other names one by one.
        let kinds: &[Kind] = match query.correlation_id {
            Some(_) => &[Kind::Correlation],
            None => kinds,
        };
        let names: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
        let covered = exact.is_some() && query.tenant.is_some() && query.correlation_id.is_none();
        let filter = match &query.types {
            Some(_) if !covered => ", filter type",
            _ => "",
        };
        let text = match names.as_slice() {
            [] => format!("scan{filter}"),
            [one] => format!("index {one}{filter}"),
            several => format!("indexes {}{filter}", several.join(" ∩ ")),
        };
        Self {
            scopes: kinds
                .iter()
                .filter_map(|kind| hashes.scope(*kind))
                .collect(),
            text,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(words: &str) -> HistoryQuery {
        let query = HistoryQuery::default();
        words.split_whitespace().fold(query, |q, word| match word {
            "tenant" => q.tenant("t"),
            "app" => q.app("a"),
            "entity" => q.entity("E", "1"),
            "type" => q.types("order.placed".parse().unwrap()),
            "correlation" => q.correlation_id("r"),
            _ => q.types("order.*".parse().unwrap()),
        })
    }

    // conformance: memory/history-planner: the planner picks the index for each of the eight patterns, and combines indexes for the others
    // conformance: embedded/type-fast: a type in a tenant is asked for by its index
    #[test]
    fn every_combination_of_names_has_its_plan() {
        for (given, plan, lists) in [
            ("tenant", "index tenant", 1),
            ("entity", "index entity", 1),
            ("app", "index app", 1),
            ("app entity", "index app+entity", 1),
            ("type tenant", "index type+tenant", 1),
            ("type tenant entity", "index type+tenant+entity", 1),
            ("type tenant app", "index type+tenant+app", 1),
            ("type tenant app entity", "index type+tenant+app+entity", 1),
            ("tenant app", "indexes tenant ∩ app", 2),
            ("tenant entity", "indexes entity ∩ tenant", 2),
            ("tenant app entity", "indexes app+entity ∩ tenant", 2),
            ("type app", "index app, filter type", 1),
            ("type entity", "index entity, filter type", 1),
            ("type app entity", "index app+entity, filter type", 1),
            ("order.* tenant", "index tenant, filter type", 1),
            ("order.* tenant app", "indexes tenant ∩ app, filter type", 2),
            ("correlation", "index correlation", 1),
            (
                "type tenant correlation",
                "index correlation, filter type",
                1,
            ),
            ("type", "scan, filter type", 0),
            ("order.*", "scan, filter type", 0),
            ("", "scan", 0),
        ] {
            let found = Plan::of(&query(given));
            assert_eq!(found.text, plan, "{given}");
            assert_eq!(found.scopes.len(), lists, "{given}");
        }
    }
}
