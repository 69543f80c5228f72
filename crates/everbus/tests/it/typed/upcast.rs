//! Versions: the current one is read as it is, older ones through their steps, others not at all.

// A step takes the old value; what it does with it is its own business.
#![allow(clippy::needless_pass_by_value)]

use everbus::{Code, Event, IntoEvent, TypedEvent, Upcasts};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

const TYPE: &str = "users.user.created";

#[derive(Serialize, Deserialize, Event)]
#[event(type = "users.user.created")]
struct V1 {
    name: String,
}

#[derive(Debug, PartialEq, Serialize, Deserialize, Event)]
#[event(type = "users.user.created", version = 2)]
struct V2 {
    first: String,
    last: String,
    /// Not written down: it is lost wherever the value becomes JSON.
    #[serde(skip)]
    steps: u8,
}

#[derive(Debug, PartialEq, Serialize, Deserialize, Event)]
#[event(type = "users.user.created", version = 3)]
struct V3 {
    full: String,
    #[serde(skip)]
    steps: u8,
}

fn split(old: V1) -> V2 {
    let (first, last) = old.name.split_once(' ').unwrap_or((&old.name, ""));
    V2 {
        first: first.to_owned(),
        last: last.to_owned(),
        steps: 1,
    }
}

fn join(old: V2) -> V3 {
    V3 {
        full: format!("{}, {}", old.last, old.first),
        steps: old.steps + 1,
    }
}

fn upcasts(add: impl FnOnce(&mut Upcasts)) -> Upcasts {
    let mut upcasts = Upcasts::new();
    add(&mut upcasts);
    upcasts
}

fn event(version: u32, payload: &Value) -> Event {
    let event = Event::builder(TYPE).version(version).json(payload);
    event.build().unwrap()
}

fn ada() -> Event {
    let name = "Ada Lovelace".to_owned();
    V1 { name }.into_event().unwrap()
}

// conformance: framework/versioning-current: a consumer handles the current version.
#[test]
fn the_current_version_is_read_without_any_step() {
    let never = upcasts(|u| {
        u.add(|_: V1| -> V2 { panic!("called") });
        u.add(|_: V2| -> V3 { panic!("called") });
    });
    let payload = json!({ "first": "Ada", "last": "Lovelace" });
    let read: V2 = never.read(&event(2, &payload)).unwrap();
    assert_eq!(read.first, "Ada");
    let read: V1 = Upcasts::new().read(&ada()).unwrap();
    assert_eq!(read.name, "Ada Lovelace");
}

// conformance: framework/versioning-previous: a consumer handles the version before, through an upcast.
#[test]
fn the_version_before_is_brought_up() {
    let known = upcasts(|u| {
        u.add(split);
    });
    let read: V2 = known.read(&ada()).unwrap();
    assert_eq!((&*read.first, &*read.last), ("Ada", "Lovelace"));
}

// conformance: handlers/upcast-chain: steps are followed one after another.
#[test]
fn an_older_version_passes_through_every_step_between() {
    let known = upcasts(|u| {
        u.add(join).add(split);
    });
    known.check().unwrap();
    let read: V3 = known.read(&ada()).unwrap();
    // The count would be 1 if the value had been written down between the steps.
    let full = "Lovelace, Ada".to_owned();
    assert_eq!(read, V3 { full, steps: 2 });
    assert_eq!(known.versions_read_as(TYPE, 3), [1, 2, 3]);
    assert_eq!(known.versions_read_as(TYPE, 1), [1]);
    assert_eq!(known.versions_read_as("other", 7), [7]);
}

