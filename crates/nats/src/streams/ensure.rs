//! Creates streams as declared, and compares those that exist: settings that would lose events are refused.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Code, Durability, Error, Pattern, Result, Stream, Streams};
use everbus_dialects::Dialect;
use serde_json::{Value, json};

use super::{
    DIALECT, NAMING, SINGLE, SPACE, Space, StreamHandle, Table, acks_from_memory, durability_of,
    handle, texts,
};
use crate::api::StreamInfo;
use crate::client::Link;
use crate::config::Options;
use crate::names::{self, Naming};

/// The mark of streams that Everbus made.
const MADE: &str = "everbus";
/// The shortest age of dead letters: the omni specification keeps them this long.
const DEAD_AGE: Duration = Duration::from_secs(30 * 24 * 3600);

/// Creates or changes the streams.
pub(crate) async fn declare(
    link: &Link,
    space: &Space,
    options: &Options,
    routes: Streams,
) -> Result<Table> {
    let mut streams = Vec::new();
    let mut copies = options.replicas;
    if routes.is_declared() {
        for stream in &routes {
            let others = routes.iter().filter(|other| other.name != stream.name);
            let others: Vec<&Pattern> = others.flat_map(Stream::patterns).collect();
            let stream_ = declare_one(link, space, options, stream, others).await?;
            streams.push(Arc::new(stream_));
            copies = copies.max(stream.copies.unwrap_or(0));
        }
    } else {
        let subjects = names::single_subjects();
        let wanted = Wanted {
            name: SINGLE,
            subjects,
            dialect: Dialect::Native,
            naming: Naming::Single,
            max_age: None,
            copies: options.replicas,
            of_others: Vec::new(),
        };
        streams.push(Arc::new(ensure(link, space, options, wanted, None).await?));
    }
    let groups = declare_groups(link, space, options, copies).await?;
    let dead = declare_dead(link, space, options, &routes, copies).await?;
    Ok(Table {
        routes,
        streams,
        copies,
        own: groups.min(dead),
    })
}

async fn declare_one(
    link: &Link,
    space: &Space,
    options: &Options,
    stream: &Stream,
    others: Vec<&Pattern>,
) -> Result<StreamHandle> {
    let dialect = match &stream.dialect {
        Some(name) => name.parse()?,
        None => Dialect::Native,
    };
    let Some(subjects) = names::filters(Naming::Declared, stream.patterns()) else {
        let what = format!(
            "the stream {} covers everything: a NATS server has subjects of its own",
            stream.name
        );
        return Err(Error::new(Code::InvalidSetting, what)
            .hint("name domains, such as order.>, or declare no streams at all"));
    };
    let wanted = Wanted {
        name: &stream.name,
        subjects,
        dialect,
        naming: Naming::Declared,
        max_age: stream.max_age,
        copies: stream.copies.unwrap_or(options.replicas),
        of_others: names::filters(Naming::Declared, others).unwrap_or_default(),
    };
    let types = Some(stream.types().clone());
    ensure(link, space, options, wanted, types).await
}

/// The stream of the groups.
pub(crate) async fn declare_groups(
    link: &Link,
    space: &Space,
    options: &Options,
    copies: u32,
) -> Result<Durability> {
    let own = Own {
        name: space.groups_stream(),
        subject: space.group_subject("*"),
        age: None,
        least_age: None,
        copies,
    };
    own_stream(link, options, own).await
}

/// The stream of the dead letters.
async fn declare_dead(
    link: &Link,
    space: &Space,
    options: &Options,
    routes: &Streams,
    copies: u32,
) -> Result<Durability> {
    let omni = Streams::omni();
    let is_omni = routes.is_declared() && omni.iter().all(|s| routes.named(&s.name).is_some());
    let own = Own {
        name: space.dead_stream(),
        subject: format!("{}dlq.>", space.subject_prefix),
        age: is_omni.then_some(DEAD_AGE),
        least_age: Some(DEAD_AGE),
        copies,
    };
    own_stream(link, options, own).await
}

/// A stream for what Everbus keeps beside events.
struct Own {
    name: String,
    subject: String,
    /// The `max_age` of a new stream.
    age: Option<Duration>,
    /// The shortest `max_age` that an existing stream may have; `None`: it must have none.
    least_age: Option<Duration>,
    copies: u32,
}

/// Creates the stream, or checks the existing one. Returns how durable it is.
async fn own_stream(link: &Link, options: &Options, own: Own) -> Result<Durability> {
    let found = match link.stream(&own.name).await? {
        Some(info) => info,
        None => {
            let config = json!({
                "name": own.name,
                "subjects": [own.subject],
                "storage": "file",
                "retention": "limits",
                "discard": "old",
                "max_msgs_per_subject": 1,
                "max_age": own.age.map_or(0, nanos),
                "num_replicas": own.copies,
                "allow_direct": true,
                "metadata": made(),
            });
            match link.create_stream(&config).await? {
                Some(info) => info,
                // Another process was faster.
                None => match link.stream(&own.name).await? {
                    Some(info) => info,
                    None => return Err(removed_meanwhile(&own.name)),
                },
            }
        }
    };
    check_own(&found.config, &own)?;
    match raise_copies(link, &found.config, own.copies).await? {
        Some(raised) => Ok(durability_of(&raised.config, options)),
        None => Ok(durability_of(&found.config, options)),
    }
}

