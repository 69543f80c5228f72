//! Data beside an event: the stages of its payload, and the note about an object that it leaves behind.

use std::time::Duration;

use bytes::Bytes;
use everbus_core::{
    Code, Event, EventId, EventKey, Orphan, Overflow, OverflowPart, Payloads, Retention, StageInfo,
    StoredStage, Timestamp,
};
use sha2::{Digest as _, Sha256};

use super::needs::{
    ATOMIC_BATCH, DEDUPLICATION, LOOKUP, MAINTENANCE, ORPHANS, PAYLOADS, RESTART, STAGES_LAST,
};
use super::stage::{code, event, options, take_one};
use super::{Harness, Outcome, Stage, Time};

const SECOND: Duration = Duration::from_secs(1);

fn payloads<H: Harness>(stage: &Stage<H>) -> Option<&dyn Payloads> {
    stage.engine().payloads.as_deref()
}

fn stored<H: Harness>(stage: &Stage<H>, name: &str, original: u64, content: &str) -> StoredStage {
    StoredStage {
        info: StageInfo {
            stage: name.parse().unwrap(),
            timestamp: stage.now(),
            payload_size_original: original,
            payload_size_compressed: content.len() as u64,
            status_code: Some(502),
            error_details: Some("bad gateway".into()),
            contains_media: true,
            contains_base64: false,
        },
        compressed: Bytes::copy_from_slice(content.as_bytes()),
    }
}

async fn empty_the_log<H: Harness>(stage: &Stage<H>) {
    let retention = Retention {
        max_len: Some(0),
        ..Retention::default()
    };
    let maintenance = stage.engine().maintenance().unwrap();
    assert_eq!(maintenance.prune(retention).await.unwrap().kept, 0);
}

/// Stages are kept by event and stage with all their fields, oldest first.
pub async fn stages_are_kept_by_event_and_stage<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Virtual, &[&PAYLOADS]).await?;
    let store = payloads(&stage).unwrap();
    let (one, other) = (event("a.x"), event("a.x"));
    stage.append(one.clone()).await;
    stage.append(other.clone()).await;
    let mut expected = Vec::new();
    for (name, content) in [
        ("webhook_raw", "one"),
        ("agent_request", "two"),
        ("my own", "three"),
        ("agent_request", "four"),
    ] {
        let stored = stored(&stage, name, 9, content);
        store.store((&one).into(), stored.clone()).await.unwrap();
        expected.push(stored);
        stage.advance(SECOND).await;
    }
    let mut plain = stored(&stage, "error", 1, "");
    (plain.info.status_code, plain.info.error_details) = (None, None);
    store.store((&other).into(), plain.clone()).await.unwrap();
    for round in 0..2 {
        let store = payloads(&stage).unwrap();
        let all = store.stages((&one).into(), None).await.unwrap();
        assert_eq!(all, expected, "round {round}");
        let named = Some("agent_request".parse().unwrap());
        let two = store.stages((&one).into(), named).await.unwrap();
        assert_eq!(two, [expected[1].clone(), expected[3].clone()]);
        let none = Some("channel_send".parse().unwrap());
        assert!(store.stages((&one).into(), none).await.unwrap().is_empty());
        let others = store.stages((&other).into(), None).await.unwrap();
        assert_eq!(others, [plain.clone()]);
        if !stage.offers(&RESTART) {
            return stage.passed();
        }
        stage.restart().await;
    }
    stage.passed()
}

/// A stage needs its event, and an event id belongs to one tenant.
pub async fn a_stage_needs_its_event<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&PAYLOADS, &STAGES_LAST]).await?;
    let store = payloads(&stage).unwrap();
    let unknown = EventKey::from(EventId::new());
    let nowhere = store.store(unknown.clone(), stored(&stage, "error", 1, "x"));
    assert_eq!(code(nowhere.await), Code::NotFound);
    assert!(store.stages(unknown, None).await.unwrap().is_empty());
    let of = |tenant: &str| {
        let id: EventId = "0190b0a0-0000-7000-8000-000000000001".parse().unwrap();
        Event::builder("a.x").id(id).tenant(tenant).build().unwrap()
    };
    let (acme, bolt) = (of("acme"), of("bolt"));
    stage.append(acme.clone()).await;
    let unknown = store.store((&bolt).into(), stored(&stage, "error", 1, "x"));
    assert_eq!(code(unknown.await), Code::NotFound);
    let without = store.store(acme.id().into(), stored(&stage, "error", 1, "x"));
    assert_eq!(code(without.await), Code::NotFound);
    stage.append(bolt.clone()).await;
    let content = stored(&stage, "error", 1, "x");
    store.store((&bolt).into(), content.clone()).await.unwrap();
    assert!(store.stages((&acme).into(), None).await.unwrap().is_empty());
    assert_eq!(store.stages((&bolt).into(), None).await.unwrap(), [content]);
    stage.passed()
}

