//! What the properties of an event say that others than its handler must know.

use everbus_core::{Code, Error, Event, Result, Timestamp};
use serde::{Deserialize, Serialize};

/// Where the large fields of an event went.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overflow {
    /// The bucket.
    pub bucket: String,
    /// The key of the object in it.
    pub key: String,
}

/// The properties that the system itself reads. They stay in the payload as they are; their times are in
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
    /// Until when the worker holds the task.
    pub effective_until: Option<Timestamp>,
    /// When the task last did something.
    pub last_activity: Option<Timestamp>,
    /// Where the large fields went, if they did.
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
                Error::new(Code::InvalidPayload, what).hint("milliseconds must be divided by 1000")
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

/// Whole seconds since 1970, as `effectiveUntil` and `lastActivity.timestamp` are written.
pub fn seconds(at: Timestamp) -> i64 {
    at.as_micros().div_euclid(1_000_000)
}

fn from_seconds(seconds: f64) -> Option<Timestamp> {
    // Milliseconds given by mistake lie beyond the year 9999.
    let micros = (seconds * 1e6).round();
    let possible = (0.0..253_402_207_200e6).contains(&micros);
    #[expect(clippy::cast_possible_truncation, reason = "the range was checked")]
    possible.then(|| Timestamp::from_micros(micros as i64))
}
