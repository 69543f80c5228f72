//! The state of every group, and how far it is behind.

use std::collections::BTreeMap;
use std::sync::Arc;

use everbus_core::{Cursor, GroupInfo, Lag, Result, Timestamp};

use crate::broker::Memory;
use crate::groups::{Group, RowState};
use crate::records::Records;

impl Memory {
    pub(crate) fn inspect_groups(&self) -> Result<Vec<GroupInfo>> {
        let mut state = self.open_state()?;
        let now = self.now();
        state.end_leases(now);
        let groups = state
            .names
            .values()
            .filter_map(|number| state.groups.get(number));
        let infos = groups.map(|group| {
            let dead_letters = state.dead.open_by_type(&group.name);
            describe(group, &state.records, dead_letters, now)
        });
        Ok(infos.collect())
    }
}

fn describe(
    group: &Group,
    records: &Records,
    dead_letters: BTreeMap<Arc<str>, u64>,
    now: Timestamp,
) -> GroupInfo {
    let mut types: BTreeMap<Arc<str>, Lag> = BTreeMap::new();
    for row in group.rows.values() {
        let lag = types
            .entry(row.record.event.type_arc().clone())
            .or_default();
        match row.state {
            RowState::InFlight { .. } => lag.in_flight += 1,
            _ => lag.waiting += 1,
        }
        lag.unhandled += u64::from(group.is_unhandled(row));
        lag.note_oldest(row.record.received_at);
    }
    let beyond = records.after(group.cursor);
    for record in beyond.filter(|record| group.awaits(record)) {
        let lag = types.entry(record.event.type_arc().clone()).or_default();
        lag.behind += 1;
        lag.note_oldest(record.received_at);
    }
    for (event_type, count) in dead_letters {
        types.entry(event_type).or_default().dead_letters = count;
    }
    let mut subscriptions = group.subscriptions.clone();
    subscriptions.sort_by(|a, b| a.name.cmp(&b.name));
    let mut info = GroupInfo::new(group.name.clone(), group.active_at);
    info.ordered = group.ordered;
    info.ephemeral = group.ephemeral;
    let patterns = group.subscriptions.iter().map(|s| s.pattern.as_str());
    info.patterns = patterns.map(str::to_owned).collect();
    info.subscriptions = subscriptions;
    info.position = Cursor::seq(group.cursor);
    info.with_types(types, now)
}
