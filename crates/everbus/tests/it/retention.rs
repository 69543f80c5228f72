//! Retention runs by itself where the bus was given one.

use std::time::Duration;

use everbus::duty::LastRun;
use everbus::{Code, Cursor, Retention};

use crate::support::{eventually, on_every_engine};

// conformance: bus/retention: the log is pruned by length, and what a group still owes work on stays.
#[tokio::test]
async fn a_started_bus_prunes_what_no_group_needs_any_more() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        bus.subscribe("*").handler(|| async {}).await.unwrap();
        bus.subscribe("owed")
            .group("g")
            .handler(std::future::pending::<()>)
            .await
            .unwrap();
        bus.start().await.unwrap();
        for n in 0..10 {
            bus.publish(("done", n))
                .await
                .unwrap()
                .settled()
                .await
                .unwrap();
        }
        let owed = bus.publish(("owed", 1)).await.unwrap();
        let retention = Retention {
            max_len: Some(0),
            ..Retention::default()
        };
        let pruning = lab
            .builder()
            .retention(retention.clone())
            .retention_delay(Duration::ZERO)
            .with_engine(bus.engine().clone())
            .unwrap();
        pruning.start().await.unwrap();
        let kept = || async {
            let log = bus.log().unwrap();
            let (events, _) = log
                .read(Cursor::START, vec!["*".parse().unwrap()], 100)
                .await
                .unwrap();
            events
        };
        eventually("the log is pruned", || async { kept().await.len() == 1 }).await;
        assert_eq!(kept().await[0].event.id(), owed.id());
        bus.shutdown_within(std::time::Duration::ZERO)
            .await
            .unwrap();
    })
    .await;
}

