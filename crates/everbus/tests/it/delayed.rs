//! Events that are published for a later time.

use std::time::Duration;

use everbus::{Clock as _, Event};

use crate::support::{eventually, fine, is_done, on_every_engine, recorder};

const HOUR: Duration = Duration::from_secs(3600);

// conformance: operations/publish-later: an event that is published for a later time is stored at once and handed to no group before; that is no attempt, and it does not age meanwhile
#[tokio::test]
async fn an_event_for_later_is_handled_then() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let (handler, mut seen) = recorder(fine);
        let subscribe = bus.subscribe("a.b").group("g");
        subscribe
            .max_staleness(HOUR / 2)
            .handler(handler)
            .await
            .unwrap();
        bus.start().await.unwrap();
        let at = lab.clock.now().plus(HOUR);
        let later = Event::builder("a.b").json(&1).at(at).build().unwrap();
        bus.publish(later).await.unwrap();
        bus.publish(("a.b", 2)).await.unwrap();
        let first: u64 = seen.next().await.json().unwrap();
        assert_eq!(first, 2, "the one for later does not come first");
        eventually("it waits for its time", || async {
            let group = bus.groups().await.unwrap().remove(0);
            (group.waiting, group.in_flight) == (1, 0)
        })
        .await;
        lab.clock.advance(HOUR - Duration::from_secs(1));
        assert!(!is_done(&bus, 1, "g").await);
        lab.clock.advance(Duration::from_secs(1));
        let message = seen.next().await;
        assert_eq!(message.json::<u64>().unwrap(), 1);
        assert_eq!((message.attempt(), message.failures().len()), (1, 0));
        bus.shutdown().await.unwrap();
    })
    .await;
}
