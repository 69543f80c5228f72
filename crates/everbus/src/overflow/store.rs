//! A place that holds objects: a directory, or with the feature `s3` a bucket.
//!
//! An object is durable once it is created, and is never changed.

use std::path::{Path as FilePath, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use everbus_core::{Code, Error, LogId, Result};
use futures_util::TryStreamExt as _;
use futures_util::stream::BoxStream;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    Error as StoreError, GetResult, GetResultPayload, ObjectMeta, ObjectStore, ObjectStoreExt as _,
    PutMode, PutOptions, PutPayload,
};
use sha2::{Digest as _, Sha256};
use tokio::sync::OnceCell;

use super::directory::{make_directory, sweep, sync_directory};
use super::errors::{failed, from_io};
use super::{Content, hex, key};

/// An older object without a reference may be deleted at any moment, so a publish does not reuse it.
const REUSABLE: Duration = Duration::from_secs(3600);
/// How many bytes are read at once.
const CHUNK: usize = 256 * 1024;

/// A place that holds objects.
pub(super) struct Store {
    /// The name that references use.
    bucket: String,
    /// Comes before every key.
    pub(super) prefix: String,
    /// The log that owns the place, once known.
    pub(super) owner: OnceCell<Option<LogId>>,
    pub(super) place: Place,
}

pub(super) enum Place {
    /// Created when the first object is put there.
    Directory {
        path: PathBuf,
        open: OnceLock<Arc<LocalFileSystem>>,
    },
    #[cfg(feature = "s3")]
    Remote(Arc<dyn ObjectStore>),
}

impl Place {
    /// The path, if this is a directory.
    pub(super) fn path(&self) -> Option<&FilePath> {
        match self {
            Self::Directory { path, .. } => Some(path),
            #[cfg(feature = "s3")]
            Self::Remote(_) => None,
        }
    }
}

const HINT: &str = "use file:///directory or a path for a directory, s3://bucket/prefix for S3";

impl Store {
    /// The directory beside an engine's file. The bucket is only its name, so that the file and the
    /// directory can be moved together.
    pub(super) fn beside(directory: &FilePath) -> Self {
        let name = directory.file_name().unwrap_or(directory.as_os_str());
        Self::directory(name.to_string_lossy().into_owned(), directory.into())
    }

    pub(super) fn directory(bucket: String, path: PathBuf) -> Self {
        Self {
            bucket,
            prefix: String::new(),
            owner: OnceCell::new(),
            place: Place::Directory {
                path,
                open: OnceLock::new(),
            },
        }
    }

