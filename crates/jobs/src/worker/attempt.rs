//! One attempt at one task: from the work message to the event with its result.

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
use serde_json::json;
use tokio::time::Instant;

use super::cancel::{Cancellations, is_asked_for};
use super::child::{ChildCommand, ChildLimits, Ended, Running, StopSignal, Stopped};
use super::classify::{Classifier, cut};
use super::task::{Reports, Task, TaskError, TaskHandler};
use super::{ATTEMPTS, TIMEOUT};
use crate::events::{
    ErrorCategory, FailureSource, Json, LastActivity, MemoryUsage, Signal, TaskCompleted,
    TaskFailed, TaskHeartbeat, TaskProcessingFailed, TaskStarted, TaskTimeout, Usage,
};
use crate::handle::is_copy;
use crate::ids::time_in;
use crate::state::Kind;
use crate::{ATTEMPT, Emitter, Jobs, WORKERS, WorkItem, run_of};

/// A task that ran during this many crashes of workers is taken as their cause, if it ran alone during the last one.
const CRASHES: usize = 3;
/// The time limit of the bus is longer than the limit of the task by this much, so that the worker ends the task first.
const MARGIN: Duration = Duration::from_secs(60);
/// The longest pause before a task with an unknown name goes back to the group.
const UNKNOWN_PAUSE: Duration = Duration::from_secs(1);
/// The most bytes of an error that are kept: as many as of standard error by default.
pub(super) const LONGEST_ERROR: usize = 4 * 1024;
/// The most bytes of the name of a step that are kept.
const LONGEST_STEP: usize = 1024;
/// More bytes than `Task Completed` has besides its output and its ids.
const ENVELOPE: usize = 384;
/// The metadata key for details about the child process: exit, memory, end of standard error.
pub(crate) const DETAILS: &str = "worker";

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

/// How an attempt ended.
enum End {
    Completed {
        output: Json,
        usage: Option<Usage>,
        exit_code: i32,
    },
    Failed {
        category: ErrorCategory,
        error: String,
    },
    TimedOut {
        limit: Duration,
        signal: Signal,
    },
    Cancelled,
    LeaseLost,
    GivenBack,
}

/// The end of an attempt, and the details for the metadata of its event.
struct Finished {
    end: End,
    elapsed: Duration,
    details: Option<String>,
}

/// One attempt.
struct Attempt<'a> {
    runner: &'a Runner,
    item: WorkItem,
    emitter: Emitter,
    context: &'a Context,
    /// Whether a person asked for this delivery. Then attempts are counted from 1 again.
    is_asked_for: bool,
    /// The id of the event that ends the task with the ack.
    end_id: EventId,
    /// The limits of a child process. Its time limit also applies to a function.
    limits: ChildLimits,
    max_attempts: u32,
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
                "the task was cancelled, has been started again, or has completed",
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

/// The id of the event that ends the task with the ack: the same in every attempt, and for a work message that the
/// broker stored twice. The id that the bus would derive depends on the number of events before it, and an attempt whose
/// function waits has published its start already. Then the end could get the id of a start that a killed worker stored,
/// and would be taken for its duplicate.
///
/// A delivery that a person asked for opens a run that may have ended with this id: a replay delivers the same work
/// message. So the id then depends on that last end too. It stays the same in each attempt until the run ends again.
fn end_id(work: EventId, last_end: Option<EventId>) -> EventId {
    let time = time_in(&work.to_string()).unwrap_or(Timestamp::EPOCH);
    let name = last_end.map_or_else(|| "end".to_owned(), |last| format!("end\0{last}"));
    EventId::derived(work, time, WORKERS, &name, 0)
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

    /// Turns the end of the attempt into the outcome for the work message, with its events. `begun`: the start event,
    /// if it was not published yet.
    fn settle(
        &self,
        begun: Option<EventBuilder>,
        finished: Finished,
    ) -> Result<Outcome, HandlerError> {
        let acked = |begun: Option<EventBuilder>, event: EventBuilder| {
            let mut events = begun.into_iter().chain([event.id(self.end_id)]);
            events.try_fold(Outcome::default(), Outcome::publish)
        };
        let Finished {
            end,
            elapsed,
            details,
        } = finished;
        let end = self.bounded(end);
        let with_details = |event: EventBuilder| match &details {
            Some(details) => event.meta(DETAILS, details.as_str()),
            None => event,
        };
        let work = &self.item.work;
        let (request_id, job_id) = (work.request_id.clone(), work.job_id.clone());
        match end {
            End::Completed {
                output,
                usage,
                exit_code,
            } => {
                let completed = TaskCompleted {
                    request_id,
                    job_id,
                    output,
                    duration_ms: millis(elapsed),
                    exit_code,
                    usage,
                };
                let event = self.item.event(&self.emitter, &completed);
                acked(begun, with_details(event))
            }
            End::TimedOut { limit, signal } => {
                let timeout = TaskTimeout {
                    request_id,
                    job_id,
                    timeout_ms: millis(limit),
                    elapsed_ms: millis(elapsed),
                    signal,
                };
                let event = self.item.event(&self.emitter, &timeout);
                acked(begun, with_details(event))
            }
            End::Failed { category, error } if !category.is_retryable() => {
                let event = self.failed(error, category, FailureSource::Worker);
                acked(begun, with_details(event))
            }
            End::Failed { category, error } => {
                let attempt = self.context.attempt();
                let failed = TaskProcessingFailed {
                    request_id,
                    job_id,
                    attempt_number: attempt,
                    error: error.clone(),
                    error_category: category,
                };
                let event = with_details(self.item.event(&self.emitter, &failed));
                let failed = |error| {
                    let events = begun.into_iter().chain([event]);
                    events.fold(error, HandlerError::with_event)
                };
                if attempt < self.max_attempts {
                    return Err(failed(HandlerError::new(error)));
                }
                let last = self.failed(error.clone(), category, FailureSource::Dlq);
                Err(failed(HandlerError::permanent(error)).with_event(with_details(last)))
            }
            End::Cancelled => Err(skip("the task was cancelled while it ran")),
            End::LeaseLost => Err(HandlerError::new("the lease of the task was lost")),
            End::GivenBack => Err(HandlerError::give_back("the worker stops")),
        }
    }

    /// Cuts a long error. An output that is too large for an event becomes a failure.
    fn bounded(&self, end: End) -> End {
        let most = self.runner.jobs.bus().max_payload();
        let work = &self.item.work;
        let ids = work.request_id.len() + work.job_id.as_ref().map_or(0, String::len);
        let room = most.saturating_sub(ENVELOPE + 2 * ids);
        match end {
            End::Completed { output, .. } if output.get().len() > room => End::Failed {
                category: ErrorCategory::Programming,
                error: format!(
                    "its output has {} bytes, and an event here has at most {most}",
                    output.get().len()
                ),
            },
            End::Failed { category, error } => End::Failed {
                category,
                error: cut(&error, LONGEST_ERROR).to_owned(),
            },
            end => end,
        }
    }

    /// The error for a task without attempts left: a dead letter, with `Task Failed`.
    fn used_up(&self, error: &str) -> HandlerError {
        let error = cut(error, LONGEST_ERROR).to_owned();
        let event = self.failed(
            error.clone(),
            ErrorCategory::ServerError,
            FailureSource::Dlq,
        );
        HandlerError::permanent(error).with_event(event)
    }

    fn failed(
        &self,
        error: String,
        category: ErrorCategory,
        source: FailureSource,
    ) -> EventBuilder {
        let work = &self.item.work;
        self.item.event(
            &self.emitter,
            &TaskFailed {
                request_id: work.request_id.clone(),
                job_id: work.job_id.clone(),
                error,
                error_category: category,
                retry_count: self.context.attempt(),
                source,
            },
        )
    }
}

