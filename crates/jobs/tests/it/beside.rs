//! Jobs on brokers that keep no history, with a file beside them that does:
//! `cargo test -p everbus-jobs --all-features --test it beside`; with `EVERBUS_KAFKA=1` on Kafka too.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use everbus::{Bus, Code};
use everbus_jobs::events::{
    ErrorCategory, JobCompleted, TaskCompleted, TaskPending, TaskStarted, TaskState, Work,
};
use everbus_jobs::{Dispatcher, JobState, Jobs, Task, TaskError, Worker};
use serde_json::{Value, json};

use crate::support::{ended, events_of, job, task, task_with, until};

/// Completes a diamond, fails and resumes another one, each with a worker that runs functions.
async fn diamonds_complete(url: &str) {
    let bare = Bus::open(url).await.unwrap();
    let error = Jobs::new(bare.clone()).unwrap_err();
    assert_eq!(error.code(), Code::Unsupported);
    assert!(error.hint_text().unwrap().contains("--store"), "{error:?}");
    bare.shutdown().await.unwrap();

    let directory = tempfile::tempdir().unwrap();
    let store = format!("sqlite:{}", directory.path().join("store.db").display());
    let bus = Bus::builder().store(store).open(url).await.unwrap();
    let jobs = Jobs::new(bus.clone()).unwrap();
    Dispatcher::subscribe(&jobs).await.unwrap();
    let broken = Arc::new(AtomicBool::new(true));
    let is_broken = broken.clone();
    let echo = move |task: Task| {
        let is_broken = is_broken.load(Ordering::SeqCst);
        async move {
            let input: Value = task.read()?;
            if input["fail"] == true && is_broken {
                return Err(TaskError::new(ErrorCategory::Validation, "it was asked to"));
            }
            Ok(json!({ "of": task.request_id, "got": input }))
        }
    };
    Worker::new(jobs.clone())
        .any(echo)
        .concurrency(4)
        .mount()
        .await
        .unwrap();
    bus.start().await.unwrap();

    let diamond = |id: &str, fails: bool| {
        let name = |task: &str| format!("{id}.{task}");
        let (a, b, c, d) = (name("a"), name("b"), name("c"), name("d"));
        let tasks = vec![
            task_with(&a, &[], &json!({ "n": 1 })),
            task(&b, &[&a]),
            task_with(&c, &[&a], &json!({ "fail": fails })),
            task(&d, &[&b, &c]),
        ];
        job(id, tasks)
    };
    jobs.submit_job(diamond("good", false)).await.unwrap();
    let status = ended(&jobs, "good").await;
    assert_eq!(status.state, JobState::Completed);
    assert!(!jobs.submit_job(diamond("good", false)).await.unwrap().new);

    jobs.submit_job(diamond("bad", true)).await.unwrap();
    let status = ended(&jobs, "bad").await;
    assert_eq!(status.state, JobState::Failed);
    assert_eq!(status.task_statuses["bad.d"], None);
    broken.store(false, Ordering::SeqCst);
    assert_eq!(jobs.resume("bad").await.unwrap().started, ["bad.c"]);
    until("the resumed job has completed", async || {
        jobs.job("bad").await.unwrap().state == JobState::Completed
    })
    .await;
    until("both ends are told", async || {
        events_of::<JobCompleted>(&jobs).await.len() == 2
    })
    .await;

    // Four tasks each, and one of them twice: nothing is started twice, and nothing is missing.
    assert_eq!(events_of::<TaskPending>(&jobs).await.len(), 9);
    assert_eq!(events_of::<Work>(&jobs).await.len(), 9);
    assert_eq!(events_of::<TaskStarted>(&jobs).await.len(), 9);
    assert_eq!(events_of::<TaskCompleted>(&jobs).await.len(), 8);
    let works = events_of::<Work>(&jobs).await;
    let work = works
        .iter()
        .map(|record| record.event.json::<Work>().unwrap())
        .find(|work| work.request_id == "good.d");
    let input: Value = work.unwrap().input.read().unwrap();
    let outputs = input["dependencyOutputs"].as_object().unwrap();
    assert_eq!(outputs.keys().collect::<Vec<_>>(), ["good.b", "good.c"]);
    assert_eq!(
        outputs["good.b"]["got"]["dependencyOutputs"]["good.a"]["got"]["n"],
        1
    );
    let task = jobs.task("good.d").await.unwrap().unwrap();
    assert_eq!(task.state, Some(TaskState::Completed));
    bus.shutdown().await.unwrap();
}

// conformance: workflow/job-engines: a job runs on NATS with a file beside it; without the file it is refused with a hint
// needs: nats-server
#[cfg(feature = "nats")]
#[tokio::test(flavor = "multi_thread")]
async fn a_diamond_completes_on_nats_with_a_file_beside_it() {
    let Some(server) = everbus_testkit::servers::Nats::shared() else {
        return;
    };
    diamonds_complete(&server.fresh_account()).await;
}

// conformance: workflow/job-engines: a job runs on Redis with a file beside it; without the file it is refused with a hint
// needs: redis-server
#[cfg(feature = "redis")]
#[tokio::test(flavor = "multi_thread")]
async fn a_diamond_completes_on_redis_with_a_file_beside_it() {
    use everbus_testkit::servers::{Flavour, Redis};
    let Some(server) = Redis::shared(Flavour::Redis) else {
        return;
    };
    diamonds_complete(&server.fresh_database()).await;
}

// conformance: workflow/job-engines: a job runs on Kafka with a file beside it; without the file it is refused with a hint
// needs: Kafka
#[cfg(feature = "kafka")]
#[tokio::test(flavor = "multi_thread")]
async fn a_diamond_completes_on_kafka_with_a_file_beside_it() {
    use everbus_testkit::servers::Kafka;
    let Some(server) = Kafka::shared() else {
        return;
    };
    diamonds_complete(&server.fresh_space()).await;
}
