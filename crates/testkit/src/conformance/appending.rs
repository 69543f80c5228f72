//! Appending: identity, atomic batches, odd payloads and types, reading back, closing under load.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use everbus_core::{Code, Cursor, Event, EventId, MAX_TYPE_CHARS, Position, TraceContext};

use super::needs::{ATOMIC_BATCH, DEDUPLICATION, LOG, LOOKUP, OWN_LOG, RESTART};
use super::stage::{DEADLINE, beyond, code, event, nothing, pattern, take, take_one};
use super::{Harness, Outcome, Stage, Time};

fn body(id: EventId, payload: &'static str) -> Event {
    Event::builder("order.placed")
        .id(id)
        .payload(payload)
        .build()
        .unwrap()
}

/// The same event twice gets the first answer again and is stored and delivered once.
pub async fn the_same_event_twice_is_stored_once<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[&DEDUPLICATION]).await?;
    stage.declare("", &["*"]).await;
    let id = EventId::new();
    let first = stage.append(body(id, "{\"n\":1}")).await;
    assert!(!first.duplicate);
    stage.publish("other.event").await;
    stage.advance(Duration::from_secs(1)).await;
    // Values that a repeated publish may generate anew are not compared.
    let again = Event::builder("order.placed").id(id).payload("{\"n\":1}");
    let again = again
        .source("another try")
        .correlation_id("c")
        .build()
        .unwrap();
    let second = stage.append(again).await;
    assert!(second.duplicate);
    assert_eq!(second.position, first.position);
    assert_eq!(second.received_at, first.received_at);
    assert_eq!(second.id, id);
    let mut consumer = stage.consumer("").await;
    let got = take(&mut consumer, 2).await;
    assert_eq!(got[0].record.event.id(), id);
    nothing(&mut consumer).await;
    // Also after the event was handled.
    stage.ack(&got[0]).await;
    assert!(stage.append(body(id, "{\"n\":1}")).await.duplicate);
    nothing(&mut consumer).await;
    stage.passed()
}

/// The same id with another body is refused, and the first event stays as it was.
pub async fn the_same_id_with_another_body_is_refused<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&DEDUPLICATION]).await?;
    let id = EventId::new();
    stage.append(body(id, "{\"n\":1}")).await;
    let reused = stage.try_append(body(id, "{\"n\":2}")).await;
    assert_eq!(code(reused), Code::IdReused);
    let reused = Event::builder("order.paid").id(id).payload("{\"n\":1}");
    assert_eq!(
        code(stage.try_append(reused.build().unwrap()).await),
        Code::IdReused
    );
    if stage.offers(&LOOKUP) {
        let found = stage.lookup().find(id).await.unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].event.payload().as_ref(), b"{\"n\":1}");
    }
    stage.passed()
}

/// A repeated event in a batch is a duplicate of the first one.
pub async fn a_batch_may_repeat_an_event<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&DEDUPLICATION]).await?;
    let (one, two) = (EventId::new(), EventId::new());
    let batch = vec![body(one, "1"), body(two, "2"), body(one, "1")];
    let answers = stage.broker().append(batch).await.unwrap();
    let answers: Vec<_> = answers.into_iter().map(Result::unwrap).collect();
    let repeats: Vec<bool> = answers.iter().map(|a| a.duplicate).collect();
    assert_eq!(repeats, [false, false, true]);
    assert_eq!(answers[2].position, answers[0].position);
    assert!(answers[1].position > answers[0].position);
    let empty = stage.broker().append(Vec::new()).await.unwrap();
    assert!(empty.is_empty());
    stage.passed()
}

/// With an atomic batch, one event that is refused keeps the whole batch out.
pub async fn a_batch_is_stored_whole_or_not_at_all<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&ATOMIC_BATCH, &DEDUPLICATION]).await?;
    stage.declare("", &["*"]).await;
    let (known, new, inside) = (EventId::new(), EventId::new(), EventId::new());
    let first = stage.append(body(known, "1")).await;
    for batch in [
        vec![body(new, "1"), body(known, "2")],
        vec![body(known, "2"), body(new, "1")],
        vec![body(new, "1"), body(inside, "1"), body(inside, "2")],
    ] {
        assert_eq!(code(stage.broker().append(batch).await), Code::IdReused);
        if stage.offers(&LOG) && stage.offers(&LOOKUP) {
            assert!(stage.lookup().find(new).await.unwrap().is_empty());
            assert!(stage.lookup().find(inside).await.unwrap().is_empty());
            if stage.offers(&OWN_LOG) {
                let head = stage.log().head().await.unwrap();
                assert_eq!(head, Cursor::from(first.position));
            }
        }
    }
    let mut consumer = stage.consumer("").await;
    let only = take_one(&mut consumer).await;
    assert_eq!(only.record.event.id(), known);
    nothing(&mut consumer).await;
    // The ids of a refused batch are free.
    assert!(!stage.append(body(new, "3")).await.duplicate);
    stage.passed()
}

