//! The keys of the table and of its seven indexes.

use everbus_core::{Code, Entity, Error, Event, Result};

use super::refused;

/// The names of all keys, in the order of the specification.
pub const KEY_NAMES: [&str; 16] = [
    "PK", "SK", "GSI1PK", "GSI1SK", "GSI2PK", "GSI2SK", "GSI3PK", "GSI3SK", "GSI4PK", "GSI4SK",
    "GSI5PK", "GSI5SK", "GSI6PK", "GSI6SK", "GSI7PK", "GSI7SK",
];

/// The keys of one event. An event without an entity or app has no keys for the indexes that need them.
///
/// ```
/// use everbus_core::Event;
/// use everbus_dialects::workflow::Keys;
///
/// let event = Event::builder("Task Completed").tenant("acme").entity("TASK", "req-1").build()?;
/// let keys = Keys::of(&event)?;
/// assert_eq!(keys.get("PK"), Some("TENANT#acme"));
/// assert_eq!(keys.get("GSI1PK"), Some("TASK#req-1"));
/// assert_eq!(keys.get("GSI2PK"), None);
/// # Ok::<(), everbus_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys {
    millis: u64,
    keys: Vec<(&'static str, String)>,
}

impl Keys {
    /// Computes the keys of an event. It must have a tenant and a time from 1970 on, and no `#` in tenant,
    /// app or entity: a `#` could form the key of another tenant.
    pub fn of(event: &Event) -> Result<Self> {
        let a = event.attributes();
        let Some(tenant) = event.tenant() else {
            let id = event.display_id();
            return Err(refused(format!(
                "the workflow dialect needs a tenant, and {id:?} has none"
            )));
        };
        let Ok(millis) = u64::try_from(event.occurred_at().as_micros().div_euclid(1000)) else {
            let (id, at) = (event.display_id(), event.occurred_at());
            return Err(refused(format!(
                "the workflow dialect has no times before 1970, and {id:?} is from {at}"
            )));
        };
        Self::new(
            tenant,
            a.and_then(|a| a.app.as_deref()),
            a.and_then(|a| a.entity.as_ref()),
            event.event_type(),
            millis,
            &event.display_id(),
        )
    }

    pub(super) fn new(
        tenant: &str,
        app: Option<&str>,
        entity: Option<&Entity>,
        event_type: &str,
        millis: u64,
        id: &str,
    ) -> Result<Self> {
        part("tenant", tenant)?;
        if let Some(app) = app {
            part("app", app)?;
        }
        if let Some(entity) = entity {
            part("type of the entity", &entity.kind)?;
            part("id of the entity", &entity.id)?;
        }
        let time = format!("TIMESTAMP#{millis}");
        let tenant = format!("TENANT#{tenant}");
        let kind = format!("EVENT#{event_type}");
        let app = app.map(|app| format!("APP#{app}"));

        let mut keys = vec![("PK", tenant.clone()), ("SK", format!("{time}#EVENT#{id}"))];
        if let Some(e) = entity {
            keys.push(("GSI1PK", e.to_string()));
            keys.push(("GSI1SK", format!("{}#{time}", e.kind)));
        }
        if let Some(app) = &app {
            keys.push(("GSI2PK", app.clone()));
            keys.push(("GSI2SK", time.clone()));
        }
        if let (Some(app), Some(e)) = (&app, entity) {
            keys.push(("GSI3PK", app.clone()));
            keys.push(("GSI3SK", format!("{e}#{time}")));
        }
        keys.push(("GSI4PK", kind.clone()));
        keys.push(("GSI4SK", format!("{tenant}#{time}")));
        if let Some(e) = entity {
            keys.push(("GSI5PK", kind.clone()));
            keys.push(("GSI5SK", format!("{tenant}#{e}#{time}")));
        }
        if let Some(app) = &app {
            keys.push(("GSI6PK", kind.clone()));
            keys.push(("GSI6SK", format!("{tenant}#{app}#{time}")));
        }
        if let (Some(app), Some(e)) = (&app, entity) {
            keys.push(("GSI7PK", kind));
            keys.push(("GSI7SK", format!("{tenant}#{app}#{e}#{time}")));
        }
        Ok(Self { millis, keys })
    }

    /// The time of the event, in milliseconds since 1970.
    pub fn millis(&self) -> u64 {
        self.millis
    }

    /// One key by its name.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.iter().find(|(n, _)| *n == name).map(|(_, key)| key)
    }

    /// All keys that the event has, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.keys.iter().map(|(name, key)| (*name, key.as_str()))
    }
}

fn part(name: &str, value: &str) -> Result<()> {
    if !value.is_empty() && !value.contains('#') {
        return Ok(());
    }
    let what = format!("the {name} {value:?} cannot be part of a key");
    Err(Error::new(Code::InvalidAttribute, what)
        .hint("# separates the parts, and none may be empty"))
}
