//! One error type: a stable code, a sentence, a hint for the person, and the cause.

use std::error::Error as StdError;
use std::fmt;

/// The result of an Everbus operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What went wrong, as a name that never changes between versions.
        ///
        /// Each code has a page under `docs/errors/`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Code {
            $($(#[$doc])* $name,)*
        }

        impl Code {
            /// Every code.
            pub const ALL: &'static [Code] = &[$(Code::$name,)*];

            /// The code as text, for logs and for machines.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Code::$name => stringify!($name),)*
                }
            }
        }
    };
}

codes! {
    /// The bus was shut down; it accepts no more publishes or subscriptions.
    EventBusShutdownError,
    /// The payload does not match its content type (by default: it is not JSON).
    InvalidPayloadError,
    /// The payload is larger than the bus allows.
    PayloadTooLarge,
    /// The event type is empty, too long, or has a forbidden character.
    InvalidType,
    /// The text is not an event id.
    InvalidId,
    /// An attribute of the event is malformed or too long.
    InvalidAttribute,
    /// The pattern is invalid.
    InvalidPattern,
    /// The cursor is invalid, or belongs to another query.
    InvalidCursor,
    /// A setting is out of range or cannot be parsed.
    InvalidSetting,
    /// The URL names no engine of this build, or cannot be parsed.
    InvalidUrl,
    /// An event with this id but another body was published before.
    IdReused,
    /// A key has another revision than the caller expected.
    RevisionConflict,
    /// A group was declared again with settings that contradict the first ones.
    GroupConflict,
    /// There is no such group.
    GroupNotFound,
    /// There is no such subscription.
    SubscriptionNotFound,
    /// There is no such event or dead letter.
    NotFound,
    /// The lease had ended, or another consumer has the event now; the settlement was not applied.
    LeaseLost,
    /// The wait ended before the awaited event happened.
    Timeout,
    /// The engine cannot do this.
    Unsupported,
    /// The clock has jumped ahead; by this clock, data would be removed that cannot be restored.
    ClockInDoubt,
    /// The payload does not match the schema registered for its type.
    ValidationError,
    /// The given JSON Schema is invalid.
    InvalidSchema,
    /// The event has a version that no handler here can read.
    UnknownVersion,
    /// The upcasts of an event type contradict each other.
    UpcastConflict,
    /// No declared stream covers the event type, or no stream has this name.
    NoStream,
    /// The stream is full, or the publisher is over its rate limit, for longer than a publish waits.
    Backpressure,
    /// The effect of a handler in the transaction of its ack failed; the transaction was rolled back.
    EffectFailed,
    /// The configuration file cannot be used.
    InvalidConfig,
    /// The server cannot be reached, or does not answer.
    Unavailable,
    /// Another program holds the file or database for longer than the bus waits.
    Busy,
    /// The disk is full, or nearly: publishes are refused so that acks still fit.
    DiskFull,
    /// The file or its directory cannot be written.
    ReadOnly,
    /// The path names a directory or something else that is not a regular file.
    NotAFile,
    /// The file does not exist and was not to be created.
    NoSuchFile,
    /// The file was deleted, moved or replaced while it was open; the engine has stopped.
    FileGone,
    /// The process has run out of memory, file descriptors or threads.
    OutOfResources,
    /// The stored data is damaged.
    Corrupt,
    /// The file or database belongs to another program.
    NotEverbus,
    /// The stored data was written by a newer version of Everbus.
    NewerSchema,
    /// The file is on a network file system, where its locks cannot be trusted.
    NetworkFileSystem,
    /// The SQLite library is too old to be safe.
    SqliteTooOld,
    /// The requested durability could not be set.
    NotDurable,
    /// The object store cannot be reached, or an object in it is missing or has another content.
    ObjectStoreError,
    /// Storage failed; the outcome of the running operations is unknown and the engine has stopped.
    StorageFailed,
    /// The graph of a job, or the file that describes it, is invalid.
    InvalidJob,
    /// The state of a task or job does not allow this, or another job has a task of this name.
    TaskConflict,
    /// A bug in Everbus.
    Internal,
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Code {
    /// The name of the error in messages about a file, if it differs from the code.
    const fn file_name(self) -> &'static str {
        match self {
            Code::Busy => "FileBusy",
            Code::Corrupt => "CorruptFile",
            Code::NotEverbus => "NotAnEverbusFile",
            other => other.as_str(),
        }
    }

    /// The class of an error with this code whose outcome is known.
    ///
    /// Every code is listed, so that a new one does not compile before it has a class.
    const fn class(self) -> Class {
        match self {
            Code::InvalidPayloadError
            | Code::PayloadTooLarge
            | Code::InvalidType
            | Code::InvalidId
            | Code::InvalidAttribute
            | Code::InvalidPattern
            | Code::NoStream
            | Code::InvalidCursor
            | Code::InvalidSetting
            | Code::InvalidUrl
            | Code::InvalidConfig
            | Code::InvalidSchema
            | Code::ValidationError
            | Code::UnknownVersion
            | Code::UpcastConflict
            | Code::Unsupported
            | Code::GroupNotFound
            | Code::SubscriptionNotFound
            | Code::NotFound
            | Code::NotAFile
            | Code::NoSuchFile
            | Code::EffectFailed
            | Code::ClockInDoubt
            | Code::InvalidJob
            | Code::Internal => Class::Caller,
            Code::IdReused
            | Code::RevisionConflict
            | Code::GroupConflict
            | Code::TaskConflict
            | Code::LeaseLost => Class::Conflict,
            Code::Unavailable
            | Code::Busy
            | Code::DiskFull
            | Code::ReadOnly
            | Code::OutOfResources
            | Code::Timeout
            | Code::Backpressure
            | Code::ObjectStoreError => Class::Passing,
            Code::EventBusShutdownError
            | Code::StorageFailed
            | Code::FileGone
            | Code::Corrupt
            | Code::NotEverbus
            | Code::NewerSchema
            | Code::NetworkFileSystem
            | Code::SqliteTooOld
            | Code::NotDurable => Class::Final,
        }
    }
}

