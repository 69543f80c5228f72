//! Periodic duties that several processes share: retention, schedules, health checks. Each is done by one process at
//! a time, and each turn of it once.
//!
//! The record of a duty is a value in the store. It says which turn was last taken, by which process, and until when.
//! It changes only by compare-and-set on its revision, so of several processes one gets a turn. The revision is the
//! *fencing token*: a process that was suspended until its turn had expired cannot finish, extend or release the turn
//! of another process.

use std::time::Duration;

use everbus_core::{Clock, Code, Engine, Error, Result, Timestamp};
use serde::{Deserialize, Serialize};

use crate::kv::Kv;

/// The bucket of the records.
pub const BUCKET: &str = "everbus-duties";

/// Clocks of processes may differ. A record whose time is further ahead than this was written with a wrong clock.
const CLOCK_SET_BACK: Duration = Duration::from_secs(24 * 3600);

/// How many times a record is read again because another process changed it at the same time.
const TRIES: usize = 8;

/// The record of a duty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DutyState {
    /// The turn that was last taken. For a schedule it is the time of the tick.
    pub turn: Timestamp,
    /// The process that took it.
    pub owner: String,
    /// When the turn began.
    pub taken_at: Timestamp,
    /// The process has the duty until this time, unless it finishes earlier.
    pub until: Timestamp,
    /// When the turn was finished.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<Timestamp>,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// When a turn last ended well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub succeeded_at: Option<Timestamp>,
}

impl DutyState {
    /// Whether a process has the duty at this time.
    pub fn is_held(&self, now: Timestamp) -> bool {
        self.finished_at.is_none() && now < self.until
    }
}

/// A duty, from the point of view of one process.
#[derive(Clone, Debug)]
pub struct Duty {
    kv: Kv,
    name: String,
    owner: String,
}

/// The answer to a request for a turn.
#[derive(Debug)]
pub enum Taken {
    /// This process has the turn.
    Yes(Turn),
    /// The turn, or a later one, was taken before.
    Done(DutyState),
    /// Another turn is still under way.
    Busy(DutyState),
}

impl Duty {
    /// A duty by its name, in the store of an engine.
    pub fn of(engine: &Engine, name: impl Into<String>, owner: impl Into<String>) -> Result<Self> {
        let kv = Kv::new(engine.kv()?, BUCKET.to_owned())?;
        Ok(Self::new(kv, name, owner))
    }

    /// A duty by its name. The owner is recorded, so that operators see who has it.
    pub fn new(kv: Kv, name: impl Into<String>, owner: impl Into<String>) -> Self {
        Self {
            kv,
            name: name.into(),
            owner: owner.into(),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The record, if the duty was ever taken.
    pub async fn state(&self) -> Result<Option<DutyState>> {
        Ok(self.read().await?.map(|(state, _)| state))
    }

    /// Takes a turn for a time. Turns only move forward: a turn that is not later than the last turn is
    /// [`Taken::Done`].
    pub async fn take(&self, turn: Timestamp, hold: Duration, clock: &dyn Clock) -> Result<Taken> {
        self.take_if(turn, hold, clock, |_| true).await
    }

    /// As [`take`](Self::take), if the duty is due by its record. The check uses the record that the turn replaces, so
    /// it sees a turn of another process that ended meanwhile.
    pub(crate) async fn take_if(
        &self,
        turn: Timestamp,
        hold: Duration,
        clock: &dyn Clock,
        is_due: impl Fn(&DutyState) -> bool,
    ) -> Result<Taken> {
        for _ in 0..TRIES {
            let now = clock.now();
            let (last, revision) = match self.read().await? {
                Some((state, revision)) => (Some(state), revision),
                None => (None, everbus_core::ABSENT),
            };
            match &last {
                // Written before the clock was set back.
                Some(state) if state.taken_at > now.plus(CLOCK_SET_BACK) => {}
                Some(state) if state.turn >= turn => return Ok(Taken::Done(state.clone())),
                Some(state) if state.is_held(now) => return Ok(Taken::Busy(state.clone())),
                Some(state) if !is_due(state) => return Ok(Taken::Done(state.clone())),
                _ => {}
            }
            let state = DutyState {
                turn,
                owner: self.owner.clone(),
                taken_at: now,
                until: now.plus(hold),
                finished_at: None,
                error: None,
                succeeded_at: last.and_then(|last| last.succeeded_at),
            };
            let put = self.kv.put_json(&self.name, &state).expected(revision);
            match put.await {
                Ok(token) => {
                    let duty = self.clone();
                    return Ok(Taken::Yes(Turn { duty, state, token }));
                }
                Err(error) if error.code() == Code::RevisionConflict => {}
                Err(error) => return Err(error),
            }
        }
        let what = format!(
            "other processes keep changing the record of the duty {:?}",
            self.name
        );
        Err(Error::new(Code::Busy, what))
    }

    async fn read(&self) -> Result<Option<(DutyState, u64)>> {
        self.kv.get_json(&self.name).await
    }
}

/// The last run of a periodic duty, for operators. No decision depends on it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastRun {
    /// The process that ran it.
    pub owner: String,
    /// When it ended.
    pub at: Timestamp,
}

impl LastRun {
    /// The last run, if there was one.
    pub async fn of(engine: &Engine, duty: &str) -> Result<Option<Self>> {
        let kv = Kv::new(engine.kv()?, BUCKET.to_owned())?;
        Ok(kv.get_json(duty).await?.map(|(last, _)| last))
    }

