//! Groups and subscriptions: create, change, remove.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use everbus_core::{
    Code, Cursor, Error, EventId, GroupName, GroupSpec, Pattern, Position, Result, StartFrom,
    SubscriptionInfo, no_group,
};
use rdkafka::admin::AdminOptions;
use rdkafka::error::RDKafkaErrorCode as Kind;
use rdkafka::producer::Producer as _;

use crate::broker::Shared;
use crate::client::blocking;
use crate::groups::{Creation, Key, Record, Subscription, subscription_id};
use crate::log::place;
use crate::topics::Topic;

/// The most attempts to declare a group that is removed at the same time.
const TRIES: usize = 5;
/// Clocks of publishers and this process may differ by this much.
const SKEW: Duration = Duration::from_secs(60);

/// The first offset of each partition, by topic.
type Starts = BTreeMap<String, Vec<i64>>;

fn text(value: &impl serde::Serialize) -> Result<Option<String>> {
    serde_json::to_string(value).map(Some).map_err(|error| {
        Error::new(
            Code::Internal,
            format!("a group cannot be written: {error}"),
        )
    })
}

/// A number that no other declaration has.
fn number() -> String {
    format!("{:016x}", fastrand::u64(..))
}

impl Shared {
    pub(crate) async fn declare(
        self: &Arc<Self>,
        spec: GroupSpec,
    ) -> Result<Vec<SubscriptionInfo>> {
        for _ in 0..TRIES {
            let topics = self.readable().await?;
            let known = self.registry.group(&spec.name);
            if let Some(record) = &known
                && !self.is_alive(record).await
            {
                self.remove_parts(&spec.name).await?;
                continue;
            }
            let facts = match &known {
                Some(record) => self.changes(&spec, record, &topics).await?,
                None => self.creation(&spec, &topics).await?,
            };
            if !facts.is_empty() {
                self.registry.write(&self.link, facts).await?;
            }
            let Some(record) = self.registry.group(&spec.name) else {
                // The group was removed at the same time.
                continue;
            };
            // Another process may have created it at the same time, with other settings.
            self.check_known(&spec, &record)?;
            if spec.ephemeral {
                // By the member, other engines see that this engine is alive.
                self.join(&spec.name, |_| ()).await?;
            }
            return declared(&record, &spec);
        }
        let what = format!("the group {} is removed by others all the time", spec.name);
        Err(Error::new(Code::Busy, what))
    }

    fn check_known(&self, spec: &GroupSpec, record: &Record) -> Result<()> {
        let same = match &record.owner {
            None => !spec.ephemeral,
            Some(owner) => spec.ephemeral && *owner == self.owner,
        };
        spec.check_known(record.ordered, same)
    }

    /// The facts of a new group. Its start positions are first, so that it never exists without them.
    async fn creation(
        self: &Arc<Self>,
        spec: &GroupSpec,
        topics: &[Arc<Topic>],
    ) -> Result<Vec<(Key, Option<String>)>> {
        spec.check_new()?;
        let name = spec.name.as_str().to_owned();
        let number = number();
        let patterns: Vec<Pattern> = spec
            .subscriptions
            .iter()
            .map(|s| s.pattern.clone())
            .collect();
        let reached = self.reached(topics, &patterns);
        let starts = self.starts(&reached, &patterns, spec.start_from).await?;
        let now = self.options.clock.now();
        let creation = Creation {
            ordered: spec.ordered,
            owner: spec.ephemeral.then(|| self.owner.clone()),
            created_at: now,
            since: match spec.start_from {
                StartFrom::Time(time) => Some(time),
                _ => None,
            },
        };
        let mut facts = Vec::new();
        for (topic, offsets) in &starts {
            let [creation, own] = [number.clone(), number.clone()];
            let key = Key::Start(name.clone(), topic.clone(), creation, own);
            facts.push((key, text(offsets)?));
        }
        facts.push((Key::Group(name.clone(), number), text(&creation)?));
        let after = cursor(&reached, &starts).to_string();
        for wanted in &spec.subscriptions {
            let subscription = Subscription {
                pattern: wanted.pattern.as_str().to_owned(),
                after: after.clone(),
                created_at: now,
            };
            facts.push((
                Key::Subscription(name.clone(), wanted.name.clone()),
                text(&subscription)?,
            ));
        }
        Ok(facts)
    }

