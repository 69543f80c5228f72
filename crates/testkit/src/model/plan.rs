//! The plan: random operations on an engine, each mirrored on the model and compared.

use std::collections::BTreeMap;
use std::time::Duration;

use everbus_core::{
    Clock, Code, Consumer, Cursor, Deduplication, Delivery, Event, GroupSpec, Retention,
    Settlement, StartFrom, Verdict, letter_kept_for,
};

use super::Random;
use super::oracle::{Hold, LEASE, Oracle};
use crate::conformance::needs::{EXACT_ATTEMPTS, FENCING, LOG, LOOKUP, ONE_LOG};
use crate::conformance::stage::{event, options, pattern, spec};
use crate::conformance::{Harness, Outcome, Stage, Time};

pub(super) const ROOM: usize = 6;
/// How many events some consumers run at once.
const FEW: usize = 2;
pub(super) const GROUPS: [(&str, &[&str]); 6] = [
    ("", &["*"]),
    ("some", &["a.*", "c"]),
    ("ordered", &["*"]),
    ("ordered too", &["*"]),
    ("system", &["system.>", "b.x"]),
    ("late", &["*"]),
];
const TYPES: [&str; 5] = ["a.x", "a.y", "b.x", "c", "system.note"];
pub(super) const PATIENCE: Duration = Duration::from_secs(120);

/// Runs one random plan and compares the engine with the model throughout. Panics on a difference,
/// after printing the seed and the last steps. The model has one log.
pub async fn run_model<H: Harness>(harness: H, seed: u64, steps: usize) -> Outcome {
    let needs = [&ONE_LOG, &LOG, &LOOKUP, &FENCING, &EXACT_ATTEMPTS];
    let stage = Stage::open(harness, Time::Virtual, &needs).await?;
    let mut plan = Plan::new(stage, seed);
    for _ in 0..steps {
        plan.step().await;
    }
    plan.drain().await;
    plan.stage.passed()
}

/// A consumer, and how many deliveries it may still count as its own.
pub(super) struct Seat {
    pub(super) number: usize,
    pub(super) consumer: Box<dyn Consumer>,
    /// It may certainly hold this many at a time.
    places: usize,
}

/// A delivery that was fetched; its lease may be over by now.
pub(super) struct Fetched {
    pub(super) group: &'static str,
    seat: usize,
    pub(super) delivery: Delivery,
}

pub(super) struct Plan<H: Harness> {
    pub(super) stage: Stage<H>,
    pub(super) oracle: Oracle,
    pub(super) random: Random,
    trace: Trace,
    pub(super) seats: BTreeMap<&'static str, Vec<Seat>>,
    next_seat: usize,
    pub(super) fetched: Vec<Fetched>,
}

/// The steps so far; shown when the test fails.
pub(super) struct Trace {
    seed: u64,
    steps: Vec<String>,
}

impl Drop for Trace {
    #[allow(
        clippy::print_stderr,
        reason = "this is what a person needs to reproduce the failure"
    )]
    fn drop(&mut self) {
        if std::thread::panicking() {
            let from = self.steps.len().saturating_sub(40);
            eprintln!("the last steps of {}:", self.steps.len());
            self.steps[from..]
                .iter()
                .for_each(|step| eprintln!("  {step}"));
            eprintln!("reproduce with EVERBUS_SEED={}", self.seed);
        }
    }
}

impl<H: Harness> Plan<H> {
    fn new(stage: Stage<H>, seed: u64) -> Self {
        let oracle = Oracle::new(stage.clock.now(), stage.harness().claims_ahead());
        Self {
            oracle,
            stage,
            random: Random::new(seed),
            trace: Trace {
                seed,
                steps: Vec::new(),
            },
            seats: BTreeMap::new(),
            next_seat: 0,
            fetched: Vec::new(),
        }
    }

    pub(super) fn note(&mut self, step: &str) {
        let number = self.trace.steps.len() + 1;
        self.trace.steps.push(format!("{number}: {step}"));
    }

