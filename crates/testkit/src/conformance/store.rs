//! A store beside a broker: what the runtime writes about events that another engine delivers. Every write
//! may be repeated.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use everbus_core::{
    Burial, Clock, Cursor, DeadLetter, DeadLetterFilter, Event, EventKey, EventState, Failure,
    FailureKind, HistoryQuery, Position, Recorded, Retention, SentBack, Shard, StageInfo, Store,
    StoredStage, Timestamp,
};

use super::needs::{
    DEAD_LETTERS, HISTORY, INBOX, LOG, LOOKUP, MAINTENANCE, OWN_LOG, PAYLOADS, RESTART,
    STAGES_LAST, STORE,
};
use super::stage::{code, event, name, pattern};
use super::{Harness, Outcome, Stage, Time};

const SECOND: Duration = Duration::from_secs(1);

fn store<H: Harness>(stage: &Stage<H>) -> Arc<dyn Store> {
    stage.engine().store().unwrap()
}

/// An event as recorded by a broker with several shards.
fn moved<H: Harness>(stage: &Stage<H>, event: Event, place: u64) -> Arc<Recorded> {
    let shard = Shard::named("orders/3").unwrap();
    let position = Position::new(shard, place);
    Arc::new(Recorded::new(event, position, stage.clock.now()))
}

fn failure(attempt: u32, at: Timestamp) -> Failure {
    Failure::new(attempt, at, FailureKind::Error, format!("no {attempt}")).in_handler("theirs")
}

async fn all_events<H: Harness>(stage: &Stage<H>) -> Vec<Arc<Recorded>> {
    let all = vec![pattern("*"), pattern("system.>")];
    let (found, _) = stage.log().read(Cursor::START, all, 100).await.unwrap();
    found
}

/// Ingesting may be repeated, also in part, and an ingested event is like any other.
pub async fn an_event_is_ingested_once<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Virtual, &[&STORE, &LOG, &LOOKUP, &HISTORY]).await?;
    let store = store(&stage);
    let received_at = stage.clock.now();
    let make = |n: u32| {
        Event::builder("order.placed")
            .tenant("acme")
            .json(&n)
            .build()
            .unwrap()
    };
    let records: Vec<Arc<Recorded>> = (0..3)
        .map(|n| moved(&stage, make(n), 40 + u64::from(n)))
        .collect();
    stage.advance(60 * SECOND).await;
    let places = store.ingest(records[..2].to_vec()).await.unwrap();
    assert!(places[0] < places[1], "{places:?}");
    // The second half was not acknowledged: everything is sent again, one event twice in a batch.
    let mut again = records.clone();
    again.push(records[2].clone());
    let all = store.ingest(again).await.unwrap();
    assert_eq!(all[..2], places);
    assert_eq!(all[2], all[3]);
    // An id is unique per tenant.
    let stranger = Event::builder("order.placed")
        .id(records[0].event.id())
        .tenant("other")
        .json(&0)
        .build()
        .unwrap();
    let other = store
        .ingest(vec![moved(&stage, stranger, 9)])
        .await
        .unwrap();
    assert!(!all.contains(&other[0]));
    if stage.offers(&RESTART) {
        drop(store);
        stage.crash().await;
    }
    let events = all_events(&stage).await;
    assert_eq!(events.len(), 4, "{events:?}");
    for (n, record) in records.iter().enumerate() {
        let found = &events[n];
        assert_eq!(found.event, record.event);
        assert_eq!((found.position, found.received_at), (all[n], received_at));
        let by_id = stage.lookup().find(record.event.id()).await.unwrap();
        assert!(by_id.contains(found), "{by_id:?}");
    }
    let history = stage.engine().history().unwrap();
    let query = HistoryQuery::default().tenant("acme");
    assert_eq!(history.query(query).await.unwrap().items.len(), 3);
    // A publish of the same event on the store itself is a duplicate, too.
    if stage.offers(&OWN_LOG) {
        let published = stage.append(records[1].event.clone()).await;
        assert!(published.duplicate);
        assert_eq!(published.position, all[1]);
    }
    stage.passed()
}

