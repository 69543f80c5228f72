//! Delivering events again, as one of the operations of a plan.

use everbus_core::{Position, Redelivery};

use super::plan::Plan;
use crate::conformance::Harness;
use crate::conformance::stage::name;

impl<H: Harness> Plan<H> {
    /// Delivers a few events to a group again; some of them do not exist.
    pub(super) async fn redeliver(&mut self) {
        let Some(group) = self.random_group() else {
            return;
        };
        let known: Vec<u64> = self.oracle.log.keys().copied().collect();
        let mut asked = Vec::new();
        for _ in 0..=self.random.below(3) {
            asked.extend(self.random.pick(&known));
        }
        if self.random.one_in(10) {
            asked.push(self.oracle.head + 1);
        }
        self.note(&format!("redeliver {asked:?} to {group:?}"));
        let Ok(redeliver) = self.stage.engine().redeliver() else {
            return;
        };
        let positions = asked.iter().copied().map(Position::seq).collect();
        let answers = redeliver.redeliver(name(group), positions).await.unwrap();
        assert_eq!(answers.len(), asked.len(), "one answer for each");
        for (position, answer) in asked.into_iter().zip(answers) {
            let allowed = self.oracle.may_redeliver(group, position);
            assert!(
                allowed.contains(&answer),
                "{position} of {group:?}: {answer:?}, {allowed:?} expected"
            );
            if answer == Redelivery::Queued {
                self.oracle.redelivered(group, position);
            }
        }
    }
}
