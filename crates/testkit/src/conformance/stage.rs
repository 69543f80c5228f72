//! The base of every scenario: an opened engine, a clock that is moved by hand, and short functions to
//! publish, take and settle.

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use everbus_core::{
    Appended, Broker, Capabilities, Clock, Code, ConsumeOptions, Consumer, DeadLetter,
    DeadLetterFilter, DeadLetters, Delivery, Engine, Event, EventKey, EventState, Failure,
    FailureKind, GroupInfo, GroupName, GroupSpec, GroupState, Log, Lookup, ManualClock,
    PageRequest, Pattern, Position, Result, SettledOutcome, Settlement, StartFrom,
    SubscriptionInfo, SubscriptionSpec, SystemClock, Timestamp, Verdict,
};

use super::needs::{CLOCK, Judged, LOOKUP, Need, Offer, STATES};
use super::{Harness, NotOffered, Outcome, Passed};

/// How long to wait for something that must happen, also on a slow machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);
/// How long to wait to show that nothing happens.
pub(crate) const QUIET: Duration = Duration::from_millis(150);
/// The lease of [`Stage::consumer`].
pub(crate) const LEASE: Duration = Duration::from_secs(5);

/// How a scenario uses time. Every engine checks that the scenario keeps to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Time {
    /// It lets no time pass.
    Still,
    /// It lets some seconds pass, 20 at most, and waits for them where the clock cannot be moved.
    Short,
    /// It needs a clock that can be moved: days pass, times are compared exactly, or the clock jumps.
    Virtual,
}

/// The time that a [`Time::Short`] scenario may let pass.
pub(crate) const MOST: Duration = Duration::from_secs(20);

/// An opened engine on a harness, with its clock.
#[derive(Debug)]
pub struct Stage<H: Harness> {
    harness: H,
    engine: Option<Engine>,
    time: Time,
    passed: Mutex<Duration>,
    column: &'static str,
    emulated: Mutex<BTreeSet<&'static str>>,
    except: Mutex<BTreeSet<&'static str>>,
    /// The engine's internal groups.
    own: Vec<GroupName>,
    /// The engine's clock.
    pub clock: ManualClock,
}

impl<H: Harness> Stage<H> {
    /// Opens the engine for a scenario with this use of time and these needs.
    pub async fn open(harness: H, time: Time, needs: &[&'static Need]) -> Result<Self, NotOffered> {
        let start: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let clock = if harness.virtual_time() {
            ManualClock::new(start)
        } else {
            ManualClock::default()
        };
        let engine = harness.open(Arc::new(clock.clone())).await;
        let own = engine.broker.capabilities().engine;
        let column = harness.column().unwrap_or(own);
        let offer = Offer {
            engine: &engine,
            survives_restart: harness.survives_restart(),
            virtual_time: harness.virtual_time(),
        };
        let clock_first = (time == Time::Virtual).then_some(&CLOCK);
        let needs = clock_first.into_iter().chain(needs.iter().copied());
        let mut emulated = BTreeSet::new();
        let mut missing = None;
        for need in needs {
            match need.judge(&offer) {
                Judged::Offered => {}
                Judged::Emulated(how) => _ = emulated.insert(how),
                Judged::Missing => missing = missing.or(Some(need)),
            }
        }
        if let Some(need) = missing {
            engine.broker.close().await.unwrap();
            return Err(NotOffered { column, need });
        }
        let own = engine.broker.inspect().await.unwrap();
        Ok(Self {
            harness,
            own: own.into_iter().map(|group| group.name).collect(),
            engine: Some(engine),
            time,
            passed: Mutex::default(),
            column,
            emulated: Mutex::new(emulated),
            except: Mutex::default(),
            clock,
        })
    }

    /// Whether a part of the scenario has what it needs, from the engine or from the runtime. If not, the
    /// outcome says so.
    pub fn offers(&self, need: &'static Need) -> bool {
        let judged = need.judge(&Offer {
            engine: self.engine(),
            survives_restart: self.harness.survives_restart(),
            virtual_time: self.harness.virtual_time(),
        });
        let (list, told) = match judged {
            Judged::Offered => return true,
            Judged::Emulated(how) => (&self.emulated, how),
            Judged::Missing => (&self.except, need.reason),
        };
        let mut list = list.lock().unwrap_or_else(PoisonError::into_inner);
        list.insert(told);
        matches!(judged, Judged::Emulated(_))
    }

    /// The end of a scenario.
    pub fn passed(&self) -> Outcome {
        let list = |list: &Mutex<BTreeSet<&'static str>>| {
            list.lock().unwrap_or_else(PoisonError::into_inner).clone()
        };
        Ok(Passed {
            column: self.column,
            emulated: list(&self.emulated),
            except: list(&self.except),
        })
    }

