//! How durable topics are, and which settings keep them from being more so.

use everbus_core::Durability;

use crate::bad_input::create;
use crate::{server, work};

// conformance: contract/kafka-durability: the grade is that of the weakest topic, from its copies and settings; each setting that weakens it is named, and so is a retention
// needs: Kafka
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_weakest_topic_counts_and_its_settings_are_named() {
    let Some(url) = server::space() else {
        return;
    };
    let flushed = [("retention.ms", "-1"), ("flush.messages", "1")];
    create(&url, "user", 1, &flushed).await;
    create(&url, "price", 1, &[("retention.ms", "60000")]).await;
    let mut options = server::options();
    options.allow_shorter_age = true;
    let engine = everbus_kafka::open(&url, options).await.unwrap();
    let durability = || engine.broker.capabilities().durability;
    work::publish(&engine, "user.created").await;
    assert_eq!(durability(), Durability::PowerLoss);
    work::publish(&engine, "price.changed").await;
    assert_eq!(durability(), Durability::Process);
    let again = server::open(&url).await;
    let named = |setting: &str, topic: &str| {
        let of = |name: &str| name.starts_with(setting) && name.ends_with(&format!(".{topic}"));
        again.weaknesses.iter().any(|weak| of(&weak.setting))
    };
    for topic in ["user", "price"] {
        assert!(named("replication.factor", topic), "{:?}", again.weaknesses);
    }
    assert!(named("retention.ms", "price") && !named("retention.ms", "user"));
    assert!(named("flush.messages", "price") && !named("flush.messages", "user"));
}
