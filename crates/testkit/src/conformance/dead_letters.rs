//! The dead letters: listing, paging, filters, retry and purge.

use std::time::Duration;

use everbus_core::{
    Appended, DeadLetter, DeadLetterFilter, DeadLetterKey, EventId, EventState, PageRequest,
    PurgeBasis, PurgedLetter, Timestamp,
};

use super::needs::{DEAD_LETTERS, LOOKUP, SENT_BACK};
use super::stage::{code, name, nothing, pattern, take, take_one};
use super::{Harness, Outcome, Stage, Time};

const SECOND: Duration = Duration::from_secs(1);

fn all() -> DeadLetterFilter {
    DeadLetterFilter::default()
}

fn keys(letters: &[DeadLetter]) -> Vec<DeadLetterKey> {
    letters.iter().map(DeadLetter::key).collect()
}

/// Lets two groups give up on every event of three kinds, one second apart.
async fn fill<H: Harness>(stage: &Stage<H>, rounds: usize) -> Vec<Appended> {
    stage.declare("billing", &["*"]).await;
    stage.declare("mail", &["*"]).await;
    let mut published = Vec::new();
    for round in 0..rounds {
        let appended = stage.publish(["a.x", "a.y", "b.x"][round % 3]).await;
        for group in ["billing", "mail"] {
            let mut consumer = stage.consumer(group).await;
            let delivery = take_one(&mut consumer).await;
            stage.kill(&delivery).await;
            consumer.close().await.unwrap();
        }
        published.push(appended);
        stage.advance(SECOND).await;
    }
    published
}

/// The list is newest first. Paging by offset and by key give the same list, with each dead letter once.
pub async fn pages_by_offset_and_by_key_agree<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Virtual, &[&DEAD_LETTERS]).await?;
    let published = fill(&stage, 9).await;
    let dead = stage.dead_letters();
    let whole = stage.open_dead_letters().await;
    assert_eq!(whole.len(), 18);
    assert_eq!(dead.count(all()).await.unwrap(), 18);
    let mut expected = Vec::new();
    for appended in published.iter().rev() {
        let position = stage.read_at(appended).await;
        for group in ["billing", "mail"] {
            expected.push(DeadLetterKey {
                position,
                group: name(group),
            });
        }
    }
    assert_eq!(keys(&whole), expected, "newest first, then by group");
    for limit in [1, 4, 7, 18, 100] {
        let mut by_key = Vec::new();
        let mut after = None;
        loop {
            let page = PageRequest {
                limit,
                offset: 0,
                after,
            };
            let page = dead.list(all(), page).await.unwrap();
            assert!(page.items.len() <= limit);
            by_key.extend(page.items);
            after = page.next;
            if after.is_none() {
                break;
            }
            assert!(by_key.len() <= 18, "the pages do not end");
        }
        assert_eq!(keys(&by_key), expected, "pages of {limit} by key");
        let mut by_offset = Vec::new();
        for offset in (0..18).step_by(limit) {
            let page = PageRequest {
                limit,
                offset,
                after: None,
            };
            by_offset.extend(dead.list(all(), page).await.unwrap().items);
        }
        assert_eq!(keys(&by_offset), expected, "pages of {limit} by offset");
    }
    assert_eq!(
        PageRequest::default().limit,
        100,
        "the default of the specification"
    );
    for limit in [0, usize::MAX] {
        let page = PageRequest {
            limit,
            ..PageRequest::default()
        };
        let refused = dead.list(all(), page).await;
        assert_eq!(code(refused), everbus_core::Code::InvalidSetting);
    }
    stage.passed()
}

/// Filters by type, group, event and time select the same for list, count and retry.
pub async fn filters_select<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Virtual, &[&DEAD_LETTERS, &SENT_BACK]).await?;
    let published = fill(&stage, 6).await;
    let dead = stage.dead_letters();
    let cases = [
        (all(), 12),
        (
            DeadLetterFilter {
                pattern: Some(pattern("a.*")),
                ..all()
            },
            8,
        ),
        (
            DeadLetterFilter {
                group: Some(name("mail")),
                ..all()
            },
            6,
        ),
        (
            DeadLetterFilter {
                group: Some(name("nobody")),
                ..all()
            },
            0,
        ),
        (
            DeadLetterFilter {
                id: Some(published[2].id),
                ..all()
            },
            2,
        ),
        (
            DeadLetterFilter {
                id: Some(EventId::new()),
                ..all()
            },
            0,
        ),
        (
            DeadLetterFilter {
                since: Some(published[4].received_at),
                ..all()
            },
            4,
        ),
        (
            DeadLetterFilter {
                until: Some(published[1].received_at),
                ..all()
            },
            4,
        ),
        (
            DeadLetterFilter {
                pattern: Some(pattern("b.x")),
                group: Some(name("billing")),
                since: Some(published[3].received_at),
                until: Some(published[5].received_at),
                ..DeadLetterFilter::default()
            },
            1,
        ),
    ];
    for (filter, expected) in &cases {
        let page = dead
            .list(filter.clone(), PageRequest::default())
            .await
            .unwrap();
        assert_eq!(page.items.len(), *expected, "{filter:?}");
        assert_eq!(
            dead.count(filter.clone()).await.unwrap(),
            *expected as u64,
            "{filter:?}"
        );
    }
    let (last, count) = cases.last().unwrap().clone();
    assert_eq!(dead.retry(last.clone()).await.unwrap(), count as u64);
    assert_eq!(dead.count(last).await.unwrap(), 0);
    assert_eq!(dead.count(all()).await.unwrap(), 11);
    stage.passed()
}

