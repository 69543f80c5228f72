//! The names of the dialects.

use std::fmt;
use std::str::FromStr;

use everbus_core::suggest::nearest;
use everbus_core::{Code, Error};

/// A wire format of events.
///
/// ```
/// use everbus_dialects::Dialect;
/// let dialect: Dialect = "cloudevents".parse()?;
/// assert_eq!(dialect, Dialect::CloudEvents);
/// assert_eq!(dialect.to_string(), "cloudevents");
/// # Ok::<(), everbus_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dialect {
    /// The JSON of Everbus itself, as the command line prints it. It carries every field.
    #[default]
    Native,
    /// CloudEvents 1.0.
    CloudEvents,
    /// `type, payload, id, timestamp, source, traceId`.
    Omni,
    /// `PK, SK, GSI1PK … GSI7SK, entityId, entityType, tenantId, eventType, timestamp, context,
    /// properties`.
    Workflow,
    /// `event_id, occurred_at, correlation_id, tenant_id, station_id, schema_version, payload`.
    Outbox,
    /// `event_id, event_type, event_version, timestamp, source, correlation_id, trace_id, payload`.
    Framework,
}

impl Dialect {
    /// Every dialect.
    pub const ALL: &'static [Dialect] = &[
        Dialect::Native,
        Dialect::CloudEvents,
        Dialect::Omni,
        Dialect::Workflow,
        Dialect::Outbox,
        Dialect::Framework,
    ];

    /// The name in settings.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::CloudEvents => "cloudevents",
            Self::Omni => "omni",
            Self::Workflow => "workflow",
            Self::Outbox => "outbox",
            Self::Framework => "framework",
        }
    }
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Dialect {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let found = Self::ALL.iter().find(|dialect| dialect.as_str() == name);
        found.copied().ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|d| d.as_str()).collect();
            let one_of = format!("one of {}", names.join(", "));
            let near = nearest(&name.to_lowercase(), names);
            let hint = near.map_or(one_of.clone(), |near| {
                format!("did you mean {near:?}? It is {one_of}")
            });
            Error::new(Code::InvalidSetting, format!("{name:?} is not a dialect")).hint(hint)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back_and_others_are_refused_with_the_list() {
        for dialect in Dialect::ALL {
            assert_eq!(dialect.to_string().parse::<Dialect>().unwrap(), *dialect);
        }
        for name in ["", "Native", "cloud-events", "avro"] {
            let e = name.parse::<Dialect>().unwrap_err();
            assert_eq!(e.code(), Code::InvalidSetting);
            assert!(e.hint_text().unwrap().contains("framework"), "{e:?}");
        }
        let e = "CloudEvent".parse::<Dialect>().unwrap_err();
        let hint = e.hint_text().unwrap();
        assert!(hint.starts_with("did you mean \"cloudevents\"?"), "{hint}");
    }
}
