//! The task behind a consumer: it reads messages, drops messages for other groups, and puts the rest
//! on the consumer's desk.
//!
//! It asks the server for no more than the last `fetch` wanted, because the server counts every message that it
//! sends as a delivery. A message that no fetch takes from the desk is given back before its lease ends.

use std::collections::VecDeque;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use async_nats::Message;
use everbus_core::{Code, Error, Pattern, Position, Recorded, Result, Shard, Timestamp, no_group};
use futures_util::Stream as _;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::broker::Shared;
use crate::groups::Group;
use crate::source::{Source, Status, place};
use crate::streams::StreamHandle;
use crate::wire::{self, Around};

/// The most messages that are sorted in one turn.
const TURN: usize = 256;
/// The first and the longest time for which an event without a handler here is left to other processes. The server
/// counts a delivery each time: within a day the count stays below that of a poison event.
const LEFT_FIRST: Duration = Duration::from_secs(1);
const LEFT_LONGEST: Duration = Duration::from_secs(3600);
/// How often a reader looks at its group: while it has no stream to read, and later.
const LOOK_FIRST: Duration = Duration::from_millis(300);
const LOOK: Duration = Duration::from_secs(15);
/// How often a process that takes over an ordered group asks for one message more than it has room for.
const EXTRA: Duration = Duration::from_millis(500);
/// How often a process that takes over an ordered group asks whether it may begin.
const TRY_OPEN: Duration = Duration::from_millis(100);

/// A message for the group, under its lease.
pub(crate) struct Item {
    pub(crate) stream: Arc<StreamHandle>,
    pub(crate) record: Arc<Recorded>,
    pub(crate) reply: Arc<str>,
    /// How often the server has sent it.
    pub(crate) delivered: u64,
    pub(crate) came: Instant,
    /// When the server received it.
    pub(crate) stored_at: Timestamp,
    pub(crate) lease: Duration,
    /// Why the message is not of the stream's dialect, if it is not.
    pub(crate) foreign: Option<String>,
    /// No process has a handler for it.
    pub(crate) unhandled: bool,
}

impl Item {
    pub(crate) fn key(&self) -> Option<(Shard, String)> {
        let key = self.record.event.ordering_key()?;
        Some((self.record.position.shard(), key.into_owned()))
    }

    pub(crate) fn seq(&self) -> u64 {
        self.record.position.place()
    }

    /// When the message is given back if no fetch has taken it.
    fn stale_at(&self) -> Instant {
        self.came + self.lease / 2
    }

    pub(crate) fn place(&self) -> (String, u64) {
        (self.stream.short.clone(), self.seq())
    }
}

/// What consumer and reader share.
pub(crate) struct Desk {
    pub(crate) state: Mutex<DeskState>,
    pub(crate) to_reader: Notify,
    pub(crate) to_consumer: Notify,
    /// Notified when the reader has ended.
    pub(crate) done: Notify,
}

pub(crate) struct DeskState {
    pub(crate) ready: VecDeque<Item>,
    /// How many messages the last fetch wanted.
    pub(crate) want: usize,
    pub(crate) prefetch: usize,
    pub(crate) paused: bool,
    pub(crate) handled: Arc<[Pattern]>,
    pub(crate) error: Option<Error>,
    pub(crate) ended: bool,
    pub(crate) is_done: bool,
}

/// The reader of one consumer.
pub(crate) struct Reader {
    pub(crate) shared: Arc<Shared>,
    pub(crate) group: Arc<Group>,
    pub(crate) desk: Arc<Desk>,
    pub(crate) number: u64,
    pub(crate) lease: Duration,
    pub(crate) no_handler_after: Duration,
    pub(crate) hand_out_unhandled: Option<Duration>,
    pub(crate) sources: Vec<Source>,
    pub(crate) next: usize,
    /// When a shut stream may be asked for one message more than there is room for.
    pub(crate) extra: Instant,
}

/// Tells the consumer that its reader has ended, also if that was a panic: a fetch must not wait for ever.
struct Ending {
    shared: Arc<Shared>,
    desk: Arc<Desk>,
}

impl Drop for Ending {
    fn drop(&mut self) {
        {
            let mut state = self.desk.state.lock();
            state.is_done = true;
            if std::thread::panicking() {
                let what = "the reader of the group panicked";
                let error = Error::new(Code::Internal, what);
                state.error = Some(error.hint("this is a bug in Everbus; please report it"));
            }
        }
        self.desk.done.notify_waiters();
        self.desk.to_consumer.notify_waiters();
        self.shared.link.part();
    }
}