/// A broker may add attributes on the way, and may not deduplicate. The store keeps what it has.
pub async fn the_first_body_of_an_id_is_kept<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&STORE, &LOG]).await?;
    let store = store(&stage);
    let first = event("a.b");
    let with = |key: &str| {
        Event::builder("a.b")
            .id(first.id())
            .payload("{}")
            .meta(key, "broker")
            .build()
            .unwrap()
    };
    let place = store.ingest(vec![moved(&stage, first.clone(), 1)]).await;
    let place = place.unwrap();
    let again = vec![moved(&stage, with("x"), 1), moved(&stage, with("y"), 2)];
    let again = store.ingest(again).await.unwrap();
    assert_eq!(again, [place[0], place[0]]);
    let events = all_events(&stage).await;
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].event, first);
    stage.passed()
}

/// Shards are archived one after another, and clocks differ.
pub async fn times_never_fall_in_a_store<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Virtual, &[&STORE, &LOG]).await?;
    let store = store(&stage);
    let early = moved(&stage, event("a.b"), 1);
    stage.advance(10 * SECOND).await;
    let (late, now) = (moved(&stage, event("a.b"), 2), stage.clock.now());
    let (position, hour) = (late.position, Duration::from_secs(3600));
    let future = Arc::new(Recorded::new(event("a.b"), position, now.plus(hour)));
    store.ingest(vec![late, early, future]).await.unwrap();
    let own = stage.publish("a.b").await;
    assert_eq!(own.received_at, now);
    let times: Vec<Timestamp> = all_events(&stage)
        .await
        .iter()
        .map(|r| r.received_at)
        .collect();
    assert_eq!(times, [now; 4]);
    stage.passed()
}

/// Failures are numbered; the same number again replaces the first.
pub async fn recorded_failures_come_back_in_order<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Virtual, &[&STORE, &LOOKUP]).await?;
    let mut told = store(&stage);
    let (one, other) = (
        moved(&stage, event("a.b"), 1),
        moved(&stage, event("a.b"), 2),
    );
    let keys = vec![EventKey::of(&one.event), EventKey::of(&other.event)];
    let now = stage.clock.now();
    let [first, second, second_again] = [failure(1, now), failure(2, now), failure(2, now)];
    let none = told.failures(name("g"), keys.clone()).await.unwrap();
    assert_eq!(none, [vec![], vec![]]);
    for failure in [&first, &second, &second_again] {
        told.record_failure(name("g"), one.clone(), failure.clone())
            .await
            .unwrap();
    }
    if stage.offers(&RESTART) {
        drop(told);
        stage.crash().await;
        told = store(&stage);
    }
    let known = told.failures(name("g"), keys.clone()).await.unwrap();
    let both = vec![first.clone(), second.clone()];
    assert_eq!(known, [both.clone(), vec![]]);
    let elsewhere = told.failures(name("h"), keys.clone()).await.unwrap();
    assert_eq!(elsewhere, [vec![], vec![]]);
    let place = told.ingest(vec![one.clone()]).await.unwrap()[0];
    let state = stage.known_state(place, "g").await;
    assert_eq!(state.state, EventState::Processing);
    assert_eq!((state.attempts, state.failures), (2, both.clone()));
    // The third attempt succeeds: the failures stay with the event, and do not count for a next attempt.
    told.record_handled(name("g"), vec![one.clone()])
        .await
        .unwrap();
    let known = told.failures(name("g"), keys.clone()).await.unwrap();
    assert_eq!(known, [vec![], vec![]]);
    let state = stage.known_state(place, "g").await;
    assert_eq!((state.state, state.attempts), (EventState::Done, 3));
    assert_eq!(state.failures, both);
    // A replay begins with no failures.
    told.record_failure(name("g"), one, first.clone())
        .await
        .unwrap();
    let known = told.failures(name("g"), keys).await.unwrap();
    assert_eq!(known, [vec![first], vec![]]);
    stage.passed()
}

/// The inbox is read before a handler runs, and written before the broker gets the ack.
pub async fn what_was_recorded_as_handled_is_in_the_inbox<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Still, &[&STORE, &LOG, &INBOX]).await?;
    let told = store(&stage);
    let records: Vec<Arc<Recorded>> = (1..=3)
        .map(|place| moved(&stage, event("a.b"), place))
        .collect();
    for _ in 0..2 {
        let handled = vec![records[0].clone(), records[2].clone()];
        told.record_handled(name("g"), handled).await.unwrap();
    }
    if stage.offers(&RESTART) {
        drop(told);
        stage.crash().await;
    }
    let inbox = stage.engine().inbox().unwrap();
    let known = inbox.handled(name("g"), records.clone()).await.unwrap();
    assert_eq!(known, [true, false, true]);
    let elsewhere = inbox.handled(name("h"), records).await.unwrap();
    assert_eq!(elsewhere, [false; 3]);
    assert_eq!(
        all_events(&stage).await.len(),
        2,
        "they brought their events"
    );
    stage.passed()
}

