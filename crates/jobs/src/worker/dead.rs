//! Ends tasks whose work message became a dead letter without a `Task Failed` from a worker, for example because the
//! worker crashed in the last attempt. Publishes the `Task Failed`. A message that names no task is only logged.

use everbus::{
    Code, Context, HandlerError, HandlerResult, HistoryQuery, Json, Message, Order, Result,
    TypedEvent,
};
use serde::Deserialize;

use super::DEAD_WORK;
use super::attempt::LONGEST_ERROR;
use super::classify::cut;
use crate::dispatcher::LEASE;
use crate::events::{ErrorCategory, FailureSource, TASK, TaskCompleted, TaskFailed, TaskTimeout};
use crate::handle::is_copy;
use crate::ids::Parts;
use crate::{Jobs, Origin, WORK, WORKERS, WorkItem, run_of};

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
    let handle = move |message: Message, Json(notice): Json<Notice>, context: Context| {
        let jobs = jobs.clone();
        async move {
            let is_work = notice.event_type == WORK && notice.group == WORKERS;
            if is_work && !is_copy(message.event()) {
                end_task(&jobs, &message, &notice, &context).await?;
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

/// Publishes `Task Failed` unless the task has ended.
async fn end_task(
    jobs: &Jobs,
    notice: &Message,
    dead: &Notice,
    context: &Context,
) -> HandlerResult {
    let jobs = jobs.of(notice.event());
    let id = dead.event_id.parse()?;
    let found = jobs.bus().lookup()?.find(id).await?;
    let mut found = found.into_iter();
    let work = found.find(|record| record.event.tenant() == notice.event().tenant());
    let Some(work) = work else {
        return Err(HandlerError::new(format!(
            "the work message {} is not there",
            dead.event_id
        )));
    };
    let work = jobs.bus().whole(&work).await?;
    let work = &work.event;
    let Ok(item) = WorkItem::of(work) else {
        tracing::error!(target: "everbus::worker", id = dead.event_id, "a dead work message names no task");
        return Ok(());
    };
    let jobs = jobs.of(work);
    if has_ended(&jobs, &item).await? {
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

/// Whether the last event of this run is a terminal one.
async fn has_ended(jobs: &Jobs, item: &WorkItem) -> Result<bool> {
    let query = HistoryQuery::default()
        .tenant(jobs.tenant())
        .entity(TASK, &item.work.request_id)
        .order(Order::Newest)
        .limit(20);
    let page = jobs.bus().history()?.query(query).await?;
    let of_run = |event: &everbus::Event| run_of(event).unwrap_or(1) == item.run && !is_copy(event);
    let mut events = page.items.iter().map(|record| &record.event);
    let last = events.find(|event| of_run(event));
    Ok(last.is_some_and(|event| {
        let ends = [TaskFailed::TYPE, TaskTimeout::TYPE, TaskCompleted::TYPE];
        ends.contains(&event.event_type())
    }))
}
