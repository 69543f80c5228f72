//! The process that is killed: it publishes, handles, and reports on its standard output which publishes were
//! acknowledged and which handlers finished.
//!
//! `A id position` is written after the publish returned; `H group handler id position attempt` before the
//! handler returns. When standard input closes, it ends in order.

use std::io::{Read as _, Write as _};
use std::path::PathBuf;
use std::time::Duration;

use everbus::overflow::Overflow;
use everbus::{Bus, Durable, HandlerError, HandlerResult, Message, Receipt, RetryPolicy};
use everbus_core::{Code, Error, EventId};
use tokio::sync::oneshot;

use super::content::{Act, Content, Ids};
use super::hooks::Hooked;
use super::leases::ShortLeases;
use super::objects::{DieBetween, THRESHOLD};
use super::plant::{AckFirst, LateObjects, UnsyncedObjects};
use super::{Broken, GROUPS, PREFETCH};
use crate::model::Random;

/// A handler that takes longer has failed.
const TIMEOUT: Duration = Duration::from_millis(50);
/// Tasks that publish.
const TASKS: u64 = 3;
/// Ids of an earlier victim that are published again: it may have died before it had its answer.
const REPEATED: usize = 6;

/// The orders of a victim.
#[derive(Clone, Debug)]
pub struct Orders {
    /// The file.
    pub db: PathBuf,
    /// Which ids it publishes, and how.
    pub seed: u64,
    /// How many publishes each of its tasks makes; 0 for a process that only handles.
    pub publishes: u64,
    /// The seed of an earlier victim, some of whose ids are published again.
    pub repeat: Option<u64>,
    /// Leases end after this many milliseconds instead of what the bus chooses.
    pub lease_ms: Option<u64>,
    /// Commits are not synced: acknowledged events may be lost with the power.
    pub normal: bool,
    /// Events are acked before they are handled: a bug that the campaign must find.
    pub ack_first: bool,
    /// Its error output is expected and not shown.
    pub quiet: bool,
    /// Large events are split, and it publishes mostly large ones.
    pub overflow: bool,
    /// It dies after the object of the n-th event is durable and before the event is in the log.
    pub die_between: Option<u64>,
    /// Objects are stored after their events: a bug that the campaign must find.
    pub late_objects: bool,
    /// Objects are not synced before their events are appended: a bug that power losses must find.
    pub unsynced_objects: bool,
    /// Events are removed from the file: some expire, some have payload stages, and none is published twice.
    pub mortal: bool,
}

impl Orders {
    /// Orders with the usual behaviour.
    pub fn new(db: PathBuf, seed: u64, publishes: u64) -> Self {
        Self {
            db,
            seed,
            publishes,
            repeat: None,
            lease_ms: None,
            normal: false,
            ack_first: false,
            quiet: false,
            overflow: false,
            die_between: None,
            late_objects: false,
            unsynced_objects: false,
            mortal: false,
        }
    }

    fn meddles(&self) -> bool {
        self.lease_ms.is_some()
            || self.ack_first
            || self.late_objects
            || self.unsynced_objects
            || self.die_between.is_some()
    }
}

/// Works until standard input is closed, then ends in order. Usually it is killed before that.
pub fn run(orders: Orders) -> Result<(), Broken> {
    quiet_expected_panics();
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_time()
        .build()
        .map_err(Broken::at("starting a runtime"))?
        .block_on(live(orders))
        .map_err(|error| Broken(format!("{error:?}")))
}

async fn live(orders: Orders) -> Result<(), Error> {
    let bus = open(&orders).await?;
    for group in 0..GROUPS.len() {
        subscribe(&bus, group).await?;
    }
    bus.start().await?;
    tell("READY\n");
    let ended = end_of_input();
    if orders.publishes > 0 {
        for task in 0..TASKS {
            tokio::spawn(publish(bus.clone(), orders.clone(), task));
        }
    }
    let _ = ended.await;
    bus.shutdown_within(Duration::from_secs(5)).await.map(drop)
}

async fn open(orders: &Orders) -> Result<Bus, Error> {
    let policy = RetryPolicy::new()
        .base_delay(Duration::from_millis(5))
        .max_delay(Duration::from_millis(50));
    let overflow = Overflow::default();
    let builder = Bus::builder()
        .overflow(if orders.overflow {
            overflow.threshold(THRESHOLD)
        } else {
            overflow
        })
        .retry(policy)
        .timeout(TIMEOUT)
        .prefetch(PREFETCH)
        .durability(if orders.normal {
            Durable::Normal
        } else {
            Durable::Full
        });
    let url = format!("sqlite:{}", orders.db.display());
    if !orders.meddles() {
        return builder.open(url).await;
    }
    let mut engine = everbus_sqlite::open(&orders.db, everbus_sqlite::Options::default())?;
    if let Some(lease) = orders.lease_ms {
        // The bus uses long leases. A test that waits for the end of a lease needs short ones.
        engine.broker = ShortLeases::wrap(engine.broker, Duration::from_millis(lease));
    }
    if orders.ack_first {
        engine.broker = AckFirst::wrap(engine.broker);
    }
    if orders.late_objects {
        engine.broker = Hooked::wrap(engine.broker, LateObjects::new(&orders.db));
    }
    if orders.unsynced_objects {
        engine.broker = Hooked::wrap(engine.broker, UnsyncedObjects::new(&orders.db));
    }
    if let Some(n) = orders.die_between {
        engine.broker = Hooked::wrap(engine.broker, DieBetween::new(n));
    }
    builder.with_engine(engine)
}

