//! Overflow: moves payloads that are too large for the log to an object store.
//!
//! An event whose attributes and payload have more than 204,800 bytes together is split before it is
//! appended: the values of the fields `output`, `outputs`, `input` and `claudeOutput` of its payload go
//! into an object, or the whole payload if that is not enough, and the event carries a reference
//! ([`Event::overflow`]). Handlers, `everbus get` and all other readers get the event as it was published,
//! byte for byte.
//!
//! ```text
//!  publish ─▶ split ─▶ note ─▶ object (durable) ─▶ append, note removed ─▶ the log has a reference
//!  deliver ─▶ reference ─▶ object (length and SHA-256 checked) ─▶ handler sees the whole payload
//!  retention ─▶ event and a note of its object, one transaction ─▶ collector ─▶ object deleted
//! ```
//!
//! The object is durable **before** the event is appended and deleted only **after** the event is removed. So a crash
//! leaves at most an object without an event, which has a note and is deleted later. Each put has a new key. An object
//! without a note in this log is never deleted.
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
mod fields;
mod foreign;
mod key;
mod options;
mod place;
mod read;
mod transfer;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use everbus_core::{
    Attributes, Clock as _, Code, Engine, Error, Event, Orphan, Orphans, Overflow as Reference,
    Recorded, Result, SystemClock,
};
use sha2::{Digest as _, Sha256};

pub use collect::{Collect, Collected, Survey, Tally, is_in_use};
pub use options::{LARGEST_EVENT, Overflow, THRESHOLD};
pub use place::Place;
pub use transfer::Transferred;

use fields::Split;
use read::Flaw;

/// Replaces a value that moved.
const NULL: Bytes = Bytes::from_static(b"null");

/// The object store of a bus, for large payloads.
pub struct Objects {
    place: Place,
    /// Places that may have older objects; only read.
    others: Vec<Place>,
    options: Overflow,
    /// Keeps a note of each object before it is put.
    orphans: Option<Arc<dyn Orphans>>,
}

fn hex(bytes: &[u8]) -> String {
    data_encoding::HEXLOWER.encode(bytes)
}

impl Objects {
    /// The object store of an engine: in the configured place, else beside its file. `None` if there is
    /// neither, or it is switched off.
    pub fn open(engine: &Engine, options: &Overflow) -> Result<Option<Arc<Self>>> {
        options.validate()?;
        let place = match (&options.url, &engine.objects) {
            (Some(url), _) => Place::parse(url)?,
            (None, Some(directory)) => Place::beside(directory),
            (None, None) => return Ok(None),
        };
        Ok(Some(Arc::new(Self {
            place,
            others: Place::others(options, engine.objects.as_deref())?,
            options: options.clone(),
            orphans: engine.orphans.clone(),
        })))
    }

    /// The largest accepted payload; `None` if events are not split.
    pub(crate) fn limit(&self) -> Option<usize> {
        self.options.enabled.then_some(self.options.limit)
    }

    /// Whether an event is too large for the log.
    pub(crate) fn is_over(&self, event: &Event) -> bool {
        if !self.options.enabled || event.overflow().is_some() {
            return false;
        }
        let threshold = self.options.threshold_of(event.event_type());
        // Almost every event is far below the limit; these are not measured exactly.
        let bound = event.attributes().map_or(0, upper_bound);
        event.payload().len() + bound > threshold && size(event) > threshold
    }

    /// The event to append instead of one that is too large: its large part is put into the store, durably, and it
    /// carries a reference.
    pub(crate) async fn offload(&self, event: Event) -> Result<Event> {
        let bucket = self.place.name().to_owned();
        let key = |log| format!("{}{}", self.place.prefix, key::new(&event, log));
        let key = match &self.orphans {
            None => key(None),
            Some(orphans) => {
                let note = Orphan {
                    bucket: bucket.clone(),
                    key: key(Some(orphans.log_id().await?)),
                    id: event.id(),
                    since: SystemClock.now(),
                    unborn: true,
                };
                orphans.note(vec![note.clone()]).await?;
                note.key
            }
        };
        let threshold = self.options.threshold_of(event.event_type());
        let put_as = key.clone();
        let (event, chunks) = blocking(move || {
            let split_by = |split: Split| {
                let reference = reference(&event, &split, &bucket, &key);
                let event = event.clone().with_overflow(split.rest, reference);
                (event, split.chunks)
            };
            let part = Split::of(&event).map(split_by);
            let part = part.filter(|(event, _)| size(event) <= threshold);
            part.unwrap_or_else(|| split_by(Split::whole(&event)))
        })
        .await?;
        self.place.put(&put_as, chunks).await?;
        Ok(event)
    }
}

