//! The dispatcher: each task starts once, when its parents have completed.

use std::sync::atomic::Ordering;

use everbus::{HistoryQuery, TypedEvent};
use everbus_jobs::events::{
    JobCompleted, JobFailureDetected, TaskCompleted, TaskFailed, TaskPending, TaskState, Work,
};
use everbus_jobs::{Dispatcher, JobState, Jobs, Origin};
use serde_json::{Value, json};

use crate::support::{
    File, ended, events_of, job, memory, running, task, task_with, until, worker,
};

fn five() -> Vec<everbus_jobs::events::TaskSpec> {
    vec![
        task_with("task-A", &[], &json!({"storeId": "store-123"})),
        task_with("task-B", &[], &json!({"market": "fashion"})),
        task_with("task-C", &["task-A"], &json!({"style": "modern"})),
        task("task-D", &["task-A"]),
        task("task-E", &["task-C", "task-D"]),
    ]
}

async fn inputs(jobs: &Jobs) -> std::collections::BTreeMap<String, Value> {
    let works = events_of::<Work>(jobs).await;
    let works = works.iter().map(|r| r.event.json::<Work>().unwrap());
    works
        .map(|work| (work.request_id, work.input.read().unwrap()))
        .collect()
}

async fn count<T: TypedEvent>(jobs: &Jobs) -> usize {
    events_of::<T>(jobs).await.len()
}

// conformance: workflow/job-events: the five-task job of the document runs to Job Completed, with one Task Pending for each task
// conformance: workflow/job-inputs: roots receive their input, others theirs merged with the outputs of their parents
// conformance: workflow/one-path: all events of producer, dispatcher and worker are in the one log
// conformance: workflow/job-notice: waiting for a job ends with its result
#[tokio::test(flavor = "multi_thread")]
async fn the_job_of_the_document_completes() {
    let file = File::new();
    for jobs in [memory().await, file.open().await] {
        let runs = running(&jobs).await;
        jobs.submit_job(job("job-456", five())).await.unwrap();
        let status = ended(&jobs, "job-456").await;
        assert_eq!(status.state, JobState::Completed);
        until("the job is completed", async || {
            count::<JobCompleted>(&jobs).await == 1
        })
        .await;
        assert_eq!(runs.load(Ordering::Relaxed), 5);
        assert_eq!(count::<TaskPending>(&jobs).await, 5);
        let inputs = inputs(&jobs).await;
        assert_eq!(inputs["task-A"], json!({"storeId": "store-123"}));
        assert_eq!(inputs["task-C"]["style"], "modern");
        assert_eq!(
            inputs["task-C"]["dependencyOutputs"]["task-A"]["of"],
            "task-A"
        );
        let both = inputs["task-E"]["dependencyOutputs"].as_object().unwrap();
        assert_eq!(both.keys().collect::<Vec<_>>(), ["task-C", "task-D"]);
        let record = &events_of::<JobCompleted>(&jobs).await[0];
        let completed: JobCompleted = record.event.json().unwrap();
        assert_eq!(completed.total_tasks, 5);
        assert!(
            completed
                .task_statuses
                .values()
                .all(|s| *s == Some(TaskState::Completed))
        );
        // Task Pending and the work were appended in one step: they are neighbours in the log.
        let pending = events_of::<TaskPending>(&jobs).await;
        let works = events_of::<Work>(&jobs).await;
        for (pending, work) in pending.iter().zip(&works) {
            assert_eq!(pending.position.place() + 1, work.position.place());
        }
        jobs.bus().shutdown().await.unwrap();
    }
}

