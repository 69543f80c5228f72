//! The groups as the server stores them: one record for each group, in a hash.
//!
//! A record has what a consumer group of Redis cannot store: whether the group is ordered, its subscriptions, the
//! engine that an ephemeral group belongs to. Each change gives the record a new revision. A claim names the revision
//! that its process knows; with an older revision the claim is refused, and the process reads the record again.

use std::sync::{Arc, Weak};

use everbus_core::{
    Code, Cursor, Error, EventId, GroupName, Pattern, Result, SubscriptionInfo, Timestamp,
};
use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};

use crate::broker::Shared;
use crate::client::Read as _;
use crate::consumer::Inner;
use crate::keys;

/// A group as it is stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) name: String,
    pub(crate) ordered: bool,
    /// The engine that an ephemeral group belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) owner: Option<String>,
    pub(crate) created_at: Timestamp,
    /// The group skips events that were received before this time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) since: Option<Timestamp>,
    pub(crate) subscriptions: Vec<Subscription>,
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
    known: RwLock<Known>,
    /// Its number in this process: a group that is removed and created again gets another number.
    pub(crate) number: u64,
    pub(crate) consumers: Mutex<Vec<Weak<Inner>>>,
}

#[derive(Clone)]
pub(crate) struct Known {
    pub(crate) record: Arc<Record>,
    pub(crate) revision: String,
    pub(crate) patterns: Arc<[Pattern]>,
}

impl Group {
    pub(crate) fn new(
        name: GroupName,
        number: u64,
        record: Record,
        revision: String,
    ) -> Result<Self> {
        let known = Known {
            patterns: record.patterns()?.into(),
            record: Arc::new(record),
            revision,
        };
        Ok(Self {
            name,
            known: RwLock::new(known),
            number,
            consumers: Mutex::default(),
        })
    }

    pub(crate) fn known(&self) -> Known {
        self.known.read().clone()
    }

    pub(crate) fn record(&self) -> Arc<Record> {
        self.known.read().record.clone()
    }

    /// Its name on the server.
    pub(crate) fn on_server(&self) -> &str {
        keys::group_name(self.name.as_str())
    }

    /// Stores the record that was read last. If that record is outdated, the next claim reports it.
    fn update(&self, record: Record, revision: String) -> Result<()> {
        let patterns = record.patterns()?.into();
        *self.known.write() = Known {
            record: Arc::new(record),
            revision,
            patterns,
        };
        Ok(())
    }

    /// Makes the consumers of this process try a claim after this time.
    pub(crate) fn poke(&self, after: std::time::Duration) {
        let mut consumers = self.consumers.lock();
        consumers.retain(|consumer| match consumer.upgrade() {
            Some(consumer) => {
                consumer.look_after(after);
                true
            }
            None => false,
        });
    }
}

fn parse(name: &str, text: &str) -> Result<(Record, String)> {
    let read = |text: &str| {
        let (revision, json) = text.split_once('\n')?;
        Some((serde_json::from_str(json).ok()?, revision.to_owned()))
    };
    read(text).ok_or_else(|| {
        let what = format!("the record of the group {name:?} cannot be read");
        Error::new(Code::NewerSchema, what).hint("it was written by a newer version of Everbus")
    })
}

impl Shared {
    /// The record of a group with its revision, if there is one.
    pub(crate) async fn load_group(&self, name: &str) -> Result<Option<(Record, String)>> {
        let mut get = redis::cmd("HGET");
        get.arg(self.space.own("groups")).arg(name);
        let text = self.link.ask(&get).await?.text()?;
        match text.is_empty() {
            true => Ok(None),
            false => parse(name, &text).map(Some),
        }
    }

    /// All groups, by name.
    pub(crate) async fn load_groups(&self) -> Result<Vec<(Record, String)>> {
        let mut get = redis::cmd("HGETALL");
        get.arg(self.space.own("groups"));
        let flat = self.link.ask(&get).await?.list()?;
        let mut all = Vec::with_capacity(flat.len() / 2);
        let mut flat = flat.into_iter();
        while let (Some(name), Some(text)) = (flat.next(), flat.next()) {
            all.push(parse(&name.text()?, &text.text()?)?);
        }
        all.sort_by(|a, b| a.0.name.cmp(&b.0.name));
        Ok(all)
    }

    /// A group as the server has it now; `None` if it was removed.
    pub(crate) async fn reload(&self, group: &Group) -> Result<Option<()>> {
        let Some((record, revision)) = self.load_group(group.name.as_str()).await? else {
            return Ok(None);
        };
        // A group that was removed and created again is another group.
        if record.created_at != group.record().created_at {
            return Ok(None);
        }
        group.update(record, revision).map(Some)
    }

    /// The group of a record that was just read or written.
    pub(crate) fn remember(&self, record: Record, revision: String) -> Result<Arc<Group>> {
        let name: GroupName = record.name.parse()?;
        let mut groups = self.groups.lock();
        if let Some(group) = groups.get(&name)
            && group.record().created_at == record.created_at
        {
            group.update(record, revision)?;
            return Ok(group.clone());
        }
        let group = Arc::new(Group::new(name.clone(), self.number(), record, revision)?);
        groups.insert(name, group.clone());
        Ok(group)
    }
}
