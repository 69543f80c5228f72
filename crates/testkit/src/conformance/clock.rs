//! After a clock has jumped ahead, retention by age does not trust it at once.

use std::time::Duration;

use everbus_core::{ClockRecord, Maintenance};

use super::needs::{MAINTENANCE, RESTART};
use super::{Harness, Outcome, Stage, Time};

const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

async fn is_doubted(maintenance: &dyn Maintenance) -> bool {
    maintenance.look_at_clock().await.unwrap().is_some()
}

/// After a jump the clock is in doubt until it has run without a jump for a day, also across a restart.
pub async fn a_clock_that_leaps_is_doubted<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Virtual, &[&MAINTENANCE]).await?;
    stage.publish("a").await;
    let before = stage.now();
    {
        let maintenance = stage.engine().maintenance().unwrap();
        assert!(!is_doubted(maintenance).await);
        stage.advance(30 * DAY).await;
        // Reading the holdings reports the doubt, and changes nothing.
        let held = maintenance.holdings().await.unwrap();
        assert_eq!(held.clock.unwrap().before, before);
        stage.publish("a").await;
        let doubt = maintenance.look_at_clock().await.unwrap().unwrap();
        assert_eq!((doubt.before, doubt.found), (before, stage.now()));
        assert_eq!(doubt.left(), ClockRecord::PROOF);
    }
    if stage.offers(&RESTART) {
        stage.restart().await;
    }
    let maintenance = stage.engine().maintenance().unwrap();
    for hour in 1..24 {
        stage.advance(HOUR).await;
        assert!(is_doubted(maintenance).await, "after {hour} hours");
        let held = maintenance.holdings().await.unwrap();
        assert_eq!(held.clock.unwrap().left(), (24 - hour) * HOUR);
    }
    let report = maintenance.check().await.unwrap();
    let told = report.findings.iter().find(|f| f.check == "clock").unwrap();
    assert!(told.ok && told.detail.contains("in doubt"), "{told:?}");
    stage.advance(HOUR).await;
    assert!(!is_doubted(maintenance).await);
    assert_eq!(maintenance.holdings().await.unwrap().clock, None);
    // Nights and weekends are not jumps.
    stage.advance(ClockRecord::LEAP).await;
    assert!(!is_doubted(maintenance).await);
    stage.passed()
}

/// A doubt ends when the clock is put right, or when an operator says that it is right.
pub async fn a_clock_put_right_is_believed<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Virtual, &[&MAINTENANCE]).await?;
    let maintenance = stage.engine().maintenance().unwrap();
    let right = stage.now();
    assert!(!is_doubted(maintenance).await, "there is nothing yet");
    stage.advance(30 * DAY).await;
    assert!(is_doubted(maintenance).await);
    stage.clock.set(right.plus(HOUR));
    assert!(!is_doubted(maintenance).await);
    stage.advance(30 * DAY).await;
    assert!(is_doubted(maintenance).await);
    maintenance.trust_clock().await.unwrap();
    assert!(!is_doubted(maintenance).await);
    stage.advance(30 * DAY).await;
    assert!(is_doubted(maintenance).await, "that was about another leap");
    stage.passed()
}

/// At its first check, a store compares the clock with its newest event.
pub async fn the_first_look_goes_by_the_log<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Virtual, &[&MAINTENANCE]).await?;
    let maintenance = stage.engine().maintenance().unwrap();
    stage.publish("a").await;
    stage.advance(DAY).await;
    let newest = stage.publish("a").await.received_at;
    stage.advance(4 * DAY).await;
    let doubt = maintenance.look_at_clock().await.unwrap().unwrap();
    assert_eq!(doubt.before, newest);
    stage.passed()
}
