//! The list of tasks by state, and one task with its events.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::Response;
use everbus::{Recorded, Result, TypedEvent as _};
use everbus_jobs::events::{TASK, TaskProcessingFailed, TaskState};
use everbus_jobs::state::TaskStatus;
use maud::{Markup, html};
use serde::Deserialize;

use super::dag;
use super::job::{colour, task_buttons};
use super::jobs::{Chosen, health_badge, no_worker, tabs};
use super::page::{Page, Place};
use super::parts::{self, number};
use crate::api::events::{EventsQuery, page as events_page};
use crate::api::tasks::WantedState;
use crate::auth::Caller;
use crate::body::Params;
use crate::problem::Problem;
use crate::state::AppState;

const PAGE: usize = 50;
/// How many events of a task are on its page.
const EVENTS: usize = 200;
/// How many failed attempts of a task are on its page.
const ATTEMPTS: usize = 50;

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Filters {
    state: Option<WantedState>,
    tenant: String,
    cursor: String,
}

pub(super) async fn list(
    State(state): State<AppState>,
    caller: Caller,
    Params(filters): Params<Filters>,
) -> Result<Response, Problem> {
    let chosen = Chosen::of(&state, &caller, &filters.tenant).await?;
    let wanted = filters.state.map(TaskState::from);
    let cursor = (!filters.cursor.is_empty()).then_some(filters.cursor.as_str());
    let found = chosen.jobs.tasks_page(wanted, cursor, PAGE).await?;
    let counts = chosen.jobs.task_counts().await?;
    let total: u64 = counts.iter().map(|(_, count)| count).sum();
    let first = filters.cursor.is_empty();
    let this = wanted.map_or("", TaskState::as_str);
    let body = html! {
        div #jobs-page data-tenant=(chosen.jobs.tenant()) data-follow[first] {
            div.head {
                h1 { "Tasks" }
                span.sub { "the newest change first" }
                span.tools { (chosen.tenant_form("/tasks")) }
            }
            div.stack {
                (tabs(&chosen, "Tasks"))
                (no_worker(&state, counts[0].1).await)
                section.card #task-list data-live {
                    header {
                        span.row role="group" aria-label="State" {
                            a.button.small-button href=(chosen.link("/tasks", &[])) aria-current=[wanted.is_none().then_some("true")] { "All " span.faint { (number(total)) } }
                            @for (state, count) in counts {
                                a.button.small-button href=(chosen.link("/tasks", &[("state", state.as_str())])) aria-current=[(wanted == Some(state)).then_some("true")] {
                                    (capital(state)) " " span.faint { (number(count)) }
                                }
                            }
                        }
                    }
                    @if total == 0 {
                        (parts::empty(
                            "No tasks yet",
                            "Submit one, and start a worker that runs it:",
                            Some("everbus task submit scrape-store '{\"store\": 1}'\neverbus worker -- ./work.sh"),
                        ))
                    } @else if found.items.is_empty() {
                        (parts::empty("No such tasks", "No task is in this state.", None))
                    } @else {
                        (table(&chosen, &caller, &found.items))
                    }
                    footer.pages {
                        span.grow {}
                        @if !first { a.button href=(chosen.link("/tasks", &[("state", this)])) { "First page" } }
                        @if let Some(next) = &found.next {
                            a.button #next rel="next" href=(chosen.link("/tasks", &[("state", this), ("cursor", next)])) { "Next page" }
                        }
                    }
                }
            }
        }
    };
    let page = Page {
        place: Place::Jobs,
        title: "Tasks".to_owned(),
        script: Some("/assets/jobs.js"),
        body,
    };
    Ok(page.show(&state, &caller).await)
}

const fn capital(state: TaskState) -> &'static str {
    match state {
        TaskState::Pending => "Pending",
        TaskState::Processing => "Processing",
        TaskState::Completed => "Completed",
        TaskState::Failed => "Failed",
    }
}

fn table(chosen: &Chosen, caller: &Caller, tasks: &[TaskStatus]) -> Markup {
    html! {
        div.scroll { table.cards {
            thead { tr { th { "Task" } th { "State" } th { "Job" } th { "Worker" } th { "Error" } th.num { "Since" } th {} } }
            tbody #task-rows { @for task in tasks {
                tr data-href=(chosen.task(&task.request_id)) data-task=(task.request_id) {
                    td.lead { a.wrap href=(chosen.task(&task.request_id)) { (task.request_id) } span.clip.small.faint { (task.name) } }
                    td data-label="State" { (dag::badge(task.state, task.cancelled)) }
                    td data-label="Job" { @if let Some(job) = &task.job_id { a.wrap href=(chosen.job(job)) { (job) } } }
                    td.small.muted data-label="Worker" { (task.worker_id.as_deref().unwrap_or_default()) }
                    td.small.muted.wrap.line { (task.error.as_deref().unwrap_or_default()) }
                    td.num data-label="Since" { @if let Some(since) = task.since { (parts::time(since)) } }
                    td.tight { (task_buttons(caller, &task.request_id, task.state, false)) }
                }
            } }
        } }
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Whose {
    tenant: String,
}

