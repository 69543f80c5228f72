//! Events of other senders, whose large fields are in an object that their properties name.

use everbus::dialects::encode;
use everbus::overflow::{Collect, Overflow};
use everbus::{Bus, Code, DeadLetter, Dialect, Event, FailureKind, Json};
use serde_json::{Value, json};

use super::{Shelf, stored};
use crate::support::{on_every_engine, recorder};

const KEY: &str = "events/req-123/ddf71f63-b036-4ac7-ad0f-77a7fdfca352-payload.json";

/// A document as a sender of the *workflow* specification writes it.
fn document(n: u32, place: &Value) -> Vec<u8> {
    let event = Event::builder("Task Completed")
        .tenant("acme")
        .app("pictures")
        .entity("TASK", "req-123")
        .foreign_id(format!("ddf71f63-{n}"))
        .json(&json!({ "requestId": "req-123", "_s3Overflow": place }));
    encode(&event.build().unwrap(), Dialect::Workflow).unwrap()
}

fn put(shelf: &Shelf, key: &str, object: &str) {
    let path = shelf.objects().join(key);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, object).unwrap();
}

async fn given_up(bus: &Bus, document: &[u8]) -> DeadLetter {
    let published = bus.publish(Dialect::Workflow.document(document)).await;
    let receipt = published.unwrap();
    receipt.settled().await.unwrap();
    let mut letters = bus.dead_letters().get(receipt.id()).await.unwrap();
    assert_eq!(letters.len(), 1);
    letters.remove(0)
}

