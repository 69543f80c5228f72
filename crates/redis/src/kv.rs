//! Values by key: a hash for each value, which expires by itself, and one with the revisions of a bucket.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use everbus_core::{
    BoxFuture, KeyValue, KvChange, KvEntry, KvPut, KvWatch, Result, check_kv_names,
    kv::{KvSeen, revision_conflict},
};
use redis::Value;

use crate::broker::{Redis, Shared};
use crate::client::{Arguments, Read as _};
use crate::scripts::{KV_DELETE, KV_PUT};

/// How often a watcher reads its bucket.
const PAUSE: Duration = Duration::from_millis(50);

impl Shared {
    async fn kv_get(&self, bucket: &str, key: &str) -> Result<Option<KvEntry>> {
        let mut get = redis::cmd("HMGET");
        get.arg(self.space.own(&format!("kv:{bucket}:{key}")));
        let mut parts = self
            .link
            .ask(get.arg("r").arg("v"))
            .await?
            .list()?
            .into_iter();
        match (parts.next(), parts.next()) {
            (Some(revision), Some(value)) if revision != Value::Nil => {
                Ok(Some(KvEntry::new(key, value.bytes()?, revision.number()?)))
            }
            _ => Ok(None),
        }
    }

    /// The answer of a script: its result, or the revision that the key has.
    fn kv_answer(answer: Value, key: &str, expected: Option<u64>) -> Result<u64> {
        let mut parts = answer.list()?.into_iter();
        let mut part = || parts.next().unwrap_or(Value::Nil);
        match part().text()?.as_str() {
            "ok" => part().number(),
            _ => {
                let found = part().text()?.parse().ok();
                Err(revision_conflict(key, expected.unwrap_or_default(), found))
            }
        }
    }

    /// Every key of a bucket with its value and revision. The keys are read one after another, so a value may be older
    /// than the newest one of an earlier look and still be new to a watcher.
    async fn kv_all(&self, bucket: &str) -> Result<Vec<(String, Option<Bytes>, u64)>> {
        let mut all = redis::cmd("HKEYS");
        let keys = self
            .link
            .ask(all.arg(self.space.own(&format!("kv:{bucket}"))))
            .await?;
        let mut found = Vec::new();
        for key in keys.list()? {
            let key = key.text()?;
            if let Some(entry) = self.kv_get(bucket, &key).await? {
                found.push((key, Some(entry.value), entry.revision));
            }
        }
        Ok(found)
    }
}

fn expected(revision: Option<u64>) -> String {
    revision.map_or_else(String::new, |revision| revision.to_string())
}

impl KeyValue for Redis {
    fn get(&self, bucket: String, key: String) -> BoxFuture<'_, Result<Option<KvEntry>>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            check_kv_names(&bucket, Some(&key))?;
            self.shared.kv_get(&bucket, &key).await
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
            let _running = self.shared.link.enter()?;
            check_kv_names(&bucket, Some(&key))?;
            let mut arguments = Arguments::default();
            arguments
                .text(&bucket)
                .text(&key)
                .bytes(&value)
                .text(&expected(put.expected));
            match put.ttl {
                Some(ttl) => arguments.millis(ttl.max(Duration::from_millis(1))),
                None => arguments.number(0),
            };
            let answer = self.shared.link.run(&KV_PUT, &arguments).await?;
            Shared::kv_answer(answer, &key, put.expected)
        })
    }

    fn delete(
        &self,
        bucket: String,
        key: String,
        revision: Option<u64>,
    ) -> BoxFuture<'_, Result<bool>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            check_kv_names(&bucket, Some(&key))?;
            let mut arguments = Arguments::default();
            arguments.text(&bucket).text(&key).text(&expected(revision));
            let answer = self.shared.link.run(&KV_DELETE, &arguments).await?;
            Ok(Shared::kv_answer(answer, &key, revision)? == 1)
        })
    }

    fn watch(&self, bucket: String) -> BoxFuture<'_, Result<Box<dyn KvWatch>>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            check_kv_names(&bucket, None)?;
            let watch = Watch {
                shared: self.shared.clone(),
                bucket,
                seen: KvSeen::default(),
            };
            Ok(Box::new(watch) as Box<dyn KvWatch>)
        })
    }
}

struct Watch {
    shared: Arc<Shared>,
    bucket: String,
    seen: KvSeen,
}

impl KvWatch for Watch {
    fn next(&mut self) -> BoxFuture<'_, Result<KvChange>> {
        Box::pin(async move {
            loop {
                if let Some(change) = self.seen.take() {
                    return Ok(change);
                }
                self.shared.link.check_open()?;
                let now = self.shared.kv_all(&self.bucket).await?;
                self.seen.compare(now);
                if let Some(change) = self.seen.take() {
                    return Ok(change);
                }
                tokio::time::sleep(PAUSE).await;
            }
        })
    }
}
