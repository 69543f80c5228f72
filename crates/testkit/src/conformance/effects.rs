//! Effects: a handler's own work in the transaction of its ack happens with the ack or not at all. What an
//! effect may do inside depends on the engine; its crate tests that.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use everbus_core::{
    Code, Cursor, Delivery, Effect, EffectResult, Error, Event, EventState, Settlement, Verdict,
};

use super::needs::{INBOX, LOG, LOOKUP, MAINTENANCE, TRANSACTION};
use super::stage::{code, event, following, name, nothing, take, take_one};
use super::{Harness, Outcome, Stage, Time};

/// A handler's own error type.
#[derive(Debug, PartialEq)]
struct OutOfStock(u32);

impl fmt::Display for OutOfStock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} are missing", self.0)
    }
}

impl StdError for OutOfStock {}

/// An effect that counts its runs and ends in the given way.
fn counting(
    engine: &'static str,
    runs: &Arc<AtomicU32>,
    end: impl Fn() -> EffectResult + Send + Sync + 'static,
) -> Effect {
    let runs = runs.clone();
    Effect::new(engine, move |_| {
        runs.fetch_add(1, Ordering::SeqCst);
        end()
    })
}

fn with(delivery: &Delivery, effect: Effect) -> Settlement {
    let mut settlement = Settlement::new(delivery.lease.clone(), Verdict::Ack);
    settlement.inbox = true;
    settlement.effect = Some(effect);
    settlement
}

async fn is_handled<H: Harness>(stage: &Stage<H>, delivery: &Delivery) -> bool {
    let inbox = stage.engine().inbox().unwrap();
    let asked = vec![delivery.record.clone()];
    inbox.handled(name(""), asked).await.unwrap()[0]
}

/// The cause of an error, however deep, if it is of this type.
fn cause<T: StdError + 'static>(error: &Error) -> Option<&T> {
    let mut next: Option<&(dyn StdError + 'static)> = error.source();
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        next = error.source();
    }
    None
}

/// An engine without transactions for effects, or with those of another engine, refuses the effect: nothing
/// is applied and the lease is held.
pub async fn an_effect_of_another_engine_is_refused<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    stage.declare("", &["order.*"]).await;
    stage.publish_many("order.placed", 2).await;
    let mut consumer = stage.consumer("").await;
    let got = take(&mut consumer, 2).await;
    let runs = Arc::default();
    let own = stage.capabilities().transaction;
    let foreign = if own == Some("sqlite") {
        "other"
    } else {
        "sqlite"
    };
    let follow_up = event("mail.sent");
    let followed = follow_up.id();
    let refused = following(
        with(&got[0], counting(foreign, &runs, || Ok(Vec::new()))),
        vec![follow_up],
    );
    let beside = Settlement::new(got[1].lease.clone(), Verdict::Ack);
    let answers = stage.broker().settle(vec![refused, beside]).await.unwrap();
    let codes: Vec<Option<Code>> = answers
        .iter()
        .map(|answer| answer.as_ref().err().map(Error::code))
        .collect();
    assert_eq!(codes, [Some(Code::Unsupported), None]);
    assert_eq!(runs.load(Ordering::SeqCst), 0);
    if stage.offers(&INBOX) {
        assert!(!is_handled(&stage, &got[0]).await);
    }
    if stage.offers(&LOOKUP) {
        assert!(stage.lookup().find(followed).await.unwrap().is_empty());
    }
    stage
        .assert_state(got[0].record.position, "", EventState::Processing)
        .await;
    stage.ack(&got[0]).await;
    nothing(&mut consumer).await;
    stage.passed()
}

