//! Tasks and jobs on Everbus. A task is a sequence of events on the bus, a job is a graph of tasks, and the state of
//! both is derived from their events.
//!
//! ```text
//!     │                                     ▲                                                                  │
//!     └── Job Created, Job Tasks Added ─────┤                                                                  │
//!                                           └── Task Pending + task.work, Job Completed, … ── dispatcher ◀─────┘
//! ```
//!
//! - [`events`]: the twelve event types and the message that carries the work.
//! - [`Jobs`]: the handle on a bus, for one tenant and app. It submits, cancels, retries and asks.
//! - [`state`]: the state of a task, folded from its events in the order of the log.
//! - [`graph`]: the graph of a job, and what makes one invalid.
//! - [`Index`]: tasks by state and by job. It is built from events, and can be deleted at any time.
//! - [`Dispatcher`]: starts each task of a job when its parents have completed.
//!
//! Event ids that must not be repeated are derived from tenant, job, task, run number and type ([`ids`]). So two
//! dispatchers, a restarted one, or a producer that repeats its request publish the same event, and the log keeps one.
//!
//! Everything uses the public API of [`everbus`], on every engine with a history.

pub mod events;
mod handle;
pub mod ids;


pub use handle::{Emitter, Jobs, JobsBuilder, Origin, RUN, WorkItem, run_of};

/// The stream of all task and job events, where streams are declared.
pub const STREAM: &str = "tasks";
/// The type of the message that carries the work of a task.
pub const WORK: &str = "task.work";
/// The group of the dispatchers.
pub const DISPATCHER: &str = "tasks.dispatcher";
/// The tenant, unless another is set.
pub const DEFAULT_TENANT: &str = "default";
/// The app, unless another is set.
pub const DEFAULT_APP: &str = "task-workflow";
/// The largest number of tasks in a job.
pub const MAX_TASKS: usize = 10_000;
