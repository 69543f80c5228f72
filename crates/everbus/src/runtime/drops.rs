//! Events that a server removes because of their age before a group has received them. The bus publishes an alert
//! before this happens, and an alert with the count after it.
//!
//! Only engines with [`Capabilities::drops_by_age`](everbus_core::Capabilities::drops_by_age) do this.

use std::collections::HashMap;
use std::sync::Arc;

use everbus_core::{Event, EventId, GroupInfo, GroupName, StreamLag};
use parking_lot::Mutex;
use serde_json::json;

use crate::guard;
use crate::runtime::alert;
use crate::runtime::bus::Shared;

/// Published when the oldest event that a group has not settled has reached 80 % of the age at which the server
/// removes it.
pub(crate) const AT_RISK: &str = "system.events_at_risk";
/// Published when the server has removed events that a group had not received.
pub(crate) const DROPPED: &str = "system.events_dropped";
/// Events are at risk from this fraction of the age at which they are removed.
const RISK: f64 = 0.8;

/// What was noted last, by group and stream.
#[derive(Default)]
pub(crate) struct Drops(Mutex<HashMap<(GroupName, Arc<str>), Noted>>);

#[derive(Clone, Copy, Default)]
struct Noted {
    at_risk: bool,
    dropped: u64,
}

impl Drops {
    /// Notes the lag of a group in a stream. Returns whether events are at risk now and were not before, and how
    /// many events were dropped since the last call.
    fn note(&self, group: &GroupName, of: &StreamLag) -> (bool, u64) {
        let mut all = self.0.lock();
        let noted = all.entry((group.clone(), of.stream.clone())).or_default();
        let at_risk = of.age_used().is_some_and(|used| used >= RISK);
        let newly = at_risk && !noted.at_risk;
        let more = of.lag.dropped.saturating_sub(noted.dropped);
        *noted = Noted {
            at_risk,
            dropped: of.lag.dropped,
        };
        (newly, more)
    }
}

/// Reports what is at risk and what was dropped since the last call.
pub(super) fn report(shared: &Arc<Shared>, groups: &[GroupInfo]) {
    if !shared.engine.broker.capabilities().drops_by_age {
        return;
    }
    for group in groups {
        for of in &group.streams {
            let Some(used) = of.age_used() else { continue };
            let (newly_at_risk, dropped) = shared.drops.note(&group.name, of);
            guard::log(|| {
                shared
                    .stats
                    .age_used(&group.name, &of.stream, used, dropped);
            });
            let (group, stream) = (&group.name, &*of.stream);
            if newly_at_risk {
                let behind = of.behind_for;
                guard::log(|| {
                    tracing::error!(target: "everbus::bus", %group, stream, ?behind, max_age = ?of.max_age, "the server removes events of this stream soon, and the group has not handled them");
                });
                alert::publish(shared, at_risk(group, of));
            }
            if dropped > 0 {
                guard::log(|| {
                    tracing::error!(target: "everbus::bus", %group, stream, dropped, "the server removed events by their age before the group got them");
                });
                let what = json!({ "group": group, "stream": stream, "dropped": dropped });
                alert::publish(shared, Event::builder(DROPPED).json(&what));
            }
        }
    }
}

/// The alert [`AT_RISK`]. Its id is derived from the stream, the group and the time of the oldest event, so that
/// the alerts of several processes are one event.
fn at_risk(group: &GroupName, of: &StreamLag) -> everbus_core::EventBuilder {
    let oldest = of.lag.oldest.unwrap_or_default();
    let about = EventId::from_foreign(AT_RISK, &of.stream);
    let id = EventId::derived(about, oldest, group.as_str(), AT_RISK, 0);
    let millis = |d: std::time::Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
    Event::builder(AT_RISK).id(id).json(&json!({
        "group": group,
        "stream": &*of.stream,
        "oldest": oldest.to_string(),
        "behindMs": millis(of.behind_for),
        "maxAgeMs": of.max_age.map(millis),
    }))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use everbus_core::{Lag, Timestamp};

    use super::*;

    #[test]
    fn each_danger_and_each_drop_is_reported_once() {
        let drops = Drops::default();
        let group = GroupName::unnamed();
        let at = |behind: u64, dropped| {
            let mut lag = Lag::new();
            (lag.behind, lag.dropped) = (1, dropped);
            lag.oldest = Some(Timestamp::EPOCH);
            let now = Timestamp::EPOCH.plus(Duration::from_secs(behind));
            let age = Some(Duration::from_secs(100));
            StreamLag::new("S".into(), lag, now).with_max_age(age)
        };
        let note = |behind, dropped| drops.note(&group, &at(behind, dropped));
        assert_eq!(note(79, 0), (false, 0));
        assert_eq!(note(80, 0), (true, 0));
        assert_eq!(note(99, 0), (false, 0));
        assert_eq!(note(100, 3), (false, 3));
        assert_eq!(note(100, 5), (false, 2));
        // The group has moved past the dropped events, and falls behind again.
        assert_eq!(note(10, 0), (false, 0));
        assert_eq!(note(90, 1), (true, 1));
    }
}
