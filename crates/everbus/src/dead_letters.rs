//! The dead letters as a user of the bus sees them. Needs the engine only, not a started bus.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Code, DeadLetter, DeadLetterFilter, DeadLetterPage, DeadLetters, Error, EventId, PageRequest,
    PurgeBasis, Result, Timestamp,
};

use crate::audit::{Action, audited};
use crate::bus::Shared;

/// Lists, retries and purges the events that groups gave up on.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> everbus::Result<()> {
/// let bus = everbus::Bus::open("memory:").await?;
/// for letter in bus.dead_letters().list().await? {
///     println!("{} {}: {}", letter.group, letter.event.event.event_type(), letter.last_error());
///     bus.dead_letters().retry(letter.event.event.id()).await?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct DeadLetterQueue {
    shared: Arc<Shared>,
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

    /// Everything known about the dead letters of an event: one per group that gave up on it,
    /// retried ones included. Empty if there are none.
    pub async fn get(&self, id: EventId) -> Result<Vec<DeadLetter>> {
        self.letters()?.get(id).await
    }

    /// Sends an event back to the groups that gave up on it, with a fresh set of attempts, and
    /// returns how many groups that is. `NotFound` if it has no open dead letter.
    pub async fn retry(&self, id: EventId) -> Result<u64> {
        let filter = DeadLetterFilter {
            id: Some(id),
            ..DeadLetterFilter::default()
        };
        match self.retry_where(filter).await? {
            0 => Err(Error::new(
                Code::NotFound,
                format!("the event {id} has no open dead letter"),
            )
            .hint("list shows the open ones; a retried one is open again only if it fails again")),
            sent => Ok(sent),
        }
    }

    /// Sends back every open dead letter that passes the filter and returns how many.
    pub async fn retry_where(&self, filter: DeadLetterFilter) -> Result<u64> {
        let retried = self.letters()?.retry(filter.clone());
        let mut action = Action::new("dlq.retry");
        if let Some(id) = filter.id {
            action = action.on("EVENT", &id);
        }
        self.audited(action.filter(&filter), retried).await
    }

    /// Puts on record what is done to the dead letters.
    async fn audited(
        &self,
        action: Action,
        work: impl Future<Output = Result<u64>>,
    ) -> Result<u64> {
        let operator = self.shared.audit().operator();
        audited(&self.shared.engine, &operator, action, work).await
    }

    /// Deletes the dead letters of events that were received `days` days ago or earlier, and returns
    /// how many.
    pub async fn purge_older_than_days(&self, days: u32) -> Result<u64> {
        let age = Duration::from_secs(u64::from(days) * 24 * 3600);
        let cutoff = self.shared.options.clock.now().minus(age);
        self.purge(cutoff, PurgeBasis::Created, DeadLetterFilter::default())
            .await
    }

    /// Deletes the dead letters that pass the filter, up to and including `cutoff`, and returns how
    /// many.
    pub async fn purge(
        &self,
        cutoff: Timestamp,
        basis: PurgeBasis,
        filter: DeadLetterFilter,
    ) -> Result<u64> {
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
