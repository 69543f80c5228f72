//! `everbus outbox`: the relay as a process of its own, and what it says.

use std::io::{BufRead as _, BufReader};
use std::process::Child;

use everbus::outbox::Outbox;
use everbus::rusqlite::Connection;
use everbus::{Event, EventId};
use serde_json::{Value, json};

use crate::support::{Ran, Shop, signal, wait_until};

/// A database of another program beside the file of the bus.
struct Orders {
    shop: Shop,
    db: Connection,
}

impl Orders {
    fn new() -> Self {
        let shop = Shop::new();
        let db = Connection::open(shop.path("shop.db")).unwrap();
        db.pragma_update(None, "journal_mode", "WAL").unwrap();
        Outbox::create_tables(&db).unwrap();
        Self { shop, db }
    }

    fn fill(&mut self, from: u64, n: u64) {
        let tx = self.db.transaction().unwrap();
        for number in from..from + n {
            let event = Event::builder("order.placed")
                .json(&json!({ "n": number }))
                .key(format!("key-{}", number % 7))
                .build()
                .unwrap();
            Outbox::new().enqueue(&tx, event).unwrap();
        }
        tx.commit().unwrap();
    }

    fn bad_row(&self, id: &str) {
        self.db
            .execute(
                "INSERT INTO event_outbox (event_id, event_type, payload, attempts) VALUES (?1, 'order.placed', '{', 4)",
                [id],
            )
            .unwrap();
    }

    fn outbox(&self, arguments: &[&str]) -> Ran {
        self.shop
            .run(&[&["outbox"], arguments, &["--outbox", "shop.db"]].concat())
    }

    fn relay(&self, arguments: &[&str]) -> Child {
        let all = [&["outbox", "relay", "--outbox", "shop.db"], arguments].concat();
        self.shop.command(&all).spawn().unwrap()
    }

    fn count(&self, status: &str) -> u64 {
        let sql = "SELECT count(*) FROM event_outbox WHERE status = ?1";
        self.db
            .query_row(sql, [status], |r| r.get::<_, i64>(0))
            .unwrap() as u64
    }

    /// The numbers that arrived, in their order, and how many events there are.
    fn arrived(&self) -> Vec<u64> {
        let arguments = [
            "-o",
            "json",
            "tail",
            "order.placed",
            "--from",
            "first",
            "--no-follow",
        ];
        let events = self.shop.run(&arguments).lines();
        let number = |event: &Value| event["payload"]["n"].as_u64().unwrap();
        events.iter().map(number).collect()
    }

    /// Everything arrived, once, and in order for each key.
    fn assert_complete(&self, n: u64) {
        let arrived = self.arrived();
        let mut sorted = arrived.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..n).collect::<Vec<_>>());
        for key in 0..7 {
            let of_key: Vec<u64> = arrived.iter().copied().filter(|n| n % 7 == key).collect();
            assert!(of_key.is_sorted(), "key {key}: {of_key:?}");
        }
    }
}

// conformance: memory/cli-outbox-relay: `everbus outbox relay` is a process of its own; Ctrl-C stops it cleanly
#[test]
fn a_relay_runs_as_a_process_and_stops_on_ctrl_c() {
    let mut orders = Orders::new();
    orders.fill(0, 300);
    let relay = orders.relay(&["-o", "json"]);
    wait_until("the first are sent", || orders.count("sent") == 300);
    orders.fill(300, 50);
    wait_until("those that came later are sent", || {
        orders.count("sent") == 350
    });
    let status = orders.outbox(&["status", "-o", "json"]).json();
    let holder = status["relay"].as_str().unwrap();
    assert!(
        holder.contains(&format!("process {}", relay.id())),
        "{status}"
    );
    signal(&relay, "-INT");
    let ended = Ran::from(relay.wait_with_output().unwrap());
    let last = ended.lines().pop().unwrap();
    assert_eq!((&last["sent"], &last["failed"]), (&json!(350), &json!(0)));
    orders.assert_complete(350);
    let status = orders.outbox(&["status", "-o", "json"]).json();
    assert_eq!(status.get("relay"), None, "the lease is given back");
    assert_eq!(
        (&status["pending"], &status["sent"]),
        (&json!(0), &json!(350))
    );
}

