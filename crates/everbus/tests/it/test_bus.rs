//! The test bus, and handlers called without any bus.

use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use everbus::testing::{Fate, TestBus, TestBusBuilder};
use everbus::{
    Context, Event, HandlerError, Json, ManualClock, Payload, RetryPolicy, Router, State,
    Timestamp, permanent, skip, to,
};
use serde::{Deserialize, Serialize};
use serde_json::json;

mod asserts;
mod calls;
mod idle;

const SECOND: Duration = Duration::from_secs(1);

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
#[event(type = "orders.order.placed")]
struct OrderPlaced {
    order_id: String,
    user_id: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
#[event(type = "notifications.notification.sent")]
struct NotificationSent {
    user_id: String,
    order_id: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Event)]
#[event(type = "notifications.notification.refused")]
struct NotificationRefused {
    user_id: String,
}

/// Stands for the notification service of the specification: remembers what it was asked to send.
#[derive(Clone, Default)]
struct Notifications(Arc<Mutex<Vec<String>>>);

impl Notifications {
    fn send(&self, user: &str, order: &str) {
        let sent = format!("{user}: order {order} confirmed");
        self.0.lock().unwrap().push(sent);
    }

    fn sent(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }
}

async fn handle_order_placed(
    Payload(order): Payload<OrderPlaced>,
    State(notifications): State<Notifications>,
) -> NotificationSent {
    notifications.send(&order.user_id, &order.order_id);
    NotificationSent {
        user_id: order.user_id,
        order_id: order.order_id,
    }
}

fn order() -> OrderPlaced {
    OrderPlaced {
        order_id: "ord-123".into(),
        user_id: "user-456".into(),
    }
}

/// The event of the specification's examples.
fn order_event() -> Event {
    let at: Timestamp = "2026-03-01T12:00:00Z".parse().unwrap();
    Event::builder("orders.order.placed")
        .source("test")
        .foreign_id("test-1")
        .occurred_at(at)
        .correlation_id("corr-1")
        .json(&order())
        .build()
        .unwrap()
}

fn notifier(notifications: &Notifications) -> Router {
    Router::new()
        .on(
            "orders.order.placed",
            to(handle_order_placed).name("handle_order_placed"),
        )
        .with_state(notifications.clone())
}

/// Runs a test on a test bus on every engine: in memory, and through `with_real` on a file.
async fn everywhere<Fut: Future<Output = ()>>(test: impl Fn(TestBusBuilder) -> Fut) {
    crate::logs::listen();
    eprintln!("in memory");
    test(TestBus::builder()).await;
    eprintln!("on a file");
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", dir.path().join("test.db").display());
    test(TestBus::builder().with_real(url)).await;
}

// conformance: framework/testing-integration: the publish-consume flow is tested in process, without a server
#[tokio::test]
async fn an_order_event_flows_from_publish_to_its_handler() {
    let notifications = Notifications::default();
    let bus = TestBus::new(notifier(&notifications)).await.unwrap();
    let report = bus.publish(order_event()).await.unwrap();
    assert_eq!(bus.calls("handle_order_placed"), 1);
    assert_eq!(
        notifications.sent(),
        ["user-456: order ord-123 confirmed".to_owned()]
    );
    report.assert_handled();
    let sent = bus.assert_published::<NotificationSent>();
    assert_eq!(sent.order_id, "ord-123");
    // What it caused belongs to the same request.
    let events = bus.published_events("notifications.>");
    assert_eq!(events[0].event.correlation_id(), "corr-1");
    bus.assert_no_dead_letters().await;
}

// conformance: handlers/test-bus-with-real: the same test runs in memory and against a real engine
// conformance: framework/framework-one-api: the same test runs in memory and against a real engine
#[tokio::test]
async fn the_same_test_runs_on_a_real_engine_with_the_same_clock() {
    everywhere(|builder| async move {
        let notifications = Notifications::default();
        let bus = builder.open(notifier(&notifications)).await.unwrap();
        let began = bus.now();
        bus.fail_next(3);
        let report = bus.publish(order()).await.unwrap();
        let due_at = began.plus(SECOND);
        assert_eq!(report.fate("(unnamed)"), Some(&Fate::Retrying { due_at }));
        assert!(notifications.sent().is_empty());
        bus.run_to_end().await.unwrap();
        bus.assert_handled(report.id());
        assert_eq!(bus.calls("handle_order_placed"), 4);
        // The waits of the default policy, and nothing else.
        assert_eq!(bus.now(), began.plus(7 * SECOND));
        assert_eq!(notifications.sent().len(), 1);
        bus.assert_published::<NotificationSent>();
        bus.assert_no_dead_letters().await;
    })
    .await;
}

#[tokio::test]
async fn what_a_real_engine_held_before_is_not_reported() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", dir.path().join("test.db").display());
    for _ in 0..2 {
        let notifications = Notifications::default();
        let builder = TestBus::builder().with_real(&url);
        let bus = builder.open(notifier(&notifications)).await.unwrap();
        bus.publish(order()).await.unwrap().assert_handled();
        assert_eq!(bus.published::<OrderPlaced>(), [order()]);
        bus.assert_published::<NotificationSent>();
        assert_eq!(notifications.sent().len(), 1);
        assert!(bus.shutdown().await.unwrap().closed);
    }
}

