//! An omnichannel messaging system: messages of many channels, one log of events.
//!
//! ```text
//!  webhook ─▶ intake ─▶ message.received ─┬─▶ identity ─▶ identity.resolved, identity.merged, identity.updated
//!                                         ├─▶ media    ─▶ media.received ─▶ media.processing, media.processed
//!                                         └─▶ sessions ─▶ the session of the conversation, in bus.kv("sessions")
//!  agent.request   ─▶ agent   ─▶ agent.response or agent.error
//!  message.sending ─▶ channel ─▶ message.sent
//! ```
//!
//! The payload of an event is kept at each step of its way (`webhook_raw`, `agent_request`, `agent_response`,
//! `channel_send`, `error`), for debugging.
//!
//! Nothing here knows the engine: the same code runs on a file and on a server, chosen by a URL.

pub mod agent;
pub mod app;
pub mod channel;
pub mod events;
pub mod identity;
pub mod intake;
pub mod media;
pub mod sessions;

pub use app::{App, Settings};
