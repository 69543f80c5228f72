//! Children that misbehave: each has a defined end.

use std::sync::Arc;
use std::time::Duration;

use everbus::Bus;
use everbus_jobs::events::{ErrorCategory, FailureSource, Json, TaskFailed, TaskState};
use everbus_jobs::worker::child::ChildLimits;
use everbus_jobs::{NewTask, TaskFilter};

use super::{Stage, types};

/// A bad child, and how its task ends.
struct Case {
    child: &'static str,
    category: &'static str,
    error: &'static str,
}

#[tokio::test]
async fn a_bad_child_ends_its_task_without_a_retry() {
    let stage = Stage::new().await;
    let limits = ChildLimits::default().output(1_000_000);
    stage.start(stage.worker(limits)).await;
    let too_much = "wrote more than 1000000 bytes";
    for Case {
        child,
        category,
        error,
    } in [
        Case {
            child: "not-json",
            category: "programming",
            error: "not JSON",
        },
        Case {
            child: "huge",
            category: "programming",
            error: too_much,
        },
        Case {
            child: "forever",
            category: "programming",
            error: too_much,
        },
        Case {
            child: "segfault",
            category: "programming",
            error: "SIGSEGV",
        },
        Case {
            child: "unreadable",
            category: "validation",
            error: "bad field (exit code 65)",
        },
    ] {
        let events = stage.run(child, "{}").await;
        let types = types(&events);
        assert_eq!(types.last(), Some(&"Task Failed"), "{child}: {types:?}");
        assert_eq!(types.len(), 3, "{child}: {types:?}");
        let failed = &events[2].properties;
        assert_eq!(failed["errorCategory"], category, "{child}: {failed}");
        assert_eq!(failed["source"], "worker");
        assert_eq!(failed["retryCount"], 1);
        let text = failed["error"].as_str().unwrap();
        assert!(text.contains(error), "{child}: {text}");
        assert!(text.len() < 1000, "{child}: {} bytes", text.len());
    }
    assert_eq!(stage.dead_letters().await, 0);
    stage.bus.shutdown().await.unwrap();
}

// conformance: workflow/task-endings: an error of any length ends its task, in every view of its state
#[tokio::test]
async fn an_error_of_any_length_ends_its_task() {
    // A file has an object store beside it, which takes the large parts of events.
    let dir = Arc::new(tempfile::tempdir().unwrap());
    let url = format!("sqlite:{}", dir.path().join("events.db").display());
    let stage = Stage::on(Bus::open(&*url).await.unwrap(), dir);
    stage.start(stage.worker(ChildLimits::default())).await;
    let events = stage.run("long-error", "{}").await;
    assert_eq!(types(&events)[2], "Task Failed");
    let failed = &events[2].properties;
    assert_eq!(failed["errorCategory"], "auth");
    let text = failed["error"].as_str().unwrap();
    assert!(text.starts_with("xxx"), "{text}");
    assert!(text.len() < 10_000, "{} bytes", text.len());

    // An event of another worker, which keeps no limit.
    let id = "req-other".to_owned();
    let later = stage.jobs.now().plus(Duration::from_secs(3600));
    let task = NewTask::new("other", Json::empty()).id(&id);
    let task = NewTask {
        at: Some(later),
        ..task
    };
    stage.jobs.submit(task).await.unwrap();
    let other = TaskFailed {
        request_id: id.clone(),
        job_id: None,
        error: "x".repeat(300_000),
        error_category: ErrorCategory::Auth,
        retry_count: 1,
        source: FailureSource::Worker,
    };
    let emitter = stage.jobs.emitter(everbus_jobs::Origin::Worker);
    let other = emitter.event_of_run(&other, None, 1);
    stage.bus.publish(other).await.unwrap();
    assert_eq!(stage.state(&id).await, TaskState::Failed);
    let listed = TaskFilter {
        state: Some(TaskState::Failed),
        ..TaskFilter::default()
    };
    assert_eq!(stage.jobs.tasks(&listed).await.unwrap().len(), 2);
    stage.bus.shutdown().await.unwrap();
}

