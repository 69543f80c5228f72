//! The outbox and its relay: everything arrives, in order, once; what is refused ends in the dead letters.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use everbus::core::DEAD_LETTER_EVENT;
use everbus::outbox::{Outbox, OutboxOptions, OutboxSource, Relay};
use everbus::rusqlite::{self, Connection};
use everbus::{
    Bus, Code, Cursor, Event, EventId, ManualClock, OnFull, Recorded, Router, StreamLimit,
    TraceContext, with_correlation_id, with_trace,
};
use serde_json::json;

use crate::faulty::faulty;
use crate::support::{Kind, Lab, eventually, on_every_engine};

/// A database of another program, with an outbox.
pub(crate) struct Shop {
    pub(crate) path: PathBuf,
    pub(crate) db: Connection,
    _dir: tempfile::TempDir,
}

impl Shop {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shop.db");
        let db = Connection::open(&path).unwrap();
        db.pragma_update(None, "journal_mode", "WAL").unwrap();
        Outbox::create_tables(&db).unwrap();
        Self {
            path,
            db,
            _dir: dir,
        }
    }

    pub(crate) fn source(&self, clock: &ManualClock) -> Arc<dyn OutboxSource> {
        let options = OutboxOptions {
            clock: Arc::new(clock.clone()),
            ..OutboxOptions::default()
        };
        Outbox::open_with(&self.path, options).unwrap()
    }

    pub(crate) fn enqueue(&self, event: Event) -> EventId {
        Outbox::new().enqueue(&self.db, event).unwrap()
    }

    /// Events `0..n` over three keys and without one.
    fn fill(&mut self, n: u64) {
        let tx = self.db.transaction().unwrap();
        for number in 0..n {
            let event = match number % 4 {
                3 => numbered(number, None),
                key => numbered(number, Some(&format!("key-{key}"))),
            };
            Outbox::new().enqueue(&tx, event).unwrap();
        }
        tx.commit().unwrap();
    }

    pub(crate) fn text(&self, sql: &str) -> String {
        text(&self.db, sql)
    }
}

pub(crate) fn text(db: &Connection, sql: &str) -> String {
    db.query_row(sql, [], |r| {
        Ok(match r.get_ref(0)? {
            rusqlite::types::ValueRef::Null => "NULL".to_owned(),
            rusqlite::types::ValueRef::Integer(n) => n.to_string(),
            other => String::from_utf8_lossy(other.as_bytes().unwrap()).into_owned(),
        })
    })
    .unwrap_or_else(|e| panic!("{sql}: {e}"))
}

pub(crate) fn numbered(n: u64, key: Option<&str>) -> Event {
    let builder = Event::builder("order.placed").json(&json!({ "n": n }));
    match key {
        Some(key) => builder.key(key),
        None => builder,
    }
    .build()
    .unwrap()
}

fn number(record: &Recorded) -> u64 {
    let value: serde_json::Value = record.event.json().unwrap();
    value["n"].as_u64().unwrap()
}

/// Everything of a type in the log.
pub(crate) async fn stored(bus: &Bus, pattern: &str) -> Vec<Arc<Recorded>> {
    let (mut all, mut after) = (Vec::new(), Cursor::START);
    loop {
        let patterns = vec![pattern.parse().unwrap()];
        let (some, searched) = bus
            .log()
            .unwrap()
            .read(after.clone(), patterns, 1000)
            .await
            .unwrap();
        all.extend(some);
        if after.reaches(&searched) {
            return all;
        }
        after = searched;
    }
}

pub(crate) async fn numbers(bus: &Bus) -> Vec<u64> {
    let all = stored(bus, "order.placed").await;
    all.iter().map(|record| number(record)).collect()
}

/// Runs a relay until nothing waits, moving the clock along.
pub(crate) async fn drain(relay: &Relay, clock: &ManualClock) {
    let time = async {
        loop {
            tokio::time::sleep(Duration::from_millis(5)).await;
            clock.advance(Duration::from_millis(500));
        }
    };
    let drained = tokio::time::timeout(crate::support::PATIENCE, relay.run_until_empty());
    tokio::select! {
        drained = drained => drop(drained.expect("it drains").unwrap()),
        () = time => {}
    }
}

