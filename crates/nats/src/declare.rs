//! Groups and subscriptions: create, change, remove.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{
    Code, Cursor, Error, EventId, GroupName, GroupSpec, Pattern, Position, Result, StartFrom,
    SubscriptionInfo, Timestamp, no_group,
};
use serde_json::{Value, json};

use crate::api::Which;
use crate::broker::Shared;
use crate::errors::number;
use crate::groups::{self, Group, Record, Subscription};
use crate::names;
use crate::streams::{StreamHandle, Table};

/// A record that others change at the same time is changed again, this often at most.
const TRIES: usize = 50;
/// The server removes the consumer of an ephemeral group after this long without a request.
const INACTIVE: Duration = Duration::from_secs(3600);
/// The lease of a group that nobody has consumed yet.
const FIRST_LEASE: Duration = Duration::from_secs(40);
/// Unsettled events of a group and stream beyond this wait.
const MAX_PENDING: u64 = 100_000;
/// A process that asks for nothing for this long loses an ordered group to another one.
const PINNED: Duration = Duration::from_secs(15);
/// Clocks of publishers and server may differ by this much.
const SKEW: Duration = Duration::from_secs(60);

impl Shared {
    pub(crate) async fn declare(&self, spec: GroupSpec) -> Result<Vec<SubscriptionInfo>> {
        let table = self.table_if_any().await?;
        let encoded = names::encoded(spec.name.as_str());
        if spec.ephemeral {
            self.be_alive().await?;
        }
        for _ in 0..TRIES {
            let known = groups::load(&self.link, &self.space, &encoded).await?;
            let is_new = known.is_none();
            let (mut record, revision) = match known {
                Some((record, revision)) => {
                    if let Some(owner) = &record.owner
                        && !self.is_alive(owner).await
                    {
                        self.remove_parts(&encoded, &record).await?;
                        continue;
                    }
                    let same = match &record.owner {
                        None => !spec.ephemeral,
                        Some(owner) => spec.ephemeral && *owner == self.owner,
                    };
                    spec.check_known(record.ordered, same)?;
                    (record, revision)
                }
                None => (self.new_record(&spec)?, 0),
            };
            let before = record.clone();
            let old = record.patterns()?;
            self.add_subscriptions(&mut record, &spec, is_new, &encoded)
                .await?;
            if let Some(table) = &table {
                let start = is_new.then_some(spec.start_from);
                self.fill_starts(table, &mut record, &old, start).await?;
            }
            if is_new {
                let position = cursor_of(self, &record).await?;
                for subscription in &mut record.subscriptions {
                    subscription.after = position.to_string();
                }
            }
            let changed = is_new || record != before;
            if changed
                && !groups::save(&self.link, &self.space, &encoded, &record, revision).await?
            {
                continue;
            }
            let group = self.remember(&spec.name, record)?;
            self.consumed(&group, None).await?;
            return declared(&group, &spec);
        }
        Err(busy(&spec.name))
    }

