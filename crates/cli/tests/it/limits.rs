//! What is said when the process may hardly open a file.

use std::process::Command;

use crate::support::{Ran, Shop};

/// Runs the binary with so many file descriptors.
fn run_with(shop: &Shop, descriptors: u32, arguments: &[&str]) -> Ran {
    let program = shop.command(arguments);
    let mut limited = Command::new("sh");
    limited
        .args(["-c", &format!("ulimit -n {descriptors}; exec \"$@\""), "sh"])
        .arg(program.get_program())
        .args(program.get_args());
    if let Some(directory) = program.get_current_dir() {
        limited.current_dir(directory);
    }
    Ran::from(limited.output().unwrap())
}

// conformance: contract/out-of-resources: with too few file descriptors a command says so and exits with 4; it never panics and never blames the file
#[test]
fn too_few_descriptors_are_told_as_such() {
    let shop = Shop::new();
    shop.run(&["publish", "a.b", "1"]).ok();
    let mut refused = 0;
    for descriptors in 5..=24 {
        for arguments in [&["publish", "a.b", "1"][..], &["events"]] {
            let ran = run_with(&shop, descriptors, arguments);
            if ran.code == 0 {
                continue;
            }
            refused += 1;
            let what = format!("{arguments:?} with {descriptors}: {ran:?}");
            assert_eq!(ran.code, 4, "{what}");
            assert!(ran.err.contains("error[OutOfResources]"), "{what}");
            assert!(ran.err.contains("ulimit"), "{what}");
            assert!(!ran.err.contains("panicked"), "{what}");
        }
    }
    assert!(refused > 10, "{refused}");
    assert!(shop.run(&["check"]).ok().contains("as it should be"));
}
