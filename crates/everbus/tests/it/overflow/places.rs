//! Objects are read from where they are, also after the configuration names another place.

use std::time::Duration;

use everbus::overflow::{Collect, Overflow};
use everbus::{Bus, Code, EventId, Retention};

use super::{Shelf, files, stored};
use crate::support::{Kind, Lab, on_every_engine};

async fn publish(bus: &Bus, text: &str) -> EventId {
    let published = bus.publish(("a", text.repeat(3000))).await;
    published.unwrap().id()
}

async fn read(bus: &Bus, id: EventId) -> everbus::Result<String> {
    let record = stored(bus, id).await;
    assert!(record.event.overflow().is_some());
    let whole = bus.whole(&record).await?;
    Ok(whole.event.json::<String>().unwrap())
}

// conformance: memory/overflow-also-read: after the place was changed, objects are read from the places that are listed, and what is elsewhere is said to be
#[tokio::test]
async fn older_objects_are_read_from_the_places_that_are_listed() {
    on_every_engine(|lab| async move {
        let shelf = Shelf::new(lab);
        let new = shelf.directory.path().join("new");
        let (old, new) = (shelf.objects(), new.to_str().unwrap().to_owned());
        let old = old.to_str().unwrap();
        let bus = shelf.open().await;
        let id = publish(&bus, "x").await;
        let moved = Overflow::to(&new).threshold(2000);

        let bus = reopened(&shelf, bus, moved.clone()).await;
        let error = read(&bus, id).await.unwrap_err();
        assert_eq!(error.code(), Code::ObjectStoreError);
        let said =
            format!("it is in another place ({old}), which this configuration does not read");
        assert!(error.message().contains(&said), "{error}");
        assert!(
            error.hint_text().unwrap().contains("also_read"),
            "{error:?}"
        );

        // However the place is written.
        for url in [old.to_owned(), format!("file://{old}")] {
            let bus = reopened(&shelf, bus.clone(), moved.clone().also_read(url)).await;
            assert_eq!(read(&bus, id).await.unwrap(), "x".repeat(3000));
            let newer = publish(&bus, "y").await;
            assert_eq!(read(&bus, newer).await.unwrap(), "y".repeat(3000));
            let bucket = stored(&bus, newer)
                .await
                .event
                .overflow()
                .unwrap()
                .bucket
                .clone();
            assert_eq!(bucket, new);
        }
        assert_eq!(
            shelf.files().len(),
            1,
            "nothing new is put into the old place"
        );

        // What is gone from a place that is read is missing.
        std::fs::remove_dir_all(shelf.objects()).unwrap();
        let bus = reopened(&shelf, bus, moved.also_read(format!("file://{old}"))).await;
        let error = read(&bus, id).await.unwrap_err();
        assert!(error.message().contains("it is missing"), "{error}");
    })
    .await;
}

/// The same log with other settings.
async fn reopened(shelf: &Shelf, bus: Bus, overflow: Overflow) -> Bus {
    let builder = shelf.lab.builder().overflow(overflow);
    builder.with_engine(bus.engine().clone()).unwrap()
}

// conformance: memory/overflow-beside-read: objects beside the file are read also when new ones go elsewhere, and objects that were moved with their file are found under its new name
#[tokio::test]
async fn objects_beside_the_file_are_read_whatever_is_configured() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name);
    let url = |name: &str| format!("sqlite:{}", file(name).display());
    let open = async |name: &str, overflow: Overflow| {
        let builder = Bus::builder().overflow(overflow.threshold(2000));
        builder.open(&url(name)).await.unwrap()
    };
    let bus = open("one.db", Overflow::default()).await;
    let beside = publish(&bus, "x").await;
    bus.shutdown().await.unwrap();
    let elsewhere = file("elsewhere");
    let elsewhere = Overflow::to(elsewhere.to_str().unwrap());
    let bus = open("one.db", elsewhere.clone()).await;
    let away = publish(&bus, "y").await;
    for (id, text) in [(beside, "x"), (away, "y")] {
        assert_eq!(read(&bus, id).await.unwrap(), text.repeat(3000));
    }
    bus.shutdown().await.unwrap();
    // The two are moved together.
    for suffix in ["", ".objects"] {
        let names = ["one.db", "two.db"].map(|name| file(&format!("{name}{suffix}")));
        std::fs::rename(&names[0], &names[1]).unwrap();
    }
    for overflow in [elsewhere, Overflow::default()] {
        let bus = open("two.db", overflow.clone()).await;
        assert_eq!(read(&bus, beside).await.unwrap(), "x".repeat(3000));
        assert_eq!(read(&bus, away).await.is_ok(), overflow.url.is_some());
        bus.shutdown().await.unwrap();
    }
}

// conformance: memory/overflow-also-kept: the collector deletes nothing in a place that is only read
#[tokio::test]
async fn nothing_is_deleted_in_a_place_that_is_only_read() {
    on_every_engine(|lab| async move {
        let shelf = Shelf::new(lab);
        let bus = shelf.open().await;
        publish(&bus, "x").await;
        let new = shelf.directory.path().join("new");
        let moved = Overflow::to(new.to_str().unwrap()).threshold(2000);
        let moved = moved.also_read(shelf.objects().to_str().unwrap());
        let bus = reopened(&shelf, bus, moved).await;
        publish(&bus, "y").await;
        let retention = Retention {
            max_len: Some(0),
            ..Retention::default()
        };
        let pruned = bus.maintenance().unwrap().prune(retention).await.unwrap();
        assert_eq!(pruned.kept, 0);
        let at_once = Collect {
            strays_after: Duration::ZERO,
            ..Collect::default()
        };
        for _ in 0..2 {
            let collected = bus.collect_objects(&at_once).await.unwrap();
            assert_eq!((collected.strays, collected.kept), (0, 1));
        }
        assert_eq!(shelf.files().len(), 1, "the old place is left alone");
        assert!(files(&new).is_empty(), "what went there is collected");
    })
    .await;
}

// conformance: memory/overflow-inspect: an object is looked at without being read, and deeply if asked for
#[tokio::test]
async fn an_object_is_inspected() {
    let shelf = Shelf::new(Lab::new(Kind::Memory));
    let bus = shelf.open().await;
    let id = publish(&bus, "x").await;
    let objects = everbus::overflow::Objects::open(bus.engine(), &shelf.overflow());
    let objects = objects.unwrap().unwrap();
    let record = stored(&bus, id).await;
    let reference = record.event.overflow().unwrap();
    let object = shelf.objects().join(&reference.key);
    let inspect = async |deep| {
        let all = std::slice::from_ref(reference);
        let mut found = objects.inspect(all, deep).await;
        found.remove(0).unwrap()
    };
    for deep in [false, true] {
        assert_eq!(inspect(deep).await, None);
    }
    std::fs::write(&object, "y".repeat(3002)).unwrap();
    assert_eq!(inspect(false).await, None);
    let deep = inspect(true).await;
    assert_eq!(
        deep.as_deref(),
        Some("its content is not what was put there")
    );
    std::fs::write(&object, "y").unwrap();
    let short = inspect(false).await;
    assert_eq!(short.as_deref(), Some("it has 1 bytes instead of 3002"));
    std::fs::remove_file(&object).unwrap();
    for deep in [false, true] {
        assert_eq!(inspect(deep).await.as_deref(), Some("it is missing"));
    }
}
