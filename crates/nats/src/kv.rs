//! Values by key: the layout of the key-value buckets of NATS, so that other clients read and write them.
//!
//! A bucket is a stream `KV_name` with one message per key; the revision is its sequence. A watcher reads the
//! stream, woken by a plain subscription; the server leaves a marker where a value expired.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_nats::{HeaderMap, Subscriber};
use bytes::Bytes;
use everbus_core::kv::{check_kv_names, revision_conflict};
use everbus_core::{
    ABSENT, BoxFuture, Code, Error, KeyValue, KvChange, KvEntry, KvPut, KvWatch, Result,
};
use futures_util::StreamExt as _;
use serde_json::json;

use crate::api::{Stored, Which};
use crate::broker::{Nats, Shared};
use crate::errors::number;
use crate::streams;

/// How long the server remembers that a value expired.
const MARKERS: Duration = Duration::from_secs(3600);
const OPERATION: &str = "KV-Operation";
const MARKER: &str = "Nats-Marker-Reason";
/// The most attempts to delete a key while other clients change it.
const TRIES: usize = 20;
/// How often a watcher reads the stream without being woken.
const LOOK: Duration = Duration::from_secs(1);

/// Whether a message is no value: the key was deleted, or its value expired.
fn is_gone(stored: &Stored) -> bool {
    stored.headers.get(OPERATION).is_some() || stored.headers.get(MARKER).is_some()
}

/// The names of a bucket on the server.
struct Bucket {
    stream: String,
    prefix: String,
}

impl Shared {
    fn bucket(&self, name: &str) -> Bucket {
        let name = self.space.bucket(name);
        Bucket {
            stream: format!("KV_{name}"),
            prefix: format!("$KV.{name}."),
        }
    }

    /// The last message of a key, which may be its deletion.
    async fn last(&self, bucket: &Bucket, key: &str) -> Result<Option<Stored>> {
        let which = Which {
            last_by_subj: Some(format!("{}{key}", bucket.prefix)),
            ..Which::default()
        };
        self.link.message(&bucket.stream, &which).await
    }

    async fn make_bucket(&self, bucket: &Bucket) -> Result<()> {
        if self.buckets.lock().contains(&bucket.stream) {
            return Ok(());
        }
        let copies = self.copies_of_own();
        if let Some(info) = self.link.stream(&bucket.stream).await? {
            streams::raise_copies(&self.link, &info.config, copies).await?;
        } else {
            let config = json!({
                "name": bucket.stream,
                "subjects": [format!("{}>", bucket.prefix)],
                "storage": "file",
                "retention": "limits",
                "discard": "new",
                "max_msgs_per_subject": 1,
                "num_replicas": copies,
                "metadata": streams::made(),
                "allow_direct": true,
                "allow_rollup_hdrs": true,
                "deny_delete": true,
                "allow_msg_ttl": true,
                "subject_delete_marker_ttl": MARKERS.as_nanos() as u64,
            });
            self.link.create_stream(&config).await?;
        }
        self.buckets.lock().insert(bucket.stream.clone());
        Ok(())
    }

    /// Publishes a value or a deletion. Returns `None` if the last sequence of the key is not the expected one.
    async fn put_message(
        &self,
        bucket: &Bucket,
        key: &str,
        mut headers: HeaderMap,
        value: Bytes,
        expected: Option<u64>,
    ) -> Result<Option<u64>> {
        if let Some(expected) = expected {
            headers.insert("Nats-Expected-Last-Subject-Sequence", expected.to_string());
        }
        let subject = format!("{}{key}", bucket.prefix);
        let put = self
            .link
            .publish_to_leader(&bucket.stream, &subject, headers, value);
        let ack = put.await.inspect_err(|_| {
            // The bucket may have been removed from the server: the next put looks for it.
            self.buckets.lock().remove(&bucket.stream);
        })?;
        match ack.error {
            None => Ok(Some(ack.seq)),
            Some(error)
                if matches!(
                    error.err_code,
                    number::WRONG_LAST_SEQUENCE | number::WRONG_LAST_SEQUENCE_2
                ) =>
            {
                Ok(None)
            }
            Some(error) => Err(error.into_error("the value cannot be put")),
        }
    }
}

