//! The groups as the server keeps them: one record for each, in a stream of their own.
//!
//! A record has what a consumer of JetStream has no place for: the name as written, the subscriptions, and the
//! streams that the group consumes with the place where it began in each. It is changed by compare-and-set, so
//! that processes that declare at the same time lose nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_nats::HeaderMap;
use everbus_core::{
    Code, Cursor, Error, EventId, GroupName, Pattern, Result, SubscriptionInfo, Timestamp,
};
use futures_util::future::try_join_all;
use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, watch};

use crate::api::Which;
use crate::client::Link;
use crate::errors::number;
use crate::names;
use crate::ordered::Keys;
use crate::streams::Space;

/// A group as it is stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) name: String,
    pub(crate) ordered: bool,
    /// The engine that an ephemeral group belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) owner: Option<String>,
    pub(crate) created_at: Timestamp,
    /// Events that were received earlier are not for the group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) since: Option<Timestamp>,
    pub(crate) subscriptions: Vec<Subscription>,
    /// The first sequence in each stream that the group consumes, by the name on the server.
    pub(crate) starts: BTreeMap<String, u64>,
    /// When the stream of each start was created: a stream that was created again is read from its beginning.
    #[serde(default)]
    pub(crate) created: BTreeMap<String, String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Subscription {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) pattern: String,
    pub(crate) after: String,
    pub(crate) created_at: Timestamp,
}

impl Record {
    pub(crate) fn patterns(&self) -> Result<Vec<Pattern>> {
        let patterns = self.subscriptions.iter();
        patterns.map(|s| Pattern::new(&s.pattern)).collect()
    }

    pub(crate) fn infos(&self, group: &GroupName) -> Result<Vec<SubscriptionInfo>> {
        let info = |s: &Subscription| {
            Ok(SubscriptionInfo {
                id: s.id.parse::<EventId>()?,
                group: group.clone(),
                name: s.name.clone(),
                pattern: Pattern::new(&s.pattern)?,
                after: s.after.parse::<Cursor>()?,
                created_at: s.created_at,
            })
        };
        self.subscriptions.iter().map(info).collect()
    }
}

/// A group as this process knows it.
pub(crate) struct Group {
    pub(crate) name: GroupName,
    pub(crate) encoded: String,
    known: RwLock<Known>,
    /// Grows with every change. Consumers then look at their streams again.
    pub(crate) version: watch::Sender<u64>,
    /// The keys of an ordered group.
    pub(crate) keys: Mutex<Keys>,
    /// Its number in this process: a group that is created anew gets another one.
    pub(crate) number: u64,
    /// Notified when a delivery was settled, because a consumer may then hold more.
    pub(crate) freed: Notify,
}

#[derive(Clone)]
struct Known {
    record: Arc<Record>,
    revision: u64,
    patterns: Arc<[Pattern]>,
}

impl Group {
    pub(crate) fn new(name: GroupName, number: u64, record: Record, revision: u64) -> Result<Self> {
        let known = Known {
            patterns: record.patterns()?.into(),
            record: Arc::new(record),
            revision,
        };
        Ok(Self {
            encoded: names::encoded(name.as_str()),
            name,
            known: RwLock::new(known),
            version: watch::Sender::new(0),
            keys: Mutex::default(),
            number,
            freed: Notify::new(),
        })
    }

    pub(crate) fn record(&self) -> Arc<Record> {
        self.known.read().record.clone()
    }

    pub(crate) fn patterns(&self) -> Arc<[Pattern]> {
        self.known.read().patterns.clone()
    }

    /// Takes over a newer record, and ignores an older one.
    pub(crate) fn update(&self, record: Record, revision: u64) -> Result<()> {
        let patterns = record.patterns()?.into();
        {
            let mut known = self.known.write();
            if revision <= known.revision {
                return Ok(());
            }
            known.revision = revision;
            if *known.record == record {
                return Ok(());
            }
            (known.patterns, known.record) = (patterns, Arc::new(record));
        }
        self.version.send_modify(|version| *version += 1);
        Ok(())
    }
}

/// The record of a group with its revision, if there is one.
pub(crate) async fn load(
    link: &Link,
    space: &Space,
    encoded: &str,
) -> Result<Option<(Record, u64)>> {
    let which = Which {
        last_by_subj: Some(space.group_subject(encoded)),
        ..Which::default()
    };
    let Some(stored) = link.message(&space.groups_stream(), &which).await? else {
        return Ok(None);
    };
    let record = serde_json::from_slice(&stored.payload).map_err(|error| {
        let what = format!("the record of the group {encoded} cannot be read: {error}");
        Error::new(Code::NewerSchema, what).hint("it was written by a newer version of Everbus")
    })?;
    Ok(Some((record, stored.seq)))
}

/// All groups.
pub(crate) async fn list(link: &Link, space: &Space) -> Result<Vec<Record>> {
    let (stream, filter) = (space.groups_stream(), space.group_subject("*"));
    let Some(info) = link.stream_subjects(&stream, &filter, 0).await? else {
        return Ok(Vec::new());
    };
    let prefix = space.group_subject("");
    let names = info.state.subjects.keys();
    let names = names.filter_map(|subject| subject.strip_prefix(&prefix));
    let records = try_join_all(names.map(|name| load(link, space, name))).await?;
    let mut records: Vec<Record> = records
        .into_iter()
        .flatten()
        .map(|(record, _)| record)
        .collect();
    records.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(records)
}

/// Stores a record in place of the revision that was read; 0 if there was none. Returns its revision, or `None`
/// if another process was faster.
pub(crate) async fn save(
    link: &Link,
    space: &Space,
    encoded: &str,
    record: &Record,
    revision: u64,
) -> Result<Option<u64>> {
    let mut headers = HeaderMap::new();
    headers.insert("Nats-Expected-Last-Subject-Sequence", revision.to_string());
    let body = serde_json::to_vec(record)
        .map_err(|e| Error::new(Code::Internal, format!("a group cannot be written: {e}")))?;
    let subject = space.group_subject(encoded);
    let stream = space.groups_stream();
    let ack = link
        .publish_to_leader(&stream, &subject, headers, body.into())
        .await?;
    match ack.error {
        None => Ok(Some(ack.seq)),
        Some(error)
            if matches!(
                error.err_code,
                number::WRONG_LAST_SEQUENCE | number::WRONG_LAST_SEQUENCE_2
            ) =>
        {
            Ok(None)
        }
        Some(error) => {
            Err(error.into_error(&format!("the group {} cannot be stored", record.name)))
        }
    }
}
