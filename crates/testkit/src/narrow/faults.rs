//! Faults on demand: which call fails, and how.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use everbus_core::{Code, Error, Result};

/// The number of faults so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Calls that failed and did nothing.
    pub before: u64,
    /// Calls that took effect and then failed.
    pub after: u64,
    /// Events that were stored twice, and deliveries that were handed out twice.
    pub duplicates: u64,
    /// Times a consumer lost its shards.
    pub lost_shards: u64,
}

impl Tally {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.before + self.after + self.duplicates + self.lost_shards
    }
}

/// Random faults. The same seed gives the same decisions in the same order of calls.
#[derive(Clone, Debug, Default)]
pub struct Faults(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    random: u64,
    /// One call in this many has each fault; none if it is zero.
    one_in: u64,
    tally: Tally,
    /// How often each verb was called.
    calls: BTreeMap<String, u64>,
    /// How often each verb failed, and had done nothing.
    failed: BTreeMap<String, u64>,
}

impl Faults {
    /// No faults.
    pub fn none() -> Self {
        Self::default()
    }

    /// About one call in `one_in` has each kind of fault.
    pub fn random(seed: u64, one_in: u64) -> Self {
        let faults = Self::default();
        faults.with(|state| state.random = seed);
        faults.set(one_in);
        faults
    }

    /// From now on about one call in `one_in` has each kind of fault: 1 is every call.
    pub fn set(&self, one_in: u64) {
        self.with(|state| {
            // From zero, the sequence would never leave it.
            state.random = state.random.max(1);
            state.one_in = one_in;
        });
    }

    /// Ends all faults: calls succeed from now on.
    pub fn stop(&self) {
        self.set(0);
    }

    /// The number of faults so far, by kind.
    pub fn tally(&self) -> Tally {
        self.with(|state| state.tally)
    }

    /// How often a verb failed so far, and had done nothing.
    pub fn failed(&self, verb: &str) -> u64 {
        self.with(|state| state.failed.get(verb).copied().unwrap_or_default())
    }

    /// How often a verb was called so far.
    pub fn calls(&self, verb: &str) -> u64 {
        self.with(|state| state.calls.get(verb).copied().unwrap_or_default())
    }

    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn strikes(&self, count: impl FnOnce(&mut Tally)) -> bool {
        self.with(|state| {
            let strikes = state.strikes();
            if strikes {
                count(&mut state.tally);
            }
            strikes
        })
    }

    /// The server cannot be reached: the call did nothing.
    pub(super) fn before(&self, verb: &str) -> Result<()> {
        self.with(|state| *state.calls.entry(verb.to_owned()).or_default() += 1);
        if self.strikes(|tally| tally.before += 1) {
            self.with(|state| *state.failed.entry(verb.to_owned()).or_default() += 1);
            return Err(away(verb));
        }
        Ok(())
    }

    /// The answer was lost: the call took effect.
    pub(super) fn after(&self, verb: &str) -> Result<()> {
        if self.strikes(|tally| tally.after += 1) {
            return Err(away(verb).with_unknown_outcome());
        }
        Ok(())
    }

    pub(super) fn duplicates(&self) -> bool {
        self.strikes(|tally| tally.duplicates += 1)
    }

    pub(super) fn loses_shards(&self) -> bool {
        self.strikes(|tally| tally.lost_shards += 1)
    }
}

impl State {
    /// Xorshift: small, and the same everywhere.
    fn strikes(&mut self) -> bool {
        if self.one_in == 0 {
            return false;
        }
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random.is_multiple_of(self.one_in)
    }
}

fn away(verb: &str) -> Error {
    let what = format!("{verb}: it is away, on purpose");
    Error::new(Code::Unavailable, what)
}
