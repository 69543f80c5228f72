//! A checker that finds nothing proves nothing: each kind of loss is planted in a sound file.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use everbus_testkit::chaos::checker::{Report, Stage, check};
use everbus_testkit::chaos::ledger::Ledger;
use everbus_testkit::chaos::observe::observe;
use everbus_testkit::chaos::process::SharedLedger;
use everbus_testkit::chaos::rounds::Arena;
use tempfile::TempDir;

/// A drained file with everything in it, and what was said about it.
struct Sound {
    directory: TempDir,
    file: PathBuf,
    ledger: SharedLedger,
}

fn sound() -> &'static Sound {
    static SOUND: OnceLock<Sound> = OnceLock::new();
    SOUND.get_or_init(|| {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("sound.db");
        let mut arena = Arena::new(crate::program(), file.clone(), 11);
        let mut orders = arena.orders();
        orders.publishes = 100;
        let victim = arena.spawn(&orders, None).unwrap();
        let patience = Instant::now() + Duration::from_secs(60);
        while arena.ledger().lock().acked().len() < 400 && Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(5));
        }
        victim.end_in_order().unwrap();
        arena.drain().unwrap();
        assert!(arena.tally.is_clean(), "{:?}", arena.tally.problems);
        let ledger = arena.ledger().clone();
        Sound {
            directory,
            file,
            ledger,
        }
    })
}

/// What the checker says of the file after this was done to it.
fn after(name: &str, sql: &str) -> Report {
    let sound = sound();
    let file = sound.directory.path().join(format!("{name}.db"));
    std::fs::copy(&sound.file, &file).unwrap();
    let conn = rusqlite::Connection::open(&file).unwrap();
    let changed = conn.execute(sql, []).unwrap();
    assert_eq!(changed, 1, "the plant {name} changes one row");
    drop(conn);
    let observed = observe(&file).unwrap();
    check(&sound.ledger.lock(), &observed, Stage::Drained, 0)
}

#[track_caller]
fn assert_lost(report: &Report, what: &str) {
    assert!(
        matches!(report.lost.as_slice(), [lost] if lost.contains(what)),
        "{report:?}"
    );
}

#[track_caller]
fn assert_fault(report: &Report, what: &str) {
    assert!(report.lost.is_empty(), "{report:?}");
    assert!(
        report.faults.iter().any(|fault| fault.contains(what)),
        "{report:?}"
    );
}

// conformance: bus/checker: the checker finds nothing in a sound file and every loss planted in it
#[test]
fn an_acknowledged_event_that_is_gone_is_lost() {
    // One that is handled everywhere, so that nothing else refers to it.
    let report = after(
        "gone",
        "DELETE FROM log WHERE seq = (SELECT max(seq) FROM log WHERE
           seq NOT IN (SELECT seq FROM dead_letters) AND seq NOT IN (SELECT seq FROM skips)
           AND type IN (SELECT id FROM types WHERE name LIKE 'chaos.%'))",
    );
    assert_lost(&report, "is not in the log");
}

// conformance: bus/checker: an altered payload is a loss
#[test]
fn a_payload_that_differs_by_one_byte_is_lost() {
    let report = after(
        "altered",
        "UPDATE log SET payload = CAST(replace(CAST(payload AS TEXT), '}', ' ') AS BLOB)
         WHERE seq = (SELECT max(seq) FROM log WHERE
           type IN (SELECT id FROM types WHERE name LIKE 'chaos.%'))",
    );
    assert_lost(&report, "is not what was published");
}

// conformance: bus/checker: an event that counts as handled without a handler is a loss
// conformance: fault-3: a dead letter that is dropped while its source is acked is found
#[test]
fn an_event_that_is_done_and_no_handler_finished_is_lost() {
    let report = after(
        "unhandled",
        "DELETE FROM dead_letters WHERE (seq, group_id) IN
           (SELECT seq, group_id FROM dead_letters LIMIT 1)",
    );
    assert_lost(&report, "no handler finished it");
}

