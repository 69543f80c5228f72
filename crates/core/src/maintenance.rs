//! Maintenance of an engine that keeps its own files: retention, checks, backups.

use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use crate::broker::BoxFuture;
use crate::clock_record::{ClockDoubt, ClockRecord};
use crate::error::{Code, Error, Result};
use crate::pattern::Pattern;
use crate::stream::Streams;
use crate::time::Timestamp;

/// What to keep, and for how long. An event that is pending in a group is never removed; events with an
/// [expiry time](crate::Attributes::expires_at) are removed after it.
///
/// The default removes nothing else; [`Retention::standard`] is the default of a bus.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Retention {
    /// Remove events received longer ago than this.
    pub max_age: Option<Duration>,
    /// Keep at most this many events.
    pub max_len: Option<u64>,
    /// Ages for single streams; the first match counts, `max_age` for the rest.
    pub streams: Vec<StreamAge>,
    /// Remove payload stages stored longer ago than this.
    pub payloads: Option<Duration>,
    /// Remove dead letters this long after their final failure. Dead letters of the outbox are removed with their rows.
    /// The events of other dead letters stay until they are removed by their own age. A group whose open dead letter is
    /// removed counts as having skipped the event, with [`letter_kept_for`](crate::letter_kept_for) as the reason.
    pub dead_letters: Option<Duration>,
    /// Remove audit records older than this; an anchor keeps the chain verifiable.
    pub audit: Option<Duration>,
    /// Remove rows of the outbox that were sent longer ago than this.
    pub outbox: Option<Duration>,
}

/// How long the events of one stream are kept.
#[derive(Clone, Debug, PartialEq)]
pub struct StreamAge {
    /// The event types of the stream.
    pub types: Pattern,
    /// Removes events received longer ago than this; `None` keeps them.
    pub max_age: Option<Duration>,
}

const DAY: Duration = Duration::from_secs(24 * 3600);

impl Retention {
    /// Keeps events; removes payload stages after 14 days, dead letters 30 days after their final failure,
    /// sent rows of the outbox after 7 days.
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
        let rest = Self {
            max_age: Some(30 * DAY),
            ..Self::standard()
        };
        rest.with_streams(&Streams::omni())
    }

    /// Adds the ages of streams after those that are set already: the first match counts.
    #[must_use]
    pub fn with_streams(mut self, streams: &Streams) -> Self {
        let aged = streams.iter().filter(|stream| stream.max_age.is_some());
        self.streams.extend(aged.map(|stream| StreamAge {
            types: stream.types().clone(),
            max_age: stream.max_age,
        }));
        self
    }

    /// How long events of this type are kept; `None`: for ever.
    pub fn age_of(&self, event_type: &str) -> Option<Duration> {
        let own = self.streams.iter().find(|s| s.types.matches(event_type));
        own.map_or(self.max_age, |stream| stream.max_age)
    }

    /// The longest age of any event; `None` if some are kept for ever.
    pub fn longest(&self) -> Option<Duration> {
        let mut ages = self.streams.iter().map(|stream| stream.max_age);
        ages.try_fold(self.max_age?, |longest, age| Some(longest.max(age?)))
    }

    /// The name of the periodic duty for this policy. Buses with different policies for
    /// one store each run their own.
    pub fn duty(&self) -> String {
        // FNV-1a: the same in every process; an attacker gains nothing by a collision.
        let text = format!("{self:?}");
        let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        format!("{RETENTION_DUTY}/{hash:016x}")
    }

    /// Refuses ages of zero, which would remove new data.
    pub fn validate(&self) -> Result<()> {
        let streams = self.streams.iter().map(|s| (s.types.as_str(), s.max_age));
        let single = [
            ("max_age", self.max_age),
            ("payloads", self.payloads),
            ("dead_letters", self.dead_letters),
            ("audit", self.audit),
            ("outbox", self.outbox),
        ];
        match single
            .into_iter()
            .chain(streams)
            .find(|(_, age)| age.is_some_and(|a| a.is_zero()))
        {
            None => Ok(()),
            Some((what, _)) => Err(Error::new(
                Code::InvalidSetting,
                format!("the retention of {what} is zero"),
            )
            .hint("leave it out to keep everything, or say for how long: 30d")),
        }
    }
}

