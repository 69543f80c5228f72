//! `everbus publish`: one event, many alike, or one per line of standard input.
//!
//! Events go to the bus in batches of whatever is there, so a slow producer sees each event commit
//! at once and a fast one gets the speed of batches. At most a few thousand lines are in memory.

use std::io::{BufRead, Read};
use std::time::{Duration, Instant};

use everbus::{Bus, Receipt};
use everbus_core::{Code, Error, Event, EventBuilder};
use indicatif::ProgressBar;
use serde::Serialize;
use tokio::sync::mpsc;

use super::interrupt;
use crate::args::PublishArgs;
use crate::open::Target;
use crate::output::{Output, counted, escaped};
use crate::progress;
use crate::stop::{Outcome, Stop};

/// One commit takes at most this many events.
const BATCH: usize = 1000;
/// A line longer than this is refused before it is in memory as a whole.
const LONGEST_LINE: u64 = 64 << 20;

pub(crate) async fn run(args: PublishArgs, target: &Target, output: &mut Output) -> Outcome {
    let lines = args.payload == "-";
    if lines && (args.id.is_some() || args.count.is_some()) {
        return Err(Stop::usage(
            "--id and --count do not go with payloads from standard input",
            Some("each line is one event with an id of its own"),
        ));
    }
    let template = template(&args);
    // What is wrong with the command line is said before a file is created.
    let first = if lines {
        template.clone().build()?
    } else {
        template.clone().payload(args.payload.clone()).build()?
    };
    let bus = target.open_bus().await?;
    let mut publisher = Publisher {
        bus: &bus,
        pace: Pace::new(args.rate),
        wait: args.wait,
        bar: ProgressBar::hidden(),
        published: 0,
        dead_lettered: 0,
        single: !lines && args.count.is_none(),
    };
    let work = async {
        if lines {
            publisher.bar = progress::bar("publishing", None);
            publisher.lines(&template, output).await
        } else if let Some(count) = args.count {
            if count > 1 {
                publisher.bar = progress::bar("publishing", Some(count));
            }
            publisher.copies(&first, count, output).await
        } else {
            publisher.batch(vec![(0, first)], output).await
        }
    };
    let outcome = tokio::select! {
        outcome = work => outcome,
        () = interrupt() => Err(Stop::Interrupted),
    };
    publisher.bar.finish_and_clear();
    let closed = bus.shutdown().await;
    let summary = publisher.summary(output);
    outcome?;
    summary?;
    closed?;
    if publisher.dead_lettered > 0 {
        return Err(Stop::Unsatisfied);
    }
    Ok(())
}

fn template(args: &PublishArgs) -> EventBuilder {
    let mut event = Event::builder(args.event_type.as_str()).version(args.version);
    if let Some(source) = &args.source {
        event = event.source(source);
    }
    if let Some(id) = &args.id {
        event = event.foreign_id(id);
    }
    if let Some(key) = &args.key {
        event = event.key(key);
    }
    if let Some(tenant) = &args.tenant {
        event = event.tenant(tenant);
    }
    if let Some(app) = &args.app {
        event = event.app(app);
    }
    if let Some((kind, id)) = &args.entity {
        event = event.entity(kind, id);
    }
    if let Some(id) = &args.correlation_id {
        event = event.correlation_id(id);
    }
    if let Some(content_type) = &args.content_type {
        event = event.content_type(content_type);
    }
    for (key, value) in &args.meta {
        event = event.meta(key, value);
    }
    event
}

/// What is printed for each event.
#[derive(Serialize)]
struct Published {
    id: String,
    seq: u64,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    duplicate: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    settled: Option<bool>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    dead_lettered: Vec<String>,
}

struct Publisher<'a> {
    bus: &'a Bus,
    pace: Pace,
    wait: Option<Duration>,
    bar: ProgressBar,
    published: u64,
    dead_lettered: u64,
    /// One event was asked for: no summary.
    single: bool,
}