impl Reader {
    /// Reads until the consumer or the engine ends.
    pub(crate) async fn run(mut self) {
        let _ending = Ending {
            shared: self.shared.clone(),
            desk: self.desk.clone(),
        };
        self.group.keys.lock().join();
        let (shared, group, desk) = (self.shared.clone(), self.group.clone(), self.desk.clone());
        let mut version = group.version.subscribe();
        let mut turns = shared.link.turns.clone();
        let mut followed = false;
        let mut kept = Instant::now();
        let mut looked = Instant::now();
        loop {
            let mut changed = pin!(desk.to_reader.notified());
            changed.as_mut().enable();
            let mut freed = pin!(group.freed.notified());
            freed.as_mut().enable();
            let mut closing = pin!(shared.link.closing.notified());
            closing.as_mut().enable();
            let (ended, paused) = {
                let state = desk.state.lock();
                (state.ended, state.paused)
            };
            if ended || shared.link.check_open().is_err() {
                break;
            }
            if paused {
                self.stop_reading().await;
                followed = false;
                tokio::select! {
                    () = changed => {}
                    () = closing => {}
                }
                continue;
            }
            let again = looked
                + if self.sources.is_empty() {
                    LOOK_FIRST
                } else {
                    LOOK
                };
            if again <= Instant::now() {
                // Another process may have created a stream for the group, or removed the group.
                looked = Instant::now();
                match shared.look_again(&group).await {
                    // A stream that was removed may be there again.
                    Ok(Some(_)) => followed &= !shared.misses_streams(),
                    Ok(None) => self.report(no_group(&group.name)),
                    Err(error) => self.report(error),
                }
            }
            if !followed || version.has_changed().unwrap_or(false) {
                version.mark_unchanged();
                match self.follow().await {
                    Ok(()) => followed = true,
                    Err(error) => {
                        self.report(error);
                        followed = false;
                        tokio::select! {
                            () = tokio::time::sleep(Duration::from_millis(200)) => {}
                            () = closing => {}
                        }
                        continue;
                    }
                }
            }
            turns.mark_unchanged();
            let turn = *turns.borrow();
            let ordered = group.record().ordered;
            if ordered {
                if kept.elapsed() > self.lease / 3 {
                    kept = Instant::now();
                    let replies = group.keys.lock().keep(self.lease);
                    for reply in replies {
                        shared.tell(&reply, "+WPI").await;
                    }
                }
                let shut = group.keys.lock().any_shut();
                if shut && let Err(error) = self.try_open().await {
                    self.report(error);
                }
                let ready = group.keys.lock().ready();
                self.put(ready);
            }
            self.give_back_stale().await;
            let until = match self.pull(turn, ordered).await {
                Ok(until) => until,
                Err(error) => {
                    self.report(error);
                    Some(Instant::now() + Duration::from_millis(200))
                }
            };
            let shut = ordered && group.keys.lock().any_shut();
            let tick = if shut { TRY_OPEN } else { self.lease / 3 };
            let tick = ordered.then(|| Instant::now() + tick);
            let oldest = desk.state.lock().ready.front().map(Item::stale_at);
            let until = [until, tick, oldest, Some(again)];
            let until = until.into_iter().flatten().min();
            let until = until.unwrap_or(again);
            tokio::select! {
                biased;
                () = closing => {}
                messages = arrivals(&mut self.sources) => {
                    if let Err(error) = self.sort(messages).await {
                        followed &= error.code() != Code::Unavailable;
                        self.report(error);
                    }
                }
                () = changed => {}
                () = freed => {}
                _ = version.changed() => { followed = false; }
                _ = turns.changed() => {}
                () = tokio::time::sleep_until(until.into()) => {}
            }
        }
        self.stop_reading().await;
        let parked = group.keys.lock().leave();
        for item in parked {
            self.give_back(&item).await;
        }
    }

    /// Tells the consumer of an error with its next fetch.
    fn report(&self, error: Error) {
        tracing::debug!(target: "everbus::nats", group = %self.group.name, %error, "reading");
        self.desk.state.lock().error = Some(error);
        self.desk.to_consumer.notify_waiters();
    }

