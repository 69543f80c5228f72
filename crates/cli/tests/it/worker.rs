//! `everbus worker`, `everbus health` and `everbus schedule`, as a person uses them.

use std::io::{BufRead as _, BufReader};
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::support::Shop;

const PATIENCE: Duration = Duration::from_secs(90);

/// A worker that is running; it is killed if the test fails.
struct Worker(Child);

impl Worker {
    /// Starts a worker and waits until it works.
    fn start(shop: &Shop, arguments: &[&str]) -> Self {
        let mut child = shop.command(arguments).spawn().unwrap();
        let mut line = String::new();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        output.read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "it ended at once");
        // The rest is read too, so that the pipe never fills.
        std::thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
        Self(child)
    }

    /// Asks it to end, and returns its exit code.
    fn stop(mut self) -> i32 {
        let pid = Pid::from_raw(i32::try_from(self.0.id()).unwrap()).unwrap();
        kill_process(pid, Signal::TERM).unwrap();
        self.0.wait().unwrap().code().unwrap_or(-1)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn until<T>(what: &str, look: impl Fn() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < PATIENCE, "waited too long: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn events(shop: &Shop, event_type: &str) -> Vec<Value> {
    let ran = shop.run(&[
        "-o", "json", "events", "--type", event_type, "--limit", "1000",
    ]);
    let page = ran.lines().remove(0);
    page["events"].as_array().unwrap().clone()
}

// conformance: framework/scaling-workers: --workers starts so many processes, and they share the tasks
#[test]
fn several_worker_processes_share_the_tasks() {
    let shop = Shop::new();
    for n in 0..6 {
        let id = format!("req-{n}");
        shop.run(&["task", "submit", "sleep", "{\"n\":1}", "--id", &id])
            .ok();
    }
    let worker = Worker::start(
        &shop,
        &[
            "worker",
            "--workers",
            "3",
            "--concurrency",
            "1",
            "--id",
            "w",
            "--",
            "sh",
            "-c",
            "sleep 0.3; cat",
        ],
    );
    let done = until("all tasks", || {
        let done = events(&shop, "Task Completed");
        (done.len() == 6).then_some(done)
    });
    assert_eq!(done.len(), 6);
    assert_eq!(worker.stop(), 0);
    let status = shop.run(&["-o", "json", "task", "status", "req-0"]).lines();
    assert_eq!(status[0]["state"], "completed");
    let started = events(&shop, "Task Processing Started");
    let mut ids: Vec<String> = started
        .iter()
        .map(|event| event["payload"]["workerId"].to_string())
        .collect();
    ids.sort();
    ids.dedup();
    assert!(ids.len() > 1, "one process did everything: {ids:?}");
}

#[test]
fn a_wrong_worker_is_refused_at_once() {
    let shop = Shop::new();
    for (arguments, said) in [
        (&["worker"][..], "COMMAND"),
        (
            &["worker", "--category", "x=nothing", "--", "true"],
            "nothing",
        ),
        (
            &["worker", "--category", "(=auth", "--", "true"],
            "regular expression",
        ),
        (
            &["worker", "--exit-code", "many=auth", "--", "true"],
            "many",
        ),
        (
            &["worker", "--otherwise", "cancelled", "--", "true"],
            "cancelled",
        ),
        (&["worker", "--workers", "0", "--", "true"], "1 or more"),
    ] {
        let ran = shop.run(arguments);
        assert_eq!(ran.code, 2, "{arguments:?}: {ran:?}");
        assert!(ran.err.contains(said), "{arguments:?}: {ran:?}");
    }
}

#[test]
fn health_has_an_exit_code() {
    let shop = Shop::new();
    shop.run(&["task", "submit", "nothing", "--id", "req-1"])
        .ok();
    let ran = shop.run(&["health"]).ok();
    assert!(ran.contains("0 running tasks"), "{ran}");
    std::thread::sleep(Duration::from_millis(20));
    let ran = shop.run(&["-o", "json", "health", "--pending", "1ms", "--publish"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    let report: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(report["pendingTooLong"][0]["requestId"], "req-1");
    assert_eq!(report["summary"]["totalProcessing"], 0);
    assert_eq!(events(&shop, "Task Health Check").len(), 1);
}

#[test]
fn schedules_are_added_listed_and_run() {
    let shop = Shop::new();
    let added = shop.run(&[
        "schedule",
        "add",
        "nightly",
        "--cron",
        "30 2 * * *",
        "--timezone",
        "Europe/Berlin",
        "--task",
        "report",
    ]);
    assert!(added.ok().contains("added nightly; it runs next at"));
    let every_second = [
        "schedule",
        "add",
        "pulse",
        "--cron",
        "* * * * * *",
        "--event",
        "pulse.sent",
        "--payload",
        "{\"n\":1}",
    ];
    shop.run(&every_second).ok();
    let next = shop.run(&["schedule", "next", "nightly", "-n", "3"]).ok();
    assert_eq!(next.lines().count(), 3);
    let listed = shop.run(&["-o", "json", "schedule", "list"]).lines();
    assert_eq!(listed.len(), 2);
    assert_eq!(listed[0]["schedule"]["timezone"], "Europe/Berlin");
    let runner = Worker::start(&shop, &["schedule", "run", "--health", "* * * * * *"]);
    until("two pulses", || {
        (events(&shop, "pulse.sent").len() >= 2).then_some(())
    });
    until("a health check", || {
        (!events(&shop, "Task Health Check").is_empty()).then_some(())
    });
    assert_eq!(runner.stop(), 0);
    shop.run(&["schedule", "pause", "pulse"]).ok();
    let table = shop.run(&["schedule", "list"]).ok();
    assert!(
        table.contains("paused") && table.contains("event pulse.sent"),
        "{table}"
    );
    shop.run(&["schedule", "remove", "pulse"]).ok();
    shop.run(&["schedule", "remove", "pulse"])
        .failed(3, "NotFound");
    shop.run(&["schedule", "add", "x", "--cron", "every day", "--task", "t"])
        .failed(2, "InvalidSetting");
    let private = [
        "schedule",
        "run",
        "--slack",
        "https://127.0.0.1/services/secret",
    ];
    let refused = shop.run(&private).failed(2, "InvalidUrl");
    assert!(!refused.contains("secret"), "{refused}");
}
