//! The producer: one task per request id, valid graphs, ids that forge nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use everbus::{Bus, Code, ManualClock, Timestamp};
use everbus_jobs::events::{
    ErrorCategory, FailureSource, JobTasksAdded, Json, TaskFailed, TaskPending, TaskStarted,
    TaskState, Work,
};
use everbus_jobs::{JobState, Jobs, NewJob, NewTask, Origin, Task, TaskError, WORKERS, Worker};
use parking_lot::Mutex;
use serde_json::json;

use crate::support::{File, ended, events_of, job, memory, running, seconds, task, until};

fn new_task(id: &str) -> NewTask {
    NewTask::new("scrape", Json::of(&json!({"n": 1})).unwrap()).id(id)
}

// conformance: workflow/task-events: the producer emits Task Pending before the work
// conformance: workflow/task-work: Task Pending and the work are one step; the same request twice is one task
#[tokio::test]
async fn the_same_request_twice_is_one_task() {
    let jobs = memory().await;
    let first = jobs.submit(new_task("req-1")).await.unwrap();
    assert!(first.new);
    let second = jobs.submit(new_task("req-1")).await.unwrap();
    assert_eq!(
        (second.new, second.run, second.state),
        (false, 1, TaskState::Pending)
    );
    assert_eq!(events_of::<TaskPending>(&jobs).await.len(), 1);
    assert_eq!(events_of::<Work>(&jobs).await.len(), 1);
    // At the same moment too.
    let both = tokio::join!(
        jobs.submit(new_task("req-2")),
        jobs.submit(new_task("req-2"))
    );
    assert!(both.0.is_ok() && both.1.is_ok());
    assert_eq!(events_of::<Work>(&jobs).await.len(), 2);
    // With another input it is a mistake.
    let mut other = new_task("req-1");
    other.input = Json::of(&json!({"n": 2})).unwrap();
    let error = jobs.submit(other).await.unwrap_err();
    assert_eq!(error.code(), Code::TaskConflict, "{error}");
}

// conformance: workflow/task-lock: a task under a live lock is not run again; after effectiveUntil it may be
#[tokio::test(flavor = "multi_thread")]
async fn a_locked_task_is_not_run_again() {
    let clock = ManualClock::new(Timestamp::from_micros(1_800_000_000_000_000));
    let bus = Bus::builder()
        .clock(clock.clone())
        .open("memory:")
        .await
        .unwrap();
    let jobs = Jobs::builder().clock(clock.clone()).open(bus).unwrap();
    let again = || NewTask {
        again: true,
        ..new_task("req-1")
    };
    jobs.submit(new_task("req-1")).await.unwrap();
    let error = jobs.submit(again()).await.unwrap_err();
    assert!(error.message().contains("waits for a worker"), "{error}");
    let started = TaskStarted {
        request_id: "req-1".into(),
        job_id: None,
        effective_until: seconds(&jobs) + 60,
        worker_id: "w-7".into(),
        process_id: 1,
    };
    let emitter = jobs.emitter(Origin::Worker);
    jobs.bus()
        .publish(emitter.event_of_run(&started, None, 1))
        .await
        .unwrap();
    let error = jobs.submit(again()).await.unwrap_err();
    assert_eq!(error.code(), Code::TaskConflict);
    assert!(error.message().contains("w-7"), "{error}");
    assert_eq!(
        jobs.retry("req-1", true).await.unwrap_err().code(),
        Code::TaskConflict
    );
    clock.advance(Duration::from_secs(61));
    let submitted = jobs.submit(again()).await.unwrap();
    assert_eq!((submitted.run, submitted.new), (2, true));
    // The work of both runs is in the group. One of them is done.
    let ended = &events_of::<TaskFailed>(&jobs).await[0].event;
    assert_eq!(everbus_jobs::run_of(ended), Some(1));
    let runs = Arc::new(AtomicUsize::new(0));
    let count = runs.clone();
    let worker = Worker::new(jobs.clone()).any(move |_: Task| {
        count.fetch_add(1, Ordering::SeqCst);
        async { Ok(()) }
    });
    worker.mount().await.unwrap();
    jobs.bus().start().await.unwrap();
    until("the work is done", async || work_is_done(&jobs).await).await;
    assert_eq!(runs.load(Ordering::SeqCst), 1);
    let task = jobs.task("req-1").await.unwrap().unwrap();
    assert_eq!((task.run, task.state), (2, Some(TaskState::Completed)));
    jobs.bus().shutdown().await.unwrap();
}

/// Whether the workers have settled all work.
async fn work_is_done(jobs: &Jobs) -> bool {
    let groups = jobs.bus().groups().await.unwrap();
    let mut workers = groups.iter().filter(|g| g.name.to_string() == WORKERS);
    workers.all(|g| g.behind + g.in_flight + g.waiting == 0)
}

