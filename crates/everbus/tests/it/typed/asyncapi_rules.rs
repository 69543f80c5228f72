//! The rules of AsyncAPI 3 that the documents must keep, as far as they use it.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

/// What of AsyncAPI 3.0.0 a document breaks; nothing, if it is in order.
pub(super) fn broken_rules(document: &Value) -> Vec<String> {
    let mut rules = Rules {
        document,
        broken: Vec::new(),
    };
    rules.root();
    rules.broken
}

struct Rules<'a> {
    document: &'a Value,
    broken: Vec<String>,
}

impl<'a> Rules<'a> {
    fn root(&mut self) {
        let allowed = "asyncapi info defaultContentType channels operations components";
        self.fields("document", self.document, "asyncapi info", allowed);
        self.must(self.document["asyncapi"] == "3.0.0", "asyncapi is 3.0.0");
        let info = &self.document["info"];
        self.fields("info", info, "title version", "title version description");
        for (name, value) in info.as_object().into_iter().flatten() {
            self.must(value.is_string(), &format!("info.{name} is text"));
        }
        for (key, channel) in self.entries("/channels") {
            self.channel(key, channel);
        }
        for (key, operation) in self.entries("/operations") {
            self.operation(key, operation);
        }
        for (key, message) in self.entries("/components/messages") {
            self.message(key, message);
        }
        for (key, schema) in self.entries("/components/schemas") {
            self.key(key);
            let usable = match schema.get("schema") {
                Some(_) => schema["schemaFormat"].is_string(),
                None => schema.is_object(),
            };
            self.must(usable, &format!("{key} is a schema"));
        }
        let mut refs = Vec::new();
        collect_refs(self.document, &mut refs);
        for target in refs {
            self.must(
                self.resolve(target).is_some(),
                &format!("{target} is there"),
            );
        }
    }

    fn channel(&mut self, key: &str, channel: &'a Value) {
        self.key(key);
        self.fields(key, channel, "", "address title messages parameters");
        let address = &channel["address"];
        self.must(
            address.is_string() || address.is_null(),
            "an address is text",
        );
        let parameters = channel["parameters"].as_object();
        let named: BTreeSet<String> = parameters
            .into_iter()
            .flatten()
            .map(|(k, _)| k.clone())
            .collect();
        let used: BTreeSet<String> = address
            .as_str()
            .unwrap_or_default()
            .split('{')
            .skip(1)
            .map(|rest| rest.split('}').next().unwrap().to_owned())
            .collect();
        self.must(named == used, &format!("{key} has the parameters {used:?}"));
        for (name, message) in channel["messages"].as_object().into_iter().flatten() {
            self.key(name);
            self.fields(name, message, "$ref", "$ref");
        }
    }

    fn operation(&mut self, key: &str, operation: &'a Value) {
        self.key(key);
        self.fields(
            key,
            operation,
            "action channel",
            "action channel title messages",
        );
        let action = operation["action"].as_str();
        self.must(
            matches!(action, Some("send" | "receive")),
            &format!("{key} sends or receives"),
        );
        let channel = operation["channel"]["$ref"].as_str().unwrap_or_default();
        self.must(
            channel.starts_with("#/channels/"),
            &format!("the channel of {key} is one"),
        );
        let messages = operation["messages"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        self.must(!messages.is_empty(), &format!("{key} has messages"));
        for message in messages {
            let target = message["$ref"].as_str().unwrap_or_default().to_owned();
            let own = target.starts_with(&format!("{channel}/messages/"));
            self.must(
                own,
                &format!("{target} is a message of the channel of {key}"),
            );
        }
    }

    fn message(&mut self, key: &str, message: &'a Value) {
        self.key(key);
        let allowed = "name title summary contentType headers payload correlationId";
        self.fields(key, message, "", allowed);
        self.must(
            message["name"] == key,
            &format!("{key} is the name of a message"),
        );
        self.must(
            message["headers"]["type"] == "object",
            &format!("the headers of {key} are an object"),
        );
        let location = message["correlationId"]["location"].as_str();
        self.must(
            location.is_some_and(|at| at.starts_with("$message.header#/")),
            &format!("the correlation id of {key} is in a header"),
        );
    }

    /// Required and allowed fields; extensions begin with `x-`.
    fn fields(&mut self, what: &str, object: &Value, required: &str, allowed: &str) {
        let none = Map::new();
        let object = object.as_object().unwrap_or(&none);
        for name in required.split_whitespace() {
            let given = object.get(name).is_some_and(|value| !value.is_null());
            self.must(given, &format!("{what} has {name}"));
        }
        for name in object.keys() {
            let known = allowed.split_whitespace().any(|allowed| allowed == name);
            let extension = name.starts_with("x-") && is_key(&name[2..]);
            self.must(known || extension, &format!("{what} has no {name}"));
        }
    }

    fn key(&mut self, key: &str) {
        self.must(is_key(key), &format!("{key:?} is a key"));
    }

    fn entries(&self, pointer: &str) -> Vec<(&'a String, &'a Value)> {
        let map = self.document.pointer(pointer).and_then(Value::as_object);
        map.into_iter().flatten().collect()
    }

    fn resolve(&self, target: &str) -> Option<&'a Value> {
        self.document.pointer(target.strip_prefix('#')?)
    }

    fn must(&mut self, holds: bool, rule: &str) {
        if !holds {
            self.broken.push(rule.to_owned());
        }
    }
}

fn is_key(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    !text.is_empty() && text.chars().all(plain)
}

/// Every reference. What is data in a schema may look like one; these documents hold none there but
/// in `const`, `default` and `enum`.
fn collect_refs<'a>(value: &'a Value, refs: &mut Vec<&'a str>) {
    match value {
        Value::Object(map) => {
            for (name, inner) in map {
                match (name.as_str(), inner) {
                    ("$ref", Value::String(target)) => refs.push(target),
                    ("const" | "default" | "enum", _) => {}
                    _ => collect_refs(inner, refs),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| collect_refs(item, refs)),
        _ => {}
    }
}
