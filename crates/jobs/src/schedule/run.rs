//! The scheduler: finds the ticks that are due, takes each with the duty of its schedule, and runs it once.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use everbus::core::BoxFuture;
use everbus::duty::{Duty, Taken, Turn};
use everbus::{
    Code, Event, EventBuilder, EventId, HistoryQuery, Pattern, Result, Timestamp, TypedEvent,
};
use serde::{Deserialize, Serialize};
use tokio::task::{AbortHandle, JoinSet};

use super::cron::default_timeout;
use super::{Action, CronTimes, Missed, SCHEDULE, Schedules, StoredSchedule};
use crate::events::{Json, TaskPending, TaskState, Work};
use crate::ids::Parts;
use crate::state::TaskStatus;
use crate::work::{publish_once, run_id};
use crate::worker::{ATTEMPTS, TIMEOUT};
use crate::{Jobs, Origin, WORK};

/// The type of the event that reports a run of a schedule.
pub const RUN_TYPE: &str = "schedule.ran";

/// The longest sleep: stored schedules are read again at least this often, and clocks may jump.
const LOOK: Duration = Duration::from_secs(5);
/// A tick that has not run after this time counts as missed.
const LATE: Duration = Duration::from_secs(60);
/// [`Missed::All`] runs at most this many missed ticks, the newest.
const MOST_MISSED: usize = 100;
/// How many `schedule.ran` events are searched for the last task of a schedule. Each names the task, unless the run
/// failed.
const LAST_RUNS: usize = 50;
/// The lease of a turn is longer than its time limit by this much, so that the process can record the result.
const MARGIN: Duration = Duration::from_secs(10);
/// How long the scheduler waits for running ticks when it stops.
const FINISH: Duration = Duration::from_secs(10);

/// One tick of a schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tick {
    /// The schedule.
    pub schedule: String,
    /// The time of the tick, not of the run.
    pub at: Timestamp,
    /// The fencing token of the turn: it is higher for each later turn.
    pub token: u64,
}

impl Tick {
    /// The id of an event that this tick publishes. It is the same in every process that runs the tick.
    pub fn id(&self, tenant: &str, event_type: &str) -> EventId {
        let parts = Parts {
            tenant,
            job: "",
            task: &self.schedule,
            run: self.at.as_micros().unsigned_abs(),
            event_type,
        };
        parts.at(Some(self.at))
    }
}

/// The result of a run: the payload of `schedule.ran`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ScheduleRan {
    /// The schedule.
    pub schedule: String,
    /// The time of the tick.
    pub tick: Timestamp,
    /// How long the run took.
    pub duration_ms: u64,
    /// The task that the run submitted, or the earlier task that has not ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// Why the run did nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
    /// Why the run failed. It is not retried; the schedule continues with the next tick.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The result of a run that did not fail.
#[derive(Clone, Debug, Default)]
struct Done {
    request_id: Option<String>,
    skipped: Option<String>,
}

type Function =
    Arc<dyn Fn(Tick) -> BoxFuture<'static, std::result::Result<(), String>> + Send + Sync>;

/// The work of a schedule at each tick.
#[derive(Clone)]
enum Doing {
    Function(Function),
    Stored(Box<StoredSchedule>),
}

/// A schedule that this process runs.
#[derive(Clone)]
struct Entry {
    name: String,
    times: CronTimes,
    timeout: Option<Duration>,
    missed: Missed,
    since: Timestamp,
    work: Doing,
}

/// Runs schedules: functions of this program, and stored schedules.
///
/// ```
/// use everbus::Bus;
/// use everbus_jobs::Jobs;
/// use everbus_jobs::schedule::{CronTimes, Scheduler};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> everbus::Result<()> {
/// let jobs = Jobs::new(Bus::open("memory:").await?)?;
/// let every_quarter = CronTimes::new("*/15 * * * *", "UTC")?;
/// let scheduler = Scheduler::new(jobs).on("report", every_quarter, async |tick| {
///     println!("the report of {}", tick.at);
///     Ok(())
/// });
/// # let stop = async {};
/// scheduler.run(stop).await?; // until `stop` ends
/// # Ok(())
/// # }
/// ```
#[must_use = "a scheduler does nothing until it runs"]
pub struct Scheduler {
    jobs: Jobs,
    owner: String,
    own: Vec<Entry>,
    stored: Option<Schedules>,
    /// For each schedule, the last tick that needs no further look: it was taken by a process, or was missed.
    known: BTreeMap<String, Timestamp>,
    /// For each schedule, the last run that this process began.
    begun: BTreeMap<String, AbortHandle>,
    running: JoinSet<()>,
}

