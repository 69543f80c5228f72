//! The health of running tasks, from their events: does the worker of each task still send events, and does the task
//! run for too long?

use std::time::Duration;

use everbus::{Result, Timestamp};
use serde::Serialize;

use crate::events::{Health, HealthSummary, TaskHealth, TaskHealthCheck, TaskState};
use crate::index::TaskFilter;
use crate::schedule::Tick;
use crate::state::TaskStatus;
use crate::{Jobs, Origin};

/// The most tasks that a check looks at, per tenant and state.
const MOST: usize = 100_000;

/// The metadata key in a `Task Health Check` for the tasks that wait too long for a worker, as a text. It is absent if
/// there are none.
pub const PENDING_TOO_LONG: &str = "pending_too_long";
/// The text names at most this many tasks.
const NAMED: usize = 10;
/// More bytes than a check has besides its list of tasks.
const ENVELOPE: usize = 512;

/// The limits beyond which a task is not healthy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Thresholds {
    /// A task that runs for longer is *overtime* (3,600,000 ms).
    pub overtime: Duration,
    /// The interval of heartbeats (20 s). A task whose last event is older than two intervals is a *warning*.
    pub heartbeat: Duration,
    /// A task that waits longer for a worker is reported (15 minutes).
    pub pending: Duration,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self {
            overtime: Duration::from_millis(3_600_000),
            heartbeat: Duration::from_secs(20),
            pending: Duration::from_secs(15 * 60),
        }
    }
}

impl Thresholds {
    /// Sets how long a task may run.
    #[must_use]
    pub fn overtime(mut self, time: Duration) -> Self {
        self.overtime = time;
        self
    }

    /// Sets the time between two heartbeats of a healthy worker.
    #[must_use]
    pub fn heartbeat(mut self, time: Duration) -> Self {
        self.heartbeat = time;
        self
    }

    /// Sets how long a task may wait for a worker.
    #[must_use]
    pub fn pending(mut self, time: Duration) -> Self {
        self.pending = time;
        self
    }

    /// The health of a task that is being processed. The first rule that matches decides: it runs too long (overtime),
    /// its lock has expired (critical), it had no event for more than two heartbeats (warning). Otherwise it is
    /// healthy.
    pub fn judge(&self, task: &TaskStatus, now: Timestamp) -> Health {
        let elapsed = since(task.started_at.or(task.since), now);
        let silent = since(task.last_event_at, now);
        // The lock is in whole seconds, rounded down.
        let now_seconds = now.as_micros().div_euclid(1_000_000);
        let locked = task
            .effective_until
            .and_then(|until| i64::try_from(until).ok());
        if elapsed > self.overtime {
            Health::Overtime
        } else if locked.is_some_and(|until| now_seconds > until) {
            Health::Critical
        } else if silent > 2 * self.heartbeat {
            Health::Warning
        } else {
            Health::Healthy
        }
    }
}

fn since(time: Option<Timestamp>, now: Timestamp) -> Duration {
    time.map_or(Duration::ZERO, |time| now.since(time))
}

/// A task that waits too long for a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WaitingTask {
    /// The task.
    pub request_id: String,
    /// Its job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job_id: Option<String>,
    /// The name of its work.
    pub name: String,
    /// Milliseconds that it has waited.
    pub waiting: u64,
}

/// The result of a check: the payload of `Task Health Check`, and the tasks that wait too long.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HealthReport {
    /// The tenant.
    pub tenant: String,
    /// The counts, and each task that is being processed.
    #[serde(flatten)]
    pub check: TaskHealthCheck,
    /// The tasks that wait too long for a worker, the longest first.
    #[serde(rename = "pendingTooLong")]
    pub waiting: Vec<WaitingTask>,
}

