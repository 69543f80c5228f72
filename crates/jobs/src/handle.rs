//! The handle on a bus that producers, dispatchers, workers and readers use, and the construction of their events.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use everbus::core::REPLAY_OF;
use everbus::{
    Bus, Clock, Code, Error, Event, EventBuilder, Recorded, Result, Stream, SystemClock, Timestamp,
    TypedEvent as _,
};
use serde::Serialize;

use crate::events::{JobCreated, JobTasksAdded, Properties, TYPES, Work};
use crate::index::Index;
use crate::{DEFAULT_APP, DEFAULT_TENANT, STREAM};

/// The metadata key of the run number. The first run of a task is 1. Each retry by a person, not by the bus, adds 1.
pub const RUN: &str = "run";
/// The metadata key of the attempt number in a `Task Processing Started`. With it, a start that is stored late, after a
/// later attempt has started, does not reopen the run. A start that a person asked for (a retried dead letter, a
/// replay) has no number.
pub const ATTEMPT: &str = "attempt";
/// The metadata key of the context, as the *workflow* dialect reads it.
const CONTEXT: &str = "context";

/// The part of the system that publishes an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// Submits tasks and jobs.
    Producer,
    /// Runs tasks.
    Worker,
    /// Starts the tasks of jobs.
    Dispatcher,
    /// Checks running tasks.
    HealthCheck,
}

/// Tasks and jobs on a bus, for one tenant and app. Clones are cheap.
///
/// ```
/// use everbus::Bus;
/// use everbus_jobs::Jobs;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> everbus::Result<()> {
/// let bus = Bus::open("memory:").await?;
/// let jobs = Jobs::new(bus)?;
/// assert_eq!(jobs.tenant(), "default");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Jobs {
    bus: Bus,
    tenant: Arc<str>,
    app: Arc<str>,
    environment: Arc<str>,
    clock: Arc<dyn Clock>,
    index: Arc<Index>,
    /// Whether this process knows that the retention hold for jobs exists.
    kept: Arc<AtomicBool>,
}

/// The settings of [`Jobs`].
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until it is opened"]
pub struct JobsBuilder {
    tenant: String,
    app: String,
    environment: String,
    clock: Arc<dyn Clock>,
    index: Option<PathBuf>,
}

impl JobsBuilder {
    /// The tenant of the tasks and jobs (`default`).
    pub fn tenant(mut self, tenant: impl Into<String>) -> Self {
        self.tenant = tenant.into();
        self
    }

    /// The app of the tasks and jobs (`task-workflow`).
    pub fn app(mut self, app: impl Into<String>) -> Self {
        self.app = app.into();
        self
    }

    /// The environment in the context of each event (`prod`).
    pub fn environment(mut self, environment: impl Into<String>) -> Self {
        self.environment = environment.into();
        self
    }

    /// The clock (the system clock). It must be the clock of the bus.
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.clock = Arc::new(clock);
        self
    }

    /// The file of the task index. Without a file the index is in memory and is built at its first use. The file is
    /// built from the events, so it can be deleted. Several processes may share it.
    pub fn index(mut self, file: impl Into<PathBuf>) -> Self {
        self.index = Some(file.into());
        self
    }

    /// Opens the handle. Fails with `Unsupported` if the engine has no history: such an engine needs a store beside it.
    pub fn open(self, bus: Bus) -> Result<Jobs> {
        check_id("tenant", &self.tenant)?;
        check_id("app", &self.app)?;
        bus.history()?;
        bus.log()?;
        bus.lookup()?;
        let streams = bus.streams();
        if streams.is_declared() {
            let first = streams.route(TYPES[0])?;
            for event_type in TYPES {
                let stream = streams.route(event_type)?;
                if stream.name != first.name {
                    let what = format!(
                        "{:?} is in the stream {}, and {event_type:?} in {}",
                        TYPES[0], first.name, stream.name
                    );
                    return Err(Error::new(Code::InvalidSetting, what).hint(
                        "all types of tasks and jobs share one stream: everbus_jobs::Jobs::stream() declares it",
                    ));
                }
            }
        }
        Ok(Jobs {
            bus,
            tenant: self.tenant.into(),
            app: self.app.into(),
            environment: self.environment.into(),
            clock: self.clock,
            index: Arc::new(match self.index {
                Some(file) => Index::open(file)?,
                None => Index::in_memory()?,
            }),
            kept: Arc::default(),
        })
    }
}

