//! Events whose histories look the same in a small log and in a large one.
//!
//! A page out of 5,000,000 can only be compared with one out of 50,000 if both pages have the same number of events. So
//! there are three kinds of entities. *Busy* ones: a fixed number, with the same density of events in both
//! logs. *Scattered* ones: 120 events each over the whole log, however long it is. *Single* ones: one event
//! each. Five events of six have the type of the queries.

use bytes::Bytes;
use everbus_core::{Event, Result};

const TENANTS: u64 = 20;
const APPS: u64 = 10;
/// One for each app of each tenant.
const BUSY: u64 = TENANTS * APPS;
/// Events of a scattered entity: a hundred are of the type of the queries.
const EACH: u64 = 120;
/// The type of the queries.
const USUAL: &str = "Task Heartbeat";
const OTHERS: [&str; 4] = [
    "Task Pending",
    "Task Processing Started",
    "Task Completed",
    "Task Failed",
];
/// Of ten events, six are of busy entities, three of scattered ones and one of a single one.
const TURN: [Kind; 10] = {
    use Kind::{Busy as B, Scattered as S, Single as I};
    [B, S, B, B, I, B, S, B, B, S]
};

/// From this many events on, every page is full except those of single entities.
pub(crate) const ENOUGH: u64 = 50_000;

/// How often an entity has events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Busy,
    Scattered,
    Single,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Busy => "busy",
            Self::Scattered => "scattered",
            Self::Single => "single",
        }
    }
}

/// The names of an event, or those that a query asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Names {
    pub(crate) event_type: &'static str,
    pub(crate) tenant: String,
    pub(crate) app: String,
    pub(crate) entity: String,
}

/// A log with this many events.
#[derive(Clone, Copy)]
pub(crate) struct Data {
    pub(crate) events: u64,
}

impl Data {
    /// How many entities of a kind there are.
    fn entities(self, kind: Kind) -> u64 {
        match kind {
            Kind::Busy => BUSY,
            Kind::Scattered => (self.events * 3 / 10 / EACH).max(1),
            Kind::Single => (self.events / 10).max(1),
        }
    }

    /// The names of an event of the log.
    pub(crate) fn names(self, n: u64) -> Names {
        let at = usize::try_from(n % 10).unwrap_or(0);
        let kind = TURN[at];
        let of_kind = |turn: &[Kind]| turn.iter().filter(|k| **k == kind).count() as u64;
        // Entities of a kind take turns; each round begins with another one.
        let nth = n / 10 * of_kind(&TURN) + of_kind(&TURN[..at]);
        let entities = self.entities(kind);
        let round = nth / entities;
        let entity = (nth + random(round) % entities) % entities;
        let event_type = match round % 6 {
            5 => OTHERS[usize::try_from(random(n) % 4).unwrap_or(0)],
            _ => USUAL,
        };
        named(kind, entity, event_type)
    }

    /// The names of the nth query: each entity in turn, in a pseudo-random order.
    pub(crate) fn asked(self, kind: Kind, n: u64) -> Names {
        let entities = self.entities(kind);
        let entity = match kind {
            Kind::Busy => n * 61 % entities,
            _ => random(n) % entities,
        };
        named(kind, entity, USUAL)
    }

    pub(crate) fn event(self, n: u64, payload: &Bytes) -> Result<Event> {
        let names = self.names(n);
        Event::builder(names.event_type)
            .payload(payload.clone())
            .tenant(names.tenant)
            .app(names.app)
            .entity("TASK", names.entity)
            .build()
    }
}

fn named(kind: Kind, entity: u64, event_type: &'static str) -> Names {
    Names {
        event_type,
        tenant: format!("tenant-{}", entity % TENANTS),
        app: format!("app-{}", entity / TENANTS % APPS),
        entity: format!("req-{}-{entity}", kind.name()),
    }
}

/// Pseudo-random numbers, the same in every run.
fn random(n: u64) -> u64 {
    let mut x = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn a_page_has_as_many_events_in_a_small_log_as_in_a_large_one() {
        for events in [ENOUGH, 4 * ENOUGH] {
            let data = Data { events };
            let mut usual: HashMap<(String, String, String), u64> = HashMap::new();
            for names in (0..events).map(|n| data.names(n)) {
                if names.event_type == USUAL {
                    *usual
                        .entry((names.tenant, names.app, names.entity))
                        .or_default() += 1;
                }
            }
            for (kind, least, most) in [
                (Kind::Busy, 100, events),
                (Kind::Scattered, 100, 101),
                (Kind::Single, 1, 1),
            ] {
                for n in 0..200 {
                    let names = data.asked(kind, n);
                    let key = (names.tenant, names.app, names.entity);
                    let found = usual.get(&key).copied().unwrap_or(0);
                    assert!((least..=most).contains(&found), "{key:?}: {found}");
                }
            }
        }
    }
}
