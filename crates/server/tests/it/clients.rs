//! Clients that others wrote: the CloudEvents SDK of Python, and schemathesis with the OpenAPI document.

use std::process::Stdio;

use everbus_testkit::servers::python_packages;
use serde_json::{Value, json};
use tokio::process::Command;

use crate::api::Api;

/// `xtask/src/servers.rs` installs these.
const CLOUDEVENTS: &str = "cloudevents-2";
const SCHEMATHESIS: &str = "schemathesis-4";

// needs: the cloudevents package of Python
// conformance: operations/cloudevents-sdk: the CloudEvents SDK of Python publishes in binary, structured and batch mode, and a repetition is known
#[tokio::test(flavor = "multi_thread")]
async fn the_sdk_of_cloudevents_publishes_in_three_modes() {
    let Some(packages) = python_packages(CLOUDEVENTS, "cloudevents/core") else {
        return;
    };
    let api = Api::start().await;
    let script = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/python/cloudevents_client.py"
    );
    let done = Command::new("python3")
        .arg(script)
        .arg(format!("http://{}/v1/events", api.address))
        .env("PYTHONPATH", packages)
        .stdin(Stdio::null())
        .output()
        .await
        .unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
    let out = String::from_utf8(done.stdout).unwrap();
    let told: Vec<Value> = out
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let modes: Vec<&Value> = told.iter().map(|told| &told["mode"]).collect();
    assert_eq!(modes, ["binary", "structured", "batch", "again"]);
    for told in &told {
        let again = told["mode"] == "again";
        assert_eq!(told["status"], 201, "{told}");
        assert_eq!(told["answer"]["items"][0]["duplicate"], again, "{told}");
    }
    for (number, payload) in [
        (1, json!({ "total": 1.5, "town": "Zürich" })),
        (2, json!({ "total": 2.5, "town": "Zürich" })),
        (3, json!({ "total": 3 })),
        (4, json!({ "total": 4 })),
    ] {
        let path = format!("/v1/events/sdk-{number}?source=/sdk/python");
        let event = &api.get(&path, None).await.ok(200)["event"];
        assert_eq!(event["type"], "orders.order.placed", "{event}");
        assert_eq!(event["payload"], payload);
        let time = event["occurred_at"].as_str().unwrap();
        assert!(
            time.starts_with(&format!("2026-03-01T12:00:0{number}")),
            "{time}"
        );
        assert!(event.to_string().contains("Zürich"), "{event}");
        assert!(event.to_string().contains("kept"), "{event}");
    }
    api.stop().await;
}

/// How many examples each operation gets: few in CI, more by hand with `EVERBUS_SCHEMATHESIS=200`.
fn examples() -> String {
    std::env::var("EVERBUS_SCHEMATHESIS").unwrap_or_else(|_| "3".to_owned())
}

// needs: schemathesis
// conformance: operations/openapi-schemathesis: schemathesis finds no server error and no status, content type or body that the OpenAPI document does not have
#[tokio::test(flavor = "multi_thread")]
async fn the_server_answers_as_its_openapi_document_says() {
    let Some(packages) = python_packages(SCHEMATHESIS, "schemathesis") else {
        return;
    };
    let api = Api::start().await;
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new("python3");
    command
        .args(["-m", "schemathesis.cli", "--no-color", "run"])
        .arg(format!("http://{}/openapi.json", api.address))
        .args(["--phases", "examples,coverage,fuzzing"])
        .args(["--max-examples", &examples(), "--seed", "7", "--no-shrink"])
        .args(["--checks", "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"])
        // One worker: threads that parse Python code at the same time fail in CPython 3.11 (AST recursion depth).
        .args(["--request-timeout", "60", "--workers", "1", "--continue-on-failure"])
        // An endless answer, and a consumer that would post to any address that is made up.
        .args(["--exclude-path", "/v1/events/stream"])
        .args(["--exclude-path", "/v1/webhooks/{name}"])
        .current_dir(folder.path())
        .env("PYTHONPATH", packages)
        .stdin(Stdio::null());
    let done = command.output().await.unwrap();
    let out = String::from_utf8_lossy(&done.stdout);
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{out}{said}");
    // It did test something.
    assert!(out.contains("cases"), "{out}");
    api.get("/readyz", None).await.ok(200);
    api.stop().await;
}
