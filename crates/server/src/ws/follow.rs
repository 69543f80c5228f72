//! Follows the log: first all events after a cursor, then events as they are stored, without a gap.
//!
//! One task per server reads the end of the log for all followers and serialises each event once. A follower that
//! begins earlier, or that falls behind, reads the log itself until it has caught up.

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use everbus::{Bus, Code, Cursor, Error, Pattern, Recorded, Result, StartFrom};
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::sync::{Mutex, broadcast};

/// How many batches a follower may be behind before it reads the log itself.
const BUFFER: usize = 512;
/// How many events are in one live batch, at most. Followers are woken once per batch.
const LIVE: usize = 64;
/// How many events a follower reads or returns at once.
const BATCH: usize = 256;
/// The shared reader stops at most this long after its last follower has left.
const LINGER: Duration = Duration::from_secs(5);
/// The pause of the reader after an error of the engine.
const AFTER_ERROR: Duration = Duration::from_millis(500);

/// An event, and its JSON, which is serialised once for all followers.
pub(crate) struct Live {
    pub(crate) record: Arc<Recorded>,
    json: OnceLock<Arc<str>>,
}

impl Live {
    pub(crate) fn new(record: Arc<Recorded>) -> Self {
        Self {
            record,
            json: OnceLock::new(),
        }
    }

    /// The native JSON envelope.
    pub(crate) fn json(&self) -> Arc<str> {
        let make = || match serde_json::to_string(&*self.record) {
            Ok(json) => json.into(),
            // A record has only texts, numbers and valid JSON: this cannot fail.
            Err(_) => "null".into(),
        };
        self.json.get_or_init(make).clone()
    }
}

type Sender = broadcast::Sender<Arc<[Arc<Live>]>>;
type Receiver = broadcast::Receiver<Arc<[Arc<Live>]>>;

/// The end of the log, shared by all followers of a server.
pub(crate) struct Hub {
    bus: Bus,
    reading: Mutex<Option<Sender>>,
}

impl Hub {
    pub(crate) fn new(bus: Bus) -> Arc<Self> {
        Arc::new(Self {
            bus,
            reading: Mutex::new(None),
        })
    }

    /// Follows the log from a cursor.
    pub(crate) async fn follow(
        self: &Arc<Self>,
        patterns: Vec<Pattern>,
        tenant: Option<String>,
        from: Begin,
    ) -> Result<Follow> {
        // The live subscription comes first, so that no event is missed between catching up and the first live event.
        let live = self.subscribe().await?;
        let log = self.bus.log()?;
        let cursor = match from {
            Begin::After(cursor) => cursor,
            Begin::At(start) => log.resolve(start, patterns.clone()).await?,
        };
        Ok(Follow {
            hub: self.clone(),
            patterns,
            tenant,
            cursor,
            live,
            behind: true,
        })
    }

    /// Subscribes to live events. When this returns, the start position of the reader is fixed.
    async fn subscribe(self: &Arc<Self>) -> Result<Receiver> {
        let mut reading = self.reading.lock().await;
        if let Some(sender) = &*reading {
            return Ok(sender.subscribe());
        }
        let head = self.bus.log()?.head().await?;
        let (sender, receiver) = broadcast::channel(BUFFER);
        *reading = Some(sender.clone());
        tokio::spawn(read_end(Arc::downgrade(self), sender, head));
        Ok(receiver)
    }

    /// Ends the reader if it has no followers. It takes the lock of `subscribe`, so that no new follower is missed.
    async fn is_over(&self, sender: &Sender) -> bool {
        let mut reading = self.reading.lock().await;
        let over = sender.receiver_count() == 0;
        if over {
            *reading = None;
        }
        over
    }
}

/// Reads the end of the log until there are no followers.
async fn read_end(hub: Weak<Hub>, sender: Sender, mut cursor: Cursor) {
    let everything = everything();
    loop {
        let Some(hub) = hub.upgrade() else {
            return;
        };
        let read = async {
            let log = hub.bus.log()?;
            let (events, next) = log.read(cursor.clone(), everything.clone(), LIVE).await?;
            if events.is_empty() && next == cursor {
                let _ = tokio::time::timeout(LINGER, log.wait_beyond(cursor.clone())).await;
            }
            Ok::<_, Error>((events, next))
        };
        match read.await {
            Ok((events, next)) => {
                cursor = next;
                let mut batch = Vec::with_capacity(events.len());
                for record in events {
                    batch.push(Arc::new(Live::new(whole(&hub.bus, record).await)));
                }
                if !batch.is_empty() {
                    // Without followers the send fails. The check for followers is below.
                    let _ = sender.send(batch.into());
                }
            }
            Err(error) if error.code() == Code::EventBusShutdownError => {
                *hub.reading.lock().await = None;
                return;
            }
            Err(error) => {
                tracing::debug!(target: "everbus::ws", %error, "the end of the log cannot be read");
                tokio::time::sleep(AFTER_ERROR).await;
            }
        }
        if sender.receiver_count() == 0 && hub.is_over(&sender).await {
            return;
        }
    }
}

