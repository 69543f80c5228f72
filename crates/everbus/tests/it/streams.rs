//! Declared streams: what none covers is refused, and everything that takes a stream goes by them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use everbus::core::{Appended, BoxFuture, Broker, BrokerLayer, GroupSpec, SubscriptionInfo};
use everbus::{
    Bus, Code, Event, HandlerError, Message, OnFull, Recorded, Retention, RetryPolicy, Router,
    Stream, StreamLimit, Streams,
};
use tokio::sync::Semaphore;

use crate::support::{PATIENCE, eventually, on_every_engine};

const DAY: Duration = Duration::from_secs(24 * 3600);

fn shop() -> Streams {
    let orders = Stream::new("ORDERS", ["order.>", "cart.*"]).unwrap();
    let users = Stream::new("USERS", ["user.>"]).unwrap();
    Streams::new([orders, users]).unwrap()
}

async fn stored(bus: &Bus) -> Vec<String> {
    let all = vec!["*".parse().unwrap(), "system.>".parse().unwrap()];
    let (events, _) = bus
        .log()
        .unwrap()
        .read(everbus::Cursor::START, all, 1000)
        .await
        .unwrap();
    let types = events.iter().map(|e| e.event.event_type().to_owned());
    types.collect()
}

// conformance: contract/streams-publish: a type that no declared stream covers is refused at publish, and nothing is stored
// conformance: omni/streams-system: a type that no declared stream covers is refused at publish, and nothing is stored
#[tokio::test]
async fn a_type_that_no_stream_covers_is_refused_at_publish() {
    on_every_engine(|lab| async move {
        let bus = lab.open_with(lab.builder().streams(shop())).await;
        let error = bus.publish(("usr.created", 1)).await.unwrap_err();
        assert_eq!(error.code(), Code::NoStream);
        assert!(error.message().contains("usr.created"), "{error}");
        let hint = error.hint_text().unwrap();
        assert!(hint.contains("USERS (user.>)"), "{hint}");
        assert!(hint.contains("ORDERS (order.>, cart.*)"), "{hint}");
        // A batch is taken whole or not at all.
        let batch = bus.publish_batch([("order.placed", 1), ("payment.made", 1)]);
        assert_eq!(batch.await.unwrap_err().code(), Code::NoStream);
        for event_type in ["order.placed", "order:was-placed", "cart.filled"] {
            bus.publish((event_type, 1)).await.unwrap();
        }
        let kept = ["order.placed", "order:was-placed", "cart.filled"];
        assert_eq!(stored(&bus).await, kept);
    })
    .await;
}

// conformance: contract/streams-mount: a subscription that no declared stream can serve is refused at mount, and nothing is subscribed
#[tokio::test]
async fn a_subscription_that_no_stream_serves_is_refused_at_mount() {
    on_every_engine(|lab| async move {
        let bus = lab.open_with(lab.builder().streams(shop())).await;
        for pattern in ["payment.made", "payment.>", "*.*.*.shipped.now"] {
            let router = Router::new()
                .on("order.placed", async || {})
                .on(pattern, async || {})
                .group("g");
            let mounted = bus.mount(router).await;
            if pattern.starts_with("payment") {
                assert_eq!(mounted.unwrap_err().code(), Code::NoStream, "{pattern}");
                assert!(bus.groups().await.unwrap().is_empty());
                let alone = bus.subscribe(pattern).handler(|| async {});
                assert_eq!(alone.await.unwrap_err().code(), Code::NoStream);
            } else {
                mounted.unwrap();
            }
        }
    })
    .await;
}

// conformance: contract/streams-follow-ups: an event that a handler returns and no stream covers dead-letters its cause
#[tokio::test]
async fn a_follow_up_without_a_stream_is_a_failure_of_its_handler() {
    on_every_engine(|lab| async move {
        let builder = lab.builder().streams(shop());
        let bus = lab.open_with(builder.retry(RetryPolicy::never())).await;
        let emit = async || Event::builder("payment.made").json(&1).build();
        bus.mount(Router::new().on("order.placed", emit))
            .await
            .unwrap();
        bus.start().await.unwrap();
        let receipt = bus.publish(("order.placed", 1)).await.unwrap();
        receipt.settled().await.unwrap();
        let letter = bus.dead_letters().list().await.unwrap().remove(0);
        assert!(letter.last_error().contains("NoStream"), "{letter:?}");
        // The notice of the death is in the stream of the system's own events.
        assert_eq!(stored(&bus).await, ["order.placed", "system.dead_letter"]);
    })
    .await;
}

