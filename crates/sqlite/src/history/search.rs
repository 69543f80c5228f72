//! Searches the events of a query, in steps that each see one snapshot of the file.
//!
//! Inside a run the positions come from its postings. After the last run, and where no index helps, the log is read.
//! Every event is compared with the query, so entries of removed events and equal hashes are harmless. Positions never
//! change, so writes between two steps do not affect the result.

use std::sync::Arc;

use everbus_core::history::MAX_HISTORY_BYTES;
use everbus_core::{
    HistoryPage, HistoryQuery, Order, Pattern, Position, Recorded, Result, Timestamp,
};
use rusqlite::{Connection, OptionalExtension, Row};

use super::plan::Plan;
use super::postings::{Postings, seek_all};
use super::runs::{self, Run};
use super::scope::{Named, Text};
use crate::append::position_before;
use crate::errors::from_sqlite;
use crate::feeder::type_filter;
use crate::readers::Reader;
use crate::rows::{RECORD, TypeNames, ends, read_stored, to_sql};

/// Limits of one step: positions read in the log, and index entries followed.
const SCANNED: u64 = 50_000;
const FOLLOWED: usize = 10_000;

/// A search under way.
pub(crate) struct Search {
    query: HistoryQuery,
    plan: Plan,
    /// The range left to search: after the first position, up to and including the second.
    left: Option<(u64, u64)>,
    filter: Filter,
    found: Found,
    begun: bool,
}

/// Conditions checked on a row of the log before the event is read in full.
#[derive(Default)]
struct Filter {
    /// The number of the tenant.
    tenant: Option<i64>,
    /// The number of the type, if there is only one.
    only_type: Option<i64>,
    /// Several types, as a condition; empty for all.
    types: String,
    /// Texts that the attributes must contain, as JSON.
    app: Option<String>,
    entity: Option<String>,
    correlation: Option<String>,
}

/// The result so far.
enum Found {
    Page {
        items: Vec<Arc<Recorded>>,
        bytes: usize,
        more: bool,
    },
    Count {
        events: u64,
        limit: u64,
    },
}

impl Search {
    /// A search for one page.
    pub(crate) fn page(query: HistoryQuery) -> Self {
        let found = Found::Page {
            items: Vec::new(),
            bytes: 0,
            more: false,
        };
        Self::new(query, found)
    }

    /// A search that only counts, up to a limit.
    pub(crate) fn count(query: HistoryQuery, limit: u64) -> Self {
        Self::new(query, Found::Count { events: 0, limit })
    }

    fn new(query: HistoryQuery, found: Found) -> Self {
        Self {
            plan: Plan::of(&query),
            query,
            left: None,
            filter: Filter::default(),
            found,
            begun: false,
        }
    }

    /// Whether the search is complete.
    pub(crate) fn is_done(&self) -> bool {
        self.begun && (self.left.is_none() || self.is_enough())
    }

    fn is_enough(&self) -> bool {
        match &self.found {
            Found::Page { more, .. } => *more,
            Found::Count { events, limit } => events >= limit,
        }
    }

    /// The page that was found.
    pub(crate) fn into_page(self) -> HistoryPage {
        let (items, more) = match self.found {
            Found::Page { items, more, .. } => (items, more),
            Found::Count { .. } => (Vec::new(), false),
        };
        let last = items.last().filter(|_| more);
        HistoryPage {
            next: last.map(|record| self.query.cursor_after(record.position)),
            items,
            plan: self.plan.text,
        }
    }

    /// How many events were found.
    pub(crate) fn into_count(self) -> u64 {
        match self.found {
            Found::Page { items, .. } => items.len() as u64,
            Found::Count { events, .. } => events,
        }
    }

    /// Searches the next part of the log, of bounded size.
    pub(crate) fn step(&mut self, reader: &mut Reader) -> Result<()> {
        if !self.begun {
            self.begun = true;
            self.begin(reader)?;
        }
        let Some((after, upto)) = self.left else {
            return Ok(());
        };
        let Reader { conn, types } = reader;
        let conn: &Connection = conn;
        if self.is_enough() {
            return Ok(());
        }
        if self.plan.scopes.is_empty() {
            return self.scan(conn, types, (after, upto));
        }
        let runs = runs::in_use(conn)?;
        let covered = runs.last().map_or(0, |run| run.hi);
        match self.query.order {
            Order::Newest if upto > covered => {
                let tail = (after.max(covered), upto);
                self.scan(conn, types, tail)?;
                // Usually the rest is short, and this snapshot is enough.
                if self.left.is_some_and(|(_, upto)| upto <= covered) {
                    self.follow_some(conn, types, &runs)?;
                }
                Ok(())
            }
            Order::Oldest if after >= covered => self.scan(conn, types, (after, upto)),
            _ => self.follow_some(conn, types, &runs),
        }
    }

