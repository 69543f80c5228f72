//! `everbus bridge`: as a process that is killed, between engines, and as the way to another engine.

use std::collections::BTreeMap;
use std::process::Child;
use std::time::Duration;

use everbus::{Bus, Cursor, Event, EventId, Pattern};
use serde_json::{Value, json};

use crate::support::{Ran, Shop, exists, on_runtime, signal, wait_until};

/// How many keys the events have.
const KEYS: u64 = 7;

fn event(n: u64) -> Event {
    let builder = Event::builder("order.placed").json(&json!({ "n": n }));
    builder.key(format!("key-{}", n % KEYS)).build().unwrap()
}

pub(crate) async fn open(url: &str) -> Bus {
    Bus::builder().keep_everything().open(url).await.unwrap()
}

pub(crate) async fn publish(bus: &Bus, numbers: std::ops::Range<u64>) {
    for start in numbers.clone().step_by(500) {
        let end = numbers.end.min(start + 500);
        bus.publish_batch((start..end).map(event)).await.unwrap();
    }
}

/// Every event of a log, in its order.
pub(crate) async fn all(bus: &Bus) -> Vec<Event> {
    let log = bus.log().unwrap();
    let (head, mut cursor) = (log.head().await.unwrap(), Cursor::START);
    let mut events = Vec::new();
    while !cursor.reaches(&head) {
        let patterns = vec![Pattern::new("*").unwrap()];
        let (records, searched) = log.read(cursor.clone(), patterns, 1000).await.unwrap();
        events.extend(records.iter().map(|record| record.event.clone()));
        cursor.advance_to(&searched);
    }
    events
}

fn number(event: &Event) -> u64 {
    event.json::<Value>().unwrap()["n"].as_u64().unwrap()
}

/// Everything is there once; with `ordered` in order for each key.
#[track_caller]
fn assert_complete(events: &[Event], n: u64, ordered: bool) {
    let arrived: Vec<u64> = events.iter().map(number).collect();
    let mut sorted = arrived.clone();
    sorted.sort_unstable();
    let twice = sorted.windows(2).filter(|pair| pair[0] == pair[1]).count();
    assert_eq!(twice, 0, "stored twice");
    assert_eq!(sorted, (0..n).collect::<Vec<_>>(), "lost");
    for key in (0..KEYS).filter(|_| ordered) {
        let of_key: Vec<u64> = arrived
            .iter()
            .copied()
            .filter(|n| n % KEYS == key)
            .collect();
        assert!(of_key.is_sorted(), "key {key}: {of_key:?}");
    }
}

pub(crate) fn start(shop: &Shop, from: &str, to: &str, more: &[&str]) -> Child {
    let all = [&["bridge", "--from", from, "--to", to], more].concat();
    shop.command(&all).spawn().unwrap()
}

pub(crate) fn caught_up(shop: &Shop, from: &str, to: &str, more: &[&str]) -> Ran {
    let ends = ["-o", "json", "bridge", "--from", from, "--to", to];
    shop.run(&[&ends[..], &["--until", "caught-up"], more].concat())
}

