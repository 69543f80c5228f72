//! Database files: whether another program has one open, and moving or removing one.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use everbus_core::{Code, Error, Result};
use rusqlite::{Connection, ErrorCode, OpenFlags};

/// Suffix of the directory with a file's objects.
pub(crate) const OBJECTS: &str = ".objects";
/// The suffixes of files that describe the log of this file alone: notes of its highest position, and the index of tasks.
/// Beside a restored file they would be wrong.
const OF_THE_LOG: [&str; 5] = [
    ".log-head",
    ".log-head.lost",
    "-tasks",
    "-tasks-wal",
    "-tasks-shm",
];

/// Makes sure that no program has the file open and that its write-ahead log is empty.
///
/// SQLite leaves the write-ahead mode only for the sole user of a file, so asking for that is the one test
/// that sees every other program. A damaged file, or one that is no database, passes: no program can be
/// working with it.
pub(crate) fn claim_alone(path: &Path) -> Result<()> {
    // Another program may be about to close it.
    for _ in 0..50 {
        if !in_use(path) {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Err(
        Error::of_file(Code::Busy, format!("{} is in use", path.display()))
            .hint("stop the programs that have it open, then try again"),
    )
}

fn in_use(path: &Path) -> bool {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let outcome = Connection::open_with_flags(path, flags).and_then(|connection| {
        connection.query_row("PRAGMA journal_mode = DELETE", [], |row| {
            row.get::<_, String>(0)
        })
    });
    match &outcome {
        Ok(mode) => mode.eq_ignore_ascii_case("wal"),
        Err(error) => matches!(
            error.sqlite_error_code(),
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked)
        ),
    }
}

/// The version of the tables of a file, if it is a database that can be read.
pub(crate) fn schema_version(path: &Path) -> Option<i32> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags).ok()?;
    let version = connection.query_row("PRAGMA user_version", [], |row| row.get(0));
    version.ok()
}

/// The suffixes of a file and its companions that exist: none for the file itself, then the write-ahead log, its
/// index, the head and the lock of its audit trail, the directory of its objects, notes and index of its log, and the
/// locks of programs that ended.
pub(crate) fn companions(path: &Path) -> Vec<String> {
    let fixed = ["", "-wal", "-shm", ".audit-head", ".audit-lock", OBJECTS];
    let fixed = fixed.iter().chain(&OF_THE_LOG);
    let mut suffixes: Vec<String> = fixed.map(|suffix| (*suffix).to_owned()).collect();
    let beside = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let entries = std::fs::read_dir(beside).into_iter().flatten();
    for entry in entries.filter_map(std::result::Result::ok) {
        let other = entry.file_name().to_string_lossy().into_owned();
        match other.strip_prefix(name.as_ref()) {
            Some(suffix) if suffix.starts_with("-owner-") => suffixes.push(suffix.to_owned()),
            _ => {}
        }
    }
    suffixes.retain(|suffix| with_suffix(path, suffix).exists());
    suffixes
}