/// The mark of a stream that Everbus makes.
pub(crate) fn made() -> Value {
    json!({ MADE: "1" })
}

/// Gives a stream that Everbus made more copies, if it has fewer. `None`: it was left as it is.
pub(crate) async fn raise_copies(
    link: &Link,
    config: &Value,
    copies: u32,
) -> Result<Option<StreamInfo>> {
    let enough = config["num_replicas"].as_u64().unwrap_or(1) >= u64::from(copies);
    if enough || !config["metadata"][MADE].is_string() {
        return Ok(None);
    }
    let mut raised = config.clone();
    raised["num_replicas"] = json!(copies);
    link.update_stream(&raised).await.map(Some)
}

fn removed_meanwhile(name: &str) -> Error {
    let what = format!("the stream {name} is removed and created at the same time");
    Error::new(Code::Unavailable, what)
}

/// A stream for groups or dead letters that exists must keep what is stored in it.
fn check_own(config: &Value, own: &Own) -> Result<()> {
    check_keeps(config)?;
    if acks_from_memory(config) {
        return Err(other_settings(
            config,
            "the server acks messages that are only in memory",
            "recreate it with file storage, without persist_mode: async",
        ));
    }
    let subject = &own.subject;
    let there = texts(&config["subjects"]);
    if !there.iter().any(|known| names::covers(known, subject)) {
        return Err(other_settings(
            config,
            &format!("it has the subjects {there:?} and not {subject}"),
            "rename that stream, or separate buses by a path in the URL (nats://host/space)",
        ));
    }
    let age = config["max_age"].as_u64().unwrap_or(0);
    if age != 0 && own.least_age.is_none_or(|least| age < nanos(least)) {
        let hint = match own.least_age {
            None => "give it no max_age",
            Some(_) => "give it no max_age, or thirty days at least",
        };
        let what = format!("it deletes messages after {:?}", Duration::from_nanos(age));
        return Err(other_settings(config, &what, hint));
    }
    Ok(())
}

/// Refuses settings under which the server acks an event and drops it before every group has it.
fn check_keeps(config: &Value) -> Result<()> {
    let retention = config["retention"].as_str().unwrap_or("limits");
    if retention != "limits" {
        return Err(other_settings(
            config,
            &format!("its retention is {retention}, so events vanish once one consumer acked them"),
            "give the stream another name, or recreate it with the retention limits",
        ));
    }
    if config["sealed"].as_bool() == Some(true) || config["mirror"].is_object() {
        return Err(other_settings(
            config,
            "it is sealed or a mirror and takes no events",
            "give the stream another name",
        ));
    }
    if config["no_ack"].as_bool() == Some(true) {
        return Err(other_settings(
            config,
            "it acks no publish (no_ack)",
            "set no_ack to false",
        ));
    }
    let drops_old = config["discard"].as_str().unwrap_or("old") == "old";
    for limit in ["max_msgs", "max_bytes"] {
        if drops_old && config[limit].as_i64().is_some_and(|most| most > 0) {
            return Err(other_settings(
                config,
                &format!("beyond {limit} it drops its oldest events, also those that no group has"),
                "remove the limit, or let the stream refuse new events instead (discard: new)",
            ));
        }
    }
    Ok(())
}

fn other_settings(config: &Value, what: &str, hint: &str) -> Error {
    let name = config["name"].as_str().unwrap_or_default();
    let what = format!("the stream {name} exists with other settings: {what}");
    Error::new(Code::InvalidSetting, what).hint(hint)
}

pub(super) struct Wanted<'a> {
    name: &'a str,
    subjects: Vec<String>,
    pub(super) dialect: Dialect,
    pub(super) naming: Naming,
    max_age: Option<Duration>,
    copies: u32,
    /// The subjects of the other streams of the table.
    of_others: Vec<String>,
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Creates the stream, or checks and updates the existing one.
async fn ensure(
    link: &Link,
    space: &Space,
    options: &Options,
    wanted: Wanted<'_>,
    types: Option<Pattern>,
) -> Result<StreamHandle> {
    let name = space.stream(wanted.name);
    let subjects: Vec<String> = wanted
        .subjects
        .iter()
        .map(|subject| format!("{}{subject}", space.subject_prefix))
        .collect();
    let info = match link.stream(&name).await? {
        Some(info) => Some(info),
        None => {
            let mut config = json!({
                "name": name,
                "subjects": subjects,
                "storage": "file",
                "retention": "limits",
                "discard": "old",
                "max_age": wanted.max_age.map_or(0, nanos),
                "num_replicas": wanted.copies,
                "duplicate_window": nanos(window(options, wanted.max_age)),
                "allow_direct": true,
                "allow_atomic": true,
                "metadata": metadata(space, &wanted),
            });
            if !link.client.is_server_compatible(2, 12, 0)
                && let Some(config) = config.as_object_mut()
            {
                config.remove("allow_atomic");
            }
            match link.create_stream(&config).await? {
                Some(info) => Some(info),
                None => link.stream(&name).await?,
            }
        }
    };
    let Some(mut info) = info else {
        return Err(removed_meanwhile(&name));
    };
    if let Some(changed) = changes(space, &info, &subjects, &wanted, options)? {
        info = link.update_stream(&changed).await?;
    }
    let short = names::encoded(wanted.name);
    handle(space, name, short, &info, types, Some(&wanted), options)
}

