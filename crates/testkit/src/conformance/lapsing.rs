//! Dead letters that are removed by age: their events stay, and for groups that never handled them a reason
//! is recorded.

use std::time::Duration;

use everbus_core::{
    DeadLetterFilter, Event, EventState, LETTER_PURGED, Position, PurgeBasis, Redelivery,
    Retention, StreamAge,
};

use super::needs::{DEAD_LETTERS, LOOKUP, MAINTENANCE, OWED_IS_KEPT, RESTART, SETTLED};
use super::retention::foretold;
use super::stage::{name, nothing, pattern, take_one};
use super::{Harness, Outcome, Stage, Time};

const SECOND: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(24 * 3600);
const KEPT: Option<&str> = Some("its dead letter was kept for 30 days");

/// Why a group is done with an event without having handled it.
pub(super) async fn skipped<H: Harness>(
    stage: &Stage<H>,
    position: Position,
    group: &str,
) -> Option<String> {
    let state = stage.group_state(position, group).await.unwrap();
    assert_eq!(state.state, EventState::Done, "event {position} in {group}");
    state.skipped
}

/// A dead letter is removed this long after its death. Its event stays. A group that never handled it has
/// skipped it, with the reason recorded; for a retried dead letter nothing is recorded.
pub async fn dead_letters_go_long_after_their_death<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(
        harness,
        Time::Virtual,
        &[&MAINTENANCE, &DEAD_LETTERS, &LOOKUP, &OWED_IS_KEPT],
    )
    .await?;
    let maintenance = stage.engine().maintenance().unwrap();
    stage
        .declare("g", &["alone", "retried", "shared", "again"])
        .await;
    stage.declare("h", &["young"]).await;
    let alone = stage.dead_letter("g", "alone").await;
    let retried = stage.dead_letter("g", "retried").await;
    stage.declare("late", &["shared"]).await;
    let shared = stage.dead_letter("g", "shared").await;
    let again = stage.dead_letter("g", "again").await;
    let of = |id| DeadLetterFilter {
        id: Some(id),
        ..DeadLetterFilter::default()
    };
    assert_eq!(stage.dead_letters().retry(of(retried.id)).await.unwrap(), 1);
    let mut consumer = stage.consumer("g").await;
    stage.ack(&take_one(&mut consumer).await).await;
    // This one is retried and waits again when its time comes, so it stays.
    assert_eq!(stage.dead_letters().retry(of(again.id)).await.unwrap(), 1);
    stage.fail(&take_one(&mut consumer).await, 100 * DAY).await;
    let standard = Retention::standard();
    stage.advance(30 * DAY - SECOND).await;
    let none = foretold(maintenance, &standard).await;
    assert_eq!((none.removed, none.dead_letters), (0, 0));
    let young = stage.dead_letter("h", "young").await;
    stage.advance(2 * SECOND).await;
    let pruned = foretold(maintenance, &standard).await;
    assert_eq!((pruned.removed, pruned.dead_letters), (0, 3));
    for kept in [&alone, &retried, &shared, &again, &young] {
        assert_eq!(stage.lookup().find(kept.id).await.unwrap().len(), 1);
    }
    for (event, reason) in [(&alone, KEPT), (&shared, KEPT), (&retried, None)] {
        let recorded = skipped(&stage, event.position, "g").await;
        assert_eq!(recorded.as_deref(), reason);
    }
    if stage.offers(&SETTLED) {
        let settled = stage.engine().settled().unwrap();
        let outcome = settled.settled(alone.position, SECOND).await.unwrap();
        assert!(outcome.dead_lettered.is_empty());
    }
    stage
        .assert_state(shared.position, "late", EventState::Pending)
        .await;
    let open = stage.open_dead_letters().await;
    assert_eq!(open.len(), 1);
    assert_eq!(open[0].record.event.id(), young.id);
    let kept = stage.dead_letters().get(again.id).await.unwrap();
    assert_eq!(kept.len(), 1, "its retry is under way");
    // With the age "never", no dead letter is removed.
    let never = Retention {
        dead_letters: None,
        ..Retention::standard()
    };
    stage.advance(1000 * DAY).await;
    let none = foretold(maintenance, &never).await;
    assert_eq!((none.removed, none.dead_letters), (0, 0));
    // An event skipped for that reason can be delivered again, and is then handled.
    let redeliver = stage.engine().redeliver().unwrap();
    let answer = redeliver.redeliver(name("g"), vec![alone.position]);
    assert_eq!(answer.await.unwrap(), [Redelivery::Queued]);
    for _ in 0..2 {
        // The other one is what was retried, after its hundred days.
        stage.ack(&take_one(&mut consumer).await).await;
    }
    assert_eq!(skipped(&stage, alone.position, "g").await, None);
    assert!(maintenance.check().await.unwrap().is_ok());
    stage.passed()
}

