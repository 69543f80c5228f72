//! Overflow: moves payloads that are too large for the log to an object store.
//!
//! An event whose attributes and payload have more than 204,800 bytes together is split before it is
//! appended: the values of the fields `output`, `outputs`, `input` and `claudeOutput` of its payload go
//! into an object, or the whole payload if that is not enough, and the event carries a reference
//! ([`Event::overflow`]). Handlers, `everbus get` and all other readers get the event as it was published,
//! byte for byte.
//!
//! ```text
//!  publish ─▶ split ─▶ note ─▶ object (durable) ─▶ append, note struck off ─▶ the log has a reference
//!  deliver ─▶ reference ─▶ object (length and SHA-256 checked) ─▶ handler sees the whole payload
//!  retention ─▶ event and a note of its object, one transaction ─▶ collector ─▶ object deleted
//! ```
//!
//! The object is durable **before** the event is appended and deleted only **after** the event is removed.
//! So a crash leaves at most an object without an event, which has a note and is deleted later. An object
//! with neither a reference nor a note in this log belongs to another log, and is left alone.
//!
//! An event of another sender with `_s3Overflow` in its properties (the *workflow* dialect) is completed in
//! the same way, from the configured places.
//!
//! A bus on a file keeps its objects in a directory beside it, `shop.db.objects` for `shop.db`; another
//! place is a setting:
//!
//! ```
//! use everbus::Bus;
//! use everbus::overflow::Overflow;
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> everbus::Result<()> {
//! # let dir = tempfile::tempdir().unwrap();
//! # let objects = dir.path().join("objects");
//! let bus = Bus::builder()
//!     .overflow(Overflow::to(objects.to_str().unwrap()).threshold(4096))
//!     .open("memory:")
//!     .await?;
//! let receipt = bus.publish(("report.made", "x".repeat(100_000))).await?;
//!
//! let stored = bus.lookup()?.find(receipt.id()).await?.remove(0);
//! assert_eq!(stored.event.payload(), "null"); // what travels
//! let whole = bus.whole(&stored).await?;
//! assert_eq!(whole.event.payload().len(), 100_002);
//! # Ok(())
//! # }
//! ```

mod collect;
mod directory;
mod errors;
mod fields;
mod foreign;
mod key;
mod options;
mod owner;
mod places;
mod store;
mod survey;
mod transfer;
mod whole;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use everbus_core::{
    Attributes, Clock as _, Code, Engine, Error, Event, Orphan, Orphans, Overflow as Reference,
    Recorded, Result, SystemClock,
};
use sha2::{Digest as _, Sha256};

pub use collect::{Collect, Collected, is_in_use};
pub use options::{LARGEST_EVENT, Overflow, THRESHOLD};
pub use places::Flaw;
pub use survey::{Survey, Tally};
pub use transfer::{Place, Transferred};

use fields::Split;
use store::Store;

/// The object store of a bus, for large payloads.
pub struct Objects {
    store: Store,
    /// Places that may have older objects; only read.
    others: Vec<Store>,
    options: Overflow,
    /// Keeps a note of each object before it is put.
    orphans: Option<Arc<dyn Orphans>>,
}

/// The content of an object, in slices of the payload it comes from.
struct Content {
    chunks: Vec<Bytes>,
    size: u64,
    sha256: String,
}

impl Content {
    fn new(chunks: Vec<Bytes>) -> Self {
        let mut hash = Sha256::new();
        let mut size = 0;
        for chunk in &chunks {
            hash.update(chunk);
            size += chunk.len() as u64;
        }
        Self {
            chunks,
            size,
            sha256: hex(&hash.finalize()),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    data_encoding::HEXLOWER.encode(bytes)
}

impl Objects {
    /// The object store of an engine: in the configured place, else beside its file. `None` if there is
    /// neither, or it is switched off.
    pub fn open(engine: &Engine, options: &Overflow) -> Result<Option<Arc<Self>>> {
        options.validate()?;
        let store = match (&options.url, &engine.objects) {
            (Some(url), _) => Store::parse(url)?,
            (None, Some(directory)) => Store::beside(directory),
            (None, None) => return Ok(None),
        };
        Ok(Some(Arc::new(Self {
            store,
            others: places::others(engine.objects.as_deref(), options)?,
            options: options.clone(),
            orphans: engine.orphans.clone(),
        })))
    }

    /// Whether events are split at all.
    pub(crate) fn moves(&self) -> bool {
        self.options.enabled
    }

    /// The largest accepted payload.
    pub(crate) fn limit(&self) -> usize {
        self.options.limit
    }

    /// Whether an event is too large for the log.
    pub(crate) fn is_over(&self, event: &Event) -> bool {
        if !self.options.enabled || event.overflow().is_some() {
            return false;
        }
        let payload = event.payload().len();
        // Almost every event is far below the limit; these are not measured exactly.
        if payload + upper_bound(event.attributes()) <= self.options.smallest() {
            return false;
        }
        payload + serialised(event.attributes()) > self.options.threshold_of(event.event_type())
    }

    /// The event to append: if it is too large, its large part is put into the store, durably, and it
    /// carries a reference instead.
    pub(crate) async fn offload(&self, event: Event) -> Result<Event> {
        if !self.is_over(&event) {
            return Ok(event);
        }
        let threshold = self.options.threshold_of(event.event_type());
        let bucket = self.store.bucket().to_owned();
        let (event, rest, parts, content, payload_sha256) = blocking(move || {
            let split = Split::of(&event).filter(|split| fits(&event, split, bucket, threshold));
            let (rest, parts, chunks) = match split {
                Some(split) => (split.rest, split.parts, split.chunks),
                None => (NULL, Vec::new(), vec![event.payload().clone()]),
            };
            let content = Content::new(chunks);
            let whole = match parts.is_empty() {
                true => content.sha256.clone(),
                false => hex(&Sha256::digest(event.payload())),
            };
            (event, rest, parts, content, whole)
        })
        .await?;
        let reference = Reference {
            bucket: self.store.bucket().to_owned(),
            key: self.put(&event, &content).await?,
            size: content.size,
            sha256: content.sha256,
            payload_size: event.payload().len() as u64,
            payload_sha256,
            parts,
        };
        Ok(event.with_overflow(rest, reference))
    }

    /// Puts an object for an event and returns its key once it is durable. If this log put an object with
    /// the same content there a moment ago, that one is used: the publish is being repeated. Any other
    /// object with the same name, or one that may soon be deleted, is left alone, and another key is used.
    async fn put(&self, event: &Event, content: &Content) -> Result<String> {
        let owners = self.owners_or_claim().await?;
        let mark = owners.and_then(|owners| owners.mark());
        let base = key::of(event, mark.as_deref());
        let base = format!("{}{base}", self.store.prefix);
        let hashed = key::suffixed(&base, &content.sha256[..16]);
        let random = uuid::Uuid::new_v4().simple().to_string();
        let unique = key::suffixed(&hashed, &random);
        for key in [base, hashed, unique] {
            // An existing object gets no note: a note is only for an object that this publish puts.
            if self.store.look(&key).await?.is_none() {
                self.note(event, &key).await?;
                if self.store.create(&key, &content.chunks).await? {
                    return Ok(key);
                }
            }
            if owners.is_some() && self.store.is_same(&key, content).await? {
                return Ok(key);
            }
        }
        let what = format!("no free key for the object of {}", event.display_id());
        Err(Error::new(Code::ObjectStoreError, what))
    }

    /// Makes a durable note of an object before it is put.
    async fn note(&self, event: &Event, key: &str) -> Result<()> {
        let Some(orphans) = &self.orphans else {
            return Ok(());
        };
        let note = Orphan {
            bucket: self.store.bucket().to_owned(),
            key: key.to_owned(),
            id: event.id(),
            since: SystemClock.now(),
            unborn: true,
        };
        orphans.note(vec![note]).await
    }

    /// The complete event. An event that is complete is returned unchanged.
    ///
    /// `ObjectStoreError` if the object is missing, in a place that is not read, cannot be reached, or has
    /// another content.
    pub async fn whole(&self, event: &Event) -> Result<Event> {
        let payload = match event.overflow() {
            Some(reference) => Some(Box::pin(whole::payload(self, event, reference)).await?),
            None if is_apart(event) => Box::pin(foreign::payload(Some(self), event)).await?,
            None => None,
        };
        Ok(match payload {
            Some(payload) => event.clone().made_whole(payload),
            None => event.clone(),
        })
    }
}

impl std::fmt::Debug for Objects {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Objects")
            .field("bucket", &self.store.bucket())
            .field("options", &self.options)
            .finish()
    }
}

/// The record with its complete event. For programs that use an engine without a bus; a bus has
/// [`Bus::whole`](crate::Bus::whole).
pub async fn whole(objects: Option<&Objects>, record: &Arc<Recorded>) -> Result<Arc<Recorded>> {
    let event = &record.event;
    if !is_apart(event) {
        return Ok(record.clone());
    }
    let whole = match (objects, event.overflow()) {
        (Some(objects), _) => objects.whole(event).await?,
        (None, Some(reference)) => {
            return Err(Error::new(
                Code::ObjectStoreError,
                format!(
                    "the payload of {} is in the object {:?} of {:?}, and no object store is configured",
                    event.display_id(),
                    reference.key,
                    reference.bucket
                ),
            )
            .hint("name it: overflow.url in the configuration, or BusBuilder::overflow"));
        }
        (None, None) => {
            // An error, unless the payload was corrected since.
            foreign::payload(None, event).await?;
            return Ok(record.clone());
        }
    };
    let whole = Recorded::new(whole, record.position, record.received_at);
    Ok(Arc::new(whole))
}

/// Whether a part of the payload may be in an object: of this bus, or of another sender.
pub fn is_apart(event: &Event) -> bool {
    event.overflow().is_some() || foreign::is_foreign(event)
}

const DAY: Duration = Duration::from_secs(24 * 3600);

/// Deletes objects that no event refers to any more, at the start and once a day.
pub(crate) async fn collect_daily(engine: Engine, objects: Arc<Objects>) {
    let mut day = tokio::time::interval(DAY);
    day.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        day.tick().await;
        match objects.collect(&engine, &Collect::default()).await {
            Ok(collected) if collected == Collected::default() => {}
            Ok(collected) => tracing::info!(
                target: "everbus::overflow",
                orphans = collected.orphans,
                strays = collected.strays,
                bytes = collected.bytes,
                kept = collected.kept,
                "deleted objects without events"
            ),
            Err(error) if error.code() == Code::EventBusShutdownError => return,
            Err(error) => {
                tracing::warn!(target: "everbus::overflow", %error, "could not delete objects without events");
            }
        }
    }
}

/// Whether the rest of the event, with its reference, is small enough for the log.
fn fits(event: &Event, split: &Split, bucket: String, threshold: usize) -> bool {
    if split.rest.len() > threshold {
        return false;
    }
    let reference = Reference {
        bucket,
        key: key::of(event, None),
        size: split.chunks.iter().map(|chunk| chunk.len() as u64).sum(),
        sha256: "0".repeat(64),
        payload_size: event.payload().len() as u64,
        payload_sha256: "0".repeat(64),
        parts: split.parts.clone(),
    };
    let travels = event.clone().with_overflow(split.rest.clone(), reference);
    travels.payload().len() + serialised(travels.attributes()) <= threshold
}

const NULL: Bytes = Bytes::from_static(b"null");

/// The serialised size of the attributes in bytes.
fn serialised(attributes: Option<&Attributes>) -> usize {
    struct Count(usize);
    impl std::io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let Some(attributes) = attributes else {
        return 0;
    };
    let mut count = Count(0);
    // Plain data into a writer that only counts: this cannot fail.
    let _ = serde_json::to_writer(&mut count, attributes);
    count.0
}

/// An upper bound of the serialised size of the attributes, without serialising them.
fn upper_bound(attributes: Option<&Attributes>) -> usize {
    let Some(a) = attributes else {
        return 0;
    };
    // JSON escapes need at most six bytes per byte; each field also has a name.
    let text = |text: &str| 6 * text.len() + 32;
    let option = |value: &Option<String>| value.as_deref().map_or(0, text);
    let metadata = a.metadata.iter();
    let metadata: usize = metadata.map(|(key, value)| text(key) + text(value)).sum();
    let singles = [
        &a.source,
        &a.app,
        &a.tenant,
        &a.key,
        &a.correlation_id,
        &a.causation_id,
        &a.content_type,
        &a.foreign_id,
    ];
    let entity = a.entity.as_ref();
    let trace = a.trace.as_ref();
    512 + metadata
        + singles.into_iter().map(option).sum::<usize>()
        + entity.map_or(0, |entity| text(&entity.kind) + text(&entity.id))
        + trace.map_or(0, |trace| {
            text(&trace.traceparent) + option(&trace.tracestate)
        })
}

/// Runs CPU-heavy work (hashing, scanning many megabytes) on a blocking thread.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|e| Error::new(Code::Internal, "work on a large event was given up").caused_by(e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_of_attributes_is_one() {
        let nasty = "\u{1}\"\\ä".repeat(50);
        let event = Event::builder("t")
            .source(&nasty)
            .app(&nasty)
            .tenant(&nasty)
            .entity(&nasty, &nasty)
            .key(&nasty)
            .correlation_id(&nasty)
            .causation_id(&nasty)
            .meta(&nasty, &nasty)
            .expires_at(everbus_core::Timestamp::from_micros(i64::MAX))
            .foreign_id(&nasty)
            .build()
            .unwrap();
        let attributes = event.attributes();
        assert!(upper_bound(attributes) >= serialised(attributes));
        let json = serde_json::to_string(attributes.unwrap()).unwrap();
        assert_eq!(serialised(attributes), json.len());
    }
}
