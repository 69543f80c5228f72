//! Repairs consumers that lost filters.
//!
//! The server has no compare-and-set for consumers. If one process reads a consumer, another process widens it, and
//! then the first one writes it, the new filters are lost. The first process puts them back, unless it dies before
//! that. Then the consumer is created again from an earlier sequence: the events that it skipped are delivered, and
//! some other events are repeated.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Cursor, Pattern, Result};

use crate::broker::Shared;
use crate::declare::{TRIES, busy, filters_of};
use crate::groups::{self, Group, Record, Subscription};
use crate::names;
use crate::streams::StreamHandle;

/// A process that has stored its subscriptions widens the consumers within this time.
const SETTLE: Duration = Duration::from_secs(1);
/// The filters of a younger subscription may be missing since it was added. Those of an older one were there before:
/// they were lost just now, by a change that Everbus did not make.
const YOUNG: Duration = Duration::from_secs(600);

impl Shared {
    /// Creates consumers again that lack filters of the group's record.
    pub(crate) async fn repair(&self, group: &Arc<Group>) -> Result<()> {
        if self.lost(group).await?.is_empty() {
            return Ok(());
        }
        tokio::time::sleep(SETTLE).await;
        for _ in 0..TRIES {
            if self.reload(group).await?.is_none() {
                return Ok(());
            }
            let lost = self.lost(group).await?;
            if lost.is_empty() {
                return Ok(());
            }
            let known = groups::load(&self.link, &self.space, &group.encoded).await?;
            let Some((mut record, revision)) = known else {
                return Ok(());
            };
            // The record is stored first: a reader that finds its consumer gone creates it from the record.
            record.starts.extend(lost.clone());
            let saved =
                groups::save(&self.link, &self.space, &group.encoded, &record, revision).await?;
            let Some(saved) = saved else {
                continue;
            };
            for (stream, start) in &lost {
                tracing::warn!(target: "everbus::nats", group = %group.name, stream, start, "a consumer lost filters of its group: it is created again, and events are repeated");
                self.link.delete_consumer(stream, &group.encoded).await?;
            }
            group.update(record, saved)?;
            return self.consumed(group, None).await.map(drop);
        }
        Err(busy(&group.name))
    }

    /// The streams whose consumers lack filters, each with the sequence to begin with again.
    async fn lost(&self, group: &Group) -> Result<BTreeMap<String, u64>> {
        let record = group.record();
        let mut lost = BTreeMap::new();
        for name in record.starts.keys() {
            let Some(stream) = self.stream_named(name).await? else {
                continue;
            };
            let Some(info) = self.link.consumer(name, &group.encoded).await? else {
                continue;
            };
            let Some(there) = filters_of(&info.config) else {
                continue;
            };
            let missing = missing(&stream, &record, &there)?;
            if missing.is_empty() {
                continue;
            }
            let mut start = info.ack_floor.stream_seq + 1;
            let now = self.options.clock.now();
            for subscription in missing {
                if now.since(subscription.created_at) < YOUNG {
                    let after: Cursor = subscription.after.parse()?;
                    start = start.min(after.place(stream.shard) + 1);
                }
            }
            lost.insert(name.clone(), start);
        }
        Ok(lost)
    }
}

/// The subscriptions with events that a consumer with these filters does not get.
fn missing<'a>(
    stream: &StreamHandle,
    record: &'a Record,
    there: &[String],
) -> Result<Vec<&'a Subscription>> {
    let mut missing = Vec::new();
    for subscription in &record.subscriptions {
        let pattern = Pattern::new(&subscription.pattern)?;
        let wanted = stream.filters(&[pattern]);
        let has = |filter: &String| there.iter().any(|known| names::covers(known, filter));
        if !wanted.is_some_and(|wanted| wanted.iter().all(has)) {
            missing.push(subscription);
        }
    }
    Ok(missing)
}
