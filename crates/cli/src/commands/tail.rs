//! `everbus tail`: shows events as they are published. Without a group it only reads; with a group it
//! consumes, and printed events count as handled.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use everbus::overflow::Objects;
use everbus_core::{
    Code, ConsumeOptions, Consumer, Delivery, Engine, GroupName, GroupSpec, Pattern, Recorded,
    Settlement, StartFrom, SubscriptionSpec, Verdict,
};

use super::documents::Documents;
use super::get::{Whole, shown_whole};
use crate::args::TailArgs;
use crate::interrupt::Interrupt;
use crate::open::{Target, close};
use crate::output::{Output, escaped};
use crate::reader;
use crate::stop::{Outcome, Stop};
use crate::when;

const CHUNK: usize = 256;
/// How often to check whether a group has reached the end.
const LOOK: Duration = Duration::from_millis(50);
/// A reader may pause the output (a pager) for this long before the events go to another consumer.
const LEASE: Duration = Duration::from_secs(600);
/// A warning is logged if the reader takes nothing for this long.
const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) async fn run(args: TailArgs, target: &Target, output: &mut Output) -> Outcome {
    let interrupt = Interrupt::listen();
    let engine = tokio::select! {
        engine = target.open_existing() => engine?,
        () = interrupt.wait() => return Ok(()),
    };
    let outcome = match target.objects(&engine) {
        Ok(objects) => {
            let tail = Tail {
                args: &args,
                engine: &engine,
                objects: objects.as_deref(),
                documents: args.dialect.map(|d| RefCell::new(Documents::new(d))),
                interrupt: &interrupt,
                target,
            };
            let outcome = match &args.group {
                None => tail.look(output).await,
                Some(group) => tail.run(group, output).await,
            };
            let written = tail
                .documents
                .as_ref()
                .map_or(Ok(()), |d| d.borrow().finish());
            outcome.and(written)
        }
        Err(stop) => Err(stop),
    };
    close(&engine).await;
    outcome
}

fn start(args: &TailArgs) -> StartFrom {
    // With `--no-follow` a start at the end would show nothing.
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

/// How many more may be shown.
fn left(limit: Option<u64>, shown: u64) -> usize {
    limit.map_or(CHUNK, |limit| {
        usize::try_from(limit.saturating_sub(shown)).map_or(CHUNK, |left| left.min(CHUNK))
    })
}

fn nothing_shown(shown: u64, output: &mut Output) -> Outcome {
    if shown == 0 && !output.is_json() {
        output.line("no events")?;
    }
    Ok(())
}

/// A tail under way.
struct Tail<'a> {
    args: &'a TailArgs,
    engine: &'a Engine,
    objects: Option<&'a Objects>,
    documents: Option<RefCell<Documents>>,
    interrupt: &'a Interrupt,
    target: &'a Target,
}

