//! The names of streams. `orders:order-placed`, the form of channel names in the framework specification,
//! and `orders.order.placed`, the form of event types, name the same stream.
//!
//! | written | canonical | label |
//! |---|---|---|
//! | `orders:order-placed` | `orders.order.placed` | `orders:order-placed` |
//! | `orders.order.placed` | `orders.order.placed` | `orders:order-placed` |
//! | `order-service:order-placed` | `order-service.order.placed` | `order-service:order-placed` |
//! | `TelemetryWindowClosed` | the same | the same |
//!
//! The domain is the part before the first `:` or `.`, and is kept unchanged. A name without either has no
//! domain and is kept unchanged, hyphens included.

use std::borrow::Cow;

/// The canonical name of a stream, for any spelling: dotted, like an event type.
///
/// Two names mean the same stream if their canonical names are equal.
///
/// ```
/// use everbus_core::stream as streams;
/// assert_eq!(streams::canonical("orders:order-placed"), "orders.order.placed");
/// assert_eq!(streams::canonical("orders.order.placed"), "orders.order.placed");
/// ```
pub fn canonical(name: &str) -> String {
    match name.split_once([':', '.']) {
        Some((domain, rest)) => format!("{domain}.{}", rest.replace([':', '-'], ".")),
        None => name.to_owned(),
    }
}

/// The name in metrics, logs and dead-letter streams: `domain:event-type`.
///
/// The label of an event type without a domain is the type itself.
///
/// ```
/// use everbus_core::stream as streams;
/// assert_eq!(streams::label("orders.order.placed"), "orders:order-placed");
/// assert_eq!(streams::label("TelemetryWindowClosed"), "TelemetryWindowClosed");
/// ```
pub fn label(event_type: &str) -> String {
    let name = canonical(event_type);
    match name.split_once('.') {
        Some((domain, rest)) => format!("{domain}:{}", rest.replace('.', "-")),
        None => name,
    }
}

/// An event type as the patterns of streams match it: a channel by its dotted form, any other unchanged.
///
/// Hyphens of a dotted type stay: `agent.task-done` has two segments, and `agent.*` covers it.
pub fn dotted(event_type: &str) -> Cow<'_, str> {
    match event_type.find([':', '.']) {
        Some(at) if event_type.as_bytes()[at] == b':' => canonical(event_type).into(),
        _ => event_type.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: framework/config-channel-names: channels are named {domain}:{event-type}
    #[test]
    fn the_channels_of_the_specification_are_streams_of_dotted_types() {
        for (channel, event_type) in [
            ("orders:order-placed", "orders.order.placed"),
            ("users:user-created", "users.user.created"),
            ("payments:payment-processed", "payments.payment.processed"),
            ("signals:signal-generated", "signals.signal.generated"),
            ("agents:task-completed", "agents.task.completed"),
        ] {
            assert_eq!(canonical(channel), event_type);
            assert_eq!(canonical(event_type), event_type);
            assert_eq!(label(event_type), channel);
            assert_eq!(label(channel), channel);
        }
    }

    #[test]
    fn odd_names_stay_sensible() {
        for (name, canonically, shown) in [
            (
                "Task Processing Started",
                "Task Processing Started",
                "Task Processing Started",
            ),
            (
                "cache-invalidated",
                "cache-invalidated",
                "cache-invalidated",
            ),
            (
                "order-service:order-placed",
                "order-service.order.placed",
                "order-service:order-placed",
            ),
            (
                "orders.order-placed",
                "orders.order.placed",
                "orders:order-placed",
            ),
            ("orders:a:b.c", "orders.a.b.c", "orders:a-b-c"),
            ("a..b", "a..b", "a:-b"),
            (":a", ".a", ":a"),
            ("", "", ""),
            ("größe:neu-ä", "größe.neu.ä", "größe:neu-ä"),
        ] {
            assert_eq!(canonical(name), canonically, "{name}");
            assert_eq!(label(name), shown, "{name}");
            assert_eq!(canonical(&canonical(name)), canonically, "{name}");
            assert_eq!(canonical(&label(name)), canonically, "{name}");
        }
    }
}