    /// The facts that a declaration adds to a group.
    async fn changes(
        self: &Arc<Self>,
        spec: &GroupSpec,
        record: &Arc<Record>,
        topics: &[Arc<Topic>],
    ) -> Result<Vec<(Key, Option<String>)>> {
        self.check_known(spec, record)?;
        let name = spec.name.as_str().to_owned();
        let mut subscriptions = Vec::new();
        let mut position = None;
        for wanted in &spec.subscriptions {
            let pattern = wanted.pattern.as_str().to_owned();
            let subscription = match record.subscriptions.get(&wanted.name) {
                Some(known) if known.pattern == pattern => continue,
                Some(known) => Subscription {
                    pattern,
                    ..known.clone()
                },
                None => {
                    if position.is_none() {
                        position = Some(self.position(record, topics).await?);
                    }
                    Subscription {
                        pattern,
                        after: position.clone().unwrap_or_default().to_string(),
                        created_at: self.options.clock.now(),
                    }
                }
            };
            subscriptions.push((
                Key::Subscription(name.clone(), wanted.name.clone()),
                text(&subscription)?,
            ));
        }
        if subscriptions.is_empty() {
            return Ok(Vec::new());
        }
        // The group begins at the end of a topic that none of its patterns reached before.
        let patterns: Vec<Pattern> = spec
            .subscriptions
            .iter()
            .map(|s| s.pattern.clone())
            .collect();
        let mut reached = self.reached(topics, &patterns);
        let before = self.reached(topics, &record.patterns);
        reached.retain(|topic| !before.iter().any(|known| known.name == topic.name));
        let starts = self.starts(&reached, &patterns, StartFrom::New).await?;
        let mut facts = Vec::new();
        // A new number, because another process may write a start for the same topic at the same time.
        let number = number();
        for (topic, offsets) in &starts {
            for creation in &record.creations {
                let (creation, number) = (creation.clone(), number.clone());
                let key = Key::Start(name.clone(), topic.clone(), creation, number);
                facts.push((key, text(offsets)?));
            }
        }
        facts.extend(subscriptions);
        Ok(facts)
    }

    /// The topics that one of the patterns reaches.
    pub(crate) fn reached(&self, topics: &[Arc<Topic>], patterns: &[Pattern]) -> Vec<Arc<Topic>> {
        let noted = self.registry.topics();
        let reached = |topic: &&Arc<Topic>| {
            let note = noted.get(&topic.name);
            note.is_some_and(|note| note.is_reached(patterns))
        };
        topics.iter().filter(reached).cloned().collect()
    }

    /// The offsets at which a group begins.
    async fn starts(
        self: &Arc<Self>,
        topics: &[Arc<Topic>],
        patterns: &[Pattern],
        from: StartFrom,
    ) -> Result<Starts> {
        let mut starts = Starts::new();
        let last = match from {
            StartFrom::Last => self.newest(topics, patterns).await?,
            _ => None,
        };
        let times = match from {
            StartFrom::Time(time) => Some(self.offsets_at(topics, time.minus(SKEW)).await?),
            _ => None,
        };
        let ends = self.ends(topics).await?;
        for topic in topics {
            let offsets = (0..topic.partitions).map(|partition| {
                let key = (topic.name.clone(), partition);
                let (first, end) = ends.get(&key).copied().unwrap_or_default();
                match (&times, &last) {
                    // Events that were removed before are not missing.
                    _ if matches!(from, StartFrom::First) => first,
                    (Some(times), _) => times.get(&key).copied().unwrap_or(0),
                    (None, Some((name, number, offset)))
                        if *name == topic.name && *number == partition =>
                    {
                        *offset
                    }
                    _ => end,
                }
            });
            let offsets: Vec<i64> = offsets.collect();
            if !matches!(from, StartFrom::First) || offsets.iter().any(|first| *first > 0) {
                starts.insert(topic.name.clone(), offsets);
            }
        }
        Ok(starts)
    }

    /// The position of a group.
    async fn position(
        self: &Arc<Self>,
        record: &Arc<Record>,
        topics: &[Arc<Topic>],
    ) -> Result<Cursor> {
        let mut cursor = Cursor::START;
        for (shard, state) in self.states(record, topics).await? {
            cursor.advance(Position::new(shard, state.reached));
        }
        Ok(cursor)
    }