/// The result of retention, or of a preview.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Pruned {
    /// Events removed.
    pub removed: u64,
    /// Events over the limits that were kept, because they are pending in a group or are dead letters.
    pub kept: u64,
    /// Payload stages removed by their own age. Those that go with their event are not counted.
    pub payloads: u64,
    /// Dead letters removed by age, those of the outbox included. Their events are counted only if they
    /// were removed as well.
    pub dead_letters: u64,
    /// Audit records removed.
    pub audit: u64,
    /// Rows of the outbox removed.
    pub outbox: u64,
    /// Bytes returned to the file system; unknown in a preview.
    pub freed_bytes: u64,
}

impl Pruned {
    /// The same without the freed space, which differs from run to run and which a preview cannot know.
    pub fn outcome(self) -> Self {
        Self {
            freed_bytes: 0,
            ..self
        }
    }
}

impl std::ops::AddAssign for Pruned {
    fn add_assign(&mut self, more: Self) {
        self.removed += more.removed;
        self.kept += more.kept;
        self.payloads += more.payloads;
        self.dead_letters += more.dead_letters;
        self.audit += more.audit;
        self.outbox += more.outbox;
        self.freed_bytes += more.freed_bytes;
    }
}

/// The stored data that retention may remove some day.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Holdings {
    /// The events, by type, in the order of the names.
    pub types: Vec<TypeHoldings>,
    /// Payload stages.
    pub payloads: Held,
    /// Dead letters, open and retried, by their final failure; those of the outbox included.
    pub dead_letters: Held,
    /// Audit records.
    pub audit: Held,
    /// Rows of the outbox that were sent.
    pub outbox: Held,
    /// Events with an expiry time; `oldest` is the next expiry.
    pub expiring: Held,
    /// Set if the clock is in doubt; then retention does not run by itself.
    pub clock: Option<ClockDoubt>,
}

/// The events of one type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TypeHoldings {
    /// The type.
    pub event_type: String,
    /// How many there are.
    pub events: u64,
    /// When the oldest was received.
    pub oldest: Timestamp,
}

/// A number of items and the oldest time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Held {
    /// How many.
    pub count: u64,
    /// The time of the oldest.
    pub oldest: Option<Timestamp>,
}

/// The prefix of the names of retention duties, and the name of the record of the last run.
pub const RETENTION_DUTY: &str = "retention";

/// One finding of a check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was checked.
    pub check: String,
    /// Whether it is correct.
    pub ok: bool,
    /// The details.
    pub detail: String,
}

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CheckReport {
    /// All findings, good ones too.
    pub findings: Vec<Finding>,
}

impl CheckReport {
    /// Whether there are no problems.
    pub fn is_ok(&self) -> bool {
        self.findings.iter().all(|f| f.ok)
    }

    /// Adds the state of the clock. A doubt is reported, but is not a problem of the store.
    pub fn note_clock(&mut self, known: &ClockRecord) {
        let detail = match &known.doubt {
            Some(doubt) => format!("in doubt: {doubt}"),
            None => format!("trusted, last seen at {}", known.seen),
        };
        self.add("clock", true, detail);
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

    /// Copies everything to a new file while the bus runs. `progress` gets the pages done and the total.
    fn backup(
        &self,
        target: PathBuf,
        progress: Box<dyn FnMut(u64, u64) + Send>,
    ) -> BoxFuture<'_, Result<()>>;

    /// Removes what retention allows, in small steps, so that other writers are not blocked.
    fn prune(&self, retention: Retention) -> BoxFuture<'_, Result<Pruned>> {
        self.prune_watched(retention, Box::new(|_| {}))
    }

