//! The consumer: it claims as many events as a fetch wants, and hands them out.
//!
//! A claim runs in a task of its own, so that a dropped fetch loses nothing: the claimed events stay in the `Desk` for
//! the next fetch. If no fetch comes, they are released without counting an attempt.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use everbus_core::{
    BoxFuture, Code, ConsumeOptions, Consumer, Delivery, Error, Failure, FailureKind, Lease,
    Pattern, Recorded, Result, Window, no_group,
};
use parking_lot::Mutex;
use redis::Value;
use tokio::sync::{Notify, watch};

use crate::broker::Shared;
use crate::client::{Arguments, Read};
use crate::errors;
use crate::groups::Group;
use crate::held::Hold;
use crate::keys::EntryId;
use crate::registry::Registry;
use crate::scripts::CLAIM;
use crate::wire::{self, Around, Source};

/// The largest number of events in one claim. The server does nothing else while it runs the script of a claim.
const MOST: usize = 512;
/// How often an idle consumer tries a claim, because another process may have released events.
const LOOK: Duration = Duration::from_secs(1);
/// The pause after a failed claim.
const AFTER_ERROR: Duration = Duration::from_millis(200);
/// How long this process leaves an event that it has no handler for to other processes.
const LEFT: Duration = Duration::from_secs(5);

/// An event under a lease that no fetch has taken yet.
pub(crate) struct Item {
    key: Arc<str>,
    member: Arc<str>,
    proof: Arc<str>,
    record: Arc<Recorded>,
    attempt: u32,
    failures: Vec<Failure>,
    again: bool,
    came: Instant,
}

/// What a consumer and its claims share.
pub(crate) struct Inner {
    pub(crate) shared: Arc<Shared>,
    pub(crate) group: Arc<Group>,
    pub(crate) number: u64,
    pub(crate) lease: Duration,
    pub(crate) no_handler_after: Duration,
    merged: bool,
    desk: Mutex<Desk>,
    changed: Notify,
}

struct Desk {
    ready: VecDeque<Item>,
    error: Option<Error>,
    prefetch: usize,
    handled: Arc<[Pattern]>,
    ended: bool,
    claiming: bool,
    /// How many events may be in flight. Every delivered event counts, because its handler may have begun.
    window: Window,
    settled: usize,
    /// How long the last claim took.
    step: Duration,
    /// The most events that the next claim may ask for. It falls after claims that got no answer.
    most: usize,
    /// The tags of claims whose answers were lost.
    undo: Vec<String>,
    claims: u64,
    /// When to claim again.
    look: Instant,
    /// The stream that the next claim begins with.
    first: usize,
    /// When to search for events without a handler.
    orphans: Instant,
}

impl Desk {
    /// Reports to the window how many events were settled since the last report.
    fn widen(&mut self) {
        if self.settled > 0 {
            let (settled, step) = (std::mem::take(&mut self.settled), self.step);
            self.window.settled(settled, Instant::now(), step);
        }
    }
}

/// The answer to a claim.
struct Claimed {
    events: Vec<Value>,
    tag: String,
    registry: Arc<Registry>,
    handled: Arc<[Pattern]>,
    came: Instant,
}

pub(crate) struct RedisConsumer {
    inner: Arc<Inner>,
    wakes: watch::Receiver<u64>,
}

impl RedisConsumer {
    pub(crate) fn start(shared: Arc<Shared>, group: Arc<Group>, options: ConsumeOptions) -> Self {
        let desk = Desk {
            ready: VecDeque::new(),
            error: None,
            prefetch: options.prefetch,
            handled: options.handled.into(),
            ended: false,
            claiming: false,
            window: Window::new(options.concurrency),
            settled: 0,
            step: Duration::from_millis(1),
            most: MOST,
            undo: Vec::new(),
            claims: 0,
            look: Instant::now(),
            first: 0,
            orphans: Instant::now(),
        };
        let inner = Arc::new(Inner {
            number: shared.number(),
            lease: options.lease,
            no_handler_after: options.no_handler_after,
            merged: options.merged,
            desk: Mutex::new(desk),
            changed: Notify::new(),
            group,
            shared,
        });
        inner.group.consumers.lock().push(Arc::downgrade(&inner));
        let wakes = inner.shared.wakes.subscribe();
        Self { inner, wakes }
    }
}

