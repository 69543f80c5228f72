//! Brokers that refuse single events, and errors that do not say whose fault they are: the order of a key
//! holds, a row that is to blame is given up, and a broker that is gone costs nothing.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use everbus::outbox::Relay;
use everbus::{Bus, Code, Event, ManualClock};
use serde_json::Value;

use crate::faulty::{Faulty, faulty};
use crate::outbox::{Shop, drain, numbered, numbers};

fn number(event: &Event) -> u64 {
    let value: Value = event.json().unwrap();
    // What the relay tells of has no number.
    value["n"].as_u64().unwrap_or(u64::MAX)
}

/// Refuses events by their number.
fn refusing(
    refused: impl Fn(u64) -> Option<Code> + Send + 'static,
) -> impl FnMut(&[Event]) -> Vec<Option<Code>> {
    move |batch| batch.iter().map(|event| refused(number(event))).collect()
}

/// A broker that answers for each event.
async fn picky() -> (Bus, Faulty, ManualClock) {
    let (bus, broker, clock) = faulty().await;
    broker.atomic.store(false, Ordering::SeqCst);
    (bus, broker, clock)
}

fn row(shop: &Shop, what: &str, n: u64) -> String {
    shop.text(&format!(
        "SELECT {what} FROM event_outbox WHERE payload ->> '$.payload.n' = {n}"
    ))
}

// conformance: memory/outbox-single-refusals: where a broker refuses single events of a batch, what follows under the same key waits
#[tokio::test]
async fn what_follows_a_single_refused_event_under_its_key_waits() {
    let (bus, broker, clock) = picky().await;
    let shop = Shop::new();
    for (n, key) in [
        (1, Some("b")),
        (2, Some("a")),
        (3, Some("a")),
        (4, None),
        (5, Some("b")),
        (6, Some("a")),
    ] {
        shop.enqueue(numbered(n, key));
    }
    let refuse = Arc::new(AtomicBool::new(true));
    let refuses = refuse.clone();
    broker.judge(refusing(move |n| {
        (n == 2 && refuses.load(Ordering::SeqCst)).then_some(Code::ValidationError)
    }));
    let relay = Relay::new(&bus, shop.source(&clock));
    relay.run_once().await.unwrap();
    let mut arrived = numbers(&bus).await;
    arrived.sort_unstable();
    assert_eq!(arrived, [1, 4, 5], "2 was refused, 3 and 6 wait for it");
    for n in [3, 6] {
        assert_eq!(row(&shop, "status || attempts", n), "pending0");
    }
    assert_eq!(row(&shop, "status || attempts", 2), "pending1");
    refuse.store(false, Ordering::SeqCst);
    clock.advance(Duration::from_secs(1));
    relay.run_once().await.unwrap();
    assert_eq!(numbers(&bus).await[3..], [2, 3, 6]);
}

// conformance: memory/outbox-any-answers: a row whose stream is full holds its key while others are tried
#[tokio::test]
async fn what_follows_a_full_stream_under_its_key_is_not_tried() {
    let (bus, broker, clock) = faulty().await;
    let shop = Shop::new();
    let of = |n: u64, event_type: &str, key: Option<&str>| {
        let mut event = Event::builder(event_type).json(&serde_json::json!({ "n": n }));
        if let Some(key) = key {
            event = event.key(key);
        }
        event.build().unwrap()
    };
    shop.enqueue(of(1, "full.stream", None));
    shop.enqueue(of(2, "odd.one", None));
    shop.enqueue(of(3, "full.stream", Some("k")));
    shop.enqueue(of(4, "order.placed", Some("k")));
    broker.judge(refusing(|n| match n {
        1 | 3 => Some(Code::Backpressure),
        2 => Some(Code::Internal),
        _ => None,
    }));
    let relay = Relay::new(&bus, shop.source(&clock));
    let _ = relay.run_once().await;
    assert!(!numbers(&bus).await.contains(&4), "3 goes before it");
}

/// A small generator whose seed is told.
struct Random(u64);

