//! Groups and subscriptions: create, change, remove.

use everbus_core::{
    Code, Cursor, Error, EventId, GroupName, GroupSpec, Pattern, Result, StartFrom,
    SubscriptionInfo, no_group,
};
use everbus_dialects::Dialect;
use redis::Value;

use crate::broker::Shared;
use crate::client::{Arguments, Read as _};
use crate::errors;
use crate::groups::{Record, Subscription};
use crate::keys::{self, EntryId};
use crate::registry::Registry;
use crate::scripts::{DECLARE, LAST, REMOVE};

/// How many times a change of a record is attempted while other processes change the same record.
const TRIES: usize = 50;

/// A stream that a group begins to consume.
struct Join {
    key: String,
    dialect: Dialect,
    /// The group gets the events after this id.
    start: EntryId,
}

impl Shared {
    pub(crate) async fn declare(&self, spec: GroupSpec) -> Result<Vec<SubscriptionInfo>> {
        if spec.ephemeral {
            self.be_alive().await?;
        }
        let name = spec.name.as_str();
        if self.options.adopt_streams {
            self.adopt_streams(&spec).await?;
        }
        for _ in 0..TRIES {
            let registry = self.load_registry().await?;
            let known = self.load_group(name).await?;
            let is_new = known.is_none();
            let (mut record, revision) = match known {
                Some((record, revision)) => {
                    if let Some(owner) = &record.owner
                        && !self.is_alive(owner).await?
                    {
                        self.remove(&record.name, Some(&revision)).await?;
                        continue;
                    }
                    let same = match &record.owner {
                        None => !spec.ephemeral,
                        Some(owner) => spec.ephemeral && *owner == self.owner,
                    };
                    spec.check_known(record.ordered, same)?;
                    (record, revision)
                }
                None => (self.new_record(&spec)?, "0".to_owned()),
            };
            let old = record.patterns()?;
            let has = |name: &str, record: &Record| {
                record.subscriptions.iter().position(|s| s.name == name)
            };
            for wanted in &spec.subscriptions {
                let pattern = wanted.pattern.as_str().to_owned();
                match has(&wanted.name, &record) {
                    Some(at) => record.subscriptions[at].pattern = pattern,
                    None => record.subscriptions.push(Subscription {
                        id: EventId::new().to_string(),
                        name: wanted.name.clone(),
                        pattern,
                        after: String::new(),
                        created_at: self.options.clock.now(),
                    }),
                }
            }
            let start = is_new.then_some(spec.start_from);
            let joins = self.joins(&registry, &old, &record, start).await?;
            let mut position = Cursor::START;
            for join in &joins {
                position.advance(join.start.position(self.space.shard(&join.key)?));
            }
            for subscription in &mut record.subscriptions {
                if subscription.after.is_empty() {
                    subscription.after = position.to_string();
                }
            }
            let Some(revision) = self.save(&record, &revision, &registry, &joins).await? else {
                continue;
            };
            if !joins.is_empty() {
                self.load_registry().await?;
            }
            let group = self.remember(record, revision)?;
            group.poke(std::time::Duration::ZERO);
            return declared(&group.record(), &spec);
        }
        let what = format!("other processes keep changing the group {}", spec.name);
        Err(Error::new(Code::Busy, what))
    }