impl KeyValue for Nats {
    fn get(&self, bucket: String, key: String) -> BoxFuture<'_, Result<Option<KvEntry>>> {
        Box::pin(async move {
            check_kv_names(&bucket, Some(&key))?;
            let _running = self.shared.link.enter()?;
            let bucket = self.shared.bucket(&bucket);
            let last = self.shared.last(&bucket, &key).await?;
            let value = last.filter(|stored| !is_gone(stored));
            Ok(value.map(|stored| KvEntry::new(key, stored.payload, stored.seq)))
        })
    }

    fn put(
        &self,
        bucket: String,
        key: String,
        value: Bytes,
        put: KvPut,
    ) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            check_kv_names(&bucket, Some(&key))?;
            let shared = &self.shared;
            let _running = shared.link.enter()?;
            let bucket = shared.bucket(&bucket);
            shared.make_bucket(&bucket).await?;
            let mut headers = HeaderMap::new();
            if let Some(ttl) = put.ttl {
                // The server counts whole seconds, one at least.
                let seconds = ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0);
                headers.insert("Nats-TTL", format!("{}s", seconds.max(1)));
            }
            let mut sequence = put.expected;
            if let Some(expected) = put.expected {
                let last = shared.last(&bucket, &key).await?;
                let there = last.as_ref().filter(|stored| !is_gone(stored));
                let there = there.map(|stored| stored.seq);
                if there.unwrap_or(ABSENT) != expected {
                    return Err(revision_conflict(&key, expected, there));
                }
                sequence = Some(last.map_or(0, |stored| stored.seq));
            }
            match shared
                .put_message(&bucket, &key, headers, value, sequence)
                .await?
            {
                Some(revision) => Ok(revision),
                None => {
                    let last = shared.last(&bucket, &key).await?;
                    let there = last
                        .filter(|stored| !is_gone(stored))
                        .map(|stored| stored.seq);
                    let expected = put.expected.unwrap_or_default();
                    Err(revision_conflict(&key, expected, there))
                }
            }
        })
    }

    fn delete(
        &self,
        bucket: String,
        key: String,
        expected: Option<u64>,
    ) -> BoxFuture<'_, Result<bool>> {
        Box::pin(async move {
            check_kv_names(&bucket, Some(&key))?;
            let shared = &self.shared;
            let _running = shared.link.enter()?;
            let bucket = shared.bucket(&bucket);
            for _ in 0..TRIES {
                let last = shared.last(&bucket, &key).await?;
                let there = last
                    .filter(|stored| !is_gone(stored))
                    .map(|stored| stored.seq);
                if let Some(expected) = expected.filter(|e| there.unwrap_or(ABSENT) != *e) {
                    return Err(revision_conflict(&key, expected, there));
                }
                let Some(revision) = there else {
                    return Ok(false);
                };
                let mut headers = HeaderMap::new();
                headers.insert(OPERATION, "DEL");
                let deleted =
                    shared.put_message(&bucket, &key, headers, Bytes::new(), Some(revision));
                if deleted.await?.is_some() {
                    return Ok(true);
                }
            }
            let what = format!("{key:?} is changed by others all the time");
            Err(Error::new(Code::Busy, what))
        })
    }

    fn watch(&self, bucket: String) -> BoxFuture<'_, Result<Box<dyn KvWatch>>> {
        Box::pin(async move {
            check_kv_names(&bucket, None)?;
            let shared = self.shared.clone();
            let _running = shared.link.enter()?;
            let bucket = shared.bucket(&bucket);
            shared.make_bucket(&bucket).await?;
            let woken = shared.link.client.subscribe(format!("{}>", bucket.prefix));
            let woken = woken
                .await
                .map_err(|e| Error::new(Code::Unavailable, e.to_string()))?;
            let watch = Watch {
                shared: self.shared.clone(),
                woken,
                bucket,
                last: 0,
                known: BTreeMap::new(),
                changes: Default::default(),
            };
            Ok(Box::new(watch) as Box<dyn KvWatch>)
        })
    }
}

struct Watch {
    shared: Arc<Shared>,
    bucket: Bucket,
    /// A message here wakes the watcher.
    woken: Subscriber,
    /// The last sequence that was read.
    last: u64,
    /// The revisions of the values that were reported.
    known: BTreeMap<String, u64>,
    changes: std::collections::VecDeque<KvChange>,
}

impl Watch {
    async fn look(&mut self) -> Result<()> {
        let link = &self.shared.link;
        let which = Which {
            seq: Some(self.last + 1),
            next_by_subj: Some(format!("{}>", self.bucket.prefix)),
            batch: Some(256),
            ..Which::default()
        };
        let mut page = link.messages(&self.bucket.stream, &which).await?;
        if page.is_empty() {
            // A replica may be behind its leader.
            let which = Which {
                batch: None,
                ..which
            };
            page.extend(link.message(&self.bucket.stream, &which).await?);
        }
        for stored in page {
            self.last = self.last.max(stored.seq);
            let Some(key) = stored.subject.strip_prefix(&self.bucket.prefix) else {
                continue;
            };
            if !is_gone(&stored) {
                self.known.insert(key.to_owned(), stored.seq);
                let change = KvChange::new(key, Some(stored.payload), stored.seq);
                self.changes.push_back(change);
                continue;
            }
            // As on other engines: the revision of the value, not that of the deletion.
            if let Some(revision) = self.known.remove(key) {
                self.changes.push_back(KvChange::new(key, None, revision));
            }
        }
        Ok(())
    }
}

impl KvWatch for Watch {
    fn next(&mut self) -> BoxFuture<'_, Result<KvChange>> {
        Box::pin(async move {
            loop {
                self.shared.link.check_open()?;
                if let Some(change) = self.changes.pop_front() {
                    return Ok(change);
                }
                self.look().await?;
                if self.changes.is_empty() {
                    let _ = tokio::time::timeout(LOOK, self.woken.next()).await;
                }
            }
        })
    }
}
