//! The scopes of tokens.

use std::fmt;
use std::str::FromStr;

use everbus::{Code, Error};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a token allows. `admin` includes every other scope. The other scopes include only themselves.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// Publish events, submit tasks and jobs.
    Publish,
    /// Fetch and settle events as a consumer, and declare consumers.
    Consume,
    /// Read events, groups, dead letters, tasks, jobs and metrics.
    Read,
    /// Retry, edit and purge dead letters, replay, pause and delete groups, resume and cancel jobs and tasks, change
    /// schedules.
    Operate,
    /// Everything, tokens included.
    Admin,
}

impl Scope {
    /// Every scope.
    pub const ALL: &'static [Scope] = &[
        Scope::Publish,
        Scope::Consume,
        Scope::Read,
        Scope::Operate,
        Scope::Admin,
    ];

    /// The name in settings and documents.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Publish => "publish",
            Self::Consume => "consume",
            Self::Read => "read",
            Self::Operate => "operate",
            Self::Admin => "admin",
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Scope {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let found = Self::ALL.iter().find(|scope| scope.as_str() == name);
        found.copied().ok_or_else(|| {
            Error::new(Code::InvalidSetting, format!("{name:?} is not a scope"))
                .hint("one of publish, consume, read, operate, admin")
        })
    }
}
