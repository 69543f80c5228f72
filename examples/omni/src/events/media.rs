//! Files that came with messages.

use everbus::{Event, Timestamp};
use serde::{Deserialize, Serialize};

use super::Dimensions;

/// A file came with a message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
#[serde(rename_all = "camelCase")]
#[event(type = "media.received", key = "media_id")]
pub struct MediaReceived {
    /// The message.
    pub message_id: String,
    /// The file.
    pub media_id: String,
    /// What kind of file it is.
    #[serde(rename = "type")]
    pub media_type: MediaType,
    /// Its MIME type.
    pub mime_type: String,
    /// Its size in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Where it can be fetched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// Its length in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration: Option<f64>,
    /// Its size in pixels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dimensions: Option<Dimensions>,
}

/// The kind of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the names say it")]
pub enum MediaType {
    Image,
    Audio,
    Video,
    Document,
    Sticker,
}

/// Processing of a file has begun.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
#[serde(rename_all = "camelCase")]
#[event(type = "media.processing", key = "media_id")]
pub struct MediaProcessing {
    /// The message.
    pub message_id: String,
    /// The file.
    pub media_id: String,
    /// The kind of processing.
    pub processor_type: ProcessorType,
    /// When it began.
    pub started_at: Timestamp,
}

/// The kind of processing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProcessorType {
    /// Speech to text.
    Transcription,
    /// A description of a picture.
    Description,
    /// The text of a document.
    Extraction,
}

/// A file was processed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
#[serde(rename_all = "camelCase")]
#[event(type = "media.processed", key = "media_id")]
pub struct MediaProcessed {
    /// The message.
    pub message_id: String,
    /// The file.
    pub media_id: String,
    /// The result.
    pub result: MediaResult,
    /// The time from the arrival of the file to now.
    pub processing_time_ms: u64,
}

/// The result of processing a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MediaResult {
    /// The kind of processing.
    #[serde(rename = "type")]
    pub processor_type: ProcessorType,
    /// The text.
    pub content: String,
    /// The model that made it.
    pub model: String,
    /// How many tokens the model used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_used: Option<u64>,
    /// The cost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
    /// The language of the text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub language: Option<String>,
    /// How certain the model is: 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confidence: Option<f64>,
}

/// An attempt to process a file failed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
#[serde(rename_all = "camelCase")]
#[event(type = "media.failed", key = "media_id")]
pub struct MediaFailed {
    /// The message.
    pub message_id: String,
    /// The file.
    pub media_id: String,
    /// Why.
    pub error: String,
    /// How many attempts failed before this one.
    pub retry_count: u32,
    /// Whether there is another attempt.
    pub will_retry: bool,
}