// conformance: workflow/job-cancel: a task that was cancelled before its worker came does not run, whatever the clock of the worker says
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_whose_clock_is_behind_knows_of_earlier_cancels() {
    let now = Timestamp::from_micros(1_800_000_000_000_000);
    let bus = Bus::builder()
        .clock(ManualClock::new(now))
        .open("memory:")
        .await
        .unwrap();
    let slow = ManualClock::new(now.minus(Duration::from_secs(120)));
    let jobs = Jobs::builder().clock(slow).open(bus).unwrap();
    jobs.submit(new_task("cancelled")).await.unwrap();
    assert!(jobs.cancel_task("cancelled").await.unwrap());
    let ran = Arc::new(Mutex::new(Vec::new()));
    let seen = ran.clone();
    let worker = Worker::new(jobs.clone()).any(move |task: Task| {
        seen.lock().push(task.request_id);
        async { Ok(()) }
    });
    worker.mount().await.unwrap();
    jobs.submit(new_task("other")).await.unwrap();
    jobs.bus().start().await.unwrap();
    until("the work is done", async || work_is_done(&jobs).await).await;
    assert_eq!(*ran.lock(), ["other"]);
    jobs.bus().shutdown().await.unwrap();
}

// conformance: workflow/job-cancel: a cancel that came after the end of a run does not stop a retry from the dead letters
#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_that_came_too_late_says_nothing_about_a_retry() {
    let file = File::new();
    let jobs = file.open().await;
    let worker = Worker::new(jobs.clone())
        .retry(everbus::RetryPolicy::default().max_retries(0))
        .any(async |_: Task| Err::<(), _>(TaskError::new(ErrorCategory::Network, "no route")));
    worker.mount().await.unwrap();
    jobs.bus().start().await.unwrap();
    jobs.submit(new_task("req-1")).await.unwrap();
    let letters = jobs.bus().dead_letters();
    until("it is a dead letter", async || {
        letters.list().await.unwrap().len() == 1
    })
    .await;
    assert!(!jobs.cancel_task("req-1").await.unwrap(), "it has ended");
    // The same from a process that did not know.
    let late = TaskFailed {
        request_id: "req-1".into(),
        job_id: None,
        error: "the task was cancelled".into(),
        error_category: ErrorCategory::Cancelled,
        retry_count: 0,
        source: FailureSource::Producer,
    };
    let emitter = jobs.emitter(Origin::Producer);
    let event = emitter.event_of_run(&late, None, 1);
    jobs.bus().publish(event).await.unwrap();
    jobs.bus().shutdown().await.unwrap();

    let jobs = file.open().await;
    let worker = Worker::new(jobs.clone()).any(async |_: Task| Ok(()));
    worker.mount().await.unwrap();
    jobs.bus().start().await.unwrap();
    let letters = jobs.bus().dead_letters();
    let id = letters.list().await.unwrap()[0].record.event.id();
    assert_eq!(letters.retry(id).await.unwrap(), 1);
    until("it has completed", async || {
        let task = jobs.task("req-1").await.unwrap().unwrap();
        task.state == Some(TaskState::Completed)
    })
    .await;
    jobs.bus().shutdown().await.unwrap();
}

/// Jobs of a bus whose time stands still: ids that are derived from the time of a job are the same on each.
async fn at_a_fixed_time() -> Jobs {
    let clock = ManualClock::new(Timestamp::from_micros(1_800_000_000_000_000));
    let bus = Bus::builder()
        .clock(clock.clone())
        .open("memory:")
        .await
        .unwrap();
    Jobs::builder().clock(clock).open(bus).unwrap()
}

// conformance: workflow/job-adds: an add that was refused, because another job took one of its tasks at the same moment, does not block later adds
#[tokio::test]
async fn an_add_that_was_refused_does_not_block_the_next() {
    // A producer that has not seen the other job yet.
    let unaware = at_a_fixed_time().await;
    unaware
        .submit_job(job("mine", vec![task("a", &[])]))
        .await
        .unwrap();
    let add = vec![task("mine-too", &[]), task("x", &["a"])];
    unaware.add_tasks("mine", add, false).await.unwrap();
    let refused = &events_of::<JobTasksAdded>(&unaware).await[0].event;

    let jobs = at_a_fixed_time().await;
    jobs.submit_job(job("mine", vec![task("a", &[])]))
        .await
        .unwrap();
    jobs.submit_job(job("other", vec![task("x", &[])]))
        .await
        .unwrap();
    jobs.bus().publish(refused.clone()).await.unwrap();
    assert_eq!(jobs.job("mine").await.unwrap().total_tasks, 1);
    for (id, total) in [("y", 2), ("mine-too", 3)] {
        let added = jobs.add_tasks("mine", vec![task(id, &["a"])], false);
        assert_eq!(added.await.unwrap(), total);
    }
    for at in [None, Some(jobs.now())] {
        let picture = jobs.job_graph("mine", at).await.unwrap();
        let ids = picture.graph.tasks().iter().map(|t| t.task_id.as_str());
        assert_eq!(ids.collect::<Vec<_>>(), ["a", "y", "mine-too"]);
    }
}

