//! Alerts, sent to a small HTTP server of the test.

use std::sync::Arc;
use std::time::Duration;

use everbus::{BreakerPolicy, Bus, Criticality, Event, HandlerError, ManualClock, RetryPolicy};
use everbus_jobs::alerts::{Alerts, JobEnds, Target};
use everbus_jobs::events::{
    Health, HealthSummary, JobFailureDetected, Json, TaskHealth, TaskHealthCheck, TaskStatuses,
};
use everbus_jobs::health::Thresholds;
use everbus_jobs::webhook::{WebhookClient, WebhookOptions};
use everbus_jobs::{Jobs, NewTask, Origin};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

const PATIENCE: Duration = Duration::from_secs(60);

/// A server that answers as it is told and keeps what it got.
#[derive(Clone)]
struct Server {
    url: String,
    answers: Arc<Mutex<Vec<&'static str>>>,
    got: Arc<Mutex<Vec<Value>>>,
}

impl Server {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = Self {
            url: format!("http://{}/hook", listener.local_addr().unwrap()),
            answers: Arc::default(),
            got: Arc::default(),
        };
        let this = server.clone();
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let this = this.clone();
                tokio::spawn(async move {
                    let mut request = Vec::new();
                    let body = loop {
                        if stream.read_buf(&mut request).await.unwrap_or(0) == 0 {
                            return;
                        }
                        if let Some(body) = whole(&request) {
                            break body;
                        }
                    };
                    let answer = this.answers.lock().pop().unwrap_or("200 OK");
                    if answer == "silence" {
                        std::future::pending::<()>().await;
                    }
                    if answer == "200 OK" {
                        this.got.lock().push(body);
                    }
                    let moved = "Location: http://127.0.0.1:1/\r\n";
                    let reply = format!("HTTP/1.1 {answer}\r\n{moved}Content-Length: 0\r\n\r\n");
                    let _ = stream.write_all(reply.as_bytes()).await;
                });
            }
        });
        server
    }

    fn client(&self) -> WebhookClient {
        let options = WebhookOptions::default()
            .allow_http(true)
            .allow_private(true)
            .timeout(Duration::from_secs(5));
        WebhookClient::new(&self.url, options).unwrap()
    }

    async fn received(&self, count: usize) -> Vec<Value> {
        until(|| self.got.lock().len() >= count).await;
        self.got.lock().clone()
    }
}

/// The body of a complete request.
fn whole(request: &[u8]) -> Option<Value> {
    let text = std::str::from_utf8(request).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    assert!(head.starts_with("POST /hook HTTP/1.1\r\n"), "{head}");
    serde_json::from_str(body).ok()
}

