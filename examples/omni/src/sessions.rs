//! The state of each conversation, in `bus.kv("sessions")`: the last message, and the number of messages.
//!
//! A session expires a day after its last message. Two messages of one conversation may be handled at once by
//! two processes: each puts with the revision that it read, and the slower one reads again.

use std::time::Duration;

use everbus::{Code, HandlerError, Kv, Payload, Result, State, Timestamp};
use serde::{Deserialize, Serialize};

use crate::events::{ChannelType, MessageReceived};

/// The bucket.
pub const BUCKET: &str = "sessions";
/// A session ends this long after its last message.
pub const LASTS: Duration = Duration::from_secs(24 * 3600);

/// How many messages of a conversation are remembered, to recognise one that comes again.
const RECENT: usize = 50;

/// The state of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Session {
    /// The channel.
    pub channel: ChannelType,
    /// How many messages it has had.
    pub messages: u64,
    /// The last ones, the newest last: a message that comes twice is counted once.
    pub recent_message_ids: Vec<String>,
    /// The text of the last message.
    pub last_text: Option<String>,
    /// The platform's time of the last message.
    pub last_at: Timestamp,
}

/// The key of a conversation: platforms have ids with characters that keys cannot have.
pub fn key(channel: &ChannelType, conversation: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
    let escaped = |text: &str| {
        let bytes = text.bytes().map(|byte| match char::from(byte) {
            c if plain(c) => c.to_string(),
            _ => format!("={byte:02x}"),
        });
        bytes.collect::<String>()
    };
    format!("{}/{}", escaped(&channel.0), escaped(conversation))
}

/// Adds a message to the session of its conversation. A message that comes twice is counted once.
pub async fn note(
    Payload(message): Payload<MessageReceived>,
    State(sessions): State<Kv>,
) -> Result<(), HandlerError> {
    let key = key(&message.channel, &message.external_conversation_id);
    loop {
        let found = sessions.get_json::<Session>(key.clone()).await?;
        let (messages, mut recent, revision) = match found {
            Some((session, revision)) => (session.messages, session.recent_message_ids, revision),
            None => (0, Vec::new(), 0),
        };
        if recent.contains(&message.message_id) {
            return Ok(());
        }
        recent.push(message.message_id.clone());
        recent.drain(..recent.len().saturating_sub(RECENT));
        let session = Session {
            channel: message.channel.clone(),
            messages: messages + 1,
            recent_message_ids: recent,
            last_text: message.content.text.clone(),
            last_at: message.platform_timestamp,
        };
        let put = sessions.put_json(key.clone(), &session).expected(revision);
        match put.ttl(LASTS).await {
            Ok(_) => return Ok(()),
            Err(error) if error.code() == Code::RevisionConflict => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// The session of a conversation, if it has one.
pub async fn find(
    sessions: &Kv,
    channel: &ChannelType,
    conversation: &str,
) -> Result<Option<Session>> {
    let found = sessions.get_json(key(channel, conversation)).await?;
    Ok(found.map(|(session, _)| session))
}
