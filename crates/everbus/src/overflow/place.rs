//! A place that holds objects: a directory, or with the feature `s3` a bucket.
//!
//! An object is durable once it is created, and is never changed.

use std::error::Error as StdError;
use std::io::ErrorKind::{QuotaExceeded, StorageFull};
use std::path::{Path as FilePath, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use everbus_core::{Code, Error, Result};
use futures_util::TryStreamExt as _;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    Error as StoreError, GetOptions, GetResult, ObjectStore, ObjectStoreExt as _, PutPayload,
};

use super::{Overflow, blocking, key};

/// A place that holds objects.
pub struct Place {
    /// The name that references use.
    pub(super) bucket: String,
    /// Comes before every key.
    pub(super) prefix: String,
    /// The path, if it is a directory. It is created when the first object is put there.
    pub(super) directory: Option<PathBuf>,
    open: OnceLock<Arc<dyn ObjectStore>>,
}

const HINT: &str = "use file:///directory or a path for a directory, s3://bucket/prefix for S3";

impl Place {
    /// A directory.
    pub fn directory(path: &FilePath) -> Self {
        Self::named(path.to_string_lossy().into_owned(), path)
    }

    /// The directory beside an engine's file. References use only its name, so that the file and the
    /// directory can be moved together.
    pub(super) fn beside(directory: &FilePath) -> Self {
        let name = directory.file_name().unwrap_or(directory.as_os_str());
        Self::named(name.to_string_lossy().into_owned(), directory)
    }

    fn named(bucket: String, path: &FilePath) -> Self {
        Self {
            bucket,
            prefix: String::new(),
            directory: Some(path.to_path_buf()),
            open: OnceLock::new(),
        }
    }

    /// The configured place for objects, else the directory `beside`.
    pub fn of(options: &Overflow, beside: &FilePath) -> Result<Self> {
        options.validate()?;
        match &options.url {
            Some(url) => Self::parse(url),
            None => Ok(Self::directory(beside)),
        }
    }

    /// The places besides the configured one that may have objects: the directory `beside`, unless it is
    /// the configured one, and those of the settings. They are only read.
    pub fn others(options: &Overflow, beside: Option<&FilePath>) -> Result<Vec<Self>> {
        let beside = beside.filter(|_| options.url.is_some()).map(Self::beside);
        let listed = options.also_read.iter().map(|url| Self::parse(url));
        beside.map(Ok).into_iter().chain(listed).collect()
    }

    /// Parses a URL or path. Does not connect or create anything.
    pub(super) fn parse(url: &str) -> Result<Self> {
        let bad = |what: String| Err(Error::new(Code::InvalidUrl, what).hint(HINT));
        if url.is_empty() || url.contains('\0') {
            return bad("the URL of the object store is empty or has a NUL in it".into());
        }
        match crate::url::split_scheme(url) {
            None => Ok(Self::directory(FilePath::new(url))),
            Some(("file", rest)) => {
                let hex = |rest: &str| {
                    rest.get(..2)
                        .is_some_and(|two| u8::from_str_radix(two, 16).is_ok())
                };
                let path = rest.strip_prefix("//").filter(|path| path.starts_with('/'));
                let path = path.filter(|path| path.split('%').skip(1).all(hex));
                match path.and_then(|path| Path::from_url_path(path).ok()) {
                    Some(path) => Ok(Self::directory(format!("/{path}").as_ref())),
                    None => bad(format!("{url:?} names no directory of this machine")),
                }
            }
            Some(("s3", rest)) => {
                let rest = rest.strip_prefix("//").unwrap_or_default();
                let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
                let prefix = prefix.trim_matches('/');
                if bucket.is_empty() || bucket.contains(['@', '?', ':']) {
                    return bad("an s3 URL is s3://bucket or s3://bucket/prefix".into());
                }
                if !prefix.is_empty() && Path::parse(prefix).is_err() {
                    return bad(format!("{prefix:?} is not a prefix of keys"));
                }
                Self::s3(bucket, prefix)
            }
            Some((scheme, _)) => bad(format!("there is no object store {scheme:?}")),
        }
    }

