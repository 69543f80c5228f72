//! The database file: where it may be, and how a connection to it is set up.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use everbus_core::{Code, Error, Result};
use rusqlite::{Connection, OpenFlags};

use crate::errors::{from_sqlite, io_code, is_busy};
use crate::{Durable, Options};

/// File systems whose locks cannot be trusted, by the number `statfs` gives.
const NETWORK: &[(u64, &str)] = &[
    (0x6969, "NFS"),
    (0x517b, "SMB"),
    (0xff53_4d42, "CIFS"),
    (0xfe53_4d42, "SMB2"),
    (0x0102_1997, "9P"),
    (0x00c3_6400, "Ceph"),
    (0x5346_414f, "AFS"),
    (0x0bd0_0bd0, "Lustre"),
    (0x4750_4653, "GPFS"),
    (0x564c, "NCP"),
    (0x7375_7245, "Coda"),
    (0x7461_636f, "OCFS2"),
    (0x0116_1970, "GFS2"),
    (0xbacb_acbc, "VMware shared folders"),
    (0x786f_4256, "VirtualBox shared folders"),
];

/// Checks that the path can hold a bus, and returns it as an absolute path.
pub(crate) fn locate(path: &Path, create: bool) -> Result<PathBuf> {
    let show = path.display();
    match std::fs::metadata(path) {
        Ok(meta) if meta.is_dir() => {
            return Err(Error::new(Code::NotAFile, format!("{show} is a directory"))
                .hint("name a file in it, for example events.db"));
        }
        Ok(meta) if !meta.is_file() => {
            return Err(
                Error::new(Code::NotAFile, format!("{show} is not a regular file"))
                    .hint("name a file on a local disk"),
            );
        }
        Ok(_) => {}
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            if !create {
                return Err(
                    Error::new(Code::NoSuchFile, format!("there is no file {show}"))
                        .hint("check the path, or publish something to create it"),
                );
            }
        }
        Err(e) => {
            return Err(
                Error::new(io_code(&e), format!("{show} cannot be reached: {e}"))
                    .hint("check that the directory exists and may be read")
                    .caused_by(e),
            );
        }
    }
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let directory = parent.canonicalize().map_err(|e| {
        Error::new(
            Code::NoSuchFile,
            format!("the directory {} does not exist", parent.display()),
        )
        .hint("create it first")
        .caused_by(e)
    })?;
    refuse_network(&directory)?;
    // A link is followed, so that every path to the file leads to the same locks.
    let named = path
        .file_name()
        .map_or_else(|| directory.clone(), |name| directory.join(name));
    Ok(named.canonicalize().unwrap_or(named))
}

fn refuse_network(directory: &Path) -> Result<()> {
    // A file system without a known type counts as local.
    let Ok(stat) = rustix::fs::statfs(directory) else {
        return Ok(());
    };
    match network_name(stat.f_type as u64) {
        None => Ok(()),
        Some(name) => Err(Error::new(
            Code::NetworkFileSystem,
            format!(
                "{} is on {name}, where SQLite's locks cannot be trusted",
                directory.display()
            ),
        )
        .hint("put the file on a local disk, or use an engine with a server")),
    }
}

fn network_name(magic: u64) -> Option<&'static str> {
    // The kernel's type is signed on some platforms; compare the low 32 bits.
    NETWORK
        .iter()
        .find(|(number, _)| *number == magic & 0xffff_ffff)
        .map(|(_, name)| *name)
}

/// How long SQLite waits for another process before a statement fails.
pub(crate) const STATEMENT_BUSY: Duration = Duration::from_millis(250);
/// How long to wait before asking for a write-ahead log again.
const SWITCH_PAUSE: Duration = Duration::from_millis(3);

fn read_only(path: &Path) -> Error {
    let what = format!("{} may only be read", path.display());
    Error::new(Code::ReadOnly, what).hint("make the file and its directory writable for this user")
}

