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
use crate::streams::{self, StreamHandle};
use crate::wire;

/// The most attempts to change a record while other processes change it.
pub(crate) const TRIES: usize = 50;
/// The server removes the consumer of an ephemeral group after this long without a request.
const INACTIVE: Duration = Duration::from_secs(3600);
/// The lease of a group that no process has consumed yet.
const FIRST_LEASE: Duration = Duration::from_secs(40);
/// Unsettled events have no limit: at a limit, events that wait for a retry or a handler would stop all others.
const MAX_PENDING: i64 = -1;
/// The metadata key of a consumer whose lease was set by a process.
const LEASED: &str = "everbus.leased";
/// If a process sends no pull request for this long, an ordered group moves to another process.
const PINNED: Duration = Duration::from_secs(15);

const FOREIGN: &str = "it was made by another program";

/// The result of [`Shared::ensure`].
#[derive(Clone, Copy, PartialEq, Eq)]
enum Put {
    /// The group wants nothing of the stream and never did.
    Unwanted,
    /// The stream was removed from the server.
    NoStream,
    Same,
    Changed,
}

impl Shared {
    pub(crate) async fn declare(&self, spec: GroupSpec) -> Result<Vec<SubscriptionInfo>> {
        let streams = self.all_streams().await?;
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
            let start = is_new.then_some(spec.start_from);
            self.fill_starts(&streams, &mut record, &old, start).await?;
            if is_new {
                let position = cursor_of(self, &record).await?;
                for subscription in &mut record.subscriptions {
                    subscription.after = position.to_string();
                }
            }
            let left = match is_new {
                true => self.left_behind(&record, &encoded).await?,
                false => Vec::new(),
            };
            let mut revision = revision;
            if is_new || record != before {
                let saved =
                    groups::save(&self.link, &self.space, &encoded, &record, revision).await?;
                let Some(saved) = saved else {
                    continue;
                };
                revision = saved;
            }
            for stream in left {
                self.link.delete_consumer(&stream, &encoded).await?;
            }
            let group = self.remember(&spec.name, record, revision)?;
            self.consumed(&group, None).await?;
            return declared(&group, &spec);
        }
        Err(busy(&spec.name))
    }

    /// The streams where an interrupted removal left a consumer of the group's name.
    async fn left_behind(&self, record: &Record, encoded: &str) -> Result<Vec<String>> {
        let mut left = Vec::new();
        for stream in record.starts.keys() {
            if let Some(info) = self.link.consumer(stream, encoded).await? {
                if !is_ours(&info.config) {
                    return Err(unusable(record, stream, FOREIGN));
                }
                left.push(stream.clone());
            }
        }
        Ok(left)
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
            created: Default::default(),
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

    /// The streams that are declared here, and those that other processes made for this space.
    pub(crate) async fn all_streams(&self) -> Result<Vec<Arc<StreamHandle>>> {
        let table = self.table_if_any().await?;
        let mut all = table.map_or_else(Vec::new, |table| table.streams.clone());
        for stream in streams::discover(&self.link, &self.space, &self.options).await? {
            if !all.iter().any(|known| known.name == stream.name) {
                all.push(stream);
            }
        }
        Ok(all)
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

    /// Sets the first sequence of the group in its streams. A new group begins at `start`. An existing group begins
    /// at the end of a known stream that only its new patterns reach, and at the beginning of a stream that it does
    /// not know.
    async fn fill_starts(
        &self,
        streams: &[Arc<StreamHandle>],
        record: &mut Record,
        old: &[Pattern],
        start: Option<StartFrom>,
    ) -> Result<()> {
        let patterns = record.patterns()?;
        let last = match start {
            Some(StartFrom::Last) => self.newest(streams, &patterns).await?,
            _ => None,
        };
        for stream in streams {
            let reached = |patterns: &[Pattern]| stream.filters(patterns) != Some(Vec::new());
            let known = record.starts.contains_key(&stream.name);
            if start.is_none() && known && (reached(old) || !reached(&patterns)) {
                continue;
            }
            let Some(info) = self.link.stream(&stream.name).await? else {
                continue;
            };
            let after_all = info.state.last_seq + 1;
            let first = match start {
                Some(StartFrom::First) => 1,
                Some(StartFrom::New) => after_all,
                Some(StartFrom::Last) => match &last {
                    Some((name, seq)) if *name == stream.name => *seq,
                    _ => after_all,
                },
                // Begins earlier, because clocks differ; readers skip the events before `time`.
                Some(StartFrom::Time(time)) => self.seq_at(stream, time.minus(wire::SKEW)).await?,
                None if known => after_all,
                // The stream is newer than the group.
                None => 1,
            };
            record.starts.insert(stream.name.clone(), first);
            record.created.insert(stream.name.clone(), info.created);
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

    /// Adds streams to a group that exists: it consumes them from their beginning.
    pub(crate) async fn adopt(&self, streams: &[Arc<StreamHandle>], name: &str) -> Result<()> {
        let encoded = names::encoded(name);
        for _ in 0..TRIES {
            let known = groups::load(&self.link, &self.space, &encoded).await?;
            let Some((mut record, mut revision)) = known else {
                return Ok(());
            };
            let missing = |stream: &&Arc<StreamHandle>| !record.starts.contains_key(&stream.name);
            let missing: Vec<String> = streams
                .iter()
                .filter(missing)
                .map(|stream| stream.name.clone())
                .collect();
            if !missing.is_empty() {
                record
                    .starts
                    .extend(missing.into_iter().map(|name| (name, 1)));
                let saved =
                    groups::save(&self.link, &self.space, &encoded, &record, revision).await?;
                let Some(saved) = saved else {
                    continue;
                };
                revision = saved;
            }
            let patterns = record.patterns()?;
            for stream in streams {
                self.ensure(stream, &encoded, &record, &patterns, None)
                    .await?;
            }
            let name: GroupName = name.parse()?;
            if self.groups.lock().contains_key(&name) {
                self.remember(&name, record, revision)?;
            }
            return Ok(());
        }
        Err(busy(&name.parse()?))
    }

    /// Creates and widens the consumers of the group as its patterns require, and sets their lease if one is given.
    /// Returns the streams in which the group has a consumer.
    pub(crate) async fn consumed(
        &self,
        group: &Arc<Group>,
        lease: Option<Duration>,
    ) -> Result<Vec<Arc<StreamHandle>>> {
        for _ in 0..TRIES {
            let (record, patterns) = (group.record(), group.patterns());
            let (mut streams, mut changed) = (Vec::new(), false);
            for name in record.starts.keys() {
                let Some(stream) = self.stream_named(name).await? else {
                    continue;
                };
                let put = self.ensure(&stream, &group.encoded, &record, &patterns, lease);
                match put.await? {
                    Put::Unwanted => {}
                    // The group goes on with its other streams.
                    Put::NoStream => self.forget_stream(&stream),
                    put => {
                        changed |= put == Put::Changed;
                        self.found_stream(&stream);
                        streams.push(stream);
                    }
                }
            }
            // Another process may have widened the same consumers at the same time, and this process may have
            // overwritten the new filters. If the record is newer now, the consumers are written again.
            if changed {
                self.reload(group).await?;
            }
            if group.record() == record {
                return Ok(streams);
            }
        }
        Err(busy(&group.name))
    }

    /// Creates one consumer, or widens its filters. Filters are never narrowed: a narrower filter would skip events
    /// that a newer record wants, or that an older table put into this stream. Readers ack events that no
    /// subscription wants.
    async fn ensure(
        &self,
        stream: &StreamHandle,
        encoded: &str,
        record: &Record,
        patterns: &[Pattern],
        lease: Option<Duration>,
    ) -> Result<Put> {
        let wanted = stream.filters(patterns);
        let known = self.link.consumer(&stream.name, encoded).await?;
        let wants_none = wanted.as_ref().is_some_and(Vec::is_empty);
        let (mut config, filters) = match &known {
            Some(info) => {
                check_consumer(&info.config, record, &stream.name)?;
                let filters = match (wanted, filters_of(&info.config)) {
                    (Some(wanted), Some(there)) => Some(names::union(&there, &wanted)),
                    _ => None,
                };
                (info.config.clone(), filters)
            }
            None if wants_none => return Ok(Put::Unwanted),
            None => {
                let start = self.start(record, &stream.name).await?;
                (new_consumer(record, encoded, start), wanted)
            }
        };
        let same = known
            .as_ref()
            .is_some_and(|info| filters_of(&info.config) == filters);
        if !same {
            set_filters(&mut config, filters.as_deref());
        }
        config["max_ack_pending"] = json!(MAX_PENDING);
        if let Some(lease) = lease {
            set_lease(&mut config, lease);
        }
        if known.is_some_and(|info| info.config == config) {
            return Ok(Put::Same);
        }
        let mut put = self
            .link
            .put_consumer(&stream.name, encoded, &config)
            .await?;
        let refused = [number::FILTER_NOT_SUBSET, number::FILTERS_OVERLAP];
        if put.as_ref().is_err_and(|e| refused.contains(&e.err_code)) {
            set_filters(&mut config, None);
            put = self
                .link
                .put_consumer(&stream.name, encoded, &config)
                .await?;
        }
        match put {
            Ok(_) => Ok(Put::Changed),
            Err(error) if error.err_code == number::STREAM_NOT_FOUND => Ok(Put::NoStream),
            Err(error) => {
                let what = format!("the consumer of {:?} in {}", record.name, stream.name);
                Err(error.into_error(&what))
            }
        }
    }

    /// The first sequence of a new consumer. In a stream that was removed and created again it is 1.
    async fn start(&self, record: &Record, stream: &str) -> Result<u64> {
        let start = record.starts.get(stream).copied().unwrap_or(1);
        let Some(created) = record.created.get(stream).filter(|_| start > 1) else {
            return Ok(start);
        };
        let info = self.link.stream(stream).await?;
        let same = info.is_some_and(|info| info.created == *created);
        Ok(if same { start } else { 1 })
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
            let saved = groups::save(&self.link, &self.space, &encoded, &record, revision).await?;
            if let Some(revision) = saved {
                let group = self.remember(&name.parse()?, record, revision)?;
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

    /// Removes the record, the consumers and the dead letters of a group. The record goes first: a reader that finds
    /// its consumer gone would create it again from the record. If a crash leaves consumers behind, the next group of
    /// this name removes them.
    pub(crate) async fn remove_parts(&self, encoded: &str, record: &Record) -> Result<()> {
        let own = self.space.group_subject(encoded);
        self.link.purge(&self.space.groups_stream(), &own).await?;
        for stream in record.starts.keys() {
            self.link.delete_consumer(stream, encoded).await?;
        }
        let dead = self.space.dead_stream();
        for seq in ["*", "*.payload"] {
            let letters = self.space.dead_subject("*", encoded, seq);
            self.link.purge(&dead, &letters).await?;
        }
        let name: GroupName = record.name.parse()?;
        let gone = self.groups.lock().remove(&name);
        if let Some(group) = gone {
            self.held.forget_group(group.number);
            group.version.send_modify(|version| *version += 1);
        }
        Ok(())
    }

    /// Removes the ephemeral groups of this engine.
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

pub(crate) fn busy(name: &GroupName) -> Error {
    let what = format!("the group {name} is changed by others all the time");
    Error::new(Code::Busy, what)
}

/// The cursor before the first event of the group in every stream.
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

/// Raises the lease of a consumer. The lease of a group is the longest that one of its processes needs: with a
/// shorter one, another process would get an event while its handler still runs.
fn set_lease(config: &mut Value, lease: Duration) {
    let there = match config["metadata"][LEASED].is_string() {
        true => config["ack_wait"].as_u64().unwrap_or(0),
        false => 0,
    };
    let lease = u64::try_from(lease.as_nanos()).unwrap_or(i64::MAX as u64);
    config["ack_wait"] = json!(there.max(lease));
    config["metadata"][LEASED] = json!("1");
}

/// Refuses a consumer that another program made, or whose settings lose events.
fn check_consumer(config: &Value, record: &Record, stream: &str) -> Result<()> {
    let wrong = [
        (!is_ours(config), FOREIGN),
        (
            config["ack_policy"].as_str() != Some("explicit"),
            "its ack policy is not explicit",
        ),
        (
            config["deliver_subject"].is_string(),
            "it pushes its messages",
        ),
        (
            config["max_deliver"].as_i64().is_some_and(|most| most > 0),
            "it gives events up after max_deliver deliveries",
        ),
        (
            config["headers_only"].as_bool() == Some(true),
            "it delivers headers without payloads",
        ),
        (
            config["backoff"].as_array().is_some_and(|b| !b.is_empty()),
            "its backoff replaces leases",
        ),
    ];
    match wrong.iter().find(|(wrong, _)| *wrong) {
        Some((_, why)) => Err(unusable(record, stream, why)),
        None => Ok(()),
    }
}

fn is_ours(config: &Value) -> bool {
    config["metadata"]["everbus"].is_string()
}

fn unusable(record: &Record, stream: &str, why: &str) -> Error {
    let what = format!(
        "the stream {stream} has a consumer for the group {:?} that cannot be used: {why}",
        record.name
    );
    Error::new(Code::InvalidSetting, what)
        .hint("give the group another name, or remove the consumer from the server")
}

/// The filters of a consumer; `None` is everything.
pub(crate) fn filters_of(config: &Value) -> Option<Vec<String>> {
    let one = config["filter_subject"].as_str().filter(|f| !f.is_empty());
    if let Some(one) = one {
        return Some(vec![one.to_owned()]);
    }
    let mut several = streams::texts(&config["filter_subjects"]);
    several.sort();
    (!several.is_empty()).then_some(several)
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
