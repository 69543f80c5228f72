//! Reading topics without a group.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use everbus_core::{
    BoxFuture, Cursor, Log, Pattern, Position, Recorded, Result, StartFrom, Timestamp,
};
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::KafkaError;
use rdkafka::message::Message as _;
use rdkafka::{Offset, TopicPartitionList};

use crate::broker::{Kafka, Shared};
use crate::client::{Plain, blocking, patiently};
use crate::topics::Topic;
use crate::wire;

/// A read that has lasted this long fails with the next poll that returns no record.
const COMES_WITHIN: Duration = Duration::from_secs(10);
/// If the end of a partition was seen and no record comes for this long, there is none.
const SILENT: Duration = Duration::from_secs(3);
/// How many records are read at a time to find the newest event, and how many times at most.
const WINDOW: i64 = 500;
const MOST_WINDOWS: i64 = 40;
/// The pause between two looks at the end of the log.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);
/// Clocks of publishers may differ by this much.
const SKEW: Duration = Duration::from_secs(60);
/// Readers that are kept for the next call.
const IDLE_READERS: usize = 2;

type Reader = BaseConsumer<Plain>;

/// The first offset of each partition, and the offset after its last record, by topic and partition.
pub(crate) type Ends = HashMap<(String, i32), (i64, i64)>;

impl Shared {
    /// Calls a function with a reader, on a thread that may block.
    pub(crate) async fn with_reader<T: Send + 'static>(
        self: &Arc<Self>,
        call: impl FnOnce(&Reader, Duration) -> Result<T, KafkaError> + Send + 'static,
    ) -> Result<T> {
        let kept = self.readers.lock().pop();
        let reader = match kept {
            Some(reader) => reader,
            None => self.link.reader("everbus-reader")?,
        };
        let (shared, timeout) = (self.clone(), self.link.timeout);
        let done = blocking(move || {
            let done = call(&reader, timeout);
            let mut readers = shared.readers.lock();
            if done.is_ok() && readers.len() < IDLE_READERS && shared.link.check_open().is_ok() {
                readers.push(reader);
            }
            done
        });
        let done = done.await?;
        done.map_err(|error| self.link.unanswered("the log cannot be read", &error))
    }

    /// The topics with events, after the registry was read to its end.
    pub(crate) async fn readable(&self) -> Result<Vec<Arc<Topic>>> {
        self.registry.sync(&self.link).await?;
        let noted = self.registry.topics();
        let topics = noted
            .iter()
            .map(|(name, note)| Arc::new(Topic::of_note(name, note)));
        Ok(topics.collect())
    }

    /// The ends of all partitions of these topics.
    pub(crate) async fn ends(self: &Arc<Self>, topics: &[Arc<Topic>]) -> Result<Ends> {
        let topics = topics.to_vec();
        if topics.is_empty() {
            return Ok(Ends::new());
        }
        self.with_reader(move |reader, timeout| {
            let mut ends = Ends::new();
            for topic in &topics {
                for partition in 0..topic.partitions {
                    let ask = || reader.fetch_watermarks(&topic.name, partition, timeout);
                    let end = match patiently(timeout, ask) {
                        Ok(end) => end,
                        // The topic was removed.
                        Err(error) if is_unknown(&error) => (0, 0),
                        Err(error) => return Err(error),
                    };
                    ends.insert((topic.name.clone(), partition), end);
                }
            }
            Ok(ends)
        })
        .await
    }

    async fn head(self: &Arc<Self>) -> Result<Cursor> {
        let topics = self.readable().await?;
        let ends = self.ends(&topics).await?;
        let mut cursor = Cursor::START;
        for topic in &topics {
            for partition in 0..topic.partitions {
                if let Some((_, end)) = ends.get(&(topic.name.clone(), partition)) {
                    cursor.advance(Position::new(topic.shard(partition), place(*end)));
                }
            }
        }
        Ok(cursor)
    }

    /// The first offset of each partition whose record has this time or a later one; the end if there is none.
    pub(crate) async fn offsets_at(
        self: &Arc<Self>,
        topics: &[Arc<Topic>],
        time: Timestamp,
    ) -> Result<HashMap<(String, i32), i64>> {
        let ends = self.ends(topics).await?;
        let topics = topics.to_vec();
        let millis = time.as_micros().div_euclid(1000).max(0);
        self.with_reader(move |reader, timeout| {
            let mut asked = TopicPartitionList::new();
            for topic in &topics {
                for partition in 0..topic.partitions {
                    asked.add_partition_offset(&topic.name, partition, Offset::Offset(millis))?;
                }
            }
            let mut found = HashMap::new();
            if asked.count() == 0 {
                return Ok(found);
            }
            let answers = patiently(timeout, || reader.offsets_for_times(asked.clone(), timeout))?;
            for element in answers.elements() {
                let key = (element.topic().to_owned(), element.partition());
                let end = ends.get(&key).map_or(0, |(_, end)| *end);
                let offset = match element.offset() {
                    Offset::Offset(offset) if offset >= 0 => offset.min(end),
                    _ => end,
                };
                found.insert(key, offset);
            }
            Ok(found)
        })
        .await
    }

    /// The newest event that one of the patterns matches: its topic, partition and offset.
    pub(crate) async fn newest(
        self: &Arc<Self>,
        topics: &[Arc<Topic>],
        patterns: &[Pattern],
    ) -> Result<Option<(String, i32, i64)>> {
        let ends = self.ends(topics).await?;
        let (topics, patterns) = (topics.to_vec(), patterns.to_vec());
        self.with_reader(move |reader, _| {
            let mut newest: Option<(Timestamp, String, i32, i64)> = None;
            for topic in &topics {
                for partition in 0..topic.partitions {
                    let ends = ends.get(&(topic.name.clone(), partition));
                    let (first, end) = ends.copied().unwrap_or_default();
                    let mut to = end;
                    let least = (end - WINDOW * MOST_WINDOWS).max(first);
                    while to > least {
                        let from = (to - WINDOW).max(least);
                        let (found, _) = read_partition(
                            reader,
                            topic,
                            partition,
                            (from, to),
                            usize::MAX,
                            |event_type| patterns.iter().any(|pattern| pattern.matches(event_type)),
                        )?;
                        if let Some(last) = found.last() {
                            let known = newest.as_ref();
                            if known.is_none_or(|(at, ..)| last.received_at > *at) {
                                let offset = offset(last.position.place());
                                newest =
                                    Some((last.received_at, topic.name.clone(), partition, offset));
                            }
                            break;
                        }
                        to = from;
                    }
                }
            }
            Ok(newest.map(|(_, topic, partition, offset)| (topic, partition, offset)))
        })
        .await
    }

    async fn resolve_time(self: &Arc<Self>, time: Timestamp) -> Result<Cursor> {
        let topics = self.readable().await?;
        let starts = self.offsets_at(&topics, time.minus(SKEW)).await?;
        let ends = self.ends(&topics).await?;
        self.with_reader(move |reader, _| {
            let mut cursor = Cursor::START;
            for topic in &topics {
                for partition in 0..topic.partitions {
                    let key = (topic.name.clone(), partition);
                    let mut at = starts.get(&key).copied().unwrap_or(0);
                    let end = ends.get(&key).map_or(0, |(_, end)| *end);
                    // Clocks differ, so the search begins early: records before `time` are skipped.
                    while at < end {
                        let (found, reached) =
                            read_partition(reader, topic, partition, (at, end), 200, |_| true)?;
                        if let Some(first) = found.iter().find(|record| record.received_at >= time)
                        {
                            at = offset(first.position.place());
                            break;
                        }
                        at = reached.max(at + 1);
                    }
                    cursor.advance(Position::new(topic.shard(partition), place(at)));
                }
            }
            Ok(cursor)
        })
        .await
    }
}

