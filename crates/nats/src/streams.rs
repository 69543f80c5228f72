//! The streams of the server that have events: which there are, their settings, and which type is in which.
//!
//! A declared stream is a JetStream stream of its name, with its patterns as subjects. Without declared streams
//! one stream, `EVERBUS`, has everything. Two more streams always exist: `EVERBUS_GROUPS` has the groups and
//! `DLQ` the dead letters. [`ensure`] creates and changes streams, [`space`] names them.

mod ensure;
mod space;

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Code, Durability, Error, Pattern, Result, Shard, Streams};
use everbus_dialects::Dialect;
use serde_json::Value;

use crate::api::StreamInfo;
use crate::client::Link;
use crate::config::Options;
use crate::names::{self, Naming};
use ensure::Wanted;
pub(crate) use ensure::{declare, declare_groups, made, raise_copies};
pub(crate) use space::Space;

/// The single stream of a bus without declared streams.
const SINGLE: &str = "EVERBUS";
/// The metadata keys of streams that Everbus made.
const DIALECT: &str = "everbus.dialect";
const NAMING: &str = "everbus.naming";
const SPACE: &str = "everbus.space";

/// A stream of the server that has events.
#[derive(Debug)]
pub(crate) struct StreamHandle {
    /// Its name on the server.
    pub(crate) name: String,
    /// Its name as declared, encoded.
    pub(crate) short: String,
    pub(crate) shard: Shard,
    pub(crate) naming: Naming,
    pub(crate) dialect: Dialect,
    /// The prefix of all its subjects.
    prefix: String,
    /// Its subjects, with the prefix.
    pub(crate) subjects: Vec<String>,
    /// The types that belong to the stream; `None` for a stream that is no longer declared, and for the single stream.
    pub(crate) types: Option<Pattern>,
    /// Whether the server stores a batch as a whole.
    pub(crate) atomic: bool,
    pub(crate) durability: Durability,
    pub(crate) window: Duration,
    /// The age at which the server removes events.
    pub(crate) max_age: Option<Duration>,
}

impl StreamHandle {
    pub(crate) fn subject(&self, plain: &str) -> String {
        format!("{}{plain}", self.prefix)
    }

    /// The subject without the prefix of the space.
    pub(crate) fn plain<'a>(&self, subject: &'a str) -> &'a str {
        subject.strip_prefix(&self.prefix).unwrap_or(subject)
    }

    /// The filters for these patterns, with the prefix. `None` is everything, and an empty list nothing.
    pub(crate) fn filters(&self, patterns: &[Pattern]) -> Option<Vec<String>> {
        let wanted = |pattern: &&Pattern| {
            let types = self.types.as_ref();
            types.is_none_or(|types| reaches(pattern, types))
        };
        let wanted: Vec<&Pattern> = patterns.iter().filter(wanted).collect();
        let filters = names::filters(self.naming, wanted)?;
        let filters = filters.iter().map(|filter| self.subject(filter));
        // If the types are not known, the subjects of the stream say what belongs to it.
        let reached = |filter: &String| {
            let subjects = &mut self.subjects.iter();
            self.types.is_some() || subjects.any(|subject| names::overlap(subject, filter))
        };
        Some(filters.filter(reached).collect())
    }

    /// One filter that covers all of these patterns.
    pub(crate) fn one_filter(&self, patterns: &[Pattern]) -> String {
        match self.filters(patterns).as_deref() {
            Some([one]) => one.clone(),
            _ => self.subject(">"),
        }
    }
}

/// Whether a subscription's pattern shares a type with those of a stream.
fn reaches(pattern: &Pattern, types: &Pattern) -> bool {
    let text = everbus_core::stream::dotted(pattern.as_str());
    match text == pattern.as_str() {
        true => pattern.overlap(types).is_some(),
        false => Pattern::new(&text).is_ok_and(|dotted| dotted.overlap(types).is_some()),
    }
}

/// The streams of a bus, and which type is in which.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) routes: Streams,
    pub(crate) streams: Vec<Arc<StreamHandle>>,
    /// The number of replicas for groups, dead letters and values: the highest of all event streams.
    pub(crate) copies: u32,
    /// The durability of groups or that of dead letters, whichever is weaker.
    own: Durability,
}

impl Table {
    /// The stream of an event type.
    pub(crate) fn route(&self, event_type: &str) -> Result<&Arc<StreamHandle>> {
        let name = &self.routes.route(event_type)?.name;
        let short = match self.routes.is_declared() {
            true => names::encoded(name),
            false => SINGLE.to_owned(),
        };
        self.streams
            .iter()
            .find(|stream| stream.short == short)
            .ok_or_else(|| Error::new(Code::Internal, format!("the stream {name} has no handle")))
    }

    /// The weakest durability of its streams, with those of groups and dead letters.
    pub(crate) fn durability(&self) -> Durability {
        let all = self.streams.iter().map(|stream| stream.durability);
        all.fold(self.own, Ord::min)
    }

