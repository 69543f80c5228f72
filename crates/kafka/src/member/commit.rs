//! Commits, on a thread of their own. A commit contains the progress of every partition that changed since the last
//! one, so settlements that wait at the same time share one commit.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rdkafka::consumer::{CommitMode, Consumer as _};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Kind};
use rdkafka::{Offset, TopicPartitionList};

use super::{LAZY, Member};
use crate::board::Snapshot;
use crate::errors::{kind, refused};

impl Member {
    pub(super) fn commit_loop(&self) {
        let mut lazily = Instant::now();
        while self.is_running() {
            {
                let mut woken = self.wake.0.lock();
                if !*woken {
                    self.wake.1.wait_for(&mut woken, LAZY);
                }
                *woken = false;
            }
            let lazy = lazily.elapsed() >= LAZY;
            if !self.commit(lazy) {
                std::thread::sleep(Duration::from_millis(30));
                self.kick();
            }
            if lazy {
                lazily = Instant::now();
            }
        }
    }

    /// Commits what changed. Returns false if that failed and has to be repeated.
    fn commit(&self, lazy: bool) -> bool {
        let Some(consumer) = self.consumer() else {
            return true;
        };
        let _one = self.committing.lock();
        let begin = Instant::now();
        let snapshots = self.board.lock().snapshots(lazy, begin);
        if snapshots.is_empty() || !self.is_running() {
            return true;
        }
        let answers = commit_all(&snapshots, |some| {
            consumer.commit(&list(some), CommitMode::Sync)
        });
        let mut board = self.board.lock();
        let mut again = false;
        for (snapshot, answer) in snapshots.iter().zip(&answers) {
            let slot = snapshot.slot;
            match answer {
                Ok(()) => board.committed(slot, snapshot.version),
                Err(error) if is_of_partition(error) => board.refuse_commits(slot, Instant::now()),
                Err(_) => {
                    again = true;
                    board.not_committed(slot);
                }
            }
        }
        drop(board);
        for (snapshot, error) in snapshots.iter().zip(&answers) {
            if let Err(error) = error {
                self.not_committed(snapshot, error);
            }
        }
        if !again {
            let took = u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX);
            self.step.store(took, Ordering::Relaxed);
        }
        self.changed.notify_waiters();
        !again
    }

    fn not_committed(&self, snapshot: &Snapshot, error: &KafkaError) {
        let (group, topic) = (&self.group.name, &snapshot.topic.name);
        tracing::debug!(target: "everbus::kafka", %group, topic, partition = snapshot.partition, %error, "a commit failed");
        // A removed topic is not reported here: its partitions are revoked soon.
        let lasting = [
            Kind::GroupAuthorizationFailed,
            Kind::TopicAuthorizationFailed,
            Kind::OffsetMetadataTooLarge,
            Kind::InvalidCommitOffsetSize,
            Kind::FencedInstanceId,
        ];
        if kind(error).is_some_and(|kind| lasting.contains(&kind)) {
            let what = format!("the progress of the group {group} in {topic} cannot be stored");
            self.complain(refused(&what, error));
        }
    }
}

/// Commits partitions together. If the server refuses one of them, the whole commit fails. Then each partition is
/// committed alone, so that the refused one does not stop the others.
fn commit_all(
    snapshots: &[Snapshot],
    commit: impl Fn(&[Snapshot]) -> Result<(), KafkaError>,
) -> Vec<Result<(), KafkaError>> {
    let all = commit(snapshots);
    let alone = snapshots.len() > 1 && all.as_ref().is_err_and(is_of_partition);
    let answers = snapshots.iter().map(|snapshot| match alone {
        true => commit(std::slice::from_ref(snapshot)),
        false => all.clone(),
    });
    answers.collect()
}

/// Whether a commit failed for single partitions. Otherwise it failed for the group or the connection.
fn is_of_partition(error: &KafkaError) -> bool {
    matches!(
        kind(error),
        Some(
            Kind::UnknownTopicOrPartition
                | Kind::UnknownTopic
                | Kind::UnknownPartition
                | Kind::InvalidTopic
                | Kind::TopicAuthorizationFailed
                | Kind::OffsetMetadataTooLarge
                | Kind::InvalidCommitOffsetSize
        )
    )
}

pub(super) fn list(snapshots: &[Snapshot]) -> TopicPartitionList {
    let mut all = TopicPartitionList::new();
    for snapshot in snapshots {
        let name = &snapshot.topic.name;
        let mut element = all.add_partition(name, snapshot.partition);
        let _ = element.set_offset(Offset::Offset(snapshot.offset));
        element.set_metadata(&snapshot.metadata);
    }
    all
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::Arc;

    use everbus_dialects::Dialect;

    use super::*;
    use crate::topics::Topic;

    fn snapshots() -> Vec<Snapshot> {
        let snapshot = |(slot, name): (u32, &str)| Snapshot {
            slot,
            topic: Arc::new(Topic::for_tests(name, Dialect::Native)),
            partition: 0,
            offset: 1,
            metadata: String::new(),
            version: 1,
        };
        (1..).zip(["order", "gone", "mail"]).map(snapshot).collect()
    }

    #[test]
    fn a_partition_that_is_refused_holds_up_no_other() {
        let stored = RefCell::new(Vec::new());
        let answers = commit_all(&snapshots(), |some| {
            if some.iter().any(|snapshot| snapshot.topic.name == "gone") {
                return Err(KafkaError::ConsumerCommit(Kind::UnknownTopicOrPartition));
            }
            let names = some.iter().map(|snapshot| snapshot.topic.name.clone());
            stored.borrow_mut().extend(names);
            Ok(())
        });
        assert_eq!(*stored.borrow(), ["order", "mail"]);
        assert!(answers[0].is_ok() && answers[1].is_err() && answers[2].is_ok());
    }

    #[test]
    fn an_expelled_member_asks_once() {
        let asked = RefCell::new(0);
        let answers = commit_all(&snapshots(), |_| {
            *asked.borrow_mut() += 1;
            Err(KafkaError::ConsumerCommit(Kind::UnknownMemberId))
        });
        assert_eq!(*asked.borrow(), 1);
        assert!(answers.iter().all(Result::is_err));
    }
}
