//! Values by key.

use std::sync::Arc;
use std::time::Duration;

use everbus::{Bus, Code, Engine, ManualClock, Timestamp};
use serde::{Deserialize, Serialize};

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Session {
    user: u32,
}

// conformance: contract/kv-bus: bus.kv puts and gets values and JSON with revision and expiry
#[tokio::test]
async fn values_are_put_with_conditions_and_expire() {
    let clock = ManualClock::new(Timestamp::EPOCH);
    let bus = Bus::builder().clock(clock.clone());
    let bus = bus.open("memory:").await.unwrap();
    let hour = Duration::from_secs(3600);
    let sessions = bus.kv("sessions").unwrap().ttl(hour);
    let first = sessions.put_json("a", &Session { user: 1 }).if_absent();
    let first = first.await.unwrap();
    let twice = sessions.put("a", "x").if_absent().await.unwrap_err();
    assert_eq!(twice.code(), Code::RevisionConflict);
    assert!(twice.hint_text().is_some());
    let read = sessions.get_json::<Session>("a").await.unwrap();
    assert_eq!(read, Some((Session { user: 1 }, first)));
    let wrong = sessions.get_json::<Vec<u8>>("a").await.unwrap_err();
    assert_eq!(wrong.code(), Code::InvalidPayloadError);
    sessions.put("b", "x").ttl(2 * hour).await.unwrap();

    let mut watch = sessions.watch().await.unwrap();
    assert_eq!(watch.next().await.unwrap().key, "a");
    assert_eq!(watch.next().await.unwrap().key, "b");
    clock.advance(hour);
    let expired = watch.next().await.unwrap();
    assert_eq!((expired.key.as_str(), expired.value), ("a", None));
    let kept = sessions.get("b").await.unwrap().unwrap();
    sessions.delete_revision("b", kept.revision).await.unwrap();
    assert!(!sessions.delete("b").await.unwrap());
}

// conformance: contract/kv-bus: an engine without values refuses, with a hint
#[tokio::test]
async fn an_engine_without_values_refuses() {
    let memory = everbus_memory::open(everbus_memory::Options::default());
    let narrow = Engine::new(Arc::clone(&memory.broker));
    let bus = Bus::builder().with_engine(narrow).unwrap();
    let refused = bus.kv("sessions").unwrap_err();
    assert_eq!(refused.code(), Code::Unsupported);
    assert!(refused.hint_text().unwrap().contains("--store"));
    let bus = Bus::open("memory:").await.unwrap();
    let odd = bus.kv("my sessions").unwrap_err();
    assert_eq!(odd.code(), Code::InvalidAttribute);
}
