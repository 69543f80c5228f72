//! The ledger: what victims reported, that is acknowledged ids and finished handlers.
//!
//! It is kept in a process that is never killed. A line that a kill cut off does not count: the caller had no
//! answer yet, and the handler had not returned.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use everbus_core::EventId;

use super::GROUPS;
use super::content::Content;
use super::outboxes::Which;
use super::retain::Policy;

/// How long acknowledgements may still arrive after a power cut. A process whose disk is gone gets no new
/// acknowledgements; those on their way have arrived by then, even if the process or its listener is starved.
pub const LAST_WORDS: Duration = Duration::from_secs(8);

/// Everything that victims reported about one file.
#[derive(Debug, Default)]
pub struct Ledger {
    /// Every acknowledged id with the position its receipt named.
    acked: HashMap<EventId, u64>,
    /// How often all handlers of a group finished an event.
    finished: HashMap<(usize, EventId), u32>,
    /// Handlers that finished in an attempt whose later handlers have not.
    partly: HashSet<(u32, usize, EventId, u32, usize)>,
    finished_by: HashSet<(u32, usize, EventId)>,
    twice: Vec<(u32, usize, EventId)>,
    last_of_key: HashMap<(u32, usize, String), u64>,
    out_of_order: Vec<(u32, usize, EventId, String)>,
    stopped: HashSet<u32>,
    /// When the power was cut.
    off_since: Option<Instant>,
    /// Acknowledgements received since then.
    last_words: HashSet<EventId>,
    /// Events committed to outboxes, in order.
    outbox: Vec<(Which, EventId)>,
    in_outbox: HashSet<EventId>,
    /// The retention policy of the file, if it has one.
    retention: Option<Policy>,
    faults: Vec<String>,
    errors: Vec<String>,
}

impl Ledger {
    /// Records one line of a victim, without its line break.
    pub fn hear(&mut self, victim: u32, line: &str) {
        let understood = match line.split_once(' ') {
            Some(("A", rest)) => self.acknowledged(rest),
            Some(("H", rest)) => self.handled(victim, rest),
            Some(("E", rest)) => {
                self.errors.push(format!("victim {victim}: {rest}"));
                Some(())
            }
            _ => None,
        };
        if understood.is_none() {
            self.faults.push(format!(
                "victim {victim} said {line:?}, which means nothing"
            ));
        }
    }

    /// `A id position`: the publish of this id returned.
    fn acknowledged(&mut self, rest: &str) -> Option<()> {
        let (id, position) = rest.split_once(' ')?;
        let (id, position): (EventId, u64) = (id.parse().ok()?, position.parse().ok()?);
        if let Some(since) = self.off_since {
            if since.elapsed() > LAST_WORDS {
                self.faults.push(format!(
                    "{id} was acknowledged at {position}, {:?} after the power was cut",
                    since.elapsed()
                ));
            }
            self.last_words.insert(id);
            return Some(());
        }
        if let Some(first) = self.acked.insert(id, position)
            && first != position
        {
            self.faults.push(format!(
                "{id} was acknowledged at {first} and again at {position}"
            ));
        }
        Some(())
    }

    /// `H group handler id position attempt`: this handler is about to return success.
    fn handled(&mut self, victim: u32, rest: &str) -> Option<()> {
        let mut words = rest.split(' ');
        let group: usize = words.next()?.parse().ok()?;
        let handler: usize = words.next()?.parse().ok()?;
        let id: EventId = words.next()?.parse().ok()?;
        let position: u64 = words.next()?.parse().ok()?;
        let attempt: u32 = words.next()?.parse().ok()?;
        if handler > 0
            && !self
                .partly
                .remove(&(victim, group, id, attempt, handler - 1))
        {
            self.faults.push(format!(
                "handler {handler} of group {group} ran for {id} before the one ahead of it"
            ));
        }
        if handler + 1 < GROUPS.get(group)?.handlers.len() {
            self.partly.insert((victim, group, id, attempt, handler));
            return Some(());
        }
        *self.finished.entry((group, id)).or_default() += 1;
        if !self.finished_by.insert((victim, group, id)) {
            self.twice.push((victim, group, id));
        }
        if GROUPS[group].ordered
            && let Some(key) = Content::of(id).key
        {
            let last = self
                .last_of_key
                .insert((victim, group, key.clone()), position);
            if last.is_some_and(|last| last >= position) {
                let what = format!("{key}: {position} after {last:?}");
                self.out_of_order.push((victim, group, id, what));
            }
        }
        Some(())
    }

    /// The power is about to be cut: acknowledgements from now on do not count.
    ///
    /// A machine without power would send nothing. Here the process lives on for a moment, and the one
    /// `fdatasync` that is running when ext4 is shut down may return success although its data is gone: a
    /// loop of `pwrite` and `fdatasync` without any database shows the same, in about one outage of fifteen
    /// (Linux 6.18). An `fdatasync` that begins later fails, so an acknowledgement [long after](LAST_WORDS)
    /// means that a failed sync was ignored.
    pub fn power_goes(&mut self) {
        self.off_since = Some(Instant::now());
    }

    /// The power is back, and the process that ran during the outage is gone. Returns the ids it acknowledged
    /// meanwhile.
    pub fn power_is_back(&mut self) -> HashSet<EventId> {
        self.off_since = None;
        std::mem::take(&mut self.last_words)
    }