impl Scheduler {
    /// A scheduler without schedules.
    pub fn new(jobs: Jobs) -> Self {
        Self {
            jobs,
            owner: format!("process {}", std::process::id()),
            own: Vec::new(),
            stored: None,
            known: BTreeMap::new(),
            begun: BTreeMap::new(),
            running: JoinSet::new(),
        }
    }

    /// The name of this process in the records of duties.
    pub fn owner(mut self, owner: impl Into<String>) -> Self {
        self.owner = owner.into();
        self
    }

    /// Runs a function at these times. Processes that use the same name share the schedule: each tick runs in one of
    /// them. Missed ticks are skipped.
    pub fn on<F, R>(mut self, name: impl Into<String>, times: CronTimes, function: F) -> Self
    where
        F: Fn(Tick) -> R + Send + Sync + 'static,
        R: Future<Output = std::result::Result<(), String>> + Send + 'static,
    {
        self.own.push(Entry {
            name: name.into(),
            times,
            timeout: None,
            missed: Missed::Skip,
            since: self.jobs.now(),
            work: Doing::Function(Arc::new(move |tick| Box::pin(function(tick)))),
        });
        self
    }

    /// Sets the time limit and the policy for missed ticks of the schedule that was added last.
    pub fn with(mut self, timeout: Option<Duration>, missed: Missed) -> Self {
        if let Some(last) = self.own.last_mut() {
            last.timeout = timeout;
            last.missed = missed;
        }
        self
    }

    /// Also runs the stored schedules, including those that are added later.
    pub fn stored(mut self) -> Result<Self> {
        self.stored = Some(Schedules::of(self.jobs.bus())?);
        Ok(self)
    }

