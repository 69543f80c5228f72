//! The model: the state of every event in every group, as simple as possible.
//!
//! It says which deliveries are allowed, not which one comes. Where an engine claims events before they are
//! fetched (`ahead`), the model allows the consequences: a lost claim that was not fetched counts as an
//! attempt, and a lease may have begun when the event was claimed.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use everbus_core::{
    Appended, Delivery, Event, EventId, EventState, Failure, FailureKind, GroupName, LETTER_PURGED,
    Lease, Pattern, Redelivery, Timestamp, Verdict,
};

/// The lease of every consumer of a plan. No other duration has its odd microseconds, so no lease ends
/// exactly at a moment that is compared.
pub(super) const LEASE: Duration = Duration::from_micros(10_000_007);

#[derive(Debug)]
pub(super) struct Oracle {
    pub(super) now: Timestamp,
    pub(super) ahead: bool,
    pub(super) head: u64,
    pub(super) last_received: Timestamp,
    /// The events in the log.
    pub(super) log: BTreeMap<u64, Kept>,
    pub(super) ids: HashMap<EventId, u64>,
    pub(super) groups: BTreeMap<String, Desk>,
    /// Events that each group has recorded as handled.
    pub(super) handled: HashSet<(String, EventId)>,
}

#[derive(Clone, Debug)]
pub(super) struct Kept {
    pub(super) event: Event,
    pub(super) received_at: Timestamp,
}

/// A group.
#[derive(Debug)]
pub(super) struct Desk {
    pub(super) ordered: bool,
    pub(super) patterns: Vec<Pattern>,
    /// Events that are neither done nor dead.
    pub(super) owed: BTreeMap<u64, Work>,
    pub(super) dead: BTreeMap<u64, Death>,
    /// Whether the group has a consumer that may claim.
    pub(super) attended: bool,
    /// Dropped events, perhaps before the group reached them.
    dropped: HashSet<u64>,
    /// Events whose dead letters were removed unhandled, with the reason that must be recorded.
    pub(super) lapsed: HashMap<u64, String>,
}

#[derive(Clone, Debug)]
pub(super) struct Work {
    pub(super) key: Option<String>,
    pub(super) attempts: u32,
    pub(super) failures: Vec<Failure>,
    pub(super) state: WorkState,
    /// Since when a consumer may have claimed it unfetched.
    claimable_since: Option<Timestamp>,
    /// How many unfetched claims may have been lost.
    ghosts: u32,
    /// Whether the event is delivered out of log order, so that it may overtake events not reached yet.
    at_once: bool,
    /// Whether its last attempt ended in a crash, so that an engine may hand it out alone.
    pub(super) inherited: bool,
}

#[derive(Clone, Debug)]
pub(super) enum WorkState {
    Waiting {
        due: Timestamp,
    },
    /// Certainly held until `surely`, and perhaps until `until`.
    Held {
        lease: Lease,
        surely: Timestamp,
        until: Timestamp,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Death {
    pub(super) open: bool,
    pub(super) attempts: u32,
    pub(super) failures: Vec<Failure>,
    pub(super) first_seen_at: Timestamp,
    pub(super) died_at: Timestamp,
}

/// Whether a lease is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hold {
    Yes,
    Perhaps,
    No,
}

impl Oracle {
    pub(super) fn new(now: Timestamp, ahead: bool) -> Self {
        Self {
            now,
            ahead,
            head: 0,
            last_received: now,
            log: BTreeMap::new(),
            ids: HashMap::new(),
            groups: BTreeMap::new(),
            handled: HashSet::new(),
        }
    }

    /// Notes an event that the engine stored.
    pub(super) fn appended(&mut self, event: &Event, position: u64, received_at: Timestamp) {
        self.appended_for(None, event, position, received_at);
    }

    /// Notes that a corrected event replaces a dead letter of a group, and is for that group only.
    pub(super) fn replaced(&mut self, group: &str, of: u64, event: &Event, appended: Appended) {
        let death = self.groups.get_mut(group).and_then(|d| d.dead.get_mut(&of));
        let death = death.expect("a dead letter that the model knows");
        assert!(death.open, "an open dead letter was replaced");
        death.open = false;
        let position = appended.position.place();
        self.appended_for(Some(group), event, position, appended.received_at);
    }

