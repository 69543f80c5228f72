//! `everbus task` and `everbus job`.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::Shop;

const JOB: &str = "\
jobId: job-1
tasks:
  - taskId: a
    name: first
    input: {n: 1}
  - taskId: b
    name: second
    dependsOn: [a]
";

fn written(shop: &Shop, name: &str, text: &str) -> PathBuf {
    let path = shop.path(name);
    std::fs::write(&path, text).unwrap();
    path
}

fn json_of(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

#[test]
fn a_task_is_submitted_once_listed_cancelled_and_retried() {
    let shop = Shop::new();
    let submit = [
        "-ojson",
        "task",
        "submit",
        "scrape",
        "{\"store\": 1}",
        "--id",
        "req-1",
    ];
    let first = json_of(&shop.run(&submit).out);
    assert_eq!(
        (&first["requestId"], &first["new"]),
        (&json!("req-1"), &json!(true))
    );
    assert_eq!(json_of(&shop.run(&submit).out)["new"], false);
    let status = json_of(&shop.run(&["-ojson", "task", "status", "req-1"]).out);
    assert_eq!(
        (&status["state"], &status["name"]),
        (&json!("pending"), &json!("scrape"))
    );
    let listed = json_of(
        &shop
            .run(&["-ojson", "task", "list", "--state", "pending"])
            .out,
    );
    assert_eq!(listed["tasks"][0]["requestId"], "req-1");
    assert_eq!(
        listed["counts"],
        json!({"pending": 1, "processing": 0, "completed": 0, "failed": 0})
    );
    // The list comes from an index that can be thrown away.
    std::fs::remove_file(shop.path("everbus.db-tasks")).unwrap();
    assert_eq!(
        json_of(
            &shop
                .run(&["-ojson", "task", "list", "--state", "pending"])
                .out
        ),
        listed
    );

    let cancelled = json_of(&shop.run(&["-ojson", "task", "cancel", "req-1"]).out);
    assert_eq!(cancelled["cancelled"], true);
    let text = shop.run(&["task", "status", "req-1"]).out;
    assert!(text.contains("failed (cancelled)"), "{text}");
    assert_eq!(
        json_of(&shop.run(&["-ojson", "task", "retry", "req-1"]).out)["run"],
        2
    );
    let refused = shop.run(&["task", "retry", "req-1"]);
    assert_eq!(refused.code, 1);
    assert!(refused.err.contains("TaskConflict"), "{}", refused.err);
    let history = json_of(&shop.run(&["-ojson", "task", "history", "req-1"]).out);
    let types: Vec<&str> = history
        .as_array()
        .unwrap()
        .iter()
        .map(|e| e["type"].as_str().unwrap())
        .collect();
    assert_eq!(types, ["Task Pending", "Task Failed", "Task Pending"]);
    // Those who ask for what is not there learn that.
    assert_eq!(shop.run(&["task", "status", "nothing"]).code, 3);
    assert_eq!(shop.run(&["task", "submit", "x", "{not json"]).code, 2);
    assert_eq!(shop.run(&["task", "submit", "x", "--id", "a#b"]).code, 2);
}

#[test]
fn a_job_file_with_a_mistake_is_refused_with_its_line() {
    let shop = Shop::new();
    let submit = |text: &str| {
        let file = written(&shop, "job.yaml", text);
        shop.run(&["job", "submit", file.to_str().unwrap()])
    };
    let typo = submit("tasks:\n  - taskId: a\n    name: x\n    dependOn: []\n");
    assert_eq!(typo.code, 2);
    assert!(
        typo.err.contains("line 4") && typo.err.contains("dependsOn"),
        "{}",
        typo.err
    );
    let cycle = submit(
        "tasks:\n  - {taskId: a, name: x, dependsOn: [b]}\n  - {taskId: b, name: x, dependsOn: [a]}\n",
    );
    assert_eq!(cycle.code, 2);
    assert!(cycle.err.contains("a → b → a"), "{}", cycle.err);
    assert_eq!(shop.run(&["job", "submit", "missing.yaml"]).code, 2);
    assert!(
        !shop.path("everbus.db").exists() || shop.run(&["job", "list"]).out.contains("no jobs")
    );
}

#[test]
fn a_job_is_drawn_added_to_and_cancelled() {
    let shop = Shop::new();
    let file = written(&shop, "job.yaml", JOB);
    let submitted = shop.run(&["-ojson", "job", "submit", file.to_str().unwrap()]);
    assert_eq!(json_of(&submitted.out)["totalTasks"], 2, "{submitted:?}");
    let status = json_of(&shop.run(&["-ojson", "job", "status", "job-1"]).out);
    assert_eq!(status["taskStatuses"], json!({"a": null, "b": null}));
    assert_eq!(status["state"], "running");
    let graph = shop.run(&["job", "graph", "job-1"]).out;
    assert!(
        graph.contains("· a  waiting") && graph.contains("← a"),
        "{graph}"
    );
    assert!(
        shop.run(&["job", "graph", "job-1", "--dot"])
            .out
            .starts_with("digraph")
    );
    assert!(
        shop.run(&["job", "graph", "job-1", "--mermaid"])
            .out
            .starts_with("flowchart")
    );
    assert!(
        shop.run(&["job", "graph", "job-1", "--svg"])
            .out
            .starts_with("<svg")
    );
    let past = shop.run(&["job", "graph", "job-1", "--at", "1h"]);
    assert_eq!(past.code, 3, "{past:?}");

    let more = written(
        &shop,
        "more.yaml",
        "- {taskId: c, name: third, dependsOn: [b]}\n",
    );
    let added = shop.run(&["-ojson", "job", "add", "job-1", more.to_str().unwrap()]);
    assert_eq!(json_of(&added.out)["totalTasksNow"], 3, "{added:?}");
    let listed = json_of(&shop.run(&["-ojson", "job", "list"]).out);
    assert_eq!(
        (&listed[0]["jobId"], &listed[0]["totalTasks"]),
        (&json!("job-1"), &json!(3))
    );
    let other = written(&shop, "other.yaml", &JOB.replace("job-1", "job-2"));
    let taken = shop.run(&["job", "submit", other.to_str().unwrap()]);
    assert_eq!(taken.code, 1);
    assert!(taken.err.contains("job-1"), "{}", taken.err);
    assert_eq!(
        shop.run(&["job", "submit", other.to_str().unwrap(), "--prefix-ids"])
            .code,
        0
    );
    let cancelled = json_of(&shop.run(&["-ojson", "job", "cancel", "job-1"]).out);
    assert_eq!(cancelled["cancelled"], json!(["a"]));
    assert_eq!(
        json_of(&shop.run(&["-ojson", "job", "status", "job-1"]).out)["state"],
        "failed"
    );
}

// conformance: workflow/job-notice: --wait tells by its exit code how a job ended
// conformance: workflow/job-resume: the five-task job with real child processes fails, is resumed and completes
// conformance: workflow/task-events: a worker with child processes emits the events of attempts, retries and ends
#[test]
fn the_example_store_analysis_fails_is_resumed_and_completes() {
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/store-analysis");
    let (job, task) = (format!("{example}/job.yaml"), format!("{example}/task.sh"));
    let shop = Shop::new();
    assert_eq!(shop.run(&["job", "submit", &job]).code, 0);
    let worker = |set: &[&str]| {
        let mut arguments = vec!["worker"];
        arguments.extend(set);
        arguments.extend(["--", &task]);
        shop.command(&arguments).spawn().unwrap()
    };
    let mut first = worker(&[]);
    let failed = shop.run(&["-ojson", "job", "status", "store-analysis", "--watch"]);
    assert_eq!(failed.code, 1, "{failed:?}");
    let status = json_of(&failed.out);
    assert_eq!(status["taskStatuses"]["task-B"], "completed");
    assert_eq!(status["taskStatuses"]["task-C"], "failed");
    assert_eq!(status["taskStatuses"]["task-D"], "completed");
    assert_eq!(status["taskStatuses"]["task-E"], Value::Null);
    first.kill().unwrap();
    first.wait().unwrap();

    let mut second = worker(&["--set", "COLOR_API=on"]);
    let resumed = json_of(&shop.run(&["-ojson", "job", "resume", "store-analysis"]).out);
    assert_eq!(resumed["resumed"], json!(["task-C"]));
    let begin = Instant::now();
    let completed = loop {
        let ran = shop.run(&["-ojson", "job", "submit", &job, "--wait"]);
        if ran.code == 0 || begin.elapsed() > Duration::from_secs(120) {
            break ran;
        }
    };
    second.kill().unwrap();
    second.wait().unwrap();
    assert_eq!(completed.code, 0, "{completed:?}");
    assert_eq!(json_of(&completed.out)["state"], "completed");
    let history = json_of(&shop.run(&["-ojson", "task", "history", "task-B"]).out);
    let types: Vec<&str> = history
        .as_array()
        .unwrap()
        .iter()
        .map(|e| e["type"].as_str().unwrap())
        .collect();
    assert!(types.contains(&"Task Processing Failed"), "{types:?}");
    assert_eq!(types.last(), Some(&"Task Completed"));
}
