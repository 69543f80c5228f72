//! A service without Everbus on the same subjects.

use std::io::Write as _;
use std::process::{Command, Stdio};

use everbus_testkit::servers::require;
use omni::events::MessageReceived;
use serde_json::{Value, json};

use crate::support::{System, message};

/// `Some` if the client library is installed.
fn client() -> Option<()> {
    let probe = Command::new("python3")
        .args(["-c", "import nats"])
        .stderr(Stdio::null())
        .status();
    let found = probe.is_ok_and(|status| status.success());
    let found = found
        .then_some(())
        .ok_or_else(|| "it is missing".to_owned());
    require("the Python client of NATS", "pip install nats-py", found)
}

// conformance: omni/example-interop: a plain NATS client in Python publishes a message.received and reads the identity.resolved that follows
// conformance: omni/handler-identity: the handler of the example runs as a durable group on JetStream
// needs: nats-server, the Python client of NATS
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plain_client_sends_a_message_and_reads_who_wrote_it() {
    let Some((system, url)) = System::on_nats().await else {
        return;
    };
    let Some(()) = client() else {
        return;
    };
    let payload: MessageReceived = message(1, "whatsapp", "+49", &Value::Null);
    let document = json!({
        "type": "message.received", "payload": payload, "id": "webhook-1",
        "timestamp": "2026-01-02T03:04:05.000Z", "source": "python",
    });
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/clients/message.py");
    let mut python = Command::new("python3")
        .args([script, &url])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = python.stdin.take().unwrap();
    write!(input, "{document}").unwrap();
    drop(input);
    let waiting = tokio::task::spawn_blocking(move || python.wait_with_output());
    let output = waiting.await.unwrap().unwrap();
    assert!(output.status.success());
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["type"], "identity.resolved");
    assert_eq!(answer["source"], "omni");
    assert_eq!(answer["payload"]["messageId"], "m1");
    assert_eq!(answer["payload"]["isNewPerson"], true);
    // The same event, as Everbus has it.
    let records = system.records("identity.resolved", 1).await;
    assert_eq!(answer["id"], records[0].event.id().to_string());
    let received = system.records("message.received", 1).await;
    assert_eq!(received[0].event.display_id(), "webhook-1");
}
