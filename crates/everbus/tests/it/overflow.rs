//! Overflow: large events are split, and everybody who reads sees them whole.

mod collected;
mod foreign;
mod ordering;
mod places;
mod s3;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use everbus::overflow::{LARGEST_EVENT, Overflow, THRESHOLD};
use everbus::{Bus, Code, Event, EventId, FailureKind, Json, Recorded, Router, handled};
use serde_json::{Value, json};

use crate::support::{
    Kind, Lab, fine, handled as all_handled, on_every_engine, published, recorder,
};

/// A bus whose objects are in a directory of its own, whatever the engine.
struct Shelf {
    lab: Lab,
    directory: tempfile::TempDir,
}

impl Shelf {
    fn new(lab: Lab) -> Self {
        Self {
            lab,
            directory: tempfile::tempdir().unwrap(),
        }
    }

    fn objects(&self) -> PathBuf {
        self.directory.path().join("objects")
    }

    fn overflow(&self) -> Overflow {
        Overflow::to(self.objects().to_str().unwrap()).threshold(2000)
    }

    async fn open(&self) -> Bus {
        self.open_with(self.overflow()).await
    }

    async fn open_with(&self, overflow: Overflow) -> Bus {
        let never = everbus::RetryPolicy::never();
        let builder = self.lab.builder().overflow(overflow).retry(never);
        self.lab.open_with(builder).await
    }

    /// All files there are, by their path from the directory.
    fn files(&self) -> Vec<String> {
        files(&self.objects())
    }
}

fn files(directory: &Path) -> Vec<String> {
    fn walk(path: &Path, from: &Path, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(path).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, from, found);
            } else {
                let name = path.strip_prefix(from).unwrap();
                found.push(name.to_str().unwrap().to_owned());
            }
        }
    }
    let mut found = Vec::new();
    walk(directory, directory, &mut found);
    found.sort();
    found
}

async fn stored(bus: &Bus, id: EventId) -> Arc<Recorded> {
    bus.lookup().unwrap().find(id).await.unwrap().remove(0)
}

/// Random numbers from a seed that is printed.
struct Random(u64);

impl Random {
    fn seeded() -> Self {
        let seed = std::env::var("EVERBUS_SEED")
            .ok()
            .and_then(|s| s.parse().ok());
        let seed = seed.unwrap_or_else(|| uuid::Uuid::new_v4().as_u128() as u64 | 1);
        eprintln!("EVERBUS_SEED={seed}");
        Self(seed)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }

    fn pick<'a>(&mut self, of: &[&'a str]) -> &'a str {
        of[self.below(of.len() as u64) as usize]
    }

    fn space(&mut self) -> &'static str {
        self.pick(&["", "", "", " ", "\n", "\t \r\n"])
    }

    fn text(&mut self, longest: u64) -> String {
        let parts = [
            "a", "ü", "\\\"", "\\\\", "\\u00e9", "\\n", "😀", "{", "}", "]", ",", ":", "null",
        ];
        let n = self.below(longest);
        let inner: String = (0..n).map(|_| self.pick(&parts)).collect();
        format!("\"{inner}\"")
    }

    fn value(&mut self, depth: u64) -> String {
        match self.below(if depth == 0 { 4 } else { 6 }) {
            0 => self.text(30),
            1 => self.text(1500),
            2 => self
                .pick(&[
                    "null",
                    "true",
                    "false",
                    "0",
                    "-1.5e+3",
                    "12345678901234567890",
                ])
                .into(),
            3 => self.text(3),
            4 => {
                let n = self.below(5);
                let inner: Vec<String> = (0..n).map(|_| self.spaced(depth - 1)).collect();
                format!("[{}]", inner.join(","))
            }
            _ => self.object(depth - 1),
        }
    }

    fn spaced(&mut self, depth: u64) -> String {
        let (before, value, after) = (self.space(), self.value(depth), self.space());
        format!("{before}{value}{after}")
    }

    fn object(&mut self, depth: u64) -> String {
        let keys = [
            "\"output\"",
            "\"outputs\"",
            "\"input\"",
            "\"claudeOutput\"",
            "\"\\u006futput\"",
            "\"in\\u0070ut\"",
            "\"other\"",
            "\"Output\"",
            "\"\"",
            "\"a\\\"b\"",
        ];
        let n = self.below(7);
        let members: Vec<String> = (0..n)
            .map(|_| {
                let key = self.pick(&keys);
                let (a, b, value) = (self.space(), self.space(), self.spaced(depth));
                format!("{a}{key}{b}:{value}")
            })
            .collect();
        format!("{{{}{}}}", members.join(","), self.space())
    }
}

