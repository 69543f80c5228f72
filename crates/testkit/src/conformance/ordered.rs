//! Groups with order by key: strictly one after another within a key, no order between keys.

use std::collections::HashMap;
use std::time::Duration;

use everbus_core::{Delivery, Event, GroupSpec, Verdict};

use super::needs::{DEAD_LETTERS, DELAY, EXACT_ATTEMPTS, REDELIVER};
use super::stage::{DEADLINE, LEASE, handling, nothing, options, spec, take_one};
use super::{Harness, Outcome, Stage, Time};
use crate::model::Random;

const SECOND: Duration = Duration::from_secs(1);

fn keyed(key: &str, step: usize) -> Event {
    let builder = Event::builder("step.done").json(&step);
    let builder = if key.is_empty() {
        builder
    } else {
        builder.key(key)
    };
    builder.build().unwrap()
}

async fn declare_ordered<H: Harness>(stage: &Stage<H>) {
    let ordered = GroupSpec {
        ordered: true,
        ..spec("ordered", &["*"])
    };
    stage.broker().declare(ordered).await.unwrap();
}

/// The next event of a key waits while an earlier one is in flight or waits for its retry; other
/// keys go on; a dead letter blocks no longer.
pub async fn the_same_key_is_strictly_sequential<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[]).await?;
    declare_ordered(&stage).await;
    let mut at = Vec::new();
    for (key, step) in [("a", 1), ("a", 2), ("b", 1), ("a", 3), ("", 1), ("", 2)] {
        at.push(stage.append(keyed(key, step)).await.position);
    }
    let mut consumer = stage.consumer("ordered").await;
    // The first of each key, and those without.
    let heads = [at[0], at[2], at[4], at[5]];
    let got = stage.take_these(&mut consumer, &heads).await;
    nothing(&mut consumer).await;

    let delayed = stage.offers(&DELAY);
    let after = if delayed { 4 * SECOND } else { Duration::ZERO };
    stage.fail(&got[0], after).await;
    stage.ack(&got[1]).await;
    stage.ack(&got[2]).await;
    stage.ack(&got[3]).await;
    let mut retried = None;
    if delayed {
        nothing(&mut consumer).await;
    } else {
        retried = Some(take_one(&mut consumer).await);
    }
    let b2 = stage.append(keyed("b", 2)).await;
    let next = take_one(&mut consumer).await;
    assert_eq!(next.record.position, b2.position, "another key goes on");
    stage.ack(&next).await;

    let retried = match retried {
        Some(retried) => retried,
        None => {
            stage.advance(5 * SECOND).await;
            take_one(&mut consumer).await
        }
    };
    assert_eq!((retried.record.position, retried.attempt), (at[0], 2));
    nothing(&mut consumer).await;
    stage.kill(&retried).await;
    let second = take_one(&mut consumer).await;
    assert_eq!(
        second.record.position, at[1],
        "a dead letter blocks no longer"
    );
    let after = Duration::ZERO;
    stage.end(&second, Verdict::Release { after }).await;
    let second = take_one(&mut consumer).await;
    assert_eq!(second.record.position, at[1], "a released one stays first");
    nothing(&mut consumer).await;
    stage.ack(&second).await;
    let third = take_one(&mut consumer).await;
    assert_eq!(third.record.position, at[3]);
    stage.ack(&third).await;
    nothing(&mut consumer).await;
    stage.passed()
}

/// A retried dead letter goes before the later events of its key, however the event in flight ends.
pub async fn a_retried_dead_letter_goes_before_its_key<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&DEAD_LETTERS, &REDELIVER]).await?;
    declare_ordered(&stage).await;
    let mut at = Vec::new();
    for step in 0..3 {
        at.push(stage.append(keyed("a", step)).await.position);
    }
    let mut consumer = stage.consumer("ordered").await;
    let after = Duration::ZERO;
    // An engine that claims ahead may have claimed the second event before the first one is retried.
    let rounds = if stage.harness().claims_ahead() { 2 } else { 3 };
    for round in 0..rounds {
        let first = take_one(&mut consumer).await;
        assert_eq!(first.record.position, at[0]);
        stage.kill(&first).await;
        let second = take_one(&mut consumer).await;
        assert_eq!(second.record.position, at[1]);
        if round == 2 {
            stage.end(&second, Verdict::Release { after }).await;
            // Another consumer fetches and has no handler. This shows that the second event is ready.
            let none = handling(Vec::new());
            let mut other = stage.consumer_with("ordered", none).await;
            nothing(&mut other).await;
        }
        let retried = stage.dead_letters().retry(Default::default()).await;
        assert_eq!(retried.unwrap(), 1);
        match round {
            0 => stage.fail(&second, after).await,
            1 => stage
                .settle(&second, Verdict::Release { after })
                .await
                .unwrap(),
            _ => {}
        }
    }
    for expected in at {
        let next = take_one(&mut consumer).await;
        assert_eq!(next.record.position, expected);
        nothing(&mut consumer).await;
        stage.ack(&next).await;
    }
    stage.passed()
}