impl Random {
    fn seeded() -> Self {
        let seed = std::env::var("EVERBUS_SEED")
            .ok()
            .and_then(|text| text.parse().ok())
            .unwrap_or_else(|| uuid::Uuid::new_v4().as_u128() as u64 | 1);
        eprintln!("EVERBUS_SEED={seed}");
        Self(seed)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

// conformance: memory/outbox-any-answers: the order of a key holds whatever a broker answers, event by event or as a whole
#[tokio::test]
async fn order_holds_whatever_the_answers_are() {
    let mut random = Random::seeded();
    for round in 0..6 {
        let (bus, broker, clock) = faulty().await;
        let atomic = round % 2 == 0;
        broker.atomic.store(atomic, Ordering::SeqCst);
        let shop = Shop::new();
        let mut keys = HashMap::new();
        for n in 0..120 {
            let key = random.below(6);
            let key = (key > 0).then(|| format!("key-{key}"));
            shop.enqueue(numbered(n, key.as_deref()));
            keys.insert(n, key);
        }
        // These never go through; each of the others may fail a few times.
        let poisoned: HashSet<u64> = (0..4).map(|_| random.below(120)).collect();
        let (bad, of_key) = (poisoned.clone(), keys.clone());
        let mut chance = Random(random.below(u64::MAX) | 1);
        let mut failures: HashMap<u64, u32> = HashMap::new();
        let crowded = Arc::new(AtomicUsize::new(0));
        let crowds = crowded.clone();
        broker.judge(move |batch| {
            let numbers: Vec<u64> = batch.iter().map(number).collect();
            let in_batch = numbers.iter().filter_map(|n| of_key.get(n)?.clone());
            let in_batch: Vec<String> = in_batch.collect();
            let different: HashSet<&String> = in_batch.iter().collect();
            if different.len() < in_batch.len() {
                crowds.fetch_add(1, Ordering::SeqCst);
            }
            let judged = numbers.iter().map(|n| {
                if bad.contains(n) {
                    return Some([Code::Internal, Code::InvalidPayloadError][(n % 2) as usize]);
                }
                let failed = failures.entry(*n).or_default();
                if *n == u64::MAX || *failed >= 3 || chance.below(20) > 0 {
                    return None;
                }
                *failed += 1;
                let codes = [Code::Internal, Code::ValidationError, Code::Timeout];
                Some(codes[chance.below(3) as usize])
            });
            judged.collect()
        });
        let relay = Relay::new(&bus, shop.source(&clock)).batch(30);
        drain(&relay, &clock).await;
        assert_eq!(
            atomic,
            crowded.load(Ordering::SeqCst) > 0,
            "one of each key at a time"
        );
        let arrived = numbers(&bus).await;
        let mut by_key: BTreeMap<&String, Vec<u64>> = BTreeMap::new();
        for n in &arrived {
            if let Some(key) = &keys[n] {
                by_key.entry(key).or_default().push(*n);
            }
        }
        for (key, numbers) in by_key {
            assert!(numbers.is_sorted(), "round {round}, {key}: {numbers:?}");
        }
        let mut sorted = arrived;
        sorted.sort_unstable();
        let expected: Vec<u64> = (0..120).filter(|n| !poisoned.contains(n)).collect();
        assert_eq!(sorted, expected, "round {round}");
        for n in poisoned {
            assert_eq!(
                row(&shop, "status || attempts", n),
                "failed5",
                "round {round}"
            );
        }
    }
}

/// Which of the rows never go through.
type Poisoned = fn(u64) -> bool;

// conformance: memory/outbox-unclear: an error that says not whose fault it is counts as an attempt once another row has gone through
#[tokio::test]
async fn a_row_that_always_stumbles_does_not_stop_the_outbox() {
    // At the beginning, in the middle and at the end; more than are tried to find out.
    let cases: [(u64, Poisoned); 4] = [
        (20, |n| n == 0),
        (20, |n| n == 11),
        (20, |n| n == 19),
        (200, |n| n < 50),
    ];
    for (count, poisoned) in cases {
        for atomic in [true, false] {
            let (bus, broker, clock) = faulty().await;
            broker.atomic.store(atomic, Ordering::SeqCst);
            let shop = Shop::new();
            for n in 0..count {
                shop.enqueue(numbered(n, (n % 10 == 0).then_some("k")));
            }
            broker.judge(refusing(move |n| poisoned(n).then_some(Code::Internal)));
            let relay = Relay::new(&bus, shop.source(&clock));
            drain(&relay, &clock).await;
            let mut arrived = numbers(&bus).await;
            arrived.sort_unstable();
            let expected: Vec<u64> = (0..count).filter(|n| !poisoned(*n)).collect();
            assert_eq!(arrived, expected, "{count} rows, atomic: {atomic}");
            let poison = (0..count).filter(|n| poisoned(*n)).count();
            for n in (0..count).filter(|n| poisoned(*n)) {
                assert_eq!(row(&shop, "status || attempts", n), "failed5");
            }
            assert_eq!(
                shop.text("SELECT count(*) FROM dead_letter_events WHERE error LIKE 'Internal:%'"),
                poison.to_string()
            );
        }
    }
}

// conformance: memory/outbox-unclear-outage: if nothing goes through, an unclear error is an outage, costs no attempt and is not tried with every row
#[tokio::test]
async fn a_broker_that_only_stumbles_is_an_outage() {
    for (atomic, code) in [
        (true, Code::Internal),
        (false, Code::Internal),
        (true, Code::LeaseLost),
    ] {
        let (bus, broker, clock) = faulty().await;
        broker.atomic.store(atomic, Ordering::SeqCst);
        let shop = Shop::new();
        for n in 0..500 {
            shop.enqueue(numbered(
                n,
                (n % 2 == 0).then(|| format!("k{n}")).as_deref(),
            ));
        }
        // It goes in the middle of the work, and comes back later.
        let left = Arc::new(Mutex::new(0_usize));
        let allowed = left.clone();
        broker.judge(move |batch| {
            let mut left = allowed.lock().unwrap();
            let judged = batch.iter().map(|_| match left.checked_sub(1) {
                Some(less) => {
                    *left = less;
                    None
                }
                None => Some(code),
            });
            judged.collect()
        });
        let relay = Relay::new(&bus, shop.source(&clock)).max_batch(100);
        for allow in [0, 40, 0, 130, 0] {
            *left.lock().unwrap() = allow;
            broker.batches.lock().unwrap().clear();
            let error = relay.run_once().await.unwrap_err();
            assert_eq!(error.code(), code, "{error}");
            let asked = broker.batches.lock().unwrap().len();
            assert!(allow > 0 || asked < 60, "asked {asked} times");
            assert_eq!(shop.text("SELECT sum(attempts) FROM event_outbox"), "0");
            assert_eq!(relay.stats().rejected, 0);
        }
        *left.lock().unwrap() = usize::MAX;
        relay.run_once().await.unwrap();
        let mut arrived = numbers(&bus).await;
        arrived.sort_unstable();
        assert_eq!(arrived, (0..500).collect::<Vec<_>>());
        assert_eq!(relay.stats().failed, 0);
    }
}

#[tokio::test]
async fn an_outage_for_some_events_of_a_batch_is_no_attempt_and_the_others_are_marked() {
    let (bus, broker, clock) = picky().await;
    let shop = Shop::new();
    for n in 0..10 {
        shop.enqueue(numbered(n, Some(&format!("k{}", n % 5))));
    }
    broker.judge(refusing(|n| (n == 1).then_some(Code::Timeout)));
    let relay = Relay::new(&bus, shop.source(&clock));
    assert_eq!(relay.run_once().await.unwrap_err().code(), Code::Timeout);
    let sent =
        "SELECT group_concat(n) FROM (SELECT payload ->> '$.payload.n' AS n FROM event_outbox
                WHERE status = 'sent' ORDER BY row)";
    assert_eq!(shop.text(sent), "0,2,3,4", "the first of each key");
    assert_eq!(shop.text("SELECT sum(attempts) FROM event_outbox"), "0");
    broker.judge(refusing(|_| None));
    relay.run_once().await.unwrap();
    let stats = relay.stats();
    assert_eq!((stats.sent, stats.duplicates, stats.rejected), (10, 0, 0));
    assert_eq!(numbers(&bus).await, [0, 2, 3, 4, 1, 5, 7, 8, 9, 6]);
}

#[tokio::test]
async fn a_dead_letter_that_cannot_be_stored_blocks_no_other_row() {
    let (bus, broker, clock) = faulty().await;
    let shop = Shop::new();
    shop.db
        .execute_batch(
            "INSERT INTO event_outbox (event_id, event_type, payload, attempts) VALUES ('bad', 'a.b', '{', 4)",
        )
        .unwrap();
    broker.judge(refusing(|n| (n == u64::MAX).then_some(Code::Internal)));
    let relay = Relay::new(&bus, shop.source(&clock));
    relay.run_once().await.unwrap();
    let bad = "SELECT status || attempts FROM event_outbox WHERE event_id = 'bad'";
    assert_eq!(shop.text(bad), "pending5");
    shop.enqueue(numbered(1, None));
    relay.run_once().await.unwrap();
    assert_eq!(numbers(&bus).await, [1]);
    drain(&relay, &clock).await;
    assert_eq!(shop.text(bad), "failed10");
    assert_eq!(shop.text("SELECT count(*) FROM dead_letter_events"), "1");
}

// conformance: memory/outbox-changed-row: a row that is changed while its event is on the way waits on; the changed event is rejected, since its id was used
#[tokio::test]
async fn a_row_that_is_changed_while_it_is_sent_is_not_marked() {
    let (bus, broker, clock) = faulty().await;
    let shop = Shop::new();
    shop.enqueue(numbered(1, None));
    shop.enqueue(numbered(2, None));
    let path = shop.path.clone();
    let mut changed = false;
    broker.judge(move |batch| {
        if !std::mem::replace(&mut changed, true) {
            let db = everbus::rusqlite::Connection::open(&path).unwrap();
            let change = "UPDATE event_outbox SET payload = json_set(payload, '$.payload.n', 7)
                          WHERE payload ->> '$.payload.n' = 1";
            assert_eq!(db.execute(change, []).unwrap(), 1);
        }
        vec![None; batch.len()]
    });
    let relay = Relay::new(&bus, shop.source(&clock));
    relay.run_once().await.unwrap();
    assert_eq!(numbers(&bus).await, [1, 2]);
    assert_eq!(row(&shop, "status", 2), "sent");
    assert_eq!(
        row(&shop, "status || attempts", 7),
        "pending1",
        "it was not sent"
    );
    let error = row(&shop, "last_error", 7);
    assert!(
        error.starts_with("IdReused:") && error.contains("event_id of its own"),
        "{error}"
    );
    drain(&relay, &clock).await;
    assert_eq!(row(&shop, "status || attempts", 7), "failed5");
    assert_eq!(numbers(&bus).await, [1, 2]);
}
