//! The queries of the *workflow* specification as queries of the history.

use everbus_core::{Code, HistoryQuery, Order, Pattern};
use everbus_dialects::workflow::TableQuery;
use serde_json::{Value, json};

const TENANT: &str = "gbinnovations";

fn read(query: Value) -> Result<HistoryQuery, everbus_core::Error> {
    let query: TableQuery = serde_json::from_value(query).unwrap();
    query.history(TENANT)
}

fn ours() -> HistoryQuery {
    HistoryQuery::default().tenant(TENANT)
}

fn exactly(event_type: &str) -> Pattern {
    Pattern::new(event_type).unwrap()
}

/// A query by one index, oldest first.
fn by(index: u8, partition: &str, sort: Option<&str>) -> Result<HistoryQuery, everbus_core::Error> {
    let (name, at) = match index {
        0 => (None, String::new()),
        n => (Some(format!("GSI{n}-index")), format!("GSI{n}")),
    };
    let condition = match sort {
        None => format!("{at}PK = :pk"),
        Some(_) => format!("{at}PK = :pk AND begins_with({at}SK, :sk)"),
    };
    let mut values = json!({ ":pk": partition });
    if let Some(sort) = sort {
        values[":sk"] = json!(sort);
    }
    read(json!({
        "IndexName": name,
        "KeyConditionExpression": condition,
        "ExpressionAttributeValues": values,
    }))
}

// conformance: workflow/query-single: the document's query of a single task's state
// conformance: workflow/query-history: the document's query of a task's history
// conformance: workflow/query-job: the document's query of a job's events
// conformance: workflow/query-by-type: the document's query of all tasks by state
// conformance: memory/history-begins-with: begins_with where the specification uses it
#[test]
fn the_queries_of_the_document_are_understood() {
    let single = read(json!({
        "TableName": "events",
        "IndexName": "GSI1-index",
        "KeyConditionExpression": "GSI1PK = :pk",
        "ExpressionAttributeValues": { ":pk": "TASK#req-123" },
        "ScanIndexForward": false,
        "Limit": 1
    }));
    let expected = ours()
        .entity("TASK", "req-123")
        .order(Order::Newest)
        .limit(1);
    assert_eq!(single.unwrap(), expected);

    let by_type = read(json!({
        "TableName": "events",
        "IndexName": "GSI4-index",
        "KeyConditionExpression": "GSI4PK = :pk AND begins_with(GSI4SK, :sk)",
        "ExpressionAttributeValues": {
            ":pk": "EVENT#Task Processing Started",
            ":sk": "TENANT#gbinnovations#TIMESTAMP#"
        }
    }));
    let expected = ours()
        .types(exactly("Task Processing Started"))
        .order(Order::Oldest);
    assert_eq!(by_type.unwrap(), expected);

    let history = read(json!({
        "TableName": "events",
        "IndexName": "GSI1-index",
        "KeyConditionExpression": "GSI1PK = :pk",
        "ExpressionAttributeValues": { ":pk": "TASK#req-123" },
        "ScanIndexForward": true
    }));
    let expected = ours().entity("TASK", "req-123").order(Order::Oldest);
    assert_eq!(history.unwrap(), expected);

    let job = read(json!({
        "TableName": "events",
        "IndexName": "GSI1-index",
        "KeyConditionExpression": "GSI1PK = :pk",
        "ExpressionAttributeValues": { ":pk": "JOB#job-456" },
        "ScanIndexForward": true
    }));
    let expected = ours().entity("JOB", "job-456").order(Order::Oldest);
    assert_eq!(job.unwrap(), expected);
}

// conformance: workflow/query-indexes: the table and each of its seven indexes can be asked
#[test]
fn the_table_and_all_seven_indexes_can_be_asked() {
    let ours = || ours().order(Order::Oldest);
    let typed = || ours().types(exactly("Task Failed"));
    let task = "TASK#req-123#TIMESTAMP#";
    let event = "EVENT#Task Failed";
    for (index, partition, sort, expected) in [
        (0, "TENANT#gbinnovations", "TIMESTAMP#", ours()),
        (
            1,
            "TASK#req-123",
            "TASK#TIMESTAMP#",
            ours().entity("TASK", "req-123"),
        ),
        (
            2,
            "APP#task-workflow",
            "TIMESTAMP#",
            ours().app("task-workflow"),
        ),
        (3, "APP#a", task, ours().app("a").entity("TASK", "req-123")),
        (4, event, "TENANT#gbinnovations#", typed()),
        (
            5,
            event,
            "TENANT#gbinnovations#TASK#r#TIMESTAMP#",
            typed().entity("TASK", "r"),
        ),
        (
            6,
            event,
            "TENANT#gbinnovations#APP#a#TIMESTAMP#",
            typed().app("a"),
        ),
        (
            7,
            event,
            "TENANT#gbinnovations#APP#a#TASK#r#TIMESTAMP#",
            typed().app("a").entity("TASK", "r"),
        ),
    ] {
        assert_eq!(
            by(index, partition, Some(sort)).unwrap(),
            expected,
            "{index}"
        );
    }
    // Without a sort key, where the index needs none.
    for (index, partition) in [
        (0, "TENANT#gbinnovations"),
        (1, "STORE#7"),
        (2, "APP#a"),
        (4, event),
    ] {
        by(index, partition, None).unwrap();
    }
}

