//! Ends tasks whose work message became a dead letter without a `Task Failed` from a worker, for example because the
//! worker crashed in the last attempt. Publishes the `Task Failed`. A message that names no task is only logged.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use everbus::{
    Code, Context, Event, EventId, HandlerError, HandlerResult, HistoryQuery, Json, Message, Order,
    Result, Timestamp, TypedEvent,
};
use parking_lot::Mutex;
use serde::Deserialize;

use super::DEAD_WORK;
use super::classify::cut;
use super::ending::LONGEST_ERROR;
use crate::dispatcher::LEASE;
use crate::events::{
    ErrorCategory, FailureSource, TASK, TaskCompleted, TaskFailed, TaskHeartbeat, TaskStarted,
    TaskTimeout,
};
use crate::handle::is_copy;
use crate::ids::Parts;
use crate::{Jobs, Origin, WORK, WORKERS, WorkItem, run_of};

/// How long a store beside the broker may take to get a work message.
const MISSING_FOR: Duration = Duration::from_secs(3600);

/// The fields of a dead letter notice that are needed here.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Notice {
    event_id: String,
    event_type: String,
    error: String,
    group: String,
    attempts: u32,
}

/// Subscribes to the notices of dead letters.
pub(super) async fn mount(jobs: &Jobs) -> Result<()> {
    let jobs = jobs.clone();
    let bus = jobs.bus().clone();
    let missing = Missing::default();
    let handle = move |message: Message, Json(notice): Json<Notice>, context: Context| {
        let (jobs, missing) = (jobs.clone(), missing.clone());
        async move {
            let is_work = notice.event_type == WORK && notice.group == WORKERS;
            if is_work && !is_copy(message.event()) {
                end_task(&jobs, &message, &notice, &context, &missing).await?;
            }
            everbus::handled()
        }
    };
    let subscription = bus
        .subscribe(everbus::core::DEAD_LETTER_EVENT)
        .group(DEAD_WORK);
    subscription
        .name("dead work")
        .lease(LEASE)
        // A store that is unavailable for an hour must not leave a task without an end.
        .retry_with(|policy| policy.max_retries(10_000))
        .handler(handle)
        .await?;
    Ok(())
}

/// Publishes `Task Failed` unless the task has ended, or runs again because its dead letter was retried.
async fn end_task(
    jobs: &Jobs,
    notice: &Message,
    dead: &Notice,
    context: &Context,
    missing: &Missing,
) -> HandlerResult {
    let jobs = jobs.of(notice.event());
    let id = dead.event_id.parse()?;
    let found = jobs.bus().lookup()?.find(id).await?;
    let mut found = found.into_iter();
    let work = found.find(|record| record.event.tenant() == notice.event().tenant());
    let Some(work) = work else {
        if missing.may_come(&jobs, id) {
            let error = format!("the work message {id} is not there");
            return Err(HandlerError::new(error));
        }
        tracing::error!(target: "everbus::worker", %id, "a dead work message is not there any more");
        return Ok(());
    };
    missing.forget(id);
    let work = jobs.bus().whole(&work).await?;
    let work = &work.event;
    let Ok(item) = WorkItem::of(work) else {
        tracing::error!(target: "everbus::worker", id = dead.event_id, "a dead work message names no task");
        return Ok(());
    };
    let jobs = jobs.of(work);
    if has_ended(&jobs, &item, notice).await? || was_sent_back(&jobs, work).await? {
        return Ok(());
    }
    let failed = TaskFailed {
        request_id: item.work.request_id.clone(),
        job_id: item.work.job_id.clone(),
        error: cut(&dead.error, LONGEST_ERROR).to_owned(),
        error_category: ErrorCategory::ServerError,
        retry_count: dead.attempts,
        source: FailureSource::Dlq,
    };
    // The id is different for each dead letter: a retried dead letter may fail again, and needs another `Task Failed`.
    let event_type = format!("{}/{}", TaskFailed::TYPE, context.idempotency_key());
    let id = Parts {
        tenant: jobs.tenant(),
        job: item.work.job_id.as_deref().unwrap_or_default(),
        task: &item.work.request_id,
        run: item.run.into(),
        event_type: &event_type,
    };
    let event = item
        .event(&jobs.emitter(Origin::Worker), &failed)
        .id(id.at(None));
    match jobs.bus().publish(event).await {
        Ok(_) => Ok(()),
        // An earlier attempt of this handler published it.
        Err(error) if error.code() == Code::IdReused => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Whether the last event of this run is a terminal one, or a start after the notice.
async fn has_ended(jobs: &Jobs, item: &WorkItem, notice: &Message) -> Result<bool> {
    let query = HistoryQuery::default()
        .tenant(jobs.tenant())
        .entity(TASK, &item.work.request_id)
        .order(Order::Newest)
        .limit(20);
    let page = jobs.bus().history()?.query(query).await?;
    let of_run = |event: &Event| run_of(event).unwrap_or(1) == item.run && !is_copy(event);
    let mut records = page.items.iter();
    let last = records.find(|record| of_run(&record.event));
    // A store beside the broker has its own positions.
    let is_one_log = jobs.bus().engine().background.is_none();
    Ok(last.is_some_and(|last| {
        let ends = [TaskFailed::TYPE, TaskTimeout::TYPE, TaskCompleted::TYPE];
        let begins = [TaskStarted::TYPE, TaskHeartbeat::TYPE];
        let is_later = is_one_log && last.position.place() > notice.position().place();
        let event_type = last.event.event_type();
        ends.contains(&event_type) || (is_later && begins.contains(&event_type))
    }))
}

/// Whether the dead letter was retried or corrected since. Then the task runs again, or will.
async fn was_sent_back(jobs: &Jobs, work: &Event) -> Result<bool> {
    let letters = jobs.bus().dead_letters().get(work.id()).await?;
    let mut letters = letters.iter();
    let ours = letters.find(|letter| {
        letter.group.as_str() == WORKERS && letter.event().tenant() == work.tenant()
    });
    Ok(ours.is_some_and(|letter| !letter.is_open()))
}

/// The work messages that a store beside the broker does not have, and since when this process has missed each.
#[derive(Clone, Default)]
struct Missing {
    since: Arc<Mutex<HashMap<EventId, Timestamp>>>,
}

impl Missing {
    /// Whether a missing work message may still come. Without a store beside the broker it was removed.
    fn may_come(&self, jobs: &Jobs, id: EventId) -> bool {
        if jobs.bus().engine().background.is_none() {
            return false;
        }
        let now = jobs.now();
        let since = *self.since.lock().entry(id).or_insert(now);
        let may_come = now.since(since) < MISSING_FOR;
        if !may_come {
            self.forget(id);
        }
        may_come
    }

    fn forget(&self, id: EventId) {
        self.since.lock().remove(&id);
    }
}