/// An event is removed by the age of its stream or by its expiry time. A dead letter keeps its event only as
/// long as the dead letter itself is kept: one run may remove both.
pub async fn dead_letters_hold_their_events_no_longer<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(
        harness,
        Time::Virtual,
        &[&MAINTENANCE, &DEAD_LETTERS, &LOOKUP, &OWED_IS_KEPT],
    )
    .await?;
    stage.declare("g", &["short", "ever", "ttl"]).await;
    stage.declare("h", &["short"]).await;
    let short = stage.dead_letter("g", "short").await;
    let ever = stage.dead_letter("g", "ever").await;
    let ttl = Event::builder("ttl").occurred_at(stage.now());
    let ttl = stage.append(ttl.ttl(DAY).build().unwrap()).await;
    let mut consumer = stage.consumer("g").await;
    stage.kill(&take_one(&mut consumer).await).await;
    let mut other = stage.consumer("h").await;
    stage.ack(&take_one(&mut other).await).await;
    drop((consumer, other));
    let retention = Retention {
        streams: vec![StreamAge {
            types: pattern("short"),
            max_age: Some(10 * DAY),
        }],
        ..Retention::standard()
    };
    stage.advance(29 * DAY).await;
    let maintenance = stage.engine().maintenance().unwrap();
    let none = foretold(maintenance, &retention).await;
    assert_eq!((none.removed, none.kept, none.dead_letters), (0, 2, 0));
    stage.advance(2 * DAY).await;
    let done = foretold(maintenance, &retention).await;
    assert_eq!((done.removed, done.kept, done.dead_letters), (2, 0, 3));
    for gone in [&short, &ttl] {
        assert!(stage.lookup().find(gone.id).await.unwrap().is_empty());
    }
    let none = foretold(maintenance, &retention).await;
    assert_eq!((none.removed, none.kept, none.dead_letters), (0, 0, 0));
    if stage.offers(&RESTART) {
        stage.restart().await;
    }
    let reason = skipped(&stage, ever.position, "g").await;
    assert_eq!(reason.as_deref(), KEPT);
    let mut consumer = stage.consumer("g").await;
    nothing(&mut consumer).await;
    consumer.close().await.unwrap();
    // A purge while another group needs the event is recorded as well.
    let shared = stage.dead_letter("g", "short").await;
    stage.advance(SECOND).await;
    let purge =
        stage
            .dead_letters()
            .purge(stage.now(), PurgeBasis::Died, DeadLetterFilter::default());
    let purged = purge.await.unwrap();
    assert_eq!((purged.dead_letters, purged.events), (1, 0));
    let reason = skipped(&stage, shared.position, "g").await;
    assert_eq!(reason.as_deref(), Some(LETTER_PURGED));
    stage
        .assert_state(shared.position, "h", EventState::Pending)
        .await;
    let maintenance = stage.engine().maintenance().unwrap();
    assert!(maintenance.check().await.unwrap().is_ok());
    stage.passed()
}
