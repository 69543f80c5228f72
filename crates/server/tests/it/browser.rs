//! The dashboard in a real browser.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use everbus::{AuditQuery, Event, HandlerError, HandlerResult, Message};
use everbus_jobs::events::{ErrorCategory, TaskState};
use everbus_jobs::{JobState, Jobs, NewJob, Task, TaskError, Worker};
use everbus_server::Scope;
use everbus_server::auth::{TokenRequest, Tokens};
use serde_json::json;

use crate::served::Served;
use crate::webdriver::Browser;
use tokio::sync::Semaphore;

fn url(server: &Served, path: &str) -> String {
    format!("http://{}{path}", server.address)
}

/// A small shop: handled orders, failing mails.
async fn shop(server: &Served) {
    server
        .bus
        .subscribe("order.*")
        .group("billing")
        .handler(|_: Message| async {})
        .await
        .unwrap();
    server
        .failing_group("order.*", "mail", "no mail server answers")
        .await;
    for n in 1..=8 {
        server
            .publish(
                "order.placed",
                json!({ "order": n, "total": n * 10, "items": [{ "sku": "A-1" }] }),
            )
            .await;
    }
}

const JOB: &str = "
jobId: store-analysis
tasks:
  - {taskId: scrape, name: scrape-store}
  - {taskId: analyze, name: analyze-site}
  - {taskId: tags, name: color-tags, dependsOn: [scrape]}
  - {taskId: banner, name: make-banner, dependsOn: [scrape, analyze]}
  - {taskId: report, name: compile-report, dependsOn: [tags, banner]}
";

/// A worker that takes a permit for each task; the work `color-tags` fails until it is mended.
async fn worker(jobs: &Jobs, permits: &Arc<Semaphore>, mended: &Arc<AtomicBool>) {
    let (permits, mended) = (permits.clone(), mended.clone());
    Worker::new(jobs.clone())
        .id("worker-1")
        .concurrency(4)
        .any(move |task: Task| {
            let (permits, mended) = (permits.clone(), mended.clone());
            async move {
                permits.acquire().await?.forget();
                if task.name == "color-tags" && !mended.load(Ordering::SeqCst) {
                    let what = "the palette has no colour";
                    return Err(TaskError::new(ErrorCategory::Validation, what));
                }
                Ok(json!({ "did": task.request_id }))
            }
        })
        .mount()
        .await
        .unwrap();
}

/// A job of which a task has failed.
async fn failed_job(server: &Served) {
    let jobs = Jobs::new(server.bus.clone()).unwrap();
    let permits = Arc::new(Semaphore::new(100));
    worker(&jobs, &permits, &Arc::default()).await;
    jobs.submit_job(NewJob::parse(JOB).unwrap()).await.unwrap();
    let reply = server
        .send(
            "POST",
            "/v1/tasks",
            &[("content-type", "application/json")],
            "{\"requestId\": \"later\", \"name\": \"clean-up\", \"afterMs\": 3600000}",
        )
        .await;
    assert_eq!(reply.status, 201, "{}", reply.body);
    let ended = jobs.wait("store-analysis", |_| {}).await.unwrap();
    assert_eq!(ended.state, JobState::Failed);
}