    /// Opens the streams that the group consumes.
    async fn follow(&mut self) -> Result<()> {
        let group = self.group.clone();
        let streams = self.shared.consumed(&group, Some(self.lease)).await?;
        // A stream that was removed from the server is not asked any more.
        let is_there = |source: &Source| streams.iter().any(|s| s.name == source.stream.name);
        self.sources.retain(is_there);
        for stream in streams {
            let known = |source: &Source| source.stream.name == stream.name;
            if !self.sources.iter().any(known) {
                let source = Source::open(&self.shared.link, stream, &group).await?;
                self.sources.push(source);
            }
        }
        Ok(())
    }

    /// Asks for as many messages as are wanted and allowed. Returns when to look again.
    async fn pull(&mut self, turn: u64, ordered: bool) -> Result<Option<Instant>> {
        let (want, prefetch, ready) = {
            let state = self.desk.state.lock();
            (state.want, state.prefetch, state.ready.len())
        };
        let mut parked = 0;
        let mut pins: Vec<Option<String>> = vec![None; self.sources.len()];
        let mut shut = None;
        if ordered {
            let keys = self.group.keys.lock();
            parked = keys.parked();
            let shards = self.sources.iter().map(|source| source.stream.shard);
            for (index, shard) in shards.enumerate() {
                pins[index] = keys.pin(shard);
                if keys.is_shut(shard) {
                    shut = Some(index);
                }
            }
        }
        let mut outstanding = 0;
        for (source, pin) in self.sources.iter_mut().zip(&pins) {
            outstanding += source.outstanding(turn, pin.as_ref());
        }
        let mut until = self.sources.iter().filter_map(Source::deadline).min();
        let held = self.shared.held.count(self.number);
        let mut room = prefetch.saturating_sub(held + ready + parked + outstanding);
        if want > 0 && room == 0 && held > 0 {
            let ends = self.shared.held.sweep(self.number);
            let held = self.shared.held.count(self.number);
            room = prefetch.saturating_sub(held + ready + parked + outstanding);
            until = [until, ends].into_iter().flatten().min();
        }
        if let Some(index) = shut
            && want > 0
            && room == 0
            && outstanding == 0
            && self.shared.link.is_connected()
        {
            // Parked messages take all the room. They wait for a message that the other process had, which the server
            // sends first once it is due. The extra request is rare, because other messages may come instead.
            let now = Instant::now();
            if self.extra <= now {
                self.extra = now + EXTRA;
                let pin = pins[index].take();
                let link = &self.shared.link;
                self.sources[index]
                    .pull(link, 1, false, turn, pin, ordered)
                    .await?;
            }
            let soon = Some(now + EXTRA);
            return Ok([until, soon].into_iter().flatten().min());
        }
        let missing = want.saturating_sub(ready + outstanding).min(room);
        if missing == 0 || self.sources.is_empty() || !self.shared.link.is_connected() {
            return Ok(until);
        }
        let link = &self.shared.link;
        let count = self.sources.len();
        if count == 1 {
            self.sources[0]
                .pull(link, missing, false, turn, pins[0].take(), ordered)
                .await?;
        } else if room >= count {
            let each = (missing / count).max(1);
            for (source, pin) in self.sources.iter_mut().zip(pins) {
                if source.outstanding(turn, pin.as_ref()) == 0 {
                    source.pull(link, each, false, turn, pin, ordered).await?;
                }
            }
        } else if outstanding == 0 {
            // There is less room than streams: asks one stream after another, each for a short time.
            self.next = (self.next + 1) % count;
            let pin = pins[self.next].take();
            self.sources[self.next]
                .pull(link, missing, true, turn, pin, ordered)
                .await?;
        }
        let deadline = self.sources.iter().filter_map(Source::deadline).min();
        Ok([until, deadline].into_iter().flatten().min())
    }

    /// Sorts the messages that have arrived.
    async fn sort(&mut self, messages: Vec<(usize, Option<Message>)>) -> Result<()> {
        let mut items = Vec::new();
        let mut gone = false;
        for (index, message) in messages {
            let Some(message) = message else {
                // The subscription ended with its connection.
                self.sources.clear();
                self.shared.link.check_open()?;
                return Err(Error::new(Code::Unavailable, "the subscription has ended"));
            };
            match self.sources[index].note(&message) {
                None => {
                    let stream = self.sources[index].stream.clone();
                    self.note_pin(stream.shard, &message);
                    items.extend(self.item(stream, &message));
                }
                Some(Status::Alive) => {}
                Some(Status::Gone) => gone = true,
                Some(Status::Unpinned) => {
                    let shard = self.sources[index].stream.shard;
                    self.group.keys.lock().unpinned(shard);
                }
            }
        }
        let mut wanted = Vec::with_capacity(items.len());
        for mut item in items {
            if self.decide(&mut item).await {
                wanted.push(item);
            }
        }
        if self.group.record().ordered {
            let mut keys = self.group.keys.lock();
            wanted = wanted
                .into_iter()
                .filter_map(|item| keys.arrive(item))
                .collect();
        }
        self.put(wanted);
        if gone {
            return self.is_gone().await;
        }
        Ok(())
    }

