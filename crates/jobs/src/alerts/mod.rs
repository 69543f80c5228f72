//! Alerts people when something is wrong: dead letters, open circuits, unhealthy tasks, failed jobs.
//!
//! A separate group sends the alerts, so that a slow webhook delays no other group. An alert that cannot be sent is
//! retried, and then becomes a dead letter of that group. Alerts with the same subject are not repeated within
//! [`Alerts::repeat_after`], and [`Alerts::per_minute`] limits the rate; the next alert says how many the rate limit
//! left out.

mod ends;
mod message;

use std::sync::Arc;
use std::time::Duration;

use everbus::config;
use everbus::core::DEAD_LETTER_EVENT;
use everbus::{
    Code, Context, Error, Event, HandlerError, HandlerResult, Kv, Message, Result, RetryPolicy,
    TypedEvent, skip,
};
use parking_lot::Mutex;
use serde::Deserialize;
use tokio::time::Instant;
use uuid::Uuid;

use crate::Jobs;
use crate::events::{Health, JobFailureDetected, TaskHealthCheck};
use crate::health::PENDING_TOO_LONG;
use crate::webhook::{WebhookClient, WebhookOptions};
pub use ends::{JOB_ENDS, JobEnds};
pub use message::{Alert, AlertKind};

/// The group that sends alerts.
pub const ALERTS: &str = "everbus.alerts";

/// The key-value bucket of the subjects for which an alert was sent.
const BUCKET: &str = "everbus-alerts";
/// The type of the event that a bus publishes when a circuit breaker opens.
const CIRCUIT_OPENED: &str = "system.circuit_opened";
/// No alert is sent for an event that is older than this: the group may have been idle for a long time.
const STALE: Duration = Duration::from_secs(24 * 3600);
/// An alert names at most this many unhealthy tasks.
const NAMED: usize = 10;

/// A webhook and its format.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Target {
    /// `{"text": …}`, as Slack, Mattermost and others take it.
    Slack(WebhookClient),
    /// A JSON document with kind, subject, time and fields.
    Json(WebhookClient),
}

/// The builder of alerts.
#[derive(Debug)]
#[must_use = "alerts are sent once they are mounted"]
pub struct Alerts {
    jobs: Jobs,
    targets: Vec<Target>,
    repeat_after: Duration,
    per_minute: u32,
    retry: RetryPolicy,
}

impl Alerts {
    /// Alerts without a target. Add at least one with [`to`](Self::to).
    pub fn new(jobs: Jobs) -> Self {
        Self {
            jobs,
            targets: Vec::new(),
            repeat_after: Duration::from_secs(15 * 60),
            per_minute: 20,
            retry: RetryPolicy::default()
                .max_retries(6)
                .base_delay(Duration::from_secs(2))
                .max_delay(Duration::from_secs(60)),
        }
    }

    /// Adds a target: every alert is sent to all targets.
    pub fn to(mut self, target: Target) -> Self {
        self.targets.push(target);
        self
    }

    /// The time in which an alert with the same subject is not repeated (15 minutes).
    pub fn repeat_after(mut self, time: Duration) -> Self {
        self.repeat_after = time;
        self
    }

    /// How many alerts this process sends in a minute, at most (20).
    pub fn per_minute(mut self, alerts: u32) -> Self {
        self.per_minute = alerts.max(1);
        self
    }

    /// How often an alert that could not be sent is retried (6 times, within two minutes).
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.retry = policy;
        self
    }

    /// Subscribes to the events that cause alerts. Alerts are sent once the bus is started.
    pub async fn mount(self) -> Result<()> {
        if self.targets.is_empty() {
            return Err(Error::new(Code::InvalidSetting, "alerts without a webhook"));
        }
        let bus = self.jobs.bus().clone();
        let retry = self.retry;
        let sender = Arc::new(Sender {
            told: bus.kv(BUCKET)?.ttl(self.repeat_after),
            rate: Mutex::new(Rate::new(self.per_minute)),
            targets: self.targets,
            jobs: self.jobs,
        });
        let types = [
            DEAD_LETTER_EVENT,
            CIRCUIT_OPENED,
            TaskHealthCheck::TYPE,
            JobFailureDetected::TYPE,
        ];
        for event_type in types {
            let sender = sender.clone();
            let handler = move |message: Message, context: Context| {
                let sender = sender.clone();
                async move { sender.handle(message.event(), &context).await }
            };
            bus.subscribe(event_type)
                .group(ALERTS)
                .retry(retry)
                .max_staleness(STALE)
                .timeout(Duration::from_secs(60))
                .handler(handler)
                .await?;
        }
        Ok(())
    }
}

