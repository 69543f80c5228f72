//! `everbus dlq list` and `everbus dlq show`.

use everbus_core::{DeadLetter, DeadLetterKey, Engine, PageRequest};
use serde::Serialize;
use serde_json::json;

use super::args::{DlqListArgs, DlqShowArgs};
use super::{filter, group_or_outbox, in_outbox, why_not};
use crate::commands::event_id;
use crate::commands::get::{print_event, ran, shown_whole};
use crate::open::Target;
use crate::output::{Output, Table, counted, escaped, shortened};
use crate::stop::{Outcome, Stop};
use crate::suggest::Suggestion;
use crate::when;

fn cursor(key: &DeadLetterKey) -> String {
    crate::values::dead_letter_cursor(key)
}

pub(super) async fn list(
    args: DlqListArgs,
    engine: &Engine,
    target: &Target,
    output: &mut Output,
) -> Outcome {
    let after = args.after.clone();
    let request = PageRequest {
        limit: args.limit,
        offset: args.offset,
        after,
    };
    request.validate()?;
    let filter = filter(&args.filter, engine, target).await?;
    let letters = engine.dead_letters()?;
    let mut page = letters.list(filter.clone(), request).await?;
    if let Some(next) = &page.next {
        // A full page may be the last one: a cursor is printed only if something follows.
        let peek = PageRequest {
            limit: 1,
            offset: 0,
            after: Some(next.clone()),
        };
        if letters.list(filter, peek).await?.items.is_empty() {
            page.next = None;
        }
    }
    let outbox = in_outbox(engine).await?;
    if output.is_json() {
        return output.json(&json!({
            "dead_letters": page.items,
            "next": page.next.as_ref().map(cursor),
            "outbox_dead_letters": outbox,
        }));
    }
    if page.items.is_empty() {
        output.line("no dead letters")?;
        return say_outbox(outbox, target, output);
    }
    let mut table = Table::new(&["ID", "TYPE", "GROUP", "ATTEMPTS", "DIED", "LAST ERROR"]);
    for letter in &page.items {
        let event = letter.event();
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
    say_outbox(outbox, target, output)
}

/// Reports dead letters of the outbox, which are not in the list because no group has seen them.
fn say_outbox(dead: u64, target: &Target, output: &mut Output) -> Outcome {
    if dead == 0 {
        return Ok(());
    }
    output.line(format!(
        "and {} of the outbox: everbus {} outbox failed",
        counted(dead, "dead letter"),
        target.as_option()
    ))
}

/// The command that shows the next page.
fn next_page(args: &DlqListArgs, next: &DeadLetterKey, target: &Target) -> Suggestion {
    let filter = &args.filter;
    Suggestion::new(target, "dlq list")
        .option("--type", filter.pattern.as_ref())
        .option("--stream", filter.stream.as_ref())
        .option("--group", filter.group.as_ref())
        .option("--since", filter.since)
        .option("--until", filter.until)
        .option("--tenant", filter.tenant.as_ref())
        .option("--handler", filter.handler.as_ref())
        .option("--error", filter.error.as_ref())
        .option("--limit", Some(args.limit))
        .option("--after", Some(cursor(next)))
}

pub(super) async fn show(
    args: DlqShowArgs,
    engine: &Engine,
    target: &Target,
    output: &mut Output,
) -> Outcome {
    if let Some(group) = &args.group {
        group_or_outbox(group, engine).await?;
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
    let objects = target.objects(engine)?;
    let mut shown = Vec::with_capacity(found.len());
    for mut letter in found {
        let whole = shown_whole(objects.as_deref(), &letter.record).await;
        letter.record = whole.record;
        shown.push(Shown {
            letter,
            payload_error: whole.error,
        });
    }
    if output.is_json() {
        output.json(&shown)?;
    } else {
        for (index, shown) in shown.iter().enumerate() {
            if index > 0 {
                output.line("")?;
            }
            print_letter(&shown.letter, output)?;
        }
    }
    if shown.iter().any(|shown| shown.payload_error.is_some()) {
        return Err(Stop::Unsatisfied);
    }
    Ok(())
}

#[derive(Serialize)]
struct Shown {
    #[serde(flatten)]
    letter: DeadLetter,
    /// Why the large part of the payload is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_error: Option<String>,
}

fn print_letter(letter: &DeadLetter, output: &mut Output) -> Outcome {
    print_event(&letter.record, output)?;
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
    if let Some(by) = letter.replaced_by {
        output.line(format!("replaced by  {by}"))?;
    }
    for failure in &letter.failures {
        output.line(format!(
            "attempt {:<4} {} {}{}: {}",
            failure.attempt,
            when::shown(failure.at),
            failure.kind.as_str(),
            ran(failure.took, failure.worker.as_deref()),
            escaped(&failure.error)
        ))?;
        let backtrace = failure.backtrace.as_deref().unwrap_or_default();
        for line in backtrace.lines() {
            output.line(format!("             {}", escaped(line)))?;
        }
    }
    Ok(())
}
