//! How attempts end: retries, dead letters, timeouts, crashes of workers.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use everbus::Bus;
use everbus_jobs::worker::child::{ChildCommand, ChildLimits};
use everbus_jobs::{Task, Worker};
use serde_json::json;

use super::{Stage, is_running, types};

// conformance: workflow/task-child: a retryable error leaves the task to be tried again
// conformance: workflow/props-task-processing-failed: attemptNumber, error, errorCategory, and no field retryable
#[tokio::test]
async fn a_retryable_failure_is_tried_again() {
    let stage = Stage::new().await;
    stage.start(stage.worker(ChildLimits::default())).await;
    let events = stage.run("flaky", "{}").await;
    assert_eq!(
        types(&events),
        [
            "Task Pending",
            "Task Processing Started",
            "Task Processing Failed",
            "Task Processing Started",
            "Task Completed"
        ]
    );
    assert_eq!(
        events[2].properties,
        json!({
            "requestId": "req-flaky",
            "attemptNumber": 1,
            "error": "upstream answered 503 (exit code 1)",
            "errorCategory": "server-error",
        })
    );
    assert_eq!(events[4].properties["output"], json!({"attempt": 2}));
    assert_eq!(stage.dead_letters().await, 0);
    stage.bus.shutdown().await.unwrap();
}

// conformance: workflow/worker-command-checked: a mistyped command fails no task
#[tokio::test]
async fn a_worker_with_a_mistyped_command_takes_no_task() {
    let stage = Stage::new().await;
    let command = ChildCommand::new("no-such-program-here");
    let worker = Worker::new(stage.jobs.clone()).command(command);
    let error = worker.mount().await.unwrap_err();
    assert_eq!(error.code(), everbus::Code::InvalidSetting);
    let groups = stage.bus.groups().await.unwrap();
    assert!(
        groups
            .iter()
            .all(|g| g.name.as_str() != everbus_jobs::WORKERS)
    );
    stage.bus.shutdown().await.unwrap();
}

// conformance: workflow/task-endings: exhausted retries make a dead letter and Task Failed with source dlq
// conformance: workflow/props-task-failed: error, errorCategory, retryCount, source
#[tokio::test]
async fn used_up_retries_make_a_dead_letter_and_a_failed_task() {
    let stage = Stage::new().await;
    stage.start(stage.worker(ChildLimits::default())).await;
    let events = stage.run("network", "{}").await;
    let failed = events.last().unwrap();
    assert_eq!(failed.event_type, "Task Failed");
    assert_eq!(
        failed.properties,
        json!({
            "requestId": "req-network",
            "error": "Error: connect ECONNREFUSED 127.0.0.1:9 (exit code 1)",
            "errorCategory": "network",
            "retryCount": 2,
            "source": "dlq",
        })
    );
    assert_eq!(
        failed.details["stderr"],
        "trying\nError: connect ECONNREFUSED 127.0.0.1:9"
    );
    assert_eq!(failed.details["exitCode"], 1);
    stage
        .until("the dead letter", async || stage.dead_letters().await == 1)
        .await;
    // The listener on dead letters sees that the task has ended.
    let letters = stage.bus.dead_letters().list().await.unwrap();
    assert_eq!(letters[0].record.event.event_type(), "task.work");
    let again = stage.history("req-network").await;
    assert_eq!(
        types(&again)
            .iter()
            .filter(|t| **t == "Task Failed")
            .count(),
        1
    );
    stage.bus.shutdown().await.unwrap();
}