    /// Registers streams of other programs that a wildcard of the group matches.
    async fn adopt_streams(&self, spec: &GroupSpec) -> Result<()> {
        let patterns = spec.subscriptions.iter().map(|s| s.pattern.clone());
        let patterns: Vec<Pattern> = patterns.filter(|p| p.exact().is_none()).collect();
        if patterns.is_empty() {
            return Ok(());
        }
        let registry = self.load_registry().await?;
        let mut found = Vec::new();
        let mut cursor = "0".to_owned();
        loop {
            let mut scan = redis::cmd("SCAN");
            scan.arg(&cursor).arg("COUNT").arg(1000);
            let page = self.link.ask(scan.arg("TYPE").arg("stream")).await?;
            let mut page = page.list()?.into_iter();
            let mut part = || page.next().unwrap_or(Value::Nil);
            cursor = part().text()?;
            for key in part().list()? {
                let key = key.text()?;
                // Keys of the engine itself, and names that no event type has, are not streams of events.
                let named = self.space.stream(&self.space.types(&key)[0]) == key;
                if named
                    && !registry.streams.contains_key(&key)
                    && self.space.wanted(&key, &patterns)
                {
                    found.push(key);
                }
            }
            if cursor == "0" {
                break;
            }
        }
        found.sort();
        found.dedup();
        for key in &found {
            tracing::info!(target: "everbus::redis", stream = key, "found a stream of another program");
        }
        let dialects = found.into_iter().map(|key| {
            let dialect = self.dialect(&key, &registry);
            (key, dialect)
        });
        self.register(&dialects.collect()).await
    }

    fn new_record(&self, spec: &GroupSpec) -> Result<Record> {
        spec.check_new()?;
        let since = match spec.start_from {
            StartFrom::Time(time) => Some(time),
            _ => None,
        };
        Ok(Record {
            name: spec.name.as_str().to_owned(),
            ordered: spec.ordered,
            owner: spec.ephemeral.then(|| self.owner.clone()),
            created_at: self.options.clock.now(),
            since,
            subscriptions: Vec::new(),
        })
    }

    /// The streams that the group begins to consume now: all that match if it is new, otherwise those that only
    /// its new patterns match, from their end. Streams that appear later are consumed from their beginning.
    async fn joins(
        &self,
        registry: &Registry,
        old: &[Pattern],
        record: &Record,
        start: Option<StartFrom>,
    ) -> Result<Vec<Join>> {
        let patterns = record.patterns()?;
        // The stream of a single type need not be known yet: another program may write it.
        let named = patterns.iter().filter_map(Pattern::exact);
        let named = named.map(|event_type| self.space.stream(event_type));
        let named = named.filter(|key| !registry.streams.contains_key(key));
        let keys = registry.streams.keys().cloned().chain(named);
        let is_new = |key: &String| {
            let before = start.is_none() && self.space.wanted(key, old);
            self.space.wanted(key, &patterns) && !before
        };
        let mut keys: Vec<String> = keys.filter(is_new).collect();
        keys.sort();
        keys.dedup();
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let ends = self.ends(&keys).await?;
        let newest = match start {
            Some(StartFrom::Last) => self.newest(&keys).await?,
            _ => None,
        };
        let first = EntryId { ms: 0, seq: 0 };
        let joins = keys.into_iter().zip(ends).map(|(key, end)| Join {
            dialect: self.dialect(&key, registry),
            start: match start {
                Some(StartFrom::First) => first,
                Some(StartFrom::Time(time)) => EntryId::before(time),
                Some(StartFrom::Last) => match &newest {
                    Some((id, of)) if *of == key => id.just_before(),
                    _ => end,
                },
                Some(StartFrom::New) | None => end,
            },
            key,
        });
        Ok(joins.collect())
    }

    /// The last id of each stream.
    pub(crate) async fn ends(&self, keys: &[String]) -> Result<Vec<EntryId>> {
        let mut arguments = Arguments::default();
        for key in keys {
            arguments.text(key);
        }
        let answers = self.link.run(&LAST, &arguments).await?.list()?;
        let ids = answers.into_iter().map(|id| {
            let id = id.text()?;
            EntryId::parse(&id).ok_or_else(|| errors::unreadable("the last id of a stream"))
        });
        ids.collect()
    }

    /// The newest event of these streams.
    pub(crate) async fn newest(&self, keys: &[String]) -> Result<Option<(EntryId, String)>> {
        let mut newest: Option<(EntryId, String)> = None;
        for key in keys {
            let mut last = redis::cmd("XREVRANGE");
            last.arg(key).arg("+").arg("-").arg("COUNT").arg(1);
            let entries = self.link.ask(&last).await?.list()?;
            let Some(entry) = entries.into_iter().next() else {
                continue;
            };
            let id = entry.list()?.into_iter().next().unwrap_or(Value::Nil);
            if let Some(id) = EntryId::parse(&id.text()?)
                && newest.as_ref().is_none_or(|(known, _)| id > *known)
            {
                newest = Some((id, key.clone()));
            }
        }
        Ok(newest)
    }