    /// Runs until `stop` resolves. Then it waits up to 10 seconds for running ticks.
    pub async fn run(mut self, stop: impl Future<Output = ()>) -> Result<()> {
        let mut stop = std::pin::pin!(stop);
        loop {
            let pause = match self.look().await {
                Ok(next) => {
                    let until = next.map_or(LOOK, |next| next.since(self.jobs.now()));
                    until.clamp(Duration::from_millis(10), LOOK)
                }
                Err(error) if error.code() == Code::EventBusShutdownError => return Ok(()),
                Err(error) => {
                    tracing::warn!(target: "everbus::schedule", %error, "schedules could not be looked at");
                    LOOK
                }
            };
            tokio::select! {
                () = &mut stop => break,
                () = tokio::time::sleep(pause) => {}
            }
        }
        let all = async { while self.running.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(FINISH, all).await;
        Ok(())
    }

    /// Begins every tick that is due now. Returns the time of the next tick.
    pub async fn look(&mut self) -> Result<Option<Timestamp>> {
        while self.running.try_join_next().is_some() {}
        let mut next = None::<Timestamp>;
        for entry in self.entries().await? {
            let now = self.jobs.now();
            let begun = self.begun.get(&entry.name);
            if begun.is_none_or(AbortHandle::is_finished) {
                let due = self.due(&entry, now).await?;
                self.begin(&entry, due).await?;
            }
            let coming = entry.times.next_after(now);
            next = next.into_iter().chain(coming).min();
        }
        Ok(next)
    }

    /// Waits until every tick that was begun has ended.
    pub async fn settled(&mut self) {
        while self.running.join_next().await.is_some() {}
    }

    async fn entries(&self) -> Result<Vec<Entry>> {
        let mut entries = self.own.clone();
        let stored = match &self.stored {
            Some(stored) => stored.list().await?,
            None => Vec::new(),
        };
        for schedule in stored.into_iter().filter(|schedule| !schedule.paused) {
            match schedule.times() {
                Ok(times) => entries.push(Entry {
                    name: schedule.name.clone(),
                    times,
                    timeout: schedule.timeout(),
                    missed: schedule.missed,
                    since: schedule.since,
                    work: Doing::Stored(Box::new(schedule)),
                }),
                Err(error) => {
                    tracing::error!(target: "everbus::schedule", schedule = schedule.name, %error, "a schedule cannot run");
                }
            }
        }
        Ok(entries)
    }

    /// The ticks that are due now, oldest first.
    async fn due(&mut self, entry: &Entry, now: Timestamp) -> Result<Vec<Timestamp>> {
        let Some(newest) = entry.times.last_at(now) else {
            return Ok(Vec::new());
        };
        // `since` of a function is the start of this process. With `Once` and `All`, ticks before the start also count:
        // the record of the duty has the last tick that was taken.
        let makes_up = matches!(entry.work, Doing::Function(_)) && entry.missed != Missed::Skip;
        if newest <= entry.since && !makes_up {
            return Ok(Vec::new());
        }
        if self
            .known
            .get(&entry.name)
            .is_some_and(|known| *known >= newest)
        {
            return Ok(Vec::new());
        }
        let state = self.duty(&entry.name)?.state().await?;
        let last = match state {
            Some(state) if makes_up => state.turn,
            Some(state) => state.turn.max(entry.since),
            None => entry.since,
        };
        let ticks = match entry.missed {
            Missed::All => entry.times.between(last, now, MOST_MISSED),
            _ => Vec::from_iter((newest > last).then_some(newest)),
        };
        let fresh = |tick: &Timestamp| entry.missed != Missed::Skip || now.since(*tick) <= LATE;
        let due: Vec<Timestamp> = ticks.into_iter().filter(fresh).collect();
        if due.is_empty() {
            // The newest tick was taken by another process, or was missed.
            self.known.insert(entry.name.clone(), newest);
        }
        Ok(due)
    }

    fn duty(&self, name: &str) -> Result<Duty> {
        let key = format!("schedule/{name}");
        Duty::of(self.jobs.bus().engine(), key, &*self.owner)
    }

    /// Takes the ticks and runs them one after another, in a task of their own.
    async fn begin(&mut self, entry: &Entry, ticks: Vec<Timestamp>) -> Result<()> {
        let mut ticks = ticks.into_iter();
        let Some(first) = ticks.next() else {
            return Ok(());
        };
        let duty = self.duty(&entry.name)?;
        let mut taken = match take(&self.jobs, entry, &duty, first).await? {
            Some(taken) => Some(taken),
            None if duty.state().await?.is_some_and(|state| state.turn >= first) => {
                self.known.insert(entry.name.clone(), first);
                return Ok(());
            }
            None => return Ok(()),
        };
        if ticks.len() == 0 {
            self.known.insert(entry.name.clone(), first);
        }
        let (jobs, of) = (self.jobs.clone(), entry.clone());
        let running = self.running.spawn(async move {
            while let Some((run, turn)) = taken {
                run.carry_out(turn).await;
                let Some(tick) = ticks.next() else {
                    return;
                };
                // If the tick cannot be taken, another process runs the rest, or this process after its next look.
                taken = take(&jobs, &of, &duty, tick).await.unwrap_or_else(|error| {
                    tracing::warn!(target: "everbus::schedule", schedule = of.name, %tick, %error, "a missed tick could not be taken");
                    None
                });
            }
        });
        self.begun.insert(entry.name.clone(), running);
        Ok(())
    }
}

/// Takes a tick. `None` if it was taken before, or if the tick before it has not ended.
async fn take(
    jobs: &Jobs,
    entry: &Entry,
    duty: &Duty,
    at: Timestamp,
) -> Result<Option<(Run, Turn)>> {
    let interval = entry.times.interval(at).unwrap_or(LATE);
    let timeout = entry.timeout.unwrap_or_else(|| default_timeout(interval));
    let clock = jobs.clock();
    let turn = match duty.take(at, timeout + MARGIN, &*clock).await? {
        Taken::Yes(turn) => turn,
        Taken::Done(_) => return Ok(None),
        Taken::Busy(state) => {
            tracing::warn!(
                target: "everbus::schedule",
                schedule = entry.name,
                tick = %at,
                owner = state.owner,
                "a tick waits: the one before has not ended"
            );
            return Ok(None);
        }
    };
    let run = Run {
        jobs: jobs.clone(),
        entry: entry.clone(),
        tick: Tick {
            schedule: entry.name.clone(),
            at,
            token: turn.token(),
        },
        timeout,
    };
    Ok(Some((run, turn)))
}

impl std::fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scheduler")
            .field("owner", &self.owner)
            .field("own", &self.own.iter().map(|e| &e.name).collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}

/// The run of one tick.
struct Run {
    jobs: Jobs,
    entry: Entry,
    tick: Tick,
    timeout: Duration,
}

impl Run {
    /// Runs the tick once. Publishes the result and ends the turn, also after a failure.
    async fn carry_out(self, turn: Turn) {
        let started = tokio::time::Instant::now();
        let result = match tokio::time::timeout(self.timeout, self.work()).await {
            Ok(result) => result,
            Err(_) => Err(format!("it did not end within {:?}", self.timeout)),
        };
        let (schedule, tick) = (&self.tick.schedule, self.tick.at);
        match &result {
            Ok(done) => {
                let skipped = done.skipped.as_deref();
                tracing::info!(target: "everbus::schedule", schedule, %tick, skipped, "a schedule ran");
            }
            Err(error) => {
                tracing::warn!(target: "everbus::schedule", schedule, %tick, error, "a schedule failed; its next tick comes");
            }
        }
        let took = started.elapsed();
        let (done, error) = match result {
            Ok(done) => (done, None),
            Err(error) => (Done::default(), Some(error)),
        };
        let ran = ScheduleRan {
            schedule: schedule.clone(),
            tick,
            duration_ms: u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
            request_id: done.request_id,
            skipped: done.skipped,
            error: error.clone(),
        };
        let event = self
            .event(RUN_TYPE)
            .entity(SCHEDULE, schedule.as_str())
            .id(self.id(RUN_TYPE))
            .json(&ran);
        let clock = self.jobs.clock();
        let published = once(self.jobs.bus().publish(event).await);
        let finished = turn.finish(error.map_or(Ok(()), Err), &*clock).await;
        if let Err(error) = published.and(finished) {
            tracing::warn!(target: "everbus::schedule", schedule, %tick, %error, "the end of a run was not recorded");
        }
    }

