//! Groups and subscriptions: create, change, remove.

use everbus_core::{
    Code, Cursor, Error, EventId, GroupName, GroupSpec, Pattern, Result, SubscriptionInfo,
    Timestamp,
};

use crate::groups::Group;
use crate::state::State;

impl State {
    pub(crate) fn declare(
        &mut self,
        spec: GroupSpec,
        now: Timestamp,
    ) -> Result<Vec<SubscriptionInfo>> {
        let number = match self.names.get(&spec.name) {
            Some(&number) => {
                let group = &self.groups[&number];
                spec.check_known(group.ordered, group.ephemeral == spec.ephemeral)?;
                number
            }
            None => {
                spec.check_new()?;
                let patterns: Vec<Pattern> = spec
                    .subscriptions
                    .iter()
                    .map(|s| s.pattern.clone())
                    .collect();
                let position = self.records.resolve(spec.start_from, &patterns);
                let head = self.records.head();
                let mut group = Group::new(spec.name.clone(), spec.ordered, position, head, now);
                group.ephemeral = spec.ephemeral;
                let number = self.number();
                self.groups.insert(number, group);
                self.names.insert(spec.name.clone(), number);
                number
            }
        };
        let Some(group) = self.groups.get_mut(&number) else {
            return Err(Error::new(
                Code::Internal,
                "a group has a name and no state",
            ));
        };
        let mut declared = Vec::with_capacity(spec.subscriptions.len());
        for wanted in spec.subscriptions {
            let known = group
                .subscriptions
                .iter_mut()
                .find(|s| s.name == wanted.name);
            let info = match known {
                Some(known) => {
                    known.pattern = wanted.pattern;
                    known.clone()
                }
                None => {
                    let info = SubscriptionInfo {
                        id: EventId::new(),
                        group: spec.name.clone(),
                        name: wanted.name,
                        pattern: wanted.pattern,
                        after: Cursor::seq(group.cursor),
                        created_at: now,
                    };
                    group.subscriptions.push(info.clone());
                    info
                }
            };
            declared.push(info);
        }
        let is_new = |s: &&SubscriptionInfo| declared.iter().all(|info| info.name != s.name);
        let mut others: Vec<_> = group.subscriptions.iter().filter(is_new).cloned().collect();
        others.sort_by(|a, b| a.name.cmp(&b.name));
        declared.append(&mut others);
        // The pattern of a subscription may have become narrower.
        group.skip_unwanted(now);
        Ok(declared)
    }

    pub(crate) fn retract(&mut self, id: EventId, now: Timestamp) -> Result<()> {
        for group in self.groups.values_mut() {
            let before = group.subscriptions.len();
            group.subscriptions.retain(|s| s.id != id);
            if group.subscriptions.len() < before {
                group.skip_unwanted(now);
                return Ok(());
            }
        }
        let what = format!("there is no subscription {id}");
        Err(Error::new(Code::SubscriptionNotFound, what))
    }

    pub(crate) fn remove_group(&mut self, name: &GroupName) -> Result<()> {
        let number = self.group_number(name)?;
        self.names.remove(name);
        self.groups.remove(&number);
        self.dead.remove_group(name);
        self.inbox.remove_group(number);
        self.failed.retain(|(group, _), _| *group != number);
        Ok(())
    }
}
