//! Detects dead processes: every consuming engine holds a lock on its own lock file.
//!
//! The operating system frees the lock when the process ends, however it ends. So a lock that can be taken
//! means a dead owner.

use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};

use everbus_core::{Error, Result};

use crate::errors::io_code;

/// A lock held for the life of an engine.
pub(crate) struct OwnerLock {
    name: String,
    path: PathBuf,
    _file: File,
}

impl OwnerLock {
    /// Creates and locks a new lock file beside the database.
    pub(crate) fn take(database: &Path) -> Result<Self> {
        let name = uuid::Uuid::now_v7().simple().to_string();
        let path = lock_path(database, &name);
        let locked = OpenOptions::new()
            .create_new(true)
            .write(true)
            .open(&path)
            .and_then(|file| match file.try_lock() {
                Ok(()) => Ok(file),
                Err(TryLockError::Error(e)) => Err(e),
                Err(TryLockError::WouldBlock) => Err(std::io::ErrorKind::WouldBlock.into()),
            });
        match locked {
            Ok(file) => Ok(Self {
                name,
                path,
                _file: file,
            }),
            Err(e) => Err(Error::new(
                io_code(&e),
                format!("the lock file {} cannot be made: {e}", path.display()),
            )
            .hint("the directory must be writable and its file system must support locks")
            .caused_by(e)),
        }
    }

    /// Its name in the `owners` table.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for OwnerLock {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Whether the owner with this lock is dead. A missing lock file means a dead owner: it was removed at an
/// orderly end, or the database was copied from elsewhere.
pub(crate) fn is_dead(database: &Path, name: &str) -> bool {
    if !is_lock_name(name) {
        return true;
    }
    match OpenOptions::new()
        .write(true)
        .open(lock_path(database, name))
    {
        Ok(file) => file.try_lock().is_ok(),
        Err(e) => e.kind() == std::io::ErrorKind::NotFound,
    }
}

/// Removes the lock file of a dead owner.
pub(crate) fn bury(database: &Path, name: &str) {
    if is_lock_name(name) {
        let _ = std::fs::remove_file(lock_path(database, name));
    }
}

/// Names are read from the file; a name that Everbus did not create must not become a path.
fn is_lock_name(name: &str) -> bool {
    name.len() == 32 && name.bytes().all(|b| b.is_ascii_hexdigit())
}

fn lock_path(database: &Path, name: &str) -> PathBuf {
    let mut path = database.as_os_str().to_owned();
    path.push("-owner-");
    path.push(name);
    path.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_is_alive_exactly_while_it_holds_its_lock() {
        let dir = tempfile::tempdir().unwrap();
        let database = dir.path().join("a.db");
        let lock = OwnerLock::take(&database).unwrap();
        let name = lock.name().to_owned();
        assert!(
            !is_dead(&database, &name),
            "also seen from the same process"
        );
        drop(lock);
        assert!(is_dead(&database, &name));
        assert_eq!(
            std::fs::read_dir(dir.path()).unwrap().count(),
            0,
            "nothing is left behind"
        );
    }

    #[test]
    fn a_name_from_a_tampered_file_never_becomes_a_path() {
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("a.db-owner-x");
        std::fs::write(&victim, "").unwrap();
        bury(&dir.path().join("a.db"), "x");
        bury(&dir.path().join("a.db"), "../../etc/passwd");
        assert!(victim.exists());
    }
}
