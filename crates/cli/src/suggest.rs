//! Suggested commands, for example for the next page. They can be pasted into a shell as they are.

use std::fmt;

use crate::open::Target;
use crate::output::shell_word;

/// A command line being built.
pub(crate) struct Suggestion(String);

impl Suggestion {
    /// A command on the same file or engine.
    pub(crate) fn new(target: &Target, command: &str) -> Self {
        Self(format!("everbus {} {command}", target.as_option()))
    }

    /// An option that has a value, if it has one.
    pub(crate) fn option<T: ToString>(mut self, name: &str, value: Option<T>) -> Self {
        if let Some(value) = value {
            let word = shell_word(&value.to_string());
            self.0.push_str(&format!(" {name} {word}"));
        }
        self
    }

    /// An option without a value, if it is set.
    pub(crate) fn flag(mut self, name: &str, is_set: bool) -> Self {
        if is_set {
            self.0.push_str(&format!(" {name}"));
        }
        self
    }
}

impl fmt::Display for Suggestion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
