//! The settings of topics: which are refused, how durable they make a topic, and what Everbus sets.

use std::sync::Arc;
use std::time::{Duration, Instant};

use everbus_core::{Code, Durability, Error, Result, Weakness};
use everbus_dialects::Dialect;
use rdkafka::admin::{
    AdminOptions, AlterConfig, ConfigResource, ConfigResourceResult, ConfigSource,
    ResourceSpecifier,
};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Kind};
use rdkafka::metadata::MetadataBroker;
use rdkafka::producer::Producer as _;

use super::{DEFAULT_MAX_BYTES, Topic, Wanted, partitions_of};
use crate::client::{Link, blocking};
use crate::errors::{is_passing_for_new, of_kind};

/// How long the reader of settings waits before it asks again.
const ASKS_AGAIN: Duration = Duration::from_millis(20);
/// A request for settings gets this part of the time that an answer may take, so that there is time for another one.
const SHARE: u32 = 3;

/// The settings of a topic; `None` if the cluster does not tell them, for example without the permission.
///
/// Without them it is not known whether the topic keeps its events. So an answer that only takes too long is an error,
/// and not `None`.
pub(super) async fn configuration(link: &Link, name: &str) -> Result<Option<ConfigResource>> {
    let of = ResourceSpecifier::Topic(name);
    let options = AdminOptions::new().request_timeout(Some(link.timeout / SHARE));
    let ask = || link.admin().describe_configs([&of], &options);
    let read = read(link.timeout, ask).await;
    read.map_err(|error| link.unanswered(&format!("{name}: the settings cannot be read"), &error))
}

/// Asks for settings, and asks again after an error that passes.
async fn read<F>(
    timeout: Duration,
    ask: impl Fn() -> F,
) -> Result<Option<ConfigResource>, KafkaError>
where
    F: Future<Output = Result<Vec<ConfigResourceResult>, KafkaError>>,
{
    let begin = Instant::now();
    loop {
        let answer = ask().await.map(|answers| answers.into_iter().next());
        let error = match answer {
            Ok(Some(Ok(config))) => return Ok(Some(config)),
            Ok(Some(Err(kind))) => match KafkaError::AdminOp(kind) {
                error if is_passing_for_new(&error) => error,
                // The cluster has answered, and refuses.
                _ => return Ok(None),
            },
            Ok(None) => return Ok(None),
            Err(error) => error,
        };
        if !is_passing_for_new(&error) || begin.elapsed() >= timeout {
            return Err(error);
        }
        tokio::time::sleep(ASKS_AGAIN).await;
    }
}

fn value<'a>(config: &'a ConfigResource, name: &str) -> Option<&'a str> {
    config.get(name).and_then(|entry| entry.value.as_deref())
}

/// Refuses settings under which the server drops an event before every group has it.
pub(super) fn check(
    name: &str,
    config: &ConfigResource,
    wanted: &Wanted,
    allow_shorter: bool,
) -> Result<()> {
    let refused = |what: String, hint: &str| {
        let what = format!("the topic {name} cannot be used: {what}");
        Err(Error::new(Code::InvalidSetting, what).hint(hint))
    };
    if value(config, "cleanup.policy").is_some_and(|policy| policy.contains("compact")) {
        return refused(
            "it is compacted, so a later event of a key removes an earlier one".to_owned(),
            "set cleanup.policy=delete, or give the stream another name",
        );
    }
    let bytes = value(config, "retention.bytes").and_then(|bytes| bytes.parse::<i64>().ok());
    if bytes.is_some_and(|bytes| bytes > 0) {
        return refused(
            "beyond retention.bytes it drops its oldest events, also those that no group has"
                .to_owned(),
            "set retention.bytes=-1",
        );
    }
    let age = value(config, "retention.ms").and_then(|age| age.parse::<i64>().ok());
    let Some(age) = age.filter(|age| *age >= 0) else {
        return Ok(());
    };
    let wanted_age = wanted
        .max_age
        .map(|age| i64::try_from(age.as_millis()).unwrap_or(i64::MAX));
    if wanted_age.is_none_or(|wanted| age < wanted) && !allow_shorter {
        return refused(
            format!(
                "it deletes events after {:?}, sooner than declared",
                Duration::from_millis(age.unsigned_abs())
            ),
            "set retention.ms=-1 on the topic, declare the max_age that it has, or allow it with \
             broker.allow_shorter_age: true",
        );
    }
    Ok(())
}

