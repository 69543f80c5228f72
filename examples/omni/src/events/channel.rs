//! The connections to the platforms.

use everbus::{Event, Timestamp};
use serde::{Deserialize, Serialize};

use super::ChannelType;

/// An instance is connected to its platform.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Event)]
#[serde(rename_all = "camelCase")]
#[event(type = "channel.connected", key = "instance_id")]
pub struct ChannelConnected {
    /// The instance.
    pub instance_id: String,
    /// The channel.
    pub channel: ChannelType,
    /// The account on the platform.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connection_info: Option<ConnectionInfo>,
}

/// The account with which an instance is connected.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConnectionInfo {
    /// The phone number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phone_number: Option<String>,
    /// The name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub username: Option<String>,
    /// The server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server_id: Option<String>,
}

/// An instance has lost its connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Event)]
#[serde(rename_all = "camelCase")]
#[event(type = "channel.disconnected", key = "instance_id")]
pub struct ChannelDisconnected {
    /// The instance.
    pub instance_id: String,
    /// The channel.
    pub channel: ChannelType,
    /// Why.
    pub reason: DisconnectReason,
    /// The error text of the platform.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the names say it")]
pub enum DisconnectReason {
    Logout,
    Error,
    Timeout,
    Manual,
}

/// A QR code connects an instance to its platform.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Event)]
#[serde(rename_all = "camelCase")]
#[event(type = "channel.qr_code", key = "instance_id")]
pub struct ChannelQrCode {
    /// The instance.
    pub instance_id: String,
    /// Base64 or a data URL.
    pub qr_code: String,
    /// Until when it is valid.
    pub expires_at: Timestamp,
}