impl std::fmt::Debug for Objects {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Objects").field(&self.place).finish()
    }
}

/// The record with its complete event; a complete one is returned unchanged. For programs that use an engine
/// without a bus; a bus has [`Bus::whole`](crate::Bus::whole).
///
/// `ObjectStoreError` if the object is missing, in a place that is not read, cannot be reached, or has
/// another content.
pub async fn whole(objects: Option<&Objects>, record: &Arc<Recorded>) -> Result<Arc<Recorded>> {
    let event = &record.event;
    let payload = match (event.overflow(), objects) {
        (Some(reference), Some(objects)) => {
            Some(Box::pin(objects.payload(event, reference)).await?)
        }
        (Some(reference), None) => {
            let flaw = Flaw::unconfigured();
            return Err(flaw.of(event, &reference.bucket, &reference.key));
        }
        (None, _) if is_apart(event) => Box::pin(foreign::payload(objects, event)).await?,
        (None, _) => None,
    };
    let Some(payload) = payload else {
        return Ok(record.clone());
    };
    let whole = event.clone().made_whole(payload);
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
    loop {
        match objects.collect(&engine, &Collect::default()).await {
            Ok(collected) if collected == Collected::default() => {}
            Ok(collected) => {
                tracing::info!(target: "everbus::overflow", ?collected, "deleted objects without events");
            }
            Err(error) if error.code() == Code::EventBusShutdownError => return,
            Err(error) => {
                tracing::warn!(target: "everbus::overflow", %error, "could not delete objects without events");
            }
        }
        tokio::time::sleep(DAY).await;
    }
}

/// The reference to the object of a split event.
fn reference(event: &Event, split: &Split, bucket: &str, key: &str) -> Reference {
    let mut hash = Sha256::new();
    split.chunks.iter().for_each(|chunk| hash.update(chunk));
    let sha256 = hex(&hash.finalize());
    let payload_sha256 = match split.parts.is_empty() {
        true => sha256.clone(),
        false => hex(&Sha256::digest(event.payload())),
    };
    Reference {
        bucket: bucket.to_owned(),
        key: key.to_owned(),
        size: split.chunks.iter().map(|chunk| chunk.len() as u64).sum(),
        sha256,
        payload_size: event.payload().len() as u64,
        payload_sha256,
        parts: split.parts.clone(),
    }
}

/// The serialised size of the attributes and the payload in bytes.
fn size(event: &Event) -> usize {
    let attributes = event.attributes().map(serde_json::to_vec);
    // Plain data into memory: this cannot fail.
    let attributes = attributes.map_or(0, |json| json.map_or(0, |json| json.len()));
    event.payload().len() + attributes
}

/// An upper bound of the serialised size of the attributes, without serialising them: JSON escapes need at
/// most six bytes per byte, and each field has a name.
fn upper_bound(attributes: &Attributes) -> usize {
    let texts = attributes.texts();
    512 + texts.map(|(_, text)| 6 * text.len() + 32).sum::<usize>()
}

/// Runs CPU-heavy work (hashing, scanning many megabytes) on a blocking thread.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|e| {
        Error::new(Code::Internal, "the work on a large event was aborted").caused_by(e)
    })
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
        let attributes = event.attributes().unwrap();
        let json = serde_json::to_string(attributes).unwrap();
        assert!(upper_bound(attributes) >= json.len());
        assert_eq!(size(&event), event.payload().len() + json.len());
    }
}
