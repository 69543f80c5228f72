//! The key-value store. It is lost with the process, like everything in this engine.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use everbus_core::{
    ABSENT, BoxFuture, KeyValue, KvChange, KvEntry, KvPut, KvSeen, KvWatch, Result, Timestamp,
    check_kv_names, revision_conflict,
};

use crate::broker::{Memory, MemoryBroker};

/// All values, by bucket and key.
#[derive(Debug, Default)]
pub(crate) struct Values {
    rows: BTreeMap<(String, String), Row>,
    revision: u64,
}

#[derive(Debug)]
struct Row {
    value: Bytes,
    revision: u64,
    until: Option<Timestamp>,
}

impl Values {
    fn expire(&mut self, now: Timestamp) {
        self.rows
            .retain(|_, row| row.until.is_none_or(|until| until > now));
    }

    fn check(&self, place: &(String, String), expected: Option<u64>) -> Result<()> {
        let found = self.rows.get(place).map(|row| row.revision);
        match expected {
            Some(expected) if found.unwrap_or(ABSENT) != expected => {
                Err(revision_conflict(&place.1, expected, found))
            }
            _ => Ok(()),
        }
    }
}

impl KeyValue for MemoryBroker {
    fn get(&self, bucket: String, key: String) -> BoxFuture<'_, Result<Option<KvEntry>>> {
        Box::pin(async move {
            check_kv_names(&bucket, Some(&key))?;
            let mut state = self.0.open_state()?;
            state.values.expire(self.0.now());
            let place = (bucket, key);
            let row = state.values.rows.get(&place);
            let entry = |row: &Row| KvEntry::new(place.1.clone(), row.value.clone(), row.revision);
            Ok(row.map(entry))
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
            let mut state = self.0.open_state()?;
            let (now, place) = (self.0.now(), (bucket, key));
            let values = &mut state.values;
            values.expire(now);
            values.check(&place, put.expected)?;
            values.revision += 1;
            let revision = values.revision;
            let until = put.ttl.map(|ttl| now.plus(ttl));
            let row = Row {
                value,
                revision,
                until,
            };
            values.rows.insert(place, row);
            self.0.values.notify_waiters();
            Ok(revision)
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
            let mut state = self.0.open_state()?;
            let place = (bucket, key);
            state.values.expire(self.0.now());
            state.values.check(&place, expected)?;
            let was_there = state.values.rows.remove(&place).is_some();
            self.0.values.notify_waiters();
            Ok(was_there)
        })
    }

    fn watch(&self, bucket: String) -> BoxFuture<'_, Result<Box<dyn KvWatch>>> {
        Box::pin(async move {
            check_kv_names(&bucket, None)?;
            let watcher = Watcher {
                memory: self.0.clone(),
                bucket,
                seen: KvSeen::default(),
            };
            Ok(Box::new(watcher) as Box<dyn KvWatch>)
        })
    }
}

struct Watcher {
    memory: Arc<Memory>,
    bucket: String,
    seen: KvSeen,
}

impl Watcher {
    /// Finds the changes of the bucket since the last call, and returns when the next value expires.
    fn look(&mut self) -> Result<Option<Timestamp>> {
        let mut state = self.memory.open_state()?;
        state.values.expire(self.memory.now());
        let first = (self.bucket.clone(), String::new());
        let rows = state.values.rows.range(first..);
        let rows: Vec<_> = rows.take_while(|((b, _), _)| *b == self.bucket).collect();
        let next = rows.iter().filter_map(|(_, row)| row.until).min();
        let rows = rows.into_iter();
        let now = rows.map(|((_, key), row)| (key.clone(), Some(row.value.clone()), row.revision));
        self.seen.compare(now);
        Ok(next)
    }
}

impl KvWatch for Watcher {
    fn next(&mut self) -> BoxFuture<'_, Result<KvChange>> {
        Box::pin(async move {
            let memory = self.memory.clone();
            loop {
                if let Some(change) = self.seen.take() {
                    return Ok(change);
                }
                // Registered before the check, so that no notification between the two is lost.
                let mut woken = std::pin::pin!(memory.values.notified());
                woken.as_mut().enable();
                let next = self.look()?;
                if let Some(change) = self.seen.take() {
                    return Ok(change);
                }
                match next {
                    None => woken.await,
                    Some(until) => {
                        let wait = until.since(memory.now());
                        // Check again in both cases.
                        let _ = tokio::time::timeout(wait, woken).await;
                    }
                }
            }
        })
    }
}
