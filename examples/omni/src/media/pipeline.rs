//! Turns files into text: a trait, and a built-in pipeline that always gives the same text.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use super::processor_of;
use crate::events::{MediaReceived, MediaResult};

type Processed = Pin<Box<dyn Future<Output = Result<MediaResult, PipelineError>> + Send>>;

/// Turns a file into text. Implemented by functions of the file.
pub trait Process: Send + Sync + 'static {
    /// Processes a file.
    fn process(&self, media: MediaReceived) -> Processed;
}

/// A pipeline that handlers share.
#[derive(Clone)]
pub struct MediaPipeline(Arc<dyn Process>);

impl MediaPipeline {
    /// A pipeline.
    pub fn new(process: impl Process) -> Self {
        Self(Arc::new(process))
    }

    /// Processes a file.
    pub async fn process(&self, media: MediaReceived) -> Result<MediaResult, PipelineError> {
        self.0.process(media).await
    }
}

impl fmt::Debug for MediaPipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MediaPipeline")
    }
}

/// Why a file was not processed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelineError {
    text: String,
    permanent: bool,
}

impl PipelineError {
    /// A failure that may not happen again at a retry.
    pub fn passing(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            permanent: false,
        }
    }

    /// A failure that every retry would repeat.
    pub fn permanent(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            permanent: true,
        }
    }

    /// Whether every retry would fail in the same way.
    pub fn is_permanent(&self) -> bool {
        self.permanent
    }
}

impl fmt::Display for PipelineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for PipelineError {}

/// The built-in pipeline: the text names the file and nothing is fetched. A file whose address contains
/// `flaky-N` fails N times first; one with `broken` fails for good.
#[derive(Debug, Default)]
pub struct FixedPipeline {
    failed: Mutex<HashMap<String, u32>>,
}

impl FixedPipeline {
    fn result(&self, media: &MediaReceived) -> Result<MediaResult, PipelineError> {
        let url = media.url.as_deref().unwrap_or_default();
        if url.contains("broken") {
            return Err(PipelineError::permanent(format!("{url} cannot be read")));
        }
        let times = url.split_once("flaky-").map_or(0, |(_, rest)| {
            let digits = rest.split(|c: char| !c.is_ascii_digit()).next();
            digits.and_then(|n| n.parse().ok()).unwrap_or(0)
        });
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        let so_far = failed.entry(media.media_id.clone()).or_default();
        if *so_far < times {
            *so_far += 1;
            return Err(PipelineError::passing(format!("{url} did not answer")));
        }
        let processor_type = processor_of(media.media_type);
        Ok(MediaResult {
            processor_type,
            content: format!("{processor_type:?} of {}", media.media_id).to_lowercase(),
            model: "built-in".to_owned(),
            tokens_used: Some(0),
            cost: Some(0.0),
            language: Some("en".to_owned()),
            confidence: Some(1.0),
        })
    }
}

impl Process for FixedPipeline {
    fn process(&self, media: MediaReceived) -> Processed {
        Box::pin(std::future::ready(self.result(&media)))
    }
}