impl HealthReport {
    /// Makes the report for the tasks of a tenant.
    pub fn of<'a>(
        tenant: &str,
        processing: impl IntoIterator<Item = &'a TaskStatus>,
        pending: impl IntoIterator<Item = &'a TaskStatus>,
        thresholds: &Thresholds,
        now: Timestamp,
    ) -> Self {
        let mut summary = HealthSummary::default();
        let judged = processing.into_iter().map(|task| {
            let health = thresholds.judge(task, now);
            summary.total_processing += 1;
            *match health {
                Health::Healthy => &mut summary.healthy,
                Health::Warning => &mut summary.warning,
                Health::Critical => &mut summary.critical,
                Health::Overtime => &mut summary.overtime,
            } += 1;
            TaskHealth {
                request_id: task.request_id.clone(),
                health,
                elapsed: millis(since(task.started_at.or(task.since), now)),
                time_since_last_event: millis(since(task.last_event_at, now)),
                last_event_type: task.last_event_type.clone().unwrap_or_default(),
                worker_id: task.worker_id.clone().unwrap_or_default(),
            }
        });
        let tasks = judged.collect();
        let waited = pending.into_iter().filter_map(|task| {
            let waiting = since(task.since, now);
            (waiting > thresholds.pending).then(|| WaitingTask {
                request_id: task.request_id.clone(),
                job_id: task.job_id.clone(),
                name: task.name.clone(),
                waiting: millis(waiting),
            })
        });
        Self {
            tenant: tenant.to_owned(),
            check: TaskHealthCheck { summary, tasks },
            waiting: waited.collect(),
        }
    }

    /// The tasks that wait too long, as a text.
    fn waiting_note(&self) -> Option<String> {
        let first = self.waiting.first()?;
        let named = self.waiting.iter().take(NAMED);
        let named: Vec<&str> = named.map(|task| task.request_id.as_str()).collect();
        let more = match self.waiting.len() - named.len() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let longest = first.waiting / 1000;
        Some(format!(
            "{}{more}; the first for {longest} s",
            named.join(", ")
        ))
    }

    /// The highest severity in the report. 0: all healthy. 1: a warning, or a task that waits too long. 2: critical or
    /// overtime. Monitoring programs use the same numbers for OK, WARNING and CRITICAL.
    pub fn severity(&self) -> u8 {
        let summary = self.check.summary;
        if summary.critical + summary.overtime > 0 {
            2
        } else if summary.warning > 0 || !self.waiting.is_empty() {
            1
        } else {
            0
        }
    }
}