// conformance: contract/streams-limits: the limit of a stream counts the events of all its types, and no others
#[tokio::test]
async fn a_stream_is_full_by_all_its_types_together() {
    on_every_engine(|lab| async move {
        let limit = StreamLimit::new(3).on_full(OnFull::Reject);
        let builder = lab.builder().streams(shop()).stream_limit("orders", limit);
        let bus = lab.open_with(builder).await;
        assert_eq!(bus.streams().named("ORDERS").unwrap().limit, Some(limit));
        bus.mount(Router::new().on("*", async || {}).group("g"))
            .await
            .unwrap();
        for event_type in ["order.placed", "cart.filled", "order.a.shipped"] {
            bus.publish((event_type, 1)).await.unwrap();
        }
        let error = bus.publish(("cart.emptied", 1)).await.unwrap_err();
        assert_eq!(error.code(), Code::Backpressure);
        assert!(
            error.message().contains("the stream ORDERS is full"),
            "{error}"
        );
        for n in 0..10 {
            bus.publish(("user.created", n)).await.unwrap();
        }
        assert_eq!(stored(&bus).await.len(), 13);
    })
    .await;
}

// conformance: handlers/backpressure-wait: on the engines: a publish into a full stream fails with Backpressure once its wait is over, and goes through if a group makes room before
// conformance: framework/backpressure-acceptable: on the engines: a publish into a full stream fails with Backpressure once its wait is over, and goes through if a group makes room before
#[tokio::test]
async fn a_publish_waits_for_room_in_a_full_stream() {
    on_every_engine(|lab| async move {
        let engine = lab.open().await.engine().clone();
        // Two buses on one engine, which differ in how long they wait.
        let waits_for = |wait| {
            let limit = StreamLimit::new(2).wait(wait);
            let builder = lab.builder().streams(shop()).stream_limit("ORDERS", limit);
            builder.with_engine(engine.clone()).unwrap()
        };
        let (patient, hasty) = (waits_for(PATIENCE), waits_for(Duration::from_millis(20)));
        let gate = Arc::new(Semaphore::new(0));
        let inside = gate.clone();
        let handler = move |_: Message| {
            let gate = inside.clone();
            async move { gate.acquire().await.unwrap().forget() }
        };
        let router = Router::new().on("order.>", handler);
        patient.mount(router).await.unwrap();
        patient.start().await.unwrap();
        for n in 0..2 {
            hasty.publish(("order.placed", n)).await.unwrap();
        }
        let error = hasty.publish(("order.placed", 2)).await.unwrap_err();
        assert_eq!(error.code(), Code::Backpressure, "{error}");
        assert_eq!(stored(&patient).await.len(), 2);

        let waiting = tokio::spawn({
            let bus = patient.clone();
            async move { bus.publish(("order.placed", 3)).await }
        });
        gate.add_permits(3);
        waiting.await.unwrap().unwrap();
        assert_eq!(stored(&patient).await.len(), 3);
        patient.shutdown().await.unwrap();
    })
    .await;
}

// conformance: contract/streams-limits: a full stream that drops its oldest drops them of all its types, and counts
#[tokio::test]
async fn a_full_stream_drops_the_oldest_of_all_its_types() {
    on_every_engine(|lab| async move {
        let limit = StreamLimit::new(2).on_full(OnFull::DropOldest);
        let builder = lab.builder().streams(shop()).stream_limit("ORDERS", limit);
        let bus = lab.open_with(builder).await;
        bus.mount(Router::new().on("*", async || {}).group("g"))
            .await
            .unwrap();
        bus.publish(("user.created", 1)).await.unwrap();
        for event_type in ["order.placed", "cart.filled", "order.paid"] {
            bus.publish((event_type, 1)).await.unwrap();
        }
        let depth = |name: &str| {
            let types = bus.streams().named(name).unwrap().types().clone();
            bus.engine().depth().unwrap().depth(types, 100)
        };
        assert_eq!(depth("ORDERS").await.unwrap(), 2);
        assert_eq!(depth("USERS").await.unwrap(), 1);
    })
    .await;
}

// conformance: contract/streams-limits: a limit for a stream that is not declared, or of the system's own, is refused at start
#[tokio::test]
async fn a_limit_of_an_unknown_stream_is_refused_at_start() {
    let limit = StreamLimit::new(3);
    for (name, code) in [
        ("ORDER", Code::NoStream),
        ("order.placed", Code::NoStream),
        ("SYSTEM", Code::InvalidSetting),
    ] {
        let builder = Bus::builder().streams(shop()).stream_limit(name, limit);
        let error = builder.open("memory:").await.unwrap_err();
        assert_eq!(error.code(), code, "{name}: {error}");
        assert!(error.hint_text().is_some());
    }
    // The default is for each stream but the system's.
    let builder = Bus::builder().streams(shop()).default_stream_limit(limit);
    let bus = builder.open("memory:").await.unwrap();
    let limits = bus.streams().iter().map(|s| (&*s.name, s.limit.is_some()));
    let limits: Vec<_> = limits.collect();
    assert_eq!(
        limits,
        [("ORDERS", true), ("USERS", true), ("SYSTEM", false)]
    );
}

