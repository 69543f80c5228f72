//! What the test bus has seen: subscriptions, deliveries, outcomes and the log. Filled by the
//! [tap](super::tap).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use everbus_core::{
    Clock, Code, Cursor, Delivery, Error, EventId, Failure, GroupName, Lease, Log, ManualClock,
    Pattern, Position, Recorded, Result, SubscriptionInfo, Verdict,
};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::duplicator::is_copy;
use super::report::{Fate, Happened, Report};

/// How many events are read from the log at once.
const PAGE: usize = 1000;
/// The events that the bus publishes when a circuit breaker opens or closes.
const ALERTS: [&str; 2] = ["system.circuit_opened", "system.circuit_closed"];

pub(super) struct Journal {
    seen: Mutex<Seen>,
    /// Notified at every change.
    pub(super) changed: Notify,
    log: Arc<dyn Log>,
    everything: Vec<Pattern>,
    clock: ManualClock,
}

#[derive(Default)]
struct Seen {
    /// Grows with every change.
    version: u64,
    /// Running calls that change the engine.
    under_way: usize,
    subscriptions: BTreeMap<EventId, SubscriptionInfo>,
    /// Consumers that fetch.
    consumers: BTreeMap<GroupName, usize>,
    handed: HashMap<Lease, Handed>,
    happened: HashMap<(Position, GroupName), Happened>,
    /// Outcomes that the engine accepted, releases excluded.
    outcomes: u64,
    /// Final outcomes.
    ended: u64,
    alerts: u64,
    /// The events since the beginning of the test.
    events: Vec<Arc<Recorded>>,
    read_up_to: Cursor,
}

struct Handed {
    group: GroupName,
    record: Arc<Recorded>,
}

/// A running call that changes the engine. Its end is recorded, however it comes.
pub(super) struct UnderWay<'a>(&'a Journal);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.note(|seen| seen.under_way -= 1);
    }
}

/// A consumer that fetches: it is neither closed nor paused.
pub(super) struct Fetches(Arc<Journal>, GroupName);

impl Drop for Fetches {
    fn drop(&mut self) {
        self.0.note(|seen| {
            if let Some(consumers) = seen.consumers.get_mut(&self.1) {
                *consumers -= 1;
            }
        });
    }
}

impl Journal {
    /// Begins after the newest event of the log.
    pub(super) async fn begin(log: Arc<dyn Log>, clock: ManualClock) -> Result<Self> {
        let read_up_to = log.head().await?;
        Ok(Self {
            seen: Mutex::new(Seen {
                read_up_to,
                ..Seen::default()
            }),
            changed: Notify::new(),
            log,
            // The pattern `*` leaves out the system's own events.
            everything: vec![Pattern::new("*")?, Pattern::new("system.>")?],
            clock,
        })
    }

    /// Records a change.
    fn note<T>(&self, note: impl FnOnce(&mut Seen) -> T) -> T {
        let mut seen = self.seen.lock();
        let noted = note(&mut seen);
        seen.version += 1;
        drop(seen);
        self.changed.notify_waiters();
        noted
    }

