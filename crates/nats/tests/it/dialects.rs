//! Services without Everbus on the same subjects.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use everbus::{Bus, Message, RetryPolicy};
use everbus_core::{DeadLetterFilter, Event, FailureKind, PageRequest, Stream, Streams};
use everbus_nats::Options;
use serde_json::{Value, json};

use crate::server;
use crate::streams::Plain;

fn omni() -> Streams {
    let messages = Stream::new("MESSAGES", ["message.>"])
        .unwrap()
        .dialect("omni");
    let plain = Stream::new("NOTES", ["note.>"]).unwrap();
    Streams::new([messages, plain]).unwrap()
}

async fn bus(url: &str, store: &std::path::Path, options: Options) -> Bus {
    let broker = everbus_nats::open(url, options).await.unwrap();
    let store = everbus_sqlite::open(store, everbus_sqlite::Options::default()).unwrap();
    let clock = Arc::new(everbus_core::SystemClock);
    let engine = everbus::compose(broker, store, clock).await.unwrap();
    Bus::builder().streams(omni()).with_engine(engine).unwrap()
}

type Seen = Arc<Mutex<Vec<Event>>>;

async fn listen(bus: &Bus, seen: &Seen) {
    let seen = seen.clone();
    let handler = move |message: Message| {
        let seen = seen.clone();
        async move {
            seen.lock().unwrap().push(message.event().clone());
            Ok::<(), everbus::HandlerError>(())
        }
    };
    bus.subscribe("message.*")
        .group("reader")
        .retry(RetryPolicy::never())
        .handler(handler)
        .await
        .unwrap();
    bus.start().await.unwrap();
}

async fn until(what: &str, mut so: impl AsyncFnMut() -> bool) {
    let waiting = async {
        while !so().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(60), waiting).await;
    assert!(waited.is_ok(), "waited in vain: {what}");
}

// conformance: omni/nats-interop: a plain NATS client publishes the JSON of the document, and reads what Everbus publishes as the same JSON
// needs: nats-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_that_speaks_omni_shares_the_subjects() {
    let Some(url) = server::account() else { return };
    let folder = tempfile::tempdir().unwrap();
    let bus = bus(&url, &folder.path().join("store.db"), Options::default()).await;
    let seen = Seen::default();
    listen(&bus, &seen).await;
    let plain = Plain::connect(&url).await;
    let document = json!({
        "id": "msg-1", "type": "message.received", "payload": {"text": "hello"},
        "timestamp": "2026-01-01T00:00:00.000Z", "source": "whatsapp", "traceId": "t-1",
    });
    let sent = plain
        .0
        .request("message.received", document.to_string().into());
    let ack: Value = serde_json::from_slice(&sent.await.unwrap().payload).unwrap();
    assert_eq!(ack["stream"], "MESSAGES");
    until("the event of the service", async || {
        seen.lock().unwrap().len() == 1
    })
    .await;
    let event = seen.lock().unwrap()[0].clone();
    assert_eq!(event.display_id(), "msg-1");
    assert_eq!(event.json::<Value>().unwrap(), json!({"text": "hello"}));

    let own = Event::builder("message.sent")
        .json(&json!({"text": "hi"}))
        .tenant("t");
    let own = own.build().unwrap();
    bus.publish(own.clone()).await.unwrap();
    let last = json!({"last_by_subj": "message.sent"});
    let stored = plain.api("STREAM.MSG.GET.MESSAGES", last).await;
    let data = stored["message"]["data"].as_str().unwrap();
    let data = data_encoding::BASE64.decode(data.as_bytes()).unwrap();
    let read: Value = serde_json::from_slice(&data).unwrap();
    assert_eq!(read["type"], "message.sent");
    assert_eq!(read["payload"], json!({"text": "hi"}));
    assert_eq!(read["id"], own.id().to_string());
    until("its own event", async || seen.lock().unwrap().len() == 2).await;
    assert_eq!(
        seen.lock().unwrap()[1],
        own,
        "with what the document has no place for"
    );
    bus.shutdown().await.unwrap();
}

// conformance: contract/nats-foreign-message: a foreign message on a subject is dead-lettered with the raw bytes and the reason, and blocks nothing
// needs: nats-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_foreign_message_is_dead_lettered_with_its_bytes() {
    let Some(url) = server::account() else { return };
    let folder = tempfile::tempdir().unwrap();
    let bus = bus(&url, &folder.path().join("store.db"), Options::default()).await;
    let seen = Seen::default();
    listen(&bus, &seen).await;
    let plain = Plain::connect(&url).await;
    let garbage: &[u8] = b"\xff\x00 not a document";
    plain
        .0
        .publish("message.received", garbage.into())
        .await
        .unwrap();
    plain.0.flush().await.unwrap();
    let own = Event::builder("message.sent").json(&1).build().unwrap();
    bus.publish(own.clone()).await.unwrap();
    until("the event after it", async || {
        seen.lock().unwrap().len() == 1
    })
    .await;
    let letters = bus.engine().dead_letters().unwrap();
    let list = async || {
        let page = letters.list(DeadLetterFilter::default(), PageRequest::default());
        page.await.unwrap().items
    };
    until("the dead letter", async || list().await.len() == 1).await;
    let letter = list().await.remove(0);
    assert_eq!(letter.record.event.payload(), garbage);
    assert_eq!(letter.record.event.event_type(), "message.received");
    assert_eq!(letter.failures[0].kind, FailureKind::Corrupt);
    assert!(
        letter.last_error().contains("omni"),
        "{}",
        letter.last_error()
    );
    assert_eq!(seen.lock().unwrap().len(), 1, "no handler saw it");
    bus.shutdown().await.unwrap();
}

// conformance: contract/nats-foreign-raw: by setting, a foreign message goes to the handler as it is
// needs: nats-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_foreign_message_is_passed_raw_by_setting() {
    let Some(url) = server::account() else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut options = Options::default();
    options.raw_foreign = true;
    let bus = bus(&url, &folder.path().join("store.db"), options).await;
    let seen = Seen::default();
    listen(&bus, &seen).await;
    let plain = Plain::connect(&url).await;
    plain
        .0
        .publish("message.received", "raw".into())
        .await
        .unwrap();
    plain.0.flush().await.unwrap();
    until("the message", async || seen.lock().unwrap().len() == 1).await;
    assert_eq!(&seen.lock().unwrap()[0].payload()[..], b"raw");
    bus.shutdown().await.unwrap();
}
