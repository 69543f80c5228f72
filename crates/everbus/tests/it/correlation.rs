//! Correlation, causation and trace: what an event takes over from what surrounds its publish, and
//! what the log says about it.

#[cfg(feature = "otel")]
mod otel;

use everbus::{
    Bus, Code, Context, Event, EventId, HandlerError, Recorded, Router, TraceContext,
    correlation_id, sqlite, to, with_correlation_id, with_trace,
};

use crate::logs::{TEST, lines};
use crate::support::{Kind, Lab, handled, on_every_engine, published};

const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

fn trace() -> TraceContext {
    TraceContext::parse(PARENT, Some("vendor=1")).unwrap()
}

/// The one event of this type.
async fn the(bus: &Bus, event_type: &str) -> Event {
    let events = published(bus, event_type).await;
    assert_eq!(events.len(), 1, "{event_type}: {events:?}");
    let Recorded { event, .. } = &*events[0];
    event.clone()
}

fn causation(event: &Event) -> Option<&str> {
    event.attributes()?.causation_id.as_deref()
}

fn trace_of(event: &Event) -> Option<&TraceContext> {
    event.attributes()?.trace.as_ref()
}

// conformance: outbox/6-default: without a correlation id in the context it defaults to the event_id.
// conformance: outbox/1-correlation: correlation_id defaults to event_id if not provided.
// conformance: outbox/6-context: a correlation id in the context is stored in the envelope.
// conformance: handlers/correlation-ambient: with_correlation_id sets the ambient correlation id; the innermost holds, and an event's own goes before it.
#[tokio::test]
async fn an_event_takes_the_correlation_id_that_surrounds_its_publish() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        assert_eq!(correlation_id(), None);
        let alone = bus.publish(("alone", 1)).await.unwrap();
        with_correlation_id("outer", async {
            assert_eq!(correlation_id().as_deref(), Some("outer"));
            bus.publish(("outer", 1)).await.unwrap();
            with_correlation_id("inner", async {
                assert_eq!(correlation_id().as_deref(), Some("inner"));
                bus.publish_batch([("inner.1", 1), ("inner.2", 1)])
                    .await
                    .unwrap();
            })
            .await;
            bus.publish(("outer.again", 1)).await.unwrap();
            let own = Event::builder("own").correlation_id("its own");
            bus.publish(own).await.unwrap();
        })
        .await;
        assert_eq!(correlation_id(), None);
        let stored = the(&bus, "alone").await;
        assert_eq!(stored.correlation_id(), alone.id().to_string());
        for (event_type, expected) in [
            ("outer", "outer"),
            ("inner.1", "inner"),
            ("inner.2", "inner"),
            ("outer.again", "outer"),
            ("own", "its own"),
        ] {
            assert_eq!(the(&bus, event_type).await.correlation_id(), expected);
        }
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/correlation-ambient: an id that no event may have is refused by the publish.
#[tokio::test]
async fn a_correlation_id_that_cannot_be_stored_is_refused() {
    let lab = Lab::new(Kind::Memory);
    let bus = lab.open().await;
    for id in [String::new(), "x".repeat(100_000)] {
        let error = with_correlation_id(id, bus.publish(("a", 1)))
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::InvalidAttribute);
    }
    assert!(published(&bus, "a").await.is_empty());
}

// conformance: handlers/correlation-inherited: everything published inside a handler inherits the correlation id and the trace of its event, and names it as its cause, however it is published.
// conformance: framework/structure-correlation: correlation_id links related events across services.
#[tokio::test]
async fn what_a_handler_publishes_belongs_to_its_event() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let publisher = bus.clone();
        let handler = move |context: Context| {
            let bus = publisher.clone();
            async move {
                assert_eq!(correlation_id().as_deref(), Some("request-7"));
                bus.publish(("through.the.bus", 1)).await?;
                bus.publish_batch([("in.a.batch", 1)]).await?;
                context.publish(("staged", 1))?;
                let own = Event::builder("own")
                    .correlation_id("else")
                    .causation_id("another");
                bus.publish(own).await?;
                with_correlation_id("narrower", async {
                    bus.publish(("narrower", 1)).await?;
                    context.publish(("narrower.staged", 1))
                })
                .await?;
                Ok::<_, HandlerError>(("returned", 1))
            }
        };
        bus.subscribe("a").handler(handler).await.unwrap();
        bus.start().await.unwrap();
        let event = Event::builder("a")
            .correlation_id("request-7")
            .trace(trace());
        let id = handled(&bus, event).await.id().to_string();
        for (event_type, correlation) in [
            ("through.the.bus", "request-7"),
            ("in.a.batch", "request-7"),
            ("staged", "request-7"),
            ("returned", "request-7"),
            ("narrower", "narrower"),
            ("narrower.staged", "narrower"),
        ] {
            let event = the(&bus, event_type).await;
            assert_eq!(event.correlation_id(), correlation, "{event_type}");
            assert_eq!(causation(&event), Some(id.as_str()), "{event_type}");
            assert_eq!(trace_of(&event), Some(&trace()), "{event_type}");
        }
        let own = the(&bus, "own").await;
        assert_eq!(own.correlation_id(), "else");
        assert_eq!(causation(&own), Some("another"));
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/correlation-inherited: the events of a transaction too.
#[tokio::test]
async fn what_a_transaction_publishes_belongs_to_its_event() {
    let lab = Lab::new(Kind::Sqlite);
    let bus = lab.open().await;
    bus.subscribe("a")
        .handler(|| async { sqlite::in_transaction(|_| ("b", 1)) })
        .await
        .unwrap();
    bus.start().await.unwrap();
    let event = Event::builder("a")
        .correlation_id("request-7")
        .trace(trace());
    let id = handled(&bus, event).await.id().to_string();
    let event = the(&bus, "b").await;
    assert_eq!(event.correlation_id(), "request-7");
    assert_eq!(causation(&event), Some(id.as_str()));
    assert_eq!(trace_of(&event), Some(&trace()));
    bus.shutdown().await.unwrap();
}

