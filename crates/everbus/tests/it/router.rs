//! The router: patterns, nesting, inherited settings, shared state, names, and mounting as a whole.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use everbus::{
    Bus, Clock, Context, Envelope, Event, Json, Message, Payload, RetryPolicy, Router, State, to,
};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tracing::Level;

use crate::logs::{Line, lines};
use crate::support::{Kind, Lab, given_up, handled, on_every_engine, wait_for_retry};

/// A handler that tells its group, its name and the type of its event.
fn teller() -> (
    impl Fn(Message) -> std::future::Ready<()> + Clone + Send + Sync + 'static,
    mpsc::UnboundedReceiver<[String; 3]>,
) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let tell = move |message: Message| {
        let _ = sender.send([
            message.group().to_string(),
            message.handler_name().to_owned(),
            message.event_type().to_owned(),
        ]);
        std::future::ready(())
    };
    (tell, receiver)
}

// conformance: handlers/router-nest: on, nest and merge: the patterns of a nested router begin after its prefix.
// conformance: handlers/router-group: a router's group holds for its routes unless a route or an inner router names another.
// conformance: framework/framework-groups: each consuming service has its consumer group.
#[tokio::test]
async fn nested_routers_add_their_prefix_and_take_over_the_group() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let (tell, mut told) = teller();
        let deepest = Router::new().on("placed", tell.clone()).group("deepest");
        let orders = Router::new()
            .nest("order", deepest)
            .on("order.*", tell.clone())
            .on("order.placed", to(tell.clone()).group("own"));
        let router = Router::new()
            .nest("orders", orders)
            .merge(Router::new().on("users.created", tell.clone()))
            .group("shop");
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        handled(&bus, ("orders.order.placed", 1)).await;
        handled(&bus, ("users.created", 1)).await;
        handled(&bus, ("order.placed", 1)).await;
        let mut all = Vec::new();
        while let Ok([group, name, event_type]) = told.try_recv() {
            all.push(format!("{group} {name} {event_type}"));
        }
        all.sort();
        assert_eq!(
            all,
            [
                "deepest orders.order.placed orders.order.placed",
                "own orders.order.placed orders.order.placed",
                "shop orders.order.* orders.order.placed",
                "shop users.created users.created",
            ]
        );
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/router-settings: a setting at the route goes before that of its router, before that of the router around it, before that of the bus.
#[tokio::test(start_paused = true)]
async fn the_innermost_setting_holds() {
    crate::logs::listen();
    let seconds = Duration::from_secs;
    let retries = |n| RetryPolicy::default().max_retries(n);
    let bus = Bus::builder().timeout(seconds(10)).retry(retries(1));
    let bus = bus.open("memory:").await.unwrap();
    let (sender, mut told) = mpsc::unbounded_channel();
    let tell = move |context: Context| {
        let _ = sender.send((context.remaining(), context.max_attempts()));
        async {}
    };
    let own = to(tell.clone()).timeout(seconds(40)).retry(retries(4));
    let inner = Router::new()
        .on("own", own)
        .on("inner", tell.clone())
        .timeout(seconds(30))
        .retry(retries(3));
    let outer = Router::new()
        .merge(inner)
        .on("outer", tell.clone())
        .timeout(seconds(20))
        .retry(retries(2));
    bus.mount(outer.merge(Router::new())).await.unwrap();
    bus.mount(Router::new().on("bus", tell)).await.unwrap();
    bus.start().await.unwrap();
    for (event_type, timeout, attempts) in [
        ("own", 40, 5),
        ("inner", 30, 4),
        ("outer", 20, 3),
        ("bus", 10, 2),
    ] {
        handled(&bus, (event_type, 0)).await;
        let told = told.recv().await.unwrap();
        assert_eq!(told, (seconds(timeout), attempts), "{event_type}");
    }
}

