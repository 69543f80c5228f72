//! Short functions of the tests, and a client without Everbus.

use std::time::Duration;

use everbus_core::{
    ConsumeOptions, Engine, Event, GroupSpec, Pattern, Settlement, StartFrom, SubscriptionSpec,
    Verdict,
};
use redis::Value;
use redis::aio::MultiplexedConnection;

/// A client of the server that knows nothing of Everbus.
pub(crate) struct Plain(pub(crate) MultiplexedConnection);

impl Plain {
    pub(crate) async fn connect(url: &str) -> Self {
        let client = redis::Client::open(url).unwrap();
        Self(client.get_multiplexed_async_connection().await.unwrap())
    }

    pub(crate) async fn ask(&self, words: &[&str]) -> redis::RedisResult<Value> {
        let mut command = redis::cmd(words[0]);
        for word in &words[1..] {
            command.arg(*word);
        }
        command.query_async(&mut self.0.clone()).await
    }

    pub(crate) async fn number(&self, words: &[&str]) -> i64 {
        match self.ask(words).await.unwrap() {
            Value::Int(number) => number,
            other => panic!("{other:?}"),
        }
    }

    /// The answer as text, for a look at what is in it.
    pub(crate) async fn text(&self, words: &[&str]) -> String {
        fn add(value: Value, text: &mut String) {
            match value {
                Value::Array(all) => all.into_iter().for_each(|one| add(one, text)),
                Value::BulkString(bytes) => {
                    text.push_str(&String::from_utf8_lossy(&bytes));
                    text.push('\n');
                }
                other => text.push_str(&format!("{other:?}\n")),
            }
        }
        let mut text = String::new();
        add(self.ask(words).await.unwrap(), &mut text);
        text
    }
}

pub(crate) fn pattern(text: &str) -> Pattern {
    Pattern::new(text).unwrap()
}

/// A group from the beginning of the log.
pub(crate) fn group(name: &str, patterns: &[&str]) -> GroupSpec {
    let mut spec = GroupSpec::new(name.parse().unwrap());
    spec.start_from = StartFrom::First;
    spec.subscriptions = patterns
        .iter()
        .map(|text| SubscriptionSpec {
            name: (*text).to_owned(),
            pattern: pattern(text),
        })
        .collect();
    spec
}

pub(crate) fn options() -> ConsumeOptions {
    ConsumeOptions::new(vec![pattern("*"), pattern("system.>")])
        .prefetch(64)
        .lease(Duration::from_secs(5))
}

pub(crate) async fn publish(engine: &Engine, event_type: &str) {
    let event = Event::builder(event_type).payload("{}").build().unwrap();
    let answers = engine.broker.append(vec![event]).await.unwrap();
    answers.into_iter().next().unwrap().unwrap();
}

/// Handles so many events of a group, and returns their types.
pub(crate) async fn handle(engine: &Engine, group: &str, count: usize) -> Vec<String> {
    let consumer = engine.broker.consume(group.parse().unwrap(), options());
    let mut consumer = consumer.await.unwrap();
    let mut types = Vec::new();
    let work = async {
        while types.len() < count {
            for delivery in consumer.fetch(count - types.len()).await.unwrap() {
                types.push(delivery.record.event.event_type().to_owned());
                let ack = Settlement::new(delivery.lease, Verdict::Ack);
                engine
                    .broker
                    .settle(vec![ack])
                    .await
                    .unwrap()
                    .remove(0)
                    .unwrap();
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(60), work)
        .await
        .unwrap();
    consumer.close().await.unwrap();
    types
}

/// Waits until something is so.
pub(crate) async fn until(what: &str, mut so: impl AsyncFnMut() -> bool) {
    let waiting = async {
        while !so().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(60), waiting).await;
    assert!(waited.is_ok(), "waited in vain: {what}");
}
