//! The examples do what they say, and the book lists and tests every chapter.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// More than any example needs, even on a busy machine.
const LONGEST: Duration = Duration::from_secs(60);

/// Runs an example and returns its output. It must succeed without arguments and print no errors.
fn run(program: &str) -> String {
    let mut child = Command::new(program)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // It prints less than a pipe holds, so the test need not read before it ends.
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > LONGEST {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.success(),
        "{}\n{stdout}\n{stderr}",
        output.status
    );
    assert_eq!(stderr, "", "{stdout}");
    stdout
}

/// The lines of the output that begin with a text, trimmed.
fn lines<'a>(output: &'a str, about: &str) -> Vec<&'a str> {
    let all = output.lines().map(str::trim);
    all.filter(|line| line.starts_with(about)).collect()
}

// conformance: handlers/example-orders: an example shows the order → notification flow, with retries and a breaker that opens, probes and closes
#[test]
fn orders_survive_an_outage_through_retries_and_a_breaker() {
    let output = run(env!("CARGO_BIN_EXE_orders"));
    assert_eq!(
        lines(&output, "order-"),
        [
            "order-1 attempt 1 (request-1): sent to user-1",
            "order-2 attempt 1 (request-2): connection refused",
            "order-3 attempt 1 (request-2): connection refused",
            "order-4 attempt 1 (request-2): connection refused",
            "order-2 attempt 2 (request-2): connection refused",
            "order-3 attempt 2 (request-2): connection refused",
            // The first probe, which costs order-2 no attempt, and the second.
            "order-2 attempt 3 (request-2): connection refused",
            "order-3 attempt 3 (request-2): sent to user-3",
            "order-4 attempt 2 (request-2): sent to user-4",
            "order-2 attempt 3 (request-2): sent to user-2",
        ],
        "{output}"
    );
    assert_eq!(
        lines(&output, "breaker of"),
        [
            "breaker of notification-service: open, 5 failures",
            "breaker of notification-service: closed, 0 failures",
        ],
        "{output}"
    );
    assert_eq!(
        lines(&output, "ALERT"),
        [
            "ALERT system.circuit_opened: \"notification-service\" (severity \"critical\")",
            "ALERT system.circuit_closed: \"notification-service\" (severity \"info\")",
        ],
        "{output}"
    );
    let summary = "4 orders placed, 6 attempts failed, 4 notifications sent, 0 dead letters.";
    assert_eq!(lines(&output, "4 orders"), [summary], "{output}");
}

// conformance: handlers/example-exactly-once: an example books payments once through a crash between effect and ack and through duplicates
#[test]
fn payments_are_booked_once_through_a_crash_and_duplicates() {
    let output = run(env!("CARGO_BIN_EXE_exactly-once"));
    assert_eq!(
        lines(&output, "payment "),
        [
            "payment 1 is booked and acked",
            "payment 2 is booked and acked",
            "payment 3 is booked and acked",
            "payment 4 is booked, not acked, and the process dies",
            "payment 4 was there already; it is booked and acked",
            "payment 5 is new; it is booked and acked",
            "payment 6 is new; it is booked and acked",
        ],
        "{output}"
    );
    assert_eq!(lines(&output, "It ended"), ["It ended with a crash."]);
    // After the crash, and at the end.
    assert_eq!(lines(&output, "Ada has"), ["Ada has 200", "Ada has 300"]);
    assert_eq!(lines(&output, "Bob has"), ["Bob has 100", "Bob has 300"]);
    assert!(output.contains("a plain handler ran 4 times for the 2 new payments"));
    assert!(output.contains("6 events say that something was booked"));
}

// conformance: handlers/example-middleware: an example puts a tower layer of its own and one of the tower crate around handlers
#[test]
fn layers_see_every_run_of_every_handler_and_hold_it_back() {
    let output = run(env!("CARGO_BIN_EXE_middleware"));
    let mut audit: Vec<String> = (1..=5)
        .map(|order| format!("ship order {order}, attempt 1: done, publishes 1"))
        .collect();
    audit.push("ship order 6, attempt 1: failed: there is no address".to_owned());
    audit.extend((1..=5).map(|order| format!("thank order {order}, attempt 1: done, publishes 0")));
    let (_, written) = output.split_once("The audit:").unwrap();
    let written = written
        .lines()
        .filter_map(|line| line.trim().split_once(" ("));
    let written: Vec<&str> = written.map(|(line, _)| line).collect();
    assert_eq!(written, audit, "{output}");
    let told =
        "The customers of the orders {1, 2, 3, 4, 5} know that their parcels are on the way.";
    assert_eq!(lines(&output, "The customers"), [told], "{output}");
    // Usually two; only more would be wrong.
    let at_once = |most| format!("At most {most} handlers were in the warehouse at once.");
    let most = lines(&output, "At most");
    assert!(most == [at_once(1)] || most == [at_once(2)], "{output}");
}

