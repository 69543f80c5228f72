//! What an engine that keeps its own files offers to operators.

use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use crate::broker::BoxFuture;
use crate::error::Result;

/// What to keep. Nothing a group still owes work on is ever removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// Remove events received longer ago than this.
    pub max_age: Option<Duration>,
    /// Keep at most this many events.
    pub max_len: Option<u64>,
}

/// What retention did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Pruned {
    /// Events removed.
    pub removed: u64,
    /// Events that are over the limits and were kept, because a group still owes work on them or
    /// they are dead letters.
    pub kept: u64,
}

/// One thing a check found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked at.
    pub check: String,
    /// Whether it is as it should be.
    pub ok: bool,
    /// What was seen.
    pub detail: String,
}

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CheckReport {
    /// All findings, good ones too.
    pub findings: Vec<Finding>,
}

impl CheckReport {
    /// Whether everything is as it should be.
    pub fn is_ok(&self) -> bool {
        self.findings.iter().all(|f| f.ok)
    }

    /// Adds a finding.
    pub fn add(&mut self, check: impl Into<String>, ok: bool, detail: impl Into<String>) {
        self.findings.push(Finding {
            check: check.into(),
            ok,
            detail: detail.into(),
        });
    }
}

/// An engine that keeps its own file.
pub trait Maintenance: Send + Sync + 'static {
    /// Verifies the file: the structure of the database and the rules of the tables.
    fn check(&self) -> BoxFuture<'_, Result<CheckReport>>;

    /// Copies everything to a new file while the bus runs. `progress` is told pages done and in all.
    fn backup(
        &self,
        target: PathBuf,
        progress: Box<dyn FnMut(u64, u64) + Send>,
    ) -> BoxFuture<'_, Result<()>>;

    /// Removes what retention allows, in small steps that let others through.
    fn prune(&self, retention: Retention) -> BoxFuture<'_, Result<Pruned>>;
}