// conformance: workflow/job-branches: after a failure independent branches go on, descendants wait with null
// conformance: workflow/job-resume: a failed job is resumed from its failed tasks and completes
#[tokio::test(flavor = "multi_thread")]
async fn a_failed_job_goes_on_where_it_can_and_is_resumed() {
    let jobs = memory().await;
    running(&jobs).await;
    let tasks = vec![
        task("a", &[]),
        task_with("bad", &["a"], &json!({"fail": 1})),
        task("after", &["bad"]),
        task("other", &["a"]),
        task("last", &["other"]),
    ];
    jobs.submit_job(job("j", tasks)).await.unwrap();
    let status = ended(&jobs, "j").await;
    assert_eq!(status.state, JobState::Failed);
    let of = |id: &str| status.task_statuses[id];
    assert_eq!(of("bad"), Some(TaskState::Failed));
    assert_eq!(of("after"), None);
    assert_eq!(of("last"), Some(TaskState::Completed));
    until("the failure is told", async || {
        count::<JobFailureDetected>(&jobs).await == 1
    })
    .await;
    let record = &events_of::<JobFailureDetected>(&jobs).await[0];
    let detected: JobFailureDetected = record.event.json().unwrap();
    assert_eq!(detected.failed_task_id, "bad");
    assert_eq!(detected.task_statuses["after"], None);
    assert_eq!(count::<JobCompleted>(&jobs).await, 0);

    assert_eq!(jobs.resume("j").await.unwrap().started, ["bad"]);
    assert_eq!(ended(&jobs, "j").await.state, JobState::Completed);
    until("the job is completed", async || {
        count::<JobCompleted>(&jobs).await == 1
    })
    .await;
    assert_eq!(jobs.task("bad").await.unwrap().unwrap().run, 2);
    // Five first runs and one more.
    assert_eq!(count::<TaskPending>(&jobs).await, 6);
    jobs.bus().shutdown().await.unwrap();
}

// conformance: workflow/job-submit: a job is submitted, and tasks are added to it later
// conformance: workflow/job-adds: tasks added to a completed job reopen it; Job Completed once per totalTasks
#[tokio::test(flavor = "multi_thread")]
async fn tasks_are_added_to_a_completed_job_and_concurrent_adds_are_all_kept() {
    let jobs = memory().await;
    running(&jobs).await;
    jobs.submit_job(job("j", vec![task("a", &[])]))
        .await
        .unwrap();
    assert_eq!(ended(&jobs, "j").await.state, JobState::Completed);
    until("the job is completed", async || {
        count::<JobCompleted>(&jobs).await == 1
    })
    .await;

    let mut adds = Vec::new();
    for n in 0..8 {
        let jobs = jobs.clone();
        adds.push(tokio::spawn(async move {
            let tasks = vec![
                task(&format!("x{n}"), &["a"]),
                task(&format!("y{n}"), &[&format!("x{n}")]),
            ];
            jobs.add_tasks("j", tasks, false).await.unwrap()
        }));
    }
    let mut totals = Vec::new();
    for add in adds {
        totals.push(add.await.unwrap());
    }
    totals.sort_unstable();
    assert_eq!(totals, [3, 5, 7, 9, 11, 13, 15, 17]);
    let all = async || {
        let status = jobs.job("j").await.unwrap();
        status.total_tasks == 17 && status.state == JobState::Completed
    };
    until("all seventeen have completed", all).await;
    until("that is told", async || {
        let told = events_of::<JobCompleted>(&jobs).await;
        told.iter()
            .any(|r| r.event.json::<JobCompleted>().unwrap().total_tasks == 17)
    })
    .await;
    let told = events_of::<JobCompleted>(&jobs).await;
    let totals: Vec<usize> = told
        .iter()
        .map(|r| r.event.json::<JobCompleted>().unwrap().total_tasks)
        .collect();
    let once: std::collections::BTreeSet<usize> = totals.iter().copied().collect();
    assert_eq!(
        totals.len(),
        once.len(),
        "each total is told once: {totals:?}"
    );
    assert_eq!(count::<TaskPending>(&jobs).await, 17);

    let error = jobs
        .add_tasks("j", vec![task("z", &["nothing"])], false)
        .await
        .unwrap_err();
    assert_eq!(error.code(), everbus::Code::InvalidJob);
    jobs.bus().shutdown().await.unwrap();
}