// conformance: operations/dashboard-jobs: an open page shows each task of a job as it runs, fails, is resumed and completes, and the graph as it was at each moment
// needs: chromium
#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_watched_resumed_and_seen_as_it_was() {
    let Some(browser) = Browser::start().await else {
        return;
    };
    let server = Served::start().await;
    let jobs = Jobs::new(server.bus.clone()).unwrap();
    let (permits, mended) = (Arc::new(Semaphore::new(0)), Arc::default());
    worker(&jobs, &permits, &mended).await;
    browser.open(&url(&server, "/jobs")).await;
    browser
        .wait_for("document.querySelector('#live-text').textContent === 'live'")
        .await;
    let body = json!({
        "jobId": "store-analysis",
        "tasks": NewJob::parse(JOB).unwrap().tasks,
    });
    let json = [("content-type", "application/json")];
    let posted = server
        .send("POST", "/v1/jobs", &json, &body.to_string())
        .await;
    assert_eq!(posted.status, 201, "{}", posted.body);
    // The job appears in the open list.
    browser
        .wait_for("document.querySelector('tr[data-job=\"store-analysis\"]')")
        .await;
    browser.click("tr[data-job=\"store-analysis\"] a").await;
    let shown = |task: &str, state: &str| {
        format!(
            "document.querySelector('.dag a[data-task=\"{task}\"]')?.dataset.state === '{state}'"
        )
    };
    browser.wait_for(&shown("scrape", "processing")).await;
    browser.wait_for(&shown("analyze", "processing")).await;
    browser.wait_for(&shown("report", "waiting")).await;
    browser
        .wait_for("document.querySelector('#tasks').textContent.includes('waits for tags, banner')")
        .await;
    browser.screenshot("job-running").await;
    permits.add_permits(2);
    browser.wait_for(&shown("scrape", "completed")).await;
    browser.wait_for(&shown("banner", "processing")).await;
    permits.add_permits(2);
    browser.wait_for(&shown("tags", "failed")).await;
    browser.wait_for(&shown("banner", "completed")).await;
    browser
        .wait_for(
            "document.querySelector('#tasks').textContent.includes('cannot start: tags failed')",
        )
        .await;
    browser.screenshot("job-failed").await;
    // Resumed after a question, it completes.
    mended.store(true, Ordering::SeqCst);
    permits.add_permits(10);
    browser
        .wait_for("document.querySelector('[data-act=resume]')")
        .await;
    browser.click("[data-act=resume]").await;
    browser.screenshot("job-ask-before-resume").await;
    browser.click("#confirm-yes").await;
    browser.wait_for(&shown("report", "completed")).await;
    browser
        .wait_for("document.querySelector('#job-head').dataset.state === 'completed'")
        .await;
    // The slider shows the graph as it was, and comes back to now.
    let slide = |step: &str| {
        format!(
            "(() => {{ const s = document.querySelector('#moment'); s.value = {step}; \
             s.dispatchEvent(new Event('input', {{ bubbles: true }})); return true; }})()"
        )
    };
    browser.eval(&slide("0")).await;
    browser.wait_for(&shown("scrape", "waiting")).await;
    browser.screenshot("job-at-its-beginning").await;
    browser.eval(&slide("s.max")).await;
    browser.wait_for(&shown("report", "completed")).await;
    // Tasks are added to it, and run.
    browser.click("[data-act=add]").await;
    browser
        .fill(
            "#new-tasks",
            "[{\"taskId\": \"mail\", \"name\": \"send-mail\", \"dependsOn\": [\"report\"]}]",
        )
        .await;
    browser.click("#confirm-yes").await;
    browser.wait_for(&shown("mail", "completed")).await;
    browser.no_errors().await;
    let status = jobs.job("store-analysis").await.unwrap();
    assert_eq!(status.count(TaskState::Completed), 6);
    let trail = server.bus.audit().query(AuditQuery::default()).await;
    let trail = trail.unwrap();
    let actions: Vec<&str> = trail
        .items
        .iter()
        .map(|r| r.entry.action.as_str())
        .collect();
    for action in ["jobs.resume.done", "jobs.add.done"] {
        assert!(actions.contains(&action), "{action} of {actions:?}");
    }
    drop(browser);
    server.stop().await;
}

