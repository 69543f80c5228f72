//! The span around a handler, so that its log lines say which event they belong to.

use everbus_core::{GroupName, Recorded};
use tracing::Span;

/// The span of one delivery. Its level is ERROR, so that it exists at every log level; without a subscriber
/// it costs one flag check.
///
/// The ids are in the span only: the lines inside it do not repeat them.
pub(crate) fn span(group: &GroupName, record: &Recorded, attempt: u32) -> Span {
    let event = &record.event;
    let trace = event.attributes().and_then(|a| a.trace.as_ref());
    let span = tracing::error_span!(
        target: "everbus::handle",
        "handle",
        otel.name = %format_args!("{} process", event.event_type()),
        otel.kind = "consumer",
        event_id = %event.display_id(),
        event_type = event.event_type(),
        %group,
        correlation_id = %event.correlation_id(),
        trace_id = trace.and_then(everbus_core::TraceContext::trace_id),
        attempt,
        source = event.attributes().and_then(|a| a.source.as_deref()),
    );
    #[cfg(feature = "otel")]
    if let Some(trace) = trace {
        crate::otel::link(&span, trace);
    }
    span
}