// conformance: workflow/job-ids: two dispatchers at once start every task once
#[tokio::test(flavor = "multi_thread")]
async fn two_dispatchers_in_two_processes_start_every_task_once() {
    let file = File::new();
    let (one, two) = (file.open().await, file.open().await);
    running(&one).await;
    Dispatcher::subscribe(&two).await.unwrap();
    worker(&two).await;
    two.bus().start().await.unwrap();
    // Diamonds in a row: each end has two parents that finish together.
    let mut tasks = vec![task("d0", &[])];
    for n in 0..20 {
        let from = format!("d{n}");
        tasks.push(task(&format!("l{n}"), &[&from]));
        tasks.push(task(&format!("r{n}"), &[&from]));
        tasks.push(task(
            &format!("d{}", n + 1),
            &[&format!("l{n}"), &format!("r{n}")],
        ));
    }
    let total = tasks.len();
    one.submit_job(job("diamonds", tasks)).await.unwrap();
    assert_eq!(ended(&one, "diamonds").await.state, JobState::Completed);
    until("the job is completed", async || {
        count::<JobCompleted>(&one).await == 1
    })
    .await;
    assert_eq!(count::<TaskPending>(&one).await, total);
    assert_eq!(count::<Work>(&one).await, total);
    assert_eq!(count::<TaskCompleted>(&one).await, total);
    let dead = one.bus().engine().dead_letters().unwrap();
    let letters = dead.list(
        everbus::DeadLetterFilter::default(),
        everbus::PageRequest::default(),
    );
    assert!(letters.await.unwrap().items.is_empty());
    one.bus().shutdown().await.unwrap();
    two.bus().shutdown().await.unwrap();
}

// conformance: workflow/job-ids: an id that is known with another body is "already emitted", not a dead letter
#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_is_known_with_another_body_is_no_failure() {
    let file = File::new();
    let jobs = file.open().await;
    // Another dispatcher, of another environment, has started the root already: the context differs.
    let other = Jobs::builder()
        .environment("test")
        .open(jobs.bus().clone())
        .unwrap();
    jobs.submit_job(job("j", vec![task("a", &[]), task("b", &["a"])]))
        .await
        .unwrap();
    Dispatcher::subscribe(&other).await.unwrap();
    jobs.bus().start().await.unwrap();
    until("the root is started", async || {
        count::<Work>(&jobs).await == 1
    })
    .await;
    jobs.bus().shutdown().await.unwrap();

    let jobs = file.open().await;
    // The first event is delivered once more, to a dispatcher that would make another body.
    let group: everbus::GroupName = everbus_jobs::DISPATCHER.parse().unwrap();
    let first = &events_of::<everbus_jobs::events::JobCreated>(&jobs).await[0];
    let again = jobs.bus().engine().redeliver().unwrap();
    again.redeliver(group, vec![first.position]).await.unwrap();
    running(&jobs).await;
    assert_eq!(ended(&jobs, "j").await.state, JobState::Completed);
    until("the job is completed", async || {
        count::<JobCompleted>(&jobs).await == 1
    })
    .await;
    assert_eq!(count::<Work>(&jobs).await, 2);
    let dead = jobs.bus().engine().dead_letters().unwrap();
    let letters = dead.list(
        everbus::DeadLetterFilter::default(),
        everbus::PageRequest::default(),
    );
    assert!(letters.await.unwrap().items.is_empty());
    jobs.bus().shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_of_many_roots_starts_and_completes() {
    let jobs = memory().await;
    running(&jobs).await;
    let tasks = (0..10_000).map(|n| task(&format!("t{n}"), &[])).collect();
    jobs.submit_job(job("wide", tasks)).await.unwrap();
    assert_eq!(ended(&jobs, "wide").await.state, JobState::Completed);
    until("the job is completed", async || {
        count::<JobCompleted>(&jobs).await == 1
    })
    .await;
    assert_eq!(count::<TaskPending>(&jobs).await, 10_000);
    jobs.bus().shutdown().await.unwrap();
}

