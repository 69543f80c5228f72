//! A handler that was removed, or whose pattern was narrowed, leaves its subscription behind.

use std::sync::{Arc, Mutex};

use everbus::core::{Event, UNSUBSCRIBED};
use everbus::{Bus, HandlerError, Message, Router, to};
use tracing::Level;

use crate::logs::lines;
use crate::support::{Lab, eventually, is_done, on_every_engine, state_in};

type Seen = Arc<Mutex<Vec<String>>>;

/// A router that handles these patterns in one ordered group.
fn router(group: &str, patterns: &[&str], seen: &Seen) -> Router {
    let mut router = Router::new();
    for pattern in patterns {
        let seen = seen.clone();
        let handler = move |message: Message| {
            let seen = seen.clone();
            async move {
                seen.lock().unwrap().push(message.event_type().to_owned());
                Ok::<(), HandlerError>(())
            }
        };
        router = router.on(*pattern, to(handler).ordered());
    }
    router.group(group)
}

/// The next version of a program, on the engine of the one before.
fn next(lab: &Lab, bus: &Bus) -> Bus {
    lab.builder().with_engine(bus.engine().clone()).unwrap()
}

fn keyed(event_type: &str) -> Event {
    Event::builder(event_type)
        .json(&1)
        .key("7")
        .build()
        .unwrap()
}

// conformance: operations/handler-removed: a router that says it is the whole of its group retracts what its group was subscribed to before; what waited for a handler is skipped with a reason and holds up nothing
#[tokio::test]
async fn a_removed_handler_does_not_stall_its_group() {
    on_every_engine(|lab| async move {
        let seen = Seen::default();
        let first = lab.open().await;
        first
            .mount(router("g", &["r.a", "r.b"], &seen))
            .await
            .unwrap();
        let second = next(&lab, &first);
        second.mount(router("g", &["r.a"], &seen)).await.unwrap();
        second.start().await.unwrap();
        second.publish(keyed("r.b")).await.unwrap();
        second.publish(keyed("r.a")).await.unwrap();
        // One has no handler, the other stands behind it.
        eventually("the event is known to have no handler", || async {
            let groups = second.groups().await.unwrap();
            (groups[0].unhandled, groups[0].waiting) == (1, 2)
        })
        .await;
        assert!(seen.lock().unwrap().is_empty());
        let third = next(&lab, &first);
        third
            .mount(router("g", &["r.a"], &seen).exactly())
            .await
            .unwrap();
        eventually("the event behind it is handled", || {
            is_done(&second, 2, "g")
        })
        .await;
        assert_eq!(*seen.lock().unwrap(), ["r.a"]);
        let skipped = state_in(&second, 1, "g").await.unwrap().skipped;
        assert_eq!(skipped.as_deref(), Some(UNSUBSCRIBED));
        let groups = second.groups().await.unwrap();
        assert_eq!(groups[0].patterns, ["r.a"]);
        // From now on such events are passed by.
        second.publish(keyed("r.b")).await.unwrap();
        second.publish(keyed("r.a")).await.unwrap();
        eventually("the next event is handled", || is_done(&second, 4, "g")).await;
        second.shutdown().await.unwrap();
    })
    .await;
}

// conformance: operations/handler-narrowed: a wider pattern of before is retracted by a router that is the whole of its group; other groups keep theirs
#[tokio::test]
async fn a_narrowed_pattern_leaves_nothing_behind() {
    on_every_engine(|lab| async move {
        let seen = Seen::default();
        let first = lab.open().await;
        first.mount(router("g", &["p.*"], &seen)).await.unwrap();
        first.mount(router("other", &["p.*"], &seen)).await.unwrap();
        let second = next(&lab, &first);
        second
            .mount(router("g", &["p.a"], &seen).exactly())
            .await
            .unwrap();
        let groups = second.groups().await.unwrap();
        let patterns: Vec<_> = groups.iter().map(|g| g.patterns.join(" ")).collect();
        assert_eq!(patterns, ["p.a", "p.*"]);
    })
    .await;
}

// conformance: operations/handler-warned: a bus that starts says at WARN what its groups are subscribed to and no handler here takes, with what to do
#[tokio::test]
async fn what_no_handler_takes_is_said_at_the_start() {
    on_every_engine(|lab| async move {
        let seen = Seen::default();
        let group = format!("warned-{:?}", lab.kind);
        let about = || {
            lines(|line| {
                let is_about = line.field("group") == Some(&group);
                is_about && line.level == Level::WARN && line.target == "everbus::router"
            })
        };
        let first = lab.open().await;
        first
            .mount(router(&group, &["w.a", "w.*"], &seen))
            .await
            .unwrap();
        first.start().await.unwrap();
        assert_eq!(about().len(), 0);
        let second = next(&lab, &first);
        second.mount(router(&group, &["w.a"], &seen)).await.unwrap();
        assert_eq!(about().len(), 0, "another router may be mounted for it");
        second.start().await.unwrap();
        let said = about();
        assert_eq!(said.len(), 1);
        assert_eq!(said[0].field("pattern"), Some("w.*"));
        let message = said[0].field("message").unwrap();
        assert!(message.contains("groups unsubscribe"), "{message}");
        assert!(message.contains("Router::exactly"), "{message}");
        // A router that comes later says it at once.
        second.mount(router(&group, &["w.b"], &seen)).await.unwrap();
        assert_eq!(about().len(), 2);
        second.shutdown().await.unwrap();
    })
    .await;
}
