//! A key-value store for the state of a program: `bus.kv("sessions")`.

use std::fmt;
use std::future::IntoFuture;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use everbus_core::{
    ABSENT, BoxFuture, Code, Error, KeyValue, KvChange, KvEntry, KvPut, KvWatch, Result,
    check_kv_names,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A bucket: a set of keys, each with a value.
///
/// Every change gives a key a new revision. A put may name the revision that it expects. If two processes
/// change the same value at once, both with the expected revision, one of them gets `RevisionConflict`.
#[derive(Clone)]
pub struct Kv {
    engine: Arc<dyn KeyValue>,
    bucket: String,
    ttl: Option<Duration>,
}

impl Kv {
    pub(crate) fn new(engine: Arc<dyn KeyValue>, bucket: String) -> Result<Self> {
        check_kv_names(&bucket, None)?;
        Ok(Self {
            engine,
            bucket,
            ttl: None,
        })
    }

    /// Sets after what time values that are put through this handle expire. [`Put::ttl`] replaces this for
    /// one put.
    #[must_use]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// Reads the value of a key and its revision. `None` if the key does not exist.
    pub async fn get(&self, key: impl Into<String>) -> Result<Option<KvEntry>> {
        self.engine.get(self.bucket.clone(), key.into()).await
    }

    /// Reads the value of a key as JSON, and its revision. `None` if the key does not exist;
    /// `InvalidPayloadError` if the value is not the JSON of a `T`.
    pub async fn get_json<T: DeserializeOwned>(
        &self,
        key: impl Into<String>,
    ) -> Result<Option<(T, u64)>> {
        let Some(entry) = self.get(key).await? else {
            return Ok(None);
        };
        let value = serde_json::from_slice(&entry.value).map_err(|e| {
            let what = format!("the value of {:?} is not what was asked for", entry.key);
            Error::new(Code::InvalidPayloadError, what).caused_by(e)
        })?;
        Ok(Some((value, entry.revision)))
    }

    /// Returns a put of this value. Await it to put the value; the result is the new revision. See [`Put`]
    /// for conditions and expiry.
    pub fn put(&self, key: impl Into<String>, value: impl Into<Bytes>) -> Put {
        Put {
            kv: self.clone(),
            key: key.into(),
            value: Ok(value.into()),
            put: KvPut {
                expected: None,
                ttl: self.ttl,
            },
        }
    }

    /// Like [`put`](Self::put), with the value as JSON. If the value cannot be JSON, awaiting the put fails
    /// with `InvalidPayloadError`.
    pub fn put_json(&self, key: impl Into<String>, value: &impl Serialize) -> Put {
        let mut put = self.put(key, Bytes::new());
        put.value = serde_json::to_vec(value).map(Bytes::from).map_err(|e| {
            Error::new(Code::InvalidPayloadError, "the value is not JSON").caused_by(e)
        });
        put
    }

    /// Deletes a key. Returns whether the key existed.
    pub async fn delete(&self, key: impl Into<String>) -> Result<bool> {
        let bucket = self.bucket.clone();
        self.engine.delete(bucket, key.into(), None).await
    }

    /// Deletes a key if it has this revision; otherwise fails with `RevisionConflict`.
    pub async fn delete_revision(&self, key: impl Into<String>, revision: u64) -> Result<()> {
        let (bucket, expected) = (self.bucket.clone(), Some(revision));
        let deleted = self.engine.delete(bucket, key.into(), expected);
        deleted.await.map(drop)
    }

    /// Watches the bucket: yields first every existing value, then the changes.
    pub async fn watch(&self) -> Result<Watch> {
        let changes = self.engine.watch(self.bucket.clone()).await?;
        Ok(Watch { changes })
    }
}

impl fmt::Debug for Kv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kv")
            .field("bucket", &self.bucket)
            .finish_non_exhaustive()
    }
}

/// A put that has not happened yet. Await it to put the value; the result is the new revision.
#[derive(Debug)]
#[must_use = "a put does nothing until it is awaited"]
pub struct Put {
    kv: Kv,
    key: String,
    value: Result<Bytes>,
    put: KvPut,
}

impl Put {
    /// Puts only if the key has this revision; otherwise the put fails with `RevisionConflict`.
    pub fn expected(mut self, revision: u64) -> Self {
        self.put.expected = Some(revision);
        self
    }

    /// Puts only if the key does not exist; otherwise the put fails with `RevisionConflict`.
    pub fn if_absent(self) -> Self {
        self.expected(ABSENT)
    }

    /// Makes the value expire after this time.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.put.ttl = Some(ttl);
        self
    }
}

impl IntoFuture for Put {
    type Output = Result<u64>;
    type IntoFuture = BoxFuture<'static, Result<u64>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let value = self.value?;
            let engine = self.kv.engine;
            engine.put(self.kv.bucket, self.key, value, self.put).await
        })
    }
}

/// The values and changes of a bucket, from [`Kv::watch`].
pub struct Watch {
    changes: Box<dyn KvWatch>,
}

impl Watch {
    /// Waits for the next change. If a key changes several times in quick succession, only the last change
    /// is sure to be returned.
    ///
    /// Cancel safe: if the future is dropped before it is done, the next call returns the same change.
    pub async fn next(&mut self) -> Result<KvChange> {
        self.changes.next().await
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watch")
    }
}
