//! An AsyncAPI 3 document of the events of an application: channels, messages, schemas, and which
//! operations receive or send them.
//!
//! The inputs are plain values, so that a router and a configuration file can both be described.
//! One channel per event type, one message per version of it, and the envelope as the headers.

mod embed;
mod envelope;

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use everbus_core::{Pattern, Result, RetryPolicy};
use serde_json::{Map, Value, json};

/// The version of the AsyncAPI specification.
pub const ASYNCAPI: &str = "3.0.0";

/// At most this many delays are listed: all later ones equal the longest one.
const MAX_DELAYS: u32 = 8;

/// The input of the document.
///
/// ```
/// use everbus::asyncapi::{Action, Channel, Document, Operation};
/// use serde_json::json;
///
/// let document = Document {
///     channels: vec![Channel {
///         event_type: "orders.order.placed".to_owned(),
///         versions: vec![(1, Some(json!({ "type": "object" })))],
///     }],
///     operations: vec![Operation::new(Action::Receive, "send_receipt", "orders.>")],
///     ..Document::new("Shop", "1.0.0")
/// };
/// let json = document.to_json()?;
/// let address = &json["channels"]["orders.order.placed"]["address"];
/// assert_eq!(address, "orders.order.placed");
/// # Ok::<(), everbus::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Document {
    /// The name of the application.
    pub title: String,
    /// The version of the application.
    pub version: String,
    /// A description, in CommonMark.
    pub description: Option<String>,
    /// The known event types. A type that is given twice is one channel.
    pub channels: Vec<Channel>,
    /// The operations that receive and send.
    pub operations: Vec<Operation>,
}

/// An event type.
#[derive(Clone, Debug, Default)]
pub struct Channel {
    /// The type.
    pub event_type: String,
    /// The versions that are known, each with its JSON Schema if it has one.
    pub versions: Vec<(u32, Option<Value>)>,
}

/// What an operation does with its events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Action {
    /// A handler receives them.
    #[default]
    Receive,
    /// A handler or the application publishes them.
    Send,
}

/// A handler that receives, or something that sends.
#[derive(Clone, Debug, Default)]
pub struct Operation {
    /// What it does.
    pub action: Action,
    /// The name of the handler or sender.
    pub name: String,
    /// The pattern that it receives, or the type that it sends.
    pub pattern: String,
    /// The group of the handler; none for the unnamed one and for senders.
    pub group: Option<String>,
    /// The versions of one event type that it receives or sends; empty: all known ones.
    pub versions: Vec<u32>,
    /// The retry policy.
    pub retry: Option<RetryPolicy>,
    /// The timeout.
    pub timeout: Option<Duration>,
    /// Further settings; `criticality` is shown as `x-everbus-criticality`.
    pub settings: BTreeMap<String, Value>,
}

impl Operation {
    /// An operation without any settings.
    pub fn new(action: Action, name: impl Into<String>, pattern: impl Into<String>) -> Self {
        Self {
            action,
            name: name.into(),
            pattern: pattern.into(),
            ..Self::default()
        }
    }
}

impl Document {
    /// An empty document.
    pub fn new(title: impl Into<String>, version: impl Into<String>) -> Self {
        Self {
            title: title.into(),
            version: version.into(),
            ..Self::default()
        }
    }

    /// Renders the document. Fails only on an invalid pattern.
    pub fn to_json(&self) -> Result<Value> {
        let mut draft = Draft::begin();
        for (event_type, versions) in self.known_types() {
            draft.add_channel(event_type, &versions);
        }
        for operation in &self.operations {
            draft.add_operation(operation)?;
        }
        let mut info = json!({ "title": self.title, "version": self.version });
        if let Some(text) = &self.description {
            info["description"] = text.as_str().into();
        }
        Ok(draft.finish(&info))
    }

    /// The channels in order, each type once.
    fn known_types(&self) -> BTreeMap<&str, BTreeMap<u32, Option<&Value>>> {
        let mut types: BTreeMap<&str, BTreeMap<u32, Option<&Value>>> = BTreeMap::new();
        for channel in &self.channels {
            let versions = types.entry(&channel.event_type).or_default();
            for (version, schema) in &channel.versions {
                let known = versions.entry(*version).or_default();
                *known = known.or(schema.as_ref());
            }
        }
        // A version that is received or sent is listed, even without a schema.
        for operation in &self.operations {
            if !operation.pattern.contains(['*', '>']) {
                let versions = types.entry(&operation.pattern).or_default();
                for version in &operation.versions {
                    versions.entry(*version).or_default();
                }
            }
        }
        types
    }
}

