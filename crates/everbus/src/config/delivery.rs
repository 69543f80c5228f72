//! Where the events of a consumer without a Rust handler go: `webhook`, `exec` or `pull` in its section.

use std::fmt;
use std::time::Duration;

use super::section::{Field, Reader, Section};

pub(super) const WEBHOOK_KEYS: &[&str] = &["url", "secret", "previous_secret", "allow_private"];
pub(super) const EXEC_KEYS: &[&str] = &["command", "env", "directory"];
pub(super) const PULL_KEYS: &[&str] = &["lease"];

/// Longer commands are refused as a mistake.
const MOST_WORDS: usize = 100;

/// Where the events of a consumer go. `everbus serve` delivers them; a program with its own handlers ignores it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Delivery {
    /// An HTTP POST for each event.
    Webhook(Webhook),
    /// A command for each event.
    Exec(Exec),
    /// Clients fetch the events over HTTP.
    Pull(Pull),
}

/// A webhook.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Webhook {
    /// Where to send the events.
    pub url: String,
    /// The secrets that sign each request: the current one, and the previous one while receivers change over.
    pub secrets: Vec<Secret>,
    /// Whether the address may be `http:` or in a private network.
    pub allow_private: bool,
}

impl Webhook {
    /// A webhook without secrets.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            secrets: Vec::new(),
            allow_private: false,
        }
    }
}

/// A command. It is run directly, without a shell.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Exec {
    /// The program and its arguments.
    pub command: Vec<String>,
    /// The variables of the server's environment that it gets, besides `PATH`.
    pub env: Vec<String>,
    /// The directory it runs in.
    pub directory: Option<String>,
}

/// A consumer whose events clients fetch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pull {
    /// How long a client has an event before it goes to another one, unless the client asks otherwise.
    pub lease: Option<Duration>,
}

/// A secret text, which is not shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// A secret.
    pub fn new(secret: impl Into<String>) -> Self {
        Self(secret.into())
    }

    /// The secret itself, for signing, not for display.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// Settings of a handler, which a consumer that clients fetch from does not have.
const NOT_PULLED: &[&str] = &[
    "circuit_breaker",
    "concurrency",
    "criticality",
    "dependency",
    "idempotent",
    "processing_timeout",
];

/// The delivery of a consumer, if its section has one.
pub(super) fn read(reader: &mut Reader<'_>, section: &Section<'_>) -> Option<Delivery> {
    let fields = ["webhook", "exec", "pull"].map(|key| section.get(key));
    let given: Vec<&Field<'_>> = fields.iter().flatten().collect();
    if let [first, second, ..] = given[..] {
        let what = format!("{} stands beside {}", second.path, first.path);
        let hint = "a consumer has one of webhook, exec and pull";
        reader.problems.add(second.key_place, what, hint);
        return None;
    }
    let [webhook, exec, pull] = fields;
    if let Some(section) = reader.section(webhook, WEBHOOK_KEYS) {
        return read_webhook(reader, &section).map(Delivery::Webhook);
    }
    if let Some(section) = reader.section(exec, EXEC_KEYS) {
        return read_exec(reader, &section).map(Delivery::Exec);
    }
    if pull.is_some() {
        for field in NOT_PULLED.iter().filter_map(|key| section.get(key)) {
            let what = format!("{} stands beside pull", field.path);
            let hint = "the server runs no handler for events that clients fetch: leave it out";
            reader.problems.add(field.key_place, what, hint);
        }
    }
    let is_true = |field: &Field<'_>| field.node.is_word(&["true"]);
    if pull.as_ref().is_some_and(is_true) {
        return Some(Delivery::Pull(Pull::default()));
    }
    let section = reader.section(pull, PULL_KEYS)?;
    let lease = reader.duration(section.get("lease"));
    Some(Delivery::Pull(Pull { lease }))
}

fn read_webhook(reader: &mut Reader<'_>, section: &Section<'_>) -> Option<Webhook> {
    let secrets = ["secret", "previous_secret"].map(|key| section.get(key));
    let secrets = secrets
        .into_iter()
        .filter_map(|field| reader.text(field, "a secret, such as ${WEBHOOK_SECRET}"))
        .map(|text| Secret::new(text.value));
    let secrets: Vec<Secret> = secrets.collect();
    let allow_private = reader.boolean(section.get("allow_private"));
    let Some(field) = section.get("url") else {
        let what = format!("{} is missing", section.path_of("url"));
        let hint = "a webhook needs the address that gets the events: url: https://…";
        reader.problems.add(section.place, what, hint);
        return None;
    };
    let text = reader.text(Some(field), "an address that begins with https://")?;
    let is_url = ["https://", "http://"]
        .iter()
        .any(|s| text.value.starts_with(s));
    if !is_url || text.value.chars().any(|c| c.is_control() || c == ' ') {
        let hint = "it begins with https://, or with http:// and allow_private: true";
        reader.refuse(&text, "which is not the address of a webhook", hint);
        return None;
    }
    Some(Webhook {
        url: text.value,
        secrets,
        allow_private: allow_private.unwrap_or(false),
    })
}

fn read_exec(reader: &mut Reader<'_>, section: &Section<'_>) -> Option<Exec> {
    let words = |reader: &mut Reader<'_>, key: &str| -> Vec<String> {
        let items = reader.list(section.get(key), MOST_WORDS, "words");
        let texts = items.into_iter();
        let texts = texts.filter_map(|item| reader.text(Some(item), "a word"));
        texts.map(|text| text.value).collect()
    };
    let command = words(reader, "command");
    let env = words(reader, "env");
    let directory = reader.text(section.get("directory"), "a directory");
    if command.is_empty() {
        let what = format!("{} is missing", section.path_of("command"));
        let hint = "name the program and its arguments: command: [./notify, --loud]";
        reader.problems.add(section.place, what, hint);
        return None;
    }
    Some(Exec {
        command,
        env,
        directory: directory.map(|text| text.value),
    })
}
