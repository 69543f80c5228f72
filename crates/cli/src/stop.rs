//! Why a command ended early, and with which exit code.

use std::io;
use std::process::ExitCode;

use everbus::config::{Problem, Problems};
use everbus_core::{Code, Error};
use serde::Serialize;

use crate::args::OutputFormat;
use crate::output::escaped;

/// What a command returns.
pub(crate) type Outcome<T = ()> = Result<T, Stop>;

/// Why a command ended before its work was done.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The bus or its file refused.
    Failed(Error),
    /// The command line or standard input is wrong.
    Usage {
        message: String,
        hint: Option<String>,
    },
    /// Something outside the bus failed: standard input, another file.
    Io(String),
    /// The result was printed and is itself a failure.
    Unsatisfied,
    /// The reader of standard output is gone: `everbus tail | head`.
    BrokenPipe,
    /// Ctrl-C.
    Interrupted,
}

impl Stop {
    pub(crate) fn usage(message: impl Into<String>, hint: Option<&str>) -> Self {
        Self::Usage {
            message: message.into(),
            hint: hint.map(str::to_owned),
        }
    }

    pub(crate) fn not_found(message: impl Into<String>, hint: &str) -> Self {
        Self::Failed(Error::new(Code::NotFound, message).hint(hint))
    }

    /// The exit code, as documented in `main.rs`, `--help` and the README.
    fn exit_code(&self) -> u8 {
        match self {
            Self::BrokenPipe => 0,
            Self::Io(_) | Self::Unsatisfied => 1,
            Self::Usage { .. } => 2,
            Self::Interrupted => 130,
            Self::Failed(error) => match error.code() {
                Code::InvalidPayloadError
                | Code::PayloadTooLarge
                | Code::InvalidType
                | Code::InvalidId
                | Code::InvalidAttribute
                | Code::InvalidPattern
                | Code::InvalidCursor
                | Code::InvalidSetting
                | Code::InvalidUrl
                | Code::InvalidConfig
                | Code::InvalidJob
                | Code::IdReused
                | Code::NoStream
                | Code::NotAFile
                | Code::NotEverbus => 2,
                Code::NoSuchFile
                | Code::NotFound
                | Code::GroupNotFound
                | Code::SubscriptionNotFound => 3,
                Code::Unavailable
                | Code::Busy
                | Code::DiskFull
                | Code::ReadOnly
                | Code::OutOfResources
                | Code::NetworkFileSystem => 4,
                _ => 1,
            },
        }
    }

    /// Prints on standard error what happened, and returns the exit code.
    pub(crate) fn report(&self, format: OutputFormat) -> ExitCode {
        if let Some(report) = self.describe() {
            let text = match format {
                OutputFormat::Json => {
                    let json = serde_json::json!({ "error": report });
                    format!("{json}\n")
                }
                OutputFormat::Text => report.to_text(),
            };
            // If standard error is closed, the exit code still reports the failure.
            let _ = io::Write::write_all(&mut io::stderr(), text.as_bytes());
        }
        ExitCode::from(self.exit_code())
    }

    fn describe(&self) -> Option<Report> {
        match self {
            Self::BrokenPipe | Self::Interrupted | Self::Unsatisfied => None,
            Self::Failed(error) => Some(Report {
                code: error.name(),
                message: with_cause(error),
                hint: error.hint_text().map(with_options),
                outcome_unknown: error.outcome_unknown(),
                problems: Problems::of(error).map(|problems| problems.list.clone()),
            }),
            Self::Usage { message, hint } => Some(Report {
                code: "Usage",
                message: message.clone(),
                hint: hint.clone(),
                outcome_unknown: false,
                problems: None,
            }),
            Self::Io(message) => Some(Report {
                code: "Io",
                message: message.clone(),
                hint: None,
                outcome_unknown: false,
                problems: None,
            }),
        }
    }
}