// conformance: memory/cli-outbox-status: `everbus outbox status` shows the backlog and its age, what failed, and who relays
// conformance: memory/cli-outbox-failed: failed rows are listed and retried from the command line
#[test]
fn the_backlog_and_what_failed_are_shown_and_retried() {
    let mut orders = Orders::new();
    orders.fill(0, 3);
    orders.bad_row("bad-1");
    orders.bad_row("bad-\u{1b}[31m2");
    let status = orders.outbox(&["status", "-o", "json"]).json();
    assert_eq!(
        (&status["pending"], &status["retrying"]),
        (&json!(5), &json!(2))
    );
    assert!(
        status["oldest_pending_ms"].as_u64().unwrap() < 3_600_000,
        "{status}"
    );
    assert!(status["outbox"].as_str().unwrap().ends_with("shop.db"));
    assert!(orders.outbox(&["failed"]).ok().contains("no failed rows"));

    let said = orders.outbox(&["relay", "--once"]).ok();
    assert!(
        said.contains("3 events sent") && said.contains("2 failed for good"),
        "{said}"
    );
    let text = orders.outbox(&["status"]).ok();
    assert!(
        text.contains("WAITING") && text.contains("none") && text.contains("last error"),
        "{text}"
    );
    let text = orders.outbox(&["failed"]).ok();
    assert!(text.contains("bad-1") && !text.contains('\u{1b}'), "{text}");
    let rows = orders.outbox(&["failed", "-o", "json"]).json();
    assert_eq!(
        (&rows[1]["event_id"], &rows[1]["attempts"]),
        (&json!("bad-1"), &json!(5))
    );

    orders.outbox(&["retry", "nobody"]).failed(3, "NotFound");
    assert_eq!(orders.outbox(&["retry"]).code, 2);
    assert!(
        orders
            .outbox(&["retry", "bad-1"])
            .ok()
            .contains("1 row waiting again")
    );
    orders
        .db
        .execute(
            "UPDATE event_outbox SET payload = '{\"n\":3}' WHERE event_id LIKE 'bad%'",
            [],
        )
        .unwrap();
    let all = orders.outbox(&["retry", "--all", "-o", "json"]).json();
    assert_eq!(all["retried"], 1);
    orders.outbox(&["relay", "--once"]).ok();
    assert_eq!((orders.count("sent"), orders.count("failed")), (5, 0));
}

// conformance: memory/outbox-own-cli: without --outbox the outbox is that of the file itself
#[test]
fn the_file_of_the_bus_has_an_outbox_too() {
    let shop = Shop::new();
    shop.run(&["publish", "a.b", "0"]).ok();
    let db = Connection::open(shop.db()).unwrap();
    let event = Event::builder("a.b")
        .json(&1)
        .id(EventId::new())
        .build()
        .unwrap();
    Outbox::new().enqueue(&db, event).unwrap();
    assert_eq!(
        shop.run(&["-o", "json", "outbox", "status"]).json()["pending"],
        1
    );
    let relayed = shop
        .run(&["-o", "json", "outbox", "relay", "--once"])
        .json();
    assert_eq!(relayed["sent"], 1);
    let bad = "INSERT INTO event_outbox (event_id, event_type, payload, status) VALUES ('bad', 'a.b', '2', 'failed')";
    db.execute_batch(bad).unwrap();
    shop.run(&["outbox", "retry", "bad"]).ok();
    let said = shop.run(&["-o", "json", "audit", "list"]).ok();
    assert!(
        said.contains("outbox.retry") && said.contains("bad"),
        "{said}"
    );
    shop.run(&["outbox", "relay", "--once"]).ok();
    // Named, it is the same file.
    let own = shop.run(&["-o", "json", "outbox", "status", "--outbox", "./everbus.db"]);
    assert_eq!(own.json()["sent"], 2);
    let events = shop
        .run(&["-o", "json", "tail", "--from", "first", "--no-follow"])
        .lines();
    assert_eq!(events.len(), 3);
}

// conformance: memory/cli-outbox-audit: a retry in a database of one's own is recorded in the file of the bus; if there is none, the output says so
#[test]
fn a_retry_elsewhere_is_in_the_audit_trail_of_the_bus() {
    let orders = Orders::new();
    for id in ["bad-1", "bad-2", "bad-3"] {
        orders.bad_row(id);
    }
    let fail = "UPDATE event_outbox SET status = 'failed'";
    orders.db.execute_batch(fail).unwrap();
    // There is no bus yet, and none is made for this.
    let said = orders.outbox(&["retry", "bad-1"]).ok();
    assert!(
        said.contains("1 row waiting again") && said.contains("no audit trail"),
        "{said}"
    );
    let said = orders.outbox(&["retry", "bad-2", "-o", "json"]).json();
    assert_eq!(said, json!({ "retried": 1, "audited": false }));
    assert!(!crate::support::exists(&orders.shop.db()));

    orders.shop.run(&["publish", "a.b", "0"]).ok();
    let said = orders.outbox(&["retry", "bad-3"]).ok();
    assert!(!said.contains("audit"), "{said}");
    orders.db.execute_batch(fail).unwrap();
    let said = orders.outbox(&["retry", "--all", "-o", "json"]).json();
    assert_eq!(said, json!({ "retried": 3, "audited": true }));
    let trail = orders.shop.run(&["-o", "json", "audit", "list"]).ok();
    for told in ["outbox.retry", "outbox.retry.done", "bad-3", "shop.db"] {
        assert!(trail.contains(told), "{told}: {trail}");
    }
    orders.shop.run(&["audit", "verify"]).ok();
    // What should be recorded and cannot be is not done.
    orders.db.execute_batch(fail).unwrap();
    std::fs::write(
        orders.shop.path("text"),
        "no bus at all, however long it is",
    )
    .unwrap();
    let refused = orders.outbox(&["retry", "--all", "--db", "text"]);
    assert_ne!(refused.code, 0, "{refused:?}");
    assert_eq!(orders.count("failed"), 3);
}

