//! The plan of a group: its handlers, how it consumes, and which handlers match each event type.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{ConsumeOptions, Event, GroupName, OnFull, Pattern, Result};

use crate::breaker::{Breaker, BreakerState, Criticality};
use crate::handler::Registered;
use crate::runtime::bus::Shared;
use crate::runtime::options::BusOptions;
use crate::schema::Schemas;
use crate::stats::Meter;
use crate::streams;

/// A lease lasts this much longer than the longest handler timeout, unless a handler sets its own lease.
const LEASE_MARGIN: Duration = Duration::from_secs(10);
/// How many event types the table of a group remembers. One more type clears the table, so that it stays
/// small.
const MAX_TYPES: usize = 10_000;

/// The handlers of a group, and the settings with which the group consumes.
pub(crate) struct Plan {
    pub(super) handlers: Vec<Arc<Registered>>,
    pub(super) concurrency: usize,
    pub(super) prefetch: usize,
    pub(super) lease: Duration,
    no_handler_after: Duration,
    /// The breakers of the critical handlers. While one is open, the group fetches nothing.
    pub(super) critical_breakers: Vec<Breaker>,
}

/// How much the group may fetch; the breakers of its critical handlers decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gate {
    /// As much as it prefetches.
    Free,
    /// One event at a time, as a probe of a dependency.
    Probe,
    /// Nothing.
    Shut,
}

impl Plan {
    pub(crate) fn new(
        handlers: &[Arc<Registered>],
        concurrency: usize,
        options: &BusOptions,
    ) -> Self {
        let longest = handlers.iter().map(|handler| handler.timeout).max();
        let lease = handlers.iter().filter_map(|h| h.traits.lease).max();
        Self {
            handlers: handlers.to_vec(),
            concurrency,
            prefetch: prefetch(handlers, concurrency, options),
            lease: lease.unwrap_or_else(|| longest.unwrap_or(options.timeout) + LEASE_MARGIN),
            no_handler_after: options.no_handler_after,
            critical_breakers: critical_breakers(handlers),
        }
    }

    /// The gate as the breakers of the critical handlers are now.
    pub(super) fn gate(&self) -> Gate {
        let mut gate = Gate::Free;
        for breaker in &self.critical_breakers {
            match breaker.state() {
                BreakerState::Closed => {}
                // A probe is running already, perhaps in another group.
                BreakerState::HalfOpen if breaker.is_probing() => return Gate::Shut,
                BreakerState::HalfOpen => gate = Gate::Probe,
                BreakerState::Open { .. } => return Gate::Shut,
            }
        }
        gate
    }

    pub(super) fn patterns(&self) -> Vec<Pattern> {
        self.handlers.iter().map(|h| h.pattern.clone()).collect()
    }

    pub(super) fn consume_options(&self, gate: Gate) -> ConsumeOptions {
        ConsumeOptions::new(self.patterns())
            .prefetch(self.prefetch_at(gate))
            .concurrency(self.concurrency)
            .lease(self.lease)
            .no_handler_after(self.no_handler_after)
    }

    /// How many events the group may hold: the whole prefetch, one while a breaker probes its dependency, or
    /// none.
    pub(super) fn prefetch_at(&self, gate: Gate) -> usize {
        match gate {
            Gate::Free => self.prefetch,
            Gate::Probe => 1,
            Gate::Shut => 0,
        }
    }

    /// Whether a consumer that was opened for the other plan can be kept: only patterns and prefetch differ.
    pub(super) fn consumes_like(&self, other: &Plan) -> bool {
        self.lease == other.lease
            && self.no_handler_after == other.no_handler_after
            && self.concurrency == other.concurrency
    }
}

/// How many events the group prefetches: the smallest number that a handler sets, or else the number for the
/// concurrency. If the group reads a stream that drops its oldest events, at most half the length of the
/// shortest such stream (and at least one), because a prefetched event can no longer be dropped.
fn prefetch(handlers: &[Arc<Registered>], concurrency: usize, options: &BusOptions) -> usize {
    let smallest = handlers.iter().filter_map(|h| h.traits.prefetch).min();
    let asked = smallest.unwrap_or_else(|| options.prefetch_for(concurrency));
    let limits = &options.limits;
    let limits: Vec<_> = if options.streams.is_declared() {
        let reads = |types: &Pattern| handlers.iter().any(|h| h.pattern.overlap(types).is_some());
        let read = options.streams.iter().filter(|s| reads(s.types()));
        read.filter_map(|stream| stream.limit.as_ref()).collect()
    } else {
        let matched = |stream: &str| handlers.iter().any(|h| h.pattern.matches(stream));
        let named = limits.by_stream.iter();
        let named = named.filter(|(stream, _)| matched(stream));
        named
            .map(|(_, limit)| limit)
            .chain(&limits.default)
            .collect()
    };
    let dropping = limits
        .iter()
        .filter(|limit| limit.on_full == OnFull::DropOldest);
    let shortest = dropping.map(|limit| limit.max_len).min();
    shortest.map_or(asked, |length| {
        let half = usize::try_from(length / 2).unwrap_or(usize::MAX);
        asked.min(half.max(1))
    })
}