    async fn work(&self) -> std::result::Result<Done, String> {
        match &self.entry.work {
            Doing::Function(function) => {
                function(self.tick.clone()).await.map(|()| Done::default())
            }
            Doing::Stored(schedule) => {
                let done = match &schedule.action {
                    Action::Event {
                        event_type,
                        payload,
                    } => self.publish(event_type, payload).await,
                    Action::Task { name, input } => self.submit(name, input).await,
                };
                done.map_err(|error| error.to_string())
            }
        }
    }

    async fn publish(&self, event_type: &str, payload: &Json) -> Result<Done> {
        let event = self.event(event_type).id(self.id(event_type));
        let event = event
            .json(payload)
            .meta("schedule", self.tick.schedule.as_str());
        once(self.jobs.bus().publish(event).await)?;
        Ok(Done::default())
    }

    /// Submits a task with one attempt and the time limit of the schedule.
    async fn submit(&self, name: &str, input: &Json) -> Result<Done> {
        let jobs = self.jobs.of(&self.event(WORK).build()?);
        if let Some(task) = self.unfinished(&jobs).await? {
            let request_id = task.request_id.clone();
            if task.state == Some(TaskState::Pending) && !jobs.has_work(&task).await? {
                // The process that submitted the task died between `Task Pending` and the work message.
                let events = self.start_events(&jobs, (&request_id, task.run), name, input)?;
                publish_once(jobs.bus(), events.into()).await?;
            }
            // The task is named in this run too, so that the next tick finds it.
            return Ok(Done {
                skipped: Some(format!("the task {request_id} has not ended")),
                request_id: Some(request_id),
            });
        }
        let request_id = self.task_of(self.tick.at);
        let events = self.start_events(&jobs, (&request_id, 1), name, input)?;
        publish_once(jobs.bus(), events.into()).await?;
        Ok(Done {
            request_id: Some(request_id),
            skipped: None,
        })
    }