    /// The shortest time for which a repeated id is recognised.
    pub(crate) fn window(&self) -> Duration {
        let all = self.streams.iter().map(|stream| stream.window);
        all.min().unwrap_or_default()
    }

    /// Whether the server removes events of any of its streams by their age.
    pub(crate) fn drops_by_age(&self) -> bool {
        self.streams.iter().any(|stream| stream.max_age.is_some())
    }

    /// Whether a batch is stored as a whole, whatever types it has.
    pub(crate) fn atomic(&self) -> bool {
        matches!(&self.streams[..], [only] if only.atomic)
    }
}

pub(crate) fn texts(value: &Value) -> Vec<String> {
    let all = value.as_array().map(Vec::as_slice).unwrap_or_default();
    let all = all.iter().filter_map(Value::as_str);
    all.map(str::to_owned).collect()
}

/// Whether the server acks a message before it has written it to a file.
fn acks_from_memory(config: &Value) -> bool {
    config["storage"].as_str() == Some("memory") || config["persist_mode"].as_str() == Some("async")
}

fn durability_of(config: &Value, options: &Options) -> Durability {
    let replicas = config["num_replicas"].as_u64().unwrap_or(1);
    match replicas {
        ..3 if acks_from_memory(config) => Durability::Memory,
        3.. => Durability::Replicated,
        _ if options.synced => Durability::PowerLoss,
        _ => Durability::Process,
    }
}

fn handle(
    space: &Space,
    name: String,
    short: String,
    info: &StreamInfo,
    types: Option<Pattern>,
    wanted: Option<&Wanted<'_>>,
    options: &Options,
) -> Result<StreamHandle> {
    let config = &info.config;
    let metadata = &config["metadata"];
    let dialect = match wanted {
        Some(wanted) => wanted.dialect,
        None => match metadata[DIALECT].as_str() {
            Some(name) => name.parse()?,
            None => Dialect::Native,
        },
    };
    let naming = match (wanted, metadata[NAMING].as_str()) {
        (Some(wanted), _) => wanted.naming,
        (None, Some("single")) => Naming::Single,
        (None, _) => Naming::Declared,
    };
    Ok(StreamHandle {
        shard: Shard::named(&short)?,
        name,
        short,
        naming,
        dialect,
        prefix: space.subject_prefix.clone(),
        subjects: texts(&config["subjects"]),
        types,
        atomic: config["allow_atomic"].as_bool() == Some(true),
        durability: durability_of(config, options),
        window: Duration::from_nanos(config["duplicate_window"].as_u64().unwrap_or(0)),
        max_age: config["max_age"]
            .as_u64()
            .filter(|age| *age > 0)
            .map(Duration::from_nanos),
    })
}

/// A stream that a group consumes and that is not declared here any more. `None` if it is gone.
pub(crate) async fn undeclared(
    link: &Link,
    space: &Space,
    options: &Options,
    name: &str,
) -> Result<Option<StreamHandle>> {
    let Some(info) = link.stream(name).await? else {
        return Ok(None);
    };
    let short = name.strip_prefix(&space.stream_prefix).unwrap_or(name);
    let (name, short) = (name.to_owned(), short.to_owned());
    handle(space, name, short, &info, None, None, options).map(Some)
}

/// The streams that Everbus made for this space, whether they are declared here or not.
pub(crate) async fn discover(
    link: &Link,
    space: &Space,
    options: &Options,
) -> Result<Vec<Arc<StreamHandle>>> {
    let mut streams = Vec::new();
    for info in link.streams().await? {
        let config = &info.config;
        if config["metadata"][SPACE].as_str() != Some(&space.own) {
            continue;
        }
        let name = config["name"].as_str().unwrap_or_default().to_owned();
        let short = name.strip_prefix(&space.stream_prefix).unwrap_or(&name);
        let short = short.to_owned();
        let stream = handle(space, name, short, &info, None, None, options)?;
        streams.push(Arc::new(stream));
    }
    Ok(streams)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    // conformance: contract/nats-durability: the durability grade comes from the copies of a stream, its storage and its persist_mode, and from what the operator says of sync_interval
    #[test]
    fn the_grade_follows_the_settings() {
        for (copies, storage, mode, synced, expected) in [
            (1, "file", "", false, Durability::Process),
            (1, "file", "default", true, Durability::PowerLoss),
            (2, "file", "", false, Durability::Process),
            (3, "file", "", false, Durability::Replicated),
            (1, "memory", "", true, Durability::Memory),
            (3, "memory", "", false, Durability::Replicated),
            (1, "file", "async", true, Durability::Memory),
        ] {
            let config = json!({"num_replicas": copies, "storage": storage, "persist_mode": mode});
            let options = Options {
                synced,
                ..Options::default()
            };
            assert_eq!(durability_of(&config, &options), expected, "{config}");
        }
    }
}