// conformance: contract/streams-retention: events go by the age of their stream; what was said of retention itself comes first
#[tokio::test]
async fn events_go_by_the_age_of_their_stream() {
    on_every_engine(|lab| async move {
        let orders = Stream::new("ORDERS", ["order.>", "cart.*"]).unwrap();
        let users = Stream::new("USERS", ["user.>"]).unwrap();
        let streams = Streams::new([orders.max_age(DAY), users]).unwrap();
        let bus = lab.open_with(lab.builder().streams(streams.clone())).await;
        for event_type in ["order.placed", "cart.filled", "user.created"] {
            bus.publish((event_type, 1)).await.unwrap();
        }
        lab.clock.advance(2 * DAY);
        bus.publish(("order.paid", 1)).await.unwrap();
        let pruning = lab
            .builder()
            .streams(streams)
            .retention(Retention::default())
            .retention_delay(Duration::ZERO)
            .with_engine(bus.engine().clone())
            .unwrap();
        pruning.start().await.unwrap();
        eventually("the old orders are gone", || async {
            stored(&bus).await == ["user.created", "order.paid"]
        })
        .await;
    })
    .await;
}

// conformance: contract/streams-replay: a replay of a declared stream has its events and no others; another name is refused
#[tokio::test]
async fn a_replay_goes_by_declared_streams() {
    on_every_engine(|lab| async move {
        let bus = lab.open_with(lab.builder().streams(Streams::omni())).await;
        let types = [
            "message.received",
            "media.seen",
            "message.a.b",
            "message:was-sent",
        ];
        for event_type in types {
            bus.publish((event_type, 1)).await.unwrap();
        }
        let replayed = |name: &'static str| {
            let bus = bus.clone();
            async move {
                let (send, mut receive) = tokio::sync::mpsc::unbounded_channel();
                let each = move |record: Arc<Recorded>| {
                    let _ = send.send(record.event.event_type().to_owned());
                    std::future::ready(Ok::<(), HandlerError>(()))
                };
                let report = bus.replay().stream(name).into_function(each).await?;
                let mut types = Vec::new();
                while let Ok(event_type) = receive.try_recv() {
                    types.push(event_type);
                }
                assert_eq!(report.processed, types.len() as u64);
                Ok::<_, everbus::Error>(types)
            }
        };
        let messages = ["message.received", "message.a.b", "message:was-sent"];
        assert_eq!(replayed("MESSAGES").await.unwrap(), messages);
        assert_eq!(replayed("media").await.unwrap(), ["media.seen"]);
        for name in ["message", "message.received", "MESAGES"] {
            let error = replayed(name).await.unwrap_err();
            assert_eq!(error.code(), Code::NoStream, "{name}");
        }
        assert_eq!(replayed("AGENT").await.unwrap_err().code(), Code::NotFound);
    })
    .await;
}

/// Notes in which order the engine is asked to declare, append and consume.
struct Diary {
    inner: Arc<dyn Broker>,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Diary {
    fn note(&self, what: impl Into<String>) {
        self.asked.lock().unwrap().push(what.into());
    }
}

impl BrokerLayer for Diary {
    fn inner(&self) -> &dyn Broker {
        &*self.inner
    }

    fn declare_streams(&self, streams: Streams) -> BoxFuture<'_, everbus::Result<()>> {
        let names: Vec<&str> = streams.iter().map(|stream| &*stream.name).collect();
        self.note(format!("streams {}", names.join(" ")));
        self.inner.declare_streams(streams)
    }

    fn declare(&self, group: GroupSpec) -> BoxFuture<'_, everbus::Result<Vec<SubscriptionInfo>>> {
        self.note("group");
        self.inner.declare(group)
    }

    fn append(
        &self,
        batch: Vec<Event>,
    ) -> BoxFuture<'_, everbus::Result<Vec<everbus::Result<Appended>>>> {
        self.note("append");
        self.inner.append(batch)
    }
}

// conformance: contract/streams-declared: The engine is told of the streams once, before it is told of a group or gets an event.
#[tokio::test]
async fn an_engine_knows_the_streams_before_anything_else() {
    for publish_first in [true, false] {
        on_every_engine(|lab| async move {
            let asked = Arc::default();
            let engine = lab.open().await.engine().clone();
            let diary = Diary {
                inner: engine.broker.clone(),
                asked: Arc::clone(&asked),
            };
            let engine = everbus::Engine {
                broker: Arc::new(diary),
                ..engine
            };
            let builder = lab.builder().streams(shop());
            let bus = builder.with_engine(engine).unwrap();
            if publish_first {
                bus.publish(("user.created", 1)).await.unwrap();
            }
            let handler = || async { Ok::<(), HandlerError>(()) };
            bus.mount(Router::new().on("order.placed", handler))
                .await
                .unwrap();
            bus.start().await.unwrap();
            bus.publish(("order.placed", 1)).await.unwrap();
            let order: Vec<String> = asked.lock().unwrap().clone();
            let expected: &[&str] = match publish_first {
                true => &["streams ORDERS USERS SYSTEM", "append", "group", "append"],
                false => &["streams ORDERS USERS SYSTEM", "group", "append"],
            };
            assert_eq!(order, expected);
            bus.shutdown().await.unwrap();
        })
        .await;
    }
}