// conformance: memory/dlq-notice-checked: the checker finds a dead letter that nothing tells of, and a notice of none
#[test]
fn a_dead_letter_and_its_notice_belong_together() {
    let which = "type = (SELECT id FROM types WHERE name = 'system.dead_letter')";
    let report = after(
        "untold",
        &format!("DELETE FROM log WHERE seq = (SELECT min(seq) FROM log WHERE {which})"),
    );
    assert_fault(&report, "is a dead letter that nothing tells of");
    let report = after(
        "mistold",
        &format!(
            "UPDATE log SET payload = CAST(replace(CAST(payload AS TEXT), '\"attempts\":4', '\"attempts\":5') AS BLOB)
             WHERE seq = (SELECT min(seq) FROM log WHERE {which}
               AND CAST(payload AS TEXT) LIKE '%\"attempts\":4%')"
        ),
    );
    assert_fault(&report, "tells of no dead letter");
}

// conformance: bus/checker: a skip without a recorded reason is a loss
#[test]
fn a_skip_must_be_on_record_with_its_reason() {
    let which = "(group_id, seq) IN (SELECT group_id, seq FROM skips LIMIT 1)";
    let report = after("unrecorded", &format!("DELETE FROM skips WHERE {which}"));
    assert_lost(&report, "no handler finished it");
    let report = after(
        "unreasoned",
        &format!("UPDATE skips SET reason = '' WHERE {which}"),
    );
    assert_lost(&report, "was skipped with the reason");
}

// conformance: bus/checker: a dead letter carries every error, attempts, times, group and handler
#[test]
fn a_dead_letter_must_tell_its_whole_story() {
    let plant = |name: &str, change: &str| {
        after(
            name,
            &format!(
                "UPDATE dead_letters SET {change} WHERE (seq, group_id) IN
                   (SELECT seq, group_id FROM dead_letters WHERE attempts = 4 LIMIT 1)"
            ),
        )
    };
    assert_fault(&plant("no-errors", "failures = '[]'"), "without errors");
    assert_fault(
        &plant("first-error", "failures = json_remove(failures, '$[0]')"),
        "whose errors are of the attempts [2, 3, 4]",
    );
    assert_fault(
        &plant(
            "order",
            "failures = json_set(failures, '$[0].at', '2999-01-01T00:00:00Z')",
        ),
        "not in the order of time",
    );
    assert_fault(
        &plant("blank", "failures = json_set(failures, '$[1].error', '')"),
        "that says nothing",
    );
    assert_fault(&plant("attempts", "attempts = 9"), "of 9 attempts");
    assert_fault(&plant("handler", "handler = NULL"), "of handler None");
    assert_fault(&plant("time", "died_at = 1"), "died before it lived");
    assert_fault(
        &plant(
            "early",
            "attempts = 1, failures = json_array(json_extract(failures, '$[0]'))",
        ),
        "after only 1 attempts",
    );
}

// conformance: bus/checker: an event is in exactly one place for each group
// conformance: fault-5: a position that passed an unfinished event would show as handled by nobody
#[test]
fn an_event_in_two_places_or_still_owed_is_a_fault() {
    let report = after(
        "both",
        "INSERT INTO deliveries (group_id, seq, state, due, attempt, type, updated_at)
         SELECT group_id, seq, 0, 0, 1, type, 0 FROM dead_letters LIMIT 1",
    );
    assert_fault(&report, "is in [");
    let report = after(
        "owed",
        "INSERT INTO deliveries (group_id, seq, state, due, attempt, type, updated_at)
         SELECT (SELECT id FROM groups WHERE name = 'ledger'), seq, 0, 0, 1, type, 0 FROM log
         WHERE seq NOT IN (SELECT seq FROM dead_letters) LIMIT 1",
    );
    assert_fault(&report, "is Waiting after everything was drained");
}

// conformance: bus/checker: duplicates are bounded by what was in flight when a process was torn away
#[test]
fn duplicates_that_no_kill_explains_are_a_fault() {
    let mut ledger = Ledger::default();
    let id = everbus_core::EventId::new();
    for victim in 1..=2 {
        ledger.hear(victim, &format!("H 1 0 {id} 1 1"));
    }
    let observed = everbus_testkit::chaos::observe::Observed::default();
    let unexplained = check(&ledger, &observed, Stage::Interrupted, 0);
    assert_fault(&unexplained, "duplicates");
    let explained = check(&ledger, &observed, Stage::Interrupted, 1);
    assert!(explained.is_clean(), "{explained:?}");
    assert_eq!(explained.duplicates, 1);
}
