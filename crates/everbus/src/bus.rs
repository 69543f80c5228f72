//! The bus: what users hold on to.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;

use everbus_core::{
    Capabilities, Code, Engine, Error, Event, EventId, GroupInfo, GroupName, History, IntoEvent,
    Log, Maintenance, Pattern, Recorded, Result,
};
use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::admission::Admission;
use crate::ambient;
use crate::audit::{Action, AuditTrail, audited};
use crate::breaker::BreakerInfo;
use crate::circuits::Circuits;
use crate::dead_letters::DeadLetterQueue;
use crate::guard;
use crate::options::{BusBuilder, BusOptions, TRAVELS};
use crate::overflow::{self, Collect, Collected, Objects};
use crate::payloads::PayloadStages;
use crate::receipt::Receipt;
use crate::registry::Registry;
use crate::replay::{self, Replay};
use crate::retention;
use crate::router::{Resolved, Router};
use crate::schema::Schemas;
use crate::shutdown::{self, Shutdown};
use crate::stats::{BusStats, Published, Stats};
use crate::subscribe::{Subscribe, SubscriptionId};

/// A bus on an open engine. Clones are the same bus.
///
/// Needs a tokio runtime with its timer enabled, as `#[tokio::main]` gives. Dropping the last clone
/// without [`shutdown`](Self::shutdown) blocks nothing and loses nothing: running handlers get the
/// shutdown timeout in the background as long as the runtime lives, and what they did not finish is
/// delivered again. A handler that holds a clone of the bus keeps it alive until it is shut down.
#[derive(Clone)]
pub struct Bus {
    inner: Arc<Inner>,
}

/// What the clones of a bus share.
struct Inner {
    shared: Arc<Shared>,
    registry: tokio::sync::Mutex<Registry>,
    runtime: OnceLock<Handle>,
    ending: std::sync::Mutex<Option<watch::Receiver<Ending>>>,
}

/// Nothing, until the shutdown is over.
type Ending = Option<Result<Shutdown>>;

/// What the background tasks and receipts need. It does not keep the bus alive.
pub(crate) struct Shared {
    pub(crate) engine: Engine,
    pub(crate) options: BusOptions,
    pub(crate) stats: Stats,
    pub(crate) circuits: Circuits,
    /// Where the large parts of events go, where there is such a place.
    pub(crate) objects: Option<Arc<Objects>>,
    admission: Admission,
    schemas: std::sync::RwLock<Arc<Schemas>>,
    /// Whether there are any schemas, so that a publish without them asks nobody.
    validates: AtomicBool,
    /// Becomes true just before the engine is closed.
    pub(crate) closed: watch::Sender<bool>,
    /// Becomes true when the shutdown begins.
    ending: watch::Sender<bool>,
    state: AtomicU8,
    failure: OnceLock<Error>,
    stopped_groups: std::sync::Mutex<BTreeMap<GroupName, Error>>,
    lost_leases: AtomicU64,
}

const OPEN: u8 = 0;
const FAILED: u8 = 1;
const CLOSED: u8 = 2;

impl Shared {
    /// Whether publishes and subscriptions are taken.
    pub(crate) fn accepts(&self) -> Result<()> {
        match self.state.load(Ordering::Acquire) {
            OPEN => Ok(()),
            FAILED => Err(self.failure.get().cloned().unwrap_or_else(Error::shutdown)),
            _ => Err(Error::shutdown()),
        }
    }

    /// Remembers the first failure that the engine does not recover from; whether this is one.
    pub(crate) fn fail_if_fatal(&self, error: &Error) -> bool {
        let fatal = matches!(
            error.code(),
            Code::StorageFailed | Code::Corrupt | Code::NewerSchema
        );
        if fatal && self.failure.set(error.clone()).is_ok() {
            let _ = self
                .state
                .compare_exchange(OPEN, FAILED, Ordering::AcqRel, Ordering::Acquire);
            guard::log(|| {
                tracing::error!(target: "everbus::bus", %error, "the engine failed; the bus takes no more publishes");
            });
        }
        fatal
    }

