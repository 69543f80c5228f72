//! The page of all jobs: their progress, the health of running tasks, and the schedules.

use axum::extract::State;
use axum::response::Response;
use everbus::Result;
use everbus_jobs::events::{Health, TaskState};
use everbus_jobs::health::HealthReport;
use everbus_jobs::schedule::Action;
use everbus_jobs::{DEFAULT_TENANT, JobRow, JobState, Jobs, Page as PageOf, WORKERS};
use maud::{Markup, html};
use serde::Deserialize;

use super::dag;
use super::events::link;
use super::page::{Page, Place};
use super::parts::{self, number};
use crate::api::jobs::WantedJobs;
use crate::api::percent_encoded;
use crate::api::schedules::{self, Schedule};
use crate::auth::Caller;
use crate::body::Params;
use crate::problem::Problem;
use crate::state::AppState;
use crate::tasks::of_caller;

const PAGE: usize = 50;

/// The tenant whose tasks and jobs a page shows.
pub(super) struct Chosen {
    pub(super) jobs: Jobs,
    /// Every tenant, for a caller of all tenants; else empty.
    pub(super) tenants: Vec<String>,
    of_one: bool,
}

impl Chosen {
    /// Chooses the tenant: the one in the URL, or the tenant of the caller, or the default tenant. If the default
    /// tenant has no tasks, the first tenant that has some.
    pub(super) async fn of(
        state: &AppState,
        caller: &Caller,
        asked: &str,
    ) -> Result<Self, Problem> {
        let all = state.jobs()?;
        all.index().catch_up(all.bus(), None).await?;
        let of_one = caller.tenant().is_some();
        let tenants = match of_one {
            true => Vec::new(),
            false => all.index().all_tenants()?,
        };
        let mut asked = (!asked.is_empty()).then(|| asked.to_owned());
        if !of_one && asked.is_none() && !tenants.iter().any(|name| name == DEFAULT_TENANT) {
            asked = tenants.first().cloned();
        }
        Ok(Self {
            jobs: of_caller(state, caller, asked)?,
            tenants,
            of_one,
        })
    }

    /// The tenant as a query parameter; empty if it is not needed.
    pub(super) fn tenant(&self) -> &str {
        match self.of_one || self.jobs.tenant() == DEFAULT_TENANT {
            true => "",
            false => self.jobs.tenant(),
        }
    }

    pub(super) fn link(&self, path: &str, pairs: &[(&str, &str)]) -> String {
        let mut all = vec![("tenant", self.tenant())];
        all.extend_from_slice(pairs);
        link(path, &all)
    }

    pub(super) fn job(&self, id: &str) -> String {
        self.link(&format!("/jobs/{}", percent_encoded(id)), &[])
    }

    pub(super) fn task(&self, id: &str) -> String {
        self.link(&format!("/tasks/{}", percent_encoded(id)), &[])
    }

    /// The form that chooses a tenant, if there are several.
    pub(super) fn tenant_form(&self, path: &str) -> Markup {
        html! {
            @if self.tenants.len() > 1 {
                form.row method="get" action=(path) {
                    label.field { "Tenant"
                        select name="tenant" data-submit {
                            @for name in &self.tenants {
                                option value=(name) selected[name == self.jobs.tenant()] { (name) }
                            }
                        }
                    }
                    noscript { button type="submit" { "Show" } }
                }
            }
        }
    }
}

