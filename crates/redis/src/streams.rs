//! The backlog of a stream: counts it, drops the oldest events of it, and trims the stream.
//!
//! Trimming removes only events that every group has finished, whatever the limit of the stream is.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use everbus_core::{BoxFuture, DROPPED, Depth, Pattern, Result};

use crate::broker::{Redis, Shared};
use crate::client::{Arguments, Read as _};
use crate::groups::Record;
use crate::keys;
use crate::scripts::{DROP, MISSED, TIDY, TRIM};

/// How long a dead letter is kept after it was retried or replaced.
const KEPT_RETRIED: Duration = Duration::from_secs(30 * 24 * 3600);
/// How many records are examined in one step.
const STEP: usize = 200;

/// How much of a stream is kept: a number of events, or the events of a time. It is recorded as `500000 -1`: events and
/// milliseconds, -1 for no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Limit {
    most: Option<u64>,
    age: Option<Duration>,
}

impl Limit {
    fn parse(text: &str) -> Self {
        let mut words = text.split(' ').map(|word| word.parse::<u64>().ok());
        let mut word = || words.next().flatten();
        Self {
            most: word(),
            age: word().map(Duration::from_millis),
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |number: Option<u128>| number.map_or("-1".to_owned(), |n| n.to_string());
        let age = number(self.age.map(|age| age.as_millis()));
        write!(f, "{} {age}", number(self.most.map(u128::from)))
    }
}

impl Shared {
    /// The streams that a pattern covers. The pattern of a declared stream matches by the dotted type.
    fn covered(&self, pattern: &Pattern) -> Vec<String> {
        let registry = self.registry();
        let keys = registry.streams.keys();
        let patterns = std::slice::from_ref(pattern);
        let covered = keys.filter(|key| self.space.wanted(key, patterns));
        covered.cloned().collect()
    }

