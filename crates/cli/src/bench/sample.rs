//! The events of the bench, and the arithmetic on what was measured.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use everbus::Bus;
use everbus_core::{Code, Error, Event, Result};

use crate::open::Target;
use crate::stop::{Outcome, Stop};

/// The type of most events.
pub(super) const TYPE: &str = "bench.event.stored";
/// How large a payload is.
pub(super) const PAYLOAD: usize = 200;

/// 200 bytes of JSON.
pub(super) fn payload() -> Bytes {
    numbered_payload(0)
}

/// 200 bytes of JSON that carry a number.
pub(super) fn numbered_payload(n: u64) -> Bytes {
    let mut text = format!("{{\"n\":\"{n:010}\",\"pad\":\"");
    while text.len() < PAYLOAD - 2 {
        text.push('x');
    }
    text.push_str("\"}");
    Bytes::from(text)
}

/// The number in a payload.
pub(super) fn number_in(payload: &[u8]) -> Option<usize> {
    std::str::from_utf8(payload.get(6..16)?).ok()?.parse().ok()
}

/// Builds events as a publisher would: from a type and bytes.
#[derive(Clone)]
pub(super) struct Maker {
    kind: Arc<str>,
    payload: Bytes,
}

impl Maker {
    pub(super) fn new(kind: &str) -> Self {
        Self {
            kind: kind.into(),
            payload: payload(),
        }
    }

    pub(super) fn event(&self) -> Result<Event> {
        Event::builder(self.kind.clone())
            .payload(self.payload.clone())
            .build()
    }

    pub(super) fn batch(&self, n: u64) -> Result<Vec<Event>> {
        (0..n).map(|_| self.event()).collect()
    }
}

/// Opens a bus on a file.
pub(super) async fn open(path: &Path) -> Outcome<Bus> {
    Target::file(path).open_bus().await
}

/// Publishes `n` events in batches of 1000.
pub(super) async fn fill(bus: &Bus, n: u64) -> Outcome {
    let maker = Maker::new(TYPE);
    let mut left = n;
    while left > 0 {
        let size = left.min(1000);
        bus.publish_batch(maker.batch(size)?).await?;
        left -= size;
    }
    Ok(())
}

/// Fails unless the log holds exactly this many events: a rate is worth nothing if something is missing.
pub(super) async fn expect_stored(bus: &Bus, events: u64) -> Outcome {
    let stored = bus.log()?.head().await?.progress();
    if stored == events {
        return Ok(());
    }
    Err(wrong(format!("{stored} of {events} events are stored")))
}

/// A figure that must not be reported.
pub(super) fn wrong(what: String) -> Stop {
    Error::new(Code::Internal, what).into()
}

/// The middle one.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The duration below which this share of them lies, in microseconds.
pub(super) fn percentile(durations: &mut [Duration], share: f64) -> f64 {
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

pub(super) fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// Events per second.
pub(super) fn rate(events: u64, took: Duration) -> f64 {
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
