//! Reads objects: finds them in one of the places, checks their length and SHA-256, and restores the complete
//! payload. New objects go to one place; older ones may be in others, which are only read.

use bytes::Bytes;
use everbus_core::{Code, Error, Event, Overflow as Reference, OverflowPart, Result};
use futures_util::{StreamExt as _, stream};
use object_store::GetResult;
use sha2::{Digest as _, Sha256};

use super::options::LARGEST_OBJECT;
use super::place::{self, hash_of};
use super::{NULL, Objects, Place, hex};

/// How many objects are checked at once.
const AT_ONCE: usize = 16;

/// What is wrong with an object, and what can be done about it.
pub(super) struct Flaw {
    pub(super) what: String,
    pub(super) hint: &'static str,
}

impl Flaw {
    pub(super) fn new(what: impl Into<String>) -> Self {
        let hint =
            "bring the object back from a backup; the event itself is kept and can be retried";
        let what = what.into();
        Self { what, hint }
    }

    pub(super) fn missing() -> Self {
        Self::new("it is missing")
    }

    pub(super) fn content() -> Self {
        Self::new("its content is not what was put there")
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

    /// The error of an event with such an object.
    pub(super) fn of(&self, event: &Event, bucket: &str, key: &str) -> Error {
        let (event, what) = (event.display_id(), &self.what);
        let what = format!("the payload of {event} is in the object {key:?} of {bucket:?}: {what}");
        Error::new(Code::ObjectStoreError, what).hint(self.hint)
    }
}

pub(super) fn wrong_length(found: u64, wanted: u64) -> Flaw {
    Flaw::new(format!("it has {found} bytes instead of {wanted}"))
}

impl Objects {
    /// Checks the object of a reference: whether it exists and has its length, and with `deep` whether it
    /// has its SHA-256. Returns what is wrong, if anything.
    ///
    /// An error if a place cannot be reached.
    pub async fn inspect(&self, reference: &Reference, deep: bool) -> Result<Option<String>> {
        let flaw = match self.find(reference, deep).await? {
            Err(flaw) => flaw,
            Ok(None) => return Ok(None),
            Ok(Some(found)) => match hash_of(found).await? == reference.sha256 {
                true => return Ok(None),
                false => Flaw::content(),
            },
        };
        Ok(Some(flaw.what))
    }

    /// As [`inspect`](Self::inspect), for several references, a few at once; the answers are in the same
    /// order.
    pub async fn inspect_all(
        &self,
        references: &[Reference],
        deep: bool,
    ) -> Vec<Result<Option<String>>> {
        let looking = stream::iter(references).map(|reference| self.inspect(reference, deep));
        looking.buffered(AT_ONCE).collect().await
    }

    /// All places that are read, the configured one first.
    pub(super) fn places(&self) -> impl Iterator<Item = &Place> {
        std::iter::once(&self.place).chain(&self.others)
    }

