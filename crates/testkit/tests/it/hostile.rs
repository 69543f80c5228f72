//! Hostile surroundings, one round of each kind; `everbus-chaos hostile` runs more.

use everbus_testkit::chaos::hostile::Hostile;

// conformance: contract/hostile: new files that many open, flipped bits, files that go, bad rows, clocks that leap and few file descriptors are part of the campaign
#[test]
fn hostile_surroundings_lose_nothing_and_are_told() {
    let directory = tempfile::tempdir().unwrap();
    let seed = crate::seed();
    let hostile = Hostile {
        program: crate::program().to_owned(),
        directory: directory.path().to_owned(),
        seed,
        rounds: 1,
    };
    let found = hostile.run().unwrap();
    assert!(
        found.problems.is_empty(),
        "seed {seed}: {:#?}",
        found.problems
    );
    assert_eq!(
        (found.rounds, found.flips_found + found.flips_harmless),
        (6, 1)
    );
}