    fn new_record(&self, spec: &GroupSpec) -> Result<Record> {
        spec.check_new()?;
        if spec.ordered && !self.link.client.is_server_compatible(2, 11, 0) {
            let what = "a group ordered by key needs a NATS server 2.11 or newer";
            return Err(Error::new(Code::Unsupported, what).hint("upgrade the server"));
        }
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
            starts: Default::default(),
        })
    }

    async fn add_subscriptions(
        &self,
        record: &mut Record,
        spec: &GroupSpec,
        is_new: bool,
        encoded: &str,
    ) -> Result<()> {
        let mut position = None;
        for wanted in &spec.subscriptions {
            let pattern = wanted.pattern.as_str().to_owned();
            let known = record
                .subscriptions
                .iter_mut()
                .find(|s| s.name == wanted.name);
            if let Some(known) = known {
                known.pattern = pattern;
                continue;
            }
            if position.is_none() {
                position = Some(match is_new {
                    true => Cursor::START,
                    false => self.position(record, encoded).await?,
                });
            }
            record.subscriptions.push(Subscription {
                id: EventId::new().to_string(),
                name: wanted.name.clone(),
                pattern,
                after: position.clone().unwrap_or_default().to_string(),
                created_at: self.options.clock.now(),
            });
        }
        Ok(())
    }

    /// How far a group has come in each stream.
    async fn position(&self, record: &Record, encoded: &str) -> Result<Cursor> {
        let mut cursor = cursor_of(self, record).await?;
        for name in record.starts.keys() {
            let Some(stream) = self.stream_named(name).await? else {
                continue;
            };
            if let Some(info) = self.link.consumer(name, encoded).await? {
                cursor.advance(Position::new(stream.shard, info.delivered.stream_seq));
            }
        }
        Ok(cursor)
    }

    /// Notes where the group begins in streams that it does not know yet. A stream that none of its old
    /// patterns reached is begun at its end.
    async fn fill_starts(
        &self,
        table: &Table,
        record: &mut Record,
        old: &[Pattern],
        start: Option<StartFrom>,
    ) -> Result<()> {
        let patterns = record.patterns()?;
        let last = match start {
            Some(StartFrom::Last) => self.newest(&table.streams, &patterns).await?,
            _ => None,
        };
        for stream in &table.streams {
            let reached = |patterns: &[Pattern]| stream.filters(patterns) != Some(Vec::new());
            let known = record.starts.contains_key(&stream.name);
            let first = match start {
                Some(StartFrom::First) => 1,
                Some(StartFrom::New) => self.end(stream).await? + 1,
                Some(StartFrom::Last) => match &last {
                    Some((name, seq)) if *name == stream.name => *seq,
                    _ => self.end(stream).await? + 1,
                },
                Some(StartFrom::Time(time)) => self.seq_at(stream, time.minus(SKEW)).await?,
                None if known && !reached(old) && reached(&patterns) => self.end(stream).await? + 1,
                None if known => continue,
                // It appeared after the group.
                None => 1,
            };
            record.starts.insert(stream.name.clone(), first);
        }
        Ok(())
    }

    /// The last sequence of a stream.
    async fn end(&self, stream: &StreamHandle) -> Result<u64> {
        let info = self.link.stream(&stream.name).await?;
        Ok(info.map_or(0, |info| info.state.last_seq))
    }

    /// The newest event that one of the patterns matches: its stream and sequence.
    pub(crate) async fn newest(
        &self,
        streams: &[Arc<StreamHandle>],
        patterns: &[Pattern],
    ) -> Result<Option<(String, u64)>> {
        let mut newest: Option<(Timestamp, String, u64)> = None;
        for stream in streams {
            let filters = match stream.filters(patterns) {
                Some(filters) => filters,
                None => vec![stream.subject(">")],
            };
            for filter in filters {
                let which = Which {
                    last_by_subj: Some(filter),
                    ..Which::default()
                };
                let Some(found) = self.link.message(&stream.name, &which).await? else {
                    continue;
                };
                let known = newest.as_ref();
                let newer = known.is_none_or(|(time, name, seq)| {
                    (found.time, found.seq) > (*time, *seq)
                        || *name == stream.name && found.seq > *seq
                });
                if newer {
                    newest = Some((found.time, stream.name.clone(), found.seq));
                }
            }
        }
        Ok(newest.map(|(_, name, seq)| (name, seq)))
    }

    /// The first sequence that the server received at or after a time.
    pub(crate) async fn seq_at(&self, stream: &StreamHandle, time: Timestamp) -> Result<u64> {
        if time <= Timestamp::EPOCH {
            return Ok(1);
        }
        let which = Which {
            start_time: Some(time.to_string()),
            next_by_subj: Some(stream.subject(">")),
            batch: Some(1),
            ..Which::default()
        };
        let found = self.link.messages(&stream.name, &which).await?;
        match found.first() {
            Some(first) => Ok(first.seq),
            None => Ok(self.end(stream).await? + 1),
        }
    }

    /// Adds the streams of a new table to a group that exists.
    pub(crate) async fn adopt(&self, table: &Table, name: &str) -> Result<()> {
        let encoded = names::encoded(name);
        for _ in 0..TRIES {
            let known = groups::load(&self.link, &self.space, &encoded).await?;
            let Some((mut record, revision)) = known else {
                return Ok(());
            };
            let missing = |stream: &&Arc<StreamHandle>| !record.starts.contains_key(&stream.name);
            let missing: Vec<String> = table
                .streams
                .iter()
                .filter(missing)
                .map(|stream| stream.name.clone())
                .collect();
            if !missing.is_empty() {
                record
                    .starts
                    .extend(missing.into_iter().map(|name| (name, 1)));
                if !groups::save(&self.link, &self.space, &encoded, &record, revision).await? {
                    continue;
                }
            }
            let patterns = record.patterns()?;
            for stream in &table.streams {
                let start = record.starts.get(&stream.name).copied().unwrap_or(1);
                self.ensure(stream, &encoded, &record, &patterns, start, None)
                    .await?;
            }
            let name: GroupName = name.parse()?;
            if self.groups.lock().contains_key(&name) {
                self.remember(&name, record)?;
            }
            return Ok(());
        }
        Err(busy(&name.parse()?))
    }

    /// The streams that the group has a consumer in. Consumers are created and changed as its patterns say;
    /// with a lease, they get that as well.
    pub(crate) async fn consumed(
        &self,
        group: &Arc<Group>,
        lease: Option<Duration>,
    ) -> Result<Vec<Arc<StreamHandle>>> {
        let (record, patterns) = (group.record(), group.patterns());
        let mut streams = Vec::new();
        for (name, start) in &record.starts {
            let Some(stream) = self.stream_named(name).await? else {
                continue;
            };
            let there = self.ensure(&stream, &group.encoded, &record, &patterns, *start, lease);
            if there.await? {
                streams.push(stream);
            }
        }
        Ok(streams)
    }

    /// Creates or changes one consumer. False if the group wants nothing of the stream and never did.
    async fn ensure(
        &self,
        stream: &StreamHandle,
        encoded: &str,
        record: &Record,
        patterns: &[Pattern],
        start: u64,
        lease: Option<Duration>,
    ) -> Result<bool> {
        let filters = stream.filters(patterns);
        let known = self.link.consumer(&stream.name, encoded).await?;
        let mut config = match (&known, &filters) {
            (Some(info), _) => info.config.clone(),
            (None, Some(none)) if none.is_empty() => return Ok(false),
            (None, _) => new_consumer(record, encoded, start),
        };
        let filters = match filters {
            Some(none) if none.is_empty() => names::nothing(&stream.subjects).map(|one| vec![one]),
            filters => filters,
        };
        set_filters(&mut config, filters.as_deref());
        if let Some(lease) = lease {
            config["ack_wait"] = json!(lease.as_nanos() as u64);
        }
        if known.is_some_and(|info| info.config == config) {
            return Ok(true);
        }
        let mut put = self
            .link
            .put_consumer(&stream.name, encoded, &config)
            .await?;
        if put
            .as_ref()
            .is_err_and(|e| e.err_code == number::FILTER_NOT_SUBSET)
        {
            set_filters(&mut config, None);
            put = self
                .link
                .put_consumer(&stream.name, encoded, &config)
                .await?;
        }
        let what = format!("the consumer of {:?} in {}", record.name, stream.name);
        put.map(|_| true).map_err(|error| error.into_error(&what))
    }

    pub(crate) async fn retract(&self, id: EventId) -> Result<()> {
        let id = id.to_string();
        for _ in 0..TRIES {
            let all = groups::list(&self.link, &self.space).await?;
            let has = |record: &&Record| record.subscriptions.iter().any(|s| s.id == id);
            let Some(name) = all.iter().find(has).map(|record| record.name.clone()) else {
                break;
            };
            let encoded = names::encoded(&name);
            let known = groups::load(&self.link, &self.space, &encoded).await?;
            let Some((mut record, revision)) = known else {
                break;
            };
            record.subscriptions.retain(|s| s.id != id);
            if groups::save(&self.link, &self.space, &encoded, &record, revision).await? {
                let group = self.remember(&name.parse()?, record)?;
                return self.consumed(&group, None).await.map(drop);
            }
        }
        let what = format!("there is no subscription {id}");
        Err(Error::new(Code::SubscriptionNotFound, what))
    }

    pub(crate) async fn remove_group(&self, name: &GroupName) -> Result<()> {
        let encoded = names::encoded(name.as_str());
        let known = groups::load(&self.link, &self.space, &encoded).await?;
        let Some((record, _)) = known else {
            return Err(no_group(name));
        };
        self.remove_parts(&encoded, &record).await
    }

    /// The consumers, the dead letters, and the record last: after a crash in between it can be removed again.
    pub(crate) async fn remove_parts(&self, encoded: &str, record: &Record) -> Result<()> {
        for stream in record.starts.keys() {
            self.link.delete_consumer(stream, encoded).await?;
        }
        let dead = self.space.dead_subject("*", encoded, "*");
        self.link.purge(&self.space.dead_stream(), &dead).await?;
        let own = self.space.group_subject(encoded);
        self.link.purge(&self.space.groups_stream(), &own).await?;
        let name: GroupName = record.name.parse()?;
        let gone = self.groups.lock().remove(&name);
        if let Some(group) = gone {
            self.held.forget_group(group.number);
            group.version.send_modify(|version| *version += 1);
        }
        Ok(())
    }

    /// The ephemeral groups of this engine end with it.
    pub(crate) async fn remove_own_groups(&self) {
        let own: Vec<Arc<Group>> = {
            let groups = self.groups.lock();
            let own = |group: &&Arc<Group>| group.record().owner.as_ref() == Some(&self.owner);
            groups.values().filter(own).cloned().collect()
        };
        for group in own {
            let removed = self.remove_parts(&group.encoded, &group.record()).await;
            if let Err(error) = removed {
                tracing::debug!(target: "everbus::nats", group = %group.name, %error, "an ephemeral group stays until the server removes it");
            }
        }
    }
}

