//! Reads objects: finds them in one of the places, checks their length and SHA-256, and restores the complete
//! payload. New objects go to one place; older ones may be in others, which are only read.

use bytes::Bytes;
use everbus_core::{Code, Error, Event, Overflow as Reference, OverflowPart, Result};
use futures_util::{StreamExt as _, stream};
use object_store::GetResult;
use sha2::{Digest as _, Sha256};

use super::place::failed;
use super::{NULL, Objects, Place, blocking, hex};

/// What is wrong with an object, and what can be done about it.
pub(super) struct Flaw {
    pub(super) what: String,
    pub(super) hint: &'static str,
}

impl Flaw {
    pub(super) fn new(what: impl Into<String>) -> Self {
        let hint = "restore the object from a backup; the event itself is kept and can be retried";
        let what = what.into();
        Self { what, hint }
    }

    pub(super) fn missing() -> Self {
        Self::new("it is missing")
    }

    fn length(found: &GetResult, reference: &Reference) -> Self {
        let (found, wanted) = (found.meta.size, reference.size);
        Self::new(format!("it has {found} bytes instead of {wanted}"))
    }

    pub(super) fn elsewhere(bucket: &str) -> Self {
        Self {
            what: format!(
                "it is in another place ({bucket}), which this configuration does not read; \
                 add it to overflow.also_read"
            ),
            hint: "name the place in overflow.also_read of the configuration, or with Overflow::also_read; \
                   the event itself is kept and can be retried",
        }
    }

    pub(super) fn unconfigured() -> Self {
        Self {
            what: "no object store is configured".into(),
            hint: "name it: overflow.url in the configuration, or BusBuilder::overflow",
        }
    }

    /// The error of an event with such an object.
    pub(super) fn of(&self, event: &Event, bucket: &str, key: &str) -> Error {
        let (event, what) = (event.display_id(), &self.what);
        let what = format!("the payload of {event} is in the object {key:?} of {bucket:?}: {what}");
        Error::new(Code::ObjectStoreError, what).hint(self.hint)
    }
}

/// The content of an object, if it has the length and the SHA-256 of the reference.
pub(super) async fn checked(
    found: GetResult,
    reference: &Reference,
) -> Result<Result<Bytes, Flaw>> {
    if found.meta.size != reference.size {
        return Ok(Err(Flaw::length(&found, reference)));
    }
    let object = content(found, &reference.key).await?;
    let (object, hash) = blocking(move || {
        let hash = hex(&Sha256::digest(&object));
        (object, hash)
    })
    .await?;
    Ok(match hash == reference.sha256 {
        true => Ok(object),
        false => Err(Flaw::new("its content is not what was put there")),
    })
}

/// The content of an object, unchecked.
pub(super) async fn content(found: GetResult, key: &str) -> Result<Bytes> {
    let content = found.bytes().await;
    content.map_err(|e| failed(format!("the object {key:?} could not be read"), e))
}

impl Objects {
    /// Checks the objects of these references, a few at once: whether each exists and has its length, and with
    /// `deep` whether it has its SHA-256. Returns what is wrong, if anything, in the same order.
    ///
    /// An error if a place cannot be reached.
    pub async fn inspect(&self, all: &[Reference], deep: bool) -> Vec<Result<Option<String>>> {
        let looking = stream::iter(all).map(|reference| async move {
            let found = match self.find(reference, !deep).await? {
                Ok(found) if deep => checked(found, reference).await?.map(drop),
                found => found.map(drop),
            };
            Ok(found.err().map(|flaw| flaw.what))
        });
        // An object that is read is in memory as a whole.
        looking.buffered(if deep { 2 } else { 16 }).collect().await
    }

    /// All places that are read, the configured one first.
    pub(super) fn places(&self) -> impl Iterator<Item = &Place> {
        std::iter::once(&self.place).chain(&self.others)
    }

