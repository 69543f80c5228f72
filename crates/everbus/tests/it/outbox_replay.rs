//! Dead letters that go through the outbox again: the replay of the specification, on the real tables.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use everbus::outbox::{Outbox, Relay};
use everbus::rusqlite::Connection;
use everbus::{Bus, EventBuilder, EventId, HandlerError, Message};

use crate::outbox::{Shop, text};
use crate::support::{Kind, Lab};

/// The example of the specification, as it stands there.
fn replay(id: EventId) -> String {
    "INSERT INTO event_outbox (id, event_id, event_type, payload, status, attempts)
SELECT event_id || '-replay', event_id, event_type, payload, 'pending', 0
FROM dead_letter_events
WHERE event_id = '...';"
        .replace("...", &id.to_string())
}

/// Three groups; two of them fail for good while something is broken.
struct Stage {
    lab: Lab,
    bus: Bus,
    db: Connection,
    broken: Arc<AtomicBool>,
    handled: Arc<Mutex<BTreeMap<&'static str, u32>>>,
}

impl Stage {
    async fn new() -> Self {
        let lab = Lab::new(Kind::Sqlite);
        let bus = lab.open_impatient().await;
        let broken = Arc::new(AtomicBool::new(true));
        let handled = Arc::new(Mutex::new(BTreeMap::new()));
        for (group, may_fail) in [("mail", true), ("stock", true), ("audit", false)] {
            let (broken, handled) = (broken.clone(), handled.clone());
            bus.subscribe("order.*")
                .group(group)
                .handler(move |_: Message| {
                    let fails = may_fail && broken.load(Ordering::SeqCst);
                    if !fails {
                        *handled.lock().unwrap().entry(group).or_insert(0) += 1;
                    }
                    async move {
                        if fails {
                            return Err(HandlerError::permanent("no stock"));
                        }
                        Ok(())
                    }
                })
                .await
                .unwrap();
        }
        bus.start().await.unwrap();
        let db = Connection::open(lab.file()).unwrap();
        Self {
            lab,
            bus,
            db,
            broken,
            handled,
        }
    }

    /// Relays what waits, and waits until all groups have dealt with the event.
    async fn relay(&self, id: EventId) -> everbus::outbox::RelayStats {
        let relay = Relay::own(&self.bus).unwrap();
        let stats = relay.run_until_empty().await.unwrap();
        let found = self.bus.log().unwrap().find(id).await.unwrap();
        let broker = &self.bus.engine().broker;
        broker
            .settled(found[0].position, crate::support::PATIENCE)
            .await
            .unwrap();
        stats
    }

    fn handled(&self) -> Vec<(&'static str, u32)> {
        self.handled.lock().unwrap().clone().into_iter().collect()
    }

    fn statuses(&self) -> String {
        text(
            &self.db,
            "SELECT group_concat(status) FROM (SELECT status FROM event_outbox ORDER BY row)",
        )
    }
}

fn order() -> EventBuilder {
    // What the envelope in the view has no place for must not get in the way.
    everbus::Event::builder("order.placed")
        .json(&1)
        .key("o-1")
        .app("web")
        .tenant("acme")
        .meta("channel", "web")
}

// conformance: outbox/5-replay-groups: replaying by SQL sends an event back to the groups that failed, and to no others
// conformance: issue-4/outbox-replay: a row whose event has an open dead letter is relayed as a retry of it, past deduplication
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sql_of_the_specification_replays_to_the_groups_that_failed() {
    let stage = Stage::new().await;
    let id = Outbox::new().enqueue(&stage.db, order()).unwrap();
    stage.relay(id).await;
    assert_eq!(stage.handled(), [("audit", 1)]);
    assert_eq!(stage.statuses(), "failed", "the record is marked as failed");
    assert_eq!(
        text(
            &stage.db,
            "SELECT count(*) FROM dead_letter_events WHERE retried_at IS NULL"
        ),
        "2"
    );
    // While it is still broken: it fails again, and the same rows are open again.
    stage.db.execute_batch(&replay(id)).unwrap();
    assert_eq!(stage.statuses(), "failed,pending", "two groups, one row");
    let stats = stage.relay(id).await;
    assert_eq!((stats.sent, stats.retried, stats.rejected), (1, 1, 0));
    assert_eq!(stage.statuses(), "failed,failed");
    assert_eq!(stage.bus.dead_letters().list().await.unwrap().len(), 2);

    stage.broken.store(false, Ordering::SeqCst);
    for _ in 0..2 {
        stage.db.execute_batch(&replay(id)).unwrap();
    }
    let stats = stage.relay(id).await;
    assert_eq!((stats.sent, stats.retried), (1, 1));
    assert_eq!(stage.handled(), [("audit", 1), ("mail", 1), ("stock", 1)]);
    assert!(stage.bus.dead_letters().list().await.unwrap().is_empty());
    assert_eq!(stage.statuses(), "failed,sent");
    // Nothing is open any more, but the event is known with another body: that is a mistake, and is told.
    stage.db.execute_batch(&replay(id)).unwrap();
    let relay = Relay::own(&stage.bus).unwrap();
    relay.run_once().await.unwrap();
    assert_eq!(stage.handled(), [("audit", 1), ("mail", 1), ("stock", 1)]);
    stage.bus.shutdown().await.unwrap();
}

// conformance: outbox/4-upsert: a dead letter that fails again is the same record with more attempts
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_row_is_retried_by_the_outbox_too() {
    let stage = Stage::new().await;
    let id = Outbox::new().enqueue(&stage.db, order()).unwrap();
    stage.relay(id).await;
    let source = stage.bus.engine().outbox().unwrap();
    let failed = source.failed(10).await.unwrap();
    assert_eq!(failed[0].last_error.as_deref(), Some("no stock"));
    source.retry(Some(vec![id.to_string()])).await.unwrap();
    stage.relay(id).await;
    let attempts = "SELECT group_concat(attempts) FROM dead_letter_events WHERE event_id = '...'";
    let attempts = attempts.replace("...", &id.to_string());
    assert_eq!(text(&stage.db, &attempts), "2,2");
    stage.broken.store(false, Ordering::SeqCst);
    source.retry(None).await.unwrap();
    stage.relay(id).await;
    assert_eq!(stage.handled(), [("audit", 1), ("mail", 1), ("stock", 1)]);
    assert_eq!(stage.statuses(), "sent");
    drop(stage.lab);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_from_another_database_is_a_retry_as_well() {
    let stage = Stage::new().await;
    let shop = Shop::new();
    let id = Outbox::new().enqueue(&shop.db, order()).unwrap();
    let relay = Relay::new(&stage.bus, Outbox::open(&shop.path).unwrap());
    relay.run_until_empty().await.unwrap();
    let found = stage.bus.log().unwrap().find(id).await.unwrap();
    let settled = async || {
        let broker = &stage.bus.engine().broker;
        broker
            .settled(found[0].position, crate::support::PATIENCE)
            .await
            .unwrap()
    };
    assert_eq!(settled().await.dead_lettered.len(), 2);
    assert_eq!(
        shop.text("SELECT status FROM event_outbox"),
        "sent",
        "another database"
    );
    stage.broken.store(false, Ordering::SeqCst);
    shop.db
        .execute("UPDATE event_outbox SET status = 'pending'", [])
        .unwrap();
    let stats = relay.run_until_empty().await.unwrap();
    assert_eq!((stats.retried, stats.duplicates), (1, 1));
    settled().await;
    assert_eq!(stage.handled(), [("audit", 1), ("mail", 1), ("stock", 1)]);
}