impl Jobs {
    /// Tasks and jobs of the default tenant and app.
    pub fn new(bus: Bus) -> Result<Self> {
        Self::builder().open(bus)
    }

    /// Begins a handle with other settings.
    pub fn builder() -> JobsBuilder {
        JobsBuilder {
            tenant: DEFAULT_TENANT.to_owned(),
            app: DEFAULT_APP.to_owned(),
            environment: "prod".to_owned(),
            clock: Arc::new(SystemClock),
            index: None,
        }
    }

    /// The stream of all task and job events, for a bus with declared streams.
    pub fn stream() -> Result<Stream> {
        Stream::new(STREAM, TYPES)
    }

    /// The bus.
    pub fn bus(&self) -> &Bus {
        &self.bus
    }

    /// The tenant.
    pub fn tenant(&self) -> &str {
        &self.tenant
    }

    /// The app.
    pub fn app(&self) -> &str {
        &self.app
    }

    /// The index of tasks and jobs.
    pub fn index(&self) -> &Index {
        &self.index
    }

    pub(crate) fn is_kept(&self) -> bool {
        self.kept.load(Ordering::Relaxed)
    }

    pub(crate) fn set_kept(&self) {
        self.kept.store(true, Ordering::Relaxed);
    }

    /// The present time.
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// The clock.
    pub fn clock(&self) -> Arc<dyn Clock> {
        self.clock.clone()
    }

    /// A handle for the tenant and app of an event. Dispatchers and workers serve all tenants.
    #[must_use]
    pub fn of(&self, event: &Event) -> Self {
        let app = event.attributes().and_then(|a| a.app.as_deref());
        let mut jobs = self.clone();
        if event.tenant() != Some(self.tenant()) {
            jobs.tenant = event.tenant().unwrap_or(DEFAULT_TENANT).into();
        }
        if let Some(app) = app.filter(|app| *app != self.app()) {
            jobs.app = app.into();
        }
        jobs
    }

    /// A handle for another tenant.
    #[must_use]
    pub fn for_tenant(&self, tenant: &str) -> Self {
        Self {
            tenant: tenant.into(),
            ..self.clone()
        }
    }

    /// Like [`for_tenant`](Self::for_tenant), for a name from user input. Fails with `InvalidAttribute` if the name is
    /// not allowed in events.
    pub fn of_tenant(&self, tenant: &str) -> Result<Self> {
        check_id("tenant", tenant)?;
        Ok(self.for_tenant(tenant))
    }

    /// An emitter, which makes the events of one origin.
    pub fn emitter(&self, origin: Origin) -> Emitter {
        Emitter {
            tenant: self.tenant.clone(),
            app: self.app.clone(),
            context: context(&self.environment, origin, None).into(),
            environment: self.environment.clone(),
            origin,
        }
    }
}

impl std::fmt::Debug for Jobs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Jobs")
            .field("bus", &self.bus)
            .field("tenant", &self.tenant)
            .field("app", &self.app)
            .finish_non_exhaustive()
    }
}

/// Makes the events of one part of the system. Sets their tenant, app, entity, key and context.
#[derive(Clone, Debug)]
pub struct Emitter {
    tenant: Arc<str>,
    app: Arc<str>,
    environment: Arc<str>,
    origin: Origin,
    context: Arc<str>,
}

impl Emitter {
    /// Adds the id of a worker to the context.
    #[must_use]
    pub fn worker(mut self, worker_id: &str) -> Self {
        self.context = context(&self.environment, self.origin, Some(worker_id)).into();
        self
    }

    /// An emitter for the tenant and app of an event.
    #[must_use]
    pub fn of(&self, event: &Event) -> Self {
        let mut emitter = self.clone();
        if event.tenant() != Some(&*self.tenant) {
            emitter.tenant = event.tenant().unwrap_or(DEFAULT_TENANT).into();
        }
        let app = event.attributes().and_then(|a| a.app.as_deref());
        if let Some(app) = app.filter(|app| *app != &*self.app) {
            emitter.app = app.into();
        }
        emitter
    }

