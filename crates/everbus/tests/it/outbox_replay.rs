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
fn replay(id: impl std::fmt::Display) -> String {
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
        let found = self.bus.lookup().unwrap().find(id).await.unwrap();
        let engine = self.bus.engine().settled().unwrap();
        engine
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
// conformance: memory/outbox-replay: a row whose event has an open dead letter is relayed as a retry of it, past deduplication
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
    assert_eq!(stage.statuses(), "sent,sent");
    // Nothing is open any more, but the event is known with another body: that is a mistake, and is told.
    stage.db.execute_batch(&replay(id)).unwrap();
    let relay = Relay::own(&stage.bus).unwrap();
    relay.run_once().await.unwrap();
    assert_eq!(stage.handled(), [("audit", 1), ("mail", 1), ("stock", 1)]);
    stage.bus.shutdown().await.unwrap();
}

// conformance: outbox/4-event-id: event_id is the id that the publisher gave, with the UUID in a column of its own
// conformance: outbox/5-replay-own-ids: the SQL of the specification works with the id that the publisher gave
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sql_of_the_specification_works_with_the_ids_of_the_publisher() {
    // Once without a source and once with one: it is part of the UUID, and the envelope does not say it.
    for source in [None, Some("shop")] {
        let stage = Stage::new().await;
        let mut order = order();
        if let Some(source) = source {
            order = order.source(source);
        }
        let order = order.foreign_id("order-1").build().unwrap();
        let id = Outbox::new().enqueue(&stage.db, order).unwrap();
        stage.relay(id).await;
        let shown = "SELECT DISTINCT event_id || ' ' || uuid FROM dead_letter_events";
        assert_eq!(text(&stage.db, shown), format!("order-1 {id}"));
        stage.broken.store(false, Ordering::SeqCst);
        stage.db.execute_batch(&replay("order-1")).unwrap();
        assert_eq!(
            text(
                &stage.db,
                "SELECT event_id FROM event_outbox WHERE id = 'order-1-replay'"
            ),
            "order-1"
        );
        let stats = stage.relay(id).await;
        assert_eq!((stats.sent, stats.retried), (1, 1), "{source:?}");
        assert_eq!(stage.handled(), [("audit", 1), ("mail", 1), ("stock", 1)]);
        assert!(stage.bus.dead_letters().list().await.unwrap().is_empty());
        stage.bus.shutdown().await.unwrap();
    }
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
    let found = stage.bus.lookup().unwrap().find(id).await.unwrap();
    let settled = async || {
        let engine = stage.bus.engine().settled().unwrap();
        engine
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

/// Makes every row of the outbox as old as that it was written before anything died.
fn written_long_ago(db: &Connection) {
    db.execute(
        "UPDATE event_outbox SET created_at = '2020-01-01T00:00:00Z'",
        [],
    )
    .unwrap();
}

// conformance: memory/outbox-died-unmarked: an event that died before its row was marked is not delivered again; a row that was written after the death is a retry
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_that_died_before_its_row_was_marked_is_no_retry() {
    let stage = Stage::new().await;
    let id = Outbox::new().enqueue(&stage.db, order()).unwrap();
    written_long_ago(&stage.db);
    // A relay publishes it and dies before it marks it.
    let source = stage.bus.engine().outbox().unwrap();
    let row = source.claim(0, 10).await.unwrap().rows.remove(0);
    let broker = stage.bus.engine().broker.clone();
    let appended = broker.append(vec![row.event.unwrap()]).await.unwrap();
    let position = appended[0].as_ref().unwrap().position;
    let patience = crate::support::PATIENCE;
    assert_eq!(
        stage
            .bus
            .engine()
            .settled()
            .unwrap()
            .settled(position, patience)
            .await
            .unwrap()
            .dead_lettered
            .len(),
        2
    );

    stage.broken.store(false, Ordering::SeqCst);
    let stats = stage.relay(id).await;
    assert_eq!((stats.sent, stats.duplicates, stats.retried), (1, 1, 0));
    assert_eq!(stage.handled(), [("audit", 1)], "nobody asked for a retry");
    assert_eq!(stage.bus.dead_letters().list().await.unwrap().len(), 2);
    assert_eq!(stage.statuses(), "failed", "it shows that the event died");

    // Now a retry is asked for.
    stage.db.execute_batch(&replay(id)).unwrap();
    let stats = stage.relay(id).await;
    assert_eq!((stats.sent, stats.retried), (1, 1));
    assert_eq!(stage.handled(), [("audit", 1), ("mail", 1), ("stock", 1)]);
}

// conformance: memory/outbox-granted-unmarked: a retry that was sent back and not marked is not sent back again
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wish_is_granted_once_even_if_its_row_was_not_marked() {
    for dies_again in [true, false] {
        let stage = Stage::new().await;
        let id = Outbox::new().enqueue(&stage.db, order()).unwrap();
        stage.relay(id).await;
        stage.db.execute_batch(&replay(id)).unwrap();
        // A relay grants it and dies before it marks it; the groups go on.
        stage
            .lab
            .clock
            .advance(std::time::Duration::from_secs(3600));
        stage.broken.store(dies_again, Ordering::SeqCst);
        let letters = stage.bus.engine().dead_letters().unwrap();
        assert_eq!(letters.retry(Default::default()).await.unwrap(), 2);
        let engine = stage.bus.engine().settled().unwrap();
        let found = stage.bus.lookup().unwrap().find(id).await.unwrap();
        let settled = engine.settled(found[0].position, crate::support::PATIENCE);
        settled.await.unwrap();
        let before = stage.handled();

        stage.broken.store(false, Ordering::SeqCst);
        let stats = stage.relay(id).await;
        assert_eq!((stats.sent, stats.retried, stats.rejected), (1, 0, 0));
        assert_eq!(stage.handled(), before, "once is enough");
        let open = stage.bus.dead_letters().list().await.unwrap().len();
        assert_eq!(open, if dies_again { 2 } else { 0 });
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_that_comes_while_a_relay_is_at_work_is_a_wish_whatever_its_clock_says() {
    let stage = Stage::new().await;
    let id = Outbox::new().enqueue(&stage.db, order()).unwrap();
    let relay = Relay::own(&stage.bus).unwrap();
    relay.run_until_empty().await.unwrap();
    let found = stage.bus.lookup().unwrap().find(id).await.unwrap();
    let settled = async || {
        let engine = stage.bus.engine().settled().unwrap();
        let settled = engine.settled(found[0].position, crate::support::PATIENCE);
        settled.await.unwrap();
    };
    settled().await;
    stage.broken.store(false, Ordering::SeqCst);
    stage.db.execute_batch(&replay(id)).unwrap();
    written_long_ago(&stage.db);
    let stats = relay.run_until_empty().await.unwrap();
    assert_eq!(stats.retried, 1, "nobody else can have published it");
    settled().await;
    assert_eq!(stage.handled(), [("audit", 1), ("mail", 1), ("stock", 1)]);
}

// conformance: memory/outbox-replay-tenant: a row is a retry of the dead letters of its own tenant only
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_without_a_tenant_retries_no_tenants_dead_letters() {
    let stage = Stage::new().await;
    let id = EventId::new();
    let without_tenant = || everbus::Event::builder("order.placed").id(id).json(&1);
    for event in [order().id(id), without_tenant()] {
        let receipt = stage.bus.publish(event).await.unwrap();
        assert_eq!(receipt.settled().await.unwrap().dead_lettered.len(), 2);
    }
    stage.broken.store(false, Ordering::SeqCst);
    Outbox::new().enqueue(&stage.db, without_tenant()).unwrap();
    let relay = Relay::own(&stage.bus).unwrap();
    assert_eq!(relay.run_until_empty().await.unwrap().retried, 1);
    let open = stage.bus.dead_letters().list().await.unwrap();
    assert_eq!(open.len(), 2);
    for letter in open {
        assert_eq!(letter.event().tenant(), Some("acme"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_forgets_ids_does_not_get_what_is_known_to_have_died() {
    let (bus, broker, clock) = crate::faulty::faulty().await;
    broker.forgetful.store(true, Ordering::SeqCst);
    bus.subscribe("order.*")
        .group("g")
        .handler(|_: Message| async { Err::<(), _>(HandlerError::permanent("no stock")) })
        .await
        .unwrap();
    bus.start().await.unwrap();
    let shop = Shop::new();
    Outbox::new().enqueue(&shop.db, order()).unwrap();
    written_long_ago(&shop.db);
    let source = shop.source(&clock);
    let row = source.claim(0, 10).await.unwrap().rows.remove(0);
    let receipt = bus.publish(row.event.unwrap()).await.unwrap();
    assert_eq!(receipt.settled().await.unwrap().dead_lettered.len(), 1);
    broker.batches.lock().unwrap().clear();
    let stats = Relay::new(&bus, source).run_until_empty().await.unwrap();
    assert_eq!((stats.sent, stats.retried), (1, 0));
    assert!(broker.batches.lock().unwrap().is_empty(), "it has it");
    assert_eq!(bus.dead_letters().list().await.unwrap().len(), 1);
    bus.shutdown().await.unwrap();
}
