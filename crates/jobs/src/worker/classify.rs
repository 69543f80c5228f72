//! Classifies failures: by the report of the child, by patterns in its error text, by its exit code or signal.

use everbus::{Code, Error, Result};
use regex::bytes::{Regex, RegexBuilder};

use super::child::{Ended, Exit};
use crate::events::ErrorCategory;

/// Decides the category of a failure. The first rule that matches decides:
///
/// 1. The category that the child reported.
/// 2. The patterns that were added with [`pattern`](Self::pattern), in their order.
/// 3. The exit code: those set with [`exit_code`](Self::exit_code), then those of `sysexits.h` and of shells.
/// 4. The signal: `SIGSEGV` and similar signals are `programming`. Other signals came from outside: `server-error`.
/// 5. The standard patterns: texts of common errors such as `ETIMEDOUT` and `429`.
/// 6. The fallback, by default `server-error`, which is retried.
#[derive(Clone, Debug)]
pub struct Classifier {
    patterns: Vec<(Regex, ErrorCategory)>,
    codes: Vec<(i32, ErrorCategory)>,
    standard: Vec<(Regex, ErrorCategory)>,
    fallback: ErrorCategory,
}

/// Patterns for common error texts, the most specific first. HTTP status numbers must be whole words.
const STANDARD: [(&str, ErrorCategory); 7] = [
    (
        r"\b429\b|rate.?limit|too many requests|quota exceeded",
        ErrorCategory::RateLimit,
    ),
    (
        r"\b40[13]\b|unauthori[sz]ed|forbidden|(invalid|wrong|missing|expired) (api.?key|token|credentials?|password)|authentication (failed|error)|permission denied",
        ErrorCategory::Auth,
    ),
    (
        r"ETIMEDOUT|ESOCKETTIMEDOUT|timed? ?out|deadline exceeded",
        ErrorCategory::Timeout,
    ),
    (
        r"ECONNREFUSED|ECONNRESET|ECONNABORTED|ENOTFOUND|EAI_AGAIN|EHOSTUNREACH|ENETUNREACH|EPIPE|connection (refused|reset|closed|aborted)|network is unreachable|name resolution|could not resolve|no route to host",
        ErrorCategory::Network,
    ),
    (
        r"\b50[0234]\b|internal server error|bad gateway|service unavailable|overloaded",
        ErrorCategory::ServerError,
    ),
    (
        r"\b(400|422)\b|validation ?error|invalid (input|argument|payload|json|request)|schema violation|missing required",
        ErrorCategory::Validation,
    ),
    (
        r"\b(Type|Reference|Syntax|Name|Attribute|Index|Key|ZeroDivision|Assertion|Import|ModuleNotFound|Memory|Recursion)Error\b|NullPointerException|panicked at|assertion failed|segmentation fault|command not found",
        ErrorCategory::Programming,
    ),
];

/// The codes of `sysexits.h`, and those of shells.
const EXIT_CODES: [(i32, ErrorCategory); 12] = [
    (64, ErrorCategory::Validation),
    (65, ErrorCategory::Validation),
    (66, ErrorCategory::Validation),
    (68, ErrorCategory::Network),
    (69, ErrorCategory::ServerError),
    (70, ErrorCategory::Programming),
    (75, ErrorCategory::ServerError),
    (76, ErrorCategory::Network),
    (77, ErrorCategory::Auth),
    (78, ErrorCategory::Validation),
    (126, ErrorCategory::Programming),
    (127, ErrorCategory::Programming),
];

/// The signals that a bug in the process causes: ILL, TRAP, ABRT, BUS, FPE, SEGV, SYS.
const OWN_SIGNALS: [i32; 7] = [4, 5, 6, 7, 8, 11, 31];

impl Default for Classifier {
    fn default() -> Self {
        let standard = STANDARD
            .iter()
            .filter_map(|(text, category)| Some((pattern(text).ok()?, *category)));
        Self {
            patterns: Vec::new(),
            codes: Vec::new(),
            standard: standard.collect(),
            fallback: ErrorCategory::ServerError,
        }
    }
}

impl Classifier {
    /// Adds a regular expression. It is searched, ignoring case, in the error that the child reported, or else in the
    /// end of standard error. The first pattern that matches counts.
    pub fn pattern(mut self, text: &str, category: ErrorCategory) -> Result<Self> {
        let pattern = pattern(text).map_err(|error| {
            Error::new(
                Code::InvalidSetting,
                format!("{text:?} is not a regular expression"),
            )
            .caused_by(error)
        })?;
        self.patterns.push((pattern, category));
        Ok(self)
    }

    /// Sets the category of an exit code.
    #[must_use]
    pub fn exit_code(mut self, code: i32, category: ErrorCategory) -> Self {
        self.codes.insert(0, (code, category));
        self
    }

    /// Sets the category of a failure that no rule matches.
    #[must_use]
    pub fn otherwise(mut self, category: ErrorCategory) -> Self {
        self.fallback = category;
        self
    }

    /// The category of a text.
    pub fn of_text(&self, text: &str) -> ErrorCategory {
        let rules = [&self.patterns, &self.standard];
        let found = rules.into_iter().find_map(|rules| search(rules, text));
        found.unwrap_or(self.fallback)
    }

