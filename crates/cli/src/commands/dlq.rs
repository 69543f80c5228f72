//! `everbus dlq`: look at what failed for good, send it back, or delete it. Needs no running bus.

use everbus::audit::{Action, Operator, audited};
use everbus_core::{
    Clock as _, DeadLetter, DeadLetterFilter, DeadLetterKey, DeadLetters, Engine, EventId,
    GroupName, PageRequest, PurgeBasis, SystemClock, Timestamp,
};
use serde_json::json;

use super::get::print_event;
use super::{ID_HINT, event_id, existing_group};
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
    match command {
        DlqCommand::List(args) => list(args, engine, target, output).await,
        DlqCommand::Show(args) => show(args, engine, output).await,
        DlqCommand::Retry(args) => {
            let retried = retry(args, engine, output);
            target.patiently(retried).await
        }
        DlqCommand::Purge(args) => {
            let filter = filter(&args.filter, engine).await?;
            let purged = purge(args, filter, engine, output);
            target.patiently(purged).await
        }
    }
}

/// The filter, if it makes sense: a group that is not there and an end before the beginning match
/// nothing, and that would look like good news.
async fn filter(args: &DlqFilterArgs, engine: &Engine) -> Outcome<DeadLetterFilter> {
    if let (Some(since), Some(until)) = (args.since, args.until)
        && since > until
    {
        return Err(Stop::usage(
            format!(
                "--since {} is after --until {}",
                when::shown(since),
                when::shown(until)
            ),
            Some("exchange the two"),
        ));
    }
    if let Some(group) = &args.group {
        existing_group(group, engine).await?;
    }
    Ok(DeadLetterFilter {
        pattern: args.pattern.clone(),
        group: args.group.clone(),
        since: args.since,
        until: args.until,
        ..DeadLetterFilter::default()
    })
}

fn cursor(key: &DeadLetterKey) -> String {
    format!("{}:{}", key.position, key.group)
}

async fn list(args: DlqListArgs, engine: &Engine, target: &Target, output: &mut Output) -> Outcome {
    let after = args.after.clone();
    let request = PageRequest {
        limit: args.limit,
        offset: args.offset,
        after: after.map(|(position, group)| DeadLetterKey { position, group }),
    };
    request.validate()?;
    let filter = filter(&args.filter, engine).await?;
    let letters = engine.dead_letters()?;
    let mut page = letters.list(filter.clone(), request).await?;
    if let Some(next) = &page.next {
        // A full page may be the last one: only what really follows is worth a cursor.
        let peek = PageRequest {
            limit: 1,
            offset: 0,
            after: Some(next.clone()),
        };
        if letters.list(filter, peek).await?.items.is_empty() {
            page.next = None;
        }
    }
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
        output.line(format!("more: {}", next_page(&args, next, target)))?;
    }
    Ok(())
}

/// The command that shows the next page.
fn next_page(args: &DlqListArgs, next: &DeadLetterKey, target: &Target) -> String {
    let mut command = format!("everbus {} dlq list", target.as_option());
    let mut option = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            command.push_str(&format!(" {name} {}", shell_word(&value)));
        }
    };
    let filter = &args.filter;
    option("--type", filter.pattern.as_ref().map(ToString::to_string));
    option("--group", filter.group.as_ref().map(ToString::to_string));
    option("--since", filter.since.map(|time| time.to_string()));
    option("--until", filter.until.map(|time| time.to_string()));
    option("--limit", Some(args.limit.to_string()));
    option("--after", Some(cursor(next)));
    command
}

async fn show(args: DlqShowArgs, engine: &Engine, output: &mut Output) -> Outcome {
    if let Some(group) = &args.group {
        existing_group(group, engine).await?;
    }
    let id = event_id(&args.id, args.source.as_deref());
    let mut found = engine.dead_letters()?.get(id).await?;
    if let Some(group) = &args.group {
        found.retain(|letter| letter.group == *group);
    }
    if found.is_empty() {
        let why = why_not(&args.id, id, args.group.as_ref(), engine).await?;
        return Err(Stop::not_found(why.message, &why.hint));
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

/// Why an event is not among the dead letters that were asked for.
struct WhyNot {
    message: String,
    hint: String,
}

async fn why_not(
    text: &str,
    id: EventId,
    group: Option<&GroupName>,
    engine: &Engine,
) -> Outcome<WhyNot> {
    let get = format!("`everbus get {}` shows where it stands", shell_word(text));
    let letters = engine.dead_letters()?.get(id).await?;
    let here = |letter: &&DeadLetter| group.is_none_or(|group| letter.group == *group);
    if let Some(letter) = letters.iter().find(here) {
        let message = match letter.retried_at {
            Some(at) => format!(
                "{text:?} was sent back to {} already, {}",
                letter.group,
                when::ago(at)
            ),
            None => format!("{text:?} is a dead letter that the filters leave out"),
        };
        return Ok(WhyNot { message, hint: get });
    }
    if let Some(group) = group
        && !letters.is_empty()
    {
        let groups: Vec<String> = letters.iter().map(|l| l.group.to_string()).collect();
        return Ok(WhyNot {
            message: format!("{text:?} has no dead letter in the group {group}"),
            hint: format!("it has one in {}", groups.join(", ")),
        });
    }
    let stored = !engine.log()?.find(id).await?.is_empty();
    Ok(WhyNot {
        message: if stored {
            format!("{text:?} is not a dead letter")
        } else {
            format!("there is no event {text:?}")
        },
        hint: if stored { get } else { ID_HINT.to_owned() },
    })
}

async fn retry(args: DlqRetryArgs, engine: &Engine, output: &mut Output) -> Outcome {
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
    let base = filter(&args.filter, engine).await?;
    let letters = engine.dead_letters()?;
    let bar = progress::spinner("sending back");
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
            let mut action = Action::new("dlq.retry").filter(&filter);
            if let Some(id) = filter.id {
                action = action.on("EVENT", &id);
            }
            audited(engine, &Operator::current(), action, letters.retry(filter)).await?
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
    let (mut messages, mut hint) = (Vec::new(), String::new());
    for text in missing {
        let id = event_id(text, args.source.as_deref());
        let why = why_not(text, id, args.filter.group.as_ref(), engine).await?;
        messages.push(why.message);
        hint = why.hint;
    }
    if messages.is_empty() {
        return Ok(());
    }
    Err(Stop::not_found(messages.join("; "), &hint))
}

async fn purge(
    args: DlqPurgeArgs,
    filter: DeadLetterFilter,
    engine: &Engine,
    output: &mut Output,
) -> Outcome {
    let letters = engine.dead_letters()?;
    let cutoff = SystemClock.now().minus(args.older_than);
    let bar = progress::spinner("deleting");
    let purged = match (args.dry_run, args.by) {
        (false, by) => {
            let (basis, name) = match by {
                PurgeBy::Created => (PurgeBasis::Created, "created"),
                PurgeBy::Died => (PurgeBasis::Died, "died"),
            };
            let action = Action::new("dlq.purge")
                .filter(&filter)
                .detail("cutoff", cutoff.to_string().into())
                .detail("by", name.into());
            let purged = letters.purge(cutoff, basis, filter);
            audited(engine, &Operator::current(), action, purged).await?
        }
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
