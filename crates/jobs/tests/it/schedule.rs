//! Schedules: each tick once, whatever the number of processes; no overlap, one attempt, missed ticks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use everbus::{Bus, Clock as _, Code, HistoryQuery, ManualClock, Order, Timestamp};
use everbus_jobs::Jobs;
use everbus_jobs::events::Json;
use everbus_jobs::schedule::{
    Action, CHANGED_TYPE, CronTimes, Missed, RUN_TYPE, Scheduler, Schedules, StoredSchedule, Tick,
};
use parking_lot::Mutex;
use serde_json::Value;

const MINUTE: Duration = Duration::from_secs(60);

struct Stage {
    bus: Bus,
    jobs: Jobs,
    clock: ManualClock,
}

impl Stage {
    async fn new() -> Self {
        let clock = ManualClock::new("2026-11-17T20:00:30Z".parse().unwrap());
        let bus = Bus::builder()
            .clock(clock.clone())
            .open("memory:")
            .await
            .unwrap();
        let jobs = Jobs::builder()
            .clock(clock.clone())
            .open(bus.clone())
            .unwrap();
        Self { bus, jobs, clock }
    }

    /// Another process on the same store.
    fn process(&self, name: &str) -> Scheduler {
        Scheduler::new(self.jobs.clone()).owner(name)
    }

    async fn events(&self, event_type: &str) -> Vec<Value> {
        let query = HistoryQuery::default()
            .types(event_type.parse().unwrap())
            .order(Order::Oldest);
        let page = self.bus.history().unwrap().query(query).await.unwrap();
        page.items.iter().map(|r| r.event.json().unwrap()).collect()
    }

    fn stored(&self, name: &str, action: Action) -> StoredSchedule {
        StoredSchedule {
            name: name.to_owned(),
            cron: "* * * * *".to_owned(),
            timezone: "UTC".to_owned(),
            action,
            timeout_ms: None,
            missed: Missed::Skip,
            paused: false,
            tenant: None,
            since: self.clock.now(),
        }
    }
}

fn every_minute() -> CronTimes {
    CronTimes::new("* * * * *", "UTC").unwrap()
}

/// Looks for due ticks and waits for their ends.
async fn look(scheduler: &mut Scheduler) {
    scheduler.look().await.unwrap();
    scheduler.settled().await;
}

type Seen = Arc<Mutex<Vec<Timestamp>>>;

fn noting(scheduler: Scheduler, seen: &Seen) -> Scheduler {
    let seen = seen.clone();
    scheduler.on("report", every_minute(), move |tick: Tick| {
        seen.lock().push(tick.at);
        async { Ok(()) }
    })
}

// conformance: framework/schedule-lease: of several processes one runs each tick
#[tokio::test]
async fn each_tick_runs_in_one_of_several_processes() {
    let stage = Stage::new().await;
    let seen = Seen::default();
    let mut processes: Vec<Scheduler> = (0..4)
        .map(|n| noting(stage.process(&format!("process {n}")), &seen))
        .collect();
    for _ in 0..5 {
        // Nothing is due twice.
        for _ in 0..2 {
            let looks = processes.iter_mut().map(look);
            futures_util::future::join_all(looks).await;
        }
        stage.clock.advance(MINUTE);
    }
    let ticks = seen.lock().clone();
    let expected: Vec<Timestamp> = (1..5)
        .map(|n| format!("2026-11-17T20:0{n}:00Z").parse().unwrap())
        .collect();
    assert_eq!(ticks, expected);
    let ran = stage.events(RUN_TYPE).await;
    assert_eq!(ran.len(), 4);
    assert!(
        ran.iter()
            .all(|run| run["schedule"] == "report" && run.get("error").is_none())
    );
}

