//! Values by key: revisions, conditions, expiry, and what a watcher sees.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use everbus_core::{ABSENT, Code, KeyValue, KvChange, KvPut, KvWatch, Result};

use super::needs::{KV, RESTART};
use super::stage::{DEADLINE, QUIET};
use super::{Harness, Outcome, Stage, Time};

const BUCKET: &str = "sessions";

/// Long enough for a slow machine to read the value before it expires.
const TTL: Duration = Duration::from_secs(3);

async fn put(kv: &Arc<dyn KeyValue>, key: &str, value: &str, put: KvPut) -> Result<u64> {
    let value = Bytes::copy_from_slice(value.as_bytes());
    kv.put(BUCKET.into(), key.into(), value, put).await
}

async fn read(kv: &Arc<dyn KeyValue>, key: &str) -> Option<(String, u64)> {
    let entry = kv.get(BUCKET.into(), key.into()).await.unwrap()?;
    let value = String::from_utf8(entry.value.to_vec()).unwrap();
    assert_eq!(entry.key, key);
    Some((value, entry.revision))
}

fn any() -> KvPut {
    KvPut::default()
}

fn expecting(revision: u64) -> KvPut {
    KvPut {
        expected: Some(revision),
        ttl: None,
    }
}

fn expiring() -> KvPut {
    KvPut {
        expected: None,
        ttl: Some(TTL),
    }
}

/// A read returns the value that was put last, with a growing revision. Buckets and keys do not affect each other.
pub async fn a_value_is_what_was_put_last<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&KV]).await?;
    let kv = stage.engine().kv().unwrap();
    assert_eq!(read(&kv, "user.1").await, None);
    let first = put(&kv, "user.1", "one", any()).await.unwrap();
    let second = put(&kv, "user.1", "two", any()).await.unwrap();
    assert!(first > ABSENT && second > first, "{first}, {second}");
    assert_eq!(read(&kv, "user.1").await, Some(("two".into(), second)));
    put(&kv, "user.2", "", any()).await.unwrap();
    assert_eq!(read(&kv, "user.2").await.unwrap().0, "");
    assert_eq!(kv.get("other".into(), "user.1".into()).await.unwrap(), None);
    let odd = Bytes::from_static(&[0, 255, b'\n', 0]);
    kv.put("other".into(), "a/b=c".into(), odd.clone(), any())
        .await
        .unwrap();
    let entry = kv.get("other".into(), "a/b=c".into()).await.unwrap();
    assert_eq!(entry.unwrap().value, odd);
    for (bucket, key) in [
        ("a b", "k"),
        ("", "k"),
        ("b", ""),
        ("b", "a b"),
        ("b", ".a"),
    ] {
        let refused = kv.get(bucket.into(), key.into()).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidAttribute, "{bucket:?} {key:?}");
        let refused = kv.put(bucket.into(), key.into(), Bytes::new(), any());
        assert_eq!(refused.await.unwrap_err().code(), Code::InvalidAttribute);
    }
    stage.passed()
}

/// Of several processes that change one revision, one succeeds; a deleted key counts as absent.
pub async fn a_put_can_expect_a_revision<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&KV]).await?;
    let kv = stage.engine().kv().unwrap();
    let conflict = |outcome: Result<u64>| outcome.unwrap_err().code() == Code::RevisionConflict;
    assert!(conflict(put(&kv, "k", "x", expecting(7)).await));
    let first = put(&kv, "k", "one", expecting(ABSENT)).await.unwrap();
    assert!(conflict(put(&kv, "k", "x", expecting(ABSENT)).await));
    let contenders: Vec<_> = (0..8)
        .map(|n| {
            let kv = kv.clone();
            let value = format!("contender {n}");
            tokio::spawn(async move { put(&kv, "k", &value, expecting(first)).await })
        })
        .collect();
    let mut won = Vec::new();
    for (n, contender) in contenders.into_iter().enumerate() {
        match contender.await.unwrap() {
            Ok(revision) => won.push((format!("contender {n}"), revision)),
            Err(error) => assert_eq!(error.code(), Code::RevisionConflict, "{error}"),
        }
    }
    assert_eq!(won.len(), 1, "{won:?}");
    assert_eq!(read(&kv, "k").await, won.pop());

    let delete = |expected| kv.delete(BUCKET.into(), "k".into(), expected);
    let refused = delete(Some(first)).await.unwrap_err();
    assert_eq!(refused.code(), Code::RevisionConflict);
    let (_, last) = read(&kv, "k").await.unwrap();
    assert!(delete(Some(last)).await.unwrap());
    assert_eq!(read(&kv, "k").await, None);
    assert!(!delete(None).await.unwrap(), "it is not there any more");
    let again = put(&kv, "k", "again", expecting(ABSENT)).await.unwrap();
    assert!(again > last, "a revision is not used again");
    assert!(conflict(put(&kv, "k", "x", expecting(last)).await));
    stage.passed()
}

