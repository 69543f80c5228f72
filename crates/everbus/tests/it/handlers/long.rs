//! Handlers that work long: they learn of their lease and of a shutdown, and report progress.

use std::sync::atomic::Ordering;
use std::time::Duration;

use everbus::{Bus, Code, Context, HandlerError, RetryPolicy, to};
use serde_json::json;
use tokio::sync::mpsc;

use crate::faulty::faulty;
use crate::support::{Kind, Lab, eventually, given_up, on_every_engine};

const TIMEOUT: Duration = Duration::from_secs(300);
/// Leases last ten seconds longer than the timeout, and are extended three times in that time.
const LEASE: Duration = Duration::from_secs(310);
const THIRD: Duration = Duration::from_secs(104);

/// Subscribes a handler that says which attempt begins, and then which one loses its lease.
async fn telling(bus: &Bus) -> mpsc::UnboundedReceiver<String> {
    let (sender, said) = mpsc::unbounded_channel();
    let handler = move |context: Context| {
        let sender = sender.clone();
        async move {
            let _ = sender.send(format!("begins {}", context.attempt()));
            context.lease_lost().await;
            let _ = sender.send(format!("lost {}", context.attempt()));
        }
    };
    let subscribe = bus.subscribe("a").timeout(TIMEOUT);
    subscribe.handler(handler).await.unwrap();
    said
}

// conformance: contract/lease-lost: a handler can wait for the loss of its lease; only the delivery that lost it is told
#[tokio::test(start_paused = true)]
async fn a_handler_learns_that_its_lease_was_lost() {
    let (bus, _, clock) = faulty().await;
    let mut said = telling(&bus).await;
    bus.start().await.unwrap();
    bus.publish(("a", 1)).await.unwrap();
    assert_eq!(said.recv().await.unwrap(), "begins 1");
    tokio::time::sleep(THIRD).await;
    assert!(said.is_empty(), "the lease is kept");
    // As if this process had been stopped for an hour.
    clock.advance(Duration::from_secs(3600));
    assert_eq!(said.recv().await.unwrap(), "begins 2");
    assert_eq!(said.recv().await.unwrap(), "lost 1");
    tokio::time::sleep(THIRD).await;
    assert!(said.is_empty(), "the second delivery is not told");
    bus.shutdown_within(Duration::ZERO).await.unwrap();
}

// conformance: contract/lease-lost: a lease that ends while the engine cannot be reached is lost too
#[tokio::test(start_paused = true)]
async fn a_lease_that_ends_during_an_outage_is_lost() {
    let (bus, faults, _) = faulty().await;
    let (sender, mut said) = mpsc::unbounded_channel();
    let handler = move |context: Context| {
        let sender = sender.clone();
        async move {
            context.extend(TIMEOUT * 10);
            let _ = sender.send("begins");
            context.lease_lost().await;
            let _ = sender.send("lost");
        }
    };
    let subscribe = bus.subscribe("a").timeout(TIMEOUT);
    subscribe.handler(handler).await.unwrap();
    bus.start().await.unwrap();
    bus.publish(("a", 1)).await.unwrap();
    assert_eq!(said.recv().await.unwrap(), "begins");
    faults.extend.add(1_000_000, Code::Unavailable);
    let began = tokio::time::Instant::now();
    assert_eq!(said.recv().await.unwrap(), "lost");
    assert!(began.elapsed() >= LEASE, "{:?}", began.elapsed());
    bus.shutdown_within(Duration::ZERO).await.unwrap();
}

// conformance: contract/shutting-down: a handler can wait for the shutdown, and its outcome counts
#[tokio::test]
async fn a_handler_learns_that_the_bus_shuts_down() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (sender, mut said) = mpsc::unbounded_channel();
        let handler = move |context: Context| {
            let sender = sender.clone();
            async move {
                let _ = sender.send("begins");
                context.shutting_down().await;
            }
        };
        bus.subscribe("a").handler(handler).await.unwrap();
        bus.start().await.unwrap();
        bus.publish(("a", 1)).await.unwrap();
        said.recv().await.unwrap();
        let report = bus.shutdown().await.unwrap();
        assert_eq!((report.abandoned, report.unsettled), (0, 0));
    })
    .await;
}