/// The age limit of this event type: the limit of the type, or else of its declared stream, or else `None`.
fn max_staleness(options: &BusOptions, event_type: &str) -> Option<Duration> {
    let ages = &options.max_staleness;
    if ages.is_empty() {
        return None;
    }
    let of_stream = || {
        let streams = Some(&options.streams).filter(|streams| streams.is_declared())?;
        ages.get(&streams::canonical(&streams.of(event_type)?.name))
    };
    let own = ages.get(&streams::canonical(event_type));
    own.or_else(of_stream).copied()
}

/// The breakers of the critical handlers, each once.
fn critical_breakers(handlers: &[Arc<Registered>]) -> Vec<Breaker> {
    let mut breakers: Vec<Breaker> = Vec::new();
    for traits in handlers.iter().map(|handler| &handler.traits) {
        if traits.criticality == Criticality::Critical
            && let Some(breaker) = &traits.breaker
            && !breakers.iter().any(|known| known.is(breaker))
        {
            breakers.push(breaker.clone());
        }
    }
    breakers
}

/// The handlers of one event type in a group.
pub(crate) struct Matched {
    /// In subscription order.
    pub(crate) handlers: Vec<Arc<Registered>>,
    pub(crate) meter: Arc<Meter>,
    /// Whether a handler is idempotent: the inbox is read before the handlers run, and written with the ack.
    pub(crate) idempotent: bool,
    /// Whether a check is needed before the handlers run: a handler has a breaker, or the event type or a
    /// handler has an age limit.
    pub(crate) guarded: bool,
    /// The age limit of the event type, if it has one: older events are skipped. The limit of a handler goes
    /// before it.
    pub(crate) max_staleness: Option<Duration>,
    /// All schemas, if there is one for this event type.
    schemas: Option<Arc<Schemas>>,
}

impl Matched {
    pub(crate) fn new(
        handlers: Vec<Arc<Registered>>,
        meter: Arc<Meter>,
        schemas: Option<Arc<Schemas>>,
        max_staleness: Option<Duration>,
    ) -> Self {
        let traits = || handlers.iter().map(|handler| &handler.traits);
        Self {
            meter,
            idempotent: traits().any(|traits| traits.idempotent),
            guarded: max_staleness.is_some()
                || traits().any(|t| t.breaker.is_some() || t.max_staleness.is_some()),
            max_staleness,
            schemas,
            handlers,
        }
    }

    /// Checks the payload against the schema of the event type and the schema of the handler, if there are
    /// any.
    pub(crate) fn check(&self, event: &Event, handler: &Registered) -> Result<()> {
        if let Some(schemas) = &self.schemas {
            schemas.check_consumed(event)?;
        }
        match &handler.traits.schema {
            Some(schema) => schema.check(event.payload()),
            None => Ok(()),
        }
    }
}

/// Remembers the handlers of each event type, so that patterns are matched once per type.
pub(super) struct MatchTable {
    plan: Arc<Plan>,
    schemas: Arc<Schemas>,
    by_type: HashMap<Arc<str>, Arc<Matched>>,
    /// The result of the last `find`.
    last: Option<(Arc<str>, Arc<Matched>)>,
}

impl MatchTable {
    pub(super) fn new(plan: Arc<Plan>, schemas: Arc<Schemas>) -> Self {
        Self {
            plan,
            schemas,
            by_type: HashMap::new(),
            last: None,
        }
    }

    /// Clears the table if the plan or the schemas have changed.
    pub(super) fn follow(&mut self, plan: Arc<Plan>, schemas: Arc<Schemas>) {
        if !Arc::ptr_eq(&self.plan, &plan) || !Arc::ptr_eq(&self.schemas, &schemas) {
            *self = Self::new(plan, schemas);
        }
    }

    /// The handlers of this event type; there may be none.
    pub(super) fn find(
        &mut self,
        shared: &Shared,
        group: &GroupName,
        event_type: &Arc<str>,
    ) -> Arc<Matched> {
        // Events of one type often come in a row.
        if let Some((last, matched)) = &self.last
            && (Arc::ptr_eq(last, event_type) || last == event_type)
        {
            return matched.clone();
        }
        let matched = match self.by_type.get(event_type) {
            Some(matched) => matched.clone(),
            None => {
                let matching = self.plan.handlers.iter();
                let handlers = matching
                    .filter(|handler| handler.pattern.matches(event_type))
                    .cloned()
                    .collect();
                let meter = shared.stats.meter(group, event_type);
                let knows = self.schemas.knows(event_type);
                let schemas = knows.then(|| self.schemas.clone());
                let oldest = max_staleness(&shared.options, event_type);
                let matched = Arc::new(Matched::new(handlers, meter, schemas, oldest));
                if self.by_type.len() >= MAX_TYPES {
                    self.by_type.clear();
                }
                self.by_type.insert(event_type.clone(), matched.clone());
                matched
            }
        };
        self.last = Some((event_type.clone(), matched.clone()));
        matched
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::bus::Bus;

    #[tokio::test]
    async fn the_table_of_types_stays_bounded() {
        let bus = Bus::open("memory:").await.unwrap();
        let plan = Arc::new(Plan::new(&[], 1, &BusOptions::default()));
        let mut table = MatchTable::new(plan, bus.shared().schemas());
        for n in 0..3 * MAX_TYPES {
            let event_type = format!("type.{n}").into();
            table.find(bus.shared(), &GroupName::unnamed(), &event_type);
            assert!(table.by_type.len() <= MAX_TYPES);
        }
    }
}