/// A value with a time to live is there until then, and not after; a later put without one keeps it.
pub async fn a_value_expires<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[&KV]).await?;
    let kv = stage.engine().kv().unwrap();
    put(&kv, "short", "x", expiring()).await.unwrap();
    let kept = put(&kv, "kept", "x", expiring()).await.unwrap();
    put(&kv, "kept", "for good", expecting(kept)).await.unwrap();
    assert!(read(&kv, "short").await.is_some());
    stage.advance(TTL + Duration::from_secs(1)).await;
    until_gone(&kv, "short").await;
    assert_eq!(read(&kv, "kept").await.unwrap().0, "for good");
    put(&kv, "short", "anew", expecting(ABSENT)).await.unwrap();
    assert_eq!(read(&kv, "short").await.unwrap().0, "anew");
    stage.passed()
}

/// A server may remove what expired a little later than its time.
async fn until_gone(kv: &Arc<dyn KeyValue>, key: &str) {
    let gone = async {
        while read(kv, key).await.is_some() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(DEADLINE, gone).await.unwrap();
}

/// Follows a watcher until the bucket looks as expected.
async fn until(
    watch: &mut Box<dyn KvWatch>,
    seen: &mut BTreeMap<String, (String, u64)>,
    expected: &[(&str, &str)],
) {
    let pairs = expected.iter().map(|(k, v)| ((*k).into(), (*v).into()));
    let expected: BTreeMap<String, String> = pairs.collect();
    let values = |seen: &BTreeMap<String, (String, u64)>| -> BTreeMap<String, String> {
        seen.iter()
            .map(|(k, (v, _))| (k.clone(), v.clone()))
            .collect()
    };
    while values(seen) != expected {
        let next = tokio::time::timeout(DEADLINE, watch.next()).await;
        let KvChange {
            key,
            value,
            revision,
            ..
        } = next
            .unwrap_or_else(|_| panic!("{seen:?} does not become {expected:?}"))
            .unwrap();
        match value {
            Some(value) => {
                let value = String::from_utf8(value.to_vec()).unwrap();
                seen.insert(key, (value, revision));
            }
            // What is gone was there, and has the revision that it had.
            None => assert_eq!(seen.remove(&key).map(|(_, last)| last), Some(revision)),
        }
    }
}

/// A watcher sees what is there, then every change: puts, deletions and expiry.
pub async fn a_watcher_sees_the_changes<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[&KV]).await?;
    let kv = stage.engine().kv().unwrap();
    put(&kv, "a", "1", any()).await.unwrap();
    put(&kv, "b", "2", any()).await.unwrap();
    put(&kv, "gone", "x", any()).await.unwrap();
    kv.delete(BUCKET.into(), "gone".into(), None).await.unwrap();
    let mut watch = kv.watch(BUCKET.into()).await.unwrap();
    let mut seen = BTreeMap::new();
    until(&mut watch, &mut seen, &[("a", "1"), ("b", "2")]).await;

    // One that waits is woken.
    let elsewhere = kv.clone();
    let later = tokio::spawn(async move {
        put(&elsewhere, "a", "3", any()).await.unwrap();
        let deleted = elsewhere.delete(BUCKET.into(), "b".into(), None);
        assert!(deleted.await.unwrap());
    });
    until(&mut watch, &mut seen, &[("a", "3")]).await;
    later.await.unwrap();
    kv.put("other".into(), "a".into(), Bytes::new(), any())
        .await
        .unwrap();
    // Dropping the future of a waiting watcher loses nothing.
    let other = tokio::time::timeout(QUIET, watch.next()).await;
    assert!(other.is_err(), "another bucket: {other:?}");
    put(&kv, "c", "4", expiring()).await.unwrap();
    until(&mut watch, &mut seen, &[("a", "3"), ("c", "4")]).await;
    stage.advance(TTL + Duration::from_secs(1)).await;
    until(&mut watch, &mut seen, &[("a", "3")]).await;
    stage.passed()
}

/// Values and revisions are there after a crash.
pub async fn values_survive_a_crash<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Still, &[&KV, &RESTART]).await?;
    let kv = stage.engine().kv().unwrap();
    let kept = put(&kv, "kept", "x", any()).await.unwrap();
    let deleted = put(&kv, "deleted", "y", any()).await.unwrap();
    let delete = kv.delete(BUCKET.into(), "deleted".into(), None);
    assert!(delete.await.unwrap());
    drop(kv);
    stage.crash().await;
    let kv = stage.engine().kv().unwrap();
    assert_eq!(read(&kv, "kept").await, Some(("x".into(), kept)));
    assert_eq!(read(&kv, "deleted").await, None);
    let new = put(&kv, "deleted", "z", expecting(ABSENT)).await.unwrap();
    assert!(new > deleted, "a revision is not used again");
    stage.passed()
}
