//! Objects are deleted after their events, never before, and none is left behind.

use std::path::Path;
use std::time::{Duration, SystemTime};

use everbus::overflow::{Collect, Collected};
use everbus::{Bus, Event, EventId, Retention};

use super::{Shelf, stored};
use crate::support::{Kind, Lab, on_every_engine};

fn at_once() -> Collect {
    let mut collect = Collect::default();
    (collect.orphans_after, collect.strays_after) = (Duration::ZERO, Duration::ZERO);
    collect.before_log = true;
    collect
}

/// The usual, in a place where no other log has been: the logs of these tests are younger than their
/// objects are made to be.
fn usual() -> Collect {
    let mut collect = Collect::default();
    collect.before_log = true;
    collect
}

async fn forget_everything(bus: &Bus) {
    let retention = Retention {
        max_len: Some(0),
        ..Retention::default()
    };
    let pruned = bus.maintenance().unwrap().prune(retention).await.unwrap();
    assert_eq!(pruned.kept, 0);
}

fn age(path: &Path, by: Duration) {
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.set_modified(SystemTime::now() - by).unwrap();
}

fn large(id: EventId, tenant: &str, text: &str) -> Event {
    let event = Event::builder("a").id(id).tenant(tenant);
    event.json(&text.repeat(3000)).build().unwrap()
}

// conformance: issue-4/overflow-collected: an object is collected only after its event is gone, and then it is
// conformance: fault-11/collected: an object is not collected before the transaction that removes its event
#[tokio::test]
async fn an_object_goes_after_its_event() {
    on_every_engine(|lab| async move {
        let shelf = Shelf::new(lab);
        let bus = shelf.open_with(shelf.overflow().exclusive()).await;
        bus.publish(("a", "x".repeat(3000))).await.unwrap();
        bus.publish(("a", "y".repeat(3000))).await.unwrap();
        assert_eq!(
            bus.collect_objects(&at_once()).await.unwrap(),
            Collected::default()
        );
        assert_eq!(shelf.files().len(), 2);
        forget_everything(&bus).await;
        assert_eq!(
            shelf.files().len(),
            2,
            "removing events deletes no object by itself"
        );
        // Too young: a publish may be about to refer to them.
        let kept = bus.collect_objects(&Collect::default()).await.unwrap();
        assert_eq!((kept.orphans, kept.strays, kept.kept), (0, 0, 2));
        let mut dry = at_once();
        dry.dry_run = true;
        let would = bus.collect_objects(&dry).await.unwrap();
        assert_eq!((would.orphans, would.strays, would.bytes), (2, 0, 6004));
        assert_eq!(shelf.files().len(), 2);
        for file in shelf.files() {
            age(&shelf.objects().join(file), Duration::from_secs(3 * 3600));
        }
        let done = bus.collect_objects(&Collect::default()).await.unwrap();
        assert_eq!(done, Collected { kept: 0, ..would });
        assert!(shelf.files().is_empty());
        assert!(
            bus.engine()
                .orphans()
                .unwrap()
                .list(None, 9)
                .await
                .unwrap()
                .is_empty()
        );
        assert_eq!(
            bus.collect_objects(&at_once()).await.unwrap(),
            Collected::default()
        );
    })
    .await;
}

