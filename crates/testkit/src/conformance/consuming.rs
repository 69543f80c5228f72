//! Delivery: order, competing consumers, independent groups, limits, and futures that are dropped.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use everbus_core::{Code, EventState, Position, Settlement, Verdict};

use super::needs::{DEAD_LETTERS, LOG, LOG_ORDER, LOOKUP};
use super::stage::{
    DEADLINE, LEASE, code, event, name, nothing, options, positions, take, take_one,
};
use super::{Harness, Outcome, Stage, Time};
use crate::model::Random;

/// One consumer gets the events in the order of the log, with everything they carry.
pub async fn events_come_in_the_order_of_the_log<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    stage.declare("", &["*"]).await;
    let mut published = stage.publish_many("order.placed", 50).await;
    for _ in 0..50 {
        published.push(stage.publish("order.paid").await);
    }
    assert!(
        published.windows(2).all(|w| matches!(
            w[0].position.partial_cmp(&w[1].position),
            None | Some(std::cmp::Ordering::Less)
        ) && w[0].received_at <= w[1].received_at
            && w[0].id != w[1].id),
        "positions and times of receipt rise"
    );
    let mut consumer = stage.consumer("").await;
    let mut seen = Vec::new();
    while seen.len() < published.len() {
        let batch = tokio::time::timeout(DEADLINE, consumer.fetch(7)).await;
        let batch = batch.unwrap().unwrap();
        assert!((1..=7).contains(&batch.len()), "between 1 and max");
        for delivery in batch {
            assert_eq!(delivery.attempt, 1);
            assert!(delivery.failures.is_empty());
            assert_eq!(delivery.lease.position(), delivery.record.position);
            stage.ack(&delivery).await;
            seen.push(delivery);
        }
    }
    nothing(&mut consumer).await;
    if stage.offers(&LOG_ORDER) {
        let expected: Vec<Position> = published.iter().map(|a| a.position).collect();
        assert_eq!(positions(&seen), expected);
    }
    for delivery in &seen {
        let position = delivery.record.position;
        let mut known = published.iter().filter(|a| a.position == position);
        let appended = known.next().expect("what was published");
        assert_eq!(delivery.record.event.id(), appended.id);
        assert_eq!(delivery.record.received_at, appended.received_at);
    }
    stage.passed()
}

/// A waiting fetch is woken by an append.
pub async fn a_waiting_fetch_is_woken_by_an_append<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    stage.declare("", &["*"]).await;
    let mut consumer = stage.consumer("").await;
    for _ in 0..20 {
        let broker = stage.broker().clone();
        let publisher = tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(2)).await;
            broker.append(vec![event("a.b")]).await.unwrap();
        });
        let delivery = take_one(&mut consumer).await;
        stage.ack(&delivery).await;
        publisher.await.unwrap();
    }
    stage.passed()
}

/// Consumers of one group share its events: each is delivered to one of them, all are handled.
pub async fn competing_consumers_share_and_never_double<H: Harness>(harness: H) -> Outcome {
    const EVENTS: usize = 600;
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    stage.declare("workers", &["*"]).await;
    stage.publish_many("job.ready", EVENTS / 2).await;
    let handled = Arc::new(AtomicUsize::new(0));
    let mut tasks = Vec::new();
    for _ in 0..4 {
        let options = options().prefetch(16);
        let mut consumer = stage.consumer_with("workers", options).await;
        let (broker, handled) = (stage.broker().clone(), handled.clone());
        tasks.push(tokio::spawn(async move {
            let mut mine = Vec::new();
            while handled.load(Ordering::SeqCst) < EVENTS {
                let fetched = tokio::time::timeout(Duration::from_millis(50), consumer.fetch(5));
                let Ok(batch) = fetched.await else { continue };
                let batch = batch.unwrap();
                mine.extend(positions(&batch));
                assert!(batch.iter().all(|d| d.attempt == 1), "no second attempt");
                let acks = batch
                    .into_iter()
                    .map(|d| Settlement::new(d.lease, Verdict::Ack));
                let answers = broker.settle(acks.collect()).await.unwrap();
                assert!(answers.iter().all(Result::is_ok));
                handled.fetch_add(answers.len(), Ordering::SeqCst);
                tokio::task::yield_now().await;
            }
            consumer.close().await.unwrap();
            mine
        }));
    }
    for _ in 0..EVENTS / 20 {
        stage.publish_many("job.ready", 10).await;
    }
    let mut all = Vec::new();
    for task in tasks {
        all.extend(tokio::time::timeout(DEADLINE, task).await.unwrap().unwrap());
    }
    assert_eq!(all.len(), EVENTS);
    let distinct: HashSet<Position> = all.into_iter().collect();
    assert_eq!(distinct.len(), EVENTS, "nothing was delivered twice");
    stage.passed()
}

