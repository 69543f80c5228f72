//! `everbus objects`: shows the objects by the log that put them, and removes those that another log left.

use std::time::Duration;

use clap::Subcommand;
use everbus::audit::{Action, Operator, audited};
use everbus::overflow::{Objects, Survey, Tally};
use everbus_core::{Code, Engine, Error};
use serde_json::json;

use crate::open::{Target, close};
use crate::output::{Output, Table, counted, escaped, grouped};
use crate::progress;
use crate::stop::Outcome;
use crate::when;

/// Shown for objects whose owner is not known.
const UNKNOWN: &str = "unknown";

#[derive(Debug, Subcommand)]
pub(crate) enum ObjectsCommand {
    /// Show how many objects there are, and which log put them
    Show,
    /// Delete the objects that another log put here and that no event of this file refers to
    #[command(after_help = REMOVE_HELP)]
    Remove(RemoveArgs),
}

const REMOVE_HELP: &str = "\
Another log is another file that uses the same place, or this file as it was before a restore replaced it. Make \
sure that no such file still needs its objects: deleted objects cannot be brought back. An object that this file \
refers to is never deleted, and objects that this file put are deleted by its retention.";

#[derive(Debug, clap::Args)]
pub(crate) struct RemoveArgs {
    /// The log, as `everbus objects show` names it
    #[arg(value_name = "LOG")]
    log: String,

    /// Only objects that were stored longer ago than this
    #[arg(long, value_name = "AGE", default_value = "24h", value_parser = when::parse_length)]
    older_than: Duration,

    /// Only print what would be deleted
    #[arg(long)]
    dry_run: bool,
}

pub(crate) async fn run(command: ObjectsCommand, target: &Target, output: &mut Output) -> Outcome {
    let engine = target.open_existing().await?;
    let outcome = match target.objects(&engine) {
        Ok(Some(objects)) => match command {
            ObjectsCommand::Show => show(&engine, &objects, output).await,
            ObjectsCommand::Remove(args) => remove(&args, &engine, &objects, output).await,
        },
        Ok(None) => {
            let what = "there is no place for the objects of large events";
            let error = Error::new(Code::Unsupported, what);
            Err(error
                .hint("name it: overflow.url in the configuration")
                .into())
        }
        Err(stop) => Err(stop),
    };
    close(&engine).await;
    outcome
}

async fn survey(engine: &Engine, objects: &Objects) -> Outcome<Survey> {
    let bar = progress::spinner("looking at every object");
    let survey = objects.survey(engine).await;
    bar.finish_and_clear();
    Ok(survey?)
}

async fn show(engine: &Engine, objects: &Objects, output: &mut Output) -> Outcome {
    let survey = survey(engine, objects).await?;
    if output.is_json() {
        return output.json(&survey);
    }
    let mut table = Table::new(&["OBJECTS", "OF LOG", "COUNT", "BYTES"]);
    let mut row = |what: &str, log: &str, tally: Tally| {
        let (count, bytes) = (grouped(tally.objects), grouped(tally.bytes));
        table.row(vec![what.to_owned(), log.to_owned(), count, bytes]);
    };
    row("of events", "this", survey.in_use);
    row("without an event, to be deleted", "this", survey.noted);
    for (log, tally) in &survey.others {
        let log = if log.is_empty() { UNKNOWN } else { log };
        row("not of this file", log, *tally);
    }
    table.print(output)?;
    let log = survey.log.unwrap_or_else(|| UNKNOWN.to_owned());
    let place = escaped(&survey.place);
    output.line(format!("this log is {log}, the place {place}"))
}

async fn remove(
    args: &RemoveArgs,
    engine: &Engine,
    objects: &Objects,
    output: &mut Output,
) -> Outcome {
    let survey = survey(engine, objects).await?;
    let log = if args.log == UNKNOWN { "" } else { &args.log };
    if !survey.others.contains_key(log) {
        let what = format!("there are no objects of a log {:?} here", args.log);
        let error = Error::new(Code::NotFound, what);
        return Err(error.hint("`everbus objects show` names the logs").into());
    }
    let removing = objects.remove_others(engine, &survey, log, args.older_than, args.dry_run);
    let removed = if args.dry_run {
        removing.await?
    } else {
        let action = Action::new("objects.remove")
            .on("log", &args.log)
            .detail("place", json!(survey.place));
        audited(engine, &Operator::current(), action, removing).await?
    };
    if output.is_json() {
        return output.json(&json!({
            "dry_run": args.dry_run,
            "log": args.log,
            "removed": removed,
        }));
    }
    let what = if args.dry_run {
        "would be deleted"
    } else {
        "deleted"
    };
    output.line(format!(
        "{} ({} bytes) {what}",
        counted(removed.objects, "object"),
        grouped(removed.bytes)
    ))
}