    /// An event for every group that wants it, or for the named group only.
    fn appended_for(
        &mut self,
        only: Option<&str>,
        event: &Event,
        position: u64,
        received_at: Timestamp,
    ) {
        assert!(
            position > self.head,
            "position {position} after {}",
            self.head
        );
        let expected = self.now.max(self.last_received);
        assert_eq!(received_at, expected, "the time of receipt of {position}");
        self.head = position;
        self.last_received = received_at;
        self.ids.insert(event.id(), position);
        for (name, desk) in &mut self.groups {
            // The group that failed gets it, whatever its patterns; the others skip it.
            match only {
                None if !desk.wants(event) => continue,
                Some(only) if only != name => {
                    desk.dropped.insert(position);
                    continue;
                }
                _ => {}
            }
            let mut work = Work::new(event, self.now);
            work.at_once = !desk.wants(event);
            desk.owed.insert(position, work);
        }
        let event = event.clone();
        self.log.insert(position, Kept { event, received_at });
    }

    pub(super) fn declared(
        &mut self,
        name: &str,
        ordered: bool,
        patterns: Vec<Pattern>,
        first: bool,
    ) {
        let mut desk = Desk {
            ordered,
            patterns,
            owed: BTreeMap::new(),
            dead: BTreeMap::new(),
            attended: false,
            dropped: HashSet::new(),
            lapsed: HashMap::new(),
        };
        if first {
            let group: GroupName = name.parse().unwrap();
            for (position, kept) in &self.log {
                if !kept.event.is_for(&group) {
                    desk.dropped.insert(*position);
                } else if desk.wants(&kept.event) {
                    desk.owed
                        .insert(*position, Work::new(&kept.event, self.now));
                }
            }
        }
        self.groups.insert(name.to_string(), desk);
    }

    /// Lets time pass: leases end.
    pub(super) fn advance(&mut self, by: Duration) {
        self.now = self.now.plus(by);
        let now = self.now;
        for desk in self.groups.values_mut() {
            for work in desk.owed.values_mut() {
                if matches!(work.state, WorkState::Held { until, .. } if until <= now) {
                    work.crash(now);
                }
                if work
                    .claimable_since
                    .is_some_and(|since| since.plus(LEASE) <= now)
                {
                    work.ghosts += 1;
                    work.claimable_since = Some(now);
                }
            }
        }
        self.note_claimable();
    }

    /// The process ends: events in flight count as a crash.
    pub(super) fn process_ended(&mut self) {
        let now = self.now;
        for desk in self.groups.values_mut() {
            desk.attended = false;
            for work in desk.owed.values_mut() {
                if matches!(work.state, WorkState::Held { .. }) {
                    work.crash(now);
                }
                if work.claimable_since.take().is_some() {
                    work.ghosts += 1;
                }
            }
        }
    }

    /// The consumers of a group come or go.
    pub(super) fn attended(&mut self, group: &str, attended: bool) {
        let desk = self.groups.get_mut(group).unwrap();
        desk.attended = attended;
        if !attended {
            desk.owed
                .values_mut()
                .for_each(|work| work.claimable_since = None);
        }
        self.note_claimable();
    }

    /// Whether an engine may hold everything back to run an event alone that crashed several times.
    pub(super) fn may_isolate(&self) -> bool {
        let crashes = |work: &Work| {
            work.failures
                .iter()
                .filter(|f| f.kind == FailureKind::Crash)
                .count()
        };
        self.groups
            .values()
            .any(|desk| desk.owed.values().any(|work| crashes(work) >= 3))
    }

    /// Notes what consumers may have claimed by now.
    pub(super) fn note_claimable(&mut self) {
        if !self.ahead {
            return;
        }
        let now = self.now;
        for desk in self.groups.values_mut().filter(|desk| desk.attended) {
            for position in desk.deliverable(now) {
                let work = desk.owed.get_mut(&position).unwrap();
                work.claimable_since.get_or_insert(now);
            }
        }
    }

