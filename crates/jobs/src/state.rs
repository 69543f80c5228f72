//! The state of a task, folded from its events in the order of the log.
//!
//! Each event maps to a state. After a terminal event only `Task Pending` and `Task Processing Started` open the task
//! again. Runs are numbered: events of earlier runs and of cancelled runs change nothing. So a late result of a
//! cancelled or repeated task is recorded and ignored. The attempts of a run are numbered too: the start of an earlier
//! attempt changes nothing.

use everbus::{Event, Position, Recorded, Timestamp, TypedEvent};
use serde::{Deserialize, Serialize};

use crate::events::{
    ErrorCategory, TaskCompleted, TaskFailed, TaskHeartbeat, TaskPending, TaskProcessingFailed,
    TaskStarted, TaskState, TaskTimeout,
};
use crate::handle::{ATTEMPT, is_copy, run_of};
use crate::work::NOT_BEFORE;

/// The event types that decide the state of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// `Task Pending`.
    Pending,
    /// `Task Processing Started`.
    Started,
    /// `Task Processing Failed`.
    AttemptFailed,
    /// `Task Heartbeat`.
    Heartbeat,
    /// `Task Completed`.
    Completed,
    /// `Task Failed`.
    Failed,
    /// `Task Timeout`.
    Timeout,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 7] = [
        Self::Pending,
        Self::Started,
        Self::AttemptFailed,
        Self::Heartbeat,
        Self::Completed,
        Self::Failed,
        Self::Timeout,
    ];

    /// The kind of an event type; `None` for types that do not change the state of a task.
    pub fn of(event_type: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.event_type() == event_type)
    }

    /// The event type.
    pub const fn event_type(self) -> &'static str {
        match self {
            Self::Pending => TaskPending::TYPE,
            Self::Started => TaskStarted::TYPE,
            Self::AttemptFailed => TaskProcessingFailed::TYPE,
            Self::Heartbeat => TaskHeartbeat::TYPE,
            Self::Completed => TaskCompleted::TYPE,
            Self::Failed => TaskFailed::TYPE,
            Self::Timeout => TaskTimeout::TYPE,
        }
    }

    /// The state that this kind of event maps to.
    pub const fn state(self) -> TaskState {
        match self {
            Self::Pending => TaskState::Pending,
            Self::Started | Self::AttemptFailed | Self::Heartbeat => TaskState::Processing,
            Self::Completed => TaskState::Completed,
            Self::Failed | Self::Timeout => TaskState::Failed,
        }
    }
}

/// The state of a task and its run. Together with the next event it decides the next state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fold {
    /// The state; `None` before the first event.
    pub state: Option<TaskState>,
    /// The run, from 1; 0 before the first event.
    pub run: u32,
    /// The last attempt of the run that a worker started; 0 before that, or if no start had a number.
    pub attempt: u32,
    /// The run was cancelled.
    pub cancelled: bool,
}

impl Fold {
    /// Applies the next event. Returns whether the event counts.
    pub fn apply(&mut self, note: &Note) -> bool {
        let ended = self.state.is_none_or(TaskState::is_terminal);
        let run = match (note.run, note.kind) {
            (Some(run), _) => run,
            (None, Kind::Pending) if ended => self.run + 1,
            (None, _) => self.run.max(1),
        };
        if run < self.run {
            return false;
        }
        if run > self.run {
            *self = Self {
                run,
                ..Self::default()
            };
        }
        if self.cancelled {
            return false;
        }
        let ended = self.state.is_some_and(TaskState::is_terminal);
        let counts = match (note.kind, note.attempt) {
            // The end of a run is final: no other event would end it again. A start may be stored after the end,
            // because a store beside a broker gets events in another order, or because the ack of the end was lost and
            // the work was delivered again. A start that is stored after a later start does not count either.
            (Kind::Started, Some(attempt)) => !ended && attempt >= self.attempt,
            (Kind::Started, None) => true,
            // With a run number, a second `Task Pending` of the run is stored late.
            (Kind::Pending, _) => match self.state {
                None => true,
                Some(state) => note.run.is_none() && state == TaskState::Processing,
            },
            _ => !ended,
        };
        if counts {
            self.state = Some(note.kind.state());
            self.attempt = note.attempt.unwrap_or(self.attempt);
            self.cancelled = note.cancels;
        }
        counts
    }
}

/// A task as its events describe it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TaskStatus {
    /// The task.
    pub request_id: String,
    /// Its job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job_id: Option<String>,
    /// The name of the work.
    pub name: String,
    /// The state; `None` for a task of a job that has not begun.
    pub state: Option<TaskState>,
    /// The run, from 1; 0 before the first event.
    pub run: u32,
    /// The run was cancelled.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub cancelled: bool,
    /// When the state began. For a pending task with a delayed start this is the time at which it may start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// When the last attempt started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Timestamp>,
    /// The type of the last event of this run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_event_type: Option<String>,
    /// When the last event of this run was received.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_event_at: Option<Timestamp>,
    /// The task is locked until then, in seconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effective_until: Option<u64>,
    /// The worker that runs the task, or ran it last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker_id: Option<String>,
    /// The last error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The last attempt of the run that a worker started; 0 if no start had a number.
    #[serde(skip)]
    pub attempt: u32,
    /// The place of the last event in the log.
    #[serde(skip)]
    pub place: u64,
}

