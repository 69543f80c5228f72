//! The targets of a replay: what each does with a batch of events. Reading, pace, filter, checkpoint and
//! progress are the same for all of them, and in `run`.

use std::future::Future;
use std::sync::Arc;

use everbus_core::{GroupInfo, GroupName, Pattern, Position, Recorded, Result};

use super::pace::Stop;
use super::preview::PreviewedGroup;
use super::report::ReplayReport;
use super::saved::Saved;
use crate::runtime::bus::Bus;

/// The context that a target works with.
pub struct Context {
    pub(super) bus: Bus,
    pub(super) stop: Stop,
    /// The name of the run.
    pub(super) name: Option<String>,
    pub(super) kept_failures: usize,
    /// Whether a single event was selected, and not a range.
    pub(super) single: bool,
}

impl Context {
    /// The state of a group, if it exists.
    pub(super) async fn group(&self, group: &GroupName) -> Result<Option<GroupInfo>> {
        let groups = self.bus.groups().await?;
        Ok(groups.into_iter().find(|info| info.name == *group))
    }
}

/// A destination of replayed events. Not to be implemented elsewhere.
pub trait Target: Send + 'static {
    /// At most this many events at a time.
    #[doc(hidden)]
    const PORTION: usize;
    /// Whether the checkpoint is saved after every portion; else once per second.
    #[doc(hidden)]
    const SAVED_EACH_TIME: bool = true;
    /// Whether a run is recorded in the audit trail.
    #[doc(hidden)]
    const AUDITED: bool = true;

    /// The name of the target in a checkpoint.
    #[doc(hidden)]
    fn describe(&self) -> String;

    /// Prepares the run; `resumed` if an earlier part of it ran.
    #[doc(hidden)]
    fn prepare(
        &mut self,
        _context: &Context,
        _saved: &Saved,
        _resumed: bool,
    ) -> impl Future<Output = Result<()>> + Send {
        std::future::ready(Ok(()))
    }

    /// Processes events, in order. An error ends the run.
    #[doc(hidden)]
    fn take(
        &mut self,
        context: &Context,
        events: &[Arc<Recorded>],
        report: &mut ReplayReport,
    ) -> impl Future<Output = Result<()>> + Send;

    /// Counts what [`take`](Self::take) would do, without doing it. Returns the events that the target
    /// would get.
    #[doc(hidden)]
    fn look(
        &mut self,
        _context: &Context,
        events: &[Arc<Recorded>],
        report: &mut ReplayReport,
    ) -> impl Future<Output = Result<Vec<Arc<Recorded>>>> + Send {
        report.processed += events.len() as u64;
        std::future::ready(Ok(events.to_vec()))
    }

    /// Finishes: the last events were taken, or the run was stopped.
    #[doc(hidden)]
    fn finish(
        &mut self,
        _context: &Context,
        _report: &mut ReplayReport,
    ) -> impl Future<Output = Result<()>> + Send {
        std::future::ready(Ok(()))
    }

    /// Prepares for [`look`](Self::look). Returns the groups that would get events, with empty counts.
    #[doc(hidden)]
    fn groups(
        &mut self,
        _context: &Context,
    ) -> impl Future<Output = Result<Vec<PreviewedGroup>>> + Send {
        std::future::ready(Ok(Vec::new()))
    }
}

/// The events that one of the patterns matches; the others are counted as unwanted.
pub(super) fn wanted(
    events: &[Arc<Recorded>],
    patterns: &[Pattern],
    report: &mut ReplayReport,
) -> Vec<Arc<Recorded>> {
    let wants = |record: &&Arc<Recorded>| {
        let event_type = record.event.event_type();
        patterns.iter().any(|p| p.matches(event_type))
    };
    let wanted: Vec<_> = events.iter().filter(wants).cloned().collect();
    report.skips.unwanted += (events.len() - wanted.len()) as u64;
    wanted
}

pub(super) fn positions(events: &[Arc<Recorded>]) -> Vec<Position> {
    events.iter().map(|record| record.position).collect()
}
