//! The table queries of the specification, converted to history queries.

use std::collections::BTreeMap;

use everbus_core::{Code, Entity, Error, HistoryQuery, Order, Pattern, Result};
use serde::Deserialize;

/// A table query in the form of the specification, with values as text.
///
/// The order is that of receipt, not of the senders' `timestamp`, so a sort key can only be given up to
/// `TIMESTAMP#`; for a time range use [`HistoryQuery::since`] and [`HistoryQuery::until`].
///
/// ```
/// use everbus_core::Order;
/// use everbus_dialects::workflow::TableQuery;
///
/// let query: TableQuery = serde_json::from_str(
///     r##"{
///       "IndexName": "GSI1-index",
///       "KeyConditionExpression": "GSI1PK = :pk",
///       "ExpressionAttributeValues": { ":pk": "TASK#req-123" },
///       "ScanIndexForward": false,
///       "Limit": 1
///     }"##,
/// )
/// .unwrap();
/// let query = query.history("gbinnovations")?;
/// assert_eq!(query.entity.unwrap().to_string(), "TASK#req-123");
/// assert_eq!(query.tenant.as_deref(), Some("gbinnovations"));
/// assert_eq!((query.order, query.limit), (Order::Newest, 1));
/// # Ok::<(), everbus_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", deny_unknown_fields)]
pub struct TableQuery {
    /// Ignored: there is one table.
    #[serde(default)]
    pub table_name: Option<String>,
    /// `GSI1-index` to `GSI7-index`, or none for the table itself.
    #[serde(default)]
    pub index_name: Option<String>,
    /// `GSI4PK = :pk AND begins_with(GSI4SK, :sk)`.
    pub key_condition_expression: String,
    /// The values of the names with a colon.
    #[serde(default)]
    pub expression_attribute_values: BTreeMap<String, String>,
    /// Oldest first, which is the default.
    #[serde(default = "forward")]
    pub scan_index_forward: bool,
    /// At most this many; the default of the history if none is given.
    #[serde(default)]
    pub limit: Option<usize>,
}

fn forward() -> bool {
    true
}

impl TableQuery {
    /// The equivalent history query for one tenant: the keys of GSI1 to GSI3 contain no tenant, and a
    /// tenant must not read another tenant's events. Keys with another tenant are refused.
    pub fn history(&self, tenant: &str) -> Result<HistoryQuery> {
        let condition = Condition::parse(&self.key_condition_expression)?;
        let index = condition.index;
        let asked = self.index_name.as_deref().unwrap_or(PRIMARY);
        let name = index.map_or_else(|| PRIMARY.to_owned(), |n| format!("GSI{n}-index"));
        if asked != name {
            let what = format!("the condition is about {name}, the query about {asked}");
            return Err(refused(what));
        }
        let partition = self.value(condition.partition)?;
        let sort = condition.sort.map(|name| self.value(name)).transpose()?;
        let mut query = HistoryQuery::default();
        let mut parts = Parts {
            query: &mut query,
            tenant,
        };
        parts.partition(index, partition)?;
        parts.sort(index, sort.unwrap_or_default())?;
        query.tenant = Some(tenant.to_owned());
        query.order = if self.scan_index_forward {
            Order::Oldest
        } else {
            Order::Newest
        };
        query.limit = self.limit.unwrap_or(query.limit);
        query.validate()?;
        Ok(query)
    }

    fn value(&self, name: &str) -> Result<&str> {
        let value = self.expression_attribute_values.get(name);
        value
            .map(String::as_str)
            .ok_or_else(|| refused(format!("there is no value for {name}")))
    }
}

const PRIMARY: &str = "the table";

/// A parsed key condition.
struct Condition<'a> {
    /// The number of the index; `None` for the table itself.
    index: Option<u8>,
    /// The names of the values.
    partition: &'a str,
    sort: Option<&'a str>,
}

impl<'a> Condition<'a> {
    fn parse(text: &'a str) -> Result<Self> {
        let (first, second) = match text.split_once(" AND ") {
            Some((first, second)) => (first, Some(second)),
            None => (text, None),
        };
        let bad = || {
            refused(format!("{text:?} is not a key condition"))
                .hint("NAME = :value, or NAME = :value AND begins_with(NAME, :value)")
        };
        let (name, partition) = first.split_once('=').ok_or_else(bad)?;
        let (name, partition) = (name.trim(), partition.trim());
        let index = match name.strip_prefix("GSI").and_then(|n| n.strip_suffix("PK")) {
            None if name == "PK" => None,
            Some(number) => match number.parse() {
                Ok(number @ 1..=7) => Some(number),
                _ => return Err(bad()),
            },
            None => return Err(bad()),
        };
        let sort = match second {
            None => None,
            Some(second) => {
                let inside = second
                    .trim()
                    .strip_prefix("begins_with(")
                    .and_then(|rest| rest.strip_suffix(')'));
                let (key, value) = inside.and_then(|i| i.split_once(',')).ok_or_else(bad)?;
                let expected = index.map_or_else(|| "SK".to_owned(), |n| format!("GSI{n}SK"));
                if key.trim() != expected {
                    return Err(bad());
                }
                Some(value.trim())
            }
        };
        let named = |value: &str| value.starts_with(':') && value.len() > 1;
        if !named(partition) || !sort.is_none_or(named) {
            return Err(bad());
        }
        Ok(Self {
            index,
            partition,
            sort,
        })
    }
}

