//! Kafka: Everbus beside the client library on a topic of its own.
//!
//! What is compared:
//!
//! - *Joined before the clock starts.* Both sides have a topic of three partitions, have joined their group and have
//!   their partitions before the first publish.
//! - *The same backlog.* Both clients fetch ahead before anybody asks them for an event: up to 5,000 records of each
//!   partition, Everbus up to 2,000 more. So the backlog of `consume` is [`FETCHED_AHEAD`] events larger than the number that is
//!   timed, and the clock starts when that many are settled. What is timed then comes from the server, at the pace
//!   that each side keeps up.
//! - *The same batches.* Raw takes up to [`FETCH`] records at a time, as Everbus does, and fetches the next ones while a
//!   commit is under way. Both have the same settings of the client for fetching and for the producer.
//! - *The same durability.* Everbus hands out no event before the server has stored that its attempt begins, so that
//!   attempts are counted exactly after a crash. The other engines do that when an event is claimed, and their raw
//!   loops claim. Here raw commits: before it works on a batch, one commit stores that the batch before is done (as offset)
//!   and how far this one reaches (as metadata).
//!
//! `kafka-offsets` is the same with a raw loop that promises less: it hands out at once, and commits only the offset of
//! each batch that is done. An event that kills its consumer then comes back without an attempt.

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

use crate::{BATCH, FETCH, Outcome, PUBLISHERS, Plan, Round, ours};

/// As many as a topic of Everbus has.
const PARTITIONS: i32 = 3;
/// At least as many events as either side can have fetched before it consumes.
const FETCHED_AHEAD: usize = 24_000;

/// What raw stores of its attempts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Attempts {
    /// That they begin, before they do.
    Stored,
    /// Nothing.
    Unknown,
}

/// The next offset of each partition; -1 where nothing was taken.
type Ends = [i64; PARTITIONS as usize];

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
    let fresh = || next().unwrap_or_else(|| server.fresh_space());
    ours::round(plan, payload, false, FETCHED_AHEAD, fresh).await
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

pub(crate) async fn raw(plan: &Plan, payload: usize, attempts: Attempts) -> Outcome<Round> {
    let server = server()?;
    let raw = Raw::open(server, attempts).await?;
    let consumer = raw.join().await?;
    let publish = raw.publish(plan.events, payload).await?;
    raw.publish(FETCHED_AHEAD, payload).await?;
    let consume = raw.consume(consumer, FETCHED_AHEAD, plan.events).await?;
    let raw = Raw::open(server, attempts).await?;
    let consumer = raw.join().await?;
    let began = Instant::now();
    let consuming = raw.consume(consumer, 0, plan.events);
    let (published, consumed) = tokio::join!(raw.publish(plan.events, payload), consuming);
    let (_, _) = (published?, consumed?);
    let end_to_end = began.elapsed();
    let raw = Raw::open(server, attempts).await?;
    let consumer = raw.join().await?;
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
    attempts: Attempts,
}