    /// Records a run.
    pub async fn note(&self, engine: &Engine, duty: &str) -> Result<()> {
        let kv = Kv::new(engine.kv()?, BUCKET.to_owned())?;
        kv.put_json(duty, self).await.map(drop)
    }
}

/// A turn that this process has. It ends by [`finish`](Self::finish), or when its time is over.
#[derive(Debug)]
#[must_use = "a turn that is not finished holds the duty until its time is over"]
pub struct Turn {
    duty: Duty,
    state: DutyState,
    token: u64,
}

impl Turn {
    /// The record as this process wrote it.
    pub fn state(&self) -> &DutyState {
        &self.state
    }

    /// The fencing token: it is higher for each later turn of the duty.
    pub fn token(&self) -> u64 {
        self.token
    }

    /// Holds the duty for longer: until this time from now. `LeaseLost` if another process has taken it.
    pub async fn extend(&mut self, hold: Duration, clock: &dyn Clock) -> Result<()> {
        let mut state = self.state.clone();
        state.until = clock.now().plus(hold);
        self.token = self.write(&state).await?;
        self.state = state;
        Ok(())
    }

    /// Ends the turn, with the error if it failed. `LeaseLost` if another process has taken the duty meanwhile.
    pub async fn finish(
        self,
        result: std::result::Result<(), String>,
        clock: &dyn Clock,
    ) -> Result<()> {
        let mut state = self.state.clone();
        state.finished_at = Some(clock.now());
        match result {
            Ok(()) => state.succeeded_at = state.finished_at,
            Err(error) => state.error = Some(error),
        }
        self.write(&state).await.map(drop)
    }

    async fn write(&self, state: &DutyState) -> Result<u64> {
        let Duty { kv, name, .. } = &self.duty;
        let put = kv.put_json(name, state).expected(self.token);
        put.await.map_err(|error| match error.code() {
            Code::RevisionConflict => {
                let what = format!("another process has the duty {name:?} now");
                Error::new(Code::LeaseLost, what).caused_by(error)
            }
            _ => error,
        })
    }
}

#[cfg(test)]
mod tests {
    use everbus_core::ManualClock;

    use super::*;
    use crate::Bus;

    const MINUTE: Duration = Duration::from_secs(60);

    async fn stage() -> (Bus, ManualClock, Kv) {
        let clock = ManualClock::default();
        let bus = Bus::builder()
            .clock(clock.clone())
            .open("memory:")
            .await
            .unwrap();
        let kv = bus.kv(BUCKET).unwrap();
        (bus, clock, kv)
    }

    fn turn(taken: Taken) -> Turn {
        match taken {
            Taken::Yes(turn) => turn,
            other => panic!("not taken: {other:?}"),
        }
    }