    /// This victim was stopped past its leases: what it did since may repeat what others did.
    pub fn was_stopped(&mut self, victim: u32) {
        self.stopped.insert(victim);
    }

    /// These events were committed to an outbox, in this order.
    pub fn committed(&mut self, which: Which, ids: &[EventId]) {
        self.outbox.extend(ids.iter().map(|id| (which, *id)));
        self.in_outbox.extend(ids);
    }

    /// Events committed to outboxes, in order.
    pub fn outbox(&self) -> &[(Which, EventId)] {
        &self.outbox
    }

    /// Whether a relay may have published an event, and so more than once. A repeated publish sends its dead
    /// letters back, as a retry does.
    pub fn was_relayed(&self, id: EventId) -> bool {
        self.in_outbox.contains(&id)
    }

    /// From now on events may be removed by this policy.
    pub fn retains(&mut self, policy: Policy) {
        self.retention = Some(policy);
    }

    /// The retention policy of the file, if it has one.
    pub fn retention(&self) -> Option<Policy> {
        self.retention
    }

    /// The acknowledged ids and their positions.
    pub fn acked(&self) -> &HashMap<EventId, u64> {
        &self.acked
    }

    /// How often a group finished an event.
    pub fn finished(&self, group: usize, id: EventId) -> u32 {
        self.finished.get(&(group, id)).copied().unwrap_or(0)
    }

    /// How often a group finished an event that it had finished before.
    pub fn duplicates(&self) -> u64 {
        self.finished.values().map(|n| u64::from(n - 1)).sum()
    }

    /// Errors that victims got from a publish since this was last asked.
    pub fn take_errors(&mut self) -> Vec<String> {
        std::mem::take(&mut self.errors)
    }

    /// Contradictions in the victims' reports, whatever the file contains.
    pub fn faults(&self) -> Vec<String> {
        self.faults_unless(|_, _| false)
    }

    /// As [`faults`](Self::faults), without the order of the events for which `free` is true.
    pub(crate) fn faults_unless(&self, free: impl Fn(usize, EventId) -> bool) -> Vec<String> {
        let mut faults = self.faults.clone();
        for (victim, group, id) in &self.twice {
            if !self.stopped.contains(victim) {
                faults.push(format!(
                    "victim {victim} lived on and was given {id} twice in group {group}"
                ));
            }
        }
        for (victim, group, id, what) in &self.out_of_order {
            if !self.stopped.contains(victim) && !free(*group, *id) {
                faults.push(format!("victim {victim} handled {what}, out of order"));
            }
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chaos::content::Ids;

    fn an_id() -> EventId {
        Ids::new(3).next().unwrap()
    }

    #[test]
    fn an_attempt_counts_when_its_last_handler_finished() {
        let (mut ledger, id) = (Ledger::default(), an_id());
        ledger.hear(1, &format!("A {id} 5"));
        ledger.hear(1, &format!("H 0 0 {id} 5 1"));
        assert_eq!(ledger.finished(0, id), 0);
        ledger.hear(1, &format!("H 0 1 {id} 5 1"));
        assert_eq!((ledger.finished(0, id), ledger.duplicates()), (1, 0));
        ledger.hear(2, &format!("H 0 0 {id} 5 2"));
        ledger.hear(2, &format!("H 0 1 {id} 5 2"));
        assert_eq!(ledger.duplicates(), 1, "another process did it again");
        assert!(ledger.faults().is_empty(), "{:?}", ledger.faults());
        assert_eq!(ledger.acked()[&id], 5);
    }

    #[test]
    fn what_cannot_be_is_a_fault() {
        let id = an_id();
        for lines in [
            vec!["nonsense".to_owned()],
            vec![format!("A {id} 5"), format!("A {id} 6")],
            vec![format!("H 0 1 {id} 5 1")],
            vec![format!("H 1 0 {id} 5 1"), format!("H 1 0 {id} 5 2")],
        ] {
            let mut ledger = Ledger::default();
            lines.iter().for_each(|line| ledger.hear(1, line));
            assert_eq!(ledger.faults().len(), 1, "{lines:?}");
        }
    }

    #[test]
    fn what_is_said_without_power_is_not_acknowledged() {
        let (mut ledger, id) = (Ledger::default(), an_id());
        ledger.power_goes();
        ledger.hear(1, &format!("A {id} 5"));
        assert!(ledger.acked().is_empty() && ledger.faults().is_empty());
        ledger.off_since = Instant::now().checked_sub(2 * LAST_WORDS);
        ledger.hear(1, &format!("A {id} 5"));
        assert_eq!(ledger.faults().len(), 1, "a failed sync was ignored");
        ledger.power_is_back();
        ledger.hear(2, &format!("A {id} 9"));
        assert_eq!(ledger.acked()[&id], 9);
    }

    #[test]
    fn a_key_that_goes_back_is_a_fault_unless_the_process_was_stopped() {
        let of_one_key: Vec<EventId> = Ids::new(9)
            .filter(|id| Content::of(*id).key.as_deref() == Some("key-1"))
            .take(2)
            .collect();
        let mut ledger = Ledger::default();
        ledger.hear(4, &format!("H 2 0 {} 8 1", of_one_key[0]));
        ledger.hear(4, &format!("H 2 0 {} 7 1", of_one_key[1]));
        assert_eq!(ledger.faults().len(), 1);
        ledger.was_stopped(4);
        assert!(ledger.faults().is_empty());
    }
}