fn is_unknown(error: &KafkaError) -> bool {
    use rdkafka::error::RDKafkaErrorCode as Kind;
    let unknown = [
        Kind::UnknownTopicOrPartition,
        Kind::UnknownTopic,
        Kind::UnknownPartition,
    ];
    crate::errors::kind(error).is_some_and(|kind| unknown.contains(&kind))
}

/// The last place before an offset.
pub(crate) fn place(offset: i64) -> u64 {
    u64::try_from(offset).unwrap_or(0)
}

/// The offset of a place.
pub(crate) fn offset(place: u64) -> i64 {
    i64::try_from(place).unwrap_or(i64::MAX).saturating_sub(1)
}

/// Reads records from an offset up to another one, which is not included, until `limit` records were taken. Returns
/// them, and the offset up to which the partition was read.
pub(crate) fn read_partition(
    reader: &Reader,
    topic: &Topic,
    partition: i32,
    (from, to): (i64, i64),
    limit: usize,
    wanted: impl Fn(&str) -> bool,
) -> Result<(Vec<Arc<Recorded>>, i64), KafkaError> {
    let mut found = Vec::new();
    let mut reached = from;
    if from >= to || limit == 0 {
        return Ok((found, from));
    }
    let mut all = TopicPartitionList::new();
    all.add_partition_offset(&topic.name, partition, Offset::Offset(from))?;
    reader.assign(&all)?;
    let begin = Instant::now();
    // When the end of the partition was seen with no record after that. The end may still be that of an earlier read.
    let mut silent: Option<Instant> = None;
    while reached < to && found.len() < limit {
        match reader.poll(Duration::from_millis(200)) {
            Some(Ok(message)) => {
                if message.topic() != topic.name
                    || message.partition() != partition
                    || message.offset() < from
                {
                    continue;
                }
                if message.offset() >= to {
                    reached = to;
                    break;
                }
                reached = message.offset() + 1;
                silent = None;
                let read = wire::read(topic, &message, None);
                if wanted(read.record.event.event_type()) {
                    found.push(Arc::new(read.record));
                }
            }
            // The last offsets before the end may hold no events, for example transaction markers.
            Some(Err(KafkaError::PartitionEOF(_))) => _ = silent.get_or_insert_with(Instant::now),
            Some(Err(error)) if is_unknown(&error) => break,
            Some(Err(error)) => {
                tracing::debug!(target: "everbus::kafka", %error, "reading the log");
                if begin.elapsed() > COMES_WITHIN {
                    let _ = reader.unassign();
                    return Err(error);
                }
            }
            None if begin.elapsed() > COMES_WITHIN => {
                let _ = reader.unassign();
                use rdkafka::error::RDKafkaErrorCode as Kind;
                return Err(KafkaError::MessageConsumption(Kind::OperationTimedOut));
            }
            None => {
                if silent.is_some_and(|since| since.elapsed() > SILENT) {
                    reached = to;
                }
            }
        }
    }
    let _ = reader.unassign();
    Ok((found, reached))
}

