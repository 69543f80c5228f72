//! Assigns and revokes partitions of this process, and pauses partitions that are full. Runs on the thread that polls.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::error::RDKafkaErrorCode as Kind;
use rdkafka::{Offset, TopicPartitionList};

use super::commit::list;
use super::{Context, DROPPED, Member};
use crate::board::{Load, Partition};
use crate::errors::{kind, refused};
use crate::offset_metadata::Saved;

/// A full partition is paused unless consumers take this many events within [`PATIENCE`].
const QUICK: usize = 50;
/// See [`QUICK`].
const PATIENCE: Duration = Duration::from_millis(20);
/// A partition that is still full after this long is paused in any case: the thread does not poll meanwhile, and
/// without polls there is no rebalance.
const MOST_PATIENCE: Duration = Duration::from_millis(250);
/// How often a full partition is looked at.
const GLANCE: Duration = Duration::from_millis(1);
/// How long the committed offsets of the group may take to arrive. After this time the member leaves, and another one
/// joins: a member that waits here does not poll, and events wait with it.
const COMMITTED_WITHIN: Duration = Duration::from_secs(30);

impl Member {
    /// Takes over assigned partitions: reads their progress before the first record. Returns them with the offsets at
    /// which they begin.
    pub(super) fn assigned(
        &self,
        consumer: &BaseConsumer<Context>,
        partitions: &TopicPartitionList,
    ) -> TopicPartitionList {
        let mut with_offsets = TopicPartitionList::new();
        if partitions.count() == 0 {
            return with_offsets;
        }
        let Some(committed) = self.committed(consumer, partitions) else {
            return with_offsets;
        };
        let record = self.registry.group(&self.group.name);
        let record = record.unwrap_or_else(|| self.group.clone());
        let mut board = self.board.lock();
        for element in partitions.elements() {
            let (name, partition) = (element.topic(), element.partition());
            let Some(topic) = self.topics.read().get(name).cloned() else {
                continue;
            };
            let start = record.start(name, partition);
            let found = committed.find_partition(name, partition);
            let saved = found.and_then(|found| match found.offset() {
                Offset::Offset(floor) => {
                    let floor = u64::try_from(floor).ok()?;
                    Saved::of_group(floor, found.metadata(), record.born)
                }
                _ => None,
            });
            let floor = saved.as_ref().map_or(start, |saved| saved.progress.floor());
            let offset = offset(floor);
            tracing::debug!(target: "everbus::kafka", group = %self.group.name, topic = name, partition, ?offset, "a partition was assigned");
            board.open_part(topic, partition, start, saved);
            let _ = with_offsets.add_partition_offset(name, partition, offset);
        }
        with_offsets
    }

