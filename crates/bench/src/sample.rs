//! The events of the bench, and the arithmetic on what was measured.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use everbus::{Bus, Message};
use everbus_core::{Code, Error, Event, EventBuilder, Result, StartFrom};

use crate::blocking;

/// The type of most events.
pub(crate) const TYPE: &str = "bench.event.stored";
/// How large a payload is.
const PAYLOAD: usize = 200;

/// 200 bytes of JSON.
pub(crate) fn payload() -> Bytes {
    numbered_payload(0)
}

/// 200 bytes of JSON that carry a number.
fn numbered_payload(n: u64) -> Bytes {
    let text = format!("{{\"n\":\"{n:010}\",\"pad\":\"");
    Bytes::from(format!("{text:x<0$}\"}}", PAYLOAD - 2))
}

fn number_in(payload: &[u8]) -> Option<usize> {
    std::str::from_utf8(payload.get(6..16)?).ok()?.parse().ok()
}

/// Builds events as a publisher would: from a type and bytes.
#[derive(Clone)]
pub(crate) struct Maker {
    kind: Arc<str>,
    payload: Bytes,
}

impl Maker {
    pub(crate) fn new(kind: &str) -> Self {
        Self {
            kind: kind.into(),
            payload: payload(),
        }
    }

    pub(crate) fn builder(&self) -> EventBuilder {
        Event::builder(self.kind.clone()).payload(self.payload.clone())
    }

    pub(crate) fn event(&self) -> Result<Event> {
        self.builder().build()
    }

    pub(crate) fn numbered(n: u64) -> Result<Event> {
        Event::builder(TYPE).payload(numbered_payload(n)).build()
    }

    pub(crate) fn batch(&self, n: u64) -> Result<Vec<Event>> {
        (0..n).map(|_| self.event()).collect()
    }
}

pub(crate) async fn open(path: &Path) -> Result<Bus> {
    let path = path.to_path_buf();
    let engine = blocking(move || everbus_sqlite::open(&path, everbus_sqlite::Options::default()));
    Bus::builder().keep_everything().with_engine(engine.await?)
}

/// Publishes events in batches of 1000.
pub(crate) async fn fill_with(
    bus: &Bus,
    events: u64,
    make: impl Fn(u64) -> Result<Event>,
) -> Result<()> {
    let mut done = 0;
    while done < events {
        let upto = events.min(done + 1000);
        let batch: Result<Vec<Event>> = (done..upto).map(&make).collect();
        bus.publish_batch(batch?).await?;
        done = upto;
    }
    Ok(())
}

/// Publishes `n` events of the usual kind.
pub(crate) async fn fill(bus: &Bus, n: u64) -> Result<()> {
    let maker = Maker::new(TYPE);
    fill_with(bus, n, |_| maker.event()).await
}

/// Runs this many tasks at once.
pub(crate) async fn from_tasks<T, F>(tasks: u64, task: impl Fn() -> F) -> Result<Vec<T>>
where
    T: Send + 'static,
    F: Future<Output = Result<T>> + Send + 'static,
{
    let mut running = tokio::task::JoinSet::new();
    for _ in 0..tasks {
        running.spawn(task());
    }
    running.join_all().await.into_iter().collect()
}

/// Fails unless the log holds exactly this many events: a rate counts only if no event is missing.
pub(crate) async fn expect_stored(bus: &Bus, events: u64) -> Result<()> {
    let stored = bus.log()?.head().await?.progress();
    expect(stored, events, "events are stored")
}

/// Fails unless `done` is equal to `of`.
pub(crate) fn expect(done: u64, of: u64, what: &str) -> Result<()> {
    match done == of {
        true => Ok(()),
        false => Err(wrong(format!("{done} of {of} {what}"))),
    }
}

/// The error of a measurement that must not be reported.
pub(crate) fn wrong(what: impl Into<String>) -> Error {
    Error::new(Code::Internal, what)
}

/// A time for each event, for example when it was handled, in nanoseconds of a clock that all processes share.
#[derive(Clone)]
pub(crate) struct Moments(Arc<[AtomicU64]>);

impl Moments {
    pub(crate) fn new(events: u64) -> Self {
        Self((0..events).map(|_| AtomicU64::new(0)).collect())
    }

    pub(crate) fn now() -> u64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        since.map_or(0, |t| u64::try_from(t.as_nanos()).unwrap_or(u64::MAX))
    }

    pub(crate) fn mark(&self, index: usize) {
        if let Some(moment) = self.0.get(index) {
            // The first time counts.
            let _ = moment.compare_exchange(0, Self::now(), Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    pub(crate) fn at(&self, index: usize) -> u64 {
        let moment = self.0.get(index);
        moment.map_or(0, |moment| moment.load(Ordering::Relaxed))
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = u64> {
        self.0.iter().map(|moment| moment.load(Ordering::Relaxed))
    }

    /// How much later each of these moments was than the other moment of the same event.
    pub(crate) fn since(&self, others: impl Iterator<Item = u64>) -> Vec<Duration> {
        let pairs = self.all().zip(others);
        pairs
            .map(|(late, early)| Duration::from_nanos(late.saturating_sub(early)))
            .collect()
    }

    /// Starts a group that marks when each numbered event is handled.
    pub(crate) async fn of_handler(bus: &Bus, events: u64) -> Result<Self> {
        let started = Self::new(events);
        let marks = started.clone();
        bus.subscribe("bench.>")
            .group("bench")
            .start_from(StartFrom::First)
            .handler(move |m: Message| {
                if let Some(index) = number_in(m.payload()) {
                    marks.mark(index);
                }
                std::future::ready(())
            })
            .await?;
        bus.start().await?;
        Ok(started)
    }
}

/// The middle value.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The duration below which this share of the durations lies, in microseconds.
pub(crate) fn percentile(durations: &mut [Duration], share: f64) -> f64 {
    durations.sort_unstable();
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "an index from a share of a length"
    )]
    let index = ((durations.len() as f64 * share) as usize).min(durations.len().saturating_sub(1));
    durations.get(index).copied().map_or(f64::NAN, micros)
}

pub(crate) fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// Events per second.
pub(crate) fn rate(events: u64, took: Duration) -> f64 {
    #[allow(clippy::cast_precision_loss, reason = "a rate needs no more")]
    let events = events as f64;
    events / took.as_secs_f64().max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_are_200_bytes_of_json_and_carry_their_number() {
        let payload = numbered_payload(1234);
        assert_eq!(payload.len(), PAYLOAD);
        assert!(serde_json::from_slice::<serde_json::Value>(&payload).is_ok());
        assert_eq!(number_in(&payload), Some(1234));
    }

    #[test]
    fn medians_and_percentiles() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        let mut durations: Vec<Duration> = (1..=100).map(Duration::from_micros).collect();
        assert_eq!(percentile(&mut durations, 0.5).round(), 51.0);
        assert_eq!(percentile(&mut durations, 0.99).round(), 100.0);
    }
}
