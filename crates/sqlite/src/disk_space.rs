//! Disk space: publishes are refused first, so that acks and dead letters still fit.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use everbus_core::{Code, Error, Result};

/// The content of the write-ahead log may have to fit into the database as well.
const LEAST: u64 = 6 << 20;

/// If this much more than needed is free, the disk cannot fill up within this time. Until then the free space
/// is not read again, which saves a system call per publish.
const PLENTY: u64 = 1 << 30;
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// Watches the disk that holds a file.
pub(crate) struct Space {
    directory: PathBuf,
    headroom: u64,
    /// When there was plenty of space.
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

    /// Whether there is room to publish.
    pub(crate) fn check(&self) -> Result<()> {
        let plenty = self.plenty_at.get();
        if plenty.is_some_and(|at| at.elapsed() < ASK_AGAIN) {
            return Ok(());
        }
        self.plenty_at.set(None);
        // A file system that does not report its free space counts as having room; a full disk is noticed
        // later.
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

/// The error of a publish that found no room.
pub(crate) fn full(what: &str) -> Error {
    Error::new(Code::DiskFull, format!("the disk is full: {what}"))
        .hint("free some space and publish again; nothing that was acknowledged is lost")
}
