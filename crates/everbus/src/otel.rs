//! OpenTelemetry: connects the trace context of an event with the spans of `tracing`.

use everbus_core::TraceContext;
use opentelemetry::Context;
use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// The trace context of the current span. `None` if the span belongs to no trace.
pub(crate) fn current() -> Option<TraceContext> {
    let context = Span::current().context();
    let span = context.span();
    let span = span.span_context();
    if !span.is_valid() {
        return None;
    }
    let state = span.trace_state().header();
    Some(TraceContext {
        traceparent: format!(
            "00-{}-{}-{:02x}",
            span.trace_id(),
            span.span_id(),
            span.trace_flags()
        ),
        tracestate: (!state.is_empty()).then_some(state),
    })
}

/// Makes `span` a child of the span that `trace` names, usually a span of another process: the caller of an HTTP
/// request with the header `traceparent`. Call this before the span is entered. A trace context that cannot be parsed
/// is ignored.
pub fn continue_trace(span: &Span, trace: &TraceContext) {
    if let Some(parent) = parse(trace) {
        // Fails only for a span that has begun or that no layer records.
        let _ = span.set_parent(Context::new().with_remote_span_context(parent));
    }
}

/// Makes the span of a handler a child of the span that published the event, and adds a link to it. A trace context
/// that cannot be parsed is ignored.
pub(crate) fn link(span: &Span, trace: &TraceContext) {
    let Some(producer) = parse(trace) else { return };
    span.add_link(producer.clone());
    // Fails only for a span that has begun or that no layer records.
    let _ = span.set_parent(Context::new().with_remote_span_context(producer));
}

/// Parses a trace context. `None` if its `traceparent` is not valid; a `tracestate` that is not valid is left out.
fn parse(trace: &TraceContext) -> Option<SpanContext> {
    trace.trace_id()?;
    let mut parts = trace.traceparent.split('-').skip(1);
    let trace_id = TraceId::from_hex(parts.next()?).ok()?;
    let span_id = SpanId::from_hex(parts.next()?).ok()?;
    let flags = u8::from_str_radix(parts.next()?, 16).ok()?;
    let state = trace.tracestate.as_deref().unwrap_or_default();
    let state = state.parse().unwrap_or_else(|_| TraceState::default());
    Some(SpanContext::new(
        trace_id,
        span_id,
        TraceFlags::new(flags),
        true,
        state,
    ))
}
