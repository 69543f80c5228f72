//! Work that runs again because a person asked for it, and the notices of dead letters beside it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use everbus::core::{Position, Recorded, dead_letter_notice};
use everbus::{Bus, HandlerError, Message, RetryPolicy};
use everbus_jobs::events::{ErrorCategory, Json, TaskFailed, TaskStarted, TaskState, Work};
use everbus_jobs::worker::DEAD_WORK;
use everbus_jobs::worker::child::ChildLimits;
use everbus_jobs::{Jobs, Origin, Task, TaskError, WORK, WORKERS, Worker};
use serde_json::json;

use super::{Stage, types};
use crate::support::{events_of, is_settled};

// conformance: workflow/task-events: the start of an attempt that a person asked for is stored before its work begins
#[tokio::test]
async fn a_retried_dead_letter_is_started_before_its_work_begins() {
    let stage = Stage::new().await;
    let (jobs, calls) = (stage.jobs.clone(), Arc::new(AtomicU32::new(0)));
    let count = calls.clone();
    let looks = move |task: Task| {
        let (jobs, call) = (jobs.clone(), count.fetch_add(1, Ordering::SeqCst));
        async move {
            if call == 0 {
                return Err(TaskError::new(ErrorCategory::Network, "no answer"));
            }
            let task = jobs.task(&task.request_id).await.unwrap().unwrap();
            Ok(json!(task.state == Some(TaskState::Processing)))
        }
    };
    let worker = Worker::new(stage.jobs.clone()).any(looks);
    let worker = worker.retry(RetryPolicy::default().max_retries(0));
    stage.start(worker).await;
    stage.run("call", "{}").await;
    stage
        .until("the dead letter", async || stage.dead_letters().await == 1)
        .await;
    let all = everbus::DeadLetterFilter::default();
    stage.bus.dead_letters().retry_all(all).await.unwrap();
    stage
        .until("the task completes", async || {
            stage.state("req-call").await == TaskState::Completed
        })
        .await;
    let events = stage.history("req-call").await;
    let story = [
        "Task Pending",
        "Task Processing Started",
        "Task Processing Failed",
        "Task Failed",
        "Task Processing Started",
        "Task Completed",
    ];
    assert_eq!(types(&events), story);
    assert_eq!(events[5].properties["output"], true);
    stage.bus.shutdown().await.unwrap();
}

// conformance: workflow/task-endings: the work of a completed task that is replayed into the group of the workers completes its task again, as often as it is replayed
#[tokio::test]
async fn work_that_is_replayed_into_the_group_completes_again() {
    let dir = Arc::new(tempfile::tempdir().unwrap());
    let file = format!("sqlite:{}", dir.path().join("replay.db").display());
    for url in ["memory:".to_owned(), file] {
        let stage = Stage::on(Bus::open(&*url).await.unwrap(), dir.clone());
        let calls = Arc::new(AtomicU32::new(0));
        let count = calls.clone();
        // Each output is another one.
        let worker = Worker::new(stage.jobs.clone()).any(move |_: Task| {
            let call = count.fetch_add(1, Ordering::SeqCst) + 1;
            async move {
                if call == 2 {
                    tokio::task::yield_now().await;
                }
                Ok::<_, TaskError>(call)
            }
        });
        stage.start(worker).await;
        stage.run("once", "{}").await;
        for call in 2..=4 {
            let replay = stage.bus.replay().types(WORK).into_group(WORKERS);
            assert_eq!(replay.await.unwrap().processed, 1);
            stage
                .until("the work is settled", async || {
                    calls.load(Ordering::SeqCst) == call && is_settled(&stage.bus, WORKERS).await
                })
                .await;
            let events = stage.history("req-once").await;
            assert_eq!(events.len(), 1 + 2 * call as usize, "{url} {events:?}");
            let last = events.last().unwrap();
            assert_eq!(last.event_type, "Task Completed", "{url}");
            assert_eq!(last.properties["output"], call, "{url}");
            assert_eq!(stage.state("req-once").await, TaskState::Completed);
        }
        assert_eq!(stage.dead_letters().await, 0, "{url}");
        stage.bus.shutdown().await.unwrap();
    }
}

