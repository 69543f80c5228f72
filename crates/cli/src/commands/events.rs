//! `everbus events`: the history of a tenant, an app or an entity, page by page.

use std::sync::Arc;

use everbus::{Dialect, overflow};
use everbus_core::{
    Engine, Entity, HistoryPage, HistoryQuery, PageCursor, Pattern, Recorded, Timestamp,
};
use serde::Serialize;

use super::check_range;
use super::documents::Documents;
use super::get::{Whole, shown_whole};
use crate::open::{Target, close};
use crate::output::{Output, Table, escaped, payload_text, shortened};
use crate::page::PageArgs;
use crate::stop::Outcome;
use crate::suggest::Suggestion;
use crate::values::{
    entity_text, parse_dialect, parse_entity, parse_history_cursor, parse_pattern,
};
use crate::when;

/// At most this many bytes of large payloads are fetched for one page.
const MOST_FETCHED: u64 = 64 << 20;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Times are those of receipt, and both ends of a range belong to it. Each page ends with the \
command for the next one, if there is one; in JSON that is the cursor `next`. Use a cursor with the \
filters and the order of its page. A time such as 2h means another moment in each call: give \
the `since` and `until` from the JSON of the first page instead.

In JSON large events are whole, up to 64 MiB of them on a page. Further large events have the place of \
their large part as `overflow`; `everbus get ID` shows them whole.")]
pub(crate) struct EventsArgs {
    /// Only of this tenant
    #[arg(long)]
    tenant: Option<String>,

    /// Only of this application
    #[arg(long)]
    app: Option<String>,

    /// Only about this entity
    #[arg(long, value_name = "TYPE:ID", value_parser = parse_entity)]
    entity: Option<Entity>,

    /// Only of types that match: order.placed, order.*, order.>
    #[arg(long = "type", value_name = "PATTERN", value_parser = parse_pattern)]
    pattern: Option<Pattern>,

    #[command(flatten)]
    page: PageArgs,

    /// Where to continue: the cursor printed with a page
    #[arg(long, value_parser = parse_history_cursor)]
    cursor: Option<PageCursor>,

    /// Print which indexes were used
    #[arg(long)]
    explain: bool,

    /// Print each event as a document of this dialect, one per line: native, cloudevents, omni, workflow,
    /// outbox or framework
    #[arg(long, value_name = "DIALECT", value_parser = parse_dialect)]
    dialect: Option<Dialect>,
}

pub(crate) async fn run(args: &EventsArgs, target: &Target, output: &mut Output) -> Outcome {
    let query = query(args)?;
    let engine = target.open_existing().await?;
    let outcome = show(args, query, &engine, target, output).await;
    close(&engine).await;
    outcome
}

fn query(args: &EventsArgs) -> Outcome<HistoryQuery> {
    check_range(args.page.since, args.page.until)?;
    let query = HistoryQuery {
        tenant: args.tenant.clone(),
        app: args.app.clone(),
        entity: args.entity.clone(),
        types: args.pattern.clone(),
        since: args.page.since,
        until: args.page.until,
        order: args.page.order(),
        limit: args.page.limit,
        cursor: args.cursor.clone(),
        ..HistoryQuery::default()
    };
    query.validate()?;
    Ok(query)
}

async fn show(
    args: &EventsArgs,
    query: HistoryQuery,
    engine: &Engine,
    target: &Target,
    output: &mut Output,
) -> Outcome {
    let page = engine.history()?.query(query).await?;
    if let Some(dialect) = args.dialect {
        return show_documents(args, dialect, &page, engine, target, output).await;
    }
    if output.is_json() {
        let events = whole(&page.items, engine, target).await?;
        return output.json(&Printed::new(args, &page, events));
    }
    if page.items.is_empty() {
        output.line("no events")?;
    } else {
        table(&page).print(output)?;
    }
    if args.explain {
        output.line(format!("plan: {}", page.plan))?;
    }
    if let Some(next) = &page.next {
        output.line(format!("more: {}", next_page(args, next, target)))?;
    }
    Ok(())
}

/// A page in JSON output.
#[derive(Serialize)]
struct Printed<'a, E> {
    events: Vec<E>,
    next: Option<&'a PageCursor>,
    #[serde(skip_serializing_if = "Option::is_none")]
    since: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    until: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    plan: Option<&'a str>,
}

