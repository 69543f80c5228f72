//! Counts a batch that is appended: the meters are looked up before, the events are counted by the answers.

use std::sync::Arc;

use everbus_core::{Appended, Event, Result};

use super::{PublishMeter, Stats};

/// The meters of a batch, in the order of its events. Events of one type often come in a row.
pub(crate) struct Published {
    // A batch of one type, such as a single event, allocates nothing.
    first: Option<Run>,
    more: Vec<Run>,
}

struct Run {
    meter: Arc<PublishMeter>,
    events: usize,
}

impl Published {
    pub(crate) fn new(stats: &Stats, events: &[Event]) -> Self {
        let mut runs = events
            .chunk_by(|a, b| a.event_type() == b.event_type())
            .filter_map(|run| {
                Some(Run {
                    meter: stats.publishing(run.first()?.type_arc()),
                    events: run.len(),
                })
            });
        Self {
            first: runs.next(),
            more: runs.collect(),
        }
    }

    /// Counts the stored events, without errors and duplicates. Answers are in the order of the events.
    pub(crate) fn stored(&self, mut answers: &[Result<Appended>]) {
        for run in self.first.iter().chain(&self.more) {
            let (of_run, rest) = answers.split_at(run.events.min(answers.len()));
            let is_new = |answer: &&Result<Appended>| matches!(answer, Ok(a) if !a.duplicate);
            let stored = of_run.iter().filter(is_new).count();
            if stored > 0 {
                run.meter.published(stored as u64);
            }
            answers = rest;
        }
    }
}