impl Raw {
    async fn open(server: &Kafka, attempts: Attempts) -> Outcome<Self> {
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
            attempts,
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

    /// Takes `ahead` records and then `events` more, in batches, each of which is committed. Returns how long the later
    /// ones took.
    async fn consume(
        &self,
        consumer: Arc<BaseConsumer>,
        ahead: usize,
        events: usize,
    ) -> Outcome<Duration> {
        let progress = Progress::of(self, consumer.clone());
        let work = tokio::task::spawn_blocking(move || {
            let (taken, to_commit) = std::sync::mpsc::sync_channel::<(usize, Ends)>(2);
            let committing = std::thread::spawn(move || {
                let (mut progress, mut done, mut began) = (progress, 0, None);
                for (count, ends) in to_commit {
                    if done >= ahead {
                        began.get_or_insert_with(Instant::now);
                    }
                    progress.begin(&ends)?;
                    progress.finish(&ends)?;
                    done += count;
                }
                progress.end()?;
                Outcome::Ok(began.ok_or("nothing was timed")?.elapsed())
            });
            let mut left = ahead + events;
            while left > 0 {
                let (count, ends) = take(&consumer, FETCH.min(left))?;
                left -= count;
                if count > 0 && taken.send((count, ends)).is_err() {
                    break;
                }
            }
            drop(taken);
            committing.join().map_err(|_| "the committer panicked")?
        });
        work.await?
    }

    /// From the send until a consumer that waits has the record, and may begin.
    async fn latencies(
        &self,
        consumer: Arc<BaseConsumer>,
        samples: usize,
        payload: usize,
    ) -> Outcome<Vec<Duration>> {
        let (arrived, mut arrivals) = tokio::sync::mpsc::unbounded_channel();
        let count = samples + samples / 10;
        let mut progress = Progress::of(self, consumer.clone());
        let mut tasks = JoinSet::new();
        tasks.spawn_blocking(move || {
            let mut left = count;
            while left > 0 {
                let (count, ends) = take(&consumer, 1)?;
                if count == 0 {
                    continue;
                }
                left -= count;
                progress.begin(&ends)?;
                arrived.send(Instant::now())?;
                progress.finish(&ends)?;
                progress.end()?;
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

/// Takes up to `max` records: waits for the first one, and takes those that are there as well.
fn take(consumer: &BaseConsumer, max: usize) -> Outcome<(usize, Ends)> {
    let (mut count, mut ends) = (0, [-1; PARTITIONS as usize]);
    let mut wait = Duration::from_millis(50);
    while count < max
        && let Some(message) = consumer.poll(wait)
    {
        let message = message?;
        if message.payload().is_none_or(<[u8]>::is_empty) {
            return Err("a payload is gone".into());
        }
        ends[usize::try_from(message.partition())?] = message.offset() + 1;
        (count, wait) = (count + 1, Duration::ZERO);
    }
    Ok((count, ends))
}

/// What raw has committed. Each commit waits until the server has it.
struct Progress {
    consumer: Arc<BaseConsumer>,
    topic: String,
    attempts: Attempts,
    done: Ends,
    /// Whether something is done and not committed.
    open: bool,
}

impl Progress {
    fn of(raw: &Raw, consumer: Arc<BaseConsumer>) -> Self {
        Self {
            consumer,
            topic: raw.topic.clone(),
            attempts: raw.attempts,
            done: [-1; PARTITIONS as usize],
            open: false,
        }
    }

    /// Before the work on a batch: stores that it begins, and that the one before is done.
    fn begin(&mut self, batch: &Ends) -> Outcome<()> {
        if self.attempts == Attempts::Unknown {
            return Ok(());
        }
        let mut list = TopicPartitionList::new();
        for ((partition, done), end) in (0..).zip(self.done).zip(batch) {
            if *end < 0 && done < 0 {
                continue;
            }
            // Where nothing is done yet, the commit names the first offset.
            let mut element = list.add_partition(&self.topic, partition);
            element.set_offset(Offset::Offset(done.max(0)))?;
            element.set_metadata(end.to_string());
        }
        self.consumer.commit(&list, CommitMode::Sync)?;
        self.open = false;
        Ok(())
    }

    /// After the work on a batch.
    fn finish(&mut self, batch: &Ends) -> Outcome<()> {
        for (done, end) in self.done.iter_mut().zip(batch) {
            *done = (*done).max(*end);
        }
        self.open = true;
        match self.attempts {
            Attempts::Stored => Ok(()),
            Attempts::Unknown => self.end(),
        }
    }

    /// Stores what is done.
    fn end(&mut self) -> Outcome<()> {
        if !std::mem::take(&mut self.open) {
            return Ok(());
        }
        let mut list = TopicPartitionList::new();
        for (partition, done) in (0..).zip(self.done).filter(|(_, done)| *done >= 0) {
            list.add_partition_offset(&self.topic, partition, Offset::Offset(done))?;
        }
        Ok(self.consumer.commit(&list, CommitMode::Sync)?)
    }
}
