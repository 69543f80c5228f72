//! The inbox: what a group has handled it does not handle again.

mod transactions;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use everbus::core::{BoxFuture, Inbox};
use everbus::{
    Bus, Code, Context, Engine, Error, Event, EventBuilder, EventId, GroupName, HandlerError, Json,
    Message, Receipt, Recorded, Result, Retention, Router, Timestamp, skip, to,
};
use tokio::sync::Notify;
use tracing::Level;

use crate::logs::lines_about;
use crate::support::{
    Lab, counted, eventually, fine, handled, in_time, is_done, on_every_durable_engine,
    on_every_engine, published, recorder, wait_for_retry,
};

/// Forgets the log, so that an event with the same id is new to the engine, and publishes it again.
pub(crate) async fn once_more(bus: &Bus, event: EventBuilder) -> Receipt {
    let everything = Retention {
        max_len: Some(0),
        ..Retention::default()
    };
    bus.maintenance().unwrap().prune(everything).await.unwrap();
    let receipt = handled(bus, event).await;
    assert!(
        !receipt.is_duplicate(),
        "the engine still had the first one"
    );
    receipt
}

/// Whether the inbox of a group has an event.
async fn on_record(bus: &Bus, group: &str, receipt: &Receipt) -> bool {
    let lookup = bus.lookup().unwrap();
    let records = lookup.find(receipt.id()).await.unwrap();
    let group: GroupName = group.parse().unwrap();
    let answers = bus.engine().inbox().unwrap().handled(group, records);
    answers.await.unwrap()[0]
}