/// Ids are unique per tenant.
pub async fn ids_are_unique_per_tenant<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    let id = EventId::new();
    let of = |tenant: &str, payload: &'static str| {
        let builder = Event::builder("a.b").id(id).payload(payload);
        builder.tenant(tenant).build().unwrap()
    };
    let mut positions = Vec::new();
    for event in [of("one", "1"), of("two", "2"), body(id, "3")] {
        let appended = stage.append(event).await;
        assert!(!appended.duplicate);
        positions.push(appended.position);
    }
    if stage.offers(&DEDUPLICATION) {
        assert_eq!(stage.append(of("two", "2")).await.position, positions[1]);
        assert_eq!(code(stage.try_append(of("two", "1")).await), Code::IdReused);
    }
    if stage.offers(&LOOKUP) {
        let found = stage.lookup().find(id).await.unwrap();
        assert_eq!(found.len(), positions.len());
        if stage.offers(&OWN_LOG) {
            let mut found: Vec<Position> = found.iter().map(|r| r.position).collect();
            found.sort_by_key(|position| positions.iter().position(|p| p == position));
            assert_eq!(found, positions);
        }
    }
    stage.passed()
}

/// Large and odd payloads come out byte for byte as they went in, with every attribute.
pub async fn odd_payloads_come_out_as_they_went_in<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    stage.declare("", &["*"]).await;
    let megabyte = format!("\"{}\"", "x".repeat((1 << 20) - 2));
    let deep = format!("{}1{}", "[".repeat(100), "]".repeat(100));
    let mut events = Vec::new();
    for payload in [
        megabyte.as_str(),
        deep.as_str(),
        "null",
        "\"\"",
        "{}",
        "{\"z\":1, \"a\" : 1.50,\"a\":2e400}",
        "\"grüße 👋 \\u0000 \u{202e}日本語\"",
        " [1 , 2]\n",
    ] {
        let builder = Event::builder("odd.payload").payload(payload.to_string());
        events.push(builder.build().unwrap());
    }
    let every_byte: Vec<u8> = (0..=255).collect();
    for bytes in [every_byte, Vec::new()] {
        let builder = Event::builder("odd.bytes").payload(bytes);
        events.push(
            builder
                .content_type("application/octet-stream")
                .build()
                .unwrap(),
        );
    }
    let full = Event::builder("odd.full")
        .version(7)
        .json(&[1, 2])
        .source("shop 'quoted\" \\")
        .app("app")
        .tenant("mandant größe")
        .entity("TASK", "req-123")
        .key("key\nwith newline")
        .correlation_id("corr")
        .causation_id("cause")
        .trace(TraceContext {
            traceparent: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".into(),
            tracestate: Some("k=v".into()),
        })
        .meta("", "empty key")
        .meta("empty value", "")
        .meta("emoji", "🚀")
        .foreign_id("test-1");
    events.push(full.build().unwrap());
    let mut positions = Vec::new();
    for event in &events {
        positions.push(stage.append(event.clone()).await.position);
    }
    let mut consumer = stage.consumer("").await;
    let got = stage.take_these(&mut consumer, &positions).await;
    for (expected, got) in events.iter().zip(got) {
        assert!(got.record.event == *expected, "{:?}", expected.event_type());
        stage.ack(&got).await;
        if stage.offers(&LOOKUP) {
            let found = stage.lookup().find(expected.id()).await.unwrap();
            assert!(found.len() == 1 && found[0].event == *expected);
        }
    }
    stage.passed()
}

/// Types with spaces, without dots, in any script and of the longest length are carried.
pub async fn odd_types_are_carried<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    let longest = "x".repeat(MAX_TYPE_CHARS);
    let longest_wide = "ß".repeat(MAX_TYPE_CHARS);
    let types = [
        "Task Processing Started",
        "TelemetryWindowClosed",
        "größe",
        "größe.geändert",
        "orders:order-placed",
        "a..b",
        ".",
        "it's \"quoted\" \\ %_?#/",
        "日本.語",
        &longest,
        &longest_wide,
    ];
    stage.declare("all", &["*"]).await;
    let mut positions = Vec::new();
    for event_type in types {
        positions.push(stage.publish(event_type).await.position);
    }
    let mut consumer = stage.consumer("all").await;
    let got = stage.take_these(&mut consumer, &positions).await;
    for (expected, got) in types.iter().zip(got) {
        assert_eq!(got.record.event.event_type(), *expected);
        stage.ack(&got).await;
    }
    for event_type in types {
        let group = "exact";
        stage.declare(group, &[event_type]).await;
        let mut consumer = stage.consumer(group).await;
        let got = take_one(&mut consumer).await;
        assert_eq!(got.record.event.event_type(), event_type);
        nothing(&mut consumer).await;
        drop(consumer);
        stage
            .broker()
            .remove_group(super::stage::name(group))
            .await
            .unwrap();
    }
    stage.passed()
}

