//! Payload stages: the payload of an event at each step of its way, stored beside it for debugging.
//!
//! ```
//! use everbus::Bus;
//! use everbus::payloads::Stage;
//! use serde_json::{Value, json};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> everbus::Result<()> {
//! let bus = Bus::open("memory:").await?;
//! let receipt = bus.publish(("message.received", json!({ "text": "hi" }))).await?;
//! let stages = bus.payloads();
//! stages.store(receipt.id(), Stage::WEBHOOK_RAW, &json!({ "from": "+49" })).await?;
//! stages
//!     .store(receipt.id(), Stage::AGENT_RESPONSE, &json!({ "error": "overloaded" }))
//!     .status_code(503)
//!     .error_details("try later")
//!     .await?;
//!
//! let all = stages.get(receipt.id()).await?;
//! assert_eq!(all.len(), 2);
//! assert_eq!(all[1].info.status_code, Some(503));
//! assert_eq!(all[0].json::<Value>()?, json!({ "from": "+49" }));
//! # Ok(())
//! # }
//! ```
//!
//! A stage is kept as gzip, with its sizes and with flags about its content, so that a search need not
//! decompress it. It is deleted with its event, or earlier by the retention. Inside a handler,
//! [`Context::store_payload`](crate::Context::store_payload) stores a stage of the current event.

mod flags;
mod gzip;

use std::future::IntoFuture;
use std::sync::Arc;

use bytes::Bytes;
use everbus_core::{BoxFuture, Code, Error, EventId, Result, StoredStage, Timestamp};
use serde::de::DeserializeOwned;
use serde::{Serialize, Serializer};

pub use everbus_core::payloads::LARGE_PAYLOAD;
pub use everbus_core::{EventKey, Stage, StageInfo};

use crate::environment::Environment;

/// The largest size of a stage before compression; decompression stops there too.
pub const LARGEST_STAGE: usize = 64 * 1024 * 1024;
/// How many of the largest stages are listed by default.
pub const LARGEST_LISTED: usize = 100;

/// The payload stages of a bus; see [`Bus::payloads`](crate::Bus::payloads).
#[derive(Clone)]
pub struct PayloadStages {
    environment: Arc<Environment>,
}

impl PayloadStages {
    pub(crate) fn new(environment: Arc<Environment>) -> Self {
        Self { environment }
    }

    /// Stores a value as JSON under the name of a stage. The event keeps its earlier stages, also those of
    /// the same name. Takes the [`Event`](struct@crate::Event) by reference, or its id if it has no tenant. The
    /// stage is stored when the future returns.
    ///
    /// `NotFound` without the event, `PayloadTooLarge` over [`LARGEST_STAGE`].
    pub fn store<T: Serialize + ?Sized>(
        &self,
        event: impl Into<EventKey>,
        stage: &str,
        value: &T,
    ) -> StoreStage {
        StoreStage::of(Some(self.environment.clone()), event.into(), stage, value)
    }

    /// Stores bytes unchanged, for example a request body that is not JSON.
    pub fn store_raw(
        &self,
        event: impl Into<EventKey>,
        stage: &str,
        content: impl Into<Bytes>,
    ) -> StoreStage {
        StoreStage::new(
            Some(self.environment.clone()),
            event.into(),
            stage,
            Ok(content.into()),
        )
    }

    /// All stages of an event, oldest first. A damaged stage is listed too; reading its content returns the
    /// error.
    pub async fn get(&self, event: impl Into<EventKey>) -> Result<Vec<StageContent>> {
        self.read(event.into(), None).await
    }

    /// The stages of one name, oldest first.
    pub async fn get_stage(
        &self,
        event: impl Into<EventKey>,
        stage: &str,
    ) -> Result<Vec<StageContent>> {
        self.read(event.into(), Some(Stage::new(stage)?)).await
    }

    async fn read(&self, event: EventKey, stage: Option<Stage>) -> Result<Vec<StageContent>> {
        let stored = self
            .environment
            .engine
            .payloads()?
            .stages(event, stage)
            .await?;
        unpacked(stored).await
    }

    /// The largest stages of all events, largest first: those of more than `over` bytes before
    /// compression ([`LARGE_PAYLOAD`]), at most `limit` ([`LARGEST_LISTED`]).
    pub async fn largest(&self, over: u64, limit: usize) -> Result<Vec<(EventKey, StageInfo)>> {
        self.environment
            .engine
            .payloads()?
            .largest(over, limit)
            .await
    }

