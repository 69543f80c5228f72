//! Handlers: what their parameters may be.

pub(crate) mod answers;
mod follow_ups;
mod forms;
mod long;
mod with_failure;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use everbus::{
    Bus, Clock, Context, Decode, Envelope, Event, FailureKind, FromMessage, HandlerError, Json,
    Message, Meta, Payload, RetryPolicy, Router, State, Timestamp, TypedEvent, handled as done,
    permanent, to,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::support::{
    given_up, handled, on_every_engine, recorder, run_out_of_retries, wait_for_retry,
};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
#[event(type = "orders.order.placed", version = 2)]
struct OrderPlaced {
    order: u64,
}

#[derive(Serialize, Deserialize, Event)]
#[event(type = "orders.order.placed")]
struct OrderPlacedBefore {
    number: u64,
}

/// How often handlers ran.
#[derive(Clone, Default)]
struct Runs(Arc<AtomicUsize>);

impl Runs {
    fn add(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    fn get(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

// conformance: embedded/metadata: a handler is given the metadata as it was published.
// conformance: handlers/handler-extractors: a handler takes Payload, Json, serde_json::Value, Envelope, Meta, State, Context and the message, up to eight at once.
// conformance: framework/framework-injection: services and configuration are injected into handlers.
#[tokio::test]
async fn a_handler_is_given_what_its_parameters_name() {
    #[expect(clippy::too_many_arguments, reason = "as many as there may be")]
    async fn everything(
        Payload(order): Payload<OrderPlaced>,
        Json(map): Json<BTreeMap<String, u64>>,
        value: Value,
        envelope: Envelope,
        meta: Meta,
        State(runs): State<Runs>,
        context: Context,
        message: Message,
    ) {
        assert_eq!(order, OrderPlaced { order: 42 });
        assert_eq!(map["order"], 42);
        assert_eq!(value, json!({ "order": 42 }));
        assert_eq!(envelope.event_type(), "orders.order.placed");
        assert_eq!((envelope.version(), envelope.tenant()), (2, Some("north")));
        assert_eq!(envelope.received_at(), message.received_at());
        assert_eq!(meta.get("colour"), Some("red"));
        assert_eq!(meta.get("size"), None);
        assert_eq!(meta.iter().collect::<Vec<_>>(), [("colour", "red")]);
        assert_eq!((context.attempt(), context.max_attempts()), (1, 1));
        assert!(context.failures().is_empty());
        assert_eq!(context.group().as_str(), "billing");
        assert_eq!(context.correlation_id(), "request-7");
        assert_eq!(context.trace(), None);
        assert_eq!(message.id(), envelope.id());
        assert_eq!(message.handler_name(), "orders.order.placed");
        runs.add();
    }
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let runs = Runs::default();
        let router = Router::new()
            .on("orders.order.placed", everything)
            .group("billing")
            .with_state(runs.clone());
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        let event = Event::builder(OrderPlaced::TYPE)
            .version(2)
            .json(&OrderPlaced { order: 42 })
            .tenant("north")
            .correlation_id("request-7")
            .meta("colour", "red");
        handled(&bus, event).await;
        assert_eq!(runs.get(), 1);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/handler-functions: functions and closures of none to eight parameters are handlers.
#[tokio::test]
async fn functions_and_closures_of_any_number_of_parameters_are_handlers() {
    type R = State<Runs>;
    async fn three(State(runs): R, _: Value, _: Meta) {
        runs.add();
    }
    async fn four(State(runs): R, _: Value, _: Meta, _: Context) {
        runs.add();
    }
    async fn five(State(runs): R, _: Value, _: Meta, _: Context, _: Envelope) {
        runs.add();
    }
    async fn six(State(runs): R, _: Value, _: Meta, _: Context, _: Envelope, _: Message) {
        runs.add();
    }
    async fn seven(
        State(runs): R,
        _: Value,
        _: Meta,
        _: Context,
        _: Envelope,
        _: Message,
        _: Json<u8>,
    ) {
        runs.add();
    }
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let runs = Runs::default();
        let outside = runs.clone();
        let nothing = move || {
            outside.add();
            async {}
        };
        let router = Router::new()
            .on("a", nothing)
            .on("a", |State(runs): R| async move { runs.add() })
            .on("a", |State(runs): R, n: Json<u8>| async move {
                assert_eq!(n.0, 7);
                runs.add();
                done()
            })
            .on("a", three)
            .on("a", four)
            .on("a", five)
            .on("a", six)
            .on("a", seven)
            .with_state(runs.clone());
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        handled(&bus, ("a", 7)).await;
        assert_eq!(runs.get(), 8, "all handlers of the group ran");
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/version-unknown: an event of an unknown version is dead-lettered at once with a clear reason, and the handler does not run.
// conformance: fault-4/unknown-version: an event of a version that nothing reads does not fall through to the ack.
#[tokio::test]
async fn an_unknown_version_is_a_dead_letter_at_once() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let runs = Runs::default();
        let router = Router::new()
            .on(OrderPlaced::TYPE, {
                let runs = runs.clone();
                move |_: Payload<OrderPlaced>| {
                    runs.add();
                    async {}
                }
            })
            .on(OrderPlaced::TYPE, {
                let runs = runs.clone();
                to(move |_: Option<Payload<OrderPlaced>>| {
                    runs.add();
                    async {}
                })
                .group("optional")
            });
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        // Its payload would fit.
        let event = Event::builder(OrderPlaced::TYPE).version(3);
        let receipt = bus
            .publish(event.json(&json!({ "order": 1 })))
            .await
            .unwrap();
        let settled = receipt.settled().await.unwrap();
        assert_eq!(settled.dead_lettered.len(), 2, "in both groups");
        for letter in bus.dead_letters().get(receipt.id()).await.unwrap() {
            assert_eq!((letter.attempts, letter.failures.len()), (1, 1));
            assert_eq!(letter.failures[0].kind, FailureKind::Version);
            let said = letter.last_error();
            assert!(
                said.contains("version 3") && said.contains("known: 2"),
                "{said}"
            );
        }
        assert_eq!(runs.get(), 0);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/version-upcast: a handler accepts the version before through the router's upcast.
// conformance: framework/versioning-previous: a consumer of the bus handles the current version and the one before.
#[tokio::test]
async fn the_version_before_reaches_the_handler_through_an_upcast() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let (sender, mut orders) = tokio::sync::mpsc::unbounded_channel();
        let orders_only = Router::new().on("order.placed", {
            move |Payload(order): Payload<OrderPlaced>| {
                let sender = sender.clone();
                async move { sender.send(order.order) }
            }
        });
        // An upcast holds for the whole router, wherever it is said.
        let router = Router::new()
            .nest("orders", orders_only)
            .upcast(|old: OrderPlacedBefore| OrderPlaced {
                order: old.number + 1000,
            });
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        handled(&bus, OrderPlacedBefore { number: 7 }).await;
        handled(&bus, OrderPlaced { order: 8 }).await;
        assert_eq!(orders.recv().await, Some(1007));
        assert_eq!(orders.recv().await, Some(8));
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/handler-decode: a payload that does not fit the parameter is a failure of kind decode, and the event a dead letter at once.
// conformance: framework/framework-malformed: a malformed event fails fast: one attempt, before the handler's own code, although the policy has more.
#[tokio::test]
async fn a_payload_that_does_not_fit_is_a_dead_letter_at_once() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let runs = Runs::default();
        let count = || {
            let runs = runs.clone();
            move || runs.add()
        };
        let (typed, json, optional) = (count(), count(), count());
        let router = Router::new()
            .on(OrderPlaced::TYPE, move |_: Payload<OrderPlaced>| {
                typed();
                async {}
            })
            .on("number", move |_: Json<u8>| {
                json();
                async {}
            })
            .on("maybe", move |_: Option<Json<u8>>| {
                optional();
                async {}
            });
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        let wrong = Event::builder(OrderPlaced::TYPE)
            .version(2)
            .json("no order");
        let wrong = given_up(&bus, wrong).await;
        let number = given_up(&bus, ("number", "seven")).await;
        let maybe = given_up(&bus, ("maybe", "seven")).await;
        for letter in [wrong, number, maybe] {
            assert_eq!(letter.attempts, 1, "the policy has three more");
            assert_eq!(letter.failures[0].kind, FailureKind::Decode);
        }
        assert_eq!(runs.get(), 0, "the handlers did not run");
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: omni/subscribe-validated: with decode: retry a violation follows the retry policy, as the specification has it.
// conformance: contract/decode-retry: with decode: retry an event that cannot be read, of an unknown version or against its schema is retried by the policy.
#[tokio::test]
async fn what_cannot_be_read_is_retried_if_that_is_asked_for() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let patient = Router::new()
            .on(OrderPlaced::TYPE, |_: Payload<OrderPlaced>| async {})
            .on("number", |_: Json<u8>| async {})
            .on(
                "checked",
                to(|| async {}).validated(json!({"type": "number"})),
            )
            // What a route says is stronger than what its router says.
            .on(
                "hasty",
                to(|_: Json<u8>| async {}).decode(Decode::DeadLetter),
            )
            .decode(Decode::Retry);
        bus.mount(patient).await.unwrap();
        bus.start().await.unwrap();
        let new = Event::builder(OrderPlaced::TYPE).version(9).json(&7);
        for (event, kind) in [
            (new, FailureKind::Version),
            (Event::builder("number").json("seven"), FailureKind::Decode),
            (Event::builder("checked").json("seven"), FailureKind::Schema),
        ] {
            let receipt = bus.publish(event).await.unwrap();
            let state = wait_for_retry(&bus, receipt.seq(), "", 1).await;
            assert_eq!(state.failures[0].kind, kind);
            run_out_of_retries(&lab, &bus, &receipt, "").await;
            let letter = bus
                .dead_letters()
                .get(receipt.id())
                .await
                .unwrap()
                .remove(0);
            assert_eq!(letter.attempts, 4, "the policy of the bus");
        }
        assert_eq!(given_up(&bus, ("hasty", "seven")).await.attempts, 1);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/handler-option: Option<Payload<T>> is None for other event types, and still a failure for one that cannot be read.
#[tokio::test]
async fn an_optional_payload_is_there_if_its_type_came() {
    #[derive(Debug, PartialEq, Serialize, Deserialize, Event)]
    #[event(type = "orders.order.cancelled")]
    struct Cancelled {
        order: u64,
    }
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let (sender, mut seen) = tokio::sync::mpsc::unbounded_channel();
        let either = move |placed: Option<Payload<OrderPlaced>>,
                           cancelled: Option<Payload<Cancelled>>,
                           missing: Option<State<Runs>>| {
            assert!(missing.is_none());
            let placed = placed.map(|order| order.0.order);
            let _ = sender.send((placed, cancelled.map(|order| order.0.order)));
            async {}
        };
        bus.mount(Router::new().on("orders.>", either))
            .await
            .unwrap();
        bus.start().await.unwrap();
        handled(&bus, OrderPlaced { order: 1 }).await;
        handled(&bus, Cancelled { order: 2 }).await;
        handled(&bus, ("orders.order.shipped", json!({ "order": 3 }))).await;
        assert_eq!(seen.recv().await, Some((Some(1), None)));
        assert_eq!(seen.recv().await, Some((None, Some(2))));
        assert_eq!(seen.recv().await, Some((None, None)));
        let letter = given_up(&bus, (Cancelled::TYPE, "not an order")).await;
        assert_eq!(letter.failures[0].kind, FailureKind::Decode);
        assert!(seen.is_empty());
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/handler-other-type: an event of another type is never parsed as the type that the handler takes.
#[tokio::test]
async fn another_type_is_never_parsed() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let router = Router::new().on("orders.order.*", |_: Payload<OrderPlaced>| async {});
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        let event = Event::builder("orders.order.shipped").version(2);
        let letter = given_up(&bus, event.json(&json!({ "order": 1 }))).await;
        assert_eq!(letter.failures[0].kind, FailureKind::Decode);
        let said = letter.last_error();
        assert!(said.contains("orders.order.shipped"), "{said}");
        assert!(said.contains("orders.order.placed"), "{said}");
        handled(&bus, OrderPlaced { order: 1 }).await;
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/handler-context: Context tells the attempt, what went wrong before, and how many attempts there are.
#[tokio::test]
async fn the_context_tells_which_attempt_this_is() {
    on_every_engine(|lab| async move {
        let policy = RetryPolicy::default().max_retries(1);
        let bus = lab.open_with(lab.builder().retry(policy)).await;
        let (sender, mut seen) = tokio::sync::mpsc::unbounded_channel();
        let fragile = move |context: Context| {
            let errors: Vec<_> = context.failures().iter().map(|f| f.error.clone()).collect();
            let _ = sender.send((context.attempt(), context.max_attempts(), errors));
            async move { (context.attempt() > 1).then_some(()).ok_or("not yet") }
        };
        bus.subscribe("a").handler(fragile).await.unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 1)).await.unwrap();
        let state = wait_for_retry(&bus, receipt.seq(), "", 1).await;
        assert_eq!(seen.recv().await, Some((1, 2, vec![])));
        lab.clock.set(state.due_at.unwrap());
        receipt.settled().await.unwrap();
        assert_eq!(seen.recv().await, Some((2, 2, vec!["not yet".to_owned()])));
        bus.shutdown().await.unwrap();
    })
    .await;
}

/// Follows the timer of the test, which may be virtual.
#[derive(Debug)]
struct TimerClock(Instant);

impl Clock for TimerClock {
    fn now(&self) -> Timestamp {
        Timestamp::EPOCH.plus(self.0.elapsed())
    }
}

async fn on_the_timer() -> Bus {
    crate::logs::listen();
    let builder = Bus::builder().clock(TimerClock(Instant::now()));
    builder.open("memory:").await.unwrap()
}

// conformance: handlers/handler-deadline: Context tells when the attempt ends.
#[tokio::test(start_paused = true)]
async fn the_context_tells_how_long_the_attempt_may_take() {
    let bus = on_the_timer().await;
    let limit = Duration::from_secs(7);
    let handler = move |context: Context| async move {
        assert_eq!(context.remaining(), limit);
        assert_eq!(context.deadline(), Instant::now() + limit);
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(context.remaining(), Duration::from_secs(4));
    };
    let subscribe = bus.subscribe("a").timeout(limit);
    subscribe
        .retry(RetryPolicy::never())
        .handler(handler)
        .await
        .unwrap();
    bus.start().await.unwrap();
    handled(&bus, ("a", 1)).await;
}

// conformance: handlers/handler-extend: a handler that extends its attempt is not cut at its timeout, and keeps its lease meanwhile.
#[tokio::test(start_paused = true)]
async fn an_extended_attempt_outlives_its_timeout_and_its_lease() {
    let bus = on_the_timer().await;
    let handler = |context: Context, Json(extends): Json<bool>| async move {
        if extends {
            context.extend(Duration::from_secs(1000));
        }
        // The lease is the timeout and ten seconds.
        tokio::time::sleep(Duration::from_secs(500)).await;
        assert_eq!(context.attempt(), 1);
    };
    let subscribe = bus.subscribe("a").timeout(Duration::from_secs(1));
    subscribe
        .retry(RetryPolicy::never())
        .handler(handler)
        .await
        .unwrap();
    bus.start().await.unwrap();
    let receipt = bus.publish(("a", true)).await.unwrap();
    let settled = receipt.settled_within(Duration::from_secs(600)).await;
    assert!(settled.unwrap().dead_lettered.is_empty());
    assert_eq!(bus.lost_leases(), 0);

    let letter = given_up(&bus, ("a", false)).await;
    assert_eq!(letter.failures[0].kind, FailureKind::Timeout);
}

// conformance: handlers/handler-own-extractor: a parameter type of one's own is taken from the message, and what it cannot find is a failure with its answer.
#[tokio::test]
async fn a_parameter_type_of_ones_own_is_an_extractor() {
    struct Tenant(String);

    impl FromMessage for Tenant {
        fn from_message(message: &Message) -> Result<Self, HandlerError> {
            let tenant = message.tenant().ok_or_else(|| permanent("no tenant"))?;
            Ok(Self(tenant.to_owned()))
        }
    }

    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (record, mut seen) = recorder(|_| Ok(()));
        let record = Arc::new(record);
        let handler = move |Tenant(tenant): Tenant, message: Message| {
            assert_eq!(tenant, "north");
            record(message)
        };
        bus.subscribe("a").handler(handler).await.unwrap();
        bus.start().await.unwrap();
        handled(&bus, Event::builder("a").tenant("north")).await;
        seen.next().await;
        let letter = given_up(&bus, Event::builder("a")).await;
        assert_eq!(letter.failures[0].kind, FailureKind::Permanent);
        assert_eq!(letter.last_error(), "no tenant");
        assert!(seen.is_empty());
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/handler-panic: a panic in an extractor is a failed attempt like any other.
// conformance: fault-4/extractor-panic: a panic in an extractor does not fall through to the ack.
#[tokio::test]
async fn a_panic_in_an_extractor_is_a_failed_attempt() {
    struct Bad;

    impl FromMessage for Bad {
        fn from_message(_: &Message) -> Result<Self, HandlerError> {
            panic!("in the extractor");
        }
    }

    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        bus.subscribe("a")
            .concurrency(1)
            .handler(|_: Option<Bad>| async {})
            .await
            .unwrap();
        bus.start().await.unwrap();
        for _ in 0..2 {
            let letter = given_up(&bus, ("a", 1)).await;
            assert_eq!(letter.failures[0].kind, FailureKind::Panic);
            assert!(letter.last_error().contains("in the extractor"));
        }
        bus.shutdown().await.unwrap();
    })
    .await;
}
