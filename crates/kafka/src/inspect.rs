//! The state of every group, from its committed offsets and their metadata, or from its member in this process.
//!
//! Kafka counts records and does not know types. So the records that a group has not reached are read and
//! matched, up to a number; beyond it `behind` is an upper bound.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use everbus_core::{GroupInfo, Lag, Position, Recorded, Result, Shard, StreamLag};
use rdkafka::consumer::Consumer as _;
use rdkafka::{Offset, TopicPartitionList};

use crate::broker::Shared;
use crate::client::{blocking, patiently};
use crate::groups::Record;
use crate::log::{Ends, read_partition};
use crate::member::Member;
use crate::offset_metadata::{Last, Saved};
use crate::topics::Topic;

/// The most records of a partition that are read to count those that match.
const COUNTED: i64 = 1_000;

/// How far a group has come in a partition.
#[derive(Default)]
pub(crate) struct State {
    /// Everything up to here was handed out or skipped.
    pub(crate) reached: u64,
    /// Records after this place are not known yet.
    after: u64,
    in_flight: u64,
    waiting: u64,
    unhandled: u64,
    dead: u64,
    dropped: u64,
    /// Known events that were not handed out, and those that were and are not settled.
    fresh: Vec<Arc<Recorded>>,
    open: Vec<Arc<Recorded>>,
    /// What the group committed, if this process has no member with newer state.
    saved: Option<Saved>,
}

/// Records that a group has not reached: from an offset up to another one.
struct Unread {
    topic: Arc<Topic>,
    partition: i32,
    range: (i64, i64),
    saved: Option<Saved>,
}

impl State {
    fn of_saved(saved: Saved) -> Self {
        let floor = saved.progress.floor();
        Self {
            reached: saved.begun.max(floor),
            after: floor,
            dead: saved.dead,
            saved: Some(saved),
            ..Self::default()
        }
    }
}

impl Shared {
    /// How far a group has come in each partition of these topics.
    pub(crate) async fn states(
        self: &Arc<Self>,
        record: &Arc<Record>,
        topics: &[Arc<Topic>],
    ) -> Result<HashMap<Shard, State>> {
        let member = self.member(&record.name);
        let member =
            member.filter(|member| member.is_running() && member.group.born == record.born);
        let mut states = member.map(|member| local(&member)).unwrap_or_default();
        let known = |topic: &Arc<Topic>| {
            (0..topic.partitions).all(|partition| states.contains_key(&topic.shard(partition)))
        };
        let missing: Vec<Arc<Topic>> = topics
            .iter()
            .filter(|topic| !known(topic))
            .cloned()
            .collect();
        if missing.is_empty() {
            return Ok(states);
        }
        let reader = self.link.reader(&self.space.group(&record.name))?;
        let (record, timeout) = (record.clone(), self.link.timeout);
        let asked = blocking(move || {
            let mut all = TopicPartitionList::new();
            for topic in &missing {
                for partition in 0..topic.partitions {
                    all.add_partition(&topic.name, partition);
                }
            }
            let committed = patiently(timeout, || reader.committed_offsets(all.clone(), timeout))?;
            let mut found = Vec::new();
            for topic in &missing {
                for partition in 0..topic.partitions {
                    let start = record.start(&topic.name, partition);
                    let element = committed.find_partition(&topic.name, partition);
                    let saved = element.and_then(|element| match element.offset() {
                        Offset::Offset(floor) => {
                            let floor = u64::try_from(floor).ok()?;
                            Saved::of_group(floor, element.metadata(), record.born)
                        }
                        _ => None,
                    });
                    let saved = saved.unwrap_or_else(|| Saved::new(start));
                    found.push((topic.shard(partition), saved));
                }
            }
            Ok::<_, rdkafka::error::KafkaError>(found)
        });
        let found = asked.await?;
        let found = found.map_err(|error| self.link.unanswered("committed offsets", &error))?;
        for (shard, saved) in found {
            states
                .entry(shard)
                .or_insert_with(|| State::of_saved(saved));
        }
        Ok(states)
    }

    pub(crate) async fn inspect(self: &Arc<Self>) -> Result<Vec<GroupInfo>> {
        let topics = self.readable().await?;
        let ends = self.ends(&topics).await?;
        let mut infos = Vec::new();
        for record in self.registry.groups() {
            if !self.is_alive(&record).await {
                // The group is removed, so that the next call need not ask again.
                self.remove_parts(&record.name).await?;
                continue;
            }
            infos.push(self.inspect_one(&record, &topics, &ends).await?);
        }
        Ok(infos)
    }

