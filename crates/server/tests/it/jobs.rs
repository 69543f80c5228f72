//! Tasks, jobs and schedules over HTTP.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use everbus::AuditQuery;
use everbus_jobs::events::ErrorCategory;
use everbus_jobs::{Jobs, Task, TaskError, Worker};
use everbus_server::Scope;
use serde_json::{Value, json};

use crate::api::{Api, until};

/// A worker beside the server; tasks named `breaks` fail until `mended`.
async fn worker(api: &Api) -> Arc<AtomicBool> {
    let mended = Arc::new(AtomicBool::new(false));
    let works = mended.clone();
    Worker::new(Jobs::new(api.bus.clone()).unwrap())
        .any(move |task: Task| {
            let works = works.clone();
            async move {
                if task.name == "breaks" && !works.load(Ordering::SeqCst) {
                    let category = ErrorCategory::Validation;
                    return Err(TaskError::new(category, "the shelf is empty"));
                }
                Ok(json!({ "did": task.request_id }))
            }
        })
        .mount()
        .await
        .unwrap();
    mended
}

fn diamond(job: &str, last: &str) -> Value {
    json!({
        "jobId": job,
        "tasks": [
            { "taskId": format!("{job}-a"), "name": "work", "input": { "store": 1 } },
            { "taskId": format!("{job}-b"), "name": "work", "dependsOn": [format!("{job}-a")] },
            { "taskId": format!("{job}-c"), "name": last, "dependsOn": [format!("{job}-a")] },
            { "taskId": format!("{job}-d"), "name": "work", "dependsOn": [format!("{job}-b"), format!("{job}-c")] },
        ],
    })
}

async fn until_job(api: &Api, job: &str, state: &str) -> Value {
    let path = format!("/v1/jobs/{job}");
    until(&format!("{job} {state}"), || async {
        let status = api.get(&path, None).await.ok(200);
        (status["state"] == state).then_some(status)
    })
    .await
}

