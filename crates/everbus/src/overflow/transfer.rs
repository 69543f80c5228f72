//! Copies objects between places: into a backup, and back. One object at a time: it is hard-linked if both
//! places are directories of one file system, else streamed, and its length is checked. An existing object
//! is never overwritten.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use everbus_core::{Code, Error, LogId, Overflow as Reference, Result};
use futures_util::TryStreamExt as _;
use object_store::GetResult;
use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};

use super::errors::{failed, from_io};
use super::store::{self, Store};
use super::{Overflow, blocking, directory, hex, places};

/// A place that holds objects, independent of a bus.
pub struct Place {
    store: Store,
    /// Directories with a new entry that are not synced yet.
    touched: Mutex<BTreeSet<PathBuf>>,
}

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
    /// A directory.
    pub fn directory(path: &Path) -> Self {
        let name = path.to_string_lossy().into_owned();
        Self::on(Store::directory(name, path.to_path_buf()))
    }

    /// The configured place for objects, else the directory `beside`.
    pub fn of(options: &Overflow, beside: &Path) -> Result<Self> {
        options.validate()?;
        match &options.url {
            Some(url) => Ok(Self::on(Store::parse(url)?)),
            None => Ok(Self::directory(beside)),
        }
    }

    /// The places besides that of [`of`](Self::of) that may have objects: the directory `beside`, unless it
    /// is that one, and those of the settings.
    pub fn others(options: &Overflow, beside: Option<&Path>) -> Result<Vec<Self>> {
        let others = places::others(beside, options)?;
        Ok(others.into_iter().map(Self::on).collect())
    }

    fn on(store: Store) -> Self {
        Self {
            store,
            touched: Mutex::default(),
        }
    }

    /// The name of the place, for messages.
    pub fn name(&self) -> &str {
        self.store.bucket()
    }

    /// Makes the log the owner of the place, if the place has no owner and is empty.
    pub async fn claim(&self, log: LogId) -> Result<()> {
        self.store.claim(log).await.map(drop)
    }

    /// Makes the log the owner of a directory that the caller has filled, unless it has an owner.
    pub async fn give_to(&self, log: LogId) -> Result<()> {
        self.store.mark(log).await.map(drop)
    }

    /// Copies an object here from another place. It is durable after [`finish`](Self::finish).
    ///
    /// An error if another object has its key here, or one of the places cannot be used.
    pub async fn bring(&self, from: &Place, reference: &Reference) -> Result<Transferred> {
        let key = &reference.key;
        store::path(key)?;
        if let Some(found) = self.store.get(key).await? {
            return self.is_same(found, reference).await;
        }
        let created = match (from.store.place.path(), self.store.place.path()) {
            (Some(source), Some(_)) => self.link(source.join(key), reference).await?,
            _ => match from.store.get(key).await? {
                None => return Ok(Transferred::Missing),
                Some(found) if found.meta.size != reference.size => Err(found.meta.size),
                Some(found) => match self.stream(found, reference).await? {
                    Some(created) => Ok(Some(created)),
                    None => {
                        let what = "its content is not what was put there".to_owned();
                        return Ok(Transferred::Damaged(what));
                    }
                },
            },
        };
        match created {
            Ok(None) => Ok(Transferred::Missing),
            Ok(Some(true)) => Ok(Transferred::Copied),
            Ok(Some(false)) => match self.store.get(key).await? {
                Some(found) => self.is_same(found, reference).await,
                None => Err(self.taken(key)),
            },
            Err(size) => Ok(Transferred::Damaged(format!(
                "it has {size} bytes instead of {}",
                reference.size
            ))),
        }
    }

    /// Makes all copied objects durable.
    pub async fn finish(&self) -> Result<()> {
        let touched = {
            let mut touched = self.touched.lock();
            std::mem::take(&mut *touched)
        };
        let synced = blocking(move || {
            touched
                .iter()
                .try_for_each(|d| directory::sync_directory(d))
        });
        let synced = synced.await?;
        synced.map_err(|e| from_io("the objects could not be made durable".into(), e))
    }

    async fn is_same(&self, found: GetResult, reference: &Reference) -> Result<Transferred> {
        let length = found.meta.size == reference.size;
        // A remote object is not downloaded for this check: readers check it.
        let near = self.store.place.path().is_some();
        let same = length && (!near || store::hash_of(found).await? == reference.sha256);
        match same {
            true => {
                self.store.make_durable(&reference.key).await?;
                Ok(Transferred::Present)
            }
            false => Err(self.taken(&reference.key)),
        }
    }

    fn taken(&self, key: &str) -> Error {
        let what = format!("something else is in {:?} as {key:?}", self.name());
        Error::new(Code::ObjectStoreError, what)
            .hint("nothing is overwritten; move what is there away, then try again")
    }

    /// Links or copies a file. `Ok(None)` if there is none, its length if that is wrong, else whether it
    /// was created.
    async fn link(
        &self,
        source: PathBuf,
        reference: &Reference,
    ) -> Result<Result<Option<bool>, u64>> {
        let (target, parent) = self.made(&reference.key).await?;
        let (size, key) = (reference.size, reference.key.clone());
        let linked = blocking(move || match std::fs::symlink_metadata(&source) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Ok(None)),
            Err(error) => Err(error),
            Ok(meta) if meta.is_file() && meta.len() != size => Ok(Err(meta.len())),
            Ok(_) => directory::bring_in(&source, &target).map(|created| Ok(Some(created))),
        });
        let linked = linked.await?;
        self.touch(parent);
        linked.map_err(|e| from_io(format!("the object {key:?} could not be copied"), e))
    }

    /// Copies an object while reading it. `None` if it does not match the reference, else whether it was
    /// created.
    async fn stream(&self, found: GetResult, reference: &Reference) -> Result<Option<bool>> {
        let key = &reference.key;
        let reading = |e| failed(format!("the object {key:?} could not be read"), e);
        let mut hash = Sha256::new();
        let mut chunks = found.into_stream();
        if self.store.place.path().is_none() {
            // The store accepts an object only as a whole, so it is held in memory.
            let mut content: Vec<Bytes> = Vec::new();
            while let Some(chunk) = chunks.try_next().await.map_err(reading)? {
                hash.update(&chunk);
                content.push(chunk);
            }
            if hex(&hash.finalize()) != reference.sha256 {
                return Ok(None);
            }
            return self.store.create(key, &content).await.map(Some);
        }
        let writing = |e| from_io(format!("the object {key:?} could not be copied"), e);
        let (target, parent) = self.made(key).await?;
        let partial = directory::partial(&target);
        let mut file = std::fs::File::create(&partial).map_err(writing)?;
        let filled = async {
            while let Some(chunk) = chunks.try_next().await.map_err(reading)? {
                hash.update(&chunk);
                file = blocking(move || file.write_all(&chunk).map(|()| file))
                    .await?
                    .map_err(writing)?;
            }
            blocking(move || file.sync_all()).await?.map_err(writing)
        };
        let filled = filled.await;
        if filled.is_err() || hex(&hash.finalize()) != reference.sha256 {
            let _ = std::fs::remove_file(&partial);
            return filled.map(|()| None);
        }
        let named = blocking(move || directory::name(&partial, &target)).await?;
        self.touch(parent);
        named.map(Some).map_err(writing)
    }

    /// The path for the file of an object; its directory is created.
    async fn made(&self, key: &str) -> Result<(PathBuf, PathBuf)> {
        let Some(path) = self.store.place.path() else {
            return Err(Error::new(Code::Internal, "not a directory"));
        };
        let target = path.join(key);
        let parent = target.parent().unwrap_or(path).to_path_buf();
        let wanted = parent.clone();
        let made = blocking(move || directory::make_directory(&wanted)).await?;
        made.map_err(|e| {
            from_io(
                format!("the directory {} cannot be made", parent.display()),
                e,
            )
        })?;
        Ok((target, parent))
    }

    fn touch(&self, directory: PathBuf) {
        let mut touched = self.touched.lock();
        touched.insert(directory);
    }
}

impl std::fmt::Debug for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Place").field(&self.name()).finish()
    }
}