// conformance: handlers/router-settings: retry_with changes parts of what the outer router says and keeps the rest.
#[tokio::test]
async fn a_part_of_a_retry_policy_is_changed_and_the_rest_inherited() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let fails =
            |context: Context| async move { Err::<(), _>(context.max_attempts().to_string()) };
        let inner = Router::new()
            .on("a", to(fails).retry_with(|policy| policy.multiplier(1.0)))
            .retry_with(|policy| policy.max_retries(7));
        let first = RetryPolicy::default().base_delay(Duration::from_secs(5));
        bus.mount(Router::new().merge(inner).retry(first))
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 0)).await.unwrap();
        for attempt in 1..=3 {
            let state = wait_for_retry(&bus, receipt.seq(), "", attempt).await;
            assert_eq!(state.failures[0].error, "8", "7 retries");
            let due = lab.clock.now().plus(Duration::from_secs(5));
            assert_eq!(state.due_at, Some(due), "5 s again, since it does not grow");
            lab.clock.set(due);
        }
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/router-state: state is shared by all routes; a nested router's own goes before that of the router around it.
#[tokio::test]
async fn states_are_shared_and_the_nearest_is_taken() {
    #[derive(Clone)]
    struct Name(&'static str);
    #[derive(Clone)]
    struct Calls(Arc<AtomicUsize>);

    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let (sender, mut told) = mpsc::unbounded_channel();
        let tell = move |State(name): State<Name>, State(calls): State<Calls>| {
            let calls = calls.0.fetch_add(1, Ordering::SeqCst) + 1;
            let _ = sender.send((name.0, calls));
            async {}
        };
        let inner = Router::new()
            .on("inner", tell.clone())
            .with_state(Name("inner"));
        let router = Router::new()
            .nest("in", inner)
            .on("outer", tell)
            .with_state(Name("outer"))
            .with_state(Calls(Arc::default()));
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        handled(&bus, ("in.inner", 0)).await;
        handled(&bus, ("outer", 0)).await;
        handled(&bus, ("in.inner", 0)).await;
        assert_eq!(told.recv().await, Some(("inner", 1)));
        assert_eq!(told.recv().await, Some(("outer", 2)));
        assert_eq!(told.recv().await, Some(("inner", 3)));
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/router-names: a route is called as it is told, otherwise after its pattern with a number where the group has that already.
#[tokio::test]
async fn routes_have_names_of_their_own_or_those_of_their_patterns() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let (tell, mut told) = teller();
        let router = Router::new()
            .on("a", tell.clone())
            .on("a", tell.clone())
            .on("a", to(tell.clone()).name("mine"))
            .on("a", to(tell.clone()).group("other"));
        let ids = bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        handled(&bus, ("a", 0)).await;
        let mut names = Vec::new();
        while let Ok([group, name, _]) = told.try_recv() {
            names.push((group, name));
        }
        names.sort();
        let pair = |group: &str, name: &str| (group.to_owned(), name.to_owned());
        let unnamed = "(unnamed)";
        assert_eq!(
            names,
            [
                pair(unnamed, "a"),
                pair(unnamed, "a#2"),
                pair(unnamed, "mine"),
                pair("other", "a"),
            ]
        );
        // The ids come in the order of the routes.
        bus.unsubscribe(ids[2]).await.unwrap();
        handled(&bus, ("a", 0)).await;
        while let Ok([_, name, _]) = told.try_recv() {
            assert_ne!(name, "mine");
        }
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/router-mount-later: a router that is mounted on a started bus takes effect at once.
#[tokio::test]
async fn a_router_may_be_mounted_while_the_bus_runs() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        bus.start().await.unwrap();
        let (tell, mut told) = teller();
        bus.mount(Router::new().on("a", tell)).await.unwrap();
        handled(&bus, ("a", 0)).await;
        assert_eq!(told.recv().await.unwrap()[2], "a");
        bus.shutdown().await.unwrap();
    })
    .await;
}

/// The warnings about patterns of a domain that match nothing.
fn typos(domain: &str) -> Vec<Line> {
    lines(|line| {
        line.target == "everbus::router"
            && line.field("pattern").is_some_and(|p| p.starts_with(domain))
    })
}