/// Sets the durability, the weaknesses and the largest record of a topic, from its copies and settings.
pub(super) fn grade(topic: &mut Topic, config: &ConfigResource, copies: usize) {
    let number = |name: &str| value(config, name).and_then(|text| text.parse::<i64>().ok());
    topic.max_bytes = max_bytes(config);
    let in_sync = number("min.insync.replicas").unwrap_or(1);
    let unclean = value(config, "unclean.leader.election.enable") == Some("true");
    let flushes = number("flush.messages") == Some(1);
    let age = number("retention.ms").and_then(|age| u64::try_from(age).ok());
    topic.max_age = age.map(Duration::from_millis);
    let mut weak = |setting: &str, value: String, advice: &str| {
        topic.weaknesses.push(Weakness::new(
            format!("{setting} of {}", topic.name),
            value,
            advice,
        ));
    };
    if copies < 2 {
        weak(
            "replication.factor",
            copies.to_string(),
            "for copies on several machines declare copies: 3 before the topic is created (a cluster of three brokers)",
        );
    } else if in_sync < 2 {
        weak(
            "min.insync.replicas",
            in_sync.to_string(),
            "a broker alone acknowledges events that are lost with it; set it to 2",
        );
    }
    if copies > 1 && unclean {
        weak(
            "unclean.leader.election.enable",
            "true".to_owned(),
            "a copy that lacks acknowledged events may become the leader; set it to false",
        );
    }
    if copies < 2 && !flushes {
        weak(
            "flush.messages",
            number("flush.messages").map_or_else(String::new, |n| n.to_string()),
            "a power loss may lose the last moments; set it to 1, or keep several copies",
        );
    }
    if let Some(age) = age {
        weak(
            "retention.ms",
            age.to_string(),
            "the server deletes events of this age, also those that a group has not handled; set it to -1",
        );
    }
    topic.durability = match (copies, in_sync, unclean) {
        (2.., 2.., false) => Durability::Replicated,
        _ if flushes => Durability::PowerLoss,
        _ => Durability::Process,
    };
}

/// The settings of a topic that keep it from being more durable. Settings that cannot be read count as one.
pub(crate) async fn weaknesses(link: &Arc<Link>, name: &str) -> Vec<Weakness> {
    let described = match partitions_of(link, name).await {
        Ok(Some(described)) => described,
        Ok(None) => return Vec::new(),
        Err(error) => return vec![not_read(name, &error.to_string())],
    };
    match configuration(link, name).await {
        Ok(Some(config)) => {
            let mut topic = Topic::new(
                name.to_owned(),
                name.to_owned(),
                Dialect::Native,
                described.partitions,
            );
            grade(&mut topic, &config, described.copies);
            topic.weaknesses
        }
        Ok(None) => vec![not_read(name, "the cluster does not tell them")],
        Err(error) => vec![not_read(name, &error.to_string())],
    }
}

/// The weakness of a topic whose settings are not known.
pub(super) fn not_read(name: &str, why: &str) -> Weakness {
    Weakness::new(
        format!("settings of {name}"),
        format!("could not be read: {why}"),
        "so it is not known whether the topic keeps its events, and it counts as the weakest; the user needs the \
         permission DescribeConfigs for it",
    )
}

/// Refuses a topic of groups or dead letters that deletes its records.
pub(super) fn check_own(name: &str, config: &ConfigResource, compacted: bool) -> Result<()> {
    let refused = |what: &str, hint: &str| {
        let what = format!("the topic {name} cannot be used: {what}");
        Err(Error::new(Code::InvalidSetting, what).hint(hint))
    };
    let policy = value(config, "cleanup.policy").unwrap_or_default();
    if policy.contains("compact") && !compacted {
        return refused(
            "it is compacted, so a later letter of a key removes an earlier one",
            "set cleanup.policy=delete and retention.ms=-1",
        );
    }
    let forgets = |setting: &str, least: i64| {
        let set = value(config, setting).and_then(|text| text.parse::<i64>().ok());
        set.is_some_and(|set| set >= least)
    };
    let forgets = forgets("retention.ms", 0) || forgets("retention.bytes", 1);
    // A topic that is only compacted keeps the newest record of each key, whatever its retention.
    if policy.contains("delete") && forgets {
        let what = match compacted {
            true => "it deletes old records, and the groups and subscriptions in them",
            false => "it deletes old records, and the dead letters in them",
        };
        return refused(what, "set retention.ms=-1 and retention.bytes=-1 on it");
    }
    Ok(())
}

/// The largest record that a topic takes.
pub(super) fn max_bytes(config: &ConfigResource) -> usize {
    let set = value(config, "max.message.bytes").and_then(|text| text.parse().ok());
    set.unwrap_or(DEFAULT_MAX_BYTES)
}

/// Lets a topic take larger records.
pub(super) async fn raise_max_bytes(
    link: &Link,
    name: &str,
    config: &ConfigResource,
    bytes: usize,
) -> Result<()> {
    let bytes = bytes.to_string();
    let mut alter = AlterConfig::new(ResourceSpecifier::Topic(name));
    // The request replaces all settings of the topic: those that it has are sent again.
    for entry in &config.entries {
        if let (ConfigSource::DynamicTopic, Some(value)) = (&entry.source, &entry.value) {
            alter = alter.set(&entry.name, value);
        }
    }
    let alter = alter.set("max.message.bytes", &bytes);
    let what = format!(
        "the topic {name} takes no record of {bytes} bytes, and its limit cannot be raised"
    );
    let options = AdminOptions::new().request_timeout(Some(link.timeout));
    let answers = link.admin().alter_configs([&alter], &options).await;
    let answers = answers.map_err(|error| link.unanswered(&what, &error))?;
    match answers.into_iter().next() {
        Some(Err((_, kind))) => {
            Err(of_kind(&what, kind).hint(format!("set max.message.bytes={bytes} on it")))
        }
        _ => Ok(()),
    }
}

