//! One attempt at one task: from the work message to the event that says how it ended.

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
use crate::{ATTEMPT, Emitter, Jobs, WorkItem};

/// An event that was in flight at this many crashes of workers, the last time alone, is the cause of them.
const CRASHES: usize = 3;
/// The time limit of the bus is longer than the limit of the task by this much, so the worker ends the task first.
const MARGIN: Duration = Duration::from_secs(60);
/// The pause before a task of an unknown name goes to the next worker.
const UNKNOWN_PAUSE: Duration = Duration::from_secs(1);
/// The most bytes of an error that are kept: as many as of standard error.
pub(super) const LONGEST_ERROR: usize = 4 * 1024;
/// The most bytes of the name of a step that are kept.
const LONGEST_STEP: usize = 1024;
/// What the event of a completed task has beside its output and its ids, generously.
const ENVELOPE: usize = 384;
/// The metadata key of what is known about a child that has ended.
pub(crate) const DETAILS: &str = "worker";

/// What the attempts of a worker share.
pub(super) struct Runner {
    pub(super) jobs: Jobs,
    /// Its name in the events.
    pub(super) id: String,
    /// For the tenant and app of `jobs`.
    pub(super) emitter: Emitter,
    pub(super) command: Option<Arc<ChildCommand>>,
    pub(super) handlers: BTreeMap<String, TaskHandler>,
    pub(super) any: Option<TaskHandler>,
    pub(super) classifier: Classifier,
    pub(super) heartbeat: Duration,
    pub(super) timeout: Duration,
    pub(super) finish: Duration,
    pub(super) cancellations: Cancellations,
    /// How long a task of an unknown name is left to other workers.
    pub(super) patience: Duration,
    /// Work of unknown names, and when it came first.
    pub(super) unknown: Mutex<HashMap<EventId, Instant>>,
}

/// What runs: a child, or a function.
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

/// The end of an attempt with what is kept beside its event.
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
    /// A person asked for this delivery: attempts are counted from 1 again.
    is_asked_for: bool,
    /// The limits of a child; the time limit is that of a function too.
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
        if cancellations
            .is_cancelled(&self.jobs, &item, message)
            .await?
        {
            return Err(skip("the task was cancelled, or has been started again"));
        }
        let limits = self.limits(event, &item.work.name);
        let attempt = Attempt {
            runner: self,
            item,
            emitter,
            context,
            is_asked_for: is_asked_for(message),
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
            // The last attempt ended with its worker or its lease. The bus knows only its own number of attempts.
            let most = attempt.max_attempts;
            let error = format!("its worker died or lost the task, which has {most} attempts");
            return Err(attempt.used_up(&error));
        }
        if !self.knows(&attempt.item.work.name) {
            return self.leave_to_others(&attempt, message).await;
        }
        attempt.run().await
    }

    /// The function for tasks of a name.
    fn handler(&self, name: &str) -> Option<&TaskHandler> {
        self.handlers.get(name).or(self.any.as_ref())
    }

    /// Whether tasks of this name can run here.
    fn knows(&self, name: &str) -> bool {
        self.command.is_some() || self.handler(name).is_some()
    }

    /// Gives back a task that has no handler here: another worker may have one. No attempt is counted. A task that
    /// comes again and again for some time fails.
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
        // The next worker gets it after a pause: this one may be alone.
        tokio::select! {
            () = attempt.context.shutting_down() => {}
            () = tokio::time::sleep((self.patience / 10).min(UNKNOWN_PAUSE)) => {}
        }
        Err(HandlerError::give_back(error))
    }

    /// The limits of an attempt: a work message may ask for less time.
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

/// How often workers died with this task, if it must be the cause.
fn crashes(context: &Context) -> Option<usize> {
    let crashes = context.failures().iter();
    let crashes: Vec<_> = crashes.filter(|f| f.kind == FailureKind::Crash).collect();
    let alone = crashes.last().is_some_and(|crash| crash.alone);
    (alone && crashes.len() >= CRASHES).then_some(crashes.len())
}

impl Attempt<'_> {
    async fn run(&self) -> Result<Outcome, HandlerError> {
        // From before the start, so that no extension and no loss is missed.
        let mut extensions = self.context.extensions();
        let started = Instant::now();
        let mut work = match self.begin(started) {
            Ok(work) => work,
            Err(end) => {
                let finished = Finished {
                    end,
                    elapsed: started.elapsed(),
                    details: None,
                };
                return self.settle(None, finished);
            }
        };
        let bus = self.runner.jobs.bus();
        let begun = self.started(&work);
        match self.ended_at_once(&mut work, started) {
            // The start and the end are published in one step with the ack.
            Ok(Some(finished)) => return self.settle(Some(begun), finished),
            Ok(None) => {}
            Err(panic) => {
                // The bus records the panic. The attempt has begun all the same.
                bus.publish(begun).await?;
                std::panic::resume_unwind(panic);
            }
        }
        let limit = self.limits.timeout.saturating_add(self.limits.grace);
        self.context.extend(limit.saturating_add(MARGIN));
        bus.publish(begun).await?;
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
                    // The lease is the lock; the next heartbeat may be heard again.
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

    /// The end of a function that does not wait for anything: it has ended when it was called.
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

    fn started(&self, work: &Work) -> EventBuilder {
        let of = &self.item.work;
        let now = self.runner.jobs.now();
        let started = self
            .item
            .event(
                &self.emitter,
                &TaskStarted {
                    request_id: of.request_id.clone(),
                    job_id: of.job_id.clone(),
                    effective_until: seconds(now.plus(self.lease())),
                    worker_id: self.runner.id.clone(),
                    process_id: work.pid(),
                },
            )
            // It may be published after the end of the work.
            .occurred_at(now);
        match self.is_asked_for {
            true => started,
            false => started.meta(ATTEMPT, self.context.attempt().to_string()),
        }
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

    /// Turns the end of the attempt into what happens to the work message. `begun`: its start, if that was not published.
    fn settle(
        &self,
        begun: Option<EventBuilder>,
        finished: Finished,
    ) -> Result<Outcome, HandlerError> {
        let acked = |begun: Option<EventBuilder>, event| {
            let mut events = begun.into_iter().chain([event]);
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

    /// The end with an error that is not too long. An output that no event can hold is a failure.
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

    /// No attempt is left for the task.
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

    /// Waits for the end. A function that was told to stop ends at its current await point.
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

/// What the end of a child means for its task.
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
            // The kernel refuses memory; the child only knows that an allocation failed.
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

/// What is kept beside the event: how the child ended, its memory, the end of its standard error.
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

/// A command that is not there will not be there for the next attempt; too many processes may be fewer then.
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

/// Whole seconds since 1970, rounded down: a lock must not be believed for longer than it holds.
fn seconds(time: Timestamp) -> u64 {
    u64::try_from(time.as_micros() / 1_000_000).unwrap_or(0)
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