// conformance: operations/dashboard-pages: every page loads in Chromium, light and dark, wide and on a phone, without an error in the console
// needs: chromium
#[tokio::test(flavor = "multi_thread")]
async fn every_page_loads_without_an_error() {
    let Some(browser) = Browser::start().await else {
        return;
    };
    let server = Served::start().await;
    for path in [
        "/",
        "/events",
        "/groups",
        "/dead-letters",
        "/jobs",
        "/tasks",
        "/system",
    ] {
        browser.open(&url(&server, path)).await;
        browser.wait_for("document.querySelector('h1')").await;
        browser
            .screenshot(&format!(
                "empty-{}",
                path.trim_start_matches('/').replace('/', "-")
            ))
            .await;
        browser.no_errors().await;
    }
    shop(&server).await;
    let event = server.publish("order.shipped", json!({ "order": 1 })).await;
    failed_job(&server).await;
    let pages = [
        ("overview", "/".to_owned()),
        ("events", "/events".to_owned()),
        ("event", format!("/events/{}", event.id())),
        ("groups", "/groups".to_owned()),
        ("group", "/groups/mail".to_owned()),
        ("dead-letters", "/dead-letters".to_owned()),
        ("dead-letter", format!("/dead-letters/{}", event.id())),
        ("jobs", "/jobs".to_owned()),
        ("job", "/jobs/store-analysis".to_owned()),
        ("tasks", "/tasks".to_owned()),
        ("task", "/tasks/tags".to_owned()),
        ("system", "/system".to_owned()),
    ];
    browser.open(&url(&server, "/")).await;
    browser
        .wait_for("document.querySelector('#f-dead').textContent === '9'")
        .await;
    for (width, size) in [(1400, "wide"), (400, "phone")] {
        browser.resize(width, 900).await;
        for theme in ["light", "dark"] {
            for (name, path) in &pages {
                browser.open(&url(&server, path)).await;
                browser
                    .eval(&format!("localStorage.setItem('theme', '{theme}')"))
                    .await;
                browser.open(&url(&server, path)).await;
                browser.wait_for("document.querySelector('h1')").await;
                let shown = browser.eval("document.documentElement.dataset.theme").await;
                assert_eq!(shown, theme);
                // Nothing is wider than the screen.
                let over = browser.eval("document.documentElement.scrollWidth - document.documentElement.clientWidth").await;
                assert_eq!(over, 0, "{name} on {size}");
                browser.screenshot(&format!("{name}-{size}-{theme}")).await;
                browser.no_errors().await;
            }
        }
    }
    drop(browser);
    server.stop().await;
}

// conformance: operations/dashboard-phone: on a phone the theme is changed, the keyboard help opened, and the person signed out
// needs: chromium
#[tokio::test(flavor = "multi_thread")]
async fn on_a_phone_the_theme_the_help_and_sign_out_are_within_reach() {
    let Some(browser) = Browser::start().await else {
        return;
    };
    let server = Served::start().await;
    let token = TokenRequest {
        name: "the night shift of operations".to_owned(),
        scopes: vec![Scope::Read, Scope::Operate],
        tenant: Some("north".to_owned()),
        expires_at: None,
    };
    let token = Tokens::new(&server.bus).create(token).await.unwrap().token;
    browser.resize(390, 844).await;
    browser.open(&url(&server, "/login")).await;
    browser
        .eval("localStorage.setItem('theme', 'light') ?? true")
        .await;
    browser.fill("#token", &token).await;
    browser.click("#login button").await;
    browser
        .wait_for("document.querySelector('#live-text')?.textContent === 'live'")
        .await;
    let over = "document.documentElement.scrollWidth - document.documentElement.clientWidth";
    assert_eq!(browser.eval(over).await, 0);
    for theme in ["light", "dark"] {
        let shown = browser.eval("document.documentElement.dataset.theme").await;
        assert_eq!(shown, theme);
        browser
            .screenshot(&format!("signed-in-phone-{theme}"))
            .await;
        // A click fails if the button is hidden or covered.
        browser.click("#theme").await;
    }
    browser.click("#keys-button").await;
    browser
        .wait_for("document.querySelector('#keys').open")
        .await;
    browser.click("#keys button").await;
    browser.click("#sign-out").await;
    browser.wait_for("location.pathname === '/login'").await;
    browser.no_errors().await;
    drop(browser);
    server.stop().await;
}

