//! The settler: sends every outcome there is as one batch, and takes the next when that is durable.
//!
//! While one batch is being committed the next one gathers by itself; there is no timer.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Code, Error, Settlement};
use tokio::time::Instant;

use super::Runner;
use super::queue::Outcomes;
use crate::guard;

const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

impl Runner {
    pub(super) async fn settle_loop(self: Arc<Self>) {
        loop {
            match self.queue.take_outcomes() {
                Outcomes::Send(batch) => self.settle(batch).await,
                Outcomes::Wait => self.queue.outcomes().await,
                Outcomes::End => return,
            }
        }
    }

    /// Settles a batch, again and again as long as the engine is only too busy. A lease that ends
    /// meanwhile is answered as lost.
    async fn settle(&self, mut batch: Arc<Vec<Settlement>>) {
        let mut pause = FIRST_PAUSE;
        loop {
            match self.shared.engine.broker.settle(batch.to_vec()).await {
                Ok(answers) if answers.len() != batch.len() => {
                    let error = Error::new(Code::Internal, "not every outcome was answered");
                    return self.settling_failed(&batch, &error);
                }
                Ok(answers) => {
                    let refused = batch
                        .iter()
                        .zip(answers)
                        .filter_map(|(settlement, answer)| Some((settlement, answer.err()?)));
                    let again: Vec<_> = refused
                        .filter(|(settlement, error)| self.is_worth_repeating(settlement, error))
                        .map(|(settlement, _)| settlement.clone())
                        .collect();
                    if again.is_empty() {
                        return;
                    }
                    batch = Arc::new(again);
                    self.queue.still_sending(batch.clone());
                }
                Err(error) if is_passing(&error) => {}
                Err(error) => return self.settling_failed(&batch, &error),
            }
            let give_up = self.queue.finish_by();
            if give_up.is_some_and(|by| Instant::now() + pause > by) {
                let error = Error::new(Code::Busy, "no time left before the shutdown");
                return self.settling_failed(&batch, &error);
            }
            guard::log(|| {
                tracing::warn!(
                    target: "everbus::dispatch",
                    group = %self.group,
                    outcomes = batch.len(),
                    "the engine is too busy to settle; trying again"
                );
            });
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn is_worth_repeating(&self, settlement: &Settlement, error: &Error) -> bool {
        let (group, seq) = (&self.group, settlement.lease.position);
        if error.code() == Code::LeaseLost {
            self.shared.count_lost_lease();
            guard::log(|| {
                tracing::warn!(target: "everbus::dispatch", %group, seq, "the lease was lost before the outcome was settled; the event is delivered again");
            });
            return false;
        }
        let passing = is_passing(error);
        if !passing {
            self.queue.count_unsettled(std::slice::from_ref(settlement));
            guard::log(|| {
                tracing::error!(target: "everbus::dispatch", %group, seq, %error, "an outcome could not be settled; the event is delivered again");
            });
        }
        passing
    }

    /// Nothing is acked by this: the events are delivered again when their leases end.
    fn settling_failed(&self, batch: &[Settlement], error: &Error) {
        self.queue.count_unsettled(batch);
        self.shared.fail_if_fatal(error);
        let (group, outcomes) = (&self.group, batch.len());
        guard::log(|| {
            tracing::error!(target: "everbus::dispatch", %group, outcomes, %error, "outcomes could not be settled; their events are delivered again");
        });
    }
}

/// Whether the same call may well succeed a little later.
fn is_passing(error: &Error) -> bool {
    matches!(error.code(), Code::Busy | Code::DiskFull)
}
