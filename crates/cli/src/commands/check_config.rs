//! `everbus check --config`: checks a configuration file.

use std::path::Path;

use everbus::Config;
use everbus::config::{Broker, Problems};
use serde_json::json;

use super::check::CheckArgs;
use super::streams::{print_routing, shown};
use crate::args::Args;
use crate::output::{Output, counted, escaped};
use crate::stop::{Outcome, Stop};

pub(crate) fn run(args: &Args, check: &CheckArgs, path: &Path, output: &mut Output) -> Outcome {
    if check.deep {
        return Err(Stop::usage(
            "--deep is about the objects of a file, and --config checks the configuration alone",
            Some("set EVERBUS_CONFIG to the configuration, and leave --config out"),
        ));
    }
    if args.db.is_some() || args.broker.is_some() {
        return Err(Stop::usage(
            "check looks at the configuration or at the file that holds the events, not at both",
            Some("run it twice: with --config alone, and with --db alone"),
        ));
    }
    match Config::load(path) {
        Ok(config) => good(path, &config, output),
        Err(error) => match Problems::of(&error) {
            Some(problems) => bad(problems, output),
            None => Err(error.into()),
        },
    }
}

fn good(path: &Path, config: &Config, output: &mut Output) -> Outcome {
    let file = path.to_string_lossy();
    let warnings = warnings(config);
    let streams = config.limits.over(&config.streams)?;
    if output.is_json() {
        let engine = |e: &Broker| json!({ "type": e.kind.as_str(), "url": e.url.to_string() });
        let names: Vec<&str> = config.consumers.iter().map(|c| c.name.as_str()).collect();
        return output.json(&json!({
            "ok": true,
            "file": file,
            "broker": config.broker.as_ref().map(engine),
            "store": config.store.as_ref().map(engine),
            "consumers": names,
            "streams": streams.iter().map(|s| shown(s, None)).collect::<Vec<_>>(),
            "problems": [],
            "warnings": warnings,
        }));
    }
    let consumers = counted(config.consumers.len() as u64, "consumer");
    let engine =
        |role: &str, engine: &Broker| format!("{role} {}", escaped(&engine.url.to_string()));
    let broker = config.broker.as_ref();
    let broker = broker.map_or_else(|| "no broker".to_owned(), |b| engine("broker", b));
    let store = config.store.as_ref().map(|s| engine("store", s));
    let parts: Vec<String> = [broker]
        .into_iter()
        .chain(store)
        .chain([consumers])
        .collect();
    output.line(parts.join(", "))?;
    print_routing(&streams, output)?;
    for warning in &warnings {
        output.line(format!("warning: {}", escaped(warning)))?;
    }
    output.line(format!("{}: everything is as it should be", escaped(&file)))
}

/// Settings that are valid but will not work on this machine.
fn warnings(config: &Config) -> Vec<String> {
    let engines = config.broker.iter().chain(&config.store);
    engines
        .filter(|engine| !engine.kind.is_available())
        .map(|engine| {
            format!(
                "this build has no engine for {}: a bus cannot be opened with this file here",
                engine.kind
            )
        })
        .collect()
}

fn bad(problems: &Problems, output: &mut Output) -> Outcome {
    if output.is_json() {
        output.json(&json!({
            "ok": false,
            "file": problems.file,
            "problems": problems.list,
            "total": problems.total,
            "warnings": [],
        }))?;
        return Err(Stop::Unsatisfied);
    }
    for problem in &problems.list {
        let place = match (problem.line, problem.column) {
            (Some(line), Some(column)) => format!("{}:{line}:{column}", problems.file),
            _ => problems.file.clone(),
        };
        output.line(format!(
            "BAD {}: {}; {}",
            escaped(&place),
            escaped(&problem.message),
            escaped(&problem.hint)
        ))?;
    }
    let count = counted(problems.total as u64, "problem");
    output.line(format!("{count} in {}", escaped(&problems.file)))?;
    Err(Stop::Unsatisfied)
}