    /// The server has no consumer for the group: it was removed, or has to be created again.
    async fn is_gone(&mut self) -> Result<()> {
        let (shared, group) = (self.shared.clone(), self.group.clone());
        if shared.reload(&group).await?.is_none() {
            self.sources.clear();
            return Err(no_group(&group.name));
        }
        self.follow().await
    }

    /// Opens the streams of an ordered group of which this process holds every unsettled event.
    async fn try_open(&self) -> Result<()> {
        let (link, group) = (&self.shared.link, &self.group);
        for source in &self.sources {
            let shard = source.stream.shard;
            if !group.keys.lock().is_shut(shard) {
                continue;
            }
            let info = link.consumer(&source.stream.name, &group.encoded).await?;
            let unsettled = info.map_or(0, |info| info.num_ack_pending);
            let here = |item: &&Item| item.record.position.shard() == shard;
            let ready = self.desk.state.lock().ready.iter().filter(here).count();
            let held = self.shared.held.of_group(shard, group.number);
            let mut keys = group.keys.lock();
            if unsettled <= (keys.parked_of(shard) + ready + held) as u64 {
                keys.open(shard);
            }
        }
        Ok(())
    }

    fn note_pin(&self, shard: Shard, message: &Message) {
        let headers = message.headers.as_ref();
        if let Some(pin) = headers.and_then(|headers| headers.get("Nats-Pin-Id")) {
            let is_new = self.group.keys.lock().pinned(shard, pin.as_str());
            if is_new {
                self.group.freed.notify_waiters();
            }
        }
    }

    fn item(&self, stream: Arc<StreamHandle>, message: &Message) -> Option<Item> {
        let reply = message.reply.as_ref()?;
        let at = place(reply.as_str())?;
        let stored_at = Timestamp::from_micros(at.time / 1000);
        let around = Around {
            stream: &stream.name,
            subject: stream.plain(message.subject.as_str()),
            seq: at.seq,
            time: stored_at,
            dialect: stream.dialect,
            naming: stream.naming,
        };
        let read = wire::read(around, message.headers.as_ref(), &message.payload);
        let position = Position::new(stream.shard, at.seq);
        Some(Item {
            record: Arc::new(Recorded::new(read.event, position, read.received_at)),
            stream,
            reply: reply.as_str().into(),
            delivered: at.delivered,
            came: Instant::now(),
            stored_at,
            lease: self.lease,
            foreign: read.foreign,
            unhandled: false,
        })
    }

    /// Whether a message is for a handler here. Others are acked, or left to other processes.
    async fn decide(&self, item: &mut Item) -> bool {
        let (event, group) = (&item.record.event, &self.group);
        let event_type = event.event_type();
        let handled = self.desk.state.lock().handled.clone();
        let handles = handled.iter().any(|pattern| pattern.matches(event_type));
        let received = wire::deciding_time(item.record.received_at, item.stored_at);
        let early = |since: Timestamp| received < since;
        let mut passes = !event.is_for(&group.name) || group.record().since.is_some_and(early);
        if !passes {
            let matches = || group.patterns().iter().any(|p| p.matches(event_type));
            // An event that was delivered before is still owed to a handler, even if its subscription was removed.
            let owed = item.delivered > 1 && handles;
            if !owed && !matches() {
                // Another process may have added a subscription. If the record cannot be read, the event is kept.
                let known = self.shared.reload(group).await.is_ok();
                passes = known && !matches();
            }
        }
        if passes {
            self.shared.tell(&item.reply, "+ACK").await;
            return false;
        }
        if handles {
            return true;
        }
        self.leave(item).await
    }