/// The document while it is built.
struct Draft {
    channels: Map<String, Value>,
    messages: Map<String, Value>,
    schemas: Map<String, Value>,
    operations: Map<String, Value>,
    /// By event type or pattern.
    drawn: BTreeMap<String, Drawn>,
    keys: HashSet<(Section, String)>,
}

/// A channel that is in the document.
struct Drawn {
    key: String,
    is_type: bool,
    /// The version and the key of every message.
    messages: Vec<(Option<u32>, String)>,
}

/// Keys are unique within their section.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Section {
    Channels,
    /// Messages and their schemas share their keys.
    Components,
    Operations,
}

impl Draft {
    fn begin() -> Self {
        let mut draft = Self {
            channels: Map::new(),
            messages: Map::new(),
            schemas: Map::new(),
            operations: Map::new(),
            drawn: BTreeMap::new(),
            keys: HashSet::new(),
        };
        let key = draft.key(Section::Components, envelope::KEY);
        draft.schemas.insert(key, envelope::schema());
        draft
    }

    fn finish(self, info: &Value) -> Value {
        json!({
            "asyncapi": ASYNCAPI,
            "info": info,
            "defaultContentType": "application/json",
            "channels": self.channels,
            "operations": self.operations,
            "components": { "messages": self.messages, "schemas": self.schemas },
        })
    }

    fn add_channel(&mut self, event_type: &str, versions: &BTreeMap<u32, Option<&Value>>) {
        let mut messages = Vec::new();
        for (version, schema) in versions {
            let key = self.add_message(event_type, Some(*version), *schema);
            messages.push((Some(*version), key));
        }
        if messages.is_empty() {
            messages.push((None, self.add_message(event_type, None, None)));
        }
        // Braces would be read as a parameter; the type is in the headers of the messages anyway.
        let address = (!event_type.contains(['{', '}'])).then_some(event_type);
        let channel = json!({ "address": address, "title": event_type });
        self.insert_channel(event_type, true, channel, messages);
    }

    /// A pattern that matches no known type is still documented.
    fn add_pattern(&mut self, pattern: &str) {
        let key = self.add_message(pattern, None, None);
        let (address, parameters) = expression(pattern);
        let mut channel = json!({ "address": address, "title": pattern });
        if !parameters.is_empty() {
            channel["parameters"] = parameters.into();
        }
        self.insert_channel(pattern, false, channel, vec![(None, key)]);
    }

    fn insert_channel(
        &mut self,
        name: &str,
        is_type: bool,
        mut channel: Value,
        messages: Vec<(Option<u32>, String)>,
    ) {
        let refs = messages.iter().map(|(_, key)| {
            let target = format!("#/components/messages/{key}");
            (key.clone(), json!({ "$ref": target }))
        });
        channel["messages"] = Value::Object(refs.collect());
        let key = self.key(Section::Channels, name);
        self.channels.insert(key.clone(), channel);
        let drawn = Drawn {
            key,
            is_type,
            messages,
        };
        self.drawn.insert(name.to_owned(), drawn);
    }

    /// Adds a message and its schema, and returns the key of both.
    fn add_message(&mut self, name: &str, version: Option<u32>, schema: Option<&Value>) -> String {
        let key = match version {
            Some(version) => self.key(Section::Components, &format!("{name}.v{version}")),
            None => self.key(Section::Components, name),
        };
        let is_type = !name.contains(['*', '>']);
        let mut message = json!({
            "name": key,
            "title": match version {
                Some(version) => format!("{name} version {version}"),
                None => name.to_owned(),
            },
            "contentType": "application/json",
            "headers": envelope::of(is_type.then_some(name), version),
            "correlationId": { "location": "$message.header#/correlation_id" },
        });
        if let Some(schema) = schema {
            if let Some(text) = schema.get("description").and_then(Value::as_str) {
                message["summary"] = text.into();
            }
            let at = format!("#/components/schemas/{key}");
            self.schemas.insert(key.clone(), embed::embed(schema, &at));
            message["payload"] = json!({ "$ref": at });
        }
        self.messages.insert(key.clone(), message);
        key
    }

