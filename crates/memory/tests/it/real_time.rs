//! The suite on a clock that cannot be moved, as a server's. A few scenarios, since they really wait.

use std::sync::Arc;

use everbus_core::{Clock, Engine, SystemClock};
use everbus_testkit::conformance::{Harness, claims, groups, lapsing, settling};

#[derive(Debug)]
struct RealTime;

impl Harness for RealTime {
    async fn open(&self, _: Arc<dyn Clock>) -> Engine {
        let clock = Arc::new(SystemClock);
        everbus_memory::open(everbus_memory::Options { clock })
    }

    fn survives_restart(&self) -> bool {
        false
    }

    fn claims_ahead(&self) -> bool {
        false
    }

    fn virtual_time(&self) -> bool {
        false
    }
}

// conformance: contract/suite-real-time: on an engine whose clock cannot be moved the suite waits for seconds, and what needs more is not offered
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn seconds_are_waited_for_and_days_are_not_offered() {
    let (late, dead, time) = tokio::join!(
        settling::a_late_settlement_is_refused(RealTime),
        claims::a_lost_lease_makes_no_dead_letter(RealTime),
        groups::start_from_a_time(RealTime),
    );
    for outcome in [late, dead, time] {
        assert_eq!(outcome.unwrap().to_string(), "yes");
    }
    let days = lapsing::dead_letters_go_long_after_their_death(RealTime).await;
    assert_eq!(
        days.unwrap_err().to_string(),
        "no: its clock cannot be moved"
    );
}

// conformance: contract/suite-time-declared: a scenario that lets more time pass than it declared fails on every engine
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn time_that_was_not_declared_does_not_pass() {
    use crate::conformance::InMemory;
    use everbus_testkit::conformance::{Stage, Time};
    use std::time::Duration;

    for (time, seconds) in [(Time::Still, 1), (Time::Short, 21)] {
        let scenario = tokio::spawn(async move {
            let stage = Stage::open(InMemory, time, &[]).await.unwrap();
            stage.advance(Duration::from_secs(seconds)).await;
        });
        let ended = scenario.await;
        assert!(ended.is_err_and(|e| e.is_panic()), "{time:?}");
    }
}
