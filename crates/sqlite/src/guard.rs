//! What an effect may do on the writer's connection.
//!
//! An effect gets the connection in the middle of a transaction that many commands share. SQLite calls this authorizer
//! for every statement that is prepared. While an effect runs, it refuses statements that would end the transaction,
//! change the connection's settings or touch the tables of Everbus. Statements are prepared once, so this costs the
//! engine nothing in normal operation.
//!
//! It guards against mistakes, not against malice: a statement with exactly the text of one of the engine's
//! would be found in the cache of prepared statements, which are not checked again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use everbus_core::Result;
use rusqlite::Connection;
use rusqlite::hooks::{AuthAction, AuthContext, Authorization};

use crate::errors::from_sqlite;

/// The savepoint under which an effect runs.
pub(crate) const SAVEPOINT: &str = "everbus_effect";

/// Names with this prefix are reserved for later versions.
const RESERVED: &str = "everbus_";

/// The tables and views of Everbus in the file.
const OURS: &[&str] = &[
    "meta",
    "types",
    "tenants",
    "log",
    "groups",
    "subscriptions",
    "claims",
    "deliveries",
    "dead_letters",
    "skips",
    "outcomes",
    "owners",
    "inbox",
    "processed_events",
    "events",
    "history_runs",
    "history_blocks",
    "history_indexer",
    "event_outbox",
    "outbox_dead_letters",
    "outbox_relay",
    "event_outbox_framework",
    "event_outbox_origins",
    "dead_letter_events",
    "event_payloads",
    "audit_log",
    "audit_anchor",
    "checkpoints",
    "expirations",
    "orphaned_objects",
    "everbus_failures",
    "everbus_early_payloads",
    "everbus_kv",
];

/// The table that an effect may write events into.
const OUTBOX: &str = "event_outbox";

/// Pragmas that only read.
const TELLING: &[&str] = &[
    "collation_list",
    "compile_options",
    // Full-text search tables read it before they write.
    "data_version",
    "database_list",
    "foreign_key_check",
    "foreign_key_list",
    "function_list",
    "index_info",
    "index_list",
    "index_xinfo",
    "table_info",
    "table_list",
    "table_xinfo",
];

/// Checks statements while an effect runs, and none otherwise.
#[derive(Clone, Default)]
pub(crate) struct Guard {
    on: Arc<AtomicBool>,
}

impl Guard {
    /// Installs a guard on a connection, for the life of the connection.
    pub(crate) fn install(conn: &mut Connection) -> Result<Self> {
        let guard = Self::default();
        let on = guard.on.clone();
        conn.authorizer(Some(move |context: AuthContext<'_>| {
            if !on.load(Ordering::Relaxed) || allowed(&context) {
                Authorization::Allow
            } else {
                Authorization::Deny
            }
        }))
        .map_err(|e| from_sqlite("guarding the connection", e))?;
        Ok(guard)
    }

    /// Checks statements while `run` runs.
    pub(crate) fn during<T>(&self, run: impl FnOnce() -> T) -> T {
        self.on.store(true, Ordering::Relaxed);
        let result = run();
        self.on.store(false, Ordering::Relaxed);
        result
    }
}