impl<'a, E> Printed<'a, E> {
    fn new(args: &EventsArgs, page: &'a HistoryPage, events: Vec<E>) -> Self {
        Self {
            events,
            next: page.next.as_ref(),
            since: args.page.since,
            until: args.page.until,
            plan: args.explain.then_some(page.plan.as_str()),
        }
    }
}

/// Prints the page in a dialect: one document per line, everything else on standard error.
async fn show_documents(
    args: &EventsArgs,
    dialect: Dialect,
    page: &HistoryPage,
    engine: &Engine,
    target: &Target,
    output: &mut Output,
) -> Outcome {
    let mut documents = Documents::new(dialect);
    let events = whole(&page.items, engine, target).await?;
    if output.is_json() {
        let written = events.iter().filter_map(|event| documents.written(event));
        let written: Vec<_> = written.collect();
        output.json(&Printed::new(args, page, written))?;
    } else {
        for event in &events {
            documents.print(event, output)?;
        }
        if args.explain {
            tracing::warn!("plan: {}", page.plan);
        }
        if let Some(next) = &page.next {
            tracing::warn!("more: {}", next_page(args, next, target));
        }
    }
    documents.finish()
}

/// The events with their large payloads, up to the page's limit.
async fn whole(items: &[Arc<Recorded>], engine: &Engine, target: &Target) -> Outcome<Vec<Whole>> {
    let objects = target.objects(engine)?;
    let (mut whole, mut left) = (Vec::with_capacity(items.len()), MOST_FETCHED);
    for record in items {
        let size = record.event.overflow().map_or(0, |overflow| overflow.size);
        if overflow::is_apart(&record.event) && (left == 0 || size > left) {
            whole.push(Whole {
                record: record.clone(),
                error: Some("left out of a long page; see everbus get".to_owned()),
            });
            continue;
        }
        let shown = shown_whole(objects.as_deref(), record).await;
        // The size of an object that another sender stored is known only now.
        let before = record.event.payload().len();
        let grown = shown.record.event.payload().len().saturating_sub(before);
        left = left.saturating_sub(grown as u64);
        whole.push(shown);
    }
    Ok(whole)
}

/// A table of the columns that have values.
fn table(page: &HistoryPage) -> Table {
    const OPTIONAL: [&str; 3] = ["TENANT", "APP", "ENTITY"];
    let names = |index: usize| -> Vec<String> {
        let attributes = page.items.iter().map(|r| r.event.attributes());
        attributes
            .map(|a| match (index, a) {
                (_, None) => None,
                (0, Some(a)) => a.tenant.clone(),
                (1, Some(a)) => a.app.clone(),
                (_, Some(a)) => a.entity.as_ref().map(entity_text),
            })
            .map(Option::unwrap_or_default)
            .collect()
    };
    let columns: Vec<(&str, Vec<String>)> = OPTIONAL
        .into_iter()
        .enumerate()
        .map(|(index, title)| (title, names(index)))
        .filter(|(_, cells)| cells.iter().any(|cell| !cell.is_empty()))
        .collect();
    let mut header = vec!["SEQ", "RECEIVED", "TYPE"];
    header.extend(columns.iter().map(|(title, _)| *title));
    header.extend(["ID", "PAYLOAD"]);
    let mut table = Table::new(&header);
    for (row, record) in page.items.iter().enumerate() {
        let event = &record.event;
        let mut cells = vec![
            record.position.to_string(),
            when::stamp(record.received_at),
            shortened(&escaped(event.event_type()), 40).into_owned(),
        ];
        let names = columns.iter().map(|(_, cells)| &cells[row]);
        cells.extend(names.map(|name| shortened(&escaped(name), 40).into_owned()));
        cells.push(escaped(&event.display_id()).into_owned());
        cells.push(shortened(&payload_text(event), 60).into_owned());
        table.row(cells);
    }
    table
}

/// The command that shows the next page.
fn next_page(args: &EventsArgs, next: &PageCursor, target: &Target) -> Suggestion {
    let command = Suggestion::new(target, "events")
        .option("--tenant", args.tenant.as_ref())
        .option("--app", args.app.as_ref())
        .option("--entity", args.entity.as_ref().map(entity_text))
        .option("--type", args.pattern.as_ref());
    args.page
        .repeated(command)
        .option("--cursor", Some(next))
        .flag("--explain", args.explain)
        .option("--dialect", args.dialect)
}
