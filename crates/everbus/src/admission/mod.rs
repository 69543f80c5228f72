//! Whether a publish may go now: the rate of the bus first, then room in each stream it touches.
//!
//! Nothing is stored before a publish is admitted, and one that is refused or cancelled leaves nothing
//! behind. Without limits this costs one branch.

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
use rate::Turns;
use streams::{Reservation, Stream, Streams};

/// Admits publishes to a bus.
#[derive(Debug)]
pub(crate) struct Admission {
    /// Whether there is anything to keep.
    limited: bool,
    rate: Option<Turns>,
    /// By type, where no streams are declared.
    limits: Limits,
    /// The declared streams with their limits.
    table: Table,
    streams: Streams,
}

/// What a publish wants of one stream.
struct Demand<'a> {
    /// What is in the stream; the one type of its name unless it is declared.
    types: Option<&'a Pattern>,
    limit: &'a StreamLimit,
    events: u64,
}

impl Admission {
    /// Refuses limits that make no sense. `table` has its limits already.
    pub(crate) fn new(limits: Limits, rate: Option<PublishRate>, table: Table) -> Result<Self> {
        limits.validate()?;
        if let Some(rate) = &rate {
            rate.validate()?;
        }
        Ok(Self {
            limited: rate.is_some()
                || !limits.is_empty()
                || table.iter().any(|stream| stream.limit.is_some()),
            rate: rate.map(Turns::new),
            limits,
            table,
            streams: Streams::default(),
        })
    }

    /// Whether any publish may have to wait or be refused.
    pub(crate) fn is_limited(&self) -> bool {
        self.limited
    }

    /// Waits until these events may be appended together, or says why they may not.
    ///
    /// A publish waits for its turn and for room together no longer than the longest `wait` of the
    /// settings that apply to it. What is returned is to be held until the append is over: the
    /// room stays reserved until then. Dropping the future is harmless.
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
        // In the order of their names: two publishers never wait for each other's room.
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

    /// How many events of each limited stream there are, by its name.
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

/// Leave to append. To be held until the append is over, however it ends.
#[derive(Debug, Default)]
#[must_use = "the room is reserved only while this is held"]
pub(crate) struct Admitted {
    held: Vec<Reservation>,
    dropped: Vec<(Arc<str>, u64)>,
}

impl Admitted {
    /// How many old events of which streams were dropped to make room.
    pub(crate) fn dropped(&self) -> &[(Arc<str>, u64)] {
        &self.dropped
    }
}