// conformance: handlers/test-bus-virtual-time: retries wait in virtual time; moving the clock makes each attempt at its time
#[tokio::test]
async fn each_retry_is_made_at_its_own_virtual_time() {
    everywhere(|builder| async move {
        let clock = ManualClock::new("2026-03-01T12:00:00Z".parse().unwrap());
        let times = Arc::new(Mutex::new(Vec::new()));
        let (seen, at) = (times.clone(), clock.clone());
        let handler = move || {
            let now = everbus::Clock::now(&at);
            seen.lock().unwrap().push(now);
            async { Err::<(), _>(HandlerError::new("not yet")) }
        };
        let began = everbus::Clock::now(&clock);
        let router = Router::new().on("orders.order.placed", handler);
        let bus = builder.clock(clock).open(router).await.unwrap();
        let report = bus.publish(order()).await.unwrap();
        assert_eq!(times.lock().unwrap().len(), 1);
        bus.advance(Duration::from_millis(999)).await.unwrap();
        assert_eq!(times.lock().unwrap().len(), 1);
        // One move over all of them: 1, 2 and 4 seconds after each other.
        bus.advance(Duration::from_secs(3600)).await.unwrap();
        let waits = [0, 1, 3, 7].map(|seconds| began.plus(seconds * SECOND));
        assert_eq!(*times.lock().unwrap(), waits);
        assert_eq!(bus.now(), began.plus(Duration::from_millis(3_600_999)));
        let letters = bus.dead_letters().await.unwrap();
        assert_eq!(letters.len(), 1);
        assert_eq!(letters[0].record.event.id(), report.id());
        assert_eq!((letters[0].attempts, letters[0].died_at), (4, waits[3]));
    })
    .await;
}

// conformance: handlers/test-bus-report: a publish reports what became of the event in every group that wants it
#[tokio::test]
async fn a_publish_reports_what_became_of_the_event_in_each_group() {
    everywhere(|builder| async move {
        let answer =
            |answer: fn() -> HandlerError| move || async move { Err::<(), HandlerError>(answer()) };
        let router = Router::new()
            .on("user.*", to(|| async {}).group("fine"))
            .on(
                "user.*",
                to(answer(|| HandlerError::new("down"))).group("failing"),
            )
            .on(
                "user.*",
                to(answer(|| permanent("never"))).group("hopeless"),
            )
            .on("user.*", to(answer(|| skip("not mine"))).group("choosy"))
            .on("order.*", to(|| async {}).group("others"));
        let bus = builder.open(router).await.unwrap();
        let report = bus.publish(("user.created", json!({}))).await.unwrap();
        let due_at = bus.now().plus(SECOND);
        let reason = "not mine".to_owned();
        assert_eq!(report.fate("fine"), Some(&Fate::Handled));
        assert_eq!(report.fate("failing"), Some(&Fate::Retrying { due_at }));
        assert_eq!(report.fate("hopeless"), Some(&Fate::DeadLettered));
        assert_eq!(report.fate("choosy"), Some(&Fate::Skipped { reason }));
        assert_eq!(report.fate("others"), None);
        assert!(!report.is_handled());
        let errors: Vec<_> = report.failures().map(|f| f.error.as_str()).collect();
        assert_eq!(errors, ["down", "never"]);
        assert_eq!(report.groups().len(), 4);
        assert!(
            report
                .groups()
                .iter()
                .all(|happened| happened.attempts == 1)
        );

        let nobody = bus.publish(("invoice.sent", json!({}))).await.unwrap();
        assert!(nobody.groups().is_empty() && !nobody.is_handled());
    })
    .await;
}

// conformance: handlers/test-bus-report: a publish reports what became of the event in every group that wants it
#[tokio::test]
async fn the_report_of_a_repeated_publish_is_that_of_the_first() {
    let notifications = Notifications::default();
    let bus = TestBus::new(notifier(&notifications)).await.unwrap();
    let first = bus.publish(order_event()).await.unwrap();
    let again = bus.publish(order_event()).await.unwrap();
    assert_eq!(again, first);
    assert_eq!(notifications.sent().len(), 1);
}