/// Effect, inbox record, follow-ups and ack are applied together, the follow-ups in order.
pub async fn an_effect_comes_with_its_ack<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&TRANSACTION]).await?;
    let engine = stage.capabilities().transaction.unwrap();
    stage.declare("", &["*"]).await;
    stage.publish("order.placed").await;
    let mut consumer = stage.consumer("").await;
    let delivery = take_one(&mut consumer).await;
    let (told, made) = (event("order.billed"), event("order.mailed"));
    let expected = [told.id(), made.id()];
    let runs = Arc::default();
    let settlement = following(
        with(
            &delivery,
            counting(engine, &runs, move || Ok(vec![made.clone()])),
        ),
        vec![told],
    );
    stage.settle_with(settlement).await.unwrap();
    assert_eq!(runs.load(Ordering::SeqCst), 1);
    assert!(is_handled(&stage, &delivery).await);
    stage
        .assert_state(delivery.record.position, "", EventState::Done)
        .await;
    let followed = take(&mut consumer, 2).await;
    let ids: Vec<_> = followed.iter().map(|d| d.record.event.id()).collect();
    assert_eq!(ids, expected);
    stage.passed()
}

/// An effect belongs to an ack: with any other verdict it does not run.
pub async fn an_effect_runs_only_with_an_ack<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&TRANSACTION]).await?;
    let engine = stage.capabilities().transaction.unwrap();
    stage.declare("", &["*"]).await;
    stage.publish_many("order.placed", 4).await;
    let mut consumer = stage.consumer("").await;
    let got = take(&mut consumer, 4).await;
    let later = Duration::from_secs(3600);
    let verdicts = [
        Verdict::Retry {
            after: later,
            failure: stage.failure(&got[0]),
        },
        Verdict::Skip {
            reason: "stale".into(),
        },
        Verdict::Release { after: later },
        Verdict::Dead {
            failure: Some(stage.failure(&got[3])),
        },
    ];
    let runs = Arc::default();
    for (delivery, verdict) in got.iter().zip(verdicts) {
        let mut settlement = with(delivery, counting(engine, &runs, || Ok(Vec::new())));
        settlement.verdict = verdict;
        stage.settle_with(settlement).await.unwrap();
        assert!(!is_handled(&stage, delivery).await);
    }
    assert_eq!(runs.load(Ordering::SeqCst), 0);
    stage.passed()
}

/// If an effect fails or panics, nothing of its settlement is applied: the lease is held and the event
/// can be failed, retried, and handled in the end. Its neighbours are not touched. The error it
/// returned is the cause.
pub async fn an_effect_that_fails_undoes_its_settlement<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&TRANSACTION]).await?;
    let engine = stage.capabilities().transaction.unwrap();
    for panics in [false, true] {
        let group = if panics { "panics" } else { "" };
        stage.declare(group, &["order.*"]).await;
        stage.publish_many("order.placed", 3).await;
        let mut consumer = stage.consumer(group).await;
        let got = take(&mut consumer, if panics { 6 } else { 3 }).await;
        let follow_up = event("mail.new-type");
        let followed = follow_up.id();
        let runs = Arc::default();
        let failing = following(
            with(
                &got[1],
                counting(engine, &runs, move || {
                    assert!(!panics, "a bug");
                    Err(Box::new(OutOfStock(7)))
                }),
            ),
            vec![follow_up],
        );
        let well = |delivery| with(delivery, counting(engine, &runs, || Ok(Vec::new())));
        let batch = vec![well(&got[0]), failing, well(&got[2])];
        let mut answers = stage.broker().settle(batch).await.unwrap();
        assert_eq!(answers.len(), 3);
        answers.pop().unwrap().unwrap();
        let error = answers.pop().unwrap().unwrap_err();
        answers.pop().unwrap().unwrap();
        assert_eq!(error.code(), Code::EffectFailed);
        if panics {
            assert!(error.message().contains("a bug"), "{error}");
        } else {
            assert!(error.message().contains("7 are missing"), "{error}");
            assert_eq!(cause(&error), Some(&OutOfStock(7)));
        }
        assert_eq!(runs.load(Ordering::SeqCst), 3);
        if stage.offers(&LOOKUP) {
            assert!(stage.lookup().find(followed).await.unwrap().is_empty());
        }
        for (delivery, done) in got.iter().zip([true, false, true]) {
            let inbox = stage.engine().inbox().unwrap();
            let asked = vec![delivery.record.clone()];
            let known = inbox.handled(name(group), asked).await.unwrap();
            assert_eq!(known, [done]);
            let state = if done {
                EventState::Done
            } else {
                EventState::Processing
            };
            stage
                .assert_state(delivery.record.position, group, state)
                .await;
        }
        stage.fail(&got[1], Duration::ZERO).await;
        let again = take_one(&mut consumer).await;
        assert_eq!(again.record.position, got[1].record.position);
        assert_eq!(again.attempt, 2);
        let after = event("mail.another-new-type");
        let after_id = after.id();
        stage
            .settle_with(following(
                with(&again, counting(engine, &runs, || Ok(Vec::new()))),
                vec![after],
            ))
            .await
            .unwrap();
        if stage.offers(&LOOKUP) {
            let found = stage.lookup().find(after_id).await.unwrap();
            assert_eq!(found[0].event.event_type(), "mail.another-new-type");
        }
        for delivery in got.iter().skip(3) {
            stage.ack(delivery).await;
        }
        nothing(&mut consumer).await;
    }
    stage.passed()
}

