//! `everbus outbox relay`: publishes the rows of an outbox, until Ctrl-C.

use std::time::Duration;

use clap::Args;
use everbus::Bus;
use everbus::outbox::{OutboxKeep, Relay, RelayStats};
use everbus_core::{Clock as _, SystemClock};

use super::{WhichArgs, foreign, open_file};
use crate::commands::retention::{Age, parse_age};
use crate::interrupt::Interrupt;
use crate::open::{Target, close};
use crate::output::{Output, counted, grouped};
use crate::stop::{Outcome, Stop};
use crate::when;

/// How often a relay prints its progress, if there is any.
const REPORT: Duration = Duration::from_secs(1);
/// After Ctrl-C, running work gets this long.
const LAST: Duration = Duration::from_secs(10);
/// A failed bus is opened again after this pause; the pause then doubles each time.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

pub(super) const RELAY_HELP: &str = "\
The outbox is the table event_outbox, in a database of your own (--outbox shop.db) or in the file \
of Everbus. Rows are published in their order and marked as sent once the broker has acknowledged \
them. A row that is rejected is tried five times and then marked as failed. If the broker cannot \
be reached, the relay waits. Several relays of one outbox may run: one works, the others stand by.

From a database of your own the relay also removes rows, 7 days after they were sent and 30 days \
after they failed for good. In the file of Everbus retention removes them: see \
`everbus retention`.";

#[derive(Debug, Args)]
pub(crate) struct RelayArgs {
    #[command(flatten)]
    which: WhichArgs,

    /// How many rows are taken at a time; up to fifty times as many while it is behind
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000), allow_negative_numbers = true)]
    batch: u32,

    /// How long another relay waits after this one was killed, between 100ms and 60s
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = parse_lease, allow_hyphen_values = true)]
    lease: Duration,

    /// How long sent rows stay in your own database: 7d, or never
    #[arg(long, value_name = "AGE", value_parser = parse_age, allow_hyphen_values = true)]
    keep: Option<Age>,

    /// How long rows that failed for good stay there, with their dead letters: 30d, or never
    #[arg(long, value_name = "AGE", value_parser = parse_age, allow_hyphen_values = true)]
    keep_failed: Option<Age>,

    /// Publish the rows that are ready now, and end
    #[arg(long)]
    once: bool,
}

fn parse_lease(text: &str) -> Result<Duration, String> {
    let lease = when::parse_wait(text)?;
    if lease < Duration::from_millis(100) || lease > Duration::from_secs(60) {
        return Err(format!("{text:?} is no lease; it is between 100ms and 60s"));
    }
    Ok(lease)
}

pub(super) async fn run(args: RelayArgs, target: &Target, output: &mut Output) -> Outcome {
    let interrupt = Interrupt::listen();
    // A mistyped file name is reported before a file is created for the broker.
    let source = match foreign(&args.which, target) {
        Some(path) => Some(open_file(path, target).await?),
        None => None,
    };
    let keep = keep(&args, source.is_some())?;
    let mut bus = tokio::select! {
        bus = target.open_bus() => bus?,
        () = interrupt.wait() => return Err(Stop::Interrupted),
    };
    let mut totals = RelayStats::default();
    let mut pause = FIRST_PAUSE;
    let outcome = loop {
        let source = match &source {
            Some(source) => source.clone(),
            None => match bus.engine().outbox() {
                Ok(source) => source,
                Err(error) => break Err(error.into()),
            },
        };
        let relay = Relay::new(&bus, source)
            .batch(args.batch as usize)
            .max_batch(args.batch as usize * 50)
            .lease(args.lease)
            .keep(keep);
        let before = totals.clone();
        let run = follow(&relay, &args, &interrupt, &before, output).await;
        add(&mut totals, &relay.stats());
        match run {
            // The engine has stopped for good: another one is opened in its place.
            Err(Stop::Failed(error)) if bus.failure().is_some() && !args.once => {
                tracing::warn!(%error, "the broker failed; opening it again");
                close(bus.engine()).await;
                match reopen(target, &interrupt, &mut pause).await {
                    Some(opened) => bus = opened,
                    None => break Ok(()),
                }
            }
            other => break other,
        }
    };
    if !matches!(outcome, Err(Stop::BrokenPipe)) {
        summary(&totals, output)?;
    }
    close(bus.engine()).await;
    outcome
}

