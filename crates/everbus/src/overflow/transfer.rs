//! Copies objects between places: into a backup, and back. An existing object is never overwritten.

use everbus_core::{Code, Error, Overflow as Reference, Result};

use super::Place;
use super::read::checked;

/// The result of a transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Transferred {
    /// It was copied.
    Copied,
    /// The same object was there already.
    Present,
    /// The source place does not have it.
    Missing,
    /// The source has something else under its key; the text says what.
    Damaged(String),
}

impl Place {
    /// Copies an object here from another place, if it has its length and SHA-256. Durable on return.
    ///
    /// An error if another object has its key here, or one of the places cannot be used.
    pub async fn bring(&self, from: &Place, reference: &Reference) -> Result<Transferred> {
        let key = &reference.key;
        if self.has(reference).await? {
            return Ok(Transferred::Present);
        }
        let Some(found) = from.get(key, false).await? else {
            return Ok(Transferred::Missing);
        };
        let object = match checked(found, reference).await? {
            Ok(object) => object,
            Err(flaw) => return Ok(Transferred::Damaged(flaw.what)),
        };
        if self.create(key, &[object]).await? {
            return Ok(Transferred::Copied);
        }
        // Another program put it meanwhile.
        let present = self.has(reference).await?;
        present.then_some(Transferred::Present).ok_or_else(|| {
            let what = format!("the object {key:?} comes and goes in {:?}", self.name());
            Error::new(Code::ObjectStoreError, what).hint("try again")
        })
    }

    /// Whether the object is here, durably; an error if another object has its key. A remote object is not
    /// downloaded for this: readers check its content.
    async fn has(&self, reference: &Reference) -> Result<bool> {
        let (key, remote) = (&reference.key, self.path().is_none());
        let Some(found) = self.get(key, remote).await? else {
            return Ok(false);
        };
        let same = match remote {
            true => found.meta.size == reference.size,
            false => checked(found, reference).await?.is_ok(),
        };
        if !same {
            let what = format!("something else is in {:?} as {key:?}", self.name());
            return Err(Error::new(Code::ObjectStoreError, what)
                .hint("nothing is overwritten; move what is there away, then try again"));
        }
        self.make_durable(key).await?;
        Ok(true)
    }
}
