//! Wrong wiring: a specific error when it is mounted, before any event moves, and nothing half done.

mod validation;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use everbus::{
    BreakerPolicy, Bus, Code, Criticality, Envelope, Error, Event, GroupName, Payload, RetryPolicy,
    Router, StartFrom, State, sqlite, to,
};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::faulty::faulty;
use crate::support::{Kind, Lab, handled, on_every_engine, recorder};

#[derive(Serialize, Deserialize, Event)]
#[event(type = "orders.order.placed")]
struct Placed {
    order: u64,
}

#[derive(Serialize, Deserialize, Event)]
#[event(type = "orders.order.shipped")]
struct Shipped;

async fn any(_: Envelope) {}

/// Mounts a router with one route that is right and, after it, what is wrong; nothing of it is there.
async fn refused(wrong: Router) -> Error {
    let lab = Lab::new(Kind::Memory);
    let bus = lab.open().await;
    let right = |policy| {
        let schema = Router::new().schema("right", 1, json!(false));
        schema.on("right", any).breaker(policy).group("right")
    };
    let policy = BreakerPolicy::default();
    let both = Router::new().merge(right(policy)).merge(wrong);
    let error = bus.mount(both).await.unwrap_err();
    assert!(bus.groups().await.unwrap().is_empty(), "{error}");
    assert!(bus.breakers().is_empty(), "{error}");
    bus.publish(("right", 1)).await.expect("no schema is there");
    // What was right by itself still is, with another policy too.
    bus.mount(right(policy.fail_max(9))).await.unwrap();
    error
}

// conformance: handlers/wiring-state: a handler that takes a state that nobody gives is refused when it is mounted.
#[tokio::test]
async fn a_missing_state_is_refused() {
    let router = Router::new()
        .on("a", |_: State<u128>| async {})
        .with_state(1_u64);
    let error = refused(router).await;
    assert_eq!(error.code(), Code::InvalidSetting);
    assert!(error.message().contains("State<u128>"), "{error}");
    assert!(error.hint_text().unwrap().contains("with_state"));
    // That of a router beside it does not help.
    let router = Router::new()
        .merge(Router::new().on("a", |_: State<u128>| async {}))
        .merge(Router::new().with_state(1_u128));
    assert_eq!(refused(router).await.code(), Code::InvalidSetting);
}

// conformance: handlers/wiring-payload: a Payload type that the pattern never matches, and two required payload types at once, are refused when they are mounted.
#[tokio::test]
async fn a_payload_that_can_never_come_is_refused() {
    let router = Router::new().on("users.*", |_: Payload<Placed>| async {});
    let error = refused(router).await;
    assert_eq!(error.code(), Code::InvalidSetting);
    let said = error.message();
    assert!(
        said.contains("Placed") && said.contains("orders.order.placed"),
        "{said}"
    );
    assert!(error.hint_text().unwrap().contains("orders.order.placed"));

    let both = |_: Payload<Placed>, _: Payload<Shipped>| async {};
    let error = refused(Router::new().on("orders.>", both)).await;
    assert_eq!(error.code(), Code::InvalidSetting);
    assert!(error.message().contains("several event types"), "{error}");
    assert!(error.hint_text().unwrap().contains("Option<Payload"));
}

// conformance: handlers/wiring-name-twice: a handler registered twice under one name is refused.
#[tokio::test]
async fn a_name_that_is_used_twice_in_a_group_is_refused() {
    let twice = Router::new()
        .on("a", to(any).name("mail"))
        .on("b", to(any).name("mail"));
    let error = refused(twice.clone()).await;
    assert_eq!(error.code(), Code::GroupConflict);
    assert!(error.message().contains("\"mail\""), "{error}");

    let lab = Lab::new(Kind::Memory);
    let bus = lab.open().await;
    bus.subscribe("a").name("mail").handler(any).await.unwrap();
    let later = bus.mount(Router::new().on("b", to(any).name("mail"))).await;
    assert_eq!(later.unwrap_err().code(), Code::GroupConflict);
    // Another group is another matter.
    let other = twice.clone().group("other");
    assert_eq!(
        bus.mount(other).await.unwrap_err().code(),
        Code::GroupConflict
    );
    let other = Router::new().on("b", to(any).name("mail")).group("other");
    bus.mount(other).await.unwrap();
}