    /// The engine.
    pub fn engine(&self) -> &Engine {
        self.engine.as_ref().expect("an open engine")
    }

    /// The broker.
    pub fn broker(&self) -> &Arc<dyn Broker> {
        &self.engine().broker
    }

    /// The log. Scenarios that use it need [`LOG`](super::needs::LOG).
    pub fn log(&self) -> &dyn Log {
        self.engine().log().unwrap()
    }

    /// Finding events by id. Scenarios that use it need [`LOOKUP`].
    pub fn lookup(&self) -> &dyn Lookup {
        self.engine().lookup().unwrap()
    }

    /// The dead letters.
    pub fn dead_letters(&self) -> &dyn DeadLetters {
        self.engine().dead_letters().unwrap()
    }

    /// What the engine offers.
    pub fn capabilities(&self) -> Capabilities {
        self.broker().capabilities()
    }

    /// The harness.
    pub fn harness(&self) -> &H {
        &self.harness
    }

    /// Closes the engine and opens it again.
    pub async fn restart(&mut self) {
        let engine = self.engine.take().unwrap();
        engine.broker.close().await.unwrap();
        drop(engine);
        self.engine = Some(self.harness.open(Arc::new(self.clock.clone())).await);
    }

    /// Ends the engine without closing it and opens it again.
    pub async fn crash(&mut self) {
        let engine = self.engine.take().unwrap();
        self.harness.crash(engine).await;
        self.engine = Some(self.harness.open(Arc::new(self.clock.clone())).await);
    }

    /// Lets time pass, within the limit that the scenario declared.
    pub async fn advance(&self, by: Duration) {
        {
            let mut passed = self.passed.lock().unwrap_or_else(PoisonError::into_inner);
            *passed += by;
            let kept = match self.time {
                Time::Still => false,
                Time::Short => *passed <= MOST,
                Time::Virtual => true,
            };
            assert!(kept, "declared {:?}, but {passed:?} pass", self.time);
        }
        if self.harness.virtual_time() {
            self.clock.advance(by);
        } else {
            tokio::time::sleep(by).await;
            self.clock.set(SystemClock.now());
        }
    }

    /// The time now, as the engine sees it.
    pub fn now(&self) -> Timestamp {
        if self.harness.virtual_time() {
            self.clock.now()
        } else {
            SystemClock.now()
        }
    }

    /// Declares a group that begins at the start of the log.
    pub async fn declare(&self, group: &str, patterns: &[&str]) -> Vec<SubscriptionInfo> {
        self.broker().declare(spec(group, patterns)).await.unwrap()
    }

    /// A consumer that handles everything, with room for 64 deliveries.
    pub async fn consumer(&self, group: &str) -> Box<dyn Consumer> {
        self.consumer_with(group, options()).await
    }

    /// A consumer.
    pub async fn consumer_with(&self, group: &str, options: ConsumeOptions) -> Box<dyn Consumer> {
        self.broker().consume(name(group), options).await.unwrap()
    }

    /// Publishes an event of this type with an empty object.
    pub async fn publish(&self, event_type: &str) -> Appended {
        self.append(event(event_type)).await
    }

    /// Publishes one event.
    pub async fn append(&self, event: Event) -> Appended {
        self.try_append(event).await.unwrap()
    }

    /// Publishes one event that may be refused.
    pub async fn try_append(&self, event: Event) -> Result<Appended> {
        let key = EventKey::of(&event);
        let answers = self.broker().append(vec![event]).await?;
        let appended = answers.into_iter().next().expect("one answer per event")?;
        self.copied(&key).await;
        Ok(appended)
    }

    /// Publishes several events of a type.
    pub async fn publish_many(&self, event_type: &str, count: usize) -> Vec<Appended> {
        self.append_all((0..count).map(|_| event(event_type)).collect())
            .await
    }

