//! Which events are replayed.

use std::sync::Arc;

use everbus_core::{
    Code, Entity, Error, Event, EventId, HistoryQuery, Order, Pattern, Result, Streams, Timestamp,
    check_range,
};
use serde_json::{Value, json};

use crate::streams;

/// The selected events. The default is all events.
#[derive(Clone, Debug, Default)]
pub(super) struct Selection {
    pub(super) event: Option<EventId>,
    pub(super) since: Option<Timestamp>,
    pub(super) until: Option<Timestamp>,
    pub(super) stream: Option<Named>,
    pub(super) types: Option<Pattern>,
    pub(super) tenant: Option<String>,
    pub(super) app: Option<String>,
    pub(super) entity: Option<Entity>,
}

/// The events of a stream, by its name.
#[derive(Clone, Debug)]
pub(super) struct Named {
    pub(super) name: String,
    pub(super) types: Pattern,
}

impl Named {
    pub(super) fn new(streams: &Streams, name: &str) -> Result<Self> {
        Ok(Self {
            types: streams.select(name)?,
            name: streams::canonical(name),
        })
    }
}

impl Selection {
    pub(super) fn check(&self) -> Result<()> {
        check_range(self.since, self.until)?;
        let others = self.since.is_some()
            || self.until.is_some()
            || self.stream.is_some()
            || self.types.is_some()
            || self.app.is_some()
            || self.entity.is_some();
        if self.event.is_some() && others {
            return Err(Error::new(
                Code::InvalidSetting,
                "one event was named, and a range as well",
            )
            .hint("replay either the event or the range"));
        }
        Ok(())
    }

    /// The patterns to read from the log: they match every selected event, and perhaps more.
    pub(super) fn patterns(&self) -> Result<Vec<Pattern>> {
        match (&self.types, &self.stream) {
            (Some(types), _) => Ok(vec![types.clone()]),
            (None, Some(stream)) => Ok(vec![stream.types.clone()]),
            (None, None) => Ok(vec![Pattern::new("*")?]),
        }
    }

    /// The name and the pattern of the selected stream.
    pub(super) fn stream(&self) -> Option<(&str, &Pattern)> {
        let stream = self.stream.as_ref()?;
        Some((&stream.name, &stream.types))
    }

    /// Whether the history is better suited than the log.
    pub(super) fn has_attributes(&self) -> bool {
        self.tenant.is_some() || self.app.is_some() || self.entity.is_some()
    }

    /// A history query that finds every selected event, and perhaps more.
    pub(super) fn query(&self, limit: usize) -> HistoryQuery {
        HistoryQuery {
            tenant: self.tenant.clone(),
            app: self.app.clone(),
            entity: self.entity.clone(),
            types: self.types.clone(),
            since: self.since,
            until: self.until,
            order: Order::Oldest,
            limit,
            ..HistoryQuery::default()
        }
    }

    /// The description in the checkpoint, to tell different selections apart.
    pub(super) fn description(&self) -> Value {
        json!({
            "event": self.event,
            "since": self.since,
            "until": self.until,
            "stream": self.stream.as_ref().map(|stream| &stream.name),
            "types": self.types.as_ref().map(Pattern::as_str),
            "tenant": self.tenant,
            "app": self.app,
            "entity": self.entity,
        })
    }
}

/// Tells whether an event is selected. Remembers the last type, because events of one type often come in a
/// row.
pub(super) struct Wanted {
    query: HistoryQuery,
    stream: Option<Pattern>,
    system: bool,
    last: Option<(Arc<str>, bool)>,
}

impl Wanted {
    pub(super) fn new(selection: &Selection) -> Self {
        Self {
            query: selection.query(1),
            stream: selection.stream().map(|(_, types)| types.clone()),
            system: selection.types.is_some() || selection.stream.is_some(),
            last: None,
        }
    }

    pub(super) fn takes(&mut self, event: &Event) -> bool {
        self.takes_type(event.type_arc()) && self.has_attributes(event)
    }

    fn takes_type(&mut self, event_type: &Arc<str>) -> bool {
        if let Some((last, taken)) = &self.last
            && (Arc::ptr_eq(last, event_type) || last == event_type)
        {
            return *taken;
        }
        let types = self.query.types.as_ref();
        let taken = types.is_none_or(|types| types.matches(event_type))
            && self.stream.as_ref().is_none_or(|s| s.matches(event_type))
            && (self.system || !event_type.starts_with("system."));
        self.last = Some((event_type.clone(), taken));
        taken
    }

    fn has_attributes(&self, event: &Event) -> bool {
        let HistoryQuery {
            tenant,
            app,
            entity,
            ..
        } = &self.query;
        if tenant.is_none() && app.is_none() && entity.is_none() {
            return true;
        }
        let Some(own) = event.attributes() else {
            return false;
        };
        (tenant.is_none() || *tenant == own.tenant)
            && (app.is_none() || *app == own.app)
            && (entity.is_none() || *entity == own.entity)
    }
}