/// The tabs for the lists of jobs and of tasks.
pub(super) fn tabs(chosen: &Chosen, current: &str) -> Markup {
    let tabs = [("Jobs", "/jobs"), ("Tasks", "/tasks")];
    html! {
        nav.tabs aria-label="Lists" {
            @for (name, path) in tabs {
                a href=(chosen.link(path, &[])) aria-current=[(name == current).then_some("page")] { (name) }
            }
        }
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Filters {
    state: Option<WantedJobs>,
    tenant: String,
    cursor: String,
}

pub(super) async fn list(
    State(state): State<AppState>,
    caller: Caller,
    Params(filters): Params<Filters>,
) -> Result<Response, Problem> {
    let chosen = Chosen::of(&state, &caller, &filters.tenant).await?;
    let wanted = filters.state.map(JobState::from);
    let cursor = (!filters.cursor.is_empty()).then_some(filters.cursor.as_str());
    let found = chosen.jobs.jobs_page(wanted, cursor, PAGE).await?;
    let counts = chosen.jobs.task_counts().await?;
    let health = chosen.jobs.health(&state.options().task_health).await?;
    // An engine without a key-value store has no schedules.
    let schedules = schedules::all(&state, &caller).await.unwrap_or_default();
    let first = filters.cursor.is_empty();
    let empty = found.items.is_empty() && wanted.is_none() && first;
    let body = html! {
        div #jobs-page data-tenant=(chosen.jobs.tenant()) data-follow[first] {
            div.head {
                h1 { "Jobs" }
                span.sub { "graphs of tasks, newest first" }
                span.tools { (chosen.tenant_form("/jobs")) }
            }
            div.stack {
                (tabs(&chosen, "Jobs"))
                div #counts data-live {
                    div.figures {
                        @for (state, count) in counts {
                            a.card.figure href=(chosen.link("/tasks", &[("state", state.as_str())])) {
                                div.label { (label(state)) }
                                div.value { (number(count)) }
                                div.note { (note(state)) }
                            }
                        }
                        (health_figure(&health))
                    }
                }
                (no_worker(&state, counts[0].1).await)
                (unhealthy(&chosen, &health))
                section.card #job-list data-live {
                    header { (state_tabs(&chosen, wanted)) }
                    @if empty {
                        (teach())
                    } @else if found.items.is_empty() {
                        (parts::empty("No such jobs", "No job of this tenant is in this state.", None))
                    } @else {
                        (table(&chosen, &found))
                    }
                    footer.pages {
                        span.grow {}
                        @if !first { a.button href=(chosen.link("/jobs", &[("state", wanted.map_or("", JobState::as_str))])) { "First page" } }
                        @if let Some(next) = &found.next {
                            a.button #next rel="next" href=(chosen.link("/jobs", &[("state", wanted.map_or("", JobState::as_str)), ("cursor", next)])) { "Next page" }
                        }
                    }
                }
                @if !schedules.is_empty() { (schedule_list(&schedules)) }
            }
        }
    };
    let page = Page {
        place: Place::Jobs,
        title: "Jobs".to_owned(),
        script: Some("/assets/jobs.js"),
        body,
    };
    Ok(page.show(&state, &caller).await)
}

const fn label(state: TaskState) -> &'static str {
    match state {
        TaskState::Pending => "Pending tasks",
        TaskState::Processing => "Running tasks",
        TaskState::Completed => "Completed tasks",
        TaskState::Failed => "Failed tasks",
    }
}

const fn note(state: TaskState) -> &'static str {
    match state {
        TaskState::Pending => "wait for a worker",
        TaskState::Processing => "a worker has them",
        TaskState::Completed => "ended well",
        TaskState::Failed => "or timed out, or cancelled",
    }
}

fn health_figure(health: &HealthReport) -> Markup {
    let summary = health.check.summary;
    let late = summary.warning + summary.critical + summary.overtime;
    let (class, value) = match health.severity() {
        0 => ("good", "Healthy".to_owned()),
        1 => ("warn", "Warning".to_owned()),
        _ => ("bad", "Critical".to_owned()),
    };
    html! {
        div.card.figure {
            div.label { "Task health" }
            div class={ "value " (class) } #health { (value) }
            div.note { (late) " late, " (health.waiting.len()) " wait too long" }
        }
    }
}

/// The warning that tasks wait and no worker seems to run.
pub(super) async fn no_worker(state: &AppState, pending: u64) -> Markup {
    const SILENT: u64 = 60;
    if pending == 0 {
        return html! {};
    }
    let groups = state.live().figures().groups().await.unwrap_or_default();
    let workers = groups.iter().find(|group| group.name.as_str() == WORKERS);
    let now = everbus::Clock::now(&everbus::SystemClock);
    let silent = workers.is_none_or(|group| {
        group.in_flight == 0 && group.behind > 0 && now.since(group.active_at).as_secs() > SILENT
    });
    html! {
        @if silent {
            div.notice.warn {
                p {
                    @match workers {
                        Some(group) => { "Tasks wait, and no worker has asked for one since " (parts::time(group.active_at)) ". " }
                        None => { "Tasks wait, and no worker has run yet. " }
                    }
                    "Start one: " code { "everbus worker -- COMMAND" }
                }
            }
        }
    }
}

fn unhealthy(chosen: &Chosen, health: &HealthReport) -> Markup {
    const MOST: usize = 20;
    let late = health.check.tasks.iter();
    let late = late.filter(|task| task.health != Health::Healthy);
    let late: Vec<_> = late.take(MOST).collect();
    html! {
        div #unhealthy data-live {
            @if !late.is_empty() || !health.waiting.is_empty() {
                section.card {
                    header { h2 { "Tasks that need a look" } }
                    div.scroll { table.cards {
                        thead { tr { th { "Task" } th { "Health" } th.num { "For" } th { "Last event" } th { "Worker" } } }
                        tbody {
                            @for task in late {
                                tr data-href=(chosen.task(&task.request_id)) {
                                    td.lead { a href=(chosen.task(&task.request_id)) { (task.request_id) } }
                                    td data-label="Health" { (health_badge(task.health)) }
                                    td.num data-label="For" { (parts::millis(task.elapsed)) }
                                    td data-label="Last event" { (task.last_event_type) ", " (parts::millis(task.time_since_last_event)) " ago" }
                                    td data-label="Worker" { (task.worker_id) }
                                }
                            }
                            @for task in health.waiting.iter().take(MOST) {
                                tr data-href=(chosen.task(&task.request_id)) {
                                    td.lead { a href=(chosen.task(&task.request_id)) { (task.request_id) } }
                                    td data-label="Health" { span.badge.warn { "waits too long" } }
                                    td.num data-label="For" { (parts::millis(task.waiting)) }
                                    td data-label="Last event" { "Task Pending" }
                                    td.off {}
                                }
                            }
                        }
                    } }
                }
            }
        }
    }
}

