//! An outage of the engine, as seen by one loop of a group. It is logged once when it begins and once when it ends. The
//! pause between the attempts doubles up to a limit.

use std::time::Duration;

use everbus_core::{Error, GroupName};
use tokio::time::Instant;

use crate::guard;

pub(super) struct Outage {
    /// What the loop does, for the log.
    doing: &'static str,
    group: GroupName,
    first_pause: Duration,
    longest_pause: Duration,
    /// `None` while the engine is available.
    current: Option<Current>,
}

struct Current {
    since: Instant,
    tries: u64,
    pause: Duration,
}

impl Outage {
    /// No outage yet. `doing` names the work of the loop for the log.
    pub(super) fn none(
        group: &GroupName,
        doing: &'static str,
        first_pause: Duration,
        longest_pause: Duration,
    ) -> Self {
        Self {
            doing,
            group: group.clone(),
            first_pause,
            longest_pause,
            current: None,
        }
    }

    pub(super) fn is_on(&self) -> bool {
        self.current.is_some()
    }

    /// Records a failed attempt. Returns how long to wait before the next one.
    pub(super) fn goes_on(&mut self, error: &Error) -> Duration {
        if let Some(current) = &mut self.current {
            current.tries += 1;
            current.pause = (current.pause * 2).min(self.longest_pause);
            return current.pause;
        }
        let (doing, group) = (self.doing, &self.group);
        guard::log(|| {
            tracing::warn!(target: "everbus::dispatch", %group, doing, %error, "the engine is not available; trying again until it is");
        });
        self.current = Some(Current {
            since: Instant::now(),
            tries: 1,
            pause: self.first_pause.min(self.longest_pause),
        });
        self.first_pause.min(self.longest_pause)
    }

    /// Records a success: ends the outage, if there is one.
    pub(super) fn is_over(&mut self) {
        if let Some(Current { since, tries, .. }) = self.current.take() {
            let took_ms = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
            let (doing, group) = (self.doing, &self.group);
            guard::log(|| {
                tracing::info!(target: "everbus::dispatch", %group, doing, took_ms, tries, "the engine is available again");
            });
        }
    }

    /// Ends the outage without a log line. For a loop that gives up and logs the reason itself.
    pub(super) fn forget(&mut self) {
        self.current = None;
    }
}