    /// The tenant of the events.
    pub fn tenant(&self) -> &str {
        &self.tenant
    }

    /// An event without a run number: about a job, a health check, or a task whose run is not known.
    pub fn event<P: Properties>(&self, properties: &P) -> EventBuilder {
        self.event_of_run(properties, properties.job(), 0)
    }

    /// An event about one run of a task. `job` becomes the ordering key, which all events of a job share. It is a
    /// parameter because a heartbeat does not name its job.
    pub fn event_of_run<P: Properties>(
        &self,
        properties: &P,
        job: Option<&str>,
        run: u32,
    ) -> EventBuilder {
        let mut builder = properties
            .builder()
            .tenant(&*self.tenant)
            .app(&*self.app)
            .meta(CONTEXT, &*self.context);
        if let Some(entity) = properties.entity() {
            builder = builder.entity(entity.kind, entity.id);
        }
        if let Some(job) = job {
            builder = builder.key(key_of_job(job));
        }
        if run > 0 {
            builder = builder.meta(RUN, run.to_string());
        }
        builder
    }
}

/// A work message and the run of its task. A worker needs both to publish events.
#[derive(Clone, Debug)]
pub struct WorkItem {
    /// The work.
    pub work: Work,
    /// The run of the task, from 1.
    pub run: u32,
}

impl WorkItem {
    /// Reads the message that a worker received.
    pub fn of(event: &Event) -> Result<Self> {
        Ok(Self {
            work: event.json()?,
            run: run_of(event).unwrap_or(1),
        })
    }

    /// An event about this run of the task.
    pub fn event<P: Properties>(&self, emitter: &Emitter, properties: &P) -> EventBuilder {
        emitter.event_of_run(properties, self.work.job_id.as_deref(), self.run)
    }
}

/// The run number in an event, if it carries one.
pub fn run_of(event: &Event) -> Option<u32> {
    event.metadata().get(RUN)?.parse().ok()
}

/// Whether an event is a copy that a replay published for all groups. Such a copy changes no state and starts nothing.
pub(crate) fn is_copy(event: &Event) -> bool {
    let address = event.attributes().and_then(|a| a.address.as_ref());
    address.is_none() && event.metadata().contains_key(REPLAY_OF)
}

/// The record with all fields that states and graphs need. Most records have them in the log. The payload is loaded
/// from the object store for a graph event with moved parts, and for an event whose whole payload was moved.
pub(crate) async fn readable(bus: &Bus, record: &Arc<Recorded>) -> Result<Arc<Recorded>> {
    let is_graph = matches!(
        record.event.event_type(),
        JobCreated::TYPE | JobTasksAdded::TYPE
    );
    match record.event.overflow() {
        Some(moved) if is_graph || moved.parts.is_empty() => bus.whole(record).await,
        _ => Ok(record.clone()),
    }
}

/// The ordering key of all events of a job.
pub(crate) fn key_of_job(job: &str) -> String {
    format!("JOB#{job}")
}

fn context(environment: &str, origin: Origin, worker_id: Option<&str>) -> String {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Context<'a> {
        source: &'static str,
        environment: &'a str,
        origin: Origin,
        #[serde(skip_serializing_if = "Option::is_none")]
        worker_id: Option<&'a str>,
    }
    let context = Context {
        source: "system",
        environment,
        origin,
        worker_id,
    };
    serde_json::to_string(&context).unwrap_or_default()
}

/// Refuses an id that is empty, is too long, has a control character, or contains `#`. With `#` an id could imitate a
/// table key.
pub(crate) fn check_id(what: &str, id: &str) -> Result<()> {
    let bad = |why: &str| {
        Err(
            Error::new(Code::InvalidAttribute, format!("the {what} {id:?} {why}"))
                .hint("1 to 255 printable characters without #, for example scrape-1"),
        )
    };
    if id.is_empty() {
        return bad("is empty");
    }
    if id.chars().count() > 255 {
        return bad("is too long");
    }
    if id.contains('#') {
        return bad("contains #, which separates the parts of keys");
    }
    if id.chars().any(char::is_control) {
        return bad("contains a control character");
    }
    Ok(())
}
