//! Appending: each record is sent, and the server's answer to each is awaited.
//!
//! The server does not recognise ids: an event that is appended twice is stored twice. The inbox of a store beside
//! the engine recognises the repetition.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Appended, Code, Error, Event, EventId, Position, Result};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Kind};
use rdkafka::producer::{DeliveryFuture, FutureRecord};

use crate::broker::Shared;
use crate::client::Producer;
use crate::errors::{is_refusal, kind};
use crate::topics::Topic;
use crate::wire::{self, Written};

/// After this many answers without an offset, an append fails.
const RESENDS: usize = 5;

/// An event that was given to the client.
struct Sent {
    id: EventId,
    topic: Arc<Topic>,
    written: Written,
    answer: DeliveryFuture,
}

impl Shared {
    pub(crate) async fn append(&self, batch: Vec<Event>) -> Result<Vec<Result<Appended>>> {
        let single = batch.len() == 1;
        let producer = self.link.producer();
        // All events are sent in order before the first answer is awaited.
        let mut sent = Vec::with_capacity(batch.len());
        // Most events of a batch have the type of the one before, and so its topic.
        let mut last: Option<(Arc<str>, Arc<Topic>)> = None;
        for event in batch {
            let topic = match &last {
                Some((of, topic)) if **of == *event.event_type() => Ok(topic.clone()),
                _ => self.topic_of(event.event_type()).await,
            };
            sent.push(match topic {
                Ok(topic) => {
                    last = Some((event.type_arc().clone(), topic.clone()));
                    self.send_event(&producer, topic, &event).await
                }
                Err(error) => Err(error),
            });
        }
        let mut answers = Vec::with_capacity(sent.len());
        for sent in sent {
            answers.push(match sent {
                Ok(sent) => self.answer(sent).await,
                Err(error) => Err(error),
            });
        }
        match answers.pop() {
            // With a single event, an error that may pass is the error of the whole call.
            Some(Err(error)) if single && error.class().may_repeat() => Err(error),
            last => {
                answers.extend(last);
                Ok(answers)
            }
        }
    }

    async fn send_event(
        &self,
        producer: &Arc<Producer>,
        topic: Arc<Topic>,
        event: &Event,
    ) -> Result<Sent> {
        let received_at = self.stamp();
        let written = wire::write(event, topic.dialect, received_at)?;
        if written.size() > topic.max_bytes {
            return Err(too_large(&topic));
        }
        let answer = self.send(producer, &topic.name, &written).await?;
        Ok(Sent {
            id: event.id(),
            topic,
            written,
            answer,
        })
    }

    /// Gives a record to the client. Waits while the queue of the client is full.
    pub(crate) async fn send(
        &self,
        producer: &Producer,
        topic: &str,
        written: &Written,
    ) -> Result<DeliveryFuture> {
        let begin = std::time::Instant::now();
        loop {
            let mut record = FutureRecord::<str, [u8]>::to(topic)
                .payload(&written.payload[..])
                .timestamp(written.received_at.as_micros().div_euclid(1000))
                .headers(written.native_headers());
            if let Some(key) = &written.key {
                record = record.key(key);
            }
            match producer.send_result(record) {
                Ok(answer) => return Ok(answer),
                Err((KafkaError::MessageProduction(Kind::QueueFull), _))
                    if begin.elapsed() < self.link.timeout =>
                {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                Err((error, _)) => return Err(self.not_sent(topic, &error)),
            }
        }
    }

    /// The answer for an event, once the server has it.
    async fn answer(&self, sent: Sent) -> Result<Appended> {
        let Sent {
            id,
            topic,
            written,
            answer,
        } = sent;
        let (partition, offset) = self.placed(&topic.name, &written, answer).await?;
        let place = u64::try_from(offset).unwrap_or(0) + 1;
        let position = Position::new(topic.shard(partition), place);
        Ok(Appended::new(id, position, written.received_at))
    }

    /// The partition and the offset of a record, once the server has it.
    ///
    /// The client also reports success without an offset: by its sequence number, the server took the record for a
    /// repetition. That may be wrong. If a new partition has no leader yet, the first records are refused, and later
    /// ones may be stored. When the first ones are sent again, the server takes them for repetitions and does not
    /// store them. So a record without an offset is sent again as a new one: it may be stored twice, but it is not
    /// lost.
    async fn placed(
        &self,
        topic: &str,
        written: &Written,
        answer: DeliveryFuture,
    ) -> Result<(i32, i64)> {
        let mut answer = answer;
        for _ in 0..RESENDS {
            let delivery = match answer.await {
                Ok(Ok(delivery)) => delivery,
                Ok(Err((error, _))) => return Err(self.not_sent(topic, &error)),
                Err(_) => {
                    let what = "the producer ended before the server answered";
                    return Err(Error::new(Code::Unavailable, what).with_unknown_outcome());
                }
            };
            if delivery.offset >= 0 {
                return Ok((delivery.partition, delivery.offset));
            }
            tracing::warn!(target: "everbus::kafka", topic, "a record was answered without an offset, and is sent again");
            answer = self.send(&self.link.producer(), topic, written).await?;
        }
        let what = format!("{topic}: the server does not say where the event is");
        Err(Error::new(Code::Unavailable, what).with_unknown_outcome())
    }

    /// Sends a record that is no event, and waits for the answer.
    pub(crate) async fn store(&self, topic: &str, written: &Written) -> Result<()> {
        let answer = self.send(&self.link.producer(), topic, written).await?;
        self.placed(topic, written, answer).await.map(drop)
    }

    fn not_sent(&self, topic: &str, error: &KafkaError) -> Error {
        let what = format!("the event cannot be stored in {topic}");
        let kind = kind(error);
        if matches!(
            kind,
            Some(Kind::UnknownTopicOrPartition | Kind::UnknownTopic | Kind::UnknownPartition)
        ) {
            // The next event creates the topic again.
            self.topics.lock().remove(topic);
        }
        let refusal = self.link.unanswered(&what, error);
        match is_refusal(kind) {
            true => refusal,
            false => refusal.with_unknown_outcome(),
        }
    }
}

fn too_large(topic: &Topic) -> Error {
    let what = format!(
        "the event is larger than {} bytes, which the topic {} takes at most",
        topic.max_bytes, topic.name
    );
    Error::new(Code::PayloadTooLarge, what).hint(
        "let large payloads overflow to an object store, or raise max.message.bytes of the topic",
    )
}