/// Deletes what describes the log of a file that is gone.
pub(crate) fn forget_log(path: &Path) -> Result<()> {
    for suffix in OF_THE_LOG {
        let file = with_suffix(path, suffix);
        match std::fs::remove_file(&file) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(io_error("cannot remove", &file, e));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Deletes the file and its companions.
pub(crate) fn remove(path: &Path) -> Result<()> {
    for suffix in companions(path) {
        let file = with_suffix(path, &suffix);
        let removed = match suffix == OBJECTS && file.is_dir() {
            true => std::fs::remove_dir_all(&file),
            false => std::fs::remove_file(&file),
        };
        removed.map_err(|e| io_error("cannot remove", &file, e))?;
    }
    Ok(())
}

/// Renames the file and its companions: all of them or none.
pub(crate) fn rename(path: &Path, to: &Path) -> Result<()> {
    let mut moved: Vec<String> = Vec::new();
    // The file itself must exist; otherwise moving nothing would look like success.
    let companions = companions(path).into_iter().filter(|s| !s.is_empty());
    for suffix in std::iter::once(String::new()).chain(companions) {
        let file = with_suffix(path, &suffix);
        if let Err(error) = std::fs::rename(&file, with_suffix(to, &suffix)) {
            for suffix in moved {
                let _ = std::fs::rename(with_suffix(to, &suffix), with_suffix(path, &suffix));
            }
            return Err(io_error("cannot move", &file, error));
        }
        moved.push(suffix);
    }
    Ok(())
}

/// Replaces an old file by a new one, and keeps the old one under another name. If that fails, the old file
/// is back where it was.
pub(crate) fn swap(fresh: &Path, target: &Path, old: &Path) -> Result<()> {
    rename(target, old)?;
    let Err(error) = rename(fresh, target) else {
        return Ok(());
    };
    Err(match rename(old, target) {
        Ok(()) => error,
        Err(again) => Error::new(
            again.code(),
            format!("{}; and {}", error.message(), again.message()),
        )
        .hint(format!(
            "the old file is {}; move it and what is named like it back by hand",
            old.display()
        )),
    })
}

/// Syncs the directory of a file, so that renames in it are durable.
pub(crate) fn sync_beside(path: &Path) -> Result<()> {
    let beside = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let synced = std::fs::File::open(beside).and_then(|directory| directory.sync_all());
    synced.map_err(|e| io_error("cannot make durable what is in", beside, e))
}

/// Whether both paths lead to the same file, by whatever names.
pub(crate) fn are_same(one: &Path, other: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    match (std::fs::metadata(one), std::fs::metadata(other)) {
        (Ok(one), Ok(other)) => (one.dev(), one.ino()) == (other.dev(), other.ino()),
        _ => false,
    }
}

/// The path with text added to its last part.
pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    name.into()
}

/// Maps an error of the file system.
pub(crate) fn io_error(what: &str, path: &Path, error: std::io::Error) -> Error {
    let code = match error.kind() {
        std::io::ErrorKind::NotFound => Code::NoSuchFile,
        std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem => {
            Code::ReadOnly
        }
        std::io::ErrorKind::StorageFull => Code::DiskFull,
        _ => Code::StorageFailed,
    };
    Error::new(code, format!("{what} {}: {error}", path.display())).caused_by(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn companions_move_and_go_with_their_file() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        for name in ["a.db", "a.db-wal", "a.db-owner-1", "a.db2", "b.db"] {
            std::fs::write(at(name), "").unwrap();
        }
        std::fs::create_dir_all(at("a.db.objects/events")).unwrap();
        rename(&at("a.db"), &at("c.db")).unwrap();
        assert!(at("c.db-owner-1").exists() && !at("a.db-wal").exists());
        assert!(at("c.db.objects/events").exists());
        remove(&at("c.db")).unwrap();
        let left = std::fs::read_dir(directory.path()).unwrap();
        assert_eq!(left.count(), 2, "a.db2 and b.db are not ours");
    }

    #[test]
    fn a_swap_that_fails_leaves_the_old_file_where_it_was() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        for name in ["a.db", "a.db-wal"] {
            std::fs::write(at(name), "old").unwrap();
        }
        // There is no fresh file, so the second of the two moves fails.
        let error = swap(&at("fresh.db"), &at("a.db"), &at("kept.db")).unwrap_err();
        assert_eq!(error.code(), Code::NoSuchFile);
        assert!(at("a.db").exists() && at("a.db-wal").exists());
        assert!(!at("kept.db").exists());
        std::fs::write(at("fresh.db"), "new").unwrap();
        swap(&at("fresh.db"), &at("a.db"), &at("kept.db")).unwrap();
        assert_eq!(std::fs::read(at("a.db")).unwrap(), b"new");
        assert_eq!(std::fs::read(at("kept.db-wal")).unwrap(), b"old");
        assert!(!at("a.db-wal").exists());
    }

    #[test]
    fn a_rename_that_fails_halfway_is_undone() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        for name in ["a.db", "a.db-wal"] {
            std::fs::write(at(name), "").unwrap();
        }
        std::fs::create_dir_all(at("b.db-wal/full")).unwrap();
        assert!(rename(&at("a.db"), &at("b.db")).is_err());
        assert!(at("a.db").exists() && at("a.db-wal").exists() && !at("b.db").exists());
    }

    #[test]
    fn a_file_that_a_process_has_open_is_in_use() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.db");
        let other = Connection::open(&path).unwrap();
        other.pragma_update(None, "journal_mode", "WAL").unwrap();
        other.execute_batch("CREATE TABLE t(x)").unwrap();
        assert_eq!(claim_alone(&path).unwrap_err().code(), Code::Busy);
        drop(other);
        claim_alone(&path).unwrap();
        assert_eq!(companions(&path), [""]);
    }
}