    /// Leaves an event to processes that have a handler for it. After a long time without a handler, it is
    /// dead-lettered here, or handed out to be dead-lettered. Returns true if it is handed out.
    async fn leave(&self, item: &mut Item) -> bool {
        let shared = &self.shared;
        let key = shared.key(&self.group, item);
        let now = Instant::now();
        let (since, times) = shared.held.with_note(key, |note| {
            note.uncounted += 1;
            (*note.unhandled.get_or_insert(now), note.uncounted)
        });
        let waited = now.duration_since(since);
        if self.hand_out_unhandled.is_some_and(|after| waited >= after) {
            item.unhandled = true;
            return true;
        }
        if waited >= self.no_handler_after {
            let item = Item {
                stream: item.stream.clone(),
                record: item.record.clone(),
                reply: item.reply.clone(),
                foreign: item.foreign.clone(),
                ..*item
            };
            shared.no_handler(&self.group, item, self.number).await;
            return false;
        }
        // The server's count survives this process: a restart does not make the delays short again.
        let delay = left_for(u64::from(times).max(item.delivered));
        shared
            .held
            .with_note(key, |note| note.due = Some(now + delay));
        shared.tell(&item.reply, &nak(delay)).await;
        false
    }

    fn put(&self, items: Vec<Item>) {
        if !items.is_empty() {
            self.desk.state.lock().ready.extend(items);
            self.desk.to_consumer.notify_waiters();
        }
    }

    /// Messages that no fetch took in time go to other consumers.
    async fn give_back_stale(&self) {
        let stale = |item: &Item| item.stale_at() <= Instant::now();
        let items: Vec<Item> = {
            let mut state = self.desk.state.lock();
            if !state.ready.front().is_some_and(stale) {
                return;
            }
            let (old, fresh): (Vec<_>, Vec<_>) =
                state.ready.drain(..).partition(|item| stale(item));
            state.ready = fresh.into();
            // No fetch waits, and without one the same messages must not come again.
            state.want = 0;
            old
        };
        for item in &items {
            self.give_back(item).await;
        }
    }

    async fn give_back(&self, item: &Item) {
        self.shared.give_back(&self.group, item).await;
    }

    /// Ends all subscriptions, and gives back what was not fetched.
    async fn stop_reading(&mut self) {
        let items: Vec<Item> = {
            let mut state = self.desk.state.lock();
            state.want = 0;
            state.ready.drain(..).collect()
        };
        for item in &items {
            self.give_back(item).await;
        }
        for source in std::mem::take(&mut self.sources) {
            let (stream, messages) = source.end().await;
            for message in messages {
                if let Some(item) = self.item(stream.clone(), &message) {
                    self.give_back(&item).await;
                }
            }
        }
    }
}

/// How long an event without a handler here is left to others, the n-th time.
fn left_for(times: u64) -> Duration {
    (LEFT_FIRST * (1 << times.saturating_sub(1).min(16))).min(LEFT_LONGEST)
}

/// A negative ack: the server sends the message again after this long.
pub(crate) fn nak(delay: Duration) -> String {
    match u64::try_from(delay.as_nanos()).unwrap_or(i64::MAX as u64) {
        0 => "-NAK".to_owned(),
        nanos => format!("-NAK {{\"delay\": {}}}", nanos.min(i64::MAX as u64)),
    }
}

/// Waits for messages of any source. `None` is the end of a subscription.
async fn arrivals(sources: &mut [Source]) -> Vec<(usize, Option<Message>)> {
    std::future::poll_fn(|context| {
        let mut all = Vec::new();
        for (index, source) in sources.iter_mut().enumerate() {
            while all.len() < TURN {
                match Pin::new(&mut source.messages).poll_next(context) {
                    Poll::Ready(Some(message)) => all.push((index, Some(message))),
                    Poll::Ready(None) => {
                        all.push((index, None));
                        break;
                    }
                    Poll::Pending => break,
                }
            }
        }
        match all.is_empty() {
            true => Poll::Pending,
            false => Poll::Ready(all),
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: contract/nats-left-to-others: an event that waits a day for a process with its handler is delivered less often than one that is taken for a poison event
    #[test]
    fn an_event_is_left_to_others_seldom() {
        let (mut times, mut waited) = (0, Duration::ZERO);
        while waited < Duration::from_secs(24 * 3600) {
            times += 1;
            waited += left_for(times);
        }
        // A store beside the engine treats an event as poison after 40 deliveries.
        assert!(times < 39, "{times}");
        assert_eq!(left_for(1), Duration::from_secs(1));
        assert_eq!(left_for(4), Duration::from_secs(8));
    }
}
