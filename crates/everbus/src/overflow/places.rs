//! The places that objects are read from. New objects go to one place; older ones may be in others, and are
//! found by the bucket in their reference. The other places are only read: objects are put, noted and
//! deleted only in the configured place.

use std::fmt;
use std::path::Path;

use everbus_core::{Overflow as Reference, Result};
use futures_util::{StreamExt as _, stream};
use object_store::GetResult;

use super::store::{Store, hash_of};
use super::{Objects, Overflow};

/// How many objects are checked at once.
const AT_ONCE: usize = 16;

/// What is wrong with an object.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Flaw {
    /// It is not where it should be.
    Missing,
    /// It is in this place, which the configuration does not read.
    Elsewhere(String),
    /// It has another length.
    Length {
        /// The bytes that it has.
        found: u64,
        /// The bytes that it should have.
        wanted: u64,
    },
    /// It has another SHA-256.
    Content,
}

impl Flaw {
    /// What can be done about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Elsewhere(_) => {
                "name the place in overflow.also_read of the configuration, or with Overflow::also_read; \
                 the event itself is kept and can be retried"
            }
            _ => "bring the object back from a backup; the event itself is kept and can be retried",
        }
    }
}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("it is missing"),
            Self::Elsewhere(bucket) => write!(
                f,
                "it is in another place ({bucket}), which this configuration does not read; \
                 add it to overflow.also_read"
            ),
            Self::Length { found, wanted } => {
                write!(f, "it has {found} bytes instead of {wanted}")
            }
            Self::Content => f.write_str("its content is not what was put there"),
        }
    }
}

/// The places that are read besides the one for new objects: the directory beside the file, and those of
/// the settings.
pub(super) fn others(beside: Option<&Path>, options: &Overflow) -> Result<Vec<Store>> {
    let beside = beside.filter(|_| options.url.is_some());
    let listed = options.also_read.iter().map(|url| Store::parse(url));
    beside
        .map(|d| Ok(Store::beside(d)))
        .into_iter()
        .chain(listed)
        .collect()
}

impl Objects {
    /// Checks the object of a reference: whether it exists and has its length, and with `deep` whether it
    /// has its SHA-256. Returns the flaw, if there is one.
    ///
    /// An error if a place cannot be reached.
    pub async fn inspect(&self, reference: &Reference, deep: bool) -> Result<Option<Flaw>> {
        match self.find(reference, deep).await? {
            Err(flaw) => Ok(Some(flaw)),
            Ok(None) => Ok(None),
            Ok(Some(found)) => match hash_of(found).await? == reference.sha256 {
                true => Ok(None),
                false => Ok(Some(Flaw::Content)),
            },
        }
    }

    /// As [`inspect`](Self::inspect), for several references, a few at once; the answers are in the same
    /// order.
    pub async fn inspect_all(
        &self,
        references: &[Reference],
        deep: bool,
    ) -> Vec<Result<Option<Flaw>>> {
        let looking = stream::iter(references).map(|reference| self.inspect(reference, deep));
        looking.buffered(AT_ONCE).collect().await
    }

    /// The object of a reference, from the first place that has it with the right length.
    pub(super) async fn read(&self, reference: &Reference) -> Result<Result<GetResult, Flaw>> {
        let found = self.find(reference, true).await?;
        Ok(found.and_then(|found| found.ok_or(Flaw::Missing)))
    }

    /// Looks for an object, first in the places that the reference names. The others come after: a file may
    /// have been moved together with its objects, or a place may be spelled differently. Length and SHA-256
    /// decide whether it is the right object.
    async fn find(
        &self,
        reference: &Reference,
        content: bool,
    ) -> Result<Result<Option<GetResult>, Flaw>> {
        let (key, bucket) = (&reference.key, &reference.bucket);
        let all = || std::iter::once(&self.store).chain(&self.others);
        let named = all().filter(|store| store.bucket() == bucket);
        let unnamed = all().filter(|store| store.bucket() != bucket);
        let (mut flaw, mut failed) = (None, None);
        for store in named.chain(unnamed) {
            let found = match content {
                true => store
                    .get(key)
                    .await
                    .map(|found| found.map(|found| (found.meta.size, Some(found)))),
                false => store
                    .look(key)
                    .await
                    .map(|found| found.map(|(size, _)| (size, None))),
            };
            match found {
                Ok(None) => {}
                Ok(Some((size, found))) if size == reference.size => return Ok(Ok(found)),
                Ok(Some((found, _))) => {
                    flaw.get_or_insert(Flaw::Length {
                        found,
                        wanted: reference.size,
                    });
                }
                // It may be in one of the other places.
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        match (failed, flaw) {
            (Some(error), _) => Err(error),
            (None, Some(flaw)) => Ok(Err(flaw)),
            (None, None) if all().any(|store| store.is_called(bucket)) => Ok(Err(Flaw::Missing)),
            (None, None) => Ok(Err(Flaw::Elsewhere(bucket.clone()))),
        }
    }
}
