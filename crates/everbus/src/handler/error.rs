//! The error of a handler: why it failed, and what happens to the event next.

use std::backtrace::Backtrace;
use std::error::Error as StdError;
use std::fmt;
use std::panic::Location;
use std::time::Duration;

use everbus_core::{Code, Event, FailureKind, IntoEvent};

use crate::ambient;
use crate::environment::watch::Activity;
use crate::guard::{self, Panicked};

/// An error of any type, as tower and others pass it on.
pub type BoxError = Box<dyn StdError + Send + Sync>;

/// What a handler returns.
pub type HandlerResult = Result<(), HandlerError>;

/// Why a handler did not handle an event, and what happens to the event next.
///
/// Every error converts with `?` and means: retry by the retry policy. The other cases have constructors.
/// The recorded text contains the error and all its causes. The place of the conversion
/// (`file:line:column`) is recorded too, and the backtrace if backtraces are on (`RUST_BACKTRACE=1`;
/// `RUST_LIB_BACKTRACE=0` switches them off again for all but panics of the program).
///
/// ```
/// use std::time::Duration;
/// use everbus::{HandlerError, HandlerResult, Message};
///
/// async fn charge(m: Message) -> HandlerResult {
///     let amount: i64 = m.json()?; // does not parse: dead letter at once, unless `decode` says retry
///     if amount < 0 {
///         return Err(HandlerError::permanent("a negative amount")); // dead letter at once
///     }
///     if amount == 0 {
///         return Err(HandlerError::skip("nothing to charge")); // done, with a recorded reason
///     }
///     Err(HandlerError::retry_after("the bank is closed", Duration::from_secs(60)))
/// }
/// ```
// It does not implement `std::error::Error`, because the conversion from every error would then
// overlap with the conversion from itself.
#[derive(Debug)]
pub struct HandlerError {
    text: String,
    kind: FailureKind,
    answer: Answer,
    /// Where the error occurred, if known.
    place: Option<String>,
    /// Events to publish together with the retry, the dead letter or the skip.
    events: Vec<Event>,
}

/// The largest number of events that one failure publishes.
pub(crate) const MOST_EVENTS: usize = 1024;

/// What the handler asks for.
#[derive(Debug)]
pub(crate) enum Answer {
    Retry,
    RetryAfter(Duration),
    /// The event cannot be decoded: the handler's [`Decode`](crate::Decode) setting decides.
    Decode,
    GiveUp,
    Skip,
    /// Not handled here: another process handles the event, or this one after a restart.
    GiveBack,
}

impl HandlerError {
    /// A failure that is retried by the retry policy. Takes text and boxed errors, so it also accepts error
    /// types that `?` does not convert.
    #[track_caller]
    pub fn new(error: impl Into<BoxError>) -> Self {
        Self::build(error.into().as_ref(), FailureKind::Error, Answer::Retry).here()
    }

    /// A failure that no retry can fix: the event goes to the dead letters at once.
    #[track_caller]
    pub fn permanent(error: impl Into<BoxError>) -> Self {
        Self::build(
            error.into().as_ref(),
            FailureKind::Permanent,
            Answer::GiveUp,
        )
        .here()
    }

    /// A failure that is retried after this long instead of the delay of the policy. It counts as an
    /// attempt like any other. A wait of more than a year is cut to a year.
    #[track_caller]
    pub fn retry_after(error: impl Into<BoxError>, after: Duration) -> Self {
        let after = after.min(everbus_core::retry::LONGEST_DELAY);
        Self::build(
            error.into().as_ref(),
            FailureKind::Error,
            Answer::RetryAfter(after),
        )
        .here()
    }

    /// Publishes an event in the same step as the result of this failure: the retry, the dead letter or the
    /// skip. Each failed attempt publishes its own events; several may be added. An event that cannot be
    /// published does not block the failure: the failure is recorded, and says so.
    ///
    /// An attempt that only probes an open circuit breaker does not count, and nothing is published with
    /// it.
    ///
    /// ```
    /// use everbus::{Context, HandlerError, permanent};
    ///
    /// async fn convert(context: Context) -> Result<(), HandlerError> {
    ///     let failed = ("media.failed", context.attempt());
    ///     Err(permanent("no picture in it").with_event(failed))
    /// }
    /// # let _ = everbus::Router::new().on("media.uploaded", convert);
    /// ```
    #[must_use]
    pub fn with_event(mut self, event: impl IntoEvent) -> Self {
        // The ambient values (correlation, trace) may be gone when the attempt ends.
        let event = event.into_event();
        match event.and_then(|event| ambient::inherit(event, None)) {
            Ok(event) if self.events.len() < MOST_EVENTS => self.events.push(event),
            Ok(_) => {
                let what = format!("a failure publishes at most {MOST_EVENTS} events");
                self.not_published(&everbus_core::Error::new(Code::InvalidSetting, what));
            }
            Err(error) => self.not_published(&error),
        }
        self
    }

