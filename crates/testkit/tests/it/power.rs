//! A few power losses, where the machine allows them.

use std::io::Write as _;

use everbus_testkit::chaos::disk::Disk;
use everbus_testkit::chaos::power::{Losses, Power, Unsynced};

// conformance: bus/power-loss: what was acknowledged before the power went is there when it is back, and with NORMAL it is not (the control)
// conformance: fault-1: a commit that is not synced is not taken for durable
// needs: a file system that it may mount
#[test]
fn power_loss_takes_nothing_acknowledged_unless_syncs_are_off() {
    if let Some(what) = Disk::missing() {
        // Not captured by the test runner.
        let _ = writeln!(std::io::stderr(), "SKIPPED power loss: {what} is missing");
        return;
    }
    let power = Power {
        program: crate::program().to_owned(),
        seed: crate::seed(),
    };
    let tally = power.run(Losses::Count(3)).unwrap();
    assert!(tally.is_clean(), "{power:?}: {:#?}", tally.problems);
    assert_eq!(tally.outages, 3);
    let control = power.control(Unsynced::Commits).unwrap();
    assert!(
        control.lost > 0,
        "without syncs nothing was lost, so this proves nothing: {control}"
    );
}

// conformance: memory/overflow-power-loss: after a power loss every event that is there has its object, byte for byte; if objects are not synced it has not (the control)
// conformance: fault-11/object-synced: an object that is not synced is not taken for durable
// needs: a file system that it may mount
#[test]
fn power_loss_takes_no_object_of_an_event_unless_objects_are_not_synced() {
    if let Some(what) = Disk::missing() {
        // Not captured by the test runner.
        let _ = writeln!(std::io::stderr(), "SKIPPED power loss: {what} is missing");
        return;
    }
    let mut power = Power {
        program: crate::program().to_owned(),
        seed: crate::seed(),
    };
    // Until there were enough objects to lose: now and then the power goes before there are any.
    let mut objects = 0;
    for _ in 0..20 {
        let tally = power.run(Losses::Count(4)).unwrap();
        assert!(tally.is_clean(), "{power:?}: {:#?}", tally.problems);
        objects += tally.objects;
        if objects >= 20 {
            break;
        }
        power.seed = power.seed.wrapping_add(1);
    }
    assert!(objects >= 20, "{power:?}: only {objects} objects");
    let control = power.control(Unsynced::Objects).unwrap();
    assert!(
        control.lost > 0,
        "without syncs no object was lost, so this proves nothing: {control}"
    );
}