// conformance: handlers/wiring-group-conflict: a group with conflicting settings is refused.
#[tokio::test]
async fn settings_that_contradict_each_other_in_a_group_are_refused() {
    let pairs = [
        (to(any).concurrency(2), to(any).concurrency(3)),
        (to(any), to(any).ordered()),
        (
            to(any).start_from(StartFrom::First),
            to(any).start_from(StartFrom::Last),
        ),
        (
            to(any).breaker(BreakerPolicy::default()),
            to(any).breaker(BreakerPolicy::default().fail_max(1)),
        ),
        (
            to(any).depends_on("bank").breaker(BreakerPolicy::default()),
            to(any)
                .depends_on("bank")
                .breaker(BreakerPolicy::default().open_for(Duration::from_secs(1))),
        ),
    ];
    for (one, other) in pairs {
        let router = Router::new().on("a", one).on("b", other).group("g");
        let error = refused(router).await;
        assert_eq!(error.code(), Code::GroupConflict, "{error}");
        assert!(error.hint_text().is_some());
    }
}

// conformance: handlers/wiring-retry: a retry policy with zero or overflowing delays is refused.
// conformance: handlers/wiring-settings: settings that make no sense by themselves are refused.
#[tokio::test]
async fn settings_that_make_no_sense_are_refused() {
    let policy = RetryPolicy::default();
    let (zero, endless) = (Duration::ZERO, Duration::MAX);
    let breaker = BreakerPolicy::default();
    let routes = [
        to(any).retry(policy.base_delay(zero)),
        to(any).retry(policy.base_delay(endless)),
        to(any).retry(policy.max_delay(endless)),
        to(any).retry_with(|policy| policy.multiplier(f64::INFINITY)),
        to(any).timeout(zero),
        to(any).timeout(endless),
        to(any).concurrency(0),
        to(any).concurrency(usize::MAX),
        to(any).max_staleness(endless),
        to(any).breaker(breaker.fail_max(0)),
        to(any).breaker(breaker.open_for(zero)),
        to(any).depends_on(""),
        to(any).depends_on("a\nb"),
        to(any).name(""),
        to(any).group(""),
        to(any).start_from(StartFrom::New),
    ];
    for (index, route) in routes.into_iter().enumerate() {
        let error = refused(Router::new().on("a", route)).await;
        assert_eq!(error.code(), Code::InvalidSetting, "route {index}: {error}");
        assert!(!error.message().is_empty());
    }
    let error = refused(Router::new().on("a.*.>.b", any)).await;
    assert_eq!(error.code(), Code::InvalidPattern);
}

// conformance: handlers/wiring-schema: a schema that is no schema is refused, wherever it is given.
#[tokio::test]
async fn a_schema_that_is_none_is_refused() {
    let none = json!({ "type": "no such type" });
    let routers = [
        Router::new().schema("a", 1, none.clone()),
        Router::new().schema("a", 0, json!(true)),
        Router::new().on("a", to(any).validated(none.clone())),
        Router::new().on("a", any).validated(none),
        Router::new()
            .schema("a", 1, json!(true))
            .schema("a", 1, json!(false)),
    ];
    for router in routers {
        let error = refused(router).await;
        assert_eq!(error.code(), Code::InvalidSchema, "{error}");
    }
}

// conformance: handlers/wiring-upcast: an upcast cycle is refused, also one that two routers make together.
#[tokio::test]
async fn upcasts_that_lead_in_a_circle_are_refused() {
    let step = |from, to| Router::new().upcast_json("a", from, to, Ok);
    let error = refused(step(1, 2).merge(step(2, 1))).await;
    assert_eq!(error.code(), Code::UpcastConflict);
    assert!(error.message().contains("1 → 2 → 1"), "{error}");
}

// conformance: handlers/exactly-once-unsupported: a handler that works in a transaction of another engine is refused with Unsupported.
#[tokio::test]
async fn a_transaction_of_another_engine_is_refused() {
    let books = || async { sqlite::in_transaction(|_| ()) };
    let error = refused(Router::new().on("a", books)).await;
    assert_eq!(error.code(), Code::Unsupported);
    assert!(error.message().contains("sqlite"), "{error}");
    assert!(error.message().contains("memory"), "{error}");
    let fallible = || async { Ok::<_, String>(Some(sqlite::in_transaction(|_| ()))) };
    let error = refused(Router::new().on("a", fallible)).await;
    assert_eq!(error.code(), Code::Unsupported);
}

