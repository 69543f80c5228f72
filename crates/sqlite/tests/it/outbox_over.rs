//! What is over in an outbox: dead letters that were dealt with, every rejection on record, old rows that go.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Clock as _, Code, DeadLetterFilter, Engine, Event, EventId, Failure, Forgotten, GroupName,
    MAX_FAILURES, OutboxKeep, OutboxSource, PurgeBasis, RelayLease, Retention, RowOutcome, Verdict,
};
use everbus_sqlite::outbox::{Outbox, OutboxInit, OutboxOptions};
use rusqlite::Connection;

use crate::outbox::{Shop, event, lease, ready, text};
use crate::{consume, declare, failure, fetch, open, settle};

const DAY: Duration = Duration::from_secs(24 * 3600);

/// A file of Everbus and its outbox.
struct Own {
    engine: Engine,
    db: Connection,
    source: Arc<dyn OutboxSource>,
    lease: RelayLease,
    dir: tempfile::TempDir,
}

impl Own {
    async fn new(groups: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bus.db");
        let engine = open(&path);
        for group in groups {
            declare(&engine, group, "order.*").await;
        }
        let source = engine.outbox().unwrap();
        Self {
            db: Connection::open(&path).unwrap(),
            lease: lease(&source, "me").await,
            source,
            engine,
            dir,
        }
    }

    /// Writes an event into the outbox and relays it.
    async fn send(&self, event: Event) -> EventId {
        let id = Outbox::new().enqueue(&self.db, event).unwrap();
        let row = ready(&self.source).await.remove(0);
        let event = row.event.clone().unwrap();
        self.engine.broker.append(vec![event]).await.unwrap();
        self.settle(row, RowOutcome::Sent).await;
        id
    }

    async fn settle(&self, row: everbus_core::OutboxRow, outcome: RowOutcome) {
        let lease = self.lease.clone();
        self.source
            .settle(lease, vec![(row, outcome)])
            .await
            .unwrap();
    }

    async fn die(&self, groups: &[&str]) {
        for group in groups {
            let mut consumer = consume(&self.engine, group).await;
            let delivery = fetch(&mut consumer, 1).await.remove(0);
            let dead = Verdict::Dead {
                failure: Some(failure("no stock")),
            };
            settle(&self.engine, &delivery, dead).await;
            consumer.close().await.unwrap();
        }
    }

    fn statuses(&self) -> String {
        text(
            &self.db,
            "SELECT group_concat(status) FROM (SELECT status FROM event_outbox ORDER BY row)",
        )
    }
}

fn of_group(group: &str) -> DeadLetterFilter {
    DeadLetterFilter {
        group: Some(GroupName::new(group).unwrap()),
        ..DeadLetterFilter::default()
    }
}

async fn give_up(source: &Arc<dyn OutboxSource>, lease: &RelayLease, error: &str) {
    let row = ready(source).await.remove(0);
    let error = error.to_owned();
    let outcomes = vec![(row, RowOutcome::Failed { error })];
    source.settle(lease.clone(), outcomes).await.unwrap();
}