impl Inner {
    /// Notes that deliveries were settled, and wakes the fetch, because there may be room for new events.
    pub(crate) fn settled(&self, count: usize) {
        self.desk.lock().settled += count;
        self.changed.notify_waiters();
    }

    /// Makes the next claim happen after this time at the latest.
    pub(crate) fn look_after(&self, after: Duration) {
        {
            let mut desk = self.desk.lock();
            desk.look = desk.look.min(Instant::now() + after);
        }
        self.changed.notify_waiters();
    }

    /// The patterns that the consumer has handlers for; `None` once it has ended.
    pub(crate) fn handled(&self) -> Option<Arc<[Pattern]>> {
        let desk = self.desk.lock();
        (!desk.ended).then(|| desk.handled.clone())
    }

    fn is_time_for_orphans(&self) -> bool {
        let mut desk = self.desk.lock();
        let is_time = desk.orphans <= Instant::now();
        if is_time {
            desk.orphans = Instant::now() + LOOK / 2;
        }
        is_time
    }

    fn change<T>(&self, change: impl FnOnce(&mut Desk) -> T) -> T {
        let changed = change(&mut self.desk.lock());
        self.changed.notify_waiters();
        changed
    }

    /// Takes events that are ready. Events that waited too long are released instead.
    fn take(self: &Arc<Self>, max: usize) -> Result<Vec<Delivery>> {
        let mut desk = self.desk.lock();
        if let Some(error) = &desk.error {
            let error = error.clone();
            // A group that was removed stays removed, so its error stays too.
            if error.code() != Code::GroupNotFound {
                desk.error = None;
            }
            return Err(error);
        }
        if desk.prefetch == 0 {
            return Ok(Vec::new());
        }
        let old = |item: &Item| item.came.elapsed() > self.lease / 2;
        let mut stale = Vec::new();
        while desk.ready.front().is_some_and(old) {
            stale.extend(desk.ready.pop_front());
        }
        let count = desk.ready.len().min(max);
        // Under the lock, so that a claim that ends meanwhile counts them as held.
        let taken = desk.ready.drain(..count);
        let taken = taken.map(|item| self.deliver(item)).collect();
        drop(desk);
        self.give_back(stale);
        Ok(taken)
    }

    /// Begins a claim if one is due and there is room. Returns when to try again.
    fn claim(self: &Arc<Self>, max: usize) -> Option<Instant> {
        let mut desk = self.desk.lock();
        if desk.claiming || desk.prefetch == 0 || desk.ended || !desk.ready.is_empty() {
            return None;
        }
        desk.widen();
        let (room, next) = self.room(&desk, 0);
        let want = room.min(max).min(desk.most);
        if want == 0 {
            return next;
        }
        if desk.look > Instant::now() {
            return Some(desk.look);
        }
        desk.claiming = true;
        desk.look = Instant::now() + LOOK;
        drop(desk);
        self.shared.link.join();
        let inner = self.clone();
        tokio::spawn(async move {
            let mut asked = Some((want, inner.clone().ask(want).await));
            while let Some((want, answer)) = asked.take() {
                let more = answer.as_ref().ok().and_then(|a| inner.more(a, want, max));
                // The server works on the next claim while this one is read.
                let ahead = more.map(|more| (more, tokio::spawn(inner.clone().ask(more))));
                let items = match answer {
                    Ok(answer) => inner.read(answer).await,
                    Err(error) => Err(error),
                };
                inner.put(items, want, ahead.is_none()).await;
                if let Some((want, ahead)) = ahead {
                    let panicked = |_| Err(Error::new(Code::Internal, "a claim has panicked"));
                    asked = Some((want, ahead.await.unwrap_or_else(panicked)));
                }
            }
            inner.shared.link.part();
            inner.expire_later();
        });
        None
    }