// conformance: handlers/router-typo: a pattern that matches no known type is warned about at start, with the nearest type.
#[tokio::test]
async fn a_typing_error_in_an_event_name_is_found_at_start() {
    #[derive(Serialize, Deserialize, Event)]
    #[event(type = "typo.order.placed")]
    struct Placed;

    #[derive(Serialize, Deserialize, Event)]
    #[event(type = "typo.order.shipped")]
    struct Shipped;

    let lab = Lab::new(Kind::Memory);
    let bus = lab.open().await;
    let router = Router::new()
        .on("typo.order.placed", |_: Payload<Placed>| async { Shipped })
        .on("typo.order.palced", |_: Envelope| async {})
        .on("typo.order.shiped", |_: Envelope| async {})
        .on("typo.order.*", |_: Envelope| async {})
        .on("typo.nothing.like.it", |_: Envelope| async {})
        // What the bus itself publishes is known.
        .on("system.circuit_opened", |_: Envelope| async {})
        .on("system.circuit_closed", |_: Envelope| async {});
    bus.mount(router).await.unwrap();
    let warned: Vec<_> = typos("typo.")
        .iter()
        .map(|line| {
            assert_eq!(line.level, Level::WARN);
            let near = line.field("did_you_mean").map(str::to_owned);
            (line.field("pattern").unwrap().to_owned(), near)
        })
        .collect();
    let some = |text: &str| Some(text.to_owned());
    assert_eq!(
        warned,
        [
            ("typo.order.palced".to_owned(), some("typo.order.placed")),
            ("typo.order.shiped".to_owned(), some("typo.order.shipped")),
            ("typo.nothing.like.it".to_owned(), None),
        ]
    );
    assert!(typos("system.").is_empty());

    // What an earlier router said is known to a later one.
    let later = Router::new().on("typo.order.plcaed", |_: Envelope| async {});
    bus.mount(later).await.unwrap();
    let last = typos("typo.").pop().unwrap();
    assert_eq!(last.field("did_you_mean"), Some("typo.order.placed"));
}

// conformance: handlers/router-typo: types that are only declared, by event or schema, are known; without any known type nothing is warned about.
#[tokio::test]
async fn only_what_is_known_can_be_mistyped() {
    #[derive(Serialize, Deserialize, Event)]
    #[event(type = "declared.by.event")]
    struct Declared;

    let lab = Lab::new(Kind::Memory);
    let bus = lab.open().await;
    let untyped = Router::new().on("declared.nothing", |_: Envelope| async {});
    bus.mount(untyped).await.unwrap();
    assert!(typos("declared.").is_empty(), "nothing is known yet");
    let router = Router::new()
        .event::<Declared>()
        .schema("declared.by.schema", 1, serde_json::json!(true))
        .on("declared.by.event", |_: Envelope| async {})
        .on("declared.by.schema", |_: Envelope| async {})
        .on("declared.by.nobody", |_: Envelope| async {});
    bus.mount(router).await.unwrap();
    let warned = typos("declared.");
    assert_eq!(warned.len(), 1, "{warned:?}");
    assert_eq!(warned[0].field("pattern"), Some("declared.by.nobody"));
}

// conformance: handlers/router-one-group: handlers that share a group and match the same event run one after another and fail together.
#[tokio::test]
async fn what_a_group_s_handlers_emit_is_published_only_if_all_succeed() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let router = Router::new().on("a", || async { ("b", "first") }).on(
            "a",
            |Json(fails): Json<bool>| async move {
                if fails {
                    Err("second fails")
                } else {
                    Ok(("b", "second"))
                }
            },
        );
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        let letter = given_up(&bus, ("a", true)).await;
        assert_eq!(letter.handler.as_deref(), Some("a#2"));
        assert!(crate::support::published(&bus, "b").await.is_empty());
        handled(&bus, ("a", false)).await;
        let published = crate::support::published(&bus, "b").await;
        let payloads: Vec<String> = published.iter().map(|r| r.event.json().unwrap()).collect();
        assert_eq!(payloads, ["first", "second"]);
        bus.shutdown().await.unwrap();
    })
    .await;
}
