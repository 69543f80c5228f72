//! The tables of a file, their version, and the migrations between versions.

use everbus_core::{Code, Error, Result};
use rusqlite::Connection;

use crate::errors::from_sqlite;

/// The version of the tables this build reads and writes.
pub const VERSION: i32 = 8;

/// The oldest version that this build reads. Development builds wrote older ones.
const OLDEST: i32 = 7;

/// `EVBS`: marks a SQLite file as an Everbus file.
pub(crate) const APPLICATION_ID: i32 = 0x4556_4253;

/// Migrations to the next version; the first leads from an empty file to version [`OLDEST`].
const MIGRATIONS: &[&str] = &[
    // The tables of the outbox are also created in users' databases, so they have their own file.
    concat!(
        include_str!("outbox.sql"),
        include_str!("schema.sql"),
        include_str!("views.sql")
    ),
    // The history's index also has correlation ids: it is built again.
    "UPDATE history_runs SET state = 2",
];

/// The first SQLite with the fix for lost commits after a WAL reset, and the older release lines that got it
/// too.
const SAFE_SQLITE: i32 = 3_051_003;

/// Refuses a SQLite library that may lose commits.
pub(crate) fn check_library() -> Result<()> {
    check_library_version(rusqlite::version_number())
}

fn check_library_version(version: i32) -> Result<()> {
    let patched =
        (3_050_007..3_051_000).contains(&version) || (3_044_006..3_045_000).contains(&version);
    if version >= SAFE_SQLITE || patched {
        return Ok(());
    }
    Err(Error::new(
        Code::SqliteTooOld,
        format!(
            "SQLite {}.{}.{} may lose commits when its write-ahead log is reset",
            version / 1_000_000,
            version / 1000 % 1000,
            version % 1000
        ),
    )
    .hint("build with the bundled SQLite, or link 3.51.3 or newer"))
}

/// What a file contains.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Empty,
    Ours(i32),
}

/// Examines a file without changing it, in one read transaction: another process may be creating the tables,
/// and two reads could see a state in between.
pub(crate) fn identify(conn: &Connection) -> Result<Kind> {
    if !conn.is_autocommit() {
        return look(conn);
    }
    let doing = |e| from_sqlite("reading the file", e);
    conn.execute_batch("BEGIN").map_err(doing)?;
    let kind = look(conn);
    let _ = conn.execute_batch("ROLLBACK");
    kind
}

fn look(conn: &Connection) -> Result<Kind> {
    let get = |pragma: &str| -> Result<i32> {
        conn.query_row(&format!("PRAGMA {pragma}"), [], |row| row.get(0))
            .map_err(|e| from_sqlite("reading the file", e))
    };
    let (application, version) = (get("application_id")?, get("user_version")?);
    if application == APPLICATION_ID {
        return match version {
            _ if version > VERSION => Err(newer(version)),
            _ if version < OLDEST => Err(older(version)),
            _ => Ok(Kind::Ours(version)),
        };
    }
    let tables: i64 = conn
        .query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))
        .map_err(|e| from_sqlite("reading the file", e))?;
    if application == 0 && version == 0 && tables == 0 {
        return Ok(Kind::Empty);
    }
    Err(Error::of_file(
        Code::NotEverbus,
        "this is a SQLite database of another program",
    )
    .hint("choose another file; Everbus does not put its tables into foreign databases"))
}

/// The error for a file of a newer version.
pub(crate) fn newer(version: i32) -> Error {
    Error::new(
        Code::NewerSchema,
        format!("the file has schema version {version}, this build knows {VERSION}"),
    )
    .hint("use a newer version of Everbus; the file was not touched")
}

/// The error for a file that a development build made.
fn older(version: i32) -> Error {
    Error::new(
        Code::Unsupported,
        format!(
            "the file has schema version {version} of a development build; this build reads {OLDEST} and later"
        ),
    )
    .hint("begin a new file, or use the build that made this one; the file was not touched")
}