/// A retried dead letter goes back to the group that failed, with a full reset, and to no other.
pub async fn a_retry_goes_to_the_group_that_failed<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Virtual, &[&DEAD_LETTERS, &SENT_BACK]).await?;
    stage.declare("failing", &["*"]).await;
    stage.declare("fine", &["*"]).await;
    let mut fine = stage.consumer("fine").await;
    let appended = stage.dead_letter("failing", "a.x").await;
    let handled = take_one(&mut fine).await;
    stage.ack(&handled).await;
    stage.advance(SECOND).await;
    let only = DeadLetterFilter {
        id: Some(appended.id),
        ..all()
    };
    let dead = stage.dead_letters();
    assert_eq!(dead.retry(only.clone()).await.unwrap(), 1);
    assert_eq!(dead.retry(only).await.unwrap(), 0, "it is open no more");
    if let Some(state) = stage.group_state(appended.position, "failing").await {
        assert_eq!(state.state, EventState::Pending);
        assert_eq!((state.attempts, state.failures.len()), (0, 0));
    }
    assert!(stage.open_dead_letters().await.is_empty());
    assert_eq!(dead.count(all()).await.unwrap(), 0);
    assert_eq!(stage.group_info("failing").await.dead_letters, 0);
    let kept = dead.get(appended.id).await.unwrap();
    assert_eq!(kept.len(), 1, "it is kept");
    assert_eq!(kept[0].retried_at, Some(stage.now()));
    nothing(&mut fine).await;
    let mut failing = stage.consumer("failing").await;
    let again = stage.take_sent_back(&mut failing, &[&appended]).await;
    assert_eq!(
        (again[0].attempt, again[0].failures.len()),
        (1, 0),
        "a fresh set of attempts"
    );
    assert!(again[0].retried, "it is wanted, however old it is");
    stage.ack(&again[0]).await;
    nothing(&mut failing).await;
    stage
        .assert_state(appended.position, "failing", EventState::Done)
        .await;
    stage.passed()
}

/// A retried dead letter that fails again is the same one: attempts add up, the first time stays.
pub async fn a_retried_dead_letter_that_fails_again_is_the_same<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Virtual, &[&DEAD_LETTERS, &SENT_BACK]).await?;
    stage.declare("g", &["*"]).await;
    let appended = stage.publish("a.x").await;
    let mut consumer = stage.consumer("g").await;
    let delivery = take_one(&mut consumer).await;
    stage.fail(&delivery, Duration::ZERO).await;
    let delivery = take_one(&mut consumer).await;
    stage.kill(&delivery).await;
    let first = stage.open_dead_letters().await.remove(0);
    assert_eq!(first.attempts, 2);
    for round in 1..=3u32 {
        stage.advance(10 * SECOND).await;
        assert_eq!(stage.dead_letters().retry(all()).await.unwrap(), 1);
        let came = stage.take_sent_back(&mut consumer, &[&appended]).await;
        assert_eq!(came[0].attempt, 1);
        stage.kill(&came[0]).await;
        let open = stage.open_dead_letters().await;
        assert_eq!(open.len(), 1, "one row per event and group");
        let again = &open[0];
        stage.assert_same(&again.record, appended.id, appended.position);
        assert_eq!(again.attempts, 2 + round, "attempts add up");
        let failures: Vec<u32> = again.failures.iter().map(|f| f.attempt).collect();
        let expected: Vec<u32> = [1, 2].into_iter().chain((0..round).map(|_| 1)).collect();
        assert_eq!(failures, expected, "every failure of all its deaths");
        assert_eq!(again.first_seen_at, first.first_seen_at);
        assert_eq!(again.died_at, stage.now());
        assert_eq!(
            stage.dead_letters().get(appended.id).await.unwrap().len(),
            1
        );
    }
    nothing(&mut consumer).await;
    stage.passed()
}

