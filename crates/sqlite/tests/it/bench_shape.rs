//! Query plans: what the figures depend on.

use rusqlite::Connection;

use crate::{declare, open};

/// The plan of a query, one step a line.
fn plan(conn: &Connection, sql: &str) -> String {
    let mut statement = conn.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).unwrap();
    let steps: Vec<String> = statement
        .query_map([], |r| r.get(3))
        .unwrap()
        .map(Result::unwrap)
        .collect();
    steps.join("\n")
}

#[tokio::test]
async fn the_queries_of_the_hot_paths_use_their_indexes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let engine = open(&path);
    declare(&engine, "", "*").await;
    let conn = Connection::open(&path).unwrap();
    let page = "SELECT * FROM dead_letters d JOIN log ON log.seq = d.seq
                  JOIN groups g ON g.id = d.group_id
                WHERE d.retried_at IS NULL AND d.seq <= 5 AND (d.seq < 5 OR g.name > 'x')
                ORDER BY d.seq DESC, g.name LIMIT 100";
    let due = "SELECT seq FROM deliveries WHERE group_id = 1 AND state = 0 AND suspect = 0
                 AND due <= 5 ORDER BY due, seq LIMIT 10";
    let suspect = "SELECT seq FROM deliveries WHERE group_id = 1 AND suspect = 1
                     AND due <= 5 ORDER BY due, seq LIMIT 1";
    let of_group = "SELECT * FROM dead_letters d WHERE d.retried_at IS NULL AND d.group_id = 1
                      ORDER BY d.seq DESC LIMIT 100";
    for (sql, index) in [
        (page, "dead_open"),
        (due, "deliveries_due"),
        (suspect, "deliveries_suspect"),
        (of_group, "dead_open_group"),
    ] {
        let plan = plan(&conn, sql);
        assert!(plan.contains(index), "{index} is not used:\n{plan}");
    }
    let by_id = plan(&conn, "SELECT 1 FROM log WHERE id = x'00' AND tenant = 0");
    assert!(by_id.contains("log_id"), "{by_id}");
    for (sql, search) in [
        (
            "SELECT id, tenant FROM inbox WHERE group_id = 1 AND id BETWEEN x'00' AND x'ff' LIMIT 9",
            "SEARCH inbox USING PRIMARY KEY (group_id=? AND id>? AND id<?)",
        ),
        (
            "SELECT 1 FROM inbox WHERE group_id = 1 AND id = x'00' AND tenant = 0",
            "SEARCH inbox USING PRIMARY KEY (group_id=? AND id=? AND tenant=?)",
        ),
        (
            "SELECT i.at < 5 OR g.id IS NULL FROM inbox i LEFT JOIN groups g ON g.id = i.group_id
             WHERE (i.group_id, i.id, i.tenant) > (1, x'00', 0)
             ORDER BY i.group_id, i.id, i.tenant LIMIT 9",
            "SEARCH i USING PRIMARY KEY ((group_id,id,tenant)>(?,?,?))",
        ),
        (
            "SELECT max(seq) FROM skips WHERE group_id = 1",
            "SEARCH skips USING PRIMARY KEY (group_id=?)",
        ),
    ] {
        let plan = plan(&conn, sql);
        assert!(plan.contains(search), "{search} expected:\n{plan}");
        assert!(!plan.contains("TEMP B-TREE"), "{plan}");
    }
}
