//! Limits how many deliveries of a consumer may have begun.
//!
//! An engine claims more events than a consumer can run at once. Before an event is handed out, its attempt
//! is made durable, because after a crash it counts. The window keeps this number small: the events that
//! can run at once, and a few more, so that quick handlers do not wait for the engine.

use std::time::{Duration, Instant};

/// Beyond the concurrency, as many events are handed out as are settled in this many steps: an outcome waits for the
/// end of the current step and then for its own step, and some handlers are quicker than others.
const LEAD: f64 = 4.0;

/// If fewer than this many events are settled per step, the wait for a step is negligible compared to the
/// run time of the handlers.
const NEGLIGIBLE: f64 = 0.02;

/// How long the handlers of the first outcomes are assumed to have run, if it is not known when they began.
const FIRST: Duration = Duration::from_millis(250);

/// Limits how many deliveries of a consumer may have begun without being settled.
///
/// ```
/// use std::time::{Duration, Instant};
/// use everbus_core::Window;
///
/// let (step, start) = (Duration::from_millis(1), Instant::now());
/// let mut window = Window::new(Some(1));
/// window.settled(1, start + Duration::from_secs(1), step);
/// window.settled(1, start + Duration::from_secs(2), step);
/// assert_eq!(window.size(), 1, "a second each: nothing is handed out that cannot run");
/// ```
#[derive(Clone, Debug)]
pub struct Window {
    concurrency: Option<usize>,
    /// How many more events than the concurrency may have begun.
    ahead: usize,
    settled_at: Option<Instant>,
    /// How many events were settled recently, and in how many seconds. Each update halves the earlier numbers.
    recent: (f64, f64),
}

impl Window {
    /// A window for a consumer with this concurrency; `None`: the consumer may begin every claimed event.
    pub const fn new(concurrency: Option<usize>) -> Self {
        Self {
            concurrency,
            ahead: 0,
            settled_at: None,
            recent: (0.0, 0.0),
        }
    }

    /// How many deliveries may have begun without being settled.
    pub fn size(&self) -> usize {
        match self.concurrency {
            None => usize::MAX,
            Some(concurrency) => concurrency.max(1).saturating_add(self.ahead),
        }
    }

    /// Records that deliveries were handed out to a consumer that held none. The idle time before does not count as run
    /// time of the handlers.
    pub fn began(&mut self, now: Instant) {
        self.settled_at = Some(now);
    }

    /// Records that `count` deliveries were settled. `step` is how long a step of the engine takes: from an outcome to
    /// the delivery that takes its place.
    pub fn settled(&mut self, count: usize, now: Instant, step: Duration) {
        let before = self.settled_at.replace(now);
        let step = step.max(Duration::from_micros(1));
        let took = before.map_or(FIRST, |at| now.saturating_duration_since(at));
        let took = took.max(step);
        // Several handlers that end together are settled in two transactions, one right after the other. So one
        // interval alone says little about the pace.
        let (settled, seconds) = self.recent;
        let (settled, seconds) = (
            settled / 2.0 + count as f64,
            seconds / 2.0 + took.as_secs_f64(),
        );
        self.recent = (settled, seconds);
        let in_a_step = settled * step.as_secs_f64() / seconds;
        self.ahead = if in_a_step < NEGLIGIBLE {
            0
        } else {
            (LEAD * in_a_step).ceil() as usize
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_millis(1);

    /// Settles `count` events at a time, `times` times, this long apart.
    fn settle(window: &mut Window, at: &mut Instant, count: usize, times: usize, apart: Duration) {
        for _ in 0..times {
            *at += apart;
            window.settled(count, *at, STEP);
        }
    }

    #[test]
    fn slow_handlers_get_what_can_run_and_no_more() {
        let (mut window, mut at) = (Window::new(Some(3)), Instant::now());
        assert_eq!(window.size(), 3);
        settle(&mut window, &mut at, 1, 5, 200 * STEP);
        assert_eq!(window.size(), 3);
    }

    #[test]
    fn the_time_without_events_does_not_make_handlers_slow() {
        let (mut window, mut at) = (Window::new(Some(16)), Instant::now());
        for _ in 0..2 {
            at += Duration::from_secs(3600);
            window.began(at);
            settle(&mut window, &mut at, 16, 1, STEP);
            assert!(window.size() > 32, "{}", window.size());
        }
    }

    // conformance: operations/attempts-bounded: slow handlers that end together are no quick ones
    #[test]
    fn slow_handlers_that_end_together_are_not_taken_for_quick_ones() {
        let (mut window, mut at) = (Window::new(Some(16)), Instant::now());
        for _ in 0..5 {
            // The first outcome goes alone, the others in the next transaction.
            settle(&mut window, &mut at, 1, 1, 1000 * STEP);
            assert!(window.size() <= 17, "{}", window.size());
            settle(&mut window, &mut at, 15, 1, STEP);
            assert!(window.size() <= 17, "{}", window.size());
        }
    }

    #[test]
    fn quick_handlers_never_wait_for_the_engine_for_long() {
        let (mut window, mut at) = (Window::new(Some(1)), Instant::now());
        let mut steps = 0;
        // In each step as many are settled as were handed out.
        while window.size() < 1000 {
            let all = window.size();
            settle(&mut window, &mut at, all, 1, STEP);
            steps += 1;
        }
        assert!(steps <= 15, "{steps} steps");
        // Handlers that take ten steps have the next event ready.
        let (mut window, mut at) = (Window::new(Some(1)), Instant::now());
        settle(&mut window, &mut at, 1, 5, 10 * STEP);
        assert_eq!(window.size(), 2);
    }

    #[test]
    fn handlers_that_become_slow_are_not_handed_more_for_long() {
        let (mut window, mut at) = (Window::new(Some(1)), Instant::now());
        settle(&mut window, &mut at, 250, 12, STEP);
        assert!(window.size() > 900, "{}", window.size());
        settle(&mut window, &mut at, 1, 10, 1000 * STEP);
        assert_eq!(window.size(), 1);
    }

    #[test]
    fn without_a_concurrency_everything_may_begin() {
        let mut window = Window::new(None);
        window.settled(1, Instant::now(), Duration::ZERO);
        assert_eq!(window.size(), usize::MAX);
        assert_eq!(Window::new(Some(0)).size(), 1, "never nothing at all");
    }
}