impl Finished {
    /// An attempt whose work did not begin.
    fn without_work(end: End, elapsed: Duration) -> Self {
        Self {
            end,
            elapsed,
            details: None,
        }
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

fn of_stop(why: Stopped) -> End {
    match why {
        Stopped::LeaseLost => End::LeaseLost,
        Stopped::Cancelled => End::Cancelled,
        _ => End::GivenBack,
    }
}

/// Turns the end of a child process into the end of the attempt.
fn of_child(ended: Ended, attempt: &Attempt<'_>, classifier: &Classifier) -> Finished {
    let limits = attempt.limits;
    let details = details(&ended);
    let elapsed = ended.elapsed;
    let end = match ended.stopped {
        Some((Stopped::Timeout, signal)) => End::TimedOut {
            limit: limits.timeout,
            signal: match signal {
                StopSignal::Term => Signal::Term,
                StopSignal::Kill => Signal::Kill,
            },
        },
        Some((Stopped::TooMuchOutput, _)) => End::Failed {
            category: ErrorCategory::Programming,
            error: format!(
                "the child wrote more than {} bytes of output",
                limits.output
            ),
        },
        Some((why, _)) => of_stop(why),
        None if ended.exit.code() == Some(0) => match ended.output {
            Ok(output) => End::Completed {
                output,
                usage: ended.usage,
                exit_code: 0,
            },
            Err(error) => End::Failed {
                category: ErrorCategory::Programming,
                error,
            },
        },
        None => {
            let (category, mut error) = classifier.of_child(&ended);
            // The child only sees a failed allocation, so the error mentions the limit.
            if let Some(limit) = limits.memory
                && ended.peak_memory >= limit / 10 * 8
            {
                error.push_str(&format!(
                    " (it may have needed more than its {limit} bytes of memory)"
                ));
            }
            End::Failed { category, error }
        }
    };
    Finished {
        end,
        elapsed,
        details: Some(details),
    }
}

/// The details for the metadata of the event: how the child ended, its memory, the end of its standard error.
fn details(ended: &Ended) -> String {
    let mut details = json!({ "exit": ended.exit.to_string() });
    if let Some(code) = ended.exit.code() {
        details["exitCode"] = json!(code);
    }
    if ended.peak_memory > 0 {
        details["peakMemory"] = json!(ended.peak_memory);
    }
    if !ended.stderr.is_empty() {
        details["stderr"] = json!(ended.stderr);
    }
    details.to_string()
}

/// The category of a failed start. A missing command is still missing at the next attempt, so it is not retried. Other
/// errors, such as too many processes, are retried.
fn cannot_start(error: &std::io::Error) -> ErrorCategory {
    use std::io::ErrorKind;
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::PermissionDenied | ErrorKind::Unsupported => {
            ErrorCategory::Programming
        }
        ErrorKind::InvalidInput | ErrorKind::ArgumentListTooLong => ErrorCategory::Validation,
        _ => ErrorCategory::ServerError,
    }
}

/// Whole seconds since 1970, rounded down: a reader must not take a lock for longer than it is.
fn seconds(time: Timestamp) -> u64 {
    u64::try_from(time.as_micros() / 1_000_000).unwrap_or(0)
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