/// What an error means for the next step: [`Error::class`]. Code that decides whether to repeat a call, to
/// blame an event or to stop uses the class and keeps no list of codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Class {
    /// The request cannot be served, and repeating it unchanged gives the same answer: it is invalid, names
    /// something that does not exist, or needs an ability that the engine lacks. [`Code::Internal`] belongs
    /// here too: the same request meets the same bug, other requests are served.
    Caller,
    /// The request contradicts stored data: another body under the same id, other settings, a lost lease.
    /// Nothing was done.
    Conflict,
    /// Nothing was done, and the same request may succeed later: the server is not available, the file is
    /// locked, the disk is full. The event is not the cause.
    Passing,
    /// The request may have taken effect. Repeating it is safe: an append with the same id, a settlement
    /// with the same lease.
    Unknown,
    /// The engine serves no more requests until it is opened again, and perhaps repaired first.
    Final,
}

impl Class {
    /// Whether the same request may be sent again: the request did not cause the failure.
    pub const fn may_repeat(self) -> bool {
        matches!(self, Self::Passing | Self::Unknown)
    }
}

/// An error with a stable [`Code`], a message, an optional hint and an optional cause.
///
/// It displays as `name: message`, where the [`name`](Self::name) is that of the code; the hint is
/// separate, so that a program can show it in its own way. Cloning is cheap: every waiter of a failed
/// commit gets the same error.
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    code: Code,
    message: String,
    hint: Option<String>,
    outcome_unknown: bool,
    of_file: bool,
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
            of_file: false,
            source: None,
        }))
    }

    /// A new error about a file: its [`name`](Self::name) mentions files (`FileBusy` for [`Code::Busy`]).
    pub fn of_file(code: Code, message: impl Into<String>) -> Self {
        let mut error = Self::new(code, message);
        error.0.of_file = true;
        error
    }

    /// The error of every operation after shutdown.
    pub fn shutdown() -> Self {
        Self::new(Code::EventBusShutdownError, "the bus has been shut down")
            .hint("publish and subscribe before calling shutdown, or open the bus again")
    }

    /// Adds a hint: what the user can do about it.
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

    /// The same error with another message.
    #[must_use]
    pub fn with_message(mut self, message: impl Into<String>) -> Self {
        self.0.message = message.into();
        self
    }

    /// The stable code.
    pub fn code(&self) -> Code {
        self.0.code
    }

    /// The name of the error in messages: its code, or for a file the name that mentions files.
    pub fn name(&self) -> &'static str {
        if self.0.of_file {
            self.0.code.file_name()
        } else {
            self.0.code.as_str()
        }
    }

    /// What the error means for the next step.
    ///
    /// A final error stays final when its outcome is unknown, because the engine accepts no repetition;
    /// [`outcome_unknown`](Self::outcome_unknown) tells a publisher that opens the engine again.
    pub fn class(&self) -> Class {
        match self.0.code.class() {
            Class::Final => Class::Final,
            _ if self.0.outcome_unknown => Class::Unknown,
            class => class,
        }
    }

    /// The message, without the code.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The hint: what the user can do about it.
    pub fn hint_text(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }

    /// Whether the operation may have taken effect.
    ///
    /// A publish with an unknown outcome may be repeated with the same id: if the first one took effect,
    /// its receipt is returned and nothing is stored twice.
    pub fn outcome_unknown(&self) -> bool {
        self.0.outcome_unknown
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name(), self.0.message)
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
        assert_eq!(
            Code::EventBusShutdownError.as_str(),
            "EventBusShutdownError"
        );
        assert_eq!(Code::InvalidPayloadError.as_str(), "InvalidPayloadError");
        assert!(
            Error::shutdown()
                .to_string()
                .starts_with("EventBusShutdownError: ")
        );
    }

    // conformance: bus/error-pages: every code has a page
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
            assert!(
                text.contains(code.file_name()),
                "{page} must tell the name that the file engine shows"
            );
        }
    }

    // conformance: contract/error-class: an error says its class: the caller's, a conflict, passing, outcome unknown, final
    #[test]
    fn the_class_comes_from_the_code_and_from_whether_the_outcome_is_known() {
        for (code, known, unknown) in [
            (Code::InvalidPayloadError, Class::Caller, Class::Unknown),
            (Code::IdReused, Class::Conflict, Class::Unknown),
            (Code::LeaseLost, Class::Conflict, Class::Unknown),
            (Code::Unavailable, Class::Passing, Class::Unknown),
            (Code::Busy, Class::Passing, Class::Unknown),
            (Code::DiskFull, Class::Passing, Class::Unknown),
            (Code::StorageFailed, Class::Final, Class::Final),
            (Code::EventBusShutdownError, Class::Final, Class::Final),
        ] {
            let error = Error::new(code, "x");
            assert_eq!(error.class(), known, "{code}");
            assert_eq!(error.with_unknown_outcome().class(), unknown, "{code}");
        }
        for class in [Class::Caller, Class::Conflict, Class::Final] {
            assert!(!class.may_repeat(), "{class:?}");
        }
        assert!(Class::Passing.may_repeat() && Class::Unknown.may_repeat());
    }

    // conformance: contract/neutral-codes: codes do not speak of files; errors of the file engine are shown by the names they always had
    #[test]
    fn codes_are_neutral_and_errors_about_files_keep_their_names() {
        let neutral = Error::new(Code::Busy, "held");
        assert_eq!(neutral.to_string(), "Busy: held");
        let error = Error::of_file(Code::Busy, "locked").with_message("in use");
        assert_eq!(error.to_string(), "FileBusy: in use");
        assert_eq!((error.code(), error.name()), (Code::Busy, "FileBusy"));
        assert_eq!(Error::of_file(Code::Corrupt, "").name(), "CorruptFile");
        let foreign = Error::of_file(Code::NotEverbus, "");
        assert_eq!(foreign.name(), "NotAnEverbusFile");
        assert_eq!(Error::of_file(Code::DiskFull, "").name(), "DiskFull");
    }
}
