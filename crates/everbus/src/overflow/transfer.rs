//! Copies objects between places: into a backup, and back. Another object is never overwritten.

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
        let (key, remote) = (&reference.key, self.directory.is_none());
        // A remote object is not downloaded for this: readers check its content. One in a directory is put again,
        // because the put that left it may not have been finished durably.
        let (found, done) = match self.get(key, remote).await? {
            Some(here) if remote && here.meta.size == reference.size => {
                return Ok(Transferred::Present);
            }
            Some(here) => (here, Transferred::Present),
            None => match from.get(key, false).await? {
                Some(there) => (there, Transferred::Copied),
                None => return Ok(Transferred::Missing),
            },
        };
        match checked(found, reference).await? {
            Ok(object) => self.put(key, vec![object]).await.map(|()| done),
            Err(flaw) if done == Transferred::Copied => Ok(Transferred::Damaged(flaw.what)),
            Err(_) => {
                let what = format!("something else is in {:?} as {key:?}", self.name());
                let error = Error::new(Code::ObjectStoreError, what);
                Err(error
                    .hint("nothing is overwritten; move the existing object away, then try again"))
            }
        }
    }
}