// conformance: framework/schedule-failures: one attempt for each tick, not retried, and the next run goes ahead
#[tokio::test]
async fn a_failure_is_recorded_and_the_next_tick_comes() {
    let stage = Stage::new().await;
    let runs = Arc::new(AtomicU32::new(0));
    let count = runs.clone();
    let mut scheduler = stage.process("a").on("report", every_minute(), move |_| {
        let run = count.fetch_add(1, Ordering::SeqCst);
        async move {
            if run == 0 {
                Err("no luck".to_owned())
            } else {
                Ok(())
            }
        }
    });
    stage.clock.advance(MINUTE);
    look(&mut scheduler).await;
    look(&mut scheduler).await;
    let mut other = stage
        .process("b")
        .on("report", every_minute(), async |_| Ok(()));
    look(&mut other).await;
    assert_eq!(runs.load(Ordering::SeqCst), 1);
    assert_eq!(stage.events(RUN_TYPE).await[0]["error"], "no luck");
    stage.clock.advance(MINUTE);
    look(&mut scheduler).await;
    assert_eq!(runs.load(Ordering::SeqCst), 2);
}

// conformance: framework/schedule-cron: a run that has not ended holds the next tick back; it ends by its timeout
#[tokio::test(start_paused = true)]
async fn runs_do_not_overlap() {
    let stage = Stage::new().await;
    let running = Arc::new(AtomicU32::new(0));
    let count = running.clone();
    let stuck = move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        std::future::pending::<Result<(), String>>()
    };
    let mut first = stage
        .process("a")
        .on("report", every_minute(), stuck.clone());
    let mut second = stage.process("b").on("report", every_minute(), stuck);
    stage.clock.advance(MINUTE);
    first.look().await.unwrap();
    // Its run begins.
    tokio::task::yield_now().await;
    assert_eq!(running.load(Ordering::SeqCst), 1);
    // 54 s for the run and 10 for its end have not passed.
    stage.clock.advance(MINUTE);
    first.look().await.unwrap();
    second.look().await.unwrap();
    tokio::task::yield_now().await;
    assert_eq!(running.load(Ordering::SeqCst), 1);
    // The timeout of the run is real time, which is virtual here.
    first.settled().await;
    let ran = stage.events(RUN_TYPE).await;
    assert!(ran[0]["error"].as_str().unwrap().contains("54s"), "{ran:?}");
    second.look().await.unwrap();
    tokio::task::yield_now().await;
    assert_eq!(running.load(Ordering::SeqCst), 2);
}

// conformance: framework/schedule-cron: ticks that no process was there for are skipped or made up for by the next process
#[tokio::test]
async fn missed_ticks_are_skipped_or_made_up_for() {
    for (missed, expected) in [
        (Missed::Skip, vec!["20:01"]),
        (Missed::Once, vec!["20:01", "20:04"]),
        (Missed::All, vec!["20:01", "20:02", "20:03", "20:04"]),
    ] {
        let stage = Stage::new().await;
        let seen = Seen::default();
        let process = |name: &str| {
            let times = CronTimes::new("* 20 * * *", "UTC").unwrap();
            let notes = seen.clone();
            let scheduler = stage.process(name).on("report", times, move |tick: Tick| {
                notes.lock().push(tick.at);
                async { Ok(()) }
            });
            scheduler.with(None, missed)
        };
        let mut first = process("a");
        stage.clock.set("2026-11-17T20:01:00Z".parse().unwrap());
        look(&mut first).await;
        drop(first);
        // No process was there for three minutes.
        stage.clock.set("2026-11-17T20:04:00Z".parse().unwrap());
        stage.clock.advance(if missed == Missed::Skip {
            61 * MINUTE
        } else {
            MINUTE / 2
        });
        let mut second = process("b");
        look(&mut second).await;
        look(&mut second).await;
        let ticks: Vec<String> = seen
            .lock()
            .iter()
            .map(|t| t.to_string()[11..16].to_owned())
            .collect();
        assert_eq!(ticks, expected, "{missed:?}");
    }
}