// conformance: memory/outbox-failed-until-retried: a row that shows a dead letter is sent again once no dead letter of its event is open, retried, replaced or purged
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_shows_a_dead_letter_for_as_long_as_one_is_open() {
    let own = Own::new(&["a", "b"]).await;
    let letters = own.engine.dead_letters().unwrap();
    let tenant = |tenant: &str, id: EventId| {
        let builder = Event::builder("order.placed").id(id).tenant(tenant);
        builder.json(&1).build().unwrap()
    };
    // Retried, one group after the other; the row of another tenant under the same id is its own.
    let id = EventId::new();
    own.send(tenant("acme", id)).await;
    own.send(tenant("other", id)).await;
    own.die(&["a", "b"]).await;
    assert_eq!(own.statuses(), "failed,sent");
    let sent_at = "SELECT sent_at FROM event_outbox ORDER BY row LIMIT 1";
    let sent_at = || text(&own.db, sent_at);
    let before = sent_at();
    own.die(&["a", "b"]).await;
    assert_eq!(own.statuses(), "failed,failed");
    let of = |group: &str, tenant: &str| DeadLetterFilter {
        tenant: Some(tenant.into()),
        ..of_group(group)
    };
    letters.retry(of("a", "acme")).await.unwrap();
    assert_eq!(own.statuses(), "failed,failed", "b has not retried it");
    letters.retry(of("b", "acme")).await.unwrap();
    assert_eq!(own.statuses(), "sent,failed");
    assert_eq!(sent_at(), before, "the broker has it since then");
    let error = "SELECT last_error FROM event_outbox ORDER BY row LIMIT 1";
    assert_eq!(text(&own.db, error), "no stock", "what happened is kept");
    let status = own.source.status().await.unwrap();
    assert_eq!((status.sent, status.failed), (1, 1));
    letters.retry(Default::default()).await.unwrap();
    assert_eq!(own.statuses(), "sent,sent");
    assert_eq!(own.source.status().await.unwrap().last_error, None);
    // What dies again fails again.
    own.die(&["b"]).await;
    let statuses = own.statuses();
    assert_eq!(statuses.matches("failed").count(), 1, "{statuses}");
    // Purged.
    let purged = letters.purge(
        everbus_core::SystemClock.now().plus(DAY),
        PurgeBasis::Died,
        Default::default(),
    );
    purged.await.unwrap();
    assert_eq!(own.statuses(), "sent,sent");
    own.engine.broker.close().await.unwrap();

    // Replaced by a corrected event.
    let own = Own::new(&["a"]).await;
    let letters = own.engine.dead_letters().unwrap();
    own.send(event(None, 1)).await;
    own.die(&["a"]).await;
    assert_eq!(own.statuses(), "failed");
    let page = letters.list(Default::default(), Default::default());
    let letter = page.await.unwrap().items.remove(0);
    let corrected = letter.corrected("2").unwrap();
    letters.replace(letter.key(), corrected).await.unwrap();
    assert_eq!(own.statuses(), "sent");
    // Under a foreign id, too.
    let foreign = Event::builder("order.placed").source("s").foreign_id("o-1");
    own.send(foreign.json(&1).build().unwrap()).await;
    own.die(&["a", "a"]).await;
    assert_eq!(own.statuses(), "sent,failed");
    letters.retry(Default::default()).await.unwrap();
    assert_eq!(own.statuses(), "sent,sent");
    own.engine.broker.close().await.unwrap();
}

// conformance: memory/outbox-given-up-stays: a row that the relay gave up stays failed, whatever becomes of dead letters of its event
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_that_the_relay_gave_up_is_not_sent_by_a_retry_elsewhere() {
    let own = Own::new(&["a"]).await;
    own.send(event(None, 1)).await;
    own.die(&["a"]).await;
    // It was sent once, is wanted again, and is rejected now.
    let again = "UPDATE event_outbox SET status = 'pending'";
    own.db.execute_batch(again).unwrap();
    give_up(&own.source, &own.lease, "too large").await;
    assert_eq!(own.statuses(), "failed");
    let letters = own.engine.dead_letters().unwrap();
    assert_eq!(letters.retry(Default::default()).await.unwrap(), 1);
    assert_eq!(own.statuses(), "failed");
    let failed = own.source.failed(1).await.unwrap().remove(0);
    assert_eq!(failed.last_error.as_deref(), Some("too large"));
    assert_eq!(own.source.dead_letters().await.unwrap(), 1);
    own.engine.broker.close().await.unwrap();
}