// conformance: operations/dashboard-live: an event that is published appears in the open list
// needs: chromium
#[tokio::test(flavor = "multi_thread")]
async fn a_published_event_appears_in_the_open_page() {
    let Some(browser) = Browser::start().await else {
        return;
    };
    let server = Served::start().await;
    browser.open(&url(&server, "/events")).await;
    browser
        .wait_for("document.querySelector('#live-text').textContent === 'live'")
        .await;
    let event = server.publish("order.placed", json!({ "order": 1 })).await;
    let row = format!(
        "document.querySelector('tr[data-href=\"/events/{}\"]')",
        event.id()
    );
    browser.wait_for(&row).await;
    browser
        .click(&format!("tr[data-href=\"/events/{}\"] td", event.id()))
        .await;
    browser
        .wait_for("document.querySelector('h1').textContent === 'order.placed'")
        .await;
    browser.no_errors().await;
    drop(browser);
    server.stop().await;
}

// conformance: operations/dashboard-dead-letters: a dead letter is retried, another one corrected and retried, and both actions are in the audit trail
// needs: chromium
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_is_retried_and_another_one_corrected() {
    let Some(browser) = Browser::start().await else {
        return;
    };
    let server = Served::start().await;
    let mended = Arc::new(AtomicBool::new(false));
    let works = mended.clone();
    server
        .bus
        .subscribe("order.*")
        .group("mail")
        .handler(move |message: Message| {
            let works = works.clone();
            async move {
                let order: serde_json::Value = message.event().json()?;
                if order["address"].is_null() || !works.load(Ordering::SeqCst) {
                    return HandlerResult::Err(HandlerError::permanent("no address"));
                }
                Ok(())
            }
        })
        .await
        .unwrap();
    let fine = server
        .publish("order.placed", json!({ "order": 1, "address": "here" }))
        .await;
    let wrong = server.publish("order.placed", json!({ "order": 2 })).await;
    browser.open(&url(&server, "/dead-letters")).await;
    let open_count =
        |many: usize| format!("document.querySelectorAll('button[data-retry]').length === {many}");
    // The page is made once both have died.
    crate::served::until("two dead letters", || async {
        let open = server
            .bus
            .dead_letters()
            .count(everbus::DeadLetterFilter::default())
            .await
            .unwrap();
        (open == 2).then_some(())
    })
    .await;
    browser.open(&url(&server, "/dead-letters")).await;
    browser.wait_for(&open_count(2)).await;
    mended.store(true, Ordering::SeqCst);
    browser
        .click(&format!("button[data-retry=\"{}\"]", fine.id()))
        .await;
    browser.screenshot("ask-before-retry").await;
    browser.click("#confirm-yes").await;
    browser.wait_for(&open_count(1)).await;

    browser
        .open(&url(&server, &format!("/dead-letters/{}", wrong.id())))
        .await;
    browser.click("#edit").await;
    browser.fill("#payload", "{\"order\": 2").await;
    browser
        .wait_for("document.querySelector('#send').disabled")
        .await;
    browser
        .fill("#payload", "{\"order\": 2, \"address\": \"there\"}")
        .await;
    browser
        .wait_for("!document.querySelector('#send').disabled")
        .await;
    browser.screenshot("edit-and-retry").await;
    browser.click("#send").await;
    browser
        .wait_for("document.querySelector('.notice.good a')")
        .await;
    browser.no_errors().await;
    let open = server
        .bus
        .dead_letters()
        .count(everbus::DeadLetterFilter::default())
        .await
        .unwrap();
    assert_eq!(open, 0);
    let trail = server
        .bus
        .audit()
        .query(AuditQuery::default())
        .await
        .unwrap();
    let actions: Vec<&str> = trail
        .items
        .iter()
        .map(|record| record.entry.action.as_str())
        .collect();
    assert!(
        actions.contains(&"dlq.retry") && actions.contains(&"dlq.edit"),
        "{actions:?}"
    );
    drop(browser);
    server.stop().await;
}

