//! The properties of an event that the system itself reads.

use everbus_core::{Code, Error, Event, Overflow as Reference, Result, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// Where the large fields of an event are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overflow {
    /// The bucket.
    pub bucket: String,
    /// The key of the object in it.
    pub key: String,
}

/// The properties that the system itself reads. They stay in the payload unchanged; their times are in
/// seconds, unlike the `timestamp` of the event.
///
/// ```
/// use everbus_core::Event;
/// use everbus_dialects::workflow::Properties;
///
/// let event = Event::builder("Task Heartbeat")
///     .payload(r#"{"requestId":"req-123","effectiveUntil":1707300645}"#)
///     .build()?;
/// let until = Properties::of(&event)?.effective_until;
/// assert_eq!(until, Some("2024-02-07T10:10:45Z".parse()?));
/// # Ok::<(), everbus_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Properties {
    /// Until when the task is locked for its worker.
    pub effective_until: Option<Timestamp>,
    /// The last activity of the task.
    pub last_activity: Option<Timestamp>,
    /// Where the large fields are, if they were moved.
    pub overflow: Option<Overflow>,
}

#[derive(Deserialize)]
struct Written {
    #[serde(rename = "effectiveUntil")]
    effective_until: Option<f64>,
    #[serde(rename = "lastActivity")]
    last_activity: Option<Activity>,
    #[serde(rename = "_s3Overflow")]
    overflow: Option<Overflow>,
}

#[derive(Deserialize)]
struct Activity {
    timestamp: Option<f64>,
}

impl Properties {
    /// Reads them from the payload of an event.
    pub fn of(event: &Event) -> Result<Self> {
        let written: Written = event.json()?;
        let at = |name: &str, seconds: Option<f64>| match seconds {
            None => Ok(None),
            Some(seconds) => from_seconds(seconds).map(Some).ok_or_else(|| {
                let id = event.display_id();
                let what = format!("{name} of {id:?} is not a time in seconds: {seconds}");
                Error::new(Code::InvalidPayloadError, what)
                    .hint("milliseconds must be divided by 1000")
            }),
        };
        let activity = written
            .last_activity
            .and_then(|activity| activity.timestamp);
        Ok(Self {
            effective_until: at("effectiveUntil", written.effective_until)?,
            last_activity: at("lastActivity.timestamp", activity)?,
            overflow: written.overflow,
        })
    }
}

/// The field with the place of the large fields.
pub(super) const REFERENCE: &str = "_s3Overflow";

/// The properties of an event whose large fields are in an object: without those fields, and with
/// `_s3Overflow`. `None` if the payload is not a JSON object.
pub(crate) fn with_reference(event: &Event, reference: &Reference) -> Option<String> {
    let place = Overflow {
        bucket: reference.bucket.clone(),
        key: reference.key.clone(),
    };
    let place = serde_json::to_string(&place).ok()?;
    let mut members: Vec<(String, &str)> = Vec::new();
    // If the whole payload moved, nothing of it is left.
    if !reference.parts.is_empty() {
        let all: Members<'_> = serde_json::from_slice(event.payload()).ok()?;
        members.extend(all.0.into_iter().map(|(name, value)| (name, value.get())));
        members.retain(|(name, value)| {
            let moved = reference.parts.iter().any(|part| part.field == *name);
            !(moved && *value == "null") && name != REFERENCE
        });
    }
    members.push((REFERENCE.to_owned(), &place));
    let members = members.iter().map(|(name, value)| {
        let name = serde_json::Value::from(name.as_str());
        format!("{name}:{value}")
    });
    Some(format!("{{{}}}", members.collect::<Vec<_>>().join(",")))
}

/// The members of a JSON object in order, repeated ones too.
pub(super) struct Members<'a>(pub(super) Vec<(String, &'a RawValue)>);

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;
        impl<'de> serde::de::Visitor<'de> for Collect {
            type Value = Members<'de>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(
                self,
                mut map: A,
            ) -> Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}

/// Whole seconds since 1970, the unit of `effectiveUntil` and `lastActivity.timestamp`.
pub fn seconds(at: Timestamp) -> i64 {
    at.as_micros().div_euclid(1_000_000)
}

fn from_seconds(seconds: f64) -> Option<Timestamp> {
    // A value in milliseconds by mistake would be after the year 9999.
    let micros = (seconds * 1e6).round();
    let possible = (0.0..253_402_207_200e6).contains(&micros);
    #[expect(clippy::cast_possible_truncation, reason = "the range was checked")]
    possible.then(|| Timestamp::from_micros(micros as i64))
}