async fn until(condition: impl Fn() -> bool) {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !condition() {
        assert!(tokio::time::Instant::now() < deadline, "waited too long");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn bus() -> (Bus, Jobs) {
    let bus = Bus::open("memory:").await.unwrap();
    let jobs = Jobs::new(bus.clone()).unwrap();
    (bus, jobs)
}

fn alerts(jobs: &Jobs, target: Target) -> Alerts {
    let retry = RetryPolicy::default()
        .max_retries(3)
        .base_delay(Duration::from_millis(1));
    Alerts::new(jobs.clone()).to(target).retry(retry)
}

/// A group whose handler gives up on every event.
async fn failing_group(bus: &Bus, pattern: &str, group: &str) {
    let gives_up = || async { Err::<(), _>(HandlerError::permanent("no such table: orders")) };
    bus.subscribe(pattern)
        .group(group)
        .handler(gives_up)
        .await
        .unwrap();
}

// conformance: workflow/slack-alert: a dead letter is told to Slack with event type, detail type, task, time and message id
#[tokio::test]
async fn a_dead_letter_is_told_once_in_a_while() {
    let (bus, jobs) = bus().await;
    let server = Server::start().await;
    alerts(&jobs, Target::Slack(server.client()))
        .mount()
        .await
        .unwrap();
    failing_group(&bus, "order.*", "billing").await;
    bus.start().await.unwrap();
    let event = Event::builder("order.placed")
        .source("shop")
        .entity("ORDER", "42")
        .json(&1)
        .build()
        .unwrap();
    let id = event.id().to_string();
    bus.publish(event).await.unwrap().settled().await.unwrap();
    let got = server.received(1).await;
    let text = got[0]["text"].as_str().unwrap();
    for line in [
        ":rotating_light: *Event delivery failure*",
        "*Event type:* order.placed",
        "*Detail type:* log-event",
        "*Source:* shop",
        "*Group:* billing",
        "*Error:* no such table: orders",
        "*Task:* ORDER#42",
        &format!("*Message ID:* {id}"),
    ] {
        assert!(text.lines().any(|l| l == line), "{line} is not in {text}");
    }
    assert!(text.contains("\n*Time:* 2"), "{text}");
    // The same group and type again is not told; another type is.
    bus.publish(("order.placed", 2))
        .await
        .unwrap()
        .settled()
        .await
        .unwrap();
    bus.publish(("order.paid", 3))
        .await
        .unwrap()
        .settled()
        .await
        .unwrap();
    let got = server.received(2).await;
    assert!(got[1]["text"].as_str().unwrap().contains("order.paid"));
    assert_eq!(got.len(), 2);
    bus.shutdown().await.unwrap();
}

// conformance: workflow/health-alert: tasks that are not healthy raise an alert, apart from the event
// conformance: workflow/job-notice: a webhook learns of Job Failure Detected
#[tokio::test]
async fn failed_jobs_and_unhealthy_tasks_are_told() {
    let (bus, jobs) = bus().await;
    let server = Server::start().await;
    alerts(&jobs, Target::Json(server.client()))
        .mount()
        .await
        .unwrap();
    bus.start().await.unwrap();
    let emitter = jobs.emitter(Origin::Dispatcher);
    let failure = JobFailureDetected {
        job_id: "job-456".into(),
        failed_task_id: "task-C".into(),
        task_statuses: TaskStatuses::new(),
    };
    bus.publish(emitter.event(&failure)).await.unwrap();
    let got = server.received(1).await;
    assert_eq!(got[0]["kind"], "job_failed");
    assert_eq!(got[0]["fields"]["job"], "job-456");
    assert_eq!(got[0]["fields"]["failedTask"], "task-C");
    let task = |id: &str, health| TaskHealth {
        request_id: id.into(),
        health,
        elapsed: 3_800_000,
        time_since_last_event: 20_000,
        last_event_type: "Task Heartbeat".into(),
        worker_id: "worker-i-002".into(),
    };
    let check = |tasks: Vec<TaskHealth>| TaskHealthCheck {
        summary: HealthSummary {
            total_processing: tasks.len(),
            ..HealthSummary::default()
        },
        tasks,
    };
    let healthy = check(vec![task("req-1", Health::Healthy)]);
    let unhealthy = check(vec![
        task("req-1", Health::Healthy),
        task("req-456", Health::Overtime),
    ]);
    for check in [&healthy, &unhealthy, &unhealthy] {
        bus.publish(emitter.event(check))
            .await
            .unwrap()
            .settled()
            .await
            .unwrap();
    }
    let got = server.received(2).await;
    assert_eq!(got.len(), 2, "{got:?}");
    assert_eq!(got[1]["kind"], "unhealthy_tasks");
    let named = got[1]["fields"]["tasks"].as_str().unwrap();
    assert!(
        named.contains("req-456") && !named.contains("req-1 "),
        "{named}"
    );
    bus.shutdown().await.unwrap();
}

// conformance: workflow/health-alert: a check that found tasks pending for too long raises an alert that names them
#[tokio::test]
async fn tasks_that_wait_for_too_long_are_told() {
    let clock = ManualClock::new("2026-11-17T20:00:30Z".parse().unwrap());
    let bus = Bus::builder().clock(clock.clone()).open("memory:");
    let bus = bus.await.unwrap();
    let jobs = Jobs::builder().clock(clock.clone()).open(bus.clone());
    let jobs = jobs.unwrap();
    let server = Server::start().await;
    alerts(&jobs, Target::Json(server.client()))
        .mount()
        .await
        .unwrap();
    bus.start().await.unwrap();
    for n in 0..12 {
        let task = NewTask::new("scrape", Json::empty()).id(format!("req-{n:02}"));
        jobs.submit(task).await.unwrap();
    }
    jobs.check_health(&Thresholds::default()).await.unwrap();
    clock.advance(Duration::from_secs(901));
    jobs.check_health(&Thresholds::default()).await.unwrap();
    let got = server.received(1).await;
    assert_eq!(got[0]["kind"], "unhealthy_tasks");
    let named = got[0]["fields"]["pendingTooLong"].as_str().unwrap();
    assert!(named.starts_with("req-00, req-01, "), "{named}");
    assert!(named.contains("and 2 more; the first for 901 s"), "{named}");
    assert_eq!(got.len(), 1, "the first check found nothing");
    bus.shutdown().await.unwrap();
}

#[tokio::test]
async fn an_alert_that_cannot_be_sent_is_tried_again_and_then_given_up() {
    let (bus, jobs) = bus().await;
    let server = Server::start().await;
    alerts(&jobs, Target::Json(server.client()))
        .mount()
        .await
        .unwrap();
    failing_group(&bus, "order.*", "billing").await;
    bus.start().await.unwrap();
    *server.answers.lock() = vec!["500 Internal Server Error"; 2];
    bus.publish(("order.placed", 1)).await.unwrap();
    assert_eq!(server.received(1).await.len(), 1);
    // A redirect is not followed: the address it names was not checked.
    *server.answers.lock() = vec!["302 Found"; 100];
    bus.publish(("order.paid", 2)).await.unwrap();
    let letters = async || bus.dead_letters().list().await.unwrap();
    let deadline = tokio::time::Instant::now() + PATIENCE;
    let of_alerts = loop {
        let letters = letters().await;
        let found = letters
            .into_iter()
            .find(|letter| letter.group.as_str() == "everbus.alerts");
        if let Some(found) = found {
            break found;
        }
        assert!(tokio::time::Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let error = &of_alerts.failures.last().unwrap().error;
    assert!(
        error.contains("302") && error.contains("not followed"),
        "{error}"
    );
    assert!(!error.contains("/hook"), "the URL is a secret: {error}");
    assert_eq!(server.got.lock().len(), 1);
    bus.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_silent_webhook_holds_up_nothing_else() {
    let (bus, jobs) = bus().await;
    let server = Server::start().await;
    alerts(&jobs, Target::Json(server.client()))
        .mount()
        .await
        .unwrap();
    failing_group(&bus, "order.*", "billing").await;
    let handled = Arc::new(Mutex::new(0));
    let count = handled.clone();
    let counts = move || {
        *count.lock() += 1;
        async {}
    };
    bus.subscribe("order.*")
        .group("mail")
        .handler(counts)
        .await
        .unwrap();
    bus.start().await.unwrap();
    *server.answers.lock() = vec!["silence"; 1000];
    for n in 0..200 {
        bus.publish(("order.placed", n)).await.unwrap();
    }
    until(|| *handled.lock() == 200).await;
    assert!(server.got.lock().is_empty());
    bus.shutdown_within(Duration::from_millis(100))
        .await
        .unwrap();
}

#[tokio::test]
async fn too_many_alerts_are_held_back_and_counted() {
    let (bus, jobs) = bus().await;
    let server = Server::start().await;
    let alerts = alerts(&jobs, Target::Json(server.client())).per_minute(2);
    alerts.mount().await.unwrap();
    failing_group(&bus, "order.*", "billing").await;
    bus.start().await.unwrap();
    for n in 0..10 {
        let receipt = bus.publish((format!("order.kind{n}"), n)).await.unwrap();
        receipt.settled().await.unwrap();
    }
    // All notices are settled: two were sent, the others skipped.
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        let groups = bus.groups().await.unwrap();
        let group = groups
            .iter()
            .find(|g| g.name.as_str() == "everbus.alerts")
            .unwrap();
        if group.behind + group.in_flight + group.waiting == 0 {
            break;
        }
        assert!(tokio::time::Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(server.got.lock().len(), 2);
    bus.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_webhook_to_a_private_address_is_refused_also_behind_a_name() {
    let server = Server::start().await;
    let url = server.url.replace("127.0.0.1", "localhost");
    let options = WebhookOptions::default().allow_http(true);
    let client = WebhookClient::new(&url, options).unwrap();
    let error = client.post(&1).await.unwrap_err().to_string();
    assert!(error.contains("not a public address"), "{error}");
    assert!(server.got.lock().is_empty());
}

#[tokio::test]
async fn a_webhook_that_is_down_does_not_repeat_alerts_to_the_others() {
    let (bus, jobs) = bus().await;
    let (up, down) = (Server::start().await, Server::start().await);
    down.answers
        .lock()
        .extend(["503 Service Unavailable", "503 Service Unavailable"]);
    alerts(&jobs, Target::Slack(up.client()))
        .to(Target::Json(down.client()))
        .mount()
        .await
        .unwrap();
    failing_group(&bus, "order.*", "billing").await;
    bus.start().await.unwrap();
    bus.publish(("order.placed", 1)).await.unwrap();
    down.received(1).await;
    assert_eq!(up.got.lock().len(), 1);
    bus.shutdown().await.unwrap();
}

// conformance: workflow/job-notice: a webhook is told when a job completes and when a task of it fails, and again after an error
#[tokio::test(flavor = "multi_thread")]
async fn a_webhook_is_told_how_jobs_end() {
    let server = Server::start().await;
    let (bus, jobs) = bus().await;
    let retry = RetryPolicy::default()
        .max_retries(3)
        .base_delay(Duration::from_millis(1));
    let ends = JobEnds::new(jobs.clone(), server.client()).retry(retry);
    ends.mount().await.unwrap();
    server.answers.lock().push("503 Service Unavailable");
    crate::support::running(&jobs).await;
    let job = |id: &str, tasks| crate::support::job(id, tasks);
    let tasks = vec![
        crate::support::task("a", &[]),
        crate::support::task("b", &["a"]),
    ];
    jobs.submit_job(job("good", tasks)).await.unwrap();
    let fails = crate::support::task_with("c", &[], &serde_json::json!({ "fail": true }));
    jobs.submit_job(job("bad", vec![fails])).await.unwrap();
    let mut got = server.received(2).await;
    got.sort_by_key(|told| told["jobId"].to_string());
    assert_eq!(got[0]["kind"], "job_failed");
    assert_eq!(got[0]["failedTaskId"], "c");
    assert_eq!(got[0]["taskStatuses"]["c"], "failed");
    assert_eq!(got[1]["kind"], "job_completed");
    assert_eq!(got[1]["jobId"], "good");
    assert_eq!(got[1]["totalTasks"], 2);
    assert_eq!(got[1]["tenant"], "default");
    assert_eq!(got[1]["taskStatuses"]["b"], "completed");
    assert!(got[1]["eventId"].as_str().is_some_and(|id| id.len() == 36));
    bus.shutdown().await.unwrap();
}

// conformance: workflow/circuit-alert: a circuit that opened is told, that of a best-effort group is not
#[tokio::test]
async fn a_circuit_that_opened_is_told_unless_its_group_is_best_effort() {
    let (bus, jobs) = bus().await;
    let server = Server::start().await;
    let alerts = alerts(&jobs, Target::Json(server.client()));
    alerts.mount().await.unwrap();
    let groups = [
        ("extra", Criticality::BestEffort),
        ("mail", Criticality::Critical),
    ];
    for (group, criticality) in groups {
        let fails = || async { Err::<(), _>(HandlerError::new("connection refused")) };
        bus.subscribe(format!("{group}.wanted").as_str())
            .group(group)
            .breaker(BreakerPolicy::new().fail_max(2))
            .criticality(criticality)
            .handler(fails)
            .await
            .unwrap();
    }
    bus.start().await.unwrap();
    for (group, _) in groups {
        let event_type = format!("{group}.wanted");
        for n in 0..2 {
            bus.publish((event_type.as_str(), n)).await.unwrap();
        }
        until(|| {
            let breakers = bus.breakers();
            let opened = breakers.iter().find(|breaker| breaker.name == group);
            opened.is_some_and(|breaker| breaker.times_opened == 1)
        })
        .await;
    }
    let got = server.received(1).await;
    assert_eq!(got[0]["kind"], "circuit_opened");
    assert_eq!(got[0]["fields"]["dependency"], "mail");
    assert_eq!(got[0]["fields"]["group"], "mail");
    bus.shutdown().await.unwrap();
    assert_eq!(server.got.lock().len(), 1);
}
