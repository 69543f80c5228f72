//! What the targets of a replay differ in: what they do with the events of a portion. Reading, pace,
//! filter, checkpoint and progress are the same for all of them, and in `run`.

use std::future::Future;
use std::sync::Arc;

use everbus_core::{GroupInfo, GroupName, Pattern, Position, Recorded, Result};

use super::pace::Stop;
use super::preview::PreviewedGroup;
use super::report::ReplayReport;
use super::saved::Saved;
use crate::runtime::bus::Bus;

/// What a target is given to work with.
pub struct Context {
    pub(super) bus: Bus,
    pub(super) stop: Stop,
    /// The name of the run.
    pub(super) name: Option<String>,
    pub(super) kept_failures: usize,
    /// Whether one event was named, and not a range.
    pub(super) single: bool,
}

impl Context {
    /// How a group stands, if there is such a group.
    pub(super) async fn group(&self, group: &GroupName) -> Result<Option<GroupInfo>> {
        let groups = self.bus.groups().await?;
        Ok(groups.into_iter().find(|info| info.name == *group))
    }
}

/// Where replayed events go. Not to be implemented elsewhere.
pub trait Target: Send + 'static {
    /// At most this many events at a time.
    #[doc(hidden)]
    const PORTION: usize;
    /// Whether the checkpoint follows every portion; else it follows every second.
    #[doc(hidden)]
    const SAVED_EACH_TIME: bool = true;
    /// Whether a run is put on record as something that was done to the bus.
    #[doc(hidden)]
    const AUDITED: bool = true;

    /// What the target is called in a checkpoint.
    #[doc(hidden)]
    fn describe(&self) -> String;

    /// Gets ready; `resumed` if an earlier part of the run was.
    #[doc(hidden)]
    fn prepare(
        &mut self,
        _context: &Context,
        _saved: &Saved,
        _resumed: bool,
    ) -> impl Future<Output = Result<()>> + Send {
        std::future::ready(Ok(()))
    }

    /// Takes events, in order. An error ends the run.
    #[doc(hidden)]
    fn take(
        &mut self,
        context: &Context,
        events: &[Arc<Recorded>],
        report: &mut ReplayReport,
    ) -> impl Future<Output = Result<()>> + Send;

    /// Counts what [`take`](Self::take) would, and does nothing. Returns the events that the target would
    /// be given.
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

    /// The last events were taken, or the run was stopped.
    #[doc(hidden)]
    fn finish(
        &mut self,
        _context: &Context,
        _report: &mut ReplayReport,
    ) -> impl Future<Output = Result<()>> + Send {
        std::future::ready(Ok(()))
    }

    /// Gets ready to [`look`](Self::look). The groups that would get events, to be filled in with how many.
    #[doc(hidden)]
    fn groups(
        &mut self,
        _context: &Context,
    ) -> impl Future<Output = Result<Vec<PreviewedGroup>>> + Send {
        std::future::ready(Ok(Vec::new()))
    }
}

/// Those events that one of the patterns matches; the others are counted as unwanted.
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