/// Each group gets every event, whatever the others do with it.
pub async fn groups_are_independent<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    stage.declare("billing", &["*"]).await;
    stage.declare("mail", &["order.*"]).await;
    let order = stage.publish("order.placed").await;
    let user = stage.publish("user.created").await;
    let mut billing = stage.consumer("billing").await;
    let mut mail = stage.consumer("mail").await;

    let both = [order.position, user.position];
    let mine = stage.take_these(&mut billing, &both).await;
    stage.kill(&mine[0]).await;
    stage.ack(&mine[1]).await;
    nothing(&mut billing).await;

    let theirs = take_one(&mut mail).await;
    assert_eq!(theirs.record.position, order.position);
    assert_eq!((theirs.attempt, theirs.failures.len()), (1, 0));
    stage.fail(&theirs, Duration::ZERO).await;
    let again = take_one(&mut mail).await;
    assert_eq!(again.attempt, 2);
    stage.ack(&again).await;
    nothing(&mut mail).await;
    stage
        .assert_state(order.position, "billing", EventState::Dlq)
        .await;
    stage
        .assert_state(order.position, "mail", EventState::Done)
        .await;
    stage
        .assert_state(user.position, "mail", EventState::Done)
        .await;
    stage.passed()
}

/// A consumer never holds more unsettled deliveries than its prefetch, and goes on when it settles.
pub async fn the_prefetch_bound_is_respected<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    stage.declare("", &["*"]).await;
    stage.publish_many("a.b", 10).await;
    let options = options().prefetch(3);
    let mut consumer = stage.consumer_with("", options).await;
    let mut held = take(&mut consumer, 3).await;
    nothing(&mut consumer).await;
    assert_eq!(stage.group_info("").await.in_flight, 3);
    for _ in 0..7 {
        stage.ack(&held.remove(0)).await;
        held.push(take_one(&mut consumer).await);
        assert!(stage.group_info("").await.in_flight <= 3);
    }
    stage.ack(&held.remove(0)).await;
    nothing(&mut consumer).await;
    stage.passed()
}

/// Fetch futures that are dropped at any moment lose nothing and count nothing.
pub async fn dropping_a_fetch_loses_nothing<H: Harness>(harness: H) -> Outcome {
    const EVENTS: usize = 300;
    let seed = Random::seed_from_env().unwrap_or(7);
    let mut random = Random::new(seed);
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    stage.declare("", &["*"]).await;
    let mut consumer = stage.consumer("").await;
    let broker = stage.broker().clone();
    let producer = tokio::spawn(async move {
        for n in 0..EVENTS / 3 {
            broker
                .append((0..3).map(|_| event("a.b")).collect())
                .await
                .unwrap();
            if n % 5 == 0 {
                tokio::time::sleep(Duration::from_micros(300)).await;
            }
        }
    });
    let mut seen: HashMap<Position, u32> = HashMap::new();
    let collect = async {
        while seen.len() < EVENTS {
            let patience = Duration::from_micros(random.below(1500) as u64);
            let batch = tokio::select! {
                biased;
                batch = consumer.fetch(1 + random.clone().below(5)) => batch.unwrap(),
                () = async {
                    // Half of the futures are polled once and dropped.
                    if patience.as_micros().is_multiple_of(2) {
                        tokio::task::yield_now().await;
                    } else {
                        tokio::time::sleep(patience).await;
                    }
                } => continue,
            };
            for delivery in batch {
                assert_eq!(
                    delivery.attempt, 1,
                    "seed {seed}: a dropped fetch is no attempt"
                );
                *seen.entry(delivery.record.position).or_default() += 1;
                stage.ack(&delivery).await;
            }
        }
    };
    let in_time = tokio::time::timeout(DEADLINE * 2, collect).await;
    assert!(
        in_time.is_ok(),
        "seed {seed}: only {} of {EVENTS} arrived",
        seen.len()
    );
    producer.await.unwrap();
    assert!(
        seen.values().all(|times| *times == 1),
        "seed {seed}: delivered twice"
    );
    nothing(&mut consumer).await;
    stage.passed()
}