// conformance: issue-4/overflow-shared: an event of another tenant with the same id has an object of its own, or keeps the one it shares
#[tokio::test]
async fn tenants_with_the_same_ids_do_not_take_each_others_objects() {
    on_every_engine(|lab| async move {
        let shelf = Shelf::new(lab);
        let bus = shelf.open_with(shelf.overflow().exclusive()).await;
        let id = EventId::new();
        // The same content is stored once, another content under another key.
        for (tenant, text) in [("one", "x"), ("two", "x"), ("three", "y")] {
            bus.publish(large(id, tenant, text)).await.unwrap();
        }
        assert_eq!(shelf.files().len(), 2);
        for record in bus.log().unwrap().find(id).await.unwrap() {
            let text = if record.event.tenant() == Some("three") {
                "y"
            } else {
                "x"
            };
            let whole = bus.whole(&record).await.unwrap();
            assert_eq!(whole.event.json::<String>().unwrap(), text.repeat(3000));
        }
        // The oldest goes; the one that shares its object stays.
        let retention = Retention {
            max_len: Some(2),
            ..Retention::default()
        };
        let pruned = bus.maintenance().unwrap().prune(retention).await.unwrap();
        assert_eq!(pruned.removed, 1);
        let collected = bus.collect_objects(&at_once()).await.unwrap();
        assert_eq!(collected, Collected::default());
        for record in bus.log().unwrap().find(id).await.unwrap() {
            bus.whole(&record).await.unwrap();
        }
        forget_everything(&bus).await;
        assert_eq!(bus.collect_objects(&at_once()).await.unwrap().orphans, 2);
        assert!(shelf.files().is_empty());
    })
    .await;
}

// conformance: issue-4/overflow-repeated: a repeated publish stores nothing anew and uses no object that may be on its way out
#[tokio::test]
async fn a_repeated_publish_gives_the_first_receipt() {
    on_every_engine(|lab| async move {
        let shelf = Shelf::new(lab);
        let bus = shelf.open_with(shelf.overflow().exclusive()).await;
        let event = large(EventId::new(), "t", "x");
        let first = bus.publish(event.clone()).await.unwrap();
        let second = bus.publish(event.clone()).await.unwrap();
        assert!(second.is_duplicate() && second.seq() == first.seq());
        assert_eq!(shelf.files().len(), 1);
        // An old object is not taken up again: it may be deleted at any moment.
        age(
            &shelf.objects().join(&shelf.files()[0]),
            Duration::from_secs(2 * 3600),
        );
        assert!(bus.publish(event.clone()).await.unwrap().is_duplicate());
        assert_eq!(shelf.files().len(), 2);
        for file in shelf.files() {
            age(&shelf.objects().join(file), Duration::from_secs(25 * 3600));
        }
        let collected = bus.collect_objects(&usual()).await.unwrap();
        assert_eq!((collected.orphans, collected.strays), (0, 1));
        let found = stored(&bus, event.id()).await;
        assert_eq!(bus.whole(&found).await.unwrap().event, event);
    })
    .await;
}

// conformance: issue-4/overflow-strays: an object whose publish never committed is deleted after a day, where nobody else's can be meant
#[tokio::test]
async fn an_object_whose_publish_never_committed_is_deleted_after_a_day() {
    let shelf = Shelf::new(Lab::new(Kind::Sqlite));
    let bus = shelf.open_with(shelf.overflow().exclusive()).await;
    let receipt = bus.publish(("a", "x".repeat(3000))).await.unwrap();
    let known = stored(&bus, receipt.id()).await;
    let folder = shelf.objects().join("events/~");
    let stray = format!("{}-payload.json", EventId::new());
    let files = [
        stray.clone(),
        format!("{stray}#3"),
        "somebody-elses.txt".to_owned(),
    ];
    for file in &files {
        std::fs::write(folder.join(file), "0123456789").unwrap();
        age(&folder.join(file), Duration::from_secs(23 * 3600));
    }
    age(
        &shelf.objects().join(&known.event.overflow().unwrap().key),
        Duration::from_secs(100 * 3600),
    );
    let none = bus.collect_objects(&usual()).await.unwrap();
    assert_eq!(none, Collected::default());
    for file in &files {
        age(&folder.join(file), Duration::from_secs(25 * 3600));
    }
    let mut dry = usual();
    dry.dry_run = true;
    let would = bus.collect_objects(&dry).await.unwrap();
    assert_eq!((would.strays, would.bytes), (2, 20));
    assert_eq!(shelf.files().len(), 4);
    bus.shutdown().await.unwrap();
    // Where others may keep theirs, nothing is guessed.
    let shared = shelf.open().await;
    let none = shared.collect_objects(&at_once()).await.unwrap();
    assert_eq!(none, Collected::default());
    shared.shutdown().await.unwrap();
    let bus = shelf.open_with(shelf.overflow().exclusive()).await;
    let done = bus.collect_objects(&usual()).await.unwrap();
    assert_eq!(done, would);
    assert_eq!(
        shelf.files().len(),
        2,
        "the event's object, and what is not ours"
    );
    assert!(folder.join("somebody-elses.txt").exists());
    bus.whole(&known).await.unwrap();
    bus.shutdown().await.unwrap();
}