/// Converts keys to a query.
struct Parts<'a> {
    query: &'a mut HistoryQuery,
    tenant: &'a str,
}

impl Parts<'_> {
    fn partition(&mut self, index: Option<u8>, key: &str) -> Result<()> {
        let mut words = key.splitn(2, '#');
        let (kind, name) = (words.next().unwrap_or_default(), words.next());
        let name = name.filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| refused(format!("{key:?} is not a partition key")))?;
        match (index, kind) {
            (None, "TENANT") => self.tenant(name),
            (Some(1), kind) if !kind.is_empty() => self.entity(kind, name),
            (Some(2 | 3), "APP") => self.app(name),
            (Some(4..), "EVENT") => {
                // Types have no wildcards, so a key with a wildcard would find nothing in the table either.
                self.query.types = Some(Pattern::new(name)?);
                if self
                    .query
                    .types
                    .as_ref()
                    .is_some_and(|p| p.exact().is_none())
                {
                    return Err(refused(format!("{name:?} is not the type of an event")));
                }
                Ok(())
            }
            _ => Err(refused(format!(
                "{key:?} is not a partition key of this index"
            ))),
        }
    }

    /// The sort key, as far as it is given. A missing part that the index needs is refused: it would mean
    /// all apps or entities, but only events that have one.
    fn sort(&mut self, index: Option<u8>, prefix: &str) -> Result<()> {
        let whole = prefix.is_empty() || prefix.ends_with('#');
        let mut words: Vec<&str> = prefix.split('#').collect();
        words.pop();
        if words.last() == Some(&"TIMESTAMP") {
            words.pop();
        }
        let bad = || {
            refused(format!("{prefix:?} is not the beginning of a sort key here")).hint(
                "give all parts up to TIMESTAMP#; the range of time is since and until of the query",
            )
        };
        if !whole || words.iter().any(|word| word.is_empty()) {
            return Err(bad());
        }
        match (index, words.as_slice()) {
            (None | Some(2 | 4), []) => Ok(()),
            (Some(1), []) => Ok(()),
            (Some(1), [kind]) => {
                let same = self.query.entity.as_ref().is_some_and(|e| e.kind == *kind);
                if same { Ok(()) } else { Err(bad()) }
            }
            (Some(3), [kind, id]) => self.entity(kind, id),
            (Some(4), ["TENANT", tenant]) => self.tenant(tenant),
            (Some(5), ["TENANT", tenant, kind, id]) => {
                self.tenant(tenant)?;
                self.entity(kind, id)
            }
            (Some(6), ["TENANT", tenant, "APP", app]) => {
                self.tenant(tenant)?;
                self.app(app)
            }
            (Some(7), ["TENANT", tenant, "APP", app, kind, id]) => {
                self.tenant(tenant)?;
                self.app(app)?;
                self.entity(kind, id)
            }
            _ => Err(bad()),
        }
    }

    fn tenant(&mut self, tenant: &str) -> Result<()> {
        if tenant == self.tenant {
            return Ok(());
        }
        let what = format!(
            "the query names the tenant {tenant:?} and is asked for {:?}",
            self.tenant
        );
        Err(refused(what).hint("a query sees the events of its own tenant"))
    }

    fn app(&mut self, app: &str) -> Result<()> {
        self.query.app = Some(no_hash("app", app)?);
        Ok(())
    }

    fn entity(&mut self, kind: &str, id: &str) -> Result<()> {
        self.query.entity = Some(Entity {
            kind: kind.to_owned(),
            id: no_hash("id of the entity", id)?,
        });
        Ok(())
    }
}

fn no_hash(name: &str, text: &str) -> Result<String> {
    if text.contains('#') {
        return Err(refused(format!(
            "the {name} {text:?} cannot be part of a key"
        )));
    }
    Ok(text.to_owned())
}

fn refused(what: String) -> Error {
    Error::new(Code::InvalidAttribute, what)
}
