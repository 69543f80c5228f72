//! `system.dead_letter`: an event reports every dead letter, in the transaction that writes it.

use std::time::Duration;

use everbus_core::{
    Cursor, DEAD_LETTER_EVENT, DeadLetterFilter, Delivery, Event, Failure, FailureKind, Recorded,
    Settlement, Verdict,
};
use serde_json::{Value, json};

use super::needs::{
    ATOMIC_DEAD_LETTER, DEAD_LETTERS, FENCING, LOG, LOG_ORDER, NO_HANDLER, SENT_BACK,
};
use super::stage::{LEASE, code, handling, nothing, pattern, take, take_one};
use super::{Harness, Outcome, Stage, Time};

fn body(delivery: &Delivery) -> Value {
    assert_eq!(delivery.record.event.event_type(), DEAD_LETTER_EVENT);
    delivery.record.event.json().unwrap()
}

/// All notices in the log, where it can be read.
async fn told<H: Harness>(stage: &Stage<H>) -> Vec<std::sync::Arc<Recorded>> {
    let (told, _) = stage
        .log()
        .read(Cursor::START, vec![pattern(DEAD_LETTER_EVENT)], 1000)
        .await
        .unwrap();
    told
}

/// Groups that subscribe to it get what died and why; the others, also those that want everything, do not. No
/// notice is written about a dead system event.
pub async fn every_dead_letter_is_told_of<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&DEAD_LETTERS]).await?;
    stage.declare("g", &["*"]).await;
    stage.declare("everything", &[">"]).await;
    stage.declare("alarm", &["system.>"]).await;
    stage.declare("pager", &["system.dead_letter"]).await;
    let mut g = stage.consumer("g").await;
    let mut everything = stage.consumer("everything").await;
    let mut alarm = stage.consumer("alarm").await;
    let event = Event::builder("order.placed")
        .json(&json!({"order": 1}))
        .tenant("acme")
        .correlation_id("request-1")
        .build()
        .unwrap();
    let appended = stage.append(event).await;
    let delivery = take_one(&mut g).await;
    stage.fail(&delivery, Duration::ZERO).await;
    let delivery = take_one(&mut g).await;
    stage.kill(&delivery).await;
    let notice = take_one(&mut alarm).await;
    let expected = json!({
        "eventId": appended.id.to_string(),
        "eventType": "order.placed",
        "error": "attempt 2 failed",
        "group": "g",
        "attempts": 2,
    });
    assert_eq!(body(&notice), expected);
    let told = &notice.record.event;
    assert_eq!(told.tenant(), Some("acme"));
    assert_eq!(told.correlation_id(), "request-1");
    assert_eq!(
        told.attributes().unwrap().causation_id,
        Some(appended.id.to_string())
    );
    if stage.offers(&LOG_ORDER) {
        assert!(notice.record.position > appended.position);
    }
    // A group without a consumer at that time gets it as well.
    let mut pager = stage.consumer("pager").await;
    assert_eq!(body(&take_one(&mut pager).await), expected);
    let original = take_one(&mut everything).await;
    assert_eq!(original.record.position, appended.position);
    nothing(&mut everything).await;
    nothing(&mut g).await;
    // The dead letter of the notice leads to no other.
    stage.kill(&notice).await;
    nothing(&mut alarm).await;
    let own = stage.publish("system.note").await;
    let delivery = take_one(&mut alarm).await;
    assert_eq!(delivery.record.position, own.position);
    stage.kill(&delivery).await;
    nothing(&mut alarm).await;
    stage.passed()
}

/// Every way to become a dead letter is reported: a verdict without a failure, and an event without a
/// handler.
pub async fn every_way_to_die_is_told<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[&DEAD_LETTERS]).await?;
    stage.declare("g", &["*"]).await;
    stage.declare("alarm", &["system.>"]).await;
    let mut alarm = stage.consumer("alarm").await;
    stage.publish("a.x").await;
    let mut g = stage.consumer("g").await;
    let delivery = take_one(&mut g).await;
    stage.fail(&delivery, Duration::ZERO).await;
    let delivery = take_one(&mut g).await;
    stage.end(&delivery, Verdict::Dead { failure: None }).await;
    let first = take_one(&mut alarm).await;
    assert_eq!(body(&first)["error"], "attempt 1 failed");
    stage.ack(&first).await;
    g.close().await.unwrap();
    if !stage.offers(&NO_HANDLER) {
        return stage.passed();
    }
    let only_a = handling(vec![pattern("a.*")]).no_handler_after(Duration::from_secs(10));
    let mut g = stage.consumer_with("g", only_a).await;
    let orphan = stage.publish("b.x").await;
    nothing(&mut g).await;
    // The time counts from when the engine has seen that no process has a handler. A busy machine may need more
    // than one look.
    for _ in 0..200 {
        if stage.group_info("g").await.unhandled > 0 {
            break;
        }
        let looked = tokio::time::timeout(Duration::from_millis(50), g.fetch(1)).await;
        assert!(looked.is_err(), "{looked:?}");
    }
    stage.advance(Duration::from_secs(11)).await;
    // The time limit is noticed when a consumer fetches.
    let looked = tokio::time::timeout(Duration::from_millis(300), g.fetch(1)).await;
    assert!(looked.is_err(), "{looked:?}");
    let second = body(&take_one(&mut alarm).await);
    assert_eq!(second["eventId"], orphan.id.to_string());
    let error = second["error"].as_str().unwrap();
    assert!(error.contains("handler"), "{error}");
    nothing(&mut alarm).await;
    stage.passed()
}

