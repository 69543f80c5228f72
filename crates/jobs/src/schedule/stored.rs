//! Schedules in the store (`everbus schedule add`). Every process with a scheduler can run them.

use std::collections::BTreeMap;
use std::time::Duration;

use everbus::{Bus, Code, Error, EventBuilder, Kv, Result, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{CronTimes, Missed, SCHEDULE};
use crate::events::Json;

/// The key-value bucket of the schedules.
const BUCKET: &str = "everbus-schedules";
/// All schedules are one value: there are few, and a reader gets a consistent list.
const KEY: &str = "all";
/// How often a change is tried when other processes change the value at the same time.
const TRIES: usize = 8;

/// The name of the health check, which servers and `everbus schedule run` run beside the stored schedules.
pub const HEALTH_CHECK: &str = "health-check";

type All = BTreeMap<String, StoredSchedule>;

/// The type of the event that reports that a schedule was added, changed or removed.
pub const CHANGED_TYPE: &str = "schedule.changed";

/// What a stored schedule does at each tick.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Action {
    /// Submits a task. The tick is skipped while the task of an earlier tick has not ended.
    Task {
        /// The name of the work.
        name: String,
        /// The input.
        #[serde(default)]
        input: Json,
    },
    /// Publishes an event.
    Event {
        /// Its type.
        #[serde(rename = "type")]
        event_type: String,
        /// Its payload.
        #[serde(default = "Json::null")]
        payload: Json,
    },
}

/// A stored schedule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StoredSchedule {
    /// Its name: letters, digits, `-` and `_`.
    pub name: String,
    /// The cron expression.
    pub cron: String,
    /// The time zone.
    pub timezone: String,
    /// What it does.
    pub action: Action,
    /// How long a run may take. `None`: a minute less than the interval, or 90 % of an interval under 10 minutes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// What happens to missed ticks.
    #[serde(default)]
    pub missed: Missed,
    /// Whether the schedule is paused. A paused schedule runs no ticks.
    #[serde(default)]
    pub paused: bool,
    /// The tenant of the events that the schedule publishes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// Ticks up to this time do not run, also not as missed ticks.
    pub since: Timestamp,
}

impl StoredSchedule {
    /// Its ticks.
    pub fn times(&self) -> Result<CronTimes> {
        CronTimes::new(&self.cron, &self.timezone)
    }

    /// The time limit of a run, if one is set.
    pub fn timeout(&self) -> Option<Duration> {
        self.timeout_ms.map(Duration::from_millis)
    }

    /// Refuses a schedule that no scheduler can run.
    pub fn check(&self, now: Timestamp) -> Result<()> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        if self.name.is_empty() || self.name.len() > 100 || !self.name.chars().all(plain) {
            let what = format!("{:?} is not the name of a schedule", self.name);
            return Err(
                Error::new(Code::InvalidSetting, what).hint("1 to 100 letters, digits, - and _")
            );
        }
        if self.name == HEALTH_CHECK {
            let what =
                format!("{HEALTH_CHECK} is the name of a schedule of `everbus schedule run`");
            return Err(Error::new(Code::InvalidSetting, what)
                .hint("choose another name: schedules of one name share their ticks"));
        }
        let times = self.times()?;
        let Some(next) = times.next_after(now) else {
            let what = format!("{:?} never comes", self.cron);
            return Err(Error::new(Code::InvalidSetting, what));
        };
        let interval = times.interval(next);
        if let (Some(timeout), Some(interval)) = (self.timeout(), interval)
            && (timeout.is_zero() || timeout >= interval)
        {
            let what = format!("the timeout {timeout:?} is not below the interval {interval:?}");
            return Err(Error::new(Code::InvalidSetting, what)
                .hint("a run must end before the next one begins; leave the timeout out to have one chosen"));
        }
        if let Action::Event { event_type, .. } = &self.action {
            everbus::Event::builder(event_type.as_str()).build()?;
        }
        Ok(())
    }
}

/// The schedules in the store of a bus.
#[derive(Clone, Debug)]
pub struct Schedules {
    bus: Bus,
    kv: Kv,
}

impl Schedules {
    /// The schedules of a bus. Fails with `Unsupported` if the engine has no key-value store.
    pub fn of(bus: &Bus) -> Result<Self> {
        Ok(Self {
            kv: bus.kv(BUCKET)?,
            bus: bus.clone(),
        })
    }

    /// Adds or replaces a schedule. Returns whether it is new.
    pub async fn put(&self, schedule: &StoredSchedule) -> Result<bool> {
        let known = self.get(&schedule.name).await?.is_some();
        // The event comes first, so that every schedule that runs is in the history.
        self.announce(schedule, if known { "changed" } else { "added" })
            .await?;
        self.change(|all| {
            all.insert(schedule.name.clone(), schedule.clone());
        })
        .await?;
        Ok(!known)
    }

    /// One schedule.
    pub async fn get(&self, name: &str) -> Result<Option<StoredSchedule>> {
        Ok(self.read().await?.0.remove(name))
    }

    /// Removes a schedule, and returns whether it was there.
    pub async fn remove(&self, name: &str) -> Result<bool> {
        let Some(schedule) = self.get(name).await? else {
            return Ok(false);
        };
        self.announce(&schedule, "removed").await?;
        self.change(|all| {
            all.remove(name);
        })
        .await?;
        Ok(true)
    }

    /// All schedules, by name.
    pub async fn list(&self) -> Result<Vec<StoredSchedule>> {
        Ok(self.read().await?.0.into_values().collect())
    }

    async fn read(&self) -> Result<(All, u64)> {
        let found = self.kv.get_json(KEY).await?;
        Ok(found.unwrap_or((All::new(), everbus::core::ABSENT)))
    }

    async fn change(&self, change: impl Fn(&mut All)) -> Result<()> {
        for _ in 0..TRIES {
            let (mut all, revision) = self.read().await?;
            change(&mut all);
            match self.kv.put_json(KEY, &all).expected(revision).await {
                Err(error) if error.code() == Code::RevisionConflict => {}
                put => return put.map(drop),
            }
        }
        Err(Error::new(Code::Busy, "the schedules change all the time"))
    }

    async fn announce(&self, schedule: &StoredSchedule, change: &str) -> Result<()> {
        let mut payload = serde_json::to_value(schedule).unwrap_or(Value::Null);
        payload["change"] = json!(change);
        let event = event_about(schedule, CHANGED_TYPE).json(&payload);
        self.bus.publish(event).await.map(drop)
    }
}

/// An event about a schedule.
fn event_about(schedule: &StoredSchedule, event_type: &str) -> EventBuilder {
    let event = everbus::Event::builder(event_type).entity(SCHEDULE, schedule.name.as_str());
    match &schedule.tenant {
        Some(tenant) => event.tenant(tenant.as_str()),
        None => event,
    }
}
