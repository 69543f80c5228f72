//! Events that come too late are skipped where that is allowed, and only there.

use std::time::Duration;

use everbus::{BusBuilder, Clock, Event, EventBuilder, HandlerError, Json, Router, Timestamp, to};
use tracing::Level;

use crate::handlers::answers::skip_reason;
use crate::logs::lines_about;
use crate::support::{
    Lab, counted, fine, handled, is_done, on_every_durable_engine, on_every_engine, recorder,
    wait_for_retry,
};

const SECOND: Duration = Duration::from_secs(1);

/// An event of this age.
fn aged(lab: &Lab, event_type: &str, age: Duration) -> EventBuilder {
    Event::builder(event_type).occurred_at(lab.clock.now().minus(age))
}

// conformance: handlers/staleness-skip: a stale event is acked, counted with the reason stale, and logged.
// conformance: framework/backpressure-stale: an event older than max_staleness is not processed but acknowledged; it is logged with event_age_ms and max_staleness_ms and counted with reason stale.
#[tokio::test]
async fn an_event_older_than_its_handler_allows_is_skipped() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let (handler, mut seen) = recorder(fine);
        let subscribe = bus.subscribe("a").group("g").name("prices");
        subscribe
            .max_staleness(5 * SECOND)
            .handler(handler)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let late = handled(
            &bus,
            aged(&lab, "a", 5 * SECOND + Duration::from_millis(20)),
        )
        .await;
        assert!(is_done(&bus, late.seq(), "g").await);
        assert!(seen.is_empty(), "the handler did not run");
        let stats = counted(&bus).await;
        let of_g = &stats.groups[&"g".parse().unwrap()];
        assert_eq!((of_g.skipped.stale, of_g.skipped.total()), (1, 1));
        assert_eq!((of_g.handled, of_g.failed), (0, 0));
        let logged = lines_about(late.id());
        assert_eq!(logged.len(), 1, "{logged:?}");
        let line = &logged[0];
        assert_eq!(line.level, Level::WARN);
        assert_eq!(line.field("event_age_ms"), Some("5020"));
        assert_eq!(line.field("max_staleness_ms"), Some("5000"));
        assert_eq!(line.field("reason"), Some("stale"));
        assert_eq!(line.field("event_type"), Some("a"));
        assert_eq!(line.field("group"), Some("g"));
        assert_eq!(line.field("handler"), Some("prices"));

        // Exactly as old as it may be, and one from a clock that is ahead.
        handled(&bus, aged(&lab, "a", 5 * SECOND)).await;
        seen.next().await;
        let ahead = lab.clock.now().plus(60 * SECOND);
        handled(&bus, Event::builder("a").occurred_at(ahead)).await;
        seen.next().await;
        assert_eq!(counted(&bus).await.types["a"].skipped.stale, 1);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/staleness-skip: the reason is recorded.
#[tokio::test]
async fn the_reason_of_a_stale_event_is_recorded() {
    on_every_durable_engine(|lab| async move {
        let bus = lab.open().await;
        let subscribe = bus.subscribe("a").max_staleness(SECOND);
        subscribe.handler(|| async {}).await.unwrap();
        bus.start().await.unwrap();
        let late = handled(&bus, aged(&lab, "a", 2 * SECOND)).await;
        bus.shutdown().await.unwrap();
        assert_eq!(skip_reason(&lab, late.seq()), "stale");
    })
    .await;
}

