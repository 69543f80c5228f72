//! Work at given times: cron expressions with time zones, one attempt per tick, without overlap.
//!
//! A tick is taken under a [duty](everbus::duty) in the store. So several processes may run the same schedules: each
//! tick runs once, and a process that dies during a run is replaced at the next tick. What a schedule publishes has an
//! id derived from the schedule and the tick, so that even a process that slept through its turn publishes it once.
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

/// What happens to ticks that no process was there for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Missed {
    /// They are left out: a tick runs only if it is at most a minute late.
    #[default]
    Skip,
    /// The newest one runs, however late it is.
    Once,
    /// All of them run, one after another, the newest hundred at most.
    All,
}
