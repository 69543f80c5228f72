//! Takes messages from the webhooks of the platforms.

use everbus::payloads::Stage;
use everbus::{Bus, Receipt, Result, TypedEvent};

use crate::events::MessageReceived;

/// Publishes a message from a platform, and keeps the request of the platform as the stage `webhook_raw`.
///
/// The id of the event comes from the platform's id of the message: a webhook that is called twice for one
/// message publishes it once.
pub async fn receive(bus: &Bus, message: MessageReceived) -> Result<Receipt> {
    let id = format!(
        "{}:{}:{}",
        message.channel, message.instance_id, message.external_message_id
    );
    let raw = message.raw_payload.clone();
    let receipt = bus.publish(message.builder().foreign_id(id)).await?;
    if let Some(raw) = raw {
        bus.payloads()
            .store(receipt.id(), Stage::WEBHOOK_RAW, &raw)
            .await?;
    }
    Ok(receipt)
}
