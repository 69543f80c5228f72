//! One attempt at one task: from the work message to the end of the work. `ending.rs` turns the end into events.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use everbus::core::FailureKind;
use everbus::{
    Context, Event, EventBuilder, EventId, HandlerError, LeaseExtension, Message, Outcome,
    Timestamp, skip,
};
use futures_util::FutureExt as _;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::cancel::{Cancellations, is_asked_for};
use super::child::{ChildCommand, ChildLimits, Running, Stopped};
use super::classify::{Classifier, cut};
use super::ending::{End, Finished, cannot_start, end_id, millis, of_child, of_stop};
use super::task::{Reports, Task, TaskError, TaskHandler};
use super::{ATTEMPTS, TIMEOUT};
use crate::events::{
    ErrorCategory, Json, LastActivity, MemoryUsage, Signal, TaskHeartbeat, TaskStarted,
};
use crate::handle::is_copy;
use crate::state::Kind;
use crate::{ATTEMPT, Emitter, Jobs, WorkItem, run_of};

/// A task that ran during this many crashes of workers is taken as their cause, if it ran alone during the last one.
const CRASHES: usize = 3;
/// The time limit of the bus is longer than the limit of the task by this much, so that the worker ends the task first.
const MARGIN: Duration = Duration::from_secs(60);
/// The longest pause before a task with an unknown name goes back to the group.
const UNKNOWN_PAUSE: Duration = Duration::from_secs(1);
/// The most bytes of the name of a step that are kept.
const LONGEST_STEP: usize = 1024;

/// The state that all attempts of a worker share.
pub(super) struct Runner {
    pub(super) jobs: Jobs,
    /// The id of the worker in events.
    pub(super) id: String,
    /// The emitter for the tenant and app of `jobs`.
    pub(super) emitter: Emitter,
    pub(super) command: Option<Arc<ChildCommand>>,
    pub(super) handlers: BTreeMap<String, TaskHandler>,
    pub(super) any: Option<TaskHandler>,
    pub(super) classifier: Classifier,
    pub(super) heartbeat: Duration,
    pub(super) timeout: Duration,
    pub(super) finish: Duration,
    pub(super) cancellations: Cancellations,
    /// How long a task with an unknown name is left to other workers.
    pub(super) patience: Duration,
    /// The work messages with unknown names, and when each came first.
    pub(super) unknown: Mutex<HashMap<EventId, Instant>>,
}

/// The running work: a child process or a function.
enum Work {
    Child(Running),
    Function {
        run: futures_util::future::BoxFuture<'static, Result<Json, TaskError>>,
        reports: Arc<Reports>,
        deadline: Instant,
    },
}

/// One attempt.
pub(super) struct Attempt<'a> {
    pub(super) runner: &'a Runner,
    pub(super) item: WorkItem,
    pub(super) emitter: Emitter,
    pub(super) context: &'a Context,
    /// Whether a person asked for this delivery. Then attempts are counted from 1 again.
    is_asked_for: bool,
    /// The id of the event that ends the task with the ack.
    pub(super) end_id: EventId,
    /// The limits of a child process. Its time limit also applies to a function.
    pub(super) limits: ChildLimits,
    pub(super) max_attempts: u32,
}

impl Runner {
    /// Runs one attempt.
    pub(super) async fn run(
        &self,
        message: &Message,
        context: &Context,
    ) -> Result<Outcome, HandlerError> {
        let event = message.event();
        if is_copy(event) {
            return Err(skip(
                "a replay for all groups runs no task again; `everbus task retry` does",
            ));
        }
        let item = WorkItem::of(event)?;
        let emitter = self.emitter.of(event);
        let cancellations = &self.cancellations;
        if cancellations.is_over(&self.jobs, &item, message).await? {
            return Err(skip(
                "the task was cancelled, has been started again, or has ended",
            ));
        }
        let limits = self.limits(event, &item.work.name);
        let is_asked_for = is_asked_for(message);
        let last_end = match is_asked_for {
            true => self.last_end(event, &item).await?,
            false => None,
        };
        let attempt = Attempt {
            runner: self,
            end_id: end_id(event.id(), last_end),
            item,
            emitter,
            context,
            is_asked_for,
            limits,
            max_attempts: number(event, ATTEMPTS).map_or(context.max_attempts(), |wanted| {
                context
                    .max_attempts()
                    .min(u32::try_from(wanted).unwrap_or(u32::MAX))
            }),
        };
        if let Some(crashes) = crashes(context) {
            let error = format!("{crashes} workers died while they ran this task");
            return Err(attempt.used_up(&error));
        }
        if number(event, ATTEMPTS).is_some() && context.attempt() > attempt.max_attempts {
            // The last allowed attempt ended with a crash or a lost lease. The bus has delivered the task again,
            // because it only knows its own, larger limit.
            let most = attempt.max_attempts;
            let error = format!("its worker died or lost the task, which has {most} attempts");
            return Err(attempt.used_up(&error));
        }
        if !self.knows(&attempt.item.work.name) {
            return self.leave_to_others(&attempt, message).await;
        }
        attempt.run().await
    }

