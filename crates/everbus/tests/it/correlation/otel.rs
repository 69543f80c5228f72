//! OpenTelemetry: the span of a publisher, the trace in the event, the span of the handler.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use everbus::{Bus, Event, RetryPolicy, TraceContext, sqlite};
use opentelemetry::trace::{SpanKind, TracerProvider as _};
use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider, SpanData};
use tracing::Instrument;
use tracing_subscriber::layer::SubscriberExt;

use crate::support::{Kind, Lab, handled, published};

/// Runs a test whose spans are recorded; those of this thread alone.
async fn recorded(test: impl Future<Output = ()>) -> Vec<SpanData> {
    let exporter = InMemorySpanExporter::default();
    let provider = SdkTracerProvider::builder()
        .with_simple_exporter(exporter.clone())
        .build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
    let subscriber = tracing_subscriber::registry().with(layer);
    let guard = tracing::subscriber::set_default(subscriber);
    test.await;
    drop(guard);
    provider.force_flush().unwrap();
    exporter.get_finished_spans().unwrap()
}

fn named<'a>(spans: &'a [SpanData], name: &str) -> &'a SpanData {
    let found: Vec<_> = spans.iter().filter(|span| span.name == name).collect();
    assert_eq!(found.len(), 1, "{name}: {spans:?}");
    found[0]
}

async fn open(lab: &Lab) -> Bus {
    lab.open_with(lab.builder().retry(RetryPolicy::never()))
        .await
}

// conformance: handlers/otel-spans: a published event carries the trace of the span around it; the consumer's span is in the same trace and linked to the producer's.
// conformance: framework/structure-otel: with OpenTelemetry enabled the trace of the publisher is in the envelope, and consumer processing belongs to it.
#[tokio::test]
async fn the_handler_s_span_belongs_to_the_trace_of_the_publisher() {
    let lab = Lab::new(Kind::Memory);
    let spans = recorded(async {
        let bus = open(&lab).await;
        let ran = Arc::new(AtomicBool::new(false));
        let note = ran.clone();
        let handler = move || {
            note.store(true, Ordering::SeqCst);
            async { ("b", 1) }
        };
        bus.subscribe("a").handler(handler).await.unwrap();
        bus.start().await.unwrap();
        let request = tracing::info_span!("request");
        handled(&bus, ("a", 1)).instrument(request).await;
        assert!(ran.load(Ordering::SeqCst));
        let event = published(&bus, "a").await[0].event.clone();
        let trace = event.attributes().unwrap().trace.clone().unwrap();
        assert!(trace.trace_id().is_some(), "{trace:?}");
        let follow_up = published(&bus, "b").await[0].event.clone();
        let follow_up = follow_up.attributes().unwrap().trace.clone().unwrap();
        assert_eq!(follow_up.trace_id(), trace.trace_id());
        assert_ne!(follow_up, trace, "it comes from the handler's span");
        bus.shutdown().await.unwrap();
    })
    .await;
    let (producer, consumer) = (named(&spans, "request"), named(&spans, "a process"));
    let parent = &producer.span_context;
    assert_eq!(consumer.span_kind, SpanKind::Consumer);
    assert_eq!(consumer.span_context.trace_id(), parent.trace_id());
    assert_eq!(consumer.parent_span_id, parent.span_id());
    assert!(consumer.parent_span_is_remote);
    let links: Vec<_> = consumer
        .links
        .iter()
        .map(|link| link.span_context.span_id())
        .collect();
    assert_eq!(links, [parent.span_id()]);
}

// conformance: handlers/otel-spans: what an effect publishes belongs to the span of its handler, although another thread runs the effect.
#[tokio::test]
async fn the_events_of_an_effect_belong_to_the_span_of_the_handler() {
    let lab = Lab::new(Kind::Sqlite);
    let mut trace = None;
    let spans = recorded(async {
        let bus = open(&lab).await;
        bus.subscribe("a")
            .handler(|| async { sqlite::in_transaction(|_| ("b", 1)) })
            .await
            .unwrap();
        bus.start().await.unwrap();
        let request = tracing::info_span!("request");
        handled(&bus, ("a", 1)).instrument(request).await;
        let event = published(&bus, "b").await[0].event.clone();
        trace = event.attributes().unwrap().trace.clone();
        bus.shutdown().await.unwrap();
    })
    .await;
    let handler = &named(&spans, "a process").span_context;
    let trace = trace.unwrap();
    assert_eq!(trace.trace_id(), Some(&*handler.trace_id().to_string()));
    let span = handler.span_id().to_string();
    assert!(trace.traceparent.contains(&span), "{trace:?} is not {span}");
}

// conformance: handlers/otel-spans: the trace context of an event from elsewhere is taken up, its state included; without one the handler begins a trace.
#[tokio::test]
async fn a_trace_from_elsewhere_is_taken_up() {
    let lab = Lab::new(Kind::Memory);
    let spans = recorded(async {
        let bus = open(&lab).await;
        bus.subscribe("*").handler(|| async {}).await.unwrap();
        bus.start().await.unwrap();
        let trace = TraceContext::parse(super::PARENT, Some("vendor=1")).unwrap();
        handled(&bus, Event::builder("traced").trace(trace)).await;
        handled(&bus, ("untraced", 1)).await;
        bus.shutdown().await.unwrap();
    })
    .await;
    let traced = named(&spans, "traced process");
    assert_eq!(traced.span_context.trace_id().to_string(), super::TRACE);
    assert_eq!(traced.parent_span_id.to_string(), "b7ad6b7169203331");
    assert_eq!(
        traced.links[0].span_context.trace_state().header(),
        "vendor=1"
    );
    let untraced = named(&spans, "untraced process");
    assert_ne!(untraced.span_context.trace_id().to_string(), super::TRACE);
    assert!(untraced.links.is_empty());
}
