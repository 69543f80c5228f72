//! The options of the engine.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Clock, SystemClock};

use crate::history::HistoryTuning;

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