    async fn step(&mut self) {
        match self.random.below(111) {
            0..22 => self.append().await,
            22..48 => self.fetch().await,
            48..76 => self.settle().await,
            76..80 => self.extend().await,
            80..87 => self.advance().await,
            87..90 => self.declare().await,
            90..93 => self.retry_dead().await,
            93..94 => self.purge().await,
            94..96 => self.leave().await,
            96..98 => self.end_process().await,
            98..100 => self.prune().await,
            100..102 => self.replace_dead().await,
            102..106 => self.drop_oldest().await,
            _ => self.redeliver().await,
        }
        self.oracle.note_claimable();
        let positions: Vec<u64> = self.oracle.log.keys().copied().collect();
        for _ in 0..3 {
            if let Some(&position) = self.random.pick(&positions) {
                self.compare(position).await;
            }
        }
        if self.trace.steps.len().is_multiple_of(50) {
            self.compare_all().await;
        }
    }

    fn new_event(&mut self) -> Event {
        let event_type = *self.random.pick(&TYPES).unwrap();
        let builder = Event::builder(event_type).json(&self.random.below(1000));
        let builder = match self.random.below(4) {
            0 => builder.key("k0"),
            1 => builder.key("k1"),
            2 => builder.entity("TASK", "1"),
            _ => builder,
        };
        builder.build().unwrap()
    }

    async fn append(&mut self) {
        let mut batch = Vec::new();
        let mut reused = false;
        let knows_ids = self.stage.capabilities().deduplication != Deduplication::None;
        for _ in 0..=self.random.below(4) {
            let known: Vec<u64> = self.oracle.log.keys().copied().collect();
            let known = self.random.pick(&known).copied().filter(|_| knows_ids);
            match (self.random.below(25), known) {
                (0..2, Some(known)) => batch.push(self.oracle.log[&known].event.clone()),
                (2, Some(known)) => {
                    let id = self.oracle.log[&known].event.id();
                    let other = Event::builder("a.x").id(id).json("another body");
                    batch.push(other.build().unwrap());
                    reused = true;
                }
                (3, _) if knows_ids && !batch.is_empty() => {
                    let again: Event = batch[0].clone();
                    batch.push(again);
                }
                _ => batch.push(self.new_event()),
            }
        }
        let types: Vec<&str> = batch.iter().map(Event::event_type).collect();
        self.note(&format!(
            "append {types:?}, head {}, reused {reused}",
            self.oracle.head
        ));
        if reused && !self.stage.capabilities().atomic_batch {
            return;
        }
        let answers = self.stage.broker().append(batch.clone()).await;
        if reused {
            assert_eq!(answers.unwrap_err().code(), Code::IdReused);
            return;
        }
        let answers = answers.unwrap();
        assert_eq!(answers.len(), batch.len());
        for (event, answer) in batch.iter().zip(answers) {
            let answer = answer.unwrap();
            assert_eq!(answer.id, event.id());
            match self.oracle.ids.get(&event.id()) {
                Some(first) => {
                    assert!(
                        answer.duplicate && answer.position.place() == *first,
                        "{answer:?}"
                    );
                }
                None => {
                    assert!(!answer.duplicate, "{answer:?}");
                    self.oracle
                        .appended(event, answer.position.place(), answer.received_at);
                }
            }
        }
    }

    async fn declare(&mut self) {
        let undeclared = GROUPS
            .iter()
            .filter(|(n, _)| !self.oracle.groups.contains_key(*n));
        let undeclared: Vec<_> = undeclared.copied().collect();
        let Some(&(group, patterns)) = self.random.pick(&undeclared) else {
            return;
        };
        // The unnamed group always begins at the start of the log.
        let first = group != "late" && (self.random.one_in(2) || group.is_empty());
        self.note(&format!("declare {group:?}, first: {first}"));
        let ordered = group.starts_with("ordered");
        let declared = GroupSpec {
            ordered,
            start_from: if first {
                StartFrom::First
            } else {
                StartFrom::New
            },
            ..spec(group, patterns)
        };
        self.stage.broker().declare(declared).await.unwrap();
        let patterns = patterns.iter().map(|text| pattern(text)).collect();
        self.oracle.declared(group, ordered, patterns, first);
    }

