//! `everbus publish`: one event, many copies, or one event per line of standard input.
//!
//! Each batch has the lines that have arrived. So the events of a slow producer commit at once, and those of a fast
//! producer commit in large batches. At most a few thousand lines are in memory.

mod form;

use std::io::{BufRead, Read};
use std::time::{Duration, Instant};

use everbus::{Bus, Receipt};
use everbus_core::{Code, Error, Event};
use indicatif::ProgressBar;
use serde::Serialize;
use tokio::sync::mpsc;

use form::{Form, given, payload_from};

use crate::args::PublishArgs;
use crate::interrupt::Interrupt;
use crate::open::Target;
use crate::output::{Output, counted, escaped};
use crate::progress;
use crate::stop::{Outcome, Stop, about};

/// One commit takes at most this many events.
const BATCH: usize = 1000;
/// A line longer than this, and than the largest payload, is refused before it is in memory as a whole.
const LONGEST_LINE: usize = 64 << 20;

pub(crate) async fn run(args: PublishArgs, target: &Target, output: &mut Output) -> Outcome {
    let (form, payload) = given(&args)?;
    let lines = payload == "-" && args.payload_from.is_none();
    if lines && (args.id.is_some() || args.count.is_some()) {
        return Err(Stop::usage(
            "--id and --count do not go with payloads from standard input",
            Some("each line is one event with an id of its own"),
        ));
    }
    // Mistakes on the command line are reported before a file is created.
    let first = if lines {
        form.check()?;
        None
    } else {
        let payload = match &args.payload_from {
            Some(text) => payload_from(text)?,
            None => payload.as_bytes().to_vec(),
        };
        Some(form.event(payload)?)
    };
    let interrupt = Interrupt::listen();
    let bus = tokio::select! {
        bus = target.open_bus() => bus?,
        () = interrupt.wait() => return Err(Stop::Interrupted),
    };
    let mut publisher = Publisher {
        bus: &bus,
        target,
        interrupt,
        pace: Pace::new(args.rate),
        wait: args.wait,
        bar: ProgressBar::hidden(),
        published: 0,
        dead_lettered: 0,
        single: !lines && args.count.is_none(),
    };
    let outcome = {
        match (first, args.count) {
            (None, _) => {
                publisher.bar = progress::bar("publishing", None);
                publisher.lines(&form, output).await
            }
            (Some(first), Some(count)) => {
                if count > 1 {
                    publisher.bar = progress::bar("publishing", Some(count));
                }
                publisher.copies(&first, count, output).await
            }
            (Some(first), None) => publisher.batch(vec![(0, first)], output).await,
        }
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

/// The output for each event.
#[derive(Serialize)]
struct Published {
    id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    foreign_id: Option<String>,
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
    target: &'a Target,
    interrupt: Interrupt,
    pace: Pace,
    wait: Option<Duration>,
    bar: ProgressBar,
    published: u64,
    dead_lettered: u64,
    /// Only one event: no summary.
    single: bool,
}

impl Publisher<'_> {
    async fn copies(&mut self, first: &Event, count: u64, output: &mut Output) -> Outcome {
        let mut left = count;
        while left > 0 {
            let most = usize::try_from(left).unwrap_or(BATCH).min(BATCH);
            let n = self.grant(most).await?;
            let copies = (0..n).map(|_| (0, copy(first))).collect();
            self.batch(copies, output).await?;
            left -= n as u64;
        }
        Ok(())
    }

    async fn lines(&mut self, form: &Form<'_>, output: &mut Output) -> Outcome {
        let mut lines = read_lines(self.target.max_payload().unwrap_or(0).max(LONGEST_LINE));
        let mut waiting: Vec<Line> = Vec::new();
        loop {
            if waiting.is_empty() {
                let read = tokio::select! {
                    read = lines.recv_many(&mut waiting, BATCH) => read,
                    () = self.interrupt.wait() => return Err(Stop::Interrupted),
                };
                if read == 0 {
                    return Ok(());
                }
            }
            let n = self.grant(waiting.len()).await?;
            let mut batch = Vec::with_capacity(n);
            let mut bad = None;
            for (number, line) in waiting.drain(..n) {
                match line.and_then(|bytes| Ok(form.event(bytes)?)) {
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

    /// How many events may be published now. An interrupt takes effect here, between two batches: the running
    /// batch commits and is printed first.
    async fn grant(&mut self, most: usize) -> Outcome<usize> {
        if self.interrupt.is_set() {
            return Err(Stop::Interrupted);
        }
        tokio::select! {
            n = self.pace.grant(most) => Ok(n),
            () = self.interrupt.wait() => Err(Stop::Interrupted),
        }
    }

    /// Publishes events, each with the number of its line (0 if it has none).
    async fn batch(&mut self, batch: Vec<(u64, Event)>, output: &mut Output) -> Outcome {
        let events: Vec<Event> = batch.iter().map(|(_, event)| event.clone()).collect();
        let published = self.bus.publish_batch(events);
        match self.target.patiently(published).await {
            Ok(receipts) => {
                let mut settled = Ok(());
                for (receipt, (_, event)) in receipts.iter().zip(&batch) {
                    // All of them are stored, so each is printed, even if waiting for one fails.
                    let wait = settled.is_ok();
                    let outcome = self.committed(receipt, event, wait, output).await;
                    settled = settled.and(outcome);
                }
                output.flush()?;
                settled
            }
            // An engine with atomic batches has stored nothing now. The events are published one by one: those before
            // the refused event are stored, and the refused one is named, as documented.
            Err(error) if batch.len() > 1 && !error.outcome_unknown() => {
                for (number, event) in batch {
                    match self.bus.publish(event.clone()).await {
                        Ok(receipt) => self.committed(&receipt, &event, true, output).await?,
                        Err(error) => return Err(at_line(number, error.into())),
                    }
                    if self.interrupt.is_set() {
                        return Err(Stop::Interrupted);
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

    /// Prints a stored event, after it is settled if --wait was given. A failed wait is an error; the line is
    /// printed either way.
    async fn committed(
        &mut self,
        receipt: &Receipt,
        event: &Event,
        wait: bool,
        output: &mut Output,
    ) -> Outcome {
        self.published += 1;
        self.bar.inc(1);
        let foreign_id = event.attributes().and_then(|a| a.foreign_id.as_deref());
        let mut published = Published {
            id: receipt.id().to_string(),
            foreign_id: foreign_id.map(str::to_owned),
            seq: receipt.seq(),
            duplicate: receipt.is_duplicate(),
            settled: None,
            dead_lettered: Vec::new(),
        };
        let outcome = match self.wait.filter(|_| wait) {
            None => Ok(()),
            Some(longest) => self.settled(receipt, longest, &mut published).await,
        };
        self.dead_lettered += u64::from(!published.dead_lettered.is_empty());
        print(&published, output)?;
        outcome
    }

    async fn settled(
        &self,
        receipt: &Receipt,
        longest: Duration,
        published: &mut Published,
    ) -> Outcome {
        published.settled = Some(false);
        let settled = tokio::select! {
            settled = receipt.settled_within(longest) => settled?,
            () = self.interrupt.wait() => return Err(Stop::Interrupted),
        };
        published.settled = Some(true);
        let groups = settled.dead_lettered.iter();
        published.dead_lettered = groups.map(ToString::to_string).collect();
        Ok(())
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
    let mut line = published.id.clone();
    if let Some(id) = &published.foreign_id {
        line.push_str(&format!(" ({})", escaped(id)));
    }
    line.push_str(&format!(" at {}", published.seq));
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
            let named = about(&format!("line {number}"), &error);
            let Some((before, column)) = named.message().split_once(" at line 1 column ") else {
                return Stop::Failed(named);
            };
            // The payload is one line, so its line number is left out.
            let message = format!("{before} at column {column}");
            Stop::Failed(named.with_message(message))
        }
        other => other,
    }
}

/// The number of a line from 1, and its bytes or why it cannot be read.
type Line = (u64, Outcome<Vec<u8>>);

/// Reads standard input on a thread of its own, a bounded number of lines ahead.
fn read_lines(longest: usize) -> mpsc::Receiver<Line> {
    let (to, from) = mpsc::channel(BATCH);
    std::thread::spawn(move || {
        let mut input = std::io::stdin().lock();
        let mut number = 0;
        loop {
            number += 1;
            let mut line = Vec::new();
            let read = input
                .by_ref()
                .take(longest as u64 + 1)
                .read_until(b'\n', &mut line);
            let item = match read {
                Ok(0) => return,
                Ok(n) if n > longest => Err(Stop::Failed(
                    Error::new(
                        Code::PayloadTooLarge,
                        format!("the line has more than {longest} bytes"),
                    )
                    .hint(
                        "each line of standard input is one payload; does the input have line \
                         ends? --max-payload says how large a payload may be",
                    ),
                )),
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

/// Limits the rate of events.
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

    /// Waits until at least one event may be published, and returns how many may, up to `most`.
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
    fn a_bad_line_has_one_number() {
        let bad = Event::builder("t").payload("{\"a\": x}").build();
        let Stop::Failed(error) = at_line(7, bad.unwrap_err().into()) else {
            panic!("an error of the bus");
        };
        let said = error.message();
        assert!(
            said.starts_with("line 7: ") && said.ends_with(" at column 7"),
            "{said}"
        );
        assert!(error.hint_text().is_some());
    }

    #[test]
    fn a_copy_differs_only_in_id_and_time() {
        let event = Event::builder("t").payload("[1]").key("k").build().unwrap();
        let again = copy(&event);
        assert_ne!(event.id(), again.id());
        assert!(event.same_body(&again));
    }
}
