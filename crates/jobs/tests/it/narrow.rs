//! Random jobs on a broker that offers only the required verbs, with a file beside it, through random faults: requests
//! and answers are lost, events are stored and delivered twice, and leases are lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use everbus::core::{Appended, BoxFuture, Broker, BrokerLayer, Clock, Engine};
use everbus::{
    Bus, BusOptions, Code, Error, Event, ManualClock, Result, RetryPolicy, SystemClock,
    TypedEvent as _,
};
use everbus_jobs::events::{
    ErrorCategory, JobCompleted, JobCreated, Json, TaskCompleted, TaskFailed, TaskPending,
    TaskState, TaskTimeout, Work,
};
use everbus_jobs::worker::DEAD_WORK;
use everbus_jobs::{
    DISPATCHER, Dispatcher, JobState, Jobs, NewTask, Task, TaskError, WORK, WORKERS, Worker,
};
use everbus_testkit::narrow::{self, Faults};

use crate::random_jobs::{model, random_job};
use crate::support::{events_of, is_settled, job, task, until};
use crate::worker::again::notice_of_missing_work;

/// How many jobs there are.
const JOBS: u64 = 12;
/// One call in this many has each kind of fault.
const ONE_IN: u64 = 24;

/// Counts the work messages that are appended, and loses answers on demand.
struct Works {
    inner: Arc<dyn Broker>,
    appended: Arc<AtomicU32>,
    loses_ends: Arc<AtomicBool>,
}

impl BrokerLayer for Works {
    fn inner(&self) -> &dyn Broker {
        &*self.inner
    }

    fn append(&self, batch: Vec<Event>) -> BoxFuture<'_, Result<Vec<Result<Appended>>>> {
        let works = batch.iter().filter(|event| event.event_type() == WORK);
        let works = u32::try_from(works.count()).unwrap();
        self.appended.fetch_add(works, Ordering::SeqCst);
        let ends = [TaskFailed::TYPE, TaskTimeout::TYPE];
        let has_end = batch.iter().any(|event| ends.contains(&event.event_type()));
        Box::pin(async move {
            let answers = self.inner.append(batch).await?;
            if has_end && self.loses_ends.load(Ordering::SeqCst) {
                let lost = Error::new(Code::Unavailable, "the answer is lost, on purpose");
                return Err(lost.with_unknown_outcome());
            }
            Ok(answers)
        })
    }
}

/// A bus on a narrow broker with a file beside it.
struct Stage {
    bus: Bus,
    jobs: Jobs,
    faults: Faults,
    /// How many work messages were appended.
    works: Arc<AtomicU32>,
    /// Whether the event that ends a task is stored, and the worker gets no answer.
    loses_ends: Arc<AtomicBool>,
    /// The broker without what is done to it here, and the store, for another process.
    plain: Engine,
    store: Bus,
    _directory: tempfile::TempDir,
}

async fn composed(broker: Engine, store: &Bus) -> (Bus, Jobs) {
    let engine = everbus::compose(broker, store.engine().clone(), Arc::new(SystemClock)).await;
    let bus = Bus::with_engine(engine.unwrap(), BusOptions::default()).unwrap();
    let jobs = Jobs::new(bus.clone()).unwrap();
    (bus, jobs)
}

impl Stage {
    async fn open(seed: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let faults = Faults::random(seed, 0);
        let mut broker = narrow::open(&clock, 3, faults.clone()).unwrap();
        let plain = broker.clone();
        let (works, loses_ends) = (Arc::default(), Arc::default());
        broker.broker = Arc::new(Works {
            inner: broker.broker.clone(),
            appended: Arc::clone(&works),
            loses_ends: Arc::clone(&loses_ends),
        });
        let file = format!("sqlite:{}", directory.path().join("store.db").display());
        let store = Bus::open(file).await.unwrap();
        let (bus, jobs) = composed(broker, &store).await;
        Self {
            bus,
            jobs,
            plain,
            store,
            faults,
            works,
            loses_ends,
            _directory: directory,
        }
    }

