//! The timer of a connection, for the time limits on headers and bodies.
//!
//! A tokio timer takes a lock when it is set and when it is dropped, and every request has two time limits. So each
//! connection keeps one timer. When the timer fires, the current limit is compared with the clock.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::rt;
use parking_lot::Mutex;
use tokio::time::{Instant, Sleep, sleep_until};

/// The timer of one connection. Clones refer to the same timer.
#[derive(Clone)]
pub(crate) struct ConnectionTimer(Arc<Mutex<Pin<Box<Sleep>>>>);

impl ConnectionTimer {
    /// A timer whose first time limit is this long.
    pub(crate) fn new(first: Duration) -> Self {
        Self(Arc::new(Mutex::new(Box::pin(sleep_until(
            Instant::now() + first,
        )))))
    }

    /// Ready once the deadline has passed. Otherwise the task is woken at the deadline or earlier.
    fn poll_until(&self, deadline: Instant, cx: &mut Context<'_>) -> Poll<()> {
        let mut sleep = self.0.lock();
        // A timer that fires earlier is not moved: moving it at each request would be expensive.
        if deadline < sleep.deadline() {
            sleep.as_mut().reset(deadline);
        }
        while sleep.as_mut().poll(cx).is_ready() {
            if Instant::now() >= deadline {
                return Poll::Ready(());
            }
            sleep.as_mut().reset(deadline);
        }
        Poll::Pending
    }

    /// The output of a future, or `None` if the deadline passes first.
    pub(crate) async fn before<F: Future>(
        &self,
        deadline: Instant,
        future: F,
    ) -> Option<F::Output> {
        let mut future = std::pin::pin!(future);
        std::future::poll_fn(|cx| match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending => self.poll_until(deadline, cx).map(|()| None),
        })
        .await
    }
}

impl rt::Timer for ConnectionTimer {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn rt::Sleep>> {
        self.sleep_until(self.now() + duration)
    }

    fn sleep_until(&self, deadline: std::time::Instant) -> Pin<Box<dyn rt::Sleep>> {
        Box::pin(Until {
            timer: self.clone(),
            deadline: deadline.into(),
        })
    }

    fn now(&self) -> std::time::Instant {
        Instant::now().into()
    }
}

/// Waits for a deadline with the timer of its connection.
struct Until {
    timer: ConnectionTimer,
    deadline: Instant,
}

impl Future for Until {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.timer.poll_until(self.deadline, cx)
    }
}

impl rt::Sleep for Until {}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn deadlines_end_in_their_order_however_the_timer_was_set() {
        let timer = ConnectionTimer::new(Duration::from_millis(10));
        let begin = Instant::now();
        let never = std::future::pending::<()>;
        // The deadlines are later than the timer, later again, in the past, and later again.
        for millis in [30, 35, 34, 50] {
            let deadline = begin + Duration::from_millis(millis);
            assert!(timer.before(deadline, never()).await.is_none());
            assert!(Instant::now() >= deadline);
        }
        let hour = begin + Duration::from_secs(3600);
        let soon = tokio::time::sleep(Duration::from_millis(1));
        assert!(timer.before(hour, soon).await.is_some());
        let deadline = Instant::now() + Duration::from_millis(5);
        assert!(timer.before(deadline, never()).await.is_none());
    }
}
