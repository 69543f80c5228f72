//! The order of the pipeline, one test for each neighbouring pair: swapping the two would show.
//!
//! ```text
//! trace + log + metrics → inbox → staleness → circuit breaker → timeout → user layers → handler → settle
//! ```

use std::sync::Arc;
use std::time::Duration;

use everbus::{
    BoxError, BreakerPolicy, BreakerState, Bus, Clock, Context, Criticality, Event, EventId,
    FailureKind, HandlerError, HandlerService, Json, Message, Outcome, Router, to,
};
use tokio::sync::Notify;
use tower_service::Service;

use crate::breaker::{closed, opened, the_breaker};
use crate::exactly_once::once_more;
use crate::layers::{Diary, Noting, layer};
use crate::logs::{TEST, lines, lines_about};
use crate::support::{
    Lab, counted, fine, given_up, handled, is_done, on_every_engine, published, recorder,
};

const SECOND: Duration = Duration::from_secs(1);

/// A policy that opens at the first failure.
fn touchy() -> BreakerPolicy {
    BreakerPolicy::default().fail_max(1)
}

/// Old enough to be skipped where anything may be.
fn old(lab: &Lab) -> everbus::EventBuilder {
    Event::builder("a").occurred_at(lab.clock.now().minus(1000 * SECOND))
}

// conformance: handlers/order-trace-inbox: what the inbox finds is logged inside the span and counted.
#[tokio::test]
async fn the_span_is_around_the_inbox() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let subscribe = bus.subscribe("a").group("g").idempotent();
        subscribe.handler(|| async {}).await.unwrap();
        bus.start().await.unwrap();
        let id = EventId::new();
        let event = || Event::builder("a").id(id).correlation_id("request-9");
        handled(&bus, event()).await;
        once_more(&bus, event()).await;
        let said = lines_about(id);
        assert_eq!(said.len(), 1, "{said:?}");
        assert_eq!(said[0].around("correlation_id"), Some("request-9"));
        assert_eq!(said[0].around("group"), Some("g"));
        assert_eq!(counted(&bus).await.types["a"].inbox_hits, 1);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/order-inbox-staleness: an event that is stale and was handled before is known to the inbox, not stale.
#[tokio::test]
async fn the_inbox_is_asked_before_the_age() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let subscribe = bus.subscribe("a").idempotent().max_staleness(SECOND);
        subscribe.handler(|| async {}).await.unwrap();
        bus.start().await.unwrap();
        let id = EventId::new();
        let at = lab.clock.now();
        let event = || Event::builder("a").id(id).occurred_at(at);
        handled(&bus, event()).await;
        lab.clock.advance(1000 * SECOND);
        once_more(&bus, event()).await;
        let stats = counted(&bus).await;
        assert_eq!(stats.types["a"].inbox_hits, 1);
        assert_eq!(stats.types["a"].skipped.total(), 0);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/order-staleness-breaker: a stale event is skipped as stale while the breaker is open, and does not take the probe.