fn allowed(context: &AuthContext<'_>) -> bool {
    match context.action {
        AuthAction::Select
        | AuthAction::Read { .. }
        | AuthAction::Function { .. }
        // Part of CREATE INDEX; by itself it changes nothing.
        | AuthAction::Reindex { .. }
        | AuthAction::Recursive => true,
        // An effect may write events into the outbox. The trigger replaces a row that is enqueued again.
        AuthAction::Insert { table_name } => {
            !is_ours(table_name) || table_name.eq_ignore_ascii_case(OUTBOX)
        }
        AuthAction::Delete { table_name } if table_name.eq_ignore_ascii_case(OUTBOX) => {
            context.accessor == Some("event_outbox_again")
        }
        AuthAction::Update { table_name, .. }
        | AuthAction::Delete { table_name }
        | AuthAction::DropTable { table_name }
        | AuthAction::DropVtable { table_name, .. }
        | AuthAction::CreateIndex { table_name, .. }
        | AuthAction::DropIndex { table_name, .. }
        | AuthAction::CreateTrigger { table_name, .. }
        | AuthAction::DropTrigger { table_name, .. } => !is_ours(table_name),
        AuthAction::CreateTable { table_name } | AuthAction::CreateVtable { table_name, .. } => {
            !is_ours(table_name)
        }
        AuthAction::CreateView { view_name } | AuthAction::DropView { view_name } => {
            !is_ours(view_name)
        }
        // The authorizer does not get the new name. In `temp`, a new name could hide a table of Everbus.
        AuthAction::AlterTable {
            database_name,
            table_name,
        } => database_name.eq_ignore_ascii_case("main") && !is_ours(table_name),
        AuthAction::Savepoint { savepoint_name, .. } => {
            !savepoint_name.eq_ignore_ascii_case(SAVEPOINT)
        }
        AuthAction::Pragma { pragma_name, .. } => one_of(TELLING, pragma_name),
        // Transactions, ATTACH and DETACH, ANALYZE, everything in `temp` (it stays on the connection, and its
        // names hide those of Everbus), and unknown actions.
        _ => false,
    }
}

/// Whether a table or view belongs to the engine. `sqlite_sequence` has the highest row numbers of the engine's tables,
/// so that no number is used twice. Because of it, an effect can neither rename a table nor drop one with
/// AUTOINCREMENT.
fn is_ours(name: &str) -> bool {
    one_of(OURS, name)
        || name.eq_ignore_ascii_case("sqlite_sequence")
        || name
            .get(..RESERVED.len())
            .is_some_and(|start| start.eq_ignore_ascii_case(RESERVED))
}

