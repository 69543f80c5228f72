//! How full each limited stream is, without asking the engine at every publish.
//!
//! For each stream an upper bound is kept: the last count, and what this bus has admitted since. While
//! the bound leaves room, a publish costs no question. The engine is asked when the bound leaves none,
//! while somebody waits for room, and once a second while there are publishes, since other processes
//! publish too.
//!
//! Room is reserved under a lock until the append is over, and every count has the reservations
//! added to it. So the publishers of one bus never exceed the limit together, however many there are;
//! near the limit they may be held back early, by what is being appended at that moment. Several
//! processes may exceed it together, each by what it publishes between two counts.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::stream::DEFAULT_WAIT;
use everbus_core::{Code, Depth, Error, OnFull, Pattern, Result, StreamLimit};
use parking_lot::{Mutex, MutexGuard};
use tokio::time::{Instant, sleep_until, timeout_at};

/// So long a count is believed while other processes may publish.
const FRESH: Duration = Duration::from_secs(1);
/// A count that took long is believed for so many times as long, so that counting stays below a
/// twentieth of the time.
const FRESH_PER_COST: u32 = 20;
/// But no longer than this.
const FRESH_AT_MOST: Duration = Duration::from_secs(30);
/// The first and the longest pause between two counts while somebody waits for room.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(50));
/// At most so many streams are remembered.
pub(super) const MOST_TRACKED: usize = 10_000;
/// This part of a stream is freed at once when its oldest events are dropped.
const DROP_PART: u64 = 128;

/// The streams that were published to lately.
#[derive(Debug, Default)]
pub(super) struct Streams(Mutex<Tracked>);

#[derive(Debug, Default)]
struct Tracked {
    by_name: HashMap<Arc<str>, Arc<Stream>>,
    swept_at: Option<Instant>,
}

impl Streams {
    /// The stream of a name; `types` are what is in it, the one type of that name unless given. When too
    /// many are known, those that nobody uses are forgotten: all that is lost is a count. A stream that
    /// finds no place even so is counted at every publish.
    pub(super) fn of(
        &self,
        name: &Arc<str>,
        types: Option<&Pattern>,
        limit: &StreamLimit,
    ) -> Result<Arc<Stream>> {
        let mut tracked = self.0.lock();
        if let Some(stream) = tracked.by_name.get(name) {
            return Ok(stream.clone());
        }
        let types = types.map_or_else(|| Pattern::new(name), |types| Ok(types.clone()))?;
        let stream = Arc::new(Stream::new(name.clone(), types, *limit));
        if tracked.has_place(Instant::now()) {
            tracked.by_name.insert(name.clone(), stream.clone());
        }
        Ok(stream)
    }

    #[cfg(test)]
    pub(super) fn tracked(&self) -> usize {
        self.0.lock().by_name.len()
    }
}

impl Tracked {
    fn has_place(&mut self, now: Instant) -> bool {
        if self.by_name.len() < MOST_TRACKED {
            return true;
        }
        // A sweep that found nothing to forget is not repeated at every publish.
        if self.swept_at.is_none_or(|at| now - at >= FRESH) {
            self.swept_at = Some(now);
            // Under the lock of the map nobody can begin to use a stream that nobody else holds.
            self.by_name
                .retain(|_, stream| Arc::strong_count(stream) > 1 || !stream.lock().is_stale(now));
        }
        self.by_name.len() < MOST_TRACKED
    }
}

/// One stream with a limit.
#[derive(Debug)]
pub(super) struct Stream {
    name: Arc<str>,
    types: Pattern,
    limit: StreamLimit,
    room: Mutex<Room>,
    /// Who holds it asks the engine, and waits for room if there is none; the others queue behind in
    /// the order they came.
    turn: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct Room {
    /// At most this many events are owed, reservations not counted; `None` before the first count.
    owed: Option<u64>,
    /// Events that may be on their way into the stream.
    reserved: u64,
    /// Events of publishers that queue.
    waiting: u64,
    /// All events whose append was over so far.
    finished: u64,
    /// How many questions were asked, and which of them was answered last.
    asked: u64,
    answered: u64,
    /// The last count is believed until then.
    fresh_until: Option<Instant>,
    /// Somebody asks because the last count is too old; the others go on with it meanwhile.
    refreshing: bool,
}

impl Room {
    fn fits(&self, events: u64, max_len: u64) -> bool {
        self.owed.is_some_and(|owed| {
            owed.saturating_add(self.reserved).saturating_add(events) <= max_len
        })
    }