impl TaskStatus {
    /// Applies the next event of the task, in the order of the log. Returns whether the event counts.
    pub fn apply(&mut self, note: &Note) -> bool {
        // The event was applied before: two readers of the log may pass the same event.
        if note.place <= self.place {
            return false;
        }
        self.place = note.place;
        let mut fold = self.fold();
        if !fold.apply(note) {
            return false;
        }
        if fold.run > self.run {
            self.started_at = None;
            self.effective_until = None;
            self.worker_id = None;
            self.error = None;
        }
        if self.state != fold.state || fold.run > self.run {
            self.since = Some(note.not_before.unwrap_or(note.at).max(note.at));
        }
        (self.state, self.run, self.cancelled) = (fold.state, fold.run, fold.cancelled);
        self.attempt = fold.attempt;
        self.request_id.clone_from(&note.task);
        if let Some(name) = &note.name {
            self.name.clone_from(name);
        }
        if note.job.is_some() {
            self.job_id.clone_from(&note.job);
        }
        if note.kind == Kind::Started {
            self.started_at = Some(note.at);
        }
        if note.effective_until.is_some() {
            self.effective_until = note.effective_until;
        }
        if note.worker_id.is_some() {
            self.worker_id.clone_from(&note.worker_id);
        }
        match note.kind {
            Kind::AttemptFailed | Kind::Failed | Kind::Timeout => {
                self.error.clone_from(&note.error);
            }
            Kind::Completed => self.error = None,
            _ => {}
        }
        self.last_event_type = Some(note.kind.event_type().to_owned());
        self.last_event_at = Some(note.at);
        true
    }

    /// The part of the status that decides whether later events count.
    pub fn fold(&self) -> Fold {
        Fold {
            state: self.state,
            run: self.run,
            attempt: self.attempt,
            cancelled: self.cancelled,
        }
    }

    /// Whether a worker has the task and its lock has not expired.
    pub fn is_locked(&self, now: Timestamp) -> bool {
        let now = u64::try_from(now.as_micros() / 1_000_000).unwrap_or(0);
        self.state == Some(TaskState::Processing)
            && self.effective_until.is_some_and(|until| until > now)
    }
}

/// The fields of a task event that the state of the task needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Note {
    /// The type.
    pub kind: Kind,
    /// The task.
    pub task: String,
    /// Its job.
    pub job: Option<String>,
    /// The run; `None` for events of other senders.
    pub run: Option<u32>,
    /// The attempt that the event starts; `None` for events of other senders, and for a start that a person asked for.
    pub attempt: Option<u32>,
    /// Whether the event cancels the run.
    pub cancels: bool,
    /// The name of the work.
    pub name: Option<String>,
    /// The task does not start before this time.
    pub not_before: Option<Timestamp>,
    /// The end of the lock, in seconds since 1970.
    pub effective_until: Option<u64>,
    /// The worker.
    pub worker_id: Option<String>,
    /// The error.
    pub error: Option<String>,
    /// The place of the event in the log.
    pub place: u64,
    /// When the event was received.
    pub at: Timestamp,
}

/// The payload fields of any task event that matter for the state.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Brief {
    request_id: String,
    job_id: Option<String>,
    name: Option<String>,
    effective_until: Option<u64>,
    worker_id: Option<String>,
    error: Option<String>,
    error_category: Option<String>,
    elapsed_ms: Option<u64>,
}

impl Note {
    /// Reads an event. `None` if its type changes no state, if it is the copy of a replay, or if its payload is not
    /// that of a task event.
    pub fn of(record: &Recorded) -> Option<Self> {
        Self::read(&record.event, record.position, record.received_at)
    }

