//! The state of tasks and jobs, and the index that lists them.

use std::sync::Arc;
use std::time::Duration;

use everbus::{Bus, Event, ManualClock, Recorded, Timestamp};
use everbus_jobs::events::{Json, TaskCompleted, TaskStarted, TaskState, TaskTimeout};
use everbus_jobs::state::{Note, TaskStatus};
use everbus_jobs::{DEFAULT_TENANT, Index, Jobs, NewTask, Origin, TaskFilter};
use serde_json::{Value, json};

use crate::support::{File, ended, job, memory, running, task, task_with, until};

// conformance: workflow/state-derived: an index that was thrown away is built again from the events, and is the same
// conformance: workflow/state-current: the tasks that are in a state now, each by its latest event
#[tokio::test(flavor = "multi_thread")]
async fn the_index_can_be_thrown_away() {
    let file = File::new();
    let jobs = file.open().await;
    running(&jobs).await;
    jobs.submit_job(job(
        "j",
        vec![
            task("a", &[]),
            task_with("b", &["a"], &json!({"fail": 1})),
            task("c", &["b"]),
        ],
    ))
    .await
    .unwrap();
    ended(&jobs, "j").await;
    jobs.resume("j").await.unwrap();
    ended(&jobs, "j").await;
    let later = jobs.now().plus(Duration::from_secs(3600));
    let waiting = NewTask::new("x", Json::empty()).id("waiting");
    jobs.submit(NewTask {
        at: Some(later),
        ..waiting
    })
    .await
    .unwrap();
    // A task that timed out, by another sender without run numbers.
    jobs.submit(NewTask {
        at: Some(later),
        ..NewTask::new("x", Json::empty()).id("slow")
    })
    .await
    .unwrap();
    let timeout: TaskTimeout = serde_json::from_value(json!({
        "requestId": "slow", "timeoutMs": 5, "elapsedMs": 6, "signal": "SIGKILL"
    }))
    .unwrap();
    jobs.bus()
        .publish(jobs.emitter(Origin::Worker).event(&timeout))
        .await
        .unwrap();
    let listed = async |jobs: &Jobs, state| {
        let filter = TaskFilter {
            state: Some(state),
            ..TaskFilter::default()
        };
        let tasks = jobs.tasks(&filter).await.unwrap();
        let mut ids: Vec<String> = tasks.into_iter().map(|task| task.request_id).collect();
        ids.sort();
        ids
    };
    assert_eq!(listed(&jobs, TaskState::Pending).await, ["waiting"]);
    assert_eq!(listed(&jobs, TaskState::Failed).await, ["slow"]);
    assert_eq!(listed(&jobs, TaskState::Completed).await, ["a", "b", "c"]);
    jobs.bus().shutdown().await.unwrap();

    let path = file.dir.path().join("index.db");
    let build = async || {
        let url = format!("sqlite:{}", file.dir.path().join("events.db").display());
        let bus = Bus::open(url).await.unwrap();
        let jobs = Jobs::builder().index(&path).open(bus).unwrap();
        jobs.task_counts().await.unwrap();
        let dump = jobs.index().dump().unwrap();
        jobs.bus().shutdown().await.unwrap();
        dump
    };
    let first = build().await;
    assert!(first.len() >= 6, "{first:#?}");
    assert_eq!(build().await, first, "opened again");
    std::fs::remove_file(&path).unwrap();
    assert_eq!(build().await, first, "built again");
    let mut damaged = std::fs::read(&path).unwrap();
    damaged[100..].fill(b'x');
    std::fs::write(&path, damaged).unwrap();
    assert_eq!(build().await, first, "a damaged file is replaced");
    assert_eq!(
        jobs.index().dump().unwrap(),
        first,
        "built while the events came"
    );
}

#[tokio::test]
async fn an_index_of_another_log_is_built_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("index.db");
    for id in ["first", "second"] {
        let bus = Bus::open("memory:").await.unwrap();
        let jobs = Jobs::builder().index(&path).open(bus).unwrap();
        jobs.submit(NewTask::new("x", Json::empty()).id(id))
            .await
            .unwrap();
        let tasks = jobs.tasks(&TaskFilter::default()).await.unwrap();
        let ids: Vec<&str> = tasks.iter().map(|task| task.request_id.as_str()).collect();
        assert_eq!(ids, [id]);
    }
}