#[tokio::test]
async fn the_age_is_asked_before_the_breaker() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let fails = |Json(fails): Json<bool>| async move { (!fails).then_some(()).ok_or("down") };
        let route = to(fails)
            .breaker(touchy())
            .criticality(Criticality::Standard)
            .max_staleness(60 * SECOND);
        bus.mount(Router::new().on("a", route).concurrency(1))
            .await
            .unwrap();
        bus.start().await.unwrap();
        let fresh = |fails: bool| {
            Event::builder("a")
                .occurred_at(lab.clock.now())
                .json(&fails)
        };
        bus.publish(fresh(true)).await.unwrap();
        opened(&bus).await;
        handled(&bus, old(&lab).json(&false)).await;
        let stats = counted(&bus).await;
        assert_eq!(stats.types["a"].skipped.stale, 1);
        assert_eq!(
            stats.types["a"].breaker_rejections, 0,
            "nobody asked the breaker"
        );

        // Half-open: the stale one passes by, the next one is the probe.
        lab.clock.advance(30 * SECOND);
        let stale = lab.clock.now().minus(1000 * SECOND);
        let stale = Event::builder("a").occurred_at(stale).json(&true);
        let probe = fresh(false);
        let receipts = bus.publish_batch([stale, probe]).await.unwrap();
        for receipt in receipts {
            assert!(receipt.settled().await.unwrap().dead_lettered.is_empty());
        }
        closed(&bus).await;
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/order-breaker-timeout: the breaker is around the timeout: an attempt that is cut is a failure it sees; what it rejects starts none.
// conformance: framework/resilience-stack: the breaker is around the timeout: an attempt that is cut is a failure it sees; what it rejects starts none.
#[tokio::test]
async fn the_breaker_is_around_the_timeout() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let (record, mut seen) = recorder(fine);
        let record = Arc::new(record);
        let hangs = move |message: Message| {
            let record = record.clone();
            async move {
                record(message).await?;
                std::future::pending::<Result<(), HandlerError>>().await
            }
        };
        let route = to(hangs)
            .breaker(touchy())
            .criticality(Criticality::Standard)
            .timeout(Duration::from_millis(20));
        bus.mount(Router::new().on("a", route)).await.unwrap();
        bus.start().await.unwrap();
        let cut = given_up(&bus, ("a", 1)).await;
        assert_eq!(cut.failures[0].kind, FailureKind::Timeout);
        opened(&bus).await;
        assert_eq!(the_breaker(&bus).failures, 1, "the cut counts as a failure");
        seen.next().await;
        let rejected = given_up(&bus, ("a", 2)).await;
        assert_eq!(rejected.failures[0].kind, FailureKind::Rejected);
        assert!(seen.is_empty());
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/order-timeout-layers: the timeout is around the user's layers: one that hangs is cut.
// conformance: framework/resilience-stack: the timeout is around the user's layers: one that hangs is cut.
// conformance: framework/timeout: the timeout is around the user's layers: one that hangs is cut.
#[tokio::test]
async fn the_timeout_is_around_the_layers() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let hangs = layer(|message: Message, mut inner: HandlerService| async move {
            let outcome = inner.call(message).await;
            std::future::pending::<()>().await;
            outcome
        });
        let (handler, mut seen) = recorder(fine);
        let route = to(handler).layer(hangs).timeout(Duration::from_millis(20));
        bus.mount(Router::new().on("a", route)).await.unwrap();
        bus.start().await.unwrap();
        let letter = given_up(&bus, ("a", 1)).await;
        assert_eq!(letter.failures[0].kind, FailureKind::Timeout);
        seen.next().await;
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/order-breaker-layers: a layer that fails is a failure that the breaker sees; it runs neither for what is rejected nor for what is skipped or known.
#[tokio::test]
async fn the_layers_are_inside_breaker_staleness_and_inbox() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let diary = Diary::default();
        let notes = diary.clone();
        let failing = layer(move |message: Message, mut inner: HandlerService| {
            notes.note("layer");
            async move {
                match message.json::<bool>()? {
                    true => Err(BoxError::from("the layer fails")),
                    false => inner.call(message).await,
                }
            }
        });
        let route = to(|| async {})
            .layer(failing)
            .breaker(touchy())
            .criticality(Criticality::BestEffort)
            .max_staleness(60 * SECOND)
            .idempotent();
        bus.mount(Router::new().on("a", route)).await.unwrap();
        bus.start().await.unwrap();
        let id = EventId::new();
        let at = lab.clock.now();
        let event = || Event::builder("a").id(id).occurred_at(at).json(&false);
        handled(&bus, event()).await;
        assert_eq!(diary.read().len(), 1);
        once_more(&bus, event()).await;
        handled(&bus, old(&lab).json(&false)).await;
        assert_eq!(
            diary.read().len(),
            1,
            "neither known nor stale events reach it"
        );
        let fresh = Event::builder("a").occurred_at(at).json(&true);
        bus.publish(fresh).await.unwrap();
        opened(&bus).await;
        assert_eq!(the_breaker(&bus).failures, 1);
        handled(&bus, Event::builder("a").occurred_at(at).json(&false)).await;
        assert_eq!(diary.read().len(), 2, "nor do rejected ones");
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/order-layers-handler: the layers are around the handler and its extractors: they see what goes in, and what comes out, also a payload that cannot be read.
#[tokio::test]
async fn the_layers_are_around_the_handler() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let diary = Diary::default();
        let inside = diary.clone();
        let handler = move |Json(n): Json<u8>| {
            inside.note(format!("handler {n}"));
            async { ("b", 1) }
        };
        let route = to(handler).layer(Noting::new("layer", &diary));
        bus.mount(Router::new().on("a", route)).await.unwrap();
        bus.start().await.unwrap();
        handled(&bus, ("a", 7)).await;
        assert_eq!(diary.read(), ["layer in", "handler 7", "layer out: 1"]);
        given_up(&bus, ("a", "text")).await;
        let all = diary.read();
        assert_eq!(all[3], "layer in");
        assert!(all[4].contains("cannot be read"), "{all:?}");
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/order-trace-layers: log lines of a layer, a handler and of a failed attempt are inside the span.
#[tokio::test]
async fn the_span_is_around_layers_handler_and_judgement() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let mark = EventId::new().to_string();
        let (in_layer, in_handler) = (mark.clone(), mark.clone());
        let logging = layer(move |message: Message, mut inner: HandlerService| {
            let mark = in_layer.clone();
            async move {
                tracing::info!(target: TEST, mark, place = "before");
                let outcome = inner.call(message).await;
                tracing::info!(target: TEST, mark, place = "after");
                outcome
            }
        });
        let handler = move || {
            let mark = in_handler.clone();
            async move {
                tokio::task::yield_now().await;
                tracing::info!(target: TEST, mark, place = "handler");
                Err::<Outcome, _>("fails")
            }
        };
        let route = to(handler).layer(logging).group("g");
        bus.mount(Router::new().on("a", route)).await.unwrap();
        bus.start().await.unwrap();
        let letter = given_up(&bus, Event::builder("a").correlation_id("request-3")).await;
        let id = letter.event().id().to_string();
        let of_test = lines(|line| line.field("mark") == Some(&mark));
        let places: Vec<_> = of_test
            .iter()
            .filter_map(|line| line.field("place"))
            .collect();
        assert_eq!(places, ["before", "handler", "after"]);
        let of_bus = lines_about(&id);
        assert_eq!(of_bus.len(), 1, "the failed attempt: {of_bus:?}");
        for line in of_test.iter().chain(&of_bus) {
            assert_eq!(line.around("event_id"), Some(id.as_str()), "{line:?}");
            assert_eq!(line.around("correlation_id"), Some("request-3"));
            assert_eq!(line.around("group"), Some("g"));
        }
        bus.shutdown().await.unwrap();
    })
    .await;
}