    /// Finds out which range to search.
    fn begin(&mut self, reader: &mut Reader) -> Result<()> {
        let doing = |e| from_sqlite("reading the log", e);
        let query = &self.query;
        let Some((oldest, newest)) = ends(&reader.conn)? else {
            return Ok(());
        };
        let (mut after, mut upto) = (oldest.saturating_sub(1), newest);
        if let Some(since) = query.since {
            after = after.max(position_before(&reader.conn, since)?);
        }
        if let Some(until) = query.until {
            let beyond = Timestamp::from_micros(until.as_micros().saturating_add(1));
            if beyond > until {
                upto = upto.min(position_before(&reader.conn, beyond)?);
            }
        }
        let resume = match self.found {
            Found::Page { .. } => query.resume_after()?.map(Position::place),
            Found::Count { .. } => None,
        };
        match (resume, query.order) {
            (Some(at), Order::Newest) => upto = upto.min(at.saturating_sub(1)),
            (Some(at), Order::Oldest) => after = after.max(at),
            (None, _) => {}
        }
        let mut filter = Filter::default();
        let number = |sql: &str, name: &str| -> Result<Option<i64>> {
            let mut statement = reader.conn.prepare_cached(sql).map_err(doing)?;
            let found = statement.query_row([name], |r| r.get(0));
            found.optional().map_err(doing)
        };
        if let Some(tenant) = &query.tenant {
            filter.tenant = number("SELECT id FROM tenants WHERE name = ?1", tenant)?;
            if filter.tenant.is_none() {
                return Ok(());
            }
        }
        if let Some(name) = query.types.as_ref().and_then(Pattern::exact) {
            // There may be many types, and a page should not read them all.
            filter.only_type = number("SELECT id FROM types WHERE name = ?1", name)?;
            if filter.only_type.is_none() {
                return Ok(());
            }
        } else if let Some(types) = &query.types {
            filter.types = type_filter(reader, std::slice::from_ref(types))?;
            if filter.types.ends_with("()") {
                // No event has such a type.
                return Ok(());
            }
        }
        filter.app = query.app.as_deref().map(as_json);
        filter.correlation = query.correlation_id.as_deref().map(as_json);
        filter.entity = query.entity.as_ref().map(|entity| as_json(&entity.id));
        self.filter = filter;
        self.left = Some((after, upto));
        self.close_empty();
        Ok(())
    }

    fn close_empty(&mut self) {
        self.left = self.left.filter(|(after, upto)| after < upto);
    }

    /// Marks the range up to and including a position as searched.
    fn reached(&mut self, at: u64) {
        self.left = self.left.map(|(after, upto)| match self.query.order {
            Order::Newest => (after, at.saturating_sub(1)),
            Order::Oldest => (at, upto),
        });
        self.close_empty();
    }

    /// Reads the log itself.
    fn scan(
        &mut self,
        conn: &Connection,
        types: &mut TypeNames,
        (after, upto): (u64, u64),
    ) -> Result<()> {
        let doing = |e| from_sqlite("reading the log", e);
        let (after, upto, direction) = match self.query.order {
            Order::Newest => (after.max(upto.saturating_sub(SCANNED)), upto, "DESC"),
            Order::Oldest => (after, upto.min(after.saturating_add(SCANNED)), "ASC"),
        };
        let sql = format!(
            "SELECT {RECORD} FROM log WHERE log.seq > ?1 AND log.seq <= ?2 {}
               AND (?3 IS NULL OR log.tenant = ?3)
               AND (?4 IS NULL OR log.type = ?4)
               AND (?5 IS NULL OR instr(log.attrs, ?5) > 0)
               AND (?6 IS NULL OR instr(log.attrs, ?6) > 0)
               AND (?7 IS NULL OR instr(log.attrs, ?7) > 0)
             ORDER BY log.seq {direction}",
            self.filter.types
        );
        let mut statement = conn.prepare_cached(&sql).map_err(doing)?;
        let filter = &self.filter;
        let parameters = (
            to_sql(after),
            to_sql(upto),
            filter.tenant,
            filter.only_type,
            filter.entity.as_deref(),
            filter.app.as_deref(),
            filter.correlation.as_deref(),
        );
        let mut rows = statement.query(parameters).map_err(doing)?;
        while let Some(row) = rows.next().map_err(doing)? {
            self.found.take(&self.query, conn, types, row)?;
            if self.is_enough() {
                return Ok(());
            }
        }
        self.reached(match self.query.order {
            Order::Newest => after + 1,
            Order::Oldest => upto,
        });
        Ok(())
    }