/// Kills a bridge again and again while it works, then lets one finish.
fn kill_again_and_again(shop: &Shop, from: &str, to: &str, more: &[&str]) -> Vec<Event> {
    const ROUNDS: u64 = 6;
    const EACH: u64 = 2500;
    on_runtime(async {
        let source = open(from).await;
        let target = open(to).await;
        for round in 0..ROUNDS {
            publish(&source, round * EACH..(round + 1) * EACH).await;
            let before = all(&target).await.len();
            let mut child = start(shop, from, to, more);
            // Somewhere in the middle of the work.
            let enough = before + 100 + usize::try_from(round * 120).unwrap();
            while all(&target).await.len() < enough {
                assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            signal(&child, "-KILL");
            child.wait().unwrap();
        }
        let ran = caught_up(shop, from, to, more);
        let stats = ran.json();
        assert_eq!(stats["caught_up"], true, "{stats}");
        let events = all(&target).await;
        source.shutdown().await.unwrap();
        target.shutdown().await.unwrap();
        assert_complete(&events, ROUNDS * EACH, more.contains(&"--ordered"));
        events
    })
}

// conformance: contract/engine-bridges: a bridge that is killed again and again carries every event
// conformance: engines/bridge-killed: a bridge that is killed again and again loses nothing, and doubles nothing at a target that recognises ids; with --ordered the order of each key is kept
#[test]
fn a_bridge_between_files_is_killed_and_nothing_is_lost() {
    for more in [&[][..], &["--ordered"]] {
        let shop = Shop::new();
        let path = |name: &str| shop.path(name).display().to_string();
        kill_again_and_again(&shop, &path("from.db"), &path("to.db"), more);
    }
}

// conformance: engines/bridge-cli: `everbus bridge` carries events between files, tells counts as text and JSON, continues, and stops on Ctrl-C
#[test]
fn a_bridge_tells_what_it_did() {
    let shop = Shop::new();
    let publish = |n: &str| {
        shop.run(&["--db", "from.db", "publish", "a.b", "--count", n])
            .ok()
    };
    publish("3");
    let stats = caught_up(&shop, "from.db", "to.db", &[]).json();
    assert_eq!(
        (&stats["moved"], &stats["lag"]),
        (&json!(3), &json!(0)),
        "{stats}"
    );
    assert_eq!(stats["group"], "everbus.bridge");
    assert!(stats["to"].as_str().unwrap().ends_with("/to.db"), "{stats}");
    publish("2");
    let text = [
        "bridge",
        "--from",
        "from.db",
        "--to",
        "sqlite:to.db",
        "--until",
        "caught-up",
    ];
    assert_eq!(shop.run(&text).ok(), "2 events carried; nothing is left\n");
    let child = start(&shop, "from.db", "to.db", &[]);
    publish("4");
    wait_until("they arrive", || {
        let tail = ["--db", "to.db", "-o", "json", "tail", "--no-follow"];
        shop.run(&tail).lines().len() == 9
    });
    signal(&child, "-INT");
    let ended = Ran::from(child.wait_with_output().unwrap());
    assert!(ended.ok().ends_with("4 events carried\n"));
    // The group is one like others.
    let groups = shop
        .run(&["--db", "from.db", "-o", "json", "groups"])
        .json();
    assert_eq!(groups[0]["name"], "everbus.bridge");
}

// conformance: engines/bridge-cli-refused: what the target refuses is a dead letter of the bridge, and the exit code says so
#[test]
fn refused_events_are_told_by_the_exit_code() {
    let shop = Shop::new();
    for (db, payload) in [("from.db", "1"), ("to.db", "2")] {
        shop.run(&["--db", db, "publish", "a.b", payload, "--id", "same"])
            .ok();
    }
    let arguments = [
        "bridge",
        "--from",
        "from.db",
        "--to",
        "to.db",
        "--until",
        "caught-up",
    ];
    let ran = shop.run(&arguments);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.out.contains("1 refused"), "{ran:?}");
    let list = ran.out.split("refused: everbus ").nth(1).unwrap().trim();
    let words: Vec<&str> = list.split(' ').collect();
    let listed = shop.run(&words).ok();
    assert!(listed.contains("IdReused"), "{listed}");
}

// conformance: engines/bridge-bad-input: ends that are the same, missing or in memory, and options that do not fit, are refused with hints, and make no file
#[test]
fn bridges_that_cannot_work_are_refused() {
    let shop = Shop::new();
    shop.run(&["--db", "a.db", "publish", "a.b"]).ok();
    std::fs::hard_link(shop.path("a.db"), shop.path("link.db")).unwrap();
    for (from, to, exit, code) in [
        ("a.db", "a.db", 2, "InvalidSetting"),
        ("a.db", "./a.db", 2, "InvalidSetting"),
        ("sqlite:a.db", "link.db", 2, "InvalidSetting"),
        ("none.db", "new.db", 3, "NoSuchFile"),
        ("a.db", "memory:", 2, "InvalidUrl"),
        ("mongodb://x", "new.db", 2, "InvalidUrl"),
    ] {
        let said = caught_up(&shop, from, to, &[]);
        assert_eq!(said.code, exit, "{from} {to}: {said:?}");
        assert!(said.err.contains(code), "{from} {to}: {said:?}");
        assert!(said.err.contains("\"hint\""), "{from} {to}: {said:?}");
    }
    assert!(!exists(&shop.path("new.db")));
    for more in [
        &["--db", "a.db"][..],
        &["--pattern", "a.>.b"],
        &["--group", ""],
        &["--until", "never"],
        &["--start", "whenever"],
    ] {
        let ran = caught_up(&shop, "a.db", "new.db", more);
        assert_eq!(ran.code, 2, "{more:?}: {ran:?}");
    }
    assert!(!exists(&shop.path("new.db")));
    // The group of a bridge to one target does not serve another.
    caught_up(&shop, "a.db", "b.db", &[]).ok();
    let said = caught_up(&shop, "a.db", "c.db", &[]);
    assert_eq!(said.code, 1, "{said:?}");
    assert!(said.err.contains("GroupConflict"), "{said:?}");
    caught_up(&shop, "a.db", "c.db", &["--group", "to-c"]).ok();
}

#[cfg(all(feature = "postgres", feature = "nats"))]
mod servers {
    use everbus_testkit::servers::{Nats, Postgres};

    use super::*;

    // conformance: engines/bridge-killed-postgres: a bridge from a file to PostgreSQL that is killed again and again loses and doubles nothing
    // needs: PostgreSQL
    #[test]
    fn a_bridge_to_postgres_is_killed_and_nothing_is_lost() {
        let Some(server) = Postgres::shared() else {
            return;
        };
        let shop = Shop::new();
        let file = shop.path("from.db").display().to_string();
        kill_again_and_again(&shop, &file, &server.fresh_database(), &["--ordered"]);
    }