/// Many dead letters are retried at once, and every one of them comes.
pub async fn many_are_retried_at_once<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&DEAD_LETTERS, &SENT_BACK]).await?;
    stage.declare("g", &["*"]).await;
    let published = stage.publish_many("a.x", 30).await;
    let mut consumer = stage.consumer("g").await;
    for delivery in take(&mut consumer, 30).await {
        stage.kill(&delivery).await;
    }
    assert_eq!(stage.dead_letters().retry(all()).await.unwrap(), 30);
    // Each once, whatever the order.
    let published: Vec<&Appended> = published.iter().collect();
    for delivery in stage.take_sent_back(&mut consumer, &published).await {
        stage.ack(&delivery).await;
    }
    nothing(&mut consumer).await;
    stage.passed()
}

/// Purging is inclusive, goes by creation unless told otherwise, and removes the event if no group needs it.
pub async fn purging_is_inclusive<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Virtual, &[&DEAD_LETTERS]).await?;
    let published = fill(&stage, 4).await;
    let dead = stage.dead_letters();
    let created = |n: usize| published[n].received_at;
    let before = Timestamp::from_micros(created(0).as_micros() - 1);
    assert_eq!(
        dead.purge(before, PurgeBasis::Created, all())
            .await
            .unwrap()
            .dead_letters,
        0
    );
    let one_group = DeadLetterFilter {
        group: Some(name("mail")),
        ..all()
    };
    assert_eq!(
        dead.purge(created(0), PurgeBasis::Created, one_group)
            .await
            .unwrap()
            .dead_letters,
        1
    );
    if stage.offers(&LOOKUP) {
        let kept = stage.lookup().find(published[0].id).await.unwrap();
        assert_eq!(kept.len(), 1, "the other group still has it");
    }
    let purged = dead.purge(created(1), PurgeBasis::Created, all());
    let purged = purged.await.unwrap();
    assert_eq!((purged.dead_letters, purged.events), (3, 2));
    let named = |n: usize, group: &str| PurgedLetter {
        event: published[n].id,
        group: name(group),
    };
    assert_eq!(purged.named.len(), 3);
    for gone in [named(0, "billing"), named(1, "mail"), named(1, "billing")] {
        assert!(purged.named.contains(&gone), "{gone:?} is named");
    }
    assert_eq!(dead.count(all()).await.unwrap(), 4);
    if stage.offers(&LOOKUP) {
        for (n, appended) in published.iter().enumerate() {
            let kept = stage.lookup().find(appended.id).await.unwrap().len();
            assert_eq!(kept, usize::from(n > 1), "event {n}");
        }
    }
    assert!(dead.get(published[0].id).await.unwrap().is_empty());
    let left = stage.open_dead_letters().await;
    let third = stage.read_at(&published[2]).await;
    assert!(left.iter().all(|d| d.record.position >= third));
    let mut consumer = stage.consumer("mail").await;
    nothing(&mut consumer).await;
    stage.passed()
}

/// Purging by time of death is inclusive too and does not look at the creation.
pub async fn purging_by_time_of_death<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Virtual, &[&DEAD_LETTERS]).await?;
    stage.declare("g", &["*"]).await;
    stage.publish_many("a.x", 3).await;
    let mut consumer = stage.consumer("g").await;
    let got = take(&mut consumer, 3).await;
    // They die in the order 2, 0, 1.
    let mut deaths = Vec::new();
    for n in [2, 0, 1] {
        stage.advance(SECOND).await;
        stage.kill(&got[n]).await;
        deaths.push(stage.now());
    }
    let dead = stage.dead_letters();
    let at = |n: usize| deaths[n];
    assert_eq!(
        dead.purge(at(0).minus(SECOND), PurgeBasis::Died, all())
            .await
            .unwrap()
            .dead_letters,
        0
    );
    assert_eq!(
        dead.purge(at(1), PurgeBasis::Died, all())
            .await
            .unwrap()
            .dead_letters,
        2
    );
    let left = stage.open_dead_letters().await;
    assert_eq!(left.len(), 1);
    let kept = &got[1].record;
    stage.assert_same(&left[0].record, kept.event.id(), kept.position);
    assert_eq!(left[0].died_at, at(2));
    stage.passed()
}

/// Purging a dead letter never takes an event another group still owes work on.
pub async fn purging_leaves_what_others_owe<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&DEAD_LETTERS]).await?;
    stage.declare("dead", &["*"]).await;
    stage.declare("slow", &["*"]).await;
    let appended = stage.dead_letter("dead", "a.x").await;
    let now = stage.now();
    assert_eq!(
        stage
            .dead_letters()
            .purge(now, PurgeBasis::Created, all())
            .await
            .unwrap()
            .dead_letters,
        1
    );
    let mut slow = stage.consumer("slow").await;
    let delivery = take_one(&mut slow).await;
    assert_eq!(delivery.record.position, appended.position);
    stage.ack(&delivery).await;
    stage.passed()
}
