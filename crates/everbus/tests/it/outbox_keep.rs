//! A relay removes what is over from another program's database, and nothing else.

use std::time::Duration;

use everbus::outbox::{Outbox, OutboxKeep, Relay};
use everbus::rusqlite::Connection;

use crate::outbox::{Shop, numbered, text};
use crate::support::{Kind, Lab, on_every_engine};

const DAY: Duration = Duration::from_secs(24 * 3600);

// conformance: memory/outbox-keep: a relay removes rows 7 days after they were sent and failed ones 30 days after death from a database of one's own, or as it is told
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_removes_what_is_over() {
    on_every_engine(|lab| async move {
        let bus = lab.open().await;
        let shop = Shop::new();
        let source = shop.source(&lab.clock);
        let rows = || shop.text("SELECT coalesce(group_concat(event_id || status), '') FROM (SELECT * FROM event_outbox ORDER BY row)");
        // Each relay looks at once; later ones now and then.
        let relay = async |keep: Option<OutboxKeep>| {
            let relay = Relay::new(&bus, source.clone());
            let relay = match keep {
                Some(keep) => relay.keep(keep),
                None => relay,
            };
            relay.run_once().await.unwrap()
        };
        let first = shop.enqueue(numbered(1, None));
        shop.db
            .execute_batch("INSERT INTO event_outbox (event_id, event_type, payload, attempts) VALUES ('bad', 'a.b', '{', 4)")
            .unwrap();
        let stats = relay(None).await;
        assert_eq!((stats.sent, stats.failed, stats.removed), (1, 1, 0));
        lab.clock.advance(6 * DAY);
        let second = shop.enqueue(numbered(2, None));
        assert_eq!(relay(None).await.removed, 0);
        lab.clock.advance(2 * DAY);
        let forever = OutboxKeep {
            sent: None,
            dead_letters: None,
        };
        assert_eq!(relay(Some(forever)).await.removed, 0);
        assert_eq!(rows(), format!("{first}sent,badfailed,{second}sent"));
        assert_eq!(relay(None).await.removed, 1);
        assert_eq!(rows(), format!("badfailed,{second}sent"));
        let soon = OutboxKeep {
            sent: Some(DAY),
            ..OutboxKeep::default()
        };
        assert_eq!(relay(Some(soon)).await.removed, 1);
        assert_eq!(rows(), "badfailed");
        lab.clock.advance(23 * DAY);
        assert_eq!(relay(None).await.removed, 1);
        assert_eq!(rows(), "");
        assert_eq!(shop.text("SELECT count(*) FROM dead_letter_events"), "0");
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: memory/outbox-forgets-once: a relay of the outbox in the bus's own file leaves its rows to retention
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_of_the_own_file_removes_nothing() {
    let lab = Lab::new(Kind::Sqlite);
    let bus = lab.open().await;
    let db = Connection::open(lab.file()).unwrap();
    Outbox::new().enqueue(&db, numbered(1, None)).unwrap();
    Relay::own(&bus).unwrap().run_once().await.unwrap();
    lab.clock.advance(100 * DAY);
    let stats = Relay::own(&bus).unwrap().run_once().await.unwrap();
    assert_eq!(stats.removed, 0);
    assert_eq!(
        text(&db, "SELECT group_concat(status) FROM event_outbox"),
        "sent"
    );
    bus.shutdown().await.unwrap();
}