// conformance: operations/dashboard-bulk: a group is paused and resumed, and dead letters are retried and purged in bulk, after a question that says how many there are
// needs: chromium
#[tokio::test(flavor = "multi_thread")]
async fn a_group_is_paused_and_dead_letters_are_purged_in_bulk() {
    let Some(browser) = Browser::start().await else {
        return;
    };
    let server = Served::start().await;
    shop(&server).await;
    let dead = async |many: u64| {
        crate::served::until("dead letters", || async {
            let all = everbus::DeadLetterFilter::default();
            let count = server.bus.dead_letters().count(all).await.unwrap();
            (count == many).then_some(())
        })
        .await;
    };
    dead(8).await;
    browser.open(&url(&server, "/groups/mail")).await;
    browser.click("[data-pause=mail]").await;
    browser.screenshot("ask-before-pause").await;
    browser.click("#confirm-yes").await;
    browser
        .wait_for("document.querySelector('[data-resume=mail]')")
        .await;
    let paused = server.bus.paused_groups().await.unwrap();
    assert_eq!(paused.len(), 1);
    let told = browser.eval("document.querySelector('main').textContent");
    let told = told.await;
    assert!(
        told.as_str().unwrap().contains("paused the group"),
        "{told}"
    );
    browser.click("[data-resume=mail]").await;
    browser.click("#confirm-yes").await;
    browser
        .wait_for("document.querySelector('[data-pause=mail]')")
        .await;

    browser.open(&url(&server, "/dead-letters")).await;
    let question = "document.querySelector('#confirm').open && \
                    document.querySelector('#confirm-body').textContent.includes('8 dead letters match')";
    // Cancelled, nothing happens.
    browser.click("#purge-all").await;
    browser.wait_for(question).await;
    browser.screenshot("ask-before-purge").await;
    browser.click("#confirm button[value='']").await;
    dead(8).await;
    let retried = everbus::Clock::now(&everbus::SystemClock);
    browser.click("#retry-all").await;
    browser.wait_for(question).await;
    browser.click("#confirm-yes").await;
    browser
        .wait_for("document.querySelector('#toasts').textContent.includes('8 wait')")
        .await;
    // The handler fails as before.
    crate::served::until("the second deaths", || async {
        let all = everbus::DeadLetterFilter::default();
        let page = everbus::PageRequest::default();
        let page = server
            .bus
            .dead_letters()
            .list_page(all, page)
            .await
            .unwrap();
        let again = |letter: &everbus::DeadLetter| letter.died_at > retried;
        (page.items.len() == 8 && page.items.iter().all(again)).then_some(())
    })
    .await;
    browser.open(&url(&server, "/dead-letters")).await;
    browser.click("#purge-all").await;
    browser.wait_for(question).await;
    browser.click("#confirm-yes").await;
    dead(0).await;
    browser
        .wait_for("document.querySelector('main').textContent.includes('No dead letters')")
        .await;
    browser.no_errors().await;
    let trail = server.bus.audit().query(AuditQuery::default()).await;
    let trail = trail.unwrap();
    let actions = trail.items.iter().map(|r| r.entry.action.as_str());
    let actions: Vec<&str> = actions.collect();
    for action in ["groups.pause", "groups.resume", "dlq.retry", "dlq.purge"] {
        assert!(
            actions.iter().any(|known| known.starts_with(action)),
            "{action} of {actions:?}"
        );
    }
    drop(browser);
    server.stop().await;
}