// conformance: handlers/example-versioning: an example upcasts an old version and retries an unknown one after a deployment
#[test]
fn an_unknown_version_waits_in_the_dead_letters_for_its_handler() {
    let output = run(env!("CARGO_BIN_EXE_versioning"));
    let mut welcomed = lines(&output, "welcome");
    welcomed.sort_unstable();
    assert_eq!(
        welcomed,
        [
            "welcome, Ada (Lovelace)",
            "welcome, Alan (Turing)",
            "welcome, Edsger (Dijkstra) from unknown",
            "welcome, Grace (Hopper) from USA",
        ],
        "{output}"
    );
    let letters = lines(&output, "dead letter of welcome");
    assert_eq!(letters.len(), 1, "{output}");
    let reason = "\"users.user.registered\" version 3, which nothing here can read; known: 1, 2";
    assert!(letters[0].contains(reason), "{output}");
    assert!(output.contains("after 1 attempt"), "{output}");
    assert!(output.contains("0 dead letters are left"), "{output}");
}

// conformance: memory/example-outbox: an order service that crashes between the two writes loses nothing
#[test]
fn orders_and_their_events_survive_crashes_together() {
    let output = run(env!("CARGO_BIN_EXE_outbox-sqlite"));
    assert_eq!(
        lines(&output, "order "),
        [
            "order 1 is stored with its event",
            "order 2 is stored with its event",
            "order 3 is written, its event is not, and the process dies",
            "order 3 is stored with its event",
            "order 4 is stored with its event",
        ],
        "{output}"
    );
    assert_eq!(lines(&output, "It ended"), ["It ended with a crash."; 2]);
    assert_eq!(
        lines(&output, "orders in the database"),
        [
            "orders in the database: 1, 2",
            "orders in the database: 1, 2, 3, 4"
        ]
    );
    assert_eq!(
        lines(&output, "events in the outbox"),
        [
            "events in the outbox:   1, 2",
            "events in the outbox:   1, 2, 3, 4"
        ]
    );
    let packed: Vec<String> = (1..=4)
        .map(|order| format!("the warehouse packs order {order}"))
        .collect();
    // Whether it packs them in this order is not the point here.
    let mut seen = lines(&output, "the warehouse");
    seen.sort_unstable();
    assert_eq!(seen, packed, "{output}");
    assert_eq!(lines(&output, "4 events"), ["4 events sent, 0 failed"]);
}

// conformance: handlers/book-tested: every chapter of the book is listed in its summary, and its Rust snippets run as tests
#[test]
fn every_chapter_is_in_the_summary_and_its_snippets_are_run() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let book = root.join("../docs/book");
    let summary = std::fs::read_to_string(book.join("SUMMARY.md")).unwrap();
    let tested = std::fs::read_to_string(root.join("src/lib.rs")).unwrap();
    let files = std::fs::read_dir(&book).unwrap();
    let mut chapters: Vec<String> = files
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".md") && name != "SUMMARY.md")
        .collect();
    chapters.sort();
    for chapter in &chapters {
        assert!(
            summary.contains(&format!("({chapter})")),
            "{chapter} is not in the summary"
        );
        assert!(
            tested.contains(&format!("\"{chapter}\"")),
            "{chapter} is not tested"
        );
    }
    let listed = summary.matches(".md)").count();
    assert_eq!(
        listed,
        chapters.len(),
        "the summary lists what is not there"
    );
    for expected in [
        "first-events",
        "handlers",
        "failure",
        "idempotency",
        "outbox",
        "testing",
    ] {
        assert!(
            chapters.contains(&format!("{expected}.md")),
            "{expected} is missing"
        );
    }
}

// conformance: framework/brokers-guide: the chapter about engines has a row for each need of the specification's guide, and names the engine that is for it
#[test]
fn the_guide_names_an_engine_for_each_need() {
    let page = include_str!("../../docs/book/engines.md");
    let guide = page.split("## Which one").nth(1).unwrap();
    let guide = guide.split("\n## ").next().unwrap();
    let rows: Vec<&str> = guide
        .lines()
        .filter(|line| line.starts_with("| "))
        .collect();
    for (need, engine) in [
        ("one machine", "a file"),
        ("several machines", "PostgreSQL"),
        ("thousands of events a second", "Redis Streams"),
        ("low latency", "NATS JetStream"),
        ("several regions", "NATS JetStream"),
        ("exactly once", "PostgreSQL"),
        ("audit", "Kafka"),
        ("large volumes", "Kafka"),
        ("complex routing", "not offered"),
        ("need not survive", "not offered"),
        ("tests", "memory"),
    ] {
        let cells = |row: &&&str| {
            let mut cells = row.split(" | ");
            let told = cells.next().is_some_and(|cell| cell.contains(need));
            told && cells.next().is_some_and(|cell| cell.contains(engine))
        };
        assert!(rows.iter().any(|row| cells(&row)), "{need}: {engine}");
    }
    // Every engine with a server has its section, with what happens when it fails.
    for engine in [
        "PostgreSQL",
        "NATS JetStream",
        "Redis Streams",
        "Apache Kafka",
    ] {
        assert!(page.contains(&format!("\n## {engine}\n")), "{engine}");
    }
}
