//! `everbus replay --list` and `--forget`: lists incomplete replays, and gives one of them up.

use everbus::Bus;
use everbus::replay::ReplayRun;
use serde_json::{Value, json};

use crate::open::Target;
use crate::output::{Output, Table, escaped, grouped, shortened};
use crate::stop::{Outcome, Stop};
use crate::suggest::Suggestion;
use crate::when;

pub(crate) async fn list(bus: &Bus, target: &Target, output: &mut Output) -> Outcome {
    let runs = bus.replays().await?;
    if output.is_json() {
        let all: Vec<Value> = runs.iter().map(|run| as_json(run, target)).collect();
        return output.json(&all);
    }
    if runs.is_empty() {
        return output.line("no replay is under way or waits to go on");
    }
    let mut table = Table::new(&[
        "NAME",
        "WHAT",
        "INTO",
        "PROGRESS",
        "DONE",
        "STARTED",
        "LAST SAVED",
    ]);
    for run in &runs {
        let what: Vec<String> = words(run)
            .into_iter()
            .map(|(option, value)| format!("{option} {value}"))
            .collect();
        let idle = if run.idle { " (idle)" } else { "" };
        table.row(vec![
            escaped(&run.name).into_owned(),
            shortened(&escaped(&what.join(" ")), 80).into_owned(),
            escaped(&run.target).into_owned(),
            format!("{} %", percent(run)),
            grouped(run.processed),
            when::shown(run.started_at),
            format!("{}{idle}", when::ago(run.saved_at)),
        ]);
    }
    table.print(output)?;
    output.line("")?;
    for run in &runs {
        let name = escaped(&run.name);
        output.line(match resume(run, target) {
            Some(command) => format!("to go on with {name}: {command}"),
            None => format!("only the program that began {name} can go on with it"),
        })?;
    }
    Ok(())
}

pub(crate) async fn forget(name: &str, bus: &Bus, output: &mut Output) -> Outcome {
    if !bus.forget_replay(name).await? {
        let what = format!("there is no replay {name:?} that is not complete");
        return Err(Stop::not_found(what, "everbus replay --list shows them"));
    }
    if output.is_json() {
        return output.json(&json!({ "forgotten": name }));
    }
    output.line(format!("forgotten: {}", escaped(name)))
}

fn as_json(run: &ReplayRun, target: &Target) -> Value {
    let mut json = serde_json::to_value(run).unwrap_or(Value::Null);
    if let Some(command) = resume(run, target) {
        json["resume"] = command.into();
    }
    json
}

/// How much of the range is done.
fn percent(run: &ReplayRun) -> u64 {
    let from = run.from.progress();
    let all = run.upto.progress().saturating_sub(from).max(1);
    let done = run.position.progress().saturating_sub(from).min(all);
    u64::try_from(u128::from(done) * 100 / u128::from(all)).unwrap_or(100)
}

/// The selection as command line options.
fn words(run: &ReplayRun) -> Vec<(&'static str, String)> {
    let text = |word: &str| run.selection[word].as_str().map(str::to_owned);
    let entity = &run.selection["entity"];
    let entity = match (entity["type"].as_str(), entity["id"].as_str()) {
        (Some(kind), Some(id)) => Some(format!("{kind}:{id}")),
        _ => None,
    };
    let said = [
        ("", text("event")),
        ("--since", text("since")),
        ("--until", text("until")),
        ("--stream", text("stream")),
        ("--type", text("types")),
        ("--tenant", text("tenant")),
        ("--app", text("app")),
        ("--entity", entity),
    ];
    let said = said.into_iter();
    said.filter_map(|(option, value)| Some((option, value?)))
        .collect()
}

/// The command that continues it, if there is one.
fn resume(run: &ReplayRun, target: &Target) -> Option<String> {
    let group = run.target.strip_prefix("the group ");
    let all = run.target == "copies";
    if group.is_none() && !all {
        return None;
    }
    let mut command = Suggestion::new(target, "replay");
    for (option, value) in words(run) {
        if option.is_empty() {
            // One event by its id takes no name.
            return None;
        }
        command = command.option(option, Some(value));
    }
    let command = command
        .option("--group", group)
        .option("--name", Some(&run.name))
        .flag("--yes", all);
    Some(command.to_string())
}