    /// Publishes several events in one step.
    pub async fn append_all(&self, batch: Vec<Event>) -> Vec<Appended> {
        let keys: Vec<EventKey> = batch.iter().map(EventKey::of).collect();
        let answers = self.broker().append(batch).await.unwrap();
        for key in &keys {
            self.copied(key).await;
        }
        answers.into_iter().map(|answer| answer.unwrap()).collect()
    }

    /// Settles one delivery.
    pub async fn settle(&self, delivery: &Delivery, verdict: Verdict) -> Result<()> {
        self.settle_with(Settlement::new(delivery.lease.clone(), verdict))
            .await
    }

    /// Settles one delivery, with everything that belongs to it.
    pub async fn settle_with(&self, settlement: Settlement) -> Result<()> {
        let answers = self.broker().settle(vec![settlement]).await?;
        answers
            .into_iter()
            .next()
            .expect("one answer per settlement")
    }

    /// Extends one lease.
    pub async fn extend(&self, delivery: &Delivery, by: Duration) -> Result<()> {
        let leases = vec![delivery.lease.clone()];
        let answers = self.broker().extend(leases, by).await?;
        answers.into_iter().next().expect("one answer per lease")
    }

    /// Settles one delivery, which must succeed.
    pub async fn end(&self, delivery: &Delivery, verdict: Verdict) {
        self.settle(delivery, verdict).await.unwrap();
    }

    /// Acks one delivery, which must succeed.
    pub async fn ack(&self, delivery: &Delivery) {
        self.end(delivery, Verdict::Ack).await;
    }

    /// Lets one delivery fail, to be tried again after a while.
    pub async fn fail(&self, delivery: &Delivery, after: Duration) {
        let failure = self.failure(delivery);
        self.end(delivery, Verdict::Retry { after, failure }).await;
    }

    /// Lets one delivery fail for good.
    pub async fn kill(&self, delivery: &Delivery) {
        let failure = Some(self.failure(delivery));
        self.end(delivery, Verdict::Dead { failure }).await;
    }

    /// A failure of this delivery's attempt, at this moment.
    pub fn failure(&self, delivery: &Delivery) -> Failure {
        let now = self.now();
        let text = format!("attempt {} failed", delivery.attempt);
        Failure::new(delivery.attempt, now, FailureKind::Error, text).in_handler("the handler")
    }

    /// Publishes an event and lets a group give it up at once.
    pub async fn dead_letter(&self, group: &str, event_type: &str) -> Appended {
        let appended = self.publish(event_type).await;
        let mut consumer = self.consumer(group).await;
        let delivery = take_one(&mut consumer).await;
        assert_eq!(delivery.record.position, appended.position);
        self.kill(&delivery).await;
        consumer.close().await.unwrap();
        appended
    }

    /// The state of an event in a group; `None` if the engine cannot say.
    pub async fn group_state(&self, position: Position, group: &str) -> Option<GroupState> {
        if !(self.offers(&LOOKUP) && self.offers(&STATES)) {
            return None;
        }
        Some(self.known_state(position, group).await)
    }

    /// The state of an event in a group as the engine knows it. The position is one that readers see.
    pub async fn known_state(&self, position: Position, group: &str) -> GroupState {
        let states = self.lookup().states(position).await.unwrap();
        let mut of_group = states.into_iter().filter(|s| s.group == name(group));
        let state = of_group.next();
        assert!(of_group.next().is_none(), "one state per group");
        state.expect("a state for every group")
    }

    /// Waits until an event is settled. Scenarios that use it need [`SETTLED`](super::needs::SETTLED).
    pub async fn settled(&self, position: Position) -> SettledOutcome {
        let settled = self.engine().settled().unwrap();
        settled.settled(position, DEADLINE).await.unwrap()
    }

    /// Checks the state of an event in a group, if the engine can say.
    pub async fn assert_state(&self, position: Position, group: &str, expected: EventState) {
        if let Some(state) = self.group_state(position, group).await {
            assert_eq!(state.state, expected, "event {position} in {group:?}");
        }
    }

    /// All groups without the engine's internal ones.
    pub async fn groups(&self) -> Vec<GroupInfo> {
        let mut groups = self.broker().inspect().await.unwrap();
        groups.retain(|group| !self.own.contains(&group.name));
        groups
    }

