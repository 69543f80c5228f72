//! JSON Schemas of events: one per type and version, checked on publish and on consume.
//!
//! A schema comes from a Rust type ([`Schemas::register`]) or from JSON ([`Schemas::register_json`]).
//! Schemas are compiled when they are registered: an invalid schema is an error before any event is
//! published, and a check is one look-up and one walk over the payload.

#[cfg(feature = "schema")]
mod effort;
pub(crate) mod probe;
#[cfg(feature = "schema")]
mod single;
#[cfg(not(feature = "schema"))]
#[path = "absent.rs"]
mod single;
#[cfg(feature = "schema")]
mod violation;

use std::any::type_name;
use std::collections::HashMap;

use everbus_core::builder::validate_type;
use everbus_core::{Code, Error, Event, Result, TypedEvent};
use serde_json::Value;

use single::Formats;
pub use single::Schema;

/// The registered schemas, by event type and version.
///
/// Cloning is cheap: the compiled schemas are shared.
///
/// ```
/// use everbus::{Event, Schemas};
/// use serde_json::json;
///
/// let mut schemas = Schemas::new();
/// let schema = json!({ "type": "object", "required": ["order_id"] });
/// schemas.register_json("orders.order.placed", 1, &schema)?;
///
/// let event = Event::builder("orders.order.placed").json(&json!({ "total": 5 })).build()?;
/// let error = schemas.check_published(&event, None).unwrap_err();
/// assert!(error.message().contains("\"order_id\" is a required property"));
/// # Ok::<(), everbus::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Schemas {
    // A type has few versions, and a look-up by type alone needs no owned key.
    by_type: HashMap<Box<str>, Vec<Registered>>,
}

#[derive(Clone, Debug)]
struct Registered {
    version: u32,
    schema: Schema,
    /// The Rust types that this schema comes from.
    rust_types: Vec<&'static str>,
}

impl Schemas {
    /// An empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers the schema of a typed event. For a type without a schema this does nothing.
    pub fn register<T: TypedEvent>(&mut self) -> Result<()> {
        match T::schema() {
            Some(json) => self.insert(T::TYPE, T::VERSION, &json, Some(type_name::<T>())),
            None => Ok(()),
        }
    }

    /// Registers a schema given as JSON. The draft is the one that `$schema` names, or 2020-12.
    ///
    /// Registering the same schema again is harmless. Another schema for the same type and version is
    /// [`Code::InvalidSchema`], as is JSON that is not a schema or refers to something outside itself.
    /// Nothing is ever fetched.
    pub fn register_json(&mut self, event_type: &str, version: u32, schema: &Value) -> Result<()> {
        self.insert(event_type, version, schema, None)
    }

    /// Adds all schemas of another set, under the same rules.
    #[cfg_attr(
        not(feature = "schema"),
        expect(unreachable_code, reason = "a build without schemas has none to add")
    )]
    pub fn merge(&mut self, other: &Schemas) -> Result<()> {
        for (event_type, theirs) in &other.by_type {
            for entry in theirs {
                match self.find_mut(event_type, entry.version) {
                    None => self.push(event_type, entry.clone()),
                    Some(own) => {
                        own.join(event_type, entry.schema.json(), &entry.rust_types)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The schema of this type and version.
    pub fn get(&self, event_type: &str, version: u32) -> Option<&Schema> {
        self.find(event_type, version).map(|found| &found.schema)
    }

    /// Every schema with its type and version, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, u32, &Schema)> {
        self.by_type.iter().flat_map(|(event_type, entries)| {
            let each = entries.iter();
            each.map(|entry| (&**event_type, entry.version, &entry.schema))
        })
    }

    /// Whether there is a schema for some version of this type.
    pub fn knows(&self, event_type: &str) -> bool {
        self.by_type.contains_key(event_type)
    }

    /// Whether there are no schemas.
    pub fn is_empty(&self) -> bool {
        self.by_type.is_empty()
    }

    /// Checks an event before it is published. `rust_type` comes from
    /// [`IntoEvent::rust_type`](everbus_core::IntoEvent::rust_type): a payload that was just serialised
    /// from the Rust type that the schema comes from is not checked.
    pub fn check_published(&self, event: &Event, rust_type: Option<&str>) -> Result<()> {
        let Some(found) = self.find(event.event_type(), event.version()) else {
            return Ok(());
        };
        if rust_type.is_some_and(|name| found.rust_types.contains(&name)) {
            return Ok(());
        }
        found.schema.check(event.payload())
    }

    /// Checks an event before it is handled, whichever publisher sent it.
    pub fn check_consumed(&self, event: &Event) -> Result<()> {
        match self.get(event.event_type(), event.version()) {
            Some(schema) => schema.check(event.payload()),
            None => Ok(()),
        }
    }

    fn find(&self, event_type: &str, version: u32) -> Option<&Registered> {
        let entries = self.by_type.get(event_type)?;
        entries.iter().find(|entry| entry.version == version)
    }

    fn find_mut(&mut self, event_type: &str, version: u32) -> Option<&mut Registered> {
        let entries = self.by_type.get_mut(event_type)?;
        entries.iter_mut().find(|entry| entry.version == version)
    }

    fn push(&mut self, event_type: &str, entry: Registered) {
        self.by_type
            .entry(event_type.into())
            .or_default()
            .push(entry);
    }

    pub(crate) fn insert(
        &mut self,
        event_type: &str,
        version: u32,
        json: &Value,
        rust_type: Option<&'static str>,
    ) -> Result<()> {
        validate_type(event_type)?;
        if version == 0 {
            let what = format!("a schema is registered for version 0 of {event_type:?}");
            return Err(Error::new(Code::InvalidSchema, what).hint("versions begin at 1"));
        }
        if let Some(own) = self.find_mut(event_type, version) {
            return own.join(event_type, json, rust_type.as_slice());
        }
        // A value that a Rust type serialised can be read by that type. Its schema must not refuse it
        // because of a stricter `format` for dates or durations.
        let formats = match rust_type {
            Some(_) => Formats::Annotated,
            None => Formats::AsDrafted,
        };
        let schema = Schema::compile(name(event_type, version), json, formats)?;
        let rust_types = rust_type.into_iter().collect();
        let entry = Registered {
            version,
            schema,
            rust_types,
        };
        self.push(event_type, entry);
        Ok(())
    }
}

impl Registered {
    /// Handles a second registration of the same type and version.
    fn join(&mut self, event_type: &str, json: &Value, rust_types: &[&'static str]) -> Result<()> {
        if json != self.schema.json() {
            let what = format!(
                "two different schemas are registered for {}",
                name(event_type, self.version)
            );
            return Err(Error::new(Code::InvalidSchema, what)
                .hint("a change of the schema is a new version of the event"));
        }
        if self.rust_types.is_empty() && !rust_types.is_empty() {
            let name = name(event_type, self.version);
            self.schema = Schema::compile(name, json, Formats::Annotated)?;
        }
        for rust_type in rust_types {
            if !self.rust_types.contains(rust_type) {
                self.rust_types.push(rust_type);
            }
        }
        Ok(())
    }
}

fn name(event_type: &str, version: u32) -> String {
    format!("{event_type} version {version}")
}
