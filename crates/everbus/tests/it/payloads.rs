//! Payload stages through the bus.

use std::io::Write as _;
use std::time::Duration;

use bytes::Bytes;
use everbus::core::StoredStage;
use everbus::payloads::{EventKey, LARGE_PAYLOAD, LARGEST_LISTED, Stage, StageInfo};
use everbus::{Clock, Code, Context, Event, EventId, HandlerError, Json, Router, handled};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

use crate::support::on_every_engine;

// conformance: omni/payload-store: storePayload keeps the value as gzip with its sizes and flags, getPayload gives it back, all stages or one, oldest first
#[tokio::test]
async fn a_stage_comes_back_as_it_was_stored() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let id = bus.publish(("message.received", 1)).await.unwrap().id();
        let stages = bus.payloads();
        let raw = json!({ "text": "ä".repeat(900), "n": [1, 2.5, null] });
        stages.store(id, Stage::WEBHOOK_RAW, &raw).await.unwrap();
        lab.clock.advance(Duration::from_secs(1));
        let picture = json!({ "url": "https://cdn.example/p.JPG", "encoding": "base64" });
        stages
            .store(id, Stage::AGENT_RESPONSE, &picture)
            .status_code(502)
            .error_details("bad gateway")
            .await
            .unwrap();
        lab.clock.advance(Duration::from_secs(1));
        stages
            .store_raw(id, "my stage", &b"\xff\x00raw"[..])
            .await
            .unwrap();

        let all = stages.get(id).await.unwrap();
        let names: Vec<&str> = all.iter().map(|s| s.info.stage.as_str()).collect();
        assert_eq!(names, ["webhook_raw", "agent_response", "my stage"]);
        assert_eq!(all[0].json::<Value>().unwrap(), raw);
        let info = &all[0].info;
        assert_eq!(info.payload_size_original, raw.to_string().len() as u64);
        assert!(info.payload_size_compressed < 100, "{info:?}");
        assert!(!info.contains_media && !info.contains_base64);
        assert_eq!((info.status_code, &info.error_details), (None, &None));
        let info = &all[1].info;
        assert!(info.contains_media && info.contains_base64);
        assert_eq!(info.status_code, Some(502));
        assert_eq!(info.error_details.as_deref(), Some("bad gateway"));
        assert_eq!(
            info.timestamp,
            lab.clock.now().minus(Duration::from_secs(1))
        );
        assert_eq!(&all[2].bytes().unwrap()[..], b"\xff\x00raw");
        assert_eq!(
            all[2].json::<Value>().unwrap_err().code(),
            Code::InvalidPayloadError
        );

        let one = stages.get_stage(id, "agent_response").await.unwrap();
        assert_eq!(one.len(), 1);
        assert_eq!(one[0].json::<Value>().unwrap(), picture);
        assert!(stages.get_stage(id, "error").await.unwrap().is_empty());
    })
    .await;
}

// conformance: memory/stages-names: stages of one's own have names too; what is no name is refused
// conformance: memory/stages-bad-input: an unknown event, a bad name and a stage over 64 MiB are clear errors
#[tokio::test]
async fn what_cannot_be_stored_is_refused() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let event = Event::builder("a").tenant("acme").build().unwrap();
        bus.publish(event.clone()).await.unwrap();
        let stages = bus.payloads();
        let code = |result: everbus::Result<()>| result.unwrap_err().code();
        assert_eq!(
            code(stages.store(EventId::new(), "error", &1).await),
            Code::NotFound
        );
        assert_eq!(
            code(stages.store(event.id(), "error", &1).await),
            Code::NotFound
        );
        assert_eq!(
            code(stages.store(&event, "", &1).await),
            Code::InvalidAttribute
        );
        let long = "x".repeat(51);
        assert_eq!(
            code(stages.store(&event, &long, &1).await),
            Code::InvalidAttribute
        );
        let map = std::collections::HashMap::from([(vec![1u8], 1)]);
        assert_eq!(
            code(stages.store(&event, "error", &map).await),
            Code::InvalidPayloadError
        );
        let huge = Bytes::from(vec![b'x'; 64 * 1024 * 1024 + 1]);
        let refused = stages.store_raw(&event, "error", huge).await;
        assert_eq!(code(refused), Code::PayloadTooLarge);
        assert!(stages.get(&event).await.unwrap().is_empty());
        stages.store(&event, "error", &1).await.unwrap();
        assert_eq!(stages.get(&event).await.unwrap().len(), 1);
    })
    .await;
}

fn gzip(content: &[u8]) -> Bytes {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap().into()
}

fn stored(name: &str, claimed: u64, compressed: Bytes) -> StoredStage {
    StoredStage {
        info: StageInfo {
            stage: name.parse().unwrap(),
            timestamp: everbus::Timestamp::EPOCH,
            payload_size_original: claimed,
            payload_size_compressed: compressed.len() as u64,
            status_code: None,
            error_details: None,
            contains_media: false,
            contains_base64: false,
        },
        compressed,
    }
}