    /// Notes a delivery, or returns why it is not allowed.
    pub(super) fn deliver(&mut self, group: &str, delivery: &Delivery) -> Result<(), String> {
        let now = self.now;
        let position = delivery.record.position.place();
        let kept = self.log.get(&position).ok_or("it is not in the log")?;
        if delivery.record.event != kept.event || delivery.record.received_at != kept.received_at {
            return Err("it is not the event that was published".into());
        }
        let desk = self.groups.get_mut(group).unwrap();
        let blocked = desk.is_blocked(position);
        let work = desk
            .owed
            .get_mut(&position)
            .ok_or("the group does not owe it")?;
        match work.state {
            WorkState::Held { surely, .. } if now < surely => return Err("it is held".into()),
            WorkState::Held { .. } => work.crash(now),
            WorkState::Waiting { due } if now < due => return Err(format!("it is due at {due}")),
            WorkState::Waiting { .. } => {}
        }
        if blocked && work.claimable_since.is_none() && !work.at_once {
            return Err("an earlier one of its key is not settled".into());
        }
        let extra = delivery.attempt.checked_sub(work.attempts + 1);
        let extra = extra.filter(|extra| *extra <= work.ghosts);
        let Some(extra) = extra else {
            return Err(format!(
                "attempt {} after {} attempts",
                delivery.attempt, work.attempts
            ));
        };
        let (known, ghosts) = delivery
            .failures
            .split_at_checked(work.failures.len())
            .ok_or("it forgot a failure")?;
        if !same_failures(known, &work.failures) {
            return Err(format!("its failures should be {:?}", work.failures));
        }
        if ghosts.len() != extra as usize || ghosts.iter().any(|f| f.kind != FailureKind::Crash) {
            return Err("it has failures that never were".into());
        }
        let until = now.plus(LEASE);
        work.attempts = delivery.attempt;
        work.failures.clone_from(&delivery.failures);
        work.state = WorkState::Held {
            lease: delivery.lease.clone(),
            surely: match work.claimable_since {
                // An engine that extends unfetched claims chooses the moments itself.
                _ if work.ghosts > 0 => now,
                Some(since) => since.plus(LEASE),
                None => until,
            },
            until,
        };
        work.claimable_since = None;
        work.ghosts = 0;
        Ok(())
    }

    /// Whether a lease is held now.
    pub(super) fn hold(&self, group: &str, lease: &Lease) -> Hold {
        let work = self
            .groups
            .get(group)
            .and_then(|desk| desk.owed.get(&lease.position().place()));
        match work.map(|work| &work.state) {
            Some(WorkState::Held {
                lease: own, surely, ..
            }) if own == lease => {
                if self.now < *surely {
                    Hold::Yes
                } else {
                    Hold::Perhaps
                }
            }
            _ => Hold::No,
        }
    }

    /// The engine reported a lease as lost that the model was not sure of.
    pub(super) fn lost(&mut self, group: &str, position: u64) {
        let now = self.now;
        self.work(group, position).crash(now);
    }

    pub(super) fn extended(&mut self, group: &str, position: u64, by: Duration) {
        let end = self.now.plus(by);
        if let WorkState::Held { surely, until, .. } = &mut self.work(group, position).state {
            (*surely, *until) = (end, end);
        }
    }

    /// Applies a verdict that the engine accepted.
    pub(super) fn settled(&mut self, group: &str, position: u64, verdict: &Verdict) {
        let now = self.now;
        let work = self.work(group, position);
        work.inherited = false;
        match verdict {
            Verdict::Ack | Verdict::Skip { .. } => {
                self.groups.get_mut(group).unwrap().owed.remove(&position);
            }
            Verdict::Retry { after, failure } => {
                work.failures.push(failure.clone());
                work.state = WorkState::Waiting {
                    due: now.plus(*after),
                };
            }
            Verdict::Release { after } => {
                work.attempts -= 1;
                work.state = WorkState::Waiting {
                    due: now.plus(*after),
                };
            }
            Verdict::Dead { failure } => {
                let desk = self.groups.get_mut(group).unwrap();
                let mut work = desk.owed.remove(&position).unwrap();
                // Given up because of earlier failures: this delivery was not an attempt.
                let was_none = failure.is_none() && !work.failures.is_empty();
                work.attempts -= u32::from(was_none);
                work.failures.extend(failure.clone());
                let death = desk.dead.entry(position).or_insert(Death {
                    open: true,
                    attempts: 0,
                    failures: Vec::new(),
                    first_seen_at: now,
                    died_at: now,
                });
                death.open = true;
                death.attempts += work.attempts;
                death.failures.extend(work.failures);
                death.died_at = now;
            }
        }
    }