// conformance: workflow/job-cancel: pending and running tasks fail as cancelled, dependents do not start, a late result is recorded and ignored; the job can be resumed
#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_job_stops_and_can_be_resumed() {
    let jobs = memory().await;
    Dispatcher::subscribe(&jobs).await.unwrap();
    jobs.bus().start().await.unwrap();
    let tasks = vec![task("a", &[]), task("b", &[]), task("c", &["a", "b"])];
    jobs.submit_job(job("j", tasks)).await.unwrap();
    until("both roots wait", async || count::<Work>(&jobs).await == 2).await;
    let mut cancelled = jobs.cancel_job("j").await.unwrap();
    cancelled.sort();
    assert_eq!(cancelled, ["a", "b"]);
    let status = jobs.job("j").await.unwrap();
    assert_eq!(status.state, JobState::Failed);
    assert_eq!(status.task_statuses["c"], None);
    let record = &events_of::<TaskFailed>(&jobs).await[0];
    let failed: Value = record.event.json().unwrap();
    assert_eq!(
        (&failed["errorCategory"], &failed["source"]),
        (&json!("cancelled"), &json!("producer"))
    );
    // Once more changes nothing.
    assert!(jobs.cancel_job("j").await.unwrap().is_empty());

    // A worker finishes both all the same: recorded, and ignored.
    for id in ["a", "b"] {
        let late: TaskCompleted = serde_json::from_value(json!({
            "requestId": id, "jobId": "j", "output": 1, "durationMs": 1, "exitCode": 0
        }))
        .unwrap();
        let emitter = jobs.emitter(Origin::Worker);
        let receipt = jobs
            .bus()
            .publish(emitter.event_of_run(&late, Some("j"), 1))
            .await
            .unwrap();
        receipt.settled().await.unwrap();
    }
    assert_eq!(
        jobs.job("j").await.unwrap().task_statuses["a"],
        Some(TaskState::Failed)
    );
    assert_eq!(
        count::<Work>(&jobs).await,
        2,
        "the dependent task was not started"
    );
    let query = HistoryQuery::default()
        .tenant("default")
        .entity("TASK", "a");
    let history = jobs.bus().history().unwrap().query(query).await.unwrap();
    assert!(
        history
            .items
            .iter()
            .any(|r| r.event.event_type() == "Task Completed")
    );

    assert_eq!(
        count::<JobFailureDetected>(&jobs).await,
        0,
        "a cancel was asked for"
    );

    let mut resumed = jobs.resume("j").await.unwrap().started;
    resumed.sort();
    assert_eq!(resumed, ["a", "b"]);
    worker(&jobs).await;
    assert_eq!(ended(&jobs, "j").await.state, JobState::Completed);
    jobs.bus().shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_is_cancelled_before_it_began_never_starts() {
    let jobs = memory().await;
    Dispatcher::subscribe(&jobs).await.unwrap();
    jobs.submit_job(job("j", vec![task("a", &[]), task("b", &["a"])]))
        .await
        .unwrap();
    assert!(jobs.cancel_task("b").await.unwrap());
    assert!(!jobs.cancel_task("b").await.unwrap(), "it has ended");
    worker(&jobs).await;
    jobs.bus().start().await.unwrap();
    let status = ended(&jobs, "j").await;
    assert_eq!(status.state, JobState::Failed);
    assert_eq!(status.task_statuses["a"], Some(TaskState::Completed));
    assert_eq!(status.task_statuses["b"], Some(TaskState::Failed));
    assert_eq!(count::<Work>(&jobs).await, 1);
    // Now that its parent has completed, it can be run.
    assert_eq!(jobs.retry("b", false).await.unwrap(), 2);
    assert_eq!(ended(&jobs, "j").await.state, JobState::Completed);
    jobs.bus().shutdown().await.unwrap();
}

/// An event of the first run of a task of the job `j`.
async fn publish<P: everbus_jobs::events::Properties>(jobs: &Jobs, properties: &P) {
    let emitter = jobs.emitter(Origin::Worker);
    let event = emitter.event_of_run(properties, Some("j"), 1);
    jobs.bus().publish(event).await.unwrap();
}

fn completes(id: &str, output: &Value) -> TaskCompleted {
    let completed = json!({
        "requestId": id, "jobId": "j", "output": output, "durationMs": 1, "exitCode": 0
    });
    serde_json::from_value(completed).unwrap()
}

async fn dispatched(jobs: &Jobs) {
    until("the dispatcher is done", async || {
        let groups = jobs.bus().groups().await.unwrap();
        groups
            .iter()
            .all(|g| g.behind + g.in_flight + g.waiting == 0)
    })
    .await;
}