    #[tokio::test]
    async fn of_many_processes_one_gets_a_turn() {
        let (_bus, clock, kv) = stage().await;
        let tick = clock.now();
        let asked = (0..20).map(|n| {
            let (kv, clock) = (kv.clone(), clock.clone());
            async move {
                let duty = Duty::new(kv, "health", format!("process {n}"));
                duty.take(tick, MINUTE, &clock).await.unwrap()
            }
        });
        let answers = futures_util::future::join_all(asked).await;
        let taken = answers.iter().filter(|a| matches!(a, Taken::Yes(_)));
        assert_eq!(taken.count(), 1);
        let done = answers.iter().filter(|a| matches!(a, Taken::Done(_)));
        assert_eq!(done.count(), 19);
    }

    #[tokio::test]
    async fn a_turn_is_never_taken_twice_and_turns_do_not_overlap() {
        let (_bus, clock, kv) = stage().await;
        let (a, b) = (Duty::new(kv.clone(), "d", "a"), Duty::new(kv, "d", "b"));
        let first = clock.now();
        let held = turn(a.take(first, MINUTE, &clock).await.unwrap());
        clock.advance(MINUTE / 2);
        let second = clock.now();
        assert!(matches!(
            b.take(second, MINUTE, &clock).await.unwrap(),
            Taken::Busy(_)
        ));
        held.finish(Ok(()), &clock).await.unwrap();
        let state = a.state().await.unwrap().unwrap();
        assert_eq!(
            (state.owner.as_str(), state.succeeded_at),
            ("a", Some(second))
        );
        let held = turn(b.take(second, MINUTE, &clock).await.unwrap());
        held.finish(Err("no luck".into()), &clock).await.unwrap();
        let state = a.state().await.unwrap().unwrap();
        assert_eq!(state.error.as_deref(), Some("no luck"));
        // A failure does not hide when it last worked, and is not tried again.
        assert_eq!(state.succeeded_at, Some(second));
        for turn in [first, second] {
            assert!(matches!(
                a.take(turn, MINUTE, &clock).await.unwrap(),
                Taken::Done(_)
            ));
        }
    }

    // A process that read the record before the turn of another process must see the result of that turn.
    #[tokio::test]
    async fn a_duty_that_is_not_due_any_more_is_left() {
        let (_bus, clock, kv) = stage().await;
        let (a, b) = (Duty::new(kv.clone(), "d", "a"), Duty::new(kv, "d", "b"));
        let held = turn(a.take(clock.now(), MINUTE, &clock).await.unwrap());
        held.finish(Ok(()), &clock).await.unwrap();
        clock.advance(MINUTE);
        let not_done = |state: &DutyState| state.succeeded_at.is_none();
        let later = b.take_if(clock.now(), MINUTE, &clock, not_done).await;
        assert!(matches!(later.unwrap(), Taken::Done(_)));
        assert_eq!(b.state().await.unwrap().unwrap().owner, "a");
    }

    #[tokio::test]
    async fn a_process_that_slept_past_its_turn_changes_nothing() {
        let (_bus, clock, kv) = stage().await;
        let (a, b) = (Duty::new(kv.clone(), "d", "a"), Duty::new(kv, "d", "b"));
        let mut slept = turn(a.take(clock.now(), MINUTE, &clock).await.unwrap());
        let before = slept.token();
        slept.extend(MINUTE, &clock).await.unwrap();
        assert!(slept.token() > before);
        clock.advance(MINUTE);
        let next = turn(b.take(clock.now(), MINUTE, &clock).await.unwrap());
        assert!(next.token() > slept.token());
        let lost = slept.extend(MINUTE, &clock).await.unwrap_err();
        assert_eq!(lost.code(), Code::LeaseLost);
        let lost = slept.finish(Ok(()), &clock).await.unwrap_err();
        assert_eq!(lost.code(), Code::LeaseLost);
        let state = b.state().await.unwrap().unwrap();
        assert_eq!((state.owner.as_str(), state.finished_at), ("b", None));
        next.finish(Ok(()), &clock).await.unwrap();
    }
}
