//! Services in Python, on the real FastStream package, share the streams.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex};

use everbus::{Bus, Message, RetryPolicy};
use everbus_core::{DeadLetterFilter, Event, FailureKind, PageRequest, Stream, Streams};
use everbus_redis::Options;
use everbus_testkit::servers::{Flavour, python_packages};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

use crate::plain::{Plain, until};
use crate::server;

const STREAM: &str = "orders:order-placed";

/// A service in Python with these packages.
fn service(packages: &Path, arguments: &[&str]) -> Child {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/python/service.py");
    Command::new("python3")
        .arg(script)
        .args(arguments)
        .env("PYTHONPATH", packages)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}

async fn next_line(lines: &mut Lines<BufReader<ChildStdout>>) -> String {
    let minute = std::time::Duration::from_secs(60);
    let line = tokio::time::timeout(minute, lines.next_line()).await;
    line.unwrap().unwrap().expect("a line of the service")
}

/// Publishes documents with FastStream.
async fn publish(packages: &Path, url: &str, documents: &[Value]) {
    let mut child = service(packages, &[url, "publish", STREAM]);
    let mut input = child.stdin.take().unwrap();
    for document in documents {
        let line = format!("{document}\n");
        input.write_all(line.as_bytes()).await.unwrap();
    }
    drop(input);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(next_line(&mut lines).await, "published");
    assert!(child.wait().await.unwrap().success());
}

fn document(n: u64) -> Value {
    json!({
        "event_id": format!("order-{n}"), "event_type": "orders.order.placed", "event_version": 1,
        "timestamp": "2026-03-01T12:00:00Z", "source": "order-service",
        "correlation_id": format!("c-{n}"), "trace_id": null, "payload": {"order": n},
    })
}

/// A bus that writes the documents of the framework, with a store beside it.
async fn bus(url: &str, folder: &Path) -> Bus {
    let orders = Stream::new("orders", ["orders.>"])
        .unwrap()
        .dialect("framework");
    let broker = everbus_redis::open(url, Options::default()).await.unwrap();
    let file = folder.join("store.db");
    let store = everbus_sqlite::open(&file, everbus_sqlite::Options::default()).unwrap();
    let clock = Arc::new(everbus_core::SystemClock);
    let engine = everbus::compose(broker, store, clock).await.unwrap();
    let table = Streams::new([orders]).unwrap();
    Bus::builder().streams(table).with_engine(engine).unwrap()
}

type Seen = Arc<Mutex<Vec<(Event, u32)>>>;

async fn listen(bus: &Bus, seen: &Seen) {
    let seen = seen.clone();
    let handler = move |message: Message| {
        let seen = seen.clone();
        async move {
            let event = message.event().clone();
            seen.lock().unwrap().push((event, message.attempt()));
            Ok::<(), everbus::HandlerError>(())
        }
    };
    bus.subscribe("orders.order.placed")
        .group("notification-service")
        .retry(RetryPolicy::never())
        .handler(handler)
        .await
        .unwrap();
    bus.start().await.unwrap();
}

/// The packages of a version, and a database.
fn setting(version: &str) -> Option<(PathBuf, String)> {
    let packages = python_packages(version, "faststream/redis")?;
    Some((packages, server::database(Flavour::Redis)?))
}

async fn both_ways(packages: PathBuf, url: String) {
    let folder = tempfile::tempdir().unwrap();
    let bus = bus(&url, folder.path()).await;
    let seen = Seen::default();
    listen(&bus, &seen).await;
    // From FastStream to Everbus.
    let tried = json!({"headers": {"x-retry-count": "2"}, "event": document(2)});
    publish(&packages, &url, &[document(1), tried]).await;
    until("the events of the service", async || {
        seen.lock().unwrap().len() == 2
    })
    .await;
    let got = seen.lock().unwrap().clone();
    for (n, (event, _)) in got.iter().enumerate() {
        assert_eq!(event.display_id(), format!("order-{}", n + 1));
        assert_eq!(event.json::<Value>().unwrap(), json!({"order": n + 1}));
        assert_eq!(event.correlation_id(), format!("c-{}", n + 1));
    }
    assert_eq!((got[0].1, got[1].1), (1, 3), "its retries count");
    // From Everbus to FastStream, in a group of its own.
    let plain = Plain::connect(&url).await;
    let create = ["XGROUP", "CREATE", STREAM, "python-service", "$"];
    plain.ask(&create).await.unwrap();
    let mut child = service(&packages, &[&url, "consume", STREAM, "python-service", "2"]);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(next_line(&mut lines).await, "ready");
    for n in [3, 4] {
        let event = Event::builder("orders.order.placed")
            .json(&json!({"order": n}))
            .source("everbus")
            .correlation_id("c")
            .build()
            .unwrap();
        bus.publish(event.clone()).await.unwrap();
        let read: Value = serde_json::from_str(&next_line(&mut lines).await).unwrap();
        assert_eq!(read["event_id"], event.id().to_string());
        assert_eq!(read["event_type"], "orders.order.placed");
        assert_eq!(read["payload"], json!({"order": n}));
        assert_eq!(read["correlation_id"], "c");
    }
    assert!(child.wait().await.unwrap().success());
    until("FastStream has acked", async || {
        let pending = plain.text(&["XPENDING", STREAM, "python-service"]).await;
        pending.starts_with("int(0)")
    })
    .await;
    until("its own events", async || seen.lock().unwrap().len() == 4).await;
    bus.shutdown().await.unwrap();
}