/// Migrates the tables to [`VERSION`] in one transaction: the file is in the old version or the new one,
/// never between.
pub(crate) fn migrate(conn: &Connection) -> Result<()> {
    if identify(conn)? == Kind::Ours(VERSION) {
        return Ok(());
    }
    migrate_at_once(conn)
}

fn migrate_at_once(conn: &Connection) -> Result<()> {
    let doing = |e| from_sqlite("preparing the tables", e);
    conn.execute_batch("BEGIN IMMEDIATE").map_err(doing)?;
    // Checked again under the lock: another process may have been faster.
    let moved = identify(conn).and_then(|kind| {
        let done = match kind {
            Kind::Empty => 0,
            Kind::Ours(VERSION) => return Ok(()),
            Kind::Ours(version) => version - OLDEST + 1,
        };
        let done = usize::try_from(done).unwrap_or(usize::MAX);
        for step in MIGRATIONS.iter().skip(done) {
            conn.execute_batch(step).map_err(doing)?;
        }
        conn.pragma_update(None, "application_id", APPLICATION_ID)
            .and_then(|()| conn.pragma_update(None, "user_version", VERSION))
            .map_err(doing)
    });
    match moved {
        Ok(()) => conn.execute_batch("COMMIT").map_err(doing),
        Err(e) => {
            let _ = conn.execute_batch("ROLLBACK");
            Err(e)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rusqlite::hooks::{AuthAction, AuthContext, Authorization};

    // conformance: bus/sqlite-version: a SQLite with the WAL-reset bug is refused at open
    #[test]
    fn libraries_with_the_wal_reset_bug_are_refused() {
        for bad in [3_040_001, 3_044_005, 3_050_006, 3_051_002] {
            assert_eq!(
                check_library_version(bad).unwrap_err().code(),
                Code::SqliteTooOld
            );
        }
        for good in [3_044_006, 3_050_007, 3_051_003, 3_052_000] {
            assert!(check_library_version(good).is_ok());
        }
        assert!(check_library().is_ok(), "the bundled one");
    }

    #[test]
    fn an_empty_file_becomes_ours_and_stays_so() {
        let conn = Connection::open_in_memory().unwrap();
        assert_eq!(identify(&conn).unwrap(), Kind::Empty);
        migrate(&conn).unwrap();
        migrate(&conn).unwrap();
        assert_eq!(identify(&conn).unwrap(), Kind::Ours(VERSION));
    }

    // conformance: contract/new-file-race: a file that another process makes while it is looked at is empty or an Everbus file, never one of another program
    #[test]
    fn a_file_is_identified_in_one_moment() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        let mut conn = Connection::open(&path).unwrap();
        conn.pragma_update(None, "journal_mode", "WAL").unwrap();
        // The other process finishes between the first check and the second.
        let mut other = Some(path);
        conn.authorizer(Some(move |context: AuthContext<'_>| {
            let second = matches!(
                context.action,
                AuthAction::Pragma {
                    pragma_name: "user_version",
                    ..
                }
            );
            if let Some(path) = other.take_if(|_| second) {
                migrate(&Connection::open(path).unwrap()).unwrap();
            }
            Authorization::Allow
        }))
        .unwrap();
        assert_eq!(identify(&conn).unwrap(), Kind::Empty);
        assert_eq!(identify(&conn).unwrap(), Kind::Ours(VERSION));
    }

    #[test]
    fn newer_and_foreign_files_are_refused() {
        let conn = Connection::open_in_memory().unwrap();
        migrate(&conn).unwrap();
        conn.pragma_update(None, "user_version", VERSION + 1)
            .unwrap();
        assert_eq!(identify(&conn).unwrap_err().code(), Code::NewerSchema);
        conn.pragma_update(None, "user_version", OLDEST - 1)
            .unwrap();
        let older = identify(&conn).unwrap_err();
        assert!(older.message().contains("development build"), "{older}");
        let foreign = Connection::open_in_memory().unwrap();
        foreign.execute_batch("CREATE TABLE theirs (x)").unwrap();
        assert_eq!(migrate(&foreign).unwrap_err().code(), Code::NotEverbus);
    }
}