    /// Like [`prune`](Self::prune); calls `progress` from time to time with the result so far. If the future is dropped,
    /// the work ends between two steps.
    fn prune_watched(
        &self,
        retention: Retention,
        progress: Box<dyn FnMut(Pruned) + Send>,
    ) -> BoxFuture<'_, Result<Pruned>>;

    /// What [`prune`](Self::prune) would do now; nothing is changed.
    fn preview(&self, retention: Retention) -> BoxFuture<'_, Result<Pruned>> {
        let _ = retention;
        Box::pin(std::future::ready(Err(Error::new(
            Code::Unsupported,
            "this engine cannot tell what retention would remove",
        ))))
    }

    /// The stored data, by type and kind.
    fn holdings(&self) -> BoxFuture<'_, Result<Holdings>> {
        Box::pin(std::future::ready(Err(Error::new(
            Code::Unsupported,
            "this engine cannot list its stored data",
        ))))
    }

    /// Checks the clock before data is removed by age. Returns a doubt if the clock has jumped ahead, and has not run
    /// without a jump for long enough since. An engine that uses the clock of its server may always return `None`.
    fn look_at_clock(&self) -> BoxFuture<'_, Result<Option<ClockDoubt>>> {
        Box::pin(std::future::ready(Ok(None)))
    }

    /// Ends the doubt about the clock: an operator has confirmed that it is right.
    fn trust_clock(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAYS: fn(u32) -> Duration = |days| days * DAY;

    // conformance: omni/stream-ages: messages are kept 30 days, identity 90, media 7, agent 7, access 30, channel 7
    // conformance: omni/payload-age: payload stages are kept 14 days, dead letters 30, event metadata by stream
    #[test]
    fn the_ages_of_the_omni_table() {
        let omni = Retention::omni();
        for (event_type, days) in [
            ("message.received", 30),
            ("identity.created", 90),
            ("media.processed", 7),
            ("agent.task.failed", 7),
            ("access.denied", 30),
            ("channel.connected", 7),
            ("system.dead_letter", 30),
        ] {
            assert_eq!(omni.age_of(event_type), Some(DAYS(days)), "{event_type}");
        }
        assert_eq!(omni.payloads, Some(DAYS(14)));
        assert_eq!(omni.dead_letters, Some(DAYS(30)));
        assert_eq!(omni.longest(), Some(DAYS(90)));
        assert!(omni.validate().is_ok());
    }

    // conformance: memory/retention-default: history keeps events, stages go after 14 days, dead letters 30 days after death
    #[test]
    fn the_standard_keeps_events() {
        let standard = Retention::standard();
        assert_eq!(standard.age_of("anything"), None);
        assert_eq!(standard.longest(), None);
        assert_eq!(standard.payloads, Some(DAYS(14)));
        assert_eq!(standard.dead_letters, Some(DAYS(30)));
    }

    #[test]
    fn the_first_stream_that_matches_counts_and_zero_is_refused() {
        let stream = |types: &str, max_age| StreamAge {
            types: Pattern::new(types).unwrap(),
            max_age,
        };
        let mut retention = Retention {
            max_age: Some(DAYS(3)),
            streams: vec![stream("a.b", None), stream("a.>", Some(DAYS(1)))],
            ..Retention::default()
        };
        assert_eq!(retention.age_of("a.b"), None);
        assert_eq!(retention.age_of("a.c"), Some(DAYS(1)));
        assert_eq!(retention.age_of("b"), Some(DAYS(3)));
        assert_eq!(retention.longest(), None, "a.b is kept for ever");
        retention.streams[0].max_age = Some(Duration::ZERO);
        assert_eq!(
            retention.validate().unwrap_err().code(),
            Code::InvalidSetting
        );
    }
}
