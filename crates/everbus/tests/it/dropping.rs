//! Best-effort handlers that drop what fails, and groups that never wanted an event.

use std::time::Duration;

use everbus::core::UNMATCHED;
use everbus::{Code, Criticality, HandlerError, RetryPolicy, Router, to};

use crate::support::{eventually, is_done, on_every_engine, state_in};

async fn fails() -> Result<(), HandlerError> {
    Err(HandlerError::new("no cache today"))
}

// conformance: operations/drop-failed: a best-effort handler may drop what fails for good: it is skipped with its last error as the reason, and is no dead letter; other handlers may not
#[tokio::test]
async fn a_best_effort_handler_may_drop_what_fails() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let policy = RetryPolicy::new()
            .max_retries(1)
            .base_delay(Duration::from_millis(1));
        let route = || to(fails).group("cache").retry(policy).drop_failed();
        let refused = bus
            .mount(Router::new().on("a.b", route()))
            .await
            .unwrap_err();
        assert_eq!(refused.code(), Code::InvalidSetting);
        let route = route().criticality(Criticality::BestEffort);
        bus.mount(Router::new().on("a.b", route)).await.unwrap();
        bus.start().await.unwrap();
        bus.publish(("a.b", 1)).await.unwrap();
        eventually("the event is dropped", || async {
            lab.clock.advance(Duration::from_secs(1));
            is_done(&bus, 1, "cache").await
        })
        .await;
        let state = state_in(&bus, 1, "cache").await.unwrap();
        let reason = state.skipped.unwrap();
        assert!(
            reason.contains("after 2 attempts: no cache today"),
            "{reason}"
        );
        let letters = bus.engine().dead_letters().unwrap();
        assert_eq!(letters.count(Default::default()).await.unwrap(), 0);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: operations/get-unmatched: an event that no subscription of a group matches is not shown as handled by it
#[tokio::test]
async fn an_event_that_a_group_never_wanted_is_told_from_a_handled_one() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let fine = || async {};
        bus.mount(Router::new().on("a.b", fine).group("g"))
            .await
            .unwrap();
        bus.start().await.unwrap();
        bus.publish(("a.b", 1)).await.unwrap();
        let other = bus.publish(("c.d", 1)).await.unwrap();
        other.settled().await.unwrap();
        eventually("the first is handled", || is_done(&bus, 1, "g")).await;
        let skipped = |state: Option<everbus::core::GroupState>| state.unwrap().skipped;
        assert_eq!(skipped(state_in(&bus, 1, "g").await), None);
        let reason = skipped(state_in(&bus, 2, "g").await);
        assert_eq!(reason.as_deref(), Some(UNMATCHED));
        bus.shutdown().await.unwrap();
    })
    .await;
}
