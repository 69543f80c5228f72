//! Events that no process has a handler for: after a long time they become dead letters.
//!
//! Each engine publishes the patterns that its consumers handle. A stream that a group wants and no living engine
//! handles is watched. If the group makes no progress in the stream for long enough, the events are given up.

use std::sync::Arc;
use std::time::{Duration, Instant};

use everbus_core::{Failure, FailureKind, GroupName, Pattern, Result, Settlement, Verdict};

use crate::broker::Shared;
use crate::client::{Arguments, Read as _};
use crate::consumer::Inner;
use crate::registry::Registry;
use crate::scripts::ORPHANS;

/// A longer time means that events are never given up.
const NEVER: Duration = Duration::from_secs(3650 * 24 * 3600);

impl Shared {
    /// Publishes the patterns that the consumers of this engine handle.
    pub(crate) async fn tell_handlers(&self) -> Result<()> {
        let groups: Vec<_> = self.groups.lock().values().cloned().collect();
        for group in groups {
            let mut handled: Vec<String> = Vec::new();
            for consumer in group.consumers.lock().iter() {
                let patterns = consumer.upgrade().and_then(|consumer| consumer.handled());
                let patterns = patterns.iter().flat_map(|patterns| patterns.iter());
                handled.extend(patterns.map(|pattern| pattern.as_str().to_owned()));
            }
            handled.sort();
            handled.dedup();
            let name = self.space.own(&format!("handlers:{}", group.name.as_str()));
            let mut tell = match handled.is_empty() {
                true => redis::cmd("HDEL"),
                false => redis::cmd("HSET"),
            };
            tell.arg(name).arg(&self.owner);
            if !handled.is_empty() {
                tell.arg(serde_json::to_string(&handled).unwrap_or_default());
            }
            self.link.ask(&tell).await?;
        }
        Ok(())
    }

    /// The patterns that living engines handle in a group. With `tidy`, the patterns of dead engines are removed;
    /// without it, nothing is written.
    pub(crate) async fn handled_by_all(
        &self,
        group: &GroupName,
        tidy: bool,
    ) -> Result<Vec<Pattern>> {
        let name = self.space.own(&format!("handlers:{}", group.as_str()));
        let mut all = redis::cmd("HGETALL");
        let mut flat = self.link.ask(all.arg(&name)).await?.list()?.into_iter();
        let mut patterns = Vec::new();
        while let (Some(owner), Some(json)) = (flat.next(), flat.next()) {
            let owner = owner.text()?;
            if !self.is_alive(&owner).await? {
                if !tidy {
                    continue;
                }
                let mut gone = redis::cmd("HDEL");
                self.link.ask(gone.arg(&name).arg(&owner)).await?;
                continue;
            }
            let texts: Vec<String> = serde_json::from_str(&json.text()?).unwrap_or_default();
            patterns.extend(texts.iter().filter_map(|text| Pattern::new(text).ok()));
        }
        Ok(patterns)
    }
}

impl Inner {
    /// Dead-letters events that no process has handled for too long.
    pub(crate) async fn bury_orphans(
        self: &Arc<Self>,
        registry: &Registry,
        wanted: &[Pattern],
        handled: &[Pattern],
        tag: &str,
    ) -> Result<()> {
        let (shared, after) = (&self.shared, self.no_handler_after);
        if after > NEVER {
            return Ok(());
        }
        let space = &shared.space;
        let mut keys: Vec<&String> = registry.streams.keys().collect();
        keys.retain(|key| space.wanted(key, wanted) && !space.wanted(key, handled));
        if keys.is_empty() {
            return Ok(());
        }
        let others = shared.handled_by_all(&self.group.name, true).await?;
        keys.retain(|key| !space.wanted(key, &others));
        let mut arguments = Arguments::default();
        arguments
            .text(self.group.name.as_str())
            .text(self.group.on_server())
            .text(tag)
            .millis(after)
            .millis(self.lease)
            .list(&keys);
        let came = Instant::now();
        let orphans = shared.link.run(&ORPHANS, &arguments).await?.list()?;
        let mut settlements = Vec::with_capacity(orphans.len());
        let mut source = None;
        for value in orphans {
            let (item, _) = self.item(value, registry, &mut source, tag, came)?;
            let delivery = self.deliver(item);
            let event = &delivery.record.event;
            let event_type = event.event_type();
            let matches = wanted.iter().any(|pattern| pattern.matches(event_type));
            if !matches || !event.is_for(&self.group.name) {
                settlements.push(Settlement::new(delivery.lease, Verdict::Ack));
                continue;
            }
            let text = format!("no process had a handler for {event_type} for {after:?}");
            let now = shared.options.clock.now();
            let failure = Failure::new(0, now, FailureKind::NoHandler, text);
            let failure = Some(failure);
            settlements.push(Settlement::new(delivery.lease, Verdict::Dead { failure }));
        }
        if !settlements.is_empty() {
            for answer in shared.settle(settlements).await? {
                if let Err(error) = answer {
                    tracing::warn!(target: "everbus::redis", group = %self.group.name, %error, "an event without a handler could not be dead-lettered");
                }
            }
        }
        Ok(())
    }
}
