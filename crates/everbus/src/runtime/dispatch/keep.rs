//! The lease keeper: extends the leases of a group's deliveries until they are settled.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Class, Code, Lease, Result};
use tokio::time::Instant;

use super::Runner;
use super::outage::Outage;
use crate::environment::watch::Extended;
use crate::guard;

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

impl Runner {
    /// Extends every lease of the group three times per lease duration, and at once when the lease duration
    /// changes. Uses real time, because handlers take real time.
    ///
    /// After an error that may pass it tries again sooner: the outage may end before the leases do.
    pub(super) async fn keep_leases(self: Arc<Self>) {
        let mut length = self.lease.subscribe();
        let doing = "extending leases";
        let mut outage = Outage::none(&self.group, doing, FIRST_PAUSE, LONGEST_PAUSE);
        let mut pause = None;
        loop {
            let lease = *length.borrow_and_update();
            let third = lease / 3;
            tokio::select! {
                () = tokio::time::sleep(pause.take().unwrap_or(third).min(third)) => {}
                _ = length.changed() => {}
            }
            let lease = *length.borrow_and_update();
            match self.extend_held(lease).await {
                Ok(()) => outage.is_over(),
                Err(error) if error.code() == Code::EventBusShutdownError => return,
                Err(error) if error.class().may_repeat() => {
                    pause = Some(outage.goes_on(&error));
                    let over = |since| self.leases_are_over(since);
                    self.shared
                        .environment
                        .watches
                        .lose_those(&self.group, over);
                }
                Err(error) => {
                    self.shared.fail_if_fatal(&error);
                    let group = &self.group;
                    guard::log(|| {
                        tracing::warn!(target: "everbus::dispatch", %group, %error, "leases could not be extended");
                    });
                }
            }
        }
    }

    /// Extends every held lease. Fails if the whole request fails, or if a lease was not extended with an
    /// error that may pass; the caller then extends all held leases again.
    async fn extend_held(&self, lease: Duration) -> Result<()> {
        let held = self.queue.held();
        if held.is_empty() {
            return Ok(());
        }
        let began = Instant::now();
        let watched = self.shared.environment.watches.any().then(|| held.clone());
        let answers = self.shared.engine.broker.extend(held, lease).await?;
        if let Some(held) = watched {
            self.tell_watches(&held, &answers, lease);
        }
        let mut lost = 0;
        for error in answers.into_iter().filter_map(Result::err) {
            match error.class() {
                Class::Passing | Class::Unknown => return Err(error),
                // Either the delivery was settled after `held` was read, or its lease is lost. The settler
                // reports a lost lease.
                _ => lost += 1,
            }
        }
        *self.kept_at.lock() = Some(began);
        if lost > 0 {
            let group = &self.group;
            guard::log(|| {
                tracing::debug!(target: "everbus::dispatch", %group, lost, "leases not extended");
            });
        }
        Ok(())
    }

    /// Tells the handlers that watch their lease whether it was extended or lost. An answer with another
    /// error tells them nothing.
    fn tell_watches(&self, held: &[Lease], answers: &[Result<()>], lease: Duration) {
        let became = |wanted: &Lease| {
            let at = held.iter().position(|lease| lease == wanted)?;
            match answers.get(at)? {
                Ok(()) => Some(Extended::Yes),
                Err(error) if error.code() == Code::LeaseLost => Some(Extended::Lost),
                Err(_) => None,
            }
        };
        // The clock is user code and may panic.
        let until = guard::contain(|| self.shared.options.clock.now().plus(lease));
        if let Ok(until) = until {
            self.shared
                .environment
                .watches
                .tell(&self.group, until, became);
        }
    }

    /// Whether leases that were held at `since` have ended by now, as far as this process knows: since then,
    /// no extension of all leases succeeded within the lease duration.
    pub(super) fn leases_are_over(&self, since: Instant) -> bool {
        let kept_at = self
            .kept_at
            .lock()
            .map_or(since, |kept_at| kept_at.max(since));
        kept_at.elapsed() > *self.lease.borrow()
    }
}