    /// Sends open dead letters for which `passes` is true back to their groups.
    pub(super) fn retry_dead(&mut self, passes: impl Fn(&str, u64) -> bool) -> u64 {
        let now = self.now;
        let mut retried = 0;
        for (name, desk) in &mut self.groups {
            for (position, death) in &mut desk.dead {
                if death.open && passes(name, *position) {
                    death.open = false;
                    let event = &self.log[position].event;
                    desk.owed.insert(*position, Work::new(event, now));
                    retried += 1;
                }
            }
        }
        retried
    }

    /// Deletes dead letters that died before a time and are not being retried. Returns how many.
    pub(super) fn forget_dead(&mut self, before: Timestamp, reason: &str) -> u64 {
        let mut gone = 0;
        for desk in self.groups.values_mut() {
            let Desk {
                owed, dead, lapsed, ..
            } = desk;
            dead.retain(|position, death| {
                let goes = death.died_at < before && !owed.contains_key(position);
                gone += u64::from(goes);
                if goes && death.open {
                    lapsed.insert(*position, reason.to_owned());
                }
                !goes
            });
        }
        gone
    }

    /// Deletes open dead letters for which `passes` is true, and events that no group needs any more.
    pub(super) fn purge(&mut self, passes: impl Fn(&Kept, &Death) -> bool) -> Vec<u64> {
        let mut touched = Vec::new();
        for desk in self.groups.values_mut() {
            let log = &self.log;
            desk.dead.retain(|position, death| {
                let goes = death.open && passes(&log[position], death);
                if goes {
                    touched.push(*position);
                    desk.lapsed.insert(*position, LETTER_PURGED.to_owned());
                }
                !goes
            });
        }
        touched
    }

    /// The allowed answers for an event that is to be delivered to a group again. An engine need not have
    /// passed events that the group does not want.
    pub(super) fn may_redeliver(&self, group: &str, position: u64) -> Vec<Redelivery> {
        let Some(kept) = self.log.get(&position) else {
            return vec![Redelivery::Gone];
        };
        let desk = &self.groups[group];
        let dead = desk.dead.get(&position).is_some_and(|death| death.open);
        if dead || desk.owed.contains_key(&position) {
            return vec![Redelivery::Owed];
        }
        if desk.wants(&kept.event) && !desk.dropped.contains(&position) {
            return vec![Redelivery::Queued];
        }
        vec![Redelivery::Queued, Redelivery::Owed]
    }

    /// Notes that an event waits for a group again.
    pub(super) fn redelivered(&mut self, group: &str, position: u64) {
        let work = Work::new(&self.log[&position].event, self.now);
        let desk = self.groups.get_mut(group).unwrap();
        desk.owed.insert(position, work);
        desk.lapsed.remove(&position);
    }

    /// Whether an event is delivered out of log order: it may overtake others.
    pub(super) fn comes_at_once(&self, group: &str, position: u64) -> bool {
        let work = self.groups[group].owed.get(&position);
        work.is_some_and(|work| work.at_once)
    }

    /// The backlog of a group in a stream.
    pub(super) fn owed(&self, group: &str, stream: &Pattern) -> Vec<u64> {
        let owed = self.groups[group].owed.keys();
        let matches = |position: &&u64| stream.matches(self.log[*position].event.event_type());
        owed.filter(matches).copied().collect()
    }

    /// Notes that a group dropped an event, or returns why that is not allowed.
    pub(super) fn dropped(&mut self, group: &str, position: u64) -> Result<(), String> {
        let now = self.now;
        let desk = self.groups.get_mut(group).unwrap();
        let work = desk.owed.remove(&position);
        desk.dropped.insert(position);
        match work.ok_or("the group does not owe it")?.state {
            WorkState::Held { surely, .. } if now < surely => Err("it is in flight".into()),
            _ => Ok(()),
        }
    }

    /// Notes that an event was removed from the log.
    pub(super) fn removed(&mut self, position: u64) {
        if let Some(kept) = self.log.remove(&position) {
            self.ids.remove(&kept.event.id());
        }
        for desk in self.groups.values_mut() {
            desk.dead.remove(&position);
            desk.lapsed.remove(&position);
        }
    }

    /// Whether a group has yet to handle an event or has it as a dead letter.
    pub(super) fn is_needed(&self, position: u64) -> bool {
        self.groups.values().any(|desk| {
            desk.owed.contains_key(&position) || desk.dead.get(&position).is_some_and(|d| d.open)
        })
    }

