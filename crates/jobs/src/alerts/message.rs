//! The content of an alert, and its formats: for people (Slack) and for programs (JSON).

use everbus::Timestamp;
use serde_json::{Map, Value, json};

/// Longer values are cut, in characters.
const LONGEST: usize = 1000;

/// What an alert is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AlertKind {
    /// An event could not be delivered and is in the dead letters.
    DeadLetter,
    /// A circuit breaker opened.
    CircuitOpened,
    /// Tasks are not healthy.
    UnhealthyTasks,
    /// A task of a job failed.
    JobFailed,
}

impl AlertKind {
    /// The name of the kind in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::DeadLetter => "dead_letter",
            Self::CircuitOpened => "circuit_opened",
            Self::UnhealthyTasks => "unhealthy_tasks",
            Self::JobFailed => "job_failed",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Self::DeadLetter => "Event delivery failure",
            Self::CircuitOpened => "Circuit opened",
            Self::UnhealthyTasks => "Unhealthy tasks",
            Self::JobFailed => "Job failed",
        }
    }
}

/// An alert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alert {
    /// What it is about.
    pub kind: AlertKind,
    /// Of alerts with the same kind and subject, one is sent in each [`repeat_after`](super::Alerts::repeat_after).
    pub subject: String,
    /// Names and values, in the order in which they are shown.
    pub fields: Vec<(&'static str, String)>,
    /// When it happened.
    pub at: Timestamp,
}

impl Alert {
    /// An alert without fields.
    pub fn new(kind: AlertKind, subject: impl Into<String>, at: Timestamp) -> Self {
        Self {
            kind,
            subject: subject.into(),
            fields: Vec::new(),
            at,
        }
    }

    /// Adds a field. Its value is `unknown` if `value` is `None`.
    #[must_use]
    pub fn field<V: ToString>(mut self, name: &'static str, value: Option<V>) -> Self {
        let value = value.map(|value| shown(&value.to_string()));
        let value = value.unwrap_or_else(|| "unknown".to_owned());
        self.fields.push((name, value));
        self
    }

    /// The message for Slack and compatible services: `{"text": …}`. `held_back`: how many alerts the rate limit left
    /// out.
    pub fn slack(&self, held_back: u64) -> Value {
        let mut lines = vec![format!(":rotating_light: *{}*", self.kind.title())];
        for (name, value) in &self.fields {
            lines.push(format!("*{name}:* {}", escaped(value)));
        }
        lines.push(format!("*Time:* {}", self.at));
        if held_back > 0 {
            lines.push(format!("_{held_back} further alerts were held back_"));
        }
        json!({ "text": lines.join("\n") })
    }

    /// The message for programs.
    pub fn json(&self, held_back: u64) -> Value {
        let fields: Map<String, Value> = self
            .fields
            .iter()
            .map(|(name, value)| (key(name), Value::String(value.clone())))
            .collect();
        json!({
            "kind": self.kind.as_str(),
            "title": self.kind.title(),
            "subject": self.subject,
            "time": self.at,
            "fields": fields,
            "heldBack": held_back,
        })
    }
}

/// The JSON key of a field name: `Event type` becomes `eventType`.
fn key(name: &str) -> String {
    let mut words = name.split(' ');
    let mut key = words.next().unwrap_or_default().to_lowercase();
    for word in words {
        let mut letters = word.chars();
        key.extend(letters.next().into_iter().flat_map(char::to_uppercase));
        key.push_str(letters.as_str());
    }
    key
}

/// Escapes the three characters that Slack reads as markup.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

/// Removes control characters and credentials from a value, and cuts it to [`LONGEST`] characters.
fn shown(text: &str) -> String {
    let clean = text.chars().map(|c| match c {
        '\n' => ' ',
        c if c.is_control() => '\u{fffd}',
        c => c,
    });
    let clean = without_credentials(&clean.collect::<String>());
    match clean.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &clean[..end]),
        None => clean,
    }
}

/// Replaces the user and the password in URLs: errors often contain the URL of a database.
fn without_credentials(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + 3);
        shown.push_str(before);
        let end = after.find(|c: char| c.is_whitespace() || matches!(c, '/' | '"' | '\''));
        let authority = &after[..end.unwrap_or(after.len())];
        match authority.rfind('@') {
            Some(at) => {
                shown.push_str("***");
                rest = &after[at..];
            }
            None => rest = after,
        }
    }
    shown.push_str(rest);
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alert() -> Alert {
        Alert::new(AlertKind::DeadLetter, "a", Timestamp::EPOCH)
            .field("Event type", Some("Task Completed"))
            .field("Detail type", Some("log-event"))
            .field(
                "Error",
                Some("<b> & \u{1b}[31m\nredis://me:secret@host/0 refused"),
            )
            .field("Source", None::<String>)
    }

    #[test]
    fn slack_gets_a_text() {
        let text = alert().slack(2);
        let expected = ":rotating_light: *Event delivery failure*\n*Event type:* Task Completed\n\
                        *Detail type:* log-event\n\
                        *Error:* &lt;b&gt; &amp; \u{fffd}[31m redis://***@host/0 refused\n\
                        *Source:* unknown\n*Time:* 1970-01-01T00:00:00Z\n\
                        _2 further alerts were held back_";
        let text = text["text"].as_str().unwrap();
        assert_eq!(
            text.replace(".000000Z", "Z").replace(".000Z", "Z"),
            expected
        );
    }

    #[test]
    fn programs_get_fields() {
        let json = alert().json(0);
        assert_eq!(json["kind"], "dead_letter");
        assert_eq!(json["fields"]["eventType"], "Task Completed");
        assert_eq!(json["fields"]["source"], "unknown");
        assert_eq!(json["heldBack"], 0);
    }

    #[test]
    fn long_values_are_cut() {
        let alert = Alert::new(AlertKind::JobFailed, "a", Timestamp::EPOCH)
            .field("Error", Some("ä".repeat(5000)));
        assert_eq!(alert.fields[0].1.chars().count(), LONGEST + 1);
    }
}
