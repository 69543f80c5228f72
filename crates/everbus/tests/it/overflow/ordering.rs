//! The object is durable before the event that refers to it is appended, by a publish, a handler or a relay.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use everbus::core::{
    Appended, BoxFuture, Broker, ConsumeOptions, Consumer, GroupSpec, Lease, Settlement,
    SubscriptionInfo,
};
use everbus::overflow::Collect;
use everbus::{
    Bus, Capabilities, Code, Context, Engine, Error, Event, EventId, GroupInfo, GroupName, Json,
    Result, Router, handled,
};

use super::Shelf;
use crate::support::{Kind, Lab, handled as all_handled, on_every_engine, published};

/// An engine that looks for the object of every event it is given, and can lose appends.
struct Watching {
    inner: Arc<dyn Broker>,
    objects: PathBuf,
    seen: Arc<AtomicUsize>,
    /// Every append ends with this error.
    fail: Option<Error>,
}

impl Watching {
    fn look(&self, events: &[Event]) {
        for overflow in events.iter().filter_map(Event::overflow) {
            let object = std::fs::metadata(self.objects.join(&overflow.key));
            let size = object.expect("the object is there before the event").len();
            assert_eq!(size, overflow.size);
            self.seen.fetch_add(1, Ordering::SeqCst);
        }
    }
}

impl Broker for Watching {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn declare(&self, group: GroupSpec) -> BoxFuture<'_, Result<Vec<SubscriptionInfo>>> {
        self.inner.declare(group)
    }

    fn retract(&self, subscription: EventId) -> BoxFuture<'_, Result<()>> {
        self.inner.retract(subscription)
    }

    fn remove_group(&self, group: GroupName) -> BoxFuture<'_, Result<()>> {
        self.inner.remove_group(group)
    }

    fn append(&self, batch: Vec<Event>) -> BoxFuture<'_, Result<Vec<Result<Appended>>>> {
        self.look(&batch);
        if let Some(error) = &self.fail {
            return Box::pin(std::future::ready(Err(error.clone())));
        }
        self.inner.append(batch)
    }

    fn consume(
        &self,
        group: GroupName,
        options: ConsumeOptions,
    ) -> BoxFuture<'_, Result<Box<dyn Consumer>>> {
        self.inner.consume(group, options)
    }

    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        settlements.iter().for_each(|s| self.look(&s.follow_ups));
        self.inner.settle(settlements)
    }

    fn extend(&self, leases: Vec<Lease>, by: Duration) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        self.inner.extend(leases, by)
    }

    fn inspect(&self) -> BoxFuture<'_, Result<Vec<GroupInfo>>> {
        self.inner.inspect()
    }

    fn close(&self) -> BoxFuture<'_, Result<()>> {
        self.inner.close()
    }
}

async fn watching(shelf: &Shelf, fail: Option<Error>) -> (Bus, Arc<AtomicUsize>) {
    let below = shelf.lab.open().await;
    let seen = Arc::new(AtomicUsize::new(0));
    let broker = Watching {
        inner: below.engine().broker.clone(),
        objects: shelf.objects(),
        seen: seen.clone(),
        fail,
    };
    let engine = Engine {
        broker: Arc::new(broker),
        ..below.engine().clone()
    };
    let builder = shelf.lab.builder().overflow(shelf.overflow());
    (builder.with_engine(engine).unwrap(), seen)
}

// conformance: fault-11/object-first: the object is there before the event is appended, by publish, by batch and by a handler's ack
// conformance: memory/overflow-durable: the object is durable before the event commits
#[tokio::test]
async fn the_object_is_there_before_the_event() {
    let shelf = Shelf::new(Lab::new(Kind::Memory));
    let (bus, seen) = watching(&shelf, None).await;
    let large = |n: usize| ("first", format!("{n}{}", "x".repeat(3000)));
    let answer = |Json(text): Json<String>, context: Context| async move {
        context.publish(("second", text))?;
        handled()
    };
    bus.mount(Router::new().on("first", answer)).await.unwrap();
    bus.start().await.unwrap();
    all_handled(&bus, large(0)).await;
    for receipt in bus.publish_batch((1..4).map(large)).await.unwrap() {
        receipt.settled().await.unwrap();
    }
    assert_eq!(published(&bus, "second").await.len(), 4);
    assert_eq!(seen.load(Ordering::SeqCst), 8);
    bus.shutdown().await.unwrap();
}

// conformance: fault-11/append-fails: a publish that fails after its object was put leaves no event, and at most one object with a note, which the collector deletes
// conformance: memory/overflow-note-first: every object is noted before it is put, and the note is gone when the event is there
#[tokio::test]
async fn a_publish_that_fails_leaves_an_object_at_most() {
    on_every_engine(|lab| async move {
        let shelf = Shelf::new(lab);
        let refused = Error::new(Code::Busy, "planted");
        for (error, left) in [
            (None, 1),
            (Some(refused.clone()), 1),
            (Some(refused.with_unknown_outcome()), 2),
        ] {
            let fails = error.is_some();
            let (bus, seen) = watching(&shelf, error).await;
            let published = bus.publish(("a", "x".repeat(3000))).await;
            assert_eq!(published.is_err(), fails);
            assert_eq!(seen.load(Ordering::SeqCst), 1);
            assert_eq!(shelf.files().len(), left);
            let orphans = bus.engine().orphans().unwrap();
            let notes = orphans.list().await.unwrap();
            assert_eq!(notes.len(), usize::from(fails), "{notes:?}");
            let at_once = Collect {
                strays_after: Duration::ZERO,
                ..Collect::default()
            };
            let done = bus.collect_objects(&at_once).await.unwrap();
            assert_eq!(done.strays, left as u64 - 1);
            assert_eq!(orphans.list().await.unwrap(), []);
            assert_eq!(shelf.files().len(), 1, "that of the event");
        }
    })
    .await;
}