/// The entity is the key where none is given, and the order holds between competing consumers.
pub async fn the_key_holds_between_consumers<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[]).await?;
    declare_ordered(&stage).await;
    let about = |id: &str| {
        let builder = Event::builder("task.moved").entity("TASK", id);
        builder.build().unwrap()
    };
    let first = stage.append(about("1")).await;
    let second = stage.append(about("1")).await;
    let mut one = stage.consumer("ordered").await;
    let held = take_one(&mut one).await;
    assert_eq!(held.record.position, first.position);
    let mut two = stage.consumer("ordered").await;
    nothing(&mut two).await;
    one.close().await.unwrap();
    nothing(&mut two).await;
    // The lease ends: the first comes again before the second.
    stage.advance(LEASE + SECOND).await;
    let again = take_one(&mut two).await;
    assert_eq!(again.record.position, first.position);
    if stage.offers(&EXACT_ATTEMPTS) {
        assert_eq!(again.attempt, 2);
    }
    nothing(&mut two).await;
    stage.ack(&again).await;
    let next = take_one(&mut two).await;
    assert_eq!(next.record.position, second.position);
    stage.ack(&next).await;
    stage.passed()
}

/// Under random verdicts and several consumers every key is still handled in order, and all of it.
pub async fn random_work_keeps_every_key_in_order<H: Harness>(harness: H) -> Outcome {
    const KEYS: usize = 5;
    const STEPS: usize = 20;
    let seed = Random::seed_from_env().unwrap_or(11);
    let mut random = Random::new(seed);
    let stage = Stage::open(harness, Time::Virtual, &[]).await?;
    declare_ordered(&stage).await;
    let mut batch = Vec::new();
    for step in 0..STEPS {
        batch.extend((0..KEYS).map(|key| keyed(&format!("k{key}"), step)));
    }
    stage.broker().append(batch).await.unwrap();
    let mut consumers = Vec::new();
    for _ in 0..3 {
        let options = options().prefetch(4);
        consumers.push(stage.consumer_with("ordered", options).await);
    }
    let mut next: HashMap<String, usize> = HashMap::new();
    let mut held: Vec<Delivery> = Vec::new();
    let mut handled = 0;
    let work = async {
        while handled < KEYS * STEPS {
            let at = random.below(consumers.len());
            let patience = Duration::from_millis(if held.is_empty() { 30 } else { 1 });
            let fetched = tokio::time::timeout(patience, consumers[at].fetch(3)).await;
            if let Ok(batch) = fetched {
                for delivery in batch.unwrap() {
                    let key = delivery.record.event.ordering_key().unwrap().into_owned();
                    let busy = held
                        .iter()
                        .any(|d| d.record.event.ordering_key().unwrap() == key);
                    assert!(!busy, "seed {seed}: {key} twice in flight");
                    let step: usize = delivery.record.event.json().unwrap();
                    let expected = *next.entry(key.clone()).or_default();
                    assert_eq!(step, expected, "seed {seed}: {key} out of order");
                    held.push(delivery);
                }
            }
            if held.is_empty() || random.one_in(3) {
                stage.advance(SECOND / 10).await;
                continue;
            }
            let delivery = held.swap_remove(random.below(held.len()));
            let key = delivery.record.event.ordering_key().unwrap().into_owned();
            match random.below(4) {
                0 => stage.fail(&delivery, SECOND / 20).await,
                1 => {
                    let after = Duration::ZERO;
                    stage.end(&delivery, Verdict::Release { after }).await;
                }
                verdict => {
                    if verdict == 2 {
                        stage.kill(&delivery).await;
                    } else {
                        stage.ack(&delivery).await;
                    }
                    handled += 1;
                    *next.entry(key).or_default() += 1;
                }
            }
        }
    };
    let in_time = tokio::time::timeout(DEADLINE, work).await;
    assert!(
        in_time.is_ok(),
        "seed {seed}: {handled} of {} handled",
        KEYS * STEPS
    );
    stage.passed()
}