impl Log for Kafka {
    fn head(&self) -> BoxFuture<'_, Result<Cursor>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            self.shared.head().await
        })
    }

    fn read(
        &self,
        after: Cursor,
        patterns: Vec<Pattern>,
        limit: usize,
    ) -> BoxFuture<'_, Result<(Vec<Arc<Recorded>>, Cursor)>> {
        Box::pin(async move {
            let shared = &self.shared;
            let _running = shared.link.enter()?;
            let topics = shared.readable().await?;
            let ends = shared.ends(&topics).await?;
            let noted = shared.registry.topics();
            let reading = shared.with_reader(move |reader, _| {
                let mut reached = after.clone();
                let mut found = Vec::new();
                for topic in &topics {
                    let can = noted
                        .get(&topic.name)
                        .is_some_and(|note| note.is_reached(&patterns));
                    for partition in 0..topic.partitions {
                        if found.len() >= limit {
                            return Ok((found, reached));
                        }
                        let shard = topic.shard(partition);
                        let key = (topic.name.clone(), partition);
                        let (first, end) = ends.get(&key).copied().unwrap_or_default();
                        let from = i64::try_from(after.place(shard))
                            .unwrap_or(i64::MAX)
                            .max(first);
                        let (records, at) = match can {
                            true => read_partition(
                                reader,
                                topic,
                                partition,
                                (from, end),
                                limit - found.len(),
                                |event_type| {
                                    patterns.iter().any(|pattern| pattern.matches(event_type))
                                },
                            )?,
                            false => (Vec::new(), end),
                        };
                        found.extend(records);
                        reached.advance(Position::new(shard, place(at)));
                    }
                }
                Ok((found, reached))
            });
            reading.await
        })
    }

    fn resolve(&self, from: StartFrom, patterns: Vec<Pattern>) -> BoxFuture<'_, Result<Cursor>> {
        Box::pin(async move {
            let shared = &self.shared;
            let _running = shared.link.enter()?;
            match from {
                StartFrom::First => Ok(Cursor::START),
                StartFrom::New => shared.head().await,
                StartFrom::Time(time) => shared.resolve_time(time).await,
                StartFrom::Last => {
                    let topics = shared.readable().await?;
                    let newest = shared.newest(&topics, &patterns).await?;
                    let head = shared.head().await?;
                    let Some((name, partition, offset)) = newest else {
                        return Ok(head);
                    };
                    let mut cursor = Cursor::START;
                    for topic in &topics {
                        for number in 0..topic.partitions {
                            let shard = topic.shard(number);
                            let here = topic.name == name && number == partition;
                            let at = match here {
                                true => place(offset),
                                false => head.place(shard),
                            };
                            cursor.advance(Position::new(shard, at));
                        }
                    }
                    Ok(cursor)
                }
            }
        })
    }

    fn wait_beyond(&self, cursor: Cursor) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let mut pause = FIRST_PAUSE;
            loop {
                self.shared.link.check_open()?;
                let head = self.shared.head().await?;
                let is_beyond = |at: Position| at.place() > cursor.place(at.shard());
                if head.positions().any(is_beyond) {
                    return Ok(());
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        })
    }
}
