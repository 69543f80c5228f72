//! An engine that stores events one by one: no task is left with `Task Pending` and without its work.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use everbus::core::{
    Appended, BoxFuture, Broker, BrokerLayer, Capabilities, ConsumeOptions, Consumer,
};
use everbus::{
    Bus, Clock as _, Code, Error, Event, GroupName, ManualClock, Result, TypedEvent as _,
};
use everbus_jobs::events::{
    ErrorCategory, FailureSource, JobFailureDetected, Json, TaskFailed, TaskPending, Work,
};
use everbus_jobs::schedule::{Action, Missed, Scheduler, Schedules, StoredSchedule};
use everbus_jobs::{DISPATCHER, Dispatcher, Jobs, NewTask, Origin};
use serde_json::json;

use crate::support::{events_of, job, task, until};

/// Refuses the work of tasks, and stores what comes with it. Attempts are not counted.
struct Split {
    inner: Arc<dyn Broker>,
    refuses: Arc<AtomicBool>,
    /// The lease of each group that consumes.
    leases: Arc<Mutex<HashMap<String, Duration>>>,
}

impl BrokerLayer for Split {
    fn inner(&self) -> &dyn Broker {
        &*self.inner
    }

    fn capabilities(&self) -> Capabilities {
        let offers = self.inner.capabilities();
        offers.atomic_batch(false).exact_attempts(false)
    }

    fn append(&self, batch: Vec<Event>) -> BoxFuture<'_, Result<Vec<Result<Appended>>>> {
        Box::pin(async move {
            let mut answers = Vec::new();
            for event in batch {
                if event.event_type() == Work::TYPE && self.refuses.load(Ordering::SeqCst) {
                    answers.push(Err(Error::new(Code::Unavailable, "as planned")));
                } else {
                    answers.append(&mut self.inner.append(vec![event]).await?);
                }
            }
            Ok(answers)
        })
    }

    fn consume(
        &self,
        group: GroupName,
        options: ConsumeOptions,
    ) -> BoxFuture<'_, Result<Box<dyn Consumer>>> {
        let mut leases = self.leases.lock().unwrap();
        leases.insert(group.to_string(), options.lease);
        self.inner.consume(group, options)
    }
}

/// A bus on a [`Split`] broker.
struct Halves {
    jobs: Jobs,
    refuses: Arc<AtomicBool>,
    leases: Arc<Mutex<HashMap<String, Duration>>>,
}

async fn split() -> Halves {
    split_at(everbus::SystemClock).await
}

async fn split_at(clock: impl everbus::Clock + Clone) -> Halves {
    let bus = Bus::builder().clock(clock.clone()).open("memory:");
    let bus = bus.await.unwrap();
    let mut engine = bus.engine().clone();
    let refuses = Arc::new(AtomicBool::new(true));
    let leases = Arc::default();
    engine.broker = Arc::new(Split {
        inner: engine.broker.clone(),
        refuses: refuses.clone(),
        leases: Arc::clone(&leases),
    });
    let bus = Bus::builder().clock(clock.clone()).with_engine(engine);
    let jobs = Jobs::builder().clock(clock).open(bus.unwrap()).unwrap();
    Halves {
        jobs,
        refuses,
        leases,
    }
}

fn failed(id: &str, job: Option<&str>) -> TaskFailed {
    TaskFailed {
        request_id: id.to_owned(),
        job_id: job.map(str::to_owned),
        error: "no store".to_owned(),
        error_category: ErrorCategory::Validation,
        retry_count: 1,
        source: FailureSource::Worker,
    }
}

// conformance: workflow/task-work: a task whose work was not stored is stored as a whole when it is submitted or retried again
#[tokio::test]
async fn a_request_that_failed_half_way_is_finished_by_the_next_one() {
    let Halves { jobs, refuses, .. } = split().await;
    let task = || NewTask::new("scrape", Json::of(&json!({"n": 1})).unwrap()).id("req-1");
    assert!(jobs.submit(task()).await.is_err());
    assert_eq!(events_of::<TaskPending>(&jobs).await.len(), 1);
    refuses.store(false, Ordering::SeqCst);
    assert!(jobs.submit(task()).await.unwrap().new);
    assert_eq!(events_of::<Work>(&jobs).await.len(), 1);
    assert!(!jobs.submit(task()).await.unwrap().new);
    assert_eq!(events_of::<Work>(&jobs).await.len(), 1);

    let emitter = jobs.emitter(Origin::Worker);
    let event = emitter.event_of_run(&failed("req-1", None), None, 1);
    jobs.bus().publish(event).await.unwrap();
    refuses.store(true, Ordering::SeqCst);
    assert!(jobs.retry("req-1", false).await.is_err());
    refuses.store(false, Ordering::SeqCst);
    assert_eq!(jobs.retry("req-1", false).await.unwrap(), 2);
    assert_eq!(events_of::<Work>(&jobs).await.len(), 2);
    assert_eq!(events_of::<TaskPending>(&jobs).await.len(), 2);
    assert_eq!(
        jobs.retry("req-1", false).await.unwrap_err().code(),
        Code::TaskConflict
    );
}