    /// The stages of an event as rows of the *omni* specification: with its column names, and the content
    /// as base64 text of the gzip.
    pub async fn export(
        &self,
        event: impl Into<EventKey>,
        stage: Option<&str>,
    ) -> Result<Vec<ExportedStage>> {
        let event = event.into();
        let stage = stage.map(Stage::new).transpose()?;
        let store = self.environment.engine.payloads()?;
        let stored = store.stages(event.clone(), stage).await?;
        Ok(exported(event.id, stored))
    }
}

impl std::fmt::Debug for PayloadStages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PayloadStages").finish_non_exhaustive()
    }
}

/// Decompresses stored stages; for programs that use an engine without a bus.
///
/// Stages are decompressed until they have [`LARGEST_STAGE`] bytes together; the others are decompressed
/// when their content is read, so that many small stages that expand a lot do not fill the memory.
pub async fn unpacked(stored: Vec<StoredStage>) -> Result<Vec<StageContent>> {
    let unpack = move || {
        let mut room = LARGEST_STAGE as u64;
        let each = stored.into_iter().map(|stored| {
            let left = room.checked_sub(stored.info.payload_size_original);
            room = left.unwrap_or(room);
            StageContent {
                content: left.map(|_| gzip::decompress(&stored.info, &stored.compressed)),
                info: stored.info,
                compressed: stored.compressed,
            }
        });
        each.collect()
    };
    off_the_executor(unpack).await
}

/// Stored stages as rows of the specification; for programs that use an engine without a bus.
pub fn exported(event: EventId, stored: Vec<StoredStage>) -> Vec<ExportedStage> {
    let rows = stored.into_iter().enumerate();
    rows.map(|(index, stored)| ExportedStage::new(event, index, stored))
        .collect()
}

/// A stage to store: await it.
#[must_use = "nothing is stored until it is awaited"]
pub struct StoreStage {
    /// `None` when a test calls the handler directly: everything is checked and nothing is stored.
    environment: Option<Arc<Environment>>,
    event: EventKey,
    stage: Result<Stage>,
    content: Result<Bytes>,
    status_code: Option<u16>,
    error_details: Option<String>,
}

impl StoreStage {
    fn new(
        environment: Option<Arc<Environment>>,
        event: EventKey,
        stage: &str,
        content: Result<Bytes>,
    ) -> Self {
        Self {
            environment,
            event,
            stage: Stage::new(stage),
            content,
            status_code: None,
            error_details: None,
        }
    }

    pub(crate) fn of<T: Serialize + ?Sized>(
        environment: Option<Arc<Environment>>,
        event: EventKey,
        stage: &str,
        value: &T,
    ) -> Self {
        let content = serde_json::to_vec(value).map_err(|e| {
            Error::new(
                Code::InvalidPayloadError,
                format!("the stage {stage:?} is not JSON-serialisable: {e}"),
            )
            .hint("maps need string keys and numbers must be finite")
        });
        Self::new(environment, event, stage, content.map(Bytes::from))
    }

    /// Adds an HTTP status.
    pub fn status_code(mut self, code: u16) -> Self {
        self.status_code = Some(code);
        self
    }

    /// Adds an error text.
    pub fn error_details(mut self, details: impl Into<String>) -> Self {
        self.error_details = Some(details.into());
        self
    }

    async fn run(self) -> Result<()> {
        let (stage, content) = (self.stage?, self.content?);
        if content.len() > LARGEST_STAGE {
            return Err(Error::new(
                Code::PayloadTooLarge,
                format!(
                    "the stage {stage} has {} bytes, the limit is {LARGEST_STAGE}",
                    content.len()
                ),
            )
            .hint("store large data elsewhere and keep in the stage where it is"));
        }
        let Some(environment) = self.environment else {
            return Ok(());
        };
        let timestamp = environment.clock.now();
        let store = environment.engine.payloads()?;
        let (status_code, error_details) = (self.status_code, self.error_details);
        let pack = move || pack(stage, timestamp, &content, status_code, error_details);
        let stored = off_the_executor(pack).await??;
        store.store(self.event, stored).await
    }
}

impl IntoFuture for StoreStage {
    type Output = Result<()>;
    type IntoFuture = BoxFuture<'static, Result<()>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}

impl std::fmt::Debug for StoreStage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoreStage")
            .field("event", &self.event)
            .field("stage", &self.stage)
            .finish_non_exhaustive()
    }
}