/// An event that was handled before is acked without its effect.
pub async fn a_duplicate_is_acked_without_its_effect<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&TRANSACTION, &MAINTENANCE]).await?;
    let engine = stage.capabilities().transaction.unwrap();
    stage.declare("", &["order.*"]).await;
    let original = event("order.placed");
    let runs = Arc::default();
    for _ in 0..2 {
        let appended = stage.append(original.clone()).await;
        assert!(!appended.duplicate);
        let mut consumer = stage.consumer("").await;
        let delivery = take_one(&mut consumer).await;
        let settlement = with(&delivery, counting(engine, &runs, || Ok(Vec::new())));
        stage.settle_with(settlement).await.unwrap();
        stage
            .assert_state(appended.position, "", EventState::Done)
            .await;
        consumer.close().await.unwrap();
        let retention = everbus_core::Retention {
            max_len: Some(0),
            ..Default::default()
        };
        let maintenance = stage.engine().maintenance().unwrap();
        assert_eq!(maintenance.prune(retention).await.unwrap().removed, 1);
    }
    assert_eq!(runs.load(Ordering::SeqCst), 1);
    stage.passed()
}

/// A follow-up whose id is taken by another event undoes the effect too.
pub async fn a_refused_follow_up_undoes_the_effect<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&TRANSACTION]).await?;
    let engine = stage.capabilities().transaction.unwrap();
    stage.declare("", &["order.*"]).await;
    let taken = stage.publish("mail.sent").await;
    stage.publish("order.placed").await;
    let mut consumer = stage.consumer("").await;
    let delivery = take_one(&mut consumer).await;
    let other_body = Event::builder("mail.sent")
        .id(taken.id)
        .payload("1")
        .build()
        .unwrap();
    let runs = Arc::default();
    let effect = counting(engine, &runs, move || Ok(vec![other_body.clone()]));
    let first = event("mail.drafted");
    let first_id = first.id();
    let refused = stage
        .settle_with(following(with(&delivery, effect), vec![first]))
        .await;
    assert_eq!(code(refused), Code::IdReused);
    assert!(!is_handled(&stage, &delivery).await);
    if stage.offers(&LOG) && stage.offers(&LOOKUP) {
        assert!(stage.lookup().find(first_id).await.unwrap().is_empty());
        assert_eq!(
            stage.log().head().await.unwrap(),
            Cursor::from(delivery.record.position),
            "no position was used"
        );
    }
    stage.ack(&delivery).await;
    nothing(&mut consumer).await;
    // The type of the refused follow-up is not registered.
    let later = stage.publish("mail.drafted").await;
    if stage.offers(&LOOKUP) {
        let found = stage.lookup().find(later.id).await.unwrap();
        assert_eq!(found[0].event.event_type(), "mail.drafted");
    }
    stage.passed()
}
