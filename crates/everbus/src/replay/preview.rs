//! What a replay would do.

use std::collections::BTreeMap;
use std::sync::Arc;

use everbus_core::{GroupInfo, GroupName, Pattern, Recorded, Result, Timestamp};
use serde::Serialize;

use super::Replay;
use super::source::{self, Source};
use super::target::{Context, Target};

/// What a replay would do, as things are now.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ReplayPreview {
    /// Events that would be replayed.
    pub events: u64,
    /// Events that the filter leaves out.
    pub filtered: u64,
    /// How many of each type.
    pub types: BTreeMap<String, u64>,
    /// When the first one was received.
    pub first: Option<Timestamp>,
    /// When the last one was.
    pub last: Option<Timestamp>,
    /// The groups that would get some of them.
    pub groups: Vec<PreviewedGroup>,
}

/// What a group would get.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PreviewedGroup {
    /// The group.
    pub group: GroupName,
    /// How many of the events its patterns match.
    pub events: u64,
    /// How many of these lie beyond its position: it will have them anyway.
    pub owed: u64,
    /// How many of these its inbox has as handled: idempotent handlers will not run.
    pub absorbed: u64,
    /// What it is subscribed to.
    pub patterns: Vec<String>,
    /// Its handlers in this process that would run.
    pub handlers: Vec<String>,
    #[serde(skip)]
    matches: Vec<Pattern>,
    #[serde(skip)]
    all_handlers: Vec<(Pattern, String)>,
    /// Only for events that are given to this group as they are.
    #[serde(skip)]
    position: Option<u64>,
    #[serde(skip)]
    absorbs: bool,
}

impl PreviewedGroup {
    /// A group that is there; `as_they_are` if it is to have the events themselves and not copies.
    pub(super) async fn live(
        context: &Context,
        info: &GroupInfo,
        as_they_are: bool,
    ) -> Result<Self> {
        let matches = info.patterns.iter().map(|text| Pattern::new(text));
        let matches: Result<Vec<Pattern>> = matches.collect();
        let handlers = context.bus.handlers_of(&info.name).await;
        Ok(Self {
            all_handlers: handlers,
            position: as_they_are.then_some(info.position),
            absorbs: as_they_are && context.bus.may_absorb(&info.name).await,
            ..Self::new(info.name.clone(), matches?)
        })
    }

    /// The group of handlers of its own.
    pub(super) fn fresh(group: GroupName, patterns: Vec<Pattern>, handlers: Vec<String>) -> Self {
        let all_handlers = patterns.iter().cloned().zip(handlers).collect();
        Self {
            all_handlers,
            ..Self::new(group, patterns)
        }
    }

    fn new(group: GroupName, matches: Vec<Pattern>) -> Self {
        Self {
            group,
            events: 0,
            owed: 0,
            absorbed: 0,
            patterns: matches.iter().map(ToString::to_string).collect(),
            handlers: Vec::new(),
            matches,
            all_handlers: Vec::new(),
            position: None,
            absorbs: false,
        }
    }

    fn wants(&self, event_type: &str) -> bool {
        self.matches.iter().any(|p| p.matches(event_type))
    }

    /// Takes note of some of the events.
    async fn look(&mut self, context: &Context, events: &[Arc<Recorded>]) -> Result<()> {
        let wanted = events.iter().filter(|r| self.wants(r.event.event_type()));
        let (mut owed, mut wanted): (Vec<_>, Vec<_>) = (Vec::new(), wanted.collect());
        self.events += wanted.len() as u64;
        if let Some(position) = self.position {
            owed.extend(wanted.extract_if(.., |record| record.position > position));
        }
        self.owed += owed.len() as u64;
        if let Some(inbox) = &context.bus.shared().engine.inbox
            && self.absorbs
            && !wanted.is_empty()
        {
            let asked = wanted.into_iter().cloned().collect();
            let handled = inbox.handled(self.group.clone(), asked).await?;
            self.absorbed += handled.into_iter().filter(|handled| *handled).count() as u64;
        }
        Ok(())
    }

    /// The handlers that would run, now that the types are known.
    fn name_handlers(&mut self, types: &BTreeMap<String, u64>) {
        let runs = |pattern: &Pattern| types.keys().any(|name| pattern.matches(name));
        let running = self.all_handlers.iter().filter(|(p, _)| runs(p));
        self.handlers = running.map(|(_, name)| name.clone()).collect();
    }
}

pub(super) async fn preview<T: Target>(mut replay: Replay, mut target: T) -> Result<ReplayPreview> {
    let context = replay.context();
    let Replay {
        selection, filter, ..
    } = replay;
    let engine = &context.bus.shared().engine;
    let mut groups = target.groups(&context).await?;
    let bounds = source::bounds(engine, &selection).await?;
    let mut source = Source::open(engine, &selection, bounds)?;
    let mut preview = ReplayPreview::default();
    let mut types: BTreeMap<Arc<str>, u64> = BTreeMap::new();
    while let Some(mut batch) = source.next().await? {
        if context.stop.is_set() {
            break;
        }
        let read = batch.events.len();
        if let Some(filter) = &filter {
            batch.events.retain(|record| filter(record));
        }
        preview.filtered += (read - batch.events.len()) as u64;
        preview.events += batch.events.len() as u64;
        for record in &batch.events {
            *types.entry(record.event.type_arc().clone()).or_default() += 1;
            preview.first.get_or_insert(record.received_at);
            preview.last = Some(record.received_at);
        }
        for group in &mut groups {
            group.look(&context, &batch.events).await?;
        }
    }
    preview.types = types
        .into_iter()
        .map(|(name, count)| (name.to_string(), count))
        .collect();
    for group in &mut groups {
        group.name_handlers(&preview.types);
    }
    // A group that is named is shown, also if it would get nothing.
    let all = groups.len() == 1;
    groups.retain(|group| all || group.events > 0);
    preview.groups = groups;
    Ok(preview)
}