/// A dead letter that was retried and fails again is reported again, with all its attempts.
pub async fn dying_again_is_told_again<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[&DEAD_LETTERS, &SENT_BACK]).await?;
    stage.declare("g", &["*"]).await;
    stage.declare("alarm", &["system.>"]).await;
    let mut alarm = stage.consumer("alarm").await;
    stage.dead_letter("g", "a.x").await;
    for attempts in 1..=3 {
        // Also at the same moment. Where a store records the dead letter, only the time distinguishes it from the one before.
        if !stage.offers(&ATOMIC_DEAD_LETTER) {
            stage.advance(Duration::from_millis(1)).await;
        }
        let told = body(&take_one(&mut alarm).await);
        assert_eq!(told["attempts"], attempts);
        assert_eq!(told["error"], "attempt 1 failed", "the last one there was");
        let dead = stage.open_dead_letters().await.remove(0);
        assert_eq!(dead.handler.as_deref(), Some("the handler"));
        let retried = stage.dead_letters().retry(DeadLetterFilter::default());
        assert_eq!(retried.await.unwrap(), 1);
        let mut g = stage.consumer("g").await;
        let delivery = take_one(&mut g).await;
        match attempts {
            1 => stage.kill(&delivery).await,
            // Without a new failure.
            2 => stage
                .settle(&delivery, Verdict::Dead { failure: None })
                .await
                .unwrap(),
            _ => stage.ack(&delivery).await,
        }
        g.close().await.unwrap();
    }
    nothing(&mut alarm).await;
    stage.passed()
}

/// A refused settlement reports nothing, also beside others that are not refused.
pub async fn a_refused_settlement_tells_of_nothing<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[&LOG, &FENCING]).await?;
    stage.declare("g", &["*"]).await;
    stage.publish_many("a.x", 3).await;
    let mut g = stage.consumer("g").await;
    let got = take(&mut g, 3).await;
    stage.advance(LEASE + Duration::from_secs(1)).await;
    let again = take(&mut g, 1).await.remove(0);
    let dead = |delivery: &Delivery| {
        let failure = Some(stage.failure(delivery));
        Settlement::new(delivery.lease.clone(), Verdict::Dead { failure })
    };
    assert_eq!(
        code(stage.settle_with(dead(&got[1])).await),
        everbus_core::Code::LeaseLost
    );
    assert!(told(&stage).await.is_empty());
    let batch = vec![dead(&got[0]), dead(&again), dead(&got[2])];
    let answers = stage.broker().settle(batch).await.unwrap();
    let taken: Vec<bool> = answers.iter().map(Result::is_ok).collect();
    assert_eq!(taken, [false, true, false]);
    stage.told(1).await;
    let told = told(&stage).await;
    assert_eq!(told.len(), 1);
    let body: Value = told[0].event.json().unwrap();
    assert_eq!(body["eventId"], again.record.event.id().to_string());
    stage.passed()
}

/// However long the error, the notice is a small event; the dead letter has all of it.
pub async fn a_long_error_is_cut_in_the_notice<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&DEAD_LETTERS]).await?;
    stage.declare("g", &["*"]).await;
    stage.declare("alarm", &["system.>"]).await;
    stage.publish("a.x").await;
    let mut g = stage.consumer("g").await;
    let delivery = take_one(&mut g).await;
    // Every character is six in JSON.
    let text = "\u{1}".repeat(60_000);
    let at = stage.now();
    let failure = Some(Failure::new(1, at, FailureKind::Error, text.clone()));
    stage.end(&delivery, Verdict::Dead { failure }).await;
    assert_eq!(stage.open_dead_letters().await[0].last_error(), text);
    let mut alarm = stage.consumer("alarm").await;
    let notice = take_one(&mut alarm).await;
    let error = body(&notice)["error"].as_str().unwrap().to_owned();
    assert!(error.starts_with("\u{1}\u{1}") && error.ends_with("(cut)"));
    let size = notice.record.event.payload().len();
    assert!(size < 128 * 1024, "{size} bytes");
    stage.passed()
}
