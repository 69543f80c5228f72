//! Kafka: Everbus beside the client library on a topic of its own.
//!
//! The raw loop awaits every acknowledgement of a publish, with the same producer settings and headers. It polls in one
//! thread and commits in another, as Everbus does: each commit waits for the server, and covers all records that came
//! meanwhile. Unlike Everbus it commits no attempts before they begin.
//!
//! Both have their topic, and have joined the group, before the time is taken. Both consumers have the same settings for
//! fetching. Each has fetched a part of the events before `consume` begins: raw up to 5,000 of each partition, Everbus
//! 2,000. So the number of events should be large.

use std::sync::Arc;
use std::time::{Duration, Instant};

use everbus::{Bus, Event, GroupName};
use everbus_testkit::servers::{Kafka, KafkaOptions};
use futures_util::future::try_join_all;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::message::{Header, Message as _, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::{BATCH, Outcome, PUBLISHERS, Plan, Round, ours};

/// As many as a topic of Everbus has.
const PARTITIONS: i32 = 3;

fn server() -> Outcome<&'static Kafka> {
    static SERVER: std::sync::OnceLock<Option<Kafka>> = std::sync::OnceLock::new();
    let server = SERVER.get_or_init(|| Kafka::start(&KafkaOptions::default()));
    server
        .as_ref()
        .ok_or_else(|| "Kafka is not installed, or EVERBUS_KAFKA=1 is not set".into())
}

pub(crate) async fn ours(plan: &Plan, payload: usize) -> Outcome<Round> {
    let server = server()?;
    // One space for each scenario of a round.
    let mut spaces = Vec::new();
    for _ in 0..3 {
        spaces.push(with_topic(server.fresh_space()).await?);
    }
    let spaces = std::sync::Mutex::new(spaces);
    let next = || spaces.lock().ok().and_then(|mut spaces| spaces.pop());
    ours::round(plan, payload, false, || {
        next().unwrap_or_else(|| server.fresh_space())
    })
    .await
}

/// Creates the topic before the first publish, as for the raw client. The event that creates it is for a group that
/// does not exist.
async fn with_topic(url: String) -> Outcome<String> {
    let bus = Bus::open(&url).await?;
    let first = Event::builder("bench.event.first").addressed_to(&GroupName::new("other")?);
    bus.publish(first.build()?).await?;
    bus.shutdown().await?;
    Ok(url)
}

pub(crate) async fn raw(plan: &Plan, payload: usize) -> Outcome<Round> {
    let server = server()?;
    let raw = Raw::open(server).await?;
    let consumer = raw.join().await?;
    let publish = raw.publish(plan.events, payload).await?;
    let consume = raw.consume(consumer, plan.events).await?;
    let raw = Raw::open(server).await?;
    let consumer = raw.join().await?;
    let began = Instant::now();
    let consuming = raw.consume(consumer.clone(), plan.events);
    let (published, consumed) = tokio::join!(raw.publish(plan.events, payload), consuming);
    let (_, _) = (published?, consumed?);
    let end_to_end = began.elapsed();
    Ok(Round {
        publish,
        consume,
        end_to_end,
        latencies: raw.latencies(consumer, plan.samples, payload).await?,
    })
}

/// The clients on one topic.
#[derive(Clone)]
struct Raw {
    config: ClientConfig,
    producer: FutureProducer,
    topic: String,
}

impl Raw {
    async fn open(server: &Kafka) -> Outcome<Self> {
        let mut config = ClientConfig::new();
        config
            .set("bootstrap.servers", format!("127.0.0.1:{}", server.port()))
            .set("socket.nagle.disable", "true");
        let topic = format!("raw-{}", Uuid::now_v7());
        let admin: AdminClient<DefaultClientContext> = config.create()?;
        let new = NewTopic::new(&topic, PARTITIONS, TopicReplication::Fixed(1));
        for created in admin.create_topics([&new], &AdminOptions::new()).await? {
            created.map_err(|(_, why)| format!("the topic was refused: {why}"))?;
        }
        let mut producing = config.clone();
        producing
            .set("acks", "all")
            .set("enable.idempotence", "true")
            .set("linger.ms", "0")
            .set("queue.buffering.max.messages", "500000")
            .set("sticky.partitioning.linger.ms", "0");
        Ok(Self {
            producer: producing.create()?,
            config,
            topic,
        })
    }

    async fn send(&self, payload: usize) -> Outcome<()> {
        let body = vec![b'x'; payload];
        let id = Uuid::now_v7().to_string();
        let header = |key, value| Header {
            key,
            value: Some(value),
        };
        let headers = OwnedHeaders::new_with_capacity(3)
            .insert(header("everbus", "1 1763000000000000 1763000000000000"))
            .insert(header("everbus-id", &id))
            .insert(header("everbus-type", "bench.event.stored"));
        let record = FutureRecord::<str, [u8]>::to(&self.topic)
            .payload(&body)
            .headers(headers);
        let sent = self.producer.send_result(record);
        let answer = sent.map_err(|(error, _)| error)?.await?;
        answer.map(drop).map_err(|(error, _)| error.into())
    }