// conformance: framework/schedule-cron: a schedule that makes up for missed ticks does not hold up the others
#[tokio::test(start_paused = true)]
async fn making_up_for_missed_ticks_holds_up_nothing_else() {
    let stage = Stage::new().await;
    let others = Seen::default();
    let running = Arc::new(AtomicU32::new(0));
    let count = running.clone();
    let slow = move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        std::future::pending::<Result<(), String>>()
    };
    let mut scheduler = stage.process("a").on("slow", every_minute(), slow);
    scheduler = noting(scheduler.with(None, Missed::All), &others);
    stage.clock.advance(3 * MINUTE);
    let begin = tokio::time::Instant::now();
    scheduler.look().await.unwrap();
    scheduler.look().await.unwrap();
    tokio::task::yield_now().await;
    assert_eq!(
        tokio::time::Instant::now(),
        begin,
        "no look waits for a run"
    );
    assert_eq!(running.load(Ordering::SeqCst), 1);
    assert_eq!(others.lock().len(), 1);
    // Each ends by its timeout, one after another.
    scheduler.settled().await;
    assert_eq!(running.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn a_stored_schedule_publishes_its_event_once() {
    let stage = Stage::new().await;
    let schedules = Schedules::of(&stage.bus).unwrap();
    let action = Action::Event {
        event_type: "report.due".to_owned(),
        payload: Json::parse(r#"{"kind":"daily"}"#).unwrap(),
    };
    assert!(schedules.put(&stage.stored("daily", action)).await.unwrap());
    let mut processes = [
        stage.process("a").stored().unwrap(),
        stage.process("b").stored().unwrap(),
    ];
    stage.clock.advance(MINUTE);
    let [a, b] = &mut processes;
    tokio::join!(look(a), look(b));
    assert_eq!(
        stage.events("report.due").await,
        [serde_json::json!({"kind": "daily"})]
    );
    let mut paused = schedules.get("daily").await.unwrap().unwrap();
    paused.paused = true;
    assert!(!schedules.put(&paused).await.unwrap());
    stage.clock.advance(MINUTE);
    look(&mut processes[0]).await;
    assert_eq!(stage.events("report.due").await.len(), 1);
    assert!(schedules.remove("daily").await.unwrap());
    assert!(!schedules.remove("daily").await.unwrap());
    assert!(schedules.list().await.unwrap().is_empty());
    let changes = stage.events(CHANGED_TYPE).await;
    let changes: Vec<&str> = changes
        .iter()
        .map(|c| c["change"].as_str().unwrap())
        .collect();
    assert_eq!(changes, ["added", "changed", "removed"]);
}

#[tokio::test]
async fn a_scheduled_task_has_one_attempt_and_waits_for_the_one_before() {
    let stage = Stage::new().await;
    let schedules = Schedules::of(&stage.bus).unwrap();
    let action = Action::Task {
        name: "report".to_owned(),
        input: Json::empty(),
    };
    schedules.put(&stage.stored("daily", action)).await.unwrap();
    let mut scheduler = stage.process("a").stored().unwrap();
    stage.clock.advance(MINUTE);
    look(&mut scheduler).await;
    let pending = stage.events("Task Pending").await;
    assert_eq!(pending.len(), 1);
    assert_eq!(pending[0]["name"], "report");
    // It has not ended: the next tick submits nothing, and says so.
    stage.clock.advance(MINUTE);
    look(&mut scheduler).await;
    assert_eq!(stage.events("Task Pending").await.len(), 1);
    let ran = stage.events(RUN_TYPE).await;
    let request_id = ran[0]["requestId"].as_str().unwrap();
    assert!(ran[1]["skipped"].as_str().unwrap().contains(request_id));
    // Its worker fails it: one attempt, although the worker would make four.
    let worker = everbus_jobs::Worker::new(stage.jobs.clone());
    let worker = worker.any(async |_| Err::<(), _>(std::io::Error::other("503").into()));
    worker.mount().await.unwrap();
    stage.bus.start().await.unwrap();
    let deadline = tokio::time::Instant::now() + MINUTE;
    while stage.events("Task Failed").await.is_empty() {
        assert!(tokio::time::Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(stage.events("Task Failed").await[0]["retryCount"], 1);
    stage.clock.advance(MINUTE);
    look(&mut scheduler).await;
    assert_eq!(stage.events("Task Pending").await.len(), 2);
    stage.bus.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_schedule_that_cannot_run_is_refused() {
    let stage = Stage::new().await;
    let action = Action::Task {
        name: "report".to_owned(),
        input: Json::empty(),
    };
    let good = stage.stored("daily", action);
    let now = stage.clock.now();
    good.check(now).unwrap();
    let refused = |schedule: StoredSchedule| {
        let error = schedule.check(now).unwrap_err();
        assert_eq!(error.code(), Code::InvalidSetting, "{error}");
    };
    let with = |change: fn(&mut StoredSchedule)| {
        let mut schedule = good.clone();
        change(&mut schedule);
        schedule
    };
    refused(with(|s| s.name = "a b".into()));
    refused(with(|s| s.name = "health-check".into()));
    refused(with(|s| s.cron = "every day".into()));
    refused(with(|s| s.cron = "0 0 30 2 *".into()));
    refused(with(|s| s.timezone = "Middle/Earth".into()));
    // A run must end before the next one begins.
    refused(with(|s| s.timeout_ms = Some(60_000)));
    with(|s| s.timeout_ms = Some(59_000)).check(now).unwrap();
}

/// A schedule that submits a task each minute, and the scheduler of it.
async fn daily(stage: &Stage) -> Scheduler {
    let schedules = Schedules::of(&stage.bus).unwrap();
    let action = Action::Task {
        name: "report".to_owned(),
        input: Json::empty(),
    };
    schedules.put(&stage.stored("daily", action)).await.unwrap();
    stage.process("a").stored().unwrap()
}

// conformance: framework/schedule-cron: a task that waits for its worker for long is not submitted a second time
#[tokio::test]
async fn a_task_that_waits_for_long_holds_back_every_later_tick() {
    let stage = Stage::new().await;
    let mut scheduler = daily(&stage).await;
    for _ in 0..60 {
        stage.clock.advance(MINUTE);
        look(&mut scheduler).await;
    }
    assert_eq!(stage.events("Task Pending").await.len(), 1);
    let id = stage.events(RUN_TYPE).await[0]["requestId"].clone();
    let id = id.as_str().unwrap();
    // A worker that had just taken it hears of the cancel, and says nothing.
    assert!(stage.jobs.cancel_task(id).await.unwrap());
    let started = everbus_jobs::events::TaskStarted {
        request_id: id.to_owned(),
        job_id: None,
        effective_until: 0,
        worker_id: "w-1".to_owned(),
        process_id: 1,
    };
    let emitter = stage.jobs.emitter(everbus_jobs::Origin::Worker);
    let event = emitter.event_of_run(&started, None, 1);
    stage.bus.publish(event).await.unwrap();
    stage.clock.advance(MINUTE);
    look(&mut scheduler).await;
    assert_eq!(stage.events("Task Pending").await.len(), 2);
}

#[tokio::test]
async fn the_task_of_a_schedule_can_be_retried() {
    let stage = Stage::new().await;
    let mut scheduler = daily(&stage).await;
    stage.clock.advance(MINUTE);
    look(&mut scheduler).await;
    let id = stage.events(RUN_TYPE).await[0]["requestId"].clone();
    let id = id.as_str().unwrap();
    assert!(stage.jobs.cancel_task(id).await.unwrap());
    assert_eq!(stage.jobs.retry(id, false).await.unwrap(), 2);
    assert_eq!(stage.events("task.work").await.len(), 2);
}