// conformance: workflow/task-endings: the notice of a dead letter does not end a task that was retried or started since
#[tokio::test]
async fn an_old_notice_does_not_end_a_task_that_runs_again() {
    let dir = Arc::new(tempfile::tempdir().unwrap());
    let url = format!("sqlite:{}", dir.path().join("old.db").display());
    let open = async || Stage::on(Bus::open(&*url).await.unwrap(), dir.clone());
    let stage = open().await;
    // The groups exist from now on.
    let worker = stage.worker(ChildLimits::default());
    worker.mount().await.unwrap();
    stage.bus.shutdown().await.unwrap();

    let stage = open().await;
    // A worker that ends nothing, as one that crashes. Nobody takes the notice.
    let fails = async |_: Message| Err::<(), _>(HandlerError::permanent("it crashed"));
    let works = stage.bus.subscribe(WORK).group(WORKERS);
    works.handler(fails).await.unwrap();
    stage.bus.start().await.unwrap();
    for name in ["call", "started"] {
        stage.submit(name, "{}").await;
    }
    stage
        .until("both are dead", async || stage.dead_letters().await == 2)
        .await;
    stage.bus.shutdown().await.unwrap();

    let stage = open().await;
    assert!(!is_settled(&stage.bus, DEAD_WORK).await);
    let works = events_of::<Work>(&stage.jobs).await;
    let call = works[0].event.id();
    assert_eq!(stage.bus.dead_letters().retry(call).await.unwrap(), 1);
    // The other one was replayed: its dead letter is open.
    let started = TaskStarted {
        request_id: "req-started".into(),
        job_id: None,
        effective_until: 0,
        worker_id: "w-1".into(),
        process_id: 1,
    };
    let started = stage
        .jobs
        .emitter(Origin::Worker)
        .event_of_run(&started, None, 1);
    stage.bus.publish(started).await.unwrap();
    let bus = stage.bus.clone();
    // It ends after the notice was handled.
    let waits = move |_: Task| {
        let bus = bus.clone();
        async move {
            while !is_settled(&bus, DEAD_WORK).await {
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
            Ok::<_, TaskError>(())
        }
    };
    stage
        .start(Worker::new(stage.jobs.clone()).any(waits))
        .await;
    let events = stage.ended("req-call").await;
    let story = ["Task Pending", "Task Processing Started", "Task Completed"];
    assert_eq!(types(&events), story);
    let other = stage.history("req-started").await;
    assert_eq!(types(&other), story[..2]);
    stage.bus.shutdown().await.unwrap();
}

/// A notice about the dead letter of a work message that no store has.
pub(crate) async fn notice_of_missing_work(jobs: &Jobs) {
    let work = Work {
        request_id: "req-gone".into(),
        job_id: None,
        name: "gone".into(),
        input: Json::empty(),
    };
    let work = jobs.emitter(Origin::Producer).event_of_run(&work, None, 1);
    let now = jobs.now();
    let work = Recorded::new(work.build().unwrap(), Position::seq(1), now);
    let group = WORKERS.parse().unwrap();
    let notice = dead_letter_notice(&work, &group, 1, None, now).unwrap();
    let engine = jobs.bus().engine();
    let answers = engine.broker.append(vec![notice]).await.unwrap();
    assert!(answers.iter().all(Result::is_ok));
}

#[tokio::test]
async fn the_notice_of_work_that_was_removed_is_settled_at_once() {
    let stage = Stage::new().await;
    stage.start(stage.worker(ChildLimits::default())).await;
    notice_of_missing_work(&stage.jobs).await;
    stage
        .until("the notice is settled", async || {
            is_settled(&stage.bus, DEAD_WORK).await
        })
        .await;
    assert_eq!(stage.dead_letters().await, 0);
    assert!(events_of::<TaskFailed>(&stage.jobs).await.is_empty());
    stage.bus.shutdown().await.unwrap();
}
