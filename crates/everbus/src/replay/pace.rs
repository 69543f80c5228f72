//! The pace of a replay: its rate, its batch size, and when it stops.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use everbus_core::BoxFuture;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// A batch that took longer than this is followed by a smaller one, so that a run can be stopped and saved
/// often enough.
const SLOW: Duration = Duration::from_millis(500);
/// A batch that was quicker than this is followed by a larger one.
const QUICK: Duration = Duration::from_millis(100);

/// Decides how many events are next, and waits for their time.
pub(super) struct Pace {
    rate: Option<f64>,
    most: usize,
    size: usize,
    began: Instant,
    /// When the next event may go, if there is a rate.
    due: Instant,
}

impl Pace {
    pub(super) fn new(rate: Option<f64>, most: usize) -> Self {
        // Ten batches per second are even enough.
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a rate is between nothing and ten million"
        )]
        let most = rate.map_or(most, |rate| most.min((rate / 10.0) as usize).max(1));
        let now = Instant::now();
        Self {
            rate,
            most,
            size: 1,
            began: now,
            due: now,
        }
    }

    /// How many events may go next.
    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// Waits until this many events may go, or the run is stopped.
    pub(super) async fn begin(&mut self, count: usize, stop: &Stop) {
        if let Some(rate) = self.rate {
            stop.or(tokio::time::sleep_until(self.due)).await;
            // Lost time is not recovered by a faster pace.
            let from = self.due.max(Instant::now() - Duration::from_millis(100));
            #[allow(clippy::cast_precision_loss, reason = "a few thousand")]
            let seconds = count as f64 / rate;
            self.due = from + Duration::from_secs_f64(seconds);
        }
        self.began = Instant::now();
    }

    /// Adapts the batch size to the time that the batch took.
    pub(super) fn end(&mut self) {
        let took = self.began.elapsed();
        if took > SLOW {
            self.size = (self.size / 2).max(1);
        } else if took < QUICK {
            self.size = (self.size * 2).min(self.most);
        }
    }
}

/// Whether the run must end early.
pub(super) struct Stop {
    state: Arc<(AtomicBool, Notify)>,
    watcher: Option<JoinHandle<()>>,
}

impl Stop {
    pub(super) fn on(stop: Option<BoxFuture<'static, ()>>) -> Self {
        let state = Arc::new((AtomicBool::new(false), Notify::new()));
        let watcher = stop.map(|stop| {
            let state = state.clone();
            tokio::spawn(async move {
                stop.await;
                state.0.store(true, Ordering::Release);
                state.1.notify_waiters();
            })
        });
        Self { state, watcher }
    }

    pub(super) fn is_set(&self) -> bool {
        self.state.0.load(Ordering::Acquire)
    }

    /// Waits for the future, or until the run is stopped.
    pub(super) async fn or(&self, something: impl Future<Output = ()>) {
        let mut stopped = std::pin::pin!(self.state.1.notified());
        stopped.as_mut().enable();
        if self.is_set() {
            return;
        }
        tokio::select! {
            () = something => {}
            () = stopped => {}
        }
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        if let Some(watcher) = self.watcher.take() {
            watcher.abort();
        }
    }
}
