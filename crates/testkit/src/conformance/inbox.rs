//! The inbox: an event that a group has handled is recorded, from the ack on and never before.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Code, Deduplication, Delivery, Event, EventId, EventKey, EventState, Inbox, Recorded,
    Retention, Settlement, Timestamp, Verdict,
};

use super::needs::{
    ATOMIC_FOLLOW_UPS, DEDUPLICATION, FENCING, INBOX, LOG_ORDER, LOOKUP, MAINTENANCE, OWN_LOG,
    RESTART,
};
use super::stage::{LEASE, code, event, following, name, nothing, take, take_one};
use super::{Harness, Outcome, Stage, Time};

const SECOND: Duration = Duration::from_secs(1);

fn inbox<H: Harness>(stage: &Stage<H>) -> &dyn Inbox {
    stage.engine().inbox().unwrap()
}

fn now<H: Harness>(stage: &Stage<H>) -> Timestamp {
    stage.now()
}

/// Which of these events a group has handled.
async fn handled<H: Harness>(stage: &Stage<H>, group: &str, events: &[&Delivery]) -> Vec<bool> {
    let events: Vec<Arc<Recorded>> = events.iter().map(|d| d.record.clone()).collect();
    inbox(stage).handled(name(group), events).await.unwrap()
}

/// An ack with an inbox record.
fn on_record(delivery: &Delivery) -> Settlement {
    let mut settlement = Settlement::new(delivery.lease.clone(), Verdict::Ack);
    settlement.inbox = true;
    settlement
}

async fn ack_on_record<H: Harness>(stage: &Stage<H>, delivery: &Delivery) {
    stage.settle_with(on_record(delivery)).await.unwrap();
}

/// Removes every event that no group needs from the log; its ids are free again, but the inbox still knows
/// them.
async fn empty_the_log<H: Harness>(stage: &Stage<H>) {
    let retention = Retention {
        max_len: Some(0),
        ..Retention::default()
    };
    let maintenance = stage.engine().maintenance().unwrap();
    assert_eq!(maintenance.prune(retention).await.unwrap().kept, 0);
}

fn event_of(id: EventId, tenant: Option<&str>) -> Event {
    let builder = Event::builder("order.placed").id(id).payload("{}");
    match tenant {
        Some(tenant) => builder.tenant(tenant),
        None => builder,
    }
    .build()
    .unwrap()
}

/// An event acked with a record is known as handled, by that group alone, also after a restart.
pub async fn an_ack_on_record_is_remembered<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Still, &[&INBOX]).await?;
    stage.declare("", &["*"]).await;
    stage.declare("billing", &["*"]).await;
    stage.publish_many("order.placed", 3).await;
    let mut consumer = stage.consumer("").await;
    let got = take(&mut consumer, 3).await;
    let all: Vec<&Delivery> = got.iter().collect();
    assert_eq!(handled(&stage, "", &all).await, [false, false, false]);
    ack_on_record(&stage, &got[1]).await;
    stage.ack(&got[2]).await;
    let expected = [false, true, false];
    assert_eq!(handled(&stage, "", &all).await, expected);
    assert_eq!(handled(&stage, "billing", &all).await, [false; 3]);
    assert_eq!(handled(&stage, "nobody", &all).await, [false; 3]);
    assert!(handled(&stage, "", &[]).await.is_empty());
    if stage.offers(&RESTART) {
        drop(consumer);
        stage.restart().await;
        assert_eq!(handled(&stage, "", &all).await, expected);
    }
    stage.passed()
}

