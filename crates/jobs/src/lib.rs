//! Tasks and jobs on Everbus. A task is a sequence of events on the bus, a job is a graph of tasks, and the state of
//! both is derived from their events.
//!
//! ```text
//!  producer ── Task Pending + task.work ─▶ bus ─▶ worker ── Started, Heartbeat, Completed | Failed | Timeout ─▶ bus
//!     │                                     ▲                                                                  │
//!     └── Job Created, Job Tasks Added ─────┤                                                                  │
//!                                           └── Task Pending + task.work, Job Completed, … ── dispatcher ◀─────┘
//! ```
//!
//! - [`events`]: the twelve event types and the message that carries the work.
//! - [`Jobs`]: the handle on a bus, for one tenant and app. It submits, cancels, retries and queries.
//! - [`state`]: the state of a task, folded from its events in the order of the log.
//! - [`graph`]: the graph of a job, and the checks for a valid graph.
//! - [`Index`]: tasks by state and by job. It is built from events, and can be deleted at any time.
//! - [`Dispatcher`]: starts each task of a job when its parents have completed.
//! - [`Worker`]: takes tasks from the bus and runs them in child processes, or with functions.
//! - [`health`], [`alerts`], [`schedule`]: finding stuck tasks, sending alerts, and starting work at given times.
//!
//! Events that must be stored only once have ids derived from tenant, job, task, run number and type ([`ids`]). So two
//! dispatchers, a restarted dispatcher, or a producer that repeats its request use the same id, and the log keeps one
//! event.
//!
//! Everything uses the public API of [`everbus`], on every engine with a history.

mod dispatcher;
mod draw;
pub mod events;
mod file;
pub mod graph;
mod handle;
pub mod ids;
mod index;
mod keep;
mod producer;
mod query;
pub mod state;
mod work;

pub mod alerts;
pub mod health;
pub mod schedule;
pub mod webhook;
pub mod worker;

pub use dispatcher::Dispatcher;
pub use draw::Layout;
pub use file::parse_tasks;
pub use handle::{ATTEMPT, Emitter, Jobs, JobsBuilder, Origin, RUN, WorkItem, run_of};
pub use index::{Index, JobRow, JobState, Page, TaskFilter};
pub use producer::{NewJob, NewTask, Resumed, Submitted, SubmittedJob};
pub use query::{JobPicture, JobStatus};
pub use worker::{Task, TaskError, Worker};

/// The stream of all task and job events, where streams are declared.
pub const STREAM: &str = "tasks";
/// The type of the message that carries the work of a task.
pub const WORK: &str = "task.work";
/// The group of the dispatchers.
pub const DISPATCHER: &str = "tasks.dispatcher";
/// The group of the workers.
pub const WORKERS: &str = "tasks.workers";
/// The tenant, unless another is set.
pub const DEFAULT_TENANT: &str = "default";
/// The app, unless another is set.
pub const DEFAULT_APP: &str = "task-workflow";
/// The largest number of tasks in a job.
pub const MAX_TASKS: usize = 10_000;
