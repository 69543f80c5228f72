//! The dead letters of a broker with a store beside it: stored in the store, retried through the broker.
//!
//! A retry publishes a copy of the event, addressed to the group that failed. The id of the copy is derived
//! from the id and the time of the dead letter, so a copy that is published twice is stored once. The metadata
//! [`RETRY_OF`] names the original event. If the copy fails for good, the dead letter of the original is opened
//! again.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::dead_letters::{check_replacement, not_open};
use everbus_core::{
    Appended, Attributes, BoxFuture, Broker, Clock, Code, DeadLetter, DeadLetterFilter,
    DeadLetterKey, DeadLetterPage, DeadLetterTally, DeadLetters, Error, Event, EventId, GroupInfo,
    GroupName, IDEMPOTENCY_KEY, PageRequest, Pattern, PurgeBasis, Purged, Recorded, Replaced,
    Result, SentBack, Store, Timestamp,
};

/// Metadata of the copy that a retry from the dead letters publishes: the id of the original event.
pub const RETRY_OF: &str = "retry_of";

/// How many dead letters are retried in one step.
const STEP: usize = 100;

pub(super) struct LettersBeside {
    letters: Arc<dyn DeadLetters>,
    store: Arc<dyn Store>,
    broker: Arc<dyn Broker>,
    clock: Arc<dyn Clock>,
}

/// The original of a retried event. The event itself if it was not retried, or if its dead letter is gone.
pub(super) async fn original_of(
    letters: &dyn DeadLetters,
    record: &Arc<Recorded>,
    group: &GroupName,
) -> Result<Arc<Recorded>> {
    let original = record.event.metadata().get(RETRY_OF);
    let Some(id) = original.and_then(|id| id.parse::<EventId>().ok()) else {
        return Ok(record.clone());
    };
    let known =
        letters.get(id).await?.into_iter().find(|letter| {
            letter.group == *group && letter.event().tenant() == record.event.tenant()
        });
    Ok(known.map_or_else(|| record.clone(), |letter| letter.record))
}

/// The copy that a retry publishes for a dead letter.
fn retry_of(letter: &DeadLetter) -> Result<Event> {
    let original = letter.event();
    let id = EventId::derived(
        original.id(),
        letter.died_at,
        letter.group.as_str(),
        RETRY_OF,
        letter.attempts,
    );
    let mut builder = Event::builder(original.type_arc().clone())
        .id(id)
        .version(original.version())
        .occurred_at(original.occurred_at())
        .payload(original.payload().clone());
    if let Some(attributes) = original.attributes() {
        builder = builder.attributes(Attributes {
            foreign_id: None,
            overflow: None,
            ..attributes.clone()
        });
    }
    let event = builder
        .correlation_id(original.correlation_id())
        .causation_id(original.id().to_string())
        .meta(RETRY_OF, original.id().to_string())
        .meta(IDEMPOTENCY_KEY, original.idempotency_key())
        .addressed_to(&letter.group)
        .build()?;
    // A payload in the object store stays there: the copy refers to the same object.
    Ok(match original.overflow() {
        Some(overflow) => event.with_overflow(original.payload().clone(), overflow.clone()),
        None => event,
    })
}

/// Whether a group exists and has a subscription that matches the event. A group without one does not get the
/// event, even if the event is addressed to it.
fn wants(groups: &[GroupInfo], group: &GroupName, event: &Event) -> bool {
    let patterns = groups.iter().filter(|info| info.name == *group);
    let mut patterns = patterns.flat_map(|info| &info.patterns);
    patterns.any(|text| Pattern::new(text).is_ok_and(|p| p.matches(event.event_type())))
}

impl LettersBeside {
    pub(super) fn new(
        letters: Arc<dyn DeadLetters>,
        store: Arc<dyn Store>,
        broker: Arc<dyn Broker>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        Self {
            letters,
            store,
            broker,
            clock,
        }
    }