// conformance: workflow/task-endings: a non-retryable failure is acked with its event and makes no dead letter
#[tokio::test]
async fn a_failure_that_no_retry_fixes_is_final() {
    let stage = Stage::new().await;
    stage.start(stage.worker(ChildLimits::default())).await;
    let events = stage.run("auth", "{}").await;
    assert_eq!(
        types(&events),
        ["Task Pending", "Task Processing Started", "Task Failed"]
    );
    assert_eq!(
        events[2].properties,
        json!({
            "requestId": "req-auth",
            "error": "Invalid API key",
            "errorCategory": "auth",
            "retryCount": 1,
            "source": "worker",
        })
    );
    assert_eq!(stage.dead_letters().await, 0);
    stage.bus.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_child_killed_from_outside_is_tried_again() {
    let stage = Stage::new().await;
    stage.start(stage.worker(ChildLimits::default())).await;
    let events = stage.run("killed", "{}").await;
    let attempt = &events[2];
    assert_eq!(attempt.event_type, "Task Processing Failed");
    assert_eq!(attempt.properties["errorCategory"], "server-error");
    assert_eq!(attempt.properties["error"], "the child ended with SIGKILL");
    stage.bus.shutdown().await.unwrap();
}

// conformance: workflow/task-timeout: a child that runs too long gets SIGTERM, then SIGKILL after the grace, with its group
// conformance: workflow/props-task-timeout: timeoutMs, elapsedMs, signal SIGTERM or SIGKILL
// conformance: workflow/task-endings: a timeout is acked with its event and makes no dead letter
#[tokio::test]
async fn a_child_that_runs_too_long_is_asked_and_then_killed() {
    let defaults = ChildLimits::default();
    assert_eq!(defaults.timeout, Duration::from_millis(200_000));
    assert_eq!(defaults.grace, Duration::from_secs(5));
    let stage = Stage::new().await;
    let limits = defaults
        .timeout(Duration::from_millis(300))
        .grace(Duration::from_millis(400));
    stage.start(stage.worker(limits)).await;
    for (child, signal, least) in [("polite", "SIGTERM", 300), ("stubborn", "SIGKILL", 700)] {
        let events = stage.run(child, "{}").await;
        assert_eq!(
            types(&events),
            ["Task Pending", "Task Processing Started", "Task Timeout"],
            "{child}"
        );
        let timeout = &events[2].properties;
        assert_eq!(timeout["timeoutMs"], 300);
        assert_eq!(timeout["signal"], signal, "{child}");
        assert!(
            timeout["elapsedMs"].as_u64().unwrap() >= least,
            "{child}: {timeout}"
        );
        let pid = events[1].properties["processId"].as_u64().unwrap();
        assert!(!is_running(u32::try_from(pid).unwrap()));
    }
    assert_eq!(stage.dead_letters().await, 0);
    stage.bus.shutdown().await.unwrap();
}

const CRASH: &str = "EVERBUS_TEST_CRASH";

/// Run by the test below in a process of its own: a worker that dies with the task.
#[tokio::test]
async fn a_worker_that_dies() {
    let Ok(url) = std::env::var(CRASH) else {
        return;
    };
    let bus = Bus::open(&*url).await.unwrap();
    let stage = Stage::on(bus, Arc::new(tempfile::tempdir().unwrap()));
    let worker = Worker::new(stage.jobs.clone()).any(async |_: Task| {
        std::process::abort();
        #[allow(unreachable_code)]
        Ok(())
    });
    stage.start(worker).await;
    std::future::pending::<()>().await;
}

/// A worker in a process of its own that dies with the first task.
async fn dies(url: &str) {
    let mut died = Command::new(std::env::current_exe().unwrap());
    died.args(["--exact", "worker::endings::a_worker_that_dies"])
        .env(CRASH, url);
    let output = tokio::task::spawn_blocking(move || died.output()).await;
    assert!(!output.unwrap().unwrap().status.success());
}

// conformance: workflow/task-endings: a work message that allows one attempt is not run again when its worker died
#[tokio::test]
async fn a_task_with_one_attempt_does_not_run_again_after_a_crash() {
    let dir = Arc::new(tempfile::tempdir().unwrap());
    let url = format!("sqlite:{}", dir.path().join("crash.db").display());
    {
        let stage = Stage::on(Bus::open(&*url).await.unwrap(), dir.clone());
        let work = everbus_jobs::events::Work {
            request_id: "req-once".into(),
            job_id: None,
            name: "deadly".into(),
            input: everbus_jobs::events::Json::empty(),
        };
        let emitter = stage.jobs.emitter(everbus_jobs::Origin::Producer);
        let work = emitter.event_of_run(&work, None, 1);
        let work = work.meta(everbus_jobs::worker::ATTEMPTS, "1");
        stage.bus.publish(work).await.unwrap();
        stage.bus.shutdown().await.unwrap();
    }
    dies(&url).await;
    let stage = Stage::on(Bus::open(&*url).await.unwrap(), dir);
    let worker = Worker::new(stage.jobs.clone()).any(async |_: Task| {
        panic!("it must not run again");
        #[allow(unreachable_code)]
        Ok(())
    });
    stage.start(worker).await;
    let events = stage.ended("req-once").await;
    let failed = events.last().unwrap();
    assert_eq!(failed.event_type, "Task Failed");
    assert_eq!(failed.properties["source"], "dlq");
    let started = types(&events);
    let started = started.iter().filter(|t| **t == "Task Processing Started");
    assert!(started.count() <= 1, "{events:?}");
    stage.bus.shutdown().await.unwrap();
}

// conformance: workflow/task-endings: three crashes of its worker make a dead letter and Task Failed with source dlq
#[tokio::test]
async fn a_task_that_kills_three_workers_is_a_dead_letter() {
    let dir = Arc::new(tempfile::tempdir().unwrap());
    let url = format!("sqlite:{}", dir.path().join("crash.db").display());
    {
        let stage = Stage::on(Bus::open(&*url).await.unwrap(), dir.clone());
        stage.submit("deadly", "{}").await;
        stage.bus.shutdown().await.unwrap();
    }
    for _ in 0..3 {
        dies(&url).await;
    }
    let stage = Stage::on(Bus::open(&*url).await.unwrap(), dir);
    let worker = Worker::new(stage.jobs.clone()).any(async |_: Task| {
        panic!("it must not run again");
        #[allow(unreachable_code)]
        Ok(())
    });
    stage.start(worker).await;
    let events = stage.ended("req-deadly").await;
    let failed = events.last().unwrap();
    assert_eq!(failed.event_type, "Task Failed");
    assert_eq!(failed.properties["source"], "dlq");
    let error = failed.properties["error"].as_str().unwrap();
    assert!(error.contains("3 workers died"), "{error}");
    stage
        .until("the dead letter", async || stage.dead_letters().await == 1)
        .await;
    stage.bus.shutdown().await.unwrap();
}