    // conformance: engines/bridge-nats: events go from a file to NATS and from NATS to PostgreSQL, whole and once, also if the bridge is killed
    // needs: nats-server
    // needs: PostgreSQL
    #[test]
    fn events_go_through_nats() {
        let (Some(nats), Some(postgres)) = (Nats::shared(), Postgres::shared()) else {
            return;
        };
        let shop = Shop::new();
        let file = shop.path("from.db").display().to_string();
        let (nats, postgres) = (nats.fresh_account(), postgres.fresh_database());
        let first = kill_again_and_again(&shop, &file, &nats, &[]);
        let ran = caught_up(&shop, &nats, &postgres, &[]);
        assert!(!ran.err.contains("note: "), "{ran:?}");
        assert_eq!(ran.json()["moved"], first.len());
        // And not back: they came from there.
        let back = caught_up(&shop, &postgres, &file, &[]).json();
        assert_eq!(
            (&back["moved"], &back["returned"]),
            (&json!(0), &json!(first.len()))
        );
        on_runtime(async {
            let target = open(&postgres).await;
            let last = all(&target).await;
            assert_complete(&last, first.len() as u64, false);
            let of = |events: &[Event]| -> BTreeMap<EventId, Event> {
                let whole = |e: &Event| e.clone().made_whole(e.payload().clone());
                events.iter().map(|e| (e.id(), whole(e))).collect()
            };
            let (first, last) = (of(&first), of(&last));
            for (id, event) in &first {
                assert!(last[id].same_body(event), "{id}");
                assert_eq!(last[id].occurred_at(), event.occurred_at());
            }
            target.shutdown().await.unwrap();
        });
    }

    // conformance: engines/bridge-same-server: two URLs of one database are one log, whatever its host is called
    // needs: PostgreSQL
    #[test]
    fn one_database_by_two_names_is_refused() {
        let Some(server) = Postgres::shared() else {
            return;
        };
        let shop = Shop::new();
        let url = server.fresh_database();
        shop.run(&["--broker", &url, "publish", "a.b"]).ok();
        let other = url.replace("127.0.0.1", "localhost");
        assert_ne!(url, other);
        let ran = caught_up(&shop, &url, &other, &[]);
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.err.contains("the same log"), "{ran:?}");
        // Another schema is another log.
        let join = if url.contains('?') { '&' } else { '?' };
        let schema = format!("{url}{join}schema=other");
        let stats = caught_up(&shop, &url, &schema, &[]).json();
        assert_eq!(stats["moved"], 1, "{stats}");
    }
}

#[cfg(feature = "redis")]
mod redis {
    use everbus_testkit::servers::{Redis, RedisOptions};

    use super::*;

    // conformance: engines/bridge-redis: events go from a file to Redis and from Redis to a file, whole and once, also if the bridge is killed, and with the streams that only other programs have written
    // needs: redis-server
    #[test]
    fn events_go_through_redis() {
        let Some(server) = Redis::start(RedisOptions::default()) else {
            return;
        };
        let shop = Shop::new();
        let path = |name: &str| shop.path(name).display().to_string();
        let first = kill_again_and_again(&shop, &path("from.db"), &server.url(), &[]);
        // A program without Everbus.
        server.command("XADD mails:mail-sent * n 1");
        let ran = caught_up(&shop, &server.url(), &path("to.db"), &[]).json();
        assert_eq!(ran["moved"], first.len() + 1, "{ran}");
        on_runtime(async {
            let target = open(&path("to.db")).await;
            let (mails, last): (Vec<Event>, Vec<Event>) = all(&target)
                .await
                .into_iter()
                .partition(|event| event.event_type() == "mails.mail.sent");
            assert_eq!(mails.len(), 1);
            assert_complete(&last, first.len() as u64, false);
            let whole: BTreeMap<EventId, &Event> = first.iter().map(|e| (e.id(), e)).collect();
            for event in &last {
                assert!(event.same_body(whole[&event.id()]), "{}", event.id());
            }
            target.shutdown().await.unwrap();
        });
        // And not back: they came from there.
        let back = caught_up(&shop, &path("to.db"), &server.url(), &[]).json();
        assert_eq!(back["moved"], 0, "{back}");
    }

    // conformance: engines/redis-cli: the commands work on a Redis server: publish, groups, check
    // needs: redis-server
    #[test]
    fn the_commands_work_on_redis() {
        let Some(server) = Redis::start(RedisOptions::default()) else {
            return;
        };
        let shop = Shop::new();
        let url = server.url();
        let run = |words: &[&str]| shop.run(&[&["--broker", &url][..], words].concat());
        run(&["publish", "order.placed", "--count", "3"]).ok();
        let groups = run(&["-o", "json", "groups"]);
        assert_eq!(groups.code, 0, "{groups:?}");
        let checked = shop.run(&["check", "--broker", &url]);
        assert_eq!(checked.code, 0, "{checked:?}");
    }

    // conformance: contract/redis-tls: a build with several crypto providers connects with TLS: a server that is away is Unavailable
    #[test]
    fn an_encrypted_server_that_is_away_is_unavailable() {
        let away = Shop::new().run(&["check", "--broker", "rediss://127.0.0.1:1"]);
        assert!(away.failed(4, "Unavailable").contains("with TLS"));
    }
}