// conformance: workflow/query-tenant: entity and app queries are always filtered by tenant, although GSI1–3 carry none
#[test]
fn a_query_sees_its_own_tenant_only() {
    for (index, partition) in [(1, "TASK#req-123"), (2, "APP#a"), (4, "EVENT#x")] {
        let query = by(index, partition, None).unwrap();
        assert_eq!(query.tenant.as_deref(), Some(TENANT), "{index}");
    }
    for (index, partition, sort) in [
        (0, "TENANT#other", None),
        (4, "EVENT#x", Some("TENANT#other#TIMESTAMP#")),
        (5, "EVENT#x", Some("TENANT#other#TASK#1#")),
        (6, "EVENT#x", Some("TENANT#other#APP#1#")),
        (7, "EVENT#x", Some("TENANT#other#APP#1#TASK#1#")),
    ] {
        let error = by(index, partition, sort).unwrap_err();
        assert_eq!(error.code(), Code::InvalidAttribute);
        assert!(error.message().contains("other"), "{error}");
    }
}

#[test]
fn what_the_history_cannot_say_is_refused() {
    for (index, partition, sort) in [
        // A part of a name would mean all that begin so.
        (4, "EVENT#x", Some("TENANT#gbinno")),
        (4, "EVENT#x", Some("TENANT#gbinnovations#TIMESTAMP#17674")),
        (
            0,
            "TENANT#gbinnovations",
            Some("TIMESTAMP#1767453739640#EVENT#"),
        ),
        // All entities, or all apps.
        (3, "APP#a", None),
        (3, "APP#a", Some("TASK#")),
        (5, "EVENT#x", Some("TENANT#gbinnovations#")),
        (5, "EVENT#x", None),
        (6, "EVENT#x", Some("TENANT#gbinnovations#TASK#1#")),
        (7, "EVENT#x", Some("TENANT#gbinnovations#APP#a#")),
        // Not what the index is about.
        (1, "TASK#req-123", Some("JOB#TIMESTAMP#")),
        (1, "TASK", None),
        (1, "TASK#", None),
        (1, "#x", None),
        (1, "TASK#a#b", None),
        (2, "TASK#a", None),
        (2, "APP#a#b", None),
        (4, "x", None),
        (4, "EVENT#order.*", None),
        (4, "EVENT#x", Some("TENANT##TIMESTAMP#")),
        (4, "EVENT#x", Some("#")),
    ] {
        let error = by(index, partition, sort).unwrap_err();
        assert_eq!(error.code(), Code::InvalidAttribute, "{partition} {sort:?}");
    }
    for condition in [
        "",
        "GSI1PK",
        "GSI1PK = x",
        "GSI1PK = :",
        "GSI8PK = :pk",
        "GSI0PK = :pk",
        "SK = :pk",
        "GSI1PK = :pk AND GSI1SK = :sk",
        "GSI1PK = :pk AND begins_with(GSI2SK, :sk)",
        "GSI1PK = :pk AND begins_with(GSI1SK)",
        "GSI1PK = :pk AND begins_with(GSI1SK, :sk",
        "GSI1PK = :other",
    ] {
        let error = read(json!({
            "IndexName": "GSI1-index",
            "KeyConditionExpression": condition,
            "ExpressionAttributeValues": { ":pk": "TASK#1", ":sk": "TASK#TIMESTAMP#" },
        }));
        assert_eq!(
            error.unwrap_err().code(),
            Code::InvalidAttribute,
            "{condition}"
        );
    }
    let wrong_index = read(json!({
        "IndexName": "GSI2-index",
        "KeyConditionExpression": "GSI1PK = :pk",
        "ExpressionAttributeValues": { ":pk": "TASK#1" },
    }));
    assert!(wrong_index.unwrap_err().message().contains("GSI2-index"));
    let nothing = read(json!({
        "IndexName": "GSI1-index",
        "KeyConditionExpression": "GSI1PK = :pk",
        "ExpressionAttributeValues": { ":pk": "TASK#1" },
        "Limit": 0,
    }));
    assert_eq!(nothing.unwrap_err().code(), Code::InvalidSetting);
}
