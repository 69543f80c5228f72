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
mod bury;
mod checkpoints;
mod checksum;
mod claims;
mod consumers;
mod dead_letters;
mod declare;
mod deliver;
mod deliveries;
mod effect;
mod engine;
mod ephemeral;
mod errors;
mod expire;
mod failpoint;
mod feeder;
mod file;
mod groups;
mod guard;
mod history;
mod ids;
mod inbox;
mod inspect;
mod leases;
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
mod recover;
mod redeliver;
mod replace;
mod reserve;
mod restore;
mod retention;
mod rows;
mod schema;
mod session;
mod settle;
mod space;
mod sql;
mod store;
mod streams;
mod suspects;
mod tx;
mod watch;
mod writer;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Clock, Engine, Result, SystemClock};

pub use audit::kept_head;
#[doc(hidden)]
pub use history::HistoryTuning;
pub use maintenance::restore;
pub use orphans::{References, log_id_of, references};
pub use schema::VERSION as SCHEMA_VERSION;

/// How safe a commit is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durable {
    /// `synchronous=FULL`: an acknowledged event survives power loss.
    #[default]
    Full,
    /// `synchronous=NORMAL`: it survives a crash of the process, but a power loss may lose the last moments.
    Normal,
}

/// Options for opening a file.
#[derive(Clone, Debug)]
pub struct Options {
    /// The source of the time.
    pub clock: Arc<dyn Clock>,
    /// How safe a commit is.
    pub durability: Durable,
    /// Whether to create the file if there is none.
    pub create: bool,
    /// Publishes are refused when the disk has less room than this, so that acks still fit. On small
    /// disks a tenth of the disk, but at least 6 MiB, is enough.
    pub disk_headroom: u64,
    /// How long to wait for another process that holds the file.
    pub busy_timeout: Duration,
    /// Sizes of the parts of the history's indexes. For tests; programs use the default.
    #[doc(hidden)]
    pub history: HistoryTuning,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            clock: Arc::new(SystemClock),
            durability: Durable::Full,
            create: true,
            disk_headroom: 16 << 20,
            busy_timeout: Duration::from_secs(10),
            history: HistoryTuning::default(),
        }
    }
}

/// Opens a file, creates or migrates its tables, and starts the engine's threads.
///
/// This blocks for as long as the file system does; call it off the async executor.
pub fn open(path: &Path, options: Options) -> Result<Engine> {
    engine::open(path, options)
}