// conformance: handlers/upcast-json: a step over plain JSON stands in one chain with typed ones.
#[test]
fn typed_steps_and_json_steps_mix() {
    let json_first = upcasts(|u| {
        u.add_json(TYPE, 1, 2, |old| {
            let name = old["name"].as_str().ok_or("no name")?;
            Ok::<_, &str>(json!({ "first": name, "last": "L" }))
        });
        u.add(join);
    });
    json_first.check().unwrap();
    let read: V3 = json_first.read(&ada()).unwrap();
    assert_eq!(read.full, "L, Ada Lovelace");
    let refusal = json_first.read::<V3>(&event(1, &json!({}))).unwrap_err();
    assert!(refusal.to_string().contains("no name"), "{refusal}");

    let typed_first = upcasts(|u| {
        u.add(split);
        u.add_json(TYPE, 2, 3, |old| {
            Ok::<_, String>(json!({ "full": old["last"] }))
        });
    });
    let read: V3 = typed_first.read(&ada()).unwrap();
    assert_eq!(read.full, "Lovelace");

    let only_json = upcasts(|u| {
        u.add_json(TYPE, 1, 3, |old| {
            Ok::<_, String>(json!({ "full": old["name"] }))
        });
    });
    let read: V3 = only_json.read(&ada()).unwrap();
    assert_eq!(read.full, "Ada Lovelace");
}

// conformance: handlers/upcast-chain: steps are followed one after another.
#[test]
fn another_rust_type_of_the_same_version_reads_what_a_step_made() {
    #[derive(Serialize, Deserialize, Event)]
    #[event(type = "users.user.created", version = 2)]
    struct LastName {
        last: String,
    }
    let known = upcasts(|u| {
        u.add(split);
    });
    let read: LastName = known.read(&ada()).unwrap();
    assert_eq!(read.last, "Lovelace");
}

// conformance: handlers/upcast-unknown: a version that nothing reads is refused with a clear reason, never mis-parsed.
// conformance: framework/versioning-breaking: a version that nothing reads is refused with a clear reason, never mis-parsed.
#[test]
fn an_unknown_version_is_refused_even_if_the_payload_would_fit() {
    let known = upcasts(|u| {
        u.add(split);
    });
    let fits = json!({ "first": "a", "last": "b", "full": "c", "name": "d" });
    for version in [3, 4, u32::MAX] {
        let error = known.read::<V2>(&event(version, &fits)).unwrap_err();
        assert_eq!(error.code(), Code::UnknownVersion);
        let text = error.to_string();
        assert!(text.contains(TYPE), "{text}");
        assert!(text.contains(&format!("version {version}")), "{text}");
        assert!(text.contains("known: 1, 2"), "{text}");
        assert!(error.hint_text().is_some());
    }
    // No step from 2, and none that stops at 2.
    let refused = |known: &Upcasts, version| {
        let error = known.read::<V3>(&event(version, &fits)).unwrap_err();
        assert_eq!(error.code(), Code::UnknownVersion, "{error}");
        assert!(error.to_string().ends_with("known: 3"), "{error}");
    };
    refused(&known, 1);
    refused(&known, 2);
    let past = upcasts(|u| {
        u.add_json(TYPE, 1, 4, Ok::<_, String>);
    });
    refused(&past, 1);
}

// conformance: handlers/upcast-unknown: a version that nothing reads is refused with a clear reason, never mis-parsed.
#[test]
fn another_event_type_is_not_a_question_of_versions() {
    let other = Event::builder("users.user.deleted").json(&json!({ "name": "x" }));
    let known = upcasts(|u| {
        u.add(split);
    });
    let error = known.read::<V2>(&other.build().unwrap()).unwrap_err();
    assert_eq!(error.code(), Code::InvalidPayloadError);
    assert!(error.to_string().contains("users.user.deleted"), "{error}");
}

