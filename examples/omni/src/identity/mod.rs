//! Who wrote a message: the handler of `message.received` that resolves identities.
//!
//! Persons and accounts are in tables of this service's own ([`service`]), whatever engine moves the events.
//! An event may be delivered twice. The second delivery must not create a second person, and must give the same answer
//! as the first. So the service stores its answer for each message, in the transaction that changes its tables.

mod service;
mod tables;

use everbus::{HandlerError, Outcome, Payload, State};

pub use service::{Failed, IdentityService, Resolution, Resolve};

use crate::events::{IdentityMerged, MergeReason, MessageReceived};

/// Resolves the sender of a message, and says who it is.
pub async fn resolve(
    Payload(message): Payload<MessageReceived>,
    State(service): State<IdentityService>,
) -> Result<Outcome, HandlerError> {
    let request = Resolve {
        message_id: message.message_id,
        channel: message.channel,
        platform_user_id: message.sender.platform_user_id,
        username: message.sender.platform_username,
        profile: message.sender.profile_data.unwrap_or_default(),
    };
    let resolution = service.resolve(request).await;
    let resolution = resolution.map_err(HandlerError::new)?;
    let mut outcome = Outcome::default();
    if let Some(updated) = resolution.updated {
        outcome = outcome.publish(updated)?;
    }
    for merged in resolution.merged {
        outcome = outcome.publish(merged)?;
    }
    outcome.publish(resolution.resolved)
}

/// An administrator merges two persons. Returns the event to publish; `None` if they were merged before.
pub async fn link(
    service: &IdentityService,
    target: &str,
    source: &str,
    admin: &str,
) -> Result<Option<IdentityMerged>, Failed> {
    let (target, source) = (target.to_owned(), source.to_owned());
    let reason = MergeReason::AdminLinked;
    service
        .merge(target, source, reason, admin.to_owned())
        .await
}
