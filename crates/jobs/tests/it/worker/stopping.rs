//! Tasks that are cancelled, and workers that stop.

use std::time::Duration;

use everbus_jobs::events::TaskState;
use everbus_jobs::worker::child::ChildLimits;

use super::{Stage, types};

// conformance: workflow/job-cancel: a cancelled task's running child is killed
#[tokio::test]
async fn a_cancelled_task_ends_its_child() {
    let stage = Stage::new().await;
    let limits = ChildLimits::default().grace(Duration::from_millis(100));
    stage.start(stage.worker(limits)).await;
    let id = stage.submit("stubborn", "{}").await;
    let pid = stage.pid(&id).await;
    assert!(stage.jobs.cancel_task(&id).await.unwrap());
    stage.gone(pid).await;
    let events = stage.ended(&id).await;
    let failed = events.last().unwrap();
    assert_eq!(failed.properties["errorCategory"], "cancelled");
    assert_eq!(failed.properties["source"], "producer");
    // The work is done with: another worker does not get it.
    stage
        .until("the work is settled", async || {
            let groups = stage.bus.groups().await.unwrap();
            let workers = groups.iter().find(|g| g.name.as_str() == "tasks.workers");
            workers.is_some_and(|g| g.in_flight + g.waiting + g.behind == 0)
        })
        .await;
    assert_eq!(stage.state(&id).await, TaskState::Failed);
    assert_eq!(stage.dead_letters().await, 0);
    stage.bus.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_task_that_was_cancelled_before_does_not_start() {
    let stage = Stage::new().await;
    let id = stage.submit("echo", "{}").await;
    assert!(stage.jobs.cancel_task(&id).await.unwrap());
    let other = stage.submit("reads-nothing", "{}").await;
    stage.start(stage.worker(ChildLimits::default())).await;
    stage.ended(&other).await;
    let events = stage.ended(&id).await;
    assert_eq!(types(&events), ["Task Pending", "Task Failed"]);
    stage.bus.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_worker_that_stops_finishes_what_it_can() {
    let dir = std::sync::Arc::new(tempfile::tempdir().unwrap());
    let url = format!("sqlite:{}", dir.path().join("stop.db").display());
    let open = async || Stage::on(everbus::Bus::open(&*url).await.unwrap(), dir.clone());
    let first = open().await;
    first.start(first.worker(ChildLimits::default())).await;
    let id = first.submit("waits", "{}").await;
    first.pid(&id).await;
    let (stopped, ()) = tokio::join!(first.bus.shutdown(), async { first.go() });
    assert_eq!(stopped.unwrap().abandoned, 0);
    let second = open().await;
    assert_eq!(second.state(&id).await, TaskState::Completed);
    second.bus.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_worker_that_stops_gives_back_what_takes_longer() {
    let dir = std::sync::Arc::new(tempfile::tempdir().unwrap());
    let url = format!("sqlite:{}", dir.path().join("stop.db").display());
    let open = async || Stage::on(everbus::Bus::open(&*url).await.unwrap(), dir.clone());
    let first = open().await;
    let limits = ChildLimits::default().grace(Duration::from_millis(200));
    let worker = first
        .worker(limits)
        .finish_within(Duration::from_millis(100));
    first.start(worker).await;
    let id = first.submit("waits", "{}").await;
    let pid = first.pid(&id).await;
    let stopped = first
        .bus
        .shutdown_within(Duration::from_secs(30))
        .await
        .unwrap();
    assert_eq!(stopped.abandoned, 0, "it was given back in time");
    first.gone(pid).await;
    let second = open().await;
    second.go();
    second.start(second.worker(limits)).await;
    let events = second.ended(&id).await;
    assert_eq!(
        types(&events),
        [
            "Task Pending",
            "Task Processing Started",
            "Task Processing Started",
            "Task Completed"
        ]
    );
    // No attempt was counted for the one that was interrupted.
    assert_eq!(events[3].properties["output"]["attempt"], 1);
    second.bus.shutdown().await.unwrap();
}