/// Stages come largest first, only those over the size limit, and no more than asked for.
pub async fn the_largest_stages_come_first<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&PAYLOADS]).await?;
    let store = payloads(&stage).unwrap();
    let tenant = Event::builder("a.x").tenant("acme").build().unwrap();
    stage.append(tenant.clone()).await;
    let plain = event("a.x");
    stage.append(plain.clone()).await;
    for (event, size) in [
        (&plain, 50_000),
        (&tenant, 50_001),
        (&plain, 70_000),
        (&tenant, 60_000),
        (&plain, 10),
    ] {
        let stored = stored(&stage, "agent_response", size, "z");
        store.store(event.into(), stored).await.unwrap();
    }
    let sizes = |found: &[(EventKey, StageInfo)]| -> Vec<u64> {
        let infos = found.iter().map(|(_, info)| info.payload_size_original);
        infos.collect()
    };
    let found = store.largest(50_000, 100).await.unwrap();
    assert_eq!(sizes(&found), [70_000, 60_000, 50_001]);
    assert_eq!(found[0].0, EventKey::of(&plain));
    assert_eq!(found[1].0, EventKey::of(&tenant));
    assert_eq!(sizes(&store.largest(0, 2).await.unwrap()), [70_000, 60_000]);
    assert!(store.largest(70_000, 100).await.unwrap().is_empty());
    stage.passed()
}

/// Stages are removed with their event, by retention and by a purge; those of other events stay.
pub async fn stages_go_with_their_event<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Virtual, &[&PAYLOADS, &MAINTENANCE]).await?;
    let store = payloads(&stage).unwrap();
    stage.declare("g", &["a.dead"]).await;
    let dead = event("a.dead");
    let done = event("a.done");
    for event in [&dead, &done] {
        stage.append(event.clone()).await;
        let stored = stored(&stage, "webhook_raw", 7, "x");
        store.store(event.into(), stored).await.unwrap();
    }
    let mut consumer = stage.consumer_with("g", options()).await;
    let delivery = take_one(&mut consumer).await;
    stage.kill(&delivery).await;
    stage.told(1).await;
    let retention = Retention {
        max_len: Some(0),
        ..Retention::default()
    };
    let maintenance = stage.engine().maintenance().unwrap();
    let pruned = maintenance.prune(retention).await.unwrap();
    // The notice of the dead letter is removed as well.
    assert_eq!((pruned.removed, pruned.kept), (2, 1));
    assert!(store.stages((&done).into(), None).await.unwrap().is_empty());
    assert_eq!(store.stages((&dead).into(), None).await.unwrap().len(), 1);
    assert_eq!(store.largest(0, 10).await.unwrap().len(), 1);
    let letters = stage.dead_letters();
    let now = stage.now();
    let purged = letters.purge(now, Default::default(), Default::default());
    assert_eq!(purged.await.unwrap().dead_letters, 1);
    assert!(store.largest(0, 10).await.unwrap().is_empty());
    // The id is free again; a new event has no stages of the old one.
    stage.append(dead.clone()).await;
    assert!(store.stages((&dead).into(), None).await.unwrap().is_empty());
    stage.passed()
}

/// A removed event leaves a note of its object, in the same transaction; events without an object leave none.
pub async fn a_removed_event_leaves_a_note_of_its_object<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Virtual, &[&ORPHANS, &MAINTENANCE, &LOOKUP]).await?;
    let large = |key: &str| {
        let overflow = Overflow {
            bucket: "objects".into(),
            key: key.into(),
            size: 3,
            sha256: "00".into(),
            payload_size: 3,
            payload_sha256: "00".into(),
            parts: Vec::new(),
        };
        let event = Event::builder("a.x").meta("overflow", "no").build();
        let payload = Bytes::from_static(b"null");
        event.unwrap().with_overflow(payload, overflow)
    };
    let events: Vec<Event> = ["events/c", "events/a", "events/b"].map(large).into();
    for event in &events {
        stage.append(event.clone()).await;
    }
    let odd = Event::builder("a.x").meta("overflow", "{\"overflow\":1}");
    stage.append(odd.build().unwrap()).await;
    stage.append(event("a.x")).await;
    let orphans = |stage: &Stage<H>| stage.engine().orphans.clone().unwrap();
    assert!(orphans(&stage).list().await.unwrap().is_empty());
    let found = stage.lookup().find(events[0].id()).await.unwrap();
    assert_eq!(found[0].event, events[0], "the reference is kept as it is");
    stage.advance(SECOND).await;
    let since = stage.now();
    empty_the_log(&stage).await;
    if stage.offers(&RESTART) {
        stage.restart().await;
    }
    let orphan = |n: usize| Orphan {
        bucket: "objects".into(),
        key: events[n].overflow().unwrap().key.clone(),
        id: events[n].id(),
        since,
        unborn: false,
    };
    let store = orphans(&stage);
    let all = store.list().await.unwrap();
    assert_eq!(all, [orphan(1), orphan(2), orphan(0)]);
    store.forget(all[..2].to_vec()).await.unwrap();
    assert_eq!(store.list().await.unwrap(), [orphan(0)]);
    // A note that was renewed since it was listed stays.
    let again = Orphan {
        since: since.plus(SECOND),
        unborn: true,
        ..orphan(0)
    };
    store.note(vec![again.clone()]).await.unwrap();
    store.forget(vec![orphan(0), orphan(1)]).await.unwrap();
    let left = store.list().await.unwrap();
    assert_eq!((left.len(), &left[0]), (1, &again));
    store.forget(left).await.unwrap();
    assert!(store.list().await.unwrap().is_empty());
    stage.passed()
}