/// A skipped event is done, with its reason; recorded twice, it counts once.
pub async fn a_recorded_skip_says_why<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&STORE, &LOOKUP]).await?;
    let told = store(&stage);
    let record = moved(&stage, event("a.b"), 7);
    for _ in 0..2 {
        told.record_skip(name("g"), record.clone(), "stale".into())
            .await
            .unwrap();
    }
    let place = told.ingest(vec![record]).await.unwrap()[0];
    let state = stage.known_state(place, "g").await;
    assert_eq!(state.state, EventState::Done);
    assert_eq!(state.skipped.as_deref(), Some("stale"));
    if stage.offers(&OWN_LOG) {
        stage
            .eventually("the group passes the event", || async {
                stage.group_info("g").await.behind == 0
            })
            .await;
    }
    stage.passed()
}

/// A dead letter that another process reports is like any other, but no notice is appended.
pub async fn a_dead_letter_can_be_put<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Virtual, &[&STORE, &LOG, &DEAD_LETTERS]).await?;
    let mut told = store(&stage);
    let record = moved(&stage, event("order.placed"), 7);
    let start = stage.clock.now();
    told.record_failure(name("g"), record.clone(), failure(1, start))
        .await
        .unwrap();
    stage.advance(SECOND).await;
    let died_at = stage.clock.now();
    let failures = vec![failure(1, start), failure(2, died_at)];
    let burial = Burial::new(record.clone(), name("g"), 2, failures.clone(), died_at);
    for _ in 0..2 {
        told.bury(burial.clone()).await.unwrap();
    }
    if stage.offers(&RESTART) {
        drop(told);
        stage.crash().await;
        told = store(&stage);
        told.bury(burial.clone()).await.unwrap();
    }
    let open = stage.open_dead_letters().await;
    assert_eq!(open.len(), 1, "{open:?}");
    let letter = &open[0];
    assert_eq!(letter.record.event, record.event);
    assert_eq!((letter.attempts, &letter.failures), (2, &failures));
    assert_eq!((letter.first_seen_at, letter.died_at), (died_at, died_at));
    assert_eq!(letter.handler.as_deref(), Some("theirs"));
    let count = stage.dead_letters().count(DeadLetterFilter::default());
    assert_eq!(count.await.unwrap(), 1);
    let place = letter.record.position;
    if stage.offers(&OWN_LOG) {
        assert_eq!(stage.group_info("g").await.dead_letters, 1);
        stage.assert_state(place, "g", EventState::Dlq).await;
    }
    let types: Vec<String> = all_events(&stage)
        .await
        .iter()
        .map(|r| r.event.event_type().to_owned())
        .collect();
    assert_eq!(
        types,
        ["order.placed"],
        "the runtime tells of it, not the store"
    );
    // The attempts are in the dead letter now.
    let keys = vec![EventKey::of(&record.event)];
    let next = told.failures(name("g"), keys).await.unwrap();
    assert_eq!(next, [vec![]]);

    // Sent back through the broker.
    stage.advance(SECOND).await;
    let retried_at = stage.clock.now();
    for _ in 0..2 {
        told.mark_retried(vec![sent_back(letter)], retried_at)
            .await
            .unwrap();
        stage.advance(SECOND).await;
    }
    assert!(stage.open_dead_letters().await.is_empty());
    let kept = stage.dead_letters().get(record.event.id()).await.unwrap();
    assert_eq!(kept[0].retried_at, Some(retried_at));

    // It dies again: attempts add up, and the time of the first failure stays.
    let again = stage.clock.now();
    let more = vec![failure(1, again)];
    let burial = Burial::new(record.clone(), name("g"), 1, more.clone(), again);
    for _ in 0..2 {
        told.bury(burial.clone()).await.unwrap();
    }
    let open = stage.open_dead_letters().await;
    assert_eq!(open.len(), 1);
    assert_eq!(open[0].attempts, 3);
    assert_eq!(open[0].failures, [failures, more].concat());
    assert_eq!((open[0].first_seen_at, open[0].died_at), (died_at, again));
    // An unknown dead letter is not marked, and one that died again after it was sent back stays open.
    let mut unknown = sent_back(&open[0]);
    unknown.letter.group = name("other");
    let before = sent_back(letter);
    told.mark_retried(vec![unknown, before.clone()], again)
        .await
        .unwrap();
    let by = everbus_core::EventId::new();
    told.mark_replaced(before, by, again).await.unwrap();
    assert_eq!(stage.open_dead_letters().await, open);
    stage.passed()
}

