//! Short campaigns; `everbus-chaos` runs long ones.

use std::time::Duration;

use everbus_testkit::chaos::FAILPOINTS;
use everbus_testkit::chaos::campaign::{Campaign, Until};
use everbus_testkit::chaos::checker::Stage;
use everbus_testkit::chaos::process::End;
use everbus_testkit::chaos::rounds::Arena;
use everbus_testkit::chaos::tally::Tally;

// conformance: embedded/never-lost: every event is handled or in the dead letters with its full context
// conformance: bus/kill-campaign: processes killed at random, at named places and stopped past their leases lose nothing
// conformance: embedded/recovery: what was in flight in a process that died is handled by the next
// conformance: memory/chaos-mixed: relays and processes that split large events are killed among the others
// conformance: framework/guarantee-at-least-once: what was in flight in a process that died is handled by the next
#[test]
fn a_process_that_is_killed_again_and_again_loses_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let mut tally = Tally::default();
    // On a slow machine little happens in so short a time: then there is another one.
    for _ in 0..20 {
        let seed = crate::seed();
        let campaign = Campaign {
            program: crate::program().to_owned(),
            directory: directory.path().to_owned(),
            seed,
            until: Until::Time(Duration::from_secs(10)),
        };
        let one = campaign.run().unwrap();
        assert!(one.is_clean(), "seed {seed}: {:#?}", one.problems);
        tally.add(one);
        let kills = tally.kills > 0 && tally.failpoint_kills > 0;
        let of_memory = tally.relay_kills + tally.overflow_kills > 0;
        if kills && of_memory && tally.events > 0 && tally.checks > 0 {
            return;
        }
    }
    panic!("20 campaigns, and not every kind of kill was among them: {tally}");
}

// conformance: bus/kill-campaign: the control: a consumer that acks before it handles is found out
// conformance: rule-1: an ack that comes before the event is handled loses it, and is found
#[test]
fn a_consumer_that_acks_too_early_is_found_out() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("planted.db");
    let mut arena = Arena::new(crate::program(), file, crate::seed());
    for _ in 0..100 {
        let mut orders = arena.orders();
        orders.publishes = 10_000;
        orders.ack_first = true;
        let victim = arena.spawn(&orders, None).unwrap();
        arena.work(&victim).unwrap();
        arena.end(victim).unwrap();
        let report = arena.report(Stage::Interrupted).unwrap();
        if !report.lost.is_empty() {
            return;
        }
    }
    panic!("100 kills of a consumer that loses events, and none was found lost");
}

// conformance: fault-2: what is acknowledged is committed, wherever around the commit the process dies
// conformance: fault-3: a dead letter and its ack are one step, also when the process dies between
// conformance: rule-6: a dead letter and its ack are one step, also when the process dies between
#[test]
fn a_process_that_dies_around_its_commits_loses_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("failpoints.db");
    let mut arena = Arena::new(crate::program(), file, crate::seed());
    for name in FAILPOINTS {
        for hit in [1, 4, 30] {
            let mut orders = arena.orders();
            orders.publishes = 10_000;
            let failpoint = format!("{name}:{hit}");
            let mut victim = arena.spawn(&orders, Some(&failpoint)).unwrap();
            assert!(
                victim.ends_within(Duration::from_secs(300)),
                "{failpoint} is never reached"
            );
            assert_eq!(victim.kill().unwrap(), End::Failpoint, "{failpoint}");
            arena.tally.failpoint_kills += 1;
            arena.check(Stage::Interrupted).unwrap();
            assert!(
                arena.tally.is_clean(),
                "{failpoint}: {:#?}",
                arena.tally.problems
            );
        }
    }
    arena.drain().unwrap();
    assert!(arena.tally.is_clean(), "{:#?}", arena.tally.problems);
    assert!(arena.tally.events > 0, "{}", arena.tally);
}