    /// The committed offsets of the group. No record can be taken without them: if they cannot be read, the member
    /// gives up, and consumers start another one.
    fn committed(
        &self,
        consumer: &BaseConsumer<Context>,
        partitions: &TopicPartitionList,
    ) -> Option<TopicPartitionList> {
        let begin = Instant::now();
        while self.is_running() {
            let error = match consumer.committed_offsets(partitions.clone(), self.link.timeout) {
                Ok(committed) => {
                    let elements = committed.elements();
                    match elements.iter().find_map(|element| element.error().err()) {
                        None => return Some(committed),
                        Some(error) => error,
                    }
                }
                Err(error) => error,
            };
            tracing::debug!(target: "everbus::kafka", %error, "committed offsets");
            if begin.elapsed() > COMMITTED_WITHIN {
                let what = format!(
                    "the progress of the group {} cannot be read",
                    self.group.name
                );
                self.complain(refused(&what, &error));
                self.abandon();
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        None
    }

    /// Stops fetching from partitions that are full, and goes on with those that have room again.
    ///
    /// A pause discards what the client has fetched ahead, so only partitions of slow consumers are paused. The set
    /// `paused` must be exact: if a partition is resumed that was not paused, the client reads it again from where it
    /// was assigned.
    pub(super) fn hold_back(&self, consumer: &BaseConsumer<Context>) {
        let mut paused = self.paused.lock();
        let more = self.full_for_long(&paused);
        if !more.is_empty() && consumer.pause(&named(&more)).is_ok() {
            paused.extend(more);
        }
        if paused.is_empty() {
            return;
        }
        let board = self.board.lock();
        let light = board.loads().filter(|(_, load, _)| *load == Load::Light);
        let light = light.map(|(partition, ..)| partition);
        let light: Vec<Partition> = light.filter(|one| paused.contains(one)).collect();
        drop(board);
        if !light.is_empty() && consumer.resume(&named(&light)).is_ok() {
            paused.retain(|partition| !light.contains(partition));
        }
    }

    /// The partitions to pause: they are full and not paused. Waits a moment while quick consumers make room.
    fn full_for_long(&self, paused: &BTreeSet<Partition>) -> Vec<Partition> {
        let begin = Instant::now();
        let (mut before, mut since) = (None, begin);
        loop {
            let (mut full, mut fresh) = (Vec::new(), 0);
            for (partition, load, count) in self.board.lock().loads() {
                if load == Load::Full && !paused.contains(&partition) {
                    full.push(partition);
                    fresh += count;
                }
            }
            if full.is_empty() || begin.elapsed() >= MOST_PATIENCE || !self.is_running() {
                return full;
            }
            let then = *before.get_or_insert(fresh);
            if since.elapsed() >= PATIENCE {
                if fresh + QUICK > then {
                    return full;
                }
                (before, since) = (Some(fresh), Instant::now());
            }
            std::thread::sleep(GLANCE);
        }
    }

    /// Resumes paused partitions that are given up: the client would keep the pause if they come back.
    fn forget_pauses(&self, consumer: &BaseConsumer<Context>, partitions: &TopicPartitionList) {
        let mut paused = self.paused.lock();
        let is_gone = |(topic, partition): &&Partition| {
            partitions.find_partition(topic, *partition).is_some()
        };
        let gone: Vec<Partition> = paused.iter().filter(is_gone).cloned().collect();
        if gone.is_empty() {
            return;
        }
        if let Err(error) = consumer.resume(&named(&gone)) {
            tracing::warn!(target: "everbus::kafka", %error, "partitions are given up as paused");
        }
        paused.retain(|partition| !gone.contains(partition));
    }

    /// Gives up partitions: commits what is settled, and ends their leases.
    pub(super) fn revoked(
        &self,
        consumer: &BaseConsumer<Context>,
        partitions: &TopicPartitionList,
    ) {
        self.forget_pauses(consumer, partitions);
        let _one = self.committing.lock();
        let mut last = Vec::new();
        {
            let mut board = self.board.lock();
            for element in partitions.elements() {
                let topic = self.topics.read().get(element.topic()).cloned();
                let Some(topic) = topic else { continue };
                last.extend(board.close_shard(topic.shard(element.partition())));
            }
        }
        let lost = consumer.assignment_lost();
        tracing::debug!(target: "everbus::kafka", group = %self.group.name, count = partitions.count(), lost, "partitions were revoked");
        let silent = self.state.load(Ordering::SeqCst) == DROPPED;
        if !last.is_empty() && !lost && !silent {
            for _ in 0..5 {
                match consumer.commit(&list(&last), CommitMode::Sync) {
                    Ok(()) => {
                        let mut board = self.board.lock();
                        for snapshot in &last {
                            board.set_closed(snapshot.slot, snapshot.version);
                        }
                        break;
                    }
                    Err(error) => {
                        tracing::debug!(target: "everbus::kafka", %error, "the last commit");
                        let again = [
                            Kind::RebalanceInProgress,
                            Kind::NotCoordinator,
                            Kind::CoordinatorNotAvailable,
                        ];
                        if !kind(&error).is_some_and(|kind| again.contains(&kind)) {
                            break;
                        }
                        std::thread::sleep(Duration::from_millis(50));
                    }
                }
            }
        }
        self.changed.notify_waiters();
    }
}

fn offset(place: u64) -> Offset {
    match place {
        0 => Offset::Beginning,
        place => Offset::Offset(i64::try_from(place).unwrap_or(i64::MAX)),
    }
}

fn named(partitions: &[Partition]) -> TopicPartitionList {
    let mut all = TopicPartitionList::new();
    for (topic, partition) in partitions {
        all.add_partition(topic, *partition);
    }
    all
}