    /// Retries up to `limit` dead letters, oldest event first. Appends the copies to the broker, then marks the
    /// dead letters as retried in the store. After a crash in between, the next retry publishes the same copies
    /// with the same ids.
    async fn send_back(&self, filter: DeadLetterFilter, limit: usize) -> Result<u64> {
        // The store lists the newest first, so all of them are listed. Only ids are kept, because there may be
        // very many.
        let mut open = Vec::new();
        let groups = self.broker.inspect().await?;
        self.each(filter, |letter| {
            // An event that its group would not get remains a dead letter.
            if wants(&groups, &letter.group, letter.event()) {
                open.push((letter.event().id(), letter.key()));
            }
            ControlFlow::Continue(())
        })
        .await?;
        open.reverse();
        open.truncate(limit);
        let mut sent = 0;
        for some in open.chunks(STEP) {
            let mut events = Vec::with_capacity(some.len());
            let mut keys = Vec::with_capacity(some.len());
            for (id, key) in some {
                let letters = self.letters.get(*id).await?;
                // The dead letter may have been retried or purged meanwhile.
                let open = letters
                    .iter()
                    .find(|l| l.key() == *key && l.retried_at.is_none());
                if let Some(letter) = open {
                    events.push(retry_of(letter)?);
                    keys.push(SentBack {
                        letter: key.clone(),
                        died_at: letter.died_at,
                    });
                }
            }
            for answer in self.broker.append(events).await? {
                answer?;
            }
            sent += keys.len() as u64;
            self.store.mark_retried(keys, self.clock.now()).await?;
        }
        Ok(sent)
    }

    /// Visits the open dead letters that match, newest event first, until `visit` breaks.
    async fn each(
        &self,
        filter: DeadLetterFilter,
        mut visit: impl FnMut(DeadLetter) -> ControlFlow<()>,
    ) -> Result<()> {
        let mut request = PageRequest::default();
        loop {
            let page = self.letters.list(filter.clone(), request.clone()).await?;
            for letter in page.items {
                if visit(letter).is_break() {
                    return Ok(());
                }
            }
            match page.next {
                Some(next) => request.after = Some(next),
                None => return Ok(()),
            }
        }
    }
}

impl DeadLetters for LettersBeside {
    fn list(
        &self,
        filter: DeadLetterFilter,
        page: PageRequest,
    ) -> BoxFuture<'_, Result<DeadLetterPage>> {
        self.letters.list(filter, page)
    }

    fn count(&self, filter: DeadLetterFilter) -> BoxFuture<'_, Result<u64>> {
        self.letters.count(filter)
    }

    fn tally(
        &self,
        filter: DeadLetterFilter,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<DeadLetterTally>>> {
        self.letters.tally(filter, limit)
    }

    fn get(&self, id: EventId) -> BoxFuture<'_, Result<Vec<DeadLetter>>> {
        self.letters.get(id)
    }

    fn retry(&self, filter: DeadLetterFilter) -> BoxFuture<'_, Result<u64>> {
        Box::pin(self.send_back(filter, usize::MAX))
    }

    fn retry_some(&self, filter: DeadLetterFilter, limit: usize) -> BoxFuture<'_, Result<u64>> {
        Box::pin(self.send_back(filter, limit))
    }

    fn replace(&self, key: DeadLetterKey, corrected: Event) -> BoxFuture<'_, Result<Appended>> {
        Box::pin(async move {
            let filter = DeadLetterFilter {
                group: Some(key.group.clone()),
                ..DeadLetterFilter::default()
            };
            let mut found = None;
            self.each(filter, |letter| {
                if letter.key() != key {
                    return ControlFlow::Continue(());
                }
                found = Some(letter);
                ControlFlow::Break(())
            })
            .await?;
            let letter = found.ok_or_else(|| not_open(&key))?;
            check_replacement(letter.event(), &corrected)?;
            if !wants(&self.broker.inspect().await?, &key.group, &corrected) {
                return Err(Error::new(
                    Code::Unsupported,
                    format!(
                        "no subscription of {} matches the event any more",
                        key.group
                    ),
                )
                .hint("subscribe the group to its type; the dead letter stays until then"));
            }
            let corrected = corrected.addressed_to(&key.group);
            let by = corrected.id();
            let mut answers = self.broker.append(vec![corrected]).await?;
            let appended = answers
                .pop()
                .unwrap_or_else(|| Err(Error::new(Code::Internal, "an append was not answered")))?;
            let now = self.clock.now();
            let died_at = letter.died_at;
            let letter = SentBack {
                letter: key,
                died_at,
            };
            self.store.mark_replaced(letter, by, now).await?;
            Ok(appended)
        })
    }

    fn replaced(&self) -> BoxFuture<'_, Result<Vec<Replaced>>> {
        self.letters.replaced()
    }

    fn purge(
        &self,
        cutoff: Timestamp,
        basis: PurgeBasis,
        filter: DeadLetterFilter,
    ) -> BoxFuture<'_, Result<Purged>> {
        self.letters.purge(cutoff, basis, filter)
    }

    fn expire(&self, now: Timestamp, age: Duration) -> BoxFuture<'_, Result<u64>> {
        self.letters.expire(now, age)
    }
}