// conformance: memory/stages-bomb: a gzip bomb or a damaged stage is an error of that stage alone, decompression is bounded
#[tokio::test]
async fn a_gzip_bomb_is_an_error_of_its_stage_alone() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let id = bus.publish(("a", 1)).await.unwrap().id();
        let store = bus.engine().payloads().unwrap();
        let bomb = gzip(&vec![0; 80 * 1024 * 1024]);
        let mut cut = gzip(b"\"whole\"").to_vec();
        cut.truncate(cut.len() - 5);
        let mut flipped = gzip(b"\"whole\"").to_vec();
        let crc = flipped.len() - 8;
        flipped[crc] ^= 1;
        for (name, claimed, compressed, said) in [
            ("bomb", 10, bomb.clone(), "more than the 10 bytes"),
            ("bigger bomb", 80 << 20, bomb, "more than the 67108864"),
            (
                "no gzip",
                5,
                Bytes::from_static(b"plain"),
                "cannot be decompressed",
            ),
            ("nothing", 5, Bytes::new(), "cannot be decompressed"),
            ("cut", 7, cut.into(), "cannot be decompressed"),
            ("flipped", 7, flipped.into(), "cannot be decompressed"),
            ("short", 8, gzip(b"\"whole\""), "to 7 bytes, and 8 were"),
            ("good", 7, gzip(b"\"whole\""), ""),
        ] {
            store
                .store(id.into(), stored(name, claimed, compressed))
                .await
                .unwrap();
            let found = bus.payloads().get_stage(id, name).await.unwrap();
            if said.is_empty() {
                assert_eq!(found[0].json::<String>().unwrap(), "whole");
                continue;
            }
            let error = found[0].bytes().unwrap_err();
            assert_eq!(error.code(), Code::Corrupt, "{name}");
            assert!(error.to_string().contains(said), "{name}: {error}");
        }
        let all = bus.payloads().get(id).await.unwrap();
        assert_eq!(all.len(), 8);
        assert_eq!(all.iter().filter(|s| s.bytes().is_ok()).count(), 1);
    })
    .await;
}

// conformance: omni/payload-export: rows are available in the form of the specification: its columns, base64 of the gzip
#[tokio::test]
async fn the_export_has_the_columns_of_the_specification() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let id = bus.publish(("a", 1)).await.unwrap().id();
        let stages = bus.payloads();
        stages
            .store(id, "webhook_raw", &json!({ "a": 1 }))
            .await
            .unwrap();
        stages
            .store(id, "error", &"no")
            .status_code(500)
            .await
            .unwrap();
        let rows = stages.export(id, None).await.unwrap();
        assert_eq!(
            rows,
            stages.export(id, None).await.unwrap(),
            "ids are stable"
        );
        assert_ne!(rows[0].id, rows[1].id);
        let row = serde_json::to_value(&rows[0]).unwrap();
        let columns: Vec<&String> = row.as_object().unwrap().keys().collect();
        let mut wanted = vec![
            "id",
            "event_id",
            "stage",
            "payload_compressed",
            "payload_size_original",
            "payload_size_compressed",
            "timestamp",
            "status_code",
            "error_details",
            "contains_media",
            "contains_base64",
        ];
        wanted.sort_unstable();
        let mut found = columns.clone();
        found.sort_unstable();
        assert_eq!(found, wanted);
        assert_eq!(row["event_id"], id.to_string());
        assert_eq!(row["status_code"], Value::Null);
        let text = row["payload_compressed"].as_str().unwrap();
        let gzip = data_encoding::BASE64.decode(text.as_bytes()).unwrap();
        assert_eq!(
            gzip.len() as u64,
            row["payload_size_compressed"].as_u64().unwrap()
        );
        let mut content = String::new();
        std::io::Read::read_to_string(&mut flate2::read::GzDecoder::new(&gzip[..]), &mut content)
            .unwrap();
        assert_eq!(content, r#"{"a":1}"#);
        let errors = stages.export(id, Some("error")).await.unwrap();
        assert_eq!(errors.len(), 1);
        assert_eq!(errors[0].status_code, Some(500));
    })
    .await;
}

// conformance: omni/payload-large: large payloads are those over 50,000 bytes, largest first, at most 100
#[tokio::test]
async fn the_largest_are_listed() {
    on_every_engine(|lab| async move {
        assert_eq!((LARGE_PAYLOAD, LARGEST_LISTED), (50_000, 100));
        let bus = lab.open().await;
        let event = Event::builder("a").tenant("acme").build().unwrap();
        bus.publish(event.clone()).await.unwrap();
        for bytes in [49_998, 60_000, 49_999] {
            let text = "x".repeat(bytes);
            bus.payloads()
                .store(&event, "agent_response", &text)
                .await
                .unwrap();
        }
        let found = bus
            .payloads()
            .largest(LARGE_PAYLOAD, LARGEST_LISTED)
            .await
            .unwrap();
        let sizes: Vec<u64> = found.iter().map(|(_, s)| s.payload_size_original).collect();
        assert_eq!(sizes, [60_002, 50_001]);
        assert_eq!(found[0].0, EventKey::of(&event));
    })
    .await;
}

// conformance: memory/stages-handler: a handler stores stages of its event, and they stay if the attempt fails
#[tokio::test]
async fn a_handler_stores_stages_of_its_event() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let ask = |Json(question): Json<Value>, context: Context| async move {
            context
                .store_payload(Stage::AGENT_REQUEST, &question)
                .await?;
            if question["fail"] == true {
                context
                    .store_payload(Stage::ERROR, &"down")
                    .status_code(503)
                    .await?;
                return Err(HandlerError::new("the agent is down"));
            }
            handled()
        };
        bus.mount(Router::new().on("message.received", ask))
            .await
            .unwrap();
        bus.start().await.unwrap();
        let good = bus
            .publish(("message.received", json!({ "n": 1 })))
            .await
            .unwrap();
        let bad = bus
            .publish(("message.received", json!({ "fail": true })))
            .await
            .unwrap();
        good.settled().await.unwrap();
        assert_eq!(bad.settled().await.unwrap().dead_lettered.len(), 1);
        let stages = bus.payloads().get(good.id()).await.unwrap();
        assert_eq!(stages[0].json::<Value>().unwrap(), json!({ "n": 1 }));
        let stages = bus.payloads().get(bad.id()).await.unwrap();
        assert_eq!(stages.len(), 2);
        assert_eq!(stages[1].info.status_code, Some(503));
        bus.shutdown().await.unwrap();
    })
    .await;
}
