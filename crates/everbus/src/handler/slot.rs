//! The memory for the future of a handler.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio_util::sync::ReusableBoxFuture;

use super::HandlerOutcome;

/// Where a handler puts its future. A worker keeps its slot: the next future of the same size needs no
/// allocation.
///
/// A finished future holds nothing any more, because [`put`](Self::put) wraps it in an `async` block.
#[derive(Debug)]
pub struct Slot(ReusableBoxFuture<'static, HandlerOutcome>);

impl Slot {
    /// Puts a future in the place of the last one.
    #[allow(
        clippy::redundant_async_block,
        reason = "the block drops the future as soon as it has ended"
    )]
    pub(crate) fn put<F>(&mut self, future: F)
    where
        F: Future<Output = HandlerOutcome> + Send + 'static,
    {
        self.0.set(async move { future.await });
    }
}

/// An empty slot: no memory, and a future that never ends.
impl Default for Slot {
    fn default() -> Self {
        Self(ReusableBoxFuture::new(std::future::pending()))
    }
}

impl Future for Slot {
    type Output = HandlerOutcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<HandlerOutcome> {
        self.0.poll(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::future::{poll_fn, ready};
    use std::sync::Arc;

    use super::*;
    use crate::handler::outcome::Outcome;

    /// A future that ends at once and keeps what it holds until it is dropped.
    fn holding(held: &Arc<()>) -> impl Future<Output = HandlerOutcome> + Send + use<> {
        let held = held.clone();
        poll_fn(move |_| {
            let _held = &held;
            Poll::Ready(Ok(Outcome::default()))
        })
    }

    #[tokio::test]
    async fn a_finished_future_holds_nothing() {
        let held = Arc::new(());
        let mut slot = Slot::default();
        slot.put(holding(&held));
        assert_eq!(Arc::strong_count(&held), 2);
        assert!((&mut slot).await.is_ok());
        assert_eq!(Arc::strong_count(&held), 1);
    }

    #[tokio::test]
    async fn a_slot_is_used_for_futures_of_any_size() {
        let held = Arc::new(());
        let mut slot = Slot::default();
        for _ in 0..3 {
            slot.put(ready(Ok(Outcome::default())));
            assert!((&mut slot).await.is_ok());
            slot.put(holding(&held));
            assert!((&mut slot).await.is_ok());
        }
        // One that was never polled is dropped by the next.
        slot.put(holding(&held));
        slot.put(ready(Ok(Outcome::default())));
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
