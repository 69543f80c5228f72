//! The statements use the intended SQLite indexes.

use rusqlite::Connection;

use super::{merge, postings};

fn plan(conn: &Connection, sql: &str) -> String {
    let mut statement = conn.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).unwrap();
    let mut rows = statement.raw_query();
    let mut lines = Vec::new();
    while let Some(row) = rows.next().unwrap() {
        lines.push(row.get::<_, String>(3).unwrap());
    }
    lines.join("; ")
}

// conformance: memory/history-plans: finding a block, the next ones and an event are searches, never scans or sorts
#[test]
fn every_statement_searches() {
    let conn = Connection::open_in_memory().unwrap();
    crate::schema::migrate(&conn).unwrap();
    for sql in [postings::AT_OR_BEFORE, postings::AFTER, merge::FROM] {
        let found = plan(&conn, sql);
        assert!(
            found.contains("history_blocks_first (run=? AND (scope,seq)"),
            "{found}"
        );
        assert!(!found.contains("TEMP B-TREE"), "{found}");
    }
    for sql in [
        "SELECT seq, type, attrs FROM log WHERE seq > ?1 AND seq <= ?2 ORDER BY seq DESC",
        "SELECT 1 FROM log WHERE seq BETWEEN ?1 AND ?2 LIMIT 1",
        "SELECT seq FROM log WHERE seq > ?1 AND seq <= ?2 AND type IN (1,2)
         AND (?3 IS NULL OR tenant = ?3) ORDER BY seq",
    ] {
        let found = plan(&conn, sql);
        assert!(found.contains("INTEGER PRIMARY KEY (rowid"), "{found}");
        assert!(!found.contains("TEMP B-TREE"), "{found}");
    }
}

// conformance: memory/history-range-cost: the ends of the log and the place of a time are found by searches, so that since and until cost the same in a large file
#[test]
fn the_ends_of_the_log_are_not_found_by_reading_it() {
    let conn = Connection::open_in_memory().unwrap();
    crate::schema::migrate(&conn).unwrap();
    for sql in [
        crate::rows::ENDS,
        "SELECT seq, received_at FROM log WHERE seq >= ?1 ORDER BY seq LIMIT 1",
    ] {
        let found = plan(&conn, sql);
        assert!(found.contains("SEARCH log"), "{found}");
        assert!(!found.contains("SCAN log"), "{found}");
    }
}