// conformance: workflow/task-endings: an output that no event can hold is a failure of the category programming
#[tokio::test]
async fn an_output_that_no_event_can_hold_fails_its_task() {
    // In memory there is no object store: an event has 1 MiB at most.
    let stage = Stage::new().await;
    stage.start(stage.worker(ChildLimits::default())).await;
    let events = stage.run("large", "{}").await;
    let failed = events.last().unwrap();
    assert_eq!(failed.event_type, "Task Failed");
    assert_eq!(failed.properties["errorCategory"], "programming");
    assert_eq!(failed.properties["source"], "worker");
    let text = failed.properties["error"].as_str().unwrap();
    assert!(text.contains("2000") && text.contains("1048576"), "{text}");
    assert_eq!(stage.dead_letters().await, 0);
    stage.bus.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_child_that_closes_its_pipes_is_waited_for() {
    let stage = Stage::new().await;
    stage.start(stage.worker(ChildLimits::default())).await;
    let events = stage.run("closes-its-pipes", "{}").await;
    assert_eq!(types(&events)[2], "Task Completed");
    let completed = &events[2].properties;
    assert!(completed["output"].is_null());
    assert!(
        completed["durationMs"].as_u64().unwrap() >= 100,
        "{completed}"
    );
    stage.bus.shutdown().await.unwrap();
}

// conformance: workflow/worker-group: a process that a child left running in its group is killed when the child has ended
#[tokio::test]
async fn what_a_child_leaves_behind_is_killed() {
    let stage = Stage::new().await;
    stage.start(stage.worker(ChildLimits::default())).await;
    let events = stage.run("leaves-a-process", "{}").await;
    assert_eq!(types(&events)[2], "Task Completed");
    let left = events[2].properties["output"]["left"].as_u64().unwrap();
    stage.gone(u32::try_from(left).unwrap()).await;
    stage.bus.shutdown().await.unwrap();
}

#[tokio::test]
async fn standard_error_without_end_is_kept_in_part_until_the_time_is_over() {
    let stage = Stage::new().await;
    let limits = ChildLimits::default().timeout(Duration::from_millis(300));
    stage.start(stage.worker(limits)).await;
    let events = stage.run("forever-stderr", "{}").await;
    assert_eq!(types(&events)[2], "Task Timeout");
    let kept = events[2].details["stderr"].as_str().unwrap();
    assert!(kept.contains("0123456789"));
    assert!((1000..=5000).contains(&kept.len()), "{}", kept.len());
    stage.bus.shutdown().await.unwrap();
}

// The kernel keeps the limit.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_child_gets_no_more_memory_than_allowed() {
    let stage = Stage::new().await;
    let limits = ChildLimits::default().memory(200_000_000);
    stage.start(stage.worker(limits)).await;
    let events = stage.run("hungry", "{}").await;
    assert_eq!(types(&events)[2], "Task Failed");
    let failed = &events[2].properties;
    assert!(
        failed["error"].as_str().unwrap().contains("MemoryError"),
        "{failed}"
    );
    assert_eq!(failed["errorCategory"], "programming");
    stage.bus.shutdown().await.unwrap();
    // The same child without a limit.
    let stage = Stage::new().await;
    stage.start(stage.worker(ChildLimits::default())).await;
    let events = stage.run("hungry", "{}").await;
    assert_eq!(types(&events)[2], "Task Completed");
    let peak = events[2].details["peakMemory"].as_u64().unwrap();
    assert!(peak > 500_000_000, "{peak}");
    stage.bus.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_command_that_was_removed_fails_its_task() {
    let stage = Stage::new().await;
    // A worker is only mounted with a command that exists.
    let program = stage.dir.path().join("removed");
    std::os::unix::fs::symlink("/bin/sh", &program).unwrap();
    let command = everbus_jobs::worker::child::ChildCommand::new(&program);
    let worker = stage.worker(ChildLimits::default()).command(command);
    stage.start(worker).await;
    std::fs::remove_file(&program).unwrap();
    let events = stage.run("echo", "{}").await;
    assert_eq!(types(&events), ["Task Pending", "Task Failed"]);
    let failed = &events[1].properties;
    assert_eq!(failed["errorCategory"], "programming");
    assert!(failed["error"].as_str().unwrap().contains("removed"));
    stage.bus.shutdown().await.unwrap();
}
