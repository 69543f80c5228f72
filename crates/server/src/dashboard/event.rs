//! The page of one event: its content, its state in each group, its causes and its effects.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::Response;
use everbus::{EventId, EventState, GroupState, Recorded};
use maud::{Markup, html};

use super::page::{Page, Place, may_operate};
use super::parts;
use crate::api::events::{self, EventPage};
use crate::auth::Caller;
use crate::problem::Problem;
use crate::state::AppState;

pub(super) async fn show(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Response, Problem> {
    let found = events::one(&state, &caller, &id, None).await?;
    let record = &found.event;
    let id = record.event.id();
    let event = &record.event;
    let body = html! {
        div.head {
            h1.wrap { (event.event_type()) }
            span.sub { "received " (parts::time(record.received_at)) }
            span.tools {
                @if may_operate(&caller) {
                    button type="button" data-replay=(id) title="Run this event again in a group" { "Replay" }
                }
                a.button href={ "/v1/events/" (id) } { "JSON" }
            }
        }
        div.cols-2 {
            div.stack {
                section.card {
                    header { h2 { "Payload" } span.tools.small.muted { (event.content_type()) " · " (parts::number(event.payload().len() as u64)) " bytes" } }
                    div.body { @if let Some(error) = &found.payload_error { div.notice.warn { p { (error) } } }
                        (parts::payload(record)) }
                }
                (stages(&found))
                (tree(&state, &caller, record).await)
            }
            div.stack {
                section.card {
                    header { h2 { "In each group" } }
                    div.body { (timelines(&found)) }
                }
                section.card {
                    header { h2 { "Envelope" } }
                    div.body { (envelope(record)) }
                }
            }
        }
    };
    let page = Page {
        place: Place::Events,
        title: event.event_type().to_owned(),
        script: Some("/assets/events.js"),
        body,
    };
    Ok(page.show(&state, &caller).await)
}

fn envelope(record: &Recorded) -> Markup {
    let event = &record.event;
    let attributes = event.attributes();
    let mut facts = vec![("Id", html! { span.mono { (event.id()) } })];
    let mut add = |name, text: Option<String>| {
        if let Some(text) = text.filter(|text| !text.is_empty()) {
            facts.push((name, html! { (text) }));
        }
    };
    let shown = event.display_id();
    add(
        "Given id",
        (shown != event.id().to_string()).then(|| shown.to_string()),
    );
    add("Position", Some(record.position.to_string()));
    add("Version", Some(event.version().to_string()));
    add("Occurred", Some(event.occurred_at().to_string()));
    add("Received", Some(record.received_at.to_string()));
    add("Tenant", event.tenant().map(str::to_owned));
    add(
        "Source",
        attributes
            .and_then(|a| a.source.as_ref())
            .map(ToString::to_string),
    );
    add("App", attributes.and_then(|a| a.app.clone()));
    let entity = attributes.and_then(|a| a.entity.as_ref());
    if let Some(entity) = entity {
        let name = format!("{}:{}", entity.kind, entity.id);
        let link = super::events::link("/events", &[("entity", &name)]);
        facts.push(("Entity", html! { a href=(link) { (name) } }));
    }
    let mut add = |name, text: Option<String>| {
        if let Some(text) = text.filter(|text| !text.is_empty()) {
            facts.push((name, html! { (text) }));
        }
    };
    add("Key", event.ordering_key().map(|key| key.to_string()));
    add("Correlation", Some(event.correlation_id().to_string()));
    if let Some(cause) = attributes.and_then(|a| a.causation_id.as_ref()) {
        let cause = cause.to_string();
        facts.push((
            "Caused by",
            match cause.parse::<EventId>() {
                Ok(id) => html! { a.mono href={ "/events/" (id) } { (cause) } },
                Err(_) => html! { (cause) },
            },
        ));
    }
    if let Some(trace) = attributes.and_then(|a| a.trace.as_ref()) {
        let trace = trace.trace_id().unwrap_or_default().to_owned();
        facts.push(("Trace", html! { span.mono { (trace) } }));
    }
    for (name, value) in event.metadata() {
        facts.push((name.as_str(), html! { (value) }));
    }
    parts::facts(facts)
}

fn timelines(found: &EventPage) -> Markup {
    html! {
        @if found.states.is_empty() {
            p.muted { "No group is subscribed to this type. A group that subscribes later begins after this event, unless it begins at the first event." }
        }
        @for (name, state) in &found.states {
            div.stack {
                div.row.between {
                    a href={ "/groups/" (crate::api::percent_encoded(name)) } data-handled-by=(name) { b { (name) } }
                    (parts::state(state.state))
                }
                (timeline(state))
            }
        }
        @if !found.not_subscribed.is_empty() {
            p.small.muted { "Not subscribed to this type: " (found.not_subscribed.join(", ")) }
        }
    }
}

fn timeline(state: &GroupState) -> Markup {
    let quiet = state.failures.is_empty() && state.skipped.is_none();
    html! {
        ul.timeline {
            @for failure in &state.failures {
                li.bad {
                    div.row.small {
                        b { "Attempt " (failure.attempt) } span.badge.bad { (failure.kind.as_str()) }
                        span.muted { (parts::time(failure.at)) }
                        @if let Some(took) = failure.took { span.muted { "after " (parts::millis(u64::try_from(took.as_millis()).unwrap_or(0).max(1))) } }
                    }
                    div.small.wrap { (failure.error) }
                    div.small.faint {
                        @if let Some(handler) = &failure.handler { "handler " (handler) " " }
                        @if let Some(worker) = &failure.worker { "on " (worker) }
                    }
                }
            }
            @match state.state {
                EventState::Pending => li { div.small { @if quiet { "Waits for its first attempt" } @else { "Waits for its next attempt" } } },
                EventState::Processing => li.warn { div.small {
                    @if let Some(due) = state.due_at { "Next attempt " (parts::time(due)) } @else { "Attempt " (state.attempts) " is running" }
                } },
                EventState::Done => li.good { div.small {
                    @if let Some(reason) = &state.skipped { "Skipped: " (reason) }
                    @else if let Some(ended) = &state.ended { "Handled " (parts::time(ended.at)) }
                    @else { "Handled at the first attempt" }
                } },
                EventState::Dlq => li.bad { div.small { "In the dead letters after " (parts::count(u64::from(state.attempts), "attempt")) } },
            }
        }
    }
}

/// The stored payload stages of the event.
fn stages(found: &EventPage) -> Markup {
    let text = |stage: &serde_json::Value, name: &str| match &stage[name] {
        serde_json::Value::String(text) => text.clone(),
        serde_json::Value::Null => String::new(),
        other => other.to_string(),
    };
    html! {
        @if !found.stages.is_empty() {
            section.card {
                header { h2 { "Payload stages" } }
                div.body.stack {
                    @for stage in &found.stages {
                        details {
                            summary {
                                b { (text(stage, "stage")) } " "
                                span.small.muted { (text(stage, "timestamp")) " · " (text(stage, "payload_size_original")) " bytes" }
                                @if !stage["status_code"].is_null() { " " span.badge { (text(stage, "status_code")) } }
                            }
                            @if !stage["error_details"].is_null() { p.bad { (text(stage, "error_details")) } }
                            @if !stage["content"].is_null() { (parts::json(&stage["content"])) }
                        }
                    }
                }
            }
        }
    }
}

/// The causes and effects of the event. After an error the page is shown without them.
async fn tree(state: &AppState, caller: &Caller, record: &Recorded) -> Markup {
    let id = record.event.id().to_string();
    let Ok(tree) = events::causal_tree(state, caller, &id, None).await else {
        return html! {};
    };
    let root = tree
        .items
        .iter()
        .find(|other| other.event.id().to_string() == tree.root);
    html! {
        @if let Some(root) = root.filter(|_| tree.items.len() > 1) {
            section.card {
                header { h2 { "Causes and effects" } span.tools.small.muted { (tree.items.len()) " events" @if tree.stopped { ", perhaps more" } } }
                div.body { ul.tree { (node(root, &tree.items, record, 0)) } }
            }
        }
    }
}

const DEEPEST: usize = 30;

fn node(of: &Recorded, all: &[Arc<Recorded>], here: &Recorded, depth: usize) -> Markup {
    let children = all.iter().filter(|other| {
        other.position != of.position && cause_of(other).is_some_and(|cause| is_named(of, &cause))
    });
    html! {
        li {
            span.here[of.position == here.position] {
                a href={ "/events/" (of.event.id()) } { (of.event.event_type()) }
                " " span.small.faint { (parts::time(of.received_at)) }
            }
            @if depth < DEEPEST {
                ul { @for child in children { (node(child, all, here, depth + 1)) } }
            }
        }
    }
}

fn cause_of(record: &Recorded) -> Option<String> {
    let attributes = record.event.attributes()?;
    attributes.causation_id.as_ref().map(ToString::to_string)
}

fn is_named(record: &Recorded, id: &str) -> bool {
    record.event.id().to_string() == id || record.event.display_id() == id
}