/// What a consumer claimed and did not fetch is given back when it is closed or dropped.
pub async fn what_was_not_fetched_is_given_back<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    stage.declare("", &["*"]).await;
    stage.publish_many("a.b", 9).await;
    let mut first = stage.consumer("").await;
    let mine = take(&mut first, 3).await;
    first.close().await.unwrap();
    let mut second = stage.consumer("").await;
    let theirs = take(&mut second, 3).await;
    drop(second);
    let mut third = stage.consumer("").await;
    let rest = take(&mut third, 3).await;
    nothing(&mut third).await;
    let mut all = positions(&mine);
    all.extend(positions(&theirs));
    all.extend(positions(&rest));
    let all: HashSet<Position> = all.into_iter().collect();
    assert_eq!(all.len(), 9, "every event once");
    for delivery in mine.iter().chain(&theirs).chain(&rest) {
        assert_eq!(delivery.attempt, 1, "what was not handed out is no attempt");
        // Deliveries of a closed consumer stay valid.
        stage.ack(delivery).await;
    }
    stage.passed()
}

/// What fetch hands out can be settled: a delivery that was claimed long before it was fetched is not
/// handed out under a lease that is over.
pub async fn what_is_handed_out_is_held<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[]).await?;
    stage.declare("", &["*"]).await;
    stage.publish_many("a.b", 6).await;
    let mut consumer = stage.consumer("").await;
    for round in 0..6 {
        let delivery = take_one(&mut consumer).await;
        stage.ack(&delivery).await;
        if round % 2 == 0 {
            stage.advance(LEASE + Duration::from_secs(1)).await;
        }
    }
    nothing(&mut consumer).await;
    stage.passed()
}

/// Consuming a group that was not declared is an error.
pub async fn an_unknown_group_cannot_be_consumed<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    let refused = stage.broker().consume(name("nobody"), options()).await;
    assert_eq!(refused.map(drop).unwrap_err().code(), Code::GroupNotFound);
    stage.passed()
}

/// After close every call is refused with the name the specification gives, and waits end.
pub async fn after_close_everything_is_refused<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    stage.declare("", &["*"]).await;
    let appended = stage.publish("a.b").await;
    let mut consumer = stage.consumer("").await;
    let delivery = take_one(&mut consumer).await;
    // A group with nothing in flight has no lease whose end would wake its consumer.
    stage.declare("idle", &["never"]).await;
    let mut idle = stage.consumer("idle").await;
    let waiting = tokio::spawn(async move { idle.fetch(1).await });
    tokio::time::sleep(Duration::from_millis(20)).await;
    stage.broker().close().await.unwrap();
    let ended = tokio::time::timeout(DEADLINE, waiting)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(code(ended), Code::EventBusShutdownError);
    stage.broker().close().await.unwrap();
    let broker = stage.broker();
    assert_eq!(
        code(broker.append(vec![event("a.b")]).await),
        Code::EventBusShutdownError
    );
    assert_eq!(
        code(broker.declare(super::stage::spec("x", &["*"])).await),
        Code::EventBusShutdownError
    );
    let consumed = broker.consume(name(""), options()).await;
    assert_eq!(
        consumed.map(drop).unwrap_err().code(),
        Code::EventBusShutdownError
    );
    let late = vec![Settlement::new(delivery.lease, Verdict::Ack)];
    assert_eq!(code(broker.settle(late).await), Code::EventBusShutdownError);
    assert_eq!(code(broker.inspect().await), Code::EventBusShutdownError);
    if stage.offers(&LOG) && stage.offers(&LOOKUP) {
        assert_eq!(code(stage.log().head().await), Code::EventBusShutdownError);
        assert_eq!(
            code(stage.lookup().states(appended.position).await),
            Code::EventBusShutdownError
        );
    }
    if stage.offers(&DEAD_LETTERS) {
        let counted = stage.dead_letters().count(Default::default()).await;
        assert_eq!(code(counted), Code::EventBusShutdownError);
    }
    stage.passed()
}