    /// A group that had stopped, perhaps, runs again or is no longer ours.
    pub(crate) fn group_not_stopped(&self, group: &GroupName) {
        self.stopped_groups().remove(group);
    }

    /// A group has stopped by itself.
    pub(crate) fn group_stopped(&self, group: &GroupName, error: &Error) {
        self.stopped_groups().insert(group.clone(), error.clone());
    }

    fn stopped_groups(&self) -> std::sync::MutexGuard<'_, BTreeMap<GroupName, Error>> {
        self.stopped_groups
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the engine for a change, until the shutdown begins: an engine that is slow to answer
    /// must not hold that up.
    pub(crate) async fn unless_ending<T>(
        &self,
        change: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let mut ending = self.ending.subscribe();
        let changed = tokio::select! {
            biased;
            changed = change => changed,
            _ = ending.wait_for(|ending| *ending) => Err(Error::shutdown()),
        };
        changed.inspect_err(|error| {
            self.fail_if_fatal(error);
        })
    }

    pub(crate) fn count_lost_lease(&self) {
        self.lost_leases.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether an event may be stored: its size, and its schema where there is one. A payload that was
    /// just serialised from the very type the schema comes from is not checked again.
    pub(crate) fn check_event(&self, event: &Event, rust_type: Option<&str>) -> Result<()> {
        let objects = self.objects.as_ref().filter(|objects| objects.moves());
        let most = objects.map_or(TRAVELS, |objects| objects.limit());
        self.check_within(most, event, rust_type)
    }

    /// Whether an event may be stored that is never split: it is made inside a transaction.
    pub(crate) fn check_unsplit(&self, event: &Event) -> Result<()> {
        self.check_within(TRAVELS, event, None)
    }

    fn check_within(&self, most: usize, event: &Event, rust_type: Option<&str>) -> Result<()> {
        let limit = self.options.max_payload.unwrap_or(most);
        let bytes = event.payload().len();
        if bytes > limit {
            return Err(Error::new(
                Code::PayloadTooLarge,
                format!("the payload has {bytes} bytes, the limit is {limit}"),
            )
            .hint("store large data elsewhere and publish where it is, or raise max_payload"));
        }
        if event.overflow().is_some() {
            return Err(Error::new(
                Code::InvalidAttribute,
                "the event was read with a part of its payload in an object store",
            )
            .hint("publish the whole event: Bus::whole gives it"));
        }
        if self.validates.load(Ordering::Acquire) {
            self.schemas().check_published(event, rust_type)?;
        }
        Ok(())
    }

    pub(crate) fn schemas(&self) -> Arc<Schemas> {
        let schemas = self.schemas.read().unwrap_or_else(PoisonError::into_inner);
        schemas.clone()
    }

    pub(crate) fn set_schemas(&self, schemas: Schemas) {
        let any = !schemas.is_empty();
        *self.schemas.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(schemas);
        self.validates.store(any, Ordering::Release);
    }

    /// The events as they shall be appended: the large parts of those that are too large are in the
    /// object store, durably.
    pub(crate) async fn offload(&self, mut events: Vec<Event>) -> Result<Vec<Event>> {
        let Some(objects) = &self.objects else {
            return Ok(events);
        };
        for event in &mut events {
            if objects.is_over(event) {
                // Boxed: hardly any publish needs the room.
                *event = Box::pin(objects.offload(event.clone())).await?;
            }
        }
        Ok(events)
    }

    /// The record with its event as it was published.
    pub(crate) async fn whole(&self, record: &Arc<Recorded>) -> Result<Arc<Recorded>> {
        overflow::whole(self.objects.as_deref(), record).await
    }

    /// Appends events that have been accepted, and counts them.
    async fn append(&self, events: Vec<Event>) -> Result<Vec<Result<everbus_core::Appended>>> {
        // A recorder of metrics is other people's code, and the event is stored whatever it does.
        let counts = guard::contain(|| Published::new(&self.stats, &events));
        let appended = self.engine.broker.append(events).await;
        match &appended {
            Ok(answers) => {
                let _ = guard::contain(|| counts.map(|counts| counts.stored(answers)));
                for error in answers.iter().filter_map(|answer| answer.as_ref().err()) {
                    self.fail_if_fatal(error);
                }
            }
            Err(error) => {
                self.fail_if_fatal(error);
            }
        }
        appended
    }

    /// Appends an event of the bus itself.
    pub(crate) async fn append_one(&self, event: Event) -> Result<()> {
        self.accepts()?;
        let mut answers = self.append(vec![event]).await?;
        answers.pop().unwrap_or_else(|| Err(no_answer())).map(drop)
    }

    /// The audit trail, and who acts on this bus.
    pub(crate) fn audit(&self) -> AuditTrail {
        AuditTrail::new(self.engine.clone(), self.options.source.clone())
    }

    fn refuse_new_work(&self) {
        self.state.store(CLOSED, Ordering::Release);
        self.ending.send_replace(true);
    }
}

impl Bus {
    /// Opens a bus with the default settings: `sqlite:FILE` or a bare path for a file on disk,
    /// `memory:` for events that need not survive the process.
    pub async fn open(url: impl AsRef<str>) -> Result<Bus> {
        Self::builder().open(url).await
    }

