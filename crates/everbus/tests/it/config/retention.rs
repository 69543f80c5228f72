//! The section `retention`.

use std::time::Duration;

use everbus::{Retention, StreamAge};

use super::{parse, problems};

const DAY: Duration = Duration::from_secs(24 * 3600);

fn stream(types: &str, max_age: Option<Duration>) -> StreamAge {
    StreamAge {
        types: types.parse().unwrap(),
        max_age,
    }
}

// conformance: memory/config-retention: the file says what is kept for how long, by stream or by a preset
#[test]
fn the_file_says_what_is_kept() {
    assert_eq!(parse("broker: {url: 'memory:'}").unwrap().retention, None);
    let said = |text: &str| parse(text).unwrap().retention.unwrap();
    assert_eq!(said("retention:\n"), Retention::standard());
    assert_eq!(said("retention: {preset: omni}"), Retention::omni());
    assert_eq!(said("retention: {preset: none}"), Retention::default());
    let all = said(
        "retention:
  max_age: 90d
  max_len: 1_000_000
  streams:
    'message.>': 30d
    audit.trail: never
    media.seen: 12h
  payloads: 7d
  dead_letters: never
  audit: 3650d
  outbox: 86400
",
    );
    let expected = Retention {
        max_age: Some(90 * DAY),
        max_len: Some(1_000_000),
        streams: vec![
            stream("message.>", Some(30 * DAY)),
            stream("audit.trail", None),
            stream("media.seen", Some(DAY / 2)),
        ],
        payloads: Some(7 * DAY),
        dead_letters: None,
        audit: Some(3650 * DAY),
        outbox: Some(DAY),
    };
    assert_eq!(all, expected);
    // What the file says itself comes before the preset.
    let both = said("retention: {preset: omni, streams: {message.typing: 1h}, payloads: never}");
    assert_eq!(both.age_of("message.typing"), Some(DAY / 24));
    assert_eq!(both.age_of("message.sent"), Some(30 * DAY));
    assert_eq!(both.payloads, None);
}

// conformance: memory/config-retention: what is wrong is refused where it stands
#[test]
fn what_is_no_age_is_refused() {
    for (text, what) in [
        ("retention: {max_age: 0d}", "more than nothing"),
        ("retention: {max_age: soon}", "not a duration"),
        ("retention: {max_age: 30 parsecs}", "unit"),
        ("retention: {max_age: 90000000d}", "out of range"),
        ("retention: {max_age: }", "no value"),
        ("retention: {max_age: [1]}", "a list"),
        ("retention: {maxage: 1d}", "did you mean \"max_age\"?"),
        (
            "retention: {deadletters: 1d}",
            "did you mean \"dead_letters\"?",
        ),
        ("retention: {preset: omnni}", "did you mean \"omni\"?"),
        ("retention: {max_len: 0}", "out of range"),
        ("retention: {streams: {'a.>.b': 1d}}", "streams"),
        ("retention: {streams: {a: always}}", "or never"),
        ("retention: [a]", "a list"),
    ] {
        let found = problems(text);
        assert_eq!(found.len(), 1, "{text}: {found:?}");
        assert!(found[0].contains(what), "{text}: {found:?}");
    }
}