    /// Looks for an object, first in the places that the reference names. The others come after: a file may
    /// have been moved together with its objects, or a place may be spelled differently. With `head` the
    /// object is not opened.
    async fn find(&self, reference: &Reference, head: bool) -> Result<Result<GetResult, Flaw>> {
        let bucket = &reference.bucket;
        let mut places: Vec<&Place> = self.places().collect();
        places.sort_by_key(|place| place.name() != bucket);
        let known = places.iter().any(|place| place.name() == bucket);
        let (mut flaw, mut failed) = (None, None);
        for place in places {
            match place.get(&reference.key, head).await {
                Ok(None) => {}
                Ok(Some(found)) if found.meta.size == reference.size => return Ok(Ok(found)),
                Ok(Some(found)) => flaw = flaw.or(Some(Flaw::length(&found, reference))),
                // It may be in one of the other places.
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        let absent = if known {
            Flaw::missing()
        } else {
            Flaw::elsewhere(bucket)
        };
        failed.map_or(Ok(Err(flaw.unwrap_or(absent))), Err)
    }

    /// The complete payload of an event of this log.
    pub(super) async fn payload(&self, event: &Event, reference: &Reference) -> Result<Bytes> {
        let flawed = |flaw: Flaw| flaw.of(event, &reference.bucket, &reference.key);
        let found = self.find(reference, false).await?.map_err(flawed)?;
        let object = checked(found, reference).await?.map_err(flawed)?;
        restored(event.payload(), object, reference).map_err(flawed)
    }
}

/// The payload of which a part is in an object.
fn restored(rest: &[u8], object: Bytes, reference: &Reference) -> Result<Bytes, Flaw> {
    let payload = match reference.parts.is_empty() {
        true => Some(object),
        false => filled(rest, object.into(), &reference.parts).map(Bytes::from),
    };
    let fits = |payload: &Bytes| payload.len() as u64 == reference.payload_size;
    let misfit = || Flaw::new("the reference to it does not fit the event");
    payload.filter(fits).ok_or_else(misfit)
}

/// Turns the object into the payload, in place, so that a large payload is in memory once. The text between the parts
/// of the object is replaced by the text between the `null`s of the event. `None` if a part does not fit.
fn filled(rest: &[u8], mut object: Vec<u8>, parts: &[OverflowPart]) -> Option<Vec<u8>> {
    // The parts are processed from the last to the first. These are the lengths that are left of `rest` and of
    // `object`.
    let (mut before, mut end) = (rest.len(), object.len());
    for part in parts.iter().rev() {
        let at = usize::try_from(part.at).ok()?;
        let from = usize::try_from(part.from).ok()?;
        let to = from.checked_add(usize::try_from(part.len).ok()?)?;
        let after = rest.get(at..before)?.strip_prefix(&*NULL)?;
        object.get(to..end)?;
        object.splice(to..end, after.iter().copied());
        (before, end) = (at, from);
    }
    object.splice(..end, rest[..before].iter().copied());
    Some(object)
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: memory/overflow-empty: an empty payload that was put into an object comes back empty
    #[test]
    fn an_empty_payload_comes_back_empty() {
        let reference = Reference {
            bucket: "b".into(),
            key: "k".into(),
            size: 0,
            sha256: hex(&Sha256::digest([])),
            payload_size: 0,
            payload_sha256: hex(&Sha256::digest([])),
            parts: Vec::new(),
        };
        let payload = restored(&NULL, Bytes::new(), &reference).ok();
        assert_eq!(payload, Some(Bytes::new()));
        let longer = Reference {
            payload_size: 1,
            ..reference
        };
        assert!(restored(&NULL, Bytes::new(), &longer).is_err());
    }

    #[test]
    fn a_part_that_does_not_fit_is_refused() {
        let part = |at, from, len| OverflowPart {
            field: "f".into(),
            at,
            from,
            len,
        };
        let fill = |parts: &[OverflowPart]| filled(b"[null,null]", b"{0123456789}".to_vec(), parts);
        let whole = fill(&[part(1, 1, 3), part(6, 5, 6)]).unwrap();
        assert_eq!(whole, b"[012,456789]");
        for wrong in [
            part(0, 0, 3),
            part(2, 0, 3),
            part(11, 0, 3),
            part(u64::MAX, 0, 3),
            part(1, 10, 3),
            part(1, u64::MAX, 1),
            part(1, 1, u64::MAX),
        ] {
            assert_eq!(fill(std::slice::from_ref(&wrong)), None, "{wrong:?}");
        }
        for wrong in [
            [part(6, 0, 1), part(1, 1, 1)],
            [part(1, 1, 3), part(6, 3, 3)],
        ] {
            assert_eq!(fill(&wrong), None, "out of order: {wrong:?}");
        }
    }
}
