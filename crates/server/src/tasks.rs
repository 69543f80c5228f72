//! Tasks and jobs in the server: the handle that requests use, and what runs beside them. That is the dispatcher, the
//! stored schedules, the health check and the alerts; several servers on one store share them, and each turn is taken
//! once. Retention is the bus's own, under the same kind of lease.
//!
//! A store without tasks, jobs and schedules pays nothing for them: they run from the first one on.

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

/// How soon a server sees the first task, job or schedule of another process.
const LOOK: Duration = Duration::from_secs(5);

/// The tasks and jobs of the bus.
#[derive(Default)]
pub(crate) struct Tasks {
    jobs: OnceLock<Jobs>,
    wanted: Notify,
}

impl Tasks {
    /// The handle. `Unsupported` if the engine has no history.
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

    /// Starts the dispatcher and the schedules if they do not run: there is something for them now.
    pub(crate) fn want(&self) {
        self.wanted.notify_one();
    }
}

/// The tasks and jobs that a caller means: those of its own tenant, or of the one that a caller of all tenants asks
/// for.
pub(crate) fn of_caller(
    state: &AppState,
    caller: &Caller,
    asked: Option<String>,
) -> Result<Jobs, Problem> {
    let tenant = caller.tenant_filter(asked)?;
    let tenant = tenant.as_deref().unwrap_or(DEFAULT_TENANT);
    Ok(state.jobs()?.of_tenant(tenant)?)
}

/// Mounts the alerts, if the settings name a webhook. Servers on one store share their group: each alert is sent by
/// one of them.
pub(crate) async fn mount_alerts(state: &AppState) -> Result<()> {
    let alerts = &state.options().alerts;
    if *alerts == config::Alerts::default() {
        // An engine without a history needs no tasks then.
        return Ok(());
    }
    mount_configured(&state.jobs()?, alerts).await.map(drop)
}

/// Runs the dispatcher, the schedules and the health check, until the server stops.
pub(crate) async fn run(state: AppState) {
    // An engine without a history has no tasks; requests about them are told so.
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
    // Nothing runs or waits: there is nothing to say.
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
        // Without values by key there are no schedules.
        Err(_) => Ok(false),
    }
}
