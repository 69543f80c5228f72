//! The embedded engine: one SQLite file, no server.
//!
//! ```text
//!  append ─┐                                        ┌─▶ log            every event, in order
//!  settle ─┼─▶ queue ─▶ writer thread ── COMMIT ────┼─▶ groups         how far each group has got
//!  declare ┘   (takes all that is queued,           ├─▶ claims         ranges handed out
//!               one transaction, one fsync)         ├─▶ deliveries     what waits or runs alone
//!                                                   └─▶ dead_letters
//!  feeder thread ── reads what a group that fell behind has missed
//!  reader thread ── answers queries
//!  index thread  ── sorts what was appended into the history's indexes, some way behind
//! ```
//!
//! One thread owns the writing connection and commits all queued commands in one transaction. A group
//! that has caught up gets its claim in the transaction that appends the events, so in the common case
//! handling an event costs no read and a fraction of a row. Several processes may open the same file;
//! each notices the commits of the others within 20 ms.

mod ahead;
mod answers;
mod append;
mod audit;
mod broker;
mod checkpoints;
mod checksum;
mod config;
mod consumer;
mod dead_letters;
mod declare;
mod deliveries;
mod disk_space;
mod effect;
mod errors;
mod failpoint;
mod feeder;
mod file;
mod groups;
mod guard;
mod handle;
mod history;
mod ids;
mod inbox;
mod inspect;
mod kv;
mod log;
mod log_end;
mod log_head;
mod mailbox;
mod maintenance;
mod orphans;
pub mod outbox;
mod outcomes;
mod owner;
mod payloads;
mod presence;
mod queue;
mod readers;
mod redeliver;
mod retention;
mod rows;
mod schema;
mod settle;
mod sql;
mod store;
mod streams;
mod tx;
mod watch;
mod writer;

use std::path::Path;

use everbus_core::{Engine, Result};

pub use audit::kept_head;
pub use config::{Durable, Options};
#[doc(hidden)]
pub use history::HistoryTuning;
pub use maintenance::restore;
pub use orphans::{References, references};
pub use schema::VERSION as SCHEMA_VERSION;

/// Opens a file, creates or migrates its tables, and starts the engine's threads.
///
/// This blocks for as long as the file system does; call it off the async executor.
pub fn open(path: &Path, options: Options) -> Result<Engine> {
    broker::open(path, options)
}
