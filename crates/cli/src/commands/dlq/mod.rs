//! `everbus dlq`: list dead letters, retry them, send them corrected, or delete them. Needs no running bus.

mod args;
mod edit;
mod editor;
mod list;
mod purge;
mod retry;

use everbus_core::{
    Code, DeadLetter, DeadLetterFilter, Engine, Error, EventId, GroupName, OUTBOX_GROUP,
};

pub(crate) use args::DlqCommand;
use args::DlqFilterArgs;

use super::{ID_HINT, check_range, existing_group, until_interrupted};
use crate::open::{Target, close};
use crate::output::{Output, shell_word};
use crate::stop::{Outcome, Stop};
use crate::when;

pub(crate) async fn run(command: DlqCommand, target: &Target, output: &mut Output) -> Outcome {
    // While an editor has the terminal, it handles Ctrl-C.
    if let DlqCommand::Edit(args) = command {
        return edit::run(args, target, output).await;
    }
    until_interrupted(async {
        let engine = target.open_existing().await?;
        let outcome = run_on(command, &engine, target, output).await;
        close(&engine).await;
        outcome
    })
    .await
}

async fn run_on(
    command: DlqCommand,
    engine: &Engine,
    target: &Target,
    output: &mut Output,
) -> Outcome {
    match command {
        DlqCommand::List(args) => list::list(args, engine, target, output).await,
        DlqCommand::Show(args) => list::show(args, engine, target, output).await,
        DlqCommand::Retry(args) => retry::retry(args, engine, target, output).await,
        // Handled above.
        DlqCommand::Edit(_) => Ok(()),
        DlqCommand::Purge(args) => {
            let filter = filter(&args.filter, engine, target).await?;
            let purged = purge::purge(args, filter, engine, output);
            target.patiently(purged).await
        }
    }
}

/// Checks and returns the filter. An unknown group, or an end before the beginning, would match nothing and
/// look like good news.
async fn filter(
    args: &DlqFilterArgs,
    engine: &Engine,
    target: &Target,
) -> Outcome<DeadLetterFilter> {
    check_range(args.since, args.until)?;
    if let Some(group) = &args.group {
        group_or_outbox(group, engine).await?;
    }
    Ok(DeadLetterFilter {
        pattern: match &args.stream {
            Some(stream) => Some(target.streams()?.select(stream)?),
            None => args.pattern.clone(),
        },
        group: args.group.clone(),
        since: args.since,
        until: args.until,
        tenant: args.tenant.clone(),
        handler: args.handler.clone(),
        error: args.error.clone(),
        ..DeadLetterFilter::default()
    })
}

/// The group must exist. The outbox is not a group, although `system.dead_letter` names it like one.
async fn group_or_outbox(group: &GroupName, engine: &Engine) -> Outcome {
    match existing_group(group, engine).await {
        Err(Stop::Failed(error))
            if error.code() == Code::GroupNotFound && group.as_str() == OUTBOX_GROUP =>
        {
            Err(Error::new(Code::GroupNotFound, error.message())
                .hint("`everbus outbox failed` lists the dead letters of the outbox, `everbus outbox retry` sends them again")
                .into())
        }
        other => other.map(drop),
    }
}

/// The number of dead letters of the outbox in the same file, which no group has.
async fn in_outbox(engine: &Engine) -> Outcome<u64> {
    Ok(match &engine.outbox {
        Some(outbox) => outbox.dead_letters().await?,
        None => 0,
    })
}

/// Why an event is not among the requested dead letters.
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
    if let Some(outbox) = &engine.outbox
        && let Some(known) = outbox.find_dead_letter(text.to_owned(), id).await?
    {
        let known = shell_word(&known);
        return Ok(WhyNot {
            message: format!("{text:?} is a dead letter of the outbox: no group has seen it"),
            hint: format!(
                "`everbus outbox failed` shows it, `everbus outbox retry {known}` sends it again"
            ),
        });
    }
    let stored = !engine.lookup()?.find(id).await?.is_empty();
    Ok(WhyNot {
        message: if stored {
            format!("{text:?} is not a dead letter")
        } else {
            format!("there is no event {text:?}")
        },
        hint: if stored { get } else { ID_HINT.to_owned() },
    })
}
