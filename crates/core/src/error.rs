//! One error type: a stable code, a sentence, a hint for the person, and the cause.

use std::error::Error as StdError;
use std::fmt;

/// The result of an Everbus operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// What went wrong, in a form that never changes between versions.
        ///
        /// Each code has a page under `docs/errors/`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Code {
            $($(#[$doc])* $name,)*
        }

        impl Code {
            /// Every code there is.
            pub const ALL: &'static [Code] = &[$(Code::$name,)*];

            /// The code as text, for logs and for machines.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Code::$name => $text,)*
                }
            }
        }
    };
}

codes! {
    /// The bus was shut down; it takes no more publishes or subscriptions.
    Shutdown = "EventBusShutdownError",
    /// The payload is not what its content type says (by default: not JSON).
    InvalidPayload = "InvalidPayloadError",
    /// The payload is larger than the bus allows.
    PayloadTooLarge = "PayloadTooLarge",
    /// The event type is empty, too long, or has a character it may not have.
    InvalidType = "InvalidType",
    /// The text is not an event id.
    InvalidId = "InvalidId",
    /// An attribute of the event is malformed or too long.
    InvalidAttribute = "InvalidAttribute",
    /// The pattern is not one.
    InvalidPattern = "InvalidPattern",
    /// The cursor is not one, or belongs to another query.
    InvalidCursor = "InvalidCursor",
    /// A setting is out of range or cannot be read.
    InvalidSetting = "InvalidSetting",
    /// The URL names no engine this build has, or cannot be read.
    InvalidUrl = "InvalidUrl",
    /// An event with this id but another body was published before.
    IdReused = "IdReused",
    /// A group was declared again with settings that contradict the first ones.
    GroupConflict = "GroupConflict",
    /// There is no such group.
    GroupNotFound = "GroupNotFound",
    /// There is no such subscription.
    SubscriptionNotFound = "SubscriptionNotFound",
    /// There is no such event or dead letter.
    NotFound = "NotFound",
    /// The lease had ended or belongs to somebody else now; the settlement was not applied.
    LeaseLost = "LeaseLost",
    /// The wait ended before what was waited for happened.
    Timeout = "Timeout",
    /// The engine cannot do this.
    Unsupported = "Unsupported",
    /// The clock has leapt ahead, and by it things would be removed that cannot be brought back.
    ClockInDoubt = "ClockInDoubt",
    /// The payload does not match the schema registered for its type.
    SchemaViolation = "ValidationError",
    /// What was given as a JSON Schema is none.
    InvalidSchema = "InvalidSchema",
    /// The event has a version that nothing here can read.
    UnknownVersion = "UnknownVersion",
    /// The functions from one version of an event to the next contradict each other.
    UpcastConflict = "UpcastConflict",
    /// No declared stream covers the event type, or no stream has this name.
    NoStream = "NoStream",
    /// The stream is full, or the publisher is over its rate, for longer than a publish waits.
    Backpressure = "Backpressure",
    /// What a handler wanted done in the transaction of its ack failed; nothing of it was done.
    EffectFailed = "EffectFailed",
    /// The configuration file cannot be used.
    InvalidConfig = "InvalidConfig",
    /// The file is locked by something else for longer than the bus waits.
    Busy = "FileBusy",
    /// The disk is full, or nearly: publishes are refused so that acks still fit.
    DiskFull = "DiskFull",
    /// The file or its directory cannot be written.
    ReadOnly = "ReadOnly",
    /// The path names a directory or something else that is not a regular file.
    NotAFile = "NotAFile",
    /// The file does not exist and was not to be created.
    NoSuchFile = "NoSuchFile",
    /// The file is damaged.
    Corrupt = "CorruptFile",
    /// The file is a SQLite database of something else.
    NotEverbus = "NotAnEverbusFile",
    /// The file was written by a newer version of Everbus.
    NewerSchema = "NewerSchema",
    /// The file is on a network file system, where its locks cannot be trusted.
    NetworkFileSystem = "NetworkFileSystem",
    /// The SQLite library is too old to be safe.
    SqliteTooOld = "SqliteTooOld",
    /// The durability that was asked for could not be set.
    NotDurable = "NotDurable",
    /// The object store cannot be reached, or an object in it is missing or not what was put there.
    ObjectStore = "ObjectStoreError",
    /// Storage failed; the outcome of what was under way is unknown and the engine has stopped.
    StorageFailed = "StorageFailed",
    /// Something that cannot happen did.
    Internal = "Internal",
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// An error with a stable [`Code`], a message, an optional hint and an optional cause.
///
/// It displays as `Code: message`; the hint is kept apart so that a program can show it its own way.
/// Cloning is cheap: every waiter of a failed commit gets the same error.
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    code: Code,
    message: String,
    hint: Option<String>,
    outcome_unknown: bool,
    source: Option<std::sync::Arc<dyn StdError + Send + Sync>>,
}

impl Error {
    /// A new error.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            code,
            message: message.into(),
            hint: None,
            outcome_unknown: false,
            source: None,
        }))
    }

    /// The error every operation gives after shutdown.
    pub fn shutdown() -> Self {
        Self::new(Code::Shutdown, "the bus has been shut down")
            .hint("publish and subscribe before calling shutdown, or open the bus again")
    }

    /// Adds what the person may do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hint = Some(hint.into());
        self
    }

    /// Adds the cause.
    #[must_use]
    pub fn caused_by(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.0.source = Some(std::sync::Arc::new(source));
        self
    }

    /// Marks that the operation may or may not have taken effect.
    #[must_use]
    pub fn with_unknown_outcome(mut self) -> Self {
        self.0.outcome_unknown = true;
        self
    }

    /// The stable code.
    pub fn code(&self) -> Code {
        self.0.code
    }

    /// The sentence, without the code.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// What the person may do about it.
    pub fn hint_text(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }

    /// Whether the operation may have taken effect all the same.
    ///
    /// A publish with an unknown outcome may be repeated with the same id: if it did take effect,
    /// the first receipt is returned and nothing is stored twice.
    pub fn outcome_unknown(&self) -> bool {
        self.0.outcome_unknown
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.0.code, self.0.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)?;
        if let Some(hint) = &self.0.hint {
            write!(f, " (hint: {hint})")?;
        }
        if let Some(source) = &self.0.source {
            write!(f, " (cause: {source})")?;
        }
        Ok(())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0
            .source
            .as_deref()
            .map(|e| e as &(dyn StdError + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_of_the_specification_are_codes_and_in_the_message() {
        assert_eq!(Code::Shutdown.as_str(), "EventBusShutdownError");
        assert_eq!(Code::InvalidPayload.as_str(), "InvalidPayloadError");
        assert!(
            Error::shutdown()
                .to_string()
                .starts_with("EventBusShutdownError: ")
        );
    }

    // conformance: issue-2/error-pages: every code has a page
    #[test]
    fn every_code_has_a_page_and_no_two_share_a_name() {
        let pages = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/errors");
        let mut seen = std::collections::HashSet::new();
        for code in Code::ALL {
            assert!(seen.insert(code.as_str()), "{code} twice");
            let page = format!("{pages}/{code}.md");
            let text = std::fs::read_to_string(&page).unwrap_or_else(|_| panic!("no page {page}"));
            assert!(
                text.starts_with(&format!("# {code}\n")),
                "{page} must begin with its code"
            );
        }
    }
}