// conformance: workflow/job-inputs: of two results of one run the first is the output, also for a dispatcher that comes later
#[tokio::test(flavor = "multi_thread")]
async fn the_output_of_a_task_is_that_of_the_result_that_counts() {
    let jobs = memory().await;
    jobs.submit_job(job("j", vec![task("a", &[]), task("b", &["a"])]))
        .await
        .unwrap();
    publish(&jobs, &completes("a", &json!(1))).await;
    // A worker that lost its lease.
    publish(&jobs, &completes("a", &json!(2))).await;
    Dispatcher::subscribe(&jobs).await.unwrap();
    jobs.bus().start().await.unwrap();
    until("the child is started", async || {
        count::<Work>(&jobs).await == 1
    })
    .await;
    assert_eq!(inputs(&jobs).await["b"]["dependencyOutputs"]["a"], 1);
    jobs.bus().shutdown().await.unwrap();
}

// conformance: workflow/job-ids: parents that complete together start their child once, and their job completes once
#[tokio::test(flavor = "multi_thread")]
async fn parents_that_complete_together_start_their_child_once() {
    const PARENTS: usize = 30;
    let jobs = memory().await;
    let parents: Vec<String> = (0..PARENTS).map(|n| format!("p{n}")).collect();
    let names: Vec<&str> = parents.iter().map(String::as_str).collect();
    let mut tasks: Vec<_> = names.iter().map(|name| task(name, &[])).collect();
    tasks.push(task("child", &names));
    tasks.push(task("early", &names[..1]));
    jobs.submit_job(job("j", tasks)).await.unwrap();
    // All of them are in the log before the dispatcher looks at the first.
    for name in &names {
        publish(&jobs, &completes(name, &json!(name))).await;
    }
    let dispatcher = Dispatcher::subscribe(&jobs).await.unwrap();
    jobs.bus().start().await.unwrap();
    dispatched(&jobs).await;
    let mut started: Vec<String> = Vec::new();
    for record in events_of::<Work>(&jobs).await {
        started.push(record.event.json::<Work>().unwrap().request_id);
    }
    started.sort();
    assert_eq!(started, ["child", "early"]);
    let outputs = &inputs(&jobs).await["child"]["dependencyOutputs"];
    assert_eq!(outputs.as_object().unwrap().len(), PARENTS);
    assert_eq!(count::<JobCompleted>(&jobs).await, 0);
    let emitter = jobs.emitter(Origin::Worker);
    let ends = ["child", "early"].map(|name| {
        let end = completes(name, &json!(null));
        emitter.event_of_run(&end, Some("j"), 1)
    });
    jobs.bus().publish_batch(ends).await.unwrap();
    dispatched(&jobs).await;
    assert_eq!(count::<JobCompleted>(&jobs).await, 1);
    assert_eq!(count::<TaskPending>(&jobs).await, 2);
    drop(dispatcher);
    jobs.bus().shutdown().await.unwrap();
}

// conformance: workflow/job-ids: a job of another tenant with the same ids is another job
#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_two_tenants_with_the_same_ids_are_apart() {
    let jobs = memory().await;
    running(&jobs).await;
    let other = jobs.for_tenant("other");
    let tasks = || vec![task("a", &[]), task("b", &["a"])];
    jobs.submit_job(job("j", tasks())).await.unwrap();
    let mut more = tasks();
    more.push(task("c", &["b"]));
    other.submit_job(job("j", more)).await.unwrap();
    assert_eq!(ended(&jobs, "j").await.task_statuses.len(), 2);
    assert_eq!(ended(&other, "j").await.task_statuses.len(), 3);
    until("both ends are told", async || {
        count::<JobCompleted>(&jobs).await == 2
    })
    .await;
    assert_eq!(count::<TaskPending>(&jobs).await, 5);
    jobs.bus().shutdown().await.unwrap();
}