    /// The covered streams that a group wants.
    fn owed<'a>(&self, covered: &'a [String], record: &Record) -> Result<Vec<&'a String>> {
        let patterns = record.patterns()?;
        let wanted = covered
            .iter()
            .filter(|key| self.space.wanted(key, &patterns));
        Ok(wanted.collect())
    }

    async fn depth(&self, pattern: &Pattern, limit: u64) -> Result<u64> {
        self.load_registry().await?;
        let covered = self.covered(pattern);
        let mut most = 0;
        let groups = self.load_groups().await?;
        // Publishers do not wait for an ephemeral group.
        for (record, _) in groups.iter().filter(|(record, _)| record.owner.is_none()) {
            let keys = self.owed(&covered, record)?;
            if keys.is_empty() {
                continue;
            }
            let standing = self.standing(&record.name, &keys).await?;
            let of_stream = standing.streams.iter().filter(|s| covered.contains(&s.key));
            let owed = of_stream.map(|s| s.unread + s.in_flight + s.waiting).sum();
            most = u64::max(most, owed);
        }
        Ok(most.min(limit))
    }

    async fn drop_oldest(&self, pattern: &Pattern, keep: u64) -> Result<u64> {
        self.load_registry().await?;
        let covered = self.covered(pattern);
        let mut dropped = std::collections::BTreeSet::new();
        for (record, _) in self.load_groups().await? {
            let keys = self.owed(&covered, &record)?;
            if keys.is_empty() {
                continue;
            }
            let mut arguments = Arguments::default();
            arguments
                .text(&record.name)
                .text(keys::group_name(&record.name))
                .text(DROPPED)
                .number(keep)
                .list(&keys);
            // Drops in steps, so that the server is not blocked for long.
            loop {
                let step = self.link.run(&DROP, &arguments).await?.list()?;
                if step.is_empty() {
                    break;
                }
                for member in step {
                    dropped.insert(member.text()?);
                }
            }
        }
        let groups: Vec<_> = self.groups.lock().values().cloned().collect();
        for group in groups {
            group.poke(std::time::Duration::ZERO);
        }
        Ok(dropped.len() as u64)
    }

    /// Removes events that every group has finished from streams that are over their limits of length and age. Events
    /// that other programs removed before groups had read them are counted first.
    pub(crate) async fn trim_all(&self) -> Result<()> {
        let registry = self.load_registry().await?;
        let groups = self.load_groups().await?;
        let recorded = self.recorded_limits().await?;
        let now = self.options.clock.now();
        for key in registry.streams.keys() {
            let (mut wanting, mut others) = (Vec::new(), Vec::new());
            for (record, _) in &groups {
                // No event is kept for an ephemeral group.
                match record.owner.is_none() && self.space.wanted(key, &record.patterns()?) {
                    true => wanting.push(record.name.as_str()),
                    false => others.push(record.name.as_str()),
                }
            }
            self.count_missed(key, &wanting).await;
            let limit = self.limit_of(key, recorded.get(key)).await;
            // By default a stream that no group wants is not trimmed, except a stream of notices: they need no reader.
            let is_notice = self.space.types(key)[0].starts_with("system.");
            let kept = self.options.keep_finished;
            let kept = kept.filter(|_| !wanting.is_empty() || is_notice);
            let most = match (limit.most, limit.age) {
                (Some(most), _) => Some(most),
                (None, Some(_)) => None,
                (None, None) => kept,
            };
            let most = most.map_or(-1, |most| i64::try_from(most).unwrap_or(i64::MAX));
            let oldest = limit
                .age
                .map_or(-1, |age| now.minus(age).as_micros() / 1000);
            if most < 0 && oldest < 0 {
                continue;
            }
            let on_server = |names: &[&str]| -> Vec<String> {
                let names = names.iter().map(|name| keys::group_name(name).to_owned());
                names.collect()
            };
            let mut arguments = Arguments::default();
            arguments
                .text(key)
                .number(most)
                .number(oldest)
                .list(&on_server(&wanting))
                .list(&on_server(&others));
            self.link.run(&TRIM, &arguments).await?;
        }
        Ok(())
    }

    /// Logs an error for events that other programs removed before these groups had read them. A count that fails is
    /// repeated later: a full memory must not prevent trimming.
    pub(crate) async fn count_missed(&self, key: &str, groups: &[&str]) {
        if groups.is_empty() {
            return;
        }
        if let Err(error) = self.try_count_missed(key, groups).await {
            tracing::debug!(target: "everbus::redis", stream = key, %error, "counting missed events");
        }
    }

    async fn try_count_missed(&self, key: &str, groups: &[&str]) -> Result<()> {
        let mut arguments = Arguments::default();
        arguments.text(key).number(groups.len());
        for group in groups {
            arguments.text(group).text(keys::group_name(group));
        }
        let answers = self.link.run(&MISSED, &arguments).await?.list()?;
        for (group, missed) in groups.iter().zip(answers) {
            let missed = missed.number()?;
            if missed > 0 {
                tracing::error!(target: "everbus::redis", group, stream = key, missed, "another program removed events that the group had not read: they are lost to the group");
            }
        }
        Ok(())
    }

    /// The limits that declarations have recorded, by stream. They hold for every process, also for one that declares
    /// nothing.
    async fn recorded_limits(&self) -> Result<HashMap<String, Limit>> {
        let mut all = redis::cmd("HGETALL");
        all.arg(self.space.own("limits"));
        let mut flat = self.link.ask(&all).await?.list()?.into_iter();
        let mut limits = HashMap::new();
        while let (Some(key), Some(text)) = (flat.next(), flat.next()) {
            limits.insert(key.text()?, Limit::parse(&text.text()?));
        }
        Ok(limits)
    }

    /// The limit of a stream: the one that this process declares, otherwise the recorded one, otherwise the default of
    /// this process. A declared limit is recorded.
    async fn limit_of(&self, key: &str, recorded: Option<&Limit>) -> Limit {
        let dotted = self.space.types(key).swap_remove(0);
        let table = self.table.read().clone();
        let by_type = self.type_limits.read().clone();
        let named = by_type.as_ref().and_then(|all| all.by_type.get(&dotted));
        let declared = match table.as_ref().and_then(|table| table.of(&dotted)) {
            Some(stream) => Some(Limit {
                most: stream.limit.as_ref().map(|limit| limit.max_len),
                age: stream.max_age,
            }),
            None => named.map(|limit| Limit {
                most: Some(limit.max_len),
                age: None,
            }),
        };
        if let Some(declared) = declared {
            if recorded != Some(&declared) {
                let mut record = redis::cmd("HSET");
                record.arg(self.space.own("limits")).arg(key);
                // The server refuses this if its memory is full. That must not prevent trimming.
                let _ = self.link.ask(record.arg(declared.to_string())).await;
            }
            return declared;
        }
        if let Some(recorded) = recorded {
            return *recorded;
        }
        let default = by_type.as_ref().and_then(|all| all.default.as_ref());
        Limit {
            // The system's own events are never limited.
            most: default
                .filter(|_| !dotted.starts_with("system."))
                .map(|limit| limit.max_len),
            age: None,
        }
    }

    /// Removes retried letters that are older than [`KEPT_RETRIED`].
    pub(crate) async fn tidy(&self) -> Result<()> {
        for (record, _) in self.load_groups().await? {
            let mut cursor = "0".to_owned();
            loop {
                let mut arguments = Arguments::default();
                arguments
                    .text(&record.name)
                    .millis(KEPT_RETRIED)
                    .text(&cursor)
                    .number(STEP);
                cursor = self.link.run(&TIDY, &arguments).await?.text()?;
                if cursor == "0" {
                    break;
                }
            }
        }
        Ok(())
    }
}

impl Depth for Redis {
    fn depth(&self, stream: Pattern, limit: u64) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            self.shared.depth(&stream, limit).await
        })
    }

    fn drop_oldest(&self, stream: Pattern, keep: u64) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            self.shared.drop_oldest(&stream, keep).await
        })
    }
}
