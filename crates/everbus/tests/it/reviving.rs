//! Dead letters brought back through the bus: in bulk, slowly, corrected; and where failures happened.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use everbus::{
    Bus, Code, DeadLetterFilter, Event, EventId, HandlerError, HandlerResult, Json, Message,
    RetryPace, RetryPolicy, Router, to,
};
use serde_json::{Value, json};

use crate::support::{fine, given_up, on_every_engine, recorder};

const SECOND: Duration = Duration::from_secs(1);

fn all() -> DeadLetterFilter {
    DeadLetterFilter::default()
}

/// Where a failure happened, of an event whose handler fails.
async fn place(bus: &Bus) -> String {
    let letter = given_up(bus, ("a", 1)).await;
    letter.failures[0].backtrace.clone().expect("a place")
}

// conformance: memory/dlq-backtrace: a failure is kept with where it happened
#[tokio::test]
async fn a_failure_says_where_it_happened() {
    async fn panics(_: Message) -> HandlerResult {
        tokio::task::yield_now().await;
        panic!("here")
    }
    async fn fails(_: Message) -> HandlerResult {
        "x".parse::<u32>()?;
        Ok(())
    }
    async fn refuses(_: Message) -> HandlerResult {
        Err(everbus::permanent("no"))
    }
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        bus.start().await.unwrap();
        let here = format!("at {}:", file!());
        let panic = bus.subscribe("a").handler(panics).await.unwrap();
        let panicked = place(&bus).await;
        assert!(panicked.starts_with(&here), "{panicked}");
        bus.unsubscribe(panic).await.unwrap();
        let failing = bus.subscribe("a").handler(fails).await.unwrap();
        let failed = place(&bus).await;
        assert!(failed.starts_with(&here), "{failed}");
        bus.unsubscribe(failing).await.unwrap();
        bus.subscribe("a").handler(refuses).await.unwrap();
        let refused = place(&bus).await;
        assert!(refused.starts_with(&here), "{refused}");
        let lines: Vec<&str> = [&panicked, &failed, &refused]
            .map(|p| p.lines().next().unwrap())
            .to_vec();
        assert!(lines[0] != lines[1] && lines[1] != lines[2], "{lines:?}");
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: omni/dlq-alert-handler: a handler of system.dead_letter learns eventId, eventType and error
#[tokio::test]
async fn a_handler_of_the_system_learns_of_dead_letters() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let (handler, mut everything) = recorder(fine);
        bus.subscribe("*")
            .group("everything")
            .handler(handler)
            .await
            .unwrap();
        let (handler, mut alarms) = recorder(fine);
        bus.subscribe("system.dead_letter")
            .group("alarm")
            .handler(handler)
            .await
            .unwrap();
        let refuse = |_: Message| async { Err::<(), _>(everbus::permanent("no money")) };
        bus.subscribe("order.placed")
            .group("payment")
            .handler(refuse)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("order.placed", 7)).await.unwrap();
        receipt.settled().await.unwrap();
        let alarm: Value = alarms.next().await.json().unwrap();
        assert_eq!(alarm["eventId"], receipt.id().to_string());
        assert_eq!(alarm["eventType"], "order.placed");
        assert_eq!(alarm["error"], "no money");
        assert_eq!(alarm["group"], "payment");
        everything.next().await;
        bus.shutdown().await.unwrap();
        assert!(everything.is_empty(), "* leaves out system.*");
    })
    .await;
}

/// A handler that fails until it is mended, and what it handled.
#[derive(Clone, Default)]
struct Bank {
    mended: Arc<AtomicBool>,
    handled: Arc<Mutex<Vec<Value>>>,
}

impl Bank {
    async fn charge(self, message: Message) -> HandlerResult {
        let amount: Value = message.json()?;
        if !self.mended.load(Ordering::SeqCst) {
            return Err(HandlerError::permanent("the bank is closed"));
        }
        self.handled.lock().unwrap().push(amount);
        Ok(())
    }