// conformance: workflow/job-branches: many failures at once are told by one event with all states
#[tokio::test(flavor = "multi_thread")]
async fn many_failures_are_told_together() {
    let jobs = memory().await;
    let tasks = (0..50).map(|n| task(&format!("t{n}"), &[])).collect();
    jobs.submit_job(job("j", tasks)).await.unwrap();
    for n in 0..50 {
        let failed = TaskFailed {
            request_id: format!("t{n}"),
            job_id: Some("j".into()),
            error: "Invalid API key".into(),
            error_category: everbus_jobs::events::ErrorCategory::Auth,
            retry_count: 1,
            source: everbus_jobs::events::FailureSource::Worker,
        };
        publish(&jobs, &failed).await;
    }
    Dispatcher::subscribe(&jobs).await.unwrap();
    jobs.bus().start().await.unwrap();
    dispatched(&jobs).await;
    let told = events_of::<JobFailureDetected>(&jobs).await;
    assert_eq!(told.len(), 1);
    let told: JobFailureDetected = told[0].event.json().unwrap();
    assert_eq!(told.failed_task_id, "t49");
    let failed = told.task_statuses.values();
    assert_eq!(
        failed.filter(|s| **s == Some(TaskState::Failed)).count(),
        50
    );
    jobs.bus().shutdown().await.unwrap();
}

// conformance: workflow/job-inputs: a task whose input is too large for an event fails, and its siblings start
#[tokio::test(flavor = "multi_thread")]
async fn a_task_whose_input_is_too_large_fails_alone() {
    let bus = everbus::Bus::builder()
        .max_payload(50_000)
        .open("memory:")
        .await
        .unwrap();
    let jobs = Jobs::new(bus).unwrap();
    running(&jobs).await;
    let parents: Vec<String> = (0..40).map(|n| format!("p{n}")).collect();
    let roots = parents.iter().map(|id| task(id, &[])).collect();
    jobs.submit_job(job("j", roots)).await.unwrap();
    let all: Vec<&str> = parents.iter().map(String::as_str).collect();
    let text = |bytes: usize| json!({ "text": "x".repeat(bytes) });
    let children = [
        vec![task_with("large", &all, &text(47_000))],
        // Its outputs become references.
        vec![task_with("fits", &all, &text(45_000)), task("small", &all)],
    ];
    for tasks in children {
        jobs.add_tasks("j", tasks, false).await.unwrap();
    }
    let status = ended(&jobs, "j").await;
    assert_eq!(status.state, JobState::Failed);
    assert_eq!(status.task_statuses["fits"], Some(TaskState::Completed));
    assert_eq!(status.task_statuses["small"], Some(TaskState::Completed));
    let large = jobs.task("large").await.unwrap().unwrap();
    assert_eq!(large.state, Some(TaskState::Failed));
    assert!(large.error.unwrap().contains("the limit is 50000"));
    jobs.bus().shutdown().await.unwrap();
}

// conformance: workflow/job-resume: a resume names the tasks that it cannot start yet, and the next one starts them
#[tokio::test(flavor = "multi_thread")]
async fn a_resume_names_the_tasks_that_wait_for_others() {
    let jobs = memory().await;
    let tasks = vec![
        task_with("a", &[], &json!({"fail": 1})),
        task("b", &["a"]),
        task("c", &["b"]),
    ];
    jobs.submit_job(job("j", tasks)).await.unwrap();
    assert!(jobs.cancel_task("b").await.unwrap());
    running(&jobs).await;
    assert_eq!(ended(&jobs, "j").await.state, JobState::Failed);
    let resumed = jobs.resume("j").await.unwrap();
    assert_eq!(
        (resumed.started, resumed.waiting),
        (vec!["a".to_owned()], vec!["b".to_owned()])
    );
    let status = ended(&jobs, "j").await;
    assert_eq!(status.task_statuses["a"], Some(TaskState::Completed));
    assert_eq!(status.state, JobState::Failed, "b was cancelled");
    let resumed = jobs.resume("j").await.unwrap();
    assert_eq!(
        (resumed.started, resumed.waiting),
        (vec!["b".to_owned()], vec![])
    );
    assert_eq!(ended(&jobs, "j").await.state, JobState::Completed);
    jobs.bus().shutdown().await.unwrap();
}