// conformance: outbox/2-dispatch: pending rows are published, then marked sent
// conformance: memory/outbox-relay: a relay takes an outbox into any broker, nothing is lost, nothing comes twice, each event whole
// conformance: framework/outbox-relay: the relay publishes what is unpublished and marks it, in batches of 100
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_arrives_once_in_order_and_whole() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let mut shop = Shop::new();
        shop.fill(1234);
        let whole = Event::builder("order.whole")
            .payload(vec![0_u8, 159, 146, 150])
            .content_type("image/png")
            .source("shop")
            .foreign_id("o-1")
            .tenant("acme")
            .app("web")
            .entity("ORDER", "1")
            .version(3)
            .meta("channel", "web")
            .build()
            .unwrap();
        shop.enqueue(whole.clone());
        let relay = Relay::new(&bus, shop.source(&lab.clock));
        let stats = relay.run_until_empty().await.unwrap();
        assert_eq!((stats.sent, stats.duplicates, stats.rejected), (1235, 0, 0));
        assert_eq!(numbers(&bus).await, (0..1234).collect::<Vec<_>>());
        assert_eq!(stored(&bus, "order.whole").await[0].event, whole);
        assert_eq!(
            shop.text(
                "SELECT count(*) FROM event_outbox WHERE status = 'sent' AND sent_at IS NOT NULL"
            ),
            "1235"
        );
        assert_eq!(
            relay.run_until_empty().await.unwrap().sent,
            1235,
            "nothing is left"
        );
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: memory/outbox-own-file: the file of Everbus has an outbox of its own, and its effects may write to it
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_effect_enqueues_in_the_transaction_of_its_ack() {
    use everbus::{HandlerError, Message, sqlite, to};
    let lab = Lab::new(Kind::Sqlite);
    let bus = lab.open().await;
    async fn book(message: Message) -> sqlite::InTransaction {
        let order: i64 = message.json().unwrap_or_default();
        sqlite::in_transaction(move |tx| {
            tx.execute("CREATE TABLE IF NOT EXISTS booked (n INTEGER)", ())?;
            tx.execute("INSERT INTO booked VALUES (?1)", [order])?;
            Outbox::new().enqueue(tx, ("mail.wanted", order))?;
            if order == 2 {
                return Err(HandlerError::permanent("not this one"));
            }
            Ok(())
        })
    }
    bus.mount(Router::new().on("order.placed", to(book).group("book")))
        .await
        .unwrap();
    bus.start().await.unwrap();
    for order in 1..=3 {
        let receipt = bus.publish(("order.placed", order)).await.unwrap();
        receipt.settled().await.unwrap();
    }
    let relay = Relay::own(&bus).unwrap();
    assert_eq!(relay.run_until_empty().await.unwrap().sent, 2);
    let mails = stored(&bus, "mail.wanted").await;
    let orders: Vec<u64> = mails.iter().map(|m| m.event.json().unwrap()).collect();
    assert_eq!(orders, [1, 3]);
    bus.shutdown().await.unwrap();
    let memory = Lab::new(Kind::Memory).open().await;
    assert_eq!(Relay::own(&memory).unwrap_err().code(), Code::Unsupported);
}

