//! `everbus asyncapi`: the events of a configuration and an engine as an AsyncAPI 3 document.
//!
//! It contains what is known without the program: the streams and consumers of the configuration file, the
//! groups of the engine with their patterns, and the types of its newest events. The schemas are in the
//! program; `Router::asyncapi` has them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use everbus::Config;
use everbus::asyncapi::{Action, Channel, Document, Operation};
use everbus_core::{Code, Cursor, Engine, Pattern, Position};
use serde_json::{Value, json};

use crate::args::{Args, AsyncapiArgs};
use crate::open::{Target, close};
use crate::output::Output;
use crate::stop::{Outcome, Stop};

pub(crate) async fn run(command: AsyncapiArgs, args: &Args, output: &mut Output) -> Outcome {
    let mut document = Document::new(command.title, command.app_version);
    let config = configured(args)?;
    if let Some(config) = &config {
        add_config(config, &mut document);
    }
    match engine(args, config.as_ref()).await? {
        Some(engine) => {
            let added = add_engine(&engine, command.recent, &mut document).await;
            close(&engine).await;
            added?;
        }
        None if config.is_none() => {
            return Err(Stop::usage(
                "there is nothing to describe",
                Some("name a file of events with --db, or a configuration with --config"),
            ));
        }
        None => {}
    }
    output.json(&document.to_json()?)
}

fn configured(args: &Args) -> Outcome<Option<Config>> {
    let variable = std::env::var_os("EVERBUS_CONFIG").filter(|value| !value.is_empty());
    let path = args.config.clone().or(variable.map(PathBuf::from));
    Ok(path.map(Config::load).transpose()?)
}

/// The engine, if it can be opened. With a configuration it need not exist yet.
async fn engine(args: &Args, config: Option<&Config>) -> Outcome<Option<Engine>> {
    let named = config.and_then(|config| config.broker.as_ref());
    let elsewhere = args.db.is_none() && args.broker.is_none();
    if elsewhere && named.is_some_and(|broker| !broker.kind.is_available()) {
        return Ok(None);
    }
    match Target::choose(args)?.open_existing().await {
        Ok(engine) => Ok(Some(engine)),
        Err(Stop::Failed(error)) if error.code() == Code::NoSuchFile && config.is_some() => {
            Ok(None)
        }
        Err(stop) => Err(stop),
    }
}

fn add_config(config: &Config, document: &mut Document) {
    let declared = config.streams.is_declared();
    // Names of declared streams are not types.
    let is_type = |name: &&String| !declared || config.streams.named(name).is_none();
    let limits = config.limits.by_stream.keys();
    let streams = limits.chain(config.backpressure.max_staleness.keys());
    let streams = streams.filter(is_type);
    document.channels.extend(streams.map(|stream| Channel {
        event_type: stream.clone(),
        versions: Vec::new(),
    }));
    document
        .operations
        .extend(config.consumers.iter().map(|consumer| Operation {
            group: Some(consumer.group.to_string()),
            retry: consumer.retry.map(|retry| retry.policy()),
            timeout: consumer.processing_timeout,
            settings: settings(consumer),
            ..Operation::new(
                Action::Receive,
                consumer.name.as_str(),
                consumer.pattern.as_str(),
            )
        }));
}

fn settings(consumer: &everbus::config::Consumer) -> BTreeMap<String, Value> {
    let breaker = consumer.circuit_breaker.policy().map(|policy| {
        json!({
            "fail_max": policy.fail_max,
            "open_for_ms": u64::try_from(policy.open_for.as_millis()).unwrap_or(u64::MAX),
        })
    });
    let said = [
        (
            "criticality",
            consumer.criticality.map(|c| json!(c.as_str())),
        ),
        ("circuit-breaker", breaker),
        ("dependency", consumer.dependency.clone().map(Value::from)),
        ("concurrency", consumer.concurrency.map(Value::from)),
        ("ordered", consumer.ordered.map(Value::from)),
        ("idempotent", consumer.idempotent.map(Value::from)),
        ("decode", consumer.decode.map(|d| json!(d.as_str()))),
    ];
    let said = said.into_iter();
    said.filter_map(|(key, value)| Some((key.to_owned(), value?)))
        .collect()
}

/// Adds the groups with their patterns, unless the configuration has them already, and the types and versions
/// of the newest events.
async fn add_engine(engine: &Engine, recent: u64, document: &mut Document) -> Outcome {
    let known: BTreeSet<(Option<String>, String)> = document
        .operations
        .iter()
        .map(|operation| (operation.group.clone(), operation.pattern.clone()))
        .collect();
    for group in engine.broker.inspect().await? {
        let name = (!group.name.is_unnamed()).then(|| group.name.to_string());
        for pattern in group.patterns {
            if !known.contains(&(name.clone(), pattern.clone())) {
                document.operations.push(Operation {
                    group: name.clone(),
                    ..Operation::new(Action::Receive, group.name.to_string(), pattern)
                });
            }
        }
    }
    document.channels.extend(seen(engine, recent).await?);
    Ok(())
}

async fn seen(engine: &Engine, recent: u64) -> Outcome<Vec<Channel>> {
    let log = engine.log()?;
    let head = log.head().await?;
    let mut after = Cursor::START;
    for last in head.positions() {
        let place = last.place().saturating_sub(recent);
        after.advance(Position::new(last.shard(), place));
    }
    let mut types: BTreeMap<String, BTreeSet<u32>> = BTreeMap::new();
    while !after.reaches(&head) {
        let all = vec![Pattern::new("*")?, Pattern::new("system.>")?];
        let (events, searched) = log.read(after.clone(), all, 1000).await?;
        for record in events {
            let event = &record.event;
            let versions = types.entry(event.event_type().to_owned()).or_default();
            versions.insert(event.version());
        }
        if after.reaches(&searched) {
            break;
        }
        after = searched;
    }
    let types = types.into_iter();
    Ok(types
        .map(|(event_type, versions)| Channel {
            event_type,
            versions: versions
                .into_iter()
                .map(|version| (version, None))
                .collect(),
        })
        .collect())
}
