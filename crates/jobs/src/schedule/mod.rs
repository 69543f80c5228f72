//! Schedules: cron expressions with time zones. Each tick has one attempt, and runs do not overlap.
//!
//! A process takes a tick by a compare-and-set on a [duty](everbus::duty) in the store. So several processes may run
//! the same schedules: each tick runs once, and if a process dies during a run, another process takes the next tick.
//! The events of a schedule have ids derived from the schedule and the tick. So even if a process stops for a while and
//! another one takes over, an event is stored once.
//!
//! Each run ends in an event `schedule.ran`; each change of a stored schedule is an event `schedule.changed`.

mod cron;
mod run;
mod stored;

pub use cron::CronTimes;
pub(crate) use run::once;
pub use run::{RUN_TYPE, ScheduleRan, Scheduler, Tick};
pub use stored::{Action, CHANGED_TYPE, HEALTH_CHECK, Schedules, StoredSchedule};

use serde::{Deserialize, Serialize};

/// The entity type of schedules.
pub const SCHEDULE: &str = "SCHEDULE";

/// What happens to ticks at which no scheduler ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Missed {
    /// Missed ticks are skipped: a tick runs only if it is at most a minute late.
    #[default]
    Skip,
    /// The newest missed tick runs, however late it is.
    Once,
    /// All missed ticks run, one after another; at most the newest hundred.
    All,
}