    /// How many events to claim in advance, after a claim that returned all it asked for. `None` if there is room for
    /// fewer than that claim asked for: then the next fetch claims them.
    fn more(&self, answer: &Claimed, want: usize, max: usize) -> Option<usize> {
        if answer.events.len() < want {
            return None;
        }
        let mut desk = self.desk.lock();
        if desk.ended || desk.prefetch == 0 {
            return None;
        }
        desk.widen();
        let (room, _) = self.room(&desk, answer.events.len());
        let more = room.min(max).min(desk.most);
        (more >= want).then_some(more)
    }

    /// Stores claimed events for the next fetch. `last`: no other claim is running.
    async fn put(self: &Arc<Self>, claimed: Result<Vec<Item>>, want: usize, last: bool) {
        let ended = {
            let mut desk = self.desk.lock();
            desk.claiming = !last;
            match claimed {
                Ok(items) => {
                    desk.most = (desk.most * 2).min(MOST);
                    desk.ready.extend(items);
                }
                Err(error) => {
                    if error.outcome_unknown() {
                        desk.most = (want / 2).max(1);
                    }
                    desk.look = Instant::now() + AFTER_ERROR;
                    desk.error = Some(error);
                }
            }
            let closed = self.shared.link.check_open().is_err();
            match desk.ended || desk.prefetch == 0 || closed {
                true => desk.ready.drain(..).collect(),
                false => Vec::new(),
            }
        };
        self.return_items(ended).await;
        self.changed.notify_waiters();
    }

    /// How many more events may be in flight beside those that are held, ready or `coming`; and if there are none, when
    /// the first lease ends.
    fn room(&self, desk: &Desk, coming: usize) -> (usize, Option<Instant>) {
        let most = desk.window.size().min(desk.prefetch);
        let (held, next) = self.shared.held.count(self.number, most);
        (most.saturating_sub(held + desk.ready.len() + coming), next)
    }

    /// Releases events that no fetch takes in time.
    fn expire_later(self: &Arc<Self>) {
        if self.desk.lock().ready.is_empty() {
            return;
        }
        let inner = Arc::downgrade(self);
        let after = self.lease / 2;
        tokio::spawn(async move {
            tokio::time::sleep(after).await;
            if let Some(inner) = inner.upgrade() {
                let old = |item: &Item| item.came.elapsed() >= after;
                let stale = {
                    let mut desk = inner.desk.lock();
                    let all: Vec<Item> = desk.ready.drain(..).collect();
                    let (old, fresh): (Vec<Item>, Vec<Item>) = all.into_iter().partition(old);
                    desk.ready = fresh.into();
                    old
                };
                inner.return_items(stale).await;
            }
        });
    }

