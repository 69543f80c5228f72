//! `everbus demo`.

use crate::support::Shop;

// conformance: bus/cli-demo: the demo publishes, fails, retries and dead-letters, and what it suggests works
#[test]
fn the_demo_shows_everything_and_what_it_suggests_works() {
    let shop = Shop::new();
    let text = shop.run(&["demo"]).ok();
    for part in [
        "order.placed",
        "attempt 1 of 4 failed",
        "attempt 2 of 4 failed",
        "at attempt 3",
        "to the dead letters",
        "packed a teapot",
        "What to type next",
    ] {
        assert!(text.contains(part), "{part:?} in {text}");
    }
    let suggested: Vec<Vec<&str>> = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("everbus "))
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert!(suggested.len() >= 5, "{text}");
    for command in suggested {
        let out = shop.run(&command).ok();
        assert!(
            !out.contains("no dead letters") && !out.contains("no events"),
            "{command:?}: {out}"
        );
    }
}

#[test]
fn a_second_demo_begins_anew_and_no_other_file_is_touched() {
    let shop = Shop::new();
    let first = shop.run(&["-o", "json", "demo"]).lines();
    let again = shop.run(&["-o", "json", "demo"]).lines();
    let summary = |lines: &[serde_json::Value]| lines.last().unwrap()["published"].clone();
    assert_eq!(summary(&first), summary(&again));
    let said = shop.run(&["demo"]).ok();
    assert!(
        said.starts_with("everbus-demo.db of an earlier demo is replaced"),
        "{said}"
    );

    let other = Shop::new();
    other
        .run(&["--db", "everbus-demo.db", "publish", "mine.own"])
        .ok();
    let refused = other.run(&["demo"]);
    assert_eq!(refused.code, 2, "{refused:?}");
    let lines = other
        .run(&[
            "-o",
            "json",
            "--db",
            "everbus-demo.db",
            "tail",
            "--no-follow",
        ])
        .lines();
    assert_eq!(
        lines.len(),
        1,
        "a file that is not from a demo is left alone"
    );
}
