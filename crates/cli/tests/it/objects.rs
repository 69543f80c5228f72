//! The objects of large events in backups and after restores, whose they are, and how much memory a large
//! event takes.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, SystemTime};

use everbus::{Bus, Event, Retention};
use serde_json::Value;

use crate::support::{Ran, Shop, on_runtime};

const SIZE: usize = 300_000;

/// Publishes a large event and returns its id.
fn publish(shop: &Shop, options: &[&str], text: &str) -> String {
    let arguments = [options, &["-o", "json", "publish", "order.placed", "-"]].concat();
    let payload = format!(r#"{{"output":"{}"}}"#, text.repeat(SIZE));
    let published = shop.run_with_input(&arguments, &payload);
    published.lines()[0]["id"].as_str().unwrap().to_owned()
}

/// Whether the event is there as it was published.
fn is_whole(shop: &Shop, options: &[&str], id: &str, text: &str) -> bool {
    let got = shop.run(&[options, &["-o", "json", "get", id]].concat());
    let event = got.lines().remove(0);
    event["event"]["payload"]["output"] == text.repeat(SIZE).as_str()
}

/// The names of the objects in a directory, sorted.
fn objects(directory: &Path) -> Vec<PathBuf> {
    let folder = directory.join("events/~");
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let mut names: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    names.sort();
    names
}

/// The object of an event, by the key that it has.
fn object(directory: &Path, id: &str) -> PathBuf {
    let named = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with(id);
    let found = objects(directory).into_iter().find(named);
    found.unwrap_or_else(|| panic!("no object of {id}"))
}

/// Makes everything in a directory of objects old enough to be deleted.
fn age(directory: &Path) {
    for path in objects(directory) {
        let file = std::fs::File::options().write(true).open(path).unwrap();
        let past = SystemTime::now() - Duration::from_secs(100 * 3600);
        file.set_modified(past).unwrap();
    }
}

// conformance: memory/backup-objects: a backup holds the objects that its events refer to, and can be read by itself
// conformance: memory/restore-objects: a restore brings the objects back to where they belong
#[test]
fn a_backup_holds_the_objects_and_a_restore_brings_them_back() {
    let shop = Shop::new();
    let ids = ["x", "y"].map(|text| publish(&shop, &[], text));
    let done = shop.run(&["-o", "json", "backup", "copy.db"]).json();
    assert_eq!(done["objects"]["copied"], 2, "{done}");
    assert_eq!(done["objects"]["bytes"], 2 * (SIZE + 13), "{done}");
    assert_eq!(done["objects"]["place"], "copy.db.objects");
    assert_eq!(objects(&shop.path("copy.db.objects")).len(), 2);
    // The original goes, with everything beside it.
    std::fs::remove_file(shop.db()).unwrap();
    std::fs::remove_dir_all(shop.path("everbus.db.objects")).unwrap();
    for (id, text) in ids.iter().zip(["x", "y"]) {
        assert!(is_whole(&shop, &["--db", "copy.db"], id, text));
    }
    let text = shop.run(&["--db", "new.db", "restore", "copy.db"]).ok();
    assert!(
        text.contains("2 objects copied to new.db.objects"),
        "{text}"
    );
    for (id, text) in ids.iter().zip(["x", "y"]) {
        assert!(is_whole(&shop, &["--db", "new.db"], id, text));
    }
    // Each of the two has its objects, and deletes them when their events are gone.
    for db in ["copy.db", "new.db"] {
        let run = |arguments: &[&str]| shop.run(&[&["--db", db], arguments].concat());
        let shown = run(&["-o", "json", "objects", "show"]).json();
        assert_eq!(shown["in_use"]["objects"], 2, "{shown}");
    }
    let used = shop.path("used.db");
    shop.run(&["--db", "used.db", "restore", "copy.db"]).ok();
    shop.run(&[
        "--db",
        used.to_str().unwrap(),
        "retention",
        "run",
        "--max-len",
        "0",
    ])
    .ok();
    assert_eq!(objects(&shop.path("used.db.objects")).len(), 0);
    assert_eq!(objects(&shop.path("copy.db.objects")).len(), 2);
    // What has the name of a backup is not overwritten.
    std::fs::create_dir(shop.path("other.db.objects")).unwrap();
    let said = shop.run(&["--db", "new.db", "backup", "other.db"]);
    let said = said.failed(2, "InvalidSetting");
    assert!(said.contains("other.db.objects exists already"), "{said}");
    assert!(!shop.path("other.db").exists());
}

// conformance: memory/restore-keeps-objects: a file that is replaced by a restore is kept with all its objects, which nobody collects
#[test]
fn a_replaced_file_keeps_its_objects() {
    let shop = Shop::new();
    let before = publish(&shop, &[], "x");
    shop.run(&["backup", "copy.db"]).ok();
    let after = publish(&shop, &[], "y");
    let restored = shop.run(&["-o", "json", "restore", "copy.db", "--force"]);
    let restored = restored.json();
    let kept = restored["kept"].as_str().unwrap();
    assert_eq!(restored["objects"]["copied"], 1, "{restored}");
    assert!(is_whole(&shop, &[], &before, "x"));
    shop.run(&["get", &after]).failed(3, "NotFound");
    // Everything in the new file is removed, and its objects with it.
    age(&shop.path("everbus.db.objects"));
    age(&shop.path(&format!("{kept}.objects")));
    for _ in 0..2 {
        shop.run(&["retention", "run", "--max-len", "0"]).ok();
    }
    assert_eq!(objects(&shop.path("everbus.db.objects")).len(), 0);
    assert!(is_whole(&shop, &["--db", kept], &before, "x"));
    assert!(is_whole(&shop, &["--db", kept], &after, "y"));
}

// conformance: memory/backup-no-objects: --no-objects leaves the objects out and says so
#[test]
fn a_backup_without_objects_says_so() {
    let shop = Shop::new();
    let id = publish(&shop, &[], "x");
    let ran = shop.run(&["backup", "copy.db", "--no-objects"]);
    assert!(
        ran.err
            .contains("large parts of 1 event are not in the backup"),
        "{ran:?}"
    );
    ran.ok();
    assert!(!shop.path("copy.db.objects").exists());
    // Elsewhere the objects cannot be had: the rest is there, and the command says what is not.
    let ran = shop.run(&["-o", "json", "--db", "new.db", "restore", "copy.db"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains(&format!("events/~/{id}-")), "{ran:?}");
    let done: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(done["objects"]["missing"], 1);
    let ran = shop.run(&["--db", "new.db", "get", &id]);
    assert!(ran.code == 1 && ran.out.contains(&id), "{ran:?}");
    // In the place of the file that has them they are found.
    shop.run(&["restore", "copy.db", "--force"]).ok();
    assert!(is_whole(&shop, &[], &id, "x"));
}

// conformance: memory/backup-verified: an object that is missing or has another length is named, and the exit code is 1
#[test]
fn a_backup_names_the_objects_that_are_damaged() {
    let shop = Shop::new();
    let ids = ["x", "y", "z"].map(|text| publish(&shop, &[], text));
    let at = ids.each_ref();
    let at = at.map(|id| object(&shop.path("everbus.db.objects"), id));
    std::fs::remove_file(&at[0]).unwrap();
    std::fs::write(&at[1], "short").unwrap();
    let ran = shop.run(&["-o", "json", "backup", "copy.db"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("it is missing"), "{ran:?}");
    assert!(ran.err.contains("it has 5 bytes instead of"), "{ran:?}");
    let done: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(done["objects"]["copied"], 1);
    assert_eq!(done["objects"]["missing"], 2);
    assert!(is_whole(&shop, &["--db", "copy.db"], &ids[2], "z"));
}

// conformance: memory/restore-place: objects are restored to where the configuration says, and nothing that is there is overwritten
#[test]
fn objects_go_where_the_configuration_says_and_overwrite_nothing() {
    let shop = Shop::new();
    let config = "broker:\n  type: sqlite\n  url: sqlite:shop.db\noverflow:\n  url: there\n";
    std::fs::write(shop.path("everbus.yaml"), config).unwrap();
    let options = ["--config", "everbus.yaml"];
    let id = publish(&shop, &options, "x");
    let run = |arguments: &[&str]| shop.run(&[&options, arguments].concat());
    run(&["backup", "copy.db"]).ok();
    assert_eq!(objects(&shop.path("copy.db.objects")).len(), 1);
    // The same object is there already.
    let done = run(&["-o", "json", "restore", "copy.db", "--force"]).json();
    assert_eq!(done["objects"]["present"], 1, "{done}");
    // Another log now, whose objects they are not: they stay whatever happens.
    age(&shop.path("there"));
    for _ in 0..2 {
        run(&["retention", "run", "--max-len", "0"]).ok();
    }
    assert_eq!(objects(&shop.path("there")).len(), 1);
    let told = run(&["objects", "show"]).ok();
    assert!(told.contains("not of this file"), "{told}");
    // Something else of that name is not overwritten, and nothing is changed.
    let object = &objects(&shop.path("there"))[0];
    let bytes = std::fs::read(object).unwrap();
    std::fs::remove_file(object).unwrap();
    std::fs::write(object, bytes.to_ascii_uppercase()).unwrap();
    let head = run(&["-o", "json", "objects", "show"]).json();
    let said = run(&["restore", "copy.db", "--force"]).failed(1, "ObjectStoreError");
    assert!(said.contains("nothing is overwritten"), "{said}");
    assert_eq!(run(&["-o", "json", "objects", "show"]).json(), head);
    run(&["get", &id]).failed(3, "NotFound");
    // Where the objects are gone, they are put back.
    std::fs::remove_dir_all(shop.path("there")).unwrap();
    let done = run(&["-o", "json", "restore", "copy.db", "--force"]).json();
    assert_eq!(done["objects"]["copied"], 1, "{done}");
    assert!(is_whole(&shop, &options, &id, "x"));
}

// conformance: memory/objects-command: objects of another log are shown by whose they are, and removed only on command
#[test]
fn objects_of_another_log_are_removed_only_on_command() {
    let shop = Shop::new();
    let older = publish(&shop, &[], "x");
    std::fs::copy(shop.db(), shop.path("older.db")).unwrap();
    let newer = publish(&shop, &[], "y");
    // An older copy is put into place by hand.
    std::fs::rename(shop.path("older.db"), shop.db()).unwrap();
    for side in ["everbus.db-wal", "everbus.db-shm"] {
        let _ = std::fs::remove_file(shop.path(side));
    }
    age(&shop.path("everbus.db.objects"));
    shop.run(&["retention", "run"]).ok();
    let shown = shop.run(&["-o", "json", "objects", "show"]).json();
    assert_eq!(shown["in_use"]["objects"], 1, "{shown}");
    let log = shown["log"].as_str().unwrap();
    assert_eq!(shown["others"][log]["objects"], 1, "{shown}");
    let text = shop.run(&["objects", "show"]).ok();
    assert!(text.contains("not of this file"), "{text}");
    shop.run(&["objects", "remove", "0123456789ab"])
        .failed(3, "NotFound");
    let object = object(&shop.path("everbus.db.objects"), &newer);
    let dry = shop.run(&["objects", "remove", log, "--dry-run"]).ok();
    assert!(
        dry.contains("1 object (300,013 bytes) would be deleted"),
        "{dry}"
    );
    assert!(object.exists());
    let young = shop
        .run(&["objects", "remove", log, "--older-than", "200h"])
        .ok();
    assert!(young.contains("0 objects"), "{young}");
    shop.run(&["objects", "remove", log]).ok();
    assert!(!object.exists());
    assert!(is_whole(&shop, &[], &older, "x"));
    let trail = shop.run(&["-o", "json", "audit", "list"]).json();
    assert!(trail.to_string().contains("objects.remove"), "{trail}");
}

// conformance: memory/check-objects: check names every object that is missing or damaged, with --deep also by its content; exit code 1
#[test]
fn a_check_finds_objects_that_are_missing_or_damaged() {
    let shop = Shop::new();
    let ids = ["x", "y", "z"].map(|text| publish(&shop, &[], text));
    shop.run(&["publish", "a.b", "1", "--count", "3"]).ok();
    let at = ids.each_ref();
    let at = at.map(|id| object(&shop.path("everbus.db.objects"), id));
    for options in [&["check"][..], &["check", "--deep"]] {
        let text = shop.run(options).ok();
        assert!(
            text.contains("objects: 3 objects (900,039 bytes) checked"),
            "{text}"
        );
    }
    // The same length: only a deep check sees it.
    std::fs::write(&at[2], "z".repeat(SIZE + 13)).unwrap();
    shop.run(&["check"]).ok();
    let found = |options: &[&str]| {
        let ran = shop.run(&[&["-o", "json", "check"], options].concat());
        assert_eq!(ran.code, 1, "{ran:?}");
        let report: Value = serde_json::from_str(&ran.out).unwrap();
        assert_eq!(report["ok"], false, "{report}");
        report["objects"].clone()
    };
    let deep = found(&["--deep"]);
    assert_eq!(
        (&deep["checked"], &deep["bad"]),
        (&3.into(), &1.into()),
        "{deep}"
    );
    assert_eq!(deep["problems"][0]["event"], ids[2].as_str(), "{deep}");
    std::fs::remove_file(&at[0]).unwrap();
    std::fs::write(&at[1], "short").unwrap();
    assert_eq!(found(&["--deep"])["bad"], 3);
    let quick = found(&[]);
    assert_eq!(quick["bad"], 2, "{quick}");
    for (n, what) in ["it is missing", "it has 5 bytes instead of 300013"]
        .iter()
        .enumerate()
    {
        let problem = &quick["problems"][n];
        assert_eq!(problem["event"], ids[n].as_str(), "{quick}");
        let key = problem["key"].as_str().unwrap();
        assert!(at[n].ends_with(key), "{quick}");
        assert_eq!(problem["problem"], *what, "{quick}");
    }
    let ran = shop.run(&["check"]);
    let key = quick["problems"][0]["key"].as_str().unwrap();
    let line = format!("event {}, object {key}: it is missing", ids[0]);
    assert!(ran.code == 1 && ran.out.contains(&line), "{ran:?}");
    assert!(ran.out.contains("BAD objects: 3 objects"), "{ran:?}");
    assert!(ran.out.contains("the file is sound"), "{ran:?}");
    let both = shop.run(&["check", "--deep", "--config", "everbus.yaml"]);
    assert_eq!(both.code, 2, "{both:?}");
}

// conformance: memory/check-objects-place: check and backup find objects in the places that the configuration lists, and say which place is not read
#[test]
fn a_check_looks_where_the_configuration_says() {
    let shop = Shop::new();
    let config = |overflow: &str| {
        let text =
            format!("broker:\n  type: sqlite\n  url: sqlite:shop.db\noverflow: {overflow}\n");
        std::fs::write(shop.path("everbus.yaml"), text).unwrap();
    };
    let options = ["--config", "everbus.yaml"];
    let check = || {
        let mut command = shop.command(&["check"]);
        Ran::from(
            command
                .env("EVERBUS_CONFIG", "everbus.yaml")
                .output()
                .unwrap(),
        )
    };
    let ids = ["one", "two"].map(|place| {
        config(&format!("{{url: {place}}}"));
        publish(&shop, &options, place)
    });
    // One of the two places is not read.
    let ran = check();
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.out.contains("it is in another place (one)"), "{ran:?}");
    assert!(ran.out.contains("overflow.also_read"), "{ran:?}");
    config("{url: two, also_read: [one]}");
    let text = check().ok();
    assert!(text.contains("ok  objects: 2 objects"), "{text}");
    for (id, text) in ids.iter().zip(["one", "two"]) {
        assert!(is_whole(&shop, &options, id, text));
    }
    shop.run(&[&options, &["backup", "copy.db"][..]].concat())
        .ok();
    assert_eq!(objects(&shop.path("copy.db.objects")).len(), 2);
}

// conformance: memory/backup-while-pruning: events that are removed while a backup is made do not leave it without their objects
#[test]
fn events_that_are_removed_during_a_backup_have_their_objects_in_it() {
    const EVENTS: usize = 3000;
    // Until events were removed between the copy of the file and the end of the backup.
    for _ in 0..40 {
        let shop = Shop::new();
        let url = format!("sqlite:{}", shop.db().display());
        // It is there as soon as the moment is fixed of which the copy is made.
        let copying = shop.path("copy.db.backing-up.partial");
        let done = shop.path("copy.db");
        let happened = on_runtime(async {
            let overflow = everbus::overflow::Overflow::default().threshold(1024);
            let bus = Bus::builder().overflow(overflow).open(&url).await.unwrap();
            // The last ones may go at once, and are the last that a backup looks at.
            let events = (0..EVENTS).map(|n| {
                let event = Event::builder("a.b").json(&format!("{n:>2000}"));
                match n < EVENTS - 50 {
                    true => event.build().unwrap(),
                    false => event.ttl(Duration::from_millis(1)).build().unwrap(),
                }
            });
            let receipts = bus.publish_batch(events).await.unwrap();
            let objects = shop.path("everbus.db.objects");
            let last = receipts[EVENTS - 50..].iter();
            let theirs = last.map(|receipt| object(&objects, &receipt.id().to_string()));
            let theirs: Vec<PathBuf> = theirs.collect();
            let mut child = shop.command(&["backup", "copy.db"]).spawn().unwrap();
            let (mut removed, mut happened) = (false, false);
            while child.try_wait().unwrap().is_none() {
                if removed || !copying.exists() {
                    continue;
                }
                // The events, and then their objects: what retention and the collector do.
                let maintenance = bus.maintenance().unwrap();
                let pruned = maintenance.prune(Retention::default()).await.unwrap();
                assert_eq!(pruned.removed, 50);
                for object in &theirs {
                    std::fs::remove_file(object).unwrap();
                }
                (removed, happened) = (true, !done.exists());
            }
            Ran::from(child.wait_with_output().unwrap()).ok();
            bus.shutdown().await.unwrap();
            happened
        });
        let shown = shop.run(&["-o", "json", "--db", "copy.db", "objects", "show"]);
        let in_use = shown.json()["in_use"]["objects"].as_u64().unwrap();
        let events = shop.run(&["-o", "json", "--db", "copy.db", "tail", "--no-follow"]);
        let events = events.lines().len() as u64;
        assert_eq!(in_use, events, "each event of the copy has its object");
        if happened {
            return;
        }
    }
    panic!("no event was removed after the file was copied");
}

/// The most memory that a process has had so far, in bytes.
#[cfg(target_os = "linux")]
fn peak(child: &Child) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    let kilobytes = line.unwrap().trim().trim_end_matches(" kB");
    kilobytes.parse::<usize>().unwrap() * 1024
}

/// Publishes a payload of this size from standard input; returns its id and the most memory that took.
#[cfg(target_os = "linux")]
fn publish_measured(shop: &Shop, payload: &[u8]) -> (String, usize) {
    let mut child = shop
        .command(&["-o", "json", "publish", "a.b", "-"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(payload).unwrap();
    stdin.write_all(b"\n").unwrap();
    let mut receipt = String::new();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    stdout.read_line(&mut receipt).unwrap();
    // It waits for the next line.
    let most = peak(&child);
    drop(stdin);
    assert!(child.wait().unwrap().success());
    let receipt: Value = serde_json::from_str(&receipt).unwrap();
    (receipt["id"].as_str().unwrap().to_owned(), most)
}

/// Reads an event back; returns the most memory that took until all but the end was printed.
#[cfg(target_os = "linux")]
fn get_measured(shop: &Shop, options: &[&str], size: usize) -> usize {
    let mut child = shop.command(options).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    // More than fits into a pipe is still to come, so it cannot have ended.
    let mut left = size.saturating_sub(1 << 20);
    let mut buffer = vec![0; 1 << 16];
    while left > 0 {
        let n = stdout.read(&mut buffer[..left.min(1 << 16)]).unwrap();
        assert!(n > 0, "it ended early");
        left -= n;
    }
    let most = peak(&child);
    std::io::copy(&mut stdout, &mut std::io::sink()).unwrap();
    assert!(child.wait().unwrap().success());
    most
}

// conformance: memory/overflow-memory: an event of 60 MiB is in memory once while it is published and while it is read
#[cfg(target_os = "linux")]
#[test]
fn a_large_event_is_in_memory_once() {
    const LARGE: usize = 60 << 20;
    const SMALL: usize = 2 << 20;
    // A second copy of the payload would take 120 MiB.
    const BOUND: usize = LARGE + LARGE / 2;
    let shop = Shop::new();
    for form in ["whole", "field"] {
        // The tab has to be escaped when it is shown as text.
        let payload = |size: usize| match form {
            "whole" => format!("\"{}\"", "x".repeat(size)),
            _ => format!("{{\"a\":1,\t\"output\":\"{}\"}}", "x".repeat(size)),
        };
        let (small, base) = publish_measured(&shop, payload(SMALL).as_bytes());
        let (large, most) = publish_measured(&shop, payload(LARGE).as_bytes());
        let more = most.saturating_sub(base);
        assert!(more < BOUND, "publishing {form}: {more} bytes more");
        for format in ["text", "json"] {
            let get = |id: &str, size| get_measured(&shop, &["-o", format, "get", id], size);
            let base = get(&small, SMALL);
            let more = get(&large, LARGE).saturating_sub(base);
            assert!(
                more < BOUND,
                "reading {form} as {format}: {more} bytes more"
            );
        }
    }
}