impl Publisher<'_> {
    async fn copies(&mut self, first: &Event, count: u64, output: &mut Output) -> Outcome {
        let mut left = count;
        while left > 0 {
            let most = usize::try_from(left).unwrap_or(BATCH).min(BATCH);
            let n = self.pace.grant(most).await;
            let copies = (0..n).map(|_| (0, copy(first))).collect();
            self.batch(copies, output).await?;
            left -= n as u64;
        }
        Ok(())
    }

    async fn lines(&mut self, template: &EventBuilder, output: &mut Output) -> Outcome {
        let mut lines = read_lines();
        let mut waiting: Vec<Line> = Vec::new();
        loop {
            if waiting.is_empty() && lines.recv_many(&mut waiting, BATCH).await == 0 {
                return Ok(());
            }
            let n = self.pace.grant(waiting.len()).await;
            let mut batch = Vec::with_capacity(n);
            let mut bad = None;
            for (number, line) in waiting.drain(..n) {
                match line.and_then(|bytes| Ok(template.clone().payload(bytes).build()?)) {
                    Ok(event) => batch.push((number, event)),
                    Err(stop) => {
                        bad = Some(at_line(number, stop));
                        break;
                    }
                }
            }
            if !batch.is_empty() {
                self.batch(batch, output).await?;
            }
            if let Some(bad) = bad {
                return Err(bad);
            }
        }
    }

    /// Publishes events, each with the number of its line (0 if it has none).
    async fn batch(&mut self, batch: Vec<(u64, Event)>, output: &mut Output) -> Outcome {
        let events: Vec<Event> = batch.iter().map(|(_, event)| event.clone()).collect();
        match self.bus.publish_batch(events).await {
            Ok(receipts) => {
                for receipt in receipts {
                    self.committed(&receipt, output).await?;
                }
                output.flush()
            }
            // The batch is stored as a whole or not at all. One by one, the bad one names itself
            // and those before it are stored, as documented.
            Err(error) if batch.len() > 1 && !error.outcome_unknown() => {
                for (number, event) in batch {
                    match self.bus.publish(event).await {
                        Ok(receipt) => self.committed(&receipt, output).await?,
                        Err(error) => return Err(at_line(number, error.into())),
                    }
                }
                output.flush()
            }
            Err(error) => {
                let number = batch.first().map_or(0, |(number, _)| *number);
                Err(at_line(number, error.into()))
            }
        }
    }

    async fn committed(&mut self, receipt: &Receipt, output: &mut Output) -> Outcome {
        self.published += 1;
        self.bar.inc(1);
        let mut published = Published {
            id: receipt.id().to_string(),
            seq: receipt.seq(),
            duplicate: receipt.is_duplicate(),
            settled: None,
            dead_lettered: Vec::new(),
        };
        if let Some(wait) = self.wait {
            // The line is printed even if the wait ends badly: the event is stored.
            match receipt.settled_within(wait).await {
                Ok(settled) => {
                    published.settled = Some(true);
                    published.dead_lettered = settled
                        .dead_lettered
                        .iter()
                        .map(ToString::to_string)
                        .collect();
                }
                Err(error) => {
                    published.settled = Some(false);
                    print(&published, output)?;
                    output.flush()?;
                    return Err(error.into());
                }
            }
        }
        self.dead_lettered += u64::from(!published.dead_lettered.is_empty());
        print(&published, output)
    }

    fn summary(&self, output: &mut Output) -> Outcome {
        if self.single || output.is_json() {
            return Ok(());
        }
        output.line(format!("published {}", counted(self.published, "event")))
    }
}

fn print(published: &Published, output: &mut Output) -> Outcome {
    if output.is_json() {
        return output.json(published);
    }
    let mut line = format!("{} at {}", published.id, published.seq);
    if published.duplicate {
        line.push_str(" (was there already)");
    }
    match published.settled {
        Some(true) if published.dead_lettered.is_empty() => line.push_str(" settled"),
        Some(true) => {
            let groups = published.dead_lettered.join(", ");
            line.push_str(&format!(" dead-lettered in {}", escaped(&groups)));
        }
        Some(false) => line.push_str(" not settled"),
        None => {}
    }
    output.line(line)
}