    /// Claims events.
    async fn ask(self: Arc<Self>, want: usize) -> Result<Claimed> {
        for _ in 0..20 {
            let registry = self.shared.registry();
            let known = self.group.known();
            let (tag, undo, handled, turn) = {
                let mut desk = self.desk.lock();
                desk.claims += 1;
                desk.first = desk.first.wrapping_add(1);
                let tag = format!("{}.{}.{}", self.shared.owner, self.number, desk.claims);
                (tag, desk.undo.clone(), desk.handled.clone(), desk.first)
            };
            let space = &self.shared.space;
            let mut due: Vec<&String> = registry.streams.keys().collect();
            due.retain(|key| space.wanted(key, &handled));
            let mut new = due.clone();
            new.retain(|key| space.wanted(key, &known.patterns));
            // The streams take turns at being the first, so that each of them gets its share.
            for keys in [&mut due, &mut new] {
                let middle = turn.checked_rem(keys.len()).unwrap_or(0);
                keys.rotate_left(middle);
            }
            let mut arguments = Arguments::default();
            arguments
                .text(self.group.name.as_str())
                .text(self.group.on_server())
                .text(&known.revision)
                .text(&registry.version)
                .text(&tag)
                .list(&undo)
                .number(want)
                .millis(self.lease)
                .number(self.shared.options.clock.now())
                .text(match (known.record.ordered, self.merged) {
                    (true, _) => "ordered",
                    (false, true) => "merged",
                    (false, false) => "",
                })
                .list(&due)
                .list(&new);
            let came = Instant::now();
            let answer = match self.shared.link.run(&CLAIM, &arguments).await {
                Ok(answer) => answer,
                Err(error) => {
                    if error.outcome_unknown() {
                        self.desk.lock().undo.push(tag);
                    }
                    return Err(error);
                }
            };
            let mut parts = answer.list()?.into_iter();
            let mut part = || parts.next().unwrap_or(Value::Nil);
            match part().text()?.as_str() {
                "ok" => {}
                "gone" => return Err(no_group(&self.group.name)),
                _ => {
                    // Another process changed the group, or there is a new stream.
                    self.shared.load_registry().await?;
                    if self.shared.reload(&self.group).await?.is_none() {
                        return Err(no_group(&self.group.name));
                    }
                    continue;
                }
            }
            let (events, lost, failed) = (part().list()?, part().list()?, part().list()?);
            let wait = part().text()?;
            let shared = &self.shared;
            shared
                .claimed
                .fetch_add(events.len() as u64, Ordering::Relaxed);
            {
                let mut desk = self.desk.lock();
                desk.step = came.elapsed();
                desk.undo.retain(|tag| !undo.contains(tag));
                let wait = wait.parse().map_or(LOOK, Duration::from_millis).min(LOOK);
                // Events that come before that wake the consumer.
                desk.look = desk.look.min(Instant::now() + wait);
            }
            for member in lost {
                let (group, event) = (&self.group.name, member.text()?);
                tracing::error!(target: "everbus::redis", %group, %event, "an event that the group had yet to finish was deleted from its stream: it is lost to the group");
            }
            for error in failed {
                let (group, error) = (&self.group.name, error.text()?);
                tracing::error!(target: "everbus::redis", %group, %error, "a stream cannot be read");
            }
            return Ok(Claimed {
                events,
                tag,
                registry,
                handled,
                came,
            });
        }
        Err(Error::new(
            Code::Busy,
            "other processes keep changing the group",
        ))
    }

    /// Reads claimed events, and sorts out those that are not for this process.
    async fn read(self: &Arc<Self>, claimed: Claimed) -> Result<Vec<Item>> {
        let Claimed {
            events,
            tag,
            registry,
            handled,
            came,
        } = claimed;
        if events.is_empty() && self.is_time_for_orphans() {
            let patterns = self.group.known().patterns.clone();
            self.bury_orphans(&registry, &patterns, &handled, &tag)
                .await?;
        }
        self.sort(events, &registry, &handled, &tag, came).await
    }