fn one_of(names: &[&str], name: &str) -> bool {
    names.iter().any(|known| known.eq_ignore_ascii_case(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn guarded() -> (Connection, Guard) {
        let mut conn = Connection::open_in_memory().unwrap();
        crate::schema::migrate(&conn).unwrap();
        let guard = Guard::install(&mut conn).unwrap();
        (conn, guard)
    }

    #[test]
    fn every_table_and_view_of_the_schema_is_known_as_ours() {
        let (conn, _) = guarded();
        let stored: BTreeSet<String> = conn
            .prepare(
                "SELECT name FROM sqlite_schema
                 WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite%'",
            )
            .and_then(|mut s| s.query_map([], |r| r.get(0))?.collect())
            .unwrap();
        let known: BTreeSet<String> = OURS.iter().map(|name| (*name).to_owned()).collect();
        assert_eq!(stored, known);
    }

    // conformance: handlers/exactly-once-guard: an effect cannot end the transaction, change the connection or touch Everbus's own tables
    #[test]
    fn what_would_break_out_or_touch_our_tables_is_refused() {
        let (conn, guard) = guarded();
        conn.execute_batch(&format!(
            "CREATE TABLE mine (x); BEGIN; SAVEPOINT {SAVEPOINT}"
        ))
        .unwrap();
        for statement in [
            "COMMIT",
            "ROLLBACK",
            "BEGIN",
            "ROLLBACK TO everbus_effect",
            "RELEASE Everbus_Effect",
            "SAVEPOINT everbus_effect",
            "ATTACH ':memory:' AS other",
            "DETACH main",
            "VACUUM",
            "ANALYZE",
            "PRAGMA synchronous = OFF",
            "PRAGMA foreign_keys = OFF",
            "PRAGMA defer_foreign_keys = ON",
            "PRAGMA user_version = 9",
            "PRAGMA wal_checkpoint",
            "PRAGMA writable_schema = ON",
            "DELETE FROM log",
            "DELETE FROM Log",
            "UPDATE groups SET cursor = 9",
            "INSERT INTO skips VALUES (1, 1, 'x', 1)",
            "INSERT INTO inbox SELECT 1, id, tenant, 1 FROM log",
            "DROP TABLE claims",
            "DROP VIEW events",
            "DROP INDEX log_id",
            "ALTER TABLE log RENAME TO mine2",
            "ALTER TABLE log ADD COLUMN more",
            "CREATE INDEX more ON log (type)",
            "CREATE TRIGGER t AFTER INSERT ON log BEGIN SELECT 1; END",
            "CREATE TRIGGER t INSTEAD OF INSERT ON events BEGIN SELECT 1; END",
            "CREATE TEMP TRIGGER t AFTER INSERT ON main.log BEGIN SELECT 1; END",
            "CREATE TEMP TABLE log (x)",
            "CREATE TABLE temp.log (x)",
            "CREATE TEMP VIEW log AS SELECT 1",
            "CREATE TABLE everbus_history (x)",
            "DELETE FROM sqlite_sequence",
            "UPDATE sqlite_sequence SET seq = 0",
            "DELETE FROM sqlite_schema",
            "DELETE FROM event_outbox",
            "UPDATE event_outbox SET status = 'sent'",
            "INSERT INTO outbox_relay VALUES (1, 'me', 1, 1)",
            "INSERT INTO outbox_dead_letters SELECT * FROM outbox_dead_letters",
            "CREATE TRIGGER t AFTER INSERT ON event_outbox BEGIN SELECT 1; END",
        ] {
            let refused = guard.during(|| conn.execute_batch(statement));
            assert!(refused.is_err(), "{statement}");
            assert!(!conn.is_autocommit(), "{statement}");
        }
        conn.execute_batch(&format!("ROLLBACK TO {SAVEPOINT}; COMMIT"))
            .unwrap();
    }

    #[test]
    fn reading_our_tables_and_changing_others_is_allowed() {
        let (conn, guard) = guarded();
        conn.execute_batch(&format!("BEGIN; SAVEPOINT {SAVEPOINT}"))
            .unwrap();
        for statement in [
            "CREATE TABLE mine (id INTEGER PRIMARY KEY AUTOINCREMENT, x TEXT UNIQUE)",
            "CREATE INDEX mine_x ON mine (x)",
            "CREATE TABLE journal (x)",
            "CREATE TRIGGER kept AFTER INSERT ON mine BEGIN INSERT INTO journal VALUES (new.x); END",
            "INSERT INTO mine (x) SELECT name FROM groups UNION ALL SELECT 'a'",
            "INSERT INTO mine (x) VALUES ('a') ON CONFLICT (x) DO UPDATE SET x = 'b'",
            "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 9)
             INSERT INTO journal SELECT i FROM n",
            "CREATE VIEW both AS SELECT * FROM mine, log",
            "SAVEPOINT inner; DELETE FROM journal; ROLLBACK TO inner; RELEASE inner",
            "ALTER TABLE journal ADD COLUMN y",
            "DELETE FROM journal",
            "DROP VIEW both",
            "DROP TRIGGER kept",
            "DROP TABLE journal",
            "CREATE VIRTUAL TABLE words USING fts5 (x)",
            "INSERT INTO words VALUES ('a b')",
            "INSERT INTO event_outbox (id, event_id, event_type, payload) VALUES ('a', 'a', 'x.y', '1')",
            "INSERT INTO event_outbox (id, event_id, event_type, payload) VALUES ('a', 'a', 'x.y', '1')",
        ] {
            let done = guard.during(|| conn.execute_batch(statement));
            assert!(done.is_ok(), "{statement}: {done:?}");
        }
        let columns = guard.during(|| {
            conn.query_row("SELECT count(*) FROM pragma_table_info('mine')", [], |r| {
                r.get::<_, i64>(0)
            })
        });
        assert_eq!(columns.unwrap(), 2);
        conn.execute_batch("COMMIT").unwrap();
    }
}
