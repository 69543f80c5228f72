//! Whether all due work is done, and when the next event is due.
//!
//! The engine is asked: it knows which events are in flight, waiting, or not delivered yet. The answer is
//! valid only if nothing happened while it was collected.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use everbus_core::{
    Clock, Code, Cursor, EventState, GroupInfo, GroupName, GroupState, Lookup, Pattern, Recorded,
    Result, Timestamp,
};

use super::bus::TestBus;
use crate::breaker::{BreakerInfo, BreakerState};
use crate::runtime::bus::Bus;
use crate::runtime::router::Resolved;

/// How many events are read from the log at once.
const PAGE: usize = 1000;

/// The result of a check.
pub(super) enum Look {
    /// Nothing is left to do before this time.
    Idle { next: Option<Timestamp> },
    /// There is something to do; the text says what.
    Busy(String),
}

/// Which circuit breakers may stop a group, by name.
#[derive(Default)]
pub(super) struct Gates {
    by_group: BTreeMap<GroupName, BTreeSet<String>>,
}

impl Gates {
    pub(super) fn of(router: &Resolved) -> Self {
        let mut gates = Self::default();
        for subscription in &router.subscriptions {
            let group = subscription.group.clone();
            let names = gates.by_group.entry(group).or_default();
            names.extend(subscription.settings.dependency.clone());
        }
        gates
    }

    /// When the first of the open breakers that may stop a group allows an event. A breaker that only the
    /// configuration file names may belong to any group.
    fn shut_until(&self, group: &GroupName, breakers: &[BreakerInfo]) -> Option<Timestamp> {
        let own = self.by_group.get(group);
        let concerns = |breaker: &BreakerInfo| {
            breaker.name == group.to_string()
                || own.is_some_and(|names| names.contains(&breaker.name))
                || !self.is_known(&breaker.name)
        };
        let open = breakers.iter().filter_map(|breaker| match breaker.state {
            BreakerState::Open { until } if concerns(breaker) => Some(until),
            _ => None,
        });
        open.min()
    }

    fn is_known(&self, name: &str) -> bool {
        let mut groups = self.by_group.iter();
        groups.any(|(group, names)| group.to_string() == name || names.contains(name))
    }
}

/// The work of a group.
#[derive(Default)]
struct Work {
    /// An event that is being handled.
    running: Option<String>,
    /// An event that may be handled now.
    ready: Option<String>,
    /// When the next one may be handled.
    next: Option<Timestamp>,
    /// In an ordered group: keys with an earlier event that is not settled.
    keys: HashSet<String>,
}

impl TestBus {
    /// Checks all open work. An error means that nothing will happen any more.
    pub(super) async fn look(&self) -> Result<Look> {
        let bus = self.bus();
        if let Some(error) = bus.failure() {
            return Err(error);
        }
        let ours = self.journal().groups();
        if let Some((_, error)) = bus
            .stopped_groups()
            .into_iter()
            .find(|(g, _)| ours.contains_key(g))
        {
            return Err(error);
        }
        let Some(before) = self.journal().version() else {
            return Ok(Look::Busy("a call of the engine is under way".into()));
        };
        let mut open = Vec::new();
        for info in bus.groups().await? {
            let Some(patterns) = ours.get(&info.name) else {
                continue;
            };
            if info.in_flight > 0 {
                let held = self.journal().held_by(&info.name).join(", ");
                let what = format!("group {} is handling {held}", info.name);
                return Ok(Look::Busy(what));
            }
            if info.waiting > 0 || info.behind > 0 {
                open.push((info, patterns));
            }
        }
        let next = match self.time_of_next(&open).await? {
            Look::Idle { next } => next,
            busy => return Ok(busy),
        };
        if let Some(uncounted) = self.uncounted() {
            return Ok(Look::Busy(uncounted.into()));
        }
        if self.journal().version() != Some(before) {
            return Ok(Look::Busy("something happened just now".into()));
        }
        Ok(Look::Idle { next })
    }