    /// Looks for an object, first in the places that the reference names. The others come after: a file may
    /// have been moved together with its objects, or a place may be spelled differently. Length and SHA-256
    /// decide whether it is the right object, which is opened only with `open`.
    async fn find(
        &self,
        reference: &Reference,
        open: bool,
    ) -> Result<Result<Option<GetResult>, Flaw>> {
        let (key, bucket) = (&reference.key, &reference.bucket);
        let mut places: Vec<&Place> = self.places().collect();
        places.sort_by_key(|place| place.name() != bucket);
        let (mut flaw, mut failed) = (None, None);
        for place in &places {
            let found = match open {
                true => place.get(key).await.map(|found| {
                    let found = found?;
                    Some((found.meta.size, Some(found)))
                }),
                false => place.look(key).await.map(|found| Some((found?.0, None))),
            };
            match found {
                Ok(None) => {}
                Ok(Some((size, found))) if size == reference.size => return Ok(Ok(found)),
                Ok(Some((size, _))) => flaw = flaw.or(Some(wrong_length(size, reference.size))),
                // It may be in one of the other places.
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        match (failed, flaw) {
            (Some(error), _) => Err(error),
            (None, Some(flaw)) => Ok(Err(flaw)),
            (None, None) if places.iter().any(|place| place.is_called(bucket)) => {
                Ok(Err(Flaw::missing()))
            }
            (None, None) => Ok(Err(Flaw::elsewhere(bucket))),
        }
    }

    /// The complete payload of an event of this log.
    pub(super) async fn payload(&self, event: &Event, reference: &Reference) -> Result<Bytes> {
        let flawed = |flaw: Flaw| flaw.of(event, &reference.bucket, &reference.key);
        let filling = Filling::new(event.payload().clone(), reference).map_err(flawed)?;
        let found = self.find(reference, true).await?.map_err(flawed)?;
        let found = found.ok_or_else(|| flawed(Flaw::missing()))?;
        let filled = place::read(found, filling, Filling::take).await?;
        filled.finish(reference).map_err(flawed)
    }
}

/// A payload that is being put together while its object is read. Only the payload is in memory.
struct Filling {
    payload: Vec<u8>,
    /// The part that was stored in the event, and how much of it is in the payload.
    rest: Bytes,
    done: usize,
    /// The parts, in the order of the object and of the payload, and the first that is not complete.
    parts: Vec<OverflowPart>,
    next: usize,
    read: u64,
    hash: Sha256,
}

impl Filling {
    fn new(rest: Bytes, reference: &Reference) -> Result<Self, Flaw> {
        let size = usize::try_from(reference.size).unwrap_or(usize::MAX);
        if size > LARGEST_OBJECT {
            let what = format!("its reference gives a size of {size} bytes");
            return Err(Flaw::new(what));
        }
        let mut parts = reference.parts.clone();
        if parts.is_empty() {
            // The object is the whole payload, and the event has only `null`.
            parts.push(OverflowPart {
                field: String::new(),
                at: 0,
                from: 0,
                len: reference.size,
            });
        }
        let (mut done, mut object) = (0, 0);
        for part in &parts {
            let end = part.from.checked_add(part.len);
            let at = usize::try_from(part.at).unwrap_or(usize::MAX);
            let stands = rest.get(at..).is_some_and(|rest| rest.starts_with(&NULL));
            let fits = end.is_some_and(|end| end <= reference.size) && part.from >= object;
            if at < done || !stands || !fits {
                return Err(Flaw::new("the reference to it does not fit the event"));
            }
            (done, object) = (at + NULL.len(), part.from + part.len);
        }
        Ok(Self {
            payload: Vec::with_capacity(size + rest.len()),
            rest,
            done: 0,
            parts,
            next: 0,
            read: 0,
            hash: Sha256::new(),
        })
    }

    /// Takes the next bytes of the object. All offsets were checked against the event and the object.
    fn take(&mut self, chunk: &[u8]) {
        self.hash.update(chunk);
        let (start, end) = (self.read, self.read + chunk.len() as u64);
        self.read = end;
        while let Some(part) = self.parts.get(self.next).filter(|part| part.from < end) {
            if part.from >= start {
                let at = part.at as usize;
                self.payload.extend_from_slice(&self.rest[self.done..at]);
                self.done = at + NULL.len();
            }
            let last = part.from + part.len;
            let range = part.from.max(start) - start..last.min(end) - start;
            let range = range.start as usize..range.end as usize;
            self.payload.extend_from_slice(&chunk[range]);
            if last > end {
                break;
            }
            self.next += 1;
        }
    }

    fn finish(mut self, reference: &Reference) -> Result<Bytes, Flaw> {
        if self.read != reference.size || hex(&self.hash.finalize()) != reference.sha256 {
            return Err(Flaw::content());
        }
        // Parts without a byte stand at the end of the object, so no chunk reached them.
        for part in &self.parts[self.next..] {
            let at = part.at as usize;
            self.payload.extend_from_slice(&self.rest[self.done..at]);
            self.done = at + NULL.len();
        }
        self.payload.extend_from_slice(&self.rest[self.done..]);
        if self.payload.len() as u64 != reference.payload_size {
            return Err(Flaw::new("the reference to it does not fit the event"));
        }
        Ok(self.payload.into())
    }
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
        let filling = Filling::new(Bytes::from_static(b"null"), &reference);
        let Ok(payload) = filling.and_then(|filling| filling.finish(&reference)) else {
            panic!("it is complete");
        };
        assert_eq!(payload, Bytes::new());
    }
}
