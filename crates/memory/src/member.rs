//! A consumer in its group: what it handles, and how many events it may get.

use std::time::{Duration, Instant};

use everbus_core::{ConsumeOptions, Pattern, Window};

use crate::records::any_matches;

/// The time from an outcome to the next delivery in its place: two tasks have to run.
const STEP: Duration = Duration::from_micros(100);

#[derive(Debug)]
pub(crate) struct Member {
    patterns: Vec<Pattern>,
    in_flight: usize,
    /// How many may be in flight: a delivered event may have begun.
    window: Window,
    /// Settled since the last update of the window.
    settled: usize,
}

impl Member {
    pub(crate) fn new(options: &ConsumeOptions) -> Self {
        Self {
            patterns: options.handled.clone(),
            in_flight: 0,
            window: Window::new(options.concurrency),
            settled: 0,
        }
    }

    pub(crate) fn set_patterns(&mut self, patterns: Vec<Pattern>) {
        self.patterns = patterns;
    }

    pub(crate) fn handles(&self, event_type: &str) -> bool {
        any_matches(&self.patterns, event_type)
    }

    pub(crate) fn took(&mut self) {
        self.in_flight += 1;
    }

    /// Records that an event is no longer in flight.
    pub(crate) fn gave(&mut self) {
        self.in_flight -= 1;
        self.settled += 1;
    }

    /// How many more events it may get.
    pub(crate) fn free(&mut self, prefetch: usize) -> usize {
        if self.settled > 0 {
            self.window.settled(self.settled, Instant::now(), STEP);
            self.settled = 0;
        }
        let most = self.window.size().min(prefetch);
        most.saturating_sub(self.in_flight)
    }
}