/// Mounts the alerts and the job webhook of a configuration. Returns whether it has any. `everbus serve` and `everbus
/// schedule run` call this. Processes that share a store share the groups, so one of them sends each alert.
pub async fn mount_configured(jobs: &Jobs, settings: &config::Alerts) -> Result<bool> {
    let options = WebhookOptions::default()
        .allow_http(settings.allow_http)
        .allow_private(settings.allow_private);
    let client = |url: &Option<config::Secret>| {
        let url = url.as_ref().map(config::Secret::reveal);
        url.map(|url| WebhookClient::new(url, options)).transpose()
    };
    // All URLs are checked before anything is mounted.
    let slack = client(&settings.slack)?.map(Target::Slack);
    let json = client(&settings.webhook)?.map(Target::Json);
    let job_webhook = client(&settings.job_webhook)?;
    let targets: Vec<Target> = slack.into_iter().chain(json).collect();
    let any = !targets.is_empty() || job_webhook.is_some();
    if !targets.is_empty() {
        let mut alerts = Alerts::new(jobs.clone());
        if let Some(time) = settings.repeat_after {
            alerts = alerts.repeat_after(time);
        }
        if let Some(most) = settings.per_minute {
            alerts = alerts.per_minute(most);
        }
        targets.into_iter().fold(alerts, Alerts::to).mount().await?;
    }
    if let Some(client) = job_webhook {
        JobEnds::new(jobs.clone(), client).mount().await?;
    }
    Ok(any)
}

/// The state that the handlers share.
struct Sender {
    jobs: Jobs,
    targets: Vec<Target>,
    told: Kv,
    rate: Mutex<Rate>,
}

impl Sender {
    async fn handle(&self, event: &Event, context: &Context) -> HandlerResult {
        let alert = match event.event_type() {
            DEAD_LETTER_EVENT => self.of_dead_letter(event).await?,
            CIRCUIT_OPENED => of_circuit(event)?,
            TaskHealthCheck::TYPE => of_health(event)?,
            _ => of_job(event)?,
        };
        let Some(alert) = alert else {
            return Ok(());
        };
        // The rate limit comes first: it must not mark the subject of an alert that is not sent.
        let again = context.attempt() > 1;
        let held_back = match self.rate.lock().take(Instant::now(), again) {
            Some(held_back) => held_back,
            None => return Err(skip("too many alerts in a minute")),
        };
        let result = self.send(&alert, event, held_back, again).await;
        match &result {
            Ok(true) => {}
            Ok(false) => {
                self.rate.lock().give_back(held_back, again);
                return Err(skip("the same subject was told a while ago"));
            }
            Err(_) => {
                // The next alert that is sent reports this number.
                self.rate.lock().held_back += held_back;
                if context.attempt() >= context.max_attempts() {
                    let _ = self.told.delete(subject_key(&alert, event)).await;
                }
            }
        }
        result.map(drop)
    }

    /// Sends an alert to every target that has not received it. Returns false if an alert with the same subject was
    /// sent within `repeat_after`.
    async fn send(
        &self,
        alert: &Alert,
        event: &Event,
        held_back: u64,
        again: bool,
    ) -> Result<bool, HandlerError> {
        if !self.is_new(alert, event).await? {
            return Ok(false);
        }
        let mut failed = None;
        for (number, target) in self.targets.iter().enumerate() {
            let sent = format!("{}-{number}", event.id());
            // A retry for one failed target must not send the alert to the other targets again.
            if again && self.told.get(&*sent).await?.is_some() {
                continue;
            }
            let (client, body) = match target {
                Target::Slack(client) => (client, alert.slack(held_back)),
                Target::Json(client) => (client, alert.json(held_back)),
            };
            match client.post(&body).await {
                Ok(()) if self.targets.len() > 1 => {
                    self.told.put(&*sent, "sent").await?;
                }
                Ok(()) => {}
                Err(error) => failed = Some(error),
            }
        }
        match failed {
            None => Ok(true),
            Some(error) => Err(error.into()),
        }
    }