    pub(super) fn random_group(&mut self) -> Option<&'static str> {
        let groups = GROUPS
            .iter()
            .filter(|(n, _)| self.oracle.groups.contains_key(*n));
        let groups: Vec<&'static str> = groups.map(|(n, _)| *n).collect();
        self.random.pick(&groups).copied()
    }

    pub(super) async fn attend(&mut self, group: &'static str, prefetch: usize) {
        let mut options = options().prefetch(prefetch).lease(LEASE);
        options.concurrency = self.random.one_in(2).then_some(FEW);
        let places = options.concurrency.unwrap_or(prefetch);
        let consumer = self.stage.consumer_with(group, options).await;
        self.next_seat += 1;
        let number = self.next_seat;
        self.seats.entry(group).or_default().push(Seat {
            number,
            consumer,
            places,
        });
        self.oracle.attended(group, true);
    }

    async fn fetch(&mut self) {
        let Some(group) = self.random_group() else {
            return self.declare().await;
        };
        let seats = self.seats.get(group).map_or(0, Vec::len);
        if seats == 0 || (seats == 1 && self.random.one_in(10)) {
            self.attend(group, ROOM).await;
        }
        let max = 1 + self.random.below(4);
        let now = self.oracle.now;
        let desk = &self.oracle.groups[group];
        // Events after a crash may be handed out one at a time, so they are only demanded at the end.
        let inherited = self
            .oracle
            .groups
            .values()
            .any(|d| d.owed.values().any(|w| w.inherited));
        let must = desk.must_deliver(now)
            && !(self.oracle.ahead && (inherited || self.oracle.may_isolate()));
        let (full, free): (Vec<&Seat>, Vec<&Seat>) = self.seats[group]
            .iter()
            .partition(|seat| self.load(seat.number) >= seat.places);
        // A consumer without a concurrency limit may have more reserved.
        let room = !free.is_empty() && full.iter().all(|seat| seat.places == ROOM);
        self.note(&format!(
            "fetch {max} from {group:?}, must {must}, room {room}"
        ));
        let patience = if must && room {
            PATIENCE
        } else {
            Duration::from_millis(2)
        };
        let began = tokio::time::Instant::now();
        loop {
            // Any consumer of the group may be the one that has them.
            for at in 0..self.seats[group].len() {
                let seat = &mut self.seats.get_mut(group).unwrap()[at];
                let turn = patience.min(Duration::from_millis(20));
                let Ok(batch) = tokio::time::timeout(turn, seat.consumer.fetch(max)).await else {
                    continue;
                };
                let (number, batch) = (seat.number, batch.unwrap());
                assert!((1..=max).contains(&batch.len()), "between 1 and max");
                self.take_note(group, number, batch);
                return;
            }
            if began.elapsed() >= patience {
                assert!(
                    !(must && room),
                    "nothing came: {:?}",
                    self.oracle.groups[group]
                );
                return;
            }
        }
    }

    /// How many deliveries a consumer may count as unsettled.
    fn load(&self, seat: usize) -> usize {
        self.fetched.iter().filter(|f| f.seat == seat).count()
    }

    pub(super) fn take_note(&mut self, group: &'static str, seat: usize, batch: Vec<Delivery>) {
        let mut fresh = 0;
        for delivery in batch {
            let position = delivery.record.position.place();
            self.note(&format!("  got {position}, attempt {}", delivery.attempt));
            let seen = self
                .fetched
                .iter()
                .any(|f| f.delivery.lease == delivery.lease);
            assert!(!seen, "a lease came twice: {:?}", delivery.lease);
            if let Err(why) = self.oracle.deliver(group, &delivery) {
                panic!("{group:?} was given {position}, but {why}: {delivery:?}");
            }
            let in_turn = !self.oracle.ahead && !self.oracle.comes_at_once(group, position);
            if delivery.attempt == 1 && delivery.failures.is_empty() && in_turn {
                assert!(position > fresh, "out of order");
                fresh = position;
            }
            self.fetched.push(Fetched {
                group,
                seat,
                delivery,
            });
        }
        let held = self.fetched.iter().filter(|f| {
            f.seat == seat && self.oracle.hold(f.group, &f.delivery.lease) == Hold::Yes
        });
        assert!(held.count() <= ROOM, "more than the prefetch");
    }

    async fn settle(&mut self) {
        if self.fetched.is_empty() {
            return self.fetch().await;
        }
        let at = self.random.below(self.fetched.len());
        let (group, delivery) = (self.fetched[at].group, self.fetched[at].delivery.clone());
        let failure = self.stage.failure(&delivery);
        let after = Duration::from_millis(self.random.below(8) as u64 * 1500);
        let verdict = match self.random.below(8) {
            0..3 => Verdict::Ack,
            3 => Verdict::Skip {
                reason: "stale".into(),
            },
            4 | 5 => Verdict::Retry { after, failure },
            6 => Verdict::Dead {
                failure: Some(failure).filter(|_| !self.random.one_in(5)),
            },
            _ => Verdict::Release { after },
        };
        let follow_ups: Vec<Event> = if self.random.one_in(8) {
            vec![event("c")]
        } else {
            Vec::new()
        };
        let inbox = self.stage.engine().inbox.is_some() && self.random.one_in(2);
        let position = delivery.record.position.place();
        let hold = self.oracle.hold(group, &delivery.lease);
        self.note(&format!(
            "settle {position} of {group:?} ({hold:?}): {verdict:?}"
        ));
        let mut settlement = Settlement::new(delivery.lease.clone(), verdict.clone());
        settlement.follow_ups = follow_ups.clone();
        settlement.inbox = inbox;
        let answer = self.stage.settle_with(settlement).await;
        if self.holds(answer, hold, group, position) {
            self.oracle.settled(group, position, &verdict);
            // An event that was handled before and came again is acked, and has no effect again.
            let id = delivery.record.event.id();
            let again = inbox
                && verdict == Verdict::Ack
                && !self.oracle.handled.insert((group.to_owned(), id));
            for event in &follow_ups {
                let found = self.stage.lookup().find(event.id()).await.unwrap();
                assert_eq!(found.len(), usize::from(!again), "the follow-up is there");
                for record in found {
                    let (position, received_at) = (record.position.place(), record.received_at);
                    self.oracle.appended(event, position, received_at);
                }
            }
            if matches!(verdict, Verdict::Dead { .. }) {
                self.note_notice(group, &delivery).await;
            }
        } else {
            for event in &follow_ups {
                let found = self.stage.lookup().find(event.id()).await.unwrap();
                assert!(found.is_empty(), "a follow-up of a lost lease");
            }
        }
        let head = self.stage.log().head().await.unwrap();
        assert_eq!(
            head,
            Cursor::seq(self.oracle.head),
            "nothing else was appended"
        );
        // A stale delivery is sometimes kept, to be tried again.
        if !self.random.one_in(6) {
            self.fetched.swap_remove(at);
        }
    }

    /// Whether the engine accepted it, which must agree with the model's knowledge of the lease.
    fn holds(
        &mut self,
        answer: everbus_core::Result<()>,
        hold: Hold,
        group: &str,
        at: u64,
    ) -> bool {
        match (answer, hold) {
            (Ok(()), Hold::Yes | Hold::Perhaps) => true,
            (Ok(()), Hold::No) => panic!("a lost lease on {at} of {group:?} was accepted"),
            (Err(error), hold) => {
                assert_eq!(error.code(), Code::LeaseLost);
                assert_ne!(hold, Hold::Yes, "a lease on {at} of {group:?} was refused");
                if hold == Hold::Perhaps {
                    self.oracle.lost(group, at);
                }
                false
            }
        }
    }

    async fn extend(&mut self) {
        let fetched = self.fetched.len();
        let at = self.random.below(fetched);
        let Some(Fetched {
            group, delivery, ..
        }) = self.fetched.get(at)
        else {
            return;
        };
        let (group, lease) = (*group, delivery.lease.clone());
        let by = LEASE * (1 + self.random.below(3) as u32);
        let hold = self.oracle.hold(group, &lease);
        self.note(&format!(
            "extend {} of {group:?} ({hold:?}) by {by:?}",
            lease.position()
        ));
        let answer = self.stage.broker().extend(vec![lease.clone()], by).await;
        let answer = answer.unwrap().remove(0);
        if self.holds(answer, hold, group, lease.position().place()) {
            self.oracle.extended(group, lease.position().place(), by);
        }
    }

    async fn advance(&mut self) {
        let millis = match self.random.below(6) {
            0 => 11_000 + self.random.below(30_000),
            _ => self.random.below(4000),
        };
        let by = Duration::from_millis(millis as u64);
        self.note(&format!("advance {by:?}"));
        self.stage.advance(by).await;
        self.oracle.advance(by);
    }

    /// A group's consumers leave; they can still settle what they fetched.
    async fn leave(&mut self) {
        let Some(group) = self.random_group() else {
            return;
        };
        let closes = self.random.one_in(2);
        self.note(&format!("leave {group:?}, close: {closes}"));
        for seat in self.seats.remove(group).unwrap_or_default() {
            if closes {
                seat.consumer.close().await.unwrap();
            } else {
                drop(seat.consumer);
            }
        }
        self.oracle.attended(group, false);
    }

    async fn end_process(&mut self) {
        if !self.stage.harness().survives_restart() {
            return;
        }
        let crash = self.random.one_in(2);
        self.note(&format!("end the process, crash: {crash}"));
        self.seats.clear();
        if crash {
            self.stage.crash().await;
        } else {
            self.stage.restart().await;
        }
        self.oracle.process_ended();
        self.compare_all().await;
    }

    /// Retention may remove events that are over the limits and that no group needs, and nothing else.
    async fn prune(&mut self) {
        let Ok(maintenance) = self.stage.engine().maintenance() else {
            return;
        };
        let keep = self.random.below(40);
        let letters = self.random.one_in(2);
        let letters = letters.then(|| Duration::from_secs(1 + self.random.below(60) as u64));
        let retention = Retention {
            max_len: Some(keep as u64),
            dead_letters: letters,
            ..Retention::default()
        };
        let over = self.oracle.log.len().saturating_sub(keep);
        let foretold = maintenance.preview(retention.clone()).await.unwrap();
        let pruned = maintenance.prune(retention).await.unwrap();
        self.note(&format!("prune to {keep}, letters {letters:?}: {pruned:?}"));
        assert_eq!(foretold, pruned.outcome(), "as foretold");
        let forgotten = letters.map_or(0, |age| {
            let before = self.oracle.now.minus(age);
            self.oracle.forget_dead(before, &letter_kept_for(age))
        });
        if self.stage.engine().dead_letters.is_some() {
            assert_eq!(pruned.dead_letters, forgotten, "dead letters by their age");
        }
        let positions: Vec<u64> = self.oracle.log.keys().copied().collect();
        let mut removed = 0;
        for (index, position) in positions.into_iter().enumerate() {
            if self.is_kept(position).await {
                continue;
            }
            assert!(
                !self.oracle.is_needed(position),
                "{position} is needed and gone"
            );
            assert!(index < over, "{position} is within the limit and gone");
            self.oracle.removed(position);
            removed += 1;
        }
        // The model forgets an event when a purge may take it; the engine may have kept it until now.
        assert!(
            pruned.removed >= removed,
            "{removed} are gone, {pruned:?} admitted"
        );
        if forgotten > 0 {
            self.compare_all().await;
        }
    }
}