pub(super) fn health_badge(health: Health) -> Markup {
    let (class, word) = match health {
        Health::Healthy => ("badge good", "healthy"),
        Health::Warning => ("badge warn", "warning"),
        Health::Critical => ("badge bad", "critical"),
        Health::Overtime => ("badge bad", "overtime"),
    };
    html! { span class=(class) { (word) } }
}

fn state_tabs(chosen: &Chosen, wanted: Option<JobState>) -> Markup {
    let states = [
        ("All", None),
        ("Running", Some(JobState::Running)),
        ("Failed", Some(JobState::Failed)),
        ("Completed", Some(JobState::Completed)),
    ];
    html! {
        span.row role="group" aria-label="State" {
            @for (name, state) in states {
                a.button.small-button aria-current=[(state == wanted).then_some("true")]
                    href=(chosen.link("/jobs", &[("state", state.map_or("", JobState::as_str))])) { (name) }
            }
        }
    }
}

pub(super) fn job_badge(state: JobState) -> Markup {
    let class = match state {
        JobState::Running => "badge info",
        JobState::Completed => "badge good",
        JobState::Failed | JobState::Refused => "badge bad",
    };
    html! { span class=(class) { (state.as_str()) } }
}

fn table(chosen: &Chosen, found: &PageOf<JobRow>) -> Markup {
    html! {
        div.scroll { table.cards {
            thead { tr { th { "Job" } th { "State" } th.w-progress { "Progress" } th.num { "Tasks" } th.num { "Running" } th.num { "Failed" } th.num { "Submitted" } } }
            tbody #job-rows { @for row in &found.items {
                tr data-href=(chosen.job(&row.job_id)) data-job=(row.job_id) {
                    td.lead { a.clip href=(chosen.job(&row.job_id)) title=(row.job_id) { (row.job_id) } }
                    td data-label="State" { (job_badge(row.state())) }
                    td.line { (dag::progress(row.completed, row.processing, row.failed, row.total_tasks)) }
                    td.num data-label="Tasks" { (row.completed) " of " (row.total_tasks) }
                    td.num data-label="Running" { (row.processing) }
                    td.num data-label="Failed" { span class=[(row.failed > 0).then_some("bad")] { (row.failed) } }
                    td.num data-label="Submitted" { (parts::time(row.created_at)) }
                }
            } }
        } }
    }
}

fn teach() -> Markup {
    parts::empty(
        "No jobs yet",
        "A job is a graph of tasks. Submit one, and start a worker that runs its tasks:",
        Some(
            "curl 127.0.0.1:7770/v1/jobs -H 'content-type: application/json' -d '{\n  \"tasks\": [\n    {\"taskId\": \"scrape\", \"name\": \"scrape-store\"},\n    {\"taskId\": \"tags\", \"name\": \"color-tags\", \"dependsOn\": [\"scrape\"]}\n  ]}'\n\neverbus job submit job.yaml\neverbus worker -- ./work.sh",
        ),
    )
}

fn schedule_list(schedules: &[Schedule]) -> Markup {
    html! {
        section.card {
            header { h2 { "Schedules" } }
            div.scroll { table.cards {
                thead { tr { th { "Schedule" } th { "When" } th { "What" } th { "Next" } th { "Last run" } } }
                tbody { @for Schedule { schedule, next, last } in schedules {
                    tr {
                        td.lead { (schedule.name) " " @if schedule.paused { span.badge.warn { "paused" } } }
                        td data-label="When" { span.mono { (schedule.cron) } " " span.small.faint { (schedule.timezone) } }
                        td data-label="What" {
                            @match &schedule.action {
                                Action::Task { name, .. } => { "task " (name) }
                                Action::Event { event_type, .. } => { "event " (event_type) }
                            }
                        }
                        td data-label="Next" { @if let Some(next) = next { (parts::time(*next)) } @else { "-" } }
                        td data-label="Last run" {
                            @match last {
                                None => { "-" }
                                Some(last) => {
                                    (parts::time(last.turn)) " "
                                    @if let Some(error) = &last.error { span.bad { (error) } }
                                }
                            }
                        }
                    }
                } }
            } }
        }
    }
}
