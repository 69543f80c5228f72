//! Checks that the open files still have their names.
//!
//! Processes can still write to an open file that was deleted or renamed: SQLite continues and commits succeed, but a
//! process that opens the file by its name finds nothing of what they wrote.
//!
//! A change of a name changes the modification time of its directory. So for a commit it is enough to read that time,
//! unless it has changed. Once a second the files are checked in any case, because two changes within one tick of the
//! file system's clock have the same time.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use everbus_core::{Code, Error, Result};

/// The files are checked at least this often.
const LOOK: Duration = Duration::from_secs(1);

/// The database, its write-ahead log and the index of that log. They stay the same files while a connection
/// is open.
pub(crate) struct Presence {
    files: Vec<(PathBuf, (u64, u64))>,
    directory: PathBuf,
    /// The directory's time at the last check of the files.
    changed: Option<(i64, i64)>,
    looked: Instant,
}

impl Presence {
    /// Remembers the files as they are, after a connection has opened them.
    pub(crate) fn of(database: &Path) -> Self {
        let named = ["", "-wal", "-shm"].map(|suffix| {
            let mut path = database.as_os_str().to_owned();
            path.push(suffix);
            PathBuf::from(path)
        });
        let there = |path: PathBuf| identity(&path).map(|identity| (path, identity));
        Self {
            files: named.into_iter().filter_map(there).collect(),
            directory: database
                .parent()
                .map_or_else(PathBuf::new, Path::to_path_buf),
            changed: None,
            looked: Instant::now(),
        }
    }

    /// Fails if one of the files is gone or another file has its name. Called before a commit is answered.
    pub(crate) fn check(&mut self) -> Result<()> {
        // Read before the files are checked: a change in between is noticed at the next check.
        let changed = std::fs::metadata(&self.directory).ok();
        let changed = changed.map(|meta| (meta.mtime(), meta.mtime_nsec()));
        if changed.is_some() && changed == self.changed && self.looked.elapsed() < LOOK {
            return Ok(());
        }
        (self.changed, self.looked) = (changed, Instant::now());
        match self
            .files
            .iter()
            .find(|(path, was)| identity(path) != Some(*was))
        {
            None => Ok(()),
            Some((path, _)) => Err(gone(path)),
        }
    }

    /// As [`check`](Self::check), for a writer without commits: at most once per [`LOOK`].
    pub(crate) fn check_idle(&mut self) -> Result<()> {
        if self.looked.elapsed() < LOOK {
            return Ok(());
        }
        self.check()
    }
}

/// The device and inode of a file. A file that cannot be examined counts as gone.
fn identity(path: &Path) -> Option<(u64, u64)> {
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.dev(), meta.ino()))
}

fn gone(path: &Path) -> Error {
    Error::of_file(
        Code::FileGone,
        format!(
            "{} was deleted, moved or replaced while it was open",
            path.display()
        ),
    )
    .hint(
        "put the .db, -wal and -shm back under their names before any process closes them, or restore a \
         backup; what was acknowledged since the last backup may be in the moved files",
    )
    .with_unknown_outcome()
}