// conformance: memory/outbox-every-error: a dead letter of the outbox has every rejection with attempt, time and error, also those before a retry
#[tokio::test]
async fn every_rejection_is_on_record() {
    let own = Own::new(&[]).await;
    let shop = Shop::new();
    Outbox::new().enqueue(&own.db, event(None, 1)).unwrap();
    Outbox::new().enqueue(&shop.db, event(None, 1)).unwrap();
    let elsewhere = shop.source();
    let lease = lease(&elsewhere, "me").await;
    for (source, lease, db) in [
        (&own.source, &own.lease, &own.db),
        (&elsewhere, &lease, &shop.db),
    ] {
        let reject = async |error: &str| {
            let row = ready(source).await.remove(0);
            let rejected = RowOutcome::Rejected {
                error: error.into(),
                after: Duration::ZERO,
            };
            let settled = source.settle(lease.clone(), vec![(row, rejected)]);
            settled.await.unwrap();
            shop.clock.advance(Duration::from_secs(1));
        };
        let errors = || -> Vec<Failure> {
            let errors = text(db, "SELECT errors FROM dead_letter_events");
            serde_json::from_str(&errors).unwrap()
        };
        let told = |failures: &[Failure]| -> Vec<(u32, String)> {
            let one = |f: &Failure| (f.attempt, f.error.clone());
            failures.iter().map(one).collect()
        };
        let said = |attempt: u32, error: &str| (attempt, error.to_owned());
        reject("one").await;
        reject("two").await;
        give_up(source, lease, "three").await;
        let first = errors();
        let expected = [said(1, "one"), said(2, "two"), said(3, "three")];
        assert_eq!(told(&first), expected);
        assert!(first.iter().is_sorted_by_key(|failure| failure.at));
        let listed = source.failed(1).await.unwrap().remove(0).failures;
        assert_eq!(listed, first, "the listing has them too");
        let seen = || text(db, "SELECT first_seen_at FROM dead_letter_events");
        let first_seen = seen();
        let death = first[2].at.to_string();
        assert_eq!(first_seen, death, "when it first became a dead letter");
        // After a retry they go on.
        shop.clock.advance(Duration::from_secs(60));
        assert_eq!(source.retry(None).await.unwrap(), 1);
        reject("four").await;
        give_up(source, lease, "five").await;
        let all = errors();
        assert_eq!(all[..3], first);
        assert_eq!(told(&all[3..]), [said(1, "four"), said(2, "five")]);
        assert_eq!(seen(), first_seen);
        let last = "SELECT error || last_seen_at FROM dead_letter_events";
        assert_eq!(text(db, last), format!("five{}", all[4].at));
        // There is an end to it: the oldest are forgotten. A damaged row stops no other.
        for _ in 0..MAX_FAILURES {
            source.retry(None).await.unwrap();
            give_up(source, lease, "more").await;
        }
        let all = errors();
        assert_eq!(all.len(), MAX_FAILURES);
        assert!(all.iter().all(|failure| failure.error == "more"));
        let damage = "UPDATE outbox_dead_letters SET failures = '{'";
        db.execute_batch(damage).unwrap();
        assert!(
            source
                .failed(1)
                .await
                .unwrap()
                .remove(0)
                .failures
                .is_empty()
        );
        source.retry(None).await.unwrap();
        give_up(source, lease, "last").await;
        assert_eq!(told(&errors()), [said(1, "last")]);
    }
    own.engine.broker.close().await.unwrap();
}

// conformance: memory/outbox-dead-letter-found: a dead letter of the outbox is found by the text in event_id and by the id of its event, whatever its tenant, until it is retried
#[tokio::test]
async fn a_dead_letter_of_the_outbox_is_found() {
    let shop = Shop::new();
    let source = shop.source();
    let lease = lease(&source, "me").await;
    let tenant = Event::builder("order.placed").tenant("acme").json(&1);
    let id = Outbox::new().enqueue(&shop.db, tenant).unwrap();
    let bad =
        "INSERT INTO event_outbox (event_id, event_type, payload) VALUES ('bad-1', 'a.b', '{')";
    shop.db.execute_batch(bad).unwrap();
    let find = async |text: &str| {
        let id = EventId::from_foreign("", text);
        source.find_dead_letter(text.into(), id).await.unwrap()
    };
    let shown = id.to_string();
    assert_eq!(find(&shown).await, None);
    give_up(&source, &lease, "no").await;
    give_up(&source, &lease, "no").await;
    assert_eq!(source.dead_letters().await.unwrap(), 2);
    assert_eq!(find(&shown).await, Some(shown.clone()));
    assert_eq!(find(&shown.to_uppercase()).await, Some(shown.clone()));
    assert_eq!(find("bad-1").await.as_deref(), Some("bad-1"));
    let mapped = EventId::from_foreign("", "bad-1").to_string();
    assert_eq!(find(&mapped).await.as_deref(), Some("bad-1"));
    assert_eq!(find("bad").await, None);
    assert_eq!(source.retry(Some(vec![shown.clone()])).await.unwrap(), 1);
    assert_eq!(find(&shown).await, None, "it waits again");
    assert_eq!(source.dead_letters().await.unwrap(), 1);
}