#[test]
fn what_is_no_outbox_is_said_so() {
    let shop = Shop::new();
    shop.run(&["outbox", "status"]).failed(3, "NoSuchFile");
    shop.run(&["outbox", "relay", "--outbox", "none.db"])
        .failed(3, "NoSuchFile");
    assert!(
        !crate::support::exists(&shop.db()),
        "nothing is made for a mistake"
    );
    std::fs::write(
        shop.path("text"),
        "not a database at all, but long enough to be one, perhaps",
    )
    .unwrap();
    shop.run(&["outbox", "status", "--outbox", "text"])
        .failed(2, "NotAFile");
    let db = Connection::open(shop.path("plain.db")).unwrap();
    db.execute_batch("CREATE TABLE t (x)").unwrap();
    let said = shop
        .run(&["outbox", "status", "--outbox", "plain.db"])
        .failed(3, "NotFound");
    assert!(said.contains("create_tables"), "{said}");
    for bad in [["--batch", "0"], ["--lease", "1ms"], ["--lease", "2m"]] {
        let arguments = [&["outbox", "relay", "--once"], &bad[..]].concat();
        assert_eq!(shop.run(&arguments).code, 2, "{bad:?}");
    }
}

// conformance: memory/outbox-killed: a relay that is killed in the middle loses nothing; another takes over, what comes twice is absorbed
#[test]
fn relays_that_are_killed_lose_nothing() {
    let mut orders = Orders::new();
    let lease = ["--lease", "300ms", "--batch", "10"];
    let (rounds, each) = (6, 400);
    for round in 0..rounds {
        orders.fill(round * each, each);
        let mut relays: Vec<Child> = (0..2).map(|_| orders.relay(&lease)).collect();
        let target = round * each + each / 4;
        wait_until("some are sent", || orders.count("sent") > target);
        // Both, wherever they are.
        for relay in &mut relays {
            relay.kill().unwrap();
            relay.wait().unwrap();
        }
    }
    let mut last = orders.relay(&lease);
    wait_until("everything is sent", || {
        orders.count("sent") == rounds * each
    });
    signal(&last, "-TERM");
    last.wait().unwrap();
    orders.assert_complete(rounds * each);
}

// conformance: memory/outbox-processes: several relay processes share an outbox; one works, another takes over when it is stopped
#[test]
fn several_processes_share_an_outbox() {
    let mut orders = Orders::new();
    let mut relays: Vec<Child> = (0..3)
        // A lease that no stall outlives: one that stops gives it back.
        .map(|_| orders.relay(&["-o", "json", "--lease", "60s"]))
        .collect();
    let mut duplicates = 0;
    let mut sent = 0;
    for round in 0..3 {
        orders.fill(round * 100, 100);
        wait_until("they are sent", || {
            orders.count("sent") == (round + 1) * 100
        });
        let status = orders.outbox(&["status", "-o", "json"]).json();
        let holder = status["relay"].as_str().unwrap().to_owned();
        let working = relays
            .iter()
            .position(|relay| holder.contains(&format!("process {},", relay.id())));
        let mut relay = relays.remove(working.unwrap());
        signal(&relay, "-INT");
        let out = BufReader::new(relay.stdout.take().unwrap());
        let last: Value = out
            .lines()
            .map(|line| serde_json::from_str(&line.unwrap()).unwrap())
            .last()
            .unwrap();
        duplicates += last["duplicates"].as_u64().unwrap();
        sent += last["sent"].as_u64().unwrap();
        relay.wait().unwrap();
    }
    assert_eq!((sent, duplicates), (300, 0), "no double work");
    orders.assert_complete(300);
}