// conformance: framework/redis-flow: a publisher and a consumer group exchange OrderPlaced over orders:order-placed
// conformance: framework/dlq-retry-count: x-retry-count of a message from FastStream is counted as attempts
// conformance: framework/framework-faststream: services on FastStream 0.5.34 produce to and consume from the same streams, both ways
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faststream_0_5_shares_the_streams() {
    let Some((packages, url)) = setting("faststream-0.5.34") else {
        return;
    };
    both_ways(packages, url).await;
}

// conformance: framework/framework-faststream: services on the newest FastStream, with its binary format, produce to and consume from the same streams, both ways
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_newest_faststream_shares_the_streams() {
    let Some((packages, url)) = setting("faststream-latest") else {
        return;
    };
    both_ways(packages, url).await;
}

// conformance: contract/redis-faststream-group: a FastStream service and a bus share the work of one group: each event goes to one of them
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_is_shared_with_faststream() {
    let Some(packages) = python_packages("faststream-latest", "faststream/redis") else {
        return;
    };
    let Some(url) = server::database(Flavour::Redis) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let bus = bus(&url, folder.path()).await;
    let seen = Seen::default();
    let arguments = [
        url.as_str(),
        "consume",
        STREAM,
        "notification-service",
        "1000",
    ];
    let mut child = service(&packages, &arguments);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(next_line(&mut lines).await, "ready");
    listen(&bus, &seen).await;
    let theirs = Arc::new(Mutex::new(Vec::new()));
    let noted = theirs.clone();
    let reading = tokio::spawn(async move {
        while let Ok(Some(line)) = lines.next_line().await {
            let read: Value = serde_json::from_str(&line).unwrap();
            noted
                .lock()
                .unwrap()
                .push(read["payload"]["order"].as_u64().unwrap());
        }
    });
    let ours = || -> Vec<u64> {
        let seen = seen.lock().unwrap();
        let order = |event: &Event| event.json::<Value>().unwrap()["order"].as_u64().unwrap();
        seen.iter().map(|(event, _)| order(event)).collect()
    };
    // Until both have had some.
    let mut published = 0;
    let both = async || {
        for _ in 0..10 {
            let event = Event::builder("orders.order.placed").json(&json!({"order": published}));
            bus.publish(event.build().unwrap()).await.unwrap();
            published += 1;
        }
        !theirs.lock().unwrap().is_empty() && !ours().is_empty()
    };
    until("both have handled some", both).await;
    let total = || theirs.lock().unwrap().len() + ours().len();
    until("all are handled", async || total() as u64 >= published).await;
    child.start_kill().unwrap();
    reading.await.unwrap();
    let mut all: Vec<u64> = theirs
        .lock()
        .unwrap()
        .iter()
        .copied()
        .chain(ours())
        .collect();
    all.sort_unstable();
    assert_eq!(all, (0..published).collect::<Vec<u64>>(), "each once");
    bus.shutdown().await.unwrap();
}

// conformance: contract/redis-foreign-message: a message in no known format is dead-lettered with its raw bytes and the reason, and blocks nothing
// needs: redis-server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_foreign_message_is_dead_lettered_with_its_bytes() {
    let Some(url) = server::database(Flavour::Redis) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let bus = bus(&url, folder.path()).await;
    let seen = Seen::default();
    listen(&bus, &seen).await;
    let plain = Plain::connect(&url).await;
    let mut add = redis::cmd("XADD");
    let garbage: &[u8] = b"\xff\x00 not a document";
    add.arg(STREAM).arg("*").arg("__data__").arg(garbage);
    let _: String = add.query_async(&mut plain.0.clone()).await.unwrap();
    let own = Event::builder("orders.order.placed").json(&json!({"n": 1}));
    let own = own.build().unwrap();
    bus.publish(own).await.unwrap();
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
    assert_eq!(letter.failures[0].kind, FailureKind::Corrupt);
    assert!(
        letter.last_error().contains("framework"),
        "{}",
        letter.last_error()
    );
    assert_eq!(seen.lock().unwrap().len(), 1, "no handler saw it");
    bus.shutdown().await.unwrap();
}