// conformance: memory/outbox-forgets: an outbox in a database of one's own forgets rows that were sent long ago, and dead letters with their rows, in small steps; what waits stays
#[tokio::test]
async fn a_database_of_ones_own_forgets_what_is_over() {
    let shop = Shop::new();
    let source = shop.source();
    let lease = lease(&source, "me").await;
    let settle = async |sent: bool| {
        let row = ready(&source).await.remove(0);
        let outcome = match sent {
            true => RowOutcome::Sent,
            false => RowOutcome::Failed { error: "no".into() },
        };
        let settled = source.settle(lease.clone(), vec![(row, outcome)]);
        settled.await.unwrap();
    };
    let enqueue = |n: u32| Outbox::new().enqueue(&shop.db, event(None, n)).unwrap();
    let statuses = || {
        shop.text(
            "SELECT coalesce(group_concat(status || n), '') FROM
               (SELECT status, payload ->> '$.payload.n' AS n FROM event_outbox ORDER BY row)",
        )
    };
    // Sent, given up, given up and retried, given up and replayed by SQL, all on one day.
    let ids: Vec<EventId> = (0..4).map(enqueue).collect();
    for sent in [true, false, false, false] {
        settle(sent).await;
    }
    let retried = vec![ids[2].to_string()];
    assert_eq!(source.retry(Some(retried)).await.unwrap(), 1);
    let replay = format!(
        "INSERT INTO event_outbox (id, event_id, event_type, payload)
         SELECT event_id || '-replay', event_id, event_type, payload FROM dead_letter_events
         WHERE event_id = '{}'",
        ids[3]
    );
    shop.db.execute_batch(&replay).unwrap();
    assert_eq!(statuses(), "sent0,failed1,pending2,failed3,pending3");
    let keep = OutboxKeep::default();
    let forget = async || source.forget(lease.clone(), keep).await.unwrap();
    assert_eq!(forget().await, Forgotten::default());
    shop.clock.advance(7 * DAY + Duration::from_secs(1));
    let nobody = RelayLease {
        token: lease.token + 1,
        ..lease.clone()
    };
    let none = source.forget(nobody, keep).await.unwrap();
    assert_eq!(none, Forgotten::default(), "without the lease");
    let forever = OutboxKeep {
        sent: None,
        dead_letters: None,
    };
    let none = source.forget(lease.clone(), forever).await.unwrap();
    assert_eq!(none, Forgotten::default());
    let gone = forget().await;
    assert_eq!((gone.rows, gone.dead_letters, gone.more), (1, 0, false));
    assert_eq!(statuses(), "failed1,pending2,failed3,pending3");
    shop.clock.advance(23 * DAY);
    let gone = forget().await;
    assert_eq!((gone.rows, gone.dead_letters, gone.more), (1, 1, false));
    assert_eq!(statuses(), "pending2,failed3,pending3", "what waits stays");
    // They are through now, and their dead letters are older than they may get.
    settle(true).await;
    settle(true).await;
    assert_eq!(shop.text("SELECT count(*) FROM outbox_dead_letters"), "2");
    let gone = forget().await;
    assert_eq!((gone.rows, gone.dead_letters), (1, 2));
    assert_eq!(statuses(), "sent2,sent3");

    // Many go in many steps, and never one that is wanted.
    shop.db
        .execute_batch(
            "WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 3000)
             INSERT INTO event_outbox (event_type, payload, status, sent_at)
             SELECT 'a', '{}', 'sent', '2020-01-01T00:00:00.000000Z' FROM n",
        )
        .unwrap();
    let mut rows = 0;
    loop {
        let gone = forget().await;
        rows += gone.rows;
        if !gone.more {
            break;
        }
    }
    assert_eq!(rows, 3000);
    assert_eq!(statuses(), "sent2,sent3");
}

// conformance: memory/outbox-forgets-once: what the file of Everbus keeps is up to its retention alone, however its outbox was opened
#[tokio::test]
async fn the_file_of_everbus_is_left_to_its_retention() {
    let own = Own::new(&[]).await;
    let old = "INSERT INTO event_outbox (event_type, payload, status, sent_at)
               VALUES ('a', '{}', 'sent', '2020-01-01T00:00:00.000000Z')";
    own.db.execute_batch(old).unwrap();
    let named = Outbox::open(own.dir.path().join("bus.db")).unwrap();
    for source in [&own.source, &named] {
        let gone = source.forget(own.lease.clone(), OutboxKeep::default());
        assert_eq!(gone.await.unwrap(), Forgotten::default());
    }
    assert_eq!(own.statuses(), "sent");
    own.engine.broker.close().await.unwrap();
}