/// Only an applied ack leaves a record: not a failure, a skip, a release, a dead-lettering, nor an ack whose
/// lease was lost.
pub async fn nothing_but_an_ack_is_recorded<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[&INBOX]).await?;
    stage.declare("", &["*"]).await;
    stage.publish_many("order.placed", 5).await;
    let mut consumer = stage.consumer("").await;
    let got = take(&mut consumer, 5).await;
    let verdicts = [
        Verdict::Retry {
            after: 100 * SECOND,
            failure: stage.failure(&got[0]),
        },
        Verdict::Skip {
            reason: "stale".into(),
        },
        Verdict::Release {
            after: 100 * SECOND,
        },
        Verdict::Dead {
            failure: Some(stage.failure(&got[3])),
        },
    ];
    for (delivery, verdict) in got.iter().zip(verdicts) {
        let mut settlement = on_record(delivery);
        settlement.verdict = verdict;
        stage.settle_with(settlement).await.unwrap();
    }
    stage.advance(LEASE + SECOND).await;
    if stage.offers(&FENCING) {
        let late = stage.settle_with(on_record(&got[4])).await;
        assert_eq!(code(late), Code::LeaseLost);
    }
    let all: Vec<&Delivery> = got.iter().collect();
    assert_eq!(handled(&stage, "", &all).await, [false; 5]);
    stage.passed()
}

/// An event that was handled before is acked; its follow-ups are not appended twice.
pub async fn what_was_handled_has_no_effect_again<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&INBOX, &MAINTENANCE]).await?;
    stage.declare("", &["order.*"]).await;
    let id = EventId::new();
    let follow_up = || Event::builder("mail.sent").payload("{}").build().unwrap();
    let mut followed = Vec::new();
    for _ in 0..2 {
        let appended = stage.append(event_of(id, None)).await;
        assert!(!appended.duplicate, "it is new to the log");
        let mut consumer = stage.consumer("").await;
        let delivery = take_one(&mut consumer).await;
        let follow_up = follow_up();
        followed.push(follow_up.id());
        stage
            .settle_with(following(on_record(&delivery), vec![follow_up]))
            .await
            .unwrap();
        stage
            .assert_state(appended.position, "", EventState::Done)
            .await;
        nothing(&mut consumer).await;
        consumer.close().await.unwrap();
        if stage.offers(&LOOKUP) && stage.offers(&ATOMIC_FOLLOW_UPS) {
            let found = stage
                .lookup()
                .find(followed[followed.len() - 1])
                .await
                .unwrap();
            let expected = usize::from(followed.len() == 1);
            assert_eq!(found.len(), expected, "round {}", followed.len());
        }
        empty_the_log(&stage).await;
        // A broker that knows ids for a while keeps knowing them when copies are removed.
        let dedup = stage.capabilities().deduplication;
        if matches!(dedup, Deduplication::Window(_)) && !stage.offers(&OWN_LOG) {
            break;
        }
    }
    stage.passed()
}

/// The same id in two tenants is two events.
pub async fn tenants_do_not_share_records<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&INBOX]).await?;
    stage.declare("", &["*"]).await;
    let id = EventId::new();
    for tenant in [None, Some("a"), Some("b")] {
        stage.append(event_of(id, tenant)).await;
    }
    let mut consumer = stage.consumer("").await;
    let got = take(&mut consumer, 3).await;
    let all: Vec<&Delivery> = got.iter().collect();
    ack_on_record(&stage, &got[1]).await;
    assert_eq!(handled(&stage, "", &all).await, [false, true, false]);
    let follow_up = event("order.billed");
    let followed = follow_up.id();
    stage
        .settle_with(following(on_record(&got[2]), vec![follow_up]))
        .await
        .unwrap();
    assert_eq!(handled(&stage, "", &all).await, [false, true, true]);
    let next = take_one(&mut consumer).await;
    assert_eq!(
        next.record.event.id(),
        followed,
        "it was handled for the first time"
    );
    stage.passed()
}

/// A group that is removed and created again has handled nothing.
pub async fn a_group_made_anew_has_handled_nothing<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[&INBOX]).await?;
    stage.declare("billing", &["*"]).await;
    stage.publish("order.placed").await;
    let mut consumer = stage.consumer("billing").await;
    let delivery = take_one(&mut consumer).await;
    ack_on_record(&stage, &delivery).await;
    consumer.close().await.unwrap();
    stage.broker().remove_group(name("billing")).await.unwrap();
    assert_eq!(handled(&stage, "billing", &[&delivery]).await, [false]);
    stage.declare("billing", &["*"]).await;
    let mut consumer = stage.consumer("billing").await;
    let again = take_one(&mut consumer).await;
    assert_eq!(handled(&stage, "billing", &[&again]).await, [false]);
    ack_on_record(&stage, &again).await;
    assert_eq!(handled(&stage, "billing", &[&again]).await, [true]);
    // Records of the old group go with the next sweep; those of the new one stay.
    let past = now(&stage).minus(3600 * SECOND);
    inbox(&stage).forget(past).await.unwrap();
    assert_eq!(handled(&stage, "billing", &[&again]).await, [true]);
    assert_eq!(inbox(&stage).forget(past).await.unwrap(), 0);
    stage.passed()
}

