//! What becomes of events that are not critical while the breaker is open.

use everbus::{BreakerPolicy, Bus, Criticality, FailureKind, Router, to};

use super::{Dependency, OPEN_FOR, alerts, call, closed, opened};
use crate::handlers::answers::skip_reason;
use crate::logs::lines_about;
use crate::support::{
    Lab, counted, eventually, given_up, handled, is_done, on_every_durable_engine, on_every_engine,
    published,
};

/// A group of this criticality whose breaker has just been opened by one failure.
async fn open(lab: &Lab, criticality: Criticality) -> (Bus, Dependency) {
    let bus = lab.open().await;
    let dependency = Dependency::default();
    let route = to(call)
        .breaker(BreakerPolicy::default().fail_max(1))
        .depends_on("mail")
        .criticality(criticality);
    let router = Router::new().on("a", route).group("g").concurrency(1);
    bus.mount(router.with_state(dependency.clone()))
        .await
        .unwrap();
    bus.start().await.unwrap();
    bus.publish(("a", 0)).await.unwrap();
    opened(&bus).await;
    (bus, dependency)
}

// conformance: framework/criticality-standard: a standard event goes to the dead letters for later replay; alert on warning level.
// conformance: handlers/breaker-standard: the dead letter says that the breaker was open; the handler does not run.
#[tokio::test]
async fn a_standard_event_is_dead_lettered_for_later() {
    on_every_engine(|lab| async move {
        let (bus, dependency) = open(&lab, Criticality::Standard).await;
        let letter = given_up(&bus, ("a", 7)).await;
        assert_eq!(letter.failures.len(), 1);
        assert_eq!(letter.failures[0].kind, FailureKind::Rejected);
        assert_eq!(letter.attempts, 0, "a rejection is no attempt");
        assert_eq!(letter.handler.as_deref(), Some("a"));
        assert!(letter.last_error().contains("\"mail\""), "{letter:?}");
        assert!(dependency.attempts_for(7).is_empty());
        let alert = &alerts(&bus, "system.circuit_opened", 1).await[0];
        assert_eq!(alert["dependency"], "mail");
        assert_eq!(alert["severity"], "warning");
        assert_eq!(alert["criticality"], "standard");
        let stats = counted(&bus).await;
        let of_a = &stats.types["a"];
        assert_eq!((of_a.breaker_rejections, of_a.dead_lettered), (1, 1));
        assert_eq!(of_a.failed, 1, "a rejection is no failed attempt");

        dependency.works(true);
        lab.clock.advance(OPEN_FOR);
        closed(&bus).await;
        let id = letter.event().id();
        assert_eq!(bus.dead_letters().retry(id).await.unwrap(), 1);
        eventually("it is handled after all", || async {
            is_done(&bus, letter.record.position.place(), "g").await
        })
        .await;
        assert_eq!(dependency.attempts_for(7).len(), 1);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: framework/criticality-best-effort: a best-effort event is acknowledged without being processed, and the skip is logged.
// conformance: handlers/breaker-best-effort: it is counted as skipped.
#[tokio::test]
async fn a_best_effort_event_is_skipped_and_counted() {
    on_every_engine(|lab| async move {
        let (bus, dependency) = open(&lab, Criticality::BestEffort).await;
        let receipt = handled(&bus, ("a", 7)).await;
        assert!(is_done(&bus, receipt.seq(), "g").await);
        assert!(dependency.attempts_for(7).is_empty());
        let stats = counted(&bus).await;
        let of_g = &stats.groups[&"g".parse().unwrap()];
        assert_eq!((of_g.skipped.best_effort, of_g.skipped.total()), (1, 1));
        assert_eq!((of_g.handled, of_g.dead_lettered), (0, 0));
        let logged = lines_about(receipt.id());
        assert_eq!(logged.len(), 1, "{logged:?}");
        let said = |name| logged[0].field(name);
        assert_eq!(said("resilience_event"), Some("circuit_breaker_rejected"));
        assert_eq!(said("dependency"), Some("mail"));
        assert_eq!(said("criticality"), Some("best_effort"));

        dependency.works(true);
        lab.clock.advance(OPEN_FOR);
        closed(&bus).await;
        handled(&bus, ("a", 8)).await;
        assert_eq!(dependency.attempts_for(8), [1]);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: framework/criticality-best-effort: a breaker that only best-effort handlers use raises no alert.
// conformance: handlers/breaker-events: neither event is published if all handlers are best-effort.
// conformance: handlers/breaker-quiet: the breaker of best-effort handlers alone publishes neither event.
#[tokio::test]
async fn a_best_effort_breaker_publishes_nothing() {
    on_every_engine(|lab| async move {
        let (bus, dependency) = open(&lab, Criticality::BestEffort).await;
        dependency.works(true);
        lab.clock.advance(OPEN_FOR);
        handled(&bus, ("a", 1)).await;
        closed(&bus).await;
        // Alerts are published in the background, in order. When that of a later opening is there, those
        // of the first breaker would be there too.
        let later = to(|| async { Err::<(), _>("down") })
            .breaker(BreakerPolicy::default().fail_max(1))
            .criticality(Criticality::Standard);
        bus.mount(Router::new().on("b", later).group("later"))
            .await
            .unwrap();
        bus.publish(("b", 1)).await.unwrap();
        let opened = alerts(&bus, "system.circuit_opened", 1).await;
        assert_eq!(opened[0]["group"], "later");
        assert!(published(&bus, "system.circuit_closed").await.is_empty());
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/breaker-best-effort: the reason is recorded.
#[tokio::test]
async fn the_reason_of_a_best_effort_skip_is_recorded() {
    on_every_durable_engine(|lab| async move {
        let (bus, _) = open(&lab, Criticality::BestEffort).await;
        let receipt = handled(&bus, ("a", 7)).await;
        bus.shutdown().await.unwrap();
        let reason = skip_reason(&lab, receipt.seq());
        assert!(reason.contains("circuit breaker was open"), "{reason}");
    })
    .await;
}

// conformance: handlers/breaker-several: an event whose second handler may not run has not run the first one.
#[tokio::test]
async fn no_handler_of_an_event_runs_unless_all_may() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (first, dependency) = (Dependency::default(), Dependency::default());
        first.works(true);
        let guarded = to(call)
            .breaker(BreakerPolicy::default().fail_max(1))
            .criticality(Criticality::Standard);
        let router = Router::new()
            .merge(Router::new().on("b", call).with_state(first.clone()))
            .on("a", guarded.clone())
            .on("b", guarded)
            .group("g")
            .with_state(dependency.clone());
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        bus.publish(("a", 0)).await.unwrap();
        opened(&bus).await;
        let letter = given_up(&bus, ("b", 1)).await;
        assert_eq!(letter.failures[0].kind, FailureKind::Rejected);
        assert!(
            first.attempts_for(1).is_empty(),
            "the first ran for nothing"
        );
        dependency.works(true);
        lab.clock.advance(OPEN_FOR);
        closed(&bus).await;
        let id = letter.event().id();
        bus.dead_letters().retry(id).await.unwrap();
        eventually("both have run", || async {
            is_done(&bus, letter.record.position.place(), "g").await
        })
        .await;
        assert_eq!(first.attempts_for(1).len(), 1);
        assert_eq!(dependency.attempts_for(1).len(), 1);
        bus.shutdown().await.unwrap();
    })
    .await;
}