// conformance: memory/retention-outbox-dead-letters: dead letters of the outbox go 30 days after death, open or retried, and the rows that were given up with them
// conformance: memory/retention-outbox-freed: a row that showed a dead letter goes once the dead letter has gone
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retention_takes_dead_letters_of_the_outbox() {
    let own = Own::new(&["a"]).await;
    for n in 0..3 {
        Outbox::new().enqueue(&own.db, event(None, n)).unwrap();
        give_up(&own.source, &own.lease, "no").await;
    }
    // One of them was retried and sent.
    let id = text(
        &own.db,
        "SELECT event_id FROM event_outbox ORDER BY row LIMIT 1",
    );
    own.source.retry(Some(vec![id])).await.unwrap();
    let row = ready(&own.source).await.remove(0);
    own.settle(row, RowOutcome::Sent).await;
    // One that a group gave up on.
    own.send(event(None, 3)).await;
    own.die(&["a"]).await;
    // The failures of these tests are as old as time itself.
    let now = "UPDATE dead_letters SET died_at = unixepoch('now') * 1000000";
    own.db.execute_batch(now).unwrap();
    assert_eq!(own.statuses(), "sent,failed,failed,failed");
    let maintenance = own.engine.maintenance().unwrap();
    let held = maintenance.holdings().await.unwrap();
    assert_eq!(held.dead_letters.count, 4);
    let standard = Retention::standard();
    let none = maintenance.prune(standard.clone()).await.unwrap();
    assert_eq!((none.dead_letters, none.outbox), (0, 0));
    own.db
        .execute_batch(
            "UPDATE outbox_dead_letters SET last_seen_at = strftime('%Y-%m-%dT%H:%M:%f000Z', 'now', '-31 days')
             WHERE row <> 3;
             UPDATE dead_letters SET died_at = died_at - 31 * 86400000000;
             UPDATE event_outbox SET sent_at = strftime('%Y-%m-%dT%H:%M:%f000Z', 'now', '-31 days')
             WHERE status = 'failed' AND sent_at IS NOT NULL;",
        )
        .unwrap();
    let oldest = maintenance.holdings().await.unwrap().dead_letters.oldest;
    assert!(oldest < Some(everbus_core::SystemClock.now().minus(30 * DAY)));
    let foretold = maintenance.preview(standard.clone()).await.unwrap();
    let done = maintenance.prune(standard).await.unwrap();
    assert_eq!((done.dead_letters, done.outbox), (3, 2));
    assert_eq!(
        (foretold.dead_letters, foretold.outbox),
        (done.dead_letters, done.outbox)
    );
    let left = "SELECT group_concat(row || status) FROM event_outbox";
    assert_eq!(text(&own.db, left), "1sent,3failed");
    assert_eq!(own.source.dead_letters().await.unwrap(), 1);
    own.engine.broker.close().await.unwrap();
}

// conformance: memory/outbox-init: the tables of an outbox are made in a database that is named, all or none; what is there stays
#[tokio::test]
async fn an_outbox_is_made_in_a_database_that_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let init = |name: &str| Outbox::init(path(name), &OutboxOptions::default());
    assert_eq!(init("new.db").unwrap(), OutboxInit::NewFile);
    assert_eq!(init("new.db").unwrap(), OutboxInit::There);
    let shop = Connection::open(path("shop.db")).unwrap();
    shop.execute_batch("CREATE TABLE orders (id INTEGER)")
        .unwrap();
    assert_eq!(init("shop.db").unwrap(), OutboxInit::NewTables);
    let insert = "INSERT INTO event_outbox (event_type, payload) VALUES ('a.b', '1')";
    shop.execute_batch(insert).unwrap();
    assert_eq!(init("shop.db").unwrap(), OutboxInit::There);
    let source = Outbox::open(path("shop.db")).unwrap();
    assert_eq!(source.status().await.unwrap().pending, 1);
    open(&path("bus.db")).broker.close().await.unwrap();
    assert_eq!(init("bus.db").unwrap(), OutboxInit::Everbus);
    // What the SQL makes is the same.
    let by_hand = Connection::open(path("by-hand.db")).unwrap();
    for _ in 0..2 {
        by_hand.execute_batch(&Outbox::tables_sql()).unwrap();
    }
    let schema = "SELECT group_concat(sql) FROM (SELECT sql FROM sqlite_schema ORDER BY name)";
    let new = Connection::open(path("new.db")).unwrap();
    assert_eq!(text(&by_hand, schema), text(&new, schema));
    // A table of the same name and another kind.
    let other = Connection::open(path("other.db")).unwrap();
    other
        .execute_batch("CREATE TABLE Event_Outbox (id, event_id)")
        .unwrap();
    assert_eq!(init("other.db").unwrap_err().code(), Code::Unsupported);
    assert_eq!(text(&other, "SELECT count(*) FROM sqlite_schema"), "1");
    std::fs::write(
        path("text"),
        "no database at all, however long this text is",
    )
    .unwrap();
    assert!(init("text").is_err());
    assert!(init("none/shop.db").is_err());
}