    async fn sort(
        &self,
        claimed: Vec<Value>,
        registry: &Registry,
        handled: &[Pattern],
        tag: &str,
        came: Instant,
    ) -> Result<Vec<Item>> {
        let mut items = Vec::with_capacity(claimed.len());
        let (mut passed, mut left) = (Vec::new(), Vec::new());
        let (known, mut source) = (self.group.known(), None);
        for value in claimed {
            let (item, times) = self.item(value, registry, &mut source, tag, came)?;
            let event = &item.record.event;
            let event_type = event.event_type();
            let early = |since| item.record.received_at < since;
            let unwanted = || {
                let mut patterns = known.patterns.iter();
                !patterns.any(|pattern| pattern.matches(event_type))
            };
            let handles = handled.iter().any(|pattern| pattern.matches(event_type));
            let first = times == 1 && item.failures.is_empty() && !item.again;
            // An event that was handed out before stays owed, even if its subscription was removed since.
            let passes = !event.is_for(&self.group.name)
                || known.record.since.is_some_and(early)
                || (first || !handles) && !item.again && unwanted();
            if passes {
                passed.push((item.member, item.proof));
            } else if !handles {
                left.push((item.member, item.proof));
            } else {
                items.push(item);
            }
        }
        // The oldest event first: ids grow across all streams.
        items.sort_by_key(|item| item.record.position.place());
        let done = passed
            .into_iter()
            .map(|(member, proof)| (member, proof, None));
        let later = left
            .into_iter()
            .map(|(member, proof)| (member, proof, Some(LEFT)));
        let aside: Vec<_> = done.chain(later).collect();
        if !aside.is_empty() {
            if items.is_empty() {
                self.desk.lock().look = Instant::now();
            }
            // If this fails, the events come again when their leases end.
            if let Err(error) = self.shared.put_aside(&self.group, &aside).await {
                tracing::debug!(target: "everbus::redis", group = %self.group.name, %error, "events that this process does not handle could not be released");
            }
        }
        Ok(items)
    }

    /// Reads an event from the answer to a claim. `last` has the stream of the event before, which is often the same.
    pub(crate) fn item(
        &self,
        value: Value,
        registry: &Registry,
        last: &mut Option<Source>,
        tag: &str,
        came: Instant,
    ) -> Result<(Item, u32)> {
        let mut parts = value.list()?.into_iter();
        let mut part = || parts.next().unwrap_or(Value::Nil);
        let (key, id) = (part().bytes()?, part().bytes()?);
        let (token, times) = (part().bytes()?, part().number()?);
        let times = u32::try_from(times).unwrap_or(u32::MAX);
        let failures = part().bytes()?;
        let fields = part().list()?.into_iter().map(Read::bytes);
        let fields: Vec<Bytes> = fields.collect::<Result<_>>()?;
        let again = &part().bytes()?[..] == b"1";
        let unreadable = || errors::unreadable("the id of an entry");
        let entry = EntryId::read(&id).ok_or_else(unreadable)?;
        let token = std::str::from_utf8(&token).map_err(|_| unreadable())?;
        let space = &self.shared.space;
        let source = match last {
            Some(source) if source.key.as_bytes() == &key[..] => source,
            last => {
                let key = String::from_utf8_lossy(&key);
                last.insert(Source::new(space, &key, registry.dialect(&key))?)
            }
        };
        let around = Around {
            space,
            source,
            id: entry,
        };
        let read = wire::read(around, &fields);
        let attempt = times.saturating_add(read.retries);
        let mut failures: Vec<Failure> = match failures.is_empty() {
            true => Vec::new(),
            false => {
                let list = [b"[", &failures[..], b"]"].concat();
                serde_json::from_slice(&list).unwrap_or_default()
            }
        };
        if let Some(why) = read.foreign.filter(|_| !self.shared.options.raw_foreign) {
            let now = self.shared.options.clock.now();
            failures.push(Failure::new(attempt, now, FailureKind::Corrupt, why));
        }
        let item = Item {
            member: format!("{entry}@{}", source.key).into(),
            key: source.key.clone(),
            proof: format!("{token}|{tag}").into(),
            record: Arc::new(Recorded::new(
                read.event,
                entry.position(source.shard),
                read.received_at,
            )),
            attempt,
            failures,
            again,
            came,
        };
        Ok((item, times))
    }