// conformance: operations/dashboard-keyboard: lists are paged, rows chosen and opened, pages changed and the theme switched with the keyboard alone
// needs: chromium
#[tokio::test(flavor = "multi_thread")]
async fn lists_are_paged_and_everything_is_reached_by_keyboard() {
    let Some(browser) = Browser::start().await else {
        return;
    };
    let server = Served::start().await;
    let events = (0..130).map(|n| {
        Event::builder("order.placed")
            .json(&json!({ "n": n }))
            .build()
            .unwrap()
    });
    server
        .bus
        .publish_batch(events.collect::<Vec<_>>())
        .await
        .unwrap();
    browser.open(&url(&server, "/events")).await;
    let rows = "document.querySelectorAll('#event-rows tr').length";
    browser.wait_for(&format!("{rows} === 50")).await;
    let first = browser
        .eval("document.querySelector('#event-rows tr').dataset.href")
        .await;
    browser.press(&["n"]).await;
    browser
        .wait_for("location.search.includes('cursor=')")
        .await;
    browser.wait_for(&format!("{rows} === 50")).await;
    let second = browser
        .eval("document.querySelector('#event-rows tr').dataset.href")
        .await;
    assert_ne!(first, second);
    browser.press(&["n"]).await;
    browser.wait_for(&format!("{rows} === 30")).await;
    browser.press(&["j", "j", "k"]).await;
    browser
        .wait_for(
            "document.querySelector('#event-rows tr').getAttribute('aria-selected') === 'true'",
        )
        .await;
    browser.press(&["\u{e007}"]).await;
    browser
        .wait_for("location.pathname.startsWith('/events/')")
        .await;
    browser.press(&["g", "d"]).await;
    browser
        .wait_for("location.pathname === '/dead-letters'")
        .await;
    browser.press(&["g", "e"]).await;
    browser.wait_for("location.pathname === '/events'").await;
    browser.wait_for("document.readyState === 'complete'").await;
    browser.press(&["/"]).await;
    browser
        .wait_for("document.activeElement.id === 'search'")
        .await;
    browser.press(&["\u{e00c}"]).await;
    let before = browser
        .eval("getComputedStyle(document.body).backgroundColor")
        .await;
    browser.press(&["t"]).await;
    browser
        .wait_for(&format!(
            "getComputedStyle(document.body).backgroundColor !== {before}"
        ))
        .await;
    browser.press(&["?"]).await;
    browser
        .wait_for("document.querySelector('#keys').open")
        .await;
    browser.no_errors().await;
    drop(browser);
    server.stop().await;
}

// conformance: framework/websocket-reconnect: the client of the dashboard waits 1 to 30 seconds, twice as long after each failure, less a random part
// needs: chromium
#[tokio::test(flavor = "multi_thread")]
async fn the_client_of_the_dashboard_reconnects_with_backoff_and_jitter() {
    let Some(browser) = Browser::start().await else {
        return;
    };
    let server = Served::start().await;
    browser.open(&url(&server, "/system")).await;
    // Connections that always fail, and a clock that only notes how long it was asked to wait.
    let script = "
        window.waits = [];
        window.WebSocket = class extends EventTarget {
            constructor() {
                super();
                queueMicrotask(() => this.dispatchEvent(new Event('close')));
            }
        };
        const later = window.setTimeout;
        window.setTimeout = (work, wait) => {
            window.waits.push(wait);
            if (window.waits.length < 8) later(work, 0);
        };
        import('/assets/live.js').then((live) => live.subscribe({ topic: 'overview' }, () => {}));
    ";
    browser
        .eval(&format!("(() => {{ {script} return true; }})()"))
        .await;
    browser.wait_for("window.waits.length >= 8").await;
    let waits = browser.eval("window.waits").await;
    let waits: Vec<f64> = waits
        .as_array()
        .unwrap()
        .iter()
        .map(|wait| wait.as_f64().unwrap())
        .collect();
    let longest = [
        1000.0, 2000.0, 4000.0, 8000.0, 16_000.0, 30_000.0, 30_000.0, 30_000.0,
    ];
    for (wait, longest) in waits.iter().zip(longest) {
        assert!(
            (longest / 2.0..=longest).contains(wait),
            "{wait} of {longest}: {waits:?}"
        );
    }
    let share = |n: usize| waits[n] / longest[n];
    assert!(
        (1..8).any(|n| (share(n) - share(0)).abs() > 1e-6),
        "no jitter: {waits:?}"
    );
    drop(browser);
    server.stop().await;
}