// conformance: handlers/correlation-chain: along a chain of events the correlation id stays and each names the one before it as its cause.
#[tokio::test]
async fn a_chain_of_events_is_correlated_from_end_to_end() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let router = Router::new()
            .on("one", || async { ("two", 1) })
            .on("two", to(|| async { ("three", 1) }).group("another"))
            .on("three", || async {});
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        let one = with_correlation_id("order-42", handled(&bus, ("one", 1))).await;
        crate::support::eventually("the chain ends", || async {
            published(&bus, "three").await.len() == 1
        })
        .await;
        let (two, three) = (the(&bus, "two").await, the(&bus, "three").await);
        for event in [&two, &three] {
            assert_eq!(event.correlation_id(), "order-42");
        }
        assert_eq!(causation(&two), Some(one.id().to_string().as_str()));
        assert_eq!(causation(&three), Some(two.id().to_string().as_str()));
        // The first one has no cause.
        assert_eq!(causation(&the(&bus, "one").await), None);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/trace-context: the W3C trace context is in the envelope as it was given, and comes from the surroundings if the event has none.
// conformance: framework/structure-trace: trace_id links the event to the trace that produced it; null if tracing is disabled.
#[tokio::test]
async fn an_event_carries_the_trace_that_surrounds_its_publish() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        with_trace(trace(), bus.publish(("traced", 1)))
            .await
            .unwrap();
        bus.publish(("untraced", 1)).await.unwrap();
        let own = TraceContext::parse(&PARENT.replace('7', "8"), None).unwrap();
        let event = Event::builder("own").trace(own.clone());
        with_trace(trace(), bus.publish(event)).await.unwrap();
        let traced = the(&bus, "traced").await;
        assert_eq!(trace_of(&traced), Some(&trace()));
        assert_eq!(trace_of(&traced).unwrap().trace_id(), Some(TRACE));
        assert_eq!(trace_of(&the(&bus, "untraced").await), None);
        assert_eq!(trace_of(&the(&bus, "own").await), Some(&own));
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: framework/structure-source: source is the service that generated the event, also of what handlers emit.
// conformance: omni/publish-enrich: source is the service that generated the event, also of what handlers emit.
#[tokio::test]
async fn events_name_the_service_they_come_from() {
    on_every_engine(|lab| async move {
        let bus = lab.open_with(lab.builder().source("order-service")).await;
        bus.subscribe("a")
            .handler(|context: Context| async move {
                context.publish(("staged", 1))?;
                Ok::<_, everbus::Error>(("returned", 1))
            })
            .await
            .unwrap();
        bus.start().await.unwrap();
        handled(&bus, Event::builder("a").source("elsewhere")).await;
        bus.publish(("plain", 1)).await.unwrap();
        let source = async |event_type: &str| {
            let event = the(&bus, event_type).await;
            event.attributes().unwrap().source.clone().unwrap()
        };
        assert_eq!(source("a").await, "elsewhere");
        for event_type in ["plain", "staged", "returned"] {
            assert_eq!(source(event_type).await, "order-service", "{event_type}");
        }
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/log-context: log lines inside a handler carry event id, type, group, correlation and trace ids without the handler doing anything.
// conformance: framework/framework-observability: the logging context of every consumed event is bound: event_id, correlation_id, event_type, source.
// conformance: framework/structure-rebind: on the consumer side the trace context is bound to the log.
#[tokio::test]
async fn log_lines_of_a_handler_say_which_event_they_belong_to() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let mark = EventId::new().to_string();
        let in_handler = mark.clone();
        let handler = move |context: Context| {
            let mark = in_handler.clone();
            async move {
                tracing::info!(target: TEST, mark, "at once");
                tokio::task::yield_now().await;
                tracing::debug!(target: TEST, mark, "after a wait");
                (context.attempt() > 1).then_some(()).ok_or("once more")
            }
        };
        let subscribe = bus.subscribe("a").group("billing");
        let retry = everbus::RetryPolicy::default().max_retries(1);
        subscribe.retry(retry).handler(handler).await.unwrap();
        bus.start().await.unwrap();
        let event = Event::builder("a")
            .correlation_id("request-7")
            .source("order-service")
            .trace(trace());
        let receipt = bus.publish(event).await.unwrap();
        let state = crate::support::wait_for_retry(&bus, receipt.seq(), "billing", 1).await;
        lab.clock.set(state.due_at.unwrap());
        receipt.settled().await.unwrap();
        let said = lines(|line| line.field("mark") == Some(&mark));
        assert_eq!(said.len(), 4);
        for (index, line) in said.iter().enumerate() {
            let id = receipt.id().to_string();
            assert_eq!(line.around("event_id"), Some(id.as_str()));
            assert_eq!(line.around("event_type"), Some("a"));
            assert_eq!(line.around("group"), Some("billing"));
            assert_eq!(line.around("correlation_id"), Some("request-7"));
            assert_eq!(line.around("trace_id"), Some(TRACE));
            assert_eq!(line.around("source"), Some("order-service"));
            assert_eq!(line.around("attempt"), Some(["1", "1", "2", "2"][index]));
        }
        bus.shutdown().await.unwrap();
    })
    .await;
}