    fn work(&mut self, group: &str, position: u64) -> &mut Work {
        let desk = self.groups.get_mut(group).unwrap();
        desk.owed.get_mut(&position).unwrap()
    }
}

impl Desk {
    fn wants(&self, event: &Event) -> bool {
        self.patterns.iter().any(|p| p.matches(event.event_type()))
    }

    /// Whether an earlier event with the same key is not settled.
    fn is_blocked(&self, position: u64) -> bool {
        let key = self.owed.get(&position).and_then(|work| work.key.as_ref());
        let Some(key) = key.filter(|_| self.ordered) else {
            return false;
        };
        let mut earlier = self.owed.range(..position);
        earlier.any(|(_, work)| work.key.as_ref() == Some(key))
    }

    /// Events that may be handed out now.
    pub(super) fn deliverable(&self, now: Timestamp) -> Vec<u64> {
        let due = self.owed.iter().filter(|(_, work)| match work.state {
            WorkState::Waiting { due } => due <= now,
            WorkState::Held { .. } => false,
        });
        let due = due.map(|(position, _)| *position);
        due.filter(|position| self.owed[position].at_once || !self.is_blocked(*position))
            .collect()
    }

    /// Whether an event must be handed out now to a consumer that has room. An event whose key has a later
    /// one in flight (a retried dead letter) may also wait for that.
    pub(super) fn must_deliver(&self, now: Timestamp) -> bool {
        self.deliverable(now).into_iter().any(|position| {
            let key = &self.owed[&position].key;
            let busy = self
                .owed
                .values()
                .any(|work| work.key == *key && matches!(work.state, WorkState::Held { .. }));
            !self.ordered || key.is_none() || !(busy || self.is_blocked(position))
        })
    }

    /// The states the engine may show for an event.
    pub(super) fn states(&self, position: u64, now: Timestamp) -> Vec<EventState> {
        match self.owed.get(&position) {
            Some(work) if work.is_uncertain(now) => {
                vec![EventState::Pending, EventState::Processing]
            }
            Some(Work {
                state: WorkState::Waiting { .. },
                failures,
                ..
            }) if failures.is_empty() => vec![EventState::Pending],
            // An expired lease is noticed only when a consumer of the group runs.
            Some(Work { failures, .. })
                if failures
                    .last()
                    .is_some_and(|f| f.kind == FailureKind::Crash) =>
            {
                vec![EventState::Pending, EventState::Processing]
            }
            Some(_) => vec![EventState::Processing],
            None if self.dead.get(&position).is_some_and(|d| d.open) => vec![EventState::Dlq],
            None => vec![EventState::Done],
        }
    }
}

impl Work {
    fn new(event: &Event, due: Timestamp) -> Self {
        Self {
            key: event.ordering_key().map(std::borrow::Cow::into_owned),
            attempts: 0,
            failures: Vec::new(),
            state: WorkState::Waiting { due },
            claimable_since: None,
            ghosts: 0,
            at_once: false,
            inherited: false,
        }
    }

    /// The running attempt ended without a verdict.
    fn crash(&mut self, now: Timestamp) {
        let failure = Failure::new(self.attempts, now, FailureKind::Crash, "");
        self.failures.push(failure);
        self.state = WorkState::Waiting { due: now };
        self.inherited = true;
    }

    /// Whether it certainly waits: neither fetched nor possibly claimed. The events of a dead process are in
    /// flight until another process finds out.
    pub(super) fn surely_waits(&self) -> bool {
        let waits = matches!(self.state, WorkState::Waiting { .. });
        waits && self.claimable_since.is_none() && self.ghosts == 0 && !self.inherited
    }

    /// Whether the engine may know something about it that the model cannot.
    pub(super) fn is_uncertain(&self, now: Timestamp) -> bool {
        let perhaps_ended = matches!(self.state, WorkState::Held { surely, .. } if surely <= now);
        perhaps_ended || self.claimable_since.is_some() || self.ghosts > 0
    }
}

/// The engine chooses the texts and times of crashes; everything else must agree.
pub(super) fn same_failures(a: &[Failure], b: &[Failure]) -> bool {
    let same = |(a, b): (&Failure, &Failure)| {
        let agree = a.attempt == b.attempt && a.kind == b.kind;
        agree && (a.kind == FailureKind::Crash || a == b)
    };
    a.len() == b.len() && a.iter().zip(b).all(same)
}