    /// With a dispatcher and a worker.
    async fn new(seed: u64) -> Self {
        let stage = Self::open(seed).await;
        let jobs = &stage.jobs;
        Dispatcher::subscribe(jobs).await.unwrap();
        let function = async |task: Task| {
            // Some functions wait, and some do not: their start and end are published in another way.
            if task.request_id.ends_with(['1', '3', '5']) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            if task.input.get().contains("true") {
                let error = "it was asked to";
                return Err(TaskError::new(ErrorCategory::Validation, error));
            }
            Ok(Json::empty())
        };
        Worker::new(jobs.clone())
            .any(function)
            .concurrency(4)
            .heartbeat(Duration::from_millis(500))
            .retry(RetryPolicy::default().max_retries(10_000))
            .mount()
            .await
            .unwrap();
        stage.bus.start().await.unwrap();
        stage
    }
}

// conformance: workflow/job-engines: on a broker without atomic steps, exact attempts and known ids, each random job ends as a model says, through random faults
#[tokio::test(flavor = "multi_thread")]
async fn jobs_on_a_narrow_broker_end_as_a_model_says() {
    let seed = match std::env::var("EVERBUS_SEED") {
        Ok(seed) => seed.parse().unwrap(),
        Err(_) => u64::try_from(SystemClock.now().as_micros()).unwrap(),
    };
    println!("EVERBUS_SEED={seed}");
    let stage = Stage::new(seed).await;
    let Stage {
        bus, jobs, faults, ..
    } = &stage;
    faults.set(ONE_IN);
    for n in 0..JOBS {
        let (id, tasks) = random_job(seed, n);
        // A producer repeats a request until it gets an answer.
        until("the job is submitted", async || {
            match jobs.submit_job(job(&id, tasks.clone())).await {
                Ok(_) => true,
                Err(error) if error.class().may_repeat() => false,
                Err(error) => panic!("seed {seed}: {error:?}"),
            }
        })
        .await;
    }
    let running = async || {
        let mut running = Vec::new();
        for n in 0..JOBS {
            let id = format!("job-{n}");
            match jobs.job(&id).await {
                Ok(status) if status.state != JobState::Running => {}
                status => running.push((id, status)),
            }
        }
        running
    };
    let begin = std::time::Instant::now();
    loop {
        let running = running().await;
        if running.is_empty() {
            break;
        }
        if begin.elapsed() > Duration::from_secs(20) {
            // From now on nothing fails, and every lease ends.
            faults.stop();
        }
        assert!(
            begin.elapsed() < Duration::from_secs(120),
            "seed {seed}: {running:#?}"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let tally = faults.tally();
    faults.stop();
    let mut completed = 0;
    let mut started = 0;
    let mut ended = 0;
    for n in 0..JOBS {
        let (id, tasks) = random_job(seed, n);
        let model = model(&tasks);
        let status = jobs.job(&id).await.unwrap();
        assert_eq!(status.task_statuses, model, "seed {seed}, {id}");
        started += model.values().flatten().count();
        let done = |state: &&Option<_>| **state == Some(TaskState::Completed);
        let done = model.values().filter(done).count();
        ended += done;
        completed += usize::from(done == model.len());
    }
    until("every end is told", async || {
        let lag = everbus::archive_lag(bus.engine()).await.unwrap();
        lag.is_none_or(|lag| lag.unsettled() == 0)
            && events_of::<JobCompleted>(jobs).await.len() == completed
    })
    .await;
    assert_eq!(
        events_of::<TaskPending>(jobs).await.len(),
        started,
        "seed {seed}"
    );
    assert_eq!(
        events_of::<TaskCompleted>(jobs).await.len(),
        ended,
        "seed {seed}"
    );
    println!("{JOBS} jobs, {tally:?}, {:?}", begin.elapsed());
    bus.shutdown().await.unwrap();
}

// conformance: workflow/job-adds: also where the broker does not recognise ids, concurrent adds are all kept, and a job that is submitted again is the same job or is refused
#[tokio::test(flavor = "multi_thread")]
async fn concurrent_adds_and_repeated_jobs_on_a_narrow_broker() {
    let stage = Stage::new(1).await;
    let jobs = &stage.jobs;
    let first = || vec![task("a", &[])];
    assert!(jobs.submit_job(job("j", first())).await.unwrap().new);
    assert!(!jobs.submit_job(job("j", first())).await.unwrap().new);
    let other = jobs.submit_job(job("j", vec![task("b", &[])])).await;
    assert_eq!(other.unwrap_err().code(), Code::TaskConflict);
    let adds = (0..6).map(|n| {
        let jobs = jobs.clone();
        async move {
            let tasks = vec![task(&format!("x{n}"), &["a"])];
            jobs.add_tasks("j", tasks, false).await.unwrap()
        }
    });
    let mut totals = futures_util::future::join_all(adds).await;
    totals.sort_unstable();
    assert_eq!(totals, [2, 3, 4, 5, 6, 7]);
    until("all seven have completed", async || {
        let status = jobs.job("j").await.unwrap();
        status.total_tasks == 7 && status.state == JobState::Completed
    })
    .await;
    assert_eq!(events_of::<TaskPending>(jobs).await.len(), 7);
    stage.bus.shutdown().await.unwrap();
}

// conformance: workflow/job-ids: where the broker forgets ids and counts no attempts, an event that a dispatcher gets again makes no second work
#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_event_makes_no_second_work_on_a_narrow_broker() {
    let stage = Stage::open(1).await;
    let Stage {
        bus, jobs, works, ..
    } = &stage;
    Dispatcher::subscribe(jobs).await.unwrap();
    bus.start().await.unwrap();
    let tasks = vec![task("a", &[]), task("b", &[])];
    jobs.submit_job(job("j", tasks)).await.unwrap();
    until("the store has the work", async || {
        events_of::<Work>(jobs).await.len() == 2
    })
    .await;
    assert_eq!(works.load(Ordering::SeqCst), 2);
    // The dispatcher was killed before its ack. Another one gets the event after a long time.
    let created = &events_of::<JobCreated>(jobs).await[0];
    let engine = bus.engine();
    let again = engine.broker.append(vec![created.event.clone()]).await;
    assert!(again.unwrap()[0].is_ok());
    until("the dispatcher has handled it", async || {
        is_settled(bus, DISPATCHER).await
    })
    .await;
    assert_eq!(works.load(Ordering::SeqCst), 2);
    bus.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_notice_of_missing_work_is_repeated_for_an_hour_beside_a_broker() {
    let stage = Stage::open(1).await;
    let clock = ManualClock::new("2026-11-17T20:00:00Z".parse().unwrap());
    let jobs = Jobs::builder().clock(clock.clone()).open(stage.bus.clone());
    let jobs = jobs.unwrap();
    let worker = Worker::new(jobs.clone()).any(async |_: Task| Ok::<_, TaskError>(()));
    worker.mount().await.unwrap();
    stage.bus.start().await.unwrap();
    notice_of_missing_work(&jobs).await;
    let group = DEAD_WORK.parse().unwrap();
    let failed = || {
        let groups = stage.bus.stats().groups;
        groups.get(&group).map_or(0, |group| group.retried)
    };
    until("it has failed", async || failed() > 0).await;
    assert!(!is_settled(&stage.bus, DEAD_WORK).await);
    clock.advance(Duration::from_secs(3601));
    until("it is given up", async || {
        is_settled(&stage.bus, DEAD_WORK).await
    })
    .await;
    stage.bus.shutdown().await.unwrap();
}

// conformance: workflow/task-endings: a dead letter of a task that is retried runs it again, also where the store gets its events in any order
#[tokio::test(flavor = "multi_thread")]
async fn a_retried_dead_letter_completes_its_task_on_a_narrow_broker() {
    let stage = Stage::open(1).await;
    let Stage { bus, jobs, .. } = &stage;
    let calls = Arc::new(AtomicU32::new(0));
    let count = calls.clone();
    let fails_once = move |_: Task| {
        let call = count.fetch_add(1, Ordering::SeqCst);
        async move {
            match call {
                0 => Err(TaskError::new(ErrorCategory::Network, "no answer")),
                _ => Ok(Json::empty()),
            }
        }
    };
    Worker::new(jobs.clone())
        .any(fails_once)
        .retry(RetryPolicy::default().max_retries(0))
        .mount()
        .await
        .unwrap();
    bus.start().await.unwrap();
    let task = NewTask::new("call", Json::empty()).id("req-1");
    jobs.submit(task).await.unwrap();
    let state = async || {
        jobs.task("req-1")
            .await
            .unwrap()
            .and_then(|task| task.state)
    };
    until("the task has failed", async || {
        let letters = bus.dead_letters().list().await.unwrap();
        state().await == Some(TaskState::Failed) && letters.len() == 1
    })
    .await;
    let all = everbus::DeadLetterFilter::default();
    bus.dead_letters().retry_all(all).await.unwrap();
    until("the task has completed", async || {
        state().await == Some(TaskState::Completed)
    })
    .await;
    assert_eq!(calls.load(Ordering::SeqCst), 2);
    bus.shutdown().await.unwrap();
}

// conformance: workflow/task-endings: a run that failed or timed out does not run again if its worker got no answer for the end, and the broker delivers the work to another process
#[tokio::test(flavor = "multi_thread")]
async fn a_run_whose_end_is_stored_does_not_run_again_on_a_narrow_broker() {
    for name in ["wrong", "slow"] {
        let stage = Stage::open(1).await;
        let Stage { bus, jobs, .. } = &stage;
        let calls = Arc::new(AtomicU32::new(0));
        let worker = |jobs: &Jobs| {
            let count = calls.clone();
            let ends = move |task: Task| {
                count.fetch_add(1, Ordering::SeqCst);
                async move {
                    if task.name == "slow" {
                        std::future::pending::<()>().await;
                    }
                    let error = "it was asked to";
                    Err::<(), _>(TaskError::new(ErrorCategory::Validation, error))
                }
            };
            let worker = Worker::new(jobs.clone()).any(ends).concurrency(1);
            worker.timeout(Duration::from_millis(50))
        };
        worker(jobs).mount().await.unwrap();
        bus.start().await.unwrap();
        stage.loses_ends.store(true, Ordering::SeqCst);
        let task = NewTask::new(name, Json::empty()).id("req-1");
        jobs.submit(task).await.unwrap();
        until("the store has the end", async || {
            let task = jobs.task("req-1").await.unwrap();
            task.is_some_and(|task| task.state == Some(TaskState::Failed))
        })
        .await;
        // The first worker still waits for the answer, and takes nothing else.
        let (other, other_jobs) = composed(stage.plain.clone(), &stage.store).await;
        worker(&other_jobs).mount().await.unwrap();
        other.start().await.unwrap();
        let work = events_of::<Work>(jobs).await[0].event.clone();
        let again = other.engine().broker.append(vec![work]).await;
        assert!(again.unwrap()[0].is_ok());
        let group = WORKERS.parse().unwrap();
        until("the second delivery is settled", async || {
            let groups = other.stats().groups;
            groups
                .get(&group)
                .is_some_and(|group| group.skipped.handler + group.handled > 0)
        })
        .await;
        assert_eq!(calls.load(Ordering::SeqCst), 1, "{name}");
        stage.loses_ends.store(false, Ordering::SeqCst);
        until("everything is settled", async || {
            is_settled(bus, WORKERS).await
        })
        .await;
        let ends =
            events_of::<TaskFailed>(jobs).await.len() + events_of::<TaskTimeout>(jobs).await.len();
        assert_eq!((calls.load(Ordering::SeqCst), ends), (1, 1), "{name}");
        assert!(bus.dead_letters().list().await.unwrap().is_empty());
        other.shutdown().await.unwrap();
        bus.shutdown().await.unwrap();
    }
}