    /// The state of a group.
    pub async fn group_info(&self, group: &str) -> GroupInfo {
        let groups = self.groups().await;
        let mut found = groups.into_iter().filter(|g| g.name == name(group));
        found.next().expect("the group is listed")
    }

    /// All open dead letters.
    pub async fn open_dead_letters(&self) -> Vec<DeadLetter> {
        let page = self
            .dead_letters()
            .list(DeadLetterFilter::default(), PageRequest::default());
        page.await.unwrap().items
    }

    /// Waits until a condition holds.
    pub async fn eventually<F: Future<Output = bool>>(
        &self,
        what: &str,
        mut so: impl FnMut() -> F,
    ) {
        let waiting = async {
            while !so().await {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        if tokio::time::timeout(DEADLINE, waiting).await.is_err() {
            panic!("waited in vain: {what}");
        }
    }
}

/// A group's name; the empty text is the unnamed group.
pub(crate) fn name(group: &str) -> GroupName {
    group.parse().unwrap()
}

pub(crate) fn pattern(text: &str) -> Pattern {
    Pattern::new(text).unwrap()
}

/// A group that begins at the start of the log, with one subscription per pattern, named after it.
pub(crate) fn spec(group: &str, patterns: &[&str]) -> GroupSpec {
    GroupSpec {
        name: name(group),
        start_from: StartFrom::First,
        ordered: false,
        ephemeral: false,
        subscriptions: patterns
            .iter()
            .map(|text| SubscriptionSpec {
                name: (*text).to_string(),
                pattern: pattern(text),
            })
            .collect(),
    }
}

/// Handlers for everything, room for 64, [`LEASE`].
pub(crate) fn options() -> ConsumeOptions {
    handling(vec![pattern("*"), pattern("system.>")])
}

/// Handlers for these patterns, room for 64, [`LEASE`].
pub(crate) fn handling(handled: Vec<Pattern>) -> ConsumeOptions {
    ConsumeOptions::new(handled).prefetch(64).lease(LEASE)
}

/// A settlement with events to append in the same step.
pub(crate) fn following(mut settlement: Settlement, follow_ups: Vec<Event>) -> Settlement {
    settlement.follow_ups = follow_ups;
    settlement
}

/// An event of this type with an empty object.
pub(crate) fn event(event_type: &str) -> Event {
    Event::builder(event_type).payload("{}").build().unwrap()
}

/// Takes exactly this many deliveries.
pub(crate) async fn take(consumer: &mut Box<dyn Consumer>, count: usize) -> Vec<Delivery> {
    let mut taken: Vec<Delivery> = Vec::with_capacity(count);
    while taken.len() < count {
        let wanted = count - taken.len();
        match tokio::time::timeout(DEADLINE, consumer.fetch(wanted)).await {
            Ok(batch) => {
                let batch = batch.unwrap();
                assert!(!batch.is_empty(), "fetch returned nothing");
                assert!(batch.len() <= wanted, "fetch returned more than asked for");
                taken.extend(batch);
            }
            Err(_) => panic!(
                "waited in vain for delivery {} of {count}; so far {:?}",
                taken.len() + 1,
                positions(&taken)
            ),
        }
    }
    taken
}

pub(crate) async fn take_one(consumer: &mut Box<dyn Consumer>) -> Delivery {
    take(consumer, 1).await.remove(0)
}

/// Checks that nothing is delivered for a while.
pub(crate) async fn nothing(consumer: &mut Box<dyn Consumer>) {
    if let Ok(batch) = tokio::time::timeout(QUIET, consumer.fetch(1000)).await {
        let batch = batch.unwrap();
        panic!("delivered what should wait: {:?}", positions(&batch));
    }
}

pub(crate) fn positions(deliveries: &[Delivery]) -> Vec<Position> {
    deliveries.iter().map(|d| d.record.position).collect()
}

/// A key to sort positions by that is the order of the log within a shard.
pub(crate) fn ordering(position: Position) -> (&'static str, u64) {
    (position.shard().name(), position.place())
}

/// A position `by` places later in the same shard.
pub(crate) fn beyond(position: Position, by: u64) -> Position {
    Position::new(position.shard(), position.place() + by)
}

/// The code of an expected error.
pub(crate) fn code<T: std::fmt::Debug>(result: Result<T>) -> Code {
    result.unwrap_err().code()
}