/// The log can be read from any position, filtered, searched by id, and waited on.
pub async fn the_log_can_be_read_without_a_group<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&LOG, &LOOKUP]).await?;
    let log = stage.log();
    assert!(log.head().await.unwrap().is_start());
    let (mut published, mut places) = (Vec::new(), Vec::new());
    for n in 0..30 {
        published.push(stage.publish(["a.x", "b.x", "c.x"][n % 3]).await);
        places.push(stage.read_at(&published[n]).await);
    }
    let head = log.head().await.unwrap();
    assert!(places.iter().all(|at| head.covers(*at)));
    let mut after = Cursor::START;
    let mut read = Vec::new();
    for _ in 0..100 {
        let (batch, reached) = log
            .read(after.clone(), vec![pattern("a.*"), pattern("c.x")], 4)
            .await
            .unwrap();
        assert!(batch.len() <= 4 && reached.reaches(&after));
        read.extend(batch.iter().map(|r| r.position));
        if reached == after {
            break;
        }
        after = reached;
    }
    let wanted = places.iter().enumerate().filter(|(n, _)| n % 3 != 1);
    let wanted: Vec<Position> = wanted.map(|(_, at)| *at).collect();
    assert_eq!(read, wanted, "each match once, in order");
    assert_eq!(after, head, "searched to the end");
    if stage.offers(&LOOKUP) {
        let lookup = stage.lookup();
        let found = lookup.find(published[7].id).await.unwrap();
        assert_eq!(found[0].position, places[7]);
        assert!(lookup.find(EventId::new()).await.unwrap().is_empty());
        let nowhere = beyond(places[29], 9);
        assert_eq!(code(lookup.states(nowhere).await), Code::NotFound);
    }

    log.wait_beyond(places[0].into()).await.unwrap();
    let waiting = log.wait_beyond(head);
    let broker = stage.broker().clone();
    let publisher = tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(20)).await;
        broker.append(vec![event("a.x")]).await.unwrap();
    });
    tokio::time::timeout(DEADLINE, waiting)
        .await
        .unwrap()
        .unwrap();
    publisher.await.unwrap();
    stage.passed()
}

/// Closing while many publish: each publish is acknowledged and kept, or refused.
pub async fn closing_under_load_forgets_nothing_acknowledged<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Still, &[]).await?;
    stage.declare("", &["*"]).await;
    let closing = Arc::new(AtomicBool::new(false));
    let published = Arc::new(AtomicUsize::new(0));
    let mut producers = Vec::new();
    for _ in 0..16 {
        let (broker, closing) = (stage.broker().clone(), closing.clone());
        let published = published.clone();
        producers.push(tokio::spawn(async move {
            let mut acknowledged = Vec::new();
            loop {
                let batch: Vec<Event> = (0..3).map(|_| event("a.b")).collect();
                match broker.append(batch).await {
                    Ok(answers) => {
                        acknowledged.extend(answers.into_iter().map(|a| a.unwrap()));
                        published.fetch_add(1, Ordering::SeqCst);
                    }
                    Err(error) => {
                        assert_eq!(error.code(), Code::EventBusShutdownError);
                        assert!(closing.load(Ordering::SeqCst), "refused before the close");
                        return acknowledged;
                    }
                }
                tokio::task::yield_now().await;
            }
        }));
    }
    // All of them are publishing.
    stage
        .eventually("there is load", || async {
            published.load(Ordering::SeqCst) > 4 * 16
        })
        .await;
    closing.store(true, Ordering::SeqCst);
    stage.broker().close().await.unwrap();
    let mut acknowledged = Vec::new();
    for producer in producers {
        acknowledged.extend(
            tokio::time::timeout(DEADLINE, producer)
                .await
                .unwrap()
                .unwrap(),
        );
    }
    assert!(!acknowledged.is_empty(), "the test published nothing");
    if !stage.offers(&RESTART) {
        return stage.passed();
    }
    stage.restart().await;
    let owed = stage.group_info("").await;
    assert!(owed.behind + owed.waiting + owed.in_flight >= acknowledged.len() as u64);
    if stage.offers(&LOG) && stage.offers(&OWN_LOG) {
        let mut after = Cursor::START;
        let mut kept = HashSet::new();
        loop {
            let (batch, reached) = stage
                .log()
                .read(after.clone(), vec![pattern("*")], 1000)
                .await
                .unwrap();
            kept.extend(batch.iter().map(|r| (r.position, r.event.id())));
            if reached == after {
                break;
            }
            after = reached;
        }
        for appended in acknowledged {
            let kept = kept.contains(&(appended.position, appended.id));
            assert!(kept, "lost {appended:?}");
        }
    }
    stage.passed()
}