// conformance: workflow/job-task-ids: a task submitted at the same moment as a job with that id does not disturb the job
#[tokio::test(flavor = "multi_thread")]
async fn a_task_of_the_same_id_does_not_disturb_a_job() {
    let unaware = at_a_fixed_time().await;
    unaware.submit(new_task("a")).await.unwrap();
    let jobs = memory().await;
    jobs.submit_job(job("j", vec![task("a", &[]), task("b", &["a"])]))
        .await
        .unwrap();
    for record in [
        &events_of::<TaskPending>(&unaware).await[0],
        &events_of::<Work>(&unaware).await[0],
    ] {
        jobs.bus().publish(record.event.clone()).await.unwrap();
    }
    running(&jobs).await;
    assert_eq!(ended(&jobs, "j").await.state, JobState::Completed);
    jobs.bus().shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_has_ended_runs_again_only_if_asked() {
    let jobs = memory().await;
    running(&jobs).await;
    jobs.submit(new_task("req-1")).await.unwrap();
    let is = async |state| {
        jobs.task("req-1")
            .await
            .unwrap()
            .is_some_and(|t| t.state == Some(state))
    };
    until("it has completed", async || is(TaskState::Completed).await).await;
    assert!(!jobs.submit(new_task("req-1")).await.unwrap().new);
    assert_eq!(
        jobs.retry("req-1", false).await.unwrap_err().code(),
        Code::TaskConflict
    );
    assert_eq!(jobs.retry("req-1", true).await.unwrap(), 2);
    until("it has completed again", async || {
        let task = jobs.task("req-1").await.unwrap().unwrap();
        task.run == 2 && task.state == Some(TaskState::Completed)
    })
    .await;
    let works = events_of::<Work>(&jobs).await;
    let input = |n: usize| works[n].event.json::<Work>().unwrap().input;
    assert_eq!(input(0), input(1));
    jobs.bus().shutdown().await.unwrap();
}

// conformance: workflow/task-delay: a task does not start a second before its time, and starts after it
#[tokio::test(flavor = "multi_thread")]
async fn a_delayed_task_is_never_early() {
    let clock = ManualClock::new(Timestamp::from_micros(1_800_000_000_000_000));
    let bus = Bus::builder()
        .clock(clock.clone())
        .open("memory:")
        .await
        .unwrap();
    let jobs = Jobs::builder().clock(clock.clone()).open(bus).unwrap();
    let runs = running(&jobs).await;
    let at = jobs.now().plus(Duration::from_secs(3600));
    jobs.submit(NewTask {
        at: Some(at),
        ..new_task("later")
    })
    .await
    .unwrap();
    // Another one that runs at once shows that the worker is at work.
    jobs.submit(new_task("now")).await.unwrap();
    let done = async |id: &str| {
        let task = jobs.task(id).await.unwrap();
        task.is_some_and(|task| task.state == Some(TaskState::Completed))
    };
    until("the other one has run", async || done("now").await).await;
    clock.advance(Duration::from_secs(3599));
    jobs.submit(new_task("now-too")).await.unwrap();
    until("the other one has run", async || done("now-too").await).await;
    assert_eq!(runs.load(std::sync::atomic::Ordering::Relaxed), 2);
    assert_eq!(
        jobs.task("later").await.unwrap().unwrap().state,
        Some(TaskState::Pending)
    );
    clock.advance(Duration::from_secs(2));
    until("it has run", async || done("later").await).await;
    jobs.bus().shutdown().await.unwrap();
}

// conformance: workflow/ids-without-hash: ids with # are refused, for tasks, jobs and tenants
#[tokio::test]
async fn ids_that_would_forge_keys_are_refused() {
    let jobs = memory().await;
    let task_error = jobs.submit(new_task("req#1")).await.unwrap_err();
    let job_error = jobs
        .submit_job(job("job#1", vec![task("a", &[])]))
        .await
        .unwrap_err();
    let inner_error = jobs
        .submit_job(job("job", vec![task("a#", &[])]))
        .await
        .unwrap_err();
    for error in [task_error, job_error, inner_error] {
        assert_eq!(error.code(), Code::InvalidAttribute);
        assert!(error.message().contains('#'), "{error}");
    }
    let bus = jobs.bus().clone();
    assert!(Jobs::builder().tenant("a#b").open(bus).is_err());
    assert!(events_of::<TaskPending>(&jobs).await.is_empty());
}

// conformance: workflow/job-task-ids: a taskId of another job is refused, naming that job; prefixed ids are not; another tenant may have it
#[tokio::test]
async fn a_task_id_of_another_job_is_refused() {
    let jobs = memory().await;
    jobs.submit_job(job("one", vec![task("a", &[]), task("b", &["a"])]))
        .await
        .unwrap();
    let error = jobs
        .submit_job(job("two", vec![task("b", &[])]))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::TaskConflict);
    assert!(error.message().contains("\"one\""), "{error}");
    assert_eq!(jobs.job("two").await.unwrap_err().code(), Code::NotFound);
    let error = jobs.submit(new_task("b")).await.unwrap_err();
    assert!(error.message().contains("\"one\""), "{error}");

    let tasks = vec![task("a", &[]), task("b", &["a"])];
    let prefixed = NewJob {
        prefix_ids: true,
        ..job("two", tasks.clone())
    };
    jobs.submit_job(prefixed).await.unwrap();
    let ids: Vec<String> = jobs
        .job("two")
        .await
        .unwrap()
        .task_statuses
        .into_keys()
        .collect();
    assert_eq!(ids, ["two.a", "two.b"]);
    assert_eq!(
        jobs.job_graph("two", None).await.unwrap().graph.children(0),
        [1]
    );

    let other = Jobs::builder()
        .tenant("acme")
        .open(jobs.bus().clone())
        .unwrap();
    other.submit_job(job("one", tasks)).await.unwrap();
    assert_eq!(jobs.job("one").await.unwrap().total_tasks, 2);
}

