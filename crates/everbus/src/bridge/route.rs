//! The route of a bridge: its group at the source, and the events that came from the target and must not go back.
//!
//! The subscription of a bridge has a unique id. If the target has a subscription with this id, both ends are the same
//! log. An event carries the ids of its bridges as marks, which show the logs that the event has been in.

use std::collections::HashMap;
use std::sync::Arc;

use everbus_core::{
    Code, Error, Event, EventId, GroupInfo, GroupName, GroupSpec, Pattern, Result, SubscriptionSpec,
};
use parking_lot::Mutex;

use super::{BRIDGE, Bridge, same_log};

/// The prefix of the names of a bridge's subscriptions.
const NAMED: &str = "bridge of ";

/// A group that is ready to be consumed.
pub(super) struct Route {
    pub(super) patterns: Vec<Pattern>,
    /// The mark of events that this bridge carries.
    pub(super) mark: EventId,
}

/// For each mark, whether it is that of a bridge that reads the target.
pub(super) type Homes = Mutex<HashMap<EventId, bool>>;

pub(super) fn default_group() -> GroupName {
    match GroupName::new(BRIDGE) {
        Ok(name) => name,
        Err(_) => GroupName::unnamed(),
    }
}

impl Bridge {
    /// Declares the group at the source. Refuses a route that cannot work.
    pub(super) async fn route(&self) -> Result<Route> {
        let (from, to) = (&self.from.engine().broker, &self.to.engine().broker);
        if Arc::ptr_eq(from, to) {
            return Err(same_log());
        }
        self.from.shared().declare_streams().await?;
        self.to.shared().declare_streams().await?;
        let known = self.info().await?;
        if let Some(info) = &known
            && let Some(handed_over) = self.takes_over(info)?
        {
            self.check_apart(handed_over.mark, false).await?;
            return Ok(handed_over);
        }
        let patterns = match &self.patterns {
            Some(patterns) => patterns.clone(),
            None => vec![Pattern::new("*")?],
        };
        let subscriptions: Vec<SubscriptionSpec> = patterns
            .iter()
            .map(|pattern| SubscriptionSpec {
                name: format!("{NAMED}{} to {}", pattern.as_str(), self.target),
                pattern: pattern.clone(),
            })
            .collect();
        if let Some(info) = &known {
            self.check_same(info, &subscriptions)?;
        }
        let spec = GroupSpec {
            name: self.group.clone(),
            start_from: self.start_from,
            ordered: self.ordered,
            ephemeral: false,
            subscriptions,
        };
        let declared = from.declare(spec).await?;
        let mark = declared.first().map(|subscription| subscription.id);
        let mark = mark.ok_or_else(|| self.no_patterns())?;
        self.check_apart(mark, known.is_none()).await?;
        Ok(Route { patterns, mark })
    }

    /// The route through an existing group of consumers, with the patterns of the group. `None` if a bridge created the
    /// group.
    fn takes_over(&self, info: &GroupInfo) -> Result<Option<Route>> {
        let is_bridge = |name: &str| name.starts_with(NAMED);
        if info.subscriptions.iter().any(|s| is_bridge(&s.name)) {
            return Ok(None);
        }
        let Some(first) = info.subscriptions.first() else {
            return Ok(None);
        };
        if info.ephemeral {
            let what = format!("{} is an ephemeral group", self.group);
            return Err(Error::new(Code::GroupConflict, what)
                .hint("a bridge needs a group that outlives its process"));
        }
        if self.patterns.is_some() {
            let what = format!("{} has patterns of its own", self.group);
            return Err(Error::new(Code::InvalidSetting, what).hint(
                "leave the patterns out to carry what it has not handled, or name a new group",
            ));
        }
        Ok(Some(Route {
            mark: first.id,
            patterns: info
                .subscriptions
                .iter()
                .map(|s| s.pattern.clone())
                .collect(),
        }))
    }

    /// Refuses to continue the group of a bridge that goes elsewhere, or carries something else.
    fn check_same(&self, info: &GroupInfo, wanted: &[SubscriptionSpec]) -> Result<()> {
        let known = |name: &str| wanted.iter().any(|spec| spec.name == name);
        let bridges = info.subscriptions.iter();
        let bridges = bridges.filter(|s| s.name.starts_with(NAMED));
        let same = bridges.clone().all(|s| known(&s.name));
        if same && (bridges.count() == wanted.len() || info.subscriptions.is_empty()) {
            return Ok(());
        }
        let names: Vec<&str> = info.subscriptions.iter().map(|s| s.name.as_str()).collect();
        let what = format!(
            "the group {} is that of another bridge: {}",
            self.group,
            names.join(", ")
        );
        Err(Error::new(Code::GroupConflict, what)
            .hint("name another group for this one, or run it with the same target and patterns"))
    }

    fn no_patterns(&self) -> Error {
        let what = format!("the bridge of {} has no patterns", self.group);
        Error::new(Code::InvalidSetting, what).hint("leave them out to carry every event")
    }

    /// Refuses source and target that are the same log: the target has the subscription that was declared at the
    /// source.
    async fn check_apart(&self, mark: EventId, new: bool) -> Result<()> {
        self.learn_homes(&[mark]).await?;
        if !self.homes.lock().remove(&mark).unwrap_or(false) {
            return Ok(());
        }
        if new {
            let _ = self
                .from
                .engine()
                .broker
                .remove_group(self.group.clone())
                .await;
        }
        Err(same_log())
    }

    /// Whether the event has been in the target's log.
    pub(super) async fn came_from_target(&self, event: &Event) -> Result<bool> {
        let marks = match event.attributes() {
            Some(attributes) if !attributes.bridged.is_empty() => &attributes.bridged,
            _ => return Ok(false),
        };
        let unknown = {
            let homes = self.homes.lock();
            marks.iter().any(|mark| !homes.contains_key(mark))
        };
        if unknown {
            self.learn_homes(marks).await?;
        }
        let homes = self.homes.lock();
        Ok(marks.iter().any(|mark| homes.get(mark) == Some(&true)))
    }

    /// Finds out which of these marks are subscriptions of the target. A mark is older than the events that carry it,
    /// so the answer never changes.
    async fn learn_homes(&self, marks: &[EventId]) -> Result<()> {
        let groups = self.to.engine().broker.inspect().await?;
        let ids = groups.iter().flat_map(|group| &group.subscriptions);
        let ids: Vec<EventId> = ids.map(|subscription| subscription.id).collect();
        let mut homes = self.homes.lock();
        for mark in marks {
            homes.insert(*mark, ids.contains(mark));
        }
        Ok(())
    }
}