    /// The events that are published with this failure.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    pub(crate) fn take_events(&mut self) -> Vec<Event> {
        if matches!(self.answer, Answer::GiveBack) {
            self.events.clear();
        }
        std::mem::take(&mut self.events)
    }

    /// Notes in the error text that an event could not be published.
    pub(crate) fn not_published(&mut self, error: &everbus_core::Error) {
        let note = unpublished(error);
        if !self.text.ends_with(&note) {
            self.text.push_str(&note);
        }
    }

    /// Records this backtrace with the failure instead of the place of the conversion: for errors that
    /// carry a backtrace.
    #[must_use]
    pub fn with_backtrace(mut self, backtrace: impl fmt::Display) -> Self {
        self.place = Some(backtrace.to_string());
        self
    }

    /// Records the caller's location. Not for decode errors: they occur before the handler runs.
    #[track_caller]
    fn here(mut self) -> Self {
        if self.place.is_none() && !self.is_about_the_event() {
            let location = Location::caller().to_string();
            self.place = Some(guard::placed(&location, &Backtrace::capture()));
        }
        self
    }

    /// Not a failure: the handler skips the event, and the reason is recorded.
    pub fn skip(reason: impl Into<String>) -> Self {
        Self {
            text: reason.into(),
            kind: FailureKind::Error,
            answer: Answer::Skip,
            place: None,
            events: Vec::new(),
        }
    }

    /// Not a failure: the handler was interrupted, for example by a shutdown, and releases the event. The event is
    /// delivered again, and no attempt is counted. Events added with [`with_event`](Self::with_event) are not
    /// published.
    ///
    /// ```
    /// use everbus::{Context, HandlerError};
    ///
    /// # async fn transcode() {}
    /// async fn convert(context: Context) -> Result<(), HandlerError> {
    ///     tokio::select! {
    ///         () = transcode() => Ok(()),
    ///         () = context.shutting_down() => Err(HandlerError::give_back("a shutdown")),
    ///     }
    /// }
    /// # let _ = everbus::Router::new().on("media.uploaded", convert);
    /// ```
    pub fn give_back(reason: impl Into<String>) -> Self {
        Self {
            answer: Answer::GiveBack,
            ..Self::skip(reason)
        }
    }

    /// The large part of the event could not be fetched. The object store may answer later, so this is
    /// retried whatever the handler's [`Decode`](crate::Decode) setting is.
    pub(crate) fn unreadable(error: &everbus_core::Error) -> Self {
        Self::build(error, FailureKind::Decode, Answer::Retry)
    }

    pub(crate) fn timed_out(limit: Duration, activity: Option<&Activity>) -> Self {
        let last = activity.map(|activity| format!("; last progress: {}", activity.value));
        let last = last.unwrap_or_default();
        Self {
            text: format!("the handler did not finish within {limit:?}{last}"),
            kind: FailureKind::Timeout,
            answer: Answer::Retry,
            place: None,
            events: Vec::new(),
        }
    }

    pub(crate) fn panicked(panic: Panicked) -> Self {
        let Panicked { text, place } = panic;
        Self {
            text: format!("the handler panicked: {text}"),
            kind: FailureKind::Panic,
            answer: Answer::Retry,
            place,
            events: Vec::new(),
        }
    }

    /// Converts an error of any type. If the error is or was caused by a [`HandlerError`], that one is
    /// kept.
    pub(crate) fn from_box(error: &(dyn StdError + 'static)) -> Self {
        let mut next = Some(error);
        while let Some(cause) = next {
            if let Some(Carried(inner, _)) = cause.downcast_ref::<Carried>()
                && let Some(carried) = inner.lock().take()
            {
                return carried;
            }
            next = cause.source();
        }
        Self::from_dyn(error)
    }

    fn from_dyn(error: &(dyn StdError + 'static)) -> Self {
        let code = error
            .downcast_ref::<everbus_core::Error>()
            .map(everbus_core::Error::code);
        // An error of the event itself is told apart from errors of the handler: a retry changes neither
        // the version nor the payload.
        let (kind, answer) = match code {
            Some(Code::InvalidPayloadError) => (FailureKind::Decode, Answer::Decode),
            Some(Code::UnknownVersion) => (FailureKind::Version, Answer::Decode),
            Some(Code::ValidationError) => (FailureKind::Schema, Answer::Decode),
            _ => (FailureKind::Error, Answer::Retry),
        };
        Self::build(error, kind, answer)
    }

    fn build(error: &(dyn StdError + 'static), kind: FailureKind, answer: Answer) -> Self {
        Self {
            text: with_causes(error),
            kind,
            answer,
            place: None,
            events: Vec::new(),
        }
    }

    /// Whether the failure says nothing about the handler's dependency: the event could not be decoded, or
    /// the handler skips it or gives it back.
    pub(crate) fn is_about_the_event(&self) -> bool {
        let unreadable = matches!(
            self.kind,
            FailureKind::Decode | FailureKind::Version | FailureKind::Schema
        );
        unreadable || matches!(self.answer, Answer::Skip | Answer::GiveBack)
    }

    /// Whether the event is to be retried, and not because of a decode error.
    pub(crate) fn is_worth_a_retry(&self) -> bool {
        matches!(self.answer, Answer::Retry | Answer::RetryAfter(_)) && !self.is_about_the_event()
    }

    pub(crate) fn into_parts(self) -> (String, FailureKind, Answer, Option<String>) {
        (self.text, self.kind, self.answer, self.place)
    }
}

/// The text of a failure whose event was not published.
pub(crate) fn unpublished(error: &everbus_core::Error) -> String {
    format!("; an event could not be published with this failure: {error}")
}

/// A failure that no retry can fix: see [`HandlerError::permanent`].
#[track_caller]
pub fn permanent(error: impl Into<BoxError>) -> HandlerError {
    HandlerError::permanent(error)
}

/// A failure that is retried after this long: see [`HandlerError::retry_after`].
#[track_caller]
pub fn retry_after(error: impl Into<BoxError>, after: Duration) -> HandlerError {
    HandlerError::retry_after(error, after)
}

/// Not a failure; the event is skipped: see [`HandlerError::skip`].
pub fn skip(reason: impl Into<String>) -> HandlerError {
    HandlerError::skip(reason)
}

/// `Ok(())` with the error type of a handler, for closures that do not name their error type.
///
/// ```
/// use everbus::{Json, Router, handled};
/// let router = Router::new().on("user.created", |Json(id): Json<u64>| async move {
///     println!("{id}");
///     handled()
/// });
/// ```
pub fn handled() -> HandlerResult {
    Ok(())
}

impl<E: StdError + Send + Sync + 'static> From<E> for HandlerError {
    #[track_caller]
    fn from(error: E) -> Self {
        Self::from_box(&error).here()
    }
}

/// A [`HandlerError`] that passes through code that only knows `std::error::Error`, such as a tower layer.
#[derive(Debug)]
struct Carried(parking_lot::Mutex<Option<HandlerError>>, String);

impl fmt::Display for Carried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.1)
    }
}