// conformance: outbox/6-context-outbox: a correlation id in the context is stored in the envelope of the outbox
// conformance: framework/outbox-correlation: correlation and trace ids go with the event through the outbox
#[tokio::test]
async fn what_surrounds_an_enqueue_goes_with_the_event() {
    let lab = Lab::new(Kind::Memory);
    let bus = lab
        .builder()
        .source("the relay")
        .open("memory:")
        .await
        .unwrap();
    let shop = Shop::new();
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let enqueue = async {
        let outbox = Outbox::new().source("shop");
        outbox.enqueue(&shop.db, ("order.placed", 1)).unwrap();
        outbox
            .enqueue_batch(&shop.db, [("order.placed", 2)])
            .unwrap();
    };
    let trace_context = TraceContext::parse(trace, None).unwrap();
    with_correlation_id("request-7", with_trace(trace_context, enqueue)).await;
    assert_eq!(
        shop.text("SELECT payload ->> '$.correlation_id' FROM event_outbox"),
        "request-7"
    );
    let relay = Relay::new(&bus, shop.source(&lab.clock));
    // The spans around the relay do not matter.
    with_correlation_id("relay", relay.run_until_empty())
        .await
        .unwrap();
    for record in stored(&bus, "order.placed").await {
        let attributes = record.event.attributes().unwrap();
        assert_eq!(record.event.correlation_id(), "request-7");
        assert_eq!(attributes.trace.as_ref().unwrap().traceparent, trace);
        assert_eq!(attributes.source.as_deref(), Some("shop"));
    }
    shop.db
        .execute_batch("INSERT INTO event_outbox (event_type, payload) VALUES ('order.raw', '1')")
        .unwrap();
    relay.run_until_empty().await.unwrap();
    let raw = &stored(&bus, "order.raw").await[0].event;
    assert_eq!(raw.correlation_id(), raw.id().to_string());
}

