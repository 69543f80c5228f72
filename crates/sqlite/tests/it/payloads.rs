//! The tables of payload stages, as others read them.

use std::sync::Arc;

use everbus_core::{Event, Retention, StageInfo, StoredStage, SystemClock, Timestamp};
use rusqlite::Connection;

// conformance: omni/payload-table: event_payloads has the columns and indexes of the specification
// conformance: omni/payload-cascade: payloads are deleted with their event
// conformance: memory/stages-bytes: stages are stored as bytes, not as base64 text
#[tokio::test]
async fn the_table_is_that_of_the_specification() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bus.db");
    let options = everbus_sqlite::Options {
        clock: Arc::new(SystemClock),
        ..everbus_sqlite::Options::default()
    };
    let engine = everbus_sqlite::open(&path, options).unwrap();
    let event = Event::builder("a").tenant("acme").build().unwrap();
    let appended = engine.broker.append(vec![event.clone()]).await.unwrap();
    assert!(appended[0].is_ok());
    let stage = StoredStage {
        info: StageInfo {
            stage: "webhook_raw".parse().unwrap(),
            timestamp: Timestamp::from_micros(1_700_000_000_000_000),
            payload_size_original: 12,
            payload_size_compressed: 3,
            status_code: Some(200),
            error_details: None,
            contains_media: true,
            contains_base64: false,
        },
        compressed: vec![0x1f, 0x8b, 0xff].into(),
    };
    let payloads = engine.payloads().unwrap();
    payloads.store((&event).into(), stage).await.unwrap();

    let conn = Connection::open(&path).unwrap();
    let row = conn
        .query_row(
            "SELECT event_id, stage, typeof(payload_compressed), length(payload_compressed),
               payload_size_original, payload_size_compressed, timestamp, status_code,
               error_details, contains_media, contains_base64 FROM event_payloads",
            [],
            |r| {
                let texts: (String, String, String) = (r.get(0)?, r.get(1)?, r.get(2)?);
                let sizes: (i64, i64, i64, i64) = (r.get(3)?, r.get(4)?, r.get(5)?, r.get(6)?);
                let rest: (i64, Option<String>, bool, bool) =
                    (r.get(7)?, r.get(8)?, r.get(9)?, r.get(10)?);
                Ok((texts, sizes, rest))
            },
        )
        .unwrap();
    assert_eq!(
        row.0,
        (event.id().to_string(), "webhook_raw".into(), "blob".into())
    );
    assert_eq!(row.1, (3, 12, 3, 1_700_000_000_000_000));
    assert_eq!(row.2, (200, None, true, false));
    for (column, wanted) in [
        ("event_id", "event_payloads_event_id"),
        ("stage", "event_payloads_stage"),
        ("timestamp", "event_payloads_timestamp"),
        ("payload_size_original", "event_payloads_size"),
    ] {
        let plan: String = conn
            .query_row(
                &format!("EXPLAIN QUERY PLAN SELECT * FROM event_payloads WHERE {column} > '1'"),
                [],
                |r| r.get(3),
            )
            .unwrap();
        assert!(plan.contains(wanted), "{column}: {plan}");
    }
    let everything = Retention {
        max_len: Some(0),
        ..Retention::default()
    };
    engine
        .maintenance()
        .unwrap()
        .prune(everything)
        .await
        .unwrap();
    let left: i64 = conn
        .query_row("SELECT count(*) FROM event_payloads", [], |r| r.get(0))
        .unwrap();
    assert_eq!(left, 0);
    engine.broker.close().await.unwrap();
}
