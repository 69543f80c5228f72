//! Keeps panics where they happen: a handler, a logger or a clock is other people's code.

use std::any::Any;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::Poll;

/// Runs a function; if it panics, returns what the panic said.
pub(crate) fn contain<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).map_err(said)
}

/// Awaits a future; if it panics, returns what the panic said. The future stays where it is, so this
/// costs no allocation.
pub(crate) async fn contained<F: Future>(future: F) -> Result<F::Output, String> {
    let mut future = pin!(future);
    poll_fn(|cx| match contain(|| future.as_mut().poll(cx)) {
        Ok(poll) => poll.map(Ok),
        Err(said) => Poll::Ready(Err(said)),
    })
    .await
}

/// Writes a log entry. A subscriber that panics must not end the task that has something to say.
pub(crate) fn log(write: impl FnOnce()) {
    let _ = contain(write);
}

/// The text of a panic. What was thrown is dropped here, and that may panic again.
fn said(payload: Box<dyn Any + Send>) -> String {
    let text = payload
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "(no message)".to_owned());
    if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        // That one may be of the same kind: leaked rather than dropped for ever.
        std::mem::forget(another);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Bomb;

    impl Drop for Bomb {
        fn drop(&mut self) {
            std::panic::panic_any(Bomb);
        }
    }

    #[tokio::test]
    async fn a_panic_whose_payload_panics_when_dropped_stays_inside() {
        let thrown = contain(|| std::panic::panic_any(Bomb));
        assert_eq!(thrown, Err("(no message)".to_owned()));
        let thrown = contained(async { std::panic::panic_any(Bomb) }).await;
        assert_eq!(thrown, Err::<(), _>("(no message)".to_owned()));
    }

    #[test]
    fn the_text_of_a_panic_is_kept() {
        let number = 7;
        assert_eq!(contain(|| panic!("plain")), Err::<(), _>("plain".into()));
        assert_eq!(
            contain(|| panic!("number {number}")),
            Err::<(), _>("number 7".into())
        );
    }
}
