//! Which events were corrected. A corrected event was published instead of a dead letter, for the one group
//! that had failed: it is not for the other groups, and its original is no longer for that group.

use std::collections::HashMap;
use std::sync::Arc;

use everbus_core::{Code, EDIT_OF, EventId, GroupName, Position, REPLAY_OF, Recorded, Result};

use super::report::ReplaySkips;
use super::target::Context;
use crate::compose::RETRY_OF;

/// The corrections that exist when the run begins.
#[derive(Debug, Default)]
pub(super) struct Corrections {
    /// The groups that got a corrected event instead of the one at a position.
    replaced: HashMap<Position, Vec<GroupName>>,
    /// The group of a corrected event.
    sent_to: HashMap<EventId, GroupName>,
    /// The caller selected one event by its id: it always passes.
    all_pass: bool,
}

/// Whether the event is a copy, of a replay or of a retry through a broker.
pub(super) fn is_copy(record: &Recorded) -> bool {
    let metadata = record.event.metadata();
    metadata.contains_key(REPLAY_OF) || metadata.contains_key(RETRY_OF)
}

impl Corrections {
    pub(super) async fn load(context: &Context) -> Result<Self> {
        let mut known = Self {
            all_pass: context.single,
            ..Self::default()
        };
        let Ok(letters) = context.bus.shared().engine.dead_letters() else {
            return Ok(known);
        };
        let replaced = match letters.replaced().await {
            // Then there are no corrections.
            Err(error) if error.code() == Code::Unsupported => return Ok(known),
            replaced => replaced?,
        };
        for letter in replaced {
            let groups = known.replaced.entry(letter.key.position).or_default();
            groups.push(letter.key.group.clone());
            known.sent_to.insert(letter.by, letter.key.group);
        }
        Ok(known)
    }

    /// Removes and counts events that are not for the group; without a group, not for all groups.
    pub(super) fn sort(
        &self,
        group: Option<&GroupName>,
        mut events: Vec<Arc<Recorded>>,
        skips: &mut ReplaySkips,
    ) -> Vec<Arc<Recorded>> {
        if !self.all_pass {
            events.retain(|record| {
                if self.is_replaced(group, record) {
                    skips.replaced += 1;
                    return false;
                }
                let meant = self.is_meant(group, record);
                skips.corrections += u64::from(!meant);
                meant
            });
        }
        events
    }

    fn is_replaced(&self, group: Option<&GroupName>, record: &Recorded) -> bool {
        let groups = self.replaced.get(&record.position);
        groups.is_some_and(|groups| group.is_none_or(|group| groups.contains(group)))
    }

    /// An addressed event, such as a correction, is only for its group. Older files have corrections
    /// without an address, which only their dead letter names: without it, they are for no group. Copies of
    /// corrections and all other events are for all groups.
    fn is_meant(&self, group: Option<&GroupName>, record: &Recorded) -> bool {
        let attributes = record.event.attributes();
        if attributes.is_some_and(|a| a.address.is_some()) {
            return group.is_some_and(|group| record.event.is_for(group));
        }
        if is_copy(record) {
            return true;
        }
        match self.sent_to.get(&record.event.id()) {
            Some(to) => group == Some(to),
            None => !record.event.metadata().contains_key(EDIT_OF),
        }
    }
}