    /// Stores a record in place of the revision that was read; `0` if there was none. `None` if another process has
    /// changed the record meanwhile, or if a stream has appeared.
    async fn save(
        &self,
        record: &Record,
        revision: &str,
        registry: &Registry,
        joins: &[Join],
    ) -> Result<Option<String>> {
        let json = serde_json::to_string(record)
            .map_err(|e| Error::new(Code::Internal, format!("a group cannot be written: {e}")))?;
        let mut arguments = Arguments::default();
        arguments
            .text(&record.name)
            .text(keys::group_name(&record.name))
            .text(revision)
            .text(&json)
            .text(&registry.version)
            .number(joins.len());
        for join in joins {
            arguments
                .text(&join.key)
                .text(join.dialect.as_str())
                .number(join.start);
        }
        let answer = self.link.run(&DECLARE, &arguments).await?.text()?;
        let mut words = answer.splitn(2, ' ');
        match (words.next(), words.next()) {
            (Some("ok"), Some(numbers)) => {
                let revision = numbers.split(' ').next().map(str::to_owned);
                revision
                    .map(Some)
                    .ok_or_else(|| errors::unreadable("the revision of a group"))
            }
            (Some("wrongtype"), Some(key)) => Err(errors::wrong_type(&self.link.server, key)),
            _ => Ok(None),
        }
    }

    pub(crate) async fn retract(&self, id: EventId) -> Result<()> {
        let id = id.to_string();
        for _ in 0..TRIES {
            let registry = self.load_registry().await?;
            let all = self.load_groups().await?;
            let has = |record: &Record| record.subscriptions.iter().any(|s| s.id == id);
            let Some((mut record, revision)) = all.into_iter().find(|(record, _)| has(record))
            else {
                break;
            };
            record.subscriptions.retain(|s| s.id != id);
            if let Some(revision) = self.save(&record, &revision, &registry, &[]).await? {
                return self.remember(record, revision).map(drop);
            }
        }
        let what = format!("there is no subscription {id}");
        Err(Error::new(Code::SubscriptionNotFound, what))
    }

    pub(crate) async fn remove_group(&self, name: &GroupName) -> Result<()> {
        match self.remove(name.as_str(), None).await? {
            true => Ok(()),
            false => Err(no_group(name)),
        }
    }

    /// Removes a group with all its records. Returns `false` if there is no group of this name and revision.
    pub(crate) async fn remove(&self, name: &str, revision: Option<&str>) -> Result<bool> {
        let mut arguments = Arguments::default();
        arguments.text(name).text(keys::group_name(name));
        arguments.text(revision.unwrap_or_default());
        let removed = self.link.run(&REMOVE, &arguments).await?.text()? == "1";
        let gone = self.groups.lock().remove(&name.parse()?);
        if let Some(group) = gone {
            self.held.forget_group(group.number);
            group.poke(std::time::Duration::ZERO);
        }
        Ok(removed)
    }
}

fn declared(record: &Record, spec: &GroupSpec) -> Result<Vec<SubscriptionInfo>> {
    let all = record.infos(&spec.name)?;
    let mut infos = Vec::with_capacity(all.len());
    for wanted in &spec.subscriptions {
        infos.extend(all.iter().find(|info| info.name == wanted.name).cloned());
    }
    let is_other = |info: &&SubscriptionInfo| infos.iter().all(|known| known.name != info.name);
    let mut others: Vec<_> = all.iter().filter(is_other).cloned().collect();
    others.sort_by(|a, b| a.name.cmp(&b.name));
    infos.append(&mut others);
    Ok(infos)
}