fn pack(
    stage: Stage,
    timestamp: Timestamp,
    content: &[u8],
    status_code: Option<u16>,
    error_details: Option<String>,
) -> Result<StoredStage> {
    let text = String::from_utf8_lossy(content);
    let compressed = gzip::compress(content)?;
    Ok(StoredStage {
        info: StageInfo {
            stage,
            timestamp,
            payload_size_original: content.len() as u64,
            payload_size_compressed: compressed.len() as u64,
            status_code,
            error_details,
            contains_media: flags::contains_media(&text),
            contains_base64: flags::contains_base64(&text),
        },
        compressed,
    })
}

/// Runs compression on a blocking thread: it is slow for large contents.
async fn off_the_executor<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|e| {
        Error::new(
            Code::Internal,
            "the compression of a payload stage was aborted",
        )
        .caused_by(e)
    })
}

/// One stage with its content.
#[derive(Clone, Debug)]
pub struct StageContent {
    /// Its metadata.
    pub info: StageInfo,
    compressed: Bytes,
    /// `None` until it is read.
    content: Option<Result<Bytes>>,
}

impl StageContent {
    /// The original content. `Corrupt` if it is damaged, or its decompressed size differs from the recorded
    /// one. If the stages of an event are large together, this call decompresses it.
    pub fn bytes(&self) -> Result<Bytes> {
        match &self.content {
            Some(content) => content.clone(),
            None => gzip::decompress(&self.info, &self.compressed),
        }
    }

    /// The content, decoded as JSON into any type.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_slice(&self.bytes()?).map_err(|e| {
            let stage = &self.info.stage;
            let what = format!("the stage {stage} cannot be read: {e}");
            Error::new(Code::InvalidPayloadError, what)
        })
    }
}

/// A row of `event_payloads` in the form of the *omni* specification. The id is made from event, stage and
/// time, so that a second export gives the same id.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ExportedStage {
    /// The id of the row.
    pub id: EventId,
    /// The event.
    pub event_id: EventId,
    /// Which stage.
    pub stage: Stage,
    /// The content: base64 of its gzip.
    #[serde(serialize_with = "as_base64")]
    pub payload_compressed: Bytes,
    /// The size before compression, in bytes.
    pub payload_size_original: u64,
    /// The size of the gzip, in bytes.
    pub payload_size_compressed: u64,
    /// When it was stored.
    pub timestamp: Timestamp,
    /// The HTTP status, where there was one.
    pub status_code: Option<u16>,
    /// The error text, if there was an error.
    pub error_details: Option<String>,
    /// It contains the address of a picture, film, sound or document.
    pub contains_media: bool,
    /// It contains the word base64, or is long enough to contain base64 data.
    pub contains_base64: bool,
}

impl ExportedStage {
    fn new(event: EventId, index: usize, stored: StoredStage) -> Self {
        let info = stored.info;
        let name = format!("{}/{}/{index}", info.stage, info.timestamp.as_micros());
        let id = uuid::Uuid::new_v5(&uuid::Uuid::from_bytes(*event.as_bytes()), name.as_bytes());
        Self {
            id: EventId::from_bytes(*id.as_bytes()),
            event_id: event,
            stage: info.stage,
            payload_compressed: stored.compressed,
            payload_size_original: info.payload_size_original,
            payload_size_compressed: info.payload_size_compressed,
            timestamp: info.timestamp,
            status_code: info.status_code,
            error_details: info.error_details,
            contains_media: info.contains_media,
            contains_base64: info.contains_base64,
        }
    }
}

fn as_base64<S: Serializer>(bytes: &Bytes, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&data_encoding::BASE64.encode(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: memory/stages-bomb: stages that are large together are decompressed one by one
    #[tokio::test]
    async fn only_so_much_is_decompressed_at_once() {
        let each = LARGEST_STAGE / 2 - 10;
        let content = vec![b'x'; each];
        let stored = |name: &str| {
            let stage = Stage::new(name).unwrap();
            pack(stage, Timestamp::from_micros(1), &content, None, None).unwrap()
        };
        let small = |name: &str| {
            let stage = Stage::new(name).unwrap();
            pack(stage, Timestamp::from_micros(1), b"small", None, None).unwrap()
        };
        let all = vec![stored("a"), stored("b"), stored("c"), small("d")];
        let unpacked = unpacked(all).await.unwrap();
        let held: Vec<bool> = unpacked.iter().map(|s| s.content.is_some()).collect();
        assert_eq!(held, [true, true, false, true]);
        for (stage, size) in unpacked.iter().zip([each, each, each, 5]) {
            assert_eq!(stage.bytes().unwrap().len(), size);
        }
    }
}