pub(super) async fn show(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Params(whose): Params<Whose>,
) -> Result<Response, Problem> {
    let chosen = Chosen::of(&state, &caller, &whose.tenant).await?;
    let task = chosen.jobs.task_status(&id).await?;
    let events = EventsQuery {
        tenant: Some(chosen.jobs.tenant().to_owned()),
        entity: Some(format!("{TASK}:{id}")),
        order: Some("newest".to_owned()),
        limit: Some(EVENTS),
        ..EventsQuery::default()
    };
    // The failed attempts are queried separately: many heartbeats would push them out of the list of events.
    let failed = EventsQuery {
        event_type: Some(TaskProcessingFailed::TYPE.to_owned()),
        limit: Some(ATTEMPTS),
        ..events.clone()
    };
    let events = events_page(&state, &caller, &events).await?;
    let failed = events_page(&state, &caller, &failed).await?;
    let pending = u64::from(task.state == Some(TaskState::Pending));
    let health = (task.state == Some(TaskState::Processing))
        .then(|| state.options().task_health.judge(&task, chosen.jobs.now()));
    let body = html! {
        div #jobs-page data-tenant=(chosen.jobs.tenant()) data-of-task=(id) data-follow {
            div #task-head data-live {
                p.small {
                    @match &task.job_id {
                        Some(job) => { a href=(chosen.job(job)) { (job) } }
                        None => { a href=(chosen.link("/tasks", &[])) { "Tasks" } }
                    }
                }
                div.head {
                    h1.wrap { (id) }
                    (dag::badge(task.state, task.cancelled))
                    @if let Some(health) = health { (health_badge(health)) }
                    span.sub { (task.name) }
                    span.tools { (task_buttons(&caller, &id, task.state, false)) }
                }
            }
            div.stack {
                (no_worker(&state, pending).await)
                (failed_attempts(&failed.items))
                div.cols-2 {
                    section.card #events data-live {
                        header { h2 { "Events" } span.small.muted { "newest first" } }
                        div.body {
                            @if events.items.is_empty() {
                                p.muted { "The task waits for the tasks before it. It has no events yet." }
                            }
                            ol.timeline { @for record in &events.items {
                                li class=(colour(record.event.event_type())) {
                                    a href={ "/events/" (record.event.id()) } { (record.event.event_type()) }
                                    " " span.small.faint { (parts::time(record.received_at)) }
                                    span.clip.mono.small.muted { (parts::beginning(&record.event)) }
                                }
                            } }
                        }
                    }
                    section.card #facts data-live {
                        header { h2 { "State" } }
                        div.body { (facts(&task)) }
                    }
                }
            }
        }
    };
    let page = Page {
        place: Place::Jobs,
        title: id.clone(),
        script: Some("/assets/jobs.js"),
        body,
    };
    Ok(page.show(&state, &caller).await)
}

/// The failed attempts with a retryable error, newest first.
fn failed_attempts(records: &[Arc<Recorded>]) -> Markup {
    let attempts: Vec<(&Arc<Recorded>, TaskProcessingFailed)> = records
        .iter()
        .filter_map(|record| Some((record, record.event.json().ok()?)))
        .collect();
    html! {
        section.card #failed-attempts data-live hidden[attempts.is_empty()] {
            header { h2 { "Failed attempts" } span.small.muted { "newest first" } }
            div.scroll { table.cards {
                thead { tr { th.num { "Attempt" } th { "Error" } th { "Category" } th.num { "When" } } }
                tbody { @for (record, failed) in &attempts {
                    tr data-href={ "/events/" (record.event.id()) } {
                        td.num.lead data-label="Attempt" { a href={ "/events/" (record.event.id()) } { (failed.attempt_number) } }
                        td.wrap.line.bad { (failed.error) }
                        td.small.muted data-label="Category" { (failed.error_category.as_str()) }
                        td.num data-label="When" { (parts::time(record.received_at)) }
                    }
                } }
            } }
        }
    }
}

fn facts(task: &TaskStatus) -> Markup {
    let mut facts = vec![("Run", html! { (task.run) })];
    if let Some(since) = task.since {
        facts.push(("In this state", parts::time(since)));
    }
    if let Some(started) = task.started_at {
        facts.push(("Attempt started", parts::time(started)));
    }
    if let (Some(kind), Some(at)) = (&task.last_event_type, task.last_event_at) {
        facts.push(("Last event", html! { (kind) ", " (parts::time(at)) }));
    }
    if let Some(worker) = &task.worker_id {
        facts.push(("Worker", html! { (worker) }));
    }
    if let Some(error) = &task.error {
        facts.push(("Error", html! { span.bad { (error) } }));
    }
    parts::facts(facts)
}
