//! A disk that runs out of space. There are two cases:
//!
//! - The disk is low on space: `writer/low_space.rs` refuses publishes, so that acks and dead letters still fit.
//!   [`Space`] decides how much must stay free.
//! - A commit fails because the disk is full: `writer/transaction.rs` runs the transaction again without the
//!   publishes. If that fails too, every command gets the error `DiskFull`.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use everbus_core::{Code, Error, Result};

/// At least this much stays free on a small disk: the content of the write-ahead log may have to fit into the
/// database as well.
const LEAST: u64 = 6 << 20;

/// If this much more than needed is free, the disk cannot fill up within [`ASK_AGAIN`].
const PLENTY: u64 = 1 << 30;
/// While plenty of space is free, it is read again only after this time. This saves a system call per publish.
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// Watches the disk that holds a file.
pub(crate) struct Space {
    directory: PathBuf,
    headroom: u64,
    /// When the last check found plenty of space; `None` if it did not.
    plenty_at: Cell<Option<Instant>>,
}

impl Space {
    pub(crate) fn new(file: &Path, headroom: u64) -> Self {
        let directory = file.parent().unwrap_or(Path::new(".")).to_owned();
        Self {
            directory,
            headroom,
            plenty_at: Cell::new(None),
        }
    }

    /// Fails with `DiskFull` if too little space is free to publish.
    pub(crate) fn check(&self) -> Result<()> {
        let plenty = self.plenty_at.get();
        if plenty.is_some_and(|at| at.elapsed() < ASK_AGAIN) {
            return Ok(());
        }
        self.plenty_at.set(None);
        // A file system that does not report its free space counts as having room. If it is full, the commit
        // fails.
        let Ok(stat) = rustix::fs::statvfs(&self.directory) else {
            return Ok(());
        };
        let free = stat.f_bavail.saturating_mul(stat.f_frsize);
        let total = stat.f_blocks.saturating_mul(stat.f_frsize);
        let needed = self.headroom.min((total / 10).max(LEAST));
        if free >= needed {
            if free - needed >= PLENTY {
                self.plenty_at.set(Some(Instant::now()));
            }
            return Ok(());
        }
        Err(full(&format!(
            "{free} bytes are free, {needed} are kept for acks and dead letters"
        )))
    }
}

/// The error `DiskFull`.
pub(crate) fn full(what: &str) -> Error {
    Error::new(Code::DiskFull, format!("the disk is full: {what}"))
        .hint("free some space and publish again; nothing that was acknowledged is lost")
}
