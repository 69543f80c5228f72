//! The lease keeper: while this process lives, it keeps what it holds.

use std::sync::Arc;

use everbus_core::Code;

use super::Runner;
use crate::guard;

impl Runner {
    /// Extends every lease the group holds, three times per lease, and at once when the length of
    /// its leases changes. In real time, since it is real work that takes long.
    pub(super) async fn keep_leases(self: Arc<Self>) {
        let mut length = self.lease.subscribe();
        loop {
            let lease = *length.borrow_and_update();
            tokio::select! {
                () = tokio::time::sleep(lease / 3) => {}
                _ = length.changed() => {}
            }
            let lease = *length.borrow_and_update();
            let held = self.queue.held();
            if held.is_empty() {
                continue;
            }
            let group = &self.group;
            match self.shared.engine.broker.extend(held, lease).await {
                Ok(answers) => {
                    // Some were settled since we looked; the others say so when they are settled.
                    let lost = answers.iter().filter(|answer| answer.is_err()).count();
                    if lost > 0 {
                        guard::log(|| {
                            tracing::debug!(target: "everbus::dispatch", %group, lost, "leases not extended");
                        });
                    }
                }
                Err(error) if error.code() == Code::Shutdown => return,
                Err(error) => {
                    self.shared.fail_if_fatal(&error);
                    guard::log(|| {
                        tracing::warn!(target: "everbus::dispatch", %group, %error, "leases could not be extended");
                    });
                }
            }
        }
    }
}