/// A reference to an object, as the bus makes it of a payload.
fn reference(key: &str, object: &[u8], payload: &[u8]) -> Overflow {
    let hex = |bytes: &[u8]| data_encoding::HEXLOWER.encode(&Sha256::digest(bytes));
    Overflow {
        bucket: "objects".into(),
        key: key.into(),
        size: object.len() as u64,
        sha256: hex(object),
        payload_size: payload.len() as u64,
        payload_sha256: hex(payload),
        parts: Vec::new(),
    }
}

/// The same id with the same payload is the same publish, whichever part was moved into an object the first
/// and the second time; with another payload it is refused.
pub async fn a_repeated_publish_is_told_by_the_whole_payload<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Still, &[&DEDUPLICATION, &LOOKUP]).await?;
    let (payload, other) = (r#"{"n":1,"output":"abc"}"#, r#"{"n":1,"output":"abd"}"#);
    let forms = |id: EventId, payload: &'static str| {
        let event = Event::builder("a.x").id(id).payload(payload);
        let event = event.occurred_at(Timestamp::from_micros(1));
        let event = event.build().unwrap();
        let whole = reference("events/whole", payload.as_bytes(), payload.as_bytes());
        let object = format!("{{\"output\":{}}}", &payload[16..21]);
        let mut fields = reference("events/fields", object.as_bytes(), payload.as_bytes());
        fields.parts.push(OverflowPart {
            field: "output".into(),
            at: 16,
            from: 10,
            len: 5,
        });
        [
            event
                .clone()
                .with_overflow(Bytes::from_static(b"null"), whole),
            event
                .clone()
                .with_overflow(Bytes::from_static(br#"{"n":1,"output":null}"#), fields),
            event,
        ]
    };
    for first in 0..3 {
        let id = EventId::new();
        let appended = stage.append(forms(id, payload)[first].clone()).await;
        if stage.offers(&RESTART) {
            stage.restart().await;
        }
        for second in 0..3 {
            let again = stage.append(forms(id, payload)[second].clone()).await;
            assert!(again.duplicate, "{first} then {second}");
            assert_eq!(again.position, appended.position);
            let refused = stage.try_append(forms(id, other)[second].clone()).await;
            assert_eq!(code(refused), Code::IdReused, "{first} then {second}");
        }
        let found = stage.lookup().find(id).await.unwrap();
        assert_eq!(found[0].event, forms(id, payload)[first], "the first stays");
    }
    stage.passed()
}

/// The note of an object, written before the object is stored, is removed by the append of its event, and by
/// nothing else.
pub async fn the_append_of_an_event_strikes_off_the_note_of_its_object<H: Harness>(
    harness: H,
) -> Outcome {
    let needs = [&ORPHANS, &ATOMIC_BATCH, &DEDUPLICATION];
    let mut stage = Stage::open(harness, Time::Virtual, &needs).await?;
    let orphans = stage.engine().orphans.clone().unwrap();
    let log = orphans.log_id().await.unwrap();
    let large = |key: &str| {
        let event = Event::builder("a.x").build().unwrap();
        let payload = Bytes::from_static(b"null");
        event.with_overflow(payload, reference(key, b"x", b"x"))
    };
    let events = ["events/a", "events/b", "events/c"].map(large);
    let since = stage.now();
    let note = |event: &Event| Orphan {
        bucket: "objects".into(),
        key: event.overflow().unwrap().key.clone(),
        id: event.id(),
        since,
        unborn: true,
    };
    let notes: Vec<Orphan> = events.iter().map(note).collect();
    orphans.note(notes.clone()).await.unwrap();
    assert_eq!(orphans.list().await.unwrap(), notes);
    stage.append(events[0].clone()).await;
    // A refused batch appends nothing, so the note stays; so does the note of a duplicate, which has its
    // object elsewhere.
    let taken = Event::builder("b.x").id(events[0].id()).build().unwrap();
    let refused = stage.broker().append(vec![events[1].clone(), taken]).await;
    assert_eq!(code(refused), Code::IdReused);
    let elsewhere = reference("events/c", b"x", b"x");
    let again = Event::builder("a.x").id(events[0].id()).build().unwrap();
    let again = again.with_overflow(Bytes::from_static(b"null"), elsewhere);
    assert!(stage.append(again).await.duplicate);
    if stage.offers(&RESTART) {
        stage.restart().await;
    }
    let orphans = stage.engine().orphans.clone().unwrap();
    assert_eq!(orphans.list().await.unwrap(), notes[1..]);
    if stage.offers(&RESTART) {
        assert_eq!(orphans.log_id().await.unwrap(), log, "the log is the same");
    }
    stage.append(events[1].clone()).await;
    assert_eq!(orphans.list().await.unwrap(), notes[2..]);
    stage.passed()
}