    /// Begins a bus with settings of one's own.
    pub fn builder() -> BusBuilder {
        BusBuilder::default()
    }

    /// A bus on an engine that is open already.
    pub fn with_engine(engine: Engine, options: BusOptions) -> Result<Bus> {
        options.validate()?;
        let admission = Admission::new(options.limits.clone(), options.publish_rate)?;
        let objects = Objects::open(&engine, &options.overflow)?;
        Ok(Bus {
            inner: Arc::new(Inner {
                shared: Arc::new(Shared {
                    admission,
                    objects,
                    engine,
                    options,
                    stats: Stats::default(),
                    circuits: Circuits::default(),
                    schemas: std::sync::RwLock::default(),
                    validates: AtomicBool::new(false),
                    closed: watch::Sender::new(false),
                    ending: watch::Sender::new(false),
                    state: AtomicU8::new(OPEN),
                    failure: OnceLock::new(),
                    stopped_groups: std::sync::Mutex::default(),
                    lost_leases: AtomicU64::new(0),
                }),
                registry: tokio::sync::Mutex::default(),
                runtime: OnceLock::new(),
                ending: std::sync::Mutex::default(),
            }),
        })
    }

    /// Publishes an event and returns when it is durable.
    ///
    /// Takes an [`Event`], a builder, or a pair of type and serialisable value. An event whose id was
    /// published before with the same body returns the first receipt and stores nothing.
    ///
    /// If the error says [`outcome_unknown`](Error::outcome_unknown), the event may have been stored:
    /// publish it again with the same id.
    pub fn publish<E: IntoEvent>(
        &self,
        event: E,
    ) -> impl Future<Output = Result<Receipt>> + Send + use<'_, E> {
        let event = self.accept(event);
        async move {
            let mut answers = self.append(vec![event?]).await?;
            let appended = answers.pop().unwrap_or_else(|| Err(no_answer()))?;
            Ok(Receipt::new(appended, self.inner.shared.clone()))
        }
    }

    /// Publishes events in one step: all of them or none, where the engine's
    /// [`Capabilities::atomic_batch`] says so. Receipts come in the order of the events.
    pub fn publish_batch<I>(
        &self,
        events: I,
    ) -> impl Future<Output = Result<Vec<Receipt>>> + Send + use<'_, I>
    where
        I: IntoIterator,
        I::Item: IntoEvent,
    {
        let events: Result<Vec<Event>> = events.into_iter().map(|e| self.accept(e)).collect();
        async move {
            let events = events?;
            if events.is_empty() {
                return Ok(Vec::new());
            }
            let expected = events.len();
            let answers = self.append(events).await?;
            if answers.len() != expected {
                return Err(no_answer());
            }
            answers
                .into_iter()
                .map(|answer| Ok(Receipt::new(answer?, self.inner.shared.clone())))
                .collect()
        }
    }