impl TaskHealthCheck {
    /// Shortens the list of tasks so that the check fits into an event of this size. Tasks that are not healthy come
    /// first. The summary still counts all tasks.
    fn within(&self, bytes: usize) -> Self {
        let mut check = self.clone();
        check
            .tasks
            .sort_by_key(|task| task.health == Health::Healthy);
        let mut left = bytes.saturating_sub(ENVELOPE);
        let fits = |task: &TaskHealth| {
            let size = serde_json::to_string(task).map_or(usize::MAX, |json| json.len() + 1);
            let rest = left.checked_sub(size);
            left = rest.unwrap_or(0);
            rest.is_some()
        };
        let most = check
            .tasks
            .iter()
            .map(fits)
            .take_while(|fits| *fits)
            .count();
        check.tasks.truncate(most);
        check
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl Jobs {
    /// Checks the running and waiting tasks of this tenant. Nothing is published.
    pub async fn health(&self, thresholds: &Thresholds) -> Result<HealthReport> {
        let filter = |state, before| TaskFilter {
            state: Some(state),
            before,
            oldest_first: true,
            limit: MOST,
        };
        let processing = self.tasks(&filter(TaskState::Processing, None)).await?;
        let now = self.now();
        let before = Some(now.minus(thresholds.pending));
        let pending = self.tasks(&filter(TaskState::Pending, before)).await?;
        Ok(HealthReport::of(
            self.tenant(),
            &processing,
            &pending,
            thresholds,
            now,
        ))
    }

    /// Checks the tasks of every tenant that has running or waiting tasks, and of this tenant. Publishes a `Task Health
    /// Check` for each.
    pub async fn check_health(&self, thresholds: &Thresholds) -> Result<Vec<HealthReport>> {
        self.check_health_at(thresholds, None).await
    }

    /// Like [`check_health`](Self::check_health), for one tick of a schedule. The event ids are derived from the tick,
    /// so that two processes that run the same tick publish each event once.
    pub async fn check_health_at(
        &self,
        thresholds: &Thresholds,
        tick: Option<&Tick>,
    ) -> Result<Vec<HealthReport>> {
        let index = self.index();
        index.catch_up(self.bus(), None).await?;
        let mut tenants = index.tenants(TaskState::Processing)?;
        tenants.extend(index.tenants(TaskState::Pending)?);
        tenants.push(self.tenant().to_owned());
        tenants.sort();
        tenants.dedup();
        let mut reports = Vec::with_capacity(tenants.len());
        let mut failed = None;
        for tenant in tenants {
            let jobs = self.for_tenant(&tenant);
            match jobs.publish_health(thresholds, tick).await {
                Ok(report) => reports.push(report),
                // Continue with the other tenants.
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(reports), Err)
    }

    /// Checks the tasks of this tenant, and publishes a `Task Health Check`.
    async fn publish_health(
        &self,
        thresholds: &Thresholds,
        tick: Option<&Tick>,
    ) -> Result<HealthReport> {
        let report = self.health(thresholds).await?;
        let check = report.check.within(self.bus().max_payload());
        let mut event = self.emitter(Origin::HealthCheck).event(&check);
        if let Some(waiting) = report.waiting_note() {
            event = event.meta(PENDING_TOO_LONG, waiting);
        }
        if let Some(tick) = tick {
            event = event.id(tick.id(self.tenant(), "Task Health Check"));
        }
        crate::schedule::once(self.bus().publish(event).await)?;
        Ok(report)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::TaskHeartbeat;
    use everbus::TypedEvent;

    const NOW: i64 = 1_767_453_739;

    fn at(seconds_ago: i64) -> Option<Timestamp> {
        Some(Timestamp::from_micros((NOW - seconds_ago) * 1_000_000))
    }

    fn task(id: &str, started: i64, last: i64, until: i64) -> TaskStatus {
        TaskStatus {
            request_id: id.to_owned(),
            name: "scrape-store".into(),
            state: Some(TaskState::Processing),
            since: at(started),
            started_at: at(started),
            last_event_type: Some(TaskHeartbeat::TYPE.to_owned()),
            last_event_at: at(last),
            effective_until: Some((NOW + until).unsigned_abs()),
            worker_id: Some("worker-i-001".into()),
            ..TaskStatus::default()
        }
    }

    fn now() -> Timestamp {
        at(0).unwrap()
    }

    // conformance: workflow/health-states: overtime, else critical past effectiveUntil, else warning, else healthy
    #[test]
    fn each_task_has_one_health() {
        let thresholds = Thresholds::default();
        for (started, last, until, health) in [
            (120, 15, 45, Health::Healthy),
            // Two heartbeats are 40 s.
            (120, 40, 20, Health::Healthy),
            (120, 41, 19, Health::Warning),
            (120, 60, 0, Health::Warning),
            (120, 61, -1, Health::Critical),
            (3600, 15, 45, Health::Healthy),
            (3601, 15, 45, Health::Overtime),
            // Overtime is the first rule, whatever else is wrong.
            (3800, 3700, -3640, Health::Overtime),
        ] {
            let task = task("a", started, last, until);
            let found = thresholds.judge(&task, now());
            assert_eq!(
                found, health,
                "started {started}, last {last}, until {until}"
            );
        }
        let strict = thresholds
            .overtime(Duration::from_secs(60))
            .heartbeat(Duration::from_secs(5));
        let judge = |started, last| strict.judge(&task("a", started, last, 45), now());
        assert_eq!(judge(61, 1), Health::Overtime);
        assert_eq!(judge(30, 11), Health::Warning);
    }

    // conformance: workflow/props-health: summary and the six fields of each task, as in the document
    #[test]
    fn the_report_has_the_fields_of_the_document() {
        let tasks = [
            task("req-123", 120, 15, 45),
            task("req-456", 3800, 20, 40),
            task("req-5", 120, 50, 10),
            task("req-6", 120, 70, -10),
        ];
        let report = HealthReport::of("t", &tasks, &[], &Thresholds::default(), now());
        let json = serde_json::to_value(&report.check).unwrap();
        assert_eq!(
            json["summary"],
            serde_json::json!({
                "totalProcessing": 4, "healthy": 1, "warning": 1, "critical": 1, "overtime": 1
            })
        );
        assert_eq!(
            json["tasks"][1],
            serde_json::json!({
                "requestId": "req-456",
                "health": "overtime",
                "elapsed": 3_800_000,
                "timeSinceLastEvent": 20_000,
                "lastEventType": "Task Heartbeat",
                "workerId": "worker-i-001",
            })
        );
        assert_eq!(report.severity(), 2);
    }

    #[test]
    fn tasks_that_wait_for_too_long_are_named() {
        let waits = |id: &str, seconds| TaskStatus {
            state: Some(TaskState::Pending),
            ..task(id, seconds, seconds, 0)
        };
        let pending = [waits("old", 901), waits("new", 900)];
        let report = HealthReport::of("t", &[], &pending, &Thresholds::default(), now());
        let names: Vec<&str> = report
            .waiting
            .iter()
            .map(|t| t.request_id.as_str())
            .collect();
        assert_eq!(names, ["old"]);
        assert_eq!(report.severity(), 1);
        let healthy = HealthReport::of("t", &[], &[], &Thresholds::default(), now());
        assert_eq!(healthy.severity(), 0);
        let warned = [task("a", 120, 50, 10)];
        let report = HealthReport::of("t", &warned, &[], &Thresholds::default(), now());
        assert_eq!(report.severity(), 1);
    }
}
