//! What an engine that keeps its own files offers to operators.

use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use crate::broker::BoxFuture;
use crate::error::{Code, Error, Result};
use crate::pattern::Pattern;

/// What to keep, and for how long. Nothing a group still owes work on is ever removed, and events
/// that say themselves when they [expire](crate::Attributes::expires_at) go when they do.
///
/// The default removes nothing else; [`Retention::standard`] is what a bus uses unless told otherwise.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Retention {
    /// Remove events received longer ago than this.
    pub max_age: Option<Duration>,
    /// Keep at most this many events.
    pub max_len: Option<u64>,
    /// Ages of their own for some streams; the first that matches counts, `max_age` for the rest.
    pub streams: Vec<StreamAge>,
    /// Remove payload stages stored longer ago than this.
    pub payloads: Option<Duration>,
    /// Remove dead letters this long after death.
    pub dead_letters: Option<Duration>,
    /// Remove audit records older than this; an anchor keeps the chain verifiable.
    pub audit: Option<Duration>,
    /// Remove rows of the outbox that were sent longer ago than this.
    pub outbox: Option<Duration>,
}

/// How long the events of one stream are kept.
#[derive(Clone, Debug, PartialEq)]
pub struct StreamAge {
    /// Which types are in the stream.
    pub types: Pattern,
    /// Remove those received longer ago than this; `None` keeps them.
    pub max_age: Option<Duration>,
}

const DAY: Duration = Duration::from_secs(24 * 3600);

impl Retention {
    /// Events stay; payload stages go after 14 days, dead letters 30 days after death, sent rows of
    /// the outbox after 7 days.
    pub fn standard() -> Self {
        Self {
            payloads: Some(14 * DAY),
            dead_letters: Some(30 * DAY),
            outbox: Some(7 * DAY),
            ..Self::default()
        }
    }

    /// The ages of the *omni* specification by stream: messages 30 days, identity 90, media 7, agent
    /// 7, access 30, channel 7; system and everything else 30.
    pub fn omni() -> Self {
        let table = [
            ("message.>", 30),
            ("identity.>", 90),
            ("media.>", 7),
            ("agent.>", 7),
            ("access.>", 30),
            ("channel.>", 7),
        ];
        let ages = table.iter().filter_map(|(types, days)| {
            Some(StreamAge {
                types: Pattern::new(types).ok()?,
                max_age: Some(*days * DAY),
            })
        });
        Self {
            max_age: Some(30 * DAY),
            streams: ages.collect(),
            ..Self::standard()
        }
    }

    /// How long events of this type are kept, if they are not kept for ever.
    pub fn age_of(&self, event_type: &str) -> Option<Duration> {
        let own = self.streams.iter().find(|s| s.types.matches(event_type));
        own.map_or(self.max_age, |stream| stream.max_age)
    }
}

/// What retention did, or would do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Pruned {
    /// Events removed.
    pub removed: u64,
    /// Events that are over the limits and were kept, because a group still owes work on them or
    /// they are dead letters.
    pub kept: u64,
    /// Payload stages removed by their age; those of removed events are not counted.
    pub payloads: u64,
    /// Dead letters removed by their age.
    pub dead_letters: u64,
    /// Audit records removed.
    pub audit: u64,
    /// Rows of the outbox removed.
    pub outbox: u64,
    /// Bytes given back to the file system.
    pub freed_bytes: u64,
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

    /// What [`prune`](Self::prune) would do now; nothing is changed.
    fn preview(&self, retention: Retention) -> BoxFuture<'_, Result<Pruned>> {
        let _ = retention;
        Box::pin(std::future::ready(Err(Error::new(
            Code::Unsupported,
            "this engine cannot tell what retention would remove",
        ))))
    }
}
