//! The JSON of every event is as the specification writes it.

use everbus::TypedEvent;
use omni::events::*;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// Reads the document, writes it again, and compares.
fn reads_and_writes<T: TypedEvent + Serialize + DeserializeOwned>(
    document: &Value,
) -> &'static str {
    let typed: T =
        serde_json::from_value(document.clone()).unwrap_or_else(|e| panic!("{}: {e}", T::TYPE));
    assert_eq!(
        serde_json::to_value(&typed).unwrap(),
        *document,
        "{}",
        T::TYPE
    );
    T::TYPE
}

const AT: &str = "2026-01-02T03:04:05.000000Z";

// conformance: omni/message-events: the payload types read and write every field of the document, under its names
// conformance: omni/identity-events: the payload types read and write every field of the document, under its names
// conformance: omni/media-events: the payload types read and write every field of the document, under its names
// conformance: omni/agent-events: the payload types read and write every field of the document, under its names
// conformance: omni/access-events: the payload types read and write every field of the document, under its names
// conformance: omni/channel-events: the payload types read and write every field of the document, under its names
#[test]
fn every_event_has_every_field_of_the_document() {
    let content = json!({
        "type": "protocol",
        "text": "t",
        "media": [{ "mediaId": "f", "type": "image", "mimeType": "image/png", "size": 1, "url": "u",
                    "duration": 1.5, "dimensions": { "width": 1, "height": 2 },
                    "filename": "n", "caption": "c" }],
        "reaction": { "emoji": "👍", "targetMessageId": "m" },
        "poll": { "question": "q", "options": ["a"], "selectedOptions": ["a"] },
        "location": { "latitude": 1.5, "longitude": 2.5, "name": "n" },
        "contact": { "name": "n", "phone": "p" },
        "protocol": { "action": "ephemeral", "data": { "x": 1 } },
    });
    let seen = [
        reads_and_writes::<MessageReceived>(&json!({
            "messageId": "m", "externalMessageId": "x", "channel": "whatsapp-cloud", "instanceId": "i",
            "sender": { "platformUserId": "u", "platformUsername": "n", "profileData": { "phone": "p" } },
            "conversationId": "c", "externalConversationId": "xc", "content": content,
            "platformTimestamp": AT, "rawPayload": { "a": 1 },
        })),
        reads_and_writes::<MessageSending>(&json!({
            "messageId": "m", "instanceId": "i", "channel": "discord",
            "recipient": { "platformUserId": "u", "conversationId": "c" },
            "content": { "type": "text", "text": "t" }, "replyTo": "m0",
        })),
        reads_and_writes::<MessageSent>(&json!({
            "messageId": "m", "externalMessageId": "x", "status": "delivered", "error": "e",
            "metadata": { "latencyMs": 5 },
        })),
        reads_and_writes::<MessageStatus>(&json!({
            "messageId": "m", "externalMessageId": "x", "status": "pending", "timestamp": AT,
        })),
        reads_and_writes::<IdentityResolved>(&json!({
            "messageId": "m", "personId": "p", "identityId": "i", "channel": "slack",
            "platformUserId": "u", "isNewPerson": true, "isNewIdentity": false, "confidence": 0.5,
        })),
        reads_and_writes::<IdentityMerged>(&json!({
            "targetPersonId": "p", "sourcePersonId": "q", "mergedIdentityIds": ["i"],
            "reason": "user_claimed", "evidence": { "phone": "p" }, "mergedBy": "system",
        })),
        reads_and_writes::<IdentityUpdated>(&json!({
            "identityId": "i", "personId": "p",
            "changes": [{ "field": "f", "oldValue": null, "newValue": 1 }],
        })),
        reads_and_writes::<MediaReceived>(&json!({
            "messageId": "m", "mediaId": "f", "type": "sticker", "mimeType": "image/webp", "size": 1,
            "url": "u", "duration": 1.5, "dimensions": { "width": 1, "height": 2 },
        })),
        reads_and_writes::<MediaProcessing>(&json!({
            "messageId": "m", "mediaId": "f", "processorType": "transcription", "startedAt": AT,
        })),
        reads_and_writes::<MediaProcessed>(&json!({
            "messageId": "m", "mediaId": "f",
            "result": { "type": "extraction", "content": "c", "model": "m", "tokensUsed": 1,
                        "cost": 0.5, "language": "de", "confidence": 0.5 },
            "processingTimeMs": 5,
        })),
        reads_and_writes::<MediaFailed>(&json!({
            "messageId": "m", "mediaId": "f", "error": "e", "retryCount": 0, "willRetry": true,
        })),
        reads_and_writes::<AgentRequest>(&json!({
            "messageId": "m", "personId": "p", "instanceId": "i", "enrichedContent": "c",
            "history": [{ "role": "assistant", "content": "c", "timestamp": AT }],
            "agentConfig": { "apiUrl": "u", "timeout": 1000, "streaming": true },
        })),
        reads_and_writes::<AgentResponse>(&json!({
            "messageId": "m",
            "response": { "text": "t",
                          "media": [{ "mediaId": "f", "type": "video", "mimeType": "video/mp4" }],
                          "actions": [{ "type": "handoff", "parameters": { "to": "x" } }] },
            "metadata": { "tokensUsed": 1, "latencyMs": 5, "model": "m", "streaming": false },
        })),
        reads_and_writes::<AgentError>(&json!({
            "messageId": "m", "error": "e", "retryCount": 1, "willRetry": false,
        })),
        reads_and_writes::<AccessChecked>(&json!({
            "messageId": "m", "personId": "p", "identityId": "i", "instanceId": "n",
            "decision": "deny", "rule": { "id": "r", "type": "deny", "criteria": { "phone": "p" } },
            "reason": "blocked",
        })),
        reads_and_writes::<AccessRuleChanged>(&json!({
            "ruleId": "r", "action": "updated",
            "rule": { "id": "r", "type": "allow", "criteria": {}, "priority": 1, "instanceId": "i",
                      "expiresAt": AT },
            "changedBy": "admin",
        })),
        reads_and_writes::<ChannelConnected>(&json!({
            "instanceId": "i", "channel": "telegram",
            "connectionInfo": { "phoneNumber": "p", "username": "u", "serverId": "s" },
        })),
        reads_and_writes::<ChannelDisconnected>(&json!({
            "instanceId": "i", "channel": "telegram", "reason": "logout", "error": "e",
        })),
        reads_and_writes::<ChannelQrCode>(&json!({
            "instanceId": "i", "qrCode": "data:", "expiresAt": AT,
        })),
    ];
    assert_eq!(seen, TYPES);
    // What may be missing is left out.
    reads_and_writes::<ChannelConnected>(&json!({ "instanceId": "i", "channel": "telegram" }));
    reads_and_writes::<AccessRuleChanged>(
        &json!({ "ruleId": "r", "action": "deleted", "changedBy": "admin" }),
    );
    reads_and_writes::<MessageSent>(
        &json!({ "messageId": "m", "externalMessageId": "x", "status": "sent" }),
    );
}
