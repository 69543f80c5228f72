//! Compares the breaker with the simplest correct model: a list of attempts.

use everbus_core::ManualClock;
use proptest::prelude::*;

use super::window::BUCKETS;
use super::*;

/// One step of a plan.
#[derive(Clone, Debug)]
enum Step {
    Advance(u64),
    Begin,
    /// Ends one of the running attempts.
    End(usize, Outcome),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Outcome {
    Success,
    Failure,
    None,
}

/// The expected state of the breaker, computed from everything that happened.
struct Oracle {
    policy: BreakerPolicy,
    now: u64,
    /// `None` while closed; the end of the opening otherwise.
    open_until: Option<u64>,
    probing: bool,
    /// The number of attempts begun when it last opened or closed.
    era: usize,
    /// The attempts of this era that have ended: when, and whether they failed.
    ended: Vec<(u64, bool)>,
}

impl Oracle {
    fn half_open(&self) -> bool {
        self.open_until.is_some_and(|until| self.now >= until)
    }

    fn begin(&mut self) -> Result<bool, ()> {
        match self.open_until {
            None => Ok(false),
            Some(_) if self.half_open() && !self.probing => {
                self.probing = true;
                Ok(true)
            }
            Some(_) => Err(()),
        }
    }

    /// The expected change: `Some(true)` for an opening.
    fn end(&mut self, begun_in: usize, probe: bool, outcome: Outcome) -> Option<bool> {
        if begun_in != self.era {
            return None;
        }
        if probe {
            self.probing = false;
        }
        let failed = match outcome {
            Outcome::None => return None,
            Outcome::Success => false,
            Outcome::Failure => true,
        };
        if !probe {
            self.ended.push((self.now, failed));
            if !(failed && self.too_much()) {
                return None;
            }
        }
        self.era += 1;
        self.ended.clear();
        self.open_until = failed.then(|| self.now + micros(self.policy.open_for));
        Some(failed)
    }

    fn too_much(&self) -> bool {
        let step = micros(self.policy.window) / BUCKETS as u64;
        let in_window = |at: u64| self.now / step - at / step < BUCKETS as u64;
        let recent: Vec<bool> = self
            .ended
            .iter()
            .filter(|(at, _)| in_window(*at))
            .map(|(_, failed)| *failed)
            .collect();
        let failures = recent.iter().filter(|failed| **failed).count();
        let row = recent.iter().rev().take_while(|failed| **failed).count();
        let enough = self.policy.fail_max as usize;
        let rate = failures as f64 / recent.len() as f64;
        row >= enough || (failures >= enough && rate >= self.policy.failure_rate)
    }
}

fn micros(duration: Duration) -> u64 {
    duration.as_micros() as u64
}

fn outcome() -> impl Strategy<Value = Outcome> {
    prop_oneof![
        3 => Just(Outcome::Success),
        4 => Just(Outcome::Failure),
        1 => Just(Outcome::None),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        1 => (0u64..3_000_000).prop_map(Step::Advance),
        1 => (0u64..50_000_000).prop_map(Step::Advance),
        6 => Just(Step::Begin),
        6 => (any::<usize>(), outcome()).prop_map(|(which, o)| Step::End(which, o)),
    ]
}

fn policy() -> impl Strategy<Value = BreakerPolicy> {
    (1u32..6, 1u64..40, 1u64..60, 1u32..=10).prop_map(|(fail_max, open, window, rate)| {
        BreakerPolicy::new()
            .fail_max(fail_max)
            .open_for(Duration::from_secs(open))
            .window(Duration::from_secs(window))
            .failure_rate(f64::from(rate) / 10.0)
    })
}

fn end(ticket: Ticket, outcome: Outcome) -> Option<Change> {
    match outcome {
        Outcome::Success => ticket.succeeded(),
        Outcome::Failure => ticket.failed(),
        Outcome::None => ticket.abandon(),
    }
}

proptest! {
    #[test]
    fn the_breaker_does_what_a_list_of_all_attempts_says(
        policy in policy(),
        steps in prop::collection::vec(step(), 1..300),
    ) {
        let clock = ManualClock::new(Timestamp::EPOCH);
        let breaker = Breaker::new("model", policy, Arc::new(clock.clone()));
        let mut oracle = Oracle {
            policy, now: 0, open_until: None, probing: false, era: 0, ended: Vec::new(),
        };
        let mut under_way = Vec::new();
        for step in steps {
            match step {
                Step::Advance(by) => {
                    oracle.now += by;
                    clock.advance(Duration::from_micros(by));
                }
                Step::Begin => {
                    let got = breaker.try_begin();
                    let is_probe = got.as_ref().map(Ticket::is_probe).map_err(|_| ());
                    prop_assert_eq!(is_probe, oracle.begin());
                    match got {
                        Ok(ticket) => under_way.push((oracle.era, ticket)),
                        Err(rejected) => prop_assert!(
                            rejected.retry_in > Duration::ZERO
                                && rejected.retry_in <= policy.open_for
                        ),
                    }
                }
                Step::End(_, _) if under_way.is_empty() => {}
                Step::End(which, outcome) => {
                    let which = which % under_way.len();
                    let (era, ticket) = under_way.swap_remove(which);
                    let expected = oracle.end(era, ticket.is_probe(), outcome);
                    let opened = end(ticket, outcome).map(|c| c != Change::Closed);
                    prop_assert_eq!(opened, expected);
                }
            }
            let expected = match oracle.open_until {
                None => BreakerState::Closed,
                Some(_) if oracle.half_open() => BreakerState::HalfOpen,
                Some(until) => BreakerState::Open {
                    until: Timestamp::EPOCH.plus(Duration::from_micros(until)),
                },
            };
            prop_assert_eq!(breaker.state(), expected);
        }
    }

    #[test]
    fn whatever_the_clock_does_an_attempt_is_let_through_after_open_for(
        policy in policy(),
        steps in prop::collection::vec((step(), -200_000_000i64..200_000_000), 1..200),
    ) {
        let clock = ManualClock::new(Timestamp::EPOCH);
        let breaker = Breaker::new("model", policy, Arc::new(clock.clone()));
        let mut under_way = Vec::new();
        for (step, jump) in steps {
            match step {
                Step::Advance(_) => clock.set(Timestamp::from_micros(
                    clock.now().as_micros().saturating_add(jump),
                )),
                Step::Begin => under_way.extend(breaker.try_begin()),
                Step::End(which, outcome) if !under_way.is_empty() => {
                    let which = which % under_way.len();
                    end(under_way.swap_remove(which), outcome);
                }
                Step::End(..) => {}
            }
        }
        under_way.clear();
        // This call reads the clock; from then on the wait is at most the wait of the policy.
        let wait = breaker.try_begin().err().map(|rejected| rejected.retry_in);
        prop_assert!(wait.is_none_or(|wait| wait <= policy.open_for));
        clock.advance(wait.unwrap_or_default());
        let ticket = breaker.try_begin();
        prop_assert!(ticket.is_ok());
    }
}
