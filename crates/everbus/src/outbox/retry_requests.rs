//! Retry requests: rows whose event the broker knows already. Either a service asks for another delivery of
//! a dead letter, or a relay died before it could mark the row.
//!
//! A retry request is newer than the dead letter that it is about. A row that is older than the dead letter
//! was published, and its event failed later. For a row that cannot have been published before, times are
//! not compared.

use std::sync::Arc;

use everbus_core::{
    DeadLetter, DeadLetterFilter, DeadLetters, Deduplication, Event, OutboxRow, Result, Timestamp,
};
use parking_lot::Mutex;

use super::stats::RelayStats;
use crate::runtime::bus::Bus;

/// What the dead letters say about a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RetryRequest {
    /// The row is no retry request.
    None,
    /// It is a retry request, and the dead letter was retried: now, or by a relay that could not mark the
    /// row.
    Granted,
    /// The event of this row was published, and became a dead letter.
    Died,
}

/// Finds retry requests and carries them out.
pub(super) struct RetryRequests<'a> {
    bus: &'a Bus,
    counters: &'a Mutex<RelayStats>,
    letters: Option<Arc<dyn DeadLetters>>,
    /// Rows up to this one may have been published before.
    known: i64,
    /// Whether there are open dead letters; `None` before the first check.
    any: Option<bool>,
}

impl<'a> RetryRequests<'a> {
    pub(super) fn new(bus: &'a Bus, counters: &'a Mutex<RelayStats>, known: i64) -> Self {
        Self {
            bus,
            counters,
            letters: bus.engine().dead_letters.clone(),
            known,
            any: None,
        }
    }

    /// Whether retry requests must be checked before anything is published, because the broker does not
    /// recognise an event by its id.
    pub(super) fn come_first(&self) -> bool {
        self.letters.is_some() && !self.recognises()
    }

    /// Whether the broker recognises a known event by its id.
    pub(super) fn recognises(&self) -> bool {
        let capabilities = self.bus.engine().broker.capabilities();
        capabilities.deduplication == Deduplication::WhileRetained
    }

    /// Whether a row needs to be checked: the broker may know its event.
    pub(super) async fn may_have(&mut self, row: &OutboxRow) -> Result<bool> {
        // For rows up to `known` an earlier relay may have retried the dead letter, so it need not be open.
        Ok(row.row <= self.known || self.any_open().await?)
    }

    pub(super) async fn any_open(&mut self) -> Result<bool> {
        let Some(letters) = &self.letters else {
            return Ok(false);
        };
        let any = match self.any {
            Some(any) => any,
            None => letters.count(DeadLetterFilter::default()).await? > 0,
        };
        self.any = Some(any);
        Ok(any)
    }

    /// Retries the open dead letters of a row's event, if the row asks for it.
    pub(super) async fn grant(&mut self, row: &OutboxRow) -> Result<RetryRequest> {
        let (Some(letters), Ok(event)) = (self.letters.clone(), &row.event) else {
            return Ok(RetryRequest::None);
        };
        let mut found = letters.get(event.id()).await?;
        found.retain(|letter| letter.event().tenant() == event.tenant());
        // A row without a time counts as a request: a retry too many is better than none.
        let wanted = row.wanted_at.filter(|_| row.row <= self.known);
        let is_request = |letter: &DeadLetter| {
            letter.retried_at.is_none() && wanted.is_none_or(|wanted| letter.died_at <= wanted)
        };
        if found.iter().any(is_request) {
            let filter = DeadLetterFilter {
                id: Some(event.id()),
                tenant: Some(event.tenant().unwrap_or_default().to_owned()),
                died_until: wanted,
                ..DeadLetterFilter::default()
            };
            let sent_back = letters.retry(filter).await?;
            self.counters.lock().retried += u64::from(sent_back > 0);
            return Ok(RetryRequest::Granted);
        }
        let Some(wanted) = wanted else {
            return Ok(RetryRequest::None);
        };
        if found.iter().any(|letter| was_granted(letter, wanted)) {
            return Ok(RetryRequest::Granted);
        }
        let died = |letter: &DeadLetter| same(letter.event(), event);
        Ok(if found.iter().any(died) {
            RetryRequest::Died
        } else {
            RetryRequest::None
        })
    }
}

/// Whether a dead letter existed when the row asked for its retry, and was retried since.
fn was_granted(letter: &DeadLetter, wanted: Timestamp) -> bool {
    letter.first_seen_at <= wanted
        && match letter.retried_at {
            Some(retried) => retried >= wanted,
            // It failed again.
            None => letter.died_at > wanted,
        }
}

fn same(one: &Event, other: &Event) -> bool {
    one.id() == other.id() && one.same_body(other)
}