// conformance: handlers/test-bus-run-to-end: the clock runs through all waiting retries until nothing waits
#[tokio::test]
async fn running_to_the_end_leaves_nothing_waiting() {
    everywhere(|builder| async move {
        let policy = RetryPolicy::default().max_retries(2);
        let router = Router::new()
            .on(
                "a",
                to(|| async { Err::<(), _>(HandlerError::new("no")) }).group("g"),
            )
            .on("a", to(|| async {}).group("h"));
        let builder = builder.bus(|bus| bus.retry(policy));
        let bus = builder.open(router).await.unwrap();
        for n in 0..3 {
            bus.publish_only(("a", n)).await.unwrap();
            bus.clock().advance(Duration::from_millis(100));
        }
        bus.run_to_end().await.unwrap();
        assert_eq!(bus.dead_letters().await.unwrap().len(), 3);
        let groups = bus.bus().groups().await.unwrap();
        assert!(groups.iter().all(|g| g.waiting == 0 && g.in_flight == 0));
        assert_eq!(
            bus.bus()
                .stats()
                .groups
                .values()
                .map(|g| g.handled)
                .sum::<u64>(),
            3
        );
    })
    .await;
}

#[tokio::test]
async fn a_retry_without_end_ends_the_test() {
    let policy = RetryPolicy::default().max_retries(1_000_000);
    let handler = to(|| async { Err::<(), _>(HandlerError::new("no")) }).retry(policy);
    let bus = TestBus::new(Router::new().on("a", handler)).await.unwrap();
    bus.publish(("a", 1)).await.unwrap();
    let error = bus.run_to_end().await.unwrap_err();
    assert_eq!(error.code(), everbus::Code::Timeout);
    assert!(error.message().contains("1000 moves"), "{error}");
}

// conformance: handlers/test-bus-fail-next: the next n calls of any handler, or of one handler, fail instead of running
#[tokio::test]
async fn the_next_calls_fail_and_the_handler_does_not_run() {
    let notifications = Notifications::default();
    let bus = TestBus::new(notifier(&notifications)).await.unwrap();
    bus.fail_next(2);
    let report = bus.publish(order()).await.unwrap();
    assert_eq!(report.groups()[0].failures.len(), 1);
    assert_eq!(
        report.groups()[0].failures[0].handler.as_deref(),
        Some("handle_order_placed")
    );
    bus.advance(SECOND).await.unwrap();
    assert!(notifications.sent().is_empty());
    bus.assert_not_published::<NotificationSent>();
    bus.advance(2 * SECOND).await.unwrap();
    assert_eq!(notifications.sent().len(), 1);
    bus.assert_handled(report.id());
    assert_eq!(bus.calls("handle_order_placed"), 3);
}

// conformance: handlers/test-bus-fail-next: the next n calls of any handler, or of one handler, fail instead of running
#[tokio::test]
async fn failures_can_be_kept_to_one_handler() {
    let router = Router::new()
        .on("a", to(|| async {}).group("g").name("first"))
        .on("a", to(|| async {}).group("h").name("second"));
    let bus = TestBus::new(router).await.unwrap();
    bus.fail_next_in("second", 4);
    bus.publish_only(("a", 1)).await.unwrap();
    bus.run_to_end().await.unwrap();
    assert_eq!((bus.calls("first"), bus.calls("second")), (1, 4));
    let letters = bus.dead_letters().await.unwrap();
    assert_eq!(letters.len(), 1);
    assert_eq!(letters[0].group.as_str(), "h");
    assert_eq!(letters[0].last_error(), "the test lets this call fail");
}

#[tokio::test]
#[should_panic = "there is no handler \"secnd\"; there are {\"second\"}"]
async fn a_misspelt_handler_is_found() {
    let router = Router::new().on("a", to(|| async {}).name("second"));
    let bus = TestBus::new(router).await.unwrap();
    assert_eq!(bus.calls("secnd"), 0);
}

// conformance: handlers/test-bus-settings: the settings of the bus, its configuration file included, hold in the test
#[tokio::test]
async fn the_bus_is_set_up_as_the_program_sets_it_up() {
    let config = everbus::Config::parse(
        "broker: {url: 'redis://cache:6379'}\n\
         consumers: {mail: {stream: 'orders:order-placed', retry: {max_attempts: 2}, circuit_breaker: off}}",
        "everbus.yaml",
    )
    .unwrap();
    let notifications = Notifications::default();
    let bus = TestBus::builder()
        .bus(|bus| bus.config(&config))
        .bus(|bus| bus.source("shop"))
        .open(notifier(&notifications).group("mail"))
        .await
        .unwrap();
    bus.fail_next(2);
    bus.publish(order()).await.unwrap();
    bus.run_to_end().await.unwrap();
    assert_eq!(bus.dead_letters().await.unwrap()[0].attempts, 2);
    let published = bus.published_events("orders.order.placed");
    let attributes = published[0].event.attributes().unwrap();
    assert_eq!(attributes.source.as_deref(), Some("shop"));
}

#[tokio::test]
async fn a_router_that_is_wrong_is_refused_as_by_any_bus() {
    let router = Router::new().on("orders.order.placed", handle_order_placed);
    let error = TestBus::new(router).await.unwrap_err();
    assert_eq!(error.code(), everbus::Code::InvalidSetting);
    assert!(error.message().contains("Notifications"), "{error}");
}

async fn relay(Json(left): Json<u32>, context: Context) -> Result<(), everbus::Error> {
    match left {
        0 => Ok(()),
        left => context.publish(("relay.step", left - 1)),
    }
}