/// The cluster's defaults for new topics.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Defaults {
    pub(crate) copies: Option<u32>,
    pub(crate) in_sync: Option<u32>,
}

/// Asks the brokers for their defaults, one after another until one answers. Without the permission they are not known.
pub(crate) async fn defaults(link: &Link) -> Result<Defaults> {
    let what = "the defaults of the cluster cannot be read";
    let (producer, timeout) = (link.producer(), link.timeout);
    // Not the broker that the client says has answered: its number is not known at first.
    let brokers = blocking(move || {
        let metadata = producer
            .client()
            .fetch_metadata(Some("everbus.asks"), timeout)?;
        let brokers = metadata.brokers().iter();
        Ok::<_, KafkaError>(brokers.map(MetadataBroker::id).collect::<Vec<i32>>())
    });
    let brokers = brokers
        .await?
        .map_err(|error| link.unanswered(what, &error))?;
    let mut said = KafkaError::AdminOp(Kind::BrokerNotAvailable);
    for broker in brokers {
        let of = ResourceSpecifier::Broker(broker);
        let options = AdminOptions::new().request_timeout(Some(timeout / SHARE));
        let ask = || link.admin().describe_configs([&of], &options);
        match read(Duration::ZERO, ask).await {
            Ok(config) => {
                let number =
                    |name: &str| value(config.as_ref()?, name).and_then(|text| text.parse().ok());
                return Ok(Defaults {
                    copies: number("default.replication.factor"),
                    in_sync: number("min.insync.replicas"),
                });
            }
            Err(error) => said = error,
        }
    }
    Err(link.unanswered(what, &said))
}

/// The `min.insync.replicas` to create a topic with, if the cluster would give it fewer: an event is acknowledged
/// when two brokers have it, so that losing one loses no event.
pub(super) fn in_sync(copies: Option<u32>, defaults: Defaults) -> Option<&'static str> {
    let copies = copies.or(defaults.copies).unwrap_or(1);
    (copies >= 2 && defaults.in_sync.unwrap_or(1) < 2).then_some("2")
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use rdkafka::admin::OwnedResourceSpecifier;

    use super::*;

    /// Answers with each of these in turn, and repeats the last one.
    async fn read_from(
        timeout: Duration,
        answers: &[Result<Option<Kind>, Kind>],
    ) -> Result<Option<ConfigResource>, KafkaError> {
        let asked = Cell::new(0);
        let ask = || {
            let answer = answers[asked.get().min(answers.len() - 1)];
            asked.set(asked.get() + 1);
            std::future::ready(match answer {
                Err(kind) => Err(KafkaError::AdminOp(kind)),
                Ok(Some(kind)) => Ok(vec![Err(kind)]),
                Ok(None) => Ok(vec![Ok(ConfigResource {
                    specifier: OwnedResourceSpecifier::Topic("order".to_owned()),
                    entries: Vec::new(),
                })]),
            })
        };
        read(timeout, ask).await
    }

    // conformance: contract/kafka-settings-read: settings that come late are asked for again, and are an error at last; a topic is not graded without them
    #[tokio::test]
    async fn settings_that_come_late_are_asked_for_again() {
        let long = Duration::from_secs(60);
        let (late, new) = (Kind::OperationTimedOut, Kind::UnknownTopicOrPartition);
        for answers in [
            &[Err(late), Err(late), Ok(None)][..],
            &[Ok(Some(new)), Ok(None)],
        ] {
            let read = read_from(long, answers).await;
            assert!(read.unwrap().is_some(), "{answers:?}");
        }
        let refused = [Ok(Some(Kind::TopicAuthorizationFailed))];
        assert!(read_from(long, &refused).await.unwrap().is_none());
        // The client itself refuses the request: nothing was read.
        let wrong = Err(Kind::InvalidArgument);
        assert!(read_from(long, &[wrong]).await.is_err());
        for never in [Err(late), Ok(Some(new))] {
            assert!(read_from(Duration::ZERO, &[never]).await.is_err());
        }
    }

    #[test]
    fn topics_with_copies_are_acknowledged_by_two_brokers() {
        let cluster = |copies, in_sync| Defaults {
            copies: Some(copies),
            in_sync: Some(in_sync),
        };
        let unknown = Defaults::default();
        assert_eq!(in_sync(Some(3), unknown), Some("2"));
        assert_eq!(in_sync(None, cluster(3, 1)), Some("2"));
        assert_eq!(in_sync(None, cluster(3, 2)), None, "the cluster sets it");
        assert_eq!(in_sync(Some(1), cluster(3, 1)), None);
        assert_eq!(in_sync(None, unknown), None, "it could block every publish");
    }
}
