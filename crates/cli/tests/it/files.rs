//! `everbus check`, `backup` and `restore`.

use crate::support::{Shop, exists};

// conformance: issue-2/check: the integrity of a file is checked on command
// conformance: issue-2/cli-check: a good file passes, and what the engine promises is printed
#[test]
fn a_good_file_passes_the_check() {
    let shop = Shop::new();
    shop.dead_letters(3);
    let report = shop.run(&["-o", "json", "check"]).json();
    assert_eq!(report["ok"], true, "{report}");
    assert_eq!(report["capabilities"]["durability"], "power_loss");
    assert!(!report["findings"].as_array().unwrap().is_empty());
    assert!(shop.run(&["check"]).ok().contains("as it should be"));
}

// conformance: issue-2/cli-check: a damaged file fails the check
// conformance: issue-2/corrupt: a damaged file is reported as such
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
    let said = format!("{}{}", ran.out, ran.err);
    assert!(
        said.contains("BAD") || said.contains("CorruptFile"),
        "{ran:?}"
    );
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
        let ran = shop.run(arguments);
        assert_eq!(ran.code, 1, "{ran:?}");
        assert!(ran.err.contains("error["), "{ran:?}");
    }
    assert_eq!(std::fs::read(shop.db()).unwrap(), before);
}

// conformance: issue-2/cli-backup: a backup holds everything, and a restore brings it into place
// conformance: issue-2/restore: a restore brings a backup into place
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

// conformance: issue-2/restore: a restore never overwrites a file unasked
// conformance: issue-2/cli-backup: neither overwrites a file unasked, and a forced restore keeps the old one
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
    let ran = shop.run(&["restore", "junk.db", "--force"]);
    assert_eq!(ran.code, 1, "{ran:?}");
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