/// The patterns for every event: `*` alone does not match `system.` events.
fn everything() -> Vec<Pattern> {
    ["*", "system.>"]
        .iter()
        .filter_map(|pattern| pattern.parse().ok())
        .collect()
}

/// The complete event. If its large part cannot be loaded, the event as it is in the log.
async fn whole(bus: &Bus, record: Arc<Recorded>) -> Arc<Recorded> {
    if record.event.overflow().is_none() {
        return record;
    }
    bus.whole(&record).await.unwrap_or(record)
}

/// Where a follower begins.
#[derive(Clone, Debug)]
pub(crate) enum Begin {
    /// After this cursor: the follower has all earlier events.
    After(Cursor),
    /// At the end, at the beginning, at the last event, or at a time.
    At(StartFrom),
}

impl Begin {
    /// Reads `new`, `first`, `last` or a time.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let start = match text {
            "new" => StartFrom::New,
            "first" => StartFrom::First,
            "last" => StartFrom::Last,
            time => StartFrom::Time(time.parse()?),
        };
        Ok(Self::At(start))
    }
}

/// An event that a follower gets, and the cursor after it.
pub(crate) struct Followed {
    pub(crate) event: Arc<Live>,
    pub(crate) cursor: Cursor,
}

/// One reader of the log.
pub(crate) struct Follow {
    hub: Arc<Hub>,
    patterns: Vec<Pattern>,
    tenant: Option<String>,
    cursor: Cursor,
    live: Receiver,
    /// Whether the log itself has to be read.
    behind: bool,
}

impl Follow {
    /// The cursor of this follower: all matching events up to it were returned.
    pub(crate) fn cursor(&self) -> &Cursor {
        &self.cursor
    }

    /// Whether this follower reads the log itself. Then it can read at its own pace and loses nothing if it waits.
    pub(crate) fn is_behind(&self) -> bool {
        self.behind
    }

    /// Waits for the next matching events. The future may be dropped at any time: no event is lost.
    pub(crate) async fn next(&mut self) -> Result<Vec<Followed>> {
        loop {
            let events = if self.behind {
                self.catch_up().await?
            } else {
                self.receive().await?
            };
            if !events.is_empty() {
                return Ok(events);
            }
        }
    }

    async fn catch_up(&mut self) -> Result<Vec<Followed>> {
        let log = self.hub.bus.log()?;
        let (events, next) = log
            .read(self.cursor.clone(), self.patterns.clone(), BATCH)
            .await?;
        let mut matching = Vec::with_capacity(events.len());
        let mut cursor = self.cursor.clone();
        for record in &events {
            cursor.advance(record.position);
            if self.sees(record) {
                let record = whole(&self.hub.bus, record.clone()).await;
                matching.push(Followed {
                    event: Arc::new(Live::new(record)),
                    cursor: cursor.clone(),
                });
            }
        }
        self.behind = !(events.is_empty() && next == self.cursor);
        self.cursor = next;
        Ok(matching)
    }

    async fn receive(&mut self) -> Result<Vec<Followed>> {
        let mut events = Vec::new();
        match self.live.recv().await {
            Ok(batch) => self.take(&batch, &mut events),
            Err(RecvError::Lagged(_)) => self.behind = true,
            Err(RecvError::Closed) => return Err(Error::shutdown()),
        }
        while events.len() < BATCH && !self.behind {
            match self.live.try_recv() {
                Ok(batch) => self.take(&batch, &mut events),
                Err(TryRecvError::Lagged(_)) => self.behind = true,
                Err(TryRecvError::Empty | TryRecvError::Closed) => break,
            }
        }
        Ok(events)
    }

    /// Adds live events. Events that were returned before are left out.
    fn take(&mut self, batch: &[Arc<Live>], events: &mut Vec<Followed>) {
        for event in batch {
            let position = event.record.position;
            if self.cursor.covers(position) {
                continue;
            }
            self.cursor.advance(position);
            let event_type = event.record.event.event_type();
            let matches = self.patterns.iter().any(|p| p.matches(event_type));
            if matches && self.sees(&event.record) {
                events.push(Followed {
                    event: event.clone(),
                    cursor: self.cursor.clone(),
                });
            }
        }
    }

    fn sees(&self, record: &Recorded) -> bool {
        let tenant = self.tenant.as_deref();
        tenant.is_none_or(|tenant| record.event.tenant() == Some(tenant))
    }
}