async fn subscribe(bus: &Bus, group: usize) -> Result<(), Error> {
    let described = &GROUPS[group];
    for (handler, name) in described.handlers.iter().enumerate() {
        let mut subscription = bus.subscribe(described.pattern).name(*name).concurrency(8);
        if !described.name.is_empty() {
            subscription = subscription.group(described.name);
        }
        if described.ordered {
            subscription = subscription.ordered();
        }
        subscription
            .handler(move |message: Message| handle(message, group, handler))
            .await?;
    }
    Ok(())
}

async fn handle(message: Message, group: usize, handler: usize) -> HandlerResult {
    let (id, attempt) = (message.id(), message.attempt());
    let content = Content::of(id);
    if message.payload().as_ref() != content.payload {
        return Err(HandlerError::permanent("this is not what was published"));
    }
    match content.act(group, handler, attempt) {
        Act::Finish => {}
        Act::Nap(ms) => tokio::time::sleep(Duration::from_millis(ms)).await,
        Act::Fail => return Err(HandlerError::new(format!("attempt {attempt} fails"))),
        Act::GiveUp => return Err(HandlerError::permanent("no retry can mend this")),
        Act::Panic => panic!("{EXPECTED} at attempt {attempt}"),
        Act::Oversleep => tokio::time::sleep(TIMEOUT * 100).await,
        Act::Skip => return Err(HandlerError::skip("not for this group")),
    }
    let position = message.seq();
    tell(&format!("H {group} {handler} {id} {position} {attempt}\n"));
    Ok(())
}

async fn publish(bus: Bus, orders: Orders, task: u64) {
    let mut random = Random::new(orders.seed.wrapping_mul(31).wrapping_add(task));
    let large = |id: &EventId| Content::of(*id).payload.len() > THRESHOLD;
    let mut ids = Ids::new(seed_of(orders.seed, task))
        .filter(|id| !orders.overflow || id.as_bytes()[0] % 64 == 0 || large(id));
    let mut known: Vec<EventId> = match orders.repeat {
        Some(seed) => Ids::new(seed_of(seed, task)).take(REPEATED).collect(),
        None => Vec::new(),
    };
    for _ in 0..orders.publishes {
        let batch: Vec<EventId> = match random.below(10) {
            0 if !known.is_empty() && !orders.mortal => vec![known[random.below(known.len())]],
            1..=2 => ids.by_ref().take(2 + random.below(15)).collect(),
            _ => ids.by_ref().take(1).collect(),
        };
        if !publish_one(&bus, &batch, orders.mortal).await {
            return;
        }
        if orders.mortal {
            keep_stages(&bus, &batch).await;
        }
        known.extend(batch);
        if random.one_in(2) {
            tokio::time::sleep(Duration::from_micros(random.number() % 6000)).await;
        }
    }
}

/// The seed of one task's ids.
fn seed_of(victim: u64, task: u64) -> u64 {
    victim.wrapping_add(task.wrapping_mul(0x9e37_79b9))
}

/// Publishes and reports the acknowledgement. Returns whether to go on.
async fn publish_one(bus: &Bus, batch: &[EventId], mortal: bool) -> bool {
    let event = |id: &EventId| {
        let event = Content::of(*id).event();
        match id.as_bytes()[1] % 4 {
            0 if mortal => event.ttl(Duration::from_millis(1 + u64::from(id.as_bytes()[2]))),
            _ => event,
        }
    };
    let published: Result<Vec<Receipt>, Error> = match batch {
        [id] => bus.publish(event(id)).await.map(|r| vec![r]),
        _ => bus.publish_batch(batch.iter().map(event)).await,
    };
    match published {
        Ok(receipts) => {
            let lines: String = receipts
                .iter()
                .map(|receipt| format!("A {} {}\n", receipt.id(), receipt.seq()))
                .collect();
            tell(&lines);
            true
        }
        Err(error) if error.code() == Code::EventBusShutdownError => false,
        Err(error) => {
            tell(&format!("E {error}\n"));
            error.class().may_repeat()
        }
    }
}

/// Some events get a payload stage, which is removed before them or with them.
async fn keep_stages(bus: &Bus, batch: &[EventId]) {
    for id in batch.iter().filter(|id| id.as_bytes()[3] % 4 == 0) {
        let stored = bus.payloads().store(*id, "webhook_raw", "a stage").await;
        match stored {
            Err(error) if !matches!(error.code(), Code::NotFound | Code::EventBusShutdownError) => {
                tell(&format!("E storing a stage: {error}\n"));
            }
            // A removed event takes no stage.
            _ => {}
        }
    }
}

/// Writes whole lines at once and waits until they are in the pipe: lines in the pipe survive a kill.
pub(crate) fn tell(lines: &str) {
    let mut out = std::io::stdout().lock();
    // Without a reader the campaign is gone; then standard input is closed too.
    let _ = out.write_all(lines.as_bytes()).and_then(|()| out.flush());
}

pub(crate) fn end_of_input() -> oneshot::Receiver<()> {
    let (ended, wait) = oneshot::channel();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        let _ = ended.send(());
    });
    wait
}

const EXPECTED: &str = "a panic as ordered";

/// Handlers panic on purpose; any other panic is still printed.
fn quiet_expected_panics() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let expected = info
            .payload_as_str()
            .is_some_and(|text| text.starts_with(EXPECTED));
        if !expected {
            usual(info);
        }
    }));
}