    fn accept(&self, event: impl IntoEvent) -> Result<Event> {
        let shared = &self.inner.shared;
        shared.accepts()?;
        let rust_type = event.rust_type();
        let event = event.into_event()?;
        shared.check_event(&event, rust_type)?;
        Ok(event)
    }

    async fn append(&self, events: Vec<Event>) -> Result<Vec<Result<everbus_core::Appended>>> {
        // Checked before anything else: the future may have been kept over a shutdown.
        self.accepts()?;
        let source = self.inner.shared.options.source.as_ref();
        let events = events
            .into_iter()
            .map(|event| ambient::inherit(event, source))
            .collect::<Result<Vec<_>>>()?;
        self.append_as_is(events).await
    }

    /// Whether an event that comes out of an outbox would be published.
    pub(crate) fn check_relayed(&self, event: &Event) -> Result<()> {
        let shared = &self.inner.shared;
        shared.accepts()?;
        shared.check_event(event, None)
    }

    /// Appends events that were checked, as a publish does, and take nothing over from where they are
    /// published: what surrounds a relay or a replay is not what surrounded them.
    pub(crate) async fn append_as_is(
        &self,
        events: Vec<Event>,
    ) -> Result<Vec<Result<everbus_core::Appended>>> {
        let shared = &self.inner.shared;
        shared.accepts()?;
        let broker = &*shared.engine.broker;
        // Held until the append is over.
        let admitting = shared.admission.admit(broker, &events);
        let admitted = shared.unless_ending(admitting).await?;
        for (event_type, dropped) in admitted.dropped() {
            guard::log(|| {
                shared.stats.publishing(event_type).dropped(*dropped);
                tracing::warn!(target: "everbus::bus", %event_type, dropped, "old events were skipped to make room for new ones");
            });
        }
        // After every wait: an object is referred to soon after it was put there.
        let events = shared.unless_ending(shared.offload(events)).await?;
        shared.append(events).await
    }