// conformance: handlers/idempotent-unsupported: an idempotent handler is refused where the engine has no inbox.
#[tokio::test]
async fn an_idempotent_handler_needs_an_inbox() {
    let memory = Bus::open("memory:").await.unwrap();
    let engine = everbus::Engine {
        inbox: None,
        ..memory.engine().clone()
    };
    let bus = Bus::builder().with_engine(engine).unwrap();
    let error = bus
        .subscribe("a")
        .idempotent()
        .handler(any)
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::Unsupported);
    bus.subscribe("a").handler(any).await.unwrap();
}

// conformance: handlers/mount-whole: a mount is all or nothing, also where the file has the group with another order.
#[tokio::test]
async fn a_group_of_another_kind_in_the_file_refuses_the_whole_router() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let kept = Router::new().on("a", any).group("kept").ordered();
        let ids = bus.mount(kept).await.unwrap();
        bus.unsubscribe(ids[0]).await.unwrap();
        let router = Router::new().on("a", to(any).group("new")).on(
            "a",
            to(any).group("kept").criticality(Criticality::Standard),
        );
        let error = bus.mount(router).await.unwrap_err();
        assert_eq!(error.code(), Code::GroupConflict);
        let groups = bus.groups().await.unwrap();
        let names: Vec<GroupName> = groups.into_iter().map(|group| group.name).collect();
        assert_eq!(names, ["kept".parse().unwrap()]);
        assert!(bus.breakers().is_empty());
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/mount-again: a mount that the engine failed half way can be repeated, and no handler is there twice.
#[tokio::test]
async fn a_mount_that_failed_half_way_can_be_repeated() {
    let (bus, faults, _) = faulty().await;
    bus.start().await.unwrap();
    let runs = Arc::new(AtomicUsize::new(0));
    let count = runs.clone();
    let counted = move || {
        count.fetch_add(1, Ordering::SeqCst);
        async {}
    };
    let router = Router::new().on("a", counted.clone()).on("a", counted);
    faults.declare.spare(1);
    faults.declare.add(1, Code::Busy);
    let error = bus.mount(router.clone()).await.unwrap_err();
    assert_eq!(error.code(), Code::Busy);
    bus.mount(router).await.unwrap();
    handled(&bus, ("a", 1)).await;
    assert_eq!(runs.load(Ordering::SeqCst), 2);
    bus.shutdown().await.unwrap();
}

// conformance: handlers/mount-shutdown: after a shutdown nothing is mounted.
#[tokio::test]
async fn a_bus_that_was_shut_down_mounts_nothing() {
    let lab = Lab::new(Kind::Memory);
    let bus = lab.open().await;
    bus.shutdown().await.unwrap();
    let error = bus.mount(Router::new().on("a", any)).await.unwrap_err();
    assert_eq!(error.code(), Code::EventBusShutdownError);
}

// conformance: handlers/wiring-breaker-policy: handlers that share a dependency may say its policy once, or the same.
#[tokio::test]
async fn a_shared_breaker_is_asked_for_with_one_policy() {
    let lab = Lab::new(Kind::Memory);
    let bus = lab.open().await;
    let policy = BreakerPolicy::default().fail_max(2);
    let router = Router::new()
        .on("a", to(any).depends_on("bank").breaker(policy).group("x"))
        .on("b", to(any).depends_on("bank").breaker(policy).group("y"))
        .on("c", to(any).breaker(policy).group("z"));
    bus.mount(router).await.unwrap();
    let mut names: Vec<String> = bus.breakers().into_iter().map(|b| b.name).collect();
    names.sort();
    assert_eq!(names, ["bank", "z"]);
    let (handler, _seen) = recorder(|_| Ok(()));
    let other = bus.subscribe("d").depends_on("bank").handler(handler).await;
    assert_eq!(other.unwrap_err().code(), Code::GroupConflict);
}