    fn add_operation(&mut self, operation: &Operation) -> Result<()> {
        let pattern = Pattern::new(&operation.pattern)?;
        let mut names: Vec<String> = self
            .drawn
            .iter()
            .filter(|(name, drawn)| drawn.is_type && pattern.matches(name))
            .map(|(name, _)| name.clone())
            .collect();
        if names.is_empty() {
            let text = pattern.as_str();
            if !self.drawn.contains_key(text) {
                self.add_pattern(text);
            }
            names.push(text.to_owned());
        }
        for name in names {
            let wanted = match &operation.group {
                Some(group) => format!("{group}.{}", operation.name),
                None => operation.name.clone(),
            };
            let key = self.key(
                Section::Operations,
                &format!("{wanted}.{}.{name}", operation.action.as_str()),
            );
            if let Some(drawn) = self.drawn.get(&name) {
                self.operations.insert(key, operation.on(drawn));
            }
        }
        Ok(())
    }

    /// A unique key that every tool accepts, close to the wanted one.
    fn key(&mut self, section: Section, wanted: &str) -> String {
        let plain = |c: char| match c {
            'A'..='Z' | 'a'..='z' | '0'..='9' | '.' | '-' | '_' => c,
            _ => '_',
        };
        let base: String = wanted.chars().map(plain).collect();
        let mut key = base.clone();
        let mut number = 1;
        while !self.keys.insert((section, key.clone())) {
            number += 1;
            key = format!("{base}_{number}");
        }
        key
    }
}

impl Action {
    fn as_str(self) -> &'static str {
        match self {
            Self::Receive => "receive",
            Self::Send => "send",
        }
    }
}

impl Operation {
    /// The operation object, on one channel.
    fn on(&self, channel: &Drawn) -> Value {
        let channel_ref = format!("#/channels/{}", channel.key);
        let taken = |(version, _): &&(Option<u32>, String)| {
            version.is_some_and(|version| self.versions.contains(&version))
        };
        let all = !channel.messages.iter().any(|message| taken(&message));
        let messages: Vec<Value> = channel
            .messages
            .iter()
            .filter(|message| all || taken(message))
            .map(|(_, key)| json!({ "$ref": format!("{channel_ref}/messages/{key}") }))
            .collect();
        let mut object = json!({
            "action": self.action.as_str(),
            "channel": { "$ref": channel_ref },
            "title": self.name,
            "messages": messages,
        });
        let mut extend = |name: &str, value: Value| object[format!("x-everbus-{name}")] = value;
        for (name, value) in &self.settings {
            extend(name, value.clone());
        }
        extend("handler", self.name.as_str().into());
        if self.action == Action::Receive {
            extend("pattern", self.pattern.as_str().into());
        }
        if let Some(group) = &self.group {
            extend("group", group.as_str().into());
        }
        if let Some(retry) = &self.retry {
            extend("retry", shown(retry));
        }
        if let Some(timeout) = self.timeout {
            extend("timeout-ms", milliseconds(timeout));
        }
        object
    }
}

fn shown(retry: &RetryPolicy) -> Value {
    let attempts = retry.max_attempts();
    let last = attempts.min(MAX_DELAYS.saturating_add(1));
    let delays: Vec<Value> = (2..=last)
        .map(|attempt| milliseconds(retry.delay_before(attempt)))
        .collect();
    json!({ "max_attempts": attempts, "delays_ms": delays })
}

fn milliseconds(duration: Duration) -> Value {
    u64::try_from(duration.as_millis())
        .unwrap_or(u64::MAX)
        .into()
}

/// `order.*.shipped` as the address `order.{segment2}.shipped`. A pattern that contains braces has no
/// address.
fn expression(pattern: &str) -> (Option<String>, Map<String, Value>) {
    let mut parameters = Map::new();
    if pattern.contains(['{', '}']) {
        return (None, parameters);
    }
    let mut address = Vec::new();
    let alone = !pattern.contains('.');
    for (index, segment) in pattern.split('.').enumerate() {
        let (name, what) = match segment {
            "*" | ">" | "**" if alone => ("type".to_owned(), "Any event type."),
            "*" => (format!("segment{}", index + 1), "One segment."),
            ">" | "**" => ("rest".to_owned(), "One or more segments."),
            literal => {
                address.push(literal.to_owned());
                continue;
            }
        };
        address.push(format!("{{{name}}}"));
        parameters.insert(name, json!({ "description": what }));
    }
    (Some(address.join(".")), parameters)
}