/// Opens the writing connection, and checks that its settings took effect.
pub(crate) fn open_writer(path: &Path, options: &Options) -> Result<Connection> {
    let mut flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    if options.create {
        flags |= OpenFlags::SQLITE_OPEN_CREATE;
    }
    // Checked before SQLite opens the file: a connection that may only read would leave `-wal` and `-shm`
    // files of this user beside it, and lock out the file's owner.
    if path.exists() && rustix::fs::access(path, rustix::fs::Access::WRITE_OK).is_err() {
        return Err(read_only(path));
    }
    let conn = open(path, flags)?;
    conn.busy_timeout(options.busy_timeout)
        .map_err(|e| from_sqlite("opening the file", e))?;
    let kind = crate::schema::identify(&conn)?;
    if kind == crate::schema::Kind::Empty && !options.create {
        let what = format!(
            "{} is empty: no events were ever stored in it",
            path.display()
        );
        return Err(Error::of_file(Code::NotEverbus, what)
            .hint("check the path, or publish something to it"));
    }
    if kind == crate::schema::Kind::Empty {
        // Must come before the first table.
        pragma(&conn, "auto_vacuum", "INCREMENTAL")?;
    }
    if conn.is_readonly("main").unwrap_or(false) {
        return Err(read_only(path));
    }
    let mode = switch_to_wal(&conn, options.busy_timeout)?;
    if !mode.eq_ignore_ascii_case("wal") {
        return Err(not_durable(format!("the journal mode stayed {mode}")));
    }
    let (name, number) = match options.durability {
        Durable::Full => ("FULL", 2),
        Durable::Normal => ("NORMAL", 1),
    };
    pragma(&conn, "synchronous", name)?;
    let set: i64 = conn
        .query_row("PRAGMA synchronous", [], |row| row.get(0))
        .map_err(|e| from_sqlite("checking synchronous", e))?;
    if set != number {
        return Err(not_durable(format!(
            "synchronous is {set}, asked for {number}"
        )));
    }
    pragma(&conn, "cache_size", "-8192")?;
    pragma(&conn, "temp_store", "MEMORY")?;
    crate::schema::migrate(&conn)?;
    if kind == crate::schema::Kind::Empty {
        // Moves the tables into the database file: without this, the file is empty if its write-ahead log is
        // lost. If another process already uses the new file, a later checkpoint does it.
        let _ = conn.busy_timeout(Duration::ZERO);
        let _ = conn.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()));
    }
    conn.busy_timeout(STATEMENT_BUSY)
        .map_err(|e| from_sqlite("opening the file", e))?;
    conn.set_prepared_statement_cache_capacity(128);
    Ok(conn)
}

/// Switches to a write-ahead log and returns the mode that is set. While other connections to a new file
/// switch too, SQLite refuses at once instead of waiting, so this function waits.
fn switch_to_wal(conn: &Connection, patience: Duration) -> Result<String> {
    let give_up = Instant::now() + patience;
    loop {
        match conn.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0)) {
            Err(e) if is_busy(&e) && Instant::now() < give_up => std::thread::sleep(SWITCH_PAUSE),
            mode => return mode.map_err(|e| from_sqlite("switching to a write-ahead log", e)),
        }
    }
}

/// Opens a connection that only reads.
pub(crate) fn open_reader(path: &Path) -> Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = open(path, flags)?;
    conn.busy_timeout(Duration::from_secs(5))
        .map_err(|e| from_sqlite("opening the file", e))?;
    pragma(&conn, "cache_size", "-2048")?;
    pragma(&conn, "query_only", "ON")?;
    conn.set_prepared_statement_cache_capacity(64);
    Ok(conn)
}

fn open(path: &Path, flags: OpenFlags) -> Result<Connection> {
    Connection::open_with_flags(path, flags)
        .map_err(|e| from_sqlite(&format!("opening {}", path.display()), e))
}

fn pragma(conn: &Connection, name: &str, value: &str) -> Result<()> {
    conn.pragma_update(None, name, value)
        .map_err(|e| from_sqlite(&format!("setting {name}"), e))
}

fn not_durable(what: String) -> Error {
    Error::new(Code::NotDurable, what)
        .hint("the file system does not support what durability needs")
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: bus/network-file-system: file systems whose locks cannot be trusted are refused
    #[test]
    fn network_file_systems_are_known_by_their_number() {
        assert_eq!(network_name(0x6969), Some("NFS"));
        assert_eq!(
            network_name(0xffff_ffff_ff53_4d42),
            Some("CIFS"),
            "sign-extended"
        );
        assert_eq!(network_name(0xef53), None, "ext4");
        assert_eq!(network_name(0x0102_1994), None, "tmpfs");
    }
}
