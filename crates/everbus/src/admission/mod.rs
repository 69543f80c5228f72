//! Admission: whether a publish may proceed. Checks the rate limit of the bus, then the room in each
//! stream.
//!
//! Nothing is stored before a publish is admitted. A refused or cancelled publish changes nothing. Without
//! limits, admission costs one branch.

mod limits;
mod rate;
mod streams;

#[cfg(test)]
mod fake;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use everbus_core::{Code, Depth, Error, Event, Pattern, Result, StreamLimit, Streams as Table};
use tokio::time::Instant;

pub use limits::Limits;
use limits::is_system;
pub use rate::PublishRate;
use rate::TokenBucket;
use streams::{Reservation, Stream, Streams};

/// Admits publishes to a bus.
#[derive(Debug)]
pub(crate) struct Admission {
    /// Whether there is any limit.
    limited: bool,
    rate: Option<TokenBucket>,
    /// The limits by event type, for a bus without declared streams.
    limits: Limits,
    /// The declared streams with their limits.
    table: Table,
    streams: Streams,
}

/// The demand of a publish on one stream.
struct Demand<'a> {
    /// The pattern of a declared stream; `None`: the event type that is the name.
    types: Option<&'a Pattern>,
    limit: &'a StreamLimit,
    events: u64,
}

impl Admission {
    /// Refuses invalid limits. `table` has its limits already.
    pub(crate) fn new(limits: Limits, rate: Option<PublishRate>, table: Table) -> Result<Self> {
        limits.validate()?;
        if let Some(rate) = &rate {
            rate.validate()?;
        }
        Ok(Self {
            limited: rate.is_some()
                || !limits.is_empty()
                || table.iter().any(|stream| stream.limit.is_some()),
            rate: rate.map(TokenBucket::new),
            limits,
            table,
            streams: Streams::default(),
        })
    }

    /// Whether any publish may have to wait or be refused.
    pub(crate) fn is_limited(&self) -> bool {
        self.limited
    }

    /// Waits until these events may be appended together, or returns why not.
    ///
    /// A publish waits for the rate limit and for room together no longer than the longest `wait` of the
    /// settings that apply to it. Hold the returned value until the append is over: the room stays reserved
    /// until then. Dropping the future is harmless.
    pub(crate) async fn admit(
        &self,
        depth: Option<&dyn Depth>,
        events: &[Event],
    ) -> Result<Admitted> {
        let mut admitted = Admitted::default();
        if !self.limited {
            return Ok(admitted);
        }
        let demand = self.demand(events)?;
        let start = Instant::now();
        if let Some(rate) = &self.rate {
            let limited = events.iter().filter(|e| !is_system(e.event_type()));
            match limited.count() as u64 {
                0 => {}
                count => rate.take(count, start).await?,
            }
        }
        // In the order of stream names, so that two publishers cannot deadlock on each other's room.
        for (name, wanted) in demand {
            let stream = self.streams.of(name, wanted.types, wanted.limit)?;
            let (reservation, dropped) = match depth {
                Some(depth) => stream.reserve(depth, wanted.events, start).await?,
                None => return Err(stream.cannot(cannot_count())),
            };
            admitted.held.push(reservation);
            if dropped > 0 {
                admitted.dropped.push((name.clone(), dropped));
            }
        }
        admitted.held.iter_mut().for_each(Reservation::begin);
        Ok(admitted)
    }

    /// The number of events for each limited stream, by name.
    fn demand<'a>(&'a self, events: &'a [Event]) -> Result<BTreeMap<&'a Arc<str>, Demand<'a>>> {
        let mut demand: BTreeMap<&Arc<str>, Demand<'_>> = BTreeMap::new();
        for event in events {
            if let Some((name, types, limit)) = self.limit_of(event) {
                let wanted = demand.entry(name).or_insert(Demand {
                    types,
                    limit,
                    events: 0,
                });
                wanted.events += 1;
            }
        }
        for (name, wanted) in &demand {
            Stream::check(name, wanted.limit, wanted.events)?;
        }
        Ok(demand)
    }

    fn limit_of<'a>(
        &'a self,
        event: &'a Event,
    ) -> Option<(&'a Arc<str>, Option<&'a Pattern>, &'a StreamLimit)> {
        if self.table.is_declared() {
            let stream = self.table.of(event.event_type())?;
            return Some((&stream.name, Some(stream.types()), stream.limit.as_ref()?));
        }
        let limit = self.limits.of(event.event_type())?;
        Some((event.type_arc(), None, limit))
    }
}

fn cannot_count() -> Error {
    Error::new(
        Code::Unsupported,
        "this engine cannot count what waits in a stream",
    )
}

/// Permission to append. Hold it until the append is over, however it ends.
#[derive(Debug, Default)]
#[must_use = "the room is reserved only while this is held"]
pub(crate) struct Admitted {
    held: Vec<Reservation>,
    dropped: Vec<(Arc<str>, u64)>,
}

impl Admitted {
    /// How many old events were dropped to make room, by stream.
    pub(crate) fn dropped(&self) -> &[(Arc<str>, u64)] {
        &self.dropped
    }
}
