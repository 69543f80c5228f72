//! Retention keeps what an unfinished or failed job still needs.

use std::time::Duration;

use everbus::{Bus, ManualClock, Retention, Timestamp, holds};
use everbus_jobs::events::{JobCreated, TaskPending};
use everbus_jobs::{JobState, Jobs};
use serde_json::json;

use crate::support::{ended, events_of, job, running, task, task_with};

const DAY: Duration = Duration::from_secs(24 * 3600);

async fn prune(jobs: &Jobs) {
    let week = Retention {
        max_age: Some(7 * DAY),
        ..Retention::default()
    };
    let engine = jobs.bus().engine();
    let kept = holds::applied(engine, week, jobs.now()).await.unwrap();
    engine.maintenance().unwrap().prune(kept).await.unwrap();
}

// conformance: workflow/job-retention: events of a failed job stay until it has been resumed and completed
#[tokio::test(flavor = "multi_thread")]
async fn the_events_of_a_failed_job_stay_until_it_has_completed() {
    let clock = ManualClock::new(Timestamp::from_micros(1_800_000_000_000_000));
    let bus = Bus::builder()
        .clock(clock.clone())
        .keep_everything()
        .open("memory:")
        .await
        .unwrap();
    let jobs = Jobs::builder().clock(clock.clone()).open(bus).unwrap();
    running(&jobs).await;
    let other = jobs.bus().publish(("order.placed", 1)).await.unwrap();
    let tasks = vec![
        task_with("x", &[], &json!({ "fail": 1 })),
        task("y", &["x"]),
    ];
    jobs.submit_job(job("old", tasks)).await.unwrap();
    assert_eq!(ended(&jobs, "old").await.state, JobState::Failed);

    clock.advance(40 * DAY);
    jobs.release_completed().await.unwrap();
    prune(&jobs).await;
    let lookup = jobs.bus().lookup().unwrap();
    assert!(
        lookup.find(other.id()).await.unwrap().is_empty(),
        "other old events go"
    );
    assert_eq!(events_of::<JobCreated>(&jobs).await.len(), 1);
    // What is kept is enough to go on.
    let jobs_again = Jobs::builder()
        .clock(clock.clone())
        .open(jobs.bus().clone())
        .unwrap();
    assert_eq!(jobs_again.resume("old").await.unwrap().started, ["x"]);
    assert_eq!(ended(&jobs_again, "old").await.state, JobState::Completed);

    clock.advance(40 * DAY);
    // The groups have settled what they were owed.
    crate::support::until("the groups are done", async || {
        let groups = jobs.bus().groups().await.unwrap();
        groups
            .iter()
            .all(|g| g.behind + g.in_flight + g.waiting == 0)
    })
    .await;
    prune(&jobs).await;
    assert_eq!(
        events_of::<JobCreated>(&jobs).await.len(),
        1,
        "the hold has not moved"
    );
    jobs.release_completed().await.unwrap();
    prune(&jobs).await;
    assert_eq!(events_of::<JobCreated>(&jobs).await.len(), 0);
    assert_eq!(events_of::<TaskPending>(&jobs).await.len(), 0);
    jobs.bus().shutdown().await.unwrap();
}

// conformance: workflow/job-retention: events of a completed job stay from the moment on at which tasks are added to it or run again
#[tokio::test(flavor = "multi_thread")]
async fn a_completed_job_that_goes_on_is_kept_again() {
    let clock = ManualClock::new(Timestamp::from_micros(1_800_000_000_000_000));
    let bus = Bus::builder()
        .clock(clock.clone())
        .keep_everything()
        .open("memory:")
        .await
        .unwrap();
    let jobs = Jobs::builder().clock(clock.clone()).open(bus).unwrap();
    running(&jobs).await;
    jobs.submit_job(job("old", vec![task("x", &[])]))
        .await
        .unwrap();
    assert_eq!(ended(&jobs, "old").await.state, JobState::Completed);
    let begin = jobs.now();
    clock.advance(5 * DAY);
    assert!(jobs.release_completed().await.unwrap().unwrap() > begin);
    let added = vec![task_with("y", &["x"], &json!({ "fail": 1 }))];
    jobs.add_tasks("old", added, false).await.unwrap();
    assert_eq!(ended(&jobs, "old").await.state, JobState::Failed);
    let held = holds::get(jobs.bus().engine(), "tasks").await.unwrap();
    assert!(
        held.unwrap().0.since <= begin,
        "the add moved the hold back"
    );

    clock.advance(40 * DAY);
    assert!(jobs.release_completed().await.unwrap().unwrap() <= begin);
    prune(&jobs).await;
    assert_eq!(jobs.resume("old").await.unwrap().started, ["y"]);
    assert_eq!(ended(&jobs, "old").await.state, JobState::Completed);
    jobs.bus().shutdown().await.unwrap();
}
