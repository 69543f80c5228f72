//! The page of one job: its graph now or at a past time, why each task waits, its time line, and its actions.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::Response;
use everbus::{HistoryQuery, Order, Recorded, Result, Timestamp};
use everbus_jobs::events::{JOB, TASK, TaskHeartbeat, TaskState};
use everbus_jobs::state::TaskStatus;
use everbus_jobs::{JobPicture, JobState, JobStatus, Jobs};
use maud::{Markup, html};
use serde::Deserialize;

use super::dag;
use super::jobs::{Chosen, job_badge, no_worker};
use super::page::{Page, Place, may_operate};
use super::parts;
use crate::auth::{Caller, Scope};
use crate::body::Params;
use crate::problem::Problem;
use crate::state::AppState;

/// Graphs with more tasks are not drawn: a person could not read them.
const DRAWN: usize = 250;
/// How many tasks are in the table.
const LISTED: usize = 300;
/// How many tasks have their events in the time line.
const FOLLOWED: usize = 100;
/// How many events are in the time line.
const MOMENTS: usize = 400;

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct At {
    tenant: String,
    at: String,
}

pub(super) async fn show(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Params(query): Params<At>,
) -> Result<Response, Problem> {
    let chosen = Chosen::of(&state, &caller, &query.tenant).await?;
    let jobs = &chosen.jobs;
    let at: Option<Timestamp> = match query.at.as_str() {
        "" => None,
        text => Some(text.parse()?),
    };
    let status = jobs.job(&id).await?;
    let tasks = jobs.job_tasks(&id).await?;
    let picture = match status.state {
        // A refused job has no graph.
        JobState::Refused => None,
        _ => Some(jobs.job_graph(&id, at).await?),
    };
    let moments = moments(jobs, &id, &tasks).await?;
    let pending = status.count(TaskState::Pending) as u64;
    let body = html! {
        div #jobs-page data-tenant=(jobs.tenant()) data-job=(id) data-follow[at.is_none()] {
            (head(&chosen, &caller, &status))
            div.stack {
                (no_worker(&state, pending).await)
                @if let Some(refused) = &status.refused {
                    div.notice.bad { p { "The job never started: " (refused) } }
                }
                @if let Some(picture) = &picture {
                    section.card {
                        header { h2 { "Graph" } span.tools { (legend()) } }
                        (graph(&chosen, picture, &tasks, at))
                        (slider(&moments))
                    }
                    div.cols-2 {
                        (table(&chosen, &caller, picture, &tasks, at))
                        (timeline(&chosen, &id, &moments))
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

fn head(chosen: &Chosen, caller: &Caller, status: &JobStatus) -> Markup {
    let of = |state| status.count(state);
    let (completed, failed) = (of(TaskState::Completed), of(TaskState::Failed));
    let id = &status.job_id;
    html! {
        div #job-head data-live data-state=(status.state.as_str()) {
            p.small { a href=(chosen.link("/jobs", &[])) { "Jobs" } }
            div.head {
                h1.wrap { (id) }
                (job_badge(status.state))
                span.sub {
                    (completed) " of " (status.total_tasks) " tasks completed"
                    @if failed > 0 { ", " (failed) " failed" }
                    ", submitted " (parts::time(status.created_at))
                }
                span.tools {
                    @if may_operate(caller) && failed > 0 { button.primary type="button" data-act="resume" { "Resume" } }
                    @if caller.may(Scope::Publish) && status.state != JobState::Refused { button type="button" data-act="add" { "Add tasks" } }
                    @if may_operate(caller) && status.state == JobState::Running { button.danger type="button" data-act="cancel" { "Cancel" } }
                }
            }
            (dag::progress(completed, of(TaskState::Processing), failed, status.total_tasks))
            br;
        }
    }
}

fn legend() -> Markup {
    let states = [None].into_iter().chain(TaskState::ALL.map(Some));
    html! { span.row { @for state in states { (dag::badge(state, false)) } } }
}

fn graph(
    chosen: &Chosen,
    picture: &JobPicture,
    tasks: &[TaskStatus],
    at: Option<Timestamp>,
) -> Markup {
    html! {
        div.body #graph data-live data-at=[at] {
            @if picture.graph.len() > DRAWN {
                p.muted { "The graph has " (picture.graph.len()) " tasks, which is more than a page can show. Draw it in a file:" }
                pre.code { "everbus job graph " (picture.job_id) " --svg > job.svg" }
            } @else {
                div.scroll.dag-scroll tabindex="0" { (dag::draw(picture, if at.is_some() { &[] } else { tasks }, |task| chosen.task(task))) }
            }
        }
    }
}

/// The slider that shows the graph at a past time. Its steps are the events of the time line.
fn slider(moments: &[Moment]) -> Markup {
    let last = moments.len().saturating_sub(1);
    html! {
        footer #slider data-live {
            label.field.grow {
                span.row.between { span { "Time" } output #moment-label { "now" } }
                input #moment type="range" min="0" max=(last) value=(last) disabled[last == 0];
            }
        }
    }
}

fn table(
    chosen: &Chosen,
    caller: &Caller,
    picture: &JobPicture,
    tasks: &[TaskStatus],
    at: Option<Timestamp>,
) -> Markup {
    let rank = |state: Option<TaskState>| match state {
        Some(TaskState::Failed) => 0,
        Some(TaskState::Processing) => 1,
        Some(TaskState::Pending) => 2,
        None => 3,
        Some(TaskState::Completed) => 4,
    };
    let mut order: Vec<usize> = (0..picture.graph.len()).collect();
    // If not all tasks fit, those that need attention come first.
    if order.len() > LISTED {
        order.sort_by_key(|number| rank(picture.states[*number]));
    }
    let statuses: &[TaskStatus] = if at.is_some() { &[] } else { tasks };
    html! {
        section.card #tasks data-live {
            header { h2 { "Tasks" } @if order.len() > LISTED { span.small.muted { (LISTED) " of " (order.len()) } } }
            div.scroll { table.cards {
                thead { tr { th { "Task" } th { "State" } th { "Why" } th.num { "Since" } th {} } }
                tbody { @for number in order.into_iter().take(LISTED) {
                    @let task = picture.graph.task(number);
                    @let status = statuses.get(number);
                    tr data-href=(chosen.task(&task.task_id)) {
                        td.lead {
                            a.wrap href=(chosen.task(&task.task_id)) title=(task.task_id) { (dag::own(&task.task_id, &picture.job_id)) }
                            span.clip.small.faint { (task.name) }
                        }
                        td data-label="State" { (dag::badge(picture.states[number], status.is_some_and(|s| s.cancelled))) }
                        td.small.muted.wrap.line { (picture.reason(number, status).unwrap_or_default()) }
                        td.num data-label="Since" { @if let Some(since) = status.and_then(|s| s.since) { (parts::time(since)) } }
                        td.tight { (task_buttons(caller, &task.task_id, picture.states[number], at.is_some())) }
                    }
                } }
            } }
        }
    }
}

/// The buttons for a task in this state.
pub(super) fn task_buttons(
    caller: &Caller,
    id: &str,
    state: Option<TaskState>,
    past: bool,
) -> Markup {
    html! {
        @if may_operate(caller) && !past {
            @match state {
                Some(TaskState::Failed) => { button.small-button type="button" data-retry-task=(id) { "Retry" } }
                Some(TaskState::Completed) => { button.small-button.plain type="button" data-retry-task=(id) data-completed { "Run again" } }
                Some(TaskState::Pending | TaskState::Processing) => { button.small-button type="button" data-cancel-task=(id) { "Cancel" } }
                None => {}
            }
        }
    }
}

/// One event of the time line.
struct Moment {
    record: Arc<Recorded>,
    /// The task; `None` for an event of the job.
    task: Option<String>,
}

/// The events of the job and its tasks, the oldest first. Heartbeats are left out.
async fn moments(jobs: &Jobs, id: &str, tasks: &[TaskStatus]) -> Result<Vec<Moment>> {
    let mut moments = Vec::new();
    let entities = tasks.iter().take(FOLLOWED);
    let entities = entities.map(|task| (TASK, task.request_id.as_str()));
    for (kind, entity) in [(JOB, id)].into_iter().chain(entities) {
        let query = HistoryQuery::default()
            .tenant(jobs.tenant())
            .entity(kind, entity)
            .order(Order::Newest)
            .limit(MOMENTS);
        let page = jobs.bus().history()?.query(query).await?;
        let events = page.items.into_iter().filter(|record| {
            record.event.event_type() != <TaskHeartbeat as everbus::TypedEvent>::TYPE
        });
        moments.extend(events.map(|record| Moment {
            record,
            task: (kind == TASK).then(|| entity.to_owned()),
        }));
    }
    moments.sort_by_key(|moment| (moment.record.received_at, moment.record.position.place()));
    let early = moments.len().saturating_sub(MOMENTS);
    Ok(moments.split_off(early))
}

/// The colour of an event in a time line.
pub(super) fn colour(event_type: &str) -> &'static str {
    match event_type {
        "Task Completed" | "Job Completed" => "good",
        "Task Failed" | "Task Timeout" | "Job Failure Detected" => "bad",
        "Task Processing Failed" => "warn",
        _ => "",
    }
}

fn timeline(chosen: &Chosen, id: &str, moments: &[Moment]) -> Markup {
    let path = format!("/jobs/{}", crate::api::percent_encoded(id));
    html! {
        section.card #timeline data-live {
            header { h2 { "Time line" } }
            div.body.tall {
                ol.timeline { @for moment in moments {
                    @let at = moment.record.received_at.to_string();
                    @let event_type = moment.record.event.event_type();
                    li class=(colour(event_type)) data-at=(at) {
                        a href=(chosen.link(&path, &[("at", &at)])) title="The graph at this moment" data-moment { (event_type) }
                        @if let Some(task) = &moment.task { " " span.small.muted.wrap title=(task) { (dag::own(task, id)) } }
                        " " span.small.faint { (parts::time(moment.record.received_at)) }
                    }
                } }
            }
        }
    }
}