// conformance: handlers/inbox-retention: the inbox forgets after its own time, which is at least as long as events are kept.
#[tokio::test]
async fn the_inbox_forgets_what_was_handled_long_ago() {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        bus.subscribe("a")
            .group("g")
            .idempotent()
            .handler(|| async {})
            .await
            .unwrap();
        bus.start().await.unwrap();
        let publish = async || {
            let receipt = bus.publish(("a", 1)).await.unwrap();
            receipt.settled().await.unwrap();
            receipt
        };
        let old = publish().await;
        lab.clock.advance(2 * DAY);
        let new = publish().await;
        let mut records = Vec::new();
        for receipt in [&old, &new] {
            records.extend(bus.lookup().unwrap().find(receipt.id()).await.unwrap());
        }
        let handled = || async {
            let group = everbus::GroupName::new("g").unwrap();
            let inbox = bus.engine().inbox().unwrap();
            inbox.handled(group, records.clone()).await.unwrap()
        };
        assert_eq!(handled().await, [true, true]);
        let retention = Retention {
            max_age: Some(DAY),
            ..Retention::default()
        };
        let too_short = lab
            .builder()
            .retention(retention.clone())
            .inbox_retention(DAY / 2)
            .with_engine(bus.engine().clone());
        assert_eq!(too_short.unwrap_err().code(), Code::InvalidSetting);
        let pruning = lab
            .builder()
            .retention(retention.clone())
            .inbox_retention(DAY)
            .retention_delay(Duration::ZERO)
            .with_engine(bus.engine().clone())
            .unwrap();
        pruning.start().await.unwrap();
        eventually("the inbox is pruned", || async {
            handled().await == [false, true]
        })
        .await;
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: memory/retention-by-itself: the job runs by itself, with the standard unless told otherwise
// conformance: memory/retention-lease: of several buses one runs it, and it is on record which
// conformance: omni/daily-job: old payloads and dead letters go by a job that runs daily
#[tokio::test]
async fn the_standard_is_on_by_default_and_can_be_switched_off() {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        bus.subscribe("a")
            .group("g")
            .handler(|| async { Err::<(), _>(everbus::HandlerError::permanent("no")) })
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 1)).await.unwrap();
        receipt.settled().await.unwrap();
        // The clock is read now and then, so that it is no leap.
        for _ in 0..16 {
            let maintenance = bus.engine().maintenance().unwrap();
            assert_eq!(maintenance.look_at_clock().await.unwrap(), None);
            lab.clock.advance(2 * DAY);
        }
        let dead = || async { bus.dead_letters().list().await.unwrap() };
        let last_run = async || LastRun::of(bus.engine(), "retention").await.unwrap();
        let keeping = lab
            .builder()
            .keep_everything()
            .retention_delay(Duration::ZERO)
            .with_engine(bus.engine().clone())
            .unwrap();
        keeping.start().await.unwrap();
        assert_eq!(dead().await.len(), 1);
        let start = |name: &'static str| {
            let builder = lab.builder().source(name);
            let bus = builder
                .retention_delay(Duration::ZERO)
                .with_engine(bus.engine().clone())
                .unwrap();
            async move {
                bus.start().await.unwrap();
                bus
            }
        };
        let first = start("first").await;
        eventually("the dead letter is gone", || async {
            dead().await.is_empty()
        })
        .await;
        eventually("the run is on record", || async {
            last_run().await.is_some()
        })
        .await;
        let record = last_run().await.unwrap();
        assert!(record.owner.starts_with("first, process "), "{record:?}");
        assert_eq!(record.at, everbus::Clock::now(&lab.clock));
        // A day later another one does it.
        lab.clock.advance(DAY);
        let second = start("second").await;
        eventually("another one has run it", || async {
            last_run().await.unwrap().owner.starts_with("second")
        })
        .await;
        drop((keeping, first, second));
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: memory/retention-clock-waits: while the clock is in doubt retention does not run by itself, and says so
// conformance: memory/retention-clock-grace: after a day of running it does
#[tokio::test]
async fn a_clock_that_leaps_takes_no_dead_letters() {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    on_every_engine(|lab| async move {
        let bus = lab.open_impatient().await;
        bus.subscribe("a")
            .group("g")
            .handler(|| async { Err::<(), _>(everbus::HandlerError::permanent("no")) })
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("a", 1)).await.unwrap();
        receipt.settled().await.unwrap();
        let maintenance = bus.engine().maintenance().unwrap();
        assert_eq!(maintenance.look_at_clock().await.unwrap(), None);
        let before = everbus::Clock::now(&lab.clock);
        lab.clock.advance(31 * DAY);
        let waits = |who: &str| {
            let lines = crate::logs::lines(|line| {
                let owner = line.field("owner").unwrap_or_default();
                line.target == "everbus::retention" && owner.starts_with(who)
            });
            lines.iter().any(|line| {
                assert_eq!(line.field("before"), Some(&*before.to_string()));
                line.field("message").unwrap().contains("retention waits")
            })
        };
        // One bus after another looks, an hour later each.
        let mut buses = Vec::new();
        for hour in 0..24 {
            let who = format!("the bus of hour {hour} on {:?}", lab.kind);
            let looking = lab
                .builder()
                .source(&*who)
                .retention_delay(Duration::ZERO)
                .with_engine(bus.engine().clone())
                .unwrap();
            looking.start().await.unwrap();
            eventually("it has looked, and says that it waits", || async {
                waits(&who)
            })
            .await;
            assert_eq!(bus.dead_letters().list().await.unwrap().len(), 1, "{hour}");
            let last = LastRun::of(bus.engine(), "retention").await;
            assert_eq!(last.unwrap(), None);
            // A bus that goes takes the engine with it.
            buses.push(looking);
            lab.clock.advance(DAY / 24);
        }
        let last = lab
            .builder()
            .retention_delay(Duration::ZERO)
            .with_engine(bus.engine().clone())
            .unwrap();
        last.start().await.unwrap();
        eventually("the dead letter is gone", || async {
            bus.dead_letters().list().await.unwrap().is_empty()
        })
        .await;
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: handlers/inbox-retention: the inbox remembers at least as long as the longest stream
#[tokio::test]
async fn the_inbox_remembers_as_long_as_the_longest_stream() {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    let open = |retention: Retention, days: u32| {
        let builder = everbus::Bus::builder().retention(retention);
        builder.inbox_retention(days * DAY).open("memory:")
    };
    assert!(open(Retention::omni(), 90).await.is_ok());
    for wrong in [
        open(Retention::omni(), 89).await,
        open(Retention::standard(), 365).await,
    ] {
        assert_eq!(wrong.unwrap_err().code(), Code::InvalidSetting);
    }
    let zero = Retention {
        payloads: Some(Duration::ZERO),
        ..Retention::standard()
    };
    let refused = everbus::Bus::builder()
        .retention(zero)
        .open("memory:")
        .await;
    assert_eq!(refused.unwrap_err().code(), Code::InvalidSetting);
}
