//! Objects are deleted after their events, never before, and none is left behind.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use everbus::overflow::{Collect, Collected};
use everbus::{Bus, Event, EventId, Retention};
use everbus_core::{Background, BoxFuture, Clock as _, Engine, Orphan, SystemClock, Timestamp};

use super::{Shelf, stored};
use crate::support::{Kind, Lab, on_every_engine};

fn at_once() -> Collect {
    Collect {
        strays_after: Duration::ZERO,
        ..Collect::default()
    }
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

// conformance: memory/overflow-collected: an object is collected only after its event is gone, and then it is
// conformance: fault-11/collected: an object is not collected before the transaction that removes its event
#[tokio::test]
async fn an_object_goes_after_its_event() {
    on_every_engine(|lab| async move {
        let shelf = Shelf::new(lab);
        let bus = shelf.open().await;
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
        let would = bus
            .collect_objects(&Collect {
                dry_run: true,
                ..Collect::default()
            })
            .await
            .unwrap();
        assert_eq!((would.orphans, would.strays, would.bytes), (2, 0, 6004));
        assert_eq!(shelf.files().len(), 2);
        let done = bus.collect_objects(&Collect::default()).await.unwrap();
        assert_eq!(done, would);
        assert!(shelf.files().is_empty());
        assert!(
            bus.engine()
                .orphans()
                .unwrap()
                .list()
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

// conformance: memory/overflow-shared: an event of another tenant with the same id has an object of its own
#[tokio::test]
async fn tenants_with_the_same_ids_do_not_take_each_others_objects() {
    on_every_engine(|lab| async move {
        let shelf = Shelf::new(lab);
        let bus = shelf.open().await;
        let id = EventId::new();
        for (tenant, text) in [("one", "x"), ("two", "x"), ("three", "y")] {
            bus.publish(large(id, tenant, text)).await.unwrap();
        }
        assert_eq!(shelf.files().len(), 3);
        for record in bus.lookup().unwrap().find(id).await.unwrap() {
            let text = if record.event.tenant() == Some("three") {
                "y"
            } else {
                "x"
            };
            let whole = bus.whole(&record).await.unwrap();
            assert_eq!(whole.event.json::<String>().unwrap(), text.repeat(3000));
        }
        // The oldest goes, with its object alone.
        let retention = Retention {
            max_len: Some(2),
            ..Retention::default()
        };
        let pruned = bus.maintenance().unwrap().prune(retention).await.unwrap();
        assert_eq!(pruned.removed, 1);
        let collected = bus.collect_objects(&at_once()).await.unwrap();
        assert_eq!((collected.orphans, shelf.files().len()), (1, 2));
        for record in bus.lookup().unwrap().find(id).await.unwrap() {
            bus.whole(&record).await.unwrap();
        }
        forget_everything(&bus).await;
        assert_eq!(bus.collect_objects(&at_once()).await.unwrap().orphans, 2);
        assert!(shelf.files().is_empty());
    })
    .await;
}

// conformance: memory/overflow-repeated: a repeated publish gives the first receipt and leaves no second object; one that is refused leaves none either
#[tokio::test]
async fn a_repeated_publish_leaves_no_second_object() {
    on_every_engine(|lab| async move {
        let shelf = Shelf::new(lab);
        let bus = shelf.open().await;
        let event = large(EventId::new(), "t", "x");
        let first = bus.publish(event.clone()).await.unwrap();
        let object = shelf.files();
        for _ in 0..3 {
            let again = bus.publish(event.clone()).await.unwrap();
            assert!(again.is_duplicate() && again.seq() == first.seq());
            let other = large(event.id(), "t", "y");
            let error = bus.publish(other).await.unwrap_err();
            assert_eq!(error.code(), everbus::Code::IdReused);
        }
        assert_eq!((object.len(), shelf.files()), (1, object));
        // Only the notes are left, until the collector looks for their objects.
        let notes = bus.engine().orphans().unwrap();
        assert_eq!(notes.list().await.unwrap().len(), 6);
        let collected = bus.collect_objects(&at_once()).await.unwrap();
        assert_eq!(collected, Collected::default());
        assert_eq!(notes.list().await.unwrap(), []);
        let found = stored(&bus, event.id()).await;
        assert_eq!(bus.whole(&found).await.unwrap().event, event);
    })
    .await;
}

/// An object as a publisher leaves it that is killed between the object and the event: noted and put.
async fn left_behind(bus: &Bus, shelf: &Shelf, hours: u64) -> PathBuf {
    let id = EventId::new();
    let log = bus.engine().orphans().unwrap().log_id().await.unwrap();
    let key = format!("events/~/{id}-{}-0a1b-payload.json", log.short());
    let old = Duration::from_secs(hours * 3600);
    let note = Orphan {
        bucket: shelf.objects().to_str().unwrap().to_owned(),
        key: key.clone(),
        id,
        since: Timestamp::from_micros(SystemClock.now().as_micros() - old.as_micros() as i64),
        unborn: true,
    };
    bus.engine()
        .orphans()
        .unwrap()
        .note(vec![note])
        .await
        .unwrap();
    let path = shelf.objects().join(key);
    std::fs::write(&path, "0123456789").unwrap();
    age(&path, old);
    path
}

// conformance: memory/overflow-same-payload: after the threshold was changed the same publish is still the same, and another body still refused
#[tokio::test]
async fn a_repeated_publish_is_the_same_under_any_threshold() {
    on_every_engine(|lab| async move {
        let shelf = Shelf::new(lab);
        let low = shelf.open().await;
        let high = Bus::builder().overflow(shelf.overflow().threshold(100_000));
        let high = high.with_engine(low.engine().clone()).unwrap();
        let event = |id: EventId, text: &str| {
            let fields = serde_json::json!({ "a": text, "output": "z".repeat(3000) });
            Event::builder("a").id(id).json(&fields).build().unwrap()
        };
        for (first, second) in [(&low, &high), (&high, &low)] {
            let id = EventId::new();
            let published = first.publish(event(id, "x")).await.unwrap();
            let again = second.publish(event(id, "x")).await.unwrap();
            assert!(again.is_duplicate() && again.seq() == published.seq());
            let error = second.publish(event(id, "y")).await.unwrap_err();
            assert_eq!(error.code(), everbus::Code::IdReused);
            let found = stored(&low, id).await;
            let whole = low.whole(&found).await.unwrap();
            assert_eq!(whole.event.payload(), event(id, "x").payload());
        }
    })
    .await;
}

// conformance: memory/overflow-swept: what an interrupted put left among the objects is deleted after a day
// conformance: memory/overflow-strays: an object whose publish never committed is deleted after a day; what another put is not
#[tokio::test]
async fn an_object_whose_publish_never_committed_is_deleted_after_a_day() {
    on_every_engine(|lab| async move {
        let shelf = Shelf::new(lab);
        let bus = shelf.open().await;
        let receipt = bus.publish(("a", "x".repeat(3000))).await.unwrap();
        let known = stored(&bus, receipt.id()).await;
        let object = shelf.objects().join(&known.event.overflow().unwrap().key);
        age(&object, Duration::from_secs(100 * 3600));
        let young = left_behind(&bus, &shelf, 23).await;
        let old = left_behind(&bus, &shelf, 25).await;
        let cut = old.with_extension("json#1");
        let foreign = young.with_file_name("somebody-elses.txt");
        let name = format!("{}-0123456789ab-0a1b-payload.json", EventId::new());
        let others = young.with_file_name(name);
        for file in [&cut, &foreign, &others] {
            std::fs::write(file, "0123456789").unwrap();
            age(file, Duration::from_secs(25 * 3600));
        }
        let would = bus
            .collect_objects(&Collect {
                dry_run: true,
                ..Collect::default()
            })
            .await
            .unwrap();
        assert_eq!((would.strays, would.bytes, would.kept), (1, 10, 1));
        assert!(old.exists() && cut.exists());
        let done = bus.collect_objects(&Collect::default()).await.unwrap();
        assert_eq!(done, would);
        assert!(!old.exists() && !cut.exists());
        for kept in [&object, &young, &foreign, &others] {
            assert!(kept.exists(), "{kept:?}");
        }
        bus.whole(&known).await.unwrap();
        bus.shutdown().await.unwrap();
    })
    .await;
}

/// Stands for the archive that copies the events of a broker into its store.
struct Archive;

impl Background for Archive {
    fn run(&self) -> BoxFuture<'static, ()> {
        Box::pin(std::future::pending())
    }
}

// conformance: memory/overflow-archive-late: in a store beside a broker, the object of an event that the archive has not copied yet is never deleted
#[tokio::test]
async fn the_object_of_an_event_that_is_still_to_be_archived_stays() {
    on_every_engine(|lab| async move {
        let shelf = Shelf::new(lab);
        let bus = shelf.open().await;
        publish(&bus, "x").await;
        // Published to the broker long ago: the store has only the note.
        let object = left_behind(&bus, &shelf, 1000).await;
        let engine = Engine {
            background: Some(Arc::new(Archive)),
            ..bus.engine().clone()
        };
        let objects = everbus::overflow::Objects::open(&engine, &shelf.overflow());
        let objects = objects.unwrap().unwrap();
        let done = objects.collect(&engine, &at_once()).await.unwrap();
        assert_eq!((done.strays, done.kept), (0, 1));
        assert!(object.exists());
        // Without a broker, no process is still to append it.
        let done = objects.collect(bus.engine(), &at_once()).await.unwrap();
        assert_eq!((done.strays, object.exists()), (1, false));
        bus.shutdown().await.unwrap();
    })
    .await;
}

/// A file with its objects beside it, and everything old enough to be deleted.
struct Beside(tempfile::TempDir);

impl Beside {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    async fn open(&self) -> Bus {
        self.open_as("shop.db").await
    }

    async fn open_as(&self, name: &str) -> Bus {
        let url = format!("sqlite:{}", self.path(name).display());
        // One place, whatever the file is called.
        let objects = self.path("objects");
        let overflow = everbus::overflow::Overflow::to(objects.to_str().unwrap());
        let builder = Bus::builder().overflow(overflow.threshold(2000));
        builder.open(&url).await.unwrap()
    }

    fn age_all(&self) {
        for name in super::files(&self.path("objects")) {
            age(
                &self.path("objects").join(name),
                Duration::from_secs(100 * 3600),
            );
        }
    }

    /// Everything that the bus has can be read.
    async fn is_whole(&self, bus: &Bus, ids: &[EventId]) {
        for id in ids {
            let found = stored(bus, *id).await;
            let whole = bus.whole(&found).await.unwrap();
            assert_eq!(whole.event.payload().len(), 3002);
        }
    }
}

async fn publish(bus: &Bus, text: &str) -> EventId {
    bus.publish(("a", text.repeat(3000))).await.unwrap().id()
}

// conformance: memory/overflow-other-log: objects of another log in the same place are left alone, whatever the two have in common
#[tokio::test]
async fn a_new_log_leaves_the_objects_of_the_one_before_it() {
    let shop = Beside::new();
    let bus = shop.open().await;
    let kept = publish(&bus, "x").await;
    bus.shutdown().await.unwrap();
    shop.age_all();
    // The file is moved away, its objects are forgotten.
    std::fs::rename(shop.path("shop.db"), shop.path("kept.db")).unwrap();
    let bus = shop.open().await;
    let none = bus.collect_objects(&at_once()).await.unwrap();
    assert_eq!(none, Collected::default(), "an empty log");
    publish(&bus, "y").await;
    forget_everything(&bus).await;
    let done = bus.collect_objects(&at_once()).await.unwrap();
    assert_eq!(done.orphans, 1, "its own object");
    let objects = everbus::overflow::Objects::open(bus.engine(), &{
        everbus::overflow::Overflow::to(shop.path("objects").to_str().unwrap())
    });
    let objects = objects.unwrap().unwrap();
    let survey = objects.survey(bus.engine()).await.unwrap();
    assert_eq!((survey.in_use.objects, survey.others.len()), (0, 1));
    assert_ne!(survey.others.keys().next(), survey.log.as_ref());
    bus.shutdown().await.unwrap();
    // Back in its place the file has everything.
    std::fs::rename(shop.path("kept.db"), shop.path("shop.db")).unwrap();
    let bus = shop.open().await;
    shop.is_whole(&bus, &[kept]).await;
    bus.shutdown().await.unwrap();
}

// conformance: memory/overflow-copy-is-another: a backup that is used beside the file it was made of deletes none of its objects
#[tokio::test]
async fn a_backup_in_use_leaves_the_objects_of_its_original() {
    let shop = Beside::new();
    let bus = shop.open().await;
    let id = publish(&bus, "x").await;
    let copy = shop.path("copy.db");
    let copied = bus.maintenance().unwrap().backup(copy, Box::new(|_, _| {}));
    copied.await.unwrap();
    shop.age_all();
    let other = shop.open_as("copy.db").await;
    shop.is_whole(&other, &[id]).await;
    forget_everything(&other).await;
    let done = other.collect_objects(&at_once()).await.unwrap();
    assert_eq!((done.orphans, done.kept), (0, 1));
    other.shutdown().await.unwrap();
    shop.is_whole(&bus, &[id]).await;
    bus.shutdown().await.unwrap();
}

// conformance: memory/overflow-moved: after a bus was given another place, the note of an object that is elsewhere stays
#[tokio::test]
async fn the_note_of_an_object_in_another_place_stays() {
    let shelf = || Shelf::new(Lab::new(Kind::Sqlite));
    let (ours, theirs) = (shelf(), shelf());
    let bus = ours.open().await;
    publish(&bus, "x").await;
    forget_everything(&bus).await;
    bus.shutdown().await.unwrap();
    for (overflow, orphans, kept) in [(theirs.overflow(), 0, 1), (ours.overflow(), 1, 0)] {
        let bus = ours.open_with(overflow).await;
        let done = bus.collect_objects(&at_once()).await.unwrap();
        assert_eq!((done.orphans, done.kept), (orphans, kept));
        bus.shutdown().await.unwrap();
    }
}

// conformance: memory/overflow-put-again: no key is used twice, so an event that is published again after it was removed keeps its object, however late the first one is deleted; the object of an event that exists is never deleted
#[tokio::test]
async fn an_event_that_is_published_again_keeps_its_object() {
    on_every_engine(|lab| async move {
        let shelf = Shelf::new(lab);
        let bus = shelf.open().await;
        let orphans = bus.engine().orphans().unwrap();
        let event = large(EventId::new(), "t", "x");
        bus.publish(event.clone()).await.unwrap();
        forget_everything(&bus).await;
        let first = orphans.list().await.unwrap();
        let mut published = 0;
        // The first deletion is repeated, as by a collector that was stopped for long.
        for collected in [1, 0] {
            bus.publish(event.clone()).await.unwrap();
            published += 1;
            let done = bus.collect_objects(&at_once()).await.unwrap();
            assert_eq!(done.orphans, collected, "{published}");
            orphans.note(first.clone()).await.unwrap();
            bus.collect_objects(&at_once()).await.unwrap();
            let found = stored(&bus, event.id()).await;
            assert_eq!(bus.whole(&found).await.unwrap().event, event);
        }
        // A note about an object that an event refers to is forgotten, and the object stays.
        let found = stored(&bus, event.id()).await;
        let mut wrong = first.clone();
        wrong[0]
            .key
            .clone_from(&found.event.overflow().unwrap().key);
        orphans.note(wrong).await.unwrap();
        let done = bus.collect_objects(&at_once()).await.unwrap();
        assert_eq!(done, Collected::default());
        assert_eq!(orphans.list().await.unwrap(), []);
        assert_eq!(bus.whole(&found).await.unwrap().event, event);
    })
    .await;
}

#[tokio::test]
async fn a_started_bus_collects_by_itself() {
    let shelf = Shelf::new(Lab::new(Kind::Sqlite));
    let bus = shelf.open().await;
    bus.publish(("a", "x".repeat(3000))).await.unwrap();
    forget_everything(&bus).await;
    bus.start().await.unwrap();
    crate::support::eventually("the object is deleted", || async {
        shelf.files().is_empty()
    })
    .await;
    bus.shutdown().await.unwrap();
}
