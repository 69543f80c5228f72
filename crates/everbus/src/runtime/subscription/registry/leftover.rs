//! Leftovers: durable subscriptions of a group that no handler of this bus takes.
//!
//! Subscriptions are durable, so they outlive the handler they were made for. If no other process has the
//! handler either, the events of a leftover wait; in an ordered group all later events of the same key wait
//! too.

use std::collections::BTreeSet;

use everbus_core::{Code, GroupName, Result, SubscriptionInfo};

use super::Registry;
use crate::handler::SubscriptionId;
use crate::runtime::bus::Shared;

impl Registry {
    /// Removes the leftovers of groups whose router is declared to be complete (`Router::exactly`).
    pub(super) async fn retract_leftovers(
        &mut self,
        shared: &Shared,
        exact: &BTreeSet<GroupName>,
    ) -> Result<()> {
        for name in exact {
            for leftover in self.leftovers(name) {
                match shared.engine.broker.retract(leftover.id).await {
                    // Another process removed it first.
                    Err(error) if error.code() == Code::SubscriptionNotFound => {}
                    retracted => retracted?,
                }
                tracing::info!(
                    target: "everbus::router",
                    group = %name,
                    pattern = leftover.pattern.as_str(),
                    subscription = leftover.name,
                    "unsubscribed: the router is the whole of its group"
                );
                if let Some(all) = self.subscribed.get_mut(name) {
                    all.retain(|s| s.id != leftover.id);
                }
            }
        }
        Ok(())
    }

    /// Logs the leftovers of groups, with what to do.
    pub(crate) fn report_leftovers<'a>(&self, groups: impl IntoIterator<Item = &'a GroupName>) {
        for name in groups {
            for leftover in self.leftovers(name) {
                let pattern = leftover.pattern.as_str();
                tracing::warn!(
                    target: "everbus::router",
                    group = %name,
                    pattern,
                    subscription = leftover.name,
                    "the group is subscribed to {pattern} and no handler of this program takes it: these \
                     events wait for one. If there is none any more, `everbus groups unsubscribe '{name}' \
                     '{pattern}'`, or mount the router with Router::exactly",
                );
            }
        }
    }

    fn leftovers(&self, group: &GroupName) -> Vec<SubscriptionInfo> {
        let is_handled = |s: &SubscriptionInfo| {
            let mut handlers = self.handlers(group).iter();
            handlers.any(|handler| handler.id == SubscriptionId::from(s.id))
        };
        let all = self.subscribed.get(group).into_iter().flatten();
        all.filter(|s| !is_handled(s)).cloned().collect()
    }
}
