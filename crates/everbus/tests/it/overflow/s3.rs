//! Overflow to S3, against moto where it can be had.
//!
//! Credentials and endpoint come from the environment, which a test cannot change for itself: the test
//! that starts the server runs the other one in a process of its own.
#![cfg(feature = "s3")]

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use everbus::overflow::{Collect, Overflow, Place, Transferred};
use everbus::{Bus, Event, Retention};
use serde_json::json;

struct Server {
    child: Child,
    port: u16,
}

impl Server {
    /// Waits until it takes connections; whether it did before it ended.
    fn answers(&mut self) -> bool {
        let begin = Instant::now();
        loop {
            let answers = TcpStream::connect(("127.0.0.1", self.port)).is_ok();
            // One that ended may have met another program that answers in its place.
            if self.child.try_wait().unwrap().is_some() {
                return false;
            }
            if answers {
                return true;
            }
            assert!(
                begin.elapsed() < Duration::from_secs(300),
                "moto_server does not answer"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A private server, or `None` (said aloud) where it cannot be had. Its port was free a moment before; if
/// another process was quicker, the server ends, and there is another try.
fn moto() -> Option<Server> {
    for _ in 0..20 {
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let mut server = moto_on(port)?;
        if server.answers() {
            return Some(server);
        }
    }
    panic!("moto_server does not start");
}

fn moto_on(port: u16) -> Option<Server> {
    let started = Command::new("moto_server")
        .args(["-H", "127.0.0.1", "-p", &port.to_string()])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let Ok(child) = started else {
        let required = std::env::var("EVERBUS_REQUIRE_SERVERS").is_ok_and(|v| v == "1");
        assert!(
            !required,
            "moto_server is required: pip install 'moto[server]'"
        );
        eprintln!("SKIPPED: moto_server is not installed (pip install 'moto[server]')");
        return None;
    };
    Some(Server { child, port })
}

fn make_bucket(port: u16) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let request = format!(
        "PUT /shop HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

// conformance: memory/overflow-s3: objects go to S3 by URL and come back from there
// needs: moto_server
#[test]
fn objects_go_to_s3_and_come_back() {
    let Some(server) = moto() else { return };
    make_bucket(server.port);
    let ran = Command::new(std::env::current_exe().unwrap())
        .args([
            "--ignored",
            "--exact",
            "overflow::s3::with_a_server",
            "--nocapture",
        ])
        .env(
            "AWS_ENDPOINT_URL",
            format!("http://127.0.0.1:{}", server.port),
        )
        .env("AWS_ALLOW_HTTP", "true")
        .env("AWS_REGION", "us-east-1")
        .env("AWS_ACCESS_KEY_ID", "test")
        .env("AWS_SECRET_ACCESS_KEY", "test")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(
        ran.status.success() && said.contains("1 passed"),
        "{said}{}",
        String::from_utf8_lossy(&ran.stderr)
    );
}

#[tokio::test]
#[ignore = "needs a server; objects_go_to_s3_and_come_back runs it"]
async fn with_a_server() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("bus.db");
    let overflow = Overflow::to("s3://shop/a/prefix");
    let bus = Bus::builder()
        .overflow(overflow)
        .open(file.to_str().unwrap())
        .await
        .unwrap();
    let event = Event::builder("task.done")
        .entity("TASK", "../req 1")
        .json(&json!({ "a": 1, "outputs": "x".repeat(3 << 20), "input": [1, 2, 3] }))
        .build()
        .unwrap();
    bus.publish(event.clone()).await.unwrap();
    assert!(bus.publish(event.clone()).await.unwrap().is_duplicate());
    let found = bus
        .lookup()
        .unwrap()
        .find(event.id())
        .await
        .unwrap()
        .remove(0);
    let overflow = found.event.overflow().unwrap();
    assert_eq!(overflow.bucket, "shop");
    let key = format!("a/prefix/events/..%2Freq%201/{}-", event.id());
    assert!(overflow.key.starts_with(&key), "{}", overflow.key);
    assert_eq!(bus.whole(&found).await.unwrap().event, event);
    travels(&directory, overflow).await;
    let everything = Retention {
        max_len: Some(0),
        ..Retention::default()
    };
    bus.maintenance().unwrap().prune(everything).await.unwrap();
    let collect = Collect {
        strays_after: Duration::ZERO,
        ..Collect::default()
    };
    let collected = bus.collect_objects(&collect).await.unwrap();
    assert_eq!((collected.orphans, collected.strays), (1, 0));
    let error = bus.whole(&found).await.unwrap_err();
    assert!(error.to_string().contains("it is missing"), "{error}");
    bus.shutdown().await.unwrap();
}

/// The object goes into a directory, as into a backup, and from there to another prefix; what is there is
/// not overwritten.
async fn travels(directory: &tempfile::TempDir, reference: &everbus_core::Overflow) {
    let place = |url: &str| Place::of(&Overflow::to(url), directory.path()).unwrap();
    let (s3, backup) = (place("s3://shop/a/prefix"), directory.path().join("backup"));
    let there = Place::directory(&backup);
    assert_eq!(
        bring(&there, &s3, reference).await.unwrap(),
        Transferred::Copied
    );
    assert_eq!(
        bring(&there, &s3, reference).await.unwrap(),
        Transferred::Present
    );
    let copy = backup.join(&reference.key);
    assert_eq!(copy.metadata().unwrap().len(), reference.size);
    // Back to where it is, and to where it is not.
    assert_eq!(
        bring(&s3, &there, reference).await.unwrap(),
        Transferred::Present
    );
    let mut other = reference.clone();
    other.key = format!("elsewhere/{}", other.key);
    assert_eq!(
        bring(&s3, &there, &other).await.unwrap(),
        Transferred::Missing
    );
    std::fs::create_dir_all(backup.join(&other.key).parent().unwrap()).unwrap();
    std::fs::copy(&copy, backup.join(&other.key)).unwrap();
    assert_eq!(
        bring(&s3, &there, &other).await.unwrap(),
        Transferred::Copied
    );
    other.size += 1;
    let error = bring(&s3, &there, &other).await.unwrap_err();
    assert_eq!(error.code(), everbus::Code::ObjectStoreError, "{error}");
    other.key.push('x');
    std::fs::copy(&copy, backup.join(&other.key)).unwrap();
    let damaged = bring(&s3, &there, &other).await.unwrap();
    assert!(matches!(damaged, Transferred::Damaged(_)), "{damaged:?}");
}

async fn bring(
    to: &Place,
    from: &Place,
    reference: &everbus_core::Overflow,
) -> everbus::Result<Transferred> {
    to.bring(from, reference).await
}