// conformance: issue-4/overflow-other-log: objects that are older than the log are left alone: they may belong to a log that was moved away
#[tokio::test]
async fn a_new_log_leaves_the_objects_of_the_one_before_it() {
    let directory = tempfile::tempdir().unwrap();
    let open = async |overflow| {
        let url = format!("sqlite:{}", directory.path().join("shop.db").display());
        let bus = Bus::builder().overflow(overflow).open(&url).await;
        bus.unwrap()
    };
    let small = || everbus::overflow::Overflow::default().threshold(2000);
    let bus = open(small()).await;
    let lost = bus.publish(("a", "x".repeat(3000))).await.unwrap();
    bus.shutdown().await.unwrap();
    let object = super::files(directory.path())
        .into_iter()
        .find(|name| name.contains(&lost.id().to_string()))
        .unwrap();
    let object = directory.path().join(object);
    age(&object, Duration::from_secs(100 * 3600));
    // The file is moved away, its objects are forgotten.
    let path = |name: &str| directory.path().join(name);
    std::fs::rename(path("shop.db"), path("kept.db")).unwrap();
    let bus = open(small()).await;
    let none = bus.collect_objects(&Collect::default()).await.unwrap();
    assert_eq!(none, Collected::default(), "an empty log");
    bus.publish(("a", 1)).await.unwrap();
    let none = bus.collect_objects(&Collect::default()).await.unwrap();
    assert_eq!(none, Collected::default(), "a younger log");
    bus.shutdown().await.unwrap();
    // Back in its place the file has everything.
    std::fs::rename(path("kept.db"), path("shop.db")).unwrap();
    let bus = open(small()).await;
    let found = stored(&bus, lost.id()).await;
    let whole = bus.whole(&found).await.unwrap();
    assert_eq!(whole.event.payload().len(), 3002);
    bus.shutdown().await.unwrap();
}

// conformance: issue-4/overflow-moved: after a bus was given another place, what is under the same key there is somebody else's
#[tokio::test]
async fn an_object_in_another_place_is_not_taken_for_the_one_that_was_left_behind() {
    let shelf = || Shelf::new(Lab::new(Kind::Sqlite));
    let (ours, theirs) = (shelf(), shelf());
    let event = large(EventId::new(), "t", "x");
    let bus = ours.open().await;
    bus.publish(event.clone()).await.unwrap();
    forget_everything(&bus).await;
    bus.shutdown().await.unwrap();
    // Another bus has the same event, with its object in a place that both use from now on.
    let other = theirs.open().await;
    other.publish(event.clone()).await.unwrap();
    assert_eq!(ours.files(), theirs.files(), "the same key");
    age(
        &theirs.objects().join(&theirs.files()[0]),
        Duration::from_secs(3 * 3600),
    );
    let bus = ours.open_with(theirs.overflow()).await;
    let collected = bus.collect_objects(&Collect::default()).await.unwrap();
    assert_eq!((collected.orphans, collected.kept), (0, 1));
    bus.shutdown().await.unwrap();
    let found = stored(&other, event.id()).await;
    assert_eq!(other.whole(&found).await.unwrap().event, event);
    other.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_started_bus_collects_by_itself() {
    let shelf = Shelf::new(Lab::new(Kind::Sqlite));
    let bus = shelf.open().await;
    bus.publish(("a", "x".repeat(3000))).await.unwrap();
    forget_everything(&bus).await;
    age(
        &shelf.objects().join(&shelf.files()[0]),
        Duration::from_secs(3 * 3600),
    );
    bus.start().await.unwrap();
    crate::support::eventually("the object is deleted", || async {
        shelf.files().is_empty()
    })
    .await;
    bus.shutdown().await.unwrap();
}