/// A handler that waits at a gate, and what it says when it is there.
#[expect(clippy::type_complexity, reason = "a closure and its two ends")]
fn gated() -> (
    impl Fn(Context) -> everbus::core::BoxFuture<'static, (&'static str, u32)> + Send + Sync + 'static,
    Arc<Notify>,
    Arc<Notify>,
) {
    let (begun, gate) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (begin, wait) = (begun.clone(), gate.clone());
    let handler = move |context: Context| -> everbus::core::BoxFuture<'static, _> {
        let (begun, gate) = (begin.clone(), wait.clone());
        Box::pin(async move {
            begun.notify_one();
            gate.notified().await;
            ("b", context.attempt())
        })
    };
    (handler, begun, gate)
}

// conformance: handlers/order-handler-settle: nothing is settled, published, recorded or counted before the handler has ended.
// conformance: framework/guarantee-ack-after: the consumer acknowledges after processing.
// conformance: framework/resilience-stack: the consumer acknowledges after processing.
// conformance: omni/subscribe-ack: the consumer acknowledges after processing.
#[tokio::test]
async fn the_handler_comes_before_the_settlement() {
    on_every_engine(|lab| async move {
        let bus: Bus = lab.open().await;
        let (handler, begun, gate) = gated();
        let subscribe = bus.subscribe("a").group("g").idempotent();
        subscribe.breaker(touchy()).handler(handler).await.unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 1)).await.unwrap();
        begun.notified().await;
        let not_yet = receipt.settled_within(Duration::ZERO).await;
        assert_eq!(not_yet.unwrap_err().code(), everbus::Code::Timeout);
        assert!(!is_done(&bus, receipt.seq(), "g").await);
        assert!(published(&bus, "b").await.is_empty());
        assert_eq!(bus.stats().types["a"].handled, 0);
        let records = bus.lookup().unwrap().find(receipt.id()).await.unwrap();
        let inbox = bus.engine().inbox().unwrap();
        let known = inbox.handled("g".parse().unwrap(), records).await.unwrap();
        assert_eq!(known, [false]);
        gate.notify_one();
        receipt.settled().await.unwrap();
        assert!(is_done(&bus, receipt.seq(), "g").await);
        assert_eq!(published(&bus, "b").await.len(), 1);
        assert_eq!(counted(&bus).await.types["a"].handled, 1);
        assert_eq!(the_breaker(&bus).state, BreakerState::Closed);
        bus.shutdown().await.unwrap();
    })
    .await;
}