// conformance: handlers/idempotent: an idempotent handler skips what its group has handled; others handle it again.
// conformance: outbox/3-skip: if (event_id, consumer_name) exists the handler is skipped.
// conformance: framework/guarantee-check: event_id is checked against the processed events; if already processed it is acknowledged and skipped.
#[tokio::test]
async fn what_was_handled_is_not_handled_again() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let (once, mut by_once) = recorder(fine);
        let (often, mut by_often) = recorder(fine);
        let router = Router::new()
            .on("a", to(once).idempotent().group("once"))
            .on("a", to(often).group("often"));
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        let id = EventId::new();
        let event = || Event::builder("a").id(id);
        let first = handled(&bus, event()).await;
        assert!(on_record(&bus, "once", &first).await);
        assert!(
            !on_record(&bus, "often", &first).await,
            "nobody asked for it"
        );
        by_once.next().await;
        by_often.next().await;
        let second = once_more(&bus, event()).await;
        by_often.next().await;
        assert!(by_once.is_empty(), "it was handled before");
        assert!(is_done(&bus, second.seq(), "once").await);
        let stats = counted(&bus).await;
        let once = &stats.groups[&"once".parse().unwrap()];
        assert_eq!((once.handled, once.inbox_hits), (1, 1));
        let said = lines_about(second.id());
        assert_eq!(said.len(), 1, "{said:?}");
        assert_eq!(said[0].level, Level::INFO);
        assert_eq!(said[0].field("group"), Some("once"));
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/idempotent-restart: what was handled before a restart is not handled after it.
#[tokio::test]
async fn what_was_handled_before_a_restart_is_not_handled_again() {
    on_every_durable_engine(|lab| async move {
        let id = EventId::new();
        let event = || Event::builder("a").id(id);
        let (handler, mut seen) = recorder(fine);
        let handler = Arc::new(handler);
        let open = async || {
            let bus = lab.open_impatient().await;
            let handler = handler.clone();
            let subscribe = bus.subscribe("a").group("g").idempotent();
            subscribe
                .handler(move |message: Message| handler(message))
                .await
                .unwrap();
            bus.start().await.unwrap();
            bus
        };
        let bus = open().await;
        handled(&bus, event()).await;
        seen.next().await;
        bus.shutdown().await.unwrap();
        let bus = open().await;
        once_more(&bus, event()).await;
        assert!(seen.is_empty());
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/idempotent-failures: neither a failure nor a skip is remembered as handled.
// conformance: outbox/3-after: the record is inserted after successful handling only.
// conformance: fault-8/failure: an attempt that failed leaves no record, so the next one is not discarded as a duplicate.
#[tokio::test]
async fn only_what_was_handled_is_remembered() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let runs = Arc::new(AtomicUsize::new(0));
        let count = runs.clone();
        let handler = move |context: Context, Json(skips): Json<bool>| {
            count.fetch_add(1, Ordering::SeqCst);
            async move {
                match (skips, context.attempt()) {
                    (true, _) => Err(skip("not today")),
                    (false, 1) => Err(HandlerError::new("not yet")),
                    _ => Ok(()),
                }
            }
        };
        bus.subscribe("a")
            .idempotent()
            .group("g")
            .handler(handler)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", false)).await.unwrap();
        let state = wait_for_retry(&bus, receipt.seq(), "g", 1).await;
        assert!(!on_record(&bus, "g", &receipt).await, "it failed");
        lab.clock.set(state.due_at.unwrap());
        receipt.settled().await.unwrap();
        assert_eq!(runs.load(Ordering::SeqCst), 2);
        assert!(on_record(&bus, "g", &receipt).await);

        let id = EventId::new();
        let skipped = || Event::builder("a").id(id).json(&true);
        let receipt = handled(&bus, skipped()).await;
        assert!(!on_record(&bus, "g", &receipt).await, "it was skipped");
        once_more(&bus, skipped()).await;
        assert_eq!(runs.load(Ordering::SeqCst), 4, "asked again");
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/idempotent-key: the record is per group and per tenant.
#[tokio::test]
async fn groups_and_tenants_have_records_of_their_own() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let (handler, mut seen) = recorder(fine);
        let subscribe = async |group: &str, handler| {
            let subscribe = bus.subscribe("a").group(group).idempotent();
            subscribe.handler(handler).await.unwrap();
        };
        let handler = Arc::new(handler);
        let shared = || {
            let handler = handler.clone();
            move |message| handler(message)
        };
        subscribe("x", shared()).await;
        bus.start().await.unwrap();
        let id = EventId::new();
        let of = |tenant: &str| Event::builder("a").id(id).tenant(tenant);
        handled(&bus, of("north")).await;
        assert_eq!(seen.next().await.tenant(), Some("north"));
        // The same id of another tenant is another event.
        handled(&bus, of("south")).await;
        assert_eq!(seen.next().await.tenant(), Some("south"));
        // Another group has handled nothing yet.
        subscribe("y", shared()).await;
        once_more(&bus, of("north")).await;
        assert_eq!(seen.next().await.group().as_str(), "y");
        assert!(seen.is_empty());
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/idempotent-follow-ups: what was handled before emits nothing again.
#[tokio::test]
async fn an_event_that_was_handled_emits_nothing_again() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        bus.subscribe("a")
            .idempotent()
            .handler(|| async { ("b", 1) })
            .await
            .unwrap();
        bus.start().await.unwrap();
        let id = EventId::new();
        let event = || Event::builder("a").id(id);
        handled(&bus, event()).await;
        assert_eq!(published(&bus, "b").await.len(), 1);
        once_more(&bus, event()).await;
        // The first one went with the log.
        assert!(published(&bus, "b").await.is_empty());
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: fault-8/cut-off: while a handler runs there is no record; cut off by a shutdown, its event comes again and is handled.
#[tokio::test]
async fn an_event_cut_off_in_its_handler_is_not_taken_for_handled() {
    on_every_durable_engine(|lab| async move {
        let (begun, runs) = (Arc::new(Notify::new()), Arc::new(AtomicUsize::new(0)));
        let open = async |hangs: bool| {
            let bus = lab.open().await;
            let (begun, runs) = (begun.clone(), runs.clone());
            let handler = move || {
                runs.fetch_add(1, Ordering::SeqCst);
                let begun = begun.clone();
                async move {
                    begun.notify_one();
                    if hangs {
                        std::future::pending::<()>().await;
                    }
                }
            };
            let subscribe = bus.subscribe("a").group("g").idempotent();
            subscribe.handler(handler).await.unwrap();
            bus.start().await.unwrap();
            bus
        };
        let bus = open(true).await;
        let receipt = bus.publish(("a", 1)).await.unwrap();
        begun.notified().await;
        assert!(!on_record(&bus, "g", &receipt).await);
        let report = bus.shutdown_within(Duration::ZERO).await.unwrap();
        assert_eq!(report.abandoned, 1);

        let bus = open(false).await;
        // However it was left: taken over at once, or when its lease ends.
        lab.clock.advance(Duration::from_secs(3600));
        eventually("it is handled", || async {
            is_done(&bus, receipt.seq(), "g").await
        })
        .await;
        assert_eq!(runs.load(Ordering::SeqCst), 2);
        assert!(on_record(&bus, "g", &receipt).await);
        bus.shutdown().await.unwrap();
    })
    .await;
}

/// An inbox that gives no answer while it is told so.
#[derive(Clone)]
struct Silent {
    inner: Arc<dyn Inbox>,
    silent: Arc<AtomicBool>,
    asked: Arc<Mutex<Vec<EventId>>>,
}

impl Inbox for Silent {
    fn handled(
        &self,
        group: GroupName,
        events: Vec<Arc<Recorded>>,
    ) -> BoxFuture<'_, Result<Vec<bool>>> {
        let ids = events.iter().map(|record| record.event.id());
        self.asked.lock().unwrap().extend(ids);
        if self.silent.load(Ordering::SeqCst) {
            let error = Error::new(Code::Busy, "planted");
            return Box::pin(std::future::ready(Err(error)));
        }
        self.inner.handled(group, events)
    }

    fn forget(&self, before: Timestamp) -> BoxFuture<'_, Result<u64>> {
        self.inner.forget(before)
    }
}

// conformance: handlers/idempotent-no-answer: events whose inbox gives no answer are given back without an attempt; those that need none go on.
#[tokio::test]
async fn without_an_answer_of_the_inbox_nothing_is_handled_or_failed() {
    on_every_engine(|lab: Lab| async move {
        let inner = lab.open().await;
        let engine = inner.engine().clone();
        let silent = Silent {
            inner: engine.inbox.clone().unwrap(),
            silent: Arc::new(AtomicBool::new(true)),
            asked: Arc::default(),
        };
        let engine = Engine {
            inbox: Some(Arc::new(silent.clone())),
            ..engine
        };
        let bus = lab.builder().with_engine(engine).unwrap();
        let (handler, mut seen) = recorder(fine);
        let (plain, mut plainly) = recorder(fine);
        let router = Router::new()
            .on("a", to(handler).idempotent())
            .on("b", plain)
            .group("g");
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 1)).await.unwrap();
        bus.publish(("b", 1))
            .await
            .unwrap()
            .settled()
            .await
            .unwrap();
        plainly.next().await;
        eventually("the inbox was asked", || async {
            !silent.asked.lock().unwrap().is_empty()
        })
        .await;
        assert!(seen.is_empty());
        silent.silent.store(false, Ordering::SeqCst);
        in_time(
            &lab,
            &bus,
            Duration::from_secs(1),
            "it comes again",
            || async { is_done(&bus, receipt.seq(), "g").await },
        )
        .await;
        assert_eq!(seen.next().await.attempt(), 1, "no attempt was spent");
        let asked = silent.asked.lock().unwrap().clone();
        assert!(
            asked.iter().all(|id| *id == receipt.id()),
            "only for those that need it"
        );
        bus.shutdown().await.unwrap();
    })
    .await;
}