    fn is_stale(&self, now: Instant) -> bool {
        self.fresh_until.is_none_or(|until| now >= until)
    }
}

/// How a publish found the stream.
enum Found {
    Room(Reservation),
    /// There is room, if the count is still right.
    OldCount(Refreshing),
    NoRoom(Queued),
}

impl Stream {
    fn new(name: Arc<str>, types: Pattern, limit: StreamLimit) -> Self {
        Self {
            name,
            types,
            limit,
            room: Mutex::default(),
            turn: tokio::sync::Mutex::new(()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Room> {
        self.room.lock()
    }

    /// Reserves room for so many events, in the way of the stream's limit if there is none. The
    /// second answer is how many events were dropped for it.
    pub(super) async fn reserve(
        self: &Arc<Self>,
        engine: &dyn Depth,
        events: u64,
        start: Instant,
    ) -> Result<(Reservation, u64)> {
        let (mut known, found) = self.find(events);
        let (mut refreshing, queued) = match found {
            Found::Room(reservation) => return Ok((reservation, 0)),
            Found::OldCount(refreshing) => (Some(refreshing), None),
            Found::NoRoom(queued) => (None, Some(queued)),
        };
        let deadline = match self.limit.on_full {
            OnFull::Wait => start + self.limit.wait,
            // They wait for no room, only for the counts of those before them.
            OnFull::Reject | OnFull::DropOldest => Instant::now() + DEFAULT_WAIT,
        };
        let Ok(_turn) = timeout_at(deadline, self.turn.lock()).await else {
            return Err(match self.limit.on_full {
                OnFull::Wait => self.full(),
                OnFull::Reject | OnFull::DropOldest => self.too_slow(),
            });
        };
        // Dropped before the turn is given on, so that nobody counts this publish twice.
        let mut queued = queued;
        let mut pause = PAUSES.0;
        loop {
            // A question that another publisher asked after this one came is as good as its own.
            let mut is_new = self.lock().answered > known;
            if !is_new && (refreshing.is_some() || !self.lock().fits(events, self.limit.max_len)) {
                self.ask(engine).await?;
                is_new = true;
            }
            refreshing = None;
            if let Some(reservation) = self.reserve_if_it_fits(events) {
                return Ok((reservation, 0));
            }
            if !is_new {
                continue;
            }
            queued.get_or_insert_with(|| Queued::new(self, &mut self.lock(), events));
            match self.limit.on_full {
                OnFull::Reject => return Err(self.full()),
                OnFull::DropOldest => return self.make_room(engine, events).await,
                OnFull::Wait if Instant::now() >= deadline => return Err(self.full()),
                OnFull::Wait => {
                    known = self.lock().asked;
                    sleep_until(deadline.min(Instant::now() + pause)).await;
                    pause = PAUSES.1.min(pause * 2);
                }
            }
        }
    }

    /// Looks without asking. The first answer is the number of questions asked so far.
    fn find(self: &Arc<Self>, events: u64) -> (u64, Found) {
        let mut room = self.lock();
        let asked = room.asked;
        // Those who queue are not overtaken.
        let found = if room.waiting > 0 || !room.fits(events, self.limit.max_len) {
            Found::NoRoom(Queued::new(self, &mut room, events))
        } else if !room.refreshing && room.is_stale(Instant::now()) {
            room.refreshing = true;
            Found::OldCount(Refreshing(self.clone()))
        } else {
            Found::Room(Reservation::new(self, &mut room, events))
        };
        (asked, found)
    }

    fn reserve_if_it_fits(self: &Arc<Self>, events: u64) -> Option<Reservation> {
        let mut room = self.lock();
        room.fits(events, self.limit.max_len)
            .then(|| Reservation::new(self, &mut room, events))
    }

    /// Counts what is owed. Whoever calls it holds the turn.
    async fn ask(&self, engine: &dyn Depth) -> Result<()> {
        let asked_at = Instant::now();
        let (number, finished) = {
            let mut room = self.lock();
            room.asked += 1;
            (room.asked, room.finished)
        };
        let depth = engine
            .depth(self.types.clone(), self.limit.max_len)
            .await
            .map_err(|e| self.cannot(e))?;
        let cost = asked_at.elapsed();
        let mut room = self.lock();
        room.answered = number;
        // What was appended during the count may be in it or not.
        room.owed = Some(depth.saturating_add(room.finished - finished));
        let fresh = FRESH_AT_MOST.min(FRESH.max(cost * FRESH_PER_COST));
        room.fresh_until = Some(asked_at + fresh);
        Ok(())
    }

    /// Drops the oldest events, so that this publish and those behind it have room.
    async fn make_room(
        self: &Arc<Self>,
        engine: &dyn Depth,
        events: u64,
    ) -> Result<(Reservation, u64)> {
        let (keep, finished) = {
            let room = self.lock();
            // Those who queue include this one.
            let wanted = room.waiting.max(self.limit.max_len / DROP_PART);
            let taken = room.reserved.saturating_add(wanted);
            (self.limit.max_len.saturating_sub(taken), room.finished)
        };
        let dropped = engine
            .drop_oldest(self.types.clone(), keep)
            .await
            .map_err(|e| self.cannot(e))?;
        let mut room = self.lock();
        // What is being handled is not dropped; the next count finds it.
        room.owed = Some(keep.saturating_add(room.finished - finished));
        Ok((Reservation::new(self, &mut room, events), dropped))
    }

    /// Refuses a batch that would not fit an empty stream.
    pub(super) fn check(name: &str, limit: &StreamLimit, events: u64) -> Result<()> {
        let max_len = limit.max_len;
        if events <= max_len {
            return Ok(());
        }
        Err(Error::new(
            Code::Backpressure,
            format!(
                "a batch of {events} events can never fit the stream {name}: \
                 its max_len is {max_len}"
            ),
        )
        .hint(format!(
            "publish at most {max_len} of them at once, or raise max_len"
        )))
    }

    fn full(&self) -> Error {
        let StreamLimit {
            max_len,
            on_full,
            wait,
            ..
        } = self.limit;
        let waited = match on_full {
            OnFull::Wait => format!(", and no room came within {wait:?}"),
            _ => String::new(),
        };
        Error::new(
            Code::Backpressure,
            format!(
                "the stream {} is full: {max_len} of its events are owed to a group \
                 (max_len {max_len}){waited}",
                self.name
            ),
        )
        .hint(
            "`everbus groups` shows who is behind; add consumers, publish more slowly, raise max_len, \
             or let the stream say on_full: drop_oldest",
        )
    }

    fn too_slow(&self) -> Error {
        Error::new(
            Code::Backpressure,
            format!(
                "how full the stream {} is could not be counted within {DEFAULT_WAIT:?} (max_len {})",
                self.name, self.limit.max_len
            ),
        )
        .hint("the engine is overloaded: publish more slowly and look at its disk")
    }

    /// An engine that cannot count says so at the first publish; the sentence says what to change.
    pub(super) fn cannot(&self, e: Error) -> Error {
        if e.code() != Code::Unsupported {
            return e;
        }
        let StreamLimit {
            max_len, on_full, ..
        } = self.limit;
        Error::new(
            Code::Unsupported,
            format!(
                "the stream {} has max_len {max_len} with on_full {on_full}, which this engine cannot \
                 keep: {}",
                self.name,
                e.message()
            ),
        )
        .hint("remove the limit, or use an engine that offers it")
        .caused_by(e)
    }
}

/// Room for events that may be on their way. Dropping it ends that.
#[derive(Debug)]
pub(super) struct Reservation {
    stream: Arc<Stream>,
    events: u64,
    may_be_appended: bool,
}

impl Reservation {
    fn new(stream: &Arc<Stream>, room: &mut Room, events: u64) -> Self {
        room.reserved = room.reserved.saturating_add(events);
        Self {
            stream: stream.clone(),
            events,
            may_be_appended: false,
        }
    }

    /// From now on the events may get into the stream, and are counted when this is dropped.
    pub(super) fn begin(&mut self) {
        self.may_be_appended = true;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut room = self.stream.lock();
        room.reserved = room.reserved.saturating_sub(self.events);
        if self.may_be_appended {
            room.finished += self.events;
            room.owed = room.owed.map(|owed| owed.saturating_add(self.events));
        }
    }
}

/// A publish that queues, so that later ones do not overtake it.
struct Queued {
    stream: Arc<Stream>,
    events: u64,
}

impl Queued {
    fn new(stream: &Arc<Stream>, room: &mut Room, events: u64) -> Self {
        room.waiting = room.waiting.saturating_add(events);
        Self {
            stream: stream.clone(),
            events,
        }
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        let mut room = self.stream.lock();
        room.waiting = room.waiting.saturating_sub(self.events);
    }
}

/// A publish that renews an old count, until it has done so or gave up.
struct Refreshing(Arc<Stream>);

impl Drop for Refreshing {
    fn drop(&mut self) {
        self.0.lock().refreshing = false;
    }
}