    /// The function for tasks with this name.
    fn handler(&self, name: &str) -> Option<&TaskHandler> {
        self.handlers.get(name).or(self.any.as_ref())
    }

    /// Whether this worker can run tasks with this name.
    fn knows(&self, name: &str) -> bool {
        self.command.is_some() || self.handler(name).is_some()
    }

    /// Gives back a task that has no handler here: another worker may have one. No attempt is counted. If the task
    /// still comes back after `patience`, it fails.
    async fn leave_to_others(
        &self,
        attempt: &Attempt<'_>,
        message: &Message,
    ) -> Result<Outcome, HandlerError> {
        let name = &attempt.item.work.name;
        let known: Vec<&str> = self.handlers.keys().map(String::as_str).collect();
        let known = known.join(", ");
        let error = format!("this worker has no handler for {name:?}; it has {known}");
        let now = Instant::now();
        let first = {
            let mut unknown = self.unknown.lock();
            unknown.retain(|_, first| now.duration_since(*first) < 2 * self.patience);
            *unknown.entry(message.event().id()).or_insert(now)
        };
        if now.duration_since(first) >= self.patience {
            self.unknown.lock().remove(&message.event().id());
            return Err(attempt.used_up(&error));
        }
        // Without a pause, a single worker would get the same task again at once.
        tokio::select! {
            () = attempt.context.shutting_down() => {}
            () = tokio::time::sleep((self.patience / 10).min(UNKNOWN_PAUSE)) => {}
        }
        Err(HandlerError::give_back(error))
    }

    /// The last end of this run so far.
    async fn last_end(
        &self,
        event: &Event,
        item: &WorkItem,
    ) -> Result<Option<EventId>, HandlerError> {
        let mut last = None;
        let jobs = self.jobs.of(event);
        jobs.each_event_of_task(&item.work.request_id, |record| {
            let event = &record.event;
            let is_end =
                Kind::of(event.event_type()).is_some_and(|kind| kind.state().is_terminal());
            if is_end && !is_copy(event) && run_of(event).unwrap_or(1) == item.run {
                last = Some(event.id());
            }
        })
        .await?;
        Ok(last)
    }

    /// The limits of an attempt. A work message may set a shorter time limit.
    fn limits(&self, event: &Event, name: &str) -> ChildLimits {
        let command = self.command.as_ref();
        let command = command.filter(|_| self.handler(name).is_none());
        let mut limits = command.map_or_else(
            || ChildLimits::default().timeout(self.timeout),
            |command| command.child_limits(),
        );
        if let Some(wanted) = number(event, TIMEOUT) {
            limits.timeout = limits.timeout.min(Duration::from_millis(wanted.max(1)));
        }
        limits
    }
}

/// A number in the metadata of a work message.
fn number(event: &Event, key: &str) -> Option<u64> {
    event.metadata().get(key)?.parse().ok()
}

/// How many workers crashed with this task, if the task is taken as the cause.
fn crashes(context: &Context) -> Option<usize> {
    let crashes = context.failures().iter();
    let crashes: Vec<_> = crashes.filter(|f| f.kind == FailureKind::Crash).collect();
    let alone = crashes.last().is_some_and(|crash| crash.alone);
    (alone && crashes.len() >= CRASHES).then_some(crashes.len())
}

