//! The reports of a running child: lines on standard output that begin with `{"everbus":`.
//!
//! ```text
//! {"everbus":"activity","type":"step_running","stepName":"color-tags"}
//! {"everbus":"usage","inputTokens":12000,"outputTokens":3500,"cacheReadTokens":8000}
//! {"everbus":"error","category":"auth","message":"Invalid API key"}
//! {"everbus":"output","value":{"colors":7}}
//! ```

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::events::{Json, Usage};

/// A report of a child.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Report {
    /// The current activity. The last one is in the next heartbeat.
    Activity(ReportedActivity),
    /// The tokens used so far. The last report is in `Task Completed`.
    Usage(Usage),
    /// The reason of a failure. The last report counts, if the exit code is not 0.
    Error(ReportedError),
    /// The output of the task. It replaces the last line as the output.
    Output {
        /// The output.
        value: Json,
    },
}

/// The activity that a child reported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReportedActivity {
    /// `step_running`, `sdk_query`, `waiting`, or another word.
    #[serde(rename = "type", default = "step_running")]
    pub kind: String,
    /// The name of the step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_name: Option<String>,
}

fn step_running() -> String {
    "step_running".to_owned()
}

/// The error that a child reported.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct ReportedError {
    /// The name of an [`ErrorCategory`](crate::events::ErrorCategory). Without it, the message is classified like
    /// standard error.
    #[serde(default)]
    pub category: Option<String>,
    /// The message.
    pub message: String,
}

impl Report {
    /// Reads a line. `None` if it is not a report.
    pub fn parse(line: &[u8]) -> Option<Self> {
        let line = line.trim_ascii();
        let inside = line.strip_prefix(b"{")?.trim_ascii_start();
        if !inside.starts_with(b"\"everbus\"") {
            return None;
        }
        #[derive(Deserialize)]
        struct Tag {
            everbus: String,
        }
        #[derive(Deserialize)]
        struct Output {
            value: Json,
        }
        let Tag { everbus } = read(line)?;
        // A tagged serde enum would not keep the text of the output unchanged.
        match everbus.as_str() {
            "activity" => read(line).map(Self::Activity),
            "usage" => read(line).map(Self::Usage),
            "error" => read(line).map(Self::Error),
            "output" => read(line).map(|Output { value }| Self::Output { value }),
            _ => None,
        }
    }
}

fn read<T: DeserializeOwned>(line: &[u8]) -> Option<T> {
    serde_json::from_slice(line).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reports_of_the_documentation_are_read() {
        let activity = |kind: &str, step: Option<&str>| {
            Report::Activity(ReportedActivity {
                kind: kind.to_owned(),
                step_name: step.map(str::to_owned),
            })
        };
        let cases = [
            (
                r#"{"everbus":"activity","type":"step_running","stepName":"color-tags"}"#,
                activity("step_running", Some("color-tags")),
            ),
            (
                r#" { "everbus": "activity", "type": "waiting" }"#,
                activity("waiting", None),
            ),
            (
                r#"{"everbus":"usage","inputTokens":12000,"outputTokens":3500}"#,
                Report::Usage(Usage {
                    input_tokens: 12_000,
                    output_tokens: 3500,
                    cache_read_tokens: 0,
                }),
            ),
            (
                r#"{"everbus":"error","category":"auth","message":"Invalid API key"}"#,
                Report::Error(ReportedError {
                    category: Some("auth".into()),
                    message: "Invalid API key".into(),
                }),
            ),
            (
                r#"{"everbus":"output","value":[1,2]}"#,
                Report::Output {
                    value: Json::parse("[1,2]").unwrap(),
                },
            ),
        ];
        for (line, report) in cases {
            assert_eq!(Report::parse(line.as_bytes()), Some(report), "{line}");
        }
    }

    #[test]
    fn other_lines_are_no_reports() {
        for line in [
            "",
            "done",
            r#"{"colors": 7}"#,
            r#"{"everbus": "unheard of"}"#,
            r#"{"everbus": "activity""#,
            r#"{"everbus":"error"}"#,
        ] {
            assert_eq!(Report::parse(line.as_bytes()), None, "{line}");
        }
    }
}