// conformance: memory/overflow-bytes: readers get the payload as it was published, byte for byte (property test)
#[tokio::test]
async fn whatever_the_payload_it_comes_back_byte_for_byte() {
    let shelf = Shelf::new(Lab::new(Kind::Memory));
    let bus = shelf.open().await;
    let mut random = Random::seeded();
    let (mut split, mut whole) = (0, 0);
    for round in 0..400 {
        let payload = match random.below(8) {
            0 => random.value(3),
            _ => random.object(3),
        };
        let payload = format!("{}{payload}{}", random.space(), random.space());
        let event = Event::builder("t")
            .payload(payload.clone())
            .meta("k", "v")
            .build()
            .unwrap();
        let receipt = bus.publish(event.clone()).await.unwrap();
        let found = stored(&bus, receipt.id()).await;
        let restored = bus.whole(&found).await.unwrap();
        assert_eq!(restored.event, event, "round {round}: {payload}");
        assert_eq!(
            (restored.position, restored.received_at),
            (found.position, found.received_at)
        );
        match found.event.overflow() {
            None => assert!(payload.len() <= 2000, "round {round}"),
            Some(overflow) => {
                assert!(payload.len() > 1900, "round {round}");
                assert!(found.event.payload().len() <= 2000, "round {round}");
                let travels: Result<Value, _> = serde_json::from_slice(found.event.payload());
                travels.unwrap_or_else(|e| panic!("round {round}: {e}"));
                if overflow.parts.is_empty() {
                    whole += 1;
                    assert_eq!(found.event.payload(), "null");
                } else {
                    split += 1;
                    let object = std::fs::read(shelf.objects().join(&overflow.key)).unwrap();
                    let object: Value = serde_json::from_slice(&object).unwrap();
                    assert!(object.is_object());
                }
            }
        }
    }
    assert!(
        split > 20 && whole > 5,
        "{split} were split, {whole} moved as a whole"
    );
}

