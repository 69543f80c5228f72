//! Tasks that run as functions in this process.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use everbus::{EventId, RetryPolicy, Timestamp};
use everbus_jobs::events::{ErrorCategory, Json, TaskCompleted, TaskState, Usage, Work};
use everbus_jobs::worker::child::ChildLimits;
use everbus_jobs::{Origin, Task, TaskError, WORKERS, Worker};
use serde_json::{Value, json};

use super::{Stage, types};

fn worker(stage: &Stage) -> Worker {
    let retry = RetryPolicy::default()
        .max_retries(1)
        .base_delay(Duration::from_millis(1));
    Worker::new(stage.jobs.clone()).retry(retry)
}

#[tokio::test]
async fn a_function_completes_its_task() {
    let stage = Stage::new().await;
    let worker = worker(&stage).handler("greet", async |task: Task| {
        let input: Value = task.read()?;
        task.usage(Usage {
            input_tokens: 3,
            ..Usage::default()
        });
        Ok(json!({ "hello": input["name"], "attempt": task.attempt }))
    });
    stage.start(worker).await;
    let events = stage.run("greet", r#"{"name":"Ada"}"#).await;
    assert_eq!(
        types(&events),
        ["Task Pending", "Task Processing Started", "Task Completed"]
    );
    let completed = &events[2].properties;
    assert_eq!(completed["output"], json!({"hello": "Ada", "attempt": 1}));
    assert_eq!(completed["usage"]["inputTokens"], 3);
    assert_eq!(events[1].properties["processId"], std::process::id());
    let history = stage.jobs.task_history("req-greet").await.unwrap();
    assert_eq!(history[1].event.metadata()[everbus_jobs::ATTEMPT], "1");
    stage.bus.shutdown().await.unwrap();
}

#[tokio::test]
async fn the_category_of_a_function_decides_like_that_of_a_child() {
    let stage = Stage::new().await;
    let tries = Arc::new(AtomicU32::new(0));
    let count = tries.clone();
    let worker = worker(&stage)
        .handler("refused", async |_: Task| {
            Err::<(), _>(TaskError::new(ErrorCategory::Validation, "no store"))
        })
        .handler("wrong-input", async |task: Task| task.read::<u32>())
        .handler("down", move |_: Task| {
            count.fetch_add(1, Ordering::SeqCst);
            async { Err::<(), _>(std::io::Error::other("connection refused").into()) }
        });
    stage.start(worker).await;
    for name in ["refused", "wrong-input"] {
        let events = stage.run(name, "{}").await;
        let failed = events.last().unwrap();
        assert_eq!(failed.event_type, "Task Failed");
        assert_eq!(failed.properties["errorCategory"], "validation");
        assert_eq!(failed.properties["source"], "worker");
    }
    let events = stage.run("down", "{}").await;
    let failed = &events.last().unwrap().properties;
    assert_eq!(
        (&failed["errorCategory"], &failed["source"]),
        (&json!("network"), &json!("dlq"))
    );
    assert_eq!(tries.load(Ordering::SeqCst), 2);
    stage.bus.shutdown().await.unwrap();
}

/// Start and end of a function that waits for nothing are published in one step; nothing of its story is left out.
#[tokio::test]
async fn functions_that_end_at_once_and_functions_that_wait_have_the_same_events() {
    let stage = Stage::new().await;
    let (gate, open) = tokio::sync::watch::channel(false);
    let worker = worker(&stage)
        .handler("at-once", async |task: Task| match task.attempt {
            1 => Err(TaskError::new(ErrorCategory::Network, "not yet")),
            _ => Ok(json!({ "attempt": task.attempt })),
        })
        .handler("waits", move |task: Task| {
            let mut open = open.clone();
            async move {
                let _ = open.wait_for(|open| *open).await;
                match task.attempt {
                    1 => Err(TaskError::new(ErrorCategory::Network, "not yet")),
                    _ => Ok(json!({ "attempt": task.attempt })),
                }
            }
        })
        .handler("panics", async |task: Task| match task.attempt {
            1 => panic!("at the first attempt"),
            _ => Ok::<_, TaskError>(()),
        });
    stage.start(worker).await;
    let story = [
        "Task Pending",
        "Task Processing Started",
        "Task Processing Failed",
        "Task Processing Started",
        "Task Completed",
    ];
    assert_eq!(types(&stage.run("at-once", "{}").await), story);
    let waiting = stage.submit("waits", "{}").await;
    // It is seen to run while it runs.
    stage
        .until("it is processed", async || {
            stage.state(&waiting).await == TaskState::Processing
        })
        .await;
    gate.send_replace(true);
    assert_eq!(types(&stage.ended(&waiting).await), story);
    // The bus records a panic, with no event of its own.
    let [pending, started, _, again, completed] = story;
    assert_eq!(
        types(&stage.run("panics", "{}").await),
        [pending, started, again, completed]
    );
    stage.bus.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_function_has_a_time_limit_and_may_panic() {
    let stage = Stage::new().await;
    let worker = worker(&stage)
        .timeout(Duration::from_millis(50))
        .handler("slow", async |_: Task| {
            std::future::pending::<()>().await;
            Ok(())
        })
        .handler("panics", async |task: Task| {
            assert_ne!(task.attempt, 1, "as planned");
            Ok("fine")
        });
    stage.start(worker).await;
    let events = stage.run("slow", "{}").await;
    let timeout = events.last().unwrap();
    assert_eq!(timeout.event_type, "Task Timeout");
    assert_eq!(timeout.properties["timeoutMs"], 50);
    // A panic is a failed attempt like any other.
    let events = stage.run("panics", "{}").await;
    assert_eq!(events.last().unwrap().properties["output"], "fine");
    stage.bus.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_name_without_a_handler_is_left_to_others_and_then_fails() {
    let stage = Stage::new().await;
    let worker = worker(&stage)
        .leave_unknown_for(Duration::from_millis(200))
        .handler("known", async |_: Task| Ok(()));
    stage.start(worker).await;
    let events = stage.run("unheard-of", "{}").await;
    assert_eq!(types(&events), ["Task Pending", "Task Failed"]);
    let failed = &events.last().unwrap().properties;
    assert_eq!(failed["source"], "dlq");
    assert_eq!(failed["retryCount"], 1, "no attempt was counted meanwhile");
    let error = failed["error"].as_str().unwrap();
    assert!(
        error.contains("unheard-of") && error.contains("known"),
        "{error}"
    );
    stage.bus.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_function_beside_a_command_has_the_time_limit_of_functions() {
    let stage = Stage::new().await;
    let worker = stage
        .worker(ChildLimits::default())
        .timeout(Duration::from_millis(50))
        .handler("slow", async |_: Task| {
            std::future::pending::<()>().await;
            Ok(())
        });
    stage.start(worker).await;
    let events = stage.run("slow", "{}").await;
    assert_eq!(events.last().unwrap().properties["timeoutMs"], 50);
    let both = stage
        .worker(ChildLimits::default())
        .any(async |_: Task| Ok(()));
    let error = both.mount().await.unwrap_err();
    assert_eq!(error.code(), everbus::Code::InvalidSetting);
    stage.bus.shutdown().await.unwrap();
}

// conformance: workflow/task-lock: a dead letter of an earlier run does not run beside or after the next run; one of the last run runs again
#[tokio::test]
async fn a_dead_letter_of_an_earlier_run_is_not_run_again() {
    let stage = Stage::new().await;
    let calls = Arc::new(AtomicU32::new(0));
    let count = calls.clone();
    let retry = RetryPolicy::default().max_retries(0);
    let worker = worker(&stage).retry(retry).any(move |_: Task| {
        let call = count.fetch_add(1, Ordering::SeqCst) + 1;
        async move {
            match call {
                1 | 3 => Err(TaskError::new(ErrorCategory::Network, "no answer")),
                _ => Ok(json!({ "call": call })),
            }
        }
    });
    stage.start(worker).await;
    stage.run("first", "{}").await;
    stage
        .until("the dead letter", async || stage.dead_letters().await == 1)
        .await;
    let dead = stage.bus.dead_letters().list().await.unwrap().remove(0);
    assert_eq!(stage.jobs.retry("req-first", false).await.unwrap(), 2);
    stage
        .until("the second run completes", async || {
            stage.state("req-first").await == TaskState::Completed
        })
        .await;
    let all = everbus::DeadLetterFilter::default();
    stage.bus.dead_letters().retry_all(all).await.unwrap();
    let settled = async || {
        let lookup = stage.bus.lookup().unwrap();
        let states = lookup.states(dead.record.position).await.unwrap();
        let workers = |state: &everbus::core::GroupState| {
            state.group.as_str() == everbus_jobs::WORKERS
                && state.state == everbus::core::EventState::Done
        };
        states.iter().any(workers)
    };
    stage.until("the letter is settled", settled).await;
    assert_eq!(calls.load(Ordering::SeqCst), 2, "run 1 did not run again");
    assert_eq!(stage.state("req-first").await, TaskState::Completed);

    // The letter of the last run is run again when a person asks for it.
    stage.run("second", "{}").await;
    stage
        .until("the dead letter", async || stage.dead_letters().await == 1)
        .await;
    let all = everbus::DeadLetterFilter::default();
    stage.bus.dead_letters().retry_all(all).await.unwrap();
    stage
        .until("the task completes", async || {
            stage.state("req-second").await == TaskState::Completed
        })
        .await;
    assert_eq!(calls.load(Ordering::SeqCst), 4);
    stage.bus.shutdown().await.unwrap();
}

// conformance: workflow/state-derived: copies of a replay decide no state and start no work
#[tokio::test]
async fn copies_of_a_replay_change_nothing() {
    let stage = Stage::new().await;
    let calls = Arc::new(AtomicU32::new(0));
    let count = calls.clone();
    let worker = worker(&stage).any(move |_: Task| {
        count.fetch_add(1, Ordering::SeqCst);
        async { Ok(json!({})) }
    });
    stage.start(worker).await;
    stage.run("copied", "{}").await;
    for event_type in ["Task Pending", "Task Processing Started", "task.work"] {
        let copies = stage.bus.replay().types(event_type).publish_copies();
        copies.await.unwrap();
    }
    stage.run("after", "{}").await;
    let task = stage.jobs.task_status("req-copied").await.unwrap();
    assert_eq!(task.state, Some(TaskState::Completed), "in the index");
    assert_eq!(stage.state("req-copied").await, TaskState::Completed);
    stage
        .until("the copy of the work is settled", async || {
            let groups = stage.bus.groups().await.unwrap();
            let workers = groups
                .iter()
                .find(|g| g.name.as_str() == everbus_jobs::WORKERS);
            workers.is_some_and(|group| group.behind + group.in_flight + group.waiting == 0)
        })
        .await;
    assert_eq!(calls.load(Ordering::SeqCst), 2, "each task ran once");
    stage.bus.shutdown().await.unwrap();
}

// conformance: workflow/task-lock: work that a broker delivers once more after its task has completed is not run again
#[tokio::test]
async fn work_of_a_task_that_has_completed_is_skipped() {
    let stage = Stage::new().await;
    for name in ["ended", "open"] {
        stage.submit(name, "{}").await;
    }
    // The worker before was killed between `Task Completed` and the ack.
    let completed = TaskCompleted {
        request_id: "req-ended".to_owned(),
        job_id: None,
        output: Json::empty(),
        duration_ms: 1,
        exit_code: 0,
        usage: None,
    };
    let emitter = stage.jobs.emitter(Origin::Worker);
    let event = emitter.event_of_run(&completed, None, 1);
    stage.bus.publish(event).await.unwrap();
    let ran = Arc::new(AtomicU32::new(0));
    let count = ran.clone();
    let worker = worker(&stage).any(move |_: Task| {
        count.fetch_add(1, Ordering::SeqCst);
        async { Ok::<_, TaskError>(()) }
    });
    stage.start(worker.concurrency(1)).await;
    // Its work comes later.
    stage.ended("req-open").await;
    let events = ["Task Pending", "Task Completed"];
    assert_eq!(types(&stage.history("req-ended").await), events);
    stage.bus.shutdown().await.unwrap();
    assert_eq!(ran.load(Ordering::SeqCst), 1);
}

// conformance: workflow/task-endings: the end of a task has the same id in each attempt, whether or not its start was published before it
#[tokio::test]
async fn the_id_of_an_end_does_not_depend_on_the_events_before_it() {
    let stage = Stage::new().await;
    let worker = worker(&stage)
        .handler("at-once", async |_: Task| Ok::<_, TaskError>(()))
        .handler("waits", async |_: Task| {
            tokio::time::sleep(Duration::from_millis(1)).await;
            Ok::<_, TaskError>(())
        });
    stage.start(worker).await;
    for name in ["at-once", "waits"] {
        let events = stage.run(name, "{}").await;
        assert_eq!(events.len(), 3);
        let work = crate::support::events_of::<Work>(&stage.jobs).await;
        let work = work.last().unwrap();
        let id = EventId::derived(work.event.id(), Timestamp::EPOCH, WORKERS, "end", 0);
        let history = stage.jobs.task_history(&format!("req-{name}")).await;
        assert_eq!(history.unwrap()[2].event.id(), id, "{name}");
    }
    stage.bus.shutdown().await.unwrap();
}