/// How long rows are kept, if the relay decides that.
fn keep(args: &RelayArgs, is_foreign: bool) -> Outcome<OutboxKeep> {
    let mut keep = OutboxKeep::default();
    if (args.keep.is_some() || args.keep_failed.is_some()) && !is_foreign {
        return Err(Stop::usage(
            "--keep and --keep-failed are for an outbox in a database of its own",
            Some("what the file of Everbus keeps is up to its retention: `everbus retention show`"),
        ));
    }
    if let Some(Age(age)) = args.keep {
        keep.sent = age;
    }
    if let Some(Age(age)) = args.keep_failed {
        keep.dead_letters = age;
    }
    Ok(keep)
}

/// Opens the broker again, however long it takes; `None` if interrupted.
async fn reopen(target: &Target, interrupt: &Interrupt, pause: &mut Duration) -> Option<Bus> {
    loop {
        tokio::select! {
            () = tokio::time::sleep(*pause) => {}
            () = interrupt.wait() => return None,
        }
        *pause = (*pause * 2).min(LONGEST_PAUSE);
        match target.open_bus().await {
            Ok(bus) => {
                *pause = FIRST_PAUSE;
                return Some(bus);
            }
            Err(Stop::Failed(error)) => tracing::warn!(%error, "the broker cannot be opened"),
            Err(_) => tracing::warn!("the broker cannot be opened"),
        }
    }
}

/// Runs a relay and prints its progress.
async fn follow(
    relay: &Relay,
    args: &RelayArgs,
    interrupt: &Interrupt,
    before: &RelayStats,
    output: &mut Output,
) -> Outcome {
    if args.once {
        tokio::select! {
            ran = relay.run_once() => ran.map(drop)?,
            () = interrupt.wait() => return Err(Stop::Interrupted),
        }
        return Ok(());
    }
    let mut run = Box::pin(relay.run());
    let mut told = (0, false);
    loop {
        tokio::select! {
            ran = &mut run => return Ok(ran.map(drop)?),
            () = interrupt.wait() => break,
            () = tokio::time::sleep(REPORT) => {}
        }
        let stats = relay.stats();
        let now = (stats.sent + stats.rejected + stats.removed, stats.waiting);
        if now != told {
            told = now;
            let mut totals = before.clone();
            add(&mut totals, &stats);
            progress(&totals, output)?;
            output.flush()?;
        }
    }
    relay.stop();
    match tokio::time::timeout(LAST, run).await {
        Ok(ran) => Ok(ran.map(drop)?),
        // Nothing is lost: the rows are as they were.
        Err(_) => Ok(()),
    }
}

fn add(totals: &mut RelayStats, stats: &RelayStats) {
    totals.sent += stats.sent;
    totals.duplicates += stats.duplicates;
    totals.retried += stats.retried;
    totals.rejected += stats.rejected;
    totals.failed += stats.failed;
    totals.removed += stats.removed;
    totals.outages += stats.outages;
    totals.relaying = stats.relaying;
    totals.waiting = stats.waiting;
    totals.last_error.clone_from(&stats.last_error);
}

fn progress(stats: &RelayStats, output: &mut Output) -> Outcome {
    if output.is_json() {
        return output.json(stats);
    }
    let waits = if stats.waiting { ", waiting" } else { "" };
    let now = when::stamp(SystemClock.now());
    output.line(format!("{now} {}{waits}", said(stats)))
}

fn summary(stats: &RelayStats, output: &mut Output) -> Outcome {
    if output.is_json() {
        return output.json(stats);
    }
    output.line(said(stats))
}

fn said(stats: &RelayStats) -> String {
    let mut text = format!("{} sent", counted(stats.sent, "event"));
    for (n, what) in [
        (stats.duplicates, "were there already"),
        (stats.retried, "retried as dead letters"),
        (stats.rejected, "attempts rejected"),
        (stats.failed, "failed for good"),
        (stats.removed, "old ones removed"),
    ] {
        if n > 0 {
            text.push_str(&format!(", {} {what}", grouped(n)));
        }
    }
    text
}
