//! Sends a webhook request to a program when a job completes or one of its tasks fails.
//!
//! Alerts are for people and are rate limited. Job ends are for programs: every end is sent, at least once. The body
//! has the id of the event, so that a receiver recognises a duplicate.

use std::time::Duration;

use everbus::{Event, EventId, HandlerResult, Message, Result, RetryPolicy, Timestamp, TypedEvent};
use serde::Serialize;

use crate::events::{JobCompleted, JobFailureDetected, TaskStatuses};
use crate::webhook::WebhookClient;
use crate::{DEFAULT_TENANT, Jobs};

/// The group that sends the ends of jobs to a webhook.
pub const JOB_ENDS: &str = "tasks.job-ends";

/// The builder of the webhook for the ends of jobs.
///
/// ```no_run
/// use everbus_jobs::Jobs;
/// use everbus_jobs::alerts::JobEnds;
/// use everbus_jobs::webhook::{WebhookClient, WebhookOptions};
/// # async fn example(jobs: Jobs) -> everbus::Result<()> {
/// let client = WebhookClient::new("https://example.com/jobs", WebhookOptions::default())?;
/// JobEnds::new(jobs, client).mount().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "ends are told once it is mounted"]
pub struct JobEnds {
    jobs: Jobs,
    client: WebhookClient,
    retry: RetryPolicy,
}

/// The body of a webhook request.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Told {
    kind: &'static str,
    event_id: EventId,
    time: Timestamp,
    tenant: String,
    job_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    total_tasks: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    failed_task_id: Option<String>,
    task_statuses: TaskStatuses,
}

impl JobEnds {
    /// Sends the ends of the jobs of all tenants with this client.
    pub fn new(jobs: Jobs, client: WebhookClient) -> Self {
        Self {
            jobs,
            client,
            retry: RetryPolicy::default()
                .max_retries(10)
                .base_delay(Duration::from_secs(2))
                .max_delay(Duration::from_secs(600)),
        }
    }

    /// How often a request that failed is retried (10 times, within 27 minutes). Then the event becomes a dead letter.
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.retry = policy;
        self
    }

    /// Subscribes to the ends of jobs, from now on. Requests are sent once the bus is started.
    pub async fn mount(self) -> Result<()> {
        for event_type in [JobCompleted::TYPE, JobFailureDetected::TYPE] {
            let client = self.client.clone();
            let handler = move |message: Message| {
                let client = client.clone();
                async move { tell(&client, message.event()).await }
            };
            self.jobs
                .bus()
                .subscribe(event_type)
                .group(JOB_ENDS)
                .name(event_type)
                .retry(self.retry)
                .timeout(Duration::from_secs(60))
                .handler(handler)
                .await?;
        }
        Ok(())
    }
}

async fn tell(client: &WebhookClient, event: &Event) -> HandlerResult {
    let of = |kind, job_id, task_statuses| Told {
        kind,
        event_id: event.id(),
        time: event.occurred_at(),
        tenant: event.tenant().unwrap_or(DEFAULT_TENANT).to_owned(),
        job_id,
        total_tasks: None,
        failed_task_id: None,
        task_statuses,
    };
    let told = if event.event_type() == JobCompleted::TYPE {
        let completed: JobCompleted = event.json()?;
        Told {
            total_tasks: Some(completed.total_tasks),
            ..of("job_completed", completed.job_id, completed.task_statuses)
        }
    } else {
        let failed: JobFailureDetected = event.json()?;
        Told {
            failed_task_id: Some(failed.failed_task_id),
            ..of("job_failed", failed.job_id, failed.task_statuses)
        }
    };
    client.post(&told).await?;
    Ok(())
}