    async fn inspect_one(
        self: &Arc<Self>,
        record: &Arc<Record>,
        topics: &[Arc<Topic>],
        ends: &Ends,
    ) -> Result<GroupInfo> {
        let topics = self.reached(topics, &record.patterns);
        let states = self.states(record, &topics).await?;
        let mut info = GroupInfo::new(record.name.clone(), record.created_at);
        info.ordered = record.ordered;
        info.ephemeral = record.owner.is_some();
        info.subscriptions = record.infos()?;
        let patterns = record.subscriptions.values().map(|s| s.pattern.clone());
        info.patterns = patterns.collect();
        info.patterns.sort();
        let mut position = everbus_core::Cursor::START;
        let mut types: BTreeMap<Arc<str>, Lag> = BTreeMap::new();
        // The lag in each topic, and what of it is not known by type.
        let mut lags: BTreeMap<Arc<str>, Lag> = BTreeMap::new();
        let mut more = Lag::new();
        let mut unread = Vec::new();
        for topic in &topics {
            let mut untyped = Lag::new();
            let of_topic = lags.entry(topic.name.as_str().into()).or_default();
            for partition in 0..topic.partitions {
                let shard = topic.shard(partition);
                let Some(state) = states.get(&shard) else {
                    continue;
                };
                position.advance(Position::new(shard, state.reached));
                untyped.in_flight += state.in_flight;
                untyped.waiting += state.waiting;
                untyped.unhandled += state.unhandled;
                untyped.dead_letters += state.dead;
                for fresh in &state.fresh {
                    let fresh_type = fresh.event.type_arc().clone();
                    for lag in [types.entry(fresh_type).or_default(), &mut *of_topic] {
                        lag.behind += 1;
                        lag.note_oldest(fresh.received_at);
                    }
                }
                for open in &state.open {
                    untyped.note_oldest(open.received_at);
                }
                let (first, end) = ends
                    .get(&(topic.name.clone(), partition))
                    .copied()
                    .unwrap_or_default();
                let after = i64::try_from(state.after).unwrap_or(i64::MAX);
                if topic.max_age.is_some() {
                    let removed = u64::try_from(first.saturating_sub(after)).unwrap_or(0);
                    of_topic.dropped += state.dropped + removed;
                }
                let from = after.max(first);
                if end > from {
                    let to = end.min(from.saturating_add(COUNTED));
                    untyped.behind += u64::try_from(end - to).unwrap_or(0);
                    unread.push(Unread {
                        topic: topic.clone(),
                        partition,
                        range: (from, to),
                        saved: state.saved.clone(),
                    });
                }
            }
            of_topic.add(&untyped);
            more.add(&untyped);
        }
        if !unread.is_empty() {
            let counted = self.count(record, unread).await?;
            for ((topic, event_type), lag) in counted {
                types.entry(event_type).or_default().add(&lag);
                lags.entry(topic).or_default().add(&lag);
            }
        }
        let now = self.options.clock.now();
        let mut info = info.with_types(types, now);
        info.position = position;
        info.behind += more.behind;
        info.in_flight += more.in_flight;
        info.waiting += more.waiting;
        info.unhandled += more.unhandled;
        info.dead_letters += more.dead_letters;
        info.oldest = [info.oldest, more.oldest].into_iter().flatten().min();
        info.behind_for = info.oldest.map(|at| now.since(at)).unwrap_or_default();
        // Where no age is declared, the runtime sums the types by stream.
        if topics.iter().any(|topic| topic.max_age.is_some()) {
            let streams = topics.iter().filter_map(|topic| {
                let lag = lags.remove(topic.name.as_str())?;
                let lag = StreamLag::new(topic.short.as_str().into(), lag, now);
                Some(lag.with_max_age(topic.max_age))
            });
            info.streams = streams.collect();
        }
        Ok(info)
    }

    /// Reads records that the group has not reached, and counts those that it wants, by topic and type.
    async fn count(
        self: &Arc<Self>,
        record: &Arc<Record>,
        unread: Vec<Unread>,
    ) -> Result<BTreeMap<(Arc<str>, Arc<str>), Lag>> {
        let record = record.clone();
        self.with_reader(move |reader, _| {
            let mut types: BTreeMap<(Arc<str>, Arc<str>), Lag> = BTreeMap::new();
            for part in &unread {
                let (topic, saved) = (&part.topic, &part.saved);
                let name: Arc<str> = topic.name.as_str().into();
                let all = |_: &str| true;
                let (found, _) =
                    read_partition(reader, topic, part.partition, part.range, usize::MAX, all)?;
                for event in found {
                    let place = event.position.place();
                    let known = saved
                        .as_ref()
                        .map(|saved| (saved.progress.is_done(place), saved.entry(place)));
                    let begun = known.as_ref().and_then(|(_, entry)| *entry);
                    let done = known.is_some_and(|(done, _)| done);
                    let early = record.since.is_some_and(|since| event.received_at < since);
                    let wanted =
                        event.event.is_for(&record.name) && record.wants(event.event.event_type());
                    if done || begun.is_none() && (early || !wanted) {
                        continue;
                    }
                    let key = (name.clone(), event.event.type_arc().clone());
                    let lag = types.entry(key).or_default();
                    match begun.map(|entry| entry.last) {
                        None => lag.behind += 1,
                        Some(Last::Running) => lag.in_flight += 1,
                        Some(_) => lag.waiting += 1,
                    }
                    lag.note_oldest(event.received_at);
                }
            }
            Ok(types)
        })
        .await
    }
}

fn local(member: &Member) -> HashMap<Shard, State> {
    let counts = member.board.lock().counts();
    let state = |(shard, counts): (Shard, crate::board::Counts)| {
        let state = State {
            reached: counts.reached,
            after: counts.position,
            in_flight: counts.in_flight,
            waiting: counts.waiting,
            unhandled: counts.unhandled,
            dead: counts.dead,
            dropped: counts.dropped,
            fresh: counts.fresh,
            open: counts.open,
            saved: None,
        };
        (shard, state)
    };
    counts.into_iter().map(state).collect()
}