    /// Follows the index through the runs until the page is full or the step ends.
    fn follow_some(
        &mut self,
        conn: &Connection,
        types: &mut TypeNames,
        runs: &[Run],
    ) -> Result<()> {
        let mut budget = FOLLOWED;
        while let Some((after, upto)) = self.left {
            let run = match self.query.order {
                Order::Newest => runs.iter().rev().find(|run| run.lo <= upto),
                Order::Oldest => runs.iter().find(|run| run.hi > after),
            };
            let Some(run) = run else {
                // Nothing is older than all runs; newer events are read by the next step.
                if self.query.order == Order::Newest {
                    self.left = None;
                }
                return Ok(());
            };
            self.follow(conn, types, run, &mut budget)?;
            if budget == 0 || self.is_enough() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Follows the index in one run.
    fn follow(
        &mut self,
        conn: &Connection,
        types: &mut TypeNames,
        run: &Run,
        budget: &mut usize,
    ) -> Result<()> {
        let doing = |e| from_sqlite("reading the log", e);
        let Some((after, upto)) = self.left else {
            return Ok(());
        };
        let (low, high) = (run.lo.max(after + 1), run.hi.min(upto));
        let order = self.query.order;
        let scopes = self.plan.scopes.iter();
        let mut lists: Vec<Postings<'_>> = scopes
            .map(|scope| Postings::new(conn, run, *scope, order))
            .collect();
        let sql = format!(
            "SELECT {RECORD} FROM log WHERE log.seq = ?1 {} AND (?2 IS NULL OR log.tenant = ?2)
             AND (?3 IS NULL OR log.type = ?3)",
            self.filter.types
        );
        let mut statement = conn.prepare_cached(&sql).map_err(doing)?;
        let mut at = match order {
            Order::Newest => high,
            Order::Oldest => low,
        };
        while let Some(seq) = seek_all(&mut lists, at)?.filter(|seq| (low..=high).contains(seq)) {
            let parameters = (to_sql(seq), self.filter.tenant, self.filter.only_type);
            let mut rows = statement.query(parameters).map_err(doing)?;
            if let Some(row) = rows.next().map_err(doing)? {
                self.found.take(&self.query, conn, types, row)?;
                if self.is_enough() {
                    return Ok(());
                }
            }
            drop(rows);
            *budget = budget.saturating_sub(1);
            if *budget == 0 {
                self.reached(seq);
                return Ok(());
            }
            at = match order {
                Order::Newest if seq > low => seq - 1,
                Order::Oldest if seq < high => seq + 1,
                _ => break,
            };
        }
        self.reached(match order {
            Order::Newest => low,
            Order::Oldest => high,
        });
        Ok(())
    }
}

impl Found {
    /// Adds an event to the result if it matches the query.
    fn take(
        &mut self,
        query: &HistoryQuery,
        conn: &Connection,
        types: &mut TypeNames,
        row: &Row<'_>,
    ) -> Result<()> {
        if !is_wanted(query, conn, types, row)? {
            return Ok(());
        }
        match self {
            Found::Count { events, .. } => *events += 1,
            Found::Page { items, bytes, more } => {
                if items.len() == query.limit || *bytes > MAX_HISTORY_BYTES {
                    *more = true;
                } else {
                    let Some(record) = read_stored(conn, row, types)?.or_left_out() else {
                        return Ok(());
                    };
                    *bytes += record.event.payload().len();
                    items.push(record);
                }
            }
        }
        Ok(())
    }
}

/// Compares a row of [`RECORD`] with a query, without its payload.
fn is_wanted(
    query: &HistoryQuery,
    conn: &Connection,
    types: &mut TypeNames,
    row: &Row<'_>,
) -> Result<bool> {
    let doing = |e| from_sqlite("reading the log", e);
    if let Some(pattern) = &query.types {
        // An unreadable type cannot be a type of the query.
        let name = match row.get(2) {
            Ok(id) => types.find(conn, id)?,
            Err(_) => None,
        };
        if !name.is_some_and(|name| Pattern::matches(pattern, &name)) {
            return Ok(false);
        }
    }
    let names = [&query.tenant, &query.app, &query.correlation_id];
    if names.iter().all(|name| name.is_none()) && query.entity.is_none() {
        return Ok(true);
    }
    let Ok(attrs) = row.get_ref(6).map_err(doing)?.as_str() else {
        return Ok(false);
    };
    // Damage is reported when the event is read in full, not here.
    let Ok(named) = serde_json::from_str::<Named<'_>>(attrs) else {
        return Ok(false);
    };
    let same = |wanted: &Option<String>, found: &Option<Text<'_>>| {
        wanted
            .as_ref()
            .is_none_or(|wanted| found.as_ref().is_some_and(|found| found.0 == *wanted))
    };
    let entity = query.entity.as_ref();
    Ok(same(&query.tenant, &named.tenant)
        && same(&query.app, &named.app)
        && same(&query.correlation_id, &named.correlation_id)
        && entity.is_none_or(|wanted| named.entity.as_ref().is_some_and(|e| e.is(wanted))))
}

/// A text in the JSON form of the stored attributes.
fn as_json(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