/// Records older than a time are forgotten, younger ones stay.
pub async fn old_records_are_forgotten<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Short, &[&INBOX]).await?;
    stage.declare("", &["*"]).await;
    stage.publish_many("order.placed", 12).await;
    let mut consumer = stage.consumer("").await;
    let got = take(&mut consumer, 12).await;
    let all: Vec<&Delivery> = got.iter().collect();
    for delivery in &got[..7] {
        ack_on_record(&stage, delivery).await;
    }
    stage.advance(2 * SECOND).await;
    let between = now(&stage).minus(SECOND);
    for delivery in &got[7..] {
        ack_on_record(&stage, delivery).await;
    }
    assert_eq!(inbox(&stage).forget(between).await.unwrap(), 7);
    let mut expected = [false; 12];
    expected[7..].fill(true);
    assert_eq!(handled(&stage, "", &all).await, expected);
    assert_eq!(inbox(&stage).forget(between).await.unwrap(), 0);
    stage.passed()
}

/// A settlement that is refused because of its follow-ups leaves no record, and the lease is held.
pub async fn a_refused_settlement_leaves_no_record<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(
        harness,
        Time::Still,
        &[&INBOX, &ATOMIC_FOLLOW_UPS, &DEDUPLICATION],
    )
    .await?;
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
    let first = Event::builder("mail.drafted")
        .payload("{}")
        .build()
        .unwrap();
    let first_id = first.id();
    let refused = stage
        .settle_with(following(on_record(&delivery), vec![first, other_body]))
        .await;
    assert_eq!(code(refused), Code::IdReused);
    assert_eq!(handled(&stage, "", &[&delivery]).await, [false]);
    if stage.offers(&LOOKUP) {
        assert!(stage.lookup().find(first_id).await.unwrap().is_empty());
    }
    ack_on_record(&stage, &delivery).await;
    assert_eq!(handled(&stage, "", &[&delivery]).await, [true]);
    stage.passed()
}

/// After a crash an event is recorded exactly if it was acked: the others come again, and do not count as
/// duplicates.
pub async fn a_record_and_its_ack_survive_together<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Still, &[&INBOX, &RESTART]).await?;
    stage.declare("", &["order.*"]).await;
    stage.publish_many("order.placed", 4).await;
    let mut consumer = stage.consumer("").await;
    let got = take(&mut consumer, 4).await;
    ack_on_record(&stage, &got[0]).await;
    ack_on_record(&stage, &got[2]).await;
    drop(consumer);
    stage.crash().await;
    let all: Vec<&Delivery> = got.iter().collect();
    assert_eq!(handled(&stage, "", &all).await, [true, false, true, false]);
    let mut consumer = stage.consumer("").await;
    let mut lost = vec![got[1].record.position, got[3].record.position];
    let in_order = stage.offers(&LOG_ORDER);
    while !lost.is_empty() {
        let again = take_one(&mut consumer).await;
        let at = lost.iter().position(|at| *at == again.record.position);
        let at = at.expect("one of those that were not acked");
        assert!(at == 0 || !in_order, "in the order of the log");
        lost.remove(at);
        assert_eq!(handled(&stage, "", &[&again]).await, [false]);
        let follow_up = Event::builder("mail.sent").payload("{}").build().unwrap();
        let followed = EventKey::of(&follow_up);
        stage
            .settle_with(following(on_record(&again), vec![follow_up]))
            .await
            .unwrap();
        if stage.offers(&LOOKUP) {
            stage.copied(&followed).await;
            let found = stage.lookup().find(followed.id).await.unwrap();
            assert_eq!(found.len(), 1, "its effect happened, once");
        }
    }
    nothing(&mut consumer).await;
    stage.passed()
}