    /// Parses a URL or path. Does not connect or create anything.
    pub(super) fn parse(url: &str) -> Result<Self> {
        let bad = |what: String| Err(Error::new(Code::InvalidUrl, what).hint(HINT));
        if url.is_empty() || url.contains('\0') {
            return bad("the URL of the object store is empty or has a NUL in it".into());
        }
        match crate::url::split_scheme(url) {
            None => Ok(Self::directory(url.to_owned(), url.into())),
            Some(("file", rest)) => {
                let path = rest.strip_prefix("//").filter(|path| path.starts_with('/'));
                match path.and_then(percent_decoded) {
                    Some(path) => Ok(Self::directory(url.to_owned(), path.into())),
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
        use object_store::aws::AmazonS3Builder;
        let retry = object_store::RetryConfig {
            max_retries: 5,
            retry_timeout: Duration::from_secs(30),
            ..Default::default()
        };
        let s3 = AmazonS3Builder::from_env()
            .with_bucket_name(bucket)
            .with_retry(retry)
            .build()
            .map_err(|e| {
                Error::new(
                    Code::InvalidUrl,
                    format!("the bucket {bucket:?} cannot be used"),
                )
                .caused_by(e)
                .hint("set AWS_REGION, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
            })?;
        Ok(Self {
            bucket: bucket.to_owned(),
            prefix: match prefix {
                "" => String::new(),
                prefix => format!("{prefix}/"),
            },
            owner: OnceCell::new(),
            place: Place::Remote(Arc::new(s3)),
        })
    }

    #[cfg(not(feature = "s3"))]
    fn s3(bucket: &str, _prefix: &str) -> Result<Self> {
        Err(Error::new(
            Code::InvalidUrl,
            format!("s3://{bucket}: this build has no S3"),
        )
        .hint("build everbus with the feature s3, or name a directory"))
    }

    /// The name that references use.
    pub(super) fn bucket(&self) -> &str {
        &self.bucket
    }

    /// Whether a reference to this bucket means this place; spellings may differ.
    pub(super) fn is_called(&self, bucket: &str) -> bool {
        let named = || Self::parse(bucket).ok();
        let absolute = |store: &Self| std::path::absolute(store.place.path()?).ok();
        self.bucket == bucket
            || absolute(self)
                .is_some_and(|path| named().is_some_and(|n| absolute(&n) == Some(path)))
    }

    /// The store, if it exists.
    async fn existing(&self) -> Result<Option<Arc<dyn ObjectStore>>> {
        match &self.place {
            Place::Directory { path, open } => {
                if let Some(open) = open.get() {
                    return Ok(Some(open.clone()));
                }
                let wanted = path.clone();
                let found = super::blocking(move || wanted.is_dir()).await?;
                found.then(|| opened(path, open)).transpose()
            }
            #[cfg(feature = "s3")]
            Place::Remote(store) => Ok(Some(store.clone())),
        }
    }

    /// The store; a missing directory is created, durably.
    pub(super) async fn made(&self) -> Result<Arc<dyn ObjectStore>> {
        if let Some(store) = self.existing().await? {
            return Ok(store);
        }
        match &self.place {
            Place::Directory { path, open } => {
                let wanted = path.clone();
                super::blocking(move || make_directory(&wanted))
                    .await?
                    .map_err(|e| {
                        let what = format!("the directory {} cannot be made", path.display());
                        from_io(what, e)
                    })?;
                opened(path, open)
            }
            #[cfg(feature = "s3")]
            Place::Remote(store) => Ok(store.clone()),
        }
    }

    /// Creates an object. Returns false if the name is taken. Durable when it returns.
    pub(super) async fn create(&self, key: &str, chunks: &[Bytes]) -> Result<bool> {
        let store = self.made().await?;
        let payload = PutPayload::from_iter(chunks.iter().cloned());
        let options = PutOptions::from(PutMode::Create);
        match store.put_opts(&path(key)?, payload, options).await {
            Ok(_) => Ok(true),
            Err(StoreError::AlreadyExists { .. }) => Ok(false),
            // S3's answer when two clients create the same object at once.
            Err(StoreError::Precondition { .. }) => Ok(false),
            Err(error) => Err(failed(
                format!("the object {key:?} could not be stored"),
                error,
            )),
        }
    }

    /// Whether the object has this content, was put a moment ago, and is durable.
    pub(super) async fn is_same(&self, key: &str, content: &Content) -> Result<bool> {
        let Some(found) = self.get(key).await? else {
            return Ok(false);
        };
        if found.meta.size != content.size || age(&found.meta) > REUSABLE {
            return Ok(false);
        }
        if hash_of(found).await? != content.sha256 {
            return Ok(false);
        }
        self.make_durable(key).await?;
        Ok(true)
    }

    /// Syncs an object: the process that put it may not have synced it yet.
    pub(super) async fn make_durable(&self, key: &str) -> Result<()> {
        match &self.place {
            Place::Directory { path, .. } => {
                let file = path.join(key);
                let synced = super::blocking(move || {
                    std::fs::File::open(&file)?.sync_all()?;
                    file.parent().map_or(Ok(()), sync_directory)
                });
                synced.await?.map_err(|e| {
                    from_io(format!("the object {key:?} could not be made durable"), e)
                })
            }
            #[cfg(feature = "s3")]
            Place::Remote(_) => Ok(()),
        }
    }

    /// An object, or `None` if there is none.
    pub(super) async fn get(&self, key: &str) -> Result<Option<GetResult>> {
        let Some(store) = self.existing().await? else {
            return Ok(None);
        };
        match store.get(&path(key)?).await {
            Ok(found) => Ok(Some(found)),
            Err(StoreError::NotFound { .. }) => Ok(None),
            Err(error) => Err(failed(
                format!("the object {key:?} could not be read"),
                error,
            )),
        }
    }

    /// The size and age of an object, or `None` if there is none.
    pub(super) async fn look(&self, key: &str) -> Result<Option<(u64, Duration)>> {
        let Some(store) = self.existing().await? else {
            return Ok(None);
        };
        match store.head(&path(key)?).await {
            Ok(meta) => Ok(Some((meta.size, age(&meta)))),
            Err(StoreError::NotFound { .. }) => Ok(None),
            Err(error) => Err(failed(
                format!("the object {key:?} could not be found"),
                error,
            )),
        }
    }

    /// Deletes an object. A missing object is not an error.
    pub(super) async fn delete(&self, key: &str) -> Result<()> {
        let Some(store) = self.existing().await? else {
            return Ok(());
        };
        match store.delete(&path(key)?).await {
            Ok(()) | Err(StoreError::NotFound { .. }) => Ok(()),
            Err(error) => Err(failed(
                format!("the object {key:?} could not be deleted"),
                error,
            )),
        }
    }

    /// Whether there are no objects.
    pub(super) async fn is_empty(&self) -> Result<bool> {
        let Some(store) = self.existing().await? else {
            return Ok(true);
        };
        let folder = path(&format!("{}{}", self.prefix, key::FOLDER))?;
        let first = store.list(Some(&folder)).try_next().await;
        let first = first.map_err(|e| failed("the objects could not be listed".into(), e))?;
        Ok(first.is_none())
    }

    /// Calls `each` with the key, size and age of every object.
    pub(super) async fn list(&self, mut each: impl FnMut(String, u64, Duration)) -> Result<()> {
        let Some(store) = self.existing().await? else {
            return Ok(());
        };
        let folder = path(&format!("{}{}", self.prefix, key::FOLDER))?;
        let mut objects = store.list(Some(&folder));
        let doing = |e| failed("the objects could not be listed".into(), e);
        while let Some(meta) = objects.try_next().await.map_err(doing)? {
            each(meta.location.to_string(), meta.size, age(&meta));
        }
        Ok(())
    }

    /// Removes unfinished files that interrupted puts left in a directory and that are older than `after`.
    /// With `dry_run` they are only counted. Returns their number and bytes.
    pub(super) async fn sweep_unfinished(
        &self,
        after: Duration,
        dry_run: bool,
    ) -> Result<(u64, u64)> {
        match &self.place {
            Place::Directory { path, .. } => {
                let (path, mark) = (path.clone(), self.mark_key());
                super::blocking(move || sweep(&path, &mark, after, dry_run)).await
            }
            #[cfg(feature = "s3")]
            Place::Remote(_) => Ok((0, 0)),
        }
    }
}

/// Reads a stream chunk by chunk.
pub(super) async fn read_stream(
    mut stream: BoxStream<'static, object_store::Result<Bytes>>,
    mut each: impl FnMut(&[u8]),
) -> Result<()> {
    let doing = |e| failed("an object could not be read".into(), e);
    while let Some(chunk) = stream.try_next().await.map_err(doing)? {
        each(&chunk);
    }
    Ok(())
}

/// Reads a file chunk by chunk.
pub(super) fn read_file(mut file: std::fs::File, mut each: impl FnMut(&[u8])) -> Result<()> {
    use std::io::Read as _;
    let mut buffer = vec![0; CHUNK];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(n) => each(&buffer[..n]),
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(from_io("an object could not be read".into(), e)),
        }
    }
}

pub(super) async fn hash_of(found: GetResult) -> Result<String> {
    let mut hash = Sha256::new();
    match found.payload {
        GetResultPayload::File(file, _) => {
            let hashed = move || {
                read_file(file, |chunk| hash.update(chunk))?;
                Ok(hex(&hash.finalize()))
            };
            super::blocking(hashed).await?
        }
        GetResultPayload::Stream(stream) => {
            read_stream(stream, |chunk| hash.update(chunk)).await?;
            Ok(hex(&hash.finalize()))
        }
    }
}

pub(super) fn path(key: &str) -> Result<Path> {
    Path::parse(key).map_err(|e| {
        Error::new(
            Code::ObjectStoreError,
            format!("{key:?} is not the key of an object"),
        )
        .caused_by(e)
    })
}

fn opened(path: &FilePath, open: &OnceLock<Arc<LocalFileSystem>>) -> Result<Arc<dyn ObjectStore>> {
    let store = LocalFileSystem::new_with_prefix(path)
        .map_err(|e| {
            failed(
                format!("the directory {} cannot be used", path.display()),
                e,
            )
        })?
        .with_fsync(true)
        .with_automatic_cleanup(true);
    Ok(open.get_or_init(|| Arc::new(store)).clone())
}

/// The age of an object, by the clock of this machine.
fn age(meta: &ObjectMeta) -> Duration {
    let modified = u64::try_from(meta.last_modified.timestamp_millis()).unwrap_or(0);
    let modified = SystemTime::UNIX_EPOCH + Duration::from_millis(modified);
    modified.elapsed().unwrap_or_default()
}

fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((byte, after)) = rest.split_first() {
        rest = after;
        if *byte != b'%' {
            bytes.push(*byte);
            continue;
        }
        let digits = std::str::from_utf8(rest.get(..2)?).ok()?;
        bytes.push(
            u8::from_str_radix(digits, 16)
                .ok()
                .filter(|byte| *byte != 0)?,
        );
        rest = &rest[2..];
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: fault-11/object-synced: the store of a directory syncs each object and the directory it is in
    #[test]
    fn a_directory_syncs_what_is_put_there() {
        let directory = tempfile::tempdir().unwrap();
        let store = opened(directory.path(), &OnceLock::new()).unwrap();
        assert!(format!("{store:?}").contains("fsync: true"), "{store:?}");
    }

    #[test]
    fn a_place_is_known_by_each_of_its_names() {
        let store = Store::parse("/var/objects").unwrap();
        assert!(store.is_called("/var/objects"));
        assert!(store.is_called("file:///var/objects"));
        assert!(store.is_called("/var/./objects"));
        for other in ["/var/other", "objects", "", "s3://objects"] {
            assert!(!store.is_called(other), "{other}");
        }
    }
}