    async fn open(&self, count: u32) -> Bus {
        let bus = Bus::builder()
            .retry(RetryPolicy::never())
            .open("memory:")
            .await
            .unwrap();
        let bank = self.clone();
        let charge = bus.subscribe("a").ordered().group("bank");
        charge
            .handler(move |m: Message| bank.clone().charge(m))
            .await
            .unwrap();
        bus.start().await.unwrap();
        for n in 0..count {
            let event = Event::builder("a").json(&n).key("k");
            bus.publish(event).await.unwrap().settled().await.unwrap();
        }
        bus
    }

    fn handled(&self) -> Vec<Value> {
        self.handled.lock().unwrap().clone()
    }
}

// conformance: memory/dlq-retry-rate: a bulk retry keeps to its rate and the order of keys, and says how far it is
#[tokio::test(start_paused = true)]
async fn a_slow_retry_keeps_its_pace_and_the_order() {
    let bank = Bank::default();
    let bus = bank.open(50).await;
    bank.mended.store(true, Ordering::SeqCst);
    let queue = bus.dead_letters();
    let began = tokio::time::Instant::now();
    let mut seen = Vec::new();
    let sent = queue.retry_slowly(all(), 20, |p| {
        seen.push((began.elapsed(), p.retried, p.total));
    });
    assert_eq!(sent.await.unwrap(), 50);
    // Two at a time, ten times a second, in virtual time.
    assert_eq!(seen.len(), 25);
    for (n, (at, retried, total)) in (0u32..).zip(&seen) {
        let due = n * Duration::from_millis(100);
        assert!(
            *at >= due && *at < due + Duration::from_millis(50),
            "step {n} at {at:?}"
        );
        assert_eq!((*retried, *total), (2 * u64::from(n + 1), 50));
    }
    while bank.handled().len() < 50 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let order: Vec<Value> = (0..50).map(|n| json!(n)).collect();
    assert_eq!(bank.handled(), order);
    bus.shutdown().await.unwrap();
}

// conformance: memory/dlq-retry-rate: what fails again during a slow retry is left alone, and dropping it stops it cleanly
#[tokio::test(start_paused = true)]
async fn a_slow_retry_ends_and_can_be_stopped() {
    let bank = Bank::default();
    let bus = bank.open(12).await;
    let queue = bus.dead_letters();
    tokio::time::sleep(SECOND).await;
    // Everything fails once more, and once is enough.
    let mut last = 0;
    let sent = queue.retry_slowly(all(), 5, |p| last = p.retried);
    assert_eq!(sent.await.unwrap(), 12);
    assert_eq!(last, 12);
    while queue.count(all()).await.unwrap() < 12 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // One a step: after three and a half steps four have gone.
    bank.mended.store(true, Ordering::SeqCst);
    let slow = queue.retry_slowly(all(), 5, |_| {});
    let stopped = tokio::time::timeout(Duration::from_millis(700), slow).await;
    assert!(stopped.is_err());
    assert_eq!(queue.count(all()).await.unwrap(), 8);
    tokio::time::sleep(10 * SECOND).await;
    assert_eq!(queue.count(all()).await.unwrap(), 8, "it has stopped");
    let few = RetryPace::per_second(1000).at_most(3);
    assert_eq!(queue.retry_slowly(all(), few, |_| {}).await.unwrap(), 3);
    assert_eq!(
        queue.retry_slowly(all(), u32::MAX, |_| {}).await.unwrap(),
        5
    );
    assert_eq!(
        queue.retry_slowly(all(), 1, |_| {}).await.unwrap(),
        0,
        "none is left"
    );
    let refused = queue.retry_slowly(all(), 0, |_| {}).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidSetting);
    bus.shutdown().await.unwrap();
    let closed = queue.retry_slowly(all(), 1, |_| {}).await.unwrap_err();
    assert_eq!(closed.code(), Code::EventBusShutdownError);
}