// conformance: handlers/upcast-refuse: an old payload that does not parse, or that its step refuses, is an invalid payload.
#[test]
fn an_old_payload_that_cannot_be_brought_up_is_refused_with_the_step() {
    let known = upcasts(|u| {
        u.try_add(|old: V1| match old.name.split_once(' ') {
            Some(_) => Ok(split(old)),
            None => Err("one word only"),
        });
        u.add(join);
    });
    known.check().unwrap();
    assert_eq!(known.read::<V3>(&ada()).unwrap().full, "Lovelace, Ada");
    for (payload, why) in [
        (json!({ "name": "Ada" }), "one word only"),
        (json!({ "name": 7 }), "expected a string"),
    ] {
        let error = known.read::<V3>(&event(1, &payload)).unwrap_err();
        assert_eq!(error.code(), Code::InvalidPayloadError);
        let text = error.to_string();
        assert!(text.contains("from version 1 to 2 failed"), "{text}");
        assert!(text.contains(why), "{text}");
    }
}

fn conflict(add: impl FnOnce(&mut Upcasts)) -> String {
    let upcasts = upcasts(add);
    let error = upcasts.check().unwrap_err();
    assert_eq!(error.code(), Code::UpcastConflict);
    assert!(error.hint_text().is_some());
    // What contradicts itself must not run for ever either.
    let _ = upcasts.read::<V3>(&ada());
    error.to_string()
}

fn same(old: Value) -> Result<Value, String> {
    Ok(old)
}

// conformance: handlers/upcast-conflict: steps that contradict each other are an error at start.
#[test]
fn two_steps_from_one_version_conflict() {
    let text = conflict(|u| {
        u.add(split).add_json(TYPE, 1, 3, same);
    });
    assert!(
        text.contains(r#""users.user.created" begin at version 1"#),
        "{text}"
    );
    let text = conflict(|u| {
        u.add(split);
        let again = u.clone();
        u.merge(&again);
    });
    assert!(text.contains("begin at version 1"), "{text}");
}

// conformance: handlers/upcast-cycle: an upcast cycle is an error at start.
#[test]
fn a_circle_of_steps_is_shown() {
    let text = conflict(|u| {
        u.add_json(TYPE, 7, 8, same)
            .add_json(TYPE, 1, 2, same)
            .add_json(TYPE, 2, 3, same)
            .add_json(TYPE, 3, 1, same);
    });
    assert!(text.contains("in a circle: 1 → 2 → 3 → 1"), "{text}");
    let text = conflict(|u| {
        u.add_json(TYPE, 1, 1, same);
    });
    assert!(text.contains("in a circle: 1 → 1"), "{text}");
    // The circle does not pass through where it is entered.
    let text = conflict(|u| {
        u.add_json(TYPE, 1, 2, same)
            .add_json(TYPE, 2, 3, same)
            .add_json(TYPE, 3, 2, same);
    });
    assert!(text.contains("in a circle: 2 → 3 → 2"), "{text}");
}

// conformance: handlers/upcast-conflict: steps that contradict each other are an error at start.
#[test]
fn a_step_must_rise_and_stay_within_its_type() {
    let text = conflict(|u| {
        u.add(|old: V2| V1 { name: old.first });
    });
    assert!(
        text.contains("from version 2 leads down to version 1"),
        "{text}"
    );

    #[derive(Serialize, Deserialize, Event)]
    #[event(type = "users.user.renamed", version = 2)]
    struct Renamed {
        name: String,
    }
    let text = conflict(|u| {
        u.add(|old: V1| Renamed { name: old.name });
    });
    assert!(text.contains(V1::TYPE), "{text}");
    assert!(text.contains(Renamed::TYPE), "{text}");
}

// conformance: handlers/upcast-conflict: steps that contradict each other are an error at start.
#[test]
fn steps_of_several_types_do_not_mix() {
    let both = upcasts(|u| {
        u.add(split).add_json("other", 1, 2, same);
        u.merge(&upcasts(|u| {
            u.add(join);
        }));
    });
    both.check().unwrap();
    assert!(!both.is_empty());
    assert_eq!(both.versions_read_as(TYPE, 3), [1, 2, 3]);
    assert_eq!(both.versions_read_as("other", 2), [1, 2]);
    assert!(Upcasts::new().is_empty());
}
