//! The dead letters: events a group gave up on, kept with everything needed to understand and retry.

use std::sync::Arc;

use serde::Serialize;

use crate::broker::BoxFuture;
use crate::error::{Code, Error, Result};
use crate::failure::Failure;
use crate::group::GroupName;
use crate::id::EventId;
use crate::log::Recorded;
use crate::pattern::Pattern;
use crate::time::Timestamp;

/// One event that one group gave up on.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeadLetter {
    /// The group that failed.
    pub group: GroupName,
    /// The handler that failed last, where one ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub handler: Option<String>,
    /// All attempts, those before an earlier retry included.
    pub attempts: u32,
    /// Every failed attempt since the last retry, in order.
    pub failures: Vec<Failure>,
    /// When the event first became a dead letter in this group.
    pub first_seen_at: Timestamp,
    /// When it did last: the time of the final failure.
    pub died_at: Timestamp,
    /// When it was last sent back, if it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retried_at: Option<Timestamp>,
    /// The event itself, unchanged.
    pub event: Arc<Recorded>,
}

impl DeadLetter {
    /// What names it.
    pub fn key(&self) -> DeadLetterKey {
        DeadLetterKey {
            position: self.event.position,
            group: self.group.clone(),
        }
    }

    /// The last error, for a line in a list.
    pub fn last_error(&self) -> &str {
        self.failures.last().map_or("", |f| f.error.as_str())
    }
}

/// What names a dead letter: one event in one group. Also the cursor of a page.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DeadLetterKey {
    /// The position of the event.
    pub position: u64,
    /// The group.
    pub group: GroupName,
}

/// Which dead letters. The default is all open ones.
#[derive(Clone, Debug, Default)]
pub struct DeadLetterFilter {
    /// Only of types that match.
    pub pattern: Option<Pattern>,
    /// Only of this group.
    pub group: Option<GroupName>,
    /// Only of this event.
    pub id: Option<EventId>,
    /// Only events received at or after this time.
    pub since: Option<Timestamp>,
    /// Only events received at or before this time.
    pub until: Option<Timestamp>,
}

/// Which page of a list.
#[derive(Clone, Debug)]
pub struct PageRequest {
    /// At most this many; 100 unless said otherwise.
    pub limit: usize,
    /// Leave out this many first. Costs more the larger it is; prefer `after`.
    pub offset: usize,
    /// Begin after this one: the `next` of the page before.
    pub after: Option<DeadLetterKey>,
}

/// The largest page.
pub const MAX_PAGE: usize = 10_000;

impl Default for PageRequest {
    fn default() -> Self {
        Self {
            limit: 100,
            offset: 0,
            after: None,
        }
    }
}

impl PageRequest {
    /// Refuses pages that make no sense.
    pub fn validate(&self) -> Result<()> {
        if self.limit == 0 || self.limit > MAX_PAGE {
            return Err(Error::new(
                Code::InvalidSetting,
                format!("a page of {} dead letters", self.limit),
            )
            .hint(format!("the limit is between 1 and {MAX_PAGE}")));
        }
        Ok(())
    }
}

/// One page of dead letters, newest first.
#[derive(Clone, Debug)]
pub struct DeadLetterPage {
    /// The dead letters.
    pub items: Vec<DeadLetter>,
    /// Where the next page begins, if there may be one.
    pub next: Option<DeadLetterKey>,
}

/// Which time a purge goes by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PurgeBasis {
    /// When the event was received, as the specification says.
    #[default]
    Created,
    /// When it became a dead letter.
    Died,
}

/// An engine that keeps dead letters. It needs no running bus.
pub trait DeadLetters: Send + Sync + 'static {
    /// Open dead letters, newest event first.
    fn list(
        &self,
        filter: DeadLetterFilter,
        page: PageRequest,
    ) -> BoxFuture<'_, Result<DeadLetterPage>>;

    /// How many open dead letters there are.
    fn count(&self, filter: DeadLetterFilter) -> BoxFuture<'_, Result<u64>>;

    /// Everything known about an event's dead letters, retried ones included.
    fn get(&self, id: EventId) -> BoxFuture<'_, Result<Vec<DeadLetter>>>;

    /// Sends dead letters back to the group that failed, with a fresh set of attempts. Returns how
    /// many were open and are waiting now.
    fn retry(&self, filter: DeadLetterFilter) -> BoxFuture<'_, Result<u64>>;

    /// Deletes dead letters up to and including `cutoff`, and their events where nobody else needs
    /// them. Returns how many dead letters went.
    fn purge(
        &self,
        cutoff: Timestamp,
        basis: PurgeBasis,
        filter: DeadLetterFilter,
    ) -> BoxFuture<'_, Result<u64>>;
}