    /// Begins a subscription to the events that match a pattern (`user.created`, `user.*`,
    /// `order.*.shipped`, `*`). It takes effect with [`Subscribe::handler`].
    pub fn subscribe(&self, pattern: impl AsRef<str>) -> Subscribe<'_> {
        Subscribe::new(self, pattern.as_ref())
    }

    /// Subscribes everything a router says. The whole of it is checked first; if anything is wrong,
    /// nothing is subscribed. Returns the ids in the order of the routes.
    ///
    /// A pattern that matches none of the event types that are known (from the handlers of this and of
    /// earlier routers, and from schemas) is logged as a warning: it is probably a typing error.
    pub async fn mount(&self, router: Router) -> Result<Vec<SubscriptionId>> {
        self.accepts()?;
        let resolved = router.resolve()?;
        let mut registry = self.inner.registry.lock().await;
        // Checked again under the lock: a shutdown may have come first.
        self.accepts()?;
        let shared = &self.inner.shared;
        shared.unless_ending(registry.mount(shared, resolved)).await
    }

    /// Begins a replay: what was published is run again, into a group, into handlers or a function of
    /// its own, or as copies for everybody.
    pub fn replay(&self) -> Replay {
        Replay::new(self.clone())
    }

    /// Publishes a copy of an event for everybody: under a new id, with the metadata `replay_of` naming
    /// the original, its `occurred_at` and everything else. `NotFound` if there is no such event. Where
    /// several tenants use the id, `InvalidSetting`: name one with
    /// `replay().event(id).tenant(…).publish_copies()`.
    pub async fn replay_event(&self, id: EventId) -> Result<Receipt> {
        replay::replay_event(self, id).await
    }

    /// Runs handlers in a group that has no subscriptions in the engine: it gets only what it is given.
    pub(crate) async fn mount_apart(&self, resolved: Resolved, group: &GroupName) -> Result<()> {
        let mut registry = self.inner.registry.lock().await;
        self.accepts()?;
        let _ = self.inner.runtime.set(Handle::current());
        let shared = &self.inner.shared;
        let mounting = registry.mount_apart(shared, resolved, group);
        shared.unless_ending(mounting).await
    }

    /// Ends the handlers of such a group and waits for those that run.
    pub(crate) async fn dismount(&self, group: &GroupName) {
        let shared = &self.inner.shared;
        let runner = self.inner.registry.lock().await.dismount(shared, group);
        if let Some(runner) = runner {
            let deadline = shutdown::deadline(shared.options.shutdown_timeout);
            runner.stop(deadline).await;
        }
    }

    /// The handlers of a group in this bus: their patterns and names.
    pub(crate) async fn handlers_of(&self, group: &GroupName) -> Vec<(Pattern, String)> {
        let registry = self.inner.registry.lock().await;
        let handlers = registry.handlers(group).iter();
        handlers
            .map(|handler| (handler.pattern.clone(), handler.name.clone()))
            .collect()
    }

    /// Whether the inbox of a group may absorb what it has on record: if its handlers are not here,
    /// nobody knows.
    pub(crate) async fn may_absorb(&self, group: &GroupName) -> bool {
        let registry = self.inner.registry.lock().await;
        let handlers = registry.handlers(group);
        handlers.is_empty() || handlers.iter().any(|handler| handler.traits.idempotent)
    }

    /// Counts and latencies since this bus was opened: per event type, per group, and its breakers.
    pub fn stats(&self) -> BusStats {
        let shared = &self.inner.shared;
        shared.stats.snapshot(shared.circuits.infos())
    }

    /// How the circuit breakers of this bus stand.
    pub fn breakers(&self) -> Vec<BreakerInfo> {
        self.inner.shared.circuits.infos()
    }

    /// Removes a subscription, its handler and its durable record. Runs of the handler that have
    /// begun finish; no new one begins. What its group owes and no other handler here matches is
    /// left to other processes.
    pub async fn unsubscribe(&self, id: SubscriptionId) -> Result<()> {
        let mut registry = self.inner.registry.lock().await;
        self.accepts()?;
        let shared = &self.inner.shared;
        shared.unless_ending(registry.unsubscribe(shared, id)).await
    }

    /// Starts dispatching: handlers run from now on, also those that are subscribed later. What was
    /// in flight in a process that died is taken up again. Starting twice is harmless.
    pub async fn start(&self) -> Result<()> {
        let mut registry = self.inner.registry.lock().await;
        self.accepts()?;
        let _ = self.inner.runtime.set(Handle::current());
        let shared = &self.inner.shared;
        if !registry.start(shared) {
            return Ok(());
        }
        if let Some(objects) = shared.objects.clone() {
            let collecting = overflow::collect_daily(shared.clone(), objects);
            registry.keep(tokio::spawn(collecting));
        }
        if let Some(retention) = shared.options.retention.clone() {
            registry.keep(tokio::spawn(retention::prune_daily(
                shared.clone(),
                retention,
            )));
        }
        Ok(())
    }

    /// Shuts down within the configured time (30 s unless set), as
    /// [`shutdown_within`](Self::shutdown_within) does.
    pub async fn shutdown(&self) -> Result<Shutdown> {
        self.shutdown_within(self.inner.shared.options.shutdown_timeout)
            .await
    }

    /// Shuts down: refuses new publishes and subscriptions (`EventBusShutdownError`), gives back what
    /// has not begun, lets running handlers finish within `timeout`, makes their outcomes durable and
    /// closes the engine. It returns at the latest 5 seconds after `timeout`: that is what outcomes and
    /// the engine get when the handlers have taken all of it, or when another program holds the file.
    ///
    /// Handlers that are still running after `timeout` are abandoned; their events will be delivered
    /// again, with the attempt counted. [`Shutdown`] says how many those are, how many outcomes could
    /// not be made durable in time, and whether the engine is closed. Shutting down twice, also at the same time, is harmless: both calls
    /// return the report of the first. Dropping the future does not stop the shutdown. A handler that
    /// awaits the shutdown of its own bus waits for itself and is abandoned.
    pub async fn shutdown_within(&self, timeout: Duration) -> Result<Shutdown> {
        let mut ending = self.begin_shutdown(timeout);
        let report = ending.wait_for(Option::is_some).await;
        match report.as_deref() {
            Ok(Some(report)) => report.clone(),
            _ => Err(Error::new(
                Code::Internal,
                "the shutdown ended without a report",
            )),
        }
    }

    fn begin_shutdown(&self, timeout: Duration) -> watch::Receiver<Ending> {
        let mut ending = self
            .inner
            .ending
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(running) = &*ending {
            return running.clone();
        }
        self.inner.shared.refuse_new_work();
        let deadline = shutdown::deadline(timeout);
        let (report, receiver) = watch::channel(None);
        let inner = self.inner.clone();
        // A task of its own, so that it goes on when the caller stops waiting.
        tokio::spawn(async move {
            let registry = std::mem::take(&mut *inner.registry.lock().await);
            let outcome = shutdown::drain(&inner.shared, registry, deadline).await;
            report.send_replace(Some(outcome));
        });
        *ending = Some(receiver.clone());
        receiver
    }

    /// The dead letters. They need no started bus.
    pub fn dead_letters(&self) -> DeadLetterQueue {
        DeadLetterQueue::new(self.inner.shared.clone())
    }

    /// The payload stages: what events looked like on their way. They need no started bus.
    pub fn payloads(&self) -> PayloadStages {
        PayloadStages::new(self.inner.shared.clone())
    }

    /// The record with its event as it was published. What [`log`](Self::log) and dead letters give may
    /// have a part of its payload in an object store; a record that is whole is returned as it is.
    ///
    /// `ObjectStoreError` if the object is missing, cannot be reached, or is not what was put there.
    pub async fn whole(&self, record: &Arc<Recorded>) -> Result<Arc<Recorded>> {
        self.inner.shared.whole(record).await
    }

    /// Deletes the objects that no event refers to any more; a started bus does so by itself once a
    /// day. Nothing is deleted where nothing is moved to an object store.
    pub async fn collect_objects(&self, options: &Collect) -> Result<Collected> {
        match &self.inner.shared.objects {
            Some(objects) => objects.collect(self.engine(), options).await,
            None => Ok(Collected::default()),
        }
    }

    /// The audit trail: who did what. It needs no started bus.
    pub fn audit(&self) -> AuditTrail {
        self.inner.shared.audit()
    }

    /// How every group of the engine stands, those of other processes included.
    pub async fn groups(&self) -> Result<Vec<GroupInfo>> {
        self.inner.shared.engine.broker.inspect().await
    }

    /// Deletes a group with its position, what it owes and its dead letters. Refused while this bus
    /// has handlers in it.
    pub async fn remove_group(&self, group: GroupName) -> Result<()> {
        let mut registry = self.inner.registry.lock().await;
        self.accepts()?;
        registry.forget_group(&group)?;
        let shared = &self.inner.shared;
        shared.group_not_stopped(&group);
        let action = Action::new("groups.remove").on("GROUP", &group);
        let removed = shared.engine.broker.remove_group(group);
        let operator = shared.audit().operator();
        let removed = audited(&shared.engine, &operator, action, removed);
        shared.unless_ending(removed).await
    }

    /// The log itself, for looking up, reading and tailing events; `Unsupported` where the engine
    /// cannot.
    pub fn log(&self) -> Result<&dyn Log> {
        self.inner.shared.engine.log()
    }

    /// What happened: events by tenant, app, entity, type and time; `Unsupported` where the engine cannot
    /// be asked.
    ///
    /// ```
    /// use everbus::{Bus, Event, HistoryQuery};
    /// # #[tokio::main]
    /// # async fn main() -> everbus::Result<()> {
    /// let bus = Bus::open("memory:").await?;
    /// let event = Event::builder("order.placed").tenant("acme").entity("ORDER", "123").build()?;
    /// bus.publish(event).await?;
    ///
    /// let query = HistoryQuery::default().tenant("acme").entity("ORDER", "123").limit(20);
    /// let page = bus.history()?.query(query).await?;
    /// assert_eq!(page.items[0].event.event_type(), "order.placed");
    /// assert!(page.next.is_none());
    /// # Ok(())
    /// # }
    /// ```
    pub fn history(&self) -> Result<&dyn History> {
        self.inner.shared.engine.history()
    }

    /// The upkeep of the engine's file; `Unsupported` where it has none.
    pub fn maintenance(&self) -> Result<&dyn Maintenance> {
        self.inner.shared.engine.maintenance()
    }

    /// What the engine really offers.
    pub fn capabilities(&self) -> Capabilities {
        self.inner.shared.engine.broker.capabilities()
    }

    /// The engine.
    pub fn engine(&self) -> &Engine {
        &self.inner.shared.engine
    }

    /// The failure after which this bus stopped working, if there was one: a disk that failed, a file
    /// that is damaged or was upgraded by a newer version. Publishes return it too. Open the bus again
    /// to go on. A group may also stop by itself: see [`stopped_groups`](Self::stopped_groups).
    pub fn failure(&self) -> Option<Error> {
        self.inner.shared.failure.get().cloned()
    }

    /// The groups with handlers here that handle nothing any more, and why: somebody else removed
    /// the group, or the engine failed. Other groups and publishes go on after a removal. To have a
    /// removed group again, unsubscribe its handlers and subscribe them anew.
    pub fn stopped_groups(&self) -> Vec<(GroupName, Error)> {
        let stopped = self.inner.shared.stopped_groups();
        let pairs = stopped.iter();
        pairs.map(|(g, e)| (g.clone(), e.clone())).collect()
    }

    /// How many outcomes came too late: the lease was over and the event had gone to somebody else.
    /// More than a few mean that this process is stopped or starved for longer than its leases last.
    pub fn lost_leases(&self) -> u64 {
        self.inner.shared.lost_leases.load(Ordering::Relaxed)
    }

    pub(crate) fn accepts(&self) -> Result<()> {
        self.inner.shared.accepts()
    }

    pub(crate) fn clock(&self) -> &Arc<dyn everbus_core::Clock> {
        &self.inner.shared.options.clock
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.inner.shared
    }
}

fn no_answer() -> Error {
    Error::new(Code::Internal, "the engine did not answer for every event").with_unknown_outcome()
}

impl Drop for Inner {
    fn drop(&mut self) {
        let registry = std::mem::take(self.registry.get_mut());
        // Without a start there is nothing in the background, and after a shutdown nothing is left.
        let Some(runtime) = self.runtime.get().filter(|_| registry.is_started()) else {
            return;
        };
        self.shared.refuse_new_work();
        let shared = self.shared.clone();
        runtime.spawn(async move {
            let deadline = shutdown::deadline(shared.options.shutdown_timeout);
            if let Err(error) = shutdown::drain(&shared, registry, deadline).await {
                tracing::warn!(target: "everbus::shutdown", %error, "a dropped bus did not close cleanly");
            }
        });
    }
}

impl std::fmt::Debug for Bus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bus")
            .field("engine", &self.inner.shared.engine)
            .finish_non_exhaustive()
    }
}
