//! The messages of the WebSocket, as JSON in text frames.

use everbus::{Error, Pattern, Result};
use serde::{Deserialize, Serialize};

use super::follow::Begin;
use crate::problem::Problem;

/// What a client sends.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase", deny_unknown_fields)]
pub(crate) enum Inbound {
    /// Adds a subscription.
    Subscribe(Subscribe),
    /// Removes a subscription.
    Unsubscribe {
        /// Its id.
        id: String,
    },
    /// Events of a durable group were handled.
    Ack {
        /// The subscription.
        id: String,
        /// The leases of the events.
        leases: Vec<String>,
    },
    /// Events of a durable group failed. They are retried by the policy of the group.
    Nack {
        /// The subscription.
        id: String,
        /// The leases of the events.
        leases: Vec<String>,
        /// What went wrong, for the record.
        #[serde(default)]
        error: Option<String>,
    },
    /// Asks for an answer, to check the connection.
    Ping {
        /// Returned with the answer.
        #[serde(default)]
        id: Option<String>,
    },
}

/// A subscription.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Subscribe {
    /// The id of the subscription in every message. It is unique in the connection.
    pub(crate) id: String,
    /// Patterns of event types. Default: all but `system.` events; for a group, the patterns it has.
    #[serde(default)]
    pub(crate) patterns: Vec<String>,
    /// Only events of this tenant.
    #[serde(default)]
    pub(crate) tenant: Option<String>,
    /// The cursor of the last message that arrived: continue after it.
    #[serde(default)]
    pub(crate) after: Option<String>,
    /// `new` (the default), `first`, `last` or a time.
    #[serde(default)]
    pub(crate) from: Option<String>,
    /// Consume as this durable group: each event comes with a lease and must be acked.
    #[serde(default)]
    pub(crate) group: Option<String>,
    /// Figures instead of events: `overview`.
    #[serde(default)]
    pub(crate) topic: Option<String>,
}

impl Subscribe {
    pub(crate) fn patterns(&self) -> Result<Vec<Pattern>> {
        patterns(&self.patterns)
    }

    pub(crate) fn begin(&self) -> Result<Begin> {
        begin(self.after.as_deref(), self.from.as_deref())
    }
}

/// Parses patterns. Without any: all but `system.` events.
pub(crate) fn patterns(texts: &[String]) -> Result<Vec<Pattern>> {
    if texts.is_empty() {
        return Ok(vec!["*".parse()?]);
    }
    texts.iter().map(|text| text.parse()).collect()
}

/// Parses where to begin: after a cursor, or at a named place or time.
pub(crate) fn begin(after: Option<&str>, from: Option<&str>) -> Result<Begin> {
    match (after, from) {
        (Some(cursor), _) => Ok(Begin::After(cursor.parse()?)),
        (None, from) => Begin::parse(from.unwrap_or("new")),
    }
}

/// The messages of the server, except data: those are built from events that are already JSON.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub(crate) enum Outbound<'a> {
    /// The answer to a message of the client.
    Ack {
        of: &'static str,
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        cursor: Option<String>,
    },
    /// The state of the connection, and errors.
    Status {
        status: &'static str,
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        code: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        detail: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        hint: Option<&'a str>,
    },
}

impl Outbound<'_> {
    pub(crate) fn text(&self) -> String {
        // The message has only texts: serialising it cannot fail.
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// A status message without an error code.
pub(crate) fn status(status: &'static str, detail: &str) -> String {
    Outbound::Status {
        status,
        id: None,
        code: None,
        detail: Some(detail),
        hint: None,
    }
    .text()
}

/// A message could not be served; the connection goes on.
pub(crate) fn refused_by(id: &str, problem: &Problem) -> String {
    Outbound::Status {
        status: "error",
        id: Some(id),
        code: Some(problem.code()),
        detail: Some(problem.detail()),
        hint: problem.hint_text(),
    }
    .text()
}

/// A message could not be served; the connection goes on.
pub(crate) fn refused(id: Option<&str>, error: &Error) -> String {
    Outbound::Status {
        status: "error",
        id,
        code: Some(error.code().as_str()),
        detail: Some(error.message()),
        hint: error.hint_text(),
    }
    .text()
}

pub(crate) fn ack(of: &'static str, id: Option<&str>, cursor: Option<String>) -> String {
    Outbound::Ack { of, id, cursor }.text()
}