    /// Marks the subject of an alert as sent. Returns false if another event has marked it within `repeat_after`. All
    /// processes share the marks.
    async fn is_new(&self, alert: &Alert, event: &Event) -> Result<bool, HandlerError> {
        let key = subject_key(alert, event);
        let id = event.id().to_string();
        match self.told.put(&*key, id.clone()).if_absent().await {
            Ok(_) => Ok(true),
            Err(error) if error.code() == Code::RevisionConflict => {
                // An earlier attempt at the same event may have set the mark.
                let noted = self.told.get(&*key).await?;
                Ok(noted.is_none_or(|entry| entry.value == id.as_bytes()))
            }
            Err(error) => Err(error.into()),
        }
    }

    async fn of_dead_letter(&self, event: &Event) -> Result<Option<Alert>, HandlerError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Notice {
            event_id: String,
            event_type: String,
            error: String,
            #[serde(default)]
            group: String,
        }
        let notice: Notice = event.json()?;
        // A failed alert causes no alert: that one would fail too.
        if notice.group == ALERTS {
            return Ok(None);
        }
        let dead = match notice.event_id.parse() {
            Ok(id) => {
                let found = self.jobs.bus().lookup()?.find(id).await?;
                let mut found = found.into_iter();
                found.find(|record| record.event.tenant() == event.tenant())
            }
            Err(_) => None,
        };
        let dead = dead.as_ref().map(|record| &record.event);
        let entity = dead.and_then(|dead| dead.attributes()?.entity.as_ref());
        let alert = Alert::new(
            AlertKind::DeadLetter,
            format!("{} {}", notice.group, notice.event_type),
            event.occurred_at(),
        )
        .field("Event type", Some(&notice.event_type))
        .field("Detail type", Some("log-event"))
        .field("Source", dead.and_then(source))
        .field("Group", Some(&notice.group))
        .field("Error", Some(&notice.error))
        .field("Message ID", Some(&notice.event_id));
        let task = entity.map(|entity| format!("{}#{}", entity.kind, entity.id));
        Ok(Some(match task {
            Some(task) => alert.field("Task", Some(task)),
            None => alert,
        }))
    }
}

/// The key that marks a subject as sent.
fn subject_key(alert: &Alert, event: &Event) -> String {
    let tenant = event.tenant().unwrap_or_default();
    let subject = format!("{}\0{tenant}\0{}", alert.kind.as_str(), alert.subject);
    Uuid::new_v5(&Uuid::NAMESPACE_OID, subject.as_bytes()).to_string()
}

/// The source of an event, or else a name made from its app.
fn source(event: &Event) -> Option<String> {
    let attributes = event.attributes()?;
    let source = attributes.source.as_deref().map(str::to_owned);
    source.or_else(|| {
        attributes
            .app
            .as_deref()
            .map(|app| format!("task-workflow.{app}"))
    })
}

fn of_circuit(event: &Event) -> Result<Option<Alert>, HandlerError> {
    let payload: serde_json::Value = event.json()?;
    let text = |key: &str| {
        payload
            .get(key)
            .and_then(|value| value.as_str())
            .map(str::to_owned)
    };
    let dependency = text("dependency").or_else(|| text("group"));
    let subject = dependency.clone().unwrap_or_default();
    let alert = Alert::new(AlertKind::CircuitOpened, subject, event.occurred_at())
        .field("Dependency", dependency)
        .field("Group", text("group"));
    Ok(Some(alert))
}

fn of_job(event: &Event) -> Result<Option<Alert>, HandlerError> {
    let failure: JobFailureDetected = event.json()?;
    let subject = format!("{} {}", failure.job_id, failure.failed_task_id);
    let alert = Alert::new(AlertKind::JobFailed, subject, event.occurred_at())
        .field("Job", Some(&failure.job_id))
        .field("Failed task", Some(&failure.failed_task_id));
    Ok(Some(alert))
}

