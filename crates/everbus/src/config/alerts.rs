//! The section `alerts`: where alerts and the ends of jobs are sent.

use std::time::Duration;

use super::delivery::Secret;
use super::section::{Reader, Section};

pub(super) const KEYS: &[&str] = &[
    "slack",
    "webhook",
    "job_webhook",
    "allow_http",
    "allow_private",
    "repeat_after",
    "per_minute",
];

/// Where alerts and the ends of jobs are sent. The addresses are secrets: a program that knows the path of such a
/// webhook may post to it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Alerts {
    /// A webhook of Slack or a compatible service, which gets alerts as text.
    pub slack: Option<Secret>,
    /// A webhook that gets alerts as JSON.
    pub webhook: Option<Secret>,
    /// A webhook that gets a message, as JSON, when a job completes or one of its tasks fails.
    pub job_webhook: Option<Secret>,
    /// Whether the webhooks may use plain `http`.
    pub allow_http: bool,
    /// Whether the addresses of webhooks may be on this machine or in private networks.
    pub allow_private: bool,
    /// The time after which an alert about the same subject is sent again.
    pub repeat_after: Option<Duration>,
    /// How many alerts a process sends in a minute.
    pub per_minute: Option<u32>,
}

pub(super) fn read(reader: &mut Reader<'_>, section: &Section<'_>) -> Alerts {
    let mut url = |key: &str| {
        let text = reader.text(section.get(key), "an address, such as ${SLACK_WEBHOOK}");
        text.map(|text| Secret::new(text.value))
    };
    let (slack, webhook, job_webhook) = (url("slack"), url("webhook"), url("job_webhook"));
    let per_minute = reader.whole(section.get("per_minute"), 1..=1_000_000, "alerts");
    Alerts {
        slack,
        webhook,
        job_webhook,
        allow_http: reader.boolean(section.get("allow_http")).unwrap_or(false),
        allow_private: reader
            .boolean(section.get("allow_private"))
            .unwrap_or(false),
        repeat_after: reader.duration(section.get("repeat_after")),
        per_minute: per_minute.and_then(|n| u32::try_from(n).ok()),
    }
}