impl StdError for Carried {}

impl From<HandlerError> for BoxError {
    fn from(error: HandlerError) -> Self {
        let text = error.to_string();
        Box::new(Carried(parking_lot::Mutex::new(Some(error)), text))
    }
}

impl fmt::Display for HandlerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The error and its causes, joined by `: `; a cause whose text the error already ends with is not
/// repeated.
fn with_causes(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_contains_every_cause_once() {
        let cause = std::io::Error::other("connection refused");
        let error = everbus_core::Error::new(Code::Busy, "cannot reach the bank").caused_by(cause);
        let text = HandlerError::from(error).to_string();
        assert_eq!(text, "Busy: cannot reach the bank: connection refused");
        assert_eq!(HandlerError::new("plain").to_string(), "plain");
    }

    #[test]
    fn the_place_where_an_error_was_returned_is_kept() {
        fn fails() -> HandlerResult {
            "x".parse::<u32>()?;
            Ok(())
        }
        let line = line!() - 3;
        let place = fails().unwrap_err().into_parts().3.unwrap();
        assert!(
            place.starts_with(&format!("at {}:{line}:", file!())),
            "{place}"
        );
        for error in [
            HandlerError::new("x"),
            permanent("x"),
            retry_after("x", Duration::ZERO),
        ] {
            let place = error.into_parts().3.unwrap();
            assert!(place.starts_with(&format!("at {}:", file!())), "{place}");
        }
        let own = HandlerError::new("x").with_backtrace("its own");
        assert_eq!(own.into_parts().3.as_deref(), Some("its own"));
        assert_eq!(skip("x").into_parts().3, None);
    }

    #[test]
    fn a_payload_that_cannot_be_read_is_told_apart() {
        let event = everbus_core::Event::builder("t").build().unwrap();
        let error = event.json::<u32>().unwrap_err();
        assert_eq!(
            HandlerError::from(error).into_parts().1,
            FailureKind::Decode
        );
    }
}