/// The server refuses a window that is longer than the age.
fn window(options: &Options, max_age: Option<Duration>) -> Duration {
    max_age.map_or(options.window, |age| age.min(options.window))
}

fn metadata(space: &Space, wanted: &Wanted<'_>) -> Value {
    let naming = match wanted.naming {
        Naming::Single => "single",
        Naming::Declared => "declared",
    };
    json!({
        MADE: "1",
        DIALECT: wanted.dialect.as_str(),
        NAMING: naming,
        SPACE: space.own,
    })
}

/// The changed configuration of a stream that is there, or `None` if it is as wanted. A stream whose settings
/// would lose events is refused.
fn changes(
    space: &Space,
    info: &StreamInfo,
    subjects: &[String],
    wanted: &Wanted<'_>,
    options: &Options,
) -> Result<Option<Value>> {
    let config = &info.config;
    let refused = |what: String, hint: &str| Err(other_settings(config, &what, hint));
    check_keeps(config)?;
    let per_subject = config["max_msgs_per_subject"].as_i64().unwrap_or(-1);
    let refuses = config["discard"].as_str() == Some("new")
        && config["discard_new_per_subject"].as_bool() == Some(true);
    if per_subject > 0 && !refuses {
        return refused(
            format!("it keeps {per_subject} events of a type and drops older ones"),
            "remove max_msgs_per_subject from the stream",
        );
    }
    let ours = config["metadata"][MADE].is_string();
    let there: Vec<String> = texts(&config["subjects"]);
    let missing = |subject: &&String| !there.iter().any(|known| names::covers(known, subject));
    let missing: Vec<&String> = subjects.iter().filter(missing).collect();
    if !missing.is_empty() && !ours {
        return refused(
            format!("it has the subjects {there:?} and not {missing:?}"),
            "declare the patterns that the stream has, or give the stream another name",
        );
    }
    let mut new = config.clone();
    // Subjects that are not declared here stay: a newer version may have declared them. They are removed only if
    // another stream of this table has them.
    let taken = |known: &String| {
        let mut others = wanted.of_others.iter();
        others.any(|other| names::overlap(&format!("{}{other}", space.subject_prefix), known))
    };
    // The server refuses overlapping subjects. If one covers the other, the wider one is kept; otherwise the existing
    // one is removed.
    let clashes = |known: &String| {
        let apart = |one: &str, other: &str| {
            !names::overlap(one, other) || names::covers(one, other) || names::covers(other, one)
        };
        !subjects.iter().all(|subject| apart(subject, known))
    };
    let kept = there
        .iter()
        .filter(|known| !taken(known) && !clashes(known));
    let kept: Vec<String> = kept.cloned().collect();
    let subjects = names::union(&kept, subjects);
    if ours && sorted(&there) != sorted(&subjects) {
        new["subjects"] = json!(subjects);
    }
    let age = config["max_age"].as_u64().unwrap_or(0);
    let wanted_age = wanted.max_age.map_or(0, nanos);
    let shorter = wanted_age != 0 && (age == 0 || wanted_age < age);
    if shorter && !options.allow_shorter_age {
        let shown = match age {
            0 => "without an age".to_owned(),
            age => format!("for {:?}", Duration::from_nanos(age)),
        };
        return refused(
            format!(
                "it keeps events {shown}, and the shorter {:?} would delete what is older",
                Duration::from_nanos(wanted_age)
            ),
            "declare the longer age, or allow it with broker.allow_shorter_age: true",
        );
    }
    if !ours && age != 0 && (wanted_age == 0 || age < wanted_age) {
        return refused(
            format!(
                "it deletes events after {:?}, sooner than declared",
                Duration::from_nanos(age)
            ),
            "declare the stream with the max_age that it has, or raise it on the server",
        );
    }
    if age != wanted_age && (ours || shorter) {
        new["max_age"] = json!(wanted_age);
        let known = config["duplicate_window"].as_u64().unwrap_or(0);
        if wanted_age != 0 && known > wanted_age {
            new["duplicate_window"] = json!(wanted_age);
        }
    }
    if ours {
        if u64::from(wanted.copies) > config["num_replicas"].as_u64().unwrap_or(1) {
            new["num_replicas"] = json!(wanted.copies);
        }
        if let (Some(known), Value::Object(more)) =
            (new["metadata"].as_object_mut(), metadata(space, wanted))
        {
            known.extend(more);
        }
        new["allow_direct"] = json!(true);
    }
    Ok((new != *config).then_some(new))
}

fn sorted(texts: &[String]) -> Vec<&String> {
    let mut all: Vec<&String> = texts.iter().collect();
    all.sort();
    all
}
