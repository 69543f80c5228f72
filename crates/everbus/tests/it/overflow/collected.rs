//! Objects are deleted after their events, never before, and none is left behind.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use everbus::overflow::{Collect, Collected};
use everbus::{Bus, Event, EventId, Retention};
use everbus_core::{
    Background, BoxFuture, Clock as _, Engine, GroupState, LogId, Lookup, Orphan, Orphans,
    Position, Recorded, Result, SystemClock, Timestamp,
};

use super::{Shelf, stored};
use crate::support::{Kind, Lab, on_every_engine};

fn at_once() -> Collect {
    let mut collect = Collect::default();
    collect.strays_after = Duration::ZERO;
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
        let would = bus.collect_objects(&Collect::dry_run()).await.unwrap();
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
    let key = format!("events/~/{id}-payload.json");
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

// conformance: memory/overflow-swept: what interrupted puts left among the objects is swept up after a day; nothing beside the objects is, also not an unfinished mark of the place
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
        let cut = young.with_extension("json#3");
        let foreign = young.with_file_name("somebody-elses.txt");
        // Another log marks its keys.
        let name = format!("{}-0123456789ab-payload.json", EventId::new());
        let others = young.with_file_name(name);
        let mark = shelf.objects().join("everbus-log.json#1");
        for file in [&cut, &foreign, &others, &mark] {
            std::fs::write(file, "0123456789").unwrap();
            age(file, Duration::from_secs(25 * 3600));
        }
        let would = bus.collect_objects(&Collect::dry_run()).await.unwrap();
        assert_eq!((would.strays, would.bytes, would.kept), (1, 10, 1));
        assert!(old.exists() && cut.exists());
        let done = bus.collect_objects(&Collect::default()).await.unwrap();
        assert_eq!(done, would);
        assert!(!old.exists() && !cut.exists());
        for kept in [&object, &young, &foreign, &others, &mark] {
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

// conformance: memory/overflow-look-first: a note is not forgotten before its object was looked for: one that the listing does not show is deleted, not left without a note
#[tokio::test]
async fn an_object_that_is_not_listed_is_looked_for_before_its_note_is_forgotten() {
    on_every_engine(|lab| async move {
        let shelf = Shelf::new(lab);
        let bus = shelf.open().await;
        // The place is claimed by the first object.
        publish(&bus, "x").await;
        // Put under a prefix that the place had once.
        let id = EventId::new();
        let key = format!("before/events/~/{id}-payload.json");
        let note = Orphan {
            bucket: shelf.objects().to_str().unwrap().to_owned(),
            key: key.clone(),
            id,
            since: SystemClock.now(),
            unborn: false,
        };
        let orphans = bus.engine().orphans().unwrap();
        orphans.note(vec![note]).await.unwrap();
        let path = shelf.objects().join(key);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, "0123456789").unwrap();
        let done = bus.collect_objects(&Collect::default()).await.unwrap();
        assert_eq!((done.orphans, done.bytes, done.kept), (1, 10, 0));
        assert!(!path.exists());
        assert_eq!(orphans.list().await.unwrap(), []);
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
    let new = publish(&bus, "y").await;
    let key = &stored(&bus, new)
        .await
        .event
        .overflow()
        .unwrap()
        .key
        .clone();
    assert_ne!(*key, format!("events/~/{new}-payload.json"), "it is marked");
    forget_everything(&bus).await;
    let done = bus.collect_objects(&at_once()).await.unwrap();
    assert_eq!((done.orphans, done.unknown), (1, 0), "its own object");
    let objects = everbus::overflow::Objects::open(bus.engine(), &{
        everbus::overflow::Overflow::to(shop.path("objects").to_str().unwrap())
    });
    let objects = objects.unwrap().unwrap();
    let survey = objects.survey(bus.engine()).await.unwrap();
    assert_eq!((survey.in_use.objects, survey.of_others().objects), (0, 1));
    assert_eq!(survey.others.keys().next(), survey.owner.as_ref());
    assert_ne!(survey.log, survey.owner);
    bus.shutdown().await.unwrap();
    // Back in its place the file has everything.
    std::fs::rename(shop.path("kept.db"), shop.path("shop.db")).unwrap();
    let bus = shop.open().await;
    shop.is_whole(&bus, &[kept]).await;
    bus.shutdown().await.unwrap();
}

// conformance: memory/overflow-older-copy: where an older copy of the file was put into place, the objects of the newer state are never collected
#[tokio::test]
async fn an_older_copy_deletes_nothing_of_the_newer_state() {
    let shop = Beside::new();
    let bus = shop.open().await;
    let before = publish(&bus, "x").await;
    bus.shutdown().await.unwrap();
    // By hand, without a word to anybody.
    std::fs::copy(shop.path("shop.db"), shop.path("older.db")).unwrap();
    let bus = shop.open().await;
    let after = publish(&bus, "y").await;
    bus.shutdown().await.unwrap();
    shop.age_all();
    std::fs::rename(shop.path("shop.db"), shop.path("newer.db")).unwrap();
    std::fs::rename(shop.path("older.db"), shop.path("shop.db")).unwrap();
    let bus = shop.open().await;
    // Retention removes what both know of, before the collector has looked for the first time.
    forget_everything(&bus).await;
    let log = bus.engine().orphans().unwrap().log_id().await.unwrap();
    let dry = bus.collect_objects(&Collect::dry_run()).await.unwrap();
    assert_eq!((dry.orphans, dry.unknown), (0, 1));
    let found = bus.collect_objects(&at_once()).await.unwrap();
    assert_eq!((found.orphans, found.strays, found.unknown), (0, 0, 1));
    assert_ne!(bus.engine().orphans().unwrap().log_id().await.unwrap(), log);
    // From now on it is another log, with objects of its own.
    publish(&bus, "z").await;
    forget_everything(&bus).await;
    let done = bus.collect_objects(&at_once()).await.unwrap();
    assert_eq!((done.orphans, done.strays, done.unknown), (1, 0, 0));
    bus.shutdown().await.unwrap();
    let newer = shop.open_as("newer.db").await;
    shop.is_whole(&newer, &[before, after]).await;
    newer.shutdown().await.unwrap();
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

// conformance: memory/overflow-moved: after a bus was given another place, what is under the same key there is somebody else's
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
    let bus = ours.open_with(theirs.overflow()).await;
    let collected = bus.collect_objects(&Collect::default()).await.unwrap();
    assert_eq!((collected.orphans, collected.kept), (0, 1));
    bus.shutdown().await.unwrap();
    let found = stored(&other, event.id()).await;
    assert_eq!(other.whole(&found).await.unwrap().event, event);
    other.shutdown().await.unwrap();
}

/// While the collector looks for the event of an object, another collector deletes the object, and a publish
/// puts it again.
struct PutAgain {
    inner: Arc<dyn Lookup>,
    object: PathBuf,
}

impl Lookup for PutAgain {
    fn find(&self, id: EventId) -> BoxFuture<'_, Result<Vec<Arc<Recorded>>>> {
        std::fs::remove_file(&self.object).unwrap();
        std::fs::write(&self.object, "new").unwrap();
        self.inner.find(id)
    }

    fn states(&self, position: Position) -> BoxFuture<'_, Result<Vec<GroupState>>> {
        self.inner.states(position)
    }
}

// conformance: memory/overflow-put-again: an object that was deleted and put again while a collector ran is not deleted
#[tokio::test]
async fn an_object_that_was_put_again_is_not_deleted() {
    on_every_engine(|lab| async move {
        let shelf = Shelf::new(lab);
        let bus = shelf.open().await;
        publish(&bus, "x").await;
        forget_everything(&bus).await;
        let object = shelf.objects().join(&shelf.files()[0]);
        age(&object, Duration::from_secs(3600));
        let objects = everbus::overflow::Objects::open(bus.engine(), &shelf.overflow());
        let (objects, mut engine) = (objects.unwrap().unwrap(), bus.engine().clone());
        let inner = engine.lookup.take().unwrap();
        engine.lookup = Some(Arc::new(PutAgain {
            inner,
            object: object.clone(),
        }));
        let collected = objects.collect(&engine, &at_once()).await.unwrap();
        assert_eq!(collected.orphans, 0);
        assert_eq!(std::fs::read(&object).unwrap(), b"new");
    })
    .await;
}

/// Each time a collector has read the notes, another one deletes the object, and a publish puts it again.
struct PutAfterTheNotes {
    inner: Arc<dyn Orphans>,
    object: PathBuf,
}

impl Orphans for PutAfterTheNotes {
    fn list(&self) -> BoxFuture<'_, Result<Vec<Orphan>>> {
        Box::pin(async move {
            let notes = self.inner.list().await?;
            std::fs::remove_file(&self.object).unwrap();
            let note = Orphan {
                since: SystemClock.now(),
                unborn: true,
                ..notes[0].clone()
            };
            self.inner.note(vec![note]).await?;
            std::fs::write(&self.object, "new").unwrap();
            Ok(notes)
        })
    }

    fn note(&self, orphans: Vec<Orphan>) -> BoxFuture<'_, Result<()>> {
        self.inner.note(orphans)
    }

    fn forget(&self, orphans: Vec<Orphan>) -> BoxFuture<'_, Result<()>> {
        self.inner.forget(orphans)
    }

    fn log_id(&self) -> BoxFuture<'_, Result<LogId>> {
        self.inner.log_id()
    }

    fn renew(&self) -> BoxFuture<'_, Result<LogId>> {
        self.inner.renew()
    }
}

// conformance: memory/overflow-put-again: an object that is put again after the collector has read its notes is not deleted
#[tokio::test]
async fn an_object_that_was_put_again_after_the_notes_were_read_is_not_deleted() {
    on_every_engine(|lab| async move {
        let shelf = Shelf::new(lab);
        let bus = shelf.open().await;
        publish(&bus, "x").await;
        forget_everything(&bus).await;
        let object = shelf.objects().join(&shelf.files()[0]);
        let mut engine = bus.engine().clone();
        engine.orphans = Some(Arc::new(PutAfterTheNotes {
            inner: engine.orphans.take().unwrap(),
            object: object.clone(),
        }));
        let objects = everbus::overflow::Objects::open(&engine, &shelf.overflow());
        let objects = objects.unwrap().unwrap();
        let collected = objects.collect(&engine, &at_once()).await.unwrap();
        assert_eq!((collected.orphans, collected.strays), (0, 0));
        assert_eq!(std::fs::read(&object).unwrap(), b"new");
        // The note of the publish is still there.
        let notes = bus.engine().orphans().unwrap().list().await.unwrap();
        assert!(notes.iter().any(|note| note.unborn), "{notes:?}");
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
