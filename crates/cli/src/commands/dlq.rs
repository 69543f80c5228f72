//! `everbus dlq`: look at what failed for good, send it back, or delete it. Needs no running bus.

use everbus_core::{
    Clock as _, DeadLetter, DeadLetterFilter, DeadLetterKey, DeadLetters, Engine, PageRequest,
    PurgeBasis, SystemClock, Timestamp,
};
use serde_json::json;

use super::get::print_event;
use super::{ID_HINT, event_id};
use crate::args::{
    DlqCommand, DlqFilterArgs, DlqListArgs, DlqPurgeArgs, DlqRetryArgs, DlqShowArgs, PurgeBy,
};
use crate::open::{Target, close};
use crate::output::{Output, Table, counted, escaped, shell_word, shortened};
use crate::progress;
use crate::stop::{Outcome, Stop};
use crate::when;

pub(crate) async fn run(command: DlqCommand, target: &Target, output: &mut Output) -> Outcome {
    let engine = target.open_existing().await?;
    let outcome = run_on(command, &engine, target, output).await;
    close(&engine).await;
    outcome
}

async fn run_on(
    command: DlqCommand,
    engine: &Engine,
    target: &Target,
    output: &mut Output,
) -> Outcome {
    let letters = engine.dead_letters()?;
    match command {
        DlqCommand::List(args) => list(args, letters, target, output).await,
        DlqCommand::Show(args) => show(args, letters, output).await,
        DlqCommand::Retry(args) => retry(args, letters, output).await,
        DlqCommand::Purge(args) => purge(args, letters, output).await,
    }
}

fn filter(args: DlqFilterArgs) -> DeadLetterFilter {
    DeadLetterFilter {
        pattern: args.pattern,
        group: args.group,
        id: None,
        since: args.since,
        until: args.until,
    }
}

fn cursor(key: &DeadLetterKey) -> String {
    format!("{}:{}", key.position, key.group)
}

async fn list(
    args: DlqListArgs,
    letters: &dyn DeadLetters,
    target: &Target,
    output: &mut Output,
) -> Outcome {
    let request = PageRequest {
        limit: args.limit,
        offset: args.offset,
        after: args
            .after
            .map(|(position, group)| DeadLetterKey { position, group }),
    };
    request.validate()?;
    let page = letters.list(filter(args.filter), request).await?;
    if output.is_json() {
        return output.json(&json!({
            "dead_letters": page.items,
            "next": page.next.as_ref().map(cursor),
        }));
    }
    if page.items.is_empty() {
        return output.line("no dead letters");
    }
    let mut table = Table::new(&["ID", "TYPE", "GROUP", "ATTEMPTS", "DIED", "LAST ERROR"]);
    for letter in &page.items {
        let event = &letter.event.event;
        table.row(vec![
            escaped(&event.display_id()).into_owned(),
            shortened(&escaped(event.event_type()), 40).into_owned(),
            escaped(&letter.group.to_string()).into_owned(),
            letter.attempts.to_string(),
            when::ago(letter.died_at),
            shortened(&escaped(letter.last_error()), 60).into_owned(),
        ]);
    }
    table.print(output)?;
    if let Some(next) = &page.next {
        output.line(format!(
            "more: everbus {} dlq list --after {} (and the same filters)",
            target.as_option(),
            shell_word(&cursor(next))
        ))?;
    }
    Ok(())
}

async fn show(args: DlqShowArgs, letters: &dyn DeadLetters, output: &mut Output) -> Outcome {
    let mut found = letters
        .get(event_id(&args.id, args.source.as_deref()))
        .await?;
    if let Some(group) = &args.group {
        found.retain(|letter| letter.group == *group);
    }
    if found.is_empty() {
        return Err(Stop::not_found(
            format!("there is no dead letter of the event {:?}", args.id),
            "`everbus dlq list` shows the open ones; `everbus get ID` shows any event",
        ));
    }
    if output.is_json() {
        return output.json(&found);
    }
    for (index, letter) in found.iter().enumerate() {
        if index > 0 {
            output.line("")?;
        }
        print_letter(letter, output)?;
    }
    Ok(())
}

