//! All problems of a file, each with its place. They are collected, so that a reader can fix the file in
//! one pass.

use std::fmt;

use everbus_core::{Code, Error};
use serde::Serialize;

use super::redact::redacted;

/// At most this many are shown; the rest is counted.
const SHOWN: usize = 20;
/// At most this many are kept.
const KEPT: usize = 1000;
/// A quoted text is cut after this many characters.
const LONGEST_QUOTE: usize = 60;

/// A position in the file; both count from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) line: usize,
    pub(super) column: usize,
}

/// One problem of a configuration file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Problem {
    /// The line, from 1; `None` if the problem concerns the whole file.
    pub line: Option<usize>,
    /// The column, from 1, in characters.
    pub column: Option<usize>,
    /// What is wrong.
    pub message: String,
    /// How to fix it.
    pub hint: String,
}

/// All problems of a configuration file, in the order of its lines.
///
/// It is the cause of an `InvalidConfig` error:
///
/// ```
/// use everbus::Config;
/// use everbus::config::Problems;
/// let error = Config::parse("brocker: {}\nstreams: 5\n", "everbus.yaml").unwrap_err();
/// let problems = Problems::of(&error).unwrap();
/// assert_eq!(problems.list.len(), 2);
/// assert_eq!(problems.list[0].line, Some(1));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Problems {
    /// The name of the file.
    pub file: String,
    /// The problems; at most a thousand are kept.
    pub list: Vec<Problem>,
    /// The total number of problems.
    pub total: usize,
}

impl Problems {
    pub(super) fn new(file: &str) -> Self {
        Self {
            file: file.chars().flat_map(visible).collect(),
            list: Vec::new(),
            total: 0,
        }
    }

    /// The problems behind an error, if it is an `InvalidConfig` error.
    pub fn of(error: &Error) -> Option<&Self> {
        let mut cause = std::error::Error::source(error);
        while let Some(source) = cause {
            if let Some(problems) = source.downcast_ref() {
                return Some(problems);
            }
            cause = source.source();
        }
        None
    }

    pub(super) fn add(&mut self, at: Place, message: impl Into<String>, hint: impl Into<String>) {
        self.push(Some(at), message.into(), hint.into());
    }

    /// A problem of the file as a whole.
    pub(super) fn add_to_file(&mut self, message: impl Into<String>, hint: impl Into<String>) {
        self.push(None, message.into(), hint.into());
    }

    fn push(&mut self, at: Option<Place>, message: String, hint: String) {
        self.total += 1;
        if self.list.len() < KEPT {
            self.list.push(Problem {
                line: at.map(|place| place.line),
                column: at.map(|place| place.column),
                message,
                hint,
            });
        }
    }

    /// The error for all of these problems.
    pub(super) fn into_error(mut self) -> Error {
        self.list
            .sort_by_key(|problem| (problem.line, problem.column));
        let hint = match self.list.as_slice() {
            [only] => only.hint.clone(),
            _ => "docs/book/configuration.md lists every key, its unit and its default".to_owned(),
        };
        Error::new(Code::InvalidConfig, self.to_string())
            .hint(hint)
            .caused_by(self)
    }

    #[cfg(test)]
    pub(super) fn lines(&self) -> Vec<String> {
        let lines = self.list.iter();
        lines
            .map(|problem| format!("{}; {}", self.line(problem), problem.hint))
            .collect()
    }

    fn line(&self, problem: &Problem) -> String {
        match (problem.line, problem.column) {
            (Some(line), Some(column)) => {
                format!("{}:{line}:{column}: {}", self.file, problem.message)
            }
            _ => format!("{}: {}", self.file, problem.message),
        }
    }
}

/// One line for each problem. The hint of a single problem is the hint of the error.
impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let [only] = self.list.as_slice() {
            return f.write_str(&self.line(only));
        }
        write!(f, "{} problems in {}", self.total, self.file)?;
        for problem in self.list.iter().take(SHOWN) {
            write!(f, "\n{}; {}", self.line(problem), problem.hint)?;
        }
        match self.total.saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, "\nand {more} more"),
        }
    }
}

impl std::error::Error for Problems {}

/// A text of the file in quotes: on one line, cut to a length, without possible passwords.
pub(super) fn quoted(text: &str) -> String {
    let text = redacted(text);
    let mut shown: String = text.chars().take(LONGEST_QUOTE).flat_map(visible).collect();
    if text.chars().nth(LONGEST_QUOTE).is_some() {
        shown.push('…');
    }
    format!("\"{shown}\"")
}

/// The character, escaped if it is not visible.
fn visible(c: char) -> impl Iterator<Item = char> {
    let hidden = c.is_control() || matches!(c, '\u{2028}' | '\u{2029}');
    let escaped = hidden.then(|| c.escape_default());
    escaped.into_iter().flatten().chain((!hidden).then_some(c))
}

/// The known word that was most likely meant; case and hyphens are ignored.
pub(super) fn nearest<'a>(written: &str, known: &[&'a str]) -> Option<&'a str> {
    if written.chars().nth(64).is_some() {
        return None;
    }
    let written = written.to_lowercase().replace('-', "_");
    // `timeout` for `timeout_duration`, `breaker` for `circuit_breaker`.
    let part = |word: &&&str| written.len() >= 4 && word.contains(&written);
    everbus_core::suggest::nearest(&written, known.iter().copied())
        .or_else(|| known.iter().find(part).copied())
}

/// `a`, `b` and `c`.
pub(super) fn listed(words: &[&str]) -> String {
    match words {
        [] => String::new(),
        [only] => (*only).to_owned(),
        [most @ .., last] => format!("{} and {last}", most.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_key_is_what_was_meant() {
        let known = [
            "criticality",
            "circuit_breaker",
            "timeout_duration",
            "maxlen",
            "max_attempts",
        ];
        for (written, meant) in [
            ("citicality", Some("criticality")),
            ("Criticality", Some("criticality")),
            ("critiaclity", Some("criticality")),
            ("circuit-breaker", Some("circuit_breaker")),
            ("breaker", Some("circuit_breaker")),
            ("timeout", Some("timeout_duration")),
            ("max_len", Some("maxlen")),
            ("max_atempts", Some("max_attempts")),
            ("frobnicate", None),
            ("", None),
        ] {
            assert_eq!(nearest(written, &known), meant, "{written}");
        }
        assert_eq!(nearest(&"x".repeat(100_000), &known), None);
    }

    #[test]
    fn many_problems_are_sorted_and_bounded() {
        let mut problems = Problems::new("a\nb.yaml");
        for line in (1..=2000).rev() {
            problems.add(Place { line, column: 1 }, "x", "y");
        }
        let error = problems.into_error();
        let lines: Vec<&str> = error.message().lines().collect();
        assert_eq!(lines.len(), 22);
        assert_eq!(lines[0], "2000 problems in a\\nb.yaml");
        assert_eq!(lines[21], "and 1980 more");
        assert_eq!(Problems::of(&error).unwrap().list.len(), 1000);
    }

    #[test]
    fn quoted_texts_are_short_and_on_one_line() {
        assert_eq!(quoted("a\nb\u{1b}"), "\"a\\nb\\u{1b}\"");
        assert!(quoted(&"x".repeat(1000)).chars().count() < 70);
        assert_eq!(quoted("redis://u:pw@h"), "\"redis://***@h\"");
    }
}
