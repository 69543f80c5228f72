//! The end of an attempt, and the events that tell it: with the ack, with the retry, or with the dead letter.

use std::time::Duration;

use everbus::{EventBuilder, EventId, HandlerError, Outcome, Timestamp, skip};
use serde_json::json;

use super::attempt::Attempt;
use super::child::{Ended, StopSignal, Stopped};
use super::classify::{Classifier, cut};
use crate::WORKERS;
use crate::events::{
    ErrorCategory, FailureSource, Json, Signal, TaskCompleted, TaskFailed, TaskProcessingFailed,
    TaskTimeout, Usage,
};
use crate::ids::time_in;

/// The most bytes of an error that are kept: as many as of standard error by default.
pub(super) const LONGEST_ERROR: usize = 4 * 1024;
/// More bytes than `Task Completed` has besides its output and its ids.
const ENVELOPE: usize = 384;
/// The metadata key for details about the child process: exit, memory, end of standard error.
const DETAILS: &str = "worker";

/// How an attempt ended.
pub(super) enum End {
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
pub(super) struct Finished {
    pub(super) end: End,
    pub(super) elapsed: Duration,
    pub(super) details: Option<String>,
}

impl Attempt<'_> {
    /// Turns the end of the attempt into the outcome for the work message, with its events. `begun`: the start event,
    /// if it was not published yet.
    pub(super) fn settle(
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
    pub(super) fn used_up(&self, error: &str) -> HandlerError {
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
    pub(super) fn without_work(end: End, elapsed: Duration) -> Self {
        Self {
            end,
            elapsed,
            details: None,
        }
    }
}

/// The id of the event that ends the task with the ack: the same in every attempt, and for a work message that the
/// broker stored twice. The id that the bus would derive depends on the number of events before it, and an attempt whose
/// function waits has published its start already. Then the end could get the id of a start that a killed worker stored,
/// and would be taken for its duplicate.
///
/// A delivery that a person asked for opens a run that may have ended with this id: a replay delivers the same work
/// message. So the id then depends on that last end too. It stays the same in each attempt until the run ends again.
pub(super) fn end_id(work: EventId, last_end: Option<EventId>) -> EventId {
    let time = time_in(&work.to_string()).unwrap_or(Timestamp::EPOCH);
    let name = last_end.map_or_else(|| "end".to_owned(), |last| format!("end\0{last}"));
    EventId::derived(work, time, WORKERS, &name, 0)
}

pub(super) fn of_stop(why: Stopped) -> End {
    match why {
        Stopped::LeaseLost => End::LeaseLost,
        Stopped::Cancelled => End::Cancelled,
        _ => End::GivenBack,
    }
}

/// Turns the end of a child process into the end of the attempt.
pub(super) fn of_child(ended: Ended, attempt: &Attempt<'_>, classifier: &Classifier) -> Finished {
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
pub(super) fn cannot_start(error: &std::io::Error) -> ErrorCategory {
    use std::io::ErrorKind;
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::PermissionDenied | ErrorKind::Unsupported => {
            ErrorCategory::Programming
        }
        ErrorKind::InvalidInput | ErrorKind::ArgumentListTooLong => ErrorCategory::Validation,
        _ => ErrorCategory::ServerError,
    }
}

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
