//! The health check, from the events of tasks.

use std::time::Duration;

use everbus::{Bus, Clock as _, HistoryQuery, ManualClock};
use everbus_jobs::events::{Json, TaskStarted};
use everbus_jobs::health::Thresholds;
use everbus_jobs::schedule::{CronTimes, Scheduler};
use everbus_jobs::{Jobs, NewTask, Origin};
use serde_json::Value;

const SECOND: Duration = Duration::from_secs(1);

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

    /// A task that a worker has begun just now.
    async fn started(&self, id: &str) {
        let task = NewTask::new("scrape", Json::empty()).id(id);
        self.jobs.submit(task).await.unwrap();
        let started = TaskStarted {
            request_id: id.to_owned(),
            job_id: None,
            effective_until: (self.clock.now().as_micros() / 1_000_000 + 60).unsigned_abs(),
            worker_id: "worker-i-001".to_owned(),
            process_id: 12345,
        };
        let event = self
            .jobs
            .emitter(Origin::Worker)
            .event_of_run(&started, None, 1);
        self.bus.publish(event).await.unwrap();
    }

    async fn checks(&self) -> Vec<Value> {
        let query = HistoryQuery::default().types("Task Health Check".parse().unwrap());
        let page = self.bus.history().unwrap().query(query).await.unwrap();
        page.items.iter().map(|r| r.event.json().unwrap()).collect()
    }
}

#[tokio::test]
async fn a_silent_worker_is_noticed_by_its_lock() {
    let stage = Stage::new().await;
    stage.started("req-123").await;
    let health = async || {
        let report = stage.jobs.health(&Thresholds::default()).await.unwrap();
        assert_eq!(report.check.tasks.len(), 1);
        let task = &report.check.tasks[0];
        assert_eq!(task.worker_id, "worker-i-001");
        assert_eq!(task.last_event_type, "Task Processing Started");
        (
            format!("{:?}", task.health),
            task.elapsed,
            report.severity(),
        )
    };
    assert_eq!(health().await, ("Healthy".into(), 0, 0));
    stage.clock.advance(41 * SECOND);
    assert_eq!(health().await, ("Warning".into(), 41_000, 1));
    stage.clock.advance(20 * SECOND);
    assert_eq!(health().await, ("Critical".into(), 61_000, 2));
    stage.clock.advance(3600 * SECOND);
    assert_eq!(health().await, ("Overtime".into(), 3_661_000, 2));
}

// conformance: workflow/health-event: a scheduled health check emits Task Health Check with its summary, once per tick
#[tokio::test]
async fn a_scheduled_check_is_published_once_per_tick() {
    let stage = Stage::new().await;
    stage.started("req-123").await;
    let waiting = NewTask::new("scrape", Json::empty()).id("req-waiting");
    stage.jobs.submit(waiting).await.unwrap();
    let process = |name: &str| {
        let jobs = stage.jobs.clone();
        let times = CronTimes::new("*/5 * * * *", "UTC").unwrap();
        let scheduler = Scheduler::new(stage.jobs.clone()).owner(name);
        scheduler.on("health-check", times, move |tick| {
            let jobs = jobs.clone();
            async move {
                let checked = jobs
                    .check_health_at(&Thresholds::default(), Some(&tick))
                    .await;
                checked.map(drop).map_err(|error| error.to_string())
            }
        })
    };
    let (mut a, mut b) = (process("a"), process("b"));
    for _ in 0..3 {
        stage.clock.advance(300 * SECOND);
        let (one, two) = tokio::join!(a.look(), b.look());
        one.and(two).unwrap();
        a.settled().await;
        b.settled().await;
    }
    let checks = stage.checks().await;
    assert_eq!(checks.len(), 3);
    let summary = &checks[0]["summary"];
    assert_eq!(
        (&summary["totalProcessing"], &summary["critical"]),
        (&1.into(), &1.into())
    );
    assert_eq!(checks[0]["tasks"][0]["requestId"], "req-123");
    // 15 minutes have not quite passed for the one that waits.
    let report = stage.jobs.health(&Thresholds::default()).await.unwrap();
    assert!(report.waiting.is_empty());
    stage.clock.advance(SECOND);
    let report = stage.jobs.health(&Thresholds::default()).await.unwrap();
    assert_eq!(report.waiting[0].request_id, "req-waiting");
}

// conformance: workflow/health-states: a task with a delayed start waits for a worker only once it is due
#[tokio::test]
async fn a_delayed_task_does_not_wait_before_it_is_due() {
    let stage = Stage::new().await;
    let hour = 3600 * SECOND;
    let task = NewTask {
        at: Some(stage.clock.now().plus(24 * hour)),
        ..NewTask::new("scrape", Json::empty()).id("tomorrow")
    };
    stage.jobs.submit(task).await.unwrap();
    let waiting = async || {
        let report = stage.jobs.health(&Thresholds::default()).await.unwrap();
        report.waiting.len()
    };
    stage.clock.advance(hour);
    assert_eq!(waiting().await, 0);
    stage.clock.advance(23 * hour + 901 * SECOND);
    assert_eq!(waiting().await, 1);
}

// conformance: workflow/health-event: a check of more tasks than an event holds names those that are not healthy, and the other tenants are checked too
#[tokio::test]
async fn a_check_that_is_too_large_names_the_unhealthy_tasks() {
    let clock = ManualClock::new("2026-11-17T20:00:30Z".parse().unwrap());
    let bus = Bus::builder()
        .clock(clock.clone())
        .max_payload(10_000)
        .open("memory:")
        .await
        .unwrap();
    let jobs = |tenant: &str| {
        let jobs = Jobs::builder().clock(clock.clone()).tenant(tenant);
        jobs.open(bus.clone()).unwrap()
    };
    let stage = |tenant: &str| Stage {
        bus: bus.clone(),
        jobs: jobs(tenant),
        clock: clock.clone(),
    };
    let (large, small) = (stage("large"), stage("small"));
    large.started("zz-stuck").await;
    small.started("alone").await;
    clock.advance(61 * SECOND);
    for n in 0..200 {
        large.started(&format!("req-{n:03}")).await;
    }
    let reports = large
        .jobs
        .check_health(&Thresholds::default())
        .await
        .unwrap();
    let tenants: Vec<&str> = reports.iter().map(|r| r.tenant.as_str()).collect();
    assert_eq!(tenants, ["large", "small"]);
    let checks = large.checks().await;
    let of_large = checks
        .iter()
        .find(|c| c["summary"]["totalProcessing"] == 201);
    let of_large = of_large.expect("the check of the large tenant");
    assert_eq!(of_large["summary"]["critical"], 1);
    let named = of_large["tasks"].as_array().unwrap();
    assert_eq!(named[0]["requestId"], "zz-stuck");
    assert!((10..201).contains(&named.len()), "{}", named.len());
    assert!(checks.iter().any(|c| c["tasks"][0]["requestId"] == "alone"));
}
