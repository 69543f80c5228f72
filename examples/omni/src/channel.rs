//! Sends messages to their platform. In this example the platform accepts every message.

use std::time::Instant;

use everbus::payloads::Stage;
use everbus::{Context, HandlerError, Payload};
use serde_json::json;

use crate::events::{MessageSending, MessageSent, SentMetadata, SentStatus};

/// Sends a message, and publishes that it was sent.
pub async fn send(
    Payload(message): Payload<MessageSending>,
    context: Context,
) -> Result<MessageSent, HandlerError> {
    let began = Instant::now();
    let request = json!({ "to": message.recipient.platform_user_id, "content": message.content });
    let stage = context.store_payload(Stage::CHANNEL_SEND, &request);
    stage.status_code(202).await?;
    Ok(MessageSent {
        external_message_id: format!("{}:{}", message.channel, message.message_id),
        message_id: message.message_id,
        status: SentStatus::Sent,
        error: None,
        metadata: Some(SentMetadata {
            latency_ms: u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX),
        }),
    })
}