    /// The category and the error text of a child that ended with a signal or an exit code other than 0.
    pub(super) fn of_child(&self, ended: &Ended) -> (ErrorCategory, String) {
        let reported = ended.error.as_ref();
        let text = match (reported, last_line(&ended.stderr)) {
            (Some(reported), _) => reported.message.clone(),
            (None, Some(line)) => format!("{line} ({})", ended.exit),
            (None, None) => format!("the child ended with {}", ended.exit),
        };
        let said = reported.and_then(|reported| reported.category.as_deref());
        let searched = match reported {
            Some(reported) => &reported.message,
            None => &ended.stderr,
        };
        let of_code = || {
            let code = ended.exit.code()?;
            let codes = self.codes.iter().chain(&EXIT_CODES);
            let mut codes = codes.filter(|(known, _)| *known == code);
            codes.next().map(|(_, category)| *category)
        };
        let of_signal = || match ended.exit {
            Exit::Signal(signal) if OWN_SIGNALS.contains(&signal) => {
                Some(ErrorCategory::Programming)
            }
            Exit::Signal(_) => Some(ErrorCategory::ServerError),
            Exit::Code(_) => None,
        };
        let category = said
            .and_then(named)
            .or_else(|| search(&self.patterns, searched))
            .or_else(of_code)
            .or_else(of_signal)
            .or_else(|| search(&self.standard, searched));
        (category.unwrap_or(self.fallback), text)
    }
}

fn search(rules: &[(Regex, ErrorCategory)], text: &str) -> Option<ErrorCategory> {
    let mut rules = rules.iter();
    let found = rules.find(|(pattern, _)| pattern.is_match(text.as_bytes()));
    found.map(|(_, category)| *category)
}

fn pattern(text: &str) -> std::result::Result<Regex, regex::Error> {
    // ASCII only: the Unicode tables are large.
    RegexBuilder::new(text)
        .case_insensitive(true)
        .unicode(false)
        .build()
}

/// A category by its name.
pub(crate) fn named(name: &str) -> Option<ErrorCategory> {
    let category: ErrorCategory =
        serde_json::from_value(serde_json::Value::String(name.to_owned())).ok()?;
    // Only a producer may cancel a task.
    (category != ErrorCategory::Cancelled).then_some(category)
}

fn last_line(text: &str) -> Option<&str> {
    let line = text.lines().rev().map(str::trim).find(|l| !l.is_empty())?;
    Some(cut(line, 500))
}

/// The first `most` bytes of a text, cut at a character boundary.
pub(super) fn cut(text: &str, most: usize) -> &str {
    &text[..text.floor_char_boundary(most)]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::events::Json;
    use crate::worker::child::ReportedError;
    use ErrorCategory::*;

    fn ended(exit: Exit, stderr: &str) -> Ended {
        Ended {
            exit,
            stopped: None,
            elapsed: Duration::ZERO,
            output: Ok(Json::null()),
            usage: None,
            error: None,
            stderr: stderr.to_owned(),
            peak_memory: 0,
        }
    }

    #[test]
    fn common_errors_are_known_by_their_text() {
        let classifier = Classifier::default();
        for (text, category) in [
            ("Error: connect ETIMEDOUT 10.0.0.1:443", Timeout),
            ("Error: connect ECONNREFUSED 127.0.0.1:5432", Network),
            ("curl: (6) Could not resolve host: example.com", Network),
            ("HTTP 429 Too Many Requests", RateLimit),
            ("server answered 503 Service Unavailable", ServerError),
            ("401 Unauthorized", Auth),
            ("Error: Invalid API key", Auth),
            ("ValidationError: name is required", Validation),
            ("TypeError: undefined is not a function", Programming),
            ("thread 'main' panicked at src/main.rs:3", Programming),
            // Numbers inside other numbers mean nothing.
            ("wrote 42913 rows and 150300 bytes", ServerError),
        ] {
            assert_eq!(classifier.of_text(text), category, "{text}");
        }
    }

    #[test]
    fn exit_codes_and_signals_say_something_too() {
        let classifier = Classifier::default().exit_code(3, RateLimit);
        for (exit, stderr, category) in [
            (Exit::Code(65), "", Validation),
            (Exit::Code(75), "", ServerError),
            (Exit::Code(77), "", Auth),
            (Exit::Code(127), "", Programming),
            (Exit::Code(3), "", RateLimit),
            (Exit::Code(1), "", ServerError),
            (Exit::Code(1), "KeyError: 'store'", Programming),
            // A known exit code decides before the standard patterns.
            (Exit::Code(75), "KeyError: 'store'", ServerError),
            (Exit::Signal(11), "", Programming),
            (Exit::Signal(9), "", ServerError),
            (Exit::Signal(15), "", ServerError),
        ] {
            let (found, text) = classifier.of_child(&ended(exit, stderr));
            assert_eq!(found, category, "{exit} {stderr}");
            assert!(text.contains(&exit.to_string()), "{text}");
        }
    }

    #[test]
    fn what_the_child_reports_wins_then_the_programs_patterns() {
        let classifier = Classifier::default()
            .pattern("out of stock", Validation)
            .unwrap();
        let mut ended = ended(Exit::Code(75), "warning\nitem 7 OUT OF STOCK\n");
        let found = classifier.of_child(&ended);
        assert_eq!(
            found,
            (Validation, "item 7 OUT OF STOCK (exit code 75)".into())
        );
        let report = |category: Option<&str>| {
            Some(ReportedError {
                category: category.map(str::to_owned),
                message: "no access".into(),
            })
        };
        ended.error = report(Some("auth"));
        assert_eq!(classifier.of_child(&ended), (Auth, "no access".into()));
        // Unknown and reserved names are ignored.
        for name in [None, Some("unheard of"), Some("cancelled")] {
            ended.error = report(name);
            assert_eq!(classifier.of_child(&ended).0, ServerError);
        }
        assert!(Classifier::default().pattern("(", Auth).is_err());
    }
}