    /// Checks the groups with open work.
    async fn time_of_next(&self, open: &[(GroupInfo, &Vec<Pattern>)]) -> Result<Look> {
        let mut next: Option<Timestamp> = None;
        if open.is_empty() {
            return Ok(Look::Idle { next });
        }
        let breakers = self.bus().breakers();
        let now = self.clock().now();
        for ((info, _), work) in open.iter().zip(work_of(self.bus(), open, now).await?) {
            let group = &info.name;
            if let Some(event) = work.running {
                return Ok(Look::Busy(format!("group {group} is handling {event}")));
            }
            let until = match work.ready {
                None => None,
                Some(event) if self.journal().consumes(group) => {
                    return Ok(Look::Busy(format!("group {group} is to handle {event}")));
                }
                // While a breaker is open the group does not fetch.
                Some(event) => match self.gates().shut_until(group, &breakers) {
                    None => return Ok(Look::Busy(format!("group {group} is to handle {event}"))),
                    until => until,
                },
            };
            next = [next, work.next, until].into_iter().flatten().min();
        }
        Ok(Look::Idle { next })
    }

    /// Whether durable outcomes are still to be counted, or alerts to be published: the bus does both a
    /// moment later.
    fn uncounted(&self) -> Option<&'static str> {
        let (outcomes, alerts) = self.journal().counts();
        let stats = self.bus().stats();
        let counted: u64 = stats
            .groups
            .values()
            .map(|group| {
                let skipped =
                    group.skipped.stale + group.skipped.best_effort + group.skipped.handler;
                group.handled + group.inbox_hits + skipped + group.retried + group.dead_lettered
            })
            .sum();
        if counted < outcomes {
            return Some("outcomes are still to be counted");
        }
        let breakers = self.bus().alerting_breakers();
        let changes: u64 = breakers
            .iter()
            .map(|breaker| {
                let not_closed = u64::from(breaker.state != BreakerState::Closed);
                2 * breaker.times_opened - not_closed
            })
            .sum();
        (alerts < changes)
            .then_some("a circuit breaker has changed and its alert is to be published")
    }
}

/// The work of each of these groups, from the state of each event in it.
async fn work_of(
    bus: &Bus,
    groups: &[(GroupInfo, &Vec<Pattern>)],
    now: Timestamp,
) -> Result<Vec<Work>> {
    let log = bus.log()?;
    let wanted: Vec<Pattern> = groups
        .iter()
        .flat_map(|(_, patterns)| patterns.iter().cloned())
        .collect();
    let mut work: Vec<Work> = groups.iter().map(|_| Work::default()).collect();
    let lookup = bus.engine().lookup()?;
    let mut after = Cursor::START;
    loop {
        let (records, reached) = log.read(after, wanted.clone(), PAGE).await?;
        for record in &records {
            let states = states(lookup, record).await?;
            for ((info, patterns), work) in groups.iter().zip(&mut work) {
                let wants = patterns
                    .iter()
                    .any(|p| p.matches(record.event.event_type()));
                let state = states.iter().find(|state| state.group == info.name);
                if let Some(state) = state.filter(|_| wants) {
                    work.add(record, state, info.ordered, now);
                }
            }
        }
        if records.len() < PAGE {
            return Ok(work);
        }
        after = reached;
    }
}

/// The state of an event in all groups; empty if it has just been removed.
async fn states(lookup: &dyn Lookup, record: &Recorded) -> Result<Vec<GroupState>> {
    match lookup.states(record.position).await {
        Err(error) if error.code() == Code::NotFound => Ok(Vec::new()),
        states => states,
    }
}

impl Work {
    fn add(&mut self, record: &Recorded, state: &GroupState, ordered: bool, now: Timestamp) {
        if matches!(state.state, EventState::Done | EventState::Dlq) {
            return;
        }
        let event = &record.event;
        let what = || Some(format!("{} {}", event.event_type(), event.display_id()));
        match state.due_at {
            None if state.state == EventState::Processing => self.running = what(),
            _ if ordered && self.is_behind(record) => {}
            Some(due) if due > now => {
                self.next = Some(self.next.map_or(due, |next| next.min(due)));
            }
            _ => self.ready = what(),
        }
    }

    /// Whether an earlier event with the same key is not settled.
    fn is_behind(&mut self, record: &Recorded) -> bool {
        let key = record.event.ordering_key();
        key.is_some_and(|key| !self.keys.insert(key.into_owned()))
    }
}
