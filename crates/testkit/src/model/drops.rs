//! Full streams in a plan: their backlog, and what is dropped to make room.

use std::collections::BTreeSet;

use everbus_core::{EventState, Lease, Position};

use super::oracle::LEASE;
use super::plan::Plan;
use crate::conformance::Harness;
use crate::conformance::stage::{name, pattern};

impl<H: Harness> Plan<H> {
    /// A stream's backlog is as the model says; when it is full, the oldest waiting events are dropped, no
    /// more than necessary.
    pub(super) async fn drop_oldest(&mut self) {
        let stream = *self
            .random
            .pick(&["*", "a.*", "a.x", "b.x", "system.>"])
            .unwrap();
        let keep = self.random.below(10) as u64;
        let pattern = pattern(stream);
        let groups: Vec<String> = self.oracle.groups.keys().cloned().collect();
        let owed: Vec<Vec<u64>> = groups
            .iter()
            .map(|group| self.oracle.owed(group, &pattern))
            .collect();
        let deepest = owed.iter().map(Vec::len).max().unwrap_or(0) as u64;
        let broker = self.stage.broker().clone();
        // A dropped consumer gives back its events before the engine answers this.
        let nothing = Lease::new(Position::seq(0), [0, 0]);
        broker.extend(vec![nothing], LEASE).await.unwrap();
        let Some(counted) = self.stage.engine().depth.clone() else {
            return;
        };
        let depth = counted.depth(pattern.clone(), 100_000).await.unwrap();
        assert_eq!(depth, deepest, "the depth of {stream}");
        let few = counted.depth(pattern.clone(), 3).await.unwrap();
        assert_eq!(few, deepest.min(3), "the depth of {stream}, up to 3");
        let count = counted.drop_oldest(pattern, keep).await.unwrap();
        self.note(&format!(
            "drop from {stream}, keep {keep}: {count} of {owed:?}"
        ));
        let mut all = BTreeSet::new();
        for (group, owed) in groups.iter().zip(&owed) {
            let mut gone = Vec::new();
            for position in owed {
                let states = self
                    .stage
                    .lookup()
                    .states(Position::seq(*position))
                    .await
                    .unwrap();
                let of_group = states.iter().find(|s| s.group == name(group)).unwrap();
                if of_group.state == EventState::Done {
                    gone.push(*position);
                }
            }
            let left = (owed.len() - gone.len()) as u64;
            assert!(
                left >= keep.min(owed.len() as u64),
                "{group:?} lost too many: {gone:?}"
            );
            let newest = gone.last().copied().unwrap_or(0);
            for position in &gone {
                if let Err(why) = self.oracle.dropped(group, *position) {
                    panic!("{position} was dropped from {group:?}, but {why}");
                }
                all.insert(*position);
            }
            let desk = &self.oracle.groups[group];
            // Events that a drop released may have been handed out meanwhile.
            let free = desk.deliverable(self.oracle.now);
            let free = |position: &u64| desk.attended && free.contains(position);
            for position in owed.iter().filter(|p| !gone.contains(p)) {
                let waits = desk.owed[position].surely_waits() && !free(position);
                let right = !waits || (left <= keep && *position > newest);
                assert!(right, "{position} stayed in {group:?}, {gone:?} went");
            }
        }
        assert_eq!(count, all.len() as u64, "how many were dropped");
    }
}
