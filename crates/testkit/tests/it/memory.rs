//! Short campaigns against relays, against processes that split large events and against retention
//! jobs, and the bugs that they must find.

use std::time::Duration;

use everbus_testkit::chaos::checker::{Report, Stage};
use everbus_testkit::chaos::outboxes::Which;
use everbus_testkit::chaos::retain::{Bug, Policy};
use everbus_testkit::chaos::rounds::Arena;
use everbus_testkit::chaos::tally::Tally;
use tempfile::TempDir;

/// No process takes longer than this for what it is asked.
const PATIENCE: Duration = Duration::from_secs(300);

fn arena() -> (TempDir, Arena) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("memory.db");
    let arena = Arena::new(crate::program(), file, crate::seed());
    (directory, arena)
}

/// Plays rounds with a check after each, and drains the file. Nothing may be wrong. On a slow machine
/// there are more of them, until they have shown something.
fn survive(
    arena: &mut Arena,
    rounds: usize,
    mut round: impl FnMut(&mut Arena),
    shown: impl Fn(&Tally) -> bool,
) {
    for number in 0..20 * rounds {
        if number >= rounds && shown(&arena.tally) {
            break;
        }
        round(arena);
        let errors = arena.ledger().lock().take_errors();
        assert!(errors.is_empty(), "{errors:#?}");
        arena.check(Stage::Interrupted).unwrap();
        assert!(arena.tally.is_clean(), "{:#?}", arena.tally.problems);
    }
    assert!(shown(&arena.tally), "{}", arena.tally);
    arena.drain().unwrap();
    assert!(arena.tally.is_clean(), "{:#?}", arena.tally.problems);
}

/// Plays rounds with a bug in place until it is found.
fn find(arena: &mut Arena, what: &str, mut round: impl FnMut(&mut Arena, usize)) {
    let mut report = Report::default();
    for number in 0..100 {
        round(arena, number);
        report = arena.report(Stage::Interrupted).unwrap();
        if report.lost.iter().any(|lost| lost.contains(what)) {
            return;
        }
    }
    panic!("100 rounds with a planted bug, and it was not found: {report:?}");
}

// conformance: memory/chaos-relay: a relay that is killed or stopped past its lease loses, doubles and reorders nothing, from both kinds of outbox
#[test]
fn relays_that_are_killed_lose_nothing() {
    let (_directory, mut arena) = arena();
    let killed = |tally: &Tally| tally.relay_kills > 0;
    survive(&mut arena, 14, |arena| arena.relay().unwrap(), killed);
    let committed = arena.ledger().lock().outbox().len() as u64;
    assert_eq!(arena.tally.relayed, committed, "all of it has arrived");
}

// conformance: memory/chaos-overflow: no event refers to an object that is missing or differs, wherever between object and commit the process dies
// conformance: fault-11: killed between object and commit, a process leaves at most an object without an event, which the collector removes
#[test]
fn processes_that_are_killed_between_object_and_event_leave_no_reference_without_object() {
    let (_directory, mut arena) = arena();
    let split = |tally: &Tally| tally.overflow_kills > 0 && tally.objects > 0;
    survive(&mut arena, 14, |arena| arena.overflow().unwrap(), split);
}

// conformance: memory/chaos-retention: a retention job that is killed removes nothing that a group owes work on, and leaves no reference without its object
#[test]
fn retention_jobs_that_are_killed_remove_nothing_that_is_owed() {
    for policy in [Policy::Age, Policy::Length] {
        let (_directory, new) = arena();
        let mut arena = new.retaining(policy);
        let removed = |tally: &Tally| tally.retention_kills > 0 && tally.removed > 0;
        survive(&mut arena, 7, |arena| arena.retain().unwrap(), removed);
    }
}

// conformance: memory/chaos-controls: a relay that marks rows before it publishes them is found out
#[test]
fn a_relay_that_marks_too_early_is_found_out() {
    let (_directory, mut arena) = arena();
    arena.declare().unwrap();
    find(&mut arena, "is marked as sent", |arena, number| {
        arena.fill(Which::Beside).unwrap();
        let mut orders = arena.relay_orders(Which::Beside);
        orders.mark_first = true;
        // It ends by itself, there or when nothing is left.
        orders.keep_on = false;
        let failpoint = format!("before-commit:{}", 1 + number % 5);
        let mut relay = arena.launch_relay(&orders, Some(&failpoint)).unwrap();
        assert!(relay.ends_within(PATIENCE));
        arena.end(relay).unwrap();
    });
}

// conformance: memory/chaos-controls: an object that is written after its event is found out
#[test]
fn an_object_that_comes_too_late_is_found_out() {
    let (_directory, mut arena) = arena();
    find(&mut arena, "refers to the object", |arena, number| {
        let mut orders = arena.orders();
        orders.publishes = 10_000;
        orders.overflow = true;
        orders.late_objects = true;
        // When some event is committed and its object is not where it belongs.
        let failpoint = format!("after-commit:{}", 5 + number);
        let mut victim = arena.spawn(&orders, Some(&failpoint)).unwrap();
        assert!(victim.ends_within(PATIENCE));
        arena.end(victim).unwrap();
    });
}

/// A retention job with a bug, beside a process that splits and handles events.
fn with_bug(arena: &mut Arena, bug: Bug) {
    arena.declare().unwrap();
    let mut orders = arena.orders();
    orders.publishes = 10_000;
    orders.overflow = true;
    // It cannot do its work properly.
    orders.quiet = true;
    let worker = arena.spawn(&orders, None).unwrap();
    let mut orders = arena.retain_orders(Policy::Length);
    orders.bug = Some(bug);
    let job = arena.launch_retain(&orders, None).unwrap();
    arena.work(&job).unwrap();
    arena.work(&worker).unwrap();
    arena.end(worker).unwrap();
    arena.end(job).unwrap();
}

// conformance: memory/chaos-controls: a collector that deletes objects whose events are there is found out
#[test]
fn a_collector_that_deletes_what_is_needed_is_found_out() {
    let (_directory, new) = arena();
    let mut arena = new.retaining(Policy::Length);
    find(&mut arena, "refers to the object", |arena, _| {
        with_bug(arena, Bug::DeletesObjects);
    });
}

// conformance: memory/chaos-controls: retention that takes what is in flight is found out
#[test]
fn retention_that_ignores_claims_is_found_out() {
    let (_directory, new) = arena();
    let mut arena = new.retaining(Policy::Length);
    find(&mut arena, "never came to an end", |arena, _| {
        with_bug(arena, Bug::IgnoresClaims);
    });
}
