//! The list of events: newest first, page by page, with a live tail.

use axum::extract::State;
use axum::response::{IntoResponse, Redirect, Response};
use everbus::{EventId, Recorded, Result, Timestamp};
use maud::{Markup, html};
use serde::Deserialize;

use super::page::{Page, Place};
use super::parts;
use crate::api::events::{self, EventsPage, EventsQuery};
use crate::auth::Caller;
use crate::body::Params;
use crate::problem::Problem;
use crate::state::AppState;

const PAGE: usize = 50;

/// The filters, as in the URL of the page.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Filters {
    q: String,
    r#type: String,
    tenant: String,
    app: String,
    entity: String,
    since: String,
    until: String,
    correlation: String,
    order: String,
    cursor: String,
}

impl Filters {
    fn query(&self) -> Result<EventsQuery, Problem> {
        let given = |text: &str| (!text.trim().is_empty()).then(|| text.trim().to_owned());
        let at = |text: &str| given(text).map(|text| time(&text)).transpose();
        Ok(EventsQuery {
            tenant: given(&self.tenant),
            app: given(&self.app),
            entity: given(&self.entity),
            event_type: given(&self.r#type),
            since: at(&self.since)?,
            until: at(&self.until)?,
            order: given(&self.order),
            limit: Some(PAGE),
            cursor: given(&self.cursor),
            contains: given(&self.q),
            correlation_id: given(&self.correlation),
            causation_id: None,
        })
    }

    /// The URL of another page of the list, with the same filters.
    fn link(&self, cursor: &str) -> String {
        let pairs = [
            ("q", self.q.as_str()),
            ("type", &self.r#type),
            ("tenant", &self.tenant),
            ("app", &self.app),
            ("entity", &self.entity),
            ("since", &self.since),
            ("until", &self.until),
            ("correlation", &self.correlation),
            ("order", &self.order),
            ("cursor", cursor),
        ];
        link("/events", &pairs)
    }

    fn is_plain(&self) -> bool {
        [
            &self.q,
            &self.r#type,
            &self.tenant,
            &self.app,
            &self.entity,
            &self.since,
            &self.until,
            &self.correlation,
        ]
        .iter()
        .all(|text| text.trim().is_empty())
    }
}

/// A path with the query parameters that have a value.
pub(super) fn link(path: &str, pairs: &[(&str, &str)]) -> String {
    let pairs = pairs.iter().filter(|(_, value)| !value.is_empty());
    let pairs: Vec<String> = pairs
        .map(|(name, value)| format!("{name}={}", crate::api::percent_encoded(value)))
        .collect();
    if pairs.is_empty() {
        path.to_owned()
    } else {
        format!("{path}?{}", pairs.join("&"))
    }
}

/// Parses a time in RFC 3339, or a shorter form without a zone, which is taken as UTC.
fn time(text: &str) -> Result<Timestamp> {
    match text.len() {
        10 => format!("{text}T00:00:00Z").parse(),
        16 => format!("{text}:00Z").parse(),
        19 => format!("{text}Z").parse(),
        _ => text.parse(),
    }
}

pub(super) async fn show(
    State(state): State<AppState>,
    caller: Caller,
    Params(filters): Params<Filters>,
) -> Result<Response, Problem> {
    // An event id in the search box opens the page of the event.
    if let Ok(id) = filters.q.trim().parse::<EventId>()
        && events::find(state.bus(), &caller, filters.q.trim(), None)
            .await
            .is_ok()
    {
        return Ok(Redirect::to(&format!("/events/{id}")).into_response());
    }
    let found = events::page(&state, &caller, &filters.query()?).await?;
    let of_tenant = caller.tenant().is_some();
    let body = html! {
        div.head {
            h1 { "Events" }
            span.sub { @if filters.order == "oldest" { "oldest first" } @else { "newest first" } }
            span.tools {
                button #tail type="button" aria-pressed="false" title="Show events as they are stored" { "Live tail" }
            }
        }
        section.card {
            header { (form(&filters, of_tenant)) }
            (list(&filters, &found))
        }
    };
    let page = Page {
        place: Place::Events,
        title: "Events".to_owned(),
        script: Some("/assets/events.js"),
        body,
    };
    Ok(page.show(&state, &caller).await)
}

fn form(filters: &Filters, of_tenant: bool) -> Markup {
    let more = [
        &filters.app,
        &filters.entity,
        &filters.since,
        &filters.until,
        &filters.tenant,
        &filters.correlation,
    ]
    .iter()
    .any(|text| !text.is_empty());
    html! {
        form.grow #filters method="get" action="/events" {
            div.filters {
                label.field.grow { "Search in payloads"
                    input #search name="q" type="search" value=(filters.q) placeholder="text, or the id of an event" autocomplete="off";
                }
                label.field { "Type"
                    input name="type" value=(filters.r#type) placeholder="order.*" autocomplete="off" spellcheck="false";
                }
                button.primary type="submit" { "Search" }
                @if !filters.is_plain() { a.button href="/events" { "Clear" } }
            }
            details.more open[more] {
                summary { "More filters" }
                div.filters {
                    @if !of_tenant { label.field { "Tenant" input name="tenant" value=(filters.tenant); } }
                    label.field { "App" input name="app" value=(filters.app); }
                    label.field { "Entity" input name="entity" value=(filters.entity) placeholder="ORDER:123"; }
                    label.field { "Correlation id" input name="correlation" value=(filters.correlation); }
                    label.field { "From (UTC)" input name="since" value=(filters.since) placeholder="2026-01-31T12:00"; }
                    label.field { "Until (UTC)" input name="until" value=(filters.until) placeholder="2026-01-31T13:00"; }
                    label.field { "Order"
                        select name="order" {
                            option value="" selected[filters.order != "oldest"] { "newest first" }
                            option value="oldest" selected[filters.order == "oldest"] { "oldest first" }
                        }
                    }
                }
            }
        }
    }
}

fn list(filters: &Filters, found: &EventsPage) -> Markup {
    let none = found.items.is_empty();
    html! {
        @if none && filters.is_plain() && filters.cursor.is_empty() {
            (parts::empty(
                "No events yet",
                "Publish one, and it appears here:",
                Some("everbus publish order.placed '{\"order\": 1}'\n\ncurl 127.0.0.1:7770/v1/events -H 'content-type: application/json' \\\n  -d '{\"type\": \"order.placed\", \"payload\": {\"order\": 1}}'"),
            ))
        } @else if none {
            (parts::empty("Nothing matches", "No event in this range matches these filters.", None))
        }
        div.scroll hidden[none] { table.fixed.cards {
            thead { tr { th.w-type { "Type" } th { "Payload" } th.w-about { "Entity or key" } th.w-id { "Id" } th.w-time.num { "Received" } } }
            tbody #event-rows { @for record in &found.items { (row(record, filters.q.trim())) } }
        } }
        footer.pages {
            @if found.stopped {
                span.small.muted { "The search reached its time limit before the end of the history." }
            }
            span.grow {}
            @if !filters.cursor.is_empty() { a.button href=(filters.link("")) { "First page" } }
            @if let Some(next) = &found.next {
                a.button #next href=(filters.link(next)) rel="next" {
                    @if found.stopped { "Search on" } @else { "Next page" }
                }
            }
        }
    }
}

fn row(record: &Recorded, wanted: &str) -> Markup {
    let event = &record.event;
    let attributes = event.attributes();
    let entity = attributes.and_then(|a| a.entity.as_ref());
    let entity = entity.map(|entity| format!("{}:{}", entity.kind, entity.id));
    let about = entity
        .or_else(|| event.ordering_key().map(|key| key.to_string()))
        .unwrap_or_default();
    html! {
        tr data-href={ "/events/" (event.id()) } {
            td.lead {
                span.clip title=(event.event_type()) { (event.event_type()) }
                @if let Some(tenant) = event.tenant() { span.clip.small.faint { (tenant) } }
            }
            td.line { span.clip.mono.small.muted { (parts::found(event, wanted)) } }
            td data-label="Entity" { span.clip title=(about) { (about) } }
            td data-label="Id" { (parts::event_link(record)) }
            td.num data-label="Received" { (parts::time(record.received_at)) }
        }
    }
}
