//! `everbus check`, `backup` and `restore`.

use std::io::{BufRead as _, BufReader};

use crate::support::{Shop, exists};

// conformance: bus/check: the integrity of a file is checked on command
// conformance: bus/cli-check: a good file passes, and what the engine promises is printed
#[test]
fn a_good_file_passes_the_check() {
    let shop = Shop::new();
    shop.dead_letters(3);
    let report = shop.run(&["-o", "json", "check"]).json();
    assert_eq!(report["ok"], true, "{report}");
    assert_eq!(report["capabilities"]["durability"], "power_loss");
    assert!(!report["findings"].as_array().unwrap().is_empty());
    let text = shop.run(&["check"]).ok();
    assert!(text.contains("as it should be"), "{text}");
    assert!(text.contains("durability power_loss"), "{text}");
    assert!(text.contains("survives a power loss"), "{text}");
}

// conformance: bus/cli-check: a damaged file fails the check
// conformance: bus/corrupt: a damaged file is reported as such
#[test]
fn a_damaged_file_does_not_pass() {
    let shop = Shop::new();
    shop.run(&["publish", "a.b", "1", "--count", "2000"]).ok();
    // A backup is one file, without a write-ahead log that would mend the damage.
    shop.run(&["backup", "copy.db"]).ok();
    let mut bytes = std::fs::read(shop.path("copy.db")).unwrap();
    let half = bytes.len() / 2;
    for byte in &mut bytes[half..half + 20_000] {
        *byte ^= 0x5a;
    }
    std::fs::write(shop.path("copy.db"), bytes).unwrap();
    let ran = shop.run(&["--db", "copy.db", "check"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.out.contains("BAD "), "{ran:?}");
    findings_of_a_damaged_file(&shop, "copy.db");
}

#[track_caller]
fn findings_of_a_damaged_file(shop: &Shop, db: &str) {
    let ran = shop.run(&["-o", "json", "--db", db, "check"]);
    assert_eq!((ran.code, ran.err.as_str()), (1, ""), "{ran:?}");
    let report: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(report["ok"], false);
    let findings = report["findings"].as_array().unwrap();
    assert!(findings.iter().any(|f| f["ok"] == false), "{report}");
}

// conformance: bus/cli-check: damage that the engine cannot even open is a finding too
#[test]
fn a_file_too_damaged_to_open_is_still_reported_on() {
    let shop = Shop::new();
    shop.run(&["publish", "a.b", "1", "--count", "2000"]).ok();
    shop.run(&["backup", "copy.db"]).ok();
    let mut bytes = std::fs::read(shop.path("copy.db")).unwrap();
    // All but the header of the file: the tables cannot be found any more.
    for byte in &mut bytes[100..20_000] {
        *byte ^= 0x5a;
    }
    std::fs::write(shop.path("copy.db"), bytes).unwrap();
    findings_of_a_damaged_file(&shop, "copy.db");
    let said = shop
        .run(&["--db", "copy.db", "groups"])
        .failed(1, "CorruptFile");
    let cause = "database disk image is malformed";
    assert_eq!(said.matches(cause).count(), 1, "told once: {said}");
}

#[test]
fn a_file_of_something_else_is_refused_and_untouched() {
    let shop = Shop::new();
    std::fs::write(
        shop.db(),
        "just a text file, and not a short one at that\n".repeat(50),
    )
    .unwrap();
    let before = std::fs::read(shop.db()).unwrap();
    for arguments in [&["publish", "a.b"][..], &["check"], &["groups"]] {
        shop.run(arguments).failed(2, "NotAnEverbusFile");
    }
    assert_eq!(std::fs::read(shop.db()).unwrap(), before);
}

// conformance: bus/cli-backup: a backup holds everything, and a restore brings it into place
// conformance: bus/restore: a restore brings a backup into place
#[test]
fn a_backup_is_restored_into_a_new_file() {
    let shop = Shop::new();
    let ids = shop.dead_letters(3);
    let done = shop.run(&["-o", "json", "backup", "copy.db"]).json();
    assert_eq!(done["backup"], "copy.db");
    shop.run(&["--db", "new.db", "restore", "copy.db"]).ok();
    let letters = shop
        .run(&["-o", "json", "--db", "new.db", "dlq", "list"])
        .json();
    assert_eq!(letters["dead_letters"].as_array().unwrap().len(), 3);
    shop.run(&["--db", "new.db", "get", &ids[0]]).ok();
    shop.run(&["--db", "new.db", "check"]).ok();
}

// conformance: bus/restore: a restore never overwrites a file unasked
// conformance: bus/cli-backup: neither overwrites a file unasked, and a forced restore keeps the old one
#[test]
fn nothing_is_overwritten_unasked() {
    let shop = Shop::new();
    shop.run(&["publish", "a.old"]).ok();
    shop.run(&["backup", "copy.db"]).ok();
    let again = shop.run(&["backup", "copy.db"]);
    assert_ne!(again.code, 0, "{again:?}");
    shop.run(&["publish", "a.new"]).ok();
    let refused = shop.run(&["restore", "copy.db"]);
    assert_eq!(refused.code, 2, "{refused:?}");
    let restored = shop
        .run(&["-o", "json", "restore", "copy.db", "--force"])
        .json();
    let types = |db: &str| {
        let lines = shop
            .run(&["-o", "json", "--db", db, "tail", "--no-follow"])
            .lines();
        lines.len()
    };
    assert_eq!(types("everbus.db"), 1);
    assert_eq!(
        types(restored["kept"].as_str().unwrap()),
        2,
        "the old file is kept"
    );
}

// conformance: bus/restore: notes and indexes of the replaced log go with the old file, also where that file was deleted
#[test]
fn a_restored_file_does_not_meet_the_notes_of_the_old_log() {
    let shop = Shop::new();
    shop.run(&["publish", "a.old"]).ok();
    shop.run(&["backup", "copy.db"]).ok();
    let note = shop.path("everbus.db.log-head");
    let index = shop.path("everbus.db-tasks");
    for deleted in [false, true] {
        // As after a crash. The restore opens the old file for its audit trail, and that removes the note.
        std::fs::write(&note, "of the old log").unwrap();
        std::fs::write(&index, "of the old log").unwrap();
        if deleted {
            std::fs::remove_file(shop.path("everbus.db")).unwrap();
        }
        let args = ["-o", "json", "restore", "copy.db", "--force"];
        let restored = shop.run(&args).json();
        assert!(!exists(&note) && !exists(&index), "{restored}");
        if let Some(kept) = restored["kept"].as_str().filter(|_| !deleted) {
            assert!(exists(&shop.path(&format!("{kept}-tasks"))));
        }
    }
}

#[test]
fn a_backup_needs_the_name_of_a_file() {
    let shop = Shop::new();
    shop.run(&["publish", "a.b"]).ok();
    std::fs::create_dir(shop.path("there")).unwrap();
    for name in ["there", "there/", "new/"] {
        let said = shop.run(&["backup", name]).failed(2, "NotAFile");
        assert!(said.contains("hint: name a file in it"), "{said}");
    }
    assert!(!exists(&shop.path("new")));
    assert_eq!(std::fs::read_dir(shop.path("there")).unwrap().count(), 0);
}

#[test]
fn a_file_is_not_restored_onto_itself() {
    let shop = Shop::new();
    shop.run(&["publish", "a.b"]).ok();
    std::os::unix::fs::symlink("everbus.db", shop.path("link.db")).unwrap();
    for name in ["everbus.db", "./everbus.db", "link.db"] {
        shop.run(&["restore", name, "--force"]).failed(2, "Usage");
    }
    let lines = shop.run(&["-o", "json", "tail", "--no-follow"]).lines();
    assert_eq!(lines.len(), 1);
}

// conformance: bus/locked: a command says that it waits for a locked file, and gives up when told to
#[test]
fn a_command_says_that_it_waits_for_a_locked_file() {
    let shop = Shop::new();
    shop.run(&["publish", "a.b"]).ok();
    let other = rusqlite::Connection::open(shop.db()).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let said = shop
        .run(&["--busy-timeout", "200ms", "publish", "a.b"])
        .failed(4, "FileBusy");
    assert!(said.contains("raise --busy-timeout"), "{said}");
    let mut child = shop
        .command(&["--busy-timeout", "60m", "publish", "a.b"])
        .spawn()
        .unwrap();
    let mut said = String::new();
    let mut errors = BufReader::new(child.stderr.take().unwrap());
    errors.read_line(&mut said).unwrap();
    assert!(said.starts_with("waiting for everbus.db"), "{said}");
    other.execute_batch("ROLLBACK").unwrap();
    assert!(child.wait().unwrap().success());
    let mut rest = String::new();
    errors.read_line(&mut rest).unwrap();
    assert_eq!(rest, "", "said once");
}

#[test]
fn a_file_in_use_is_not_replaced() {
    let shop = Shop::new();
    shop.run(&["publish", "a.b"]).ok();
    shop.run(&["backup", "copy.db"]).ok();
    let other = rusqlite::Connection::open(shop.db()).unwrap();
    let _: i64 = other
        .query_row("SELECT count(*) FROM events", [], |row| row.get(0))
        .unwrap();
    shop.run(&["restore", "copy.db", "--force"])
        .failed(4, "FileBusy");
    drop(other);
    shop.run(&["restore", "copy.db", "--force"]).ok();
}

#[test]
fn a_backup_that_is_none_changes_nothing() {
    let shop = Shop::new();
    shop.run(&["publish", "a.b"]).ok();
    std::fs::write(
        shop.path("junk.db"),
        "no database at all, whatever it says".repeat(40),
    )
    .unwrap();
    let said = shop
        .run(&["restore", "junk.db", "--force"])
        .failed(2, "NotAnEverbusFile");
    assert!(said.contains("junk.db"), "{said}");
    shop.run(&["restore", "missing.db", "--force"])
        .failed(3, "NoSuchFile");
    let lines = shop.run(&["-o", "json", "tail", "--no-follow"]).lines();
    assert_eq!(lines.len(), 1);
    let left: Vec<String> = std::fs::read_dir(shop.path("."))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.contains("restor"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(!exists(&shop.path("missing.db")));
}

// conformance: operations/look-empty: a command that only looks makes no database of an empty file
#[test]
fn a_look_at_an_empty_file_leaves_it_empty() {
    let shop = Shop::new();
    std::fs::write(shop.db(), "").unwrap();
    let ran = shop.run(&["groups"]);
    assert_eq!(ran.code, 2, "{ran:?}");
    assert!(ran.err.contains("is empty"), "{ran:?}");
    assert_eq!(std::fs::metadata(shop.db()).unwrap().len(), 0);
    shop.run(&["publish", "a.b"]).ok();
}

// conformance: operations/look-refused: a look that permissions refuse leaves nothing beside the file
#[test]
fn a_look_that_permissions_refuse_touches_nothing() {
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::process::CommandExt as _;
    const NOBODY: u32 = 65534;
    let shop = Shop::new();
    shop.run(&["publish", "a.b"]).ok();
    let mode = |name: &str, mode| {
        let path = shop.path(name);
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let names = || {
        let entries = std::fs::read_dir(shop.path(".")).unwrap();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name()).collect();
        names.sort();
        names
    };
    // A copy that another user may run, wherever the program was built.
    std::fs::copy(env!("CARGO_BIN_EXE_everbus"), shop.path("everbus")).unwrap();
    mode("everbus", 0o755);
    mode("everbus.db", 0o444);
    mode(".", 0o777);
    let before = names();
    let mut look = std::process::Command::new(shop.path("everbus"));
    look.current_dir(shop.path("."))
        .args(["--db", "everbus.db", "groups"]);
    // Root may write everything, so that another user looks then.
    if rustix::process::getuid().is_root() {
        look.uid(NOBODY).gid(NOBODY);
    }
    let looked = look.output().unwrap();
    assert_eq!(looked.status.code(), Some(4), "{looked:?}");
    assert_eq!(names(), before);
    mode("everbus.db", 0o644);
    shop.run(&["groups"]).ok();
}
