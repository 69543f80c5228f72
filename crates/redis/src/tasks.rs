//! The background tasks: the wake-up, the heartbeat, and the upkeep of groups and streams.
//!
//! Events are claimed by a script, because a blocking `XREADGROUP` still takes events after its client has given up. So
//! a blocking `XREAD`, on a connection of its own, only shows that there is something to claim.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use everbus_core::Result;
use redis::aio::MultiplexedConnection;

use crate::broker::Shared;
use crate::client::{Arguments, Read as _};
use crate::errors;
use crate::keys::{self, EntryId};
use crate::registry::Registry;
use crate::scripts::{ALIVE, ENDS, SWEEP};

/// How long a read blocks.
const BLOCK: Duration = Duration::from_secs(2);
/// The first pause after a failed read. The longest pause is [`BLOCK`].
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// After more claimed events than this, the last ids of the streams are read again before the next blocking read.
const FEW: u64 = 8;
/// An engine counts as alive while its key exists. The key lives for `ALIVE_FOR`, and is renewed every `BEAT`.
const ALIVE_FOR: Duration = Duration::from_secs(15);
const BEAT: Duration = Duration::from_secs(4);
/// How often the engine looks for dead engines and trims streams.
const UPKEEP: Duration = Duration::from_secs(10);
/// How often old records are removed.
const TIDY: Duration = Duration::from_secs(600);

impl Shared {
    /// Starts the tasks, once.
    pub(crate) fn start_tasks(self: &Arc<Self>) {
        if std::mem::replace(&mut *self.tasks.lock(), true) {
            return;
        }
        tokio::spawn(wake(Arc::downgrade(self)));
        tokio::spawn(beat(Arc::downgrade(self)));
        tokio::spawn(upkeep(Arc::downgrade(self)));
    }

    /// Renews the heartbeat key, which shows other engines that this one is alive.
    pub(crate) async fn be_alive(&self) -> Result<()> {
        let mut arguments = Arguments::default();
        arguments.text(&self.owner).millis(ALIVE_FOR);
        self.link.run(&ALIVE, &arguments).await.map(drop)
    }

    pub(crate) async fn is_alive(&self, owner: &str) -> Result<bool> {
        let mut exists = redis::cmd("EXISTS");
        exists.arg(self.space.own(&format!("owner:{owner}")));
        Ok(owner == self.owner || self.link.ask(&exists).await?.number()? == 1)
    }

    /// Removes the ephemeral groups of this engine, and its heartbeat key.
    pub(crate) async fn leave(&self) {
        let own: Vec<String> = {
            let groups = self.groups.lock();
            let own = groups.values().map(|group| group.record());
            let own = own.filter(|record| record.owner.as_ref() == Some(&self.owner));
            own.map(|record| record.name.clone()).collect()
        };
        for name in own {
            if let Err(error) = self.remove(&name, None).await {
                tracing::debug!(target: "everbus::redis", group = name, %error, "an ephemeral group could not be removed: another process removes it when the heartbeat of this engine has ended");
            }
        }
        if *self.tasks.lock() {
            let mut gone = redis::cmd("DEL");
            gone.arg(self.space.own(&format!("owner:{}", self.owner)));
            let _ = self.link.ask(&gone).await;
        }
    }

    /// Removes the ephemeral groups of engines that are gone.
    ///
    /// After the server was down for a while, the keys of all engines have expired. So an engine must be missing twice
    /// in a row.
    async fn remove_orphans(&self, missing: &mut HashSet<String>) -> Result<()> {
        let before = std::mem::take(missing);
        for (record, revision) in self.load_groups().await? {
            let Some(owner) = &record.owner else {
                continue;
            };
            if self.is_alive(owner).await? {
                continue;
            }
            missing.insert(owner.clone());
            if before.contains(owner) {
                self.remove(&record.name, Some(&revision)).await?;
            }
        }
        Ok(())
    }

    /// Takes over messages that other programs read for the groups of this process and did not finish.
    pub(crate) async fn sweep(&self) -> Result<()> {
        let groups: Vec<_> = self.groups.lock().values().cloned().collect();
        let registry = self.registry();
        for group in groups {
            if group
                .consumers
                .lock()
                .iter()
                .all(|consumer| consumer.strong_count() == 0)
            {
                continue;
            }
            let known = group.known();
            for key in registry.streams.keys() {
                if !self.space.wanted(key, &known.patterns) {
                    continue;
                }
                let mut from = "-".to_owned();
                while !from.is_empty() {
                    let mut arguments = Arguments::default();
                    arguments
                        .text(group.name.as_str())
                        .text(keys::group_name(group.name.as_str()))
                        .text(key)
                        .millis(self.options.stale_after)
                        .text(&from)
                        .number(self.options.stale_count.max(1))
                        .text(if known.record.ordered { "1" } else { "0" });
                    let mut answer = self.link.run(&SWEEP, &arguments).await?.list()?.into_iter();
                    let mut part = || answer.next().unwrap_or(redis::Value::Nil).text();
                    let taken = part()?;
                    if taken != "0" {
                        tracing::info!(target: "everbus::redis", group = %group.name, stream = %key, taken, "took over messages that another program had read and not finished");
                    }
                    from = part()?;
                }
            }
        }
        Ok(())
    }
}