    /// The `Task Pending` and the work message for one run of a task.
    fn start_events(
        &self,
        jobs: &Jobs,
        (request_id, run): (&str, u32),
        name: &str,
        input: &Json,
    ) -> Result<[Event; 2]> {
        let request_id = request_id.to_owned();
        let emitter = jobs.emitter(Origin::Producer);
        let pending = TaskPending {
            request_id: request_id.clone(),
            job_id: None,
            name: name.to_owned(),
            depends_on: None,
        };
        let work = Work {
            request_id: request_id.clone(),
            job_id: None,
            name: name.to_owned(),
            input: input.clone(),
        };
        // The ids are derived as for every other task: `task retry` finds the work message by its id.
        let id = |event_type| run_id(jobs.tenant(), None, &request_id, run, event_type);
        let pending = emitter
            .event_of_run(&pending, None, run)
            .id(id(TaskPending::TYPE));
        let work = emitter
            .event_of_run(&work, None, run)
            .id(id(WORK))
            .key(format!("TASK#{request_id}"))
            .meta(ATTEMPTS, "1")
            .meta(TIMEOUT, self.timeout.as_millis().to_string());
        Ok([pending.build()?, work.build()?])
    }

    /// The id of the task that a tick submits.
    fn task_of(&self, tick: Timestamp) -> String {
        format!("{}.{tick}", self.tick.schedule)
    }

    /// The task of an earlier tick that has not ended.
    async fn unfinished(&self, jobs: &Jobs) -> Result<Option<TaskStatus>> {
        let query = HistoryQuery::default()
            .entity(SCHEDULE, &self.tick.schedule)
            .types(RUN_TYPE.parse::<Pattern>()?)
            .limit(LAST_RUNS);
        let query = match &self.tenant() {
            Some(tenant) => query.tenant(tenant),
            None => query,
        };
        let page = jobs.bus().history()?.query(query).await?;
        let mut runs = page.items.iter();
        let last = runs.find_map(|record| record.event.json::<ScheduleRan>().ok()?.request_id);
        // The process of the previous tick may have died after it submitted its task and before it published
        // `schedule.ran`.
        let before = self.tick.at.minus(Duration::from_micros(1));
        let before = self.entry.times.last_at(before);
        let before = before.map(|tick| self.task_of(tick));
        for request_id in last.into_iter().chain(before) {
            let task = jobs.task(&request_id).await?;
            let open = |task: &TaskStatus| task.state.is_some_and(|state| !state.is_terminal());
            if let Some(task) = task.filter(open) {
                return Ok(Some(task));
            }
        }
        Ok(None)
    }

    fn tenant(&self) -> Option<String> {
        match &self.entry.work {
            Doing::Stored(schedule) => schedule.tenant.clone(),
            Doing::Function(_) => None,
        }
    }

    fn event(&self, event_type: &str) -> EventBuilder {
        let event = Event::builder(event_type).occurred_at(self.jobs.now());
        match self.tenant() {
            Some(tenant) => event.tenant(tenant),
            None => event,
        }
    }

    fn id(&self, event_type: &str) -> EventId {
        let tenant = self.tenant().unwrap_or_default();
        self.tick.id(&tenant, event_type)
    }
}

/// Treats `IdReused` as success: the event was published before.
pub(crate) fn once<T>(published: Result<T>) -> Result<()> {
    match published {
        Ok(_) => Ok(()),
        Err(error) if error.code() == Code::IdReused => Ok(()),
        Err(error) => Err(error),
    }
}
