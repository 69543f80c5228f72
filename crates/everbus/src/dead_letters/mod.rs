//! The dead letters in the public API of the bus. Needs only the engine, not a started bus.

mod bulk_retry;
mod edit;

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Code, DeadLetter, DeadLetterFilter, DeadLetterPage, DeadLetterTally, DeadLetters, Error,
    EventId, PageRequest, PurgeBasis, Purged, Result, Timestamp,
};

pub use bulk_retry::{RetryPace, RetryProgress};

use crate::audit::{Action, audited};

use crate::runtime::bus::{Bus, Shared};

/// A preview lists at most this many combinations of group, type and error.
const TALLIES: usize = 100;

/// What a bulk retry would retry.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct DeadLetterPreview {
    /// How many open dead letters pass the filter.
    pub total: u64,
    /// The counts by group, type and error; the 100 most frequent.
    pub tallies: Vec<DeadLetterTally>,
}

/// Lists, retries, corrects and purges the events that groups gave up on.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> everbus::Result<()> {
/// let bus = everbus::Bus::open("memory:").await?;
/// for letter in bus.dead_letters().list().await? {
///     println!("{} {}: {}", letter.group, letter.event().event_type(), letter.last_error());
///     bus.dead_letters().retry(letter.event().id()).await?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct DeadLetterQueue {
    shared: Arc<Shared>,
}

impl Bus {
    /// The dead letters. They need no started bus.
    pub fn dead_letters(&self) -> DeadLetterQueue {
        DeadLetterQueue::new(self.shared().clone())
    }
}

impl DeadLetterQueue {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    fn letters(&self) -> Result<&dyn DeadLetters> {
        self.shared.engine.dead_letters()
    }

    /// The 100 newest open dead letters, newest event first.
    pub async fn list(&self) -> Result<Vec<DeadLetter>> {
        let page = self
            .list_page(DeadLetterFilter::default(), PageRequest::default())
            .await?;
        Ok(page.items)
    }

    /// One page of the open dead letters that pass the filter, newest event first. Its `next` is the
    /// `after` of the following page.
    pub async fn list_page(
        &self,
        filter: DeadLetterFilter,
        page: PageRequest,
    ) -> Result<DeadLetterPage> {
        page.validate()?;
        self.letters()?.list(filter, page).await
    }

    /// How many open dead letters pass the filter.
    pub async fn count(&self, filter: DeadLetterFilter) -> Result<u64> {
        self.letters()?.count(filter).await
    }

    /// All dead letters of an event: one per group that gave up on it, retried ones included. Empty if
    /// there are none.
    pub async fn get(&self, id: EventId) -> Result<Vec<DeadLetter>> {
        self.letters()?.get(id).await
    }

    /// Retries an event in the groups that gave up on it, with a fresh set of attempts. Returns the number
    /// of groups. `NotFound` if it has no open dead letter.
    pub async fn retry(&self, id: EventId) -> Result<u64> {
        let filter = DeadLetterFilter {
            id: Some(id),
            ..DeadLetterFilter::default()
        };
        match self.retry_all(filter).await? {
            0 => Err(Error::new(
                Code::NotFound,
                format!("the event {id} has no open dead letter"),
            )
            .hint("list shows the open ones; a retried one is open again only if it fails again")),
            sent => Ok(sent),
        }
    }

    /// Retries every open dead letter that passes the filter, oldest event first. Returns how many.
    /// [`preview`](Self::preview) shows them first.
    pub async fn retry_all(&self, filter: DeadLetterFilter) -> Result<u64> {
        let retried = self.letters()?.retry(filter.clone());
        let mut action = Action::new("dlq.retry");
        if let Some(id) = filter.id {
            action = action.on("EVENT", &id);
        }
        self.audited(action.filter(&filter), retried).await
    }

    /// Records an operation on the dead letters in the audit trail.
    async fn audited<T: serde::Serialize>(
        &self,
        action: Action,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let operator = self.shared.audit().operator();
        audited(&self.shared.engine, &operator, action, work).await
    }

    /// Retries the open dead letters that pass the filter, oldest event first and at a limited rate (a
    /// number per second, or a [`RetryPace`]), so that their dependency is not overloaded. Returns how many
    /// were retried.
    ///
    /// Only the dead letters that exist at the start are retried: an event that fails again meanwhile is
    /// not. Each step calls `progress`. Dropping the future stops between two steps; retried ones stay
    /// retried, and a new call continues with the rest. It ends with [`Code::EventBusShutdownError`] if the
    /// bus is shut down.
    pub async fn retry_slowly(
        &self,
        filter: DeadLetterFilter,
        pace: impl Into<RetryPace>,
        progress: impl FnMut(RetryProgress) + Send,
    ) -> Result<u64> {
        let (now, pace) = (self.shared.options.clock.now(), pace.into());
        let action = Action::new("dlq.retry")
            .filter(&filter)
            .detail("per_second", pace.rate().into());
        let slowly = bulk_retry::retry_slowly(self.letters()?, filter, pace, now, progress);
        let slowly = self.shared.unless_ending(slowly);
        self.audited(action, slowly).await
    }

    /// What [`retry_all`](Self::retry_all) or [`retry_slowly`](Self::retry_slowly) would retry.
    pub async fn preview(&self, filter: DeadLetterFilter) -> Result<DeadLetterPreview> {
        let letters = self.letters()?;
        let tallies = letters.tally(filter.clone(), TALLIES).await?;
        let total = letters.count(filter).await?;
        Ok(DeadLetterPreview { total, tallies })
    }

    /// Deletes the dead letters of events that were received `days` days ago or earlier, and returns
    /// how many.
    pub async fn purge_older_than_days(&self, days: u32) -> Result<u64> {
        let age = Duration::from_secs(u64::from(days) * 24 * 3600);
        let cutoff = self.shared.options.clock.now().minus(age);
        self.purge(cutoff, PurgeBasis::Created, DeadLetterFilter::default())
            .await
            .map(|purged| purged.dead_letters)
    }

    /// Deletes the dead letters that pass the filter, up to and including `cutoff`, and their events
    /// where no other group needs them.
    pub async fn purge(
        &self,
        cutoff: Timestamp,
        basis: PurgeBasis,
        filter: DeadLetterFilter,
    ) -> Result<Purged> {
        let action = Action::new("dlq.purge")
            .filter(&filter)
            .detail("cutoff", cutoff.to_string().into())
            .detail("by", format!("{basis:?}").to_lowercase().into());
        let purged = self.letters()?.purge(cutoff, basis, filter);
        self.audited(action, purged).await
    }
}

impl std::fmt::Debug for DeadLetterQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeadLetterQueue").finish_non_exhaustive()
    }
}