// conformance: workflow/query-tenant: tasks of another tenant are not seen
#[tokio::test]
async fn tenants_do_not_see_each_other() {
    let jobs = memory().await;
    let other = Jobs::builder()
        .tenant("other")
        .open(jobs.bus().clone())
        .unwrap();
    jobs.submit(NewTask::new("x", Json::empty()).id("same"))
        .await
        .unwrap();
    assert!(other.task("same").await.unwrap().is_none());
    assert!(
        other
            .tasks(&TaskFilter::default())
            .await
            .unwrap()
            .is_empty()
    );
    assert!(other.task_history("same").await.unwrap().is_empty());
    other
        .submit(NewTask::new("y", Json::empty()).id("same"))
        .await
        .unwrap();
    assert_eq!(jobs.task("same").await.unwrap().unwrap().name, "x");
    assert_eq!(other.task("same").await.unwrap().unwrap().name, "y");
}

// conformance: workflow/state-job: the graph of a job and the states of its tasks, now and at past moments
#[tokio::test(flavor = "multi_thread")]
async fn the_graph_of_a_job_at_a_past_moment() {
    let clock = ManualClock::new(Timestamp::from_micros(1_800_000_000_000_000));
    let bus = Bus::builder()
        .clock(clock.clone())
        .open("memory:")
        .await
        .unwrap();
    let jobs = Jobs::builder().clock(clock.clone()).open(bus).unwrap();
    let before = jobs.now();
    clock.advance(Duration::from_secs(10));
    jobs.submit_job(job("j", vec![task("a", &[]), task("b", &["a"])]))
        .await
        .unwrap();
    let submitted = jobs.now();
    clock.advance(Duration::from_secs(10));
    running(&jobs).await;
    ended(&jobs, "j").await;
    let completed = jobs.now();
    clock.advance(Duration::from_secs(10));
    jobs.add_tasks("j", vec![task("c", &["b"])], false)
        .await
        .unwrap();
    until("the third has completed", async || {
        jobs.task("c")
            .await
            .unwrap()
            .is_some_and(|t| t.state == Some(TaskState::Completed))
    })
    .await;
    let at = async |time| jobs.job_graph("j", time).await;
    assert_eq!(
        at(Some(before)).await.unwrap_err().code(),
        everbus::Code::NotFound
    );
    assert_eq!(at(Some(submitted)).await.unwrap().states, [None, None]);
    let done = Some(TaskState::Completed);
    assert_eq!(at(Some(completed)).await.unwrap().states, [done, done]);
    assert_eq!(at(None).await.unwrap().states, [done, done, done]);
    jobs.bus().shutdown().await.unwrap();
}

// conformance: workflow/state-job: the graph at every past moment has the states that the histories of the tasks have
#[tokio::test(flavor = "multi_thread")]
async fn the_graph_at_every_moment_agrees_with_the_histories() {
    let jobs = memory().await;
    let bus = jobs.bus().clone();
    jobs.submit_job(job(
        "j",
        vec![task("a", &[]), task("b", &["a"]), task("c", &[])],
    ))
    .await
    .unwrap();
    // An event of another job about a task with the same id does not count.
    let foreign = Event::builder("Task Failed").tenant(DEFAULT_TENANT).entity("TASK", "b").json(&json!({
        "requestId": "b", "jobId": "another", "error": "e", "errorCategory": "auth", "retryCount": 0, "source": "worker",
    }));
    bus.publish(foreign.build().unwrap()).await.unwrap();
    running(&jobs).await;
    ended(&jobs, "j").await;
    jobs.retry("c", true).await.unwrap();
    jobs.cancel_task("c").await.unwrap();
    let mut events = Vec::new();
    for id in ["a", "b", "c"] {
        events.extend(jobs.task_history(id).await.unwrap());
    }
    let mut moments: Vec<Timestamp> = events.iter().map(|e| e.received_at).collect();
    moments.sort_unstable();
    moments.dedup();
    let mut seen = Vec::new();
    for at in moments {
        let states = jobs.job_graph("j", Some(at)).await.unwrap().states;
        let mut expected = Vec::new();
        for id in ["a", "b", "c"] {
            let of_job = |e: &&Arc<Recorded>| {
                let payload: Value = e.event.json().unwrap();
                e.received_at <= at && payload["requestId"] == id && payload["jobId"] != "another"
            };
            let mut status = TaskStatus::default();
            for event in events.iter().filter(of_job) {
                if let Some(note) = Note::of(event) {
                    status.apply(&note);
                }
            }
            expected.push(status.state);
        }
        assert_eq!(states, expected, "at {at}");
        seen.push(states);
    }
    assert!(seen.iter().any(|states| states[0] != states[1]));
    bus.shutdown().await.unwrap();
}

