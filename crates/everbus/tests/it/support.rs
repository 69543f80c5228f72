//! A bus on each engine in turn, a clock that is moved by hand, and waiting for conditions.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use everbus::{
    Bus, BusBuilder, BusStats, Cursor, DeadLetter, EventState, GroupName, GroupState, HandlerError,
    HandlerResult, IntoEvent, ManualClock, Message, Position, Receipt, Recorded, RetryPolicy,
};
use tokio::sync::mpsc;

/// Long enough for a machine that stalls; a test that waits this long has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Memory,
    Sqlite,
}

/// A fresh place for events and a clock that stands still.
pub(crate) struct Lab {
    pub(crate) kind: Kind,
    pub(crate) clock: ManualClock,
    dir: tempfile::TempDir,
}

impl Lab {
    pub(crate) fn new(kind: Kind) -> Self {
        crate::logs::listen();
        Self {
            kind,
            clock: ManualClock::default(),
            dir: tempfile::tempdir().unwrap(),
        }
    }

    /// Where the engine that has a file keeps it.
    pub(crate) fn file(&self) -> std::path::PathBuf {
        self.dir.path().join("bus.db")
    }

    pub(crate) fn builder(&self) -> BusBuilder {
        Bus::builder().clock(self.clock.clone())
    }

    pub(crate) async fn open(&self) -> Bus {
        self.open_with(self.builder()).await
    }

    /// A bus that gives up at the first failure.
    pub(crate) async fn open_impatient(&self) -> Bus {
        self.open_with(self.builder().retry(RetryPolicy::never()))
            .await
    }

    pub(crate) async fn open_with(&self, builder: BusBuilder) -> Bus {
        let url = match self.kind {
            Kind::Memory => "memory:".to_owned(),
            Kind::Sqlite => format!("sqlite:{}", self.file().display()),
        };
        builder.open(url).await.unwrap()
    }
}

/// Runs a test on a fresh bus of every engine.
pub(crate) async fn on_every_engine<Fut: Future<Output = ()>>(test: impl Fn(Lab) -> Fut) {
    for kind in [Kind::Memory, Kind::Sqlite] {
        eprintln!("on {kind:?}");
        test(Lab::new(kind)).await;
    }
}

/// Runs a test on every engine whose events survive the bus.
pub(crate) async fn on_every_durable_engine<Fut: Future<Output = ()>>(test: impl Fn(Lab) -> Fut) {
    test(Lab::new(Kind::Sqlite)).await;
}

/// Waits until the condition holds.
pub(crate) async fn eventually<Fut: Future<Output = bool>>(what: &str, check: impl Fn() -> Fut) {
    let wait = async {
        while !check().await {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    if tokio::time::timeout(PATIENCE, wait).await.is_err() {
        panic!("never happened: {what}");
    }
}

/// Moves the clock on until the condition holds, but not while something is in flight: however slow the
/// machine, no lease ends.
pub(crate) async fn in_time<Fut: Future<Output = bool>>(
    lab: &Lab,
    bus: &Bus,
    step: Duration,
    what: &str,
    check: impl Fn() -> Fut,
) {
    eventually(what, || async {
        if check().await {
            return true;
        }
        let groups = bus.groups().await.unwrap();
        if groups.iter().all(|group| group.in_flight == 0) {
            lab.clock.advance(step);
        }
        false
    })
    .await;
}

/// How an event stands in a group.
pub(crate) async fn state_in(bus: &Bus, seq: u64, group: &str) -> Option<GroupState> {
    let name: GroupName = group.parse().unwrap();
    let states = bus
        .lookup()
        .unwrap()
        .states(Position::seq(seq))
        .await
        .unwrap();
    states.into_iter().find(|state| state.group == name)
}

/// Waits until so many attempts of an event have failed in a group and it waits for the next.
pub(crate) async fn wait_for_retry(bus: &Bus, seq: u64, group: &str, failed: usize) -> GroupState {
    eventually("the failed attempt is recorded", || async {
        state_in(bus, seq, group)
            .await
            .is_some_and(|state| state.failures.len() == failed && state.due_at.is_some())
    })
    .await;
    state_in(bus, seq, group).await.unwrap()
}

pub(crate) async fn is_done(bus: &Bus, seq: u64, group: &str) -> bool {
    let state = state_in(bus, seq, group).await;
    state.is_some_and(|state| state.state == EventState::Done)
}

/// Publishes an event that every group handles or skips.
pub(crate) async fn handled(bus: &Bus, event: impl IntoEvent) -> Receipt {
    let receipt = bus.publish(event).await.unwrap();
    let settled = receipt.settled().await.unwrap();
    let letters = bus.dead_letters().get(receipt.id()).await.unwrap();
    assert!(settled.dead_lettered.is_empty(), "{letters:?}");
    receipt
}

/// Publishes an event that one group gives up on.
pub(crate) async fn given_up(bus: &Bus, event: impl IntoEvent) -> DeadLetter {
    let receipt = bus.publish(event).await.unwrap();
    receipt.settled().await.unwrap();
    let mut letters = bus.dead_letters().get(receipt.id()).await.unwrap();
    assert_eq!(letters.len(), 1, "{letters:?}");
    letters.remove(0)
}

/// The numbers, once everything that was settled is counted: that comes a moment later.
pub(crate) async fn counted(bus: &Bus) -> BusStats {
    eventually("everything is counted", || async {
        let groups = bus.stats().groups;
        groups.values().all(|group| group.queue_depth == 0)
    })
    .await;
    bus.stats()
}

/// The events in the log that match a pattern, in order.
pub(crate) async fn published(bus: &Bus, pattern: &str) -> Vec<Arc<Recorded>> {
    let patterns = vec![pattern.parse().unwrap()];
    let log = bus.log().unwrap();
    let (events, _) = log.read(Cursor::START, patterns, 10_000).await.unwrap();
    events
}

/// What a recording handler saw.
pub(crate) struct Seen(mpsc::UnboundedReceiver<Message>);

impl Seen {
    pub(crate) async fn next(&mut self) -> Message {
        let next = tokio::time::timeout(PATIENCE, self.0.recv()).await;
        next.expect("the handler was not called").unwrap()
    }

    pub(crate) fn is_empty(&mut self) -> bool {
        self.0.is_empty()
    }
}

/// A handler that remembers its messages and answers as it is told.
pub(crate) fn recorder(
    answer: impl Fn(&Message) -> HandlerResult + Send + Sync + 'static,
) -> (
    impl Fn(Message) -> std::future::Ready<HandlerResult> + Send + Sync + 'static,
    Seen,
) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let handler = move |message: Message| {
        let result = answer(&message);
        let _ = sender.send(message);
        std::future::ready(result)
    };
    (handler, Seen(receiver))
}

pub(crate) fn fine(_: &Message) -> HandlerResult {
    Ok(())
}

pub(crate) fn broken(message: &Message) -> HandlerResult {
    Err(HandlerError::new(format!("failure {}", message.attempt())))
}

/// Moves the clock over retry after retry until the event is settled.
pub(crate) async fn run_out_of_retries(lab: &Lab, bus: &Bus, receipt: &Receipt, group: &str) {
    eventually("the event is dead-lettered", || async {
        match state_in(bus, receipt.seq(), group).await {
            Some(state) if state.state == EventState::Dlq => true,
            Some(GroupState {
                due_at: Some(due), ..
            }) => {
                lab.clock.set(due);
                false
            }
            _ => false,
        }
    })
    .await;
}