// conformance: memory/dlq-preview: a bulk retry can be previewed: how many, of which groups, types and errors
#[tokio::test]
async fn a_preview_says_what_a_bulk_retry_would_send() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let fail = |Json(text): Json<String>| async { Err::<(), _>(HandlerError::new(text)) };
        bus.subscribe("a").group("g").handler(fail).await.unwrap();
        bus.start().await.unwrap();
        for error in ["down", "full", "down"] {
            given_up(&bus, ("a", error)).await;
        }
        let queue = bus.dead_letters();
        let preview = queue.preview(all()).await.unwrap();
        let told: Vec<(&str, u64)> = preview
            .tallies
            .iter()
            .map(|t| (t.error.as_str(), t.count))
            .collect();
        assert_eq!((preview.total, told), (3, vec![("down", 2), ("full", 1)]));
        assert_eq!(queue.count(all()).await.unwrap(), 3, "nothing was sent");
        let down = DeadLetterFilter {
            error: Some("down".into()),
            ..all()
        };
        assert_eq!(queue.retry_all(down).await.unwrap(), 2);
        bus.shutdown().await.unwrap();
    })
    .await;
}

#[derive(serde::Serialize, serde::Deserialize)]
struct OrderPlaced {
    amount: u32,
}

// conformance: memory/dlq-edit-checked: a corrected payload is checked as a publish is; the handler gets it, however old it is
#[tokio::test]
async fn an_edited_event_is_checked_and_handled() {
    on_every_engine(|lab| async move {
        let builder = lab.builder().retry(RetryPolicy::never()).max_payload(1000);
        let bus = lab.open_with(builder).await;
        let amounts = Arc::new(Mutex::new(Vec::new()));
        let seen = amounts.clone();
        let charge = move |Json(order): Json<OrderPlaced>| {
            let seen = seen.clone();
            async move {
                if order.amount > 100 {
                    return Err(HandlerError::permanent("too much"));
                }
                seen.lock().unwrap().push(order.amount);
                Ok(())
            }
        };
        let charge = to(charge).group("payment").max_staleness(60 * SECOND);
        let schema = json!({
            "type": "object",
            "properties": { "amount": { "type": "integer" } },
            "required": ["amount"],
        });
        let router = Router::new().schema("order.placed", 1, schema);
        bus.mount(router.on("order.placed", charge)).await.unwrap();
        let (handler, mut others) = recorder(fine);
        bus.subscribe("order.placed")
            .group("mail")
            .handler(handler)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let letter = given_up(&bus, ("order.placed", OrderPlaced { amount: 1000 })).await;
        others.next().await;
        lab.clock.advance(3600 * SECOND);
        let queue = bus.dead_letters();
        for (payload, code) in [
            ("{\"amount\":", Code::InvalidPayloadError),
            (r#"{"amount":"ten"}"#, Code::ValidationError),
            ("[]", Code::ValidationError),
        ] {
            let refused = queue.edit(&letter, payload).await.unwrap_err();
            assert_eq!(refused.code(), code, "{payload}");
            assert!(queue.corrected(&letter, payload).is_err());
        }
        let large = format!("{{\"amount\":1,\"note\":\"{}\"}}", "x".repeat(1000));
        let refused = queue.edit(&letter, large).await.unwrap_err();
        assert_eq!(refused.code(), Code::PayloadTooLarge);
        assert_eq!(queue.count(all()).await.unwrap(), 1, "it is still open");
        let sent = queue.edit(&letter, r#"{"amount":10}"#).await.unwrap();
        assert!(sent.settled().await.unwrap().dead_lettered.is_empty());
        assert_eq!(*amounts.lock().unwrap(), [10], "although it is an hour old");
        assert!(others.is_empty(), "the others had no trouble with it");
        let kept = queue.get(letter.event().id()).await.unwrap();
        assert_eq!(kept[0].replaced_by, Some(sent.id()));
        let again = queue.edit(&letter, r#"{"amount":10}"#).await.unwrap_err();
        assert_eq!(again.code(), Code::NotFound);
        let none = queue.get(EventId::new()).await.unwrap();
        assert!(none.is_empty());
        bus.shutdown().await.unwrap();
        let closed = queue.edit(&letter, r#"{"amount":10}"#).await.unwrap_err();
        assert_eq!(closed.code(), Code::EventBusShutdownError);
    })
    .await;
}