/// The same event under a new id.
fn copy(event: &Event) -> Event {
    Event::from_stored(
        everbus_core::EventId::new(),
        event.type_arc().clone(),
        event.version(),
        everbus_core::Clock::now(&everbus_core::SystemClock),
        event.payload().clone(),
        event.attributes().cloned().map(Box::new),
    )
}

fn at_line(number: u64, stop: Stop) -> Stop {
    match stop {
        Stop::Failed(error) if number > 0 => {
            let mut named = Error::new(error.code(), format!("line {number}: {}", error.message()));
            if let Some(hint) = error.hint_text() {
                named = named.hint(hint);
            }
            if error.outcome_unknown() {
                named = named.with_unknown_outcome();
            }
            Stop::Failed(named)
        }
        other => other,
    }
}

/// The number of a line from 1, and its bytes or why it cannot be read.
type Line = (u64, Outcome<Vec<u8>>);

/// Reads standard input on a thread of its own, a bounded number of lines ahead.
fn read_lines() -> mpsc::Receiver<Line> {
    let (to, from) = mpsc::channel(BATCH);
    std::thread::spawn(move || {
        let mut input = std::io::stdin().lock();
        let mut number = 0;
        loop {
            number += 1;
            let mut line = Vec::new();
            let read = input
                .by_ref()
                .take(LONGEST_LINE)
                .read_until(b'\n', &mut line);
            let item = match read {
                Ok(0) => return,
                Ok(n) if n as u64 == LONGEST_LINE => Err(Stop::Failed(Error::new(
                    Code::PayloadTooLarge,
                    "the line does not end",
                ))),
                Ok(_) => {
                    let end = line.trim_ascii_end().len();
                    line.truncate(end);
                    if line.trim_ascii().is_empty() {
                        continue;
                    }
                    Ok(line)
                }
                Err(error) => Err(Stop::Io(format!(
                    "standard input cannot be read at line {number}: {error}"
                ))),
            };
            let last = item.is_err();
            if to.blocking_send((number, item)).is_err() || last {
                return;
            }
        }
    });
    from
}

/// Lets events through at no more than a given rate.
struct Pace {
    rate: Option<f64>,
    started: Instant,
    granted: f64,
}

impl Pace {
    fn new(rate: Option<f64>) -> Self {
        Self {
            rate,
            started: Instant::now(),
            granted: 0.0,
        }
    }

    /// Waits until at least one event may go and says how many may, `most` at most.
    async fn grant(&mut self, most: usize) -> usize {
        let Some(rate) = self.rate else { return most };
        loop {
            // The first event goes at once.
            let due = self.started.elapsed().as_secs_f64() * rate + 1.0 - self.granted;
            if due >= 1.0 {
                #[allow(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "at least 1; larger than usize saturates"
                )]
                let n = (due as usize).min(most).max(1);
                #[allow(clippy::cast_precision_loss, reason = "a rate needs no more")]
                {
                    self.granted += n as f64;
                }
                return n;
            }
            let wait = ((1.0 - due) / rate).clamp(0.000_1, 3600.0);
            tokio::time::sleep(Duration::from_secs_f64(wait)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn without_a_rate_everything_goes_at_once() {
        assert_eq!(Pace::new(None).grant(1000).await, 1000);
    }

    #[tokio::test]
    async fn a_rate_is_never_exceeded() {
        let mut pace = Pace::new(Some(2000.0));
        let mut granted = 0;
        while granted < 200 {
            granted += pace.grant(1000).await;
            let allowed = pace.started.elapsed().as_secs_f64() * 2000.0 + 1.0;
            assert!(granted as f64 <= allowed, "{granted} > {allowed}");
        }
    }

    #[test]
    fn a_copy_differs_only_in_id_and_time() {
        let event = Event::builder("t").payload("[1]").key("k").build().unwrap();
        let again = copy(&event);
        assert_ne!(event.id(), again.id());
        assert!(event.same_body(&again));
    }
}
