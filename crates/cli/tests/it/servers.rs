//! The commands on engines with a server: PostgreSQL, NATS alone, and NATS with a file beside it.

use std::time::Duration;

use everbus::{Bus, HandlerError};
use everbus_testkit::servers::{Nats, Postgres};
use serde_json::{Value, json};

use crate::support::{Ran, Shop, on_runtime};

/// A bus on a server, and the options that name it.
struct Remote {
    shop: Shop,
    broker: String,
    store: Option<String>,
}

impl Remote {
    fn postgres() -> Option<Self> {
        let url = Postgres::shared()?.fresh_database();
        Some(Self::new(url))
    }

    fn nats() -> Option<Self> {
        Some(Self::new(Nats::shared()?.fresh_account()))
    }

    fn nats_with_file() -> Option<Self> {
        let mut remote = Self::nats()?;
        remote.store = Some(format!(
            "sqlite:{}",
            remote.shop.path("history.db").display()
        ));
        Some(remote)
    }

    fn new(broker: String) -> Self {
        Self {
            shop: Shop::new(),
            broker,
            store: None,
        }
    }

    fn arguments<'a>(&'a self, command: &[&'a str]) -> Vec<&'a str> {
        let mut all = vec!["--broker", &*self.broker];
        if let Some(store) = &self.store {
            all.extend(["--store", store]);
        }
        all.extend(command);
        all
    }

    fn run(&self, command: &[&str]) -> Ran {
        let ran = self.shop.run(&self.arguments(command));
        // Whatever a command says, it does not say a password.
        let secret = self.broker.split("://").nth(1).and_then(|rest| {
            let (user, _) = rest.split_once('@')?;
            user.split_once(':').map(|(_, password)| password)
        });
        if let Some(secret) = secret.filter(|secret| secret.len() > 6) {
            assert!(!ran.err.contains(secret), "{ran:?}");
        }
        ran
    }

    #[track_caller]
    fn json(&self, command: &[&str]) -> Value {
        self.run(&[&["-o", "json"], command].concat()).json()
    }

    #[track_caller]
    fn lines(&self, command: &[&str]) -> Vec<Value> {
        self.run(&[&["-o", "json"], command].concat()).lines()
    }

    /// Publishes an event that the group `payment` refuses for good, and waits for the dead letter.
    fn dead_letter(&self) -> String {
        on_runtime(async {
            let bus = self.open().await;
            bus.subscribe("card.*")
                .group("payment")
                .name("charge")
                .handler(|| std::future::ready(Err::<(), _>(HandlerError::permanent("no money"))))
                .await
                .unwrap();
            bus.start().await.unwrap();
            let receipt = bus.publish(("card.used", 7)).await.unwrap();
            let settled = async {
                loop {
                    let groups = bus.engine().broker.inspect().await.unwrap();
                    let payment = groups.iter().find(|g| g.name.as_str() == "payment");
                    let archived = everbus::archive_lag(bus.engine()).await.unwrap();
                    let archived = archived.is_none_or(|lag| lag.unsettled() == 0);
                    if archived && payment.is_some_and(|g| g.lag().unsettled() == 0) {
                        break;
                    }
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            };
            tokio::time::timeout(Duration::from_secs(120), settled)
                .await
                .unwrap();
            bus.shutdown().await.unwrap();
            receipt.id().to_string()
        })
    }

    /// Handles what waits for the group `payment`, which has money now.
    fn pay(&self) -> Vec<u64> {
        on_runtime(async {
            let bus = self.open().await;
            let (paid, mut got) = tokio::sync::mpsc::unbounded_channel();
            bus.subscribe("card.*")
                .group("payment")
                .name("charge")
                .handler(move |everbus::Json(amount): everbus::Json<u64>| {
                    let _ = paid.send(amount);
                    std::future::ready(())
                })
                .await
                .unwrap();
            bus.start().await.unwrap();
            let first = tokio::time::timeout(Duration::from_secs(120), got.recv()).await;
            bus.shutdown().await.unwrap();
            let mut all = vec![first.unwrap().unwrap()];
            while let Ok(more) = got.try_recv() {
                all.push(more);
            }
            all
        })
    }

    async fn open(&self) -> Bus {
        let mut builder = Bus::builder();
        if let Some(store) = &self.store {
            builder = builder.store(store);
        }
        builder.open(&self.broker).await.unwrap()
    }
}

fn numbers(events: &[Value]) -> Vec<u64> {
    let numbers = events.iter().map(|e| e["payload"].as_u64());
    numbers.map(Option::unwrap).collect()
}

/// What works on every engine: publish, tail, groups, streams, check.
fn moves(bus: &Remote) {
    let first = bus.json(&["publish", "order.placed", "0", "--id", "order-0"]);
    assert_eq!(first["foreign_id"], "order-0");
    let again = bus.json(&["publish", "order.placed", "0", "--id", "order-0"]);
    assert_eq!(again["duplicate"], true, "{again}");
    let other = bus.run(&["publish", "order.placed", "99", "--id", "order-0"]);
    other.failed(2, "IdReused");
    let arguments = bus.arguments(&["publish", "order.placed", "-"]);
    bus.shop.run_with_input(&arguments, "1\n2\n3\n").ok();
    bus.run(&["publish", "user.created", "8"]).ok();

    let tail = ["tail", "order.*", "--from", "first", "--no-follow"];
    assert_eq!(numbers(&bus.lines(&tail)), [0, 1, 2, 3]);
    let group = [&tail[..], &["--group", "audit"]].concat();
    assert_eq!(numbers(&bus.lines(&group)), [0, 1, 2, 3]);
    assert_eq!(bus.lines(&group).len(), 0, "the group has them");

    let groups = bus.json(&["groups"]);
    let audit = groups.as_array().unwrap().iter();
    let audit: Vec<&Value> = audit.filter(|g| g["name"] == "audit").collect();
    assert_eq!(audit.len(), 1, "{groups}");
    assert_eq!(audit[0]["behind"], 0, "{groups}");
    let shown = bus.json(&["groups", "show", "audit"]);
    assert_eq!(shown["group"]["patterns"], json!(["order.*"]));
    bus.run(&["groups", "show", "nobody"])
        .failed(3, "GroupNotFound");

    let streams = bus.json(&["streams"]);
    assert_eq!(streams["streams"].as_array().unwrap().len(), 1, "{streams}");
    let checked = bus.json(&["check"]);
    assert_eq!(checked["ok"], true, "{checked}");
    let said = bus.run(&["check"]).ok();
    assert!(said.contains("durability"), "{said}");
    let offers = &checked["capabilities"];
    let one_step = offers["atomic_dead_letter"].as_bool().unwrap();
    let two_steps = said.contains("a dead letter is stored before its event is acked");
    assert_eq!(two_steps, !one_step, "{said}");
    assert_eq!(said.contains("order: "), offers["order"] == "key", "{said}");
}

/// What needs a store: events, get, dlq, replay into a group.
fn remembers(bus: &Remote) {
    let page = bus.json(&["events", "--type", "order.*"]);
    assert_eq!(page["events"].as_array().unwrap().len(), 4, "{page}");
    let newest = &page["events"][0];
    let id = newest["id"].as_str().unwrap();
    let got = bus.json(&["get", id]);
    assert_eq!(got["event"]["payload"], newest["payload"], "{got}");
    let missing = bus.run(&["get", "no-such-event"]).failed(3, "NotFound");
    assert!(missing.contains("hint: "), "{missing}");

    // A range is looked at first, then replayed into one group.
    let range = ["replay", "--type", "order.*", "--since", "1h"];
    let preview = bus.json(&[&range[..], &["--group", "audit", "--dry-run"]].concat());
    assert_eq!(preview["events"], 4, "{preview}");
    let report = bus.json(&["replay", id, "--group", "audit"]);
    assert_eq!(report["processed"], 1, "{report}");
    let tail = ["tail", "order.*", "--no-follow", "--group", "audit"];
    let again = bus.lines(&tail);
    assert_eq!(again.len(), 1, "{again:?}");
    assert_eq!(again[0]["payload"], newest["payload"]);

    let dead = bus.dead_letter();
    let letters = bus.json(&["dlq", "list"]);
    assert_eq!(
        letters["dead_letters"][0]["event"]["id"], *dead,
        "{letters}"
    );
    let shown = bus.run(&["dlq", "show", &dead]).ok();
    assert!(shown.contains("no money"), "{shown}");
    bus.run(&["dlq", "show", "no-such-event"])
        .failed(3, "NotFound");
    bus.run(&["dlq", "list", "--group", "nobody"])
        .failed(3, "GroupNotFound");
    let retried = bus.json(&["dlq", "retry", &dead]);
    assert_eq!(retried["retried"], 1, "{retried}");
    assert_eq!(bus.pay(), [7]);
    let left = bus.json(&["dlq", "list"]);
    assert_eq!(left["dead_letters"], json!([]), "{left}");
}

// conformance: engines/cli-limits: check names no limit for PostgreSQL
// conformance: engines/cli-postgres: publish, tail, events, get, dlq, groups, replay, outbox, streams and check work on PostgreSQL
// needs: PostgreSQL
#[test]
fn the_commands_work_on_postgres() {
    let Some(bus) = Remote::postgres() else {
        return;
    };
    // A command that reads makes no schema.
    bus.run(&["events"]).failed(3, "NoSuchFile");
    moves(&bus);
    remembers(&bus);
    let status = bus.json(&["outbox", "status"]);
    assert_eq!(status["pending"], 0, "{status}");
}

// conformance: engines/cli-nats-beside: publish, tail, events, get, dlq, groups, replay, streams and check work on NATS with a file beside it
// needs: nats-server
#[test]
fn the_commands_work_on_nats_with_a_file_beside_it() {
    let Some(bus) = Remote::nats_with_file() else {
        return;
    };
    moves(&bus);
    remembers(&bus);
}

// conformance: engines/cli-limits: check says that a dead letter on NATS is stored before its event is acked
// conformance: engines/cli-nats: on NATS alone publish, tail, groups, replay of a range, streams and check work; what needs a store is refused, and the hint names --store
// needs: nats-server
#[test]
fn nats_alone_moves_events_and_names_the_option_for_the_rest() {
    let Some(bus) = Remote::nats() else {
        return;
    };
    moves(&bus);
    let range = ["replay", "--type", "order.*", "--since", "1h", "--yes"];
    let report = bus.json(&range);
    assert_eq!(report["processed"], 4, "{report}");
    let id = "0198c0de-0000-7000-8000-000000000000";
    for command in [
        &["events"][..],
        &["get", id],
        &["dlq", "list"],
        &["dlq", "show", id],
        &["dlq", "retry", "--all"],
        &["replay", id, "--yes"],
        &["payloads", "largest"],
        &["audit", "list"],
        &["retention", "run"],
    ] {
        let ran = bus.run(command);
        let code = ran.code;
        let said = ran.failed(code, "Unsupported");
        assert!(said.contains("--store sqlite:"), "{command:?}: {said}");
    }
    let said = bus.run(&["outbox", "status"]).failed(1, "Unsupported");
    assert!(said.contains("--outbox"), "{said}");
    let said = bus.run(&["backup", "copy.db"]).failed(1, "Unsupported");
    assert!(said.contains("--db"), "{said}");
    let waited = bus.run(&["publish", "order.placed", "9", "--wait=1"]);
    let said = waited.failed(1, "Unsupported");
    assert!(said.contains("everbus groups"), "{said}");
}

// conformance: engines/cli-outbox-postgres: `everbus outbox` makes the tables in PostgreSQL or prints their SQL, and relays them to another engine
// needs: PostgreSQL
// needs: nats-server
#[test]
fn an_outbox_in_postgres_is_relayed_to_nats() {
    let (Some(server), Some(bus)) = (Postgres::shared(), Remote::nats()) else {
        return;
    };
    let insert = "INSERT INTO event_outbox (event_type, payload) VALUES ('order.placed', '5')";
    // Made by the command, and by hand from the SQL that it prints.
    let made = server.fresh_database();
    let said = bus.run(&["outbox", "init", "--outbox", &made]).ok();
    assert!(said.contains("made the tables"), "{said}");
    let by_hand = server.fresh_database();
    let print = ["outbox", "init", "--print-sql", "--outbox", &by_hand];
    let sql = bus.run(&print).ok();
    server.sql_at(&by_hand, &sql);
    let of_broker = ["--broker", &by_hand, "outbox", "init", "--print-sql"];
    assert_eq!(bus.shop.run(&of_broker).ok(), sql);
    for url in [&made, &by_hand] {
        server.sql_at(url, insert);
        let relayed = bus.json(&["outbox", "relay", "--once", "--outbox", url]);
        assert_eq!(relayed["sent"], 1, "{relayed}");
        let status = bus.json(&["outbox", "status", "--outbox", url]);
        assert_eq!(
            (&status["pending"], &status["sent"]),
            (&json!(0), &json!(1))
        );
    }
    let tail = ["tail", "--from", "first", "--no-follow"];
    assert_eq!(numbers(&bus.lines(&tail)), [5, 5]);
    // A database without the table is told as such.
    let none = server.fresh_database();
    let said = bus.run(&["outbox", "status", "--outbox", &none]);
    let said = said.failed(3, "NotFound");
    assert!(said.contains("outbox init"), "{said}");
}

// conformance: engines/cli-servers-bad-input: a server that is away, a wrong scheme, a wrong port and a missing database have exit codes and hints of their own, and no secret is shown
// needs: PostgreSQL
#[test]
fn servers_that_cannot_be_used_are_told_apart() {
    let Some(server) = Postgres::shared() else {
        return;
    };
    let shop = Shop::new();
    let url = server.fresh_database();
    let (base, _) = url.rsplit_once('/').unwrap();
    let missing = format!("{base}/no_such_database");
    for (broker, exit, code) in [
        ("nats://someone:hidden-secret@127.0.0.1:1", 4, "Unavailable"),
        ("mongodb://someone:hidden-secret@host", 2, "InvalidUrl"),
        (&*missing, 2, "InvalidUrl"),
        (
            "postgres://someone:hidden-secret@host:notaport/x",
            2,
            "InvalidUrl",
        ),
    ] {
        let said = shop.run(&["--broker", broker, "publish", "a.b"]);
        let said = said.failed(exit, code);
        assert!(said.contains("hint: "), "{broker}: {said}");
        assert!(!said.contains("hidden-secret"), "{broker}: {said}");
    }
    // A broker of the kind that keeps nothing is no store.
    let store = ["--broker", &url, "--store", "nats://127.0.0.1:1", "events"];
    assert_ne!(shop.run(&store).code, 0);
}
