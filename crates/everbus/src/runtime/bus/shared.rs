//! The state that background tasks and receipts of a bus share: the engine, the settings, and whether the
//! bus still accepts work.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use everbus_core::{Class, Code, Engine, Error, GroupName, Recorded, Result};
use parking_lot::{Mutex, MutexGuard, RwLock};
use tokio::sync::{OnceCell, watch};

use crate::admission::Admission;
use crate::audit::AuditTrail;
use crate::environment::Environment;
use crate::guard;
use crate::overflow::{self, Objects};
use crate::runtime::circuits::Circuits;
use crate::runtime::drops::Drops;
use crate::runtime::options::BusOptions;
use crate::runtime::pauses::Pauses;
use crate::schema::Schemas;
use crate::stats::Stats;

/// Shared state of background tasks and receipts. It does not keep the bus alive.
pub(crate) struct Shared {
    pub(crate) engine: Engine,
    pub(crate) options: BusOptions,
    pub(crate) stats: Stats,
    pub(crate) circuits: Circuits,
    pub(crate) drops: Drops,
    /// The groups that an operator has paused.
    pub(crate) pauses: Pauses,
    /// The parts of the bus that handlers can reach.
    pub(crate) environment: Arc<Environment>,
    /// The object store for large payloads, if there is one.
    pub(crate) objects: Option<Arc<Objects>>,
    pub(super) admission: Admission,
    /// Set once the engine knows the streams.
    streams_declared: OnceCell<()>,
    schemas: RwLock<Arc<Schemas>>,
    /// Whether there are any schemas, so that a publish without schemas takes no lock.
    pub(super) validates: AtomicBool,
    /// Becomes true just before the engine is closed.
    pub(crate) closed: watch::Sender<bool>,
    state: AtomicU8,
    pub(super) failure: OnceLock<Error>,
    stopped_groups: Mutex<BTreeMap<GroupName, Error>>,
    pub(super) lost_leases: AtomicU64,
}

const OPEN: u8 = 0;
const FAILED: u8 = 1;
const CLOSED: u8 = 2;

impl Shared {
    pub(super) fn new(engine: Engine, options: BusOptions) -> Result<Self> {
        options.validate()?;
        let mut options = options;
        options.streams = options.limits.over(&options.streams)?;
        let (limits, streams) = (options.limits.clone(), options.streams.clone());
        Ok(Self {
            admission: Admission::new(limits, options.publish_rate, streams)?,
            objects: Objects::open(&engine, &options.overflow)?,
            environment: Arc::new(Environment::new(engine.clone(), options.clock.clone())),
            engine,
            options,
            stats: Stats::default(),
            circuits: Circuits::default(),
            drops: Drops::default(),
            pauses: Pauses::default(),
            streams_declared: OnceCell::new(),
            schemas: RwLock::default(),
            validates: AtomicBool::new(false),
            closed: watch::Sender::new(false),
            state: AtomicU8::new(OPEN),
            failure: OnceLock::new(),
            stopped_groups: Mutex::default(),
            lost_leases: AtomicU64::new(0),
        })
    }

    /// Fails if the bus no longer accepts publishes and subscriptions: it is shut down or has failed.
    pub(crate) fn accepts(&self) -> Result<()> {
        match self.state.load(Ordering::Acquire) {
            OPEN => Ok(()),
            FAILED => Err(self.failure.get().cloned().unwrap_or_else(Error::shutdown)),
            _ => Err(Error::shutdown()),
        }
    }

    /// Declares the streams to the engine, unless this bus has done so before.
    pub(crate) async fn declare_streams(&self) -> Result<()> {
        if self.streams_declared.initialized() {
            return Ok(());
        }
        let declare = || async {
            let streams = self.options.streams.clone();
            self.engine.broker.declare_streams(streams).await
        };
        // Boxed: only the first caller needs this future.
        Box::pin(self.streams_declared.get_or_try_init(declare)).await?;
        Ok(())
    }

    /// If the error is fatal, remembers it as the failure of the bus, unless there is one already. Returns
    /// whether the error is fatal.
    pub(crate) fn fail_if_fatal(&self, error: &Error) -> bool {
        let fatal = error.class() == Class::Final && error.code() != Code::EventBusShutdownError;
        if fatal && self.failure.set(error.clone()).is_ok() {
            let _ = self
                .state
                .compare_exchange(OPEN, FAILED, Ordering::AcqRel, Ordering::Acquire);
            guard::log(|| {
                tracing::error!(target: "everbus::bus", %error, "the engine failed; the bus accepts no more publishes");
            });
        }
        fatal
    }

    /// Clears the stopped mark of a group: it runs again, or this bus has no handlers in it any more.
    pub(crate) fn group_not_stopped(&self, group: &GroupName) {
        self.stopped_groups().remove(group);
    }

    /// Marks a group as stopped by an error.
    pub(crate) fn group_stopped(&self, group: &GroupName, error: &Error) {
        self.stopped_groups().insert(group.clone(), error.clone());
    }

    pub(super) fn stopped_groups(&self) -> MutexGuard<'_, BTreeMap<GroupName, Error>> {
        self.stopped_groups.lock()
    }

    /// Awaits `change`, a request to the engine, but fails as soon as the shutdown begins: a slow engine must
    /// not delay the shutdown. Remembers a fatal error.
    pub(crate) async fn unless_ending<T>(
        &self,
        change: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let changed = tokio::select! {
            biased;
            changed = change => changed,
            () = self.environment.shutdown_begun() => Err(Error::shutdown()),
        };
        changed.inspect_err(|error| {
            self.fail_if_fatal(error);
        })
    }

    pub(crate) fn count_lost_lease(&self) {
        self.lost_leases.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn schemas(&self) -> Arc<Schemas> {
        let schemas = self.schemas.read();
        schemas.clone()
    }

    pub(crate) fn set_schemas(&self, schemas: Schemas) {
        let any = !schemas.is_empty();
        *self.schemas.write() = Arc::new(schemas);
        self.validates.store(any, Ordering::Release);
    }

    /// The record with its complete event.
    pub(crate) async fn whole(&self, record: &Arc<Recorded>) -> Result<Arc<Recorded>> {
        overflow::whole(self.objects.as_deref(), record).await
    }

    /// The audit trail, with the actor of this bus.
    pub(crate) fn audit(&self) -> AuditTrail {
        AuditTrail::new(self.engine.clone(), self.options.source.clone())
    }

    pub(super) fn refuse_new_work(&self) {
        self.state.store(CLOSED, Ordering::Release);
        self.environment.begin_shutdown();
    }
}