impl Attempt<'_> {
    async fn run(&self) -> Result<Outcome, HandlerError> {
        // Subscribed before the start, so that no lease extension or loss is missed.
        let mut extensions = self.context.extensions();
        if self.is_asked_for
            && let Some(end) = self.open_again().await?
        {
            return self.settle(None, Finished::without_work(end, Duration::ZERO));
        }
        let started = Instant::now();
        let mut work = match self.begin(started) {
            Ok(work) => work,
            Err(end) => return self.settle(None, Finished::without_work(end, started.elapsed())),
        };
        let bus = self.runner.jobs.bus();
        let begun = (!self.is_asked_for).then(|| {
            let number = self.context.attempt().to_string();
            self.started(work.pid()).meta(ATTEMPT, number)
        });
        match self.ended_at_once(&mut work, started) {
            // The start and the end are published in one step with the ack.
            Ok(Some(finished)) => return self.settle(begun, finished),
            Ok(None) => {}
            Err(panic) => {
                // The bus records the panic. The start of the attempt is still published.
                if let Some(begun) = begun {
                    bus.publish(begun).await?;
                }
                std::panic::resume_unwind(panic);
            }
        }
        let limit = self.limits.timeout.saturating_add(self.limits.grace);
        self.context.extend(limit.saturating_add(MARGIN));
        if let Some(begun) = begun {
            bus.publish(begun).await?;
        }
        let mut cancelled =
            std::pin::pin!(self.runner.cancellations.wait(&self.emitter, &self.item));
        let mut shutdown = std::pin::pin!(async {
            self.context.shutting_down().await;
            tokio::time::sleep(self.runner.finish).await;
        });
        let mut beat = std::pin::pin!(futures_util::future::Fuse::terminated());
        let mut number = 0;
        let mut is_over = None::<Stopped>;
        let finished = loop {
            let going_on = is_over.is_none();
            tokio::select! {
                biased;
                finished = work.ended(self, is_over, started) => break finished,
                extension = extensions.next(), if going_on => match extension {
                    Some(extension) => {
                        number += 1;
                        let heartbeat = self.heartbeat(&work, &extension, number, started);
                        beat.set(Box::pin(bus.publish(heartbeat).into_future()).fuse());
                    }
                    None => {
                        work.stop(Stopped::LeaseLost, Duration::ZERO);
                        is_over = Some(Stopped::LeaseLost);
                    }
                },
                published = &mut beat, if going_on => if let Err(error) = published {
                    // The lease still holds; the next heartbeat may succeed.
                    tracing::warn!(target: "everbus::worker", %error, request_id = self.item.work.request_id, "a heartbeat was not published");
                },
                () = &mut cancelled, if going_on => {
                    work.stop(Stopped::Cancelled, self.limits.grace);
                    is_over = Some(Stopped::Cancelled);
                }
                () = &mut shutdown, if going_on => {
                    work.stop(Stopped::Shutdown, self.limits.grace);
                    is_over = Some(Stopped::Shutdown);
                }
            }
        };
        self.settle(None, finished)
    }

    /// Publishes the start of an attempt that a person asked for, before its work begins. The start opens an ended run
    /// again, so a store beside the broker must have it before the end of the attempt. Its process id is that of the
    /// worker, since there is no child yet. Returns why the work must not begin.
    async fn open_again(&self) -> Result<Option<End>, HandlerError> {
        // Longer than the wait for the store.
        self.context.extend(MARGIN);
        let jobs = &self.runner.jobs;
        let begun = self.started(std::process::id());
        tokio::select! {
            biased;
            () = self.runner.cancellations.wait(&self.emitter, &self.item) => Ok(Some(End::Cancelled)),
            () = self.context.lease_lost() => Ok(Some(End::LeaseLost)),
            () = self.context.shutting_down() => Ok(Some(End::GivenBack)),
            stored = async {
                let receipt = jobs.bus().publish(begun).await?;
                jobs.until_stored(receipt.id()).await
            } => Ok(stored.map(|()| None)?),
        }
    }

    /// The end of a function that never waits: one poll completes it. `None` for a child, or for a function that waits.
    fn ended_at_once(
        &self,
        work: &mut Work,
        started: Instant,
    ) -> std::thread::Result<Option<Finished>> {
        if matches!(work, Work::Child(_)) {
            return Ok(None);
        }
        let first = || work.ended(self, None, started).now_or_never();
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(first))
    }

    fn lease(&self) -> Duration {
        self.runner.heartbeat * super::HEARTBEATS_IN_LEASE
    }

    /// Starts the work, or says why it cannot be started.
    fn begin(&self, started: Instant) -> Result<Work, End> {
        let work = &self.item.work;
        if let Some(handler) = self.runner.handler(&work.name) {
            let reports = Arc::new(Reports::default());
            let task = Task {
                request_id: work.request_id.clone(),
                job_id: work.job_id.clone(),
                name: work.name.clone(),
                input: work.input.clone(),
                attempt: self.context.attempt(),
                reports: reports.clone(),
            };
            return Ok(Work::Function {
                run: handler(task),
                reports,
                deadline: started + self.limits.timeout,
            });
        }
        let Some(command) = &self.runner.command else {
            return Err(End::Failed {
                category: ErrorCategory::ServerError,
                error: format!("this worker has no handler for {:?}", work.name),
            });
        };
        let variables = [
            ("EVERBUS_REQUEST_ID", work.request_id.clone()),
            ("EVERBUS_TASK_NAME", work.name.clone()),
            ("EVERBUS_ATTEMPT", self.context.attempt().to_string()),
            ("EVERBUS_TENANT", self.emitter.tenant().to_owned()),
        ];
        let job = work.job_id.clone().map(|job| ("EVERBUS_JOB_ID", job));
        let input = work.input.get().as_bytes().to_vec();
        match command.start_within(self.limits, variables.into_iter().chain(job), input) {
            Ok(running) => Ok(Work::Child(running)),
            Err(error) => Err(End::Failed {
                category: cannot_start(&error),
                error: format!("cannot start {:?}: {error}", command.program()),
            }),
        }
    }

    fn started(&self, process_id: u32) -> EventBuilder {
        let of = &self.item.work;
        let now = self.runner.jobs.now();
        self.item
            .event(
                &self.emitter,
                &TaskStarted {
                    request_id: of.request_id.clone(),
                    job_id: of.job_id.clone(),
                    effective_until: seconds(now.plus(self.lease())),
                    worker_id: self.runner.id.clone(),
                    process_id,
                },
            )
            // The event may be published after the end of the work, so the time is set here.
            .occurred_at(now)
    }

    fn heartbeat(
        &self,
        work: &Work,
        extension: &LeaseExtension,
        number: u64,
        started: Instant,
    ) -> EventBuilder {
        let (activity, rss) = work.observe();
        self.item.event(
            &self.emitter,
            &TaskHeartbeat {
                request_id: self.item.work.request_id.clone(),
                effective_until: seconds(extension.until),
                heartbeat_number: number,
                elapsed_ms: millis(started.elapsed()),
                worker_id: self.runner.id.clone(),
                process_id: work.pid(),
                memory_usage: (rss > 0).then_some(MemoryUsage { rss }),
                last_activity: activity,
            },
        )
    }
}