// conformance: memory/overflow-threshold: an event over the threshold is moved, one of exactly that size is not; 204,800 bytes unless set
// conformance: workflow/overflow-threshold: events over 200 KB have their large fields in the object store
#[tokio::test]
async fn exactly_the_threshold_travels_and_one_byte_more_does_not() {
    on_every_engine(|lab| async move {
        assert_eq!(THRESHOLD, 204_800);
        let shelf = Shelf::new(lab);
        let overflow = Overflow::to(shelf.objects().to_str().unwrap());
        let bus = shelf.open_with(overflow.stream("small:one", 5_000)).await;
        for (event_type, threshold) in [("any.type", 204_800), ("small.one", 5_000)] {
            for (tenant, bytes) in [(None, 0), (Some("acme"), r#"{"tenant":"acme"}"#.len())] {
                for (more, moved) in [(0, false), (1, true)] {
                    let text = "x".repeat(threshold - bytes - 2 + more);
                    let mut event = Event::builder(event_type).json(&text);
                    if let Some(tenant) = tenant {
                        event = event.tenant(tenant);
                    }
                    let receipt = bus.publish(event).await.unwrap();
                    let found = stored(&bus, receipt.id()).await;
                    let said = format!("{event_type} {tenant:?} {more}");
                    assert_eq!(found.event.overflow().is_some(), moved, "{said}");
                }
            }
        }
        assert_eq!(shelf.files().len(), 4);
    })
    .await;
}

// conformance: memory/overflow-moves: the large fields move, or the whole payload if that is not enough or there are none; the event carries the reference
#[tokio::test]
async fn fields_move_first_and_then_everything() {
    on_every_engine(|lab| async move {
        let shelf = Shelf::new(lab);
        let bus = shelf.open().await;
        let publish = async |payload: Value| {
            let event = Event::builder("task.done")
                .entity("TASK", "req-1")
                .json(&payload);
            let receipt = bus.publish(event).await.unwrap();
            stored(&bus, receipt.id()).await.event.clone()
        };
        let large = "x".repeat(3000);
        let event = publish(json!({ "a": 1, "input": large, "outputs": [large] })).await;
        let overflow = event.overflow().unwrap();
        let fields: Vec<&str> = overflow.parts.iter().map(|p| p.field.as_str()).collect();
        assert_eq!(fields, ["input", "outputs"]);
        assert_eq!(
            event.json::<Value>().unwrap(),
            json!({ "a": 1, "input": null, "outputs": null })
        );
        let key = format!("events/req-1/{}-", event.id());
        assert!(overflow.key.starts_with(&key), "{}", overflow.key);
        assert_eq!(overflow.bucket, shelf.objects().to_str().unwrap());
        let object = std::fs::read(shelf.objects().join(&overflow.key)).unwrap();
        assert_eq!(object.len() as u64, overflow.size);
        let object: Value = serde_json::from_slice(&object).unwrap();
        assert_eq!(object, json!({ "input": large, "outputs": [large] }));

        for payload in [
            json!({ "a": large, "input": large }),
            json!({ "a": large }),
            json!(large),
        ] {
            let event = publish(payload.clone()).await;
            let overflow = event.overflow().unwrap();
            assert!(overflow.parts.is_empty());
            assert_eq!(event.payload(), "null");
            let object = std::fs::read(shelf.objects().join(&overflow.key)).unwrap();
            assert_eq!(serde_json::from_slice::<Value>(&object).unwrap(), payload);
        }
        let binary = vec![0xff; 5000];
        let event = Event::builder("t")
            .payload(binary.clone())
            .content_type("image/png");
        let found = stored(&bus, bus.publish(event).await.unwrap().id()).await;
        assert_eq!(
            found.event.overflow().unwrap().key.split('/').nth(1),
            Some("~")
        );
        assert_eq!(bus.whole(&found).await.unwrap().event.payload(), &binary);
    })
    .await;
}

// conformance: memory/overflow-readers: handlers get the event whole; what they publish is moved before the ack
#[tokio::test]
async fn handlers_see_events_whole_and_what_they_publish_is_moved() {
    on_every_engine(|lab| async move {
        let shelf = Shelf::new(lab);
        let bus = shelf.open().await;
        let large = "y".repeat(4000);
        let answer = |Json(text): Json<String>, context: everbus::Context| async move {
            context.publish(("second", text.repeat(2)))?;
            handled()
        };
        let (record, mut seen) = recorder(fine);
        bus.mount(Router::new().on("first", answer)).await.unwrap();
        bus.subscribe("second")
            .group("two")
            .handler(record)
            .await
            .unwrap();
        bus.start().await.unwrap();
        all_handled(&bus, ("first", &large)).await;
        let second = seen.next().await;
        assert_eq!(second.json::<String>().unwrap(), large.repeat(2));
        assert!(second.overflow().is_none());
        for event in published(&bus, "*").await {
            assert!(event.event.overflow().is_some(), "{event:?}");
        }
        assert_eq!(shelf.files().len(), 2);
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: memory/overflow-missing: an object that is missing or whose length or content differs is a failure of its event: recorded, dead-lettered, retried; others go on
#[tokio::test]
async fn a_bad_object_is_a_failure_of_its_event_alone() {
    on_every_engine(|lab| async move {
        let shelf = Shelf::new(lab);
        let bus = shelf.open().await;
        let (record, mut seen) = recorder(fine);
        bus.subscribe("a").group("g").handler(record).await.unwrap();
        let text = |n: usize| format!("{n}{}", "z".repeat(3000));
        let mut ids = Vec::new();
        for n in 0..4 {
            ids.push(bus.publish(("a", text(n))).await.unwrap().id());
        }
        let mut paths = Vec::new();
        for id in &ids {
            let key = stored(&bus, *id)
                .await
                .event
                .overflow()
                .unwrap()
                .key
                .clone();
            paths.push(shelf.objects().join(key));
        }
        let good = std::fs::read(&paths[0]).unwrap();
        std::fs::remove_file(&paths[0]).unwrap();
        std::fs::write(&paths[1], "\"short\"").unwrap();
        let mut other = std::fs::read(&paths[2]).unwrap();
        other[7] ^= 1;
        std::fs::write(&paths[2], other).unwrap();
        bus.start().await.unwrap();
        assert_eq!(seen.next().await.json::<String>().unwrap(), text(3));
        for (n, said) in [
            "it is missing",
            "7 bytes instead of 3003",
            "not what was put there",
        ]
        .iter()
        .enumerate()
        {
            let seq = stored(&bus, ids[n]).await.position.place();
            crate::support::eventually("it is dead-lettered", || async {
                let state = crate::support::state_in(&bus, seq, "g").await.unwrap();
                state.state == everbus::EventState::Dlq
            })
            .await;
            let letter = bus.dead_letters().get(ids[n]).await.unwrap().remove(0);
            let failure = letter.failures.last().unwrap();
            assert_eq!(failure.kind, FailureKind::Decode);
            assert!(failure.error.contains(said), "{}", failure.error);
            let error = bus.whole(&letter.record).await.unwrap_err();
            assert_eq!(error.code(), Code::ObjectStoreError);
        }
        // Brought back, it is handled.
        std::fs::create_dir_all(paths[0].parent().unwrap()).unwrap();
        std::fs::write(&paths[0], good).unwrap();
        bus.dead_letters().retry(ids[0]).await.unwrap();
        assert_eq!(seen.next().await.json::<String>().unwrap(), text(0));
        bus.shutdown().await.unwrap();
    })
    .await;
}

// conformance: memory/overflow-limit: an event with overflow has up to 64 MiB; one byte more is refused
#[tokio::test]
async fn sixty_four_mebibytes_go_through_and_one_byte_more_does_not() {
    on_every_engine(|lab| async move {
        assert_eq!(LARGEST_EVENT, 64 * 1024 * 1024);
        let shelf = Shelf::new(lab);
        let bus = shelf.open().await;
        let payload = |bytes: usize| {
            let mut payload = vec![b' '; bytes];
            payload[bytes / 2] = b'7';
            Event::builder("a").payload(payload)
        };
        let error = bus.publish(payload(LARGEST_EVENT + 1)).await.unwrap_err();
        assert_eq!(error.code(), Code::PayloadTooLarge);
        assert!(shelf.files().is_empty());
        let event = payload(LARGEST_EVENT).build().unwrap();
        let receipt = bus.publish(event.clone()).await.unwrap();
        let found = stored(&bus, receipt.id()).await;
        assert!(bus.whole(&found).await.unwrap().event.payload() == event.payload());
    })
    .await;
}

// conformance: memory/overflow-off: a bus on nothing but memory moves nothing unless told to, and then its limit is 1 MiB
#[tokio::test]
async fn without_a_place_nothing_is_moved() {
    let lab = Lab::new(Kind::Memory);
    let bus = lab.open().await;
    let receipt = bus.publish(("a", "x".repeat(300_000))).await.unwrap();
    assert!(stored(&bus, receipt.id()).await.event.overflow().is_none());
    let error = bus.publish(("a", "x".repeat(1 << 20))).await.unwrap_err();
    assert_eq!(error.code(), Code::PayloadTooLarge);
    // On a file objects lie beside it; off is off.
    let lab = Lab::new(Kind::Sqlite);
    let beside = PathBuf::from(format!("{}.objects", lab.file().display()));
    let off = lab.open_with(lab.builder().overflow(Overflow::off())).await;
    off.publish(("a", "x".repeat(300_000))).await.unwrap();
    let error = off.publish(("a", "x".repeat(1 << 20))).await.unwrap_err();
    assert_eq!(error.code(), Code::PayloadTooLarge);
    assert!(!beside.exists());
    off.shutdown().await.unwrap();
    let bus = lab.open().await;
    let large = bus.publish(("a", "x".repeat(2 << 20))).await.unwrap();
    let overflow = stored(&bus, large.id())
        .await
        .event
        .overflow()
        .unwrap()
        .clone();
    assert_eq!(overflow.bucket, "bus.db.objects");
    assert_eq!(files(&beside), std::slice::from_ref(&overflow.key));
    bus.shutdown().await.unwrap();
    // Off for publishing, it is still read.
    let off = lab.open_with(lab.builder().overflow(Overflow::off())).await;
    let found = stored(&off, large.id()).await;
    assert_eq!(
        off.whole(&found).await.unwrap().event.payload().len(),
        (2 << 20) + 2
    );
    // An explicit limit holds for everything.
    let small = lab.open_with(lab.builder().max_payload(1000)).await;
    let error = small.publish(("a", "x".repeat(1000))).await.unwrap_err();
    assert_eq!(error.code(), Code::PayloadTooLarge);
    // What was read and not made whole is not published again.
    let error = off.publish(found.event.clone()).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidAttribute);
    off.shutdown().await.unwrap();
    small.shutdown().await.unwrap();
}

// conformance: memory/overflow-bad-place: a place that cannot be used is a clear error, and nothing is published
#[tokio::test]
async fn a_place_that_cannot_be_used_is_a_clear_error() {
    on_every_engine(|lab| async move {
        let shelf = Shelf::new(lab);
        let bus = shelf.open().await;
        std::fs::write(shelf.objects(), "a file").unwrap();
        let error = bus.publish(("a", "x".repeat(5000))).await.unwrap_err();
        assert_eq!(error.code(), Code::ObjectStoreError, "{error}");
        assert!(!error.outcome_unknown());
        assert!(published(&bus, "*").await.is_empty());
        bus.publish(("a", "small ones go on")).await.unwrap();
        std::fs::remove_file(shelf.objects()).unwrap();
        bus.publish(("a", "x".repeat(5000))).await.unwrap();
    })
    .await;
    for url in [
        "",
        "ftp://host/x",
        "file://host/x",
        "file:x",
        "s3://",
        "s3:///x",
        "file:///a%zz",
    ] {
        let error = Bus::builder()
            .overflow(Overflow::to(url))
            .open("memory:")
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::InvalidUrl, "{url}");
        assert!(error.hint_text().is_some());
    }
    if cfg!(not(feature = "s3")) {
        let error = Bus::builder()
            .overflow(Overflow::to("s3://b/x"))
            .open("memory:")
            .await
            .unwrap_err();
        assert!(error.to_string().contains("no S3"), "{error}");
        assert!(error.hint_text().unwrap().contains("feature s3"));
    }
    for overflow in [
        Overflow::default().threshold(1023),
        Overflow::default().threshold(1 << 30),
        Overflow::default().stream("a", 5),
        Overflow::default().limit(1 << 30),
    ] {
        let error = Bus::builder()
            .overflow(overflow)
            .open("memory:")
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::InvalidSetting);
    }
}

// conformance: memory/overflow-path: a path in an entity id stays inside the store
#[tokio::test]
async fn a_path_in_an_entity_id_stays_inside() {
    let shelf = Shelf::new(Lab::new(Kind::Sqlite));
    let bus = shelf.open().await;
    let ids = [
        "../../escaped",
        "/etc/x",
        "a\0b",
        "%2e%2e",
        "..",
        "~",
        "x#1",
    ];
    let long = "../".repeat(2000);
    for entity in ids.into_iter().chain([long.as_str()]) {
        let event = Event::builder("a")
            .entity("TASK", entity)
            .json(&"x".repeat(3000));
        let receipt = bus.publish(event).await.unwrap();
        let found = stored(&bus, receipt.id()).await;
        let whole = bus.whole(&found).await.unwrap();
        assert_eq!(whole.event.payload().len(), 3002, "{entity:?}");
    }
    assert_eq!(shelf.files().len(), 8);
    assert!(shelf.files().iter().all(|file| file.starts_with("events/")));
    let outside: Vec<_> = std::fs::read_dir(shelf.directory.path()).unwrap().collect();
    assert_eq!(outside.len(), 1, "{outside:?}");
    bus.shutdown().await.unwrap();
}

// conformance: memory/overflow-config: everbus.yaml says where objects go and when events are split
#[tokio::test]
async fn the_configuration_file_sets_it() {
    let directory = tempfile::tempdir().unwrap();
    let objects = directory.path().join("o");
    let text = format!(
        "broker: {{type: memory}}
overflow:
  url: {}
  threshold: 5000
  limit: 100000
  streams:
    'small:one': 2000
",
        objects.display()
    );
    let config = everbus::Config::parse(&text, "everbus.yaml").unwrap();
    let overflow = config.overflow.clone().unwrap();
    assert!(overflow.enabled);
    let bus = Bus::builder()
        .config(&config)
        .open_configured()
        .await
        .unwrap();
    for (event_type, bytes, moved) in [
        ("a.b", 4000, false),
        ("a.b", 6000, true),
        ("small.one", 4000, true),
    ] {
        let receipt = bus.publish((event_type, "x".repeat(bytes))).await.unwrap();
        let found = stored(&bus, receipt.id()).await;
        assert_eq!(
            found.event.overflow().is_some(),
            moved,
            "{event_type} {bytes}"
        );
    }
    let error = bus.publish(("a", "x".repeat(100_000))).await.unwrap_err();
    assert_eq!(error.code(), Code::PayloadTooLarge);
    for (bad, said) in [
        ("overflow: {threshold: 10}", "out of range"),
        ("overflow: {url: 'ftp://x'}", "no object store"),
        ("overflow: {treshold: 5000}", "treshold"),
        ("overflow: {streams: {'a.*': 5000}}", "pattern"),
        ("overflow: {enabled: maybe}", "boolean"),
        ("overflow: {also_read: /old}", "also_read is a single value"),
        (
            "overflow: {also_read: [/old, 'ftp://x']}",
            "overflow.also_read[1]",
        ),
        (
            "overflow: {also_read: [a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q]}",
            "a list of 17",
        ),
    ] {
        let error = everbus::Config::parse(bad, "everbus.yaml").unwrap_err();
        assert_eq!(error.code(), Code::InvalidConfig);
        assert!(error.to_string().contains(said), "{bad}: {error}");
    }
}

// conformance: memory/overflow-replay: a replay gets events whole; one whose object is missing is an error of that event alone
#[tokio::test]
async fn a_replay_gets_events_whole() {
    on_every_engine(|lab| async move {
        let shelf = Shelf::new(lab);
        let bus = shelf.open().await;
        let mut ids = Vec::new();
        for n in 0..3 {
            let text = format!("{n}{}", "r".repeat(3000));
            ids.push(bus.publish(("a", text)).await.unwrap().id());
        }
        let copy = bus.replay_event(ids[1]).await.unwrap();
        let found = stored(&bus, copy.id()).await;
        let (original, reference) = (stored(&bus, ids[1]).await, found.event.overflow().unwrap());
        assert_ne!(reference.key, original.event.overflow().unwrap().key);
        let (copied, original) = (
            bus.whole(&found).await.unwrap(),
            bus.whole(&original).await.unwrap(),
        );
        assert_eq!(copied.event.payload(), original.event.payload());

        let lost = stored(&bus, ids[0])
            .await
            .event
            .overflow()
            .unwrap()
            .key
            .clone();
        std::fs::remove_file(shelf.objects().join(lost)).unwrap();
        for concurrency in [1, 4] {
            let report = bus
                .replay()
                .concurrency(concurrency)
                .into_function(|record: Arc<Recorded>| async move {
                    let text: String = record.event.json().map_err(|e| e.to_string())?;
                    if text.len() == 3001 {
                        Ok(())
                    } else {
                        Err("not whole".to_owned())
                    }
                })
                .await
                .unwrap();
            assert_eq!((report.processed, report.errors), (3, 1), "{report:?}");
        }
    })
    .await;
}
