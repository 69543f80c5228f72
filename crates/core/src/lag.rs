//! The lag of a group: by event type, as engines count it, and by stream, as it is shown.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use crate::group::GroupInfo;
use crate::stream::Streams;
use crate::time::Timestamp;

/// The pending work of a group, for one event type or one stream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Lag {
    /// Matching events that the group has not reached.
    pub behind: u64,
    /// Events delivered and not settled.
    pub in_flight: u64,
    /// Failed events that wait for their next attempt, and released ones.
    pub waiting: u64,
    /// How many of the `waiting` events wait because no process has a handler for them.
    pub unhandled: u64,
    /// Open dead letters.
    pub dead_letters: u64,
    /// Events that the server removed by their age before the group received them. The engine counts only events that
    /// the group has not moved past yet, so this becomes zero again. Events that the group does not want may be among
    /// them.
    #[serde(skip_serializing_if = "is_zero")]
    pub dropped: u64,
    /// When the oldest event that is not settled was received.
    pub oldest: Option<Timestamp>,
}

impl Lag {
    /// No lag.
    pub fn new() -> Self {
        Self::default()
    }

    /// All events that are not settled.
    pub fn unsettled(&self) -> u64 {
        self.behind + self.in_flight + self.waiting
    }

    /// How long the oldest unsettled event has been waiting; zero if there is none.
    pub fn behind_for(&self, now: Timestamp) -> Duration {
        self.oldest.map(|at| now.since(at)).unwrap_or_default()
    }

    /// Notes that an event received at this time is not settled.
    pub fn note_oldest(&mut self, received_at: Timestamp) {
        let known = self.oldest.unwrap_or(received_at);
        self.oldest = Some(known.min(received_at));
    }

    /// Adds the lag of another type.
    pub fn add(&mut self, other: &Lag) {
        self.behind += other.behind;
        self.in_flight += other.in_flight;
        self.waiting += other.waiting;
        self.unhandled += other.unhandled;
        self.dead_letters += other.dead_letters;
        self.dropped += other.dropped;
        if let Some(oldest) = other.oldest {
            self.note_oldest(oldest);
        }
    }

    /// The sum over several types.
    pub fn sum<'a>(all: impl IntoIterator<Item = &'a Lag>) -> Self {
        all.into_iter().fold(Self::new(), |mut sum, lag| {
            sum.add(lag);
            sum
        })
    }
}

/// The lag of a group in one stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct StreamLag {
    /// The name of the stream.
    pub stream: Arc<str>,
    /// The lag.
    #[serde(flatten)]
    pub lag: Lag,
    /// How long the oldest unsettled event has been waiting; zero if there is none.
    #[serde(rename = "behind_ms", serialize_with = "crate::group::as_millis")]
    pub behind_for: Duration,
    /// The age at which the server removes events, also events that the group has not received; `None` if it removes
    /// none by age.
    #[serde(
        rename = "max_age_ms",
        serialize_with = "crate::group::as_millis_if_any",
        skip_serializing_if = "Option::is_none"
    )]
    pub max_age: Option<Duration>,
}

impl StreamLag {
    /// The lag in a stream.
    pub fn new(stream: Arc<str>, lag: Lag, now: Timestamp) -> Self {
        Self {
            behind_for: lag.behind_for(now),
            stream,
            lag,
            max_age: None,
        }
    }

    /// Sets [`max_age`](Self::max_age).
    #[must_use]
    pub fn with_max_age(mut self, age: Option<Duration>) -> Self {
        self.max_age = age;
        self
    }