fn busy(name: &GroupName) -> Error {
    let what = format!("the group {name} is changed by others all the time");
    Error::new(Code::Busy, what)
}

/// Before the first event in every stream.
async fn cursor_of(shared: &Shared, record: &Record) -> Result<Cursor> {
    let mut cursor = Cursor::START;
    for (name, start) in &record.starts {
        if let Some(stream) = shared.stream_named(name).await? {
            cursor.advance(Position::new(stream.shard, start.saturating_sub(1)));
        }
    }
    Ok(cursor)
}

fn declared(group: &Group, spec: &GroupSpec) -> Result<Vec<SubscriptionInfo>> {
    let all = group.record().infos(&group.name)?;
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

fn new_consumer(record: &Record, encoded: &str, start: u64) -> Value {
    let mut config = json!({
        "name": encoded,
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": start.max(1),
        "ack_policy": "explicit",
        "ack_wait": FIRST_LEASE.as_nanos() as u64,
        "max_deliver": -1,
        "max_ack_pending": MAX_PENDING,
        "replay_policy": "instant",
        "metadata": { "everbus": record.name },
    });
    if record.owner.is_some() {
        config["inactive_threshold"] = json!(INACTIVE.as_nanos() as u64);
    } else {
        config["durable_name"] = json!(encoded);
    }
    if record.ordered {
        config["priority_groups"] = json!(["ordered"]);
        config["priority_policy"] = json!("pinned_client");
        config["priority_timeout"] = json!(PINNED.as_nanos() as u64);
    }
    config
}

fn set_filters(config: &mut Value, filters: Option<&[String]>) {
    let Some(config) = config.as_object_mut() else {
        return;
    };
    config.remove("filter_subject");
    config.remove("filter_subjects");
    match filters {
        Some([one]) => _ = config.insert("filter_subject".into(), json!(one)),
        Some(several) => _ = config.insert("filter_subjects".into(), json!(several)),
        None => {}
    }
}