    /// Publishes in batches: a batch is [`BATCH`] sends in flight.
    async fn publish(&self, events: usize, payload: usize) -> Outcome<Duration> {
        let began = Instant::now();
        let mut tasks = JoinSet::new();
        for _ in 0..PUBLISHERS {
            let raw = self.clone();
            tasks.spawn(async move {
                for _ in 0..events / PUBLISHERS / BATCH {
                    try_join_all((0..BATCH).map(|_| raw.send(payload))).await?;
                }
                Outcome::Ok(())
            });
        }
        while let Some(done) = tasks.join_next().await {
            done??;
        }
        Ok(began.elapsed())
    }

    /// Joins a group before there are events, as Everbus does when its group is declared.
    async fn join(&self) -> Outcome<Arc<BaseConsumer>> {
        let mut config = self.config.clone();
        config
            .set("group.id", format!("g-{}", self.topic))
            .set("enable.auto.commit", "false")
            .set("enable.auto.offset.store", "false")
            .set("auto.offset.reset", "earliest")
            .set("partition.assignment.strategy", "cooperative-sticky")
            .set("queued.min.messages", "5000")
            .set("queued.max.messages.kbytes", "32768")
            .set("fetch.queue.backoff.ms", "10")
            .set("fetch.wait.max.ms", "100");
        let topic = self.topic.clone();
        let joining = tokio::task::spawn_blocking(move || {
            let consumer: BaseConsumer = config.create()?;
            consumer.subscribe(&[&topic])?;
            while consumer.assignment()?.count() < PARTITIONS as usize {
                if let Some(early) = consumer.poll(Duration::from_millis(10)) {
                    return Err(format!("{early:?} came before the first event").into());
                }
            }
            Outcome::Ok(Arc::new(consumer))
        });
        joining.await?
    }

    /// Takes this many records and commits them.
    async fn consume(&self, consumer: Arc<BaseConsumer>, events: usize) -> Outcome<Duration> {
        let topic = self.topic.clone();
        let work = tokio::task::spawn_blocking(move || {
            let began = Instant::now();
            let (taken, to_commit) = std::sync::mpsc::channel::<(i32, i64)>();
            let committer = consumer.clone();
            let committing = std::thread::spawn(move || {
                while let Ok(first) = to_commit.recv() {
                    let mut ends = [-1; PARTITIONS as usize];
                    for (partition, end) in std::iter::once(first).chain(to_commit.try_iter()) {
                        ends[usize::try_from(partition)?] = end;
                    }
                    commit(&committer, &topic, &ends)?;
                }
                Outcome::Ok(())
            });
            for _ in 0..events {
                let message = loop {
                    if let Some(message) = consumer.poll(Duration::from_millis(50)) {
                        break message?;
                    }
                };
                if message.payload().is_none_or(<[u8]>::is_empty) {
                    return Err("a payload is gone".into());
                }
                taken.send((message.partition(), message.offset() + 1))?;
            }
            drop(taken);
            committing.join().map_err(|_| "the committer panicked")??;
            Outcome::Ok(began.elapsed())
        });
        work.await?
    }

    /// From the send to the poll of a consumer that waits.
    async fn latencies(
        &self,
        consumer: Arc<BaseConsumer>,
        samples: usize,
        payload: usize,
    ) -> Outcome<Vec<Duration>> {
        let (arrived, mut arrivals) = tokio::sync::mpsc::unbounded_channel();
        let count = samples + samples / 10;
        let topic = self.topic.clone();
        let mut tasks = JoinSet::new();
        tasks.spawn_blocking(move || {
            let mut taken = 0;
            while taken < count {
                let Some(message) = consumer.poll(Duration::from_secs(1)) else {
                    continue;
                };
                let message = message?;
                arrived.send(Instant::now())?;
                taken += 1;
                let mut ends = [-1; PARTITIONS as usize];
                ends[usize::try_from(message.partition())?] = message.offset() + 1;
                commit(&consumer, &topic, &ends)?;
            }
            Outcome::Ok(())
        });
        let mut took = Vec::with_capacity(samples);
        for sample in 0..count {
            let began = Instant::now();
            self.send(payload).await?;
            let arrival = arrivals.recv().await.ok_or("the consumer is gone")?;
            if sample >= samples / 10 {
                took.push(arrival.saturating_duration_since(began));
            }
        }
        while let Some(ended) = tasks.join_next().await {
            ended??;
        }
        Ok(took)
    }
}

/// Commits the next offset of each partition, and waits until the server has it.
fn commit(consumer: &BaseConsumer, topic: &str, ends: &[i64]) -> Outcome<()> {
    let mut list = TopicPartitionList::new();
    for (partition, end) in (0..).zip(ends).filter(|(_, end)| **end >= 0) {
        list.add_partition_offset(topic, partition, Offset::Offset(*end))?;
    }
    Ok(consumer.commit(&list, CommitMode::Sync)?)
}