// conformance: handlers/staleness-zero: 0 never skips.
// conformance: framework/backpressure-stale-zero: a threshold of 0 means never skip, regardless of age.
#[tokio::test]
async fn zero_never_skips() {
    on_every_engine(|lab| async move {
        let bus = lab
            .open_with(lab.builder().max_staleness("a", Duration::ZERO))
            .await;
        let (handler, mut seen) = recorder(fine);
        bus.subscribe("a").handler(handler).await.unwrap();
        bus.start().await.unwrap();
        handled(&bus, Event::builder("a").occurred_at(Timestamp::EPOCH)).await;
        seen.next().await;
        assert_eq!(counted(&bus).await.types["a"].skipped.total(), 0);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/staleness-stream: max_staleness is per stream, named in either spelling, for every group.
// conformance: framework/backpressure-stale-streams: staleness thresholds are configured per stream.
#[tokio::test]
async fn a_stream_has_its_limit_in_either_spelling() {
    on_every_engine(|lab| async move {
        type Said = fn(BusBuilder) -> BusBuilder;
        let spellings: [Said; 2] = [
            |builder| builder.max_staleness("signals:price-update", 5 * SECOND),
            |builder| builder.max_staleness("signals.price.update", 5 * SECOND),
        ];
        for (index, said) in spellings.into_iter().enumerate() {
            let lab = Lab::new(lab.kind);
            let bus = lab.open_with(said(lab.builder())).await;
            let (handler, mut seen) = recorder(fine);
            let (beside, mut others) = recorder(fine);
            let group = bus.subscribe("signals.>").group("g");
            group.handler(handler).await.unwrap();
            bus.subscribe("signals.>")
                .group("h")
                .handler(beside)
                .await
                .unwrap();
            bus.start().await.unwrap();
            handled(&bus, aged(&lab, "signals.price.update", 6 * SECOND)).await;
            assert!(seen.is_empty() && others.is_empty(), "spelling {index}");
            // Another stream, as old as it likes.
            handled(&bus, aged(&lab, "signals.signal.generated", 6 * SECOND)).await;
            assert_eq!(seen.next().await.event_type(), "signals.signal.generated");
            others.next().await;
            handled(&bus, aged(&lab, "signals.price.update", 4 * SECOND)).await;
            seen.next().await;
            assert_eq!(
                counted(&bus).await.types["signals.price.update"]
                    .skipped
                    .stale,
                2
            );
            // The events themselves may be named either way too.
            let other = bus.subscribe("signals:price-update").group("g");
            let (handler, mut seen) = recorder(fine);
            other.handler(handler).await.unwrap();
            handled(&bus, aged(&lab, "signals:price-update", 6 * SECOND)).await;
            assert!(seen.is_empty());
            bus.shutdown().await.unwrap();
        }
    })
    .await;
}

// conformance: handlers/staleness-handler: what a handler says goes before what is said of its stream; another handler of the group is not concerned.
#[tokio::test]
async fn a_handler_of_its_own_mind_is_not_skipped() {
    on_every_engine(|lab| async move {
        let bus = lab
            .open_with(lab.builder().max_staleness("a", 5 * SECOND))
            .await;
        let (patient, mut patiently) = recorder(fine);
        let (hasty, mut hastily) = recorder(fine);
        let (usual, mut usually) = recorder(fine);
        let router = Router::new()
            .on("a", to(hasty).max_staleness(SECOND))
            .on("a", to(patient).max_staleness(Duration::ZERO))
            .on("a", usual);
        bus.mount(router).await.unwrap();
        bus.start().await.unwrap();
        handled(&bus, aged(&lab, "a", 60 * SECOND)).await;
        patiently.next().await;
        assert!(hastily.is_empty() && usually.is_empty());
        handled(&bus, aged(&lab, "a", 3 * SECOND)).await;
        patiently.next().await;
        usually.next().await;
        assert!(hastily.is_empty());
        // They were handled.
        let stats = counted(&bus).await;
        assert_eq!(
            (stats.types["a"].handled, stats.types["a"].skipped.total()),
            (2, 0)
        );
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/staleness-replay: an event that carries replay_of is exempt.
#[tokio::test]
async fn a_replayed_event_is_never_stale() {
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        let (handler, mut seen) = recorder(fine);
        bus.subscribe("a")
            .max_staleness(SECOND)
            .handler(handler)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let replay = aged(&lab, "a", 1000 * SECOND).meta("replay_of", "the first one");
        handled(&bus, replay).await;
        seen.next().await;
        handled(&bus, aged(&lab, "a", 1000 * SECOND).meta("other", "entry")).await;
        assert!(seen.is_empty());
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/staleness-retry: an event that grew stale while it waited for its retry is skipped then.
#[tokio::test]
async fn an_event_may_grow_stale_while_it_waits() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let fails = |Json(_): Json<u8>| async { Err::<(), _>(HandlerError::new("down")) };
        bus.subscribe("a")
            .max_staleness(SECOND / 2)
            .handler(fails)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let event = aged(&lab, "a", Duration::ZERO).json(&1);
        let receipt = bus.publish(event).await.unwrap();
        let state = wait_for_retry(&bus, receipt.seq(), "", 1).await;
        lab.clock.set(state.due_at.unwrap());
        let settled = receipt.settled().await.unwrap();
        assert!(settled.dead_lettered.is_empty());
        let stats = counted(&bus).await;
        assert_eq!(
            (stats.types["a"].failed, stats.types["a"].skipped.stale),
            (1, 1)
        );
        bus.shutdown().await.unwrap();
    })
    .await;
}
