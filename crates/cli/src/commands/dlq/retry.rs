//! `everbus dlq retry`: retries one, many or all dead letters, at once or at a rate.

use std::collections::BTreeMap;

use everbus::audit::{Action, Operator, audited};
use everbus::{DeadLetterTally, RetryPace};
use everbus_core::dead_letters::MAX_PAGE;
use everbus_core::{Clock as _, DeadLetterFilter, Engine, SystemClock};
use serde_json::json;

use super::args::DlqRetryArgs;
use super::{filter, why_not};
use crate::commands::event_id;
use crate::open::Target;
use crate::output::{Output, Table, counted, escaped, shortened};
use crate::progress;
use crate::stop::{Outcome, Stop};

/// At most this many kinds of failure are shown.
const SHOWN: usize = 20;

pub(super) async fn retry(
    args: DlqRetryArgs,
    engine: &Engine,
    target: &Target,
    output: &mut Output,
) -> Outcome {
    if args.ids.is_empty() && !args.all && !args.filter.chooses() {
        return Err(Stop::usage(
            "which dead letters?",
            Some("name ids, give a filter such as --type 'order.*', or say --all"),
        ));
    }
    let base = filter(&args.filter, engine, target).await?;
    if !args.ids.is_empty() {
        let retried = retry_ids(&args, base, engine, output);
        return target.patiently(retried).await;
    }
    if args.dry_run {
        return preview(&args, base, engine, output).await;
    }
    let sent = match args.rate {
        Some(rate) => slowly(rate, &args, base, engine, target).await?,
        None => target.patiently(at_once(&args, base, engine)).await?,
    };
    say_sent(sent, output)
}

fn say_sent(sent: u64, output: &mut Output) -> Outcome {
    if output.is_json() {
        return output.json(&json!({ "retried": sent, "dry_run": false }));
    }
    output.line(format!("sent back {}", counted(sent, "dead letter")))
}

async fn at_once(args: &DlqRetryArgs, filter: DeadLetterFilter, engine: &Engine) -> Outcome<u64> {
    let letters = engine.dead_letters()?;
    let bar = progress::spinner("sending back");
    let action = Action::new("dlq.retry")
        .filter(&filter)
        .detail("limit", args.limit.into());
    let sent = match args.limit {
        None => letters.retry(filter),
        Some(limit) => {
            let limit = usize::try_from(limit).unwrap_or(usize::MAX);
            letters.retry_some(filter, limit)
        }
    };
    let sent = audited(engine, &Operator::current(), action, sent).await?;
    bar.finish_and_clear();
    Ok(sent)
}

async fn slowly(
    rate: u32,
    args: &DlqRetryArgs,
    filter: DeadLetterFilter,
    engine: &Engine,
    target: &Target,
) -> Outcome<u64> {
    let mut pace = RetryPace::per_second(rate);
    if let Some(limit) = args.limit {
        pace = pace.at_most(limit);
    }
    let bus = target.bus_on(engine.clone()).await?;
    let bar = progress::bar("sending back", Some(0));
    let letters = bus.dead_letters();
    let sent = letters.retry_slowly(filter, pace, |progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.retried);
    });
    let sent = sent.await;
    bar.finish_and_clear();
    Ok(sent?)
}

/// Retries each id separately, so that ids without a dead letter can be named.
async fn retry_ids(
    args: &DlqRetryArgs,
    base: DeadLetterFilter,
    engine: &Engine,
    output: &mut Output,
) -> Outcome {
    let letters = engine.dead_letters()?;
    let bar = progress::spinner("sending back");
    let (mut sent, mut missing) = (0, Vec::new());
    let mut tallies = Vec::new();
    for text in &args.ids {
        let id = event_id(text, args.source.as_deref());
        let filter = DeadLetterFilter {
            id: Some(id),
            ..base.clone()
        };
        let mut n = letters.count(filter.clone()).await?;
        if args.dry_run {
            tallies.extend(letters.tally(filter, MAX_PAGE).await?);
        } else if n > 0 {
            // A mistyped id changes nothing, so it is not recorded in the audit trail.
            let action = Action::new("dlq.retry").filter(&filter).on("EVENT", &id);
            n = audited(engine, &Operator::current(), action, letters.retry(filter)).await?;
        }
        sent += n;
        if n == 0 {
            missing.push((text.as_str(), id));
        }
    }
    bar.finish_and_clear();
    if args.dry_run {
        say_preview(sent, &tallies, output)?;
    } else if sent > 0 || output.is_json() {
        say_sent(sent, output)?;
    }
    let (mut messages, mut hint) = (Vec::new(), String::new());
    for (text, id) in missing {
        let why = why_not(text, id, args.filter.group.as_ref(), engine).await?;
        messages.push(why.message);
        hint = why.hint;
    }
    if messages.is_empty() {
        return Ok(());
    }
    Err(Stop::not_found(messages.join("; "), &hint))
}

async fn preview(
    args: &DlqRetryArgs,
    mut filter: DeadLetterFilter,
    engine: &Engine,
    output: &mut Output,
) -> Outcome {
    // One time for both queries.
    filter.died_until = Some(SystemClock.now());
    let letters = engine.dead_letters()?;
    let tallies = letters.tally(filter.clone(), MAX_PAGE).await?;
    let total = letters.count(filter).await?;
    say_preview(total.min(args.limit.unwrap_or(u64::MAX)), &tallies, output)
}

/// Prints how many would be retried, by group and type, then by error.
fn say_preview(would: u64, tallies: &[DeadLetterTally], output: &mut Output) -> Outcome {
    let mut by_type: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    for tally in tallies {
        let key = (tally.group.as_str(), tally.event_type.as_str());
        *by_type.entry(key).or_default() += tally.count;
    }
    if output.is_json() {
        return output.json(&json!({ "retried": would, "dry_run": true, "by": tallies }));
    }
    output.line(format!("would send back {}", counted(would, "dead letter")))?;
    if tallies.is_empty() {
        return Ok(());
    }
    let mut table = Table::new(&["GROUP", "TYPE", "DEAD LETTERS"]);
    for tally in tallies {
        let key = (tally.group.as_str(), tally.event_type.as_str());
        if let Some(count) = by_type.remove(&key) {
            table.row(vec![
                escaped(&tally.group.to_string()).into_owned(),
                shortened(&escaped(&tally.event_type), 40).into_owned(),
                count.to_string(),
            ]);
        }
    }
    output.line("")?;
    table.print(output)?;
    let mut table = Table::new(&["ERROR", "GROUP", "DEAD LETTERS"]);
    for tally in tallies.iter().take(SHOWN) {
        table.row(vec![
            shortened(&escaped(&tally.error), 60).into_owned(),
            escaped(&tally.group.to_string()).into_owned(),
            tally.count.to_string(),
        ]);
    }
    output.line("")?;
    table.print(output)?;
    if tallies.len() > SHOWN {
        let more = (tallies.len() - SHOWN) as u64;
        output.line(format!("and {} more", counted(more, "kind of failure")))?;
    }
    Ok(())
}