// conformance: workflow/job-api: a job is submitted over HTTP, and tasks are added to it
// conformance: operations/server-jobs: a job that is posted to the server is dispatched by it, completes with a worker, is drawn as it was at each moment, and grows
#[tokio::test(flavor = "multi_thread")]
async fn a_posted_job_is_dispatched_and_completes() {
    let api = Api::start().await;
    let posted = api.post("/v1/jobs", None, &diamond("j1", "work")).await;
    assert_eq!(posted.header("location"), Some("/v1/jobs/j1"));
    let posted = posted.ok(201);
    assert_eq!(posted["jobId"], "j1");
    assert_eq!(posted["totalTasks"], 4);
    assert_eq!(posted["new"], true);
    // Without a worker the server starts the first task, and it waits.
    until("the first task", || async {
        let graph = api.get("/v1/jobs/j1/graph", None).await.ok(200);
        (graph["nodes"][0]["state"] == "pending").then_some(())
    })
    .await;
    let graph = api.get("/v1/jobs/j1/graph", None).await.ok(200);
    assert_eq!(graph["nodes"][0]["reason"], "waits for a worker");
    assert_eq!(graph["nodes"][1]["state"], Value::Null);
    assert_eq!(graph["nodes"][1]["reason"], "waits for j1-a");
    assert_eq!(graph["nodes"][3]["layer"], 2);
    let edges = graph["edges"].as_array().unwrap();
    assert_eq!(edges.len(), 4);
    assert!(edges.contains(&json!({ "from": "j1-c", "to": "j1-d" })));

    worker(&api).await;
    let status = until_job(&api, "j1", "completed").await;
    for task in ["j1-a", "j1-b", "j1-c", "j1-d"] {
        assert_eq!(status["taskStatuses"][task], "completed");
    }
    // The same job again is the same job.
    let again = api.post("/v1/jobs", None, &diamond("j1", "work")).await;
    assert_eq!(again.header("location"), None);
    assert_eq!(again.ok(200)["new"], false);

    let history = api.get("/v1/tasks/j1-d/history", None).await.ok(200);
    let types: Vec<&str> = history["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|event| event["type"].as_str().unwrap())
        .collect();
    assert_eq!(types.first(), Some(&"Task Pending"));
    assert_eq!(types.last(), Some(&"Task Completed"));
    // At the moment when the last task became pending, it was pending, and its parents had completed.
    let then = history["items"][0]["received_at"].as_str().unwrap();
    let path = format!("/v1/jobs/j1/graph?at={then}");
    let past = api.get(&path, None).await.ok(200);
    assert_eq!(past["at"], then);
    assert_eq!(past["nodes"][2]["state"], "completed");
    assert_eq!(past["nodes"][3]["state"], "pending");

    let more = json!({ "tasks": [{ "taskId": "j1-e", "name": "work", "dependsOn": ["j1-d"] }] });
    let added = api.post("/v1/jobs/j1/tasks", None, &more).await.ok(200);
    assert_eq!(
        added,
        json!({ "jobId": "j1", "added": 1, "totalTasksNow": 5 })
    );
    let status = until_job(&api, "j1", "completed").await;
    assert_eq!(status["taskStatuses"]["j1-e"], "completed");
    let list = api.get("/v1/jobs?state=completed", None).await.ok(200);
    assert_eq!(list["items"][0]["jobId"], "j1");
    assert_eq!(list["items"][0]["state"], "completed");
    assert_eq!(list["items"][0]["completed"], 5);
    let none = api.get("/v1/jobs?state=running", None).await.ok(200);
    assert_eq!(none["items"], json!([]));
    api.stop().await;
}

// conformance: operations/server-jobs-operate: over HTTP a failed job is resumed, a task retried and cancelled, each in the audit trail
#[tokio::test(flavor = "multi_thread")]
async fn a_failed_job_is_resumed_and_tasks_are_retried_and_cancelled() {
    let api = Api::start().await;
    let mended = worker(&api).await;
    let posted = api.post("/v1/jobs", None, &diamond("j2", "breaks")).await;
    posted.ok(201);
    let status = until_job(&api, "j2", "failed").await;
    assert_eq!(status["taskStatuses"]["j2-b"], "completed");
    assert_eq!(status["taskStatuses"]["j2-d"], Value::Null);
    let graph = api.get("/v1/jobs/j2/graph", None).await.ok(200);
    assert_eq!(graph["nodes"][2]["reason"], "the shelf is empty");
    assert_eq!(graph["nodes"][3]["reason"], "cannot start: j2-c failed");
    let list = api.get("/v1/jobs?state=failed", None).await.ok(200);
    assert_eq!(list["items"][0]["jobId"], "j2");
    // A task behind the failed one cannot be retried before it.
    let got = api.post("/v1/tasks/j2-d/retry", None, &json!({})).await;
    assert_eq!(got.problem(409), "TaskConflict");
    let got = api.post("/v1/tasks/j2-a/retry", None, &json!({})).await;
    let hint = got.json()["hint"].as_str().unwrap().to_owned();
    assert_eq!(got.problem(409), "TaskConflict");
    assert!(hint.contains("\"completed\": true"), "{hint}");

    mended.store(true, Ordering::SeqCst);
    let resumed = api.post("/v1/jobs/j2/resume", None, &json!({})).await;
    assert_eq!(
        resumed.ok(200),
        json!({ "jobId": "j2", "resumed": ["j2-c"] })
    );
    until_job(&api, "j2", "completed").await;
    let again = json!({ "completed": true });
    let retried = api.post("/v1/tasks/j2-a/retry", None, &again).await;
    assert_eq!(retried.ok(200), json!({ "requestId": "j2-a", "run": 2 }));

    // A task that waits for its time is cancelled; it does not run.
    let task = json!({ "requestId": "t1", "name": "work", "afterMs": 3_600_000 });
    let submitted = api.post("/v1/tasks", None, &task).await;
    assert_eq!(submitted.header("location"), Some("/v1/tasks/t1"));
    assert_eq!(submitted.ok(201)["state"], "pending");
    let again = api.post("/v1/tasks", None, &task).await;
    assert_eq!(again.header("location"), None);
    assert_eq!(again.ok(200)["new"], false);
    let cancelled = api.post("/v1/tasks/t1/cancel", None, &json!({})).await;
    assert_eq!(
        cancelled.ok(200),
        json!({ "requestId": "t1", "cancelled": true })
    );
    let task = api.get("/v1/tasks/t1", None).await.ok(200);
    assert_eq!(task["state"], "failed");
    assert_eq!(task["cancelled"], true);
    let cancelled = api.post("/v1/jobs/j2/cancel", None, &json!({})).await;
    assert_eq!(cancelled.ok(200)["jobId"], "j2");

    let trail = api.bus.audit().query(AuditQuery::default()).await.unwrap();
    let actions: BTreeSet<&str> = trail
        .items
        .iter()
        .map(|record| record.entry.action.as_str())
        .collect();
    for action in [
        "jobs.resume.done",
        "tasks.retry.done",
        "tasks.retry.failed",
        "tasks.cancel.done",
        "jobs.cancel.done",
    ] {
        assert!(actions.contains(action), "{action} of {actions:?}");
    }
    api.stop().await;
}

// conformance: operations/server-jobs-tenants: a token sees, submits and changes the tasks, jobs and schedules of its own tenant only, and two tenants may use the same ids
#[tokio::test(flavor = "multi_thread")]
async fn tasks_jobs_and_schedules_of_tenants_are_apart() {
    let api = Api::start().await;
    let all = [Scope::Publish, Scope::Read, Scope::Operate];
    let admin = api.token(&[Scope::Admin], None).await;
    let acme = api.token(&all, Some("acme")).await;
    let other = api.token(&all, Some("other")).await;
    let (acme, other, admin) = (
        Some(acme.as_str()),
        Some(other.as_str()),
        Some(admin.as_str()),
    );
    let job = diamond("j", "work");
    api.post("/v1/jobs", acme, &job).await.ok(201);
    let task = json!({ "requestId": "t", "name": "work" });
    api.post("/v1/tasks", acme, &task).await.ok(201);
    // The address names the tenant where the token does not.
    let of_acme = json!({ "requestId": "a/b", "name": "work" });
    let made = api.post("/v1/tasks?tenant=acme", admin, &of_acme).await;
    let address = made.header("location").unwrap().replace("%2f", "%2F");
    assert_eq!(address, "/v1/tasks/a%2Fb?tenant=acme");
    let found = api.get(&address, admin).await.ok(200);
    assert_eq!(found["requestId"], "a/b");
    let schedule =
        json!({ "cron": "0 3 * * *", "action": { "task": { "name": "report", "input": {} } } });
    let put = async |token, schedule: &Value| {
        let json = [("content-type", "application/json")];
        let body = schedule.to_string();
        api.send("PUT", "/v1/schedules/night", token, &json, body.as_bytes())
            .await
    };
    let stored = put(acme, &schedule).await.ok(200);
    assert_eq!(stored["schedule"]["tenant"], "acme");

    for path in [
        "/v1/jobs/j",
        "/v1/jobs/j/graph",
        "/v1/tasks/t",
        "/v1/tasks/t/history",
        "/v1/schedules/night",
    ] {
        api.get(path, acme).await.ok(200);
        assert_eq!(api.get(path, other).await.problem(404), "NotFound");
    }
    for path in ["/v1/jobs", "/v1/tasks", "/v1/schedules"] {
        let items = api.get(path, acme).await.ok(200)["items"].clone();
        assert!(!items.as_array().unwrap().is_empty(), "{path}");
        let items = api.get(path, other).await.ok(200)["items"].clone();
        assert_eq!(items, json!([]), "{path}");
    }
    for path in [
        "/v1/tasks/t/cancel",
        "/v1/tasks/t/retry",
        "/v1/jobs/j/resume",
        "/v1/jobs/j/cancel",
        "/v1/schedules/night/pause",
        "/v1/schedules/night/resume",
    ] {
        let got = api.post(path, other, &json!({})).await;
        assert_eq!(got.problem(404), "NotFound", "{path}");
        let asked = format!("{path}?tenant=acme");
        if !path.contains("schedules") {
            let got = api.post(&asked, other, &json!({})).await;
            assert_eq!(got.problem(403), "Forbidden", "{asked}");
        }
    }
    let more = json!({ "tasks": [{ "taskId": "x", "name": "work" }] });
    let got = api.post("/v1/jobs/j/tasks", other, &more).await;
    assert_eq!(got.problem(404), "NotFound");
    let got = api
        .send("DELETE", "/v1/schedules/night", other, &[], b"")
        .await;
    assert_eq!(got.problem(404), "NotFound");
    assert_eq!(put(other, &schedule).await.problem(409), "NameTaken");
    let mut foreign = schedule.clone();
    foreign["tenant"] = json!("acme");
    assert_eq!(put(other, &foreign).await.problem(403), "Forbidden");
    let weak = api.token(&[Scope::Operate], Some("acme")).await;
    assert_eq!(put(Some(&weak), &schedule).await.problem(403), "Forbidden");

    // The same ids are free for another tenant, and a caller of all tenants names the one that it means.
    let same = api.post("/v1/jobs", other, &job).await.ok(201);
    assert_eq!(same["new"], true);
    assert_eq!(
        api.get("/v1/jobs/j", admin).await.problem(404),
        "NotFound",
        "the default tenant has none"
    );
    let of_acme = api.get("/v1/jobs/j?tenant=acme", admin).await.ok(200);
    assert_eq!(of_acme["totalTasks"], 4);
    // The dashboard offers the tenants to those who may see them all.
    for (token, offered) in [(admin, true), (acme, false)] {
        let page = api.get("/jobs", token).await;
        assert_eq!(page.status, 200);
        let text = String::from_utf8(page.body).unwrap();
        for tenant in ["acme", "other"] {
            let option = format!("<option value=\"{tenant}\"");
            assert_eq!(text.contains(&option), offered, "{tenant}: {text}");
        }
    }
    let paused = api
        .post("/v1/schedules/night/pause", acme, &json!({}))
        .await;
    assert_eq!(paused.ok(200)["schedule"]["paused"], true);
    let removed = api
        .send("DELETE", "/v1/schedules/night", acme, &[], b"")
        .await;
    removed.ok(200);
    let items = api.get("/v1/schedules", acme).await.ok(200);
    assert_eq!(items["items"], json!([]));
    api.stop().await;
}

// conformance: operations/server-jobs-bad-input: a job or task that cannot be is refused with what is wrong with it, and nothing of it is stored
#[tokio::test]
async fn what_cannot_be_a_job_is_refused() {
    let api = Api::start().await;
    let task = |id: &str, depends_on: &[&str]| json!({ "taskId": id, "name": "w", "dependsOn": depends_on });
    let many: Vec<Value> = (0..10_001).map(|n| task(&n.to_string(), &[])).collect();
    for (tasks, says) in [
        (json!([]), "no tasks"),
        (json!([task("a", &[]), task("a", &[])]), "two tasks"),
        (json!([task("a", &["a"])]), "depends on itself"),
        (json!([task("a", &["b"]), task("b", &["a"])]), "a → b → a"),
        (json!([task("a", &["x"])]), "no task of the job"),
        (json!(many), "10001 tasks"),
    ] {
        let got = api.post("/v1/jobs", None, &json!({ "tasks": tasks })).await;
        let detail = got.json()["detail"].as_str().unwrap().to_owned();
        assert_eq!(got.problem(422), "InvalidJob", "{says}");
        assert!(detail.contains(says), "{detail}");
    }
    let deep = format!("{}{}", "[".repeat(2000), "]".repeat(2000));
    let deep = format!("{{\"name\":\"w\",\"input\":{deep}}}");
    let json = [("content-type", "application/json")];
    let got = api.send("POST", "/v1/tasks", None, &json, deep.as_bytes());
    assert_eq!(got.await.problem(400), "InvalidRequest");
    for (path, body, status, code) in [
        ("/v1/tasks", json!({ "name": "" }), 400, "InvalidAttribute"),
        ("/v1/tasks", json!({ "nam": "w" }), 400, "InvalidRequest"),
        (
            "/v1/tasks",
            json!({ "name": "w", "requestId": "a#b" }),
            400,
            "InvalidAttribute",
        ),
        (
            "/v1/tasks?tenant=a%23b",
            json!({ "name": "w" }),
            400,
            "InvalidAttribute",
        ),
        (
            "/v1/tasks",
            json!({ "name": "w", "at": "2026-01-01T00:00:00Z", "afterMs": 1 }),
            400,
            "InvalidRequest",
        ),
        (
            "/v1/jobs",
            json!({ "jobId": "a#b", "tasks": [task("a", &[])] }),
            400,
            "InvalidAttribute",
        ),
        (
            "/v1/jobs",
            json!({ "totalTasks": 2, "tasks": [task("a", &[])] }),
            400,
            "InvalidRequest",
        ),
        (
            "/v1/jobs/none/tasks",
            json!({ "tasks": [task("a", &[])] }),
            404,
            "NotFound",
        ),
        ("/v1/jobs/none/resume", json!({}), 404, "NotFound"),
        ("/v1/jobs/none/cancel", json!({}), 404, "NotFound"),
        ("/v1/tasks/none/retry", json!({}), 404, "NotFound"),
        ("/v1/tasks/none/cancel", json!({}), 404, "NotFound"),
    ] {
        let got = api.post(path, None, &body).await;
        assert_eq!(got.problem(status), code, "{path} {body}");
    }
    for (path, status) in [
        ("/v1/tasks?state=done", 400),
        ("/v1/tasks?limit=0", 400),
        ("/v1/tasks?cursor=x", 400),
        ("/v1/jobs?cursor=9", 400),
        ("/v1/jobs?stat=failed", 400),
        ("/v1/jobs/none", 404),
        ("/v1/jobs/none/graph", 404),
        ("/v1/jobs/none/graph?at=yesterday", 400),
        ("/v1/tasks/none/history", 404),
        ("/v1/health/tasks?overtime_ms=0", 400),
    ] {
        api.get(path, None).await.problem(status);
    }
    for schedule in [
        json!({ "cron": "every day", "action": { "event": { "type": "a.b" } } }),
        json!({ "cron": "* * * * *", "timezone": "Mars/Base", "action": { "event": { "type": "a.b" } } }),
        json!({ "cron": "* * * * *", "timeoutMs": 60_000, "action": { "event": { "type": "a.b" } } }),
        json!({ "cron": "* * * * *", "action": { "exec": "rm" } }),
    ] {
        let body = schedule.to_string();
        let got = api.send("PUT", "/v1/schedules/s", None, &json, body.as_bytes());
        got.await.problem(400);
    }
    let jobs = api.get("/v1/jobs", None).await.ok(200);
    assert_eq!(jobs["items"], json!([]));
    let tasks = api.get("/v1/tasks?counts=true", None).await.ok(200);
    assert_eq!(tasks["counts"]["pending"], 0);
    api.stop().await;
}

// conformance: operations/server-tasks-paged: tasks and jobs are listed page by page, each once, also many that came at the same moment
#[tokio::test]
async fn tasks_and_jobs_are_paged() {
    let api = Api::start().await;
    let jobs = Jobs::new(api.bus.clone()).unwrap();
    let tasks: Vec<everbus_jobs::NewTask> = (0..230)
        .map(|_| everbus_jobs::NewTask::new("w", everbus_jobs::events::Json::empty()))
        .collect();
    let ids = jobs.submit_all(&tasks).await.unwrap();
    for n in 0..7 {
        let job = json!({ "jobId": format!("j{n}"), "tasks": [{ "taskId": format!("t{n}"), "name": "w" }] });
        api.post("/v1/jobs", None, &job).await.ok(201);
    }
    let walk = async |path: &str, key: &str| {
        let mut seen = Vec::new();
        let mut cursor = String::new();
        loop {
            let page = api.get(&format!("{path}{cursor}"), None).await.ok(200);
            let items = page["items"].as_array().unwrap();
            seen.extend(items.iter().map(|i| i[key].as_str().unwrap().to_owned()));
            match page["next"].as_str() {
                Some(next) => cursor = format!("&cursor={}", next.replace('#', "%23")),
                None => return seen,
            }
        }
    };
    let seen = walk("/v1/tasks?state=pending&limit=50", "requestId").await;
    let distinct: BTreeSet<&String> = seen.iter().collect();
    assert_eq!(distinct.len(), seen.len(), "a task came twice");
    assert!(ids.iter().all(|id| distinct.contains(id)), "one is missing");
    let seen = walk("/v1/jobs?limit=2", "jobId").await;
    assert_eq!(seen, ["j6", "j5", "j4", "j3", "j2", "j1", "j0"]);
    let seen = walk("/v1/jobs?limit=3&state=running", "jobId").await;
    assert_eq!(seen.len(), 7);
    let counts = api.get("/v1/tasks?counts=true&limit=1", None).await.ok(200);
    assert!(counts["counts"]["pending"].as_u64().unwrap() >= 230);
    let health = api.get("/v1/health/tasks?pending_ms=1", None).await.ok(200);
    assert_eq!(health["summary"]["totalProcessing"], 0);
    let waiting = health["pendingTooLong"].as_array().unwrap();
    assert!(waiting.len() >= 230, "{}", waiting.len());
    api.stop().await;
}

// conformance: operations/server-schedules: a server runs the schedules that are put over HTTP
#[tokio::test(flavor = "multi_thread")]
async fn a_schedule_that_is_put_runs_in_the_server() {
    let api = Api::start().await;
    // Six fields: every second.
    let schedule = json!({ "cron": "* * * * * *", "action": { "event": { "type": "clock.struck", "payload": { "n": 1 } } } });
    let body = schedule.to_string();
    let json = [("content-type", "application/json")];
    let put = api.send("PUT", "/v1/schedules/clock", None, &json, body.as_bytes());
    let put = put.await;
    if put.status == 400 {
        panic!("{}", put.json());
    }
    until("the schedule", || async {
        let events = api.get("/v1/events?type=clock.struck", None).await.ok(200);
        (!events["items"].as_array().unwrap().is_empty()).then_some(())
    })
    .await;
    let shown = until("the record of the run", || async {
        let shown = api.get("/v1/schedules/clock", None).await.ok(200);
        (!shown["last"].is_null()).then_some(shown)
    })
    .await;
    let owner = shown["last"]["owner"].as_str().unwrap();
    assert!(owner.starts_with("everbus serve"), "{owner}");
    api.stop().await;
}

// conformance: operations/server-task-metrics: /metrics counts the running tasks of all tenants by health
#[tokio::test(flavor = "multi_thread")]
async fn metrics_count_running_tasks_by_health() {
    let api = Api::start().await;
    let text = async || {
        let got = api.get("/metrics", None).await;
        assert_eq!(got.status, 200);
        String::from_utf8(got.body).unwrap()
    };
    let before = text().await;
    assert!(
        before.contains("everbus_task_health{category=\"healthy\"} 0"),
        "{before}"
    );
    let hold = Arc::new(tokio::sync::Notify::new());
    let held = hold.clone();
    Worker::new(Jobs::new(api.bus.clone()).unwrap())
        .any(move |_: Task| {
            let held = held.clone();
            async move {
                held.notified().await;
                Ok(json!({}))
            }
        })
        .mount()
        .await
        .unwrap();
    let task = json!({ "requestId": "t", "name": "work" });
    api.post("/v1/tasks?tenant=acme", None, &task).await.ok(201);
    until("the running task", || async {
        let text = text().await;
        text.contains("everbus_task_health{category=\"healthy\"} 1")
            .then_some(())
    })
    .await;
    let health = api.get("/v1/health/tasks?tenant=acme", None).await.ok(200);
    assert_eq!(health["summary"]["healthy"], 1);
    assert_eq!(health["tasks"][0]["requestId"], "t");
    hold.notify_one();
    api.stop().await;
}

// conformance: workflow/dashboard-errors: the page of a task shows each attempt that failed, with its number, error and category
#[tokio::test(flavor = "multi_thread")]
async fn the_page_of_a_task_shows_its_failed_attempts() {
    let api = Api::start().await;
    let retry = everbus::RetryPolicy::default()
        .max_retries(2)
        .base_delay(std::time::Duration::from_millis(1));
    Worker::new(Jobs::new(api.bus.clone()).unwrap())
        .retry(retry)
        .any(|task: Task| async move {
            match (task.name.as_str(), task.attempt) {
                ("fetch", 1) => Err(TaskError::new(
                    ErrorCategory::Network,
                    "no route to the <shelf>",
                )),
                ("fetch", 2) => Err(TaskError::new(ErrorCategory::RateLimit, "come back later")),
                _ => Ok(json!(1)),
            }
        })
        .mount()
        .await
        .unwrap();
    let task = json!({ "name": "fetch", "requestId": "t1" });
    api.post("/v1/tasks", None, &task).await.ok(201);
    until("the task", async || {
        let task = api.get("/v1/tasks/t1", None).await.ok(200);
        (task["state"] == "completed").then_some(())
    })
    .await;
    let page = api.get("/tasks/t1", None).await;
    let page = String::from_utf8(page.body).unwrap();
    let (_, card) = page.split_once("id=\"failed-attempts\"").unwrap();
    let (card, _) = card.split_once("</section>").unwrap();
    let newest = card.find("come back later").unwrap();
    let oldest = card.find("no route to the &lt;shelf&gt;").unwrap();
    assert!(newest < oldest, "{card}");
    assert!(
        card.contains("rate-limit") && card.contains("network"),
        "{card}"
    );
    // A task without failures has no such card to see.
    let task = json!({ "name": "works", "requestId": "t2", "input": {} });
    api.post("/v1/tasks", None, &task).await.ok(201);
    let page = api.get("/tasks/t2", None).await;
    let page = String::from_utf8(page.body).unwrap();
    let (_, card) = page.split_once("id=\"failed-attempts\"").unwrap();
    assert!(card.starts_with(" data-live hidden"), "{card}");
    api.stop().await;
}

// conformance: workflow/split-reader: every page and every GET of the API, with tasks and jobs to show, leaves the log as it is
#[tokio::test(flavor = "multi_thread")]
async fn reading_over_http_publishes_nothing() {
    let api = Api::with(None, |options| options.health_check = None).await;
    worker(&api).await;
    let posted = api.post("/v1/jobs", None, &diamond("j1", "breaks")).await;
    posted.ok(201);
    until_job(&api, "j1", "failed").await;
    let lag = || async {
        let groups = api.get("/v1/groups", None).await.ok(200);
        let items = groups["items"].as_array().unwrap().clone();
        items
            .iter()
            .all(|g| g["behind"] == 0 && g["in_flight"] == 0)
    };
    until("the dispatcher to be done", || async {
        lag().await.then_some(())
    })
    .await;
    let stored = || async {
        let page = api.get("/v1/events?limit=1000", None).await.ok(200);
        page["items"].as_array().unwrap().clone()
    };
    let before = stored().await;
    let mut read = 0;
    for route in api.state.routes() {
        // A stream that does not end, and an upgrade.
        if route.method != "GET" || ["/v1/events/stream", "/ws"].contains(&route.path) {
            continue;
        }
        let id = before[0]["id"].as_str().unwrap();
        let path = match route.path {
            path if path.contains("jobs") => path.replace("{id}", "j1"),
            path if path.contains("tasks") => path.replace("{id}", "j1-a"),
            path if path.contains("events") => path.replace("{id}", id),
            path => path.replace("{group}", "tasks.dispatcher"),
        };
        let got = api.get(&path, None).await;
        assert!(got.status < 500, "{path}: {}", got.status);
        read += usize::from(got.status == 200);
    }
    assert!(read > 25, "{read}");
    assert_eq!(stored().await, before);
    api.stop().await;
}
