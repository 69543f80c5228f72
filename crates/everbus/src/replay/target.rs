//! What every target of a replay does.

use std::future::Future;
use std::sync::Arc;

use everbus_core::{GroupInfo, Recorded, Result};

use super::pace::Stop;
use super::preview::PreviewedGroup;
use super::report::ReplayReport;
use super::saved::Saved;
use crate::bus::Bus;

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
    pub(super) async fn group(&self, group: &everbus_core::GroupName) -> Result<Option<GroupInfo>> {
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
    const SAVED_EACH_TIME: bool;

    /// What the target is called in a checkpoint.
    #[doc(hidden)]
    fn describe(&self) -> String;

    /// Gets ready; `resumed` if an earlier part of the run was.
    #[doc(hidden)]
    fn prepare(
        &mut self,
        context: &Context,
        saved: &Saved,
        resumed: bool,
    ) -> impl Future<Output = Result<()>> + Send;

    /// Takes events, in order. An error ends the run.
    #[doc(hidden)]
    fn take(
        &mut self,
        context: &Context,
        events: &[Arc<Recorded>],
        report: &mut ReplayReport,
    ) -> impl Future<Output = Result<()>> + Send;

    /// The last events were taken, or the run was stopped.
    #[doc(hidden)]
    fn finish(
        &mut self,
        context: &Context,
        report: &mut ReplayReport,
    ) -> impl Future<Output = Result<()>> + Send;

    /// The groups that would get events, to be filled in with how many.
    #[doc(hidden)]
    fn groups(
        &mut self,
        context: &Context,
    ) -> impl Future<Output = Result<Vec<PreviewedGroup>>> + Send;
}
