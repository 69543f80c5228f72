//! `everbus streams`: which event types are in which stream, with what limits, and how full it is.

use everbus_core::{Code, Engine, Pattern, Stream, Streams};
use serde_json::{Value, json};

use crate::open::{Target, close};
use crate::output::{Output, Table, escaped, grouped, shortened};
use crate::stop::{Outcome, Stop};
use crate::when;

/// Waiting events are counted up to this limit, so that the command stays fast.
const COUNTED: u64 = 100_000;

pub(crate) async fn run(target: &Target, output: &mut Output) -> Outcome {
    let streams = target.streams()?;
    let engine = match target.open_existing().await {
        Ok(engine) => Some(engine),
        // Without a file, the configuration still says which streams there will be.
        Err(Stop::Failed(error)) if error.code() == Code::NoSuchFile && target.has_config() => None,
        Err(stop) => return Err(stop),
    };
    let depths = depths(&streams, engine.as_ref()).await;
    if let Some(engine) = &engine {
        close(engine).await;
    }
    let depths = depths?;
    if output.is_json() {
        let all = streams.iter().zip(&depths);
        let all: Vec<Value> = all.map(|(stream, depth)| shown(stream, *depth)).collect();
        return output.json(&json!({ "declared": streams.is_declared(), "streams": all }));
    }
    let mut table = Table::new(&["STREAM", "TYPES", "KEPT FOR", "WAITING", "MAX", "WHEN FULL"]);
    for (stream, depth) in streams.iter().zip(depths) {
        table.row(row(stream, depth));
    }
    table.print(output)
}

/// How many events of each stream wait for the group that is furthest behind, if that can be known.
async fn depths(streams: &Streams, engine: Option<&Engine>) -> Outcome<Vec<Option<u64>>> {
    let mut depths = Vec::new();
    for stream in streams {
        let depth = match engine.and_then(|engine| engine.depth.as_deref()) {
            Some(engine) => Some(engine.depth(stream.types().clone(), COUNTED).await?),
            None => None,
        };
        depths.push(depth);
    }
    Ok(depths)
}

fn row(stream: &Stream, depth: Option<u64>) -> Vec<String> {
    let limit = stream.limit.as_ref();
    let nothing = || "-".to_owned();
    vec![
        escaped(&stream.name).into_owned(),
        shortened(&escaped(stream.types().as_str()), 60).into_owned(),
        stream.max_age.map_or_else(nothing, when::lasting),
        match depth {
            Some(COUNTED) => format!("{}+", grouped(COUNTED)),
            Some(depth) => grouped(depth),
            None => nothing(),
        },
        limit.map_or_else(nothing, |limit| grouped(limit.max_len)),
        limit.map_or_else(nothing, |limit| limit.on_full.to_string()),
    ]
}

/// A stream for machines. A depth of 100,000 means that many or more.
pub(super) fn shown(stream: &Stream, depth: Option<u64>) -> Value {
    let types: Vec<&str> = stream.patterns().iter().map(Pattern::as_str).collect();
    let limit = stream.limit.as_ref();
    json!({
        "name": &*stream.name,
        "types": types,
        "max_age_s": stream.max_age.map(|age| age.as_secs()),
        "max_len": limit.map(|limit| limit.max_len),
        "on_full": limit.map(|limit| limit.on_full),
        "dialect": stream.dialect.as_deref(),
        "shards": stream.shards,
        "copies": stream.copies,
        "waiting": depth,
    })
}

/// The routing table, for `everbus check --config`.
pub(super) fn print_routing(streams: &Streams, output: &mut Output) -> Outcome {
    if !streams.is_declared() {
        return output.line("one stream for every event type");
    }
    for stream in streams {
        output.line(format!(
            "stream {}: {}",
            escaped(&stream.name),
            escaped(stream.types().as_str())
        ))?;
    }
    Ok(())
}
