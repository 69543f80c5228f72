//! The tables of a file, their version, and the way from one version to the next.

use everbus_core::{Code, Error, Result};
use rusqlite::Connection;

use crate::errors::from_sqlite;

/// The version of the tables this build reads and writes.
pub const VERSION: i32 = 6;

/// `EVBS`: marks a SQLite file as ours.
pub(crate) const APPLICATION_ID: i32 = 0x4556_4253;

/// What leads from version n to n + 1; the first leads from an empty file to version 1.
const MIGRATIONS: &[&str] = &[
    include_str!("schema.sql"),
    include_str!("schema_2.sql"),
    // The tables of the outbox are also made in other people's databases, so they have a file of their own.
    concat!(include_str!("outbox.sql"), include_str!("schema_3.sql")),
    include_str!("schema_4.sql"),
    include_str!("schema_5.sql"),
    include_str!("schema_6.sql"),
];

/// The first SQLite that has the fix for lost commits after a WAL reset, and the older lines that
/// got it too.
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

/// What a file turned out to be.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Empty,
    Ours(i32),
}

/// Looks at a file without changing it, in one read transaction: another process may be making the tables
/// just now, and would be seen half-way between two reads.
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
        return if version > VERSION {
            Err(newer(version))
        } else {
            Ok(Kind::Ours(version))
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

/// The error for a file from the future.
pub(crate) fn newer(version: i32) -> Error {
    Error::new(
        Code::NewerSchema,
        format!("the file has schema version {version}, this build knows {VERSION}"),
    )
    .hint("use a newer version of Everbus; the file was not touched")
}

/// Brings the tables to [`VERSION`] in one transaction: the file is as it was or new, never between.
pub(crate) fn migrate(conn: &Connection) -> Result<()> {
    let doing = |e| from_sqlite("preparing the tables", e);
    if identify(conn)? == Kind::Ours(VERSION) {
        return Ok(());
    }
    // A table that others refer to can only be made anew while nobody watches over the references.
    let watched: bool = conn
        .query_row("PRAGMA foreign_keys", [], |row| row.get(0))
        .map_err(doing)?;
    conn.pragma_update(None, "foreign_keys", false)
        .map_err(doing)?;
    let migrated = migrate_at_once(conn);
    conn.pragma_update(None, "foreign_keys", watched)
        .map_err(doing)?;
    migrated
}

/// A table of the user's may stand where a newer version needs one of its own.
fn name_taken(error: rusqlite::Error) -> Error {
    let text = error.to_string();
    if !text.contains("already exists") {
        return from_sqlite("preparing the tables", error);
    }
    Error::new(
        Code::Unsupported,
        format!("this version needs a name that something of yours in the file has: {text}"),
    )
    .hint("rename yours: ALTER TABLE … RENAME TO …; the file was not changed")
    .caused_by(error)
}

fn migrate_at_once(conn: &Connection) -> Result<()> {
    let doing = |e| from_sqlite("preparing the tables", e);
    conn.execute_batch("BEGIN IMMEDIATE").map_err(doing)?;
    // Looked at again under the lock: another process may have been faster.
    let moved = identify(conn).and_then(|kind| {
        let from = match kind {
            Kind::Empty => 0,
            Kind::Ours(version) => version,
        };
        if from == VERSION {
            return Ok(());
        }
        let from = usize::try_from(from).unwrap_or(usize::MAX);
        for step in MIGRATIONS.iter().skip(from) {
            conn.execute_batch(step).map_err(name_taken)?;
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
        // The other process is done between the first look and the second.
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

    // conformance: handlers/inbox-group-numbers: the number of a removed group is never given again, also in a file of version 1
    #[test]
    fn the_numbers_of_groups_go_on_after_a_migration() {
        for kept in [0, 1] {
            let conn = Connection::open_in_memory().unwrap();
            conn.execute_batch(MIGRATIONS[0]).unwrap();
            conn.pragma_update(None, "application_id", APPLICATION_ID)
                .unwrap();
            conn.pragma_update(None, "user_version", 1).unwrap();
            let add = |name: &str| -> i64 {
                conn.execute(
                    "INSERT INTO groups (name, ordered, cursor, declared_at, created_at, active_at)
                     VALUES (?1, 0, 0, 0, 0, 0)",
                    [name],
                )
                .unwrap();
                conn.last_insert_rowid()
            };
            let numbers = ["a", "b", "c"].map(add);
            conn.execute("INSERT INTO skips VALUES (?1, 1, 'kept', 1)", [numbers[0]])
                .unwrap();
            if kept == 0 {
                conn.execute("DELETE FROM skips", []).unwrap();
            }
            conn.execute("DELETE FROM groups WHERE id > ?1", [kept])
                .unwrap();
            migrate(&conn).unwrap();
            assert!(add("d") > numbers[2], "with {kept} kept");
            let broken: i64 = conn
                .query_row("SELECT count(*) FROM pragma_foreign_key_check", [], |r| {
                    r.get(0)
                })
                .unwrap();
            assert_eq!(broken, 0);
            let orphan = conn.execute("INSERT INTO skips VALUES (99, 1, 'x', 1)", []);
            assert!(orphan.is_err(), "references are watched over again");
        }
    }

    // conformance: memory/migration-names: a table of the user's in the way of a migration is named, and nothing is changed
    #[test]
    fn a_table_in_the_way_is_named() {
        let conn = Connection::open_in_memory().unwrap();
        conn.execute_batch(MIGRATIONS[0]).unwrap();
        conn.execute_batch(MIGRATIONS[1]).unwrap();
        conn.pragma_update(None, "application_id", APPLICATION_ID)
            .unwrap();
        conn.pragma_update(None, "user_version", 2).unwrap();
        conn.execute_batch("CREATE TABLE audit_log (mine)").unwrap();
        let error = migrate(&conn).unwrap_err();
        assert_eq!(error.code(), Code::Unsupported);
        assert!(error.to_string().contains("audit_log"), "{error}");
        assert_eq!(identify(&conn).unwrap(), Kind::Ours(2));
        conn.execute_batch("ALTER TABLE audit_log RENAME TO mine")
            .unwrap();
        migrate(&conn).unwrap();
        assert_eq!(identify(&conn).unwrap(), Kind::Ours(VERSION));
    }

    #[test]
    fn newer_and_foreign_files_are_refused() {
        let conn = Connection::open_in_memory().unwrap();
        migrate(&conn).unwrap();
        conn.pragma_update(None, "user_version", VERSION + 1)
            .unwrap();
        assert_eq!(identify(&conn).unwrap_err().code(), Code::NewerSchema);
        let foreign = Connection::open_in_memory().unwrap();
        foreign.execute_batch("CREATE TABLE theirs (x)").unwrap();
        assert_eq!(migrate(&foreign).unwrap_err().code(), Code::NotEverbus);
    }
}
