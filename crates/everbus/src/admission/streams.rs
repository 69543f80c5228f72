//! Tracks how full each limited stream is, without asking the engine at every publish.
//!
//! For each stream it keeps an upper bound: the last count plus the events that this bus has admitted
//! since. While the bound leaves room, a publish asks nothing. The engine is asked when the bound leaves no
//! room, while a publisher waits for room, and once a second while there are publishes, because other
//! processes publish too.
//!
//! Room is reserved under a lock until the append is over, and every count adds the reservations. So the
//! publishers of one bus never exceed the limit together. Near the limit a publish may wait too early,
//! because of events that are being appended at that moment. Several processes may exceed the limit
//! together, each by the events it publishes between two counts.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::stream::DEFAULT_WAIT;
use everbus_core::{Code, Depth, Error, OnFull, Pattern, Result, StreamLimit};
use parking_lot::{Mutex, MutexGuard};
use tokio::time::{Instant, sleep_until, timeout_at};

/// How long a count is valid, given that other processes may publish.
const FRESH: Duration = Duration::from_secs(1);
/// A slow count is valid for this many times its duration, so that counting takes less than a twentieth of
/// the time.
const FRESH_PER_COST: u32 = 20;
/// The longest validity of a count.
const FRESH_AT_MOST: Duration = Duration::from_secs(30);
/// The first and the longest pause between two counts while a publisher waits for room.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(50));
/// The largest number of streams that are tracked.
pub(super) const MOST_TRACKED: usize = 10_000;
/// When the oldest events are dropped, at least this fraction of the stream (1/128) is freed at once.
const DROP_PART: u64 = 128;

/// The streams with recent publishes.
#[derive(Debug, Default)]
pub(super) struct Streams(Mutex<Tracked>);

#[derive(Debug, Default)]
struct Tracked {
    by_name: HashMap<Arc<str>, Arc<Stream>>,
    swept_at: Option<Instant>,
}

impl Streams {
    /// The stream with this name. `types` is the pattern of the stream; without it the stream has the one
    /// type of that name. When too many streams are tracked, unused ones are forgotten: only a count is
    /// lost. A stream that still finds no place is counted at every publish.
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
        // A sweep that found nothing is not repeated at every publish.
        if self.swept_at.is_none_or(|at| now - at >= FRESH) {
            self.swept_at = Some(now);
            // A stream that only the map holds is unused, and the lock of the map keeps it so.
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
    /// The holder of this lock asks the engine, and waits for room if there is none; the others queue for
    /// the lock in order of arrival.
    turn: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct Room {
    /// The largest possible number of pending events, without reservations; `None` before the first count.
    owed: Option<u64>,
    /// Events that are perhaps being appended.
    reserved: u64,
    /// Events of queued publishers.
    waiting: u64,
    /// The number of events whose append has ended, since the start.
    finished: u64,
    /// The number of questions to the engine, and the last one that was answered.
    asked: u64,
    answered: u64,
    /// The last count is valid until then.
    fresh_until: Option<Instant>,
    /// One publisher renews the old count; the others use the old one meanwhile.
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

/// The state of the stream for one publish.
enum Found {
    Room(Reservation),
    /// There is room, but the count is old.
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

    /// Reserves room for this many events. If there is none, the limit's `on_full` decides. Also returns
    /// how many events were dropped to make room.
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
            // These do not wait for room, only for the counts of the publishers before them.
            OnFull::Reject | OnFull::DropOldest => Instant::now() + DEFAULT_WAIT,
        };
        let Ok(_turn) = timeout_at(deadline, self.turn.lock()).await else {
            return Err(match self.limit.on_full {
                OnFull::Wait => self.full(),
                OnFull::Reject | OnFull::DropOldest => self.too_slow(),
            });
        };
        // Dropped before the lock is released, so that no publisher counts this publish twice.
        let mut queued = queued;
        let mut pause = PAUSES.0;
        loop {
            // An answer to a question that was asked after this publish arrived is as good as a new one.
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

    /// Checks the tracked count without asking the engine. Also returns the number of questions asked so
    /// far.
    fn find(self: &Arc<Self>, events: u64) -> (u64, Found) {
        let mut room = self.lock();
        let asked = room.asked;
        // Queued publishers are not overtaken.
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

    /// Counts the pending events. The caller holds the `turn` lock.
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
        // Events that were appended during the count may be in it or not.
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
            // The queued publishers include this one.
            let wanted = room.waiting.max(self.limit.max_len / DROP_PART);
            let taken = room.reserved.saturating_add(wanted);
            (self.limit.max_len.saturating_sub(taken), room.finished)
        };
        let dropped = engine
            .drop_oldest(self.types.clone(), keep)
            .await
            .map_err(|e| self.cannot(e))?;
        let mut room = self.lock();
        // Events that are being handled are not dropped; the next count includes them.
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
            "`everbus groups` shows which group is behind; add consumers, publish more slowly, raise max_len, \
             or let the stream say on_full: drop_oldest",
        )
    }

    fn too_slow(&self) -> Error {
        Error::new(
            Code::Backpressure,
            format!(
                "the pending events of the stream {} could not be counted within {DEFAULT_WAIT:?} (max_len {})",
                self.name, self.limit.max_len
            ),
        )
        .hint("the engine is overloaded: publish more slowly and look at its disk")
    }

    /// Explains the error of an engine that cannot count: it comes at the first publish, with what to
    /// change.
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

/// Reserved room for events that are perhaps being appended. Dropping it frees the room.
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

    /// From now on the events may reach the stream; they are counted when this is dropped.
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

/// A queued publish, so that later ones do not overtake it.
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

/// A publish that renews an old count, until it succeeds or gives up.
struct Refreshing(Arc<Stream>);

impl Drop for Refreshing {
    fn drop(&mut self) {
        self.0.lock().refreshing = false;
    }
}