fn of_health(event: &Event) -> Result<Option<Alert>, HandlerError> {
    let check: TaskHealthCheck = event.json()?;
    let mut unhealthy: Vec<_> = check
        .tasks
        .iter()
        .filter(|t| t.health != Health::Healthy)
        .collect();
    let waiting = event.metadata().get(PENDING_TOO_LONG);
    if unhealthy.is_empty() && waiting.is_none() {
        return Ok(None);
    }
    unhealthy.sort_by(|a, b| a.request_id.cmp(&b.request_id));
    let names = unhealthy.iter().map(|task| task.request_id.as_str());
    // The number of waiting tasks grows while no worker runs. It is not part of the subject, so the alert is not
    // repeated.
    let names = names.chain(waiting.map(|_| "#waiting"));
    let subject = names.collect::<Vec<_>>().join(" ");
    let described = unhealthy.iter().take(NAMED).map(|task| {
        let seconds = task.time_since_last_event / 1000;
        format!(
            "{} {:?} on {}, silent for {seconds} s",
            task.request_id, task.health, task.worker_id
        )
    });
    let mut tasks = described.collect::<Vec<_>>().join("; ");
    if unhealthy.len() > NAMED {
        tasks.push_str(&format!("; and {} more", unhealthy.len() - NAMED));
    }
    let summary = check.summary;
    let alert = Alert::new(AlertKind::UnhealthyTasks, subject, event.occurred_at())
        .field("Processing", Some(summary.total_processing))
        .field("Warning", Some(summary.warning))
        .field("Critical", Some(summary.critical))
        .field("Overtime", Some(summary.overtime));
    let alert = match unhealthy.is_empty() {
        true => alert,
        false => alert.field("Tasks", Some(tasks)),
    };
    Ok(Some(match waiting {
        Some(waiting) => alert.field("Pending too long", Some(waiting)),
        None => alert,
    }))
}

/// The rate limit: a token bucket that fills in one minute.
#[derive(Debug)]
struct Rate {
    per_minute: u32,
    left: f64,
    since: Option<Instant>,
    held_back: u64,
}

impl Rate {
    fn new(per_minute: u32) -> Self {
        Self {
            per_minute,
            left: f64::from(per_minute),
            since: None,
            held_back: 0,
        }
    }

    /// Takes a token. Returns how many alerts were refused since the last one that was sent, or `None` if no token is
    /// left. `again`: a retry of an alert, which takes no second token.
    fn take(&mut self, now: Instant, again: bool) -> Option<u64> {
        let full = f64::from(self.per_minute);
        if let Some(since) = self.since {
            let minutes = now.saturating_duration_since(since).as_secs_f64() / 60.0;
            self.left = (self.left + minutes * full).min(full);
        }
        self.since = Some(now);
        if !again {
            if self.left < 1.0 {
                self.held_back += 1;
                return None;
            }
            self.left -= 1.0;
        }
        Some(std::mem::take(&mut self.held_back))
    }

    /// Gives back an unused token, and the number of refused alerts that its alert would have reported.
    fn give_back(&mut self, held_back: u64, again: bool) {
        self.held_back += held_back;
        if !again {
            self.left += 1.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_minute_has_so_many_alerts() {
        let mut rate = Rate::new(2);
        let start = Instant::now();
        assert_eq!(rate.take(start, false), Some(0));
        assert_eq!(rate.take(start, false), Some(0));
        assert_eq!(rate.take(start, false), None);
        assert_eq!(rate.take(start, false), None);
        // The retry of an alert takes no token.
        assert_eq!(rate.take(start, true), Some(2));
        let later = start + Duration::from_secs(31);
        assert_eq!(rate.take(later, false), Some(0));
        assert_eq!(rate.take(later, false), None);
        let much_later = later + Duration::from_secs(3600);
        assert_eq!(rate.take(much_later, false), Some(1));
        assert_eq!(rate.take(much_later, false), Some(0));
        assert_eq!(rate.take(much_later, false), None);
        // An alert whose subject was sent before gives its token back.
        let at_last = much_later + Duration::from_secs(31);
        assert_eq!(rate.take(at_last, false), Some(1));
        rate.give_back(1, false);
        assert_eq!(rate.take(at_last, false), Some(1));
        assert_eq!(rate.take(at_last, false), None);
    }
}