// conformance: outbox/4-not-blocking: failures do not block subsequent events
// conformance: framework/outbox-attempts: a row that cannot be published counts its attempts and keeps the last error; after five it is left alone
// conformance: memory/outbox-rejected: a rejected row backs off by rule 8, five attempts, then failed, a dead letter and system.dead_letter
#[tokio::test]
async fn a_row_that_is_rejected_five_times_is_a_dead_letter_and_blocks_only_its_key() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let mut shop = Shop::new();
        shop.fill(8);
        shop.db
            .execute_batch(
                "INSERT INTO event_outbox (event_id, event_type, payload, ordering_key)
                 VALUES ('bad', 'order.placed', '{\"n\":', 'key-1')",
            )
            .unwrap();
        shop.enqueue(numbered(100, Some("key-1")));
        shop.enqueue(numbered(101, Some("key-2")));
        let relay = Relay::new(&bus, shop.source(&lab.clock));
        let bad = |what: &str| shop.text(&format!("SELECT {what} FROM event_outbox WHERE event_id = 'bad'"));
        let mut waited = Vec::new();
        for attempt in 1..5 {
            relay.run_once().await.unwrap();
            assert_eq!(bad("status || attempts"), format!("pending{attempt}"));
            assert!(bad("last_error").contains("cannot be read"), "{}", bad("last_error"));
            // Not a moment earlier.
            let due: i64 = bad("due").parse().unwrap();
            let now = everbus::Clock::now(&lab.clock);
            let wait = everbus::Timestamp::from_micros(due).since(now);
            waited.push(wait.as_secs());
            lab.clock.advance(wait - Duration::from_micros(1));
            relay.run_once().await.unwrap();
            assert_eq!(bad("attempts"), attempt.to_string());
            lab.clock.advance(Duration::from_micros(1));
        }
        assert_eq!(waited, [1, 2, 4, 8]);
        let arrived = numbers(&bus).await;
        assert_eq!(arrived, [0, 1, 2, 3, 4, 5, 6, 7, 101], "others went on");
        assert!(stored(&bus, DEAD_LETTER_EVENT).await.is_empty());

        relay.run_once().await.unwrap();
        assert_eq!(bad("status || attempts"), "failed5");
        assert_eq!(numbers(&bus).await.last(), Some(&100), "its key goes on");
        let letter = shop.text(
            "SELECT event_id || event_type || attempts || (error LIKE '%cannot be read%') FROM dead_letter_events",
        );
        assert_eq!(letter, "badorder.placed51");
        let notices = stored(&bus, DEAD_LETTER_EVENT).await;
        assert_eq!(notices.len(), 1);
        let notice: serde_json::Value = notices[0].event.json().unwrap();
        assert_eq!(notice["eventId"], "bad");
        assert_eq!(notice["eventType"], "order.placed");
        assert_eq!(notice["group"], "outbox");
        assert!(notice["error"].as_str().unwrap().contains("cannot be read"));
        let stats = relay.stats();
        assert_eq!((stats.rejected, stats.failed, stats.sent), (5, 1, 10));
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: memory/outbox-refused-batch: a batch that is refused as a whole is taken apart; an id that was used for another event is a rejection
#[tokio::test]
async fn one_bad_event_does_not_take_its_batch_with_it() {
    on_every_engine(|lab| async move {
        let bus = lab.open_with(lab.builder().max_payload(1000)).await;
        let schema = json!({ "properties": { "n": { "maximum": 900 } } });
        let router = Router::new().schema("order.placed", 1, schema);
        bus.mount(router).await.unwrap();
        let mut shop = Shop::new();
        let used = EventId::new();
        let first = Event::builder("order.placed")
            .id(used)
            .json(&json!({ "n": 1 }));
        bus.publish(first).await.unwrap();
        shop.fill(50);
        shop.enqueue(
            Event::builder("order.placed")
                .id(used)
                .json(&json!({ "n": 2 }))
                .build()
                .unwrap(),
        );
        shop.enqueue(numbered(901, None));
        let large = json!({ "n": 3, "pad": "x".repeat(1000) });
        shop.enqueue(Event::builder("order.placed").json(&large).build().unwrap());
        shop.enqueue(numbered(60, None));
        let again = numbered(61, None);
        bus.publish(again.clone()).await.unwrap();
        shop.enqueue(again);
        let relay = Relay::new(&bus, shop.source(&lab.clock));
        drain(&relay, &lab.clock).await;
        let mut arrived = numbers(&bus).await;
        assert_eq!(arrived.remove(0), 1);
        assert_eq!(arrived.remove(0), 61);
        let expected: Vec<u64> = (0..50).chain([60]).collect();
        assert_eq!(arrived, expected);
        let errors = shop.text(
            "SELECT group_concat(substr(last_error, 1, instr(last_error, ':') - 1)) FROM
             (SELECT last_error FROM event_outbox WHERE status = 'failed' ORDER BY row)",
        );
        assert_eq!(errors, "IdReused,ValidationError,PayloadTooLarge");
        let stats = relay.stats();
        assert_eq!((stats.duplicates, stats.failed, stats.outages), (1, 3, 0));
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: memory/outbox-broker-down: a broker that is down for an hour costs no attempt and loses nothing; the rest follows when it is back
#[tokio::test(start_paused = true)]
async fn a_broker_that_is_down_for_an_hour_is_waited_for() {
    let (bus, broker, clock) = faulty().await;
    let mut shop = Shop::new();
    shop.fill(250);
    let codes = [
        Code::Unavailable,
        Code::Busy,
        Code::DiskFull,
        Code::Timeout,
        Code::ReadOnly,
        Code::Internal,
    ];
    for times in 0..1000 {
        broker.append.add(1, codes[times % codes.len()]);
    }
    let began = tokio::time::Instant::now();
    let relay = Relay::new(&bus, shop.source(&clock));
    let stats = relay.run_until_empty().await.unwrap();
    assert!(
        began.elapsed() > Duration::from_secs(3600),
        "{:?}",
        began.elapsed()
    );
    assert!(stats.outages > 720, "{stats:?}");
    assert_eq!((stats.sent, stats.rejected, stats.failed), (250, 0, 0));
    assert_eq!(numbers(&bus).await, (0..250).collect::<Vec<_>>());
    assert_eq!(shop.text("SELECT sum(attempts) FROM event_outbox"), "0");
    assert!(!stats.waiting);
}

// conformance: contract/relay-outage: an outage whose outcome is unknown costs a row no attempt either, and nothing is stored twice
#[tokio::test(start_paused = true)]
async fn an_outage_after_the_effect_is_no_attempt() {
    for atomic in [true, false] {
        let (bus, broker, clock) = faulty().await;
        broker.atomic.store(atomic, Ordering::SeqCst);
        let mut shop = Shop::new();
        shop.fill(20);
        broker.append.add_after(20, Code::Unavailable);
        let relay = Relay::new(&bus, shop.source(&clock)).max_batch(5);
        let stats = relay.run_until_empty().await.unwrap();
        assert_eq!((stats.sent, stats.rejected, stats.failed), (20, 0, 0));
        assert_eq!(stats.outages, 20, "{stats:?}");
        assert_eq!(numbers(&bus).await, (0..20).collect::<Vec<_>>());
        assert_eq!(shop.text("SELECT sum(attempts) FROM event_outbox"), "0");
    }
}

#[tokio::test]
async fn a_bus_that_is_no_more_ends_the_relay_and_loses_nothing() {
    for code in [Code::StorageFailed, Code::EventBusShutdownError] {
        let (bus, broker, clock) = faulty().await;
        let mut shop = Shop::new();
        shop.fill(5);
        broker.append.add(1, code);
        let relay = Relay::new(&bus, shop.source(&clock));
        let error = relay.run_until_empty().await.unwrap_err();
        assert_eq!(error.code(), code);
        assert_eq!(
            shop.text(
                "SELECT count(*) FROM event_outbox WHERE status = 'pending' AND attempts = 0"
            ),
            "5"
        );
    }
}

#[tokio::test]
async fn an_outage_while_giving_a_row_up_gives_nothing_up() {
    let (bus, broker, clock) = faulty().await;
    let shop = Shop::new();
    shop.db
        .execute_batch(
            "INSERT INTO event_outbox (event_id, event_type, payload, attempts) VALUES ('bad', 'a.b', '{', 4)",
        )
        .unwrap();
    let relay = Relay::new(&bus, shop.source(&clock));
    broker.append.add(1, Code::Timeout);
    assert_eq!(relay.run_once().await.unwrap_err().code(), Code::Timeout);
    assert_eq!(
        shop.text("SELECT status || attempts FROM event_outbox"),
        "pending4"
    );
    relay.run_once().await.unwrap();
    assert_eq!(
        shop.text("SELECT status || attempts FROM event_outbox"),
        "failed5"
    );
    assert_eq!(stored(&bus, DEAD_LETTER_EVENT).await.len(), 1);
}

// conformance: memory/outbox-full-stream: a full stream holds back its own events, not those of others
#[tokio::test(start_paused = true)]
async fn a_full_stream_holds_back_its_own_events_only() {
    let lab = Lab::new(Kind::Memory);
    let limit = StreamLimit::new(2).on_full(OnFull::Reject);
    let builder = lab.builder().stream_limit("slow.event", limit);
    let bus = lab.open_with(builder).await;
    bus.subscribe("slow.*")
        .group("g")
        .handler(|| async {})
        .await
        .unwrap();
    let shop = Shop::new();
    for n in 0..6 {
        let slow = Event::builder("slow.event")
            .json(&json!({ "n": n }))
            .build()
            .unwrap();
        shop.enqueue(slow);
        shop.enqueue(numbered(n, None));
    }
    let relay = Relay::new(&bus, shop.source(&lab.clock));
    relay.run_once().await.unwrap();
    assert_eq!(numbers(&bus).await, [0, 1, 2, 3, 4, 5]);
    let waits = "SELECT count(*) FROM event_outbox WHERE status = 'pending' AND attempts = 0 AND event_type = 'slow.event'";
    assert_eq!(shop.text(waits), "4");
    bus.start().await.unwrap();
    relay.run_until_empty().await.unwrap();
    let slow: Vec<u64> = stored(&bus, "slow.event")
        .await
        .iter()
        .map(|r| number(r))
        .collect();
    assert_eq!(slow, [0, 1, 2, 3, 4, 5]);
    bus.shutdown().await.unwrap();
}

// conformance: memory/outbox-several: several relays at once do no double work, and another goes on when one stops
// conformance: framework/outbox-skip-locked: several relays at once do no double work, and another goes on when one stops
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_relays_share_an_outbox_without_double_work() {
    let lab = Lab::new(Kind::Memory);
    let bus = lab.open().await;
    let mut shop = Shop::new();
    let relays: Vec<_> = (0..4)
        .map(|_| {
            let source = shop.source(&lab.clock);
            Relay::new(&bus, source)
                .lease(Duration::from_millis(200))
                .spawn()
        })
        .collect();
    let mut relays = relays;
    let mut expected = 0;
    while let Some(count) = relays.len().checked_sub(1) {
        shop.fill(500);
        expected += 500;
        let all_sent = || async {
            shop.text("SELECT count(*) FROM event_outbox WHERE status = 'sent'")
                == expected.to_string()
        };
        eventually("everything is sent", all_sent).await;
        let working = relays
            .iter()
            .position(|relay| relay.stats().relaying)
            .unwrap_or(count);
        assert!(relays.iter().filter(|relay| relay.stats().relaying).count() <= 1);
        let stats = relays.remove(working).stop().await.unwrap();
        assert_eq!(stats.duplicates, 0, "{stats:?}");
        assert!(!stats.relaying);
    }
    assert_eq!(numbers(&bus).await.len(), expected);
}

// conformance: memory/outbox-repeat: what was published and not marked is published again, and its id absorbs it
#[tokio::test]
async fn what_was_not_marked_is_published_again_and_absorbed() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let mut shop = Shop::new();
        shop.fill(30);
        let source = shop.source(&lab.clock);
        let relay = Relay::new(&bus, source.clone());
        relay.run_until_empty().await.unwrap();
        // As a relay leaves it that dies before it marks.
        shop.db
            .execute(
                "UPDATE event_outbox SET status = 'pending', sent_at = NULL WHERE row > 10",
                [],
            )
            .unwrap();
        let stats = Relay::new(&bus, source).run_until_empty().await.unwrap();
        assert_eq!((stats.sent, stats.duplicates), (20, 20));
        assert_eq!(numbers(&bus).await, (0..30).collect::<Vec<_>>());
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: memory/outbox-stop: a relay in the background is woken by an enqueue and stops after what is under way
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_in_the_background_follows_and_stops() {
    let lab = Lab::new(Kind::Memory);
    let bus = lab.open().await;
    let shop = Shop::new();
    let relay = Relay::new(&bus, shop.source(&lab.clock)).spawn();
    for n in 0..5 {
        shop.enqueue(numbered(n, None));
        eventually("it is relayed", || async {
            numbers(&bus).await.len() as u64 == n + 1
        })
        .await;
    }
    // And a row that this process was not told of.
    shop.db
        .execute_batch(
            "INSERT INTO event_outbox (event_type, payload) VALUES ('order.placed', '{\"n\":5}')",
        )
        .unwrap();
    eventually("it is found", || async { numbers(&bus).await.len() == 6 }).await;
    let stats = relay.stop().await.unwrap();
    assert_eq!((stats.sent, stats.relaying), (6, false));
    let holder = "SELECT until FROM outbox_relay";
    eventually("the lease is given back", || async {
        shop.text(holder) == "0"
    })
    .await;
    shop.enqueue(numbered(6, None));
    let dropped = Relay::new(&bus, shop.source(&lab.clock)).spawn();
    eventually("it goes on", || async { numbers(&bus).await.len() == 7 }).await;
    drop(dropped);
    eventually("a dropped one stops", || async { shop.text(holder) == "0" }).await;
}

// conformance: memory/outbox-batches: a relay takes 100 rows at a time, more when it is behind
#[tokio::test]
async fn batches_grow_while_there_is_more() {
    let (bus, broker, clock) = faulty().await;
    let mut shop = Shop::new();
    shop.fill(1000);
    let relay = Relay::new(&bus, shop.source(&clock)).max_batch(400);
    relay.run_until_empty().await.unwrap();
    // 100, 200, 400 and the 300 that are left.
    assert_eq!(*broker.batches.lock().unwrap(), [100, 200, 400, 300]);
    broker.batches.lock().unwrap().clear();
    shop.fill(150);
    let fixed = Relay::new(&bus, shop.source(&clock)).max_batch(100);
    fixed.run_until_empty().await.unwrap();
    assert_eq!(*broker.batches.lock().unwrap(), [100, 50]);
    assert_eq!(broker.taken.load(Ordering::SeqCst), 0);
}