    /// Releases events in the background, without counting an attempt.
    fn give_back(self: &Arc<Self>, items: Vec<Item>) {
        if items.is_empty() {
            return;
        }
        let inner = self.clone();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            inner.shared.link.join();
            runtime.spawn(async move {
                inner.return_items(items).await;
                inner.shared.link.part();
            });
        }
    }

    async fn return_items(&self, items: Vec<Item>) {
        if items.is_empty() {
            return;
        }
        let items: Vec<_> = items
            .into_iter()
            .map(|item| (item.member, item.proof, Some(Duration::ZERO)))
            .collect();
        if let Err(error) = self.shared.put_aside(&self.group, &items).await {
            tracing::debug!(target: "everbus::redis", group = %self.group.name, %error, "claimed events could not be released");
        }
        self.group.poke(Duration::ZERO);
    }

    pub(crate) fn deliver(self: &Arc<Self>, item: Item) -> Delivery {
        // A number of this process, not the token of the server: a server that lost writes may issue the same token
        // twice.
        let number = self.shared.number();
        let words = [self.group.number, number];
        let lease = Lease::new(item.record.position, words).with_text(item.member.clone());
        let until = item.came + self.lease;
        let hold = Hold {
            group: self.group.clone(),
            consumer: Arc::downgrade(self),
            number: self.number,
            key: item.key,
            member: item.member,
            proof: item.proof,
            record: item.record.clone(),
            attempt: item.attempt,
            failures: item.failures.clone(),
            again: item.again,
        };
        self.shared.held.hold(number, hold, until);
        Delivery::new(item.record, lease)
            .after(item.attempt, item.failures)
            .retried(item.again)
            .held_for(item.came.elapsed())
    }
}

impl Consumer for RedisConsumer {
    fn fetch(&mut self, max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        Box::pin(async move {
            let (inner, max) = (self.inner.clone(), max.max(1));
            let shared = inner.shared.clone();
            loop {
                let mut changed = pin!(inner.changed.notified());
                changed.as_mut().enable();
                let mut closing = pin!(shared.link.closing.notified());
                closing.as_mut().enable();
                shared.link.check_open()?;
                let taken = inner.take(max)?;
                if !taken.is_empty() {
                    return Ok(taken);
                }
                let until = inner.claim(max);
                let far = Instant::now() + Duration::from_secs(3600);
                // Only consumers that wait for events need to be woken.
                let _idle = until.map(|_| shared.idle());
                tokio::select! {
                    () = changed => {}
                    () = closing => {}
                    woken = self.wakes.changed(), if until.is_some() => {
                        if woken.is_ok() {
                            inner.look_after(Duration::ZERO);
                        }
                    }
                    () = tokio::time::sleep_until(until.unwrap_or(far).into()) => {}
                }
            }
        })
    }

    fn set_handled(&mut self, handled: Vec<Pattern>) {
        self.inner.change(|desk| {
            desk.handled = handled.into();
            desk.look = Instant::now();
        });
    }

    fn pause(&mut self) -> BoxFuture<'_, Result<()>> {
        self.resume(0)
    }

    fn resume(&mut self, prefetch: usize) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let items = self.inner.change(|desk| {
                desk.prefetch = prefetch;
                desk.look = Instant::now();
                match prefetch {
                    0 => desk.ready.drain(..).collect(),
                    _ => Vec::new(),
                }
            });
            self.inner.return_items(items).await;
            Ok(())
        })
    }

    fn close(self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        let inner = self.inner.clone();
        let items = inner.change(|desk| {
            desk.ended = true;
            desk.ready.drain(..).collect()
        });
        drop(self);
        Box::pin(async move {
            inner.return_items(items).await;
            let ended = async {
                loop {
                    let mut changed = pin!(inner.changed.notified());
                    changed.as_mut().enable();
                    if !inner.desk.lock().claiming {
                        return;
                    }
                    changed.await;
                }
            };
            // Events that could not be released come again when their leases end.
            let _ = tokio::time::timeout(Duration::from_secs(5), ended).await;
            Ok(())
        })
    }
}

impl Drop for RedisConsumer {
    fn drop(&mut self) {
        let items = self.inner.change(|desk| {
            desk.ended = true;
            desk.ready.drain(..).collect()
        });
        self.inner.give_back(items);
    }
}
