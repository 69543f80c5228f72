//! Files of messages: they are announced, processed, and the result is published.

mod pipeline;

use std::time::Duration;

use everbus::payloads::Stage;
use everbus::{
    Bus, Clock as _, Context, Envelope, HandlerError, Payload, State, SystemClock, TypedEvent,
};
use serde_json::json;

pub use pipeline::{FixedPipeline, MediaPipeline, PipelineError, Process};

use crate::events::{
    MediaFailed, MediaProcessed, MediaProcessing, MediaReceived, MediaType, MessageReceived,
    ProcessorType,
};

/// The first retry of a failed file waits this long.
pub const RETRY_DELAY: Duration = Duration::from_secs(2);
/// How many times a failed file is retried.
pub const RETRIES: u32 = 3;

/// Announces each file of a message.
pub async fn announce(Payload(message): Payload<MessageReceived>) -> Vec<MediaReceived> {
    let files = message.content.media.unwrap_or_default();
    let announced = files.into_iter().map(|file| MediaReceived {
        message_id: message.message_id.clone(),
        media_id: file.media_id,
        media_type: file.media_type,
        mime_type: file.mime_type,
        size: file.size,
        url: file.url,
        duration: file.duration,
        dimensions: file.dimensions,
    });
    announced.collect()
}

/// Processes a file. Publishes at once that processing began, and the result with the ack or with the retry.
pub async fn process(
    Payload(media): Payload<MediaReceived>,
    State(pipeline): State<MediaPipeline>,
    State(bus): State<Bus>,
    envelope: Envelope,
    context: Context,
) -> Result<MediaProcessed, HandlerError> {
    let (message_id, media_id) = (media.message_id.clone(), media.media_id.clone());
    let began = MediaProcessing {
        message_id: message_id.clone(),
        media_id: media_id.clone(),
        processor_type: processor_of(media.media_type),
        started_at: SystemClock.now(),
    };
    // Published at once and not with the ack, so that others see it while the work goes on. One for each attempt.
    bus.publish(began.builder()).await?;
    match pipeline.process(media).await {
        Ok(result) => {
            let taken = SystemClock.now().since(envelope.occurred_at());
            Ok(MediaProcessed {
                message_id,
                media_id,
                result,
                processing_time_ms: u64::try_from(taken.as_millis()).unwrap_or(u64::MAX),
            })
        }
        Err(error) => {
            let (attempt, last) = (context.attempt(), context.max_attempts());
            let will_retry = !error.is_permanent() && attempt < last;
            let failed = MediaFailed {
                message_id,
                media_id,
                error: error.to_string(),
                retry_count: attempt - 1,
                will_retry,
            };
            let details = json!({ "attempt": attempt, "error": failed.error });
            let stage = context.store_payload(Stage::ERROR, &details);
            stage.error_details(failed.error.clone()).await?;
            let error = if error.is_permanent() {
                HandlerError::permanent(error)
            } else {
                HandlerError::new(error)
            };
            Err(error.with_event(failed))
        }
    }
}

/// The kind of processing for this kind of file.
pub fn processor_of(media: MediaType) -> ProcessorType {
    match media {
        MediaType::Audio => ProcessorType::Transcription,
        MediaType::Image | MediaType::Video | MediaType::Sticker => ProcessorType::Description,
        MediaType::Document => ProcessorType::Extraction,
    }
}