fn sent_back(letter: &DeadLetter) -> SentBack {
    SentBack {
        letter: letter.key(),
        died_at: letter.died_at,
    }
}

/// Groups that are known only from a store want nothing, so they keep no event from being removed.
pub async fn what_a_store_is_told_pins_nothing<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(
        harness,
        Time::Virtual,
        &[&STORE, &DEAD_LETTERS, &MAINTENANCE],
    )
    .await?;
    let told = store(&stage);
    let maintenance = stage.engine().maintenance().unwrap();
    let records: Vec<Arc<Recorded>> = (1..=4)
        .map(|place| moved(&stage, event("a.b"), place))
        .collect();
    let now = stage.clock.now();
    told.ingest(records.clone()).await.unwrap();
    told.record_failure(name("f"), records[0].clone(), failure(1, now))
        .await
        .unwrap();
    told.record_handled(name("h"), vec![records[1].clone()])
        .await
        .unwrap();
    told.record_skip(name("s"), records[2].clone(), "stale".into())
        .await
        .unwrap();
    let dead = Burial::new(records[3].clone(), name("d"), 1, vec![failure(1, now)], now);
    told.bury(dead).await.unwrap();
    let retention = Retention {
        max_len: Some(0),
        ..Retention::default()
    };
    let pruned = maintenance.prune(retention.clone()).await.unwrap();
    assert_eq!((pruned.removed, pruned.kept), (3, 1));
    let left = stage.open_dead_letters().await;
    told.mark_retried(vec![sent_back(&left[0])], now)
        .await
        .unwrap();
    let pruned = maintenance.prune(retention).await.unwrap();
    assert_eq!((pruned.removed, pruned.kept), (1, 0));
    let report = maintenance.check().await.unwrap();
    assert!(report.is_ok(), "{report:?}");
    stage.passed()
}

/// A stage that arrives before its event is kept, and can be read.
pub async fn a_stage_waits_for_its_event<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Virtual, &[&STORE, &PAYLOADS]).await?;
    let mut told = store(&stage);
    let event = Event::builder("a.b")
        .tenant("acme")
        .payload("{}")
        .build()
        .unwrap();
    let key = EventKey::of(&event);
    let stored = |content: &str, timestamp: Timestamp| StoredStage {
        info: StageInfo {
            stage: "webhook_raw".parse().unwrap(),
            timestamp,
            payload_size_original: 9,
            payload_size_compressed: content.len() as u64,
            status_code: Some(502),
            error_details: None,
            contains_media: false,
            contains_base64: true,
        },
        compressed: Bytes::copy_from_slice(content.as_bytes()),
    };
    let first = stored("one", stage.clock.now());
    told.store_stage(key.clone(), first.clone()).await.unwrap();
    let payloads = stage.engine().payloads().unwrap();
    // Only a store beside a broker keeps an early stage. On an engine that is its own broker it is a mistake.
    if stage.offers(&STAGES_LAST) {
        let refused = payloads.store(key.clone(), first.clone()).await;
        assert_eq!(code(refused), everbus_core::Code::NotFound);
    }
    let waiting = payloads.stages(key.clone(), None).await.unwrap();
    assert_eq!(waiting, std::slice::from_ref(&first));
    let elsewhere = payloads.stages(event.id().into(), None).await.unwrap();
    assert!(elsewhere.is_empty(), "of another tenant");
    if stage.offers(&RESTART) {
        drop(told);
        stage.crash().await;
        told = store(&stage);
    }
    told.ingest(vec![moved(&stage, event, 3)]).await.unwrap();
    stage.advance(SECOND).await;
    let second = stored("two", stage.clock.now());
    told.store_stage(key.clone(), second.clone()).await.unwrap();
    let payloads = stage.engine().payloads().unwrap();
    let both = payloads.stages(key.clone(), None).await.unwrap();
    assert_eq!(both, [first, second]);
    let largest = payloads.largest(0, 10).await.unwrap();
    assert_eq!(largest.len(), 2);
    assert!(largest.iter().all(|(of, _)| *of == key));
    stage.passed()
}
