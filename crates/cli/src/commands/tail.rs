//! `everbus tail`: shows events as they come. Without a group it only looks; with one it consumes,
//! and what was printed counts as handled.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Code, ConsumeOptions, Consumer, Engine, GroupName, GroupSpec, Pattern, Recorded, Settlement,
    StartFrom, SubscriptionSpec, Verdict,
};

use super::interrupt;
use crate::args::TailArgs;
use crate::open::{Target, close};
use crate::output::{Output, escaped, payload_text};
use crate::stop::{Outcome, Stop};
use crate::when;

const CHUNK: usize = 256;
/// How often a group that seems to be at the end is asked whether it is.
const LOOK: Duration = Duration::from_millis(50);
/// A reader may pause our output (a pager) for this long before the events go to somebody else.
const LEASE: Duration = Duration::from_secs(600);

pub(crate) async fn run(args: TailArgs, target: &Target, output: &mut Output) -> Outcome {
    let engine = target.open_existing().await?;
    let outcome = match args.group.clone() {
        None => look(&args, &engine, output).await,
        Some(group) => consume(&args, group, &engine, output).await,
    };
    close(&engine).await;
    outcome
}

fn start(args: &TailArgs) -> StartFrom {
    // "What is there now, then stop" would show nothing if it began at the end.
    let usual = if args.no_follow {
        StartFrom::First
    } else {
        StartFrom::New
    };
    args.from.unwrap_or(usual)
}

fn patterns(args: &TailArgs) -> Outcome<Vec<Pattern>> {
    if args.patterns.is_empty() {
        return Ok(vec![Pattern::new("*")?]);
    }
    Ok(args.patterns.clone())
}

/// How many may be shown still.
fn left(limit: Option<u64>, shown: u64) -> usize {
    limit.map_or(CHUNK, |limit| {
        usize::try_from(limit.saturating_sub(shown)).map_or(CHUNK, |left| left.min(CHUNK))
    })
}

async fn look(args: &TailArgs, engine: &Engine, output: &mut Output) -> Outcome {
    let log = engine.log()?;
    let patterns = patterns(args)?;
    // Without following, what is published while we print does not move the end.
    let end = log.head().await?;
    let mut position = log.resolve(start(args), patterns.clone()).await?;
    let mut shown = 0;
    loop {
        let max = left(args.limit, shown);
        if max == 0 {
            return Ok(());
        }
        let (records, searched) = log.read(position, patterns.clone(), max).await?;
        for record in &records {
            if args.no_follow && record.position > end {
                break;
            }
            print(record, output)?;
            shown += 1;
        }
        output.flush()?;
        let stuck = searched <= position;
        position = position.max(searched);
        if args.no_follow && (position >= end || stuck) {
            return nothing_shown(shown, output);
        }
        if records.is_empty() {
            tokio::select! {
                more = log.wait_beyond(position) => more?,
                () = interrupt() => return Ok(()),
            }
        }
    }
}

fn nothing_shown(shown: u64, output: &mut Output) -> Outcome {
    if shown == 0 && !output.is_json() {
        output.line("no events")?;
    }
    Ok(())
}

async fn consume(
    args: &TailArgs,
    group: GroupName,
    engine: &Engine,
    output: &mut Output,
) -> Outcome {
    let handled = join_group(args, &group, engine).await?;
    let options = ConsumeOptions {
        prefetch: left(args.limit, 0).max(1),
        lease: LEASE,
        handled,
        ..ConsumeOptions::default()
    };
    let mut consumer = engine.broker.consume(group.clone(), options).await?;
    let outcome = consume_with(args, &group, engine, consumer.as_mut(), output).await;
    consumer.close().await?;
    outcome
}