    /// Reads an event at a position.
    pub fn read(event: &Event, position: Position, at: Timestamp) -> Option<Self> {
        let kind = Kind::of(event.event_type())?;
        if is_copy(event) {
            return None;
        }
        let brief: Brief = event.json().ok()?;
        let cancelled = ErrorCategory::Cancelled;
        let cancels = kind == Kind::Failed
            && brief
                .error_category
                .is_some_and(|category| category == cancelled.as_str());
        let error = match kind {
            Kind::Timeout => brief
                .elapsed_ms
                .map(|ms| format!("it did not end within {ms} ms")),
            _ => brief.error,
        };
        Some(Self {
            kind,
            task: brief.request_id,
            job: brief.job_id,
            run: run_of(event),
            attempt: event
                .metadata()
                .get(ATTEMPT)
                .filter(|_| kind == Kind::Started)
                .and_then(|n| n.parse().ok()),
            cancels,
            name: brief.name,
            not_before: event
                .metadata()
                .get(NOT_BEFORE)
                .and_then(|time| time.parse().ok()),
            effective_until: brief.effective_until,
            worker_id: brief.worker_id,
            error,
            place: position.place(),
            at,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use TaskState::{Completed, Failed, Pending, Processing};

    fn note(kind: Kind, run: Option<u32>, cancels: bool) -> Note {
        Note {
            kind,
            task: "a".to_owned(),
            job: None,
            run,
            attempt: None,
            cancels,
            name: None,
            not_before: None,
            effective_until: None,
            worker_id: None,
            error: None,
            place: 1,
            at: Timestamp::EPOCH,
        }
    }

    fn folded(kinds: &[(Kind, Option<u32>)]) -> Fold {
        let mut fold = Fold::default();
        for (kind, run) in kinds {
            fold.apply(&note(*kind, *run, false));
        }
        fold
    }

    // conformance: workflow/state-mapping: EVENT_TO_STATE, type by type; other types decide nothing
    #[test]
    fn every_type_maps_to_the_state_of_the_document() {
        for (event_type, state) in [
            ("Task Pending", Pending),
            ("Task Processing Started", Processing),
            ("Task Processing Failed", Processing),
            ("Task Completed", Completed),
            ("Task Failed", Failed),
            ("Task Timeout", Failed),
            ("Task Heartbeat", Processing),
        ] {
            assert_eq!(Kind::of(event_type).unwrap().state(), state, "{event_type}");
        }
        for other in [
            "task.work",
            "Job Created",
            "Task Health Check",
            "task pending",
        ] {
            assert_eq!(Kind::of(other), None);
        }
    }

    // conformance: workflow/state-machine: after a terminal event only Task Pending or Task Processing Started reopens a task
    #[test]
    fn a_terminal_state_ends_a_run_until_it_is_opened_again() {
        use Kind as K;
        for end in [K::Completed, K::Failed, K::Timeout] {
            let begun = [(K::Pending, None), (K::Started, None), (end, None)];
            for late in [
                K::Heartbeat,
                K::AttemptFailed,
                K::Completed,
                K::Failed,
                K::Timeout,
            ] {
                let events = [&begun[..], &[(late, None)]].concat();
                assert_eq!(folded(&events).state, Some(end.state()), "{end:?} {late:?}");
            }
            let again = [&begun[..], &[(K::Pending, None)]].concat();
            assert_eq!(
                (folded(&again).state, folded(&again).run),
                (Some(Pending), 2)
            );
            let again = [&begun[..], &[(K::Started, None)]].concat();
            assert_eq!(
                (folded(&again).state, folded(&again).run),
                (Some(Processing), 1)
            );
        }
    }

    #[test]
    fn events_of_an_earlier_run_change_nothing() {
        use Kind as K;
        let mut events = vec![
            (K::Pending, Some(1)),
            (K::Started, Some(1)),
            (K::Failed, Some(1)),
            (K::Pending, Some(2)),
        ];
        for late in Kind::ALL {
            events.push((late, Some(1)));
            assert_eq!(folded(&events).state, Some(Pending), "{late:?}");
        }
        events.push((K::Completed, Some(2)));
        assert_eq!(folded(&events).state, Some(Completed));
    }

    #[test]
    fn a_cancelled_run_stays_cancelled() {
        for before in [&[][..], &[Kind::Pending], &[Kind::Pending, Kind::Started]] {
            let mut fold = Fold::default();
            for kind in before {
                fold.apply(&note(*kind, Some(1), false));
            }
            assert!(fold.apply(&note(Kind::Failed, Some(1), true)));
            for late in Kind::ALL {
                assert!(!fold.apply(&note(late, Some(1), false)), "{late:?}");
            }
            assert_eq!(fold.state, Some(Failed));
            assert!(fold.apply(&note(Kind::Pending, Some(2), false)));
            assert_eq!((fold.state, fold.cancelled), (Some(Pending), false));
        }
    }

    // conformance: workflow/state-machine: a run ends with its first end, in whatever order a store beside a broker gets its events
    #[test]
    fn the_order_of_the_events_of_a_run_does_not_change_its_end() {
        use Kind as K;
        let kinds = [K::Pending, K::Started, K::Heartbeat, K::Completed];
        for shift in 0..kinds.len() {
            for backwards in [false, true] {
                let mut order = kinds;
                order.rotate_left(shift);
                if backwards {
                    order.reverse();
                }
                let mut fold = Fold::default();
                for kind in order {
                    let attempt = (kind == K::Started).then_some(1);
                    let note = Note {
                        attempt,
                        ..note(kind, Some(1), false)
                    };
                    fold.apply(&note);
                }
                assert_eq!(fold.state, Some(Completed), "{order:?}");
            }
        }
        let late = folded(&[(K::Started, Some(1)), (K::Pending, Some(1))]);
        assert_eq!(late.state, Some(Processing));
    }

    #[test]
    fn the_second_pending_of_a_run_changes_nothing() {
        let mut fold = folded(&[(Kind::Pending, Some(1)), (Kind::Completed, Some(1))]);
        assert!(!fold.apply(&note(Kind::Pending, Some(1), false)));
        assert_eq!(fold.state, Some(Completed));
    }
}