// conformance: workflow/job-task-ids: of two jobs that name one task at the same moment the first in the log has it, and the other never starts
#[tokio::test(flavor = "multi_thread")]
async fn of_two_jobs_with_one_task_the_first_in_the_log_has_it() {
    let jobs = memory().await;
    jobs.submit_job(job("one", vec![task("a", &[])]))
        .await
        .unwrap();
    // The check before the publish is passed by: the second producer has not seen the first job yet.
    let created: everbus_jobs::events::JobCreated = serde_json::from_value(json!({
        "jobId": "two", "requestId": "two", "totalTasks": 2,
        "tasks": [{"taskId": "x", "name": "n"}, {"taskId": "a", "name": "n"}]
    }))
    .unwrap();
    let event = jobs.emitter(Origin::Producer).event(&created);
    jobs.bus().publish(event).await.unwrap();
    running(&jobs).await;
    assert_eq!(ended(&jobs, "one").await.state, JobState::Completed);
    let refused = ended(&jobs, "two").await;
    assert_eq!(refused.state, JobState::Refused);
    assert!(refused.refused.unwrap().contains("\"one\""));
    jobs.submit_job(job("three", vec![task("x", &[])]))
        .await
        .unwrap();
    assert_eq!(ended(&jobs, "three").await.state, JobState::Completed);
    assert_eq!(events_of::<Work>(&jobs).await.len(), 2);
    jobs.bus().shutdown().await.unwrap();
}

#[tokio::test]
async fn the_same_job_twice_is_one_job() {
    let jobs = memory().await;
    let tasks = || vec![task("a", &[])];
    assert!(jobs.submit_job(job("j", tasks())).await.unwrap().new);
    assert!(!jobs.submit_job(job("j", tasks())).await.unwrap().new);
    let error = jobs
        .submit_job(job("j", vec![task("b", &[])]))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::TaskConflict, "{error}");
    // A request without a job id is one job too.
    let of_request = |id: &str| NewJob {
        request_id: Some("req-9".into()),
        tasks: vec![task(id, &[])],
        ..NewJob::default()
    };
    let first = jobs.submit_job(of_request("r")).await.unwrap();
    let second = jobs.submit_job(of_request("r")).await.unwrap();
    assert_eq!((first.job_id.as_str(), first.new), ("job-req-9", true));
    assert_eq!((second.job_id, second.new), (first.job_id, false));
}

#[tokio::test]
async fn an_engine_without_a_history_is_refused_with_a_hint() {
    let bus = Bus::open("memory:").await.unwrap();
    let engine = everbus::Engine::new(bus.engine().broker.clone());
    let bare = Bus::builder().with_engine(engine).unwrap();
    let error = Jobs::new(bare).unwrap_err();
    assert_eq!(error.code(), Code::Unsupported);
    assert!(error.hint_text().unwrap().contains("--store"), "{error:?}");
}
