//! A short campaign against the relay of an outbox; `everbus-chaos relay` runs long ones.

use everbus_testkit::chaos::relay::RelayCampaign;

// conformance: memory/outbox-chaos: the crash harness kills the relay, at random and at named places: nothing is lost, doubled or out of order
#[test]
fn a_relay_that_is_killed_again_and_again_loses_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let seed = crate::seed();
    let campaign = RelayCampaign {
        program: crate::program().to_owned(),
        directory: directory.path().to_owned(),
        seed,
        kills: 30,
    };
    let found = campaign.run().unwrap();
    assert!(found.problems.is_empty(), "seed {seed}: {found:#?}");
    assert!(found.named > 0 && found.events > 0, "{found}");
}