// conformance: contract/lease-extensions: the runtime tells a handler of each extension of its lease
// conformance: contract/progress: a handler reports progress, which is shown while it runs
#[tokio::test(start_paused = true)]
async fn a_handler_is_told_of_extensions_and_its_progress_is_shown() {
    let (bus, faults, _) = faulty().await;
    let (sender, mut said) = mpsc::unbounded_channel();
    let handler = move |context: Context| {
        let sender = sender.clone();
        async move {
            let mut extensions = context.extensions();
            for part in 1..=2 {
                context.progress(&json!({ "part": part }))?;
                let extension = extensions.next().await;
                let _ = sender.send(extension);
            }
            Ok::<_, HandlerError>(())
        }
    };
    let subscribe = bus.subscribe("a").group("g").name("long");
    subscribe.timeout(TIMEOUT).handler(handler).await.unwrap();
    bus.start().await.unwrap();
    assert!(bus.activities().is_empty());
    let receipt = bus.publish(("a", 1)).await.unwrap();
    for part in 1..=2 {
        eventually("it is shown", || async {
            let shown = bus.activities();
            shown
                .first()
                .is_some_and(|first| first.activity.value == json!({ "part": part }))
        })
        .await;
        let shown = &bus.activities()[0];
        assert_eq!(shown.event_id, receipt.id());
        assert_eq!((shown.group.as_str(), &*shown.handler), ("g", "long"));
        assert_eq!((shown.attempt, shown.extensions), (1, part - 1));
        let extension = said.recv().await.unwrap().unwrap();
        assert_eq!(extension.number, part);
        assert_eq!(extension.activity.unwrap().value, json!({ "part": part }));
        // The clock of the bus stands still here.
        let from_now = extension.until.since(receipt.received_at());
        assert_eq!(from_now, LEASE);
        assert_eq!(faults.extended.load(Ordering::SeqCst) as u64, part);
    }
    receipt.settled().await.unwrap();
    eventually("it is over", || async { bus.activities().is_empty() }).await;
    bus.shutdown().await.unwrap();
}

// conformance: contract/progress: the last progress is part of the error of an attempt that timed out; progress is small
#[tokio::test]
async fn a_timeout_tells_the_last_progress() {
    let lab = Lab::new(Kind::Memory);
    let bus = lab.open_impatient().await;
    let handler = |context: Context| async move {
        let error = context.progress(&"x".repeat(5000)).unwrap_err();
        assert_eq!(error.code(), Code::PayloadTooLarge);
        context.progress("page 7 of 9").unwrap();
        std::future::pending::<()>().await;
    };
    let subscribe = bus.subscribe("a").timeout(Duration::from_millis(20));
    subscribe.handler(handler).await.unwrap();
    bus.start().await.unwrap();
    let letter = given_up(&bus, ("a", 1)).await;
    assert!(
        letter
            .last_error()
            .ends_with("last progress: \"page 7 of 9\""),
        "{}",
        letter.last_error()
    );
    assert!(bus.activities().is_empty());
    bus.shutdown().await.unwrap();
}

/// A handler that asks for nothing is not watched.
#[tokio::test]
async fn a_handler_that_asks_for_nothing_shows_nothing() {
    let lab = Lab::new(Kind::Memory);
    let bus = lab.open().await;
    let router = everbus::Router::new().retry(RetryPolicy::never()).on(
        "a",
        to(|context: Context| async move {
            context.attempt();
        }),
    );
    bus.mount(router).await.unwrap();
    bus.start().await.unwrap();
    crate::support::handled(&bus, ("a", 1)).await;
    assert!(bus.activities().is_empty());
    bus.shutdown().await.unwrap();
}
