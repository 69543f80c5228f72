//! Publishers of a campaign: each repeats a publish under the same ids until it is acknowledged.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use everbus::Bus;
use everbus_core::{Class, EventId};

use super::workers::SharedReports;
use crate::chaos::content::{Content, Ids};
use crate::model::Random;

/// A publish that has not returned after this long hangs.
const HANGS: Duration = Duration::from_secs(90);
/// Publishers wait while this many reports of handled events are missing.
const BACKLOG: u64 = 400;

/// What all publishers of a campaign did.
#[derive(Debug, Default)]
pub(super) struct Published {
    acked: Mutex<HashSet<EventId>>,
    problems: Mutex<Vec<String>>,
    /// Publishes that failed and were repeated.
    pub(super) repeated: AtomicU64,
    /// Those of them with an unknown outcome.
    pub(super) unknown: AtomicU64,
    pub(super) stop: AtomicBool,
}

impl Published {
    pub(super) fn acked(&self) -> MutexGuard<'_, HashSet<EventId>> {
        self.acked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn problems(&self) -> MutexGuard<'_, Vec<String>> {
        self.problems.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Publishes until told to stop.
pub(super) async fn publish(
    bus: Bus,
    seed: u64,
    published: Arc<Published>,
    reports: SharedReports,
) {
    let (mut random, mut ids) = (Random::new(seed), Ids::new(seed));
    while !published.stop.load(Ordering::Relaxed) {
        let behind = published.acked().len() as u64;
        if behind > reports.lock().total + BACKLOG {
            tokio::time::sleep(Duration::from_millis(5)).await;
            continue;
        }
        let size = if random.one_in(4) {
            2 + random.below(7)
        } else {
            1
        };
        let batch: Vec<EventId> = ids.by_ref().take(size).collect();
        if !until_acknowledged(&bus, &batch, &published).await {
            return;
        }
        tokio::time::sleep(Duration::from_micros(random.number() % 4000)).await;
    }
}

/// Publishes a batch and repeats it until it is acknowledged. Returns whether to go on.
async fn until_acknowledged(bus: &Bus, batch: &[EventId], published: &Published) -> bool {
    loop {
        let events = batch.iter().map(|id| Content::of(*id).event());
        let one = async {
            match batch {
                [id] => bus.publish(Content::of(*id).event()).await.map(drop),
                _ => bus.publish_batch(events).await.map(drop),
            }
        };
        let error = match tokio::time::timeout(HANGS, one).await {
            Err(_) => {
                let problem = format!("a publish did not return within {HANGS:?}");
                published.problems().push(problem);
                return false;
            }
            Ok(Ok(())) => {
                published.acked().extend(batch);
                return true;
            }
            Ok(Err(error)) => error,
        };
        if !error.class().may_repeat() {
            let problem = format!("a publish failed for good: {error:?}");
            published.problems().push(problem);
            return false;
        }
        published.repeated.fetch_add(1, Ordering::Relaxed);
        if error.class() == Class::Unknown {
            published.unknown.fetch_add(1, Ordering::Relaxed);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
