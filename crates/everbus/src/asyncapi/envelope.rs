//! The envelope of an event, as the headers of a message. The names are those of the native JSON.

use serde_json::{Value, json};

/// The key of the schema.
pub(super) const KEY: &str = "EventEnvelope";

/// The schema of every envelope.
pub(super) fn schema() -> Value {
    let text = json!({ "type": "string" });
    json!({
        "title": "Event envelope",
        "description": "What every event carries beside its payload.",
        "type": "object",
        "required": ["id", "type", "version", "occurred_at", "correlation_id"],
        "properties": {
            "id": { "type": "string", "format": "uuid",
                "description": "The identity and idempotency key." },
            "seq": { "type": "integer", "minimum": 0,
                "description": "The place in the log." },
            "type": { "type": "string", "minLength": 1, "maxLength": 255 },
            "version": { "type": "integer", "minimum": 1,
                "description": "The version of the payload." },
            "occurred_at": { "type": "string", "format": "date-time" },
            "received_at": { "type": "string", "format": "date-time" },
            "correlation_id": { "type": "string",
                "description": "Ties together everything that one request caused." },
            "causation_id": { "type": "string",
                "description": "The event whose handling caused this one." },
            "foreign_id": { "type": "string",
                "description": "The id it came with, if that was not a UUID." },
            "source": text,
            "app": text,
            "tenant": text,
            "key": { "type": "string",
                "description": "Events with the same key are handled in order by ordered groups." },
            "content_type": text,
            "entity": {
                "type": "object",
                "description": "The thing it is about.",
                "required": ["type", "id"],
                "properties": { "type": text, "id": text },
            },
            "trace": {
                "type": "object",
                "description": "W3C trace context.",
                "required": ["traceparent"],
                "properties": { "traceparent": text, "tracestate": text },
            },
            "metadata": { "type": "object", "additionalProperties": text },
        },
    })
}

/// The envelope of this type and version.
pub(super) fn of(event_type: Option<&str>, version: Option<u32>) -> Value {
    let mut properties = json!({});
    if let Some(event_type) = event_type {
        properties["type"] = json!({ "const": event_type });
    }
    if let Some(version) = version {
        properties["version"] = json!({ "const": version });
    }
    json!({
        "type": "object",
        "allOf": [{ "$ref": format!("#/components/schemas/{KEY}") }],
        "properties": properties,
    })
}
