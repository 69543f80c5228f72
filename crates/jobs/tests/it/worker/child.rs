//! What a child gets and what it gives.

use everbus_jobs::worker::child::{ALLOWED, ChildLimits, OutputKind};
use serde_json::json;

use super::{Stage, types};

// conformance: workflow/task-child: a worker spawns a child process, and code 0 is Task Completed
// conformance: workflow/one-path: the events of producer and worker are in one store
#[tokio::test]
async fn a_child_gets_its_input_and_its_last_line_is_the_output() {
    let stage = Stage::new().await;
    stage.start(stage.worker(ChildLimits::default())).await;
    let events = stage
        .run("echo", r#"{"storeId":"store-123","n":1e2}"#)
        .await;
    assert_eq!(
        types(&events),
        ["Task Pending", "Task Processing Started", "Task Completed"]
    );
    let completed = &events[2];
    assert_eq!(completed.properties["requestId"], "req-echo");
    assert_eq!(completed.properties["output"]["storeId"], "store-123");
    assert_eq!(completed.properties["exitCode"], 0);
    assert!(completed.properties["durationMs"].is_u64());
    assert!(completed.properties.get("usage").is_none());
    assert!(completed.properties.get("jobId").is_none());
    assert_eq!(
        completed.context,
        json!({
            "source": "system", "environment": "prod", "origin": "worker", "workerId": "worker-i-001"
        })
    );
    assert_eq!(completed.details["exitCode"], 0);
    stage.bus.shutdown().await.unwrap();
}

// conformance: workflow/props-task-started: requestId, effectiveUntil one and a half extensions ahead, workerId, processId
#[tokio::test]
async fn the_start_names_the_worker_the_process_and_the_lock() {
    let stage = Stage::new().await;
    stage.start(stage.worker(ChildLimits::default())).await;
    let before = stage.jobs.now().as_micros() / 1_000_000;
    let events = stage.run("reads-nothing", "{}").await;
    let after = stage.jobs.now().as_micros() / 1_000_000;
    let started = &events[1].properties;
    assert_eq!(started["workerId"], "worker-i-001");
    assert!(started["processId"].as_u64().unwrap() > 1);
    // A lease of three heartbeats: 40 s and a half more.
    let until = started["effectiveUntil"].as_i64().unwrap();
    assert!(
        (before + 60..=after + 60).contains(&until),
        "{until}, {before}"
    );
    stage.bus.shutdown().await.unwrap();
}

// conformance: workflow/worker-environment: a child sees the variables of the allow-list and those that are set, and no others
#[tokio::test]
async fn the_environment_is_cleared_to_an_allow_list() {
    let stage = Stage::new().await;
    let worker = stage.worker(ChildLimits::default());
    let command = stage
        .command(ChildLimits::default())
        // Cargo sets it for every test.
        .allow_env("CARGO_MANIFEST_DIR")
        .env("COLOR", "blue");
    stage.start(worker.command(command)).await;
    let events = stage.run("environment", "{}").await;
    let names = events[2].properties["output"].as_str().unwrap().to_owned();
    let set_by_worker = ["PIDS", "COLOR", "CARGO_MANIFEST_DIR"];
    // A shell sets these itself.
    let set_by_shell = ["PWD", "OLDPWD", "SHLVL", "_"];
    for name in names.split(' ') {
        assert!(
            ALLOWED.contains(&name)
                || set_by_worker.contains(&name)
                || set_by_shell.contains(&name)
                || name.starts_with("EVERBUS_"),
            "{name} got through"
        );
    }
    for name in set_by_worker {
        assert!(
            names.split(' ').any(|n| n == name),
            "{name} is missing: {names}"
        );
    }
    let events = stage.run("who", "{}").await;
    let who = &events[2].properties["output"];
    assert_eq!(*who, json!(["req-who", "", "1", "default"]));
    stage.bus.shutdown().await.unwrap();
}

// conformance: workflow/props-task-completed: requestId, output, durationMs, exitCode, usage with its three counts
#[tokio::test]
async fn usage_and_output_can_be_reported() {
    let stage = Stage::new().await;
    stage.start(stage.worker(ChildLimits::default())).await;
    let events = stage.run("usage", "{}").await;
    let completed = &events[2].properties;
    assert_eq!(completed["output"], json!({"colors": 7}));
    assert_eq!(
        completed["usage"],
        json!({"inputTokens": 12000, "outputTokens": 3500, "cacheReadTokens": 8000})
    );
    stage.bus.shutdown().await.unwrap();
}

#[tokio::test]
async fn text_can_be_the_output() {
    let stage = Stage::new().await;
    let command = stage
        .command(ChildLimits::default())
        .output(OutputKind::Text);
    let worker = stage.worker(ChildLimits::default()).command(command);
    stage.start(worker).await;
    let events = stage.run("not-json", "{}").await;
    assert_eq!(events[2].properties["output"], "all is well");
    stage.bus.shutdown().await.unwrap();
}

// conformance: workflow/task-child: the output can be written to a file descriptor of its own, as JSON within the limit
#[tokio::test]
async fn the_output_can_have_a_descriptor_of_its_own() {
    let stage = Stage::new().await;
    let limits = ChildLimits::default();
    let command = stage.command(limits).output(OutputKind::Descriptor);
    stage.start(stage.worker(limits).command(command)).await;
    let events = stage.run("descriptor", "{}").await;
    assert_eq!(events[2].properties["output"], json!({"colors": 8}));
    assert_eq!(events[2].properties["usage"]["outputTokens"], 2);
    // Nothing was written to it.
    let events = stage.run("not-json", "{}").await;
    assert_eq!(events[2].properties["output"], json!(null));
    for (name, why) in [
        ("descriptor-not-json", "is not JSON"),
        ("descriptor-huge", "more than"),
    ] {
        let events = stage.run(name, "{}").await;
        assert_eq!(events[2].event_type, "Task Failed");
        let error = events[2].properties["error"].as_str().unwrap();
        assert!(error.contains(why), "{error}");
    }
    stage.bus.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_large_input_reaches_a_child_and_one_that_is_not_read_does_no_harm() {
    let stage = Stage::new().await;
    stage.start(stage.worker(ChildLimits::default())).await;
    // More than a pipe holds.
    let text = "x".repeat(500_000);
    let input = json!({ "text": text }).to_string();
    let events = stage.run("echo", &input).await;
    assert_eq!(events[2].properties["output"]["text"], text);
    let events = stage.run("reads-nothing", &input).await;
    assert_eq!(events[2].properties["output"], json!({"done": true}));
    stage.bus.shutdown().await.unwrap();
}
