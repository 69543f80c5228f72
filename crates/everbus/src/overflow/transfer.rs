//! Copies objects between places: into a backup, and back. An existing object is never overwritten.

use bytes::Bytes;
use everbus_core::{Code, Error, Overflow as Reference, Result};
use sha2::{Digest as _, Sha256};

use super::errors::{failed, from_io};
use super::place::{hash_of, make_directory, path, sync_directory};
use super::read::{Flaw, wrong_length};
use super::{Place, blocking, hex};

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
    /// Copies an object here from another place: by a hard link if both are directories of one file system,
    /// else through memory. Durable on return.
    ///
    /// An error if another object has its key here, or one of the places cannot be used.
    pub async fn bring(&self, from: &Place, reference: &Reference) -> Result<Transferred> {
        let key = &reference.key;
        path(key)?;
        if self.has(reference).await? {
            return Ok(Transferred::Present);
        }
        if self.link(from, reference).await? {
            return Ok(Transferred::Copied);
        }
        let Some(found) = from.get(key).await? else {
            return Ok(Transferred::Missing);
        };
        if found.meta.size != reference.size {
            let flaw = wrong_length(found.meta.size, reference.size);
            return Ok(Transferred::Damaged(flaw.what));
        }
        let reading = |e| failed(format!("the object {key:?} could not be read"), e);
        let object = found.bytes().await.map_err(reading)?;
        let (object, hash) = blocking(move || {
            let hash = hex(&Sha256::digest(&object));
            (object, hash)
        })
        .await?;
        if hash != reference.sha256 {
            return Ok(Transferred::Damaged(Flaw::content().what));
        }
        self.copied(reference, object).await
    }

    async fn copied(&self, reference: &Reference, object: Bytes) -> Result<Transferred> {
        if self.create(&reference.key, &[object]).await? {
            return Ok(Transferred::Copied);
        }
        match self.has(reference).await? {
            true => Ok(Transferred::Present),
            false => Err(self.taken(&reference.key)),
        }
    }

    /// Whether the object is here; an error if another object has its key. A remote object is not
    /// downloaded for this: readers check its content.
    async fn has(&self, reference: &Reference) -> Result<bool> {
        let Some(found) = self.get(&reference.key).await? else {
            return Ok(false);
        };
        let length = found.meta.size == reference.size;
        if length && (self.path().is_none() || hash_of(found).await? == reference.sha256) {
            return Ok(true);
        }
        Err(self.taken(&reference.key))
    }

    fn taken(&self, key: &str) -> Error {
        let what = format!("something else is in {:?} as {key:?}", self.name());
        Error::new(Code::ObjectStoreError, what)
            .hint("nothing is overwritten; move what is there away, then try again")
    }

    /// Links the file of an object. False if that is not possible, or the file is not as it should be.
    async fn link(&self, from: &Place, reference: &Reference) -> Result<bool> {
        let (Some(from), Some(to)) = (from.path(), self.path()) else {
            return Ok(false);
        };
        let (from, to) = (from.join(&reference.key), to.join(&reference.key));
        let size = reference.size;
        let linked = blocking(move || {
            let meta = std::fs::symlink_metadata(&from);
            let directory = to.parent().unwrap_or(&to);
            if !meta.is_ok_and(|meta| meta.is_file() && meta.len() == size) {
                return Ok(false);
            }
            make_directory(directory)?;
            // Another file system, or one without hard links.
            if std::fs::hard_link(&from, &to).is_err() {
                return Ok(false);
            }
            sync_directory(directory).map(|()| true)
        });
        let what = || format!("the object {:?} could not be copied", reference.key);
        linked.await?.map_err(|e| from_io(what(), e))
    }
}