    pub(crate) async fn retract(&self, id: EventId) -> Result<()> {
        self.registry.sync(&self.link).await?;
        for record in self.registry.groups() {
            let mut names = record.subscriptions.keys();
            let Some(name) = names.find(|name| subscription_id(&record.name, name) == id) else {
                continue;
            };
            let key = Key::Subscription(record.name.as_str().to_owned(), name.clone());
            let mut facts = vec![(key, None)];
            // Removes the starts of topics that no other subscription reaches. If a new subscription reaches them
            // later, it writes new starts.
            let others = record
                .subscriptions
                .iter()
                .filter(|(other, _)| *other != name);
            let others: Vec<Pattern> = others
                .filter_map(|(_, other)| Pattern::new(&other.pattern).ok())
                .collect();
            for (topic, note) in self.registry.topics() {
                if note.is_reached(&record.patterns) && !note.is_reached(&others) {
                    let starts = self.registry.starts_of(&record.name, &topic);
                    facts.extend(starts.into_iter().map(|key| (key, None)));
                }
            }
            return self.registry.write(&self.link, facts).await;
        }
        let what = format!("there is no subscription {id}");
        Err(Error::new(Code::SubscriptionNotFound, what))
    }

    pub(crate) async fn remove_group(&self, name: &GroupName) -> Result<()> {
        self.registry.sync(&self.link).await?;
        if self.registry.group(name).is_none() {
            return Err(no_group(name));
        }
        self.remove_parts(name).await
    }

    /// Removes the facts of a group first, so that members in all processes leave; then its committed offsets. If the
    /// offsets stay, they do no harm: a group that is created again does not use the offsets of the older group.
    pub(crate) async fn remove_parts(&self, name: &GroupName) -> Result<()> {
        let facts = self
            .registry
            .keys_of(name)
            .into_iter()
            .map(|key| (key, None));
        self.registry.write(&self.link, facts.collect()).await?;
        self.part(name).await;
        let group = self.space.group(name);
        let options = AdminOptions::new().request_timeout(Some(self.link.timeout));
        let begin = Instant::now();
        loop {
            let answers = self.link.admin().delete_groups(&[&group], &options).await;
            let answer = answers.ok().and_then(|answers| answers.into_iter().next());
            match answer {
                Some(Err((_, Kind::NonEmptyGroup))) if begin.elapsed() < Duration::from_secs(3) => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                Some(Err((_, kind))) if kind != Kind::GroupIdNotFound => {
                    tracing::debug!(target: "everbus::kafka", group, %kind, "offsets of a removed group stay");
                    return Ok(());
                }
                _ => return Ok(()),
            }
        }
    }

    /// Whether the engine that owns an ephemeral group is alive: the group has a member. A group that was just
    /// created counts as alive.
    pub(crate) async fn is_alive(&self, record: &Record) -> bool {
        let Some(owner) = &record.owner else {
            return true;
        };
        let age = self.options.clock.now().since(record.created_at);
        if *owner == self.owner || age < self.options.session {
            return true;
        }
        let (producer, timeout) = (self.link.producer(), self.link.timeout);
        let group = self.space.group(&record.name);
        let asked = blocking(move || {
            let list = producer
                .client()
                .fetch_group_list(Some(&group), timeout)
                .ok()?;
            let known = list.groups().iter().find(|known| known.name() == group);
            Some(known.is_some_and(|known| !known.members().is_empty()))
        });
        // Without an answer, the engine counts as alive.
        asked.await.ok().flatten().unwrap_or(true)
    }

    /// Removes the ephemeral groups of this engine.
    pub(crate) async fn remove_own_groups(&self) {
        for record in self.registry.groups() {
            if record.owner.as_ref() == Some(&self.owner)
                && let Err(error) = self.remove_parts(&record.name).await
            {
                tracing::debug!(target: "everbus::kafka", group = %record.name, %error, "an ephemeral group stays until another engine finds it dead");
            }
        }
    }
}

/// The cursor before the first event of the group in every partition.
fn cursor(topics: &[Arc<Topic>], starts: &Starts) -> Cursor {
    let mut cursor = Cursor::START;
    for topic in topics {
        let offsets = starts.get(&topic.name).into_iter().flatten();
        for (partition, offset) in (0..).zip(offsets) {
            cursor.advance(Position::new(topic.shard(partition), place(*offset)));
        }
    }
    cursor
}

fn declared(record: &Record, spec: &GroupSpec) -> Result<Vec<SubscriptionInfo>> {
    let all = record.infos()?;
    let mut infos = Vec::with_capacity(all.len());
    for wanted in &spec.subscriptions {
        infos.extend(all.iter().find(|info| info.name == wanted.name).cloned());
    }
    let is_other = |info: &&SubscriptionInfo| infos.iter().all(|known| known.name != info.name);
    let others: Vec<_> = all.iter().filter(is_other).cloned().collect();
    infos.extend(others);
    Ok(infos)
}