// conformance: workflow/overflow-foreign: an event that arrives with _s3Overflow in its properties is made whole for its handlers and all other readers
#[tokio::test]
async fn the_large_fields_of_another_sender_are_fetched() {
    on_every_engine(|lab| async move {
        let shelf = Shelf::new(lab);
        let bus = shelf.open().await;
        let (handler, mut seen) = recorder(|_| Ok(()));
        bus.subscribe("Task Completed")
            .group("g")
            .handler(handler)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let objects = shelf.objects();
        let object = r#"{"outputs":[{"file":"a.png"}],"claudeOutput":"large"}"#;
        put(&shelf, KEY, object);
        let place = json!({ "bucket": objects.to_str().unwrap(), "key": KEY });
        let document = document(1, &place);
        let published = bus.publish(Dialect::Workflow.document(&document)).await;
        let receipt = published.unwrap();
        let whole = json!({
            "requestId": "req-123",
            "outputs": [{ "file": "a.png" }],
            "claudeOutput": "large",
        });
        assert_eq!(seen.next().await.json::<Value>().unwrap(), whole);
        receipt.settled().await.unwrap();
        // The log keeps what came, and every reader sees the whole.
        let record = stored(&bus, receipt.id()).await;
        let kept: Value = record.event.json().unwrap();
        assert_eq!(kept["_s3Overflow"], place);
        let read = bus.whole(&record).await.unwrap();
        assert_eq!(read.event.json::<Value>().unwrap(), whole);
        assert_eq!(encode(&record.event, Dialect::Workflow).unwrap(), document);
        // It is the sender's: nothing here deletes it.
        let all = Collect {
            strays_after: std::time::Duration::ZERO,
            ..Collect::default()
        };
        let collected = bus.collect_objects(&all).await.unwrap();
        assert_eq!((collected.orphans, collected.strays), (0, 0));
        assert!(objects.join(KEY).exists());
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: workflow/overflow-foreign: a missing object is the failure that it is for our own, and can be retried
#[tokio::test]
async fn a_missing_object_of_another_sender_is_a_dead_letter() {
    on_every_engine(|lab| async move {
        let shelf = Shelf::new(lab);
        let bus = shelf.open().await;
        let (handler, mut seen) = recorder(|m| {
            m.json::<Value>()?;
            Ok(())
        });
        bus.subscribe("Task Completed")
            .handler(handler)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let bucket = shelf.objects().to_str().unwrap().to_owned();
        put(&shelf, "events/x/list-payload.json", "[1, 2]");
        let list = json!({ "bucket": bucket, "key": "events/x/list-payload.json" });
        let letter = given_up(&bus, &document(1, &list)).await;
        assert!(
            letter.last_error().contains("the object cannot be read"),
            "{letter:?}"
        );
        let letter = given_up(&bus, &document(2, &json!("s3://b/k"))).await;
        assert!(
            letter.last_error().contains("does not say where"),
            "{letter:?}"
        );

        let place = json!({ "bucket": bucket, "key": KEY });
        let letter = given_up(&bus, &document(3, &place)).await;
        assert_eq!(letter.failures[0].kind, FailureKind::Decode);
        assert!(letter.last_error().contains("it is missing"), "{letter:?}");
        assert!(letter.last_error().contains(KEY), "{letter:?}");
        assert_eq!(
            bus.whole(&letter.record).await.unwrap_err().code(),
            Code::ObjectStoreError
        );
        assert!(seen.is_empty(), "the handler did not run");
        put(&shelf, KEY, r#"{"outputs":7}"#);
        bus.dead_letters().retry(letter.event().id()).await.unwrap();
        let payload: Value = seen.next().await.json().unwrap();
        assert_eq!(payload["outputs"], 7);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: workflow/overflow-foreign-place: another bucket, a path or a key with .. is refused, and nothing is read
#[tokio::test]
async fn a_reference_to_another_place_is_refused() {
    on_every_engine(|lab| async move {
        let shelf = Shelf::new(lab);
        let bus = shelf.open().await;
        bus.subscribe("Task Completed")
            .handler(|Json(payload): Json<Value>| async move {
                Err::<(), _>(format!("it got {payload}"))
            })
            .await
            .unwrap();
        bus.start().await.unwrap();
        let bucket = shelf.objects().to_str().unwrap().to_owned();
        let secret = r#"{"password":"swordfish"}"#;
        put(&shelf, "../secret.json", secret);
        put(&shelf, "../other/events/x/y-payload.json", secret);
        put(&shelf, "secret.json", secret);
        put(&shelf, "events/x/y-payload.json", "{}");
        let outside = shelf.directory.path().join("other");
        let outside = outside.to_str().unwrap();
        let elsewhere = "does not read";
        let no_key = "outside the folder of objects";
        for (n, (bucket, key, said)) in [
            (outside, "events/x/y-payload.json", elsewhere),
            ("http://169.254.169.254", "events/x/y", elsewhere),
            ("s3://somebody-elses", "events/x/y", elsewhere),
            ("", "events/x/y-payload.json", elsewhere),
            ("/", "events/x/y", elsewhere),
            (&bucket, "../secret.json", no_key),
            (&bucket, "events/../secret.json", no_key),
            (&bucket, "events/../../secret.json", no_key),
            (&bucket, "events/x/../../../secret.json", no_key),
            (&bucket, "events/%2e%2e/%2e%2e/secret.json", "it is missing"),
            (&bucket, "secret.json", no_key),
            (&bucket, "/etc/passwd", no_key),
        ]
        .into_iter()
        .enumerate()
        {
            let place = json!({ "bucket": bucket, "key": key });
            let n = u32::try_from(n).unwrap();
            let letter = given_up(&bus, &document(n, &place)).await;
            let error = letter.last_error();
            assert!(error.contains(said), "{bucket} {key}: {error}");
            assert!(!error.contains("swordfish"), "{error}");
        }
        // The place of another sender is read once it is listed.
        let bus = {
            bus.shutdown().await.unwrap();
            let listed = shelf.overflow().also_read(outside);
            shelf.open_with(listed).await
        };
        let place = json!({ "bucket": outside, "key": "events/x/y-payload.json" });
        let document = document(99, &place);
        let receipt = bus.publish(Dialect::Workflow.document(&document)).await;
        let record = stored(&bus, receipt.unwrap().id()).await;
        let whole: Value = bus.whole(&record).await.unwrap().event.json().unwrap();
        assert_eq!(whole["password"], "swordfish");
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: workflow/overflow-foreign-place: without any configured place it is a clear error
#[tokio::test]
async fn without_an_object_store_a_reference_is_an_error() {
    let bus = Bus::builder()
        .overflow(Overflow::default())
        .open("memory:")
        .await
        .unwrap();
    let document = document(1, &json!({ "bucket": "b", "key": KEY }));
    let receipt = bus.publish(Dialect::Workflow.document(&document)).await;
    let record = stored(&bus, receipt.unwrap().id()).await;
    let error = bus.whole(&record).await.unwrap_err();
    assert_eq!(error.code(), Code::ObjectStoreError);
    assert!(
        error.message().contains("no object store is configured"),
        "{error}"
    );
    bus.shutdown().await.unwrap();
}