impl Tail<'_> {
    /// Reads without a group.
    async fn look(&self, output: &mut Output) -> Outcome {
        let (args, interrupt) = (self.args, self.interrupt);
        let log = self.engine.log()?;
        let patterns = patterns(args)?;
        // With `--no-follow`, events published while this prints do not move the end.
        let end = log.head().await?;
        let mut position = log.resolve(start(args), patterns.clone()).await?;
        let mut shown = 0;
        loop {
            let max = left(args.limit, shown);
            if max == 0 {
                return Ok(());
            }
            let (records, searched) = log.read(position.clone(), patterns.clone(), max).await?;
            for record in &records {
                if args.no_follow && !end.covers(record.position) {
                    continue;
                }
                self.print(record, output).await?;
                shown += 1;
            }
            output.flush()?;
            let stuck = position.reaches(&searched);
            position.advance_to(&searched);
            if args.no_follow && (position.reaches(&end) || stuck) {
                return nothing_shown(shown, output);
            }
            if interrupt.is_set() {
                return Ok(());
            }
            if records.is_empty() {
                tokio::select! {
                    more = log.wait_beyond(position.clone()) => more?,
                    () = reader::gone() => return Err(Stop::BrokenPipe),
                    () = interrupt.wait() => return Ok(()),
                }
            }
        }
    }

    /// Consumes as a group.
    async fn run(&self, group: &GroupName, output: &mut Output) -> Outcome {
        let joined = join_group(self.args, group, self.engine);
        let handled = self.target.patiently(joined).await?;
        // To a pipe, events are handed out one by one, because the reader may never take them.
        let one_by_one = reader::may_leave();
        let prefetch = if one_by_one {
            1
        } else {
            left(self.args.limit, 0).max(1)
        };
        let options = ConsumeOptions::new(handled).prefetch(prefetch).lease(LEASE);
        let broker = &self.engine.broker;
        let mut consumer = broker.consume(group.clone(), options).await?;
        let outcome = self
            .consume(group, consumer.as_mut(), one_by_one, output)
            .await;
        consumer.close().await?;
        match outcome {
            // Ctrl-C is the usual end of a tail.
            Err(Stop::Interrupted) => Ok(()),
            other => other,
        }
    }

    async fn consume(
        &self,
        group: &GroupName,
        consumer: &mut dyn Consumer,
        one_by_one: bool,
        output: &mut Output,
    ) -> Outcome {
        let most = if one_by_one { 1 } else { CHUNK };
        let mut shown = 0;
        loop {
            let max = left(self.args.limit, shown).min(most);
            if max == 0 || self.interrupt.is_set() {
                return Ok(());
            }
            let deliveries = tokio::select! {
                deliveries = consumer.fetch(max) => deliveries?,
                () = at_the_end(group, self.engine), if self.args.no_follow => {
                    return nothing_shown(shown, output);
                }
                () = reader::gone() => return Err(Stop::BrokenPipe),
                () = self.interrupt.wait() => return Ok(()),
            };
            shown += deliveries.len() as u64;
            let mut outcome = self.show(&deliveries, output).await;
            if outcome.is_ok() && one_by_one {
                outcome = self.until_taken().await;
            }
            // Handled means that the reader has it. Otherwise another consumer, or a later call, gets it.
            let verdict = match outcome {
                Ok(()) => Verdict::Ack,
                Err(_) => Verdict::Release {
                    after: Duration::ZERO,
                },
            };
            self.settle(deliveries, verdict).await?;
            outcome?;
        }
    }

    async fn show(&self, deliveries: &[Delivery], output: &mut Output) -> Outcome {
        for delivery in deliveries {
            self.print(&delivery.record, output).await?;
        }
        output.flush()
    }

    async fn print(&self, record: &Arc<Recorded>, output: &mut Output) -> Outcome {
        let whole = shown_whole(self.objects, record).await;
        match &self.documents {
            // An event that counts as handled must have been printed.
            Some(documents) if self.args.group.is_some() => {
                documents.borrow_mut().print_or_fail(&whole, output)
            }
            Some(documents) => documents.borrow_mut().print(&whole, output),
            None => print(&whole, output),
        }
    }

    /// Waits until the reader of a pipe has taken the output.
    async fn until_taken(&self) -> Outcome {
        let taken = async {
            let mut taken = std::pin::pin!(reader::has_taken_all());
            tokio::select! {
                taken = &mut taken => return taken,
                () = tokio::time::sleep(PATIENCE) => {}
            }
            tracing::warn!("the reader takes no output; until it does, events are not handled");
            taken.await
        };
        tokio::select! {
            taken = taken => if taken { Ok(()) } else { Err(Stop::BrokenPipe) },
            () = self.interrupt.wait() => Err(Stop::Interrupted),
        }
    }

    async fn settle(&self, deliveries: Vec<Delivery>, verdict: Verdict) -> Outcome {
        let settlements = deliveries
            .into_iter()
            .map(|delivery| Settlement::new(delivery.lease, verdict.clone()))
            .collect();
        let settled = self.engine.broker.settle(settlements);
        for answer in self.target.patiently(settled).await? {
            match answer {
                Err(error) if error.code() == Code::LeaseLost => {
                    tracing::warn!("an event was shown so late that it may be shown again");
                }
                other => other?,
            }
        }
        Ok(())
    }
}

/// Creates the group if it is new. An existing group gets no more patterns: its own program would get events
/// that it has no handler for.
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
            ephemeral: false,
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

fn print(whole: &Whole, output: &mut Output) -> Outcome {
    if output.is_json() {
        return output.json(whole);
    }
    let record = &whole.record;
    let event = &record.event;
    let before = format!(
        "{} {:>6} {} {} ",
        when::stamp(record.received_at),
        record.position,
        escaped(&event.display_id()),
        escaped(event.event_type()),
    );
    let key = event.ordering_key();
    let after = key.map(|key| format!(" key={}", escaped(&key)));
    output.payload_line(&before, event, &after.unwrap_or_default())
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