    /// The age of the oldest unsettled event as a fraction of the age at which events are removed: at 1 it is removed.
    /// `None` if no event is removed by its age.
    pub fn age_used(&self) -> Option<f64> {
        let age = self.max_age.filter(|age| !age.is_zero())?;
        Some(self.behind_for.as_secs_f64() / age.as_secs_f64())
    }
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl GroupInfo {
    /// The total lag.
    pub fn lag(&self) -> Lag {
        Lag {
            behind: self.behind,
            in_flight: self.in_flight,
            waiting: self.waiting,
            unhandled: self.unhandled,
            dead_letters: self.dead_letters,
            dropped: self.streams.iter().map(|of| of.lag.dropped).sum(),
            oldest: self.oldest,
        }
    }

    /// Fills [`streams`](Self::streams) by the routing table, unless the engine has filled it. There is an entry for
    /// each stream that the group reads or has pending events in, in the order of the table. Events of a type that no
    /// stream covers any more are only in the totals of the group.
    #[must_use]
    pub fn with_streams(mut self, table: &Streams, now: Timestamp) -> Self {
        if !self.streams.is_empty() {
            return self;
        }
        let mut by_stream: BTreeMap<&str, Lag> = BTreeMap::new();
        for (event_type, lag) in &self.types {
            if let Some(stream) = table.of(event_type) {
                by_stream.entry(&stream.name).or_default().add(lag);
            }
        }
        let reads = |types| {
            let mut subscriptions = self.subscriptions.iter();
            subscriptions.any(|s| s.pattern.overlap(types).is_some())
        };
        let lags = table.iter().filter_map(|stream| {
            let lag = by_stream.get(&*stream.name);
            let lag = lag
                .cloned()
                .or_else(|| reads(stream.types()).then(Lag::new))?;
            Some(StreamLag::new(stream.name.clone(), lag, now))
        });
        self.streams = lags.collect();
        self
    }

    /// Sets the lag of each event type, and the totals.
    #[must_use]
    pub fn with_types(mut self, types: BTreeMap<Arc<str>, Lag>, now: Timestamp) -> Self {
        let sum = Lag::sum(types.values());
        self.behind = sum.behind;
        self.in_flight = sum.in_flight;
        self.waiting = sum.waiting;
        self.unhandled = sum.unhandled;
        self.dead_letters = sum.dead_letters;
        self.behind_for = sum.behind_for(now);
        self.oldest = sum.oldest;
        self.types = types;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cursor, EventId, GroupName, SubscriptionInfo};

    fn lag(behind: u64, dead_letters: u64, oldest: i64) -> Lag {
        Lag {
            behind,
            dead_letters,
            oldest: Some(Timestamp::from_micros(oldest)),
            ..Lag::new()
        }
    }

    // conformance: contract/lag-streams: the lag of a group is summed by declared stream, streams without any included
    #[test]
    fn lag_is_summed_by_stream() {
        let now = Timestamp::from_micros(10_000);
        let mut info = GroupInfo::new(GroupName::unnamed(), now);
        info.subscriptions = ["message.>", "agent.*", "media.seen"]
            .into_iter()
            .map(|pattern| SubscriptionInfo {
                id: EventId::new(),
                group: GroupName::unnamed(),
                name: pattern.into(),
                pattern: pattern.parse().unwrap(),
                after: Cursor::START,
                created_at: now,
            })
            .collect();
        let types = [
            ("message.a", lag(3, 0, 4000)),
            ("message.b", lag(2, 1, 3000)),
            ("media.seen", lag(1, 0, 9000)),
            ("order.placed", lag(5, 0, 1000)),
        ];
        let types = types.into_iter().map(|(name, lag)| (name.into(), lag));
        let info = info.with_types(types.collect(), now);
        assert_eq!((info.behind, info.dead_letters), (11, 1));
        assert_eq!(info.behind_for, Duration::from_micros(9000));
        let info = info.with_streams(&Streams::omni(), now);
        let shown: Vec<_> = info
            .streams
            .iter()
            .map(|s| (&*s.stream, s.lag.behind, s.behind_for.as_micros()))
            .collect();
        let expected = [("MESSAGES", 5, 7000), ("MEDIA", 1, 1000), ("AGENT", 0, 0)];
        assert_eq!(shown, expected);
        assert_eq!(info.streams[0].lag.dead_letters, 1);
        let one = GroupInfo {
            streams: Vec::new(),
            ..info
        }
        .with_streams(&Streams::single(), now);
        assert_eq!(one.streams.len(), 1);
        assert_eq!(one.streams[0].lag.behind, 11);
    }
}
