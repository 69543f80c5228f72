//! Retention runs by itself where the bus was given one.

use everbus::Retention;

use crate::support::{eventually, on_every_engine};

// conformance: issue-2/retention: the log is pruned by length, and what a group still owes work on stays.
#[tokio::test]
async fn a_started_bus_prunes_what_nobody_needs_any_more() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        bus.subscribe("*")
            .handler(|_| async { Ok(()) })
            .await
            .unwrap();
        bus.subscribe("owed")
            .group("g")
            .handler(|_| std::future::pending())
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
            .retention(retention)
            .with_engine(bus.engine().clone())
            .unwrap();
        pruning.start().await.unwrap();
        let kept = || async {
            let log = bus.log().unwrap();
            let (events, _) = log.read(0, vec!["*".parse().unwrap()], 100).await.unwrap();
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