impl Work {
    fn pid(&self) -> u32 {
        match self {
            Self::Child(running) => running.pid(),
            Self::Function { .. } => std::process::id(),
        }
    }

    fn stop(&self, why: Stopped, grace: Duration) {
        if let Self::Child(running) = self {
            running.stop(why, grace);
        }
    }

    fn observe(&self) -> (Option<LastActivity>, u64) {
        let (activity, rss) = match self {
            Self::Child(running) => (running.activity(), running.resident_memory()),
            Self::Function { reports, .. } => (reports.activity.lock().clone(), 0),
        };
        let activity = activity.map(|(activity, at)| LastActivity {
            kind: cut(&activity.kind, LONGEST_STEP).to_owned(),
            step_name: activity
                .step_name
                .map(|step| cut(&step, LONGEST_STEP).to_owned()),
            timestamp: at.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        });
        (activity, rss)
    }

    /// Waits for the end. A function that has to stop is dropped at its current await point.
    async fn ended(
        &mut self,
        attempt: &Attempt<'_>,
        stopped: Option<Stopped>,
        started: Instant,
    ) -> Finished {
        let classifier = &attempt.runner.classifier;
        match self {
            Self::Child(running) => match running.ended().await {
                Ok(ended) => of_child(ended, attempt, classifier),
                Err(error) => Finished {
                    end: End::Failed {
                        category: ErrorCategory::ServerError,
                        error: format!("the child was lost: {error}"),
                    },
                    elapsed: started.elapsed(),
                    details: None,
                },
            },
            Self::Function {
                run,
                reports,
                deadline,
            } => {
                let end = if let Some(why) = stopped {
                    of_stop(why)
                } else {
                    match tokio::time::timeout_at(*deadline, run).await {
                        Ok(Ok(output)) => End::Completed {
                            output,
                            usage: reports.usage.lock().take(),
                            exit_code: 0,
                        },
                        Ok(Err(error)) => End::Failed {
                            category: error
                                .category
                                .filter(|category| *category != ErrorCategory::Cancelled)
                                .unwrap_or_else(|| classifier.of_text(&error.message)),
                            error: error.message,
                        },
                        Err(_) => End::TimedOut {
                            limit: attempt.limits.timeout,
                            signal: Signal::Term,
                        },
                    }
                };
                Finished {
                    end,
                    elapsed: started.elapsed(),
                    details: None,
                }
            }
        }
    }
}

/// Whole seconds since 1970, rounded down: a reader must not take a lock for longer than it is.
fn seconds(time: Timestamp) -> u64 {
    u64::try_from(time.as_micros() / 1_000_000).unwrap_or(0)
}