/// Wakes consumers that wait, as long as there are any.
async fn wake(shared: Weak<Shared>) {
    let Some(mut waiting) = shared.upgrade().map(|shared| shared.waiting.subscribe()) else {
        return;
    };
    let mut connection: Option<MultiplexedConnection> = None;
    let mut seen = Seen::default();
    let mut pause = FIRST_PAUSE;
    loop {
        if waiting.wait_for(|waiting| *waiting > 0).await.is_err() {
            return;
        }
        let Some(strong) = shared.upgrade() else {
            return;
        };
        if strong.link.check_open().is_err() {
            return;
        }
        let watched = watch(&strong, &mut connection, &mut seen).await;
        let (own, command) = match watched {
            Ok(watched) => watched,
            Err(error) => {
                tracing::debug!(target: "everbus::redis", %error, "waiting for events");
                (connection, seen.watched) = (None, None);
                drop(strong);
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(BLOCK);
                continue;
            }
        };
        // No strong reference while the read blocks, so that a dropped engine ends.
        drop(strong);
        let mut own = own;
        let answer = own.send_packed_command(&command).await;
        match answer.and_then(redis::Value::extract_error) {
            Ok(answer) => {
                pause = FIRST_PAUSE;
                let Some(strong) = shared.upgrade() else {
                    return;
                };
                answered(&strong, &mut seen, streams_of(answer)).await;
            }
            Err(error) => {
                tracing::debug!(target: "everbus::redis", %error, "waiting for events");
                seen.watched = None;
                // The server refuses the whole read if one key is not a stream.
                seen.check_types = error.code() == Some("WRONGTYPE");
                if !seen.check_types {
                    connection = None;
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(BLOCK);
            }
        }
    }
}

/// What earlier reads of the wake-up have shown.
#[derive(Default)]
struct Seen {
    /// What the next read waits for. `None` if the server must be asked first.
    watched: Option<Watched>,
    /// The streams whose last ids must be read.
    answered: Vec<String>,
    /// The last ids of streams that have answered. The ids of a stream may be ahead of the clock of the server: a read
    /// that begins at the time of the server would then return at once, again and again.
    ends: HashMap<String, EntryId>,
    check_types: bool,
    /// Keys whose type is not stream.
    others: HashSet<String>,
}

/// The streams that are waited for.
struct Watched {
    registry: Arc<Registry>,
    /// Streams that have not answered are read after this id.
    common: EntryId,
    /// How many events this process had claimed when the last read answered.
    claimed: u64,
}

/// The streams of an answer to XREAD, with the first new entry of each.
fn streams_of(answer: redis::Value) -> Vec<(String, EntryId)> {
    let pairs: Vec<(redis::Value, redis::Value)> = match answer {
        redis::Value::Map(pairs) => pairs,
        redis::Value::Array(pairs) => {
            let pair = |pair: redis::Value| {
                let mut pair = pair.list().ok()?.into_iter();
                Some((pair.next()?, pair.next()?))
            };
            pairs.into_iter().filter_map(pair).collect()
        }
        _ => Vec::new(),
    };
    let first = |(key, entries): (redis::Value, redis::Value)| {
        let entry = entries.list().ok()?.into_iter().next()?;
        let id = entry.list().ok()?.into_iter().next()?.bytes().ok()?;
        Some((key.text().ok()?, EntryId::read(&id)?))
    };
    pairs.into_iter().filter_map(first).collect()
}

/// Wakes consumers at once, then reads the last ids of the streams that answered. If more entries came before that,
/// consumers are woken once more, because the next read begins after these ids.
async fn answered(shared: &Shared, seen: &mut Seen, streams: Vec<(String, EntryId)>) {
    let own_key = shared.space.own("wake");
    let events = !streams.is_empty() && streams.iter().all(|(key, _)| *key != own_key);
    let Some(watched) = seen.watched.as_mut().filter(|_| events) else {
        // The read timed out, or the key `wake` answered: a stream is new, or an event came back. The server must be
        // asked before the next read.
        seen.watched = None;
        seen.answered = streams.into_iter().map(|(key, _)| key).collect();
        return;
    };
    watched.claimed = shared.claimed.load(Ordering::Relaxed);
    shared.wakes.send_modify(|wakes| *wakes += 1);
    let (keys, firsts): (Vec<String>, Vec<EntryId>) = streams.into_iter().unzip();
    match shared.ends(&keys).await {
        Ok(ends) => {
            if ends.iter().zip(&firsts).any(|(end, first)| end != first) {
                shared.wakes.send_modify(|wakes| *wakes += 1);
            }
            seen.ends.extend(keys.into_iter().zip(ends));
        }
        Err(_) => {
            seen.watched = None;
            seen.answered = keys;
        }
    }
}

/// Reads the last ids of the streams that answered, and which keys are no streams.
async fn learn(shared: &Shared, registry: &Registry, seen: &mut Seen) -> Result<()> {
    if seen.check_types {
        seen.others.clear();
        for key in registry.streams.keys() {
            let mut kind = redis::cmd("TYPE");
            let kind = shared.link.ask(kind.arg(key)).await?.text()?;
            if kind != "stream" && kind != "none" {
                seen.others.insert(key.clone());
            }
        }
        seen.check_types = false;
    }
    if !seen.answered.is_empty() {
        let ends = shared.ends(&seen.answered).await?;
        let answered = std::mem::take(&mut seen.answered);
        seen.ends.extend(answered.into_iter().zip(ends));
    }
    Ok(())
}

/// The read that ends with the next event, and the connection for it.
async fn watch(
    shared: &Shared,
    connection: &mut Option<MultiplexedConnection>,
    seen: &mut Seen,
) -> Result<(MultiplexedConnection, redis::Cmd)> {
    let own = match connection {
        Some(own) => own.clone(),
        None => {
            let new = shared.link.own_connection(BLOCK).await?;
            connection.insert(new).clone()
        }
    };
    let claimed = shared.claimed.load(Ordering::Relaxed);
    // Events that were claimed since then would end the read at once, although there is nothing left to claim.
    let is_fresh = |watched: &Watched| claimed.wrapping_sub(watched.claimed) <= FEW;
    let watched = match seen.watched.take().filter(is_fresh) {
        Some(watched) => watched,
        None => look(shared, seen).await?,
    };
    let watched = seen.watched.insert(watched);
    let own_key = shared.space.own("wake");
    let keys = watched.registry.streams.keys().chain([&own_key]);
    let keys: Vec<&String> = keys.filter(|key| !seen.others.contains(*key)).collect();
    let mut read = redis::cmd("XREAD");
    let millis = u64::try_from(BLOCK.as_millis()).unwrap_or(u64::MAX);
    read.arg("COUNT")
        .arg(1)
        .arg("BLOCK")
        .arg(millis)
        .arg("STREAMS");
    for key in &keys {
        read.arg(key.as_str());
    }
    let common = watched.common;
    for key in &keys {
        let end = seen.ends.get(*key).copied();
        read.arg(end.unwrap_or(common).max(common).to_string());
    }
    Ok((own, read))
}

/// Reads an id that is smaller than all later ones, then wakes the consumers. Events that come after that end the read.
async fn look(shared: &Shared, seen: &mut Seen) -> Result<Watched> {
    let (registry, end) = loop {
        let registry = shared.registry();
        let mut answer = shared
            .link
            .run(&ENDS, &Arguments::default())
            .await?
            .list()?
            .into_iter();
        let mut part = || answer.next().unwrap_or(redis::Value::Nil).text();
        let (end, version) = (part()?, part()?);
        if version == registry.version {
            break (registry, end);
        }
        shared.load_registry().await?;
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    learn(shared, &registry, seen).await?;
    let common = EntryId::parse(&end).ok_or_else(|| errors::unreadable("an id"))?;
    let claimed = shared.claimed.load(Ordering::Relaxed);
    shared.wakes.send_modify(|wakes| *wakes += 1);
    Ok(Watched {
        registry,
        common,
        claimed,
    })
}

fn note(what: &str, done: Result<()>) {
    if let Err(error) = done {
        tracing::debug!(target: "everbus::redis", %error, what);
    }
}

/// Renews the heartbeat of the engine, and publishes the patterns that it handles.
async fn beat(shared: Weak<Shared>) {
    loop {
        tokio::time::sleep(BEAT).await;
        let Some(shared) = shared.upgrade() else {
            return;
        };
        if shared.link.check_open().is_err() {
            return;
        }
        note("the heartbeat", shared.be_alive().await);
        note("the handlers", shared.tell_handlers().await);
    }
}

/// Keeps groups and streams in order.
async fn upkeep(shared: Weak<Shared>) {
    let mut missing = HashSet::new();
    let (mut upkept, mut swept, mut tidied) = (Instant::now(), Instant::now(), Instant::now());
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let Some(shared) = shared.upgrade() else {
            return;
        };
        if shared.link.check_open().is_err() {
            return;
        }
        if upkept.elapsed() >= UPKEEP {
            upkept = Instant::now();
            note(
                "ephemeral groups",
                shared.remove_orphans(&mut missing).await,
            );
            note("trimming streams", shared.trim_all().await);
        }
        if tidied.elapsed() >= TIDY {
            tidied = Instant::now();
            note("old records", shared.tidy().await);
        }
        let often = (shared.options.stale_after / 10).clamp(BEAT, Duration::from_secs(30));
        if swept.elapsed() >= often {
            swept = Instant::now();
            note("taking over messages", shared.sweep().await);
        }
    }
}
