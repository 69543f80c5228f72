//! Tasks and jobs in the server: the handle for requests, and the background work. The background work is the
//! dispatcher, the stored schedules, the health check and the alerts. Several servers on one store share it, and one of
//! them does each piece. Retention is not here: the bus runs it.
//!
//! The dispatcher, the schedules and the health check start when the store has its first task, job or schedule.

use std::sync::OnceLock;
use std::time::Duration;

use everbus::config;
use everbus::{Bus, HistoryQuery, Pattern, Result, TypedEvent as _};
use everbus_jobs::alerts::mount_configured;
use everbus_jobs::events::{JobCreated, TaskPending, TaskState};
use everbus_jobs::health::Thresholds;
use everbus_jobs::schedule::{CronTimes, HEALTH_CHECK, Scheduler, Schedules, Tick};
use everbus_jobs::{DEFAULT_TENANT, Dispatcher, Jobs};
use tokio::sync::Notify;

use crate::auth::Caller;
use crate::options::ServerOptions;
use crate::problem::Problem;
use crate::state::AppState;

/// How often a server looks for the first task, job or schedule of another process.
const LOOK: Duration = Duration::from_secs(5);

/// The tasks and jobs of the bus.
#[derive(Default)]
pub(crate) struct Tasks {
    jobs: OnceLock<Jobs>,
    wanted: Notify,
}

impl Tasks {
    /// The handle. Fails with `Unsupported` if the engine has no history.
    pub(crate) fn open(&self, bus: &Bus, options: &ServerOptions) -> Result<Jobs> {
        if let Some(jobs) = self.jobs.get() {
            return Ok(jobs.clone());
        }
        let mut jobs = Jobs::builder();
        if let Some(file) = &options.task_index {
            jobs = jobs.index(file);
        }
        let opened = jobs.open(bus.clone())?;
        Ok(self.jobs.get_or_init(|| opened).clone())
    }

    /// Makes [`run`] look at once whether the dispatcher and the schedules have to start.
    pub(crate) fn want(&self) {
        self.wanted.notify_one();
    }
}

/// The tasks and jobs for a caller: of its own tenant, or for a caller of all tenants of the requested tenant.
pub(crate) fn of_caller(
    state: &AppState,
    caller: &Caller,
    asked: Option<String>,
) -> Result<Jobs, Problem> {
    let tenant = caller.tenant_filter(asked)?;
    let tenant = tenant.as_deref().unwrap_or(DEFAULT_TENANT);
    Ok(state.jobs()?.of_tenant(tenant)?)
}

/// Mounts the alerts, if they are configured. Servers on one store share the group, so one of them sends each alert.
pub(crate) async fn mount_alerts(state: &AppState) -> Result<()> {
    let alerts = &state.options().alerts;
    if *alerts == config::Alerts::default() {
        // Without alerts the handle is not opened, which would fail on an engine without a history.
        return Ok(());
    }
    mount_configured(&state.jobs()?, alerts).await.map(drop)
}

/// Runs the dispatcher, the schedules and the health check, until the server stops.
pub(crate) async fn run(state: AppState) {
    // An engine without a history has no tasks. Requests about tasks get the error.
    let Ok(jobs) = state.jobs() else { return };
    loop {
        match in_use(&jobs).await {
            Ok(true) => match Dispatcher::subscribe(&jobs).await {
                Ok(_) => break,
                Err(error) => {
                    tracing::warn!(target: "everbus::jobs", %error, "the dispatcher could not start; it is tried again");
                }
            },
            Ok(false) => {}
            Err(error) => {
                tracing::warn!(target: "everbus::jobs", %error, "the server cannot see whether there are tasks");
            }
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK) => {}
            () = state.tasks().wanted.notified() => {}
            () = state.stopping() => return,
        }
    }
    if let Err(error) = schedules(&state, jobs).await {
        tracing::warn!(target: "everbus::schedule", %error, "schedules do not run in this server");
    }
}

async fn schedules(state: &AppState, jobs: Jobs) -> Result<()> {
    let owner = format!("everbus serve, process {}", std::process::id());
    let mut scheduler = Scheduler::new(jobs.clone()).owner(owner).stored()?;
    if let Some(cron) = &state.options().health_check {
        let times = CronTimes::new(cron, "UTC")?;
        let thresholds = state.options().task_health;
        scheduler = scheduler.on(HEALTH_CHECK, times, move |tick| {
            let jobs = jobs.clone();
            async move {
                let checked = check_health(&jobs, &thresholds, &tick).await;
                checked.map_err(|error| error.to_string())
            }
        });
    }
    scheduler.run(state.stopping()).await
}

async fn check_health(jobs: &Jobs, thresholds: &Thresholds, tick: &Tick) -> Result<()> {
    let index = jobs.index();
    index.catch_up(jobs.bus(), None).await?;
    // No task runs or waits, so no check is published.
    if index.tenants(TaskState::Processing)?.is_empty()
        && index.tenants(TaskState::Pending)?.is_empty()
    {
        return Ok(());
    }
    let reports = jobs.check_health_at(thresholds, Some(tick)).await;
    reports.map(drop)
}

/// Whether there is a task, a job or a schedule.
async fn in_use(jobs: &Jobs) -> Result<bool> {
    for event_type in [JobCreated::TYPE, TaskPending::TYPE] {
        let query = HistoryQuery::default()
            .types(Pattern::new(event_type)?)
            .limit(1);
        if !jobs.bus().history()?.query(query).await?.items.is_empty() {
            return Ok(true);
        }
    }
    match Schedules::of(jobs.bus()) {
        Ok(schedules) => Ok(!schedules.list().await?.is_empty()),
        // An engine without a key-value store has no schedules.
        Err(_) => Ok(false),
    }
}
