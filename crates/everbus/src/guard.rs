//! Catches panics of user code: handlers, loggers, clocks.
//!
//! The location of a panic is known only to the panic hook. So one hook is added, once, before the existing
//! one, which is always called too.

use std::any::Any;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::pin::Pin;
use std::sync::Once;
use std::task::Poll;

/// The text of a panic, and its place if the hook recorded it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Panicked {
    pub(crate) text: String,
    pub(crate) place: Option<String>,
}

impl From<String> for Panicked {
    fn from(text: String) -> Self {
        Self { text, place: None }
    }
}

thread_local! {
    /// Whether a panic on this thread is to be recorded.
    static WATCHED: Cell<bool> = const { Cell::new(false) };
    static PLACE: RefCell<Option<(String, Backtrace)>> = const { RefCell::new(None) };
}

/// Runs a function; if it panics, returns the text and the place of the panic: the location, and the
/// backtrace if backtraces are on (`RUST_BACKTRACE`).
pub(crate) fn traced<T>(run: impl FnOnce() -> T) -> Result<T, Panicked> {
    watch_panics();
    let outer = WATCHED.replace(true);
    let result = contain(run);
    WATCHED.set(outer);
    result.map_err(|text| {
        let noted = PLACE.take();
        let place = noted.map(|(location, trace)| placed(&location, &trace));
        Panicked { text, place }
    })
}

/// A location and a backtrace as one text.
pub(crate) fn placed(location: &str, trace: &Backtrace) -> String {
    if trace.status() == BacktraceStatus::Captured {
        format!("at {location}\n{}", own_frames(&trace.to_string()))
    } else {
        format!("at {location}")
    }
}

/// After this many frames, a recursion only repeats the same frames.
const MOST_FRAMES: usize = 32;

/// The frames of the user's code and of Everbus in a backtrace: those of the standard library, the runtime
/// and other dependencies are the same for every handler.
fn own_frames(trace: &str) -> String {
    let mut kept = Vec::new();
    let mut lines = trace.lines().peekable();
    while let Some(symbol) = lines.next() {
        let at = lines.next_if(|line| line.trim_start().starts_with("at "));
        let is_foreign = at.is_none_or(|at| {
            let path = at.replace('\\', "/");
            path.contains("/rustc/")
                || path.contains("/registry/src/")
                || path.contains("/toolchains/")
        });
        if !is_foreign {
            kept.extend([Some(symbol), at].into_iter().flatten());
        }
    }
    if kept.is_empty() {
        // Without line numbers the owner of a frame is unknown.
        return trace
            .lines()
            .take(2 * MOST_FRAMES)
            .collect::<Vec<_>>()
            .join("\n");
    }
    kept.truncate(2 * MOST_FRAMES);
    kept.join("\n")
}

/// Adds the hook. A program that sets another hook later replaces it; then only the places are missing.
fn watch_panics() {
    static ADDED: Once = Once::new();
    // The hook cannot be changed while a thread panics.
    if ADDED.is_completed() || std::thread::panicking() {
        return;
    }
    ADDED.call_once(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            note(info);
            previous(info);
        }));
    });
}

fn note(info: &PanicHookInfo<'_>) {
    // The thread-local variables of an ending thread are gone.
    if !WATCHED.try_with(Cell::get).unwrap_or(false) {
        return;
    }
    let location = info
        .location()
        .map_or_else(String::new, ToString::to_string);
    let noted = (location, Backtrace::capture());
    let _ = PLACE.try_with(|place| {
        if let Ok(mut place) = place.try_borrow_mut() {
            *place = Some(noted);
        }
    });
}

/// Runs a function; if it panics, returns the text of the panic.
pub(crate) fn contain<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).map_err(said)
}

/// Awaits a future; if it panics, returns the text of the panic. The future is pinned by the caller, so
/// this neither allocates nor copies it.
pub(crate) fn contained<F: Future>(
    mut future: Pin<&mut F>,
) -> impl Future<Output = Result<F::Output, String>> {
    poll_fn(move |cx| match contain(|| future.as_mut().poll(cx)) {
        Ok(poll) => poll.map(Ok),
        Err(said) => Poll::Ready(Err(said)),
    })
}

/// Writes a log entry. A panicking subscriber must not end the task.
pub(crate) fn log(write: impl FnOnce()) {
    let _ = contain(write);
}

/// The text of a panic. Dropping the panic's payload may panic again.
fn said(payload: Box<dyn Any + Send>) -> String {
    let text = payload
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "(no message)".to_owned());
    if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        // Dropping this one may panic as well: it is leaked instead.
        std::mem::forget(another);
    }
    text
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    // conformance: operations/backtrace-own: a backtrace keeps the frames of the user's code and of Everbus, and no others
    #[test]
    fn a_backtrace_keeps_own_frames() {
        let trace = "\
   0: std::backtrace::Backtrace::capture
             at /rustc/5980/library/std/src/backtrace.rs:296:13
   1: shop::charge
             at ./src/charge.rs:7:5
   2: <core::pin::Pin<P> as core::future::Future>::poll
             at /rustc/5980/library/core/src/future.rs:124:9
   3: tokio::runtime::task
             at /cargo/registry/src/index/tokio-1.0/src/task.rs:1:1
   4: everbus::pipeline::run
             at /code/everbus/crates/everbus/src/pipeline/mod.rs:9:9
   5: __libc_start_main";
        let kept = own_frames(trace);
        let symbols: Vec<&str> = kept.lines().step_by(2).map(str::trim).collect();
        assert_eq!(symbols, ["1: shop::charge", "4: everbus::pipeline::run"]);
        assert_eq!(
            own_frames("   0: stripped\n   1: too"),
            "   0: stripped\n   1: too"
        );
    }

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
        let thrown = contained(pin!(async { std::panic::panic_any(Bomb) })).await;
        assert_eq!(thrown, Err::<(), _>("(no message)".to_owned()));
    }

    #[test]
    fn the_place_of_a_panic_is_kept() {
        let panicked = traced(|| panic!("here")).unwrap_err();
        assert_eq!(panicked.text, "here");
        let place = panicked.place.unwrap();
        let here = format!("at {}:", file!());
        assert!(place.starts_with(&here), "{place}");
        // A payload thrown without a panic has no place, and not the place of an earlier panic.
        let thrown = traced(|| std::panic::resume_unwind(Box::new("thrown"))).unwrap_err();
        assert_eq!((thrown.text.as_str(), thrown.place), ("thrown", None));
        assert_eq!(traced(|| 7), Ok(7));
    }

    #[test]
    fn a_panic_elsewhere_is_not_noted() {
        let _ = traced(|| {});
        let _ = contain(|| panic!("not a handler's"));
        assert!(PLACE.take().is_none());
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
