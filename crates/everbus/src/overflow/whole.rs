//! Restores a complete payload: reads the object directly into the buffer that becomes the payload, and
//! checks its length and SHA-256.

use std::ops::Range;

use bytes::Bytes;
use everbus_core::{Code, Error, Event, Overflow as Reference, Result};
use object_store::{GetResult, GetResultPayload};
use sha2::{Digest as _, Sha256};

use super::options::LARGEST_OBJECT;
use super::places::Flaw;
use super::{Objects, blocking, hex, store};

const NULL: &[u8] = b"null";

/// The complete payload.
pub(super) async fn payload(
    objects: &Objects,
    event: &Event,
    reference: &Reference,
) -> Result<Bytes> {
    let flawed = |flaw: Flaw| about(event, reference, &flaw.to_string(), flaw.hint());
    let damaged = |what: &str| about(event, reference, what, Flaw::Content.hint());
    let filling = Filling::new(event.payload(), reference).map_err(|what| damaged(&what))?;
    let found = objects.read(reference).await?.map_err(flawed)?;
    let filled = read(found, filling).await?;
    if filled.read != reference.size {
        return Err(damaged("its length changed while it was read"));
    }
    if hex(&filled.hash.finalize()) != reference.sha256 {
        return Err(flawed(Flaw::Content));
    }
    Ok(filled.buffer.into())
}

async fn read(found: GetResult, mut filling: Filling) -> Result<Filling> {
    match found.payload {
        GetResultPayload::File(file, _) => {
            let read = move || {
                store::read_file(file, |chunk| filling.take(chunk))?;
                Ok(filling)
            };
            blocking(read).await?
        }
        GetResultPayload::Stream(stream) => {
            store::read_stream(stream, |chunk| filling.take(chunk)).await?;
            Ok(filling)
        }
    }
}

fn about(event: &Event, reference: &Reference, what: &str, hint: &str) -> Error {
    Error::new(
        Code::ObjectStoreError,
        format!(
            "the payload of {} is in the object {:?} of {:?}: {what}",
            event.display_id(),
            reference.key,
            reference.bucket
        ),
    )
    .hint(hint)
}

/// A buffer that is being filled from an object.
struct Filling {
    buffer: Vec<u8>,
    /// Which range of the object goes where in the buffer, in the order of the object.
    places: Vec<(Range<u64>, usize)>,
    /// The first range that is not complete.
    next: usize,
    read: u64,
    hash: Sha256,
}

impl Filling {
    /// The buffer, with the part that was stored in the event already in place; or what is wrong with the
    /// reference.
    fn new(rest: &[u8], reference: &Reference) -> Result<Self, String> {
        let size = usize::try_from(reference.size).unwrap_or(usize::MAX);
        if size > LARGEST_OBJECT {
            return Err(format!("its reference gives a size of {size} bytes"));
        }
        let mut filling = Self {
            buffer: Vec::new(),
            places: Vec::with_capacity(reference.parts.len().min(1024)),
            next: 0,
            read: 0,
            hash: Sha256::new(),
        };
        if reference.parts.is_empty() {
            filling.buffer = vec![0; size];
            filling.places.push((0..reference.size, 0));
            return Ok(filling);
        }
        let wrong = || "the reference to it does not fit the event".to_owned();
        let (mut done, mut object, mut total) = (0usize, 0u64, 0usize);
        let mut copies = Vec::new();
        for part in &reference.parts {
            let at = usize::try_from(part.at).map_err(|_| wrong())?;
            let end = part.from.checked_add(part.len).ok_or_else(wrong)?;
            let stands = rest.get(at..).is_some_and(|here| here.starts_with(NULL));
            if at < done || !stands || part.from < object || end > reference.size {
                return Err(wrong());
            }
            copies.push((done..at, total));
            total += at - done;
            filling.places.push((part.from..end, total));
            // Not larger than the object, so it cannot overflow.
            total += usize::try_from(part.len).map_err(|_| wrong())?;
            done = at + NULL.len();
            object = end;
        }
        copies.push((done..rest.len(), total));
        filling.buffer = vec![0; total + rest.len() - done];
        for (from, to) in copies {
            let len = from.len();
            filling.buffer[to..to + len].copy_from_slice(&rest[from]);
        }
        Ok(filling)
    }

    /// Takes the next bytes of the object.
    fn take(&mut self, chunk: &[u8]) {
        self.hash.update(chunk);
        let start = self.read;
        let end = start + chunk.len() as u64;
        self.read = end;
        while let Some((wanted, to)) = self.places.get(self.next) {
            let (lo, hi) = (wanted.start.max(start), wanted.end.min(end));
            if lo < hi {
                // All these offsets are inside the chunk and the buffer.
                let from = (lo - start) as usize..(hi - start) as usize;
                let to = to + (lo - wanted.start) as usize;
                self.buffer[to..to + from.len()].copy_from_slice(&chunk[from]);
            }
            if wanted.end > end {
                break;
            }
            self.next += 1;
        }
    }
}
