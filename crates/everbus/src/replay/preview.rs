//! What a replay would do.

use std::collections::BTreeMap;
use std::sync::Arc;

use everbus_core::{GroupInfo, GroupName, Pattern, Result, Timestamp};
use serde::Serialize;

use super::Replay;
use super::report::{ReplayReport, ReplaySkips};
use super::source::{self, Source};
use super::target::Target;

/// What a replay would do, in the current state.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ReplayPreview {
    /// Events that would reach the target; a report counts them as
    /// [`processed`](super::ReplayReport::processed) or as errors.
    pub events: u64,
    /// Events that are selected and would be left out; [`skips`](Self::skips) says why.
    pub skipped: u64,
    /// Why events would be left out, counted as a run counts them.
    pub skips: ReplaySkips,
    /// How many events of each type the target would get, including those that its inbox skips.
    pub types: BTreeMap<String, u64>,
    /// When the first of these was received.
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
    /// How many of the events are for it: its patterns match them.
    pub events: u64,
    /// How many of these are still pending in the group, so that it gets them anyway: after its position,
    /// in flight, waiting, or open dead letters.
    pub owed: u64,
    /// How many of these its inbox has as handled: idempotent handlers will not run.
    pub absorbed: u64,
    /// The patterns of its subscriptions.
    pub patterns: Vec<String>,
    /// Its handlers that would run, by the names of their subscriptions.
    pub handlers: Vec<String>,
    #[serde(skip)]
    matches: Vec<Pattern>,
    #[serde(skip)]
    all_handlers: Vec<(Pattern, String)>,
    /// Whether the group gets the events themselves and not copies.
    #[serde(skip)]
    as_they_are: bool,
}

impl PreviewedGroup {
    /// An existing group; `as_they_are` if it gets the events themselves and not copies.
    pub(super) fn live(info: &GroupInfo, as_they_are: bool) -> Result<Self> {
        let matches = info.patterns.iter().map(|text| Pattern::new(text));
        let matches: Result<Vec<Pattern>> = matches.collect();
        let handlers = info.subscriptions.iter().cloned();
        Ok(Self {
            all_handlers: handlers.map(|it| (it.pattern, it.name)).collect(),
            as_they_are,
            ..Self::new(info.name.clone(), matches?)
        })
    }

    /// The fresh group of a replay.
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
            as_they_are: false,
        }
    }

    fn wants(&self, event_type: &str) -> bool {
        self.matches.iter().any(|p| p.matches(event_type))
    }

    /// Computes the counts, once the types are known.
    fn count(&mut self, types: &BTreeMap<String, u64>, skips: &ReplaySkips) {
        let given = types.iter().filter(|(name, _)| self.wants(name));
        self.events = given.map(|(_, count)| count).sum();
        if self.as_they_are {
            (self.owed, self.absorbed) = (skips.owed, skips.absorbed);
            self.events += skips.owed;
        }
        self.name_handlers(types);
    }

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
    let mut report = ReplayReport::default();
    let mut types: BTreeMap<Arc<str>, u64> = BTreeMap::new();
    while let Some(mut batch) = source.next().await? {
        let read = batch.events.len();
        if let Some(filter) = &filter {
            batch.events.retain(|record| filter(record));
        }
        report.skips.filtered += (read - batch.events.len()) as u64;
        for portion in batch.events.chunks(T::PORTION) {
            if context.stop.is_set() {
                break;
            }
            for record in target.look(&context, portion, &mut report).await? {
                *types.entry(record.event.type_arc().clone()).or_default() += 1;
                preview.first.get_or_insert(record.received_at);
                preview.last = Some(record.received_at);
            }
        }
        if context.stop.is_set() {
            break;
        }
    }
    preview.events = report.processed;
    preview.skipped = report.skips.total();
    preview.skips = report.skips;
    preview.types = types
        .into_iter()
        .map(|(name, count)| (name.to_string(), count))
        .collect();
    for group in &mut groups {
        group.count(&preview.types, &preview.skips);
    }
    // A single target group is always shown, even if it would get nothing.
    let all = groups.len() == 1;
    groups.retain(|group| all || group.events > 0);
    preview.groups = groups;
    Ok(preview)
}