// conformance: workflow/job-ids: a dispatcher that failed between Task Pending and the work stores the work with its next attempt
#[tokio::test(flavor = "multi_thread")]
async fn a_dispatcher_that_failed_half_way_goes_on_there() {
    const ROOTS: usize = 130;
    let Halves { jobs, refuses, .. } = split().await;
    Dispatcher::subscribe(&jobs).await.unwrap();
    jobs.bus().start().await.unwrap();
    let tasks = (0..ROOTS).map(|n| task(&format!("t{n}"), &[])).collect();
    jobs.submit_job(job("wide", tasks)).await.unwrap();
    until("the first step was made", async || {
        events_of::<TaskPending>(&jobs).await.len() == ROOTS
    })
    .await;
    // Another event makes the dispatcher read what it stored.
    let emitter = jobs.emitter(Origin::Worker);
    let event = emitter.event_of_run(&failed("t0", Some("wide")), Some("wide"), 1);
    jobs.bus().publish(event).await.unwrap();
    until("the failure is told", async || {
        events_of::<JobFailureDetected>(&jobs).await.len() == 1
    })
    .await;
    assert!(events_of::<Work>(&jobs).await.is_empty());
    refuses.store(false, Ordering::SeqCst);
    until("the others have their work", async || {
        events_of::<Work>(&jobs).await.len() == ROOTS - 1
    })
    .await;
    assert_eq!(events_of::<TaskPending>(&jobs).await.len(), ROOTS);
    jobs.bus().shutdown().await.unwrap();
}

// conformance: workflow/job-ids: a dispatcher that finds Task Pending without its work stores the work, also where the broker calls each delivery the first attempt; it asks for a lease of at most 30 seconds
#[tokio::test(flavor = "multi_thread")]
async fn a_task_pending_without_its_work_gets_it() {
    let Halves {
        jobs,
        refuses,
        leases,
    } = split().await;
    refuses.store(false, Ordering::SeqCst);
    let tasks = vec![task("a", &[]), task("b", &[]), task("c", &["a"])];
    jobs.submit_job(job("j", tasks)).await.unwrap();
    // A killed dispatcher leaves this, and nothing else.
    let pending = TaskPending {
        request_id: "a".to_owned(),
        job_id: Some("j".to_owned()),
        name: "work-a".to_owned(),
        depends_on: Some(Vec::new()),
    };
    let emitter = jobs.emitter(Origin::Dispatcher);
    let event = emitter.event_of_run(&pending, Some("j"), 1);
    jobs.bus().publish(event).await.unwrap();
    Dispatcher::subscribe(&jobs).await.unwrap();
    jobs.bus().start().await.unwrap();
    until("both roots have their work", async || {
        events_of::<Work>(&jobs).await.len() == 2
    })
    .await;
    // A broker gives the events of a killed dispatcher to another one after its lease.
    let lease = leases.lock().unwrap()[DISPATCHER];
    assert!(lease <= Duration::from_secs(30), "{lease:?}");
    jobs.bus().shutdown().await.unwrap();
}

// conformance: framework/schedule-failures: a task whose work was not stored gets it with the next tick, so that the schedule goes on
#[tokio::test]
async fn a_schedule_that_failed_half_way_goes_on() {
    let minute = Duration::from_secs(60);
    let clock = ManualClock::new("2026-11-17T20:00:30Z".parse().unwrap());
    let Halves { jobs, refuses, .. } = split_at(clock.clone()).await;
    let schedule = StoredSchedule {
        name: "report".to_owned(),
        cron: "* * * * *".to_owned(),
        timezone: "UTC".to_owned(),
        action: Action::Task {
            name: "report".to_owned(),
            input: Json::of(&json!({"n": 1})).unwrap(),
        },
        timeout_ms: None,
        missed: Missed::Skip,
        paused: false,
        tenant: None,
        since: clock.now(),
    };
    let schedules = Schedules::of(jobs.bus()).unwrap();
    schedules.put(&schedule).await.unwrap();
    let mut scheduler = Scheduler::new(jobs.clone()).stored().unwrap();
    clock.advance(minute);
    scheduler.look().await.unwrap();
    scheduler.settled().await;
    assert_eq!(events_of::<TaskPending>(&jobs).await.len(), 1);
    assert!(events_of::<Work>(&jobs).await.is_empty());
    refuses.store(false, Ordering::SeqCst);
    clock.advance(minute);
    scheduler.look().await.unwrap();
    scheduler.settled().await;
    let works = events_of::<Work>(&jobs).await;
    assert_eq!(works.len(), 1, "the task has its work now");
    let work: Work = works[0].event.json().unwrap();
    let pending: TaskPending = events_of::<TaskPending>(&jobs).await[0]
        .event
        .json()
        .unwrap();
    assert_eq!(work.request_id, pending.request_id);
    // It has not ended: the next tick submits no other one.
    clock.advance(minute);
    scheduler.look().await.unwrap();
    scheduler.settled().await;
    assert_eq!(events_of::<Work>(&jobs).await.len(), 1);
}