/// Makes the group if it is new. One that exists is not widened: its own program would get events
/// it has no handler for.
async fn join_group(args: &TailArgs, name: &GroupName, engine: &Engine) -> Outcome<Vec<Pattern>> {
    let groups = engine.broker.inspect().await?;
    let Some(group) = groups.into_iter().find(|group| group.name == *name) else {
        let patterns = patterns(args)?;
        let subscriptions = patterns.iter().map(|pattern| SubscriptionSpec {
            name: format!("tail {pattern}"),
            pattern: pattern.clone(),
        });
        let spec = GroupSpec {
            name: name.clone(),
            start_from: start(args),
            ordered: false,
            subscriptions: subscriptions.collect(),
        };
        engine.broker.declare(spec).await?;
        return Ok(patterns);
    };
    for pattern in &args.patterns {
        if !group.patterns.contains(&pattern.to_string()) {
            return Err(Stop::usage(
                format!(
                    "the group {name} does not want {pattern}; it wants {}",
                    group.patterns.join(", ")
                ),
                Some("leave the pattern out, or use a group of your own"),
            ));
        }
    }
    if !args.patterns.is_empty() {
        return Ok(args.patterns.clone());
    }
    let patterns = group.patterns.iter().map(|text| Pattern::new(text));
    Ok(patterns.collect::<Result<_, _>>()?)
}

async fn consume_with(
    args: &TailArgs,
    group: &GroupName,
    engine: &Engine,
    consumer: &mut dyn Consumer,
    output: &mut Output,
) -> Outcome {
    let mut shown = 0;
    loop {
        let max = left(args.limit, shown);
        if max == 0 {
            return Ok(());
        }
        let deliveries = tokio::select! {
            deliveries = consumer.fetch(max) => deliveries?,
            () = at_the_end(group, engine), if args.no_follow => {
                return nothing_shown(shown, output);
            }
            () = interrupt() => return Ok(()),
        };
        let mut printed = Ok(());
        let mut settlements = Vec::with_capacity(deliveries.len());
        for delivery in deliveries {
            if printed.is_ok() {
                printed = print(&delivery.record, output);
            }
            settlements.push(delivery.lease);
        }
        // Handled means that the reader has it.
        printed = printed.and_then(|()| output.flush());
        let verdict = match printed {
            Ok(()) => Verdict::Ack,
            Err(_) => Verdict::Release {
                after: Duration::ZERO,
            },
        };
        shown += settlements.len() as u64;
        let settlements = settlements
            .into_iter()
            .map(|lease| Settlement::new(lease, verdict.clone()))
            .collect();
        for answer in engine.broker.settle(settlements).await? {
            match answer {
                Err(error) if error.code() == Code::LeaseLost => {
                    tracing::warn!("an event was shown so late that it may be shown again");
                }
                other => other?,
            }
        }
        printed?;
    }
}

/// Resolves once the group has nothing to hand out.
async fn at_the_end(group: &GroupName, engine: &Engine) {
    loop {
        tokio::time::sleep(LOOK).await;
        let Ok(groups) = engine.broker.inspect().await else {
            return;
        };
        match groups.iter().find(|info| info.name == *group) {
            Some(info) if info.behind > 0 || info.in_flight > 0 => {}
            _ => return,
        }
    }
}

fn print(record: &Arc<Recorded>, output: &mut Output) -> Outcome {
    if output.is_json() {
        return output.json(record.as_ref());
    }
    let event = &record.event;
    let mut line = format!(
        "{} {:>6} {} {} {}",
        when::stamp(record.received_at),
        record.position,
        escaped(&event.display_id()),
        escaped(event.event_type()),
        payload_text(event),
    );
    if let Some(key) = event.ordering_key() {
        line.push_str(&format!(" key={}", escaped(&key)));
    }
    output.line(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_counted_down_and_chunks_are_bounded() {
        assert_eq!(left(None, 5), CHUNK);
        assert_eq!(left(Some(3), 1), 2);
        assert_eq!(left(Some(3), 3), 0);
        assert_eq!(left(Some(u64::MAX), 0), CHUNK);
    }
}