    /// Credentials, region and endpoint come from the environment: `AWS_ACCESS_KEY_ID` and the related
    /// variables.
    #[cfg(feature = "s3")]
    fn s3(bucket: &str, prefix: &str) -> Result<Self> {
        let retry = object_store::RetryConfig {
            max_retries: 5,
            retry_timeout: Duration::from_secs(30),
            ..Default::default()
        };
        let s3 = object_store::aws::AmazonS3Builder::from_env()
            .with_bucket_name(bucket)
            .with_retry(retry)
            .build()
            .map_err(|e| {
                let what = format!("the bucket {bucket:?} cannot be used");
                let error = Error::new(Code::InvalidUrl, what).caused_by(e);
                error.hint("set AWS_REGION, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
            })?;
        let prefix = match prefix {
            "" => String::new(),
            prefix => format!("{prefix}/"),
        };
        Ok(Self {
            bucket: bucket.to_owned(),
            prefix,
            directory: None,
            open: OnceLock::from(Arc::new(s3) as Arc<dyn ObjectStore>),
        })
    }

    #[cfg(not(feature = "s3"))]
    fn s3(bucket: &str, _prefix: &str) -> Result<Self> {
        let what = format!("s3://{bucket}: this build has no S3");
        Err(Error::new(Code::InvalidUrl, what)
            .hint("build everbus with the feature s3, or name a directory"))
    }

    /// The name of the place, as references use it.
    pub fn name(&self) -> &str {
        &self.bucket
    }

    /// The store. If the directory is missing it is created, durably, or `None` without `make`.
    async fn store(&self, make: bool) -> Result<Option<Arc<dyn ObjectStore>>> {
        if let Some(open) = self.open.get() {
            return Ok(Some(open.clone()));
        }
        let Some(path) = self.directory.clone() else {
            return Ok(None);
        };
        let opened = blocking(move || opened(&path, make)).await??;
        Ok(opened.map(|store| self.open.get_or_init(|| store).clone()))
    }

    /// Puts an object. Durable when it returns.
    pub(super) async fn put(&self, key: &str, chunks: Vec<Bytes>) -> Result<()> {
        let Some(store) = self.store(true).await? else {
            return Err(Error::new(Code::Internal, "an object has no place"));
        };
        let put = store.put(&path(key)?, PutPayload::from_iter(chunks)).await;
        let what = |e| failed(format!("the object {key:?} could not be stored"), e);
        put.map(drop).map_err(what)
    }

    /// An object, or `None` if there is none. With `head` its content is not read.
    pub(super) async fn get(&self, key: &str, head: bool) -> Result<Option<GetResult>> {
        let Some(store) = self.store(false).await? else {
            return Ok(None);
        };
        let options = GetOptions::new().with_head(head);
        found(store.get_opts(&path(key)?, options).await, key)
    }

    /// Deletes an object, and in a directory what an interrupted put left of it: `object_store` writes a file with
    /// `#1` after its name, then renames it. A missing object is not an error.
    pub(super) async fn delete(&self, key: &str) -> Result<()> {
        let Some(store) = self.store(false).await? else {
            return Ok(());
        };
        if let Some(path) = &self.directory {
            let unfinished = path.join(format!("{key}#1"));
            let _ = blocking(move || std::fs::remove_file(unfinished)).await?;
        }
        found(store.delete(&path(key)?).await, key).map(drop)
    }

    /// All objects: key, size, and age by the clock of this machine.
    pub(super) async fn list(&self) -> Result<Vec<(String, u64, Duration)>> {
        let Some(store) = self.store(false).await? else {
            return Ok(Vec::new());
        };
        let folder = path(&format!("{}{}", self.prefix, key::FOLDER))?;
        let objects = store.list(Some(&folder));
        let objects = objects.map_ok(|meta| {
            let age = SystemTime::from(meta.last_modified).elapsed();
            let key = meta.location.to_string();
            (key, meta.size, age.unwrap_or_default())
        });
        let objects = objects.try_collect().await;
        objects.map_err(|e| failed("the objects could not be listed".into(), e))
    }
}

impl std::fmt::Debug for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Place").field(&self.name()).finish()
    }
}

fn found<T>(result: object_store::Result<T>, key: &str) -> Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(StoreError::NotFound { .. }) => Ok(None),
        Err(e) => Err(failed(format!("the object {key:?} could not be read"), e)),
    }
}

/// Converts an error of an object store or of its files.
pub(super) fn failed(what: String, error: impl StdError + Send + Sync + 'static) -> Error {
    let first: &(dyn StdError + 'static) = &error;
    let full = std::iter::successors(Some(first), |cause| (*cause).source())
        .filter_map(|cause| cause.downcast_ref::<std::io::Error>())
        .any(|io| matches!(io.kind(), StorageFull | QuotaExceeded));
    let (code, hint) = match full {
        true => (
            Code::DiskFull,
            "make room where the objects are; nothing was published",
        ),
        false => (
            Code::ObjectStoreError,
            "see that the object store can be reached, read and written",
        ),
    };
    Error::new(code, what).caused_by(error).hint(hint)
}

pub(super) fn path(key: &str) -> Result<Path> {
    Path::parse(key).map_err(|e| {
        let what = format!("{key:?} is not the key of an object");
        Error::new(Code::ObjectStoreError, what).caused_by(e)
    })
}

/// The store of a directory. If the directory is missing it is created, durably, or `None` without `make`.
fn opened(path: &FilePath, make: bool) -> Result<Option<Arc<dyn ObjectStore>>> {
    let what = |what: &str| format!("the directory {} cannot be {what}", path.display());
    if make {
        make_directory(path).map_err(|e| failed(what("made"), e))?;
    } else if !path.is_dir() {
        return Ok(None);
    }
    let store = LocalFileSystem::new_with_prefix(path).map_err(|e| failed(what("used"), e))?;
    let store = store.with_fsync(true).with_automatic_cleanup(true);
    Ok(Some(Arc::new(store)))
}

/// Creates a directory and its parents, and syncs those that got a new entry.
fn make_directory(path: &FilePath) -> std::io::Result<()> {
    let missing = path.ancestors().take_while(|above| !above.is_dir());
    let missing: Vec<&FilePath> = missing.collect();
    std::fs::create_dir_all(path)?;
    for above in missing.into_iter().filter_map(FilePath::parent) {
        let here = above.as_os_str().is_empty();
        let above = if here { FilePath::new(".") } else { above };
        if cfg!(unix) {
            std::fs::File::open(above)?.sync_all()?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: fault-11/object-synced: the store of a directory syncs each object and the directory it is in
    #[test]
    fn a_directory_syncs_what_is_put_there() {
        let directory = tempfile::tempdir().unwrap();
        let store = opened(directory.path(), true).unwrap().unwrap();
        assert!(format!("{store:?}").contains("fsync: true"), "{store:?}");
    }
}