fn print_letter(letter: &DeadLetter, output: &mut Output) -> Outcome {
    print_event(&letter.event, output)?;
    output.line(format!(
        "group        {}",
        escaped(&letter.group.to_string())
    ))?;
    if let Some(handler) = &letter.handler {
        output.line(format!("handler      {}", escaped(handler)))?;
    }
    output.line(format!("attempts     {}", letter.attempts))?;
    output.line(format!(
        "first died   {}",
        when::shown(letter.first_seen_at)
    ))?;
    output.line(format!(
        "died         {} ({})",
        when::shown(letter.died_at),
        when::ago(letter.died_at)
    ))?;
    if let Some(retried) = letter.retried_at {
        output.line(format!("sent back    {}", when::shown(retried)))?;
    }
    for failure in &letter.failures {
        output.line(format!(
            "attempt {:<4} {} {}: {}",
            failure.attempt,
            when::shown(failure.at),
            failure.kind.as_str(),
            escaped(&failure.error)
        ))?;
    }
    Ok(())
}

async fn retry(args: DlqRetryArgs, letters: &dyn DeadLetters, output: &mut Output) -> Outcome {
    let any = args.filter.pattern.is_some()
        || args.filter.group.is_some()
        || args.filter.since.is_some()
        || args.filter.until.is_some();
    if args.ids.is_empty() && !args.all && !any {
        return Err(Stop::usage(
            "which dead letters?",
            Some("name ids, give a filter such as --type order.*, or say --all"),
        ));
    }
    let bar = progress::spinner("sending back");
    let base = filter(args.filter);
    let mut filters = vec![base.clone()];
    if !args.ids.is_empty() {
        filters = args
            .ids
            .iter()
            .map(|id| DeadLetterFilter {
                id: Some(event_id(id, args.source.as_deref())),
                ..base.clone()
            })
            .collect();
    }
    let mut sent = 0;
    let mut missing = Vec::new();
    for (index, filter) in filters.into_iter().enumerate() {
        let n = if args.dry_run {
            letters.count(filter).await?
        } else {
            letters.retry(filter).await?
        };
        sent += n;
        match args.ids.get(index) {
            Some(id) if n == 0 => missing.push(id.as_str()),
            _ => {}
        }
    }
    bar.finish_and_clear();
    let what = counted(sent, "dead letter");
    match (output.is_json(), args.dry_run) {
        (true, dry_run) => output.json(&json!({ "retried": sent, "dry_run": dry_run }))?,
        (false, true) => output.line(format!("would send back {what}"))?,
        (false, false) => output.line(format!("sent back {what}"))?,
    }
    if missing.is_empty() {
        return Ok(());
    }
    Err(Stop::not_found(
        format!("no open dead letter: {}", missing.join(", ")),
        ID_HINT,
    ))
}

async fn purge(args: DlqPurgeArgs, letters: &dyn DeadLetters, output: &mut Output) -> Outcome {
    let cutoff = SystemClock.now().minus(args.older_than);
    let filter = filter(args.filter);
    let bar = progress::spinner("deleting");
    let purged = match (args.dry_run, args.by) {
        (false, PurgeBy::Created) => letters.purge(cutoff, PurgeBasis::Created, filter).await?,
        (false, PurgeBy::Died) => letters.purge(cutoff, PurgeBasis::Died, filter).await?,
        (true, PurgeBy::Created) => {
            let until = filter.until.map_or(cutoff, |until| until.min(cutoff));
            let filter = DeadLetterFilter {
                until: Some(until),
                ..filter
            };
            letters.count(filter).await?
        }
        (true, PurgeBy::Died) => count_died(cutoff, &filter, letters).await?,
    };
    bar.finish_and_clear();
    let what = counted(purged, "dead letter");
    match (output.is_json(), args.dry_run) {
        (true, dry_run) => output.json(&json!({ "purged": purged, "dry_run": dry_run })),
        (false, true) => output.line(format!("would delete {what}")),
        (false, false) => output.line(format!("deleted {what}")),
    }
}

/// A filter knows no time of death, so the dead letters are walked page by page.
async fn count_died(
    cutoff: Timestamp,
    filter: &DeadLetterFilter,
    letters: &dyn DeadLetters,
) -> Outcome<u64> {
    let mut count = 0;
    let mut after = None;
    loop {
        let request = PageRequest {
            limit: 1000,
            offset: 0,
            after,
        };
        let page = letters.list(filter.clone(), request).await?;
        count += page.items.iter().filter(|l| l.died_at <= cutoff).count() as u64;
        match page.next {
            Some(next) if !page.items.is_empty() => after = Some(next),
            _ => return Ok(count),
        }
    }
}