#[test]
fn an_index_file_that_cannot_be_made_says_so() {
    let error = Index::open("/proc/nothing/index.db").unwrap_err();
    assert!(error.hint_text().is_some(), "{error:?}");
}

#[test]
fn a_file_of_another_program_is_refused_and_stays_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("app.db");
    let conn = everbus::rusqlite::Connection::open(&path).unwrap();
    for version in [0, 1, 7] {
        let sql = format!(
            "CREATE TABLE IF NOT EXISTS jobs (id TEXT); INSERT INTO jobs VALUES ('precious'); PRAGMA user_version = {version};"
        );
        conn.execute_batch(&sql).unwrap();
        let error = Index::open(&path).unwrap_err();
        assert_eq!(error.code(), everbus::Code::InvalidSetting, "{error}");
    }
    let rows: i64 = conn
        .query_row("SELECT count(*) FROM jobs", [], |row| row.get(0))
        .unwrap();
    assert_eq!(rows, 3);

    let notes = dir.path().join("notes.txt");
    let text = "not a database, and longer than the header of one would be. ".repeat(50);
    std::fs::write(&notes, &text).unwrap();
    assert_eq!(
        Index::open(&notes).unwrap_err().code(),
        everbus::Code::Corrupt
    );
    assert_eq!(std::fs::read_to_string(&notes).unwrap(), text);
}

// conformance: workflow/state-machine: a start of an earlier attempt that is stored late does not reopen its run
#[tokio::test]
async fn a_start_that_comes_late_does_not_reopen_a_finished_run() {
    let jobs = memory().await;
    jobs.submit(NewTask::new("x", Json::empty()).id("req-1"))
        .await
        .unwrap();
    let emitter = jobs.emitter(Origin::Worker);
    let started = |worker: &str| TaskStarted {
        request_id: "req-1".into(),
        job_id: None,
        effective_until: crate::support::seconds(&jobs) + 60,
        worker_id: worker.into(),
        process_id: 7,
    };
    let start = async |worker: &str, attempt: Option<u32>| {
        let mut event = emitter.event_of_run(&started(worker), None, 1);
        if let Some(attempt) = attempt {
            event = event.meta("attempt", attempt.to_string());
        }
        jobs.bus().publish(event).await.unwrap();
    };
    let seen = async || {
        let (folded, listed) = (jobs.task("req-1").await, jobs.task_status("req-1").await);
        let (folded, listed) = (folded.unwrap().unwrap(), listed.unwrap());
        assert_eq!(folded.state, listed.state);
        assert_eq!(folded.worker_id, listed.worker_id);
        (folded.state.unwrap(), folded.worker_id.unwrap())
    };
    // The worker of the first attempt stands still before its start is stored; the second one runs.
    start("second", Some(2)).await;
    start("first", Some(1)).await;
    assert_eq!(seen().await, (TaskState::Processing, "second".into()));
    let completed = TaskCompleted {
        request_id: "req-1".into(),
        job_id: None,
        output: Json::empty(),
        duration_ms: 1,
        exit_code: 0,
        usage: None,
    };
    let event = emitter.event_of_run(&completed, None, 1);
    jobs.bus().publish(event).await.unwrap();
    // A later attempt does not count either: the ack of the end was lost. Its own end has the same id, so no other event
    // would end the run again.
    for attempt in [1, 2, 3] {
        start("first", Some(attempt)).await;
        assert_eq!(seen().await, (TaskState::Completed, "second".into()));
    }
    // A start that a person asked for opens the run again.
    start("asked", None).await;
    assert_eq!(seen().await, (TaskState::Processing, "asked".into()));
}
