//! Positions and cursors: they name events, and their text form outlives the process.

use std::collections::HashMap;

use everbus_core::{Cursor, Event, Position, Shard};

use super::needs::{LOG, LOOKUP, OWN_LOG, RESTART, STATES};
use super::stage::{ordering, pattern, take};
use super::{Harness, Outcome, Stage, Time};

fn keyed(n: usize) -> Event {
    let event = Event::builder(["a.x", "b.x"][n % 2]).key(format!("k{}", n % 5));
    event.json(&n).build().unwrap()
}

/// A position names the same event in the answer to its append, in its delivery, in the log and after it was
/// written as text. Positions rise within a shard, and no two events share one.
pub async fn a_position_names_one_event_everywhere<H: Harness>(harness: H) -> Outcome {
    let stage = Stage::open(harness, Time::Still, &[]).await?;
    stage.declare("g", &["*"]).await;
    let mut published: HashMap<Position, usize> = HashMap::new();
    let mut last: HashMap<Shard, u64> = HashMap::new();
    for n in 0..20 {
        let position = stage.append(keyed(n)).await.position;
        let text = position.to_string();
        assert_eq!(text.parse::<Position>().unwrap(), position, "{text}");
        let before = last.insert(position.shard(), position.place());
        assert!(before < Some(position.place()), "{before:?}, {position}");
        assert_eq!(published.insert(position, n), None, "{position} twice");
    }
    let mut consumer = stage.consumer("g").await;
    for delivery in take(&mut consumer, 20).await {
        let n: usize = delivery.record.event.json().unwrap();
        assert_eq!(published[&delivery.record.position], n);
        assert_eq!(delivery.lease.position(), delivery.record.position);
        stage.ack(&delivery).await;
    }
    if stage.offers(&LOG) {
        let read = stage.log().read(Cursor::START, vec![pattern("*")], 100);
        for record in read.await.unwrap().0 {
            let n: usize = record.event.json().unwrap();
            let read = record.position.to_string().parse::<Position>().unwrap();
            if stage.offers(&OWN_LOG) {
                assert_eq!(published.get(&read), Some(&n));
            }
            if stage.offers(&LOOKUP) {
                let found = stage.lookup().find(record.event.id()).await.unwrap();
                assert_eq!(found[0].position, read);
            }
            if stage.offers(&LOOKUP) && stage.offers(&STATES) {
                assert_eq!(stage.lookup().states(read).await.unwrap().len(), 1);
            }
        }
    }
    stage.passed()
}

/// A reader that keeps its cursor as text, and ends with its process after every page, sees each event
/// once, in the order of its shard, also what is appended meanwhile.
pub async fn a_cursor_goes_on_after_its_text_form<H: Harness>(harness: H) -> Outcome {
    let mut stage = Stage::open(harness, Time::Still, &[&LOG]).await?;
    let mut published = Vec::new();
    for n in 0..20 {
        let appended = stage.append(keyed(n)).await;
        published.push(stage.read_at(&appended).await);
    }
    let mut read: Vec<Position> = Vec::new();
    let mut text = Cursor::START.to_string();
    for page in 0.. {
        let after: Cursor = text.parse().unwrap();
        assert_eq!(after.to_string(), text);
        let log = stage.log();
        let (records, reached) = log
            .read(after.clone(), vec![pattern("*")], 3)
            .await
            .unwrap();
        for record in &records {
            assert!(!after.covers(record.position), "{} again", record.position);
            assert!(reached.covers(record.position));
        }
        read.extend(records.iter().map(|record| record.position));
        if reached == after {
            break;
        }
        text = reached.to_string();
        if page < 3 {
            let appended = stage.append(keyed(page)).await;
            published.push(stage.read_at(&appended).await);
        }
        if page % 3 == 1 && stage.offers(&RESTART) {
            stage.restart().await;
        }
        assert!(page < 1000, "it does not come to an end");
    }
    for pair in read.windows(2) {
        let order = pair[1].partial_cmp(&pair[0]);
        let falls = order == Some(std::cmp::Ordering::Less);
        assert!(!falls, "{pair:?} in the order of the shard");
    }
    read.sort_by_key(|position| ordering(*position));
    published.sort_by_key(|position| ordering(*position));
    assert_eq!(read, published, "each once, without a gap");
    let head = stage.log().head().await.unwrap();
    assert!(published.iter().all(|position| head.covers(*position)));
    assert_eq!(head.to_string().parse::<Cursor>().unwrap(), head);
    stage.passed()
}