    pub(super) fn under_way(&self) -> UnderWay<'_> {
        self.seen.lock().under_way += 1;
        UnderWay(self)
    }

    pub(super) fn declared(&self, subscriptions: &[SubscriptionInfo]) {
        self.note(|seen| {
            for info in subscriptions {
                seen.subscriptions.insert(info.id, info.clone());
            }
        });
    }

    pub(super) fn retracted(&self, subscription: EventId) {
        self.note(|seen| seen.subscriptions.remove(&subscription));
    }

    pub(super) fn fetches(self: &Arc<Self>, group: &GroupName) -> Fetches {
        self.note(|seen| *seen.consumers.entry(group.clone()).or_default() += 1);
        Fetches(self.clone(), group.clone())
    }

    pub(super) fn handed(&self, group: &GroupName, batch: &[Delivery]) {
        self.note(|seen| {
            for delivery in batch {
                let record = delivery.record.clone();
                if !is_copy(&delivery.lease) {
                    let happened = seen.happened_in(record.position, group);
                    happened.fate = Fate::Waiting;
                    happened.attempts = delivery.attempt;
                    happened.failures.clone_from(&delivery.failures);
                }
                let group = group.clone();
                let handed = Handed { group, record };
                seen.handed.insert(delivery.lease.clone(), handed);
            }
        });
    }

    pub(super) fn appended<'a>(&self, event_types: impl Iterator<Item = &'a str>) {
        let alerts = event_types.filter(|name| ALERTS.contains(name)).count() as u64;
        self.note(|seen| seen.alerts += alerts);
    }

    /// Records the engine's answers to settlements.
    pub(super) fn settled(&self, verdicts: &[(Lease, Verdict)], answers: &[Result<()>]) {
        let now = self.clock.now();
        self.note(|seen| {
            for ((lease, verdict), answer) in verdicts.iter().zip(answers) {
                let lost = answer.as_ref().is_err_and(|e| e.code() == Code::LeaseLost);
                if answer.is_err() && !lost {
                    // The lease is still held.
                    continue;
                }
                let Some(handed) = seen.handed.remove(lease).filter(|_| !lost) else {
                    continue;
                };
                seen.outcomes += u64::from(!matches!(verdict, Verdict::Release { .. }));
                seen.ended += u64::from(is_end(verdict));
                let happened = seen.happened_in(handed.record.position, &handed.group);
                happened.failures.extend(failure_of(verdict).cloned());
                if is_copy(lease) {
                    continue;
                }
                happened.fate = match verdict {
                    Verdict::Ack => Fate::Handled,
                    Verdict::Skip { reason } => Fate::Skipped {
                        reason: reason.clone(),
                    },
                    Verdict::Retry { after, .. } => Fate::Retrying {
                        due_at: now.plus(*after),
                    },
                    Verdict::Dead { .. } => Fate::DeadLettered,
                    Verdict::Release { .. } => Fate::Waiting,
                };
                if matches!(verdict, Verdict::Release { .. }) {
                    // Released: this was no attempt.
                    happened.attempts = happened.attempts.saturating_sub(1);
                }
            }
        });
    }

    /// Reads the new events of the log.
    pub(super) async fn catch_up(&self) -> Result<()> {
        loop {
            let after = self.seen.lock().read_up_to.clone();
            let (found, reached) = self.log.read(after, self.everything.clone(), PAGE).await?;
            let full = found.len() == PAGE;
            let mut seen = self.seen.lock();
            // Another task may have read the same events meanwhile.
            let last = seen.read_up_to.clone();
            let new = found
                .into_iter()
                .filter(|record| !last.covers(record.position));
            seen.events.extend(new);
            seen.read_up_to.advance_to(&reached);
            if !full {
                return Ok(());
            }
        }
    }

    /// The events since the beginning of the test.
    pub(super) fn events(&self) -> Vec<Arc<Recorded>> {
        self.seen.lock().events.clone()
    }

    /// The number of changes; `None` while a call that changes the engine is running.
    pub(super) fn version(&self) -> Option<u64> {
        let seen = self.seen.lock();
        (seen.under_way == 0).then_some(seen.version)
    }

    /// The groups with handlers here, and their patterns.
    pub(super) fn groups(&self) -> BTreeMap<GroupName, Vec<Pattern>> {
        let mut groups = BTreeMap::<_, Vec<_>>::new();
        for info in self.seen.lock().subscriptions.values() {
            let patterns = groups.entry(info.group.clone()).or_default();
            patterns.push(info.pattern.clone());
        }
        groups
    }

    /// The names of the handlers.
    pub(super) fn handlers(&self) -> BTreeSet<String> {
        let seen = self.seen.lock();
        let infos = seen.subscriptions.values();
        infos.map(|info| info.name.clone()).collect()
    }

    pub(super) fn consumes(&self, group: &GroupName) -> bool {
        self.seen
            .lock()
            .consumers
            .get(group)
            .is_some_and(|n| *n > 0)
    }

    /// Final outcomes.
    pub(super) fn ended(&self) -> u64 {
        self.seen.lock().ended
    }

    /// Outcomes that the engine accepted, and alerts that were published.
    pub(super) fn counts(&self) -> (u64, u64) {
        let seen = self.seen.lock();
        (seen.outcomes, seen.alerts)
    }

    /// The events that a group holds now, for a message.
    pub(super) fn held_by(&self, group: &GroupName) -> Vec<String> {
        let seen = self.seen.lock();
        let held = seen.handed.values().filter(|handed| handed.group == *group);
        held.map(|handed| {
            let event = &handed.record.event;
            format!("{} {}", event.event_type(), event.display_id())
        })
        .collect()
    }

    /// What happened to an event in every subscribed group.
    pub(super) fn report(&self, id: EventId, position: Position) -> Result<Report> {
        let seen = self.seen.lock();
        let mut events = seen.events.iter();
        let Some(record) = events.find(|record| record.position == position) else {
            let what = format!("the event {id} was published before this test bus began");
            return Err(Error::new(Code::NotFound, what));
        };
        let event_type = record.event.event_type();
        let wanting: BTreeSet<_> = seen
            .subscriptions
            .values()
            .filter(|info| !info.after.covers(position) && info.pattern.matches(event_type))
            .map(|info| info.group.clone())
            .collect();
        let known = seen.happened.iter().filter(|((at, _), _)| *at == position);
        let mut groups: Vec<Happened> = known.map(|(_, happened)| happened.clone()).collect();
        let missing = wanting
            .into_iter()
            .filter(|group| !seen.happened.contains_key(&(position, group.clone())));
        groups.extend(missing.map(Happened::nothing).collect::<Vec<_>>());
        groups.sort_by(|a, b| a.group.cmp(&b.group));
        Ok(Report {
            id,
            position,
            event_type: event_type.to_owned(),
            groups,
        })
    }

    /// What happened to the newest event with this id.
    pub(super) fn report_of(&self, id: EventId) -> Option<Report> {
        let mut events = self.events().into_iter().rev();
        let record = events.find(|record| record.event.id() == id)?;
        self.report(id, record.position).ok()
    }
}

impl Seen {
    fn happened_in(&mut self, position: Position, group: &GroupName) -> &mut Happened {
        self.happened
            .entry((position, group.clone()))
            .or_insert_with(|| Happened::nothing(group.clone()))
    }
}

impl Happened {
    fn nothing(group: GroupName) -> Self {
        Self {
            group,
            fate: Fate::Waiting,
            attempts: 0,
            failures: Vec::new(),
        }
    }
}

fn is_end(verdict: &Verdict) -> bool {
    !matches!(verdict, Verdict::Retry { .. } | Verdict::Release { .. })
}

fn failure_of(verdict: &Verdict) -> Option<&Failure> {
    match verdict {
        Verdict::Retry { failure, .. } => Some(failure),
        Verdict::Dead { failure } => failure.as_ref(),
        _ => None,
    }
}