/// The error's message, with its cause unless the message contains it.
fn with_cause(error: &Error) -> String {
    let message = error.message();
    match std::error::Error::source(error).map(ToString::to_string) {
        Some(cause) if !message.contains(&cause) => format!("{message} ({cause})"),
        _ => message.to_owned(),
    }
}

/// Hints of the library name settings; on the command line they are options.
fn with_options(hint: &str) -> String {
    hint.replace("max_payload", "--max-payload")
        .replace("the busy timeout", "--busy-timeout")
}

/// The same error with its subject in front.
pub(crate) fn about(what: &str, error: &Error) -> Error {
    let message = format!("{what}: {}", with_cause(error));
    error.clone().with_message(message)
}

#[derive(Serialize)]
struct Report {
    code: &'static str,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<String>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    outcome_unknown: bool,
    /// The problems of a configuration file, one by one.
    #[serde(skip_serializing_if = "Option::is_none")]
    problems: Option<Vec<Problem>>,
}

impl Report {
    fn to_text(&self) -> String {
        // The problems of a file have a line each; any other line break is escaped.
        let message = match self.problems {
            Some(_) => self
                .message
                .lines()
                .map(escaped)
                .collect::<Vec<_>>()
                .join("\n  "),
            None => escaped(&self.message).into_owned(),
        };
        let mut text = format!("error[{}]: {message}\n", self.code);
        if self.outcome_unknown {
            text.push_str(
                "note: it may have taken effect all the same; the same id can be published again\n",
            );
        }
        if let Some(hint) = &self.hint {
            text.push_str(&format!("hint: {}\n", escaped(hint)));
        }
        text
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        // EMFILE and ENFILE have no kind of their own.
        match (error.kind(), error.raw_os_error()) {
            (io::ErrorKind::BrokenPipe, _) => Self::BrokenPipe,
            (io::ErrorKind::OutOfMemory, _) | (_, Some(23 | 24)) => Self::Failed(
                Error::new(Code::OutOfResources, error.to_string())
                    .hint("raise the limit of open files, for example: ulimit -n 1024"),
            ),
            _ => Self::Io(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: bus/cli-exit-codes: every error code has the exit code its documentation says
    #[test]
    fn codes_map_to_the_documented_exit_codes() {
        let exit = |code| Stop::from(Error::new(code, "x")).exit_code();
        assert_eq!(exit(Code::InvalidPayloadError), 2);
        assert_eq!(exit(Code::InvalidUrl), 2);
        assert_eq!(exit(Code::InvalidConfig), 2);
        assert_eq!(exit(Code::NoSuchFile), 3);
        assert_eq!(exit(Code::GroupNotFound), 3);
        assert_eq!(exit(Code::DiskFull), 4);
        assert_eq!(exit(Code::Busy), 4);
        assert_eq!(exit(Code::Unavailable), 4);
        assert_eq!(exit(Code::IdReused), 2);
        assert_eq!(exit(Code::NotAFile), 2);
        assert_eq!(exit(Code::NotEverbus), 2);
        assert_eq!(exit(Code::Corrupt), 1);
        assert_eq!(
            Stop::from(io::Error::from(io::ErrorKind::BrokenPipe)).exit_code(),
            0
        );
        assert_eq!(Stop::Interrupted.exit_code(), 130);
    }

    #[test]
    fn a_cause_that_the_message_tells_is_not_told_again() {
        let cause = || io::Error::other("disk on fire");
        let report = |message: &str| {
            let error = Error::new(Code::StorageFailed, message).caused_by(cause());
            Stop::from(error).describe().map(|report| report.message)
        };
        assert_eq!(
            report("writing: disk on fire").as_deref(),
            Some("writing: disk on fire")
        );
        assert_eq!(report("writing").as_deref(), Some("writing (disk on fire)"));
    }

    #[test]
    fn hints_name_options_where_the_library_names_settings() {
        assert_eq!(
            with_options("close it, or raise the busy timeout"),
            "close it, or raise --busy-timeout"
        );
        assert_eq!(with_options("raise max_payload"), "raise --max-payload");
    }
}
